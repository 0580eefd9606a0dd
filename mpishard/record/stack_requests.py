"""Asks all processes of a run, through its folder, where they are, or for a trace; finds those that do not answer."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpishard.io.atomic_json import read_note, write_note
from mpishard.record.json_lines import read_lines
from mpishard.record.reading import PROCESSES, TRACE, Follower, Process, state_here
from mpishard.record.stack_reporter import REQUEST, TRACE_REQUEST, WHERE

_POLL_S = 0.1
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
    """The answers to a request, by rank; see `mpishard.record.stack_reporter.StackReporter.answer`."""

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
            time.sleep(_POLL_S)
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
        time.sleep(_POLL_S)
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
