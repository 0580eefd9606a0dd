"""How the script of this process ends: its exit code, as far as that is known before, and 130 after Ctrl-C.

A run that Ctrl-C has stopped in order lets the script go on to its end, which is then no success: a loop of the shell
around it must see that.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import opcode
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar, NoReturn

# Exit code of a program that Ctrl-C has ended, as shells tell it.
INTERRUPTED = 128 + signal.SIGINT


class Ending:
    """The end of the script that is running.  From its creation on it listens to `sys.exit`.

    Attributes
    ----------
    this : Ending or None
        That of this process, once somebody wishes to know.
    interrupted : bool
        The user has stopped the last run of the script.
    """

    this: ClassVar[Ending | None] = None
    interrupted: ClassVar[bool] = False

    def __init__(self) -> None:
        self._main = _main_frame()
        self._exit: Any = _Unknown
        self._really_exit: Callable[..., NoReturn] = sys.exit
        sys.exit = self._note_exit
        Ending.this = self

    def _note_exit(self, status: Any = None, /) -> NoReturn:
        self._exit = status
        self._really_exit(status)

    @property
    def code(self) -> int | None:
        """The exit code of the script, which has ended; None if it raised SystemExit itself."""
        code = _exit_code(self._exit, _ran_to_its_end(self._main))
        return INTERRUPTED if code == 0 and Ending.interrupted else code


def note_run(stopped: bool) -> None:
    """A run of the script is over; `stopped`: by the user, in order.

    If it was the last one, the script's exit code is 130 where it would be 0.  Not collective.
    """
    Ending.interrupted = stopped
    if stopped and Ending.this is None and not hasattr(sys, "ps1"):
        atexit.register(_end, Ending(), os.getpid())


def _end(ending: Ending, process: int) -> None:
    """Leave with code 130 at the very end, after files were closed and MPI was finalized."""
    if os.getpid() != process or hasattr(sys, "last_value") or ending.code != INTERRUPTED:
        return
    # Python has its exit code already, and tells it to exit() of C, before which come these, the last one first.
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        for function, argument in (("_exit", INTERRUPTED), ("fflush", None)):
            address = ctypes.cast(getattr(library, function), ctypes.c_void_p)
            library.__cxa_atexit(address, ctypes.c_void_p(argument), None)


class _Unknown:
    """In the place of an exit status: ``sys.exit`` was not called."""


def _exit_code(status: Any, to_its_end: bool) -> int | None:
    """The exit code of a script, of what it gave to ``sys.exit``; None if it raised SystemExit itself."""
    if to_its_end or status is None:
        return 0
    if status is _Unknown:
        return None
    return status & 0xFF if isinstance(status, int) else 1


def _main_frame() -> FrameType | None:
    """The frame of the script, which has not come to its end."""
    frame: FrameType | None = sys._getframe()
    names = sys.modules["__main__"].__dict__
    found = None
    while frame is not None:
        if frame.f_globals is names and frame.f_code.co_name == "<module>":
            found = frame
        frame = frame.f_back
    return found


def _ran_to_its_end(frame: FrameType | None) -> bool:
    """Whether the last instruction of a frame was its return: one that an exception has left stands where that rose."""
    if frame is None:
        return False
    return opcode.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")
