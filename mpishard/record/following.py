"""Reads the record of a run again and again while it grows, each line once."""

from __future__ import annotations

import os
import time
from collections import deque
from pathlib import Path
from typing import Any

from mpishard.record.lines import read_lines
from mpishard.record.reading import LOGGED, METRICS, STARTS, Process, own_lines, own_metrics, process_files
from mpishard.record.skew import STEPS, Straggler, stragglers

GONE, DEAD, STOPPED = "is gone", "is dead", "is stopped (SIGCONT lets it go on)"
_METRICS = 200  # lines kept


class Follower:
    """The latest of a run.

    Parameters
    ----------
    folder : path

    Attributes
    ----------
    start : dict
        The last start; empty before there is one.
    metrics : deque of dict
        The last lines of metrics.
    logged : dict
        By name the last step and value that `RunRecord.log` was given.
    processes : list of Process
        Those that have written since the last start, by rank, with their last lines.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder: Path = Path(folder)
        self.start: dict[str, Any] = {}
        self.metrics: deque[dict[str, Any]] = deque(maxlen=_METRICS)
        self.logged: dict[str, tuple[int, float | None]] = {}
        self._places: dict[Path, int] = {}
        self._lines: dict[str, deque[dict[str, Any]]] = {}

    def update(self) -> None:
        """Read what has come since."""
        for start in self._new(self.folder / STARTS):
            self.start = start
        for line in own_metrics(self._new(self.folder / METRICS)):
            # A start from a checkpoint takes steps again.
            while self.metrics and self.metrics[-1]["step"] >= line["step"]:
                self.metrics.pop()
            self.metrics.append(line)
        for line in own_metrics(self._new(self.folder / LOGGED)):
            self.logged |= {name: (line["step"], value) for name, value in line.items() if name not in ("step", "time")}
        for file in process_files(self.folder):
            self._lines.setdefault(file.stem, deque(maxlen=STEPS)).extend(own_lines(self._new(file)))

    def _new(self, path: Path) -> list[dict[str, Any]]:
        lines, self._places[path] = read_lines(path, self._places.get(path, 0))
        return lines

    @property
    def processes(self) -> list[Process]:
        since = self.start.get("time", 0)
        found = [Process(name, list(lines)) for name, lines in self._lines.items() if lines]
        found = [process for process in found if process.lines[-1]["time"] >= since]
        return sorted(found, key=lambda process: process.lines[-1]["rank"])

    @property
    def stragglers(self) -> list[Straggler]:
        return stragglers(self.processes)

    def silent(self, process: Process) -> float:
        """Seconds since a process has written, by the clock of this machine."""
        return max(0.0, time.time() - process.lines[-1]["time"])

    @property
    def ending(self) -> str:
        """How the run has ended, in words; empty while it goes on, and if that cannot be seen from here."""
        last, steps = self.last_step, self.start.get("problem", {}).get("steps")
        if steps and last >= steps:
            return f"all of its {steps} steps are taken"
        processes = self.processes
        if processes and all(state_here(process.name) in (GONE, DEAD) for process in processes):
            return f"none of its processes is left, and step {last} {f'of {steps} ' if steps else ''}was the last"
        return ""

    @property
    def last_step(self) -> int:
        """The last step that ended; 0 before there is one."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0


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
