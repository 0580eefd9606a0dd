"""How gradients and optimizer state are spread over the data axis.

A strategy says which ranges of the flat parameters this rank updates (`own`), reduces the gradients (`reduce` a bucket,
then `finish`), and makes the new parameters known to all (`publish`).  Rajbhandari et al., "ZeRO" (2020), section 5,
for the stages.  Every strategy sums; the optimizer divides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from mpishard import array as arrays
from mpishard.collectives import Axis, Pending
from mpishard.gradients import Bucket, GradientBuckets, accumulate
from mpishard.layout import counts, split
from mpishard.parameters import FlatParameters

Array = Any
Range = tuple[int, int]


class Strategy(ABC):
    """One optimizer's way over one axis.  Methods are collective over it, in the same order on all ranks.

    Parameters
    ----------
    axis : Axis
    parameters : FlatParameters
        Gets the gradient buckets of this strategy.
    minimum : int
        Least number of elements in a bucket.
    overlap : bool
        Whether `reduce` returns before the transfer is done.

    Attributes
    ----------
    own : list of (start, stop)
        Ranges of the flat parameters that this rank updates; its state arrays are these ranges end to end.
    counted : list of (start, stop)
        Ranges that this rank contributes to sums over all parameters: every element on one rank.
    """

    gradients_on_demand: ClassVar[bool] = False
    replicated: ClassVar[bool] = False

    def __init__(self, axis: Axis, parameters: FlatParameters, minimum: int, overlap: bool) -> None:
        self.axis = axis
        self.overlap = overlap
        self.buckets = GradientBuckets(
            parameters.specs,
            parameters.flat,
            minimum,
            reduce=self.reduce,
            drain=self.drain,
            on_demand=self.gradients_on_demand,
        )
        self.own: list[Range] = []
        self.counted: list[Range] = []
        self._counts = [counts(split(bucket.size, axis.size)) for bucket in self.buckets.buckets]
        self._pending: list[tuple[Bucket, Pending]] = []

    @property
    def owned(self) -> int:
        """Number of elements that this rank updates."""
        return sum(stop - start for start, stop in self.own)

    def reduce(self, bucket: Bucket, gradient: Array) -> None:
        """Start to sum the gradient of a bucket over the axis."""
        for _, earlier in self._pending:
            earlier.test()  # MPI moves data only while it is called
        self._pending.append((bucket, self.start(bucket, gradient)))
        if not self.overlap:
            self.drain()

    @abstractmethod
    def start(self, bucket: Bucket, gradient: Array) -> Pending:
        """Start the collective that sums the gradient of a bucket."""

    def drain(self) -> None:
        """Wait until no reduction is under way."""
        for bucket, pending in self._pending:
            self.arrived(bucket, pending.wait())
            self.buckets.release(bucket)
        self._pending.clear()

    def arrived(self, bucket: Bucket, result: Array) -> None:
        """Take in what the reduction of a bucket returned; here it may stay in the gradient buffer."""
        return

    @abstractmethod
    def gradients(self) -> list[Array]:
        """The summed gradient of each range in `own`; call after `drain`."""

    @abstractmethod
    def publish(self, flat: Array) -> None:
        """Make each rank's own ranges of `flat` known to all."""

    def owned_views(self, flat: Array) -> list[Array]:
        """The own ranges of a flat array of all parameters."""
        return [flat[start:stop] for start, stop in self.own]

    def state_views(self, slot: Array) -> list[Array]:
        """The parts of a state array that belong to the ranges in `own`."""
        views, place = [], 0
        for start, stop in self.own:
            views.append(slot[place : place + stop - start])
            place += stop - start
        return views

    def gather(self, slot: Array) -> Array:
        """A state array of all parameters, in flat order, from everybody's parts."""
        flat = arrays.empty(sum(bucket.size for bucket in self.buckets.buckets), slot.dtype, like=slot)
        for whole, part in zip(self.owned_views(flat), self.state_views(slot), strict=True):
            whole[...] = part
        self.publish(flat)
        return flat

    @property
    def gradient_bytes(self) -> int:
        """Most bytes of gradient memory that this rank has held."""
        return self.buckets.peak_bytes


class DataParallel(Strategy):
    """DDP: every rank holds everything; gradients are all-reduced."""

    replicated = True

    def __init__(self, axis: Axis, parameters: FlatParameters, minimum: int, overlap: bool) -> None:
        super().__init__(axis, parameters, minimum, overlap)
        for bucket in self.buckets.buckets:
            cuts = split(bucket.size, axis.size)
            self.own.append((bucket.start, bucket.stop))
            self.counted.append((bucket.start + cuts[axis.rank], bucket.start + cuts[axis.rank + 1]))

    def start(self, bucket: Bucket, gradient: Array) -> Pending:
        return self.axis.start_all_reduce(gradient, label="gradients")

    def gradients(self) -> list[Array]:
        return [self.buckets.of_bucket(bucket) for bucket in self.buckets.buckets]

    def publish(self, flat: Array) -> None:
        """Nothing to tell: every rank has updated all of it."""


class ShardedState(Strategy):
    """ZeRO-1: optimizer state is sharded.  Gradients are reduce-scattered, updated parameters all-gathered.

    A rank owns an even part of every bucket, which arrives at the front of the bucket's place in the gradient buffer.
    """

    def __init__(self, axis: Axis, parameters: FlatParameters, minimum: int, overlap: bool) -> None:
        super().__init__(axis, parameters, minimum, overlap)
        for bucket, pieces in zip(self.buckets.buckets, self._counts, strict=True):
            start = bucket.start + sum(pieces[: axis.rank])
            self.own.append((start, start + pieces[axis.rank]))
        self.counted = self.own

    def start(self, bucket: Bucket, gradient: Array) -> Pending:
        return self.axis.start_reduce_scatter(gradient, counts=self._counts[bucket.index], label="gradients")

    def gradients(self) -> list[Array]:
        return [
            self.buckets.of_bucket(bucket)[: pieces[self.axis.rank]]
            for bucket, pieces in zip(self.buckets.buckets, self._counts, strict=True)
        ]

    def publish(self, flat: Array) -> None:
        pending = [
            self.axis.start_all_gather(flat[bucket.start : bucket.stop], counts=pieces, label="parameters")
            for bucket, pieces in zip(self.buckets.buckets, self._counts, strict=True)
        ]
        for gathered in pending:
            gathered.wait()


class ShardedGradients(ShardedState):
    """ZeRO-2: gradients are sharded too.  A bucket is reduced to its owners and its memory is used again."""

    gradients_on_demand = True

    def __init__(self, axis: Axis, parameters: FlatParameters, minimum: int, overlap: bool) -> None:
        super().__init__(axis, parameters, minimum, overlap)
        self._shard = arrays.zeros(self.owned, parameters.dtype, like=parameters.flat)
        self._summed: set[int] = set()
        self.buckets.on_reset.append(self._summed.clear)

    def reduce(self, bucket: Bucket, gradient: Array) -> None:
        # One bucket travels while the next is filled, and no more: their number is what ZeRO-2 saves.
        self.drain()
        super().reduce(bucket, gradient)

    def arrived(self, bucket: Bucket, result: Array) -> None:
        shard = self.gradients()[bucket.index]
        if bucket.index in self._summed:
            accumulate(shard, result)
        else:
            shard[...] = result
        self._summed.add(bucket.index)

    def gradients(self) -> list[Array]:
        return self.state_views(self._shard)

    @property
    def gradient_bytes(self) -> int:
        return int(self._shard.nbytes) + super().gradient_bytes
