"""The strategies by name: DDP, the stages of ZeRO, and the workers of Local SGD."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mpishard.backend import array as arrays
from mpishard.backend.array import accumulate
from mpishard.comm.capabilities import probe
from mpishard.comm.channel import Request
from mpishard.comm.mesh import ModelParallelGroup
from mpishard.data_parallel.configuration import ShardingConfiguration
from mpishard.data_parallel.owned_ranges import OwnedRanges
from mpishard.data_parallel.strategy import Strategy
from mpishard.layout.run_state import AVERAGE_ERRORS
from mpishard.parameters.buckets import Bucket
from mpishard.parameters.flat import FlatParameters
from mpishard.parameters.reducer import Transfer
from mpishard.parameters.zero3_units import ShardedUnits
from mpishard.reduction.error_feedback import CompressedSums
from mpishard.reduction.hierarchical import HierarchicalSums, node_axes

Array = Any
Range = tuple[int, int]
# Bytes of a bucket from which DDP's sum of it is a reduce-scatter, and an all-gather when all are done, by MPI library.
# The non-blocking all-reduce of Open MPI 5 takes up to twice as long as these two, that of MPICH does not.
IN_PARTS_FROM: dict[str, int] = {"Open MPI": 2**20}


class WholeSums(Strategy):
    """Gradients are all-reduced: every data rank gets all sums, in the gradient buffer."""

    def start_plain(self, bucket: Bucket, gradient: Array) -> Request | None:
        if self.axis.size == 1:
            return None
        if self.blocks:
            self.axis.all_reduce(gradient, label="gradients")
            return None
        if self._is_in_parts(gradient):
            own = self.target(bucket, gradient)
            return self.axis.start_reduce_scatter(gradient, own, self._counts[bucket.index], label="gradients")
        return self.axis.start_all_reduce(gradient, label="gradients")

    def _is_in_parts(self, gradient: Array) -> bool:
        """Whether `start_plain` reduce-scatters a bucket, so that `finish` gathers it, in place of all-reducing it."""
        least = IN_PARTS_FROM.get(probe().library)
        return least is not None and gradient.nbytes >= least and not arrays.is_device(gradient) and self.axis.size > 1

    def target(self, bucket: Bucket, gradient: Array) -> Array:
        pieces = self._counts[bucket.index]
        start = sum(pieces[: self.axis.rank])
        return gradient[start : start + pieces[self.axis.rank]]

    def owned(self, bucket: Bucket) -> Array:
        return self.target(bucket, self.reducer.memory.of_bucket(bucket))

    def finish(self, started: Sequence[tuple[Bucket, Array, Transfer]]) -> None:
        """Wait for the sums of buckets, and write each whole sum into its gradient."""
        super().finish(started)
        gathers = [
            self.axis.start_all_gather(gradient, counts=self._counts[bucket.index], label="gradients")
            for bucket, gradient, _ in started
            if self._is_in_parts(gradient)
        ]
        for gather in gathers:
            gather.wait()


class DataParallel(WholeSums):
    """DDP: every data rank holds all parameters and state; gradients are all-reduced."""

    gathers_gradients = True

    def _make_ownership(self, parameters: FlatParameters, shares: list[Range]) -> OwnedRanges:
        buckets = [(bucket.start, bucket.stop) for bucket in self.buckets]
        return OwnedRanges(parameters, buckets, shares)

    def _make_compressed(self, config: ShardingConfiguration, parameters: FlatParameters) -> CompressedSums | None:
        compressor = config.compressor
        axes = node_axes(self.mesh, config.hierarchical)
        self.hierarchical: HierarchicalSums | None = None
        if axes is None or (compressor is not None and not compressor.by_nodes):
            return super()._make_compressed(config, parameters)
        buckets, scale = self.buckets, parameters.loss_scale
        self.hierarchical = HierarchicalSums(axes, buckets, parameters.like, compressor, scale)
        return self.hierarchical.compressed

    @property
    def error_ranges(self) -> list[Range]:
        return self.ownership.counted if self.hierarchical is None else self.hierarchical.owned

    def start(self, bucket: Bucket, gradient: Array, earlier: Sequence[Array] = ()) -> Transfer | None:
        if self.hierarchical is not None:
            return self.hierarchical.start(bucket, gradient)
        return super().start(bucket, gradient, earlier)

    @property
    def sums_are_everywhere(self) -> bool:
        return self.mesh.size == self.axis.size and self.compressed is None and not self.workers_differ

    def finish(self, started: Sequence[tuple[Bucket, Array, Transfer]]) -> None:
        """Wait for the sums of buckets, and write each whole sum into its gradient."""
        gathers_ordered = self.ordered is not None or (self.compressed is not None and self.compresses)
        if self.hierarchical is None and not gathers_ordered:
            super().finish(started)
            return
        arrived = [(bucket, gradient, transfer.wait()) for bucket, gradient, transfer in started]
        if self.hierarchical is not None:
            self.hierarchical.finish(arrived, compresses=self.compresses)
        else:
            self._gather([(bucket, gradient) for bucket, gradient, _ in arrived if not self._waits_for_uses(bucket)])

    def add_uses(self) -> None:
        super().add_uses()
        memory = self.reducer.memory
        self._gather([(bucket, memory.of_bucket(bucket)) for bucket in self.buckets if self._waits_for_uses(bucket)])

    def _waits_for_uses(self, bucket: Bucket) -> bool:
        """Return True if the uses of a tied tensor are added in this bucket, or from it, before it is gathered."""
        return self.uses is not None and (bucket.second_use or bucket.index in self.uses.incomplete)

    def _gather(self, sums: Sequence[tuple[Bucket, Array]]) -> None:
        for gather in [self._start_gather(bucket, gradient) for bucket, gradient in sums]:
            gather.wait()

    def _start_gather(self, bucket: Bucket, gradient: Array) -> Transfer:
        pieces = self._counts[bucket.index]
        if self.compressed is not None:
            return self.compressed.start_gather(bucket, gradient)
        return self.axis.start_all_gather(gradient, counts=pieces, label="gradients")

    def gradients(self) -> list[Array]:
        return [self.reducer.memory.of_bucket(bucket) for bucket in self.buckets]

    def publish_parameters(self) -> None:
        """Send nothing: every data rank has updated all parameters."""

    def resync(self, slot: Array) -> None:
        self.axis.broadcast(slot, label="state")
        self.copies.spread_inside(slot)


class ShardedState(Strategy):
    """ZeRO-1: optimizer state is sharded. Gradients are reduce-scattered, updated parameters all-gathered.

    Each data rank owns one share of every bucket; the shares are even. The reduced share arrives at the front of the
    bucket's range in the gradient buffer.
    """

    divides_state = True

    def start_plain(self, bucket: Bucket, gradient: Array) -> Request | None:
        if self.axis.size == 1:
            return None
        counts = self._counts[bucket.index]
        if self.blocks:
            self.axis.reduce_scatter(gradient, counts=counts, label="gradients")
            return None
        return self.axis.start_reduce_scatter(gradient, counts=counts, label="gradients")

    def target(self, bucket: Bucket, gradient: Array) -> Array:
        return gradient[: self._counts[bucket.index][self.axis.rank]]

    def owned(self, bucket: Bucket) -> Array:
        return self.target(bucket, self.reducer.memory.of_bucket(bucket))

    def gradients(self) -> list[Array]:
        return [
            self.reducer.memory.of_bucket(bucket)[: pieces[self.axis.rank]]
            for bucket, pieces in zip(self.buckets, self._counts, strict=False)  # those of second uses follow
        ]

    def publish_parameters(self) -> None:
        self._gather(self.parameters.flat, "parameters")

    def resync(self, slot: Array) -> None:
        if self.copies.inside:
            flat = self.gather(slot, "state")
            self.copies.spread_inside(flat)
            for (start, stop), view in zip(self.ownership.own, self.ownership.state_views(slot), strict=True):
                view[...] = flat[start:stop]

    def gather(self, slot: Array, label: str) -> Array:
        """A state array of all data ranks as a new flat array like the parameters.  Collective over the data axis."""
        flat = arrays.empty(self.parameters.size, slot.dtype, like=slot)
        for (start, stop), view in zip(self.ownership.own, self.ownership.state_views(slot), strict=True):
            flat[start:stop] = view
        self._gather(flat, label)
        return flat

    def _gather(self, flat: Array, label: str) -> None:
        """All-gather a flat array in which each data rank has filled its own ranges."""
        if self.axis.size == 1:
            return
        if self.blocks:
            self.axis.all_gather(flat, counts=self._counts[0], label=label)
            return
        pending = [
            self.axis.start_all_gather(flat[bucket.start : bucket.stop], counts=pieces, label=label)
            for bucket, pieces in zip(self.buckets, self._counts, strict=False)
        ]
        for gathered in pending:
            gathered.wait()


class ShardedStateOnly(WholeSums, ShardedState):
    """ZeRO-1 whose gradients are all-reduced, for code that reads or changes them between backward pass and step.

    A step sends half as many bytes again as with `ShardedState`.  Neither compressed nor in a fixed order.
    """

    @property
    def sums_are_everywhere(self) -> bool:
        return self.mesh.size == self.axis.size

    def gradients(self) -> list[Array]:
        return [self.owned(bucket) for bucket in self.buckets]


class ShardedGradients(ShardedState):
    """ZeRO-2: gradients are sharded too.  A bucket is reduced to its owners, and its memory is then reused."""

    gradients_on_demand = True

    def __init__(self, config: ShardingConfiguration, parameters: FlatParameters) -> None:
        super().__init__(config, parameters)
        self._shard = arrays.zeros(self.ownership.size, parameters.dtype, like=parameters.like)
        self._summed: set[int] = set()
        # By bucket of a second use: this rank's part of its sum.
        self._second: dict[int, Array] = {}
        for bucket in () if self.uses is None else self.uses.buckets:
            size = self._counts[bucket.index][self.axis.rank]
            self._second[bucket.index] = arrays.zeros(size, parameters.dtype, like=parameters.like)

    def start_plain(self, bucket: Bucket, gradient: Array) -> Request | None:
        started = super().start_plain(bucket, gradient)
        if started is None:
            self._add(bucket, self.target(bucket, gradient))
        return started

    def target(self, bucket: Bucket, gradient: Array) -> Array:
        return super().target(bucket, gradient) if self.ordered is None else self.owned(bucket)

    def owned(self, bucket: Bucket) -> Array:
        return self._second[bucket.index] if bucket.second_use else self.gradients()[bucket.index]

    def finish(self, started: Sequence[tuple[Bucket, Array, Transfer]]) -> None:
        """Wait for the sums of buckets, and add this rank's part of each to those of earlier micro-batches."""
        for bucket, _, transfer in started:
            result = transfer.wait()
            if self.ordered is None:
                self._add(bucket, result)

    def _add(self, bucket: Bucket, result: Array) -> None:
        shard = self.gradients()[bucket.index]
        if bucket.index in self._summed:
            accumulate(shard, result)
        else:
            shard[...] = result
        self._summed.add(bucket.index)

    def reset(self) -> None:
        super().reset()
        self._summed.clear()

    def gradients(self) -> list[Array]:
        return self.ownership.state_views(self._shard)

    @property
    def gradient_bytes(self) -> int:
        return int(self._shard.nbytes + sum(part.nbytes for part in self._second.values())) + super().gradient_bytes


class ShardedParameters(ShardedGradients):
    """ZeRO-3: parameters are sharded too, unit by unit, and each unit is a bucket of gradients.

    A model gathers a unit before each use, in the forward and again in the backward pass, and frees it afterwards. The
    update therefore sends no parameters.
    """

    shards_parameters = True

    def __init__(self, config: ShardingConfiguration, parameters: FlatParameters) -> None:
        # With the largest possible group size a bucket is a whole unit, so that bucket and unit have the same owners.
        whole = max(1, sum(spec.size for spec in parameters.specs))
        super().__init__(replace(config, minimum_parameter_group_size=whole), parameters)
        assert self.sharded.own == self.ownership.own

    @classmethod
    def fitting(cls, parameters: FlatParameters) -> type[Strategy]:
        """ZeRO-2 for a caller's flat array, which must stay whole; ZeRO-2 gathers it after the update."""
        return ShardedGradients if parameters.lent else cls

    def attach(self, parameters: FlatParameters) -> None:
        super().attach(parameters)
        parameters.shard(self.axis)

    def abandon(self) -> None:
        super().abandon()
        self.sharded.abandon()

    @property
    def sharded(self) -> ShardedUnits:
        assert self.parameters.sharded is not None
        return self.parameters.sharded

    def values(self) -> list[Array]:
        return self.sharded.shares

    def publish_parameters(self) -> None:
        """Send nothing, and free the units still gathered, which hold values from before the update."""
        self.sharded.drop()


class LocalUpdates(DataParallel):
    """Every data coordinate is one of `workers` workers, which updates its copy of the model with its gradient.

    With sums by nodes, the data ranks of a node form one worker and sum their gradients every step. Sums over all
    workers are those of averages, of differences from the anchor.
    """

    errors_kind = AVERAGE_ERRORS
    workers_differ = True

    def __init__(self, config: ShardingConfiguration, parameters: FlatParameters) -> None:
        super().__init__(config, parameters)
        # Each rank of a node has the worker's whole gradient, so that the ranks of a node need no agreement.
        self.team = ModelParallelGroup(self.mesh)
        self._within = None if self.hierarchical is None else self.hierarchical.within
        self.workers: int = self.axis.size // (1 if self._within is None else self._within.size)

    def _make_ownership(self, parameters: FlatParameters, shares: list[Range]) -> OwnedRanges:
        buckets = [(bucket.start, bucket.stop) for bucket in self.buckets]
        return OwnedRanges(parameters, buckets, shares, in_team=buckets)  # a worker counts all of its gradient

    def start(self, bucket: Bucket, gradient: Array, earlier: Sequence[Array] = ()) -> Transfer | None:
        """Start the sum of a gradient within the worker; None if the worker is one data rank."""
        return None if self._within is None else self._within.start_all_reduce(gradient, label="gradients")

    def finish(self, started: Sequence[tuple[Bucket, Array, Transfer]]) -> None:
        Strategy.finish(self, started)

    def start_plain(self, bucket: Bucket, gradient: Array) -> Request:
        return self.axis.start_all_reduce(gradient, label="gradients")  # an average may take several steps

    def _is_in_parts(self, gradient: Array) -> bool:
        return False

    def start_average(self, bucket: Bucket, delta: Array) -> Transfer:
        """Start the sum of a bucket's difference from the anchor over all workers."""
        if self.hierarchical is not None:
            return self.hierarchical.start_shared(bucket, delta)
        transfer = super().start(bucket, delta)
        assert transfer is not None
        return transfer

    def finish_averages(self, started: Sequence[tuple[Bucket, Array, Transfer]]) -> None:
        """Wait for the sums of `start_average`, and write each into its difference."""
        if self.hierarchical is None:
            super().finish(started)
            return
        arrived = [(bucket, delta, transfer.wait()) for bucket, delta, transfer in started]
        self.hierarchical.finish(arrived, compresses=True, shared=True)

    def error_scale(self, loss_scale: float) -> float:
        """1: the errors are differences of parameters, which contain no loss scale."""
        return 1.0

    def prepare_step(self, compresses: bool, loss_scale: float) -> None:
        """As `Strategy.prepare_step`, but averages are compressed always.

        `compress_after` is for rules that divide by the size of what is compressed.
        """
        super().prepare_step(True, loss_scale)

    def keep_errors(self) -> None:
        """Do nothing: a worker's own step compresses nothing."""

    def keep_bucket(self, bucket: Bucket) -> None:
        """After an average of a bucket, keep what compression left out of it; the next average sends it."""
        if self.hierarchical is not None:
            self.hierarchical.keep_bucket(bucket)
        elif self.compressed is not None:
            self.compressed.keep_bucket(bucket)
