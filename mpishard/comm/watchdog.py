"""Ends the job when a collective waits too long, and reports where each rank is.

On every rank a watchdog thread detects a collective that exceeds the time limit.  The thread asks all ranks where they
are, prints where each rank waits and which ranks are missing, and aborts the job.  The threads have a communicator of
their own.  A death monitor reports the rank that is killed.

The limit is the user's number, or follows from the steps of the run.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from mpi4py import MPI

from mpishard.comm.abort import FIRST_S, LAST_S, DeathMonitor, abort, dead_ranks, let_mpi_progress
from mpishard.comm.capabilities import heals_in_place
from mpishard.comm.ledger import Call, Ledger, users_level
from mpishard.comm.messages import messages
from mpishard.io.terminal import say
from mpishard.launch.script import innermost, main_frame

# The default limits of a collective: seconds before the first step is over, when one rank may read data or compile
# while the others wait; seconds if all ranks wait, and at least; and afterwards a multiple of the longest step.
_SET_UP_S, LEAST_S, _STEPS = 1800.0, 120.0, 10


class TimeLimit:
    """The seconds that a collective may wait: the chosen number, or one that follows from the longest step so far.

    Unless chosen, it is `_SET_UP_S` until the first step is over, then ten times the longest step (from its begin to
    the begin of the next), at least `LEAST_S`.
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
        """Return True if no limit was chosen and no step is over."""
        return self.chosen is None and self._longest is None

    @property
    def seconds(self) -> float:
        if self.chosen is not None:
            return self.chosen
        return _SET_UP_S if self._longest is None else max(LEAST_S, _STEPS * self._longest)

    def __str__(self) -> str:
        ways = "MPISHARD_TIMEOUT or Mesh(timeout=...)"
        if self.chosen is not None:
            return f"{self.seconds:g} s ({ways})"
        rule = f"{_STEPS} times the longest step and at least {LEAST_S:g} s"
        return (
            f"{self.seconds:.0f} s ({'before the first step' if self._longest is None else rule}; {ways} sets another)"
        )


# -- the watch ---------------------------------------------------------------------------------------------------------

_ASK, _ASK_ALL, _ANSWER, _FAILED = 1, 2, 3, 4
_POLL_S = 0.25
# After this wait a rank asks its neighbour whether it is still in the script, and again after each further one.
_SUSPICION_S = 5.0
_TOOK_PART = "took part"
_ANSWER_S = 2.0
# How often a rank asks, before the first step is over, whether any rank is at work, and after which wait.
_LOOK_S, _IDLE_S = 15.0, LEAST_S
# How long the first rank waits to hear whether all have failed.
_ALIKE_S = 0.6
# How long ranks of a new mesh wait for the others before they say so, and at least before they end the job.
_ARRIVAL_SAID_S, _ARRIVAL_LEAST_S = 15.0, LEAST_S
# Longest answer; more stack frames fit than anybody reads.
_ANSWER_BYTES = 2000


def arrival(comm: MPI.Intracomm, limit: float | None) -> contextlib.ExitStack:
    """A context in which the ranks of a new mesh wait for each other: they say so after a while, and not for ever.

    They have no communicator yet on which they could ask who is missing.
    """
    context = contextlib.ExitStack()
    if comm.size == 1 or MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        return context
    frame, limits = sys._getframe(users_level() - 1), TimeLimit(limit)
    seconds = max(limits.seconds, _ARRIVAL_LEAST_S)
    last = min(seconds + min(comm.rank, 5), threading.TIMEOUT_MAX)  # a limit may be infinite
    text = (
        f"mpishard: Mesh() at {Path(frame.f_code.co_filename).name}:{frame.f_lineno} waits for other ranks: all "
        f"{comm.size} of its communicator make it; a rank in Mesh(MPI.COMM_SELF), or that ends its script, does not; "
        f"the job ends after {seconds:.0f} s"
    )

    # One after the other, so that the first one ends the job for all.
    timers = [threading.Timer(last, abort, [text])]
    if comm.rank < 2:  # one of them may be the one that is missing
        timers.append(threading.Timer(_ARRIVAL_SAID_S, say, [text]))
    for timer in timers:
        timer.daemon = True
        timer.start()
        context.callback(timer.cancel)
    return context


class _Reply(NamedTuple):
    """The answer of a rank: whether it has waited for long or has ended, and a text."""

    idle: bool
    text: str


def _question(call: Call) -> bytes:
    """The question to other ranks: where they are, and whether they took part in `call`."""
    return f"{call.sequence} {call.kind}".encode()


class Watchdog:
    """Names the ranks to blame when a collective outlasts its time limit, or can never end, and aborts the job.

    A collective can never end once a member of its axis has ended its script without it; the neighbours are asked after
    a few seconds. One that took part may have ended: the root of a broadcast does not wait for those who are late, nor
    for those to whom they pass it on. Needs an MPI that several threads may call (``MPI_THREAD_MULTIPLE``); without it
    there is no time limit. Creation and `close` are collective over `comm`.
    """

    def __init__(self, comm: MPI.Intracomm, ledger: Ledger, limit: float | None) -> None:
        self._limit = TimeLimit(limit)
        self._ledger = ledger
        self._comm = comm.Dup()
        self._stop = threading.Event()
        self._leaving = ""  # why this rank has no further collectives; empty until then
        self._stand_down = 0.0  # until then a lower rank reports
        self._asked: Call | None = None  # the call about which a neighbour is asked
        self._distance = 1  # of the rank that is asked about it, among the members
        self._next_question = 0.0  # 0: that rank has not been asked
        self._next_look = 0.0  # of whether any rank is at work, before the first step is over
        self._replies: dict[int, _Reply] = {}  # by rank, to the last question
        self._sends: list[Any] = []  # requests with their buffers, until they are sent
        self._failed: set[int] = set()  # the ranks known to have failed
        self._thread: threading.Thread | None = None
        self._death_monitor = DeathMonitor.over(comm) if comm.size > 1 else None
        if comm.size > 1 and MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            self._thread = threading.Thread(target=self._run, name="mpishard-watchdog", daemon=True)
            self._thread.start()
        atexit.register(self._end_of_script)

    def close(self) -> None:
        """End the watch and free the communicator; a second call does nothing."""
        if self._comm == MPI.COMM_NULL:
            return
        atexit.unregister(self._end_of_script)
        self._leave("has freed its mesh")
        if self._death_monitor is not None:
            self._death_monitor.close()
        with contextlib.suppress(MPI.Exception):  # after a death
            for _ in messages(self._comm):  # what has come after `stop`, MPICH would give to the next communicator
                pass
        self._comm.Free()

    def stop(self) -> None:
        """End the time limits; a rank that is killed is still named."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def gather_failures(self) -> list[int]:
        """Inform the others that this rank has failed; returns the failed ranks once it is this rank's turn to report.

        The first of them reports and ends the job while the others wait here.  Empty if `comm` is not the whole job,
        or was freed.
        """
        comm, began, sends = self._comm, time.monotonic(), []
        may_call = self._thread is not None or threading.current_thread() is threading.main_thread()
        if not may_call or comm == MPI.COMM_NULL:
            return []
        if MPI.Comm.Compare(comm, MPI.COMM_WORLD) not in (MPI.IDENT, MPI.CONGRUENT):
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
            patience = LAST_S if min(self._failed) < comm.rank else FIRST_S if comm.rank else _ALIKE_S
            if time.monotonic() - began > patience or (heals_in_place() and 0 in dead_ranks()):
                break
            let_mpi_progress()
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
            elif waited > _IDLE_S and self._limit.in_set_up and now > self._next_look:
                self._next_look = now + _LOOK_S
                self._report(f"and no rank has been at work for {_IDLE_S:g} s", if_all_idle=True)
            elif waited > _SUSPICION_S:
                self._ask_neighbour(call, now)

    def _ask_neighbour(self, call: Call, now: float) -> None:
        """Ask the next rank on the axis that did not take part in `call`; report it if it has ended its script."""
        members, rank = call.members, self._comm.rank
        if rank not in members or len(members) == 1:
            return
        if call.op == "recv" and len(members) > 2:  # any of them may send
            return
        if self._asked != call:
            self._asked, self._distance, self._next_question = call, 1, 0.0
        neighbour = members[(members.index(rank) + self._distance) % len(members)]
        reply = self._replies.pop(neighbour, None) if self._next_question else None
        if reply is not None and reply.text.startswith("has "):
            self._report(f"and can never end, since rank {neighbour} {reply.text}")
        elif reply is not None and reply.text.startswith(_TOOK_PART):
            self._distance, self._next_question = self._distance % (len(members) - 1) + 1, 0.0
        elif now > self._next_question:
            self._next_question = now + _SUSPICION_S
            self._replies.pop(neighbour, None)
            self._send(neighbour, _ASK, _question(call))

    def _serve(self) -> None:
        """Answer the questions of other ranks and receive their answers."""
        for source, tag, data in messages(self._comm):
            if tag == _FAILED:
                self._failed.add(source)
                continue
            if tag == _ANSWER:
                idle, _, text = data.decode(errors="replace").partition(" ")
                self._replies[source] = _Reply(idle == "True", text)
                continue
            if tag == _ASK_ALL and source < self._comm.rank:  # the report of the lowest rank is enough
                self._stand_down = time.monotonic() + 3 * _ANSWER_S
            own = self._state()
            sequence, _, kind = data.decode().partition(" ")
            call = self._ledger.waiting
            if self._ledger.absent and call is not None and call.kind != kind:
                own = _Reply(True, f"{self._ledger.absent}, and {own.text}")
            if self._ledger.took_part(kind, int(sequence)):
                own = _Reply(own.idle, f"{_TOOK_PART}, and {own.text}")
            self._send(source, _ANSWER, f"{own.idle} {own.text}".encode()[:_ANSWER_BYTES])

    def _send(self, target: int, tag: int, data: bytes) -> None:
        self._sends = [(request, kept) for request, kept in self._sends if not request.Test()]
        self._sends.append((self._comm.Isend([data, MPI.BYTE], target, tag), data))

    def _state(self) -> _Reply:
        """The reply of this rank: what it is doing."""
        call = self._ledger.waiting_with_site
        if call is not None:
            waited = time.perf_counter() - call.began
            return _Reply(waited > _IDLE_S, f"waits {waited:.1f} s in {call}")
        if self._leaving:
            return _Reply(True, self._leaving)
        with main_frame() as frame:
            stack = innermost(frame, 3)
        code = " < ".join(f"{f.filename}:{f.lineno} ({f.name})" for f in stack)
        recent = self._ledger.recent
        last = recent[-1].call if recent else None
        return _Reply(False, f"is in no collective: it runs {code or 'unknown code'}; its last collective was {last}")

    def _report(self, why: str, if_all_idle: bool = False) -> None:
        """Ask all ranks where they are, print it and abort, unless the call has ended or another rank reports."""
        comm = self._comm
        call = self._ledger.waiting
        if call is None:
            return
        self._replies = {comm.rank: self._state()}
        for rank in range(comm.size):
            if rank != comm.rank:
                self._send(rank, _ASK_ALL, _question(call))
        deadline = time.monotonic() + _ANSWER_S
        while time.monotonic() < deadline and len(self._replies) < comm.size:
            self._serve()
            time.sleep(0.01)
        if time.monotonic() <= self._stand_down or self._stop.is_set() or self._ledger.waiting != call:
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
