"""Problems with constraints, of Hock and Schittkowski (1981): equations, inequalities and bounds, and their minima."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, log, pi, sqrt
from typing import Any

import numpy as np

Array = Any
_STEP = 1e-30  # of a derivative by a complex step, which has no cancellation


@dataclass(frozen=True)
class Problem:
    """Minimise `fun` where `equations` are 0 and `inequalities` not negative, between two `bounds`."""

    fun: Callable[[Array], Any]
    start: Sequence[float]
    minimum: float
    equations: Callable[[Array], list[Any]] = lambda x: []
    inequalities: Callable[[Array], list[Any]] = lambda x: []
    bounds: tuple[Any, Any] = (-inf, inf)
    most: float = inf  # what the inequalities must not exceed

    @property
    def x0(self) -> Array:
        return np.array(self.start, float)

    @property
    def pairs(self) -> list[tuple[float, float]]:
        """The bounds of each unknown."""
        lower, upper = (np.broadcast_to(np.asarray(end, float), len(self.start)) for end in self.bounds)
        return list(zip(lower.tolist(), upper.tolist(), strict=True))

    @property
    def upper(self) -> Array:
        """The upper limits of `constraints`; the lower ones are 0."""
        equations, inequalities = len(self.equations(self.x0)), len(self.inequalities(self.x0))
        return np.array([0.0] * equations + [self.most] * inequalities)

    def constraints(self, x: Array) -> Array:
        """The equations, and then the inequalities."""
        return np.array([*self.equations(x), *self.inequalities(x)])

    def value_and_gradient(self, x: Array) -> tuple[float, Array]:
        return float(self.fun(x)), derivatives(self.fun, x)

    def jacobian(self, x: Array) -> Array:
        return derivatives(self.constraints, x).T

    def adjoint(self, x: Array, v: Array) -> Array:
        return derivatives(self.constraints, x) @ v


def derivatives(function: Callable[[Array], Any], x: Array) -> Array:
    """The derivatives by all elements, one a row."""
    return np.stack([np.imag(np.asarray(function(x + step))) / _STEP for step in 1j * _STEP * np.eye(x.size)])


def _sphere_and_cubes(x: Array) -> list[Any]:
    return [x @ x - 10, x[1] * x[2] - 5 * x[3] * x[4], x[0] ** 3 + x[1] ** 3 + 1]


_OF_80 = np.array([2.3, 2.3, 3.2, 3.2, 3.2])

PROBLEMS: dict[int, Problem] = {
    7: Problem(
        lambda x: np.log(1 + x[0] ** 2) - x[1], [2, 2], -sqrt(3), lambda x: [(1 + x[0] ** 2) ** 2 + x[1] ** 2 - 4]
    ),
    9: Problem(
        lambda x: np.sin(pi * x[0] / 12) * np.cos(pi * x[1] / 16), [0, 0], -0.5, lambda x: [4 * x[0] - 3 * x[1]]
    ),
    11: Problem(
        lambda x: (x[0] - 5) ** 2 + x[1] ** 2 - 25, [4.9, 0.1], -8.498464223, inequalities=lambda x: [x[1] - x[0] ** 2]
    ),
    # Its minimum is (1, 0), where the Jacobian of what holds there is singular: no multipliers exist.
    13: Problem(
        lambda x: (x[0] - 2) ** 2 + x[1] ** 2,
        [-2, -2],
        1.0,
        inequalities=lambda x: [(1 - x[0]) ** 3 - x[1]],
        bounds=(0, inf),
    ),
    14: Problem(
        lambda x: (x[0] - 2) ** 2 + (x[1] - 1) ** 2,
        [2, 2],
        9 - 2.875 * sqrt(7),
        lambda x: [x[0] - 2 * x[1] + 1],
        lambda x: [1 - 0.25 * x[0] ** 2 - x[1] ** 2],
    ),
    23: Problem(
        lambda x: x @ x,
        [3, 1],
        2.0,
        inequalities=lambda x: [
            x[0] + x[1] - 1,
            x @ x - 1,
            9 * x[0] ** 2 + x[1] ** 2 - 9,
            x[0] ** 2 - x[1],
            x[1] ** 2 - x[0],
        ],
        bounds=(-50, 50),
    ),
    24: Problem(
        lambda x: ((x[0] - 3) ** 2 - 9) * x[1] ** 3 / (27 * sqrt(3)),
        [1, 0.5],
        -1.0,
        inequalities=lambda x: [x[0] / sqrt(3) - x[1], x[0] + sqrt(3) * x[1], 6 - x[0] - sqrt(3) * x[1]],
        bounds=(0, inf),
    ),
    26: Problem(
        lambda x: (x[0] - x[1]) ** 2 + (x[1] - x[2]) ** 4,
        [-2.6, 2, 2],
        0.0,
        lambda x: [(1 + x[1] ** 2) * x[0] + x[2] ** 4 - 3],
    ),
    39: Problem(lambda x: -x[0], [2] * 4, -1.0, lambda x: [x[1] - x[0] ** 3 - x[2] ** 2, x[0] ** 2 - x[1] - x[3] ** 2]),
    40: Problem(
        lambda x: -np.prod(x),
        [0.8] * 4,
        -0.25,
        lambda x: [x[0] ** 3 + x[1] ** 2 - 1, x[0] ** 2 * x[3] - x[2], x[3] ** 2 - x[1]],
    ),
    43: Problem(
        lambda x: x @ (np.array([1, 1, 2, 1]) * x) - 5 * x[0] - 5 * x[1] - 21 * x[2] + 7 * x[3],
        [0] * 4,
        -44.0,
        inequalities=lambda x: [
            8 - x @ x - x[0] + x[1] - x[2] + x[3],
            10 - x @ (np.array([1, 2, 1, 2]) * x) + x[0] + x[3],
            5 - x @ (np.array([2, 1, 1, 0]) * x) - 2 * x[0] + x[1] + x[3],
        ],
    ),
    52: Problem(
        lambda x: (4 * x[0] - x[1]) ** 2 + (x[1] + x[2] - 2) ** 2 + (x[3] - 1) ** 2 + (x[4] - 1) ** 2,
        [2] * 5,
        1859 / 349,
        lambda x: [x[0] + 3 * x[1], x[2] + x[3] - 2 * x[4], x[1] - x[4]],
    ),
    63: Problem(
        lambda x: 1000 - x[0] ** 2 - 2 * x[1] ** 2 - x[2] ** 2 - x[0] * x[1] - x[0] * x[2],
        [2, 2, 2],
        961.7151721,
        lambda x: [8 * x[0] + 14 * x[1] + 7 * x[2] - 56, x @ x - 25],
        bounds=(0, inf),
    ),
    64: Problem(
        lambda x: 5 * x[0] + 5e4 / x[0] + 20 * x[1] + 7.2e4 / x[1] + 10 * x[2] + 1.44e5 / x[2],
        [1, 1, 1],
        6299.842428,
        inequalities=lambda x: [1 - 4 / x[0] - 32 / x[1] - 120 / x[2]],
        bounds=(1e-5, inf),
    ),
    71: Problem(
        lambda x: x[0] * x[3] * (x[0] + x[1] + x[2]) + x[2],
        [1, 5, 5, 1],
        17.0140173,
        lambda x: [x @ x - 40],
        lambda x: [np.prod(x) - 25],
        (1, 5),
    ),
    77: Problem(
        lambda x: (x[0] - 1) ** 2 + (x[0] - x[1]) ** 2 + (x[2] - 1) ** 2 + (x[3] - 1) ** 4 + (x[4] - 1) ** 6,
        [2] * 5,
        0.24150513,
        lambda x: [
            x[0] ** 2 * x[3] + np.sin(x[3] - x[4]) - 2 * sqrt(2),
            x[1] + x[2] ** 4 * x[3] ** 2 - 8 - sqrt(2),
        ],
    ),
    80: Problem(
        lambda x: np.exp(np.prod(x)), [-2, 2, 2, -1, -1], 0.0539498478, _sphere_and_cubes, bounds=(-_OF_80, _OF_80)
    ),
    10: Problem(
        lambda x: x[0] - x[1],
        [-10, 10],
        -1.0,
        inequalities=lambda x: [-3 * x[0] ** 2 + 2 * x[0] * x[1] - x[1] ** 2 + 1],
    ),
    12: Problem(
        lambda x: 0.5 * x[0] ** 2 + x[1] ** 2 - x[0] * x[1] - 7 * x[0] - 7 * x[1],
        [0, 0],
        -30.0,
        inequalities=lambda x: [25 - 4 * x[0] ** 2 - x[1] ** 2],
    ),
    21: Problem(
        lambda x: 0.01 * x[0] ** 2 + x[1] ** 2 - 100,
        [-1, -1],
        -99.96,
        inequalities=lambda x: [10 * x[0] - x[1] - 10],
        bounds=([2, -50], 50),
    ),
    22: Problem(
        lambda x: (x[0] - 2) ** 2 + (x[1] - 1) ** 2,
        [2, 2],
        1.0,
        inequalities=lambda x: [2 - x[0] - x[1], x[1] - x[0] ** 2],
    ),
    29: Problem(
        lambda x: -np.prod(x),
        [1, 1, 1],
        -16 * sqrt(2),
        inequalities=lambda x: [48 - x[0] ** 2 - 2 * x[1] ** 2 - 4 * x[2] ** 2],
    ),
    30: Problem(
        lambda x: x @ x,
        [1, 1, 1],
        1.0,
        inequalities=lambda x: [x[0] ** 2 + x[1] ** 2 - 1],
        bounds=([1, -10, -10], 10),
    ),
    31: Problem(
        lambda x: 9 * x[0] ** 2 + x[1] ** 2 + 9 * x[2] ** 2,
        [1, 1, 1],
        6.0,
        inequalities=lambda x: [x[0] * x[1] - 1],
        bounds=([-10, 1, -10], [10, 10, 1]),
    ),
    34: Problem(
        lambda x: -x[0],
        [0, 1.05, 2.9],
        -log(log(10)),
        inequalities=lambda x: [x[1] - np.exp(x[0]), x[2] - np.exp(x[1])],
        bounds=(0, [100, 100, 10]),
    ),
    35: Problem(
        lambda x: (
            9
            - 8 * x[0]
            - 6 * x[1]
            - 4 * x[2]
            + 2 * x[0] ** 2
            + 2 * x[1] ** 2
            + x[2] ** 2
            + 2 * x[0] * x[1]
            + 2 * x[0] * x[2]
        ),
        [0.5] * 3,
        1 / 9,
        inequalities=lambda x: [3 - x[0] - x[1] - 2 * x[2]],
        bounds=(0, inf),
    ),
    36: Problem(
        lambda x: -np.prod(x),
        [10] * 3,
        -3300.0,
        inequalities=lambda x: [72 - x[0] - 2 * x[1] - 2 * x[2]],
        bounds=(0, [20, 11, 42]),
    ),
    37: Problem(
        lambda x: -np.prod(x),
        [10] * 3,
        -3456.0,
        inequalities=lambda x: [x[0] + 2 * x[1] + 2 * x[2]],
        bounds=(0, 42),
        most=72.0,
    ),
    41: Problem(
        lambda x: 2 - x[0] * x[1] * x[2],
        [1] * 4,
        52 / 27,
        lambda x: [x[0] + 2 * x[1] + 2 * x[2] - x[3]],
        bounds=(0, [1, 1, 1, 2]),
    ),
    65: Problem(
        lambda x: (x[0] - x[1]) ** 2 + (x[0] + x[1] - 10) ** 2 / 9 + (x[2] - 5) ** 2,
        [-5, 5, 0],
        0.9535288567,
        inequalities=lambda x: [48 - x @ x],
        bounds=([-4.5, -4.5, -5], [4.5, 4.5, 5]),
    ),
    66: Problem(
        lambda x: 0.2 * x[2] - 0.8 * x[0],
        [0, 1.05, 2.9],
        0.5181632741,
        inequalities=lambda x: [x[1] - np.exp(x[0]), x[2] - np.exp(x[1])],
        bounds=(0, [100, 100, 10]),
    ),
    76: Problem(
        lambda x: x @ (np.array([1, 0.5, 1, 0.5]) * x) - x[0] * x[2] + x[2] * x[3] - x[0] - 3 * x[1] + x[2] - x[3],
        [0.5] * 4,
        -4.681818181,
        inequalities=lambda x: [
            5 - x[0] - 2 * x[1] - x[2] - x[3],
            4 - 3 * x[0] - x[1] - 2 * x[2] + x[3],
            x[1] + 4 * x[2] - 1.5,
        ],
        bounds=(0, inf),
    ),
    100: Problem(
        lambda x: (
            (x[0] - 10) ** 2
            + 5 * (x[1] - 12) ** 2
            + x[2] ** 4
            + 3 * (x[3] - 11) ** 2
            + 10 * x[4] ** 6
            + 7 * x[5] ** 2
            + x[6] ** 4
            - 4 * x[5] * x[6]
            - 10 * x[5]
            - 8 * x[6]
        ),
        [1, 2, 0, 4, 0, 1, 1],
        680.6300573,
        inequalities=lambda x: [
            127 - 2 * x[0] ** 2 - 3 * x[1] ** 4 - x[2] - 4 * x[3] ** 2 - 5 * x[4],
            282 - 7 * x[0] - 3 * x[1] - 10 * x[2] ** 2 - x[3] + x[4],
            196 - 23 * x[0] - x[1] ** 2 - 6 * x[5] ** 2 + 8 * x[6],
            -4 * x[0] ** 2 - x[1] ** 2 + 3 * x[0] * x[1] - 2 * x[2] ** 2 - 5 * x[5] + 11 * x[6],
        ],
    ),
}
