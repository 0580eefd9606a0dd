"""How buckets of gradients are summed over the data axis: plainly, in a fixed order, compressed, or by nodes.

A strategy chooses one `Summation` when parameters are bound, and its `GradientReducer` calls that for each bucket:
`start` when the bucket is complete, `finish` when its sum is needed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from mpishard.backend import array as arrays
from mpishard.backend.array import accumulate
from mpishard.comm.axis import Axis
from mpishard.comm.capabilities import probe
from mpishard.data_parallel.ownership import TensorCopies, TiedWeights
from mpishard.parameters.buckets import Bucket
from mpishard.parameters.reducer import PendingSum
from mpishard.reduction.compressed import CompressedSums
from mpishard.reduction.hierarchical import HierarchicalSums
from mpishard.reduction.ordered import OrderedSums

Array = Any
Started = Sequence[tuple[Bucket, Array, PendingSum]]


class Parts(Protocol):
    """What a `Summation` asks of its strategy: the ranks, and which part of a sum each of them owns."""

    @property
    def axis(self) -> Axis: ...
    @property
    def copies(self) -> TensorCopies: ...
    @property
    def compresses(self) -> bool:
        """True if the gradients of this step are compressed, where there is a compressor."""
        ...

    @property
    def blocks(self) -> bool:
        """True if sums are blocking calls."""
        ...

    @property
    def counts(self) -> Sequence[list[int]]:
        """By bucket and rank, the number of elements that the rank owns."""
        ...

    def shard_output(self, bucket: Bucket, gradient: Array) -> Array:
        """The array that receives this rank's part of an ordered or compressed sum; it may be a view of `gradient`."""
        ...

    def sum_shard(self, bucket: Bucket) -> Array:
        """This rank's part of the sum of a bucket, also of one of a second use."""
        ...

    def gradient_of(self, bucket: Bucket) -> Array:
        """The gradient memory of a bucket."""
        ...


class Resettable(Protocol):
    """What keeps something of a step."""

    def reset(self) -> None: ...


class Summation(ABC):
    """A `BucketSums`: one way to sum buckets over the data axis, which uses the sums `inner`.

    Methods are collective over the mesh, in the same order on all ranks, except `reset`.
    """

    def __init__(self, parts: Parts, *inner: Resettable) -> None:
        self._parts = parts
        self._axis = parts.axis
        self._inner = inner

    def sum_copies(self, bucket: Bucket, gradient: Array) -> None:
        """Sum a bucket's gradient over the copies of its tensors within one data coordinate.

        With `reproducible` no bucket is tied here: the uses of a tied tensor are added by `add_uses`.
        """
        copies = self._parts.copies
        copies.sum(bucket, gradient)

    @abstractmethod
    def start(self, bucket: Bucket, gradient: Array, earlier: Sequence[Array] = ()) -> PendingSum | None:
        """Start the sum of a bucket's gradient; `earlier` are partial sums of other terms. None if it is complete."""

    def finish(self, started: Started) -> None:
        """Wait for the sums of buckets.  Here the results stay in the gradient buffer."""
        for _, _, transfer in started:
            transfer.wait()

    def add_uses(self) -> None:
        """Add the gradients of the uses of tied tensors, after all sums of a reproducible step."""
        raise NotImplementedError(f"{type(self).__name__} is not for reproducible=True")

    def reset(self) -> None:
        """Forget the sums of this step; not collective."""
        for each in self._inner:
            each.reset()


# Bytes of a bucket from which DDP's sum of it is a reduce-scatter, and an all-gather when all are done, by MPI library.
# The non-blocking all-reduce of Open MPI 5 takes up to twice as long as these two, that of MPICH does not.
IN_PARTS_FROM: dict[str, int] = {"Open MPI": 2**20}


class AllReduce(Summation):
    """Every data rank gets the whole sum, in the gradient buffer."""

    def start(self, bucket: Bucket, gradient: Array, earlier: Sequence[Array] = ()) -> PendingSum | None:
        if self._axis.size == 1:
            return None
        if self._parts.blocks:
            self._axis.all_reduce(gradient, label="gradients")
            return None
        if self._is_in_parts(gradient):
            own, pieces = self._parts.shard_output(bucket, gradient), self._parts.counts[bucket.index]
            return self._axis.start_reduce_scatter(gradient, own, pieces, label="gradients")
        return self._axis.start_all_reduce(gradient, label="gradients")

    def finish(self, started: Started) -> None:
        """Wait for the sums of buckets, and write each whole sum into its gradient."""
        super().finish(started)
        gathers = [
            self._axis.start_all_gather(gradient, counts=self._parts.counts[bucket.index], label="gradients")
            for bucket, gradient, _ in started
            if self._is_in_parts(gradient)
        ]
        for gather in gathers:
            gather.wait()

    def _is_in_parts(self, gradient: Array) -> bool:
        """Return True if `start` reduce-scatters a bucket, so that `finish` gathers it, in place of all-reducing it."""
        least = IN_PARTS_FROM.get(probe().library)
        return least is not None and gradient.nbytes >= least and not arrays.is_device(gradient) and self._axis.size > 1


class ReduceScatter(Summation):
    """Each data rank gets its part of the sum, at the front of the gradient."""

    def start(self, bucket: Bucket, gradient: Array, earlier: Sequence[Array] = ()) -> PendingSum | None:
        if self._axis.size == 1:
            return None
        counts = self._parts.counts[bucket.index]
        if self._parts.blocks:
            self._axis.reduce_scatter(gradient, counts=counts, label="gradients")
            return None
        return self._axis.start_reduce_scatter(gradient, counts=counts, label="gradients")


class FixedOrder(Summation):
    """Sums along the tree of `OrderedSums`, and then the `uses` of tied tensors.

    With `gathers` every data rank gets the whole sum, else its part.
    """

    def __init__(
        self, parts: Parts, sums: OrderedSums, uses: TiedWeights, buckets: Sequence[Bucket], gathers: bool
    ) -> None:
        super().__init__(parts, sums)
        self._sums = sums
        self._uses = uses
        self._buckets = buckets
        self._gathers = gathers

    def start(self, bucket: Bucket, gradient: Array, earlier: Sequence[Array] = ()) -> PendingSum:
        counts, target = self._parts.counts[bucket.index], self._parts.shard_output(bucket, gradient)
        return self._sums.start(bucket, [*earlier, gradient], counts, target)

    def finish(self, started: Started) -> None:
        super().finish(started)
        if self._gathers:
            self._gather([(bucket, gradient) for bucket, gradient, _ in started if not self._waits_for_uses(bucket)])

    def add_uses(self) -> None:
        self._uses.add(self._parts.sum_shard, self._parts.copies)
        if self._gathers:
            waiting = [bucket for bucket in self._buckets if self._waits_for_uses(bucket)]
            self._gather([(bucket, self._parts.gradient_of(bucket)) for bucket in waiting])

    def _waits_for_uses(self, bucket: Bucket) -> bool:
        """Return True if the uses of a tied tensor are added in this bucket, or from it, before it is gathered."""
        return bucket.second_use or bucket.index in self._uses.incomplete

    def _gather(self, sums: Sequence[tuple[Bucket, Array]]) -> None:
        gathers = [
            self._axis.start_all_gather(gradient, counts=self._parts.counts[bucket.index], label="gradients")
            for bucket, gradient in sums
        ]
        for gather in gathers:
            gather.wait()


class Compressed(Summation):
    """Compressed sums, and `plain` ones in steps that do not compress (`compress_after`).

    With `gathers` every data rank gets the whole sum, else its part.
    """

    def __init__(self, parts: Parts, sums: CompressedSums, plain: Summation, gathers: bool) -> None:
        super().__init__(parts, sums)
        self._sums = sums
        self._plain = plain
        self._gathers = gathers

    def start(self, bucket: Bucket, gradient: Array, earlier: Sequence[Array] = ()) -> PendingSum | None:
        if not self._parts.compresses:
            return self._plain.start(bucket, gradient)
        return self._sums.start(bucket, gradient, self._parts.shard_output(bucket, gradient))

    def finish(self, started: Started) -> None:
        if not self._parts.compresses:
            self._plain.finish(started)
            return
        super().finish(started)
        if self._gathers:
            for gather in [self._sums.start_gather(bucket, gradient) for bucket, gradient, _ in started]:
                gather.wait()


class Hierarchical(Summation):
    """Sums within each node, then between the nodes, compressed if there is a compressor."""

    def __init__(self, parts: Parts, sums: HierarchicalSums) -> None:
        super().__init__(parts, sums)
        self._sums = sums

    def start(self, bucket: Bucket, gradient: Array, earlier: Sequence[Array] = ()) -> PendingSum:
        return self._sums.start(bucket, gradient)

    def finish(self, started: Started) -> None:
        arrived = [(bucket, gradient, transfer.wait()) for bucket, gradient, transfer in started]
        self._sums.finish(arrived, compresses=self._parts.compresses)


class Accumulated(Summation):
    """Adds this rank's part of each sum to those of earlier micro-batches, in `shards` by bucket (ZeRO-2)."""

    def __init__(self, parts: Parts, sums: Summation, shards: Sequence[Array]) -> None:
        super().__init__(parts, sums)
        self._sums = sums
        self._shards = shards
        self._summed: set[int] = set()

    def start(self, bucket: Bucket, gradient: Array, earlier: Sequence[Array] = ()) -> PendingSum | None:
        started = self._sums.start(bucket, gradient)
        if started is None:
            self._add(bucket, self._parts.shard_output(bucket, gradient))
        return started

    def finish(self, started: Started) -> None:
        for bucket, _, transfer in started:
            self._add(bucket, transfer.wait())

    def reset(self) -> None:
        super().reset()
        self._summed.clear()

    def _add(self, bucket: Bucket, result: Array) -> None:
        shard = self._shards[bucket.index]
        if bucket.index in self._summed:
            accumulate(shard, result)
        else:
            shard[...] = result
        self._summed.add(bucket.index)


# Local SGD: a worker sums its gradients alone, and now and then all workers sum differences of parameters.


class WithinWorker(Summation):
    """Sums over the ranks of a worker's node; nothing if the worker is one data rank.  `averages`: of all workers."""

    def __init__(self, parts: Parts, within: Axis | None, averages: Summation) -> None:
        super().__init__(parts, averages)
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
        self._sums.finish(arrived, compresses=True, shared=True)
