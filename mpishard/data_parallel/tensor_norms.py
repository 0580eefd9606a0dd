"""Norms of whole tensors that are split over ranks, for rules such as LAMB that scale by these norms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpishard.backend import exact_norm
from mpishard.comm.axis import Axis
from mpishard.data_parallel.model_parallel_group import ModelParallelGroup
from mpishard.layout.local_layout import Piece
from mpishard.layout.specs import ParameterSpec

Array = Any
Range = tuple[int, int]
Span = tuple[int, int, int]


class Part(NamedTuple):
    """Elements ``[start, stop)`` of the owned range number `owned` belong to tensor number `tensor`."""

    tensor: int
    owned: int
    start: int
    stop: int


def parts_of(
    pieces: Sequence[Piece], tensors: Sequence[int], ranges: Sequence[Range], origins: Sequence[int]
) -> list[Part]:
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
                parts.append(Part(number, owned, begin - origin, end - origin))
    return parts


def spans_of(parts: Sequence[Part]) -> list[Span]:
    """The elements of `parts` as ``(owned, start, stop)``, with adjacent parts joined."""
    spans: list[Span] = []
    for _, owned, start, stop in parts:
        if spans and spans[-1][0] == owned and spans[-1][2] == start:
            spans[-1] = (owned, spans[-1][1], stop)
        else:
            spans.append((owned, start, stop))
    return spans


def norms(
    axis: Axis | ModelParallelGroup, specs: Sequence[ParameterSpec], parts: Sequence[Part], arrays: Sequence[Array]
) -> list[float]:
    """The 2-norm of every tensor over all ranks, with the same bits for any cut into parts.

    Every element must be in `parts` on exactly one rank of the axis; `arrays` has one array for each owned range.
    Collective over `axis`, the team of a strategy.
    """
    tops = np.zeros(len(specs))
    for tensor, owned, start, stop in parts:
        tops[tensor] = max(tops[tensor], exact_norm.largest(arrays[owned][start:stop]))
    axis.all_reduce(tops, op="max", label="norms")
    sums = np.zeros((len(specs), 2))
    for tensor, owned, start, stop in parts:
        part = arrays[owned][start:stop]
        sums[tensor] += exact_norm.sum_of_squares(part, float(tops[tensor]), specs[tensor].size)
    axis.all_reduce(sums, label="norms")
    return [exact_norm.norm(pair, float(top)) for pair, top in zip(sums, tops, strict=True)]
