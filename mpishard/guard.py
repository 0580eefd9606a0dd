"""What ends a job when a rank fails: no rank waits for ever, and the culprit is named.

An uncaught exception on any rank prints that rank's traceback and aborts the job.  A watchdog thread on every rank
notices a collective that waits past the time limit, asks all ranks where they are, prints who waits where and who is
missing, and aborts; the threads talk over a communicator of their own.  A witness names the rank that is killed.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Any

from mpi4py import MPI

from mpishard.ledger import Ledger
from mpishard.witness import Witness

_ASK, _ANSWER = 1, 2
_POLL_S = 0.25
_ANSWER_S = 2.0
_FLUSH_S = 0.2
# Longest answer; the numbers of stack frames that fit are more than anybody reads.
_ANSWER_BYTES = 2000


def abort(message: str, witness: Witness | None) -> None:
    """Print `message` on stderr and end every process of the job with exit code 1."""
    if witness is not None:
        witness.silence()
    sys.stderr.write(message if message.endswith("\n") else message + "\n")
    sys.stderr.flush()
    time.sleep(_FLUSH_S)  # launchers drop what is still in the pipe when the job is aborted
    MPI.COMM_WORLD.Abort(1)


class _AbortOnException:
    """The process's excepthook: prints the traceback with the rank, and the step where one is known, then aborts."""

    def __init__(self) -> None:
        self.ledger: Ledger | None = None
        self.witness: Witness | None = None

    def __call__(self, kind: type[BaseException], error: BaseException | None, where: TracebackType | None) -> None:
        comm = MPI.COMM_WORLD
        step = f" at step {self.ledger.step}" if self.ledger is not None and self.ledger.step else ""
        text = "".join(traceback.format_exception(kind, error, where))
        abort(f"mpishard: rank {comm.rank} of {comm.size} failed{step} and ends the job\n{text}", self.witness)

    def in_thread(self, args: threading.ExceptHookArgs) -> None:
        if args.exc_type is not SystemExit:
            self(args.exc_type, args.exc_value, args.exc_traceback)


def abort_on_exception(ledger: Ledger | None = None, witness: Witness | None = None) -> None:
    """From now on an exception that nobody catches, in any thread of this process, aborts the job of several ranks.

    Importing mpishard does this, since a rank may fail before it has a mesh; a mesh adds its ledger, which knows the
    step, and its witness.  Sessions at a prompt are left alone.
    """
    if MPI.COMM_WORLD.size == 1 or hasattr(sys, "ps1"):
        return
    if not isinstance(sys.excepthook, _AbortOnException):
        hook = _AbortOnException()
        sys.excepthook, threading.excepthook = hook, hook.in_thread
    assert isinstance(sys.excepthook, _AbortOnException)
    sys.excepthook.ledger, sys.excepthook.witness = ledger, witness


class Watchdog:
    """Names the ranks to blame when a collective outlasts `limit` seconds, then aborts the job.

    Creation and `close` are collective over `comm`.
    """

    def __init__(self, comm: MPI.Intracomm, ledger: Ledger, limit: float) -> None:
        self.limit = limit
        self._ledger = ledger
        self._main = threading.main_thread().ident
        self._comm = comm.Dup()
        self._stop = threading.Event()
        self._leaving = False
        self._stand_down = 0.0
        self._replies: dict[int, str] = {}
        self._sends: list[Any] = []
        self._thread: threading.Thread | None = None
        self.witness = Witness(comm) if comm.size > 1 else None
        if comm.size > 1 and MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            self._thread = threading.Thread(target=self._run, name="mpishard-watchdog", daemon=True)
            self._thread.start()
            atexit.register(self._leave)

    def close(self) -> None:
        """Stop the thread and free the communicator."""
        if self.witness is not None:
            self.witness.dismiss()
        if self._thread is not None:
            atexit.unregister(self._leave)
            self._end_thread()
        self._comm.Barrier()
        self._comm.Free()

    def _end_thread(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _leave(self) -> None:
        """End of the script: keep answering until all ranks are here, so that one that left early can be named."""
        if MPI.Is_finalized() or self._thread is None:
            return
        self._leaving = True
        if self.witness is not None:
            self.witness.dismiss()
        request = self._comm.Ibarrier()
        deadline = time.monotonic() + self.limit + 4 * _ANSWER_S
        while not request.Test() and time.monotonic() < deadline:
            time.sleep(0.001)
        self._end_thread()

    def _run(self) -> None:
        poll = min(_POLL_S, self.limit / 4)
        while not self._stop.wait(poll):
            self._serve()
            call = self._ledger.active
            waited = 0.0 if call is None else time.perf_counter() - call.began
            if waited > self.limit and time.monotonic() > self._stand_down:
                self._report(waited)

    def _serve(self) -> None:
        """Answer the questions of other ranks and take in their answers."""
        status = MPI.Status()
        while self._comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
            buffer = bytearray(status.Get_count(MPI.BYTE))
            source = status.Get_source()
            self._comm.Recv([buffer, MPI.BYTE], source, status.Get_tag())
            if status.Get_tag() == _ANSWER:
                self._replies[source] = buffer.decode(errors="replace")
            else:
                if source < self._comm.rank:  # one report is enough: the lowest rank that waits writes it
                    self._stand_down = time.monotonic() + 3 * _ANSWER_S
                self._send(source, _ANSWER, self._where().encode()[:_ANSWER_BYTES])

    def _send(self, target: int, tag: int, data: bytes) -> None:
        self._sends = [(request, kept) for request, kept in self._sends if not request.Test()]
        self._sends.append((self._comm.Isend([data, MPI.BYTE], target, tag), data))

    def _where(self) -> str:
        """What this rank is doing, in words."""
        call = self._ledger.active
        if call is not None:
            return f"waits {time.perf_counter() - call.began:.1f} s in {call}"
        if self._leaving:
            return "has ended its script"
        frame = sys._current_frames().get(self._main or 0)
        stack = traceback.extract_stack(frame)[-3:] if frame is not None else []
        place = " < ".join(f"{f.filename}:{f.lineno} ({f.name})" for f in reversed(stack))
        last = self._ledger.recent[-1].call if self._ledger.recent else None
        return f"is in no collective: it runs {place or 'unknown code'}; its last collective was {last}"

    def _report(self, waited: float) -> None:
        comm = self._comm
        self._replies = {comm.rank: self._where()}
        for rank in range(comm.size):
            if rank != comm.rank:
                self._send(rank, _ASK, b"?")
        deadline = time.monotonic() + _ANSWER_S
        while time.monotonic() < deadline and len(self._replies) < comm.size:
            self._serve()
            time.sleep(0.01)
        if time.monotonic() <= self._stand_down or self._stop.is_set() or self._ledger.active is None:
            return
        lines = [
            f"mpishard: a collective has waited {waited:.1f} s, past the time limit of {self.limit:g} s "
            f"(MPISHARD_TIMEOUT or Mesh(timeout=...)); step {self._ledger.step}; the job ends"
        ]
        for rank in range(comm.size):
            lines.append(f"  rank {rank} {self._replies.get(rank, 'does not answer: dead, stopped, or blocked')}")
        abort("\n".join(lines), self.witness)
