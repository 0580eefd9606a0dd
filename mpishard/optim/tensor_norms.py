"""Norms of whole tensors of which ranks hold parts, for rules such as LAMB that scale by them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpishard import summation
from mpishard.collectives import Axis
from mpishard.layout import ParameterSpec

Array = Any
Range = tuple[int, int]


class Part(NamedTuple):
    """Elements ``[start, stop)`` of the owned range number `owned` belong to tensor number `tensor`."""

    tensor: int
    owned: int
    start: int
    stop: int


def parts_of(specs: Sequence[ParameterSpec], ranges: Sequence[Range], origins: Sequence[int]) -> list[Part]:
    """Cut ascending ranges of the flat parameters at tensor boundaries; places count from each range's origin."""
    parts = []
    tensors = list(_extents(specs))
    first = 0
    for owned, ((start, stop), origin) in enumerate(zip(ranges, origins, strict=True)):
        while first < len(tensors) and tensors[first][1] <= start:
            first += 1
        for tensor in range(first, len(tensors)):
            begin, end = tensors[tensor]
            if begin >= stop:
                break
            if max(begin, start) < min(end, stop):
                parts.append(Part(tensor, owned, max(begin, start) - origin, min(end, stop) - origin))
    return parts


def norms(axis: Axis, specs: Sequence[ParameterSpec], parts: Sequence[Part], arrays: Sequence[Array]) -> list[float]:
    """The 2-norm of every tensor over all ranks, the same bits for any cut into parts.

    `parts` must name every element on exactly one rank of the axis; `arrays` has one array for each owned range.
    Collective over `axis`.
    """
    tops = np.zeros(len(specs))
    for tensor, owned, start, stop in parts:
        tops[tensor] = max(tops[tensor], summation.largest(arrays[owned][start:stop]))
    axis.all_reduce(tops, op="max", label="norms")
    sums = np.zeros((len(specs), 2))
    for tensor, owned, start, stop in parts:
        part = arrays[owned][start:stop]
        sums[tensor] += summation.sum_of_squares(part, float(tops[tensor]), specs[tensor].size)
    axis.all_reduce(sums, label="norms")
    return [summation.norm(pair, float(top)) for pair, top in zip(sums, tops, strict=True)]


def _extents(specs: Sequence[ParameterSpec]) -> Iterator[Range]:
    start = 0
    for spec in specs:
        yield start, start + spec.size
        start += spec.size
