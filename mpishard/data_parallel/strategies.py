"""How gradients and optimizer state are spread over a mesh.

A strategy chooses the ranges of the flat parameters that this rank updates (`own`), sums the gradients over ranks for
its `GradientReducer` (`start` for each bucket, then `complete`), and sends the new parameters to the other ranks
(`all_gather_parameters`).  The stages
are those of Rajbhandari et al., "ZeRO" (2020), section 5.  A strategy only sums gradients; the optimizer divides.

Order of summation: first the micro-batches, in the gradient buffer; then the copies of a tensor within one data
coordinate (`Replicas`); then the data axis.  With `reproducible`, the copies come first; `OrderedSums` then sums over
micro-batches and the data axis along the tree of `mpishard.reduction.tree_sum`.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from mpishard.backend import array as arrays
from mpishard.backend.array import accumulate
from mpishard.comm.axis import Axis
from mpishard.comm.mesh import Mesh
from mpishard.comm.request import Request
from mpishard.data_parallel.bucket_plan import bucket_layout
from mpishard.data_parallel.configuration import ShardingConfiguration
from mpishard.data_parallel.model_parallel_group import ModelParallelGroup
from mpishard.data_parallel.shared_parameters import Replicas
from mpishard.data_parallel.tensor_norms import Part, parts_of
from mpishard.layout.boxes import counts, split
from mpishard.layout.run_state import GRADIENT_ERRORS
from mpishard.parameters.flat import FlatParameters
from mpishard.parameters.gradient_buckets import Bucket, make_buckets
from mpishard.parameters.gradient_reducer import GradientReducer, Transfer
from mpishard.parameters.zero3_units import ShardedUnits
from mpishard.reduction.error_feedback import CompressedSums
from mpishard.reduction.hierarchical import HierarchicalSums, node_axes
from mpishard.reduction.ordered import OrderedSums
from mpishard.reduction.reducers import CompressedReducers

Array = Any
Range = tuple[int, int]


class Strategy(ABC):
    """How one optimizer communicates over one mesh.

    Methods are collective over the mesh, in the same order on all ranks.  The constructor makes all copies of the
    parameters equal.

    Parameters
    ----------
    config : ShardingConfiguration
    parameters : FlatParameters
        The parameters to train; they use the gradient buckets of this strategy.

    Attributes
    ----------
    ordered : OrderedSums or None
        Sums over the data axis along a fixed tree over the step's micro-batches; None unless `reproducible`.
    compressed : CompressedSums or None
        Sums gradients over the data axis in compressed form; None without compression.
    compresses : bool
        Whether the gradients of this step are compressed.
    team : Axis or ModelParallelGroup
        The ranks that take a step together.  Every element of the model is in `counted_parts` of exactly one of them.
    own : list of (start, stop)
        Ranges of the flat parameters that this rank updates, ascending.  A state array holds these ranges end to end.
    counted : list of (start, stop)
        The part of each range in `own` that this rank contributes to sums, where other data ranks update it too.
    """

    errors_kind: ClassVar[str] = GRADIENT_ERRORS
    gradients_on_demand: ClassVar[bool] = False
    shards_parameters: ClassVar[bool] = False
    gathers_gradients: ClassVar[bool] = False
    workers_differ: ClassVar[bool] = False

    def __init__(self, config: ShardingConfiguration, parameters: FlatParameters) -> None:
        self.mesh: Mesh
        self.mesh = mesh = config.mesh
        self.axis: Axis = mesh.data
        self.team: Axis | ModelParallelGroup = mesh.world
        self.ordered: OrderedSums | None = OrderedSums(self.axis, parameters.like) if config.reproducible else None
        Replicas(mesh, parameters).spread()
        self.attach(parameters)
        compressed = config.compressor is not None
        runs, sizes = bucket_layout(parameters, compressed=compressed, by_unit=self.shards_parameters)
        self.buckets: tuple[Bucket, ...] = make_buckets(
            parameters.pieces, config.minimum_parameter_group_size, runs, sizes
        )
        self.reducer: GradientReducer = GradientReducer(
            parameters.pieces,
            self.buckets,
            parameters.like,
            self,
            on_demand=self.gradients_on_demand,
            overlap=config.overlap_communication,
            reproducible=config.reproducible,
        )
        self.own: list[Range] = []
        self.counted: list[Range] = []
        self._counts = [counts(split(bucket.size, self.axis.size)) for bucket in self.buckets]
        self.compresses = True
        self.compressed: CompressedSums | None = self._make_compressed(config, parameters)

    def _make_compressed(self, config: ShardingConfiguration, parameters: FlatParameters) -> CompressedSums | None:
        """The sums of compressed gradients, or None without compression.  Collective over the data axis."""
        if config.compressor is None:
            return None
        like, scale, pieces = parameters.like, parameters.loss_scale, parameters.pieces
        reducers = CompressedReducers(
            self.axis, self.buckets, self._counts, like, scale, pieces, self.gathers_gradients
        )
        return config.compressor.make_reducer(reducers)

    @classmethod
    def fitting(cls, parameters: FlatParameters) -> type[Strategy]:
        """The strategy to use for these parameters when this one is requested."""
        return cls

    def attach(self, parameters: FlatParameters) -> None:
        """Use these parameters from now on; their layout is that of the previous ones."""
        self.parameters = parameters
        self.replicas: Replicas = Replicas(self.mesh, parameters)

    @property
    def owned(self) -> int:
        """Number of elements that this rank updates."""
        return sum(stop - start for start, stop in self.own)

    def reduce_within_replica(self, bucket: Bucket, gradient: Array) -> None:
        """Sum a bucket's gradient over the copies of its tensors within one data coordinate."""
        self.replicas.sum(bucket, gradient)

    def start(self, bucket: Bucket, gradient: Array, earlier: Sequence[Array] = ()) -> Transfer | None:
        """Start the sum of a bucket's gradient over the data axis; `earlier` are partial sums of other terms."""
        if self.ordered is not None:
            partial, pieces = [*earlier, gradient], self._counts[bucket.index]
            return self.ordered.start(bucket, partial, pieces, self.target(bucket, gradient))
        if self.compressed is not None and self.compresses:
            return self.compressed.start(bucket, gradient, self.target(bucket, gradient))
        return self.start_plain(bucket, gradient)

    @abstractmethod
    def start_plain(self, bucket: Bucket, gradient: Array) -> Request:
        """Start that sum with one MPI collective: neither ordered nor compressed."""

    @abstractmethod
    def target(self, bucket: Bucket, gradient: Array) -> Array:
        """The array that receives this rank's part of an ordered or compressed sum; it may be a view of `gradient`."""

    def complete(self, started: Sequence[tuple[Bucket, Array, Transfer]]) -> None:
        """Wait for the sums of buckets.  Here the results stay in the gradient buffer."""
        for _, _, transfer in started:
            transfer.wait()

    def reset(self) -> None:
        """Forget the sums of this step.  Not collective."""
        if self.ordered is not None:
            self.ordered.reset()
        if self.compressed is not None:
            self.compressed.reset()

    def abandon(self) -> None:
        """Drop the pending sums, whose communicators were revoked.  Not collective."""
        self.reducer.abandon()

    @abstractmethod
    def gradients(self) -> list[Array]:
        """The summed gradient of each range in `own`; call after `GradientReducer.finalize`."""

    def values(self) -> list[Array]:
        """The parameters of each range in `own`."""
        return [self.parameters.flat[start:stop] for start, stop in self.own]

    @abstractmethod
    def all_gather_parameters(self) -> None:
        """Send each rank's own parameters to the ranks that keep a copy of them."""

    @abstractmethod
    def resync(self, slot: Array) -> None:
        """Make all copies of a state array equal, as `Replicas.spread` does for the parameters."""

    def state_views(self, slot: Array) -> list[Array]:
        """The parts of a state array that belong to the ranges in `own`."""
        views, offset = [], 0
        for start, stop in self.own:
            views.append(slot[offset : offset + stop - start])
            offset += stop - start
        return views

    def counted_views(self, owned: Sequence[Array]) -> list[Array]:
        """Cut arrays that cover the ranges in `own` down to the ranges in `counted`."""
        ranges = zip(owned, self.own, self.counted, strict=True)
        return [array[start - origin : stop - origin] for array, (origin, _), (start, stop) in ranges]

    @property
    def error_ranges(self) -> list[Range]:
        """Ranges of the flat parameters that ``compressed.owned`` covers, end to end."""
        return self.counted

    def error_scale(self, loss_scale: float) -> float:
        """The factor on the compression errors when gradients are multiplied by `loss_scale`."""
        return loss_scale

    def prepare_step(self, compresses: bool, loss_scale: float) -> None:
        """Set whether the gradients of the next step are compressed, and the loss scale that they contain."""
        self.compresses = compresses
        if self.compressed is not None:
            self.compressed.rescale(self.error_scale(loss_scale))

    def keep_errors(self) -> None:
        """After a step, keep what compression left out of it; the next step sends it."""
        if self.compressed is not None and self.compresses:
            self.compressed.keep()

    @functools.cached_property
    def owned_parts(self) -> list[Part]:
        """The ranges in `own`, cut at tensors."""
        return self._parts(self.own)

    @functools.cached_property
    def counted_parts(self) -> list[Part]:
        """This rank's parts in sums over the model: each logical element is on exactly one rank of the team."""
        specs, model_rank = self.parameters.specs, self.parameters.place
        return [part for part in self._parts(self.counted) if model_rank.counts(specs[part.tensor])]

    def _parts(self, ranges: Sequence[Range]) -> list[Part]:
        number = {spec.name: index for index, spec in enumerate(self.parameters.specs)}
        tensors = [number[piece.name] for piece in self.parameters.pieces]
        return parts_of(self.parameters.pieces, tensors, ranges, [start for start, _ in self.own])

    @property
    def gradient_bytes(self) -> int:
        """Peak bytes of gradient memory on this rank."""
        kept = self.ordered or self.compressed
        return self.reducer.memory.peak_bytes + (0 if kept is None else kept.nbytes)


class DataParallel(Strategy):
    """DDP: every data rank holds all parameters and state; gradients are all-reduced."""

    gathers_gradients = True

    def __init__(self, config: ShardingConfiguration, parameters: FlatParameters) -> None:
        super().__init__(config, parameters)
        for bucket, pieces in zip(self.buckets, self._counts, strict=True):
            start = bucket.start + sum(pieces[: self.axis.rank])
            self.own.append((bucket.start, bucket.stop))
            self.counted.append((start, start + pieces[self.axis.rank]))

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
        return self.counted if self.hierarchical is None else self.hierarchical.owned

    def start(self, bucket: Bucket, gradient: Array, earlier: Sequence[Array] = ()) -> Transfer | None:
        if self.hierarchical is not None:
            return self.hierarchical.start(bucket, gradient)
        return super().start(bucket, gradient, earlier)

    def start_plain(self, bucket: Bucket, gradient: Array) -> Request:
        return self.axis.start_all_reduce(gradient, label="gradients")

    def target(self, bucket: Bucket, gradient: Array) -> Array:
        start, stop = self.counted[bucket.index]
        return gradient[start - bucket.start : stop - bucket.start]

    def complete(self, started: Sequence[tuple[Bucket, Array, Transfer]]) -> None:
        """Wait for the sums of buckets, and write each whole sum into its gradient."""
        arrived = [(bucket, gradient, transfer.wait()) for bucket, gradient, transfer in started]
        if self.hierarchical is not None:
            self.hierarchical.complete(arrived, compresses=self.compresses)
        elif self.ordered is not None or (self.compressed is not None and self.compresses):
            for gather in [self._start_gather(bucket, gradient) for bucket, gradient, _ in arrived]:
                gather.wait()

    def _start_gather(self, bucket: Bucket, gradient: Array) -> Transfer:
        pieces = self._counts[bucket.index]
        if self.compressed is not None:
            return self.compressed.start_gather(bucket, gradient)
        return self.axis.start_all_gather(gradient, counts=pieces, label="gradients")

    def gradients(self) -> list[Array]:
        return [self.reducer.memory.of_bucket(bucket) for bucket in self.buckets]

    def all_gather_parameters(self) -> None:
        """Send nothing: every data rank has updated all parameters."""

    def resync(self, slot: Array) -> None:
        self.axis.broadcast(slot, label="state")
        self.replicas.spread_inside(slot)


class ShardedState(Strategy):
    """ZeRO-1: optimizer state is sharded.  Gradients are reduce-scattered, updated parameters all-gathered.

    Each data rank owns one share of every bucket; the shares are even.  The reduced share arrives at the front of the
    bucket's range in the gradient buffer.
    """

    def __init__(self, config: ShardingConfiguration, parameters: FlatParameters) -> None:
        super().__init__(config, parameters)
        for bucket, pieces in zip(self.buckets, self._counts, strict=True):
            start = bucket.start + sum(pieces[: self.axis.rank])
            self.own.append((start, start + pieces[self.axis.rank]))
        self.counted = self.own

    def start_plain(self, bucket: Bucket, gradient: Array) -> Request:
        return self.axis.start_reduce_scatter(gradient, counts=self._counts[bucket.index], label="gradients")

    def target(self, bucket: Bucket, gradient: Array) -> Array:
        return gradient[: self._counts[bucket.index][self.axis.rank]]

    def gradients(self) -> list[Array]:
        return [
            self.reducer.memory.of_bucket(bucket)[: pieces[self.axis.rank]]
            for bucket, pieces in zip(self.buckets, self._counts, strict=True)
        ]

    def all_gather_parameters(self) -> None:
        self._gather(self.parameters.flat, "parameters")

    def resync(self, slot: Array) -> None:
        if self.replicas.inside:
            flat = arrays.empty(self.parameters.size, slot.dtype, like=slot)
            views = self.state_views(slot)
            for (start, stop), view in zip(self.own, views, strict=True):
                flat[start:stop] = view
            self._gather(flat, "state")
            self.replicas.spread_inside(flat)
            for (start, stop), view in zip(self.own, views, strict=True):
                view[...] = flat[start:stop]

    def _gather(self, flat: Array, label: str) -> None:
        """All-gather a flat array in which each data rank has filled its own ranges."""
        pending = [
            self.axis.start_all_gather(flat[bucket.start : bucket.stop], counts=pieces, label=label)
            for bucket, pieces in zip(self.buckets, self._counts, strict=True)
        ]
        for gathered in pending:
            gathered.wait()


class ShardedGradients(ShardedState):
    """ZeRO-2: gradients are sharded too.  A bucket is reduced to its owners, and its memory is then reused."""

    gradients_on_demand = True

    def __init__(self, config: ShardingConfiguration, parameters: FlatParameters) -> None:
        super().__init__(config, parameters)
        self._shard = arrays.zeros(self.owned, parameters.dtype, like=parameters.like)
        self._summed: set[int] = set()

    def target(self, bucket: Bucket, gradient: Array) -> Array:
        return super().target(bucket, gradient) if self.ordered is None else self.gradients()[bucket.index]

    def complete(self, started: Sequence[tuple[Bucket, Array, Transfer]]) -> None:
        """Wait for the sums of buckets, and add this rank's part of each to those of earlier micro-batches."""
        for bucket, _, transfer in started:
            result = transfer.wait()
            if self.ordered is not None:
                continue
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
        return self.state_views(self._shard)

    @property
    def gradient_bytes(self) -> int:
        return int(self._shard.nbytes) + super().gradient_bytes


class ShardedParameters(ShardedGradients):
    """ZeRO-3: parameters are sharded too, unit by unit, and each unit is a bucket of gradients.

    A model gathers a unit before each use, in the forward and again in the backward pass, and frees it afterwards.  The
    update therefore sends no parameters.
    """

    shards_parameters = True

    def __init__(self, config: ShardingConfiguration, parameters: FlatParameters) -> None:
        # With the largest possible group size a bucket is a whole unit, so that bucket and unit have the same owners.
        whole = max(1, sum(spec.size for spec in parameters.specs))
        super().__init__(replace(config, minimum_parameter_group_size=whole), parameters)
        assert self.sharded.own == self.own

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

    def all_gather_parameters(self) -> None:
        """Send nothing, and free the units still gathered, which hold values from before the update."""
        self.sharded.drop()
