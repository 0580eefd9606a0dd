"""Linear algebra of a few numbers, with the same bits on every machine.

All ranks compute these numbers for themselves and must agree. LAPACK and BLAS choose other orders of summation on other
processors; here every sum is rounded once, or is of two numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul

import numpy as np

# Of Jacobi's rotations: what is left of an element when it counts as 0, beside its diagonal and beside all.
_ROUNDED, _NEGLIGIBLE = 2.0**-54, 2.0**-75
_MOST_SWEEPS = 30


def dot(one: Sequence[float], other: Sequence[float]) -> float:
    """The dot product of two lists of one length, rounded once; NaN if infinities cancel or the sum is too large."""
    try:
        return math.fsum(map(mul, one, other))
    except (OverflowError, ValueError):
        return math.nan


def solve(matrix: np.ndarray, right: Sequence[float]) -> list[float]:
    """Solve a small linear system by elimination with partial pivoting; NaN if the matrix is singular."""
    size = len(right)
    table = np.concatenate([matrix, np.reshape(right, (size, 1))], axis=1)
    with np.errstate(all="ignore"):
        for k in range(size):
            pivot = k + int(np.argmax(abs(table[k:, k])))
            table[[k, pivot]] = table[[pivot, k]]
            factors = table[k + 1 :, k] / table[k, k]
            table[k + 1 :, k:] -= factors[:, None] * table[k, k:]
    solution = [math.nan] * size
    rows = table.tolist()
    for k in reversed(range(size)):
        rest = rows[k][size] - dot(rows[k][k + 1 : size], solution[k + 1 :])
        solution[k] = rest / rows[k][k] if rows[k][k] else math.nan
    return solution


def cholesky(matrix: np.ndarray) -> np.ndarray | None:
    """The lower triangular L with ``L L' = matrix``; None if this is not positive definite, to rounding."""
    size = len(matrix)
    rows = [[0.0] * size for _ in range(size)]
    for i, row in enumerate(rows):
        for j in range(i):
            row[j] = (float(matrix[i, j]) - dot(row[:j], rows[j][:j])) / rows[j][j]
        square = float(matrix[i, i]) - dot(row[:i], row[:i])
        if not 0 < square < math.inf:
            return None
        row[i] = math.sqrt(square)
    return np.array(rows).reshape(size, size)


def solve_lower(lower: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Solve ``lower X = right`` for the columns of `right`; no diagonal element of `lower` is 0."""
    solution = np.array(right, np.float64)
    for k in range(len(lower)):
        solution[k] /= lower[k, k]
        solution[k + 1 :] -= lower[k + 1 :, k, None] * solution[k]
    return solution


def times(matrix: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The product of two small matrices, summed in the order of the columns of the first."""
    product = np.zeros((len(matrix), right.shape[1]))
    for k, row in enumerate(right):
        product += matrix[:, k, None] * row
    return product


def eigenpairs(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The eigenvalues of a symmetric matrix, in no order, and its eigenvectors, in the rows of another.

    Jacobi's rotations, in rounds of disjoint pairs (Brent and Luk, SIAM Journal on Scientific and Statistical Computing
    6, 1985), each of which are a few operations on arrays. Time is cubic: a quarter of a second for 110 rows.
    """
    size = len(matrix)
    work, vectors = np.array(matrix, np.float64), np.eye(size)
    floor = float(abs(work).max(initial=0.0)) * _NEGLIGIBLE
    players = np.arange(size + size % 2)  # as in a tournament: the first one stays, the others move on by one place
    half = len(players) // 2
    for _ in range(_MOST_SWEEPS):
        rotated = False
        for _ in range(len(players) - 1):
            pairs = np.stack([players[:half], players[half:][::-1]])
            pairs = pairs[:, pairs.max(0) < size]
            p, q = pairs
            across, first, second = work[p, q], work[p, p], work[q, q]
            turned = (abs(across) > _ROUNDED * np.sqrt(abs(first)) * np.sqrt(abs(second))) & (abs(across) > floor)
            if turned.any():
                rotated = True
                p, q, across, gap = p[turned], q[turned], across[turned], (second - first)[turned]
                with np.errstate(over="ignore"):
                    tau = gap / (2 * across)
                    tangent = np.copysign(1.0, tau) / (abs(tau) + np.sqrt(1.0 + tau * tau))
                cosine = 1.0 / np.sqrt(1.0 + tangent * tangent)
                for table in (work, work.T, vectors):
                    above, below = table[p], table[q]
                    c, s = cosine[:, None], (tangent * cosine)[:, None]
                    table[p], table[q] = c * above - s * below, s * above + c * below
                work[p, q] = work[q, p] = 0.0
            players = np.concatenate([players[:1], players[-1:], players[1:-1]])
        if not rotated:
            break
    return work.diagonal().copy(), vectors


def power(base: float, exponent: float) -> float:
    """A power of finite numbers of at least 0 by multiplications and square roots only, which round equally everywhere.

    ``**`` does not. Infinite if it is too large.
    """
    result, factor, whole = 1.0, base, int(exponent)
    while whole:
        if whole % 2:
            result *= factor
        factor, whole = factor * factor, whole // 2
    root, part = base, exponent - int(exponent)
    while part:
        root, part = math.sqrt(root), 2 * part
        if part >= 1:
            result, part = result * root, part - 1
    return result
