"""Tracebacks as users need them: their own frames, and where mpishard refuses what it was given."""

from __future__ import annotations

import opcode
import os
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

_FULL = "MPISHARD_TRACEBACK"
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def describe(error: BaseException, where: TracebackType | None) -> str:
    """The traceback of an exception without frames of mpishard; whole with ``MPISHARD_TRACEBACK=1``.

    Where mpishard raised it on purpose, the frame that did so stays.  Where something went wrong inside of mpishard all
    frames do.
    """
    report = traceback.TracebackException(type(error), error, where)
    left_out = 0
    if os.environ.get(_FULL, "0") in ("", "0"):
        left_out = sum(_shorten(each, of) for each, of in _chain(report, error, where))
    note = f"({left_out} frames of mpishard are left out; {_FULL}=1 shows them)\n" if left_out else ""
    return note + "".join(report.format())


def _chain(
    report: traceback.TracebackException | None, error: BaseException | None, where: TracebackType | None
) -> Iterator[tuple[traceback.TracebackException, tuple[BaseException, TracebackType]]]:
    """A report and those of what its error was raised from, each with its error and traceback."""
    if report is None or error is None:
        return
    if where is not None:
        yield report, (error, where)
    for also, origin in ((report.__cause__, error.__cause__), (report.__context__, error.__context__)):
        yield from _chain(also, origin, None if origin is None else origin.__traceback__)


def _shorten(report: traceback.TracebackException, of: tuple[BaseException, TracebackType]) -> int:
    """Drop frames of mpishard; returns how many."""
    error, where = of
    ours = [frame.filename.startswith(_PACKAGE) for frame in report.stack]
    users = [
        not inside and not frame.filename.startswith((*_LIBRARIES, "<frozen"))
        for frame, inside in zip(report.stack, ours, strict=True)
    ]
    last = max((place for place, is_users in enumerate(users) if is_users), default=None)
    if last is None:
        return 0
    keep = [not inside for inside in ours]
    if any(ours[last:]):
        if not ours[-1] or not _raises(error, where):
            return 0
        keep[-1] = True
    report.stack[:] = [frame for frame, kept in zip(report.stack, keep, strict=True) if kept]
    return keep.count(False)


def _raises(error: BaseException, where: TracebackType) -> bool:
    """Whether the innermost frame of a traceback stands at a ``raise``."""
    while where.tb_next is not None:
        where = where.tb_next
    operation = opcode.opname[where.tb_frame.f_code.co_code[where.tb_lasti]]
    return operation == "RAISE_VARARGS" and not isinstance(error, AssertionError)
