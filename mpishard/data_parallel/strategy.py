"""A strategy: how gradients and optimizer state are spread over a mesh.

It chooses the ranges of the flat parameters that this rank updates, sums the gradients over ranks for its
`GradientReducer`, whose `BucketSums` it is, and sends the new parameters to ranks with a copy. The optimizer divides.
The stages are those of Rajbhandari et al., "ZeRO" (2020), section 5.

Order of summation: the micro-batches, in the gradient buffer; the copies of a tensor within one data coordinate
(`TensorCopies`); the data axis. With `reproducible`, the copies on the tensor axis come first; `OrderedSums` then sums
over micro-batches and the data axis along the tree of `mpishard.reduction.tree_sum`; the uses of a tied tensor come
last (`TiedUses`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from mpishard.comm.axis import Axis
from mpishard.comm.channel import Request
from mpishard.comm.mesh import Mesh, ModelParallelGroup
from mpishard.data_parallel.configuration import ShardingConfiguration, bucket_layout
from mpishard.data_parallel.owned_ranges import OwnedRanges
from mpishard.data_parallel.tensor_copies import TensorCopies
from mpishard.data_parallel.tied_uses import TiedUses
from mpishard.layout.boxes import counts, split
from mpishard.layout.run_state import GRADIENT_ERRORS
from mpishard.parameters.buckets import Bucket, make_buckets
from mpishard.parameters.flat import FlatParameters
from mpishard.parameters.reducer import GradientReducer, Transfer
from mpishard.reduction.error_feedback import CompressedSums
from mpishard.reduction.ordered import OrderedSums
from mpishard.reduction.sums_maker import CompressedSumsMaker

Array = Any
Range = tuple[int, int]


class Strategy(ABC):
    """The communication of one optimizer over one mesh.

    Methods are collective over the mesh, in the same order on all ranks. The constructor makes all copies of the
    parameters equal; they use the gradient buckets of this strategy.
    """

    # More members than other classes: it is the one interface between the optimizer, the reducer of its gradients, the
    # checks, and those who save its state; each subclass overrides what its stage does in another way.
    errors_kind: ClassVar[str] = GRADIENT_ERRORS
    gradients_on_demand: ClassVar[bool] = False
    shards_parameters: ClassVar[bool] = False
    gathers_gradients: ClassVar[bool] = False
    workers_differ: ClassVar[bool] = False
    divides_state: ClassVar[bool] = False

    def __init__(self, config: ShardingConfiguration, parameters: FlatParameters) -> None:
        self.mesh: Mesh
        self.mesh = mesh = config.mesh
        self.axis: Axis = mesh.data
        # The ranks that take a step together: every element is in the ``ownership.counted_parts`` of exactly one of
        # them.
        self.team: Axis | ModelParallelGroup = mesh.world
        # Sums over the data axis along a fixed tree over the step's micro-batches; None unless `reproducible`.
        self.ordered: OrderedSums | None = OrderedSums(self.axis, parameters.like) if config.reproducible else None
        TensorCopies(mesh, parameters).spread()
        self.attach(parameters)
        compressed = config.compressor is not None
        runs, sizes = bucket_layout(
            parameters, compressed=compressed, by_unit=self.shards_parameters, ties_apart=config.reproducible
        )
        self.buckets: tuple[Bucket, ...] = make_buckets(
            parameters.pieces, config.minimum_parameter_group_size, runs, sizes
        )
        self._counts = [counts(split(bucket.size, self.axis.size)) for bucket in self.buckets]
        self.uses: TiedUses | None = None  # adds the uses of tied tensors; None unless `reproducible`
        if config.reproducible:
            self.uses = TiedUses(parameters, self.buckets, self._counts, self.axis.rank)
            self._counts += self.uses.counts
        self.reducer: GradientReducer = GradientReducer(
            parameters.pieces,
            (*self.buckets, *(() if self.uses is None else self.uses.buckets)),
            parameters.like,
            self,
            on_demand=self.gradients_on_demand,
            overlap=config.overlap_communication,
            reproducible=config.reproducible,
        )
        # The elements that this rank updates.
        self.ownership: OwnedRanges = self._make_ownership(parameters, self._shares())
        self.compresses = True  # the gradients of this step are compressed
        # Sums gradients over the data axis in compressed form; None without compression.
        self.compressed: CompressedSums | None = self._make_compressed(config, parameters)

    def _shares(self) -> list[Range]:
        """This rank's even share of each bucket, as ranges of the flat parameters."""
        shares = []
        for bucket, pieces in zip(self.buckets, self._counts, strict=False):
            start = bucket.start + sum(pieces[: self.axis.rank])
            shares.append((start, start + pieces[self.axis.rank]))
        return shares

    def _make_ownership(self, parameters: FlatParameters, shares: list[Range]) -> OwnedRanges:
        """The elements that this rank updates.  Here its share of each bucket."""
        return OwnedRanges(parameters, shares, shares)

    def _make_compressed(self, config: ShardingConfiguration, parameters: FlatParameters) -> CompressedSums | None:
        """The sums of compressed gradients, or None without compression.  Collective over the data axis."""
        if config.compressor is None:
            return None
        like, scale, pieces = parameters.like, parameters.loss_scale, parameters.pieces
        maker = CompressedSumsMaker(self.axis, self.buckets, self._counts, like, scale, pieces, self.gathers_gradients)
        return config.compressor.make_sums(maker)

    @classmethod
    def fitting(cls, parameters: FlatParameters) -> type[Strategy]:
        """The strategy to use for these parameters when this one is requested."""
        return cls

    def attach(self, parameters: FlatParameters) -> None:
        """Use these parameters from now on; their layout is that of the previous ones."""
        self.parameters = parameters
        self.copies: TensorCopies = TensorCopies(self.mesh, parameters)

    def sum_copies(self, bucket: Bucket, gradient: Array) -> None:
        """Sum a bucket's gradient over the copies of its tensors within one data coordinate.

        With `reproducible` no bucket is tied here: the uses of a tied tensor are added by `add_uses`.
        """
        self.copies.sum(bucket, gradient)

    def start(self, bucket: Bucket, gradient: Array, earlier: Sequence[Array] = ()) -> Transfer | None:
        """Start the sum of a bucket's gradient over the data axis; `earlier` are partial sums of other terms."""
        if self.ordered is not None:
            partial, pieces = [*earlier, gradient], self._counts[bucket.index]
            return self.ordered.start(bucket, partial, pieces, self.target(bucket, gradient))
        if self.compressed is not None and self.compresses:
            return self.compressed.start(bucket, gradient, self.target(bucket, gradient))
        return self.start_plain(bucket, gradient)

    @abstractmethod
    def start_plain(self, bucket: Bucket, gradient: Array) -> Request | None:
        """Sum, or start to sum, with one MPI collective: neither ordered nor compressed; on one data rank with none."""

    @property
    def blocks(self) -> bool:
        """Return True if sums are blocking calls: a lent array leaves nothing to overlap them with."""
        return self.parameters.lent and len(self.buckets) == 1

    @abstractmethod
    def target(self, bucket: Bucket, gradient: Array) -> Array:
        """The array that receives this rank's part of an ordered or compressed sum; it may be a view of `gradient`."""

    def finish(self, started: Sequence[tuple[Bucket, Array, Transfer]]) -> None:
        """Wait for the sums of buckets.  Here the results stay in the gradient buffer."""
        for _, _, transfer in started:
            transfer.wait()

    def add_uses(self) -> None:
        """Add the gradients of the uses of tied tensors, after all sums of a reproducible step."""
        assert self.uses is not None
        self.uses.add(self.owned, self.copies)

    @abstractmethod
    def owned(self, bucket: Bucket) -> Array:
        """This rank's part of the sum of a bucket, also of one of a second use."""

    def reset(self) -> None:
        """Forget the sums of this step; not collective."""
        if self.ordered is not None:
            self.ordered.reset()
        if self.compressed is not None:
            self.compressed.reset()

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
        """Make all copies of a state array equal, as `TensorCopies.spread` does for the parameters."""

    @property
    def sums_are_everywhere(self) -> bool:
        """Return True if every rank of the mesh has all sums of gradients of all tensors, with the same bits."""
        return self.mesh.size == 1

    @property
    def error_ranges(self) -> list[Range]:
        """Ranges of the flat parameters that ``compressed.owned`` covers, end to end."""
        return self.ownership.counted

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

    @property
    def gradient_bytes(self) -> int:
        """Peak bytes of gradient memory on this rank."""
        kept = self.ordered or self.compressed
        return self.reducer.memory.peak_bytes + (0 if kept is None else kept.nbytes)
