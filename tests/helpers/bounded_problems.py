"""Problems with bounds, and large ones with and without.

Gay: D. M. Gay, A trust-region approach to linearly constrained optimization, in: Numerical Analysis (Dundee 1983),
Lecture Notes in Mathematics 1066 (1984): bounds for the problems of Moré, Garbow and Hillstrom.  HS: W. Hock and
K. Schittkowski, Test Examples for Nonlinear Programming Codes (1981).  MINPACK-2: B. M. Averick, R. G. Carter,
J. J. Moré and G. Xue, The MINPACK-2 test problem collection, Argonne preprint MCS-P153-0692 (1992).
"""

from __future__ import annotations

import math

import mgh
import numpy as np
from problems import Array, Function, Problem, Residuals, sum_of_squares


def hs3(x: Array) -> tuple[float, Array]:
    a, b = x
    return b + 1e-5 * (b - a) ** 2, np.array([-2e-5 * (b - a), 1 + 2e-5 * (b - a)])


def hs4(x: Array) -> tuple[float, Array]:
    a, b = x
    return (a + 1) ** 3 / 3 + b, np.array([(a + 1) ** 2, 1])


def hs5(x: Array) -> tuple[float, Array]:
    a, b = x
    slope = np.cos(a + b)
    value = np.sin(a + b) + (a - b) ** 2 - 1.5 * a + 2.5 * b + 1
    return value, np.array([slope + 2 * (a - b) - 1.5, slope - 2 * (a - b) + 2.5])


def hs45(x: Array) -> tuple[float, Array]:
    without = np.array([np.prod(np.delete(x, j)) for j in range(5)])
    return 2 - np.prod(x) / 120, -without / 120


def hs110(x: Array) -> tuple[float, Array]:
    one, two = np.log(x - 2), np.log(10 - x)
    product = np.prod(x) ** 0.2
    return (one**2 + two**2).sum() - product, 2 * one / (x - 2) - 2 * two / (10 - x) - 0.2 * product / x


def chained_rosenbrock(x: Array) -> tuple[float, Array]:
    """Of the driver of L-BFGS-B 3.0: (x1 - 1)^2 + 4 sum (x_i - x_{i-1}^2)^2."""
    rest = x[1:] - x[:-1] ** 2
    gradient = np.zeros_like(x)
    gradient[0] = 2 * (x[0] - 1)
    gradient[1:] += 8 * rest
    gradient[:-1] -= 16 * x[:-1] * rest
    return (x[0] - 1) ** 2 + 4 * rest @ rest, gradient


def dirichlet(weight_x: Array, weight_y: Array, load: Array) -> Function:
    """A quadratic on a grid that is 0 around: half the weighted squares of all differences, less load times values.

    `weight_x` (rows, columns + 1) is of the differences along rows, those to the boundary included.
    """

    def function(x: Array) -> tuple[float, Array]:
        grid = np.pad(x.reshape(load.shape), 1)
        along, across = np.diff(grid[1:-1], axis=1), np.diff(grid[:, 1:-1], axis=0)
        flow, rise = weight_x * along, weight_y * across
        value = ((flow * along).sum() + (rise * across).sum()) / 2 - (load * grid[1:-1, 1:-1]).sum()
        return value, (-np.diff(flow, axis=1) - np.diff(rise, axis=0) - load).ravel()

    return function


def torsion(n: int, force: float, minimum: float) -> Problem:
    """Elastic-plastic torsion of a square bar, MINPACK-2: n * n values of at most their distance to the rim."""
    h = 1 / (n + 1)
    line = np.minimum(np.arange(1, n + 1), np.arange(n, 0, -1)) * h
    distance = np.minimum(line[:, None], line).ravel()
    ones = np.ones((n, n + 1))
    function = dirichlet(ones, ones.T, np.full((n, n), force * h * h))
    name = f"MINPACK-2 torsion, {n}x{n}, c={force:g}"
    return Problem(name, distance.copy(), function, minimum, -distance, distance)


def bearing(n: int, eccentricity: float, width: float, minimum: float) -> Problem:
    """Pressure in a journal bearing, MINPACK-2: n * n values that are not negative, on (0, 2 pi) x (0, 2 width)."""
    hx, hy = 2 * math.pi / (n + 1), 2 * width / (n + 1)
    angle = np.arange(n + 2) * hx
    gap = (1 + eccentricity * np.cos(angle)) ** 3
    # Each triangle has the mean of its three corners; an edge has half of the triangle at either side.
    left, right = 2 * gap[:-1] + gap[1:], gap[:-1] + 2 * gap[1:]
    weight_x = np.tile((left + right) / 6, (n, 1)) * hy / hx
    weight_y = np.tile((right[:-1] + left[1:]) / 6, (n + 1, 1)) * hx / hy
    load = np.tile(eccentricity * np.sin(angle[1:-1]), (n, 1)) * hx * hy
    start = np.tile(np.maximum(np.sin(angle[1:-1]), 0), n)
    name = f"MINPACK-2 journal bearing, {n}x{n}"
    function = dirichlet(weight_x, weight_y, load)
    return Problem(name, start, function, minimum, np.zeros(n * n), np.full(n * n, math.inf))


def _bounded(name: str, function: Function, start: object, lower: object, upper: object, *minima: float) -> Problem:
    start = np.array(start, float)
    lower, upper = (np.broadcast_to(np.array(bound, float), start.shape).copy() for bound in (lower, upper))
    return Problem(name, start, function, minima[0], lower, upper, minima[1:])


def _squares(name: str, residuals: Residuals, *given: object) -> Problem:
    return _bounded(name, sum_of_squares(residuals), *given)


_INF = math.inf
_ODD = np.arange(25) % 2 == 0

# Digits beyond those of Gay's table, and the minima of MINPACK-2's problems in these sizes, are of tight runs of SciPy.
BOUNDED = [
    _squares("Gay 3 Powell badly scaled", mgh.powell_badly_scaled, [0, 1], [0, 1], [1, 9], 1.5125936724e-10),
    _squares("Gay 4 Brown badly scaled", mgh.brown_badly_scaled, [1, 1], [0, 3e-5], [1e6, 100], 783.99999929518),
    _squares("Gay 5 Beale", mgh.beale, [1, 1], [0.6, 0.5], [10, 100], 0),
    _squares("Gay 7 helical valley", mgh.helical_valley, [-1, 0, 0], [-100, -1, -1], [0.8, 1, 1], 0.99042212096),
    _squares("Gay 9 Gaussian", mgh.gaussian, [0.4, 1, 0], [0.398, 1, -0.5], [4.2, 2, 0.1], 1.1279327696e-8),
    _squares("Gay 12 Box", lambda x: mgh.box(x, 3), [0, 10, 20], [0, 5, 0], [2, 9.5, 20], 3.0998153432e-6),
    _squares("Gay 14 Wood", mgh.wood, [-3, -1, -3, -1], -100, [0, 10, 100, 100], 1.5567008004386),
    _squares(
        "Gay 16 Brown and Dennis",
        mgh.brown_dennis,
        [25, 5, -5, -1],
        [-10, 0, -100, -20],
        [100, 15, 0, 0.2],
        88860.4797675,
    ),
    _squares(
        "Gay 18 Biggs EXP6", mgh.biggs_exp6, [1, 2, 1, 1, 1, 1], [0, 0, 0, 1, 0, 0], [2, 8, 1, 7, 5, 5], 5.3209865908e-4
    ),
    _squares("HS 1", mgh.rosenbrock, [-2, 1], [-_INF, -1.5], _INF, 0),
    _squares("HS 2", mgh.rosenbrock, [-2, 1], [-_INF, 1.5], _INF, 0.0504261879, 4.941229318),
    _bounded("HS 3", hs3, [10, 1], [-_INF, 0], _INF, 0),
    _bounded("HS 4", hs4, [1.125, 0.125], [1, 0], _INF, 8 / 3),
    _bounded("HS 5", hs5, [0, 0], [-1.5, -3], [4, 3], -math.sqrt(3) / 2 - math.pi / 3),
    _squares("HS 38", mgh.wood, [-3, -1, -3, -1], -10, 10, 0),
    _bounded("HS 45", hs45, [2, 2, 2, 2, 2], 0, [1, 2, 3, 4, 5], 1),
    _bounded("HS 110", hs110, np.full(10, 9.0), 2.001, 9.999, -45.778469707446),
    _bounded("L-BFGS-B driver, 25", chained_rosenbrock, np.full(25, 3.0), np.where(_ODD, 1, -100), 100, 0),
    torsion(20, 5.0, -0.41611287179189),
    torsion(30, 20.0, -2.8461126768839),
    bearing(20, 0.1, 10.0, -0.17997935149217),
    bearing(30, 0.5, 1.0, -0.12288541356246),
]

LARGE = [
    Problem("21 extended Rosenbrock, 1000", np.tile([-1.2, 1.0], 500), sum_of_squares(mgh.extended_rosenbrock), 0),
    Problem(
        "30 Broyden tridiagonal, 1000",
        -np.ones(1000),
        sum_of_squares(mgh.broyden_tridiagonal),
        0,
        others=(0.71252790958608,),
    ),
    Problem(
        "26 trigonometric, 100", np.full(100, 0.01), sum_of_squares(mgh.trigonometric), 0, others=(1.8409625428e-6,)
    ),
]
