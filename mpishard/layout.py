"""Who holds which piece of which global tensor: the one place that turns ranks into offsets.

A *box* is a tuple of ``(start, stop)`` pairs, one a dimension of a global tensor.  A *piece* ties a box to a place in
a rank's flat buffer; inside the buffer a box lies in row-major order.  A *holding* is all that one rank has, and a
layout is a sequence of holdings, one a rank.  Changing between layouts is a list of moves.  No MPI here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

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
        Pipeline stage that owns the tensor.
    tensor_dim : int or None
        Dimension split over the tensor axis; None: every tensor rank holds all of it.
    """

    name: str
    shape: tuple[int, ...]
    stage: int = 0
    tensor_dim: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(extent) for extent in self.shape))
        if not self.name:
            raise ValueError("a parameter needs a name")
        if min(self.shape, default=0) < 0:
            raise ValueError(f"parameter {self.name!r} has the negative extent {min(self.shape)} in {self.shape}")

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def box(self) -> Box:
        """The box that covers the whole tensor."""
        return tuple((0, extent) for extent in self.shape)


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


Holding = tuple[Piece, ...]


@dataclass(frozen=True)
class Move:
    """Copy `box` of tensor `name` from a piece on one rank to a piece on another (or the same) rank."""

    name: str
    box: Box
    source_rank: int
    source: Piece
    target_rank: int
    target: Piece


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


def holding_of_ranges(specs: Iterable[ParameterSpec], ranges: Iterable[tuple[int, int]]) -> Holding:
    """Pieces of a rank whose buffer is a run of ranges of the concatenated tensors.

    Parameters
    ----------
    specs : iterable of ParameterSpec
        Tensors in the order in which they are concatenated.
    ranges : iterable of (start, stop)
        Ascending ranges of the concatenation; the rank's buffer is these ranges end to end.
    """
    tensors = []
    offset = 0
    for spec in specs:
        tensors.append((offset, offset + spec.size, spec))
        offset += spec.size
    pieces: list[Piece] = []
    place = 0
    index = 0
    for start, stop in ranges:
        while index < len(tensors) and tensors[index][1] <= start:
            index += 1
        for first, last, spec in tensors[index:]:
            if first >= stop:
                break
            for box in boxes_of_range(spec.shape, max(start, first) - first, min(stop, last) - first):
                pieces.append(Piece(spec.name, box, place))
                place += pieces[-1].size
    return tuple(pieces)


def intersect(one: Box, other: Box) -> Box | None:
    """The box common to both, or None where it is empty."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return None if any(start >= stop for start, stop in common) else common


def moves(source: Sequence[Holding], target: Sequence[Holding]) -> list[Move]:
    """List what goes from whom to whom so that `source` becomes `target`.

    Every element of every target piece is covered exactly once.  Where several ranks hold a copy, a target takes its
    own; elements that a target already holds are listed with ``source_rank == target_rank`` and cost no message.

    Raises
    ------
    ValueError
        If some element of a target piece is held by no source rank.
    """
    held: dict[str, list[tuple[int, Piece]]] = defaultdict(list)
    for rank, holding in enumerate(source):
        for piece in holding:
            held[piece.name].append((rank, piece))
    plan: list[Move] = []
    for rank, holding in enumerate(target):
        for piece in holding:
            missing = [piece.box] if piece.size else []
            # Own pieces first; then from the next rank on, so that the holders of copies share the sending.
            holders = sorted(held[piece.name], key=lambda item, to=rank: (item[0] - to) % len(source))  # type: ignore[misc]
            for holder, held_piece in holders:
                uncovered: list[Box] = []
                for box in missing:
                    common = intersect(box, held_piece.box)
                    if common is None:
                        uncovered.append(box)
                    else:
                        plan.append(Move(piece.name, common, holder, held_piece, rank, piece))
                        uncovered += subtract(box, common)
                missing = uncovered
                if not missing:
                    break
            if missing:
                raise ValueError(f"no rank of the source layout holds {missing[0]} of tensor {piece.name!r}")
    return plan


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
