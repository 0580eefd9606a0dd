"""Move the arrays of a run from one layout to another, in bounded memory and without a disk.

Each rank plans what it receives, and requests it from the senders.  Rounds of Alltoallv then move the elements, packed
end to end, one bucket at a time.  Elements that a rank holds already are copied locally, or stay where they are.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from mpishard.arguments import integer
from mpishard.backend import array as arrays
from mpishard.comm.agreement import opening
from mpishard.comm.axis import Axis
from mpishard.comm.errors import raised_on_all
from mpishard.layout.boxes import Box, box_shape, box_size, boxes_of_range, intersect, subtract
from mpishard.layout.run_state import RunState, Shard, check_same_tensors, check_state
from mpishard.layout.tensors import LocalLayout, Piece

Array = Any


# The transfers between ranks that turn one layout into another.
#
# Reading a checkpoint needs none: each rank there intersects its own boxes with the stored ones
# (`mpishard.checkpoint.load`).


class Transfer(NamedTuple):
    """Copy a box of a tensor from a piece on one rank to a piece on another, or the same, rank; it lies inside both."""

    name: str
    box: Box
    source_rank: int
    source: Piece
    target_rank: int
    target: Piece


class Holders:
    """An index of the boxes that ranks hold of each tensor in a layout, made once for all target ranks."""

    def __init__(self, source: Sequence[LocalLayout]) -> None:
        held: dict[str, dict[Box, list[tuple[int, Piece]]]] = defaultdict(lambda: defaultdict(list))
        for rank, holding in enumerate(source):
            for piece in holding:
                if piece.size:
                    held[piece.name][piece.box].append((rank, piece))
        self._tensors = {name: _Boxes(boxes) for name, boxes in held.items()}

    def transfers_to(
        self, rank: int, holding: LocalLayout, lost: list[tuple[Piece, Box]] | None = None
    ) -> list[Transfer]:
        """The transfers to one rank with a new local layout, in the order of its pieces.

        Pieces with boxes that no rank holds are added to `lost`; without it they raise ValueError, as does a tensor
        with another number of dimensions.
        """
        plan: list[Transfer] = []
        for piece in holding:
            if not piece.size:
                continue
            tensor = self._tensors.get(piece.name, _NOBODY)
            copies = tensor.overlapping(piece)
            # The rank's own pieces come first: they cost no message.
            own = [each for each in tensor.of_rank.get(rank, ()) if intersect(piece.box, each.box) is not None]
            offers = itertools.chain(
                ((each.box, rank, each) for each in own),
                ((box, *copies_of_box[(rank + len(plan)) % len(copies_of_box)]) for box, copies_of_box in copies),
            )
            missing = [piece.box]
            for box, holder, source in offers:
                uncovered: list[Box] = []
                for part in missing:
                    common = intersect(part, box)
                    if common is None:
                        uncovered.append(part)
                    else:
                        plan.append(Transfer(piece.name, common, holder, source, rank, piece))
                        uncovered += subtract(part, common)
                missing = uncovered
                if not missing:
                    break
            if missing and lost is not None:
                lost += [(piece, box) for box in missing]
            elif missing:
                raise ValueError(f"no rank of the source layout holds {missing[0]} of tensor {piece.name!r}")
        return plan


class _Boxes:
    """The different boxes of one tensor that ranks hold, sorted by their start in its first dimension."""

    def __init__(self, boxes: Mapping[Box, Sequence[tuple[int, Piece]]]) -> None:
        self.boxes = sorted(boxes.items(), key=lambda item: item[0])
        runs = [box[0] if box else (0, 1) for box, _ in self.boxes]
        self.starts = [start for start, _ in runs]
        # Running maxima of the stops, ascending for bisection: all boxes before the first maximum above a start end at
        # or before that start.
        self.stops = list(itertools.accumulate((stop for _, stop in runs), max))
        self.of_rank: dict[int, list[Piece]] = defaultdict(list)
        for copies in boxes.values():
            for rank, piece in copies:
                self.of_rank[rank].append(piece)

    def overlapping(self, piece: Piece) -> Sequence[tuple[Box, Sequence[tuple[int, Piece]]]]:
        """The boxes that may have elements in common with the piece, each with all its holders."""
        start, stop = piece.box[0] if piece.box else (0, 1)
        if self.boxes and len(self.boxes[0][0]) != len(piece.box):
            raise ValueError(
                f"tensor {piece.name!r} has {len(self.boxes[0][0])} dimensions in the source layout and "
                f"{len(piece.box)} in the target; layouts of one model have the same tensors"
            )
        return self.boxes[bisect_right(self.stops, start) : bisect_left(self.starts, stop)]


_NOBODY = _Boxes({})


def transfers(source: Sequence[LocalLayout], target: Sequence[LocalLayout]) -> list[Transfer]:
    """List the transfers that turn the layout `source` into the layout `target`, by target rank.

    Every element of every target piece is covered exactly once; ValueError if no source rank holds it.  A target takes
    its own copy where it has one, listed with ``source_rank == target_rank``, which costs no message.  Otherwise the
    holders of copies take turns.
    """
    holders = Holders(source)
    return [move for rank, holding in enumerate(target) for move in holders.transfers_to(rank, holding)]


# -- moving the elements -----------------------------------------------------------------------------------------------

# The description of a shard for other ranks: its kind and dtype, and name, box and start of its pieces.
_Description = tuple[str, str, tuple[tuple[str, Box, int], ...]]
# The description of a run state: its tensors with their shapes, and its kinds.
_Model = tuple[tuple[tuple[str, tuple[int, ...]], ...], tuple[str, ...]]
_CONTROL = "control"


def reshard(axis: Axis, source: Shard | None, target: Shard | None, *, bucket_bytes: int = 2**26) -> None:
    """Fill the target array of every rank from the source arrays of all. Collective over `axis`.

    Every element of a target is written once, and none travels to a rank that has it already; ranks that hold copies
    share the sending. A rank that is not in a layout gives None. Source and target may share one array if each element
    has the same offset in both; only the missing elements are then received. A rank packs at most `bucket_bytes`, the
    least of all ranks', in one round, and receives as many; at least one element per target rank is allowed. The ledger
    counts elements under ``"reshard"``.

    Raises ValueError or TypeError on every rank, before anything is written, if kinds or dtypes differ, no rank holds
    an element that is required, or arrays do not fit their layouts.
    """
    descriptions = axis.allgather_object((_describe(source), _describe(target), int(bucket_bytes)))
    plan: list[Transfer] = []
    lost: list[tuple[Piece, Box]] = []
    with raised_on_all(axis):
        _check_alike(descriptions)
        _check_arrays(source, target)
        if target is not None:
            layouts = [() if side is None else tuple(Piece(*each) for each in side[2]) for side, _, _ in descriptions]
            holders = Holders(layouts)
            plan = holders.transfers_to(axis.rank, target.holding, None if target.required else lost)
        if source is not None and target is not None:
            _check_sharing(source, target, [move for move in plan if move.source_rank == axis.rank])
    for piece, box in lost:
        assert target is not None
        view_of(target.array, piece, box)[...] = 0
    if source is not None and target is not None and source.array is not target.array:
        for move in plan:
            if move.source_rank == axis.rank:
                view_of(target.array, move.target, move.box)[...] = view_of(source.array, move.source, move.box)
    wanted: list[list[Transfer]] = [[] for _ in range(axis.size)]
    for move in plan:
        if move.source_rank != axis.rank:
            wanted[move.source_rank].append(move)
    incoming = [_Stream([(move.target, move.box) for move in part]) for part in wanted]
    outgoing = _request(axis, wanted, source)
    dtype = next(np.dtype(side[1]) for side, _, _ in descriptions if side is not None)
    bucket = min(limit for _, _, limit in descriptions) // dtype.itemsize
    _send_rounds(axis, source, target, outgoing, incoming, dtype, bucket)


def reshard_state(
    axis: Axis, source: RunState | None, target: RunState | None, *, bucket_bytes: int = 2**26
) -> Mapping[str, Any]:
    """Fill the arrays of the target state of every rank from the source states of all.  Collective over `axis`.

    Parameters
    ----------
    axis : Axis
        The ranks of both layouts.
    source, target : RunState or None
        Of one model.  A target may have fewer kinds of arrays than the source, e.g. the parameters alone.  None on a
        rank that is not in that layout.
    bucket_bytes : int
        As for `reshard`.

    Returns
    -------
    mapping
        The metadata (facts) of the source, on all ranks.

    Raises
    ------
    ValueError, TypeError
        On every rank and before anything is written, if the states are of different models or the source lacks a kind
        of array that the target has; also the errors of `reshard`, for each kind in turn.
    """
    with opening(axis, "reshard_state"):
        models = _model("source", source), _model("target", target)
        integer("bucket_bytes", bucket_bytes, least=1)
    descriptions = axis.allgather_object(models)
    with raised_on_all(axis):
        _check_models(descriptions)
    for kind in next((model[1] for _, model in descriptions if model is not None), ()):
        reshard(axis, _shard(source, kind), _shard(target, kind), bucket_bytes=bucket_bytes)
    first = next(rank for rank, (model, _) in enumerate(descriptions) if model is not None)
    return _share_facts(axis, source.facts if source is not None else {}, first)


# -- checks -----------------------------------------------------------------------------------------------------------


def _describe(shard: Shard | None) -> _Description | None:
    if shard is None:
        return None
    pieces = tuple((piece.name, piece.box, piece.start) for piece in shard.holding)
    return shard.kind, shard.array.dtype.name, pieces


def _check_alike(descriptions: Sequence[tuple[_Description | None, _Description | None, int]]) -> None:
    """Raise unless all sides are arrays of one kind and dtype, and somebody has a source."""
    sides = [
        (f"the {what} of rank {rank}", side)
        for rank, (source, target, _) in enumerate(descriptions)
        for what, side in (("source", source), ("target", target))
        if side is not None
    ]
    for whose, (kind, dtype, _) in sides[1:]:
        first, (first_kind, first_dtype, _) = sides[0]
        if kind != first_kind:
            raise ValueError(f"{first} is {first_kind!r} but {whose} is {kind!r}; reshard one kind of array at a time")
        if dtype != first_dtype:
            raise TypeError(f"{first} is {first_dtype} but {whose} is {dtype}; resharding does not convert")
    if all(source is None for source, _, _ in descriptions):
        raise ValueError("no rank has a source to reshard from")
    if min(limit for _, _, limit in descriptions) < 1:
        raise ValueError(f"bucket_bytes must be at least 1, got {min(limit for _, _, limit in descriptions)}")


def _check_arrays(*shards: Shard | None) -> None:
    """Raise unless this rank's arrays are as long as their layouts say, and are in one kind of memory."""
    for shard in shards:
        if shard is None:
            continue
        end = max((piece.start + piece.size for piece in shard.holding), default=0)
        if shard.array.ndim != 1 or not shard.array.flags.c_contiguous or end > shard.array.size:
            raise ValueError(
                f"{shard.kind!r} has pieces up to element {end} in an array of shape {shard.array.shape}; it must be "
                "flat, contiguous, and long enough"
            )
    modules = {arrays.module_of(shard.array).__name__ for shard in shards if shard is not None}
    if len(modules) > 1:
        raise TypeError(f"source and target of a rank are arrays of {' and '.join(sorted(modules))}; use one kind")


def _check_sharing(source: Shard, target: Shard, local: Sequence[Transfer]) -> None:
    """Raise unless the arrays share no memory, or are one array in which no element changes its offset."""
    same = source.array is target.array
    if not same and not arrays.module_of(source.array).may_share_memory(source.array, target.array):
        return
    in_place = sum(box_size(move.box) for move in local if _stays(move))
    if not same or len(local) != sum(map(_stays, local)) or in_place != sum(piece.size for piece in source.holding):
        raise ValueError(
            f"source and target of {source.kind!r} share memory, but elements lie elsewhere in the one than in the "
            "other; give the target its own array"
        )


def _stays(move: Transfer) -> bool:
    """Return True if the elements have the same offsets in the source array and in the target array."""
    return _offsets(move.source, move.box) == _offsets(move.target, move.box)


def _offsets(piece: Piece, box: Box) -> tuple[int, list[int]]:
    """The offset of the first element of a box of a piece, and the strides along extents above 1."""
    strides = list(accumulate(piece.shape[:0:-1], int.__mul__, initial=1))[::-1][: len(box)]
    offsets = [start - origin for (start, _), (origin, _) in zip(box, piece.box, strict=True)]
    first = piece.start + sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    return first, [stride for (start, stop), stride in zip(box, strides, strict=True) if stop - start > 1]


def _model(name: str, state: RunState | None) -> _Model | None:
    if state is None:
        return None
    check_state(name, state)
    return tuple((spec.name, spec.shape) for spec in state.specs), state.kinds


def _check_models(descriptions: Sequence[tuple[_Model | None, _Model | None]]) -> None:
    """Raise unless all states are of one model, and targets want kinds that the sources have."""
    sources = [model for model, _ in descriptions if model is not None]
    targets = [model for _, model in descriptions if model is not None]
    if not sources:
        raise ValueError("no rank has a state to reshard from")
    tensors, kinds = sources[0]
    for other, _ in (*sources[1:], *targets):
        check_same_tensors("the source state", tensors, other, "Give source and target the same tensors on every rank")
    for _, other_kinds in sources[1:]:
        if other_kinds != kinds:
            raise ValueError(f"the source states of two ranks have {', '.join(kinds)} and {', '.join(other_kinds)}")
    for _, wanted in targets:
        if wanted != targets[0][1]:
            raise ValueError(f"the targets of two ranks have {', '.join(targets[0][1])} and {', '.join(wanted)}")
        missing = [kind for kind in wanted if kind not in kinds]
        if missing:
            raise ValueError(
                f"the target has {', '.join(missing)}, but the source only {', '.join(kinds)}; make the target's "
                "optimizer with the rule that the source has"
            )


def _shard(state: RunState | None, kind: str) -> Shard | None:
    return None if state is None else next(shard for shard in state.shards if shard.kind == kind)


# -- transfer ---------------------------------------------------------------------------------------------------------


class _Stream:
    """The elements that travel from one rank to another: boxes of pieces, end to end."""

    def __init__(self, boxes: Sequence[tuple[Piece, Box]]) -> None:
        self.boxes = boxes
        self.starts = list(accumulate((box_size(box) for _, box in boxes), initial=0))
        self.size = self.starts[-1]

    def between(self, start: int, stop: int) -> Iterator[tuple[Piece, Box]]:
        """The elements `start` to `stop` of the stream, in order, as boxes of pieces."""
        for index in range(bisect_right(self.starts, start) - 1, len(self.boxes)):
            first, last = self.starts[index], self.starts[index + 1]
            if first >= stop:
                break
            piece, box = self.boxes[index]
            if start <= first and last <= stop:
                yield piece, box
                continue
            for part in boxes_of_range(box_shape(box), max(start, first) - first, min(stop, last) - first):
                yield piece, tuple((a + begin, b + begin) for (a, b), (begin, _) in zip(part, box, strict=True))


def view_of(array: Array, piece: Piece, box: Box) -> Array:
    """The view of a box of a piece in an array."""
    inside = (slice(start - origin, stop - origin) for (start, stop), (origin, _) in zip(box, piece.box, strict=True))
    return array[piece.start : piece.start + piece.size].reshape(piece.shape)[(*inside, ...)]


def _request(axis: Axis, wanted: Sequence[Sequence[Transfer]], source: Shard | None) -> list[_Stream]:
    """Request from every rank the boxes to send here; returns what this rank is to send to each."""
    words = [[number for move in part for number in (move.source.start, *sum(move.box, ()))] for part in wanted]
    lengths = np.array([len(part) for part in words], np.int64)
    request_lengths = axis.all_to_all(lengths, np.empty_like(lengths), label=_CONTROL).tolist()
    own_requests = np.array([word for part in words for word in part], np.int64)
    requests = np.empty(sum(request_lengths), np.int64)
    axis.all_to_all(own_requests, requests, lengths.tolist(), request_lengths, label=_CONTROL)
    # Pieces with elements do not overlap, so the start in the array identifies a piece.
    pieces = {piece.start: piece for piece in (source.holding if source is not None else ()) if piece.size}
    streams, numbers, end = [], iter(requests.tolist()), 0
    for length in request_lengths:
        boxes, end = [], end + length
        while length:
            piece = pieces[next(numbers)]
            boxes.append((piece, tuple((next(numbers), next(numbers)) for _ in piece.box)))
            length -= 1 + 2 * len(piece.box)
        streams.append(_Stream(boxes))
    return streams


def _send_rounds(
    axis: Axis,
    source: Shard | None,
    target: Shard | None,
    outgoing: Sequence[_Stream],
    incoming: Sequence[_Stream],
    dtype: np.dtype,
    bucket: int,
) -> None:
    """Move the streams in rounds. A round moves as much of each stream as fits the bucket at both of its ends.

    `bucket` is the number of elements that a rank sends in a round at most, and receives.
    """
    peers = axis.allgather_object(max(sum(stream.size > 0 for stream in streams) for streams in (outgoing, incoming)))
    # Both ends of a stream compute the same quota for it.
    quotas = [max(1, bucket // max(1, peers[axis.rank], other)) for other in peers]
    rounds = [-(-stream.size // quota) for stream, quota in zip(outgoing, quotas, strict=True)]
    most = int(axis.all_reduce(np.array([max(rounds)], np.int64), op="max", label=_CONTROL)[0])
    # The first round is the largest.
    sending = _buffer(source or target, dtype, sum(_counts(outgoing, quotas, 0)))
    receiving = _buffer(target or source, dtype, sum(_counts(incoming, quotas, 0)))
    for number in range(most):
        out_counts, in_counts = (_counts(streams, quotas, number) for streams in (outgoing, incoming))
        packed, arrived = sending[: sum(out_counts)], receiving[: sum(in_counts)]
        for view, run in _runs(source, outgoing, quotas, number, packed):
            run[...] = view
        axis.all_to_all(packed, arrived, out_counts, in_counts, label="reshard")
        for view, run in _runs(target, incoming, quotas, number, arrived):
            view[...] = run


def _counts(streams: Sequence[_Stream], quotas: Sequence[int], number: int) -> list[int]:
    """The number of elements of each stream that travel in a round."""
    return [min(quota, max(0, s.size - quota * number)) for s, quota in zip(streams, quotas, strict=True)]


def _runs(
    shard: Shard | None, streams: Sequence[_Stream], quotas: Sequence[int], number: int, packed: Array
) -> Iterator[tuple[Array, Array]]:
    """The parts of a rank's array that travel in a round: a view of each, and its view in the packed buffer."""
    offset = 0
    for stream, quota in zip(streams, quotas, strict=True):
        for piece, box in stream.between(quota * number, quota * (number + 1)):
            assert shard is not None
            view = view_of(shard.array, piece, box)
            yield view, packed[offset : offset + view.size].reshape(view.shape)
            offset += view.size


def _buffer(like: Shard | None, dtype: np.dtype, size: int) -> Array:
    return np.empty(size, dtype) if like is None else arrays.empty(size, dtype, like=like.array)


def _share_facts(axis: Axis, facts: Mapping[str, Any], first: int) -> Mapping[str, Any]:
    """Broadcast the facts of rank `first` to all ranks; arrays travel as buffers."""
    mine = dict(facts) if axis.rank == first else {}
    plain = {name: value for name, value in mine.items() if not isinstance(value, np.ndarray)}
    layout = [(name, value.dtype.str, value.shape) for name, value in mine.items() if isinstance(value, np.ndarray)]
    plain, layout = axis.allgather_object((plain, layout))[first]
    for name, dtype, shape in layout:
        own = mine[name].astype(dtype, order="C") if name in mine else np.empty(shape, dtype)
        plain[name] = axis.broadcast(own, first, label=_CONTROL)
    return plain
