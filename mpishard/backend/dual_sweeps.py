"""Sweeps over the dual field of total variation, compiled."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mpishard.backend.jit_function import HostFunction


class DualField(NamedTuple):
    """The dual field of the differences of a grid, and what sweeps take of the grid: contiguous float64.

    The grid has three dimensions, of which the first ones may have one cell; `last` and `ahead`, (d, i, j, k), are the
    last iterate and the extrapolated one, whose components are of the last d dimensions.
    """

    last: np.ndarray
    ahead: np.ndarray
    scale: np.ndarray  # (d, i, j, k): a difference is this times the next cell less this one; 0 where it does not count
    bound: np.ndarray  # (i, j, k): on the length of the dual vector of a cell


def dual_sweeps(
    field: DualField,
    x: np.ndarray,
    center: np.ndarray,
    sides: tuple[np.ndarray, np.ndarray],
    inverse: float,
    step: float,
    t: float,
    count: int,
) -> float:
    """So many steps of the accelerated projected gradient for the dual field, in place; returns the next `t`.

    In each `x` becomes ``center - inverse * adjoint(ahead)`` between the sides, (i, j, k) as they are. Then `last` is
    ``ahead + step * differences(x)``, shortened to the bound in each cell, and `ahead` goes beyond it. The momentum
    grows with `t`, which is 1 at first (Nesterov, 1983).
    """
    arrays = field.last, field.ahead, field.scale, field.bound, x, center, *sides
    return float(_sweeps(arrays, (inverse, step, t, count)))


def _sweeps_loop(last, ahead, scale, bound, x, center, lower, upper, inverse, step, t, count):  # type: ignore[no-untyped-def]
    rows, columns, depth = x.shape
    components = len(last)
    for _ in range(count):
        for i in range(rows):
            for j in range(columns):
                for k in range(depth):
                    flow = 0.0
                    for d in range(components):
                        flow -= scale[d, i, j, k] * ahead[d, i, j, k]
                        dim = 3 - components + d
                        if dim == 0 and i > 0:
                            flow += scale[d, i - 1, j, k] * ahead[d, i - 1, j, k]
                        elif dim == 1 and j > 0:
                            flow += scale[d, i, j - 1, k] * ahead[d, i, j - 1, k]
                        elif dim == 2 and k > 0:
                            flow += scale[d, i, j, k - 1] * ahead[d, i, j, k - 1]
                    value = max(center[i, j, k] - inverse * flow, lower[i, j, k])
                    x[i, j, k] = min(value, upper[i, j, k])
        following = 0.5 * (1.0 + np.sqrt(1.0 + 4.0 * t * t))
        momentum = (t - 1.0) / following
        t = following
        for i in range(rows):
            for j in range(columns):
                for k in range(depth):
                    square = 0.0
                    for d in range(components):
                        dim = 3 - components + d
                        beyond = x[min(i + 1, rows - 1), j, k]
                        if dim == 1:
                            beyond = x[i, min(j + 1, columns - 1), k]
                        elif dim == 2:
                            beyond = x[i, j, min(k + 1, depth - 1)]
                        ahead[d, i, j, k] += step * (scale[d, i, j, k] * (beyond - x[i, j, k]))
                        square += ahead[d, i, j, k] * ahead[d, i, j, k]
                    length, most = np.sqrt(square), bound[i, j, k]
                    part = most / length if length > most else 1.0
                    for d in range(components):
                        value = part * ahead[d, i, j, k]
                        ahead[d, i, j, k] = value + momentum * (value - last[d, i, j, k])
                        last[d, i, j, k] = value
    return t


_sweeps = HostFunction(_sweeps_loop)
