"""Where the processes of a run are, on request, and why the run hangs.

`StackReporter` answers in each process: its stack, and the collective in which it waits.  `ask` asks all through the
run's folder, and finds those that do not answer.  `diagnose` says from the answers which rank waits for which: a rank
in a collective waits for the members that are not in it.  A rank for which others wait, and which itself waits for no
rank, is the cause; if all ranks wait, the cause is a cycle.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import signal
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from mpishard.comm.ledger import Call
from mpishard.comm.mesh import Mesh
from mpishard.io.files import create, read_note, time_of, write_note
from mpishard.launch.processes import state_here
from mpishard.launch.script import innermost, main_frame
from mpishard.record.follower import Follower
from mpishard.record.reading import PROCESSES, TRACE, Process, read_lines
from mpishard.watch.diagnosis import Finding, shortest_cycle
from mpishard.watch.sampler import REQUEST, WHERE

TRACE_REQUEST = "trace-next"
_POLL_S = 1.0
# After a wait of this many seconds, and after each further one, this process asks all others where they are.
LONG_S = 15.0
_RECENT, _DEEP = 5, 20
# Removed from the front of file names, which leaves mpishard/nn/linear.py and numpy/....
_LIBRARIES = f"{Path(__file__).parents[2]}{os.sep}"


class StackReporter(threading.Thread):
    """A thread that writes ``processes/NAME.where.json`` on request, so that a blocked process answers too.

    A request is a new file ``why`` in the folder of the record, or SIGQUIT (the stack is then of that moment).  After a
    long wait in a call it requests an answer of all processes, so that the late rank is known even after the job has
    ended.  The thread also calls `flush` periodically, and `trace` with the first and last step from a new note
    ``trace-next`` in that folder.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        mesh: Mesh,
        flush: Callable[[], None],
        trace: Callable[[tuple[int, int]], None],
        every: float,
    ) -> None:
        super().__init__(name="mpishard-where", daemon=True)
        self._request = folder / REQUEST
        self._path = folder / "processes" / f"{name}{WHERE}"
        self._stack_path = folder / "processes" / f"{name}.stack"
        self._mesh = mesh
        self._flush, self._trace, self._every = flush, trace, every
        self._over = threading.Event()
        self._stack: IO[bytes] | None = None
        self._asked = time_of(self._request)
        self._trace_request = folder / TRACE_REQUEST
        self._traced = time_of(self._trace_request)
        self._dumped = 0

    def watch(self) -> None:
        with contextlib.suppress(OSError, AttributeError, ValueError):  # no disk, no SIGQUIT, not the main thread
            self._stack_path.unlink(missing_ok=True)
            self._stack = os.fdopen(create(self._stack_path), "wb")
            faulthandler.register(signal.SIGQUIT, self._stack, all_threads=False)
        self.start()

    def end(self) -> None:
        self._over.set()
        self.join()
        if self._stack is not None:
            faulthandler.unregister(signal.SIGQUIT)
            self._stack.close()
            if not self._dumped:
                self._stack_path.unlink(missing_ok=True)

    def run(self) -> None:
        looked = flushed = time.monotonic()
        while not self._over.wait(min(_POLL_S, self._every)):
            now = time.monotonic()
            if now - flushed >= self._every:
                flushed = now
                self._flush()
            if now - looked < _POLL_S:
                continue
            looked = now
            self._look_for_trace()
            call = self._mesh.ledger.waiting
            waited = 0.0 if call is None else time.perf_counter() - call.began
            asked = time_of(self._request)
            if waited > LONG_S and time.time() - asked > LONG_S:
                with contextlib.suppress(OSError):
                    write_note(self._request, None)
                asked = time_of(self._request)
            dumped = self._size_of_stack()
            if asked > self._asked or dumped > self._dumped:
                self._asked, self._dumped = asked, dumped
                with contextlib.suppress(OSError):
                    write_note(self._path, self.answer())

    def answer(self) -> dict[str, Any]:
        """The state of this process, as plain values."""
        ledger, mesh = self._mesh.ledger, self._mesh
        call = ledger.waiting_with_site
        with main_frame() as frame:
            stack = innermost(frame, _DEEP)
        return {
            "time": round(time.time(), 3),
            "rank": mesh.rank,
            "ranks": mesh.size,
            "host": os.uname().nodename,
            "process": os.getpid(),
            "step": ledger.step,
            "call": None
            if call is None
            else {**call_fields(call), "seconds": round(time.perf_counter() - call.began, 3)},
            "recent": [call_fields(entry.call) for entry in ledger.recent[-_RECENT:]],
            "stack": [f"{f.filename.removeprefix(_LIBRARIES)}:{f.lineno} ({f.name})" for f in stack],
        }

    def _look_for_trace(self) -> None:
        asked = time_of(self._trace_request)
        if asked > self._traced:
            self._traced = asked
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                note = read_note(self._trace_request)
                self._trace((int(note["first"]), int(note["last"])))

    def _size_of_stack(self) -> int:
        try:
            return self._stack_path.stat().st_size if self._stack is not None else 0
        except OSError:
            return 0


def call_fields(call: Call) -> dict[str, Any]:
    """The fields of a call, as plain values."""
    return {
        "axis": call.axis,
        "sequence": call.sequence,
        "op": call.op,
        "dtype": str(call.dtype),
        "elements": call.elements,
        "label": call.label,
        "site": call.site,
        "members": list(call.members),
    }


# The side that asks.

_ASK_POLL_S = 0.1
# Time until all processes have seen a request: they look every second, and their lines are up to a second old.
_NOTICE_S = 3.0
# A trace may take this many times longer than expected.
_PATIENCE = 3.0

# The fields of an answer and of its calls, with their types.
_ANSWER = {"time": int | float, "rank": int, "step": int, "call": dict | None, "recent": list, "stack": list}
_CALL = dict.fromkeys(("axis", "op", "dtype", "label", "site"), str) | {
    "sequence": int,
    "elements": int,
    "members": list,
}
_WAIT = {"seconds": int | float}


@dataclass(frozen=True)
class Asked:
    """The answers to a request, by rank; see `mpishard.record.stacks.StackReporter.answer`."""

    answers: list[dict[str, Any]]
    silent: dict[int, str]  # ranks without an answer, and the state of their process
    fresh: bool  # False if no process answered; `answers` are then older ones
    ending: str  # see `Follower.ending`


def ask(folder: Path, limit: float) -> Asked:
    """Ask the processes of the last start, and wait up to `limit` seconds; with 0, read their last answers.

    Raises OSError if the record's folder cannot be written.
    """
    run = Follower(folder)
    run.update()
    if run.ended_in_order:
        return Asked([], {}, fresh=False, ending=run.ending)
    processes = run.processes
    answers: dict[str, dict[str, Any]] = {}
    request = folder / REQUEST
    if limit > 0:
        write_note(request, None)
        asked, deadline = request.stat().st_mtime, time.monotonic() + limit
        while len(answers) < len(processes) and time.monotonic() < deadline:
            time.sleep(_ASK_POLL_S)
            answers = _answers(folder, processes, since=asked)
    fresh = bool(answers)
    if not fresh:
        answers = _answers(folder, processes, since=run.start.get("time", 0.0))
        run.update()
        # Older answers of processes that have left the run say nothing about its end.
        answers = {name: answer for name, answer in answers.items() if answer["step"] >= run.last_step}
    found = sorted(answers.values(), key=lambda answer: int(answer["rank"]))
    silent = {int(p.lines[-1]["rank"]): _state(p, limit) for p in processes if p.name not in answers}
    known = {int(answer["rank"]) for answer in found} | silent.keys()
    ranks = int(processes[-1].lines[-1]["ranks"]) if processes else 0
    # With many ranks only some have a file.
    if len(processes) == ranks or ranks <= len(known):
        silent |= {rank: "it has no file in this record" for rank in range(ranks) if rank not in known}
    return Asked(found, silent, fresh, "" if fresh else run.ending)


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


def _answers(folder: Path, processes: list[Process], since: float) -> dict[str, dict[str, Any]]:
    found = {}
    for process in processes:
        path = folder / PROCESSES / f"{process.name}{WHERE}"
        with contextlib.suppress(OSError, ValueError):  # a process without an answer, or with a damaged one, is silent
            if path.stat().st_mtime >= since and _is_answer(answer := read_note(path)):
                found[process.name] = answer
    return found


def _is_answer(found: Any) -> bool:
    """Return True if the content of a file is what `StackReporter.answer` writes."""
    if not _has(found, _ANSWER) or not all(isinstance(line, str) for line in found["stack"]):
        return False
    waits = [] if found["call"] is None else [found["call"]]
    calls = found["recent"] + waits
    if not all(_has(call, _CALL) for call in calls) or not all(_has(call, _WAIT) for call in waits):
        return False
    return all(isinstance(rank, int) for call in calls for rank in call["members"])


def _has(found: Any, fields: dict[str, Any]) -> bool:
    return isinstance(found, dict) and all(isinstance(found.get(name), kind) for name, kind in fields.items())


def _state(process: Process, limit: float) -> str:
    """The state of a process that does not answer, as far as this machine can see it."""
    host, _, number = process.name.rpartition("-")
    which = f"process {number} on {host}"
    if state := state_here(process.name):
        return f"{which} {state}"
    return f"{which} gave no answer in {limit:g} s: its host is lost, or it is blocked and holds Python's lock"


# Who waits for whom.

_LEAST_S = 1.0  # shorter waits are normal


def diagnose(answers: Sequence[Mapping[str, Any]], silent: Mapping[int, str]) -> list[Finding]:
    """Diagnose a run from the answers of its ranks.

    `answers` are from `mpishard.record.stacks.StackReporter.answer`, at most one per rank; `silent` has the
    ranks that do not answer, and the state of their process.  Kinds: ``"waits"``, ``"missing"`` (runs code while others
    wait), ``"silent"``, ``"mismatch"`` (members of one communicator wait in different calls), ``"cycle"``, or
    ``"runs"`` if no rank waits for long.
    """
    by_rank = {int(answer["rank"]): answer for answer in answers}
    waiting = {rank: a["call"] for rank, a in by_rank.items() if a["call"] and a["call"]["seconds"] >= _LEAST_S}
    if not waiting:
        running = [Finding((rank,), "runs", _place(answer)) for rank, answer in sorted(by_rank.items())]
        return [*running, *_silent(silent, set())]
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for rank, call in sorted(waiting.items()):
        groups[_key(rank, call)].append(rank)
    findings = [_waits(ranks, waiting) for ranks in groups.values()]
    wanted = {rank: _awaited(rank, waiting, groups) for rank in waiting}
    awaited = set().union(*wanted.values())
    findings += _mismatches(waiting, wanted)
    causes = sorted(awaited - waiting.keys())
    findings += [
        Finding((rank,), "missing", f"is waited for, and {_place(by_rank[rank])}") for rank in causes if rank in by_rank
    ]
    findings += _silent(silent, awaited)
    if not causes and not any(finding.kind == "mismatch" for finding in findings):
        cycle = shortest_cycle(wanted)
        if cycle:
            chain = ", ".join(f"{rank} for {other}" for rank, other in zip(cycle, [*cycle[1:], cycle[0]], strict=True))
            findings.append(Finding(tuple(cycle), "cycle", f"wait for each other in a circle ({chain}): a deadlock"))
    return findings


def _key(rank: int, call: Mapping[str, Any]) -> tuple[Any, ...]:
    """A key that is the same for all ranks that wait in the same call."""
    alone = (rank,) if call["op"] in ("send", "recv") else ()
    return call["axis"], tuple(call["members"]), call["op"], call["sequence"], *alone


def _awaited(rank: int, waiting: Mapping[int, Any], groups: Mapping[Any, list[int]]) -> set[int]:
    """The members of the call in which `rank` waits that are not in that call."""
    call = waiting[rank]
    there = set(groups[_key(rank, call)])
    return {member for member in call["members"] if member not in there}


def _waits(ranks: list[int], waiting: Mapping[int, Any]) -> Finding:
    call = waiting[ranks[0]]
    longest = max(waiting[rank]["seconds"] for rank in ranks)
    sites = {waiting[rank]["site"] for rank in ranks}
    others = "" if len(sites) == 1 else f" (others at {', '.join(sorted(sites - {call['site']}))})"
    missing = sorted(set(call["members"]) - set(ranks))
    verb = "wait" if len(ranks) > 1 else "waits"
    without = f", without {_ranks(missing)}" if missing else ", all have arrived"
    return Finding(tuple(ranks), "waits", f"{verb} {longest:.0f} s in {_call(call)}{others}{without}")


def _mismatches(waiting: Mapping[int, Any], wanted: Mapping[int, set[int]]) -> list[Finding]:
    """Members of a communicator that wait in different calls on it, since their scripts took different paths."""
    found: dict[tuple[Any, ...], set[int]] = defaultdict(set)
    for rank, others in wanted.items():
        call = waiting[rank]
        for other in others & waiting.keys():
            there = waiting[other]
            if (there["axis"], there["members"]) == (call["axis"], call["members"]) and call["op"] not in (
                "send",
                "recv",
            ):
                found[call["axis"], tuple(call["members"])] |= {rank, other}
    findings = []
    for (axis, _), ranks in found.items():
        calls = "; ".join(f"rank {rank} in {_call(waiting[rank])}" for rank in sorted(ranks))
        text = f"are in different calls of the {axis} axis, which can never meet: {calls}"
        findings.append(Finding(tuple(sorted(ranks)), "mismatch", text))
    return findings


def _silent(silent: Mapping[int, str], awaited: Any) -> list[Finding]:
    return [
        Finding((rank,), "silent", f"{'is waited for, and ' if rank in awaited else ''}does not answer: {what}")
        for rank, what in sorted(silent.items())
    ]


def _place(answer: Mapping[str, Any]) -> str:
    stack = answer["stack"]
    last = f"; its last collective was {_call(answer['recent'][-1])}" if answer["recent"] else ""
    return f"runs {' < '.join(stack[:3]) or 'unknown code'} in step {answer['step']}{last}"


def _call(call: Mapping[str, Any]) -> str:
    label = f" [{call['label']}]" if call["label"] else ""
    what = f"{call['axis']}.{call['op']} #{call['sequence']} of {call['elements']} {call['dtype']}{label}"
    return f"{what} called at {call['site']}" if call["site"] else what


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
