"""Owned ranges, cut at tensors: into parts, for norms by tensor, and spans, for global ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mpishard.layout.tensors import Piece

Range = tuple[int, int]
Span = tuple[int, int, int]


class OwnedPart(NamedTuple):
    """Elements ``[start, stop)`` of the owned range number `owned` belong to tensor number `tensor`."""

    tensor: int
    owned: int
    start: int
    stop: int


def parts_of(
    pieces: Sequence[Piece], tensors: Sequence[int], ranges: Sequence[Range], origins: Sequence[int]
) -> list[OwnedPart]:
    """Cut ascending ranges of a flat buffer at its pieces; positions in a part count from the range's origin.

    `tensors` has the tensor number of each piece.
    """
    parts = []
    first = 0
    for owned, ((start, stop), origin) in enumerate(zip(ranges, origins, strict=True)):
        while first < len(pieces) and pieces[first].start + pieces[first].size <= start:
            first += 1
        for number, piece in zip(tensors[first:], pieces[first:], strict=True):
            if piece.start >= stop:
                break
            begin, end = max(piece.start, start), min(piece.start + piece.size, stop)
            if begin < end:
                parts.append(OwnedPart(number, owned, begin - origin, end - origin))
    return parts


def spans_of(parts: Sequence[OwnedPart]) -> list[Span]:
    """The elements of `parts` as ``(owned, start, stop)``, with adjacent parts joined."""
    spans: list[Span] = []
    for _, owned, start, stop in parts:
        if spans and spans[-1][0] == owned and spans[-1][2] == start:
            spans[-1] = (owned, spans[-1][1], stop)
        else:
            spans.append((owned, start, stop))
    return spans
