"""Tracebacks for users: their own frames, and the frame in which mpishard rejects an argument."""

from __future__ import annotations

import opcode
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType

from mpishard.backend.garbage import no_garbage_collection
from mpishard.launch.python_command import RUNNER

_FULL = "MPISHARD_TRACEBACK"
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def describe(error: BaseException, trace: TracebackType | None) -> str:
    """The traceback of an exception without frames of mpishard; whole with ``MPISHARD_TRACEBACK=1``.

    If mpishard raised it on purpose, the raising frame stays.  If something went wrong inside mpishard, all frames
    stay.  Lines end with a newline, the last one too.
    """
    report = traceback.TracebackException(type(error), error, trace)
    left_out = 0
    if os.environ.get(_FULL, "0") in ("", "0"):
        left_out = sum(_shorten(each, of) for each, of in _chain(report, error, trace))
    some = "1 frame of mpishard is" if left_out == 1 else f"{left_out} frames of mpishard are"
    note = f"({some} left out; {_FULL}=1 shows all)\n" if left_out else ""
    return note + "".join(report.format())


def in_users_code(error: BaseException) -> str:
    """Lines of a traceback: at most ten frames of the user's code where an exception was raised; "" without any."""
    trace = error.__traceback__
    report = traceback.TracebackException(type(error), error, trace)
    if trace is None or not any(_are_users(report.stack)):
        return ""
    _shorten(report, (error, trace))
    return "".join(traceback.StackSummary.from_list(report.stack[-10:]).format())


@contextmanager
def main_frame() -> Iterator[FrameType | None]:
    """The innermost frame of the main thread, for another thread that reads its stack in this context; None at its end.

    CPython 3.11 makes the objects of frames when they are asked for, and making one may start a garbage collection.  In
    it the main thread may run on, and what the frame describes is freed: a segmentation fault (python/cpython#99110) or
    a deadlock (python/cpython#106883).  So there are no collections in this context.
    """
    with no_garbage_collection():
        yield sys._current_frames().get(threading.main_thread().ident or 0)


def innermost(frame: FrameType | None, most: int) -> list[traceback.FrameSummary]:
    """At most `most` frames of a stack, from the innermost outwards; without those of the runner of the script.

    Empty for a thread that has ended (`frame` is None).
    """
    if frame is None:
        return []
    stack = [each for each in traceback.extract_stack(frame) if each.filename != RUNNER]
    return stack[: -most - 1 : -1]


def _chain(
    report: traceback.TracebackException | None, error: BaseException | None, trace: TracebackType | None
) -> Iterator[tuple[traceback.TracebackException, tuple[BaseException, TracebackType]]]:
    """A report and those of the causes and contexts of its error, each with its error and traceback."""
    if report is None or error is None:
        return
    if trace is not None:
        yield report, (error, trace)
    for also, origin in ((report.__cause__, error.__cause__), (report.__context__, error.__context__)):
        yield from _chain(also, origin, None if origin is None else origin.__traceback__)


def _shorten(report: traceback.TracebackException, of: tuple[BaseException, TracebackType]) -> int:
    """Drop frames of mpishard; returns their number."""
    error, trace = of
    ours = [frame.filename.startswith(_PACKAGE) for frame in report.stack]
    users = _are_users(report.stack)
    last = max((index for index, is_users in enumerate(users) if is_users), default=None)
    if last is None:
        return 0
    keep = [not inside for inside in ours]
    if any(ours[last:]):
        if not ours[-1] or not _raises(error, trace):
            return 0
        keep[-1] = True
    report.stack[:] = [frame for frame, kept in zip(report.stack, keep, strict=True) if kept]
    return keep.count(False)


def _are_users(stack: traceback.StackSummary) -> list[bool]:
    """For each frame True if it is of the user's code: neither of mpishard nor of a library."""
    return [not frame.filename.startswith((_PACKAGE, *_LIBRARIES, "<frozen")) for frame in stack]


def _raises(error: BaseException, trace: TracebackType) -> bool:
    """Return True if the innermost frame of a traceback stands at a ``raise``."""
    while trace.tb_next is not None:
        trace = trace.tb_next
    operation = opcode.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]]
    return operation == "RAISE_VARARGS" and not isinstance(error, AssertionError)
