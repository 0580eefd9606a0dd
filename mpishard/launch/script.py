"""The user's script in this process: its command line, and its tracebacks.

The command line gets the runner `mpishard.launch.worker` put before the script.  Tracebacks for users have their own
frames, and the frame in which mpishard rejects an argument.
"""

from __future__ import annotations

import linecache
import os
import re
import site
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType

from mpishard.backend.garbage import no_garbage_collection

RUNNER = str(Path(__file__).resolve().with_name("worker.py"))
_RUNNER_MODULE = ["-m", "mpishard.launch.worker"]
_PYTHON = re.compile(r"python(3(\.\d+)?t?)?")
_FLAGS = "[bBdEhiIOPqRsSuvVx]*"
_TAKES_VALUE = re.compile(f"-{_FLAGS}[XW]|--check-hash-based-pycs")
# Options with which a script runs under the runner as without; not -i, -x, and those that run no script.
_KEPT = re.compile("-[bBdEIOPqRsSuv]*([XW].*)?|--check-hash-based-pycs")

_FULL = "MPISHARD_TRACEBACK"
PACKAGE = str(Path(__file__).parents[1]) + os.sep  # how the files of mpishard begin
# How the files begin that are not the user's: those of Python, of installed packages, and of mpishard.
_FOLDERS = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_FOLDERS |= {*site.getsitepackages(), site.getusersitepackages()}
NOT_USERS = (PACKAGE, *(folder + os.sep for folder in _FOLDERS), "<frozen")


def parted(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments of the interpreter into its options and the script's part: ``-c ...``, ``-m ...`` or a path.

    Together the two are the arguments again, with flags before ``-c`` or ``-m`` as a separate word.
    """
    arguments = list(arguments)
    at = 0
    while at < len(arguments) and arguments[at].startswith("-") and arguments[at] != "-":
        runs = re.match(f"-({_FLAGS})([cm])(.*)", arguments[at], re.DOTALL)
        if runs:
            flags, kind, value = runs.groups()
            script = [f"-{kind}", *([value] if value else []), *arguments[at + 1 :]]
            return arguments[:at] + ([f"-{flags}"] if flags else []), script
        at += 2 if _TAKES_VALUE.fullmatch(arguments[at]) else 1
    return arguments[:at], arguments[at:]


def with_runner(command: Sequence[str], *, elsewhere: bool = False, runner: Sequence[str] = (RUNNER,)) -> list[str]:
    """The command with `mpishard.launch.worker` before its script, if it runs a file or a module by Python.

    Any other command is left alone, and one with an option that the runner could not keep.  `elsewhere`: other hosts
    run it too.  These have the runner's file if they have this Python; a command with another Python is left alone.
    `runner`: the words of another runner.
    """
    python, *arguments = command
    options, script = parted(arguments)
    is_python = _PYTHON.fullmatch(os.path.basename(python)) and (python == sys.executable or not elsewhere)
    if not (is_python and _can_keep(options) and _can_run(script)):
        return list(command)
    return [python, *options, *runner, *script]


def without_runner(script: Sequence[str]) -> list[str]:
    """The script part of a command, as `parted` returns it, without the runner."""
    if list(script[:2]) == _RUNNER_MODULE:
        return list(script[2:])
    return list(script[1:] if script and os.path.realpath(script[0]) == RUNNER else script)


def _can_keep(options: Sequence[str]) -> bool:
    words = iter(options)
    for word in words:
        if not _KEPT.fullmatch(word):
            return False
        if _TAKES_VALUE.fullmatch(word):
            next(words, None)
    return True


def _can_run(script: Sequence[str]) -> bool:
    """Return True if the runner can run the script part of a command: a module, source, a folder, or an archive."""
    if not script or without_runner(script) != list(script):
        return False
    if script[0].startswith("-"):
        return script[0] == "-m" and len(script) > 1
    return os.path.exists(script[0]) and not script[0].endswith(".pyc")


def describe(error: BaseException, trace: TracebackType | None) -> str:
    """The traceback of an exception without frames of mpishard; whole with ``MPISHARD_TRACEBACK=1``.

    If mpishard raised it on purpose, the raising frame stays.  If something went wrong inside mpishard, all frames
    stay.  Lines end with a newline, the last one too.
    """
    report = traceback.TracebackException(type(error), error, trace)
    left_out = 0
    if os.environ.get(_FULL, "0") in ("", "0"):
        left_out = sum(_shorten(each, of) for each, of in _chain(report, error))
    some = "1 frame of mpishard is" if left_out == 1 else f"{left_out} frames of mpishard are"
    note = f"({some} left out; {_FULL}=1 shows all)\n" if left_out else ""
    return note + "".join(report.format())


def in_users_code(error: BaseException) -> str:
    """Lines of a traceback: at most ten frames of the user's code where an exception was raised; "" without any."""
    trace = error.__traceback__
    report = traceback.TracebackException(type(error), error, trace)
    if trace is None or not any(_are_users(report.stack)):
        return ""
    _shorten(report, error)
    return "".join(traceback.StackSummary.from_list(report.stack[-10:]).format())


def place_of(error: BaseException) -> str:
    """``file:line`` where an exception was raised: the innermost line of the user's code in its traceback, if any."""
    place, trace = "?", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if place == "?" or not file.startswith((*NOT_USERS, "<")):  # "<": code compiled from a string
            place = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def is_refusal(error: BaseException) -> bool:
    """Return True if code of mpishard has raised an exception, and no function of the user's or of another package."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_filename.startswith(PACKAGE)


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
    report: traceback.TracebackException | None, error: BaseException | None
) -> Iterator[tuple[traceback.TracebackException, BaseException]]:
    """A report and those of the causes and contexts of its error, each with its error."""
    if report is None or error is None:
        return
    if report.stack:
        yield report, error
    yield from _chain(report.__cause__, error.__cause__)
    yield from _chain(report.__context__, error.__context__)


def _shorten(report: traceback.TracebackException, error: BaseException) -> int:
    """Drop frames of mpishard; returns their number."""
    ours = [frame.filename.startswith(PACKAGE) for frame in report.stack]
    users = _are_users(report.stack)
    last = max((index for index, is_users in enumerate(users) if is_users), default=None)
    if last is None:
        return 0
    keep = [not inside for inside in ours]
    if any(ours[last:]):
        if not ours[-1] or not _raises(error, report.stack[-1]):
            return 0
        keep[-1] = True
    report.stack[:] = [frame for frame, kept in zip(report.stack, keep, strict=True) if kept]
    return keep.count(False)


def _are_users(stack: traceback.StackSummary) -> list[bool]:
    """For each frame True if it is of the user's code: neither of mpishard nor of a library."""
    return [not frame.filename.startswith(NOT_USERS) for frame in stack]


def _raises(error: BaseException, frame: traceback.FrameSummary) -> bool:
    """Return True if a frame stands at a ``raise``, not within the expression that it raises."""
    line = linecache.getline(frame.filename, frame.lineno or 0)
    return line[frame.colno or 0 :].startswith("raise ") and not isinstance(error, AssertionError)
