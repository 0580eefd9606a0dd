"""Where the processes of a run are, on request; `mpishard.watch.diagnosis` says from that why the run hangs.

`StackReporter` answers in each process: its stack, and the collective in which it waits.  `ask` asks all through the
run's folder, and finds those that do not answer.  `ask_for_trace` asks for a trace of the next steps in the same way.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from mpishard.comm.mesh import Mesh
from mpishard.io.files import open_to_append, read_note, time_of, write_note
from mpishard.record.follower import Follower
from mpishard.record.reading import PROCESSES, TRACE, read_lines
from mpishard.watch.calls import ANY, AXIS
from mpishard.watch.folder import Asked, ask_all, read_answers, sort_out
from mpishard.watch.sampler import LOOK_S, RUNS, WHERE, Sampler

TRACE_REQUEST = "trace-next"
_RECENT = 5  # calls


class StackReporter(Sampler):
    """A thread that writes ``processes/HOST-PID.where.json`` on request, so that a blocked process answers too.

    A request is a new file ``why`` in the folder of the record, or SIGQUIT, which also writes the stack of that moment.
    The thread also calls `flush` periodically, and `trace` with the first and last step from a new note ``trace-next``
    in that folder.
    """

    def __init__(
        self,
        folder: Path,
        mesh: Mesh,
        flush: Callable[[], None],
        trace: Callable[[tuple[int, int]], None],
        every: float,
    ) -> None:
        super().__init__(folder, every=min(LOOK_S, every))
        self._mesh = mesh
        self._flush, self._trace, self._flush_every = flush, trace, every
        self._flushed = time.monotonic()
        self._trace_request = folder / TRACE_REQUEST
        self._traced = time_of(self._trace_request)
        self._stack: int | None = None
        self._dumped = 0

    def watch(self) -> None:
        with contextlib.suppress(OSError, AttributeError, ValueError):  # no disk, no SIGQUIT, not the main thread
            self._stack = open_to_append(self.stack_path)
            os.ftruncate(self._stack, 0)
            faulthandler.register(signal.SIGQUIT, self._stack, all_threads=False)
        self.start()

    def end(self) -> None:
        super().end()
        if self._stack is not None:
            faulthandler.unregister(signal.SIGQUIT)
            with contextlib.suppress(OSError):  # a disk that fails
                os.close(self._stack)
                if not self._dumped:
                    self.stack_path.unlink(missing_ok=True)

    def who(self) -> dict[str, Any]:
        ledger = self._mesh.ledger
        recent = [str(entry.call) for entry in ledger.recent[-_RECENT:]]
        return {"rank": self._mesh.rank, "ranks": self._mesh.size, "step": ledger.step, "recent": recent}

    def waited(self) -> float:
        call = self._mesh.ledger.waiting
        return 0.0 if call is None else time.perf_counter() - call.began

    def call(self, frame: FrameType | None) -> dict[str, Any] | None:
        call = self._mesh.ledger.waiting
        if call is None:
            return None
        members = list(call.members)
        label = f" [{call.label}]" if call.label else ""
        peers: dict[str, Any] = {}
        if call.op in ("send", "recv"):  # between these two, or from any of them
            peers = {"dest" if call.op == "send" else "source": 1 if len(members) == 2 else ANY}
        return {
            "op": call.op,
            "on": call.axis,
            "class": AXIS,
            "number": f"#{call.sequence}{' started' * call.started}",
            "buffer": f"{call.elements} {call.dtype}{label}",
            "size": len(members),
            "members": members,
            **peers,
        }

    def look(self) -> None:
        if time.monotonic() - self._flushed >= self._flush_every:
            self._flushed = time.monotonic()
            self._flush()
        self._look_for_trace()
        if self._stack is not None and (dumped := os.fstat(self._stack).st_size) > self._dumped:
            self._dumped = dumped
            self.write(self.answer())
        super().look()

    def _look_for_trace(self) -> None:
        asked = time_of(self._trace_request)
        if asked > self._traced:
            self._traced = asked
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                note = read_note(self._trace_request)
                self._trace((int(note["first"]), int(note["last"])))


# The side that asks.

_ASK_POLL_S = 0.1
# Time until all processes have seen a request: they look every second, and their lines are up to a second old.
_NOTICE_S = 3.0
# A trace may take this many times longer than expected.
_PATIENCE = 3.0


def ask(folder: Path, limit: float) -> tuple[Asked, str]:
    """Ask the processes of the last start, and wait up to `limit` seconds; with 0, read their last answers.

    The text is `Follower.ending`, empty while the run goes on.  Raises OSError if the record's folder cannot be
    written.
    """
    run = Follower(folder)
    run.update()
    if run.ended_in_order:
        return Asked([], {}, 0, is_over=True), run.ending
    before = _answers(run, run.start.get("time", 0.0))
    asked = ask_all(folder, limit, before, lambda since: _answers(run, since))
    if not asked.is_over:
        return asked, ""
    run.update()
    # Older answers of processes that have left the run say nothing about its end.
    answers = [answer for answer in asked.answers if answer["step"] >= run.last_step]
    return replace(asked, answers=answers), run.ending


def ask_for_trace(folder: Path, count: int) -> tuple[int, int]:
    """Ask the processes for a trace of the next `count` steps, and wait for it; returns its first and last step.

    Raises ValueError if the run has ended or takes no steps, OSError if the record's folder cannot be written.
    """
    run = Follower(folder)
    run.update()
    if not run.last_step:
        raise ValueError(f"{folder} has no step yet; ask again when the run has taken some")
    step_s = statistics.median([line["seconds"] for line in run.metrics if line.get("seconds")] or [1.0])
    # All processes must have seen the request before the first of these steps begins.
    first = run.last_step + 1 + math.ceil(_NOTICE_S / step_s)
    last = first + count - 1
    names = {process.name for process in run.processes}
    if not run.ending:
        write_note(folder / TRACE_REQUEST, {"first": first, "last": last})
    deadline = time.monotonic() + _PATIENCE * (_NOTICE_S + (last - run.last_step) * step_s)
    while time.monotonic() < deadline:
        files = [folder / PROCESSES / f"{name}{TRACE}" for name in names]
        if all(any(line.get("step") == last for line in read_lines(file)[0]) for file in files):
            return first, last
        run.update()
        if run.ending:
            raise ValueError(f"{folder} takes no {count} more steps: {run.ending}")
        time.sleep(_ASK_POLL_S)
    raise ValueError(f"{folder} has no trace of the steps {first} to {last} yet; see mpishard why {folder}")


def _answers(run: Follower, since: float) -> Asked:
    """What the processes of the last start have answered since a time."""
    silent: dict[int, tuple[dict[str, Any], float]] = {}
    answered: dict[int, tuple[dict[str, Any], float]] = {}
    for process in run.processes:
        host, _, number = process.name.rpartition("-")
        rank = int(process.lines[-1]["rank"])
        silent[rank] = {"rank": rank, "host": host, "process": number, "state": RUNS}, -1.0
        for answer, written in read_answers([run.folder / PROCESSES / f"{process.name}{WHERE}"]):
            if isinstance(answer.get("step"), int):
                answered[answer["rank"]] = answer, written
    return sort_out(silent | answered, since)
