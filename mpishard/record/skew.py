"""Stragglers: ranks that need longer than others for the same work, step after step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpishard.record.reading import Process

STEPS = 20  # number of last steps that count
_LEAST = 8  # fewer steps prove nothing
_FACTOR = 1.3  # times the median of the ranks with the same work, above which a rank is slow
_OFTEN = 0.8  # of the steps; on a shared machine any rank is slow now and then
_LEAST_S = 1e-3  # smaller differences come from clock and scheduler


@dataclass(frozen=True)
class Straggler:
    """A process that was slow in most of the last steps: `slower` times the others' median, in seconds per step."""

    process: Process
    rank: int
    busy: float
    median: float

    @property
    def slower(self) -> float:
        return self.busy / self.median if self.median > 0 else float("inf")

    @property
    def host(self) -> str:
        return self.process.name.rpartition("-")[0]

    def __str__(self) -> str:
        return (
            f"rank {self.rank} on {self.host} computes {self.busy * 1e3:.3g} ms a step, "
            f"{self.slower:.2g} times the median of ranks with the same work"
        )


def stragglers(processes: Sequence[Process]) -> list[Straggler]:
    """The processes that were slow in most of the last steps, the slowest first.

    Time in collectives does not count, since there all wait for the slowest rank.  Pipeline stages have different work,
    so each rank is compared with the others of its stage.
    """
    groups: dict[int, list[Process]] = defaultdict(list)
    last = max((_end(process) for process in processes), default=0)
    for process in processes:
        if _end(process) > last - STEPS:
            groups[process.lines[-1].get("pipeline", 0)].append(process)
    found = [straggler for group in groups.values() if len(group) > 1 for straggler in _slow(group)]
    return sorted(found, key=lambda straggler: -straggler.slower)


def _end(process: Process) -> int:
    line = process.lines[-1]
    return int(line["step"]) + len(line["busy"])


def _slow(group: Sequence[Process]) -> list[Straggler]:
    by_step = [dict(zip(*map(np.ndarray.tolist, process.by_step("busy")), strict=True)) for process in group]
    steps = sorted(set.intersection(*(set(known) for known in by_step)))[-STEPS:]
    if len(steps) < _LEAST:
        return []
    busy = np.array([[known[step] for step in steps] for known in by_step])
    found = []
    for number, process in enumerate(group):
        others = np.median(np.delete(busy, number, axis=0), axis=0)
        slow = (busy[number] > _FACTOR * others) & (busy[number] - others > _LEAST_S)
        if slow.mean() >= _OFTEN:
            rank = int(process.lines[-1]["rank"])
            found.append(Straggler(process, rank, float(np.median(busy[number])), float(np.median(others))))
    return found
