"""The averages of Local SGD, the steps that workers take between them, and when they are due."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpishard.backend import array as arrays
from mpishard.comm.axis import Axis
from mpishard.comm.channel import Request
from mpishard.data_parallel.rank_state import slots_of_rule
from mpishard.data_parallel.strategies import Strategy
from mpishard.data_parallel.summation import WithinWorker
from mpishard.optim import SGD, Rule
from mpishard.optim.formulas import follow, lag
from mpishard.parameters.buckets import Bucket
from mpishard.parameters.reducer import PendingSum

Array = Any

_MEAN = SGD(lr=1.0)  # a full step along the mean difference from the anchor ends at the mean


@dataclass
class _Round:
    """The pending average of one part."""

    part: int
    begun: int  # the step after which it started
    problem: Exception | None  # this rank's error up to then
    trouble: Request  # finds out whether any rank has a `problem`
    # For each bucket, the difference from the anchor and the request that sums it.
    sums: list[tuple[Bucket, Array, PendingSum]]
    then: list[Array]  # the parameters of step `begun`, bucket by bucket


class Averages:
    """The anchor of one model, and the pending averages of its parts.

    The anchor holds the parameters of the last average, the same on all workers, which have taken separate steps since.
    The mean of ``anchor - parameters`` over the workers serves as a gradient, along which the outer rule moves the
    anchor (Douillard et al., "DiLoCo", 2023, algorithm 1); without it the anchor becomes the mean of the workers
    (Stich, "Local SGD converges fast and communicates little", 2019).

    Buckets are divided into `parts`, each of which is averaged by itself. With `delayed` workers may take steps between
    the start of an average and its end, which are then kept. `start`, `take_in` and `discard` are collective over the
    data axis.
    """

    def __init__(self, strategy: Strategy, outer: Rule | None, parts: int, delayed: bool) -> None:
        parameters = strategy.parameters
        self._strategy = strategy
        assert isinstance(strategy.summation, WithinWorker)
        self._sums = strategy.summation.average_sums
        self.workers: int = strategy.axis.size // strategy.ranks_of_step
        self._rule = rule = outer or _MEAN
        self._delayed = delayed
        self._parts = [strategy.shares.buckets[part::parts] for part in range(parts)]
        self._anchor = arrays.empty(parameters.size, parameters.dtype, like=parameters.like)
        self._rounds: list[_Round] = []
        self._begun = [0] * parts  # for each part, the step after which its last average started
        # State of the outer rule, in flat order; the same on all workers.
        self.slots: dict[str, Array] = slots_of_rule(rule, parameters.size, parameters.dtype, like=parameters.like)
        self.steps: list[int] = [0] * parts  # steps that the anchor has taken, for each part

    @property
    def nbytes(self) -> int:
        """Bytes of the anchor and the slots."""
        return sum(int(array.nbytes) for array in (self._anchor, *self.slots.values()))

    def begin(self) -> None:
        """Set the anchor to the parameters, which are the same on all workers now."""
        self._anchor[...] = self._strategy.parameters.flat
        self._begun = [0] * len(self._parts)

    def lacks(self, part: int, now: int) -> bool:
        """Return True if workers still differ in a part after step `now` and all pending averages."""
        return self._begun[part] < now

    def ends(self, latest: int) -> bool:
        """Return True if an average is pending that started after step `latest` or before."""
        return any(each.begun <= latest for each in self._rounds)

    def is_pending(self, part: int) -> bool:
        """Return True if the average of a part has started and is not finished."""
        return any(each.part == part for each in self._rounds)

    def start(self, part: int, now: int, problem: Exception | None) -> None:
        """Start the average of a part, after step `now`. Collective over the data axis.

        `problem` is this rank's error; all ranks learn of it when the average finishes.
        """
        strategy, flat = self._strategy, self._strategy.parameters.flat
        trouble = np.array([problem is not None], np.int64)
        pending = strategy.axis.start_all_reduce(trouble, op="max", label="control")
        sums, then = [], []
        for bucket in self._parts[part]:
            own = flat[bucket.start : bucket.stop]
            delta = arrays.empty(own.size, own.dtype, like=own)
            lag(delta, self._anchor[bucket.start : bucket.stop], own, self.workers)
            then.append(own.copy() if self._delayed else own)
            started = self._sums.start(bucket, delta)
            assert started is not None
            sums.append((bucket, delta, started))
        self._rounds.append(_Round(part, now, problem, pending, sums, then))
        self._begun[part] = now

    def progress(self) -> None:
        """Let MPI progress the pending averages; it moves data only while it is called."""
        for each in self._rounds:
            for _, _, transfer in each.sums:
                transfer.test()

    def take_in(self, now: int, latest: int) -> tuple[int | None, bool, Exception | None]:
        """Finish the averages that started after step `latest` or before; move the anchor and the workers by them.

        Returns the steps between the start of the last of these averages and `now` (None without one), whether any
        worker reported a problem, and this rank's problem. Collective over the data axis.
        """
        due = [each for each in self._rounds if each.begun <= latest]
        self._rounds = [each for each in self._rounds if each.begun > latest]
        trouble, problem = False, None
        for each in due:
            trouble |= bool(each.trouble.wait()[0])
            problem = problem or each.problem
            self._finish(each, now)
        return (now - due[-1].begun if due else None), trouble, problem

    def _finish(self, finished: _Round, now: int) -> None:
        strategy = self._strategy
        self._sums.finish(finished.sums)
        # What compression leaves out of an average, the next one sends.
        kept = strategy.compressed if strategy.hierarchical is None else strategy.hierarchical
        self.steps[finished.part] += 1
        step = self.steps[finished.part]
        for (bucket, delta, _), then in zip(finished.sums, finished.then, strict=True):
            if kept is not None:
                kept.keep_bucket(bucket)
            extent = slice(bucket.start, bucket.stop)
            own, anchor = strategy.parameters.flat[extent], self._anchor[extent]
            if not own.size:
                continue
            states = [slot[extent] for slot in self.slots.values()]
            self._rule.update(anchor, delta, states, step)
            if now == finished.begun:
                own[...] = anchor  # the same bits on all workers
            else:
                follow(own, anchor, then)

    def discard(self) -> None:
        """Wait for the pending averages and drop their results, because other state replaces all of it."""
        for each in self._rounds:
            for pending in (each.trouble, *(transfer for _, _, transfer in each.sums)):
                pending.wait()
        self._rounds.clear()

    def abandon(self) -> None:
        """Drop pending averages, which cannot finish after a rank has died."""
        for each in self._rounds:
            for pending in (each.trouble, *(transfer for _, _, transfer in each.sums)):
                pending.abandon()
        self._rounds.clear()


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
    """The steps that workers take independently since all were in one state, and the averages that are due.

    `end` and `average_all` are collective over the data axis.
    """

    def __init__(self, axis: Axis, schedule: AveragingSchedule, averages: Averages, staleness: int = 0) -> None:
        self.staleness = staleness  # steps between the start of the last average and its use
        self._axis = axis
        self._schedule = schedule
        self._averages = averages
        self._taken = 0
        self._problem: Exception | None = None  # of this worker; all ranks raise at the next average

    def restart(self) -> None:
        """Count from here, since all workers are in one state."""
        self._taken = 0
        self._problem = None

    @property
    def next_starts_and_finishes(self) -> bool:
        """Return True if the next step both starts and finishes an average."""
        return self._schedule.delay == 0 and bool(self._schedule.due(self._taken + 1))

    @property
    def next_finishes(self) -> bool:
        """Return True if the next step finishes an average, for which it waits."""
        return self.next_starts_and_finishes or self._averages.ends(self._taken + 1 - self._schedule.delay)

    def begin(self) -> None:
        """Begin a step: set the anchor before the first one."""
        if self._taken == 0:
            self._averages.begin()

    def note(self, problem: Exception) -> None:
        """Keep this worker's error until the next average, unless it has one already."""
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
        """Finish averages that started after step `latest` or before; start those of `due`. Collective.

        Averages that are due as soon as they start finish here too.
        """
        now, averages = self._taken, self._averages
        found = [averages.take_in(now, latest)]
        for part in due:
            if not averages.is_pending(part):  # else `sync_every` was lowered since it started
                averages.start(part, now, self._problem)
                self._problem = None
        found.append(averages.take_in(now, latest))
        for staleness, _, _ in found:
            if staleness is not None:
                self.staleness = staleness
        if any(trouble for _, trouble, _ in found):
            self._axis.raise_together(found[0][2] or found[1][2])
