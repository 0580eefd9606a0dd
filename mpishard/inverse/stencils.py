"""Stencils on a field that is cut over ranks: differences of neighbours, and the neighbours' cells beyond a cut."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from types import EllipsisType
from typing import Any

import numpy as np

from mpishard.backend import array as arrays
from mpishard.backend import exact, exact_norms
from mpishard.comm.axis import Axis
from mpishard.comm.errors import OneRank, raised_on_all
from mpishard.layout.boxes import Box, box_shape, box_size, inside, intersect
from mpishard.parameters.partition import Partition

Array = Any


# Differences of neighbours on a grid, with a zero where there is no neighbour, and their adjoints.


def along(dim: int, start: int | None, stop: int | None) -> tuple[slice, ...]:
    """The index of a range in one dimension and of everything in those before it."""
    return (*(slice(None),) * dim, slice(start, stop))


def forward(field: Array, dim: int, spacing: float) -> Array:
    """The next element less this one, over the spacing; 0 for the last."""
    out = arrays.module_of(field).zeros_like(field)
    out[along(dim, None, -1)] = (field[along(dim, 1, None)] - field[along(dim, None, -1)]) / spacing
    return out


def forward_adjoint(flow: Array, dim: int, spacing: float) -> Array:
    """The transpose of `forward`."""
    inner = flow[along(dim, None, -1)] / spacing
    out = arrays.module_of(flow).zeros_like(flow)
    out[along(dim, None, -1)] -= inner
    out[along(dim, 1, None)] += inner
    return out


def second(field: Array, dim: int, spacing: float) -> Array:
    """Next less twice this plus previous element, over the square of the spacing; 0 for the first and the last."""
    out = arrays.module_of(field).zeros_like(field)
    if field.shape[dim] > 2:
        middle = field[along(dim, 1, -1)]
        sides = field[along(dim, 2, None)] + field[along(dim, None, -2)]
        out[along(dim, 1, -1)] = (sides - 2.0 * middle) / (spacing * spacing)
    return out


def second_adjoint(flow: Array, dim: int, spacing: float) -> Array:
    """The transpose of `second`."""
    out = arrays.module_of(flow).zeros_like(flow)
    if flow.shape[dim] > 2:
        inner = flow[along(dim, 1, -1)] / (spacing * spacing)
        out[along(dim, None, -2)] += inner
        out[along(dim, 1, -1)] -= 2.0 * inner
        out[along(dim, 2, None)] += inner
    return out


def difference_mask(mask: Array, dim: int, order: int) -> Array:
    """The mask of the differences of this order: 1 where all elements count that a difference takes, else 0."""
    out = mask.copy()
    if order >= 1 and mask.shape[dim] > 1:
        out[along(dim, None, -1)] *= mask[along(dim, 1, None)]
    if order == 2 and mask.shape[dim] > 1:
        out[along(dim, 1, None)] *= mask[along(dim, None, -1)]
    return out


# Rows of the neighbours of a slab, for fields that are cut along their first dimension over the tensor axis.

_TAG = 7


def exchange_rows(axis: Axis, slab: Array, rows: int) -> tuple[Array | None, Array | None]:
    """The last rows of the slab before and the first rows of the slab after. Collective over the axis.

    The ranks of the axis have the slabs in order, each of at least `rows` rows, unless a rank is the only one;
    ValueError on all ranks if one has fewer. Returns new arrays; None without a neighbour.
    """
    if axis.size == 1 or not rows:
        return None, None
    with raised_on_all(axis):
        if len(slab) < rows:
            raise ValueError(
                f"rank {axis.rank} of {axis.size} on the tensor axis has {len(slab)} rows of the field, and its "
                f"neighbours need {rows} of them; take fewer tensor ranks"
            )
    module = arrays.module_of(slab)
    sent = []
    found: list[Array | None] = []
    for other, own in ((axis.rank - 1, slab[:rows]), (axis.rank + 1, slab[-rows:])):
        if 0 <= other < axis.size:
            sent.append(axis.start_send(module.ascontiguousarray(own).reshape(-1), other, _TAG, label="halo"))
    for other in (axis.rank - 1, axis.rank + 1):
        if not 0 <= other < axis.size:
            found.append(None)
            continue
        buffer = arrays.empty(rows * prod(slab.shape[1:]), slab.dtype, like=slab)
        axis.recv(buffer, other, _TAG, label="halo")
        found.append(buffer.reshape(rows, *slab.shape[1:]))
    for request in sent:
        request.wait()
    return found[0], found[1]


# Cells of the neighbours of a box, for fields that the application has cut in boxes.


def grown(box: Box, cells: int, shape: Sequence[int]) -> Box:
    """A box with so many cells more on each side, within the grid; an empty one stays empty."""
    if not box_size(box):
        return box
    return tuple(
        (max(0, start - cells), min(extent, stop + cells)) for (start, stop), extent in zip(box, shape, strict=True)
    )


class Halo:
    """This rank's box with so many cells of its neighbours on each side: where they come from, for many exchanges.

    Neighbours may be cut in any way, and have fewer cells than that.
    """

    def __init__(self, partition: Partition, cells: int) -> None:
        self._axis, parts = partition.ranks, partition.parts
        rank = self._axis.rank
        own, wide = parts[rank], [grown(part, cells, partition.shape) for part in parts]
        self.shape = box_shape(wide[rank])
        self.place = inside(own, wide[rank])  # of the box in the wide one
        there = [None if other == rank else intersect(own, each) for other, each in enumerate(wide)]
        here = [None if other == rank else intersect(wide[rank], each) for other, each in enumerate(parts)]
        self._sent = [inside(each, own) for each in there if each is not None]
        self._received = [inside(each, wide[rank]) for each in here if each is not None]
        self._counts, self._arriving = (
            [0 if each is None else box_size(each) for each in boxes] for boxes in (there, here)
        )

    def exchange(self, *boxes: Array) -> list[Array]:
        """New arrays of boxes of one dtype with their neighbours' cells.  Collective over the ranks of the field."""
        packed = [boxes[0][:0].reshape(-1), *(box[index].reshape(-1) for index in self._sent for box in boxes)]
        counts, arriving = ([len(boxes) * count for count in each] for each in (self._counts, self._arriving))
        arrived = arrays.empty(sum(arriving), boxes[0].dtype, like=boxes[0])
        self._axis.all_to_all(arrays.joined(packed), arrived, counts, arriving, label="halo")
        found = [arrays.empty(prod(self.shape), box.dtype, like=box).reshape(self.shape) for box in boxes]
        for each, box in zip(found, boxes, strict=True):
            each[self.place] = box
        first = 0
        for index in self._received:
            for each in found:
                target = each[index]
                target[...] = arrived[first : first + target.size].reshape(target.shape)
                first += target.size
        return found


def exchange_halo(partition: Partition, box: Array, cells: int) -> tuple[Array, tuple[slice | EllipsisType, ...]]:
    """This rank's box with so many cells of its neighbours on each side, and where the box lies in it.

    Collective over the ranks that share the field.
    """
    halo = Halo(partition, cells)
    (found,) = halo.exchange(box)
    return found, halo.place


# What all ranks know of a field.


def sum_of_cells(axis: Axis | OneRank, values: Array) -> float:
    """The sum of the cells of all ranks, the same bits on any distribution of them.  Collective over the axis."""
    flat = values.reshape(-1)
    largest = exact_norms.largest(flat)
    # A maximum over ranks may lose a NaN, but not infinity; the sum is NaN for both.
    largest = largest if np.isfinite(largest) else np.inf
    (top,) = axis.all_reduce(np.array([largest]), op="max", label="control").tolist()
    words = exact.dot_words(flat, arrays.module_of(flat).ones_like(flat), top, [(0, flat.size)])
    axis.all_reduce(words, label="control")
    return exact.values(words.reshape(1, 2), [top])[0]
