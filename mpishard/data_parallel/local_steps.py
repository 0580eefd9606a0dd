"""The steps of Local SGD that workers take by themselves, and when their parameters are averaged."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from mpishard.comm.axis import Axis
from mpishard.data_parallel.averages import Averages


@dataclass
class AveragingSchedule:
    """When the parts of a model are averaged: see `LocalSGDOptimizer` for the numbers."""

    sync_every: int
    parts: int
    delay: int

    def due(self, now: int) -> list[int]:
        """The parts whose average starts after step `now`."""
        parts, every = self.parts, self.sync_every
        return [part for part in range(parts) if (now + part * every // parts) % every == 0]

    @property
    def facts(self) -> dict[str, int]:
        """The numbers by name."""
        return {"sync_every": self.sync_every, "parts": self.parts, "delay": self.delay}


class LocalSteps:
    """The steps that workers take by themselves since all were in one state, and the averages that are due.

    Methods are collective over the data axis unless their docstrings say otherwise.

    Parameters
    ----------
    axis : Axis
        The data axis.
    schedule : AveragingSchedule
    averages : Averages
    staleness : int
        That of the average before these steps.

    Attributes
    ----------
    staleness : int
        Steps between the start of the last average and its use.
    """

    def __init__(self, axis: Axis, schedule: AveragingSchedule, averages: Averages, staleness: int = 0) -> None:
        self.staleness = staleness
        self._axis = axis
        self._schedule = schedule
        self._averages = averages
        self._taken = 0
        self._problem: Exception | None = None  # of this worker; all ranks raise at the next average

    def restart(self) -> None:
        """Count from here, since all workers are in one state.  Not collective."""
        self._taken = 0
        self._problem = None

    @property
    def next_starts_and_finishes(self) -> bool:
        """Whether the next step both starts and finishes an average.  Not collective."""
        return self._schedule.delay == 0 and bool(self._schedule.due(self._taken + 1))

    @property
    def next_finishes(self) -> bool:
        """Whether the next step finishes an average, for which it waits.  Not collective."""
        return self.next_starts_and_finishes or self._averages.ends(self._taken + 1 - self._schedule.delay)

    def begin(self) -> None:
        """Begin a step: set the anchor before the first one.  Not collective."""
        if self._taken == 0:
            self._averages.begin()

    def note(self, problem: Exception) -> None:
        """Keep this worker's error until the next average, unless there is one already.  Not collective."""
        self._problem = self._problem or problem

    def end(self) -> None:
        """Count a step, and average the parts that are due."""
        self._taken += 1
        self._averages.progress()
        self._average(self._schedule.due(self._taken), self._taken - self._schedule.delay)

    def average_all(self) -> bool:
        """Finish all averages, and average the parts in which workers still differ; False if no step was taken."""
        if self._taken:
            lacking = [part for part in range(self._schedule.parts) if self._averages.lacks(part, self._taken)]
            self._average(lacking, self._taken)
        return self._taken > 0

    def _average(self, due: Collection[int], latest: int) -> None:
        """Finish averages that started after step `latest` or before; start those of `due`.

        Averages that are due as soon as they start finish here too.
        """
        now, averages = self._taken, self._averages
        found = [averages.take_in(now, latest)]
        for part in due:
            averages.start(part, now, self._problem)
            self._problem = None
        found.append(averages.take_in(now, latest))
        for staleness, _, _ in found:
            if staleness is not None:
                self.staleness = staleness
        if any(trouble for _, trouble, _ in found):
            self._axis.raise_together(found[0][2] or found[1][2])
