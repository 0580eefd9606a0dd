"""Differences of neighbours on a grid, with a zero where there is no neighbour, and their adjoints.  No MPI."""

from __future__ import annotations

from typing import Any

from mpishard.backend import array as arrays

Array = Any


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


def neighbours_count(mask: Array, dim: int, order: int) -> Array:
    """Where all elements count that the difference of this order takes; `mask` is 1 where an element counts, else 0."""
    out = mask.copy()
    if order >= 1 and mask.shape[dim] > 1:
        out[along(dim, None, -1)] *= mask[along(dim, 1, None)]
    if order == 2 and mask.shape[dim] > 1:
        out[along(dim, 1, None)] *= mask[along(dim, None, -1)]
    return out
