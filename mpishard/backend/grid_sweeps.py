"""One sweep of an iteration over a grid, compiled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpishard.backend.jit_function import HostFunction


def chebyshev_sweep(
    before: np.ndarray, values: np.ndarray, right: np.ndarray, weights: Sequence[float], omega: float
) -> None:
    """Replace `before`, the iterate before `values`, by the one after it, towards the solution of ``A x = right``.

    ``A x`` is x plus, for each dimension, its weight times twice the element less its two neighbours. A neighbour that
    is outside has the value of the element itself: the natural boundary condition. The new element is ``before + omega
    * (x - before)``, where x solves its row of A with the neighbours of `values`. The arrays are contiguous float64, of
    three dimensions.
    """
    _sweep((before, values, right), (*weights, 1 / (1 + 2 * sum(weights)), omega))


def _sweep_loop(before, values, right, weight_i, weight_j, weight_k, inverse, omega):  # type: ignore[no-untyped-def]
    rows, columns, depth = values.shape
    for i in range(rows):
        last_i, next_i = max(i - 1, 0), min(i + 1, rows - 1)
        for j in range(columns):
            last_j, next_j = max(j - 1, 0), min(j + 1, columns - 1)
            for k in range(0, depth, max(depth - 1, 1)):  # both ends
                x = weight_i * (values[last_i, j, k] + values[next_i, j, k])
                x += weight_j * (values[i, last_j, k] + values[i, next_j, k])
                x += weight_k * (values[i, j, max(k - 1, 0)] + values[i, j, min(k + 1, depth - 1)])
                before[i, j, k] += omega * (inverse * (right[i, j, k] + x) - before[i, j, k])
            # Views, so that all indices begin at 0: Numba vectorises no loop whose indices could be negative.
            new, given = before[i, j, 1:], right[i, j, 1:]
            one_i, other_i = values[last_i, j, 1:], values[next_i, j, 1:]
            one_j, other_j = values[i, last_j, 1:], values[i, next_j, 1:]
            one_k, other_k = values[i, j], values[i, j, 2:]
            for k in range(depth - 2):
                x = weight_i * (one_i[k] + other_i[k])
                x += weight_j * (one_j[k] + other_j[k])
                x += weight_k * (one_k[k] + other_k[k])
                new[k] += omega * (inverse * (given[k] + x) - new[k])


_sweep = HostFunction(_sweep_loop)
