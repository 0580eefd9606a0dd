"""Strategies: how gradients and optimizer state are spread over a mesh; DDP, stages of ZeRO, Local SGD's workers.

A strategy says which ranges of the flat parameters this rank updates, and how its `GradientReducer` sums gradients over
ranks; it all-gathers the new parameters. The optimizer divides by the number of samples.
The stages are those of Rajbhandari et al., "ZeRO" (2020), section 5.

Order of summation: the micro-batches, in the gradient buffer; the copies of a tensor within one data coordinate
(`TensorCopies`); the data axis. With `reproducible`, the copies on the tensor axis come first; `OrderedSums` then
sums over micro-batches and the data axis along the tree of `mpishard.reduction.tree_sum`; the uses of a tied tensor
come last (`TiedWeights`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from mpishard.backend import array as arrays
from mpishard.comm.axis import Axis, ModelParallelGroup
from mpishard.comm.mesh import Mesh
from mpishard.data_parallel.configuration import ShardingConfiguration
from mpishard.data_parallel.ownership import BucketShares, OwnedRanges, OwnSums, TensorCopies
from mpishard.data_parallel.summation import (
    Accumulated,
    AllReduce,
    Compressed,
    FixedOrder,
    Hierarchical,
    HierarchicalAverage,
    NonblockingAllReduce,
    ReduceScatter,
    Summation,
    WithinWorker,
)
from mpishard.layout.run_state import AVERAGE_ERRORS, GRADIENT_ERRORS
from mpishard.parameters.buckets import Bucket
from mpishard.parameters.flat import FlatParameters
from mpishard.parameters.reducer import GradientReducer
from mpishard.parameters.zero3_units import ShardedUnits
from mpishard.reduction.compressed import CompressedSums, CompressedSumsMaker
from mpishard.reduction.hierarchical import HierarchicalSums, node_axes
from mpishard.reduction.ordered import OrderedSums

Array = Any


Range = tuple[int, int]


class Strategy(ABC):
    """The communication of one optimizer over one mesh.

    Methods are collective over the mesh, in the same order on all ranks. The constructor makes all copies of the
    parameters equal; they use the gradient buckets of this strategy.
    """

    # What a stage does; each subclass sets what it does in another way.
    errors_kind: ClassVar[str] = GRADIENT_ERRORS  # what the rounding errors of compression are errors of
    gradients_on_demand: ClassVar[bool] = False  # a bucket has memory from its first gradient until its sum
    shards_parameters: ClassVar[bool] = False
    gathers_gradients: ClassVar[bool] = False  # all ranks get all sums of gradients, not their part
    workers_differ: ClassVar[bool] = False  # between two averages each worker has its own parameters
    divides_state: ClassVar[bool] = False

    def __init__(self, config: ShardingConfiguration, parameters: FlatParameters) -> None:
        self.mesh: Mesh
        self.mesh = mesh = config.mesh
        self.axis: Axis = mesh.data
        # The ranks that take a step together: every element is in the ``ownership.counted_parts`` of exactly one of
        # them. Each rank of a worker has the worker's whole gradient, so that these ranks need no agreement.
        self.sync_group: Axis | ModelParallelGroup = mesh.world
        if self.workers_differ:
            self.sync_group = ModelParallelGroup(mesh.tensor, mesh.pipeline, mesh.rank)
        self.copies: TensorCopies = TensorCopies(mesh, parameters)
        self.copies.broadcast(parameters)
        self.attach(parameters)
        self.shares: BucketShares = BucketShares(
            config, parameters, self.copies, by_unit=self.shards_parameters, ties_apart=config.reproducible
        )
        # Sums are blocking calls: one bucket in an array of the user leaves nothing to overlap.
        self.blocks: bool = parameters.lent and len(self.shares.buckets) == 1
        # The elements that this rank updates.
        self.ownership: OwnedRanges = self._make_ownership(parameters)
        assert parameters.sharded is None or parameters.sharded.own == self.ownership.own  # a bucket is a unit
        # This rank's part of each sum, where it is not in the memory of the buckets.
        self.own_sums: OwnSums | None = None
        if self.gradients_on_demand:
            self.own_sums = OwnSums(self.shares, self.ownership, parameters.like)
        # Sums over the data axis along a fixed tree over the step's micro-batches; None unless `reproducible`.
        self.ordered: OrderedSums | None = OrderedSums(self.axis, parameters.like) if config.reproducible else None
        self.hierarchical: HierarchicalSums | None = self._make_hierarchical(config, parameters)
        # Sums gradients over the data axis in compressed form; None without compression.
        self.compressed: CompressedSums | None = self._make_compressed(config, parameters)
        self.summation: Summation = self._make_summation()
        self.reducer: GradientReducer = GradientReducer(
            parameters.pieces,
            (*self.shares.buckets, *self.shares.second_uses),
            parameters.like,
            self.summation,
            on_demand=self.gradients_on_demand,
            overlap=config.overlap_communication,
            reproducible=config.reproducible,
            accumulates=not config.auto_sync_gradients,
        )

    def _make_ownership(self, parameters: FlatParameters) -> OwnedRanges:
        """A rank owns its shares of the buckets where the state is divided, else all of them.

        A worker counts all of its own gradient, others count their shares.
        """
        shares, whole = self.shares.ranges, [(bucket.start, bucket.stop) for bucket in self.shares.buckets]
        own = shares if self.divides_state else whole
        return OwnedRanges(parameters, own, shares, in_sync_group=whole if self.workers_differ else None)

    def _make_hierarchical(self, config: ShardingConfiguration, parameters: FlatParameters) -> HierarchicalSums | None:
        """The sums by nodes, for which all ranks get all sums; None without nodes, or with a compressor not for them.

        Collective over the data axis.
        """
        axes = node_axes(self.mesh, config.hierarchical) if self.gathers_gradients else None
        compressor = config.compressor
        if axes is None or (compressor is not None and not compressor.by_nodes):
            return None
        return HierarchicalSums(axes, self.shares.buckets, parameters.like, compressor, parameters.loss_scale)

    def _make_compressed(self, config: ShardingConfiguration, parameters: FlatParameters) -> CompressedSums | None:
        """The compressed sums: those between nodes, or over the data axis.  Collective over the data axis."""
        if self.hierarchical is not None:
            return self.hierarchical.compressed
        if config.compressor is None:
            return None
        buckets, counts = self.shares.buckets, self.shares.counts
        like, scale, pieces = parameters.like, parameters.loss_scale, parameters.pieces
        return config.compressor.make_sums(
            CompressedSumsMaker(self.axis, buckets, counts, like, scale, pieces, self.gathers_gradients)
        )

    def _make_summation(self) -> Summation:
        """How this strategy sums gradients over the data axis."""
        shares, gathers = self.shares, self.gathers_gradients
        if self.ordered is not None:
            part = self._part if self.own_sums is None else self.own_sums.part
            return FixedOrder(shares, self.ordered, part, gathers)
        if self.hierarchical is not None:
            return Hierarchical(shares, self.hierarchical)
        sums = self._plain_sums()
        if self.compressed is not None:
            sums = Compressed(shares, self.compressed, sums, self._part, gathers)
        return sums if self.own_sums is None else Accumulated(shares, sums, self._part, self.own_sums)

    @abstractmethod
    def _plain_sums(self) -> Summation:
        """The sums that one MPI collective does, neither ordered nor compressed."""

    @abstractmethod
    def _part(self, bucket: Bucket, gradient: Array) -> Array:
        """This rank's part of the sum of a bucket, in the memory of its gradient."""

    @classmethod
    def fitting(cls, parameters: FlatParameters) -> type[Strategy]:
        """The strategy to use for these parameters when this one is requested."""
        return cls

    def attach(self, parameters: FlatParameters) -> None:
        """Use these parameters from now on; their layout is that of the previous ones."""
        self.parameters = parameters
        if self.shards_parameters:
            parameters.shard(self.axis)

    def abandon(self) -> None:
        """Drop the pending sums, whose communicators were revoked; not collective."""
        self.reducer.abandon()

    @abstractmethod
    def gradients(self) -> list[Array]:
        """The summed gradient of each range in ``ownership.own``; call after `GradientReducer.finalize`."""

    def values(self) -> list[Array]:
        """The parameters of each range in ``ownership.own``."""
        return [self.parameters.flat[start:stop] for start, stop in self.ownership.own]

    @abstractmethod
    def publish_parameters(self) -> None:
        """After an update, bring the new parameters to all data ranks that keep a copy of them.

        Sends in ZeRO-1 and 2 only. In DDP every rank has updated all parameters. In ZeRO-3 no rank keeps a copy, and
        gathered units, which have the values from before the update, are dropped.
        """

    @abstractmethod
    def resync(self, slot: Array) -> None:
        """Make all copies of a state array equal, as `TensorCopies.broadcast` does for the parameters."""

    @property
    def sums_are_everywhere(self) -> bool:
        """Return True if every rank of the mesh has all sums of gradients of all tensors, with the same bits."""
        return self.mesh.size == 1

    @property
    def unit_marks(self) -> tuple[int, ...]:
        """Numbers for `agree_on_units`, of which the sync group takes the maxima in an exchange that it has anyway.

        None where ranks keep whole parameters. Ranks of other stages or slices have other units, and compare none.
        """
        sharded = self.parameters.sharded
        comparable = sharded is not None and 1 < sharded.axis.size == len(self.sync_group.members)
        return sharded.order.marks if sharded is not None and comparable else ()

    def agree_on_units(self, marks: Sequence[float]) -> None:
        """Raise CollectiveMismatchError on all ranks, and drop the gradients, if they have gathered other units.

        `marks` are the maxima of `unit_marks`. Collective over the data axis if they differ.
        """
        sharded = self.parameters.sharded
        if sharded is None:
            return
        if sum(marks):
            self.reducer.reset()
            raise sharded.order.difference(sharded.axis)
        sharded.order.restart()

    def compare_units(self) -> None:
        """`agree_on_units` in a step that exchanges nothing else. Collective over the sync group."""
        if marks := self.unit_marks:
            self.agree_on_units(self.axis.all_reduce(np.array(marks), op="max", label="control").tolist())

    @property
    def error_ranges(self) -> list[Range]:
        """Ranges of the flat parameters that ``compressed.owned`` covers, end to end."""
        return self.ownership.counted

    def error_scale(self, loss_scale: float) -> float:
        """The factor on the compression errors when gradients are multiplied by `loss_scale`."""
        return loss_scale

    def prepare_step(self, compresses: bool, loss_scale: float) -> None:
        """Set whether the gradients of the next step are compressed, and the loss scale that they contain."""
        if self.compressed is not None:
            self.compressed.in_use = compresses
            self.compressed.rescale(self.error_scale(loss_scale))

    def keep_errors(self) -> None:
        """After a step, keep what compression left out of it; the next step sends it."""
        if self.compressed is not None and self.compressed.in_use:
            self.compressed.keep()

    @property
    def gradient_bytes(self) -> int:
        """Peak bytes of gradient memory on this rank."""
        kept = self.ordered, self.compressed, self.own_sums
        return self.reducer.memory.peak_bytes + sum(each.nbytes for each in kept if each is not None)


def sum_unbound(config: ShardingConfiguration, copies: TensorCopies, gradients: GradientReducer) -> None:
    """Sum the gradients of a model that no optimizer has bound, in place: over copies, then over the data axis.

    Collective over the mesh.
    """
    for bucket in reversed(gradients.buckets):
        copies.sum(bucket, gradients.memory.of_bucket(bucket))
    axis, flat = config.mesh.data, gradients.flat
    if config.reproducible:
        OrderedSums(axis, flat).all_reduce(flat)
    else:
        axis.all_reduce(flat, label="gradients")


# The strategies by name.


class DataParallel(Strategy):
    """DDP: every data rank holds all parameters and state; gradients are all-reduced."""

    gathers_gradients = True

    def _plain_sums(self) -> Summation:
        return AllReduce(self.shares, self.blocks)

    def _part(self, bucket: Bucket, gradient: Array) -> Array:
        return self.shares.in_place(bucket, gradient)

    @property
    def error_ranges(self) -> list[Range]:
        return self.ownership.counted if self.hierarchical is None else self.hierarchical.owned

    @property
    def sums_are_everywhere(self) -> bool:
        return self.mesh.size == self.axis.size and self.compressed is None and not self.workers_differ

    def gradients(self) -> list[Array]:
        return [self.reducer.memory.of_bucket(bucket) for bucket in self.shares.buckets]

    def publish_parameters(self) -> None:
        """Send nothing: every data rank has updated all parameters."""

    def resync(self, slot: Array) -> None:
        self.axis.broadcast(slot, label="state")
        self.copies.broadcast_within_replica(slot)


class ZeRO1(Strategy):
    """ZeRO-1: optimizer state is sharded. Gradients are reduce-scattered, updated parameters all-gathered.

    Each data rank owns one share of every bucket; the shares are even. The reduced share arrives at the front of the
    bucket's range in the gradient buffer.
    """

    divides_state = True

    def _plain_sums(self) -> Summation:
        return ReduceScatter(self.shares, self.blocks)

    def _part(self, bucket: Bucket, gradient: Array) -> Array:
        return self.shares.at_front(bucket, gradient)

    def gradients(self) -> list[Array]:
        return [self._part(bucket, self.reducer.memory.of_bucket(bucket)) for bucket in self.shares.buckets]

    def publish_parameters(self) -> None:
        self._all_gather_in_place(self.parameters.flat, "parameters")

    def resync(self, slot: Array) -> None:
        if self.copies.within_replica:
            flat = self.gather(slot, "state")
            self.copies.broadcast_within_replica(flat)
            for (start, stop), view in zip(self.ownership.own, self.ownership.state_views(slot), strict=True):
                view[...] = flat[start:stop]

    def gather(self, slot: Array, label: str) -> Array:
        """A state array of all data ranks as a new flat array like the parameters.  Collective over the data axis."""
        flat = arrays.empty(self.parameters.size, slot.dtype, like=slot)
        for (start, stop), view in zip(self.ownership.own, self.ownership.state_views(slot), strict=True):
            flat[start:stop] = view
        self._all_gather_in_place(flat, label)
        return flat

    def _all_gather_in_place(self, flat: Array, label: str) -> None:
        """All-gather a flat array in which each data rank has filled its own ranges."""
        if self.axis.size == 1:
            return
        if self.blocks:
            self.axis.all_gather(flat, counts=self.shares.counts[0], label=label)
            return
        pending = [
            self.axis.start_all_gather(
                flat[bucket.start : bucket.stop], counts=self.shares.counts[bucket.index], label=label
            )
            for bucket in self.shares.buckets
        ]
        for gathered in pending:
            gathered.wait()


class ZeRO1AllReduced(ZeRO1):
    """ZeRO-1 whose gradients are all-reduced, for code that reads or changes them between backward pass and step.

    A step sends half as many bytes again as with `ZeRO1`.  Neither compressed nor in a fixed order.
    """

    def _plain_sums(self) -> Summation:
        return AllReduce(self.shares, self.blocks)

    def _part(self, bucket: Bucket, gradient: Array) -> Array:
        return self.shares.in_place(bucket, gradient)

    @property
    def sums_are_everywhere(self) -> bool:
        return self.mesh.size == self.axis.size


class ZeRO2(ZeRO1):
    """ZeRO-2: gradients are sharded too.  A bucket is reduced to its owners, and its memory is then reused."""

    gradients_on_demand = True

    def gradients(self) -> list[Array]:
        assert self.own_sums is not None
        return self.own_sums.of_parameters


class ZeRO3(ZeRO2):
    """ZeRO-3: parameters are sharded too, unit by unit, and each unit is a bucket of gradients.

    A model gathers a unit before each use, in the forward and again in the backward pass, and frees it afterwards. The
    update therefore sends no parameters.
    """

    shards_parameters = True

    @classmethod
    def fitting(cls, parameters: FlatParameters) -> type[Strategy]:
        """ZeRO-2 for a caller's flat array, which must stay whole; ZeRO-2 gathers it after the update."""
        return ZeRO2 if parameters.lent else cls

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
        self.sharded.free_all()


class LocalUpdates(DataParallel):
    """Every data coordinate is one of `workers` workers, which updates its copy of the model with its gradient.

    With sums by nodes, the data ranks of a node form one worker and sum their gradients every step. What
    all workers sum are differences of their parameters from the anchor, the parameters of the last average.
    """

    errors_kind = AVERAGE_ERRORS
    workers_differ = True

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self.axis.size // (1 if self.hierarchical is None else self.hierarchical.within.size)

    @property
    def average_sums(self) -> Summation:
        """Sums the differences from the anchor over all workers."""
        assert isinstance(self.summation, WithinWorker)
        return self.summation.average_sums

    def _plain_sums(self) -> Summation:
        return NonblockingAllReduce(self.shares)

    def _make_summation(self) -> Summation:
        if self.hierarchical is None:
            return WithinWorker(self.shares, None, super()._make_summation())
        averages = HierarchicalAverage(self.shares, self.hierarchical)
        return WithinWorker(self.shares, self.hierarchical.within, averages)

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
