"""Which elements of the flat parameters a rank updates, cut at tensors and rules, and which tensors have copies.

`BucketShares` cuts each bucket into one share for each data rank. Which ranges a rank owns, its shares or all buckets,
the strategy says. Here is what follows.

A table that embedding and output head share has two uses. On one mesh one rank has both, on another two pipeline ranks
have one each. For a sum of one order on all meshes, each use is summed over micro-batches and the data axis separately,
and then the sums of the uses are added (`TiedWeights`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from mpishard.backend import array as arrays
from mpishard.backend.array import Kernel, accumulate
from mpishard.backend.ranges import Range as ArrayRange
from mpishard.backend.ranges import Ranges
from mpishard.comm.axis import Axis
from mpishard.comm.mesh import Mesh
from mpishard.data_parallel.configuration import ShardingConfiguration, bucket_layout
from mpishard.layout.boxes import run_lengths, run_of, split
from mpishard.layout.run_state import Range
from mpishard.layout.tensors import ParameterSpec, Piece
from mpishard.optim import Rule
from mpishard.parameters.buckets import Bucket, make_buckets
from mpishard.parameters.flat import FlatParameters
from mpishard.reduction.ordered import OrderedSums

Array = Any


Span = tuple[int, int, int]


class OwnedPart(NamedTuple):
    """Elements ``[start, stop)`` of the owned range number `owned` belong to tensor number `tensor`."""

    tensor: int
    owned: int
    start: int
    stop: int


def spans_of(parts: Sequence[OwnedPart]) -> list[Span]:
    """The elements of `parts` as ``(owned, start, stop)``, with adjacent parts joined."""
    spans: list[Span] = []
    for _, owned, start, stop in parts:
        if spans and spans[-1][0] == owned and spans[-1][2] == start:
            spans[-1] = (owned, spans[-1][1], stop)
        else:
            spans.append((owned, start, stop))
    return spans


class OwnedRanges:
    """The elements of one rank, as ranges of its flat parameters.

    `own` are the ascending ranges that this rank updates; a state array holds them end to end. `counted` has for each
    the part for which this rank stands in saves and full tensors. Where several data ranks update the same elements, as
    in DDP, each stands for another part, so that every element counts once. `in_sync_group` is the same for sums over
    the ranks that take a step together, such as norms; by default it is `counted`.
    """

    def __init__(
        self,
        parameters: FlatParameters,
        own: list[Range],
        counted: list[Range],
        in_sync_group: list[Range] | None = None,
    ) -> None:
        self.own = own
        self.counted = counted
        self._in_sync_group = counted if in_sync_group is None else in_sync_group
        self._layout = parameters.layout  # not the parameters: others of the same layout may take their place

    @property
    def size(self) -> int:
        """Number of elements that this rank updates."""
        return sum(stop - start for start, stop in self.own)

    def state_views(self, slot: Array) -> list[Array]:
        """The parts of a state array that belong to the ranges in `own`."""
        views, offset = [], 0
        for start, stop in self.own:
            views.append(slot[offset : offset + stop - start])
            offset += stop - start
        return views

    def states_of(self, slots: Sequence[Array]) -> list[list[Array]]:
        """For each range in `own` its parts of all state arrays, in their order."""
        if len(self.own) == 1:
            return [list(slots)]
        views = [self.state_views(slot) for slot in slots]
        return [[part[number] for part in views] for number in range(len(self.own))]

    def counted_views(self, owned: Sequence[Array]) -> list[Array]:
        """Cut arrays that cover the ranges in `own` down to the ranges in `counted`."""
        ranges = zip(owned, self.own, self.counted, strict=True)
        return [array[start - origin : stop - origin] for array, (origin, _), (start, stop) in ranges]

    @cached_property
    def owned_parts(self) -> list[OwnedPart]:
        """The ranges in `own`, cut at tensors."""
        return self._parts(self.own)

    @cached_property
    def counted_parts(self) -> list[OwnedPart]:
        """This rank's parts in sums over the sync group, on exactly one rank of which each logical element is.

        They are `in_sync_group`, cut at tensors; the ranges in `counted` may be others.
        """
        specs, model_rank = self._layout.specs, self._layout.place
        return [part for part in self._parts(self._in_sync_group) if model_rank.is_primary(specs[part.tensor])]

    def _parts(self, ranges: Sequence[Range]) -> list[OwnedPart]:
        """Cut ascending ranges, each within one of `own`, at tensors; positions count from the start of that one."""
        pieces = self._layout.pieces
        number = {spec.name: index for index, spec in enumerate(self._layout.specs)}
        parts = []
        first = 0
        for owned, ((start, stop), (origin, _)) in enumerate(zip(ranges, self.own, strict=True)):
            while first < len(pieces) and pieces[first].start + pieces[first].size <= start:
                first += 1
            for piece in pieces[first:]:
                if piece.start >= stop:
                    break
                begin, end = max(piece.start, start), min(piece.start + piece.size, stop)
                if begin < end:
                    parts.append(OwnedPart(number[piece.name], owned, begin - origin, end - origin))
        return parts


class RuleRange(NamedTuple):
    """Elements ``[start, stop)`` of the owned range number `owned`, which `rule` updates."""

    rule: Rule
    owned: int
    start: int
    stop: int


class RuleRanges:
    """The owned ranges of a rank, with the rule of each.

    `counted` and `owned` are cut at tensors, and choose the number of their tensor.
    """

    def __init__(self, ownership: OwnedRanges, specs: Sequence[ParameterSpec]) -> None:
        self._ownership = ownership
        self._shapes = {spec.name: spec.shape for spec in specs}
        self._rule: Rule | None = None
        self._by_tensor: list[Rule] = []
        self._ranges: list[RuleRange] = []
        self._rules: list[Rule] = []
        self._for_one_launch = Ranges([])
        self._of_kernels: dict[Kernel, Ranges] = {}

    def by_tensor(self, rule: Rule) -> list[Rule]:
        """The rule of each tensor, by its number."""
        self._follow(rule)
        return self._by_tensor

    def of(self, rule: Rule, factor: float) -> list[RuleRange]:
        """The ranges in their order, each with its rule; `factor` multiplies all learning rates."""
        self._follow(rule)
        if factor == 1:
            return self._ranges
        scaled = {id(each.rule): each.rule.scaled(factor) for each in self._ranges}
        return [each._replace(rule=scaled[id(each.rule)]) for each in self._ranges]

    def for_one_launch(self, rule: Rule, factor: float) -> tuple[list[Rule], Ranges]:
        """The ranges for one launch, and the rules that they choose from; otherwise as `of`."""
        self._follow(rule)
        return [each.scaled(factor) for each in self._rules], self._for_one_launch

    def of_all(self, kernel: Kernel) -> Ranges:
        """All of each owned range, for a kernel that does the same with all of them.

        Each kernel has its own, since these keep a device table for the arrays of the last launch.
        """
        if kernel not in self._of_kernels:
            own = enumerate(self._ownership.own)
            self._of_kernels[kernel] = Ranges([ArrayRange(row, 0, stop - start) for row, (start, stop) in own])
        return self._of_kernels[kernel]

    @cached_property
    def counted(self) -> tuple[Ranges, Ranges]:
        """This rank's parts in sums over the sync group: twice, for the norms of two sets of arrays: see `of_all`."""
        return _ranges_of(self._ownership.counted_parts), _ranges_of(self._ownership.counted_parts)

    @cached_property
    def owned(self) -> Ranges:
        """All elements of this rank, cut at tensors."""
        return _ranges_of(self._ownership.owned_parts)

    def _follow(self, rule: Rule) -> None:
        """Find the ranges again if this is another rule than the last one."""
        if rule is not self._rule:
            self._by_tensor = rule.by_shape(self._shapes)
            self._ranges = self._cut(rule)
            self._rules = list({id(each.rule): each.rule for each in self._ranges}.values())
            number = {id(each): choice for choice, each in enumerate(self._rules)}
            self._for_one_launch = Ranges([ArrayRange(*each[1:], number[id(each.rule)]) for each in self._ranges])
            self._rule = rule

    def _cut(self, rule: Rule) -> list[RuleRange]:
        if all(each is rule for each in self._by_tensor):
            own = enumerate(self._ownership.own)
            return [RuleRange(rule, number, 0, stop - start) for number, (start, stop) in own if stop > start]
        ranges: list[RuleRange] = []
        for tensor, owned, start, stop in self._ownership.owned_parts:
            of_tensor = self._by_tensor[tensor]
            last = ranges[-1] if ranges else None
            if last is not None and (last.rule is of_tensor, last.owned, last.stop) == (True, owned, start):
                ranges[-1] = last._replace(stop=stop)
            else:
                ranges.append(RuleRange(of_tensor, owned, start, stop))
        return ranges


def _ranges_of(parts: Sequence[OwnedPart]) -> Ranges:
    """Parts as ranges that choose the number of their tensor."""
    return Ranges([ArrayRange(part.owned, part.start, part.stop, part.tensor) for part in parts])


class TensorCopies:
    """Keeps the copies of tensors on several ranks equal: sums their gradients, and broadcasts their values.

    All methods and the constructor are collective over the mesh, unless a docstring says otherwise. `parameters` are
    laid out for this rank's tensor and pipeline rank; others of the same layout may take their place.
    """

    def __init__(self, mesh: Mesh, parameters: FlatParameters) -> None:
        self._mesh = mesh
        self._tensors: list[tuple[ParameterSpec, Piece]] = list(zip(parameters.local, parameters.pieces, strict=True))
        # By name of a tied tensor: the axis of the pipeline ranks that hold it, and the owner's rank on that axis.
        self._ties: dict[str, tuple[Axis, int]] = {}
        model_rank = mesh.place
        for spec in parameters.specs:
            holders = model_rank.holders(spec)
            if len(holders) > 1:
                axis = mesh.pipeline.subgroup(f"ties {'+'.join(map(str, holders))}", holders)
                if axis is not None:
                    self._ties[spec.name] = axis, holders.index(model_rank.runner(spec.stage))

    @property
    def within_replica(self) -> bool:
        """Return True if one data coordinate has several copies of a tensor: on the tensor axis, or as ties."""
        return bool(self._ties) or self._mesh.tensor.size > 1

    @property
    def sum_changes(self) -> bool:
        """Return True if `sum` changes any gradient; not collective, and the same on all ranks of the tensor axis."""
        partial = self._mesh.tensor.size > 1 and any(spec.partial for spec, _ in self._tensors)
        return bool(self._ties) or partial

    # -- gradients --------------------------------------------------------------------------------------------------

    def sum(self, bucket: Bucket, gradient: Array) -> None:
        """Sum a bucket's gradient in place: partial gradients over the tensor axis, then ties over their stages."""
        if self._mesh.tensor.size > 1:
            self._sum_partial(bucket, gradient)
        if bucket.tied:
            name = self._tensors[bucket.first][1].name
            if name in self._ties:
                self._ties[name][0].all_reduce(gradient, label="gradients")

    def sum_tie(self, name: str, gradient: Array) -> None:
        """Sum the gradient of a tied tensor, or a part of it, over its stages in place, in the order of the stages."""
        if name not in self._ties:
            return
        axis = self._ties[name][0]
        if axis.size == 2:  # one order only
            axis.all_reduce(gradient, label="gradients")
        else:
            OrderedSums(axis, gradient).all_reduce(gradient)

    def _sum_partial(self, bucket: Bucket, gradient: Array) -> None:
        runs: list[tuple[int, int]] = []
        for spec, piece in self._tensors[bucket.first : bucket.last]:
            start = piece.start - bucket.start
            if not spec.partial:
                continue
            if runs and runs[-1][1] == start:
                start = runs.pop()[0]
            runs.append((start, piece.start - bucket.start + piece.size))
        if len(runs) == 1:
            ((start, stop),) = runs
            self._mesh.tensor.all_reduce(gradient[start:stop], label="gradients")
        elif runs:
            packed = arrays.empty(sum(stop - start for start, stop in runs), gradient.dtype, like=gradient)
            offset = 0
            for start, stop in runs:
                packed[offset : offset + stop - start] = gradient[start:stop]
                offset += stop - start
            self._mesh.tensor.all_reduce(packed, label="gradients")
            offset = 0
            for start, stop in runs:
                gradient[start:stop] = packed[offset : offset + stop - start]
                offset += stop - start

    def zero_duplicates(self, flat: Array) -> None:
        """Turn a gradient that is already summed into terms of a sum: zero all copies but one; not collective."""
        if self._mesh.data.rank:
            flat[...] = 0
        for spec, piece in self._tensors:
            tied = bool(spec.copies) and not self._mesh.place.runs(spec.stage)
            if tied or (spec.partial and self._mesh.tensor.rank):
                flat[piece.start : piece.start + piece.size] = 0

    # -- values -----------------------------------------------------------------------------------------------------

    def broadcast(self, parameters: FlatParameters) -> None:
        """Set all copies of the parameters to those of data rank 0, tensor rank 0 and the owners of ties."""
        if parameters.sharded is None:
            self._mesh.data.broadcast(parameters.flat, label="parameters")
            self.broadcast_within_replica(parameters.flat)
        elif self.within_replica:
            parameters.sharded.rewrite(self.broadcast_within_replica)

    def broadcast_within_replica(self, flat: Array, first: int = 0, last: int | None = None) -> None:
        """Set all copies within each data coordinate to those of tensor rank 0 and the owners of ties.

        `flat` is laid out like this rank's flat parameters, or like its tensors number `first` to `last` (exclusive).
        """
        tensors = self._tensors[first:last]
        for spec, piece in tensors:
            start = piece.start - tensors[0][1].start
            values = flat[start : start + piece.size]
            if not spec.is_split and self._mesh.tensor.size > 1:
                self._mesh.tensor.broadcast(values, label="parameters")
            if spec.name in self._ties:
                axis, owner = self._ties[spec.name]
                axis.broadcast(values, owner, label="parameters")

    def find_divergent(self, parameters: FlatParameters) -> dict[int, int]:
        """World ranks that have a copy that differs from the first copy, with the rank of that first copy."""
        mesh = self._mesh
        flat = arrays.to_host(parameters.flat if parameters.sharded is None else parameters.gather())
        stage, data, tensor = (mesh.coordinates[name] for name in ("pipeline", "data", "tensor"))
        unsplit, digests = hashlib.sha256(), []
        for spec, piece in self._tensors:
            values = flat[piece.start : piece.start + piece.size].data
            if not spec.is_split:
                unsplit.update(values)
            if spec.name in self._ties:
                digests.append(((spec.name, data, tensor), hashlib.sha256(values).digest()))
        digests.append((("unsplit", stage, data), unsplit.digest()))
        if parameters.sharded is None:
            digests.append((("copies", stage, tensor), hashlib.sha256(flat.data).digest()))
        first: dict[Any, tuple[int, bytes]] = {}
        divergent: dict[int, int] = {}
        for rank, of_rank in enumerate(mesh.world.allgather_object(tuple(digests))):
            for what, digest in of_rank:
                holder, theirs = first.setdefault(what, (rank, digest))
                if theirs != digest:
                    divergent.setdefault(rank, holder)
        return divergent


@dataclass(frozen=True)
class _SecondUse:
    """The second use of a tensor on this rank."""

    bucket: Bucket  # of its gradient alone
    first: Bucket  # the bucket in which the gradient of the first use is
    part: slice  # where this rank's part of `bucket` is to be added, in this rank's part of `first`


class TiedWeights:
    """Adds the uses of tied tensors, each of which is summed over the data axis by itself.

    Both uses may be on this rank: then the second has a bucket of its own here, in `buckets`. Or one is on another
    pipeline rank. The arguments `buckets` are those that cover the parameters; `counts` has for each the elements that
    each data rank owns.
    """

    def __init__(
        self, parameters: FlatParameters, buckets: Sequence[Bucket], counts: Sequence[Sequence[int]], rank: int
    ) -> None:
        # For each bucket of a second use, the elements that each data rank owns: the same as of the first use.
        self.counts: list[list[int]] = []
        self._second: list[_SecondUse] = []
        number = {piece.name: index for index, piece in enumerate(parameters.pieces)}
        for name, stage in parameters.second_uses.items():
            index, piece = number[name], parameters.pieces[number[name]]
            first = next(bucket for bucket in buckets if bucket.first <= index < bucket.last)
            stop = piece.start + piece.size
            after_others = len(buckets) + len(self._second)
            bucket = Bucket(after_others, index, index + 1, piece.start, stop, stage, second_use=True)
            self.counts.append([])
            start = first.start
            for each, count in enumerate(counts[first.index]):
                begin, end = max(start, piece.start), min(start + count, stop)
                self.counts[-1].append(max(0, end - begin))
                if each == rank:
                    place = slice(begin - start, end - start) if begin < end else slice(0, 0)
                start += count
            self._second.append(_SecondUse(bucket, first, place))
        # Those of second uses.
        self.buckets: tuple[Bucket, ...] = tuple(use.bucket for use in self._second)
        # Tied tensors have separate buckets, unless all of their stages are on this rank.
        self._tied = [
            (bucket, parameters.pieces[bucket.first].name)
            for bucket in buckets
            if bucket.last == bucket.first + 1 and parameters.local[bucket.first].copies
        ]

    @property
    def incomplete(self) -> set[int]:
        """Indices of the buckets to which a use is still to be added when they are summed over the data axis."""
        return {bucket.index for bucket, _ in self._tied} | {use.first.index for use in self._second}

    def add(self, part: Callable[[Bucket], Array], copies: TensorCopies) -> None:
        """Add the uses of each tied tensor, in this rank's part of the gradient.

        ``part(bucket)`` is this rank's part of the sum of a bucket over the data axis; `copies` adds over pipeline
        ranks. Collective over the pipeline ranks that share a tie.
        """
        for use in self._second:
            accumulate(part(use.first)[use.part], part(use.bucket))
        for bucket, name in self._tied:
            copies.sum_tie(name, part(bucket))


class BucketShares:
    """The buckets of a model's gradients, and which part of each every data rank owns: an even share.

    With `by_unit` a bucket is a whole unit of the parameters, so that bucket and unit have the same owners (ZeRO-3).
    With `ties_apart` the uses of a tied tensor are summed separately.
    """

    def __init__(
        self,
        config: ShardingConfiguration,
        parameters: FlatParameters,
        copies: TensorCopies,
        *,
        by_unit: bool,
        ties_apart: bool,
    ) -> None:
        self.axis: Axis = config.mesh.data
        self.copies = copies
        runs, sizes = bucket_layout(
            parameters, compressed=config.compressor is not None, by_unit=by_unit, ties_apart=ties_apart
        )
        whole = max(1, sum(spec.size for spec in parameters.specs))
        minimum = whole if by_unit else config.minimum_parameter_group_size
        # Those that cover the parameters.
        self.buckets: tuple[Bucket, ...] = make_buckets(parameters.pieces, minimum, runs, sizes)
        # By bucket and rank, the number of elements that the rank owns; those of second uses follow.
        self.counts: list[list[int]] = [run_lengths(split(bucket.size, self.axis.size)) for bucket in self.buckets]
        self.uses: TiedWeights | None = None  # adds the uses of tied tensors; None unless `ties_apart`
        if ties_apart:
            self.uses = TiedWeights(parameters, self.buckets, self.counts, self.axis.rank)
            self.counts += self.uses.counts

    @property
    def second_uses(self) -> tuple[Bucket, ...]:
        """The buckets of second uses, whose indices follow those of `buckets`."""
        return () if self.uses is None else self.uses.buckets

    @property
    def ranges(self) -> list[Range]:
        """This rank's share of each bucket, as ranges of the flat parameters."""
        runs = [(bucket.start, run_of(self.counts[bucket.index], self.axis.rank)) for bucket in self.buckets]
        return [(start + run.start, start + run.stop) for start, run in runs]

    def in_place(self, bucket: Bucket, gradient: Array) -> Array:
        """This rank's part of a bucket where it lies in the whole."""
        return gradient[run_of(self.counts[bucket.index], self.axis.rank)]

    def at_front(self, bucket: Bucket, gradient: Array) -> Array:
        """As many elements as this rank's part, at the front of the bucket's memory, where its sum arrives (ZeRO-1)."""
        return gradient[: self.counts[bucket.index][self.axis.rank]]


class OwnSums:
    """Memory for this rank's part of each summed gradient, apart from that of the buckets (ZeRO-2)."""

    def __init__(self, shares: BucketShares, ownership: OwnedRanges, like: Array) -> None:
        flat = arrays.zeros(ownership.size, like.dtype, like=like)
        self.of_parameters: list[Array] = ownership.state_views(flat)
        rank = shares.axis.rank
        sizes = [shares.counts[bucket.index][rank] for bucket in shares.second_uses]
        self._parts = [*self.of_parameters, *(arrays.zeros(size, like.dtype, like=like) for size in sizes)]
        self.nbytes: int = int(sum(part.nbytes for part in self._parts))

    def part(self, bucket: Bucket, gradient: Array) -> Array:
        """This rank's part of the sum of a bucket, whose `gradient` lies elsewhere."""
        return self._parts[bucket.index]
