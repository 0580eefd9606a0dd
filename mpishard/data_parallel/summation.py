"""How buckets of gradients are summed over the data axis: plainly, in a fixed order, compressed, or by nodes.

A strategy chooses one `Summation` when parameters are bound, and its `GradientReducer` calls that for each bucket:
`start` when the bucket is complete, `finish` when its sum is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpishard.backend.array import accumulate
from mpishard.comm.axis import Axis
from mpishard.comm.collectives import is_faster_in_parts
from mpishard.data_parallel.ownership import BucketShares, OwnSums
from mpishard.parameters.buckets import Bucket, BucketMemory
from mpishard.parameters.reducer import BucketSums, PendingSum, Started
from mpishard.reduction.compressed import CompressedSums
from mpishard.reduction.hierarchical import HierarchicalSums
from mpishard.reduction.ordered import OrderedSums

Array = Any
# This rank's part of the sum of a bucket, given the bucket and the memory of its gradient, of which it may be a view.
PartOf = Callable[[Bucket, Array], Array]


class Summation(BucketSums):
    """One way to sum buckets over the data axis, which uses the sums `inner`."""

    def __init__(
        self, shares: BucketShares, *inner: BucketSums | OrderedSums | CompressedSums | HierarchicalSums
    ) -> None:
        self._shares = shares
        self._axis = shares.axis
        self._inner = inner

    def sum_copies(self, bucket: Bucket, gradient: Array) -> None:
        self._shares.copies.sum(bucket, gradient)

    def reset(self) -> None:
        for each in self._inner:
            each.reset()

    def _gather(self, sums: Sequence[tuple[Bucket, Array]]) -> None:
        """Fill gradients, in which each rank has the sum of its part."""
        gathers = [
            self._axis.start_all_gather(gradient, counts=self._shares.counts[bucket.index], label="gradients")
            for bucket, gradient in sums
        ]
        for gather in gathers:
            gather.wait()


class AllReduce(Summation):
    """Every data rank gets the whole sum, in the gradient buffer.  `blocks`: by blocking calls."""

    def __init__(self, shares: BucketShares, blocks: bool) -> None:
        super().__init__(shares)
        self._blocks = blocks

    def start(self, bucket: Bucket, gradient: Array, earlier: Sequence[Array] = ()) -> PendingSum | None:
        if self._axis.size == 1:
            return None
        if self._blocks:
            self._axis.all_reduce(gradient, label="gradients")
            return None
        if is_faster_in_parts(gradient, self._axis.size):
            own, counts = self._shares.in_place(bucket, gradient), self._shares.counts[bucket.index]
            return self._axis.start_reduce_scatter(gradient, own, counts, label="gradients")
        return self._axis.start_all_reduce(gradient, label="gradients")

    def finish(self, started: Started) -> None:
        super().finish(started)
        scattered = [each for each in started if is_faster_in_parts(each[1], self._axis.size)]
        self._gather([(bucket, gradient) for bucket, gradient, _ in scattered])


class ReduceScatter(Summation):
    """Each data rank gets its part of the sum, at the front of the gradient.  `blocks`: by blocking calls."""

    def __init__(self, shares: BucketShares, blocks: bool) -> None:
        super().__init__(shares)
        self._blocks = blocks

    def start(self, bucket: Bucket, gradient: Array, earlier: Sequence[Array] = ()) -> PendingSum | None:
        if self._axis.size == 1:
            return None
        counts = self._shares.counts[bucket.index]
        if self._blocks:
            self._axis.reduce_scatter(gradient, counts=counts, label="gradients")
            return None
        return self._axis.start_reduce_scatter(gradient, counts=counts, label="gradients")


class FixedOrder(Summation):
    """Sums along the tree of `OrderedSums`, and then the uses of tied tensors.

    With `gathers` every data rank gets the whole sum, else its `part`.
    """

    def __init__(self, shares: BucketShares, sums: OrderedSums, part: PartOf, gathers: bool) -> None:
        super().__init__(shares, sums)
        assert shares.uses is not None
        self._sums = sums
        self._uses = shares.uses
        self._part = part
        self._gathers = gathers

    def start(self, bucket: Bucket, gradient: Array, earlier: Sequence[Array] = ()) -> PendingSum:
        counts, target = self._shares.counts[bucket.index], self._part(bucket, gradient)
        return self._sums.start(bucket, [*earlier, gradient], counts, target)

    def finish(self, started: Started) -> None:
        super().finish(started)
        if self._gathers:
            self._gather([(bucket, gradient) for bucket, gradient, _ in started if not self._waits_for_uses(bucket)])

    def add_uses(self, memory: BucketMemory) -> None:
        self._uses.add(lambda bucket: self._part(bucket, memory.of_bucket(bucket)), self._shares.copies)
        if self._gathers:
            waiting = [bucket for bucket in self._shares.buckets if self._waits_for_uses(bucket)]
            self._gather([(bucket, memory.of_bucket(bucket)) for bucket in waiting])

    def _waits_for_uses(self, bucket: Bucket) -> bool:
        """Return True if the uses of a tied tensor are added in this bucket, or from it, before it is gathered."""
        return bucket.second_use or bucket.index in self._uses.incomplete


class Compressed(Summation):
    """Compressed sums, and `plain` ones in steps that do not compress (`compress_after`).

    With `gathers` every data rank gets the whole sum, else its `part`.
    """

    def __init__(
        self, shares: BucketShares, sums: CompressedSums, plain: BucketSums, part: PartOf, gathers: bool
    ) -> None:
        super().__init__(shares, sums)
        self._sums = sums
        self._plain = plain
        self._part = part
        self._gathers = gathers

    def start(self, bucket: Bucket, gradient: Array, earlier: Sequence[Array] = ()) -> PendingSum | None:
        if not self._sums.in_use:
            return self._plain.start(bucket, gradient)
        return self._sums.start(bucket, gradient, self._part(bucket, gradient))

    def finish(self, started: Started) -> None:
        if not self._sums.in_use:
            self._plain.finish(started)
            return
        super().finish(started)
        if self._gathers:
            for gather in [self._sums.start_gather(bucket, gradient) for bucket, gradient, _ in started]:
                gather.wait()


class Hierarchical(Summation):
    """Sums within each node, then between the nodes, compressed if there is a compressor."""

    def __init__(self, shares: BucketShares, sums: HierarchicalSums) -> None:
        super().__init__(shares, sums)
        self._sums = sums

    def start(self, bucket: Bucket, gradient: Array, earlier: Sequence[Array] = ()) -> PendingSum:
        return self._sums.start(bucket, gradient)

    def finish(self, started: Started) -> None:
        arrived = [(bucket, gradient, transfer.wait()) for bucket, gradient, transfer in started]
        self._sums.finish(arrived)


class Accumulated(Summation):
    """Adds this rank's `part` of each sum to those of earlier micro-batches, in memory of its own (ZeRO-2)."""

    def __init__(self, shares: BucketShares, sums: BucketSums, part: PartOf, own: OwnSums) -> None:
        super().__init__(shares, sums)
        self._sums = sums
        self._part = part
        self._own = own
        self._summed: set[int] = set()

    def start(self, bucket: Bucket, gradient: Array, earlier: Sequence[Array] = ()) -> PendingSum | None:
        started = self._sums.start(bucket, gradient)
        if started is None:
            self._add(bucket, self._part(bucket, gradient))
        return started

    def finish(self, started: Started) -> None:
        for bucket, _, transfer in started:
            self._add(bucket, transfer.wait())

    def reset(self) -> None:
        super().reset()
        self._summed.clear()

    def _add(self, bucket: Bucket, result: Array) -> None:
        own = self._own.of_parameters[bucket.index]
        if bucket.index in self._summed:
            accumulate(own, result)
        else:
            own[...] = result
        self._summed.add(bucket.index)


# Local SGD: a worker sums its gradients alone, and now and then all workers sum differences of parameters.


class WithinWorker(Summation):
    """Sums over the ranks of a worker's node; nothing if the worker is one data rank.

    `average_sums` sums the differences from the anchor over all workers, when the optimizer says so.
    """

    def __init__(self, shares: BucketShares, within: Axis | None, average_sums: Summation) -> None:
        super().__init__(shares, average_sums)
        self.average_sums = average_sums
        self._within = within

    def start(self, bucket: Bucket, gradient: Array, earlier: Sequence[Array] = ()) -> PendingSum | None:
        return None if self._within is None else self._within.start_all_reduce(gradient, label="gradients")


class NonblockingAllReduce(Summation):
    """All-reduces that are always started: an average may take several steps."""

    def start(self, bucket: Bucket, gradient: Array, earlier: Sequence[Array] = ()) -> PendingSum:
        return self._axis.start_all_reduce(gradient, label="gradients")


class HierarchicalAverage(Hierarchical):
    """Sums between nodes of differences that all ranks of a node have."""

    def start(self, bucket: Bucket, gradient: Array, earlier: Sequence[Array] = ()) -> PendingSum:
        return self._sums.start_shared(bucket, gradient)

    def finish(self, started: Started) -> None:
        arrived = [(bucket, delta, transfer.wait()) for bucket, delta, transfer in started]
        self._sums.finish(arrived, shared=True)
