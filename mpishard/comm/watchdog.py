"""Ends the job when a rank fails, so that no rank waits for ever, and reports which rank failed.

If any rank raises an uncaught exception, that rank prints its traceback and aborts the job.  On every rank a watchdog
thread detects a collective that exceeds the time limit.  The thread asks all ranks where they are, prints where each
rank waits and which ranks are missing, and aborts the job.  The threads have a communicator of their own.  A death
monitor reports the rank that is killed.

Under Open MPI's ULFM, ``MPI_Abort`` ends only the rank that calls it, and MPI does not inform the other ranks (5.0.11,
4 ranks).  Nor does MPI inform them of a rank that ends with an exit code other than 0.  MPI does inform them of a rank
that a signal kills.  So under ULFM a rank that aborts the job kills itself, and the informed ranks do the same.
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
from typing import Any, NamedTuple, NoReturn

from mpi4py import MPI

from mpishard.comm.capabilities import heals_in_place
from mpishard.comm.death_monitor import DeathMonitor, silence_death_monitors
from mpishard.comm.ledger import Call, Ledger
from mpishard.launch.endings import INTERRUPTED
from mpishard.launch.tracebacks import describe

_ASK, _ASK_ALL, _ANSWER, _FAILED = 1, 2, 3, 4
_POLL_S = 0.25
# After this wait a rank asks its neighbour whether it is still in the script.
_SUSPICION_S = 5.0
_ANSWER_S = 2.0
_FLUSH_S = 0.2
# The default time limits of a collective: seconds before the first step is over, when one rank may read data or compile
# while the others wait; seconds if all ranks wait, and at least; and afterwards a multiple of the longest step.
_SET_UP_S, _LEAST_S, _STEPS = 1800.0, 120.0, 10
# How often a rank asks, before the first step is over, whether any rank is at work.
_LOOK_S = 15.0
# How long other ranks leave to the first to report an error that all have; it ends them by then.
_FIRST_S = 1.0
# Time until a Ctrl-C is sent again that Python ignored, since it came where no exception can be raised.
_AGAIN_S = 0.05
# How long the first rank waits to hear whether all have failed.
_ALIKE_S = 0.6
# The longest wait of a rank for others that end too, and its sleep between two checks.
_LAST_S, _NAP_S = 5.0, 0.02
# Longest answer; more stack frames fit than anybody reads.
_ANSWER_BYTES = 2000


def abort(message: str, code: int = 1) -> None:
    """Print `message` on stderr and end every process of the job with an exit code."""
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

    MPI_Finalize would wait for the others, and ULFM does not inform them of an exit code other than 0.
    """
    _print(message)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("this process lives")


def _end_with_others(message: str, code: int) -> NoReturn:
    """`abort` under ULFM: the others are informed of the death of this process and end in the same way.

    The lowest rank stays until the others are gone and exits with `code`: killed ranks do not set the launcher's code.
    """
    world = MPI.COMM_WORLD
    dead = _dead()
    if not dead or not set(range(world.rank)) <= set(dead):
        die(message)
    _print(message)
    deadline = time.monotonic() + _LAST_S
    while len(_dead()) < world.size - 1:
        if time.monotonic() > deadline:
            os.kill(os.getpid(), signal.SIGKILL)
        _progress()
    os._exit(code)


def _print(message: str) -> None:
    if not message:
        return
    sys.stderr.write(message if message.endswith("\n") else message + "\n")
    sys.stderr.flush()
    time.sleep(_FLUSH_S)  # launchers drop the output still in the pipe when the job is aborted


def _dead() -> list[int]:
    """The ranks that MPI reports as dead."""
    world = MPI.COMM_WORLD
    return sorted(MPI.Group.Translate_ranks(world.Get_failed(), None, world.Get_group()))


def _dead_within(seconds: float) -> list[int]:
    """The ranks reported dead within so many seconds, or until rank 0 is; none if MPI reports no deaths."""
    if not heals_in_place():
        time.sleep(seconds)
        return []
    deadline = time.monotonic() + seconds
    while 0 not in _dead() and time.monotonic() < deadline:
        _progress()
    return _dead()


def _progress() -> None:
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


class _AbortOnException:
    """The process's excepthook: prints the traceback with the rank and, if known, the step, then aborts."""

    def __init__(self) -> None:
        self.ledger: Ledger | None = None
        self.note: Callable[[BaseException, int], None] | None = None
        self.note_abort: Callable[[], None] | None = None
        self.watchdog: Watchdog | None = None
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
                time.sleep(_FIRST_S)
            abort(f"mpishard: Ctrl-C{step} ends the job", INTERRUPTED)
        text = describe(error or kind(), trace)
        if self.alone:
            die(f"mpishard: process {comm.rank} failed{step} and leaves the run\n{text}")
        failed = self.watchdog.gather_failures() if self.watchdog is not None else []
        dead = _dead_within(_FIRST_S if comm.rank > 0 and not failed else 0.0)
        if 0 in dead and len(failed) == comm.size:
            abort("")  # rank 0 has reported the error of all
        if dead and (isinstance(error, MPI.Exception) or 0 in dead):
            why = text.splitlines()[-1]
            abort(f"mpishard: rank {comm.rank} of {comm.size} ends{step} after rank {dead[0]} has: {why}")
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
    watchdog: Watchdog | None = None,
) -> None:
    """Make an uncaught exception in any thread of this process abort the job, if it has several ranks.

    Importing mpishard does this, since a rank may fail before it has a mesh; a mesh adds its ledger, which knows the
    step.  Interactive sessions are left alone.  A single rank that no other has spawned only gets a shorter traceback,
    unless a caller asks for a note.

    Parameters
    ----------
    note : callable, optional
        Called first, with the exception and the step, 0 if it is not known.
    note_abort : callable, optional
        Called before this process ends the job, for that or another reason.
    watchdog : Watchdog, optional
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
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def fail_alone(alone: bool) -> None:
    """Set whether an uncaught exception ends this process only; MPI informs the others (ULFM)."""
    if isinstance(sys.excepthook, _AbortOnException):
        sys.excepthook.alone = alone


class TimeLimit:
    """How many seconds a collective may wait: the chosen number, or one that follows from the longest step so far.

    Parameters
    ----------
    chosen : float or None
        None: `_SET_UP_S` until the first step is over; then ten times the longest step (from its begin to the begin of
        the next), at least `_LEAST_S`.
    """

    def __init__(self, chosen: float | None) -> None:
        self.chosen = chosen
        self._step = 0
        self._began = 0.0
        self._longest: float | None = None

    def note(self, step: int, now: float, any_over: bool = False) -> None:
        """Note that `step` is under way at the time `now`; 0 before the first.

        `any_over`: a step has ended, perhaps before the first call of this.
        """
        if any_over and self._longest is None:
            self._longest = 0.0
        if step == self._step:
            return
        if self._step:
            self._longest = max(self._longest or 0.0, now - self._began)
        self._step, self._began = step, now

    @property
    def in_set_up(self) -> bool:
        """Whether no limit was chosen and no step is over."""
        return self.chosen is None and self._longest is None

    @property
    def seconds(self) -> float:
        if self.chosen is not None:
            return self.chosen
        return _SET_UP_S if self._longest is None else max(_LEAST_S, _STEPS * self._longest)

    def __str__(self) -> str:
        ways = "MPISHARD_TIMEOUT or Mesh(timeout=...)"
        if self.chosen is not None:
            return f"{self.seconds:g} s ({ways})"
        rule = f"{_STEPS} times the longest step and at least {_LEAST_S:g} s"
        return (
            f"{self.seconds:.0f} s ({'before the first step' if self._longest is None else rule}; {ways} sets another)"
        )


class _Reply(NamedTuple):
    """The answer of a rank: whether it has waited for long or has ended, and a text."""

    idle: bool
    text: str


class Watchdog:
    """Names the ranks to blame when a collective outlasts its time limit, or can never end, and aborts the job.

    A collective can never end once a member of its axis has ended its script; the neighbours are asked after a few
    seconds.  Needs an MPI that several threads may call (``MPI_THREAD_MULTIPLE``); without it there is no time limit.
    Creation and `close` are collective over `comm`.
    """

    def __init__(self, comm: MPI.Intracomm, ledger: Ledger, limit: float | None) -> None:
        self._limit = TimeLimit(limit)
        self._ledger = ledger
        self._main = threading.main_thread().ident
        self._comm = comm.Dup()
        self._stop = threading.Event()
        self._leaving = ""
        self._stand_down = 0.0
        self._asked: Call | None = None
        self._next_look = 0.0
        self._replies: dict[int, _Reply] = {}
        self._sends: list[Any] = []
        self._failed: set[int] = set()
        self._thread: threading.Thread | None = None
        self._death_monitor = DeathMonitor.over(comm) if comm.size > 1 else None
        if comm.size > 1 and MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            self._thread = threading.Thread(target=self._run, name="mpishard-watchdog", daemon=True)
            self._thread.start()
        atexit.register(self._end_of_script)

    def close(self) -> None:
        """End the watch and free the communicator."""
        atexit.unregister(self._end_of_script)
        if isinstance(sys.excepthook, _AbortOnException) and sys.excepthook.watchdog is self:
            sys.excepthook.watchdog = None
        self._leave("has freed its mesh")
        if self._death_monitor is not None:
            self._death_monitor.close()
        self._comm.Free()

    def stop(self) -> None:
        """End the time limits; a rank that is killed is still named.  Not collective."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def gather_failures(self) -> list[int]:
        """Inform the others that this rank has failed; returns the failed ranks once it is this rank's turn to report.

        The first of them reports and ends the job while the others wait here.  Empty if `comm` is not the whole job.
        """
        comm, began, sends = self._comm, time.monotonic(), []
        may_call = self._thread is not None or threading.current_thread() is threading.main_thread()
        if not may_call or MPI.Comm.Compare(comm, MPI.COMM_WORLD) not in (MPI.IDENT, MPI.CONGRUENT):
            return []
        self._failed.add(comm.rank)
        for rank in range(comm.size):
            if rank != comm.rank:
                with contextlib.suppress(MPI.Exception):  # the rank has died
                    sends.append(comm.Isend([b"!", MPI.BYTE], rank, _FAILED))
        while len(self._failed) < comm.size or comm.rank > 0:
            if self._thread is None:
                with contextlib.suppress(MPI.Exception):
                    self._serve()
            patience = _LAST_S if min(self._failed) < comm.rank else _FIRST_S if comm.rank else _ALIKE_S
            if time.monotonic() - began > patience or (heals_in_place() and 0 in _dead()):
                break
            _progress()
        return sorted(self._failed)

    def _end_of_script(self) -> None:
        self._leave("has ended its script")

    def _leave(self, why: str) -> None:
        """Keep answering until all ranks have come here, so that a rank that left early can be named."""
        if self._death_monitor is not None:
            self._death_monitor.dismiss()
        if not MPI.Is_finalized() and self._comm.size > 1:
            self._leaving = why
            request = self._comm.Ibarrier()
            deadline = time.monotonic() + self._limit.seconds + 4 * _ANSWER_S
            while not request.Test() and time.monotonic() < deadline:
                time.sleep(0.0005)
        self.stop()

    def _run(self) -> None:
        poll = min(_POLL_S, self._limit.seconds / 4)
        while not self._stop.wait(poll) and not MPI.Is_finalized():
            self._serve()
            now = time.monotonic()
            self._limit.note(self._ledger.step, now, self._ledger.any_over)
            call = self._ledger.waiting
            if call is None or now <= self._stand_down:
                continue
            waited = time.perf_counter() - call.began
            if waited > self._limit.seconds:
                self._report(f"past the time limit of {self._limit}")
            elif waited > _LEAST_S and self._limit.in_set_up and now > self._next_look:
                self._next_look = now + _LOOK_S
                self._report(f"and no rank has been at work for {_LEAST_S:g} s", if_all_idle=True)
            elif waited > _SUSPICION_S:
                self._ask_neighbour(call)

    def _ask_neighbour(self, call: Call) -> None:
        """Ask the next rank on the axis, once per call, whether it is still in the script; if not, report it."""
        members = call.members
        if self._comm.rank not in members:
            return
        neighbour = members[(members.index(self._comm.rank) + 1) % len(members)]
        if self._asked != call:
            self._asked = call
            self._replies.pop(neighbour, None)
            self._send(neighbour, _ASK, b"?")
        elif neighbour in self._replies and self._replies[neighbour].text.startswith("has "):
            self._report(f"and can never end, since rank {neighbour} {self._replies[neighbour].text}")

    def _serve(self) -> None:
        """Answer the questions of other ranks and receive their answers."""
        status = MPI.Status()
        while self._comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
            buffer = bytearray(status.Get_count(MPI.BYTE))
            source, tag = status.Get_source(), status.Get_tag()
            self._comm.Recv([buffer, MPI.BYTE], source, tag)
            if tag == _FAILED:
                self._failed.add(source)
                continue
            if tag == _ANSWER:
                idle, _, text = buffer.decode(errors="replace").partition(" ")
                self._replies[source] = _Reply(idle == "True", text)
                continue
            if tag == _ASK_ALL and source < self._comm.rank:  # the report of the lowest rank is enough
                self._stand_down = time.monotonic() + 3 * _ANSWER_S
            own = self._state()
            self._send(source, _ANSWER, f"{own.idle} {own.text}".encode()[:_ANSWER_BYTES])

    def _send(self, target: int, tag: int, data: bytes) -> None:
        self._sends = [(request, kept) for request, kept in self._sends if not request.Test()]
        self._sends.append((self._comm.Isend([data, MPI.BYTE], target, tag), data))

    def _state(self) -> _Reply:
        """What this rank is doing."""
        call = self._ledger.waiting
        if call is not None:
            waited = time.perf_counter() - call.began
            return _Reply(waited > _LEAST_S, f"waits {waited:.1f} s in {call}")
        if self._leaving:
            return _Reply(True, self._leaving)
        frame = sys._current_frames().get(self._main or 0)
        stack = traceback.extract_stack(frame)[-3:] if frame is not None else []
        code = " < ".join(f"{f.filename}:{f.lineno} ({f.name})" for f in reversed(stack))
        recent = self._ledger.recent
        last = recent[-1].call if recent else None
        return _Reply(False, f"is in no collective: it runs {code or 'unknown code'}; its last collective was {last}")

    def _report(self, why: str, if_all_idle: bool = False) -> None:
        """Ask all ranks where they are, print it and abort, unless the call has ended or another rank reports."""
        comm = self._comm
        call = self._ledger.waiting
        self._replies = {comm.rank: self._state()}
        for rank in range(comm.size):
            if rank != comm.rank:
                self._send(rank, _ASK_ALL, b"?")
        deadline = time.monotonic() + _ANSWER_S
        while time.monotonic() < deadline and len(self._replies) < comm.size:
            self._serve()
            time.sleep(0.01)
        if time.monotonic() <= self._stand_down or self._stop.is_set() or call is None or self._ledger.waiting != call:
            return
        if if_all_idle and not (len(self._replies) == comm.size and all(each.idle for each in self._replies.values())):
            return
        waited = time.perf_counter() - call.began
        step = f"; step {self._ledger.step}" if self._ledger.step else ""
        lines = [f"mpishard: a collective has waited {waited:.1f} s, {why}{step}; the job ends"]
        for rank in range(comm.size):
            reply = self._replies.get(rank)
            lines.append(
                f"  rank {rank} {'does not answer: dead, stopped, or blocked' if reply is None else reply.text}"
            )
        abort("\n".join(lines))
