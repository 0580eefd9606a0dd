"""Who holds which piece of which global tensor: the one place that turns ranks into offsets.

A *box* is a tuple of ``(start, stop)`` pairs, one a dimension of a global tensor.  A *piece* ties a box to a place in
a rank's flat buffer; inside the buffer a box lies in row-major order.  A *holding* is all that one rank has, and a
layout is a sequence of holdings, one a rank.  Changing between layouts is a list of moves.  No MPI here.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from mpishard.arguments import flag, integer, shown

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ParameterSpec:
    """What every rank knows of one global tensor.

    Parameters
    ----------
    name : str
        Unique in its model, e.g. ``"blocks.0.attention.qkv.weight"``.
    shape : tuple of int
        Global shape; may contain zeros.
    stage : int
        Pipeline stage that owns the tensor.  With several chunks a rank it is the virtual stage, of which pipeline rank
        r of p holds r, r + p, r + 2 p, and so on.
    tensor_dim : int or None
        Dimension split over the tensor axis; None: every tensor rank holds all of it, and the copies are replicas.
    partial : bool
        Whether the gradients that the tensor ranks compute for their replicas are terms of a sum, instead of equal.
    copies : tuple of int
        Further stages that hold the tensor and use it too: a tie, whose gradients are terms of a sum over the stages.
    """

    name: str
    shape: tuple[int, ...]
    stage: int = 0
    tensor_dim: int | None = None
    partial: bool = False
    copies: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_name(self.name)
        shape: object = self.shape
        if isinstance(shape, str) or not isinstance(shape, Iterable):
            raise TypeError(f"parameter {self.name!r}: shape={shown(shape)} must be a tuple of whole numbers")
        what = f"parameter {self.name!r}: {{}}".format
        object.__setattr__(self, "shape", tuple(integer(what("extent"), extent) for extent in self.shape))
        object.__setattr__(self, "stage", integer(what("stage"), self.stage, least=0))
        object.__setattr__(self, "copies", tuple(integer(what("copy"), stage, least=0) for stage in self.copies))
        object.__setattr__(self, "partial", flag(what("partial"), self.partial))
        if self.tensor_dim is not None:
            object.__setattr__(self, "tensor_dim", integer(what("tensor_dim"), self.tensor_dim))
        if min(self.shape, default=0) < 0:
            raise ValueError(f"parameter {self.name!r} has the negative extent {min(self.shape)} in {self.shape}")
        if self.tensor_dim is not None and not 0 <= self.tensor_dim < len(self.shape):
            raise ValueError(
                f"parameter {self.name!r} of shape {self.shape} has no dimension {self.tensor_dim} to split"
            )
        if self.partial and self.tensor_dim is not None:
            raise ValueError(
                f"parameter {self.name!r} is split along {self.tensor_dim}, so every tensor rank has gradients of its "
                "own; only those of replicas (tensor_dim=None) can be partial"
            )

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def box(self) -> Box:
        """The box that covers the whole tensor."""
        return tuple((0, extent) for extent in self.shape)


def _check_name(name: object) -> None:
    """Raise unless it can name a tensor, in a file too."""
    if not isinstance(name, str):
        raise TypeError(f"a parameter's name must be a string, got {shown(name)}")
    if not name:
        raise ValueError("a parameter needs a name")
    if "\0" in name or any("\ud800" <= letter <= "\udfff" for letter in name):
        raise ValueError(f"the parameter name {name!r} has a NUL or a surrogate in it, which files cannot hold")


@dataclass(frozen=True)
class Piece:
    """A box of the global tensor `name`, stored from element `start` of a flat buffer on, row-major."""

    name: str
    box: Box
    start: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.box)

    @property
    def size(self) -> int:
        return prod(self.shape)


LocalLayout = tuple[Piece, ...]


@dataclass(frozen=True)
class ModelParallelRank:
    """Where a rank stands in a mesh, as far as it decides which parameters it holds.

    Parameters
    ----------
    tensor_rank, tensor_size : int
        On the tensor axis.
    pipeline_rank, pipeline_size : int
        On the pipeline axis.
    """

    tensor_rank: int = 0
    tensor_size: int = 1
    pipeline_rank: int = 0
    pipeline_size: int = 1

    def runner(self, stage: int) -> int:
        """The pipeline rank that runs the (virtual) stage."""
        return stage % self.pipeline_size

    def runs(self, stage: int) -> bool:
        """Whether this rank runs the (virtual) stage."""
        return self.runner(stage) == self.pipeline_rank

    def holders(self, spec: ParameterSpec) -> list[int]:
        """The pipeline ranks that hold the tensor, ascending; several if it is tied between them."""
        return sorted({self.runner(stage) for stage in (spec.stage, *spec.copies)})

    def holds(self, spec: ParameterSpec) -> bool:
        """Whether this rank holds the tensor, or its own slice of it."""
        return self.pipeline_rank in self.holders(spec)

    def box(self, spec: ParameterSpec) -> Box:
        """The slice of a tensor that belongs to this rank of the tensor axis."""
        if spec.tensor_dim is None:
            return spec.box
        cuts = split(spec.shape[spec.tensor_dim], self.tensor_size)
        box = list(spec.box)
        box[spec.tensor_dim] = (cuts[self.tensor_rank], cuts[self.tensor_rank + 1])
        return tuple(box)

    def counts(self, spec: ParameterSpec) -> bool:
        """Whether this rank's elements of the tensor are the ones to count, of replicas and ties the first."""
        return self.runs(spec.stage) and (spec.tensor_dim is not None or self.tensor_rank == 0)

    def holding(self, specs: Iterable[ParameterSpec]) -> LocalLayout:
        """What this rank holds of the tensors, end to end in their order."""
        pieces: list[Piece] = []
        start = 0
        for spec in specs:
            if self.holds(spec):
                pieces.append(Piece(spec.name, self.box(spec), start))
                start += pieces[-1].size
        return tuple(pieces)


WHOLE = ModelParallelRank()


class Transfer(NamedTuple):
    """Copy `box` of tensor `name` from a piece on one rank to a piece on another (or the same) rank."""

    name: str
    box: Box
    source_rank: int
    source: Piece
    target_rank: int
    target: Piece


def merge_ties(specs: Iterable[ParameterSpec]) -> list[ParameterSpec]:
    """Make one spec of those with one name: a tensor that several stages list is tied between them.

    Raises
    ------
    ValueError
        If tied tensors differ in shape or split, or a stage lists a name twice.
    """
    merged: dict[str, ParameterSpec] = {}
    for spec in specs:
        first = merged.setdefault(spec.name, spec)
        if first is spec:
            continue
        if spec.stage in (first.stage, *first.copies):
            raise ValueError(f"two parameters of stage {spec.stage} are named {spec.name!r}; names must be unique")
        if (first.shape, first.tensor_dim, first.partial) != (spec.shape, spec.tensor_dim, spec.partial):
            raise ValueError(
                f"{spec.name!r} ties a tensor of shape {first.shape}, split along {first.tensor_dim}, on stage "
                f"{first.stage} to one of shape {spec.shape}, split along {spec.tensor_dim}, on stage {spec.stage}; "
                "tied tensors must be alike, in `partial` too"
            )
        merged[spec.name] = replace(first, copies=(*first.copies, spec.stage))
    return list(merged.values())


def split(size: int, parts: int) -> list[int]:
    """Offsets that cut `size` elements into `parts` runs, the first ``size % parts`` of them one longer.

    Run ``r`` is ``[offsets[r], offsets[r + 1])``; runs are empty where there are more parts than elements.
    """
    if size < 0 or parts < 1:
        raise ValueError(f"cannot split {size} elements into {parts} parts")
    quotient, remainder = divmod(size, parts)
    return [part * quotient + min(part, remainder) for part in range(parts + 1)]


def counts(offsets: Sequence[int]) -> list[int]:
    """Lengths of the runs between consecutive offsets."""
    return [stop - start for start, stop in zip(offsets[:-1], offsets[1:], strict=True)]


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Cut the row-major range ``[start, stop)`` of a tensor into boxes, in order.

    At most ``2 * len(shape) - 1`` boxes: a ragged head, whole rows, and a ragged tail, dimension by dimension.
    """
    if start >= stop:
        return []
    if not shape:
        return [()]
    row = prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last and (start % row or stop % row):
        rest = boxes_of_range(shape[1:], start - first * row, stop - first * row)
        return [((first, first + 1), *box) for box in rest]
    boxes: list[Box] = []
    if start % row:
        boxes += boxes_of_range(shape, start, (first + 1) * row)
        first += 1
    whole = stop // row
    if whole > first:
        boxes.append(((first, whole), *((0, extent) for extent in shape[1:])))
    if stop % row:
        boxes += boxes_of_range(shape, whole * row, stop)
    return boxes


def cut_holding(holding: LocalLayout, ranges: Iterable[tuple[int, int]]) -> LocalLayout:
    """Pieces of a buffer that is a run of ranges of another one.

    Parameters
    ----------
    holding : tuple of Piece
        What the other buffer holds, end to end.
    ranges : iterable of (start, stop)
        Ascending ranges of the other buffer; the new one is these ranges end to end.
    """
    pieces: list[Piece] = []
    place = 0
    for start, stop in ranges:
        first = max(0, bisect_right(holding, start, key=lambda piece: piece.start) - 1)
        for whole in itertools.islice(holding, first, None):
            if whole.start >= stop:
                break
            begin, end = max(start, whole.start), min(stop, whole.start + whole.size)
            for box in boxes_of_range(whole.shape, begin - whole.start, end - whole.start):
                within = zip(box, whole.box, strict=True)
                pieces.append(Piece(whole.name, tuple((a + c, b + c) for (a, b), (c, _) in within), place))
                place += pieces[-1].size
    return tuple(pieces)


def intersect(one: Box, other: Box) -> Box | None:
    """The box common to both, or None where it is empty."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return None if any(start >= stop for start, stop in common) else common


class Holders:
    """Who holds what of each tensor in a layout: made once, then asked for one target rank after another.

    Parameters
    ----------
    source : sequence of tuple of Piece
        What each rank holds.
    """

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
        """The moves of `transfers` whose target is this rank, which is to hold `holding`.

        Boxes of its pieces that nobody holds are added to `lost`; without it, it raises as `transfers` does.
        """
        plan: list[Transfer] = []
        for piece in holding:
            if not piece.size:
                continue
            tensor = self._tensors.get(piece.name, _NOBODY)
            copies = tensor.overlapping(piece)
            # What the rank has itself comes first: it costs no message.
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
    """The different boxes of one tensor that ranks hold, by where they start in its first dimension."""

    def __init__(self, boxes: Mapping[Box, Sequence[tuple[int, Piece]]]) -> None:
        self.boxes = sorted(boxes.items(), key=lambda item: item[0])
        runs = [box[0] if box else (0, 1) for box, _ in self.boxes]
        self.starts = [start for start, _ in runs]
        # Never descending, unlike the stops themselves: all boxes before the first of these that is past a start end
        # before it too.
        self.stops = list(itertools.accumulate((stop for _, stop in runs), max))
        self.of_rank: dict[int, list[Piece]] = defaultdict(list)
        for copies in boxes.values():
            for rank, piece in copies:
                self.of_rank[rank].append(piece)

    def overlapping(self, piece: Piece) -> Sequence[tuple[Box, Sequence[tuple[int, Piece]]]]:
        """Those that can have elements in common with the piece, each with all who hold it."""
        start, stop = piece.box[0] if piece.box else (0, 1)
        if self.boxes and len(self.boxes[0][0]) != len(piece.box):
            raise ValueError(
                f"tensor {piece.name!r} has {len(self.boxes[0][0])} dimensions in the source layout and "
                f"{len(piece.box)} in the target; layouts of one model have the same tensors"
            )
        return self.boxes[bisect_right(self.stops, start) : bisect_left(self.starts, stop)]


_NOBODY = _Boxes({})


def transfers(source: Sequence[LocalLayout], target: Sequence[LocalLayout]) -> list[Transfer]:
    """List what goes from whom to whom so that `source` becomes `target`.

    Every element of every target piece is covered exactly once.  Where several ranks hold a copy, a target takes its
    own, listed with ``source_rank == target_rank``, which costs no message; of others the holders take turns.

    Raises
    ------
    ValueError
        If some element of a target piece is held by no source rank.
    """
    holders = Holders(source)
    return [move for rank, holding in enumerate(target) for move in holders.transfers_to(rank, holding)]


def subtract(box: Box, hole: Box) -> list[Box]:
    """Boxes that cover `box` without `hole`, which lies inside it."""
    rest: list[Box] = []
    done: Box = ()
    for dim, ((start, stop), (hole_start, hole_stop)) in enumerate(zip(box, hole, strict=True)):
        if start < hole_start:
            rest.append((*done, (start, hole_start), *box[dim + 1 :]))
        if hole_stop < stop:
            rest.append((*done, (hole_stop, stop), *box[dim + 1 :]))
        done = (*done, (hole_start, hole_stop))
    return rest
