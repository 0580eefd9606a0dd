"""FISTA with restarts, and how the course of any method is measured: for l1.py and total_variation.py."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

Array = np.ndarray


class WithTerm(Protocol):
    """A function with its gradient, and a term without one."""

    @property
    def size(self) -> int: ...

    @property
    def curvature(self) -> float:
        """The largest eigenvalue of a Hessian."""
        ...

    @property
    def function(self) -> Callable[[Array], tuple[float, Array]]: ...

    def value(self, x: Array, value: float) -> float:
        """The value of the function, with the term."""
        ...


class Measured:
    """The function, of whose calls the values with the term are noted, and the seconds beside the noting."""

    def __init__(self, problem: WithTerm) -> None:
        self._problem = problem
        self.values: list[float] = []
        self.seconds: list[float] = []
        self._noting, self._began = 0.0, time.process_time()

    def __call__(self, x: Array) -> tuple[float, Array]:
        value, gradient = self._problem.function(x)
        self.note(x, value)
        return value, gradient

    def note(self, x: Array, value: float | None = None) -> None:
        begin = time.process_time()
        self.seconds.append(begin - self._began - self._noting)
        value = self._problem.function(x)[0] if value is None else value
        self.values.append(self._problem.value(x, value))
        self._noting += time.process_time() - begin


def fista(
    problem: WithTerm, proximal_point: Callable[[Array], Array], most: int, target: float
) -> tuple[Measured, Array]:
    """From 0, until the value is at most the target; also the last iterate.

    `proximal_point` is that of the term, for steps of 1 / curvature. (O'Donoghue and Candes, 2015)
    """
    measured = Measured(problem)
    x = y = np.zeros(problem.size)
    t = 1.0
    for _ in range(most):
        new = proximal_point(y - problem.function(y)[1] / problem.curvature)
        if (y - new) @ (new - x) > 0:  # the momentum leads uphill
            t = 1.0
        following = 0.5 * (1 + math.sqrt(1 + 4 * t * t))
        y = new + (t - 1) / following * (new - x)
        x, t = new, following
        measured.note(x)
        if measured.values[-1] <= target:
            break
    return measured, x
