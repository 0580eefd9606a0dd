"""Reads the record of a run again and again while it grows, each line once."""

from __future__ import annotations

import os
import time
from collections import deque
from pathlib import Path
from typing import Any

from mpishard.record.lines import read_lines
from mpishard.record.reading import (
    ENDS,
    LOGGED,
    METRICS,
    STARTS,
    Process,
    began_after,
    own_lines,
    own_metrics,
    process_files,
    series_of,
)
from mpishard.record.skew import STEPS, Straggler, stragglers

GONE, DEAD, STOPPED = "is gone", "is dead", "is stopped (SIGCONT lets it go on)"
_METRICS = 200  # lines kept
# Why a run stops, as `OptimizationResult.stop_reason` has it, in words.
_REASONS = {
    "signal": "stopped by a signal, such as Ctrl-C,",
    "callback": "stopped by its callback",
    "seconds": "its time was over",
    "tolerance": "the gradient was within the tolerance",
    "closed": "its script closed the record",
}


class Follower:
    """The latest of a run.

    Parameters
    ----------
    folder : path

    Attributes
    ----------
    start : dict
        The last start; empty before there is one.
    number : int
        Which start that is, from 1.
    metrics : deque of dict
        The last lines of metrics, by step; those of starts before are there as far as the last one goes on from them.
    logged : dict
        By name the last step and value that `RunRecord.log` was given.
    processes : list of Process
        Those that have written since the last start and take part still, by rank, with their last lines.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder: Path = Path(folder)
        self.start: dict[str, Any] = {}
        self.number: int = 0
        self.metrics: deque[dict[str, Any]] = deque(maxlen=_METRICS)
        self._logged: dict[str, dict[str, Any]] = {}
        self._end: dict[str, Any] = {}
        self._places: dict[Path, int] = {}
        self._lines: dict[str, deque[dict[str, Any]]] = {}

    def update(self) -> None:
        """Read what has come since."""
        # The end first: once it is there, so is everything before it.
        for end in own_metrics(self._new(self.folder / ENDS)):
            self._end = end
        for start in self._new(self.folder / STARTS):
            self.start = start
            self.number += 1
        for line in own_metrics(self._new(self.folder / METRICS)):
            # A start from a checkpoint takes steps again.
            while self.metrics and self.metrics[-1]["step"] >= line["step"]:
                self.metrics.pop()
            self.metrics.append(line)
        while self.metrics and self._is_past(self.metrics[-1]):
            self.metrics.pop()
        for line in own_metrics(self._new(self.folder / LOGGED)):
            self._logged |= dict.fromkeys(series_of(line), line)
        for file in process_files(self.folder):
            self._lines.setdefault(file.stem, deque(maxlen=STEPS)).extend(own_lines(self._new(file)))

    def _new(self, path: Path) -> list[dict[str, Any]]:
        lines, self._places[path] = read_lines(path, self._places.get(path, 0))
        return lines

    def _is_past(self, line: dict[str, Any]) -> bool:
        """Whether it is of a step that a start before has taken and the last one begins before."""
        began = began_after(self.start)
        return began is not None and line.get("start", self.number) < self.number and line["step"] > began

    @property
    def logged(self) -> dict[str, tuple[int, float | None]]:
        return {name: (line["step"], line[name]) for name, line in self._logged.items() if not self._is_past(line)}

    @property
    def own_metrics(self) -> list[dict[str, Any]]:
        """Of `metrics` the lines of the last start."""
        return [line for line in self.metrics if line.get("start", self.number) == self.number]

    @property
    def processes(self) -> list[Process]:
        since = self.start.get("time", 0)
        found = [Process(name, list(lines)) for name, lines in self._lines.items() if lines]
        last = sorted((process for process in found if _written(process) >= since), key=_written)
        # Where a run has healed or changed its size, some have left: another process has their rank, or none has.
        by_rank = {int(process.lines[-1]["rank"]): process for process in last}
        ranks = last[-1].lines[-1]["ranks"] if last else 0
        return [process for rank, process in sorted(by_rank.items()) if rank < ranks]

    @property
    def stragglers(self) -> list[Straggler]:
        return stragglers(self.processes)

    def silent(self, process: Process) -> float:
        """Seconds since a process has written, by the clock of this machine."""
        return max(0.0, time.time() - _written(process))

    @property
    def ending(self) -> str:
        """How the run has ended, in words; empty while it goes on, and if that cannot be seen from here."""
        last, steps = self.last_step, self.steps
        place = f"step {last}{f' of {steps}' if steps and last <= steps else ''}"
        if self.ended_in_order:
            way_on = self._end.get("way_on")
            return f"{self._reason(place)}{f'; {way_on}' if way_on else ''}"
        processes = self.processes
        if not all(state_here(process.name) in (GONE, DEAD) for process in processes):
            return ""
        if steps and last >= steps:
            return f"all of its {steps} steps are taken"
        return f"none of its processes is left, and {place} was the last" if processes else ""

    @property
    def ended_in_order(self) -> bool:
        """Whether the run itself has noted its end."""
        return self._end.get("start") == self.number > 0 and self._end["step"] >= self.last_step

    def _reason(self, place: str) -> str:
        """Why the run has ended in order, as it has noted."""
        reason, steps = str(self._end.get("reason", "")), self.steps
        if reason == "steps":
            if self.own_metrics or self.last_step < (steps or 0):
                return f"all of its {steps} steps are taken"
            asked = f", and {steps} were asked for" if steps != self.last_step else ""
            return f"nothing was left to do: {self.last_step} steps had been taken before{asked}"
        return f"{_REASONS.get(reason, reason)} after {place}"

    @property
    def steps(self) -> int | None:
        """The step that is to be the last; None if that is not known."""
        steps = self.start.get("problem", {}).get("steps")
        return steps + int(self.start.get("steps_before", 0)) if steps else None

    @property
    def last_step(self) -> int:
        """The last step that ended; 0 before there is one."""
        return int(self.metrics[-1]["step"] if self.metrics else began_after(self.start) or 0)


def _written(process: Process) -> float:
    """When it has written last."""
    return float(process.lines[-1]["time"])


def state_here(name: str) -> str:
    """What is wrong with a process, by the name of its file: `GONE`, `DEAD` or `STOPPED`.

    Empty if nothing is, and for those of other hosts.
    """
    host, _, number = name.rpartition("-")
    if host != os.uname().nodename:
        return ""
    try:
        state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return GONE
    return STOPPED if state in "Tt" else DEAD if state in "ZX" else ""
