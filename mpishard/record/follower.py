"""The latest state of a run, while it continues and after its end.  Needs no MPI."""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from pathlib import Path
from typing import Any

from mpishard.launch.processes import DEAD, GONE, state_here
from mpishard.record.audits import known_findings, known_promise
from mpishard.record.reading import (
    AUDITS,
    DEATHS,
    ENDS,
    LOGGED,
    METRICS,
    STARTS,
    STEPS,
    VALIDATION,
    Process,
    Straggler,
    began_after,
    damage,
    is_number,
    own_lines,
    own_metrics,
    own_starts,
    process_files,
    read_lines,
    series_of,
    stragglers,
)

_METRICS = 200  # lines kept
# Texts for the values of `OptimizationResult.stop_reason`.
_REASONS = {
    "signal": "stopped by a signal, such as Ctrl-C,",
    "callback": "stopped by its callback",
    "patience": "its validation loss no longer fell",
    "seconds": "its time was over",
    "tolerance": "the gradient was within the tolerance",
    "gradient": "the gradient was within gtol",
    "decrease": "the loss decreased by at most ftol",
    "step": "its steps were within xtol",
    "iterations": "maxiter was reached",
    "evaluations": "maxfun was reached",
    "line search": "its line search found no lower loss",
    "wall": "its steps ended where the loss or the gradient was not finite",
    "unbounded": "the loss fell without limit",
    "range": "the square of the gradient was out of range",
    "not finite": "the loss or the gradient was not finite",
    "rank": "the products of both passes are known",
    "closed": "its script closed the record",
}


class Follower:
    """The latest state of a run, read from the files in the record's folder by any process.

    `start` is the last start's line, empty before there is one, and `number` its number, from 1.  `metrics` has the
    last lines of metrics, by step; also those of earlier starts, up to the step at which the last one began.
    `findings` are the lines of all starts about what audits have found.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder: Path = Path(folder)
        self.start: dict[str, Any] = {}
        self.number: int = 0
        self.metrics: deque[dict[str, Any]] = deque(maxlen=_METRICS)
        self.findings: list[dict[str, Any]] = []
        self._logged: dict[str, dict[str, Any]] = {}
        self._validated: list[dict[str, Any]] = []  # the lines with a validation loss
        self._end: dict[str, Any] = {}
        self._places: dict[Path, int] = {}
        self._lines: dict[str, deque[dict[str, Any]]] = {}

    def update(self) -> None:
        """Read the lines written since the last call."""
        # The end first: once it is written, so is everything before it.
        for end in own_metrics(self._new(self.folder / ENDS)):
            self._end = end
        for start in own_starts(self._new(self.folder / STARTS)):
            self.start = start
            self.number += 1
        for line in own_metrics(self._new(self.folder / METRICS)):
            # A start from a checkpoint repeats steps.
            while self.metrics and self.metrics[-1]["step"] >= line["step"]:
                self.metrics.pop()
            self.metrics.append(line)
        while self.metrics and self._is_past(self.metrics[-1]):
            self.metrics.pop()
        for line in own_metrics(self._new(self.folder / LOGGED)):
            self._logged |= dict.fromkeys(series_of(line), line)
            if VALIDATION in line:
                while self._validated and self._validated[-1]["step"] >= line["step"]:
                    self._validated.pop()
                self._validated.append(line)
        self.findings += known_findings(self._new(self.folder / AUDITS))
        for file in process_files(self.folder):
            self._lines.setdefault(file.stem, deque(maxlen=STEPS)).extend(own_lines(self._new(file)))

    def _new(self, path: Path) -> list[dict[str, Any]]:
        lines, self._places[path] = read_lines(path, self._places.get(path, 0))
        return lines

    def _is_past(self, line: dict[str, Any]) -> bool:
        """Return True if a line of an earlier start is of a step that the last start repeats."""
        began = began_after(self.start)
        return began is not None and line.get("start", self.number) < self.number and line["step"] > began

    @property
    def logged(self) -> dict[str, tuple[int, float | None]]:
        """By name the last step and value given to `RunRecord.log`."""
        return {name: (line["step"], line[name]) for name, line in self._logged.items() if not self._is_past(line)}

    @property
    def validated(self) -> list[tuple[int, float]]:
        """The steps after which the validation set was evaluated, and its losses."""
        found = [line for line in self._validated if not self._is_past(line)]
        return [(line["step"], line[VALIDATION]) for line in found if isinstance(line[VALIDATION], int | float)]

    @property
    def best_validation(self) -> tuple[int, float] | None:
        """The step and the value of the lowest validation loss; None before there is one."""
        return min(self.validated, key=lambda each: each[1], default=None)

    @property
    def audit(self) -> dict[str, Any] | None:
        """What the audit of the last start spends, and when it sees what; None without one."""
        return known_promise(self.start.get("audit"))

    @property
    def audit_damage(self) -> str:
        """What is wrong with the file of `findings`; empty if it is whole."""
        return damage(self.folder / AUDITS)

    @property
    def step_seconds(self) -> float:
        """Median seconds of the last steps since the last start; 0 before any is known."""
        recent = [line["seconds"] for line in self.own_metrics[-STEPS:] if line.get("seconds")]
        return statistics.median(recent) if recent else 0.0

    @property
    def own_metrics(self) -> list[dict[str, Any]]:
        """The lines of `metrics` that belong to the last start."""
        return [line for line in self.metrics if line.get("start", self.number) == self.number]

    @property
    def is_minimization(self) -> bool:
        """True if a method has chosen the last steps: its losses are values of a function."""
        return any("iteration" in line for line in self.own_metrics or self.metrics)

    @property
    def processes(self) -> list[Process]:
        """The processes that have written since the last start and still take part, by rank, with their last lines."""
        since = self.start.get("time", 0)
        found = [Process(name, list(lines)) for name, lines in self._lines.items() if lines]
        last = sorted((process for process in found if _written(process) >= since), key=_written)
        # Of a process that has left the run another one, or none, has the rank now.
        by_rank = {int(process.lines[-1]["rank"]): process for process in last}
        ranks = last[-1].lines[-1]["ranks"] if last else 0
        return [process for rank, process in sorted(by_rank.items()) if rank < ranks]

    @property
    def stragglers(self) -> list[Straggler]:
        """Ranks that take longer over the same work than others."""
        return stragglers(self.processes)

    def silent(self, process: Process) -> float:
        """Seconds since the last line of a process, by the clock of this machine; at least 0."""
        return max(0.0, time.time() - _written(process))

    @property
    def ending(self) -> str:
        """A text that says how the run has ended; empty while it continues, and if this machine cannot tell."""
        last, steps = self.last_step, self.steps
        last_step = f"step {last}{f' of {steps}' if steps and last <= steps else ''}"
        if self.ended_in_order:
            way_on = self._end.get("way_on")
            return f"{self._reason(last_step)}{f'; {way_on}' if way_on else ''}"
        processes = self.processes
        if not all(state_here(process.name) in (GONE, DEAD) for process in processes):
            return ""
        if steps and last >= steps:
            return f"all of its {steps} steps are taken"
        return f"{self._death}none of its processes is left, and {last_step} was the last" if processes else ""

    @property
    def _death(self) -> str:
        """A text for the first death since the last start; empty if none was noted."""
        for line in read_lines(self.folder / DEATHS)[0]:
            known = is_number(line.get("time")) and isinstance(line.get("process"), str) and is_number(line.get("rank"))
            if known and line["time"] >= self.start.get("time", 0):
                return f"rank {line['rank']} ({line['process']}) has died, "
        return ""

    @property
    def ended_in_order(self) -> bool:
        """True if the run itself has noted its end."""
        return self._end.get("start") == self.number > 0 and self._end["step"] >= self.last_step

    def _reason(self, last_step: str) -> str:
        """A text for the reason that the run has noted for its end."""
        reason, steps = str(self._end.get("reason", "")), self.steps
        if reason == "steps":
            if self.own_metrics or self.last_step < (steps or 0):
                return f"all of its {steps} steps are taken"
            asked = f", and {steps} were asked for" if steps != self.last_step else ""
            return f"nothing was left to do: {self.last_step} steps had been taken before{asked}"
        text = _REASONS.get(reason, reason)
        return f"{text.replace('loss', 'value') if self.is_minimization else text} after {last_step}"

    @property
    def steps(self) -> int | None:
        """The planned last step; None if unknown."""
        steps = self.start.get("problem", {}).get("steps")
        return steps + int(self.start.get("steps_before", 0)) if steps else None

    @property
    def last_step(self) -> int:
        """The last finished step; 0 before there is one."""
        return int(self.metrics[-1]["step"] if self.metrics else began_after(self.start) or 0)


def _written(process: Process) -> float:
    """The time of the last line of a process."""
    return float(process.lines[-1].get("time", 0))
