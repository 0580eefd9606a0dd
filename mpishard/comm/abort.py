"""Ends the job when a rank fails, so that no rank waits for ever for it, and reports which rank failed.

A rank with an uncaught exception prints its traceback and aborts the job. Under Open MPI's ULFM MPI informs the others
only of a rank that a signal kills, not of ``MPI_Abort`` or an exit code (5.0.11, 4 ranks): a rank that aborts the job
kills itself, and the informed ranks do the same.

The death monitor, a process next to the ranks, reports which rank died first: MPICH's launcher kills the others within
a millisecond and then names a process, not always that one. It ends when the first of its sockets to the ranks closes
or when it is dismissed, so it never outlives the job.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import ClassVar, NoReturn

from mpi4py import MPI

from mpishard.comm.capabilities import heals_in_place
from mpishard.comm.ledger import Ledger
from mpishard.io.terminal import say
from mpishard.launch.exit_codes import INTERRUPTED
from mpishard.launch.job_notes import ON_ALL_RANKS
from mpishard.launch.script import describe
from mpishard.launch.signals import ctrl_c_again

# Makes an exit of this process a death by a signal, of which ULFM informs the other ranks.
#
# At an exit with a code other than 0, the launcher of Open MPI 5 reports PMIX_ERR_EXIT_NONZERO_TERM.  MPI does not
# listen to that event, so survivors that share memory with the rank wait for ever.  The launcher also counts the rank
# twice, and ends the job once it has counted as many ended ranks as there were (5.0.11).  MPI does listen to the event
# of a rank that a signal kills, and that is counted once.
#
# Covered are ``os._exit``, and C's ``exit``, which libraries call, as does Fortran's ``STOP``.  C's ``_exit`` is not.

_SIG_DFL, _SIG_IGN = 0, 1  # <signal.h>


def die_at_exit(wanted: bool) -> None:
    """Set whether an exit of this process is a death by a signal; forks of it exit as usual."""
    _replace_exit(kills=wanted)
    if wanted != _CExit.is_deadly and hasattr(signal, "SIGRTMIN"):  # macOS has none
        _CExit.make_deadly(wanted)


def _replace_exit(**flags: bool) -> None:
    """Replace ``os._exit``, or restore it if it need neither kill nor fail any more."""
    known = os._exit if isinstance(os._exit, _Exit) else _Exit()
    vars(known).update(flags)
    os._exit = known if known.kills or known.fails else known.really_exit


class _Exit:
    """Replaces ``os._exit`` of a rank, which kills itself or never counts as a success; forks of it exit as usual."""

    kills = False
    fails = False

    def __init__(self) -> None:
        self._rank, self.really_exit = os.getpid(), os._exit

    def __call__(self, status: int) -> NoReturn:
        if os.getpid() == self._rank:
            if self.kills:
                os.kill(self._rank, signal.SIGKILL)
            if self.fails:
                status = status or 1
        self.really_exit(status)


class _CExit:
    """C's ``exit`` raises a signal, which ends this process unless it is ignored.

    C calls ``raise`` without Python: the interpreter may have ended.
    """

    is_deadly: ClassVar[bool] = False
    _raises: ClassVar[bool] = False

    @classmethod
    def make_deadly(cls, deadly: bool) -> None:
        library, number = ctypes.CDLL(None), signal.SIGRTMIN + 6
        # Python's own function is for the main thread only.
        library.signal(number, ctypes.c_void_p(_SIG_DFL if deadly else _SIG_IGN))
        cls.is_deadly = deadly
        if not cls._raises:
            cls._raises = True
            os.register_at_fork(after_in_child=lambda: cls.make_deadly(False))
            library["__cxa_atexit"](ctypes.cast(library["raise"], ctypes.c_void_p), ctypes.c_void_p(number), None)


# -- the death monitor -------------------------------------------------------------------------------------------------

# Seconds that a rank waits for the death monitor to be ready; on a busy machine Python starts slowly.
_PATIENCE_S = 10.0

# argv: host, number of ranks, number of ranks on this node, patience.  Descriptor 0 is a listening socket.  A rank
# connects, sends its rank and process number, and gets an answer when all are watched: of ranks that ended earlier the
# order would not be known.  Anybody on the node can connect to the socket; the kernel reports the user id.  Later a
# rank may send a path and a newline: the file to which the death is noted, too.
_SCRIPT = """
import os, select, socket, struct, sys
host, size, here, patience = sys.argv[1:]
socket.setdefaulttimeout(float(patience))
listener = socket.socket(fileno=0)
events, ranks = select.epoll(), {}
try:
    while len(ranks) < int(here):
        rank = listener.accept()[0]
        if struct.unpack("3i", rank.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1] != os.getuid():
            rank.close()
            continue
        ranks[rank.fileno()] = rank, rank.recv(100).decode()
        events.register(rank, select.EPOLLIN)
    for rank, _ in ranks.values():
        rank.send(b".")
except OSError:
    sys.exit()  # somebody was gone before all were here
path = told = b"."
while told:
    ((first, _),) = events.poll(maxevents=1)  # of several closed sockets the first
    try:
        told = ranks[first][0].recv(10000)
    except OSError:
        told = b""
    path = told.split(b"\\n")[-2] if b"\\n" in told else path
who, process = ranks[first][1].split()
if path != b".":
    import json, time
    line = {"time": round(time.time(), 3), "rank": int(who), "ranks": int(size), "process": f"{host}-{process}"}
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
        os.write(file, json.dumps(line).encode() + b"\\n")
    except OSError:
        pass
sys.exit(f"mpishard: rank {who} of {size} (process {process} on {host}) has died")
"""


def _watch_exits(wanted: bool) -> None:
    """Set whether ``os._exit`` of this rank fails: at such an exit a death monitor counts it as dead.

    MPICH's launcher ends the job then, and in half of the runs seen the job's exit code was this rank's 0.  Not under
    Open MPI: with ULFM it ends the whole job at a code other than 0.
    """
    if MPI.get_vendor()[0] != "Open MPI":
        _replace_exit(fails=wanted)


def note_deaths(path: Path) -> None:
    """Have the death monitors of this rank note a death in a file of lines, too; call it on all ranks."""
    for monitor in DeathMonitor._active:
        if monitor._socket is not None:
            with contextlib.suppress(OSError):
                monitor._socket.send(os.fsencode(path.absolute()) + b"\n")


def silence_death_monitors() -> None:
    """Stop reporting deaths, since this rank has reported its error and is about to end the job."""
    for monitor in DeathMonitor._active:
        if monitor._number:
            with contextlib.suppress(OSError):
                os.kill(monitor._number, signal.SIGKILL)


class DeathMonitor:
    """Watches the ranks of `comm` that share a node with this one.  Get one by `DeathMonitor.over`."""

    _active: ClassVar[list[DeathMonitor]] = []

    @classmethod
    def over(cls, comm: MPI.Intracomm) -> DeathMonitor:
        """The active monitor of these ranks, or a new one: starting a process takes longer than making a mesh.

        The caller dismisses and closes it.  Collective, as `dismiss` and `close` are; all ranks call them in one order.
        """
        group = comm.Get_group()
        for known in cls._active:
            if MPI.Group.Compare(group, known._group) == MPI.IDENT:
                group.Free()
                known._users += 1
                return known
        return cls(comm, group)

    def __init__(self, comm: MPI.Intracomm, group: MPI.Group) -> None:
        self._group, self._users = group, 1
        self._active.append(self)
        _watch_exits(True)
        node = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        address, number = b"", 0
        if node.rank == 0:
            with contextlib.suppress(OSError):
                address, number = self._start(comm.size, node.size)
        address, self._number = node.bcast((address, number))
        if self._number:
            with contextlib.suppress(OSError):
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._socket.settimeout(_PATIENCE_S)
                self._socket.connect(address)
                self._socket.send(f"{comm.rank} {os.getpid()}".encode())
                self._socket.recv(1)
        node.Free()

    def _start(self, ranks: int, ranks_here: int) -> tuple[bytes, int]:
        """Start the process; returns the socket address, which accepts connections at once, and the process number."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind("")  # Linux picks a free abstract address; elsewhere this fails: no monitor
            listener.listen(ranks_here)
            arguments = MPI.Get_processor_name(), str(ranks), str(ranks_here), str(_PATIENCE_S)
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _SCRIPT, *arguments],
                stdin=listener.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
            return listener.getsockname(), self._process.pid

    def dismiss(self) -> None:
        """Stop reporting deaths to this user.  A rank may end once all have passed a barrier after this."""
        self._users -= 1
        if self._users:
            return
        self._active.remove(self)
        _watch_exits(bool(self._active))
        if not MPI.Is_finalized():
            self._group.Free()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        """Close the socket, after that barrier."""
        if not self._users and self._socket is not None:
            self._socket.close()
            self._socket = None


# -- uncaught exceptions -----------------------------------------------------------------------------------------------

# How long other ranks leave to the first to report an error that all have; it ends them by then.
FIRST_S = 1.0
# The longest wait of a rank for others that end too, and its sleep between two checks.
LAST_S, _NAP_S = 5.0, 0.02
_FLUSH_S = 0.2


def abort(message: str, code: int = 1) -> None:
    """Print `message` on stderr and end every process of the job with an exit code."""
    hook = _hook()
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
    """Print `message`, unless empty, on stderr and kill this process alone, so that ULFM informs the others.

    MPI_Finalize would wait for the others, and ULFM informs them of a signal, not of an exit code other than 0.
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
    say(message)
    time.sleep(_FLUSH_S)  # launchers drop the output still in the pipe when the job is aborted


def dead_ranks() -> list[int]:
    """The ranks that MPI reports as dead."""
    world = MPI.COMM_WORLD
    return sorted(MPI.Group.Translate_ranks(world.Get_failed(), None, world.Get_group()))


def _dead_within(seconds: float) -> list[int]:
    """The ranks reported dead within `seconds`, or until rank 0 is; none if MPI reports no deaths."""
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
    """The excepthook of a process without others, which ends without help."""
    interrupted = issubclass(kind, KeyboardInterrupt)
    sys.stderr.write("mpishard: ended by Ctrl-C\n" if interrupted else describe(error or kind(), trace))


class _AbortOnException:
    """The process's excepthook: prints the traceback with the rank and, if known, the step, then aborts."""

    def __init__(self) -> None:
        self.ledger: Ledger | None = None
        self.note: Callable[[BaseException, int], None] | None = None
        self.note_abort: Callable[[], None] | None = None
        self.gather_failures: Callable[[], list[int]] | None = None
        self.alone = False
        self._first = threading.Lock()

    @property
    def step(self) -> int:
        """The step under way, 0 if unknown."""
        return 0 if self.ledger is None else self.ledger.step

    def __call__(self, kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
        if MPI.Is_finalized():
            sys.__excepthook__(kind, error or kind(), trace)
            return
        self._first.acquire()  # never released: another thread that fails has nothing to add
        comm = MPI.COMM_WORLD
        step = f" at step {self.step}" if self.step else ""
        if self.note is not None:
            self.note(error or kind(), self.step)
        if issubclass(kind, KeyboardInterrupt):
            if comm.rank > 0:
                time.sleep(FIRST_S)
            abort(f"mpishard: Ctrl-C{step} ends the job", INTERRUPTED)
        text = describe(error or kind(), trace)
        if self.alone:
            die(f"mpishard: process {comm.rank} failed{step} and leaves the run\n{text}")
        failed = [] if self.gather_failures is None else self.gather_failures()
        dead = _dead_within(FIRST_S if comm.rank > 0 and not failed else 0.0)
        if 0 in dead and len(failed) == comm.size:
            abort("")  # rank 0 has reported the error of all
        if dead and (isinstance(error, MPI.Exception) or 0 in dead):
            why = traceback.format_exception_only(error or kind())[0].splitlines()[-1]  # without its notes
            abort(f"mpishard: rank {comm.rank} of {comm.size} ends{step} after rank {dead[0]} has: {why}")
        if not failed and getattr(error, ON_ALL_RANKS, 0) == comm.size:
            failed = list(range(comm.size))
        if len(failed) < 2:
            abort(f"mpishard: rank {comm.rank} of {comm.size} failed{step} and ends the job\n{text}")
        some = f"ranks {', '.join(map(str, failed))} of {comm.size}"
        who = f"all {comm.size} ranks" if len(failed) == comm.size else some
        abort(f"mpishard: {who} failed{step} and end the job; of rank {comm.rank}:\n{text}")

    def in_thread(self, args: threading.ExceptHookArgs) -> None:
        if args.exc_type is not SystemExit:
            self(args.exc_type, args.exc_value, args.exc_traceback)


def abort_on_exception(
    ledger: Ledger | None = None,
    *,
    note: Callable[[BaseException, int], None] | None = None,
    note_abort: Callable[[], None] | None = None,
    gather_failures: Callable[[], list[int]] | None = None,
) -> None:
    """Make an uncaught exception in any thread of this process abort the job, if it has several ranks.

    Importing mpishard does this, since a rank may fail before it has a mesh; a mesh adds its ledger, which knows the
    step. Interactive sessions are left alone; a single rank that no other has spawned only gets a shorter traceback,
    unless a caller asks for a note.

    `note` is called first, with the exception and the step (0 if unknown), `note_abort` before this process ends the
    job for that or another reason. By `gather_failures` of a watchdog ranks that fail together learn of each other, so
    that one of them reports for all.
    """
    if hasattr(sys, "ps1"):
        return
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = ctrl_c_again
    hook = _hook()
    has_others = MPI.COMM_WORLD.size > 1 or MPI.Comm.Get_parent() != MPI.COMM_NULL
    if hook is None and note is None and not has_others:
        if sys.excepthook is sys.__excepthook__:
            sys.excepthook = _print_error
        return
    if hook is None:
        hook = _AbortOnException()
        sys.excepthook, threading.excepthook = hook, hook.in_thread
    hook.ledger, hook.gather_failures = ledger, gather_failures
    hook.note = note or hook.note
    hook.note_abort = note_abort or hook.note_abort


def _hook() -> _AbortOnException | None:
    return sys.excepthook if isinstance(sys.excepthook, _AbortOnException) else None


def step_under_way() -> int:
    """The step of the newest mesh's ledger; 0 without one."""
    hook = _hook()
    return 0 if hook is None else hook.step


def fail_alone(alone: bool) -> None:
    """Set whether an uncaught exception, or an exit, ends this process only; MPI informs the others (ULFM)."""
    die_at_exit(alone)
    hook = _hook()
    if hook is not None:
        hook.alone = alone


# -- the start and the end of MPI --------------------------------------------------------------------------------------

_FINALIZE_S = 3.0


def start_mpi() -> None:
    """Start MPI unless somebody has: ``mpi4py.rc.initialize = False``, as Devito sets it, leaves that to others.

    Collective.
    """
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        _Finalize.wanted = True


@contextlib.contextmanager
def killed_after(seconds: float) -> Iterator[None]:
    """A context that is left within `seconds`, or SIGALRM kills this process; also if MPI fails in it.

    It is for MPI_Finalize, which waits if a peer is inside MPI.  The timer is the kernel's: mpi4py keeps the
    interpreter's lock in MPI_Finalize, so that no thread of Python runs.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except MPI.Exception:  # others have ended without Finalize, so that it could not complete
        os.kill(os.getpid(), signal.SIGALRM)
    signal.setitimer(signal.ITIMER_REAL, 0)


def finalize_in_time() -> None:
    """Limit the time of MPI_Finalize from now on: in Open MPI 5 it may wait for ever after a death.

    After that time the process ends without it; the launcher reports the exit code of the dead process in any case.
    """
    _Finalize.wanted = _Finalize.limited = True


class _Finalize:
    """MPI_Finalize at the end of the script, where mpi4py would not call it (`wanted`), or not in time (`limited`)."""

    wanted: ClassVar[bool] = False
    limited: ClassVar[bool] = False

    @classmethod
    def at_exit(cls) -> None:
        if not cls.wanted or MPI.Is_finalized():
            return
        if not cls.limited:
            MPI.Finalize()
            return
        sys.stdout.flush()
        with killed_after(_FINALIZE_S):
            MPI.Finalize()


# Registered on import of mpishard, so that it runs after everything registered later, such as the report of the end.
atexit.register(_Finalize.at_exit)
