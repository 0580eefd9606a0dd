"""What a process of a supervised job tells its supervisor: how its script ended, why it failed, and where it is.

Ended in order has a script that ran to its end or called ``sys.exit``; not one that raised an exception or was killed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import sysconfig
import threading
from pathlib import Path
from typing import ClassVar

from mpi4py import MPI

from mpishard.comm.watchdog import abort_on_exception
from mpishard.launch.endings import Ending
from mpishard.launch.interrupts import Interrupts
from mpishard.launch.processes import die_with_single_threaded_parent, end_with_daemon
from mpishard.launch.run_folder import Ended, Failure, RunFolder, RunLost

_POLL_S = 0.25
_FINALIZE_S = 3.0
# Where Python and its packages are, this one, and what was made of a text.
_NOT_THE_USERS = (*(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),)
_NOT_THE_USERS += (str(Path(__file__).parents[1]) + os.sep, "<")


def watch_script() -> None:
    """Tell the supervisor of this job, if it has one, how the script of this process goes.  Not collective.

    Importing mpishard does this; an atexit function that was registered before runs after the script's end was noted.
    """
    run = RunFolder.from_environment()
    if run is not None:
        Completion.this = Completion(run)


def leave_to_others(silent: bool = True) -> None:
    """Whether from now on others speak for the job, if it has healed.  Not collective."""
    if Completion.this is not None:
        Completion.this.is_silent = silent


def note_training(under_way: bool, tells: bool) -> None:
    """An elastic run of the script begins here, or has ended; `tells`: this process tells the supervisor.

    Not collective.
    """
    if Completion.this is not None:
        Completion.this.note_training(under_way, tells)


def give_up() -> None:
    """Note the exit code of the script, which has ended in the middle of a run, if it is another than 0."""
    if Completion.this is not None:
        Completion.this.give_up()


class Completion:
    """Notes of this process in the folder of the run.

    Rank 0 of the founders speaks for the job; once that has healed, every rank does, since rank 0 may be gone, until
    they have come to the end of the run together: then the first of them does.
    """

    this: ClassVar[Completion | None] = None

    def __init__(self, run: RunFolder) -> None:
        self.is_silent = False
        self._has_trained = False
        self._run = run
        self._process = os.getpid()
        self._is_first = MPI.COMM_WORLD.rank == 0 and MPI.Comm.Get_parent() == MPI.COMM_NULL
        self._ending = Ending()
        self._stop = threading.Event()
        die_with_single_threaded_parent()
        if self._is_first:
            run.note_started()
        Interrupts.is_ending = lambda: run.is_ending
        abort_on_exception(note=self._note_failure, note_abort=self._note_abort)
        atexit.register(self._end)
        self._thread = threading.Thread(target=self._follow, name="mpishard-progress", daemon=True)
        self._thread.start()

    def _speaks(self) -> bool:
        return not self.is_silent if self._run.healed else self._is_first

    def _note_failure(self, error: BaseException, step: int) -> None:
        # An error of MPI is what others see of a death.  An interrupt comes from outside.
        if os.getpid() != self._process or isinstance(error, MPI.Exception | RunLost):
            return
        if not isinstance(error, Exception):
            return
        with contextlib.suppress(OSError):  # the traceback is still to be printed
            failure = Failure(type(error).__name__, str(error)[:500], _where(error), step, self._has_trained)
            self._run.note_failure(failure)

    def _note_abort(self) -> None:
        if os.getpid() == self._process:
            with contextlib.suppress(OSError):
                self._run.note_aborted()

    def _follow(self) -> None:
        """Note the step under way, and end this process once it is nobody's."""
        noted = 0
        while not self._stop.wait(_POLL_S):
            step = _step()
            with contextlib.suppress(OSError):  # of a disk that comes back
                if self._run.is_over:  # on a host that was cut off, where nobody could end it
                    end_with_daemon()
                if step > noted:
                    noted = step
                    if self._speaks():
                        self._run.note_step(step)

    def _end(self) -> None:
        """At the end of the script, after those who were registered later."""
        if os.getpid() != self._process:  # a fork
            return
        self._stop.set()
        self._thread.join()
        if hasattr(sys, "last_value"):  # an exception that was printed
            return
        if self._speaks():
            step = _step()
            if step:
                self._run.note_step(step)
            self._run.note_ended(Ended(self._ending.code))
        else:
            self.give_up()

    def note_training(self, under_way: bool, tells: bool) -> None:
        self._has_trained = not under_way
        if tells:
            with contextlib.suppress(OSError):
                self._run.note_training(under_way)

    def give_up(self) -> None:
        code = self._ending.code
        if code:
            self._run.note_given_up(Ended(code))


def _step() -> int:
    """The training step under way, as this package's excepthook knows it; 0 without."""
    ledger = getattr(sys.excepthook, "ledger", None)
    return 0 if ledger is None else ledger.step


def _where(error: BaseException) -> str:
    """``file:line`` where an exception rose, in the user's code if that is on the way."""
    place, trace = "?", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if place == "?" or not file.startswith(_NOT_THE_USERS):
            place = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def finalize_in_time() -> None:
    """From now on MPI_Finalize has limited time: after a death that of Open MPI 5 may wait for ever.

    The process then ends without it; the launcher has the code of the dead to report in any case.
    """
    _Finalize.limited = True


class _Finalize:
    limited: ClassVar[bool] = False

    @classmethod
    def in_time(cls) -> None:
        if cls.limited and not MPI.Is_finalized():
            sys.stdout.flush()
            # By the kernel, since mpi4py keeps the interpreter's lock meanwhile and no thread of Python runs.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, _FINALIZE_S)
            try:
                MPI.Finalize()
            except MPI.Exception:  # others have ended without it, and it would not come to its end
                os.kill(os.getpid(), signal.SIGALRM)
            signal.setitimer(signal.ITIMER_REAL, 0)


# Registered when ranks import mpishard, it runs after whatever is registered later, as the note of the script's end is.
atexit.register(_Finalize.in_time)
