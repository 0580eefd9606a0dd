"""The exit codes of a script: which it has, and how this process learns its own.

Under `mpishard run` the runner of the script knows its exit code.  For scripts without the runner there is a hook on
`sys.exit`.  After Ctrl-C has stopped a run in order, the script continues to its end.  That is no success, and a shell
loop around the script must see it: the exit code is set to 130.
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
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

if TYPE_CHECKING:
    from mpishard.launch.worker import Script

# The exit code that shells give to a program ended by Ctrl-C.
INTERRUPTED = 128 + signal.SIGINT
# The exit code, 75, of a script that has saved a checkpoint and is to be started again.  Scripts exit with it, mpishard
# passes it on like any other, and `slurm/train.sbatch` queues the job again.
START_AGAIN = os.EX_TEMPFAIL


def exit_code(returned: int) -> int:
    """The exit code of a process as shells give it: 128 plus the signal that killed it, a negative number in Python."""
    return returned if returned >= 0 else 128 - returned


def code_of_exit(status: Any) -> int:
    """The exit code of a script for an argument of ``sys.exit``: 0 for None, 1 for what is no number."""
    if status is None:
        return 0
    return status & 0xFF if isinstance(status, int) else 1


class ScriptEnding:
    """Knows the exit code of the running script, once it has ended: from the runner, or else from a hook.

    The hook wraps `sys.exit` when this is created, in a process that `mpishard run` has not started by its runner.
    `this` is the instance of this process, None until one is created; `interrupted`: the user has stopped the last run
    of the script.
    """

    this: ClassVar[ScriptEnding | None] = None
    interrupted: ClassVar[bool] = False

    def __init__(self) -> None:
        self._hook = None if _runner() is not None else _ExitHook()
        ScriptEnding.this = self

    @property
    def code(self) -> int | None:
        """The exit code, after the end; None after an exception, and if only the launcher will know it."""
        script = _runner() or self._hook
        code = None if script is None else script.code
        return INTERRUPTED if code == 0 and ScriptEnding.interrupted else code

    @property
    def failed(self) -> bool:
        """True if an exception has ended the script."""
        script = _runner()
        return hasattr(sys, "last_value") if script is None else script.code is None


def note_run(stopped: bool) -> None:
    """Note that a run of the script is over; `stopped`: the user has stopped it in order.

    If that was the script's last run, an exit code of 0 is changed to 130.
    """
    ScriptEnding.interrupted = stopped
    if stopped and ScriptEnding.this is None and not hasattr(sys, "ps1"):
        atexit.register(_end, ScriptEnding(), os.getpid())


def _end(ending: ScriptEnding, process: int) -> None:
    """Leave with code 130 at the very end, after files were closed and MPI was finalized."""
    if os.getpid() != process or hasattr(sys, "last_value") or ending.code != INTERRUPTED:
        return
    # Python calls exit() of C with a code that can no longer change.  That calls these functions first, last one first.
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        for function, argument in (("_exit", INTERRUPTED), ("fflush", None)):
            address = ctypes.cast(getattr(library, function), ctypes.c_void_p)
            library.__cxa_atexit(address, ctypes.c_void_p(argument), None)


def _runner() -> Script | None:
    """The runner of this process's script, maybe still on its way to be imported, or None."""
    worker = sys.modules.get("mpishard.launch.worker")
    return None if worker is None else worker.Script.this


class _ExitHook:
    """Finds the exit code of a script that Python itself runs: from the call of `sys.exit`, and from its frame."""

    def __init__(self) -> None:
        self._main = _main_frame()
        self._exit: Any = _Unknown
        self._really_exit: Callable[..., NoReturn] = sys.exit
        sys.exit = self._note_exit

    def _note_exit(self, status: Any = None, /) -> NoReturn:
        self._exit = status
        self._really_exit(status)

    @property
    def code(self) -> int | None:
        """The exit code of the script, after its end; None if the script raised SystemExit itself."""
        return _code_of_script(self._exit, _ran_to_its_end(self._main))


class _Unknown:
    """A marker instead of an exit status: ``sys.exit`` was not called."""


def _code_of_script(status: Any, to_its_end: bool) -> int | None:
    """The exit code of a script from its argument of ``sys.exit``; None if it raised SystemExit itself."""
    if to_its_end:
        return 0
    return None if status is _Unknown else code_of_exit(status)


def _main_frame() -> FrameType | None:
    """The frame of the running script, or None."""
    frame: FrameType | None = sys._getframe()
    names = sys.modules["__main__"].__dict__
    found = None
    while frame is not None:
        if frame.f_globals is names and frame.f_code.co_name == "<module>":
            found = frame
        frame = frame.f_back
    return found


def _ran_to_its_end(frame: FrameType | None) -> bool:
    """Return True if the last instruction of a frame was its return; after an exception it is the one that raised."""
    if frame is None:
        return False
    return opcode.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")
