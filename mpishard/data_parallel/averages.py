"""Averages of the parameters of workers that take steps by themselves.

The *anchor* holds the parameters of the last average, which were the same on all workers.  Each worker has since taken
its own steps.  The mean of ``anchor - parameters`` over the workers serves as a gradient for the anchor, and an outer
rule moves the anchor along it (Douillard et al., "DiLoCo", 2023, algorithm 1).  Without an outer rule the anchor
becomes the mean of the workers (Stich, "Local SGD converges fast and communicates little", 2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpishard.backend import array as arrays
from mpishard.comm.request import Request
from mpishard.data_parallel.slots import make_slots
from mpishard.data_parallel.strategies import LocalUpdates
from mpishard.optim import SGD, Rule
from mpishard.parameters.bucket_sums import Transfer
from mpishard.parameters.gradient_buckets import Bucket

Array = Any

_MEAN = SGD(lr=1.0)  # a full step along the mean difference from the anchor ends at the mean


@arrays.elementwise
def _lag(out, anchor, own, /, workers):  # type: ignore[no-untyped-def]
    """``out = (anchor - own) / workers``: this worker's term of the mean; the number of workers is that of the start"""
    out = (anchor - own) / workers
    return out


@arrays.elementwise
def _follow(own, anchor, then, /):  # type: ignore[no-untyped-def]
    """``own += anchor - then``"""
    own = own + (anchor - then)
    return own


@dataclass
class _Round:
    """The pending average of one part.

    It started after step `begun`.  `problem` is this rank's error up to then, and `trouble` the request that finds out
    whether any rank has one.  `sums` has, for each bucket, the difference from the anchor and the request that sums it.
    `then` has the parameters of step `begun`, bucket by bucket.
    """

    part: int
    begun: int
    problem: Exception | None
    trouble: Request
    sums: list[tuple[Bucket, Array, Transfer]]
    then: list[Array]


class Averages:
    """The anchor of one model, and the pending averages of its parts.

    Methods are collective over the data axis unless their docstrings say otherwise.

    Parameters
    ----------
    strategy : LocalUpdates
    outer : Rule or None
        Moves the anchor; without it the anchor becomes the mean.
    parts : int
        Number of parts into which the buckets are divided.
    lasting : bool
        Whether workers may take steps between the start of an average and its end.

    Attributes
    ----------
    slots : dict of 1-D arrays
        State of the outer rule, in flat order; the same on all workers.
    steps : list of int
        Steps that the anchor has taken, for each part.
    """

    def __init__(self, strategy: LocalUpdates, outer: Rule | None, parts: int, lasting: bool) -> None:
        parameters = strategy.parameters
        self._strategy = strategy
        self._rule = rule = outer or _MEAN
        self._lasting = lasting
        self._parts = [strategy.buckets[part::parts] for part in range(parts)]
        self._anchor = arrays.empty(parameters.size, parameters.dtype, like=parameters.like)
        self._rounds: list[_Round] = []
        self._begun = [0] * parts  # for each part, the step after which its last average started
        self.slots: dict[str, Array] = make_slots(rule, parameters.size, parameters.dtype, like=parameters.like)
        self.steps: list[int] = [0] * parts

    @property
    def nbytes(self) -> int:
        """Bytes of the anchor and the slots."""
        return sum(int(array.nbytes) for array in (self._anchor, *self.slots.values()))

    def begin(self) -> None:
        """Set the anchor to the parameters, which are the same on all workers now.  Not collective."""
        self._anchor[...] = self._strategy.parameters.flat
        self._begun = [0] * len(self._parts)

    def lacks(self, part: int, now: int) -> bool:
        """Whether workers still differ in a part after step `now` and all pending averages.  Not collective."""
        return self._begun[part] < now

    def ends(self, latest: int) -> bool:
        """Whether an average is pending that started after step `latest` or before.  Not collective."""
        return any(each.begun <= latest for each in self._rounds)

    def start(self, part: int, now: int, problem: Exception | None) -> None:
        """Start the average of a part, after step `now`.

        Parameters
        ----------
        problem : Exception or None
            This rank's error; all ranks learn of it when the average finishes.
        """
        strategy, flat = self._strategy, self._strategy.parameters.flat
        trouble = np.array([problem is not None], np.int64)
        pending = strategy.axis.start_all_reduce(trouble, op="max", label="control")
        sums, then = [], []
        for bucket in self._parts[part]:
            own = flat[bucket.start : bucket.stop]
            delta = arrays.empty(own.size, own.dtype, like=own)
            _lag(delta, self._anchor[bucket.start : bucket.stop], own, strategy.workers)
            then.append(own.copy() if self._lasting else own)
            sums.append((bucket, delta, strategy.start_average(bucket, delta)))
        self._rounds.append(_Round(part, now, problem, pending, sums, then))
        self._begun[part] = now

    def progress(self) -> None:
        """Let MPI progress the pending averages; it moves data only while it is called.  Not collective."""
        for each in self._rounds:
            for _, _, transfer in each.sums:
                transfer.test()

    def take_in(self, now: int, latest: int) -> tuple[int | None, bool, Exception | None]:
        """Finish the averages that started after step `latest` or before; move the anchor and the workers by them.

        Returns
        -------
        staleness : int or None
            Steps between the start of the last of these averages and `now`; None if there was none.
        trouble : bool
            Whether any worker reported a problem.
        problem : Exception or None
            This rank's own problem.
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
        strategy.finish_averages(finished.sums)
        self.steps[finished.part] += 1
        step = self.steps[finished.part]
        for (bucket, delta, _), then in zip(finished.sums, finished.then, strict=True):
            strategy.keep_bucket(bucket)
            extent = slice(bucket.start, bucket.stop)
            own, anchor = strategy.parameters.flat[extent], self._anchor[extent]
            if not own.size:
                continue
            states = [slot[extent] for slot in self.slots.values()]
            self._rule.update(anchor, delta, states, step)
            if now == finished.begun:
                own[...] = anchor  # the same bits on all workers
            else:
                _follow(own, anchor, then)

    def discard(self) -> None:
        """Wait for the pending averages and drop their results, because other state replaces all of it."""
        for each in self._rounds:
            for pending in (each.trouble, *(transfer for _, _, transfer in each.sums)):
                pending.wait()
        self._rounds.clear()

    def abandon(self) -> None:
        """Drop pending averages, which cannot finish after a rank has died.  Not collective."""
        for each in self._rounds:
            for pending in (each.trouble, *(transfer for _, _, transfer in each.sums)):
                pending.abandon()
        self._rounds.clear()
