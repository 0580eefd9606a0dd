"""The bounded problem of tao.py, in NumPy alone: this file and tao_petsc.py run in the environment of PETSc, too."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np

LOWER, UPPER = -2.0, {50: 0.8, 30: 2.0}  # by the percentage of unknowns that end at a bound; the minimum is at 1
NEAR = -0.5  # the upper bound of the first unknown in six pairs of ten for 30 %, and its start
HISTORY, ITERATIONS = 10, 30


def rows_of(rank: int, size: int, unknowns: int) -> tuple[int, int]:
    """The pairs of unknowns that a rank has, first and end, as mpishard cuts them."""
    pairs = unknowns // 2
    each, more = divmod(pairs, size)
    first = rank * each + min(rank, more)
    return first, first + each + (rank < more)


def scattered(rank: int, size: int, unknowns: int) -> np.ndarray:
    """The numbers of the pairs that a rank has where they are dealt out at random, in any order."""
    random = np.random.default_rng(0)
    owned, block = [], 1 << 20
    for first in range(0, unknowns // 2, block):
        owners = random.integers(size, size=min(block, unknowns // 2 - first))
        owned.append(first + np.flatnonzero(owners == rank))
    return random.permutation(np.concatenate(owned))


def near_bounds(number: np.ndarray, percent: int) -> np.ndarray:
    """Of which of the pairs with these numbers the first unknown has the bound `NEAR`."""
    return (number % 10 < 6) & (percent == 30)


def start(number: np.ndarray, percent: int) -> np.ndarray:
    """The start of these pairs; another one for each."""
    pairs = np.stack([-1.2 + 0.4 * np.sin(number), 0.5 + 0.2 * np.cos(number)], axis=1)
    pairs[near_bounds(number, percent), 0] = NEAR
    return pairs


def upper_bounds(number: np.ndarray, percent: int) -> np.ndarray:
    """The upper bounds of these pairs."""
    bounds = np.full((len(number), 2), UPPER[percent])
    bounds[near_bounds(number, percent), 0] = NEAR
    return bounds


class Rosenbrock:
    """Rosenbrock's function of pairs of unknowns, summed; `seconds` and `processor`: the times of its evaluations."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.processor = 0.0
        self.calls = 0

    def __call__(self, pairs: np.ndarray, gradient: np.ndarray) -> float:
        began, processor = time.perf_counter(), time.process_time()
        one, other = pairs[:, 0], pairs[:, 1]
        bend = other - one * one
        rest = 1.0 - one
        gradient[:, 0] = -400.0 * one * bend - 2.0 * rest
        gradient[:, 1] = 200.0 * bend
        value = 100.0 * float(bend @ bend) + float(rest @ rest)
        self.seconds += time.perf_counter() - began
        self.processor += time.process_time() - processor
        self.calls += 1
        return value


def report(function: Rosenbrock, seconds: float, processor: float, iterations: int, value: float, most: int) -> None:
    """Print what one run has measured; `processor`: its time with the function's, which is taken off.

    `most`: by how much memory grew from before there were vectors, on any rank.
    """
    found: dict[str, Any] = {
        "seconds": seconds,
        "function": function.seconds,
        "processor": processor - function.processor,
        "calls": function.calls,
        "iterations": iterations,
        "value": value,
        "bytes": most,
    }
    print(json.dumps(found), flush=True)
