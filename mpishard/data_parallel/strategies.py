"""Strategies: how gradients and optimizer state are spread over a mesh; DDP, stages of ZeRO, Local SGD's workers.

`Sharding` is the table of them.  `Strategy` has which ranges of the flat parameters this rank updates, and how its
`GradientReducer` sums gradients over ranks; it all-gathers the new parameters. The optimizer divides by the number of
samples. The stages are those of Rajbhandari et al., "ZeRO" (2020), section 5.

Order of summation: the micro-batches, in the gradient buffer; the copies of a tensor within one data coordinate
(`TensorCopies`); the data axis. With `reproducible`, the copies on the tensor axis come first; `OrderedSums` then
sums over micro-batches and the data axis along the tree of `mpishard.reduction.tree_sum`; the uses of a tied tensor
come last (`TiedWeights`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
    PartOf,
    ReduceScatter,
    Summation,
    WithinWorker,
)
from mpishard.layout.run_state import AVERAGE_ERRORS, GRADIENT_ERRORS, Range
from mpishard.parameters.flat import FlatParameters
from mpishard.parameters.reducer import GradientReducer
from mpishard.reduction.compressed import CompressedSums, CompressedSumsMaker
from mpishard.reduction.hierarchical import HierarchicalSums, node_axes
from mpishard.reduction.ordered import OrderedSums

Array = Any


@dataclass(frozen=True)
class Sharding:
    """What is divided over the data ranks: a stage of ZeRO, or the workers of Local SGD.

    A value, known before there are parameters; `Strategy` carries it out.
    """

    name: str  # in checkpoints and messages
    gathers_gradients: bool = False  # all ranks get all sums of gradients, not their part
    divides_state: bool = False  # a rank updates its share of each bucket, and all gather the new parameters
    gradients_on_demand: bool = False  # a bucket has memory from its first gradient until its sum
    shards_parameters: bool = False  # a unit of the parameters is gathered for each use
    workers_differ: bool = False  # between two averages each worker has its own parameters

    def fitting(self, parameters: FlatParameters) -> Sharding:
        """ZeRO-2 in place of ZeRO-3 for a caller's flat array, which must stay whole; it is gathered after updates."""
        return ZERO2 if self.shards_parameters and parameters.lent else self

    @property
    def stage(self) -> int:
        """The stage of ZeRO; 0 where each data rank holds all."""
        return self.divides_state + self.gradients_on_demand + self.shards_parameters

    @property
    def errors_kind(self) -> str:
        """What the rounding errors of compression are errors of."""
        return AVERAGE_ERRORS if self.workers_differ else GRADIENT_ERRORS


# DDP: every data rank holds all parameters and state; gradients are all-reduced.
DDP = Sharding("DataParallel", gathers_gradients=True)
# Gradients are reduce-scattered, updated parameters all-gathered; a rank has the state of its share of each bucket.
ZERO1 = Sharding("ZeRO1", divides_state=True)
# For code that reads or changes gradients between backward pass and step: they are all-reduced, and a step sends half
# as many bytes again.  Neither compressed nor in a fixed order.
ZERO1_ALL_REDUCED = Sharding("ZeRO1AllReduced", gathers_gradients=True, divides_state=True)
# A bucket is reduced to its owners, and its memory is then reused.
ZERO2 = Sharding("ZeRO2", divides_state=True, gradients_on_demand=True)
# Each unit of the parameters is a bucket of gradients.  A model gathers a unit before each use, in the forward and
# again in the backward pass, and frees it afterwards, so that an update sends no parameters.
ZERO3 = Sharding("ZeRO3", divides_state=True, gradients_on_demand=True, shards_parameters=True)
# Every data coordinate is a worker, which updates its copy of the model with its gradient; with sums by nodes, the data
# ranks of a node are one worker.  What all sum are differences of their parameters from the last average.
LOCAL = Sharding("LocalUpdates", gathers_gradients=True, workers_differ=True)
STAGES = (DDP, ZERO1, ZERO2, ZERO3)  # index: the stage of ZeRO


class Strategy:
    """The communication of one optimizer over one mesh, as its `sharding` says.

    Methods that send are collective over the mesh, in the same order on all ranks. The constructor makes all copies of
    the parameters equal; they use the gradient buckets of this strategy.
    """

    def __init__(self, sharding: Sharding, config: ShardingConfiguration, parameters: FlatParameters) -> None:
        self.sharding: Sharding = sharding
        mesh = config.mesh
        self.mesh: Mesh = mesh
        self.axis: Axis = mesh.data
        # The ranks that take a step together: every element is in the ``ownership.counted_parts`` of exactly one of
        # them. Each rank of a worker has the worker's whole gradient, so that these ranks need no agreement.
        self.sync_group: Axis | ModelParallelGroup = mesh.world
        if sharding.workers_differ:
            self.sync_group = ModelParallelGroup(mesh.tensor, mesh.pipeline, mesh.rank)
        self.copies: TensorCopies = TensorCopies(mesh, parameters)
        self.copies.broadcast(parameters)
        self.attach(parameters)
        self.shares: BucketShares = BucketShares(
            config, parameters, self.copies, by_unit=sharding.shards_parameters, ties_apart=config.reproducible
        )
        shares, like = self.shares, parameters.like
        # Sums are blocking calls: one bucket in an array of the user leaves nothing to overlap.
        self.blocks: bool = parameters.lent and len(shares.buckets) == 1
        # The elements that this rank updates.  A worker counts all of its own gradient, others count their shares.
        whole = [(bucket.start, bucket.stop) for bucket in shares.buckets]
        self.ownership: OwnedRanges = OwnedRanges(
            parameters,
            shares.ranges if sharding.divides_state else whole,
            shares.ranges,
            in_sync_group=whole if sharding.workers_differ else None,
        )
        assert parameters.sharded is None or parameters.sharded.own == self.ownership.own  # a bucket is a unit
        # This rank's part of each sum, where it is not in the memory of the buckets.
        self.own_sums: OwnSums | None = OwnSums(shares, self.ownership, like) if sharding.gradients_on_demand else None
        # This rank's part of the sum of a bucket, in the memory of its gradient.
        self._part: PartOf = shares.in_place if sharding.gathers_gradients else shares.at_front
        # Sums over the data axis along a fixed tree over the step's micro-batches; None unless `reproducible`.
        self.ordered: OrderedSums | None = OrderedSums(self.axis, like) if config.reproducible else None
        # Sums by nodes; None without nodes, or with a compressor not for them.
        self.hierarchical: HierarchicalSums | None = None
        compressor, gathers = config.compressor, sharding.gathers_gradients
        axes = node_axes(mesh, config.hierarchical) if gathers and not sharding.divides_state else None
        if axes is not None and (compressor is None or compressor.by_nodes):
            self.hierarchical = HierarchicalSums(axes, shares.buckets, like, compressor, parameters.loss_scale)
        # Compressed sums, those between nodes or over the data axis; None without compression.
        self.compressed: CompressedSums | None = None
        if self.hierarchical is not None:
            self.compressed = self.hierarchical.compressed
        elif compressor is not None:
            scale, pieces = parameters.loss_scale, parameters.pieces
            made = CompressedSumsMaker(self.axis, shares.buckets, shares.counts, like, scale, pieces, gathers)
            self.compressed = compressor.make_sums(made)
        self.summation: Summation = self._within_worker() if sharding.workers_differ else self._over_data()
        self.reducer: GradientReducer = GradientReducer(
            parameters.pieces,
            (*shares.buckets, *shares.second_uses),
            like,
            self.summation,
            on_demand=sharding.gradients_on_demand,
            overlap=config.overlap_communication,
            reproducible=config.reproducible,
            accumulates=not config.auto_sync_gradients,
        )

    def _over_data(self) -> Summation:
        """How gradients, or the differences of workers, are summed over the data axis."""
        sharding, shares = self.sharding, self.shares
        gathers = sharding.gathers_gradients
        if self.ordered is not None:
            part = self._part if self.own_sums is None else self.own_sums.part
            return FixedOrder(shares, self.ordered, part, gathers)
        if self.hierarchical is not None:
            return Hierarchical(shares, self.hierarchical)
        sums: Summation
        if sharding.workers_differ:
            sums = NonblockingAllReduce(shares)
        else:
            sums = (AllReduce if gathers else ReduceScatter)(shares, self.blocks)
        if self.compressed is not None:
            sums = Compressed(shares, self.compressed, sums, self._part, gathers)
        return sums if self.own_sums is None else Accumulated(shares, sums, self._part, self.own_sums)

    def _within_worker(self) -> Summation:
        """How a worker sums its gradients, and, as its `average_sums`, how all sum their differences."""
        if self.hierarchical is None:
            return WithinWorker(self.shares, None, self._over_data())
        averages = HierarchicalAverage(self.shares, self.hierarchical)
        return WithinWorker(self.shares, self.hierarchical.within, averages)

    def attach(self, parameters: FlatParameters) -> None:
        """Use these parameters from now on; their layout is that of the previous ones."""
        self.parameters = parameters
        if self.sharding.shards_parameters:
            parameters.shard(self.axis)

    def abandon(self) -> None:
        """Drop the pending sums, whose communicators were revoked; not collective."""
        self.reducer.abandon()
        if self.parameters.sharded is not None:
            self.parameters.sharded.abandon()

    def gradients(self) -> list[Array]:
        """The summed gradient of each range in ``ownership.own``; call after `GradientReducer.finalize`."""
        if self.own_sums is not None:
            return self.own_sums.of_parameters
        buckets, of_bucket = self.shares.buckets, self.reducer.memory.of_bucket
        if self.sharding.divides_state:
            return [self._part(bucket, of_bucket(bucket)) for bucket in buckets]
        return [of_bucket(bucket) for bucket in buckets]

    def values(self) -> list[Array]:
        """The parameters of each range in ``ownership.own``."""
        if self.parameters.sharded is not None:
            return self.parameters.sharded.shares
        return [self.parameters.flat[start:stop] for start, stop in self.ownership.own]

    def publish_parameters(self) -> None:
        """After an update, bring the new parameters to all data ranks that keep a copy of them.

        Sends in ZeRO-1 and 2 only. In DDP every rank has updated all parameters. In ZeRO-3 no rank keeps a copy, and
        gathered units, which have the values from before the update, are dropped.
        """
        if self.parameters.sharded is not None:
            self.parameters.sharded.free_all()
        elif self.sharding.divides_state:
            self._all_gather_in_place(self.parameters.flat, "parameters")

    def resync(self, slot: Array) -> None:
        """Make all copies of a state array equal, as `TensorCopies.broadcast` does for the parameters."""
        if not self.sharding.divides_state:
            self.axis.broadcast(slot, label="state")
            self.copies.broadcast_within_replica(slot)
        elif self.copies.within_replica:
            flat = self.gather(slot, "state")
            self.copies.broadcast_within_replica(flat)
            for (start, stop), view in zip(self.ownership.own, self.ownership.state_views(slot), strict=True):
                view[...] = flat[start:stop]

    def gather(self, slot: Array, label: str) -> Array:
        """A divided state array of all data ranks as a new flat array like the parameters.

        Collective over the data axis.
        """
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

    @property
    def sums_are_everywhere(self) -> bool:
        """Return True if every rank of the mesh has all sums of gradients of all tensors, with the same bits."""
        if not self.sharding.gathers_gradients:
            return self.mesh.size == 1
        return self.mesh.size == self.axis.size and self.compressed is None and not self.sharding.workers_differ

    @property
    def ranks_of_step(self) -> int:
        """Number of data ranks whose gradients a step sums: those of a worker of Local SGD, or all."""
        if not self.sharding.workers_differ:
            return self.axis.size
        return 1 if self.hierarchical is None else self.hierarchical.within.size

    @property
    def unit_marks(self) -> tuple[int, ...]:
        """Numbers for `agree_on_units`, of which the sync group takes the maxima in an exchange that it has anyway.

        Empty where ranks keep whole parameters, and where the sync group has ranks of several stages or slices, whose
        units are others.
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
        return self.ownership.counted if self.hierarchical is None else self.hierarchical.owned

    def error_scale(self, loss_scale: float) -> float:
        """The factor on the compression errors when gradients are multiplied by `loss_scale`.

        Those of averages are differences of parameters, which contain no loss scale.
        """
        return 1.0 if self.sharding.workers_differ else loss_scale

    def prepare_step(self, compresses: bool, loss_scale: float) -> None:
        """Set whether the gradients of the next step are compressed, and the loss scale that they contain.

        Averages are compressed always: `compress_after` is for rules that divide by the size of what is compressed.
        """
        if self.compressed is not None:
            self.compressed.in_use = compresses or self.sharding.workers_differ
            self.compressed.rescale(self.error_scale(loss_scale))

    def keep_errors(self) -> None:
        """After a step, keep what compression left out of it; the next step sends it.

        A worker's own step compresses nothing.
        """
        if self.compressed is not None and self.compressed.in_use and not self.sharding.workers_differ:
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
