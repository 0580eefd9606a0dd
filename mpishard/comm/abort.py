"""Ends the job when a rank fails, so that no rank waits for ever for it, and reports which rank failed.

If any rank raises an uncaught exception, that rank prints its traceback and aborts the job.

Under Open MPI's ULFM, ``MPI_Abort`` ends only the rank that calls it, and MPI does not inform the other ranks (5.0.11,
4 ranks).  Nor does MPI inform them of a rank that ends with an exit code other than 0.  MPI does inform them of a rank
that a signal kills.  So under ULFM a rank that aborts the job kills itself, and the informed ranks do the same.  Where
the others go on without a rank (`fail_alone`), its exit is made such a death, see `mpishard.comm.exits`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn, Protocol

from mpi4py import MPI

from mpishard.comm.capabilities import heals_in_place
from mpishard.comm.death_monitor import silence_death_monitors
from mpishard.comm.exits import die_at_exit
from mpishard.comm.ledger import Ledger
from mpishard.launch.exit_code import INTERRUPTED
from mpishard.launch.job_notes import ALIKE
from mpishard.launch.tracebacks import describe

# How long other ranks leave to the first to report an error that all have; it ends them by then.
FIRST_S = 1.0
# The longest wait of a rank for others that end too, and its sleep between two checks.
LAST_S, _NAP_S = 5.0, 0.02
_FLUSH_S = 0.2
# Time until a Ctrl-C is sent again that Python ignored, since it came where no exception can be raised.
_AGAIN_S = 0.05


def abort(message: str, code: int = 1) -> None:
    """Print `message` on stderr and end every process of the job with an exit code.  Not collective.

    Parameters
    ----------
    message : str
        One or more lines.
    code : int
        What the launcher is to return.
    """
    hook = sys.excepthook if isinstance(sys.excepthook, _AbortOnException) else None
    if hook is not None and hook.alone:
        die(message)
    if hook is not None and hook.note_abort is not None:
        hook.note_abort()
    silence_death_monitors()
    if heals_in_place():
        _end_with_others(message, code)
    _print(message)
    with contextlib.suppress(OSError):  # no output after ours: MPICH prints from this process that MPI_Abort was called
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    MPI.COMM_WORLD.Abort(code)


def die(message: str) -> NoReturn:
    """Print `message` on stderr and kill this process alone, so that ULFM informs the others.

    MPI_Finalize would wait for the others, and ULFM informs them of a signal, not of an exit code other than 0.

    Not collective.

    Parameters
    ----------
    message : str
        One or more lines; "" prints nothing.

    Raises
    ------
    AssertionError
        Never, as this does not return.
    """
    _print(message)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("this process lives")


def _end_with_others(message: str, code: int) -> NoReturn:
    """`abort` under ULFM: the others are informed of the death of this process and end in the same way.

    The lowest rank stays until the others are gone and exits with `code`: killed ranks do not set the launcher's code.
    """
    world = MPI.COMM_WORLD
    dead = dead_ranks()
    if not dead or not set(range(world.rank)) <= set(dead):
        die(message)
    _print(message)
    deadline = time.monotonic() + LAST_S
    while len(dead_ranks()) < world.size - 1:
        if time.monotonic() > deadline:
            os.kill(os.getpid(), signal.SIGKILL)
        let_mpi_progress()
    os._exit(code)


def _print(message: str) -> None:
    if not message:
        return
    sys.stderr.write(message if message.endswith("\n") else message + "\n")
    sys.stderr.flush()
    time.sleep(_FLUSH_S)  # launchers drop the output still in the pipe when the job is aborted


def dead_ranks() -> list[int]:
    """The ranks that MPI reports as dead."""
    world = MPI.COMM_WORLD
    return sorted(MPI.Group.Translate_ranks(world.Get_failed(), None, world.Get_group()))


def _dead_within(seconds: float) -> list[int]:
    """The ranks reported dead within so many seconds, or until rank 0 is; none if MPI reports no deaths."""
    if not heals_in_place():
        time.sleep(seconds)
        return []
    deadline = time.monotonic() + seconds
    while 0 not in dead_ranks() and time.monotonic() < deadline:
        let_mpi_progress()
    return dead_ranks()


def let_mpi_progress() -> None:
    """Sleep, and let MPI notice deaths, which it does only inside its calls."""
    with contextlib.suppress(MPI.Exception):
        MPI.COMM_WORLD.Iprobe()
    time.sleep(_NAP_S)


def _print_error(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    """The excepthook of a process without others, which ends by itself."""
    interrupted = issubclass(kind, KeyboardInterrupt)
    sys.stderr.write("mpishard: ended by Ctrl-C\n" if interrupted else describe(error or kind(), trace))


def _try_again(ignored: sys.UnraisableHookArgs) -> None:
    """The process's unraisablehook: send a Ctrl-C again that came in a callback from C, e.g. while kernels compile."""
    main = threading.main_thread().ident
    if issubclass(ignored.exc_type, KeyboardInterrupt) and main is not None:
        timer = threading.Timer(_AGAIN_S, signal.pthread_kill, (main, signal.SIGINT))  # this wakes the thread, too
        timer.daemon = True
        timer.start()
    else:
        sys.__unraisablehook__(ignored)


class Failures(Protocol):
    """Who lets ranks that fail together learn of each other: a watchdog."""

    def gather_failures(self) -> list[int]: ...


class _AbortOnException:
    """The process's excepthook: prints the traceback with the rank and, if known, the step, then aborts."""

    def __init__(self) -> None:
        self.ledger: Ledger | None = None
        self.note: Callable[[BaseException, int], None] | None = None
        self.note_abort: Callable[[], None] | None = None
        self.watchdog: Failures | None = None
        self.alone = False
        self._first = threading.Lock()

    def __call__(self, kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
        if MPI.Is_finalized():
            sys.__excepthook__(kind, error or kind(), trace)
            return
        self._first.acquire()  # never released: another thread that fails has nothing to add
        comm = MPI.COMM_WORLD
        number = self.ledger.step if self.ledger is not None else 0
        step = f" at step {number}" if number else ""
        if self.note is not None:
            self.note(error or kind(), number)
        if issubclass(kind, KeyboardInterrupt):
            if comm.rank > 0:
                time.sleep(FIRST_S)
            abort(f"mpishard: Ctrl-C{step} ends the job", INTERRUPTED)
        text = describe(error or kind(), trace)
        if self.alone:
            die(f"mpishard: process {comm.rank} failed{step} and leaves the run\n{text}")
        failed = self.watchdog.gather_failures() if self.watchdog is not None else []
        dead = _dead_within(FIRST_S if comm.rank > 0 and not failed else 0.0)
        if 0 in dead and len(failed) == comm.size:
            abort("")  # rank 0 has reported the error of all
        if dead and (isinstance(error, MPI.Exception) or 0 in dead):
            why = traceback.format_exception_only(error or kind())[0].splitlines()[-1]  # without its notes
            abort(f"mpishard: rank {comm.rank} of {comm.size} ends{step} after rank {dead[0]} has: {why}")
        if not failed and getattr(error, ALIKE, 0) == comm.size:
            failed = list(range(comm.size))
        if len(failed) < 2:
            abort(f"mpishard: rank {comm.rank} of {comm.size} failed{step} and ends the job\n{text}")
        some = f"ranks {', '.join(map(str, failed))} of {comm.size}"
        who = f"all {comm.size} ranks" if len(failed) == comm.size else some
        abort(f"mpishard: {who} failed{step} and end the job; of rank {comm.rank}:\n{text}")

    def in_thread(self, args: threading.ExceptHookArgs) -> None:
        if args.exc_type is not SystemExit:
            self(args.exc_type, args.exc_value, args.exc_traceback)


def start_mpi() -> None:
    """Start MPI unless somebody has: ``mpi4py.rc.initialize = False``, as Devito sets it, leaves that to others.

    Collective.
    """
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        atexit.register(lambda: None if MPI.Is_finalized() else MPI.Finalize())


def abort_on_exception(
    ledger: Ledger | None = None,
    *,
    note: Callable[[BaseException, int], None] | None = None,
    note_abort: Callable[[], None] | None = None,
    watchdog: Failures | None = None,
) -> None:
    """Make an uncaught exception in any thread of this process abort the job, if it has several ranks.

    Importing mpishard does this, since a rank may fail before it has a mesh; a mesh adds its ledger, which knows the
    step.  Interactive sessions are left alone.  A single rank that no other has spawned only gets a shorter traceback,
    unless a caller asks for a note.

    Not collective.

    Parameters
    ----------
    ledger : Ledger, optional
        Knows the step.
    note : callable, optional
        Called first, with the exception and the step, 0 if it is not known.
    note_abort : callable, optional
        Called before this process ends the job, for that or another reason.
    watchdog : Failures, optional
        With it ranks that fail together learn of each other, so that one of them reports for all.
    """
    known = isinstance(sys.excepthook, _AbortOnException)
    alone = MPI.COMM_WORLD.size == 1 and MPI.Comm.Get_parent() == MPI.COMM_NULL
    if hasattr(sys, "ps1"):
        return
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _try_again
    if alone and note is None and not known:
        if sys.excepthook is sys.__excepthook__:
            sys.excepthook = _print_error
        return
    if not isinstance(sys.excepthook, _AbortOnException):
        hook = _AbortOnException()
        sys.excepthook, threading.excepthook = hook, hook.in_thread
    assert isinstance(sys.excepthook, _AbortOnException)
    sys.excepthook.ledger, sys.excepthook.watchdog = ledger, watchdog
    sys.excepthook.note = note or sys.excepthook.note
    sys.excepthook.note_abort = note_abort or sys.excepthook.note_abort


def restore_sigusr1() -> None:
    """Let SIGUSR1 end a script that has no handler for it; a batch script asks ranks to leave with that signal.

    MPICH installs a handler when it starts, which ignores the signal: the job would run into its time limit, and nobody
    would queue it again.

    Not collective.
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def forget(watchdog: Failures) -> None:
    """Ask this watchdog about failures no more, since it is closed."""
    if isinstance(sys.excepthook, _AbortOnException) and sys.excepthook.watchdog is watchdog:
        sys.excepthook.watchdog = None


def fail_alone(alone: bool) -> None:
    """Set whether an uncaught exception, or an exit, ends this process only; MPI informs the others (ULFM).

    Not collective.

    Parameters
    ----------
    alone : bool
        False: an exception ends the job.
    """
    die_at_exit(alone)
    if isinstance(sys.excepthook, _AbortOnException):
        sys.excepthook.alone = alone
