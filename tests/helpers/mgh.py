"""The 35 problems of Moré, Garbow and Hillstrom for unconstrained minimisation, by the numbers of the paper.

J. J. Moré, B. S. Garbow and K. E. Hillstrom: Testing unconstrained optimization software.  ACM Transactions on
Mathematical Software 7, 17-41 (1981).  Each function gives residuals and Jacobian; problems of any size take n from x.
"""

from __future__ import annotations

import math

import numpy as np
from problems import Array, Problem, Residuals, numbers, sum_of_squares

Pair = tuple[Array, Array]


def rows(*entries: list) -> Array:
    """A Jacobian from its rows."""
    return np.array(entries)


def columns(*entries: Array) -> Array:
    """A Jacobian from its columns."""
    return np.stack(np.broadcast_arrays(*entries), axis=1)


def rosenbrock(x: Array) -> Pair:
    (a, b) = x
    return np.array([10 * (b - a * a), 1 - a]), rows([-20 * a, 10], [-1, 0])


def freudenstein_roth(x: Array) -> Pair:
    (a, b) = x
    r = np.array([-13 + a + ((5 - b) * b - 2) * b, -29 + a + ((b + 1) * b - 14) * b])
    return r, rows([1, (10 - 3 * b) * b - 2], [1, (3 * b + 2) * b - 14])


def powell_badly_scaled(x: Array) -> Pair:
    (a, b) = x
    r = np.array([1e4 * a * b - 1, np.exp(-a) + np.exp(-b) - 1.0001])
    return r, rows([1e4 * b, 1e4 * a], [-np.exp(-a), -np.exp(-b)])


def brown_badly_scaled(x: Array) -> Pair:
    (a, b) = x
    return np.array([a - 1e6, b - 2e-6, a * b - 2]), rows([1, 0], [0, 1], [b, a])


def beale(x: Array) -> Pair:
    (a, b), i = x, np.arange(1, 4)
    return numbers("1.5 2.25 2.625") - a * (1 - b**i), columns(b**i - 1, a * i * b ** (i - 1))


def jennrich_sampson(x: Array) -> Pair:
    (a, b), i = x, np.arange(1, 11)
    return 2 + 2 * i - (np.exp(i * a) + np.exp(i * b)), columns(-i * np.exp(i * a), -i * np.exp(i * b))


def helical_valley(x: Array) -> Pair:
    (a, b, c) = x
    angle = np.arctan(b / a) / (2 * math.pi) + (0.5 if a.real < 0 else 0.0)
    square = a * a + b * b
    radius, turn = np.sqrt(square), 50 / (math.pi * square)
    r = np.array([10 * (c - 10 * angle), 10 * (radius - 1), c])
    return r, rows([turn * b, -turn * a, 10], [10 * a / radius, 10 * b / radius, 0], [0, 0, 1])


BARD = numbers(".14 .18 .22 .25 .29 .32 .35 .39 .37 .58 .73 .96 1.34 2.10 4.39")


def bard(x: Array) -> Pair:
    (a, b, c), u = x, np.arange(1, 16)
    v, w = 16 - u, np.minimum(u, 16 - u)
    below = v * b + w * c
    return BARD - (a + u / below), columns(-np.ones(15), u * v / below**2, u * w / below**2)


GAUSSIAN = numbers(".0009 .0044 .0175 .0540 .1295 .2420 .3521 .3989 .3521 .2420 .1295 .0540 .0175 .0044 .0009")


def gaussian(x: Array) -> Pair:
    (a, b, c), t = x, (8 - np.arange(1, 16)) / 2
    bell = np.exp(-b * (t - c) ** 2 / 2)
    return a * bell - GAUSSIAN, columns(bell, -a * bell * (t - c) ** 2 / 2, a * bell * b * (t - c))


MEYER = numbers("34780 28610 23650 19630 16370 13720 11540 9744 8261 7030 6005 5147 4427 3820 3307 2872")


def meyer(x: Array) -> Pair:
    (a, b, c), t = x, 45 + 5 * np.arange(1, 17)
    growth = np.exp(b / (t + c))
    return a * growth - MEYER, columns(growth, a * growth / (t + c), -a * growth * b / (t + c) ** 2)


def gulf(x: Array) -> Pair:
    """With 99 residuals, and |y - x2|: the paper's y m i x2 is a misprint."""
    (a, b, c), t = x, np.arange(1, 100) / 100
    difference = 25 + (-50 * np.log(t)) ** (2 / 3) - b
    sign = np.where(difference.real < 0, -1.0, 1.0)
    distance = difference * sign
    power = distance**c / a
    decay = np.exp(-power)
    slopes = (power / a, power * c / distance * sign, -power * np.log(distance))
    return decay - t, columns(*(decay * slope for slope in slopes))


def box(x: Array, m: int = 10) -> Pair:
    (a, b, c), t = x, np.arange(1, m + 1) / 10
    last = np.exp(-t) - np.exp(-10 * t)
    r = np.exp(-t * a) - np.exp(-t * b) - c * last
    return r, columns(-t * np.exp(-t * a), t * np.exp(-t * b), -last)


def wood(x: Array) -> Pair:
    (a, b, c, d) = x
    s, t = math.sqrt(90), math.sqrt(10)
    r = np.array([10 * (b - a * a), 1 - a, s * (d - c * c), 1 - c, t * (b + d - 2), (b - d) / t])
    first = rows([-20 * a, 10, 0, 0], [-1, 0, 0, 0], [0, 0, -2 * s * c, s], [0, 0, -1, 0])
    return r, np.concatenate([first, rows([0, t, 0, t], [0, 1 / t, 0, -1 / t])])


KOWALIK = numbers(".1957 .1947 .1735 .1600 .0844 .0627 .0456 .0342 .0323 .0235 .0246")
KOWALIK_U = numbers("4 2 1 .5 .25 .167 .125 .1 .0833 .0714 .0625")


def kowalik_osborne(x: Array) -> Pair:
    (a, b, c, d), u = x, KOWALIK_U
    above, below = u * u + u * b, u * u + u * c + d
    slope = a * above / below**2
    return KOWALIK - a * above / below, columns(-above / below, -a * u / below, slope * u, slope)


def brown_dennis(x: Array) -> Pair:
    (a, b, c, d), t = x, np.arange(1, 21) / 5
    one, two = a + t * b - np.exp(t), c + d * np.sin(t) - np.cos(t)
    return one**2 + two**2, 2 * columns(one, t * one, two, np.sin(t) * two)


OSBORNE_1 = numbers(
    ".844 .908 .932 .936 .925 .908 .881 .850 .818 .784 .751 .718 .685 .658 .628 .603 .580 .558 .538 .522 .506 .490 "
    ".478 .467 .457 .448 .438 .431 .424 .420 .414 .411 .406"
)


def osborne_1(x: Array) -> Pair:
    (a, b, c, d, e), t = x, 10 * np.arange(33)
    one, two = np.exp(-t * d), np.exp(-t * e)
    return OSBORNE_1 - (a + b * one + c * two), columns(-np.ones(33), -one, -two, b * t * one, c * t * two)


def biggs_exp6(x: Array) -> Pair:
    (a, b, c, d, e, f), t = x, np.arange(1, 14) / 10
    y = np.exp(-t) - 5 * np.exp(-10 * t) + 3 * np.exp(-4 * t)
    one, two, three = np.exp(-t * a), np.exp(-t * b), np.exp(-t * e)
    return c * one - d * two + f * three - y, columns(-t * c * one, t * d * two, one, -two, -t * f * three, three)


OSBORNE_2 = numbers(
    "1.366 1.191 1.112 1.013 .991 .885 .831 .847 .786 .725 .746 .679 .608 .655 .616 .606 .602 .626 .651 .724 .649 "
    ".649 .694 .644 .624 .661 .612 .558 .533 .495 .500 .423 .395 .375 .372 .391 .396 .405 .428 .429 .523 .562 .607 "
    ".653 .672 .708 .633 .668 .645 .632 .591 .559 .597 .625 .739 .710 .729 .720 .636 .581 .428 .292 .162 .098 .054"
)


def osborne_2(x: Array) -> Pair:
    t = np.arange(65) / 10
    height, rate, centre = x[1:4], x[5:8], x[8:]
    decay, away = np.exp(-t * x[4]), t[:, None] - centre
    bells = np.exp(-(away**2) * rate)
    r = OSBORNE_2 - (x[0] * decay + bells @ height)
    first = columns(-decay), -bells, columns(x[0] * t * decay)
    return r, np.hstack([*first, bells * height * away**2, -2 * bells * height * away * rate])


def watson(x: Array) -> Pair:
    t, j = np.arange(1, 30)[:, None] / 29, np.arange(x.size)
    powers = t**j
    slopes = np.hstack([np.zeros((29, 1)), j[1:] * powers[:, :-1]])
    total = powers @ x
    last = np.zeros((2, x.size), x.dtype)
    last[0, 0], last[1, 0], last[1, 1] = 1, -2 * x[0], 1
    r = np.concatenate([slopes @ x - total**2 - 1, [x[0], x[1] - x[0] ** 2 - 1]])
    return r, np.concatenate([slopes - 2 * total[:, None] * powers, last])


def extended_powell(x: Array) -> Pair:
    """Problem 22; of 4 numbers problem 13, Powell's singular function."""
    four, i = x.reshape(-1, 4).T, np.arange(x.size // 4)
    a, b, c, d = four
    r = np.array([a + 10 * b, math.sqrt(5) * (c - d), (b - 2 * c) ** 2, math.sqrt(10) * (a - d) ** 2])
    jacobian = np.zeros((i.size, 4, i.size, 4), x.dtype)
    jacobian[i, 0, i, 0], jacobian[i, 0, i, 1] = 1, 10
    jacobian[i, 1, i, 2], jacobian[i, 1, i, 3] = math.sqrt(5), -math.sqrt(5)
    jacobian[i, 2, i, 1], jacobian[i, 2, i, 2] = 2 * (b - 2 * c), -4 * (b - 2 * c)
    jacobian[i, 3, i, 0], jacobian[i, 3, i, 3] = 2 * math.sqrt(10) * (a - d), -2 * math.sqrt(10) * (a - d)
    return r.T.ravel(), jacobian.reshape(x.size, x.size)


def extended_rosenbrock(x: Array) -> Pair:
    i = np.arange(0, x.size, 2)
    r, jacobian = np.empty_like(x), np.zeros((x.size, x.size), x.dtype)
    r[i], r[i + 1] = 10 * (x[i + 1] - x[i] ** 2), 1 - x[i]
    jacobian[i, i], jacobian[i, i + 1], jacobian[i + 1, i] = -20 * x[i], 10, -1
    return r, jacobian


def penalty_1(x: Array) -> Pair:
    weight = math.sqrt(1e-5)
    r = np.concatenate([weight * (x - 1), [x @ x - 0.25]])
    return r, np.concatenate([weight * np.eye(x.size), 2 * x[None]])


def penalty_2(x: Array) -> Pair:
    n, weight = x.size, math.sqrt(1e-5)
    i, e, count = np.arange(2, n + 1), np.exp(x / 10), np.arange(n, 0, -1)
    y = np.exp(i / 10) + np.exp((i - 1) / 10)
    r = [[x[0] - 0.2], weight * (e[1:] + e[:-1] - y), weight * (e[1:] - math.exp(-0.1)), [count @ x**2 - 1]]
    diagonal = np.diag(weight * e / 10)
    first = np.eye(n)[:1]
    return np.concatenate(r), np.concatenate([first, diagonal[1:] + diagonal[:-1], diagonal[1:], 2 * (count * x)[None]])


def variably_dimensioned(x: Array) -> Pair:
    j = np.arange(1, x.size + 1)
    total = j @ (x - 1)
    return np.concatenate([x - 1, [total, total**2]]), np.concatenate([np.eye(x.size), [j, 2 * total * j]])


def trigonometric(x: Array) -> Pair:
    n, i = x.size, np.arange(1, x.size + 1)
    r = n - np.cos(x).sum() + i * (1 - np.cos(x)) - np.sin(x)
    return r, np.sin(x)[None] + np.diag(i * np.sin(x) - np.cos(x))


def brown_almost_linear(x: Array) -> Pair:
    n = x.size
    r = np.append(x[:-1] + x.sum() - (n + 1), np.prod(x) - 1)
    without = [np.prod(np.delete(x, j)) for j in range(n)]
    return r, np.concatenate([(np.eye(n) + 1)[:-1], [without]])


def discrete_boundary_value(x: Array) -> Pair:
    n, h = x.size, 1 / (x.size + 1)
    shifted = x + h * np.arange(1, n + 1) + 1
    second = 2 * np.eye(n) - np.eye(n, k=1) - np.eye(n, k=-1)
    return second @ x + h * h * shifted**3 / 2, second + np.diag(1.5 * h * h * shifted**2)


def discrete_integral_equation(x: Array) -> Pair:
    n, h = x.size, 1 / (x.size + 1)
    t = h * np.arange(1, n + 1)
    shifted = x + t + 1
    kernel = h / 2 * np.where(t[:, None] >= t, (1 - t[:, None]) * t, t[:, None] * (1 - t))
    return x + kernel @ shifted**3, np.eye(n) + kernel * 3 * shifted**2


def broyden_tridiagonal(x: Array) -> Pair:
    n = x.size
    beside = np.eye(n, k=-1) + 2 * np.eye(n, k=1)
    return (3 - 2 * x) * x - beside @ x + 1, np.diag(3 - 4 * x) - beside


def broyden_banded(x: Array) -> Pair:
    n = x.size
    band = np.tril(np.triu(np.ones((n, n)), -5), 1) - np.eye(n)
    return x * (2 + 5 * x**2) + 1 - band @ (x * (1 + x)), np.diag(2 + 15 * x**2) - band * (1 + 2 * x)


def linear_full_rank(x: Array) -> Pair:
    n, m = x.size, 2 * x.size
    matrix = np.eye(m, n) - 2 / m
    return matrix @ x - 1, matrix


def linear_rank_1(x: Array) -> Pair:
    n, m = x.size, 2 * x.size
    matrix = np.outer(np.arange(1, m + 1), np.arange(1, n + 1))
    return matrix @ x - 1, matrix


def linear_rank_1_with_zeros(x: Array) -> Pair:
    n, m = x.size, 2 * x.size
    left, right = np.arange(0.0, m), np.arange(1.0, n + 1)
    left[-1] = right[0] = right[-1] = 0
    matrix = np.outer(left, right)
    return matrix @ x - 1, matrix


def chebyquad(x: Array) -> Pair:
    n, y = x.size, 2 * x - 1
    values, slopes = [np.ones_like(y), y], [np.zeros_like(y), 2 * np.ones_like(y)]
    for _ in range(n - 1):
        values.append(2 * y * values[-1] - values[-2])
        slopes.append(4 * values[-2] + 2 * y * slopes[-1] - slopes[-2])
    integrals = np.array([0.0 if i % 2 else -1 / (i * i - 1) for i in range(1, n + 1)])
    return np.array(values[1 : n + 1]).mean(axis=1) - integrals, np.array(slopes[1 : n + 1]) / n


def _alternating(n: int, *values: float) -> Array:
    return np.tile(values, n // len(values))


def _grid(n: int) -> Array:
    return np.arange(1, n + 1) / (n + 1)


def _problem(name: str, residuals: Residuals, start: object, minimum: float, *others: float) -> Problem:
    return Problem(name, np.array(start, float), sum_of_squares(residuals), minimum, others=others, residuals=residuals)


_HALF = np.full(10, 0.5)
_ARC = _grid(10) * (_grid(10) - 1)
PROBLEMS = [
    _problem("1 Rosenbrock", rosenbrock, [-1.2, 1], 0),
    _problem("2 Freudenstein and Roth", freudenstein_roth, [0.5, -2], 0, 48.98425367924),
    _problem("3 Powell badly scaled", powell_badly_scaled, [0, 1], 0),
    _problem("4 Brown badly scaled", brown_badly_scaled, [1, 1], 0),
    _problem("5 Beale", beale, [1, 1], 0),
    _problem("6 Jennrich and Sampson", jennrich_sampson, [0.3, 0.4], 124.3621823556),
    _problem("7 helical valley", helical_valley, [-1, 0, 0], 0),
    _problem("8 Bard", bard, [1, 1, 1], 8.2148773065790e-3, 17.42869),
    _problem("9 Gaussian", gaussian, [0.4, 1, 0], 1.1279327696189e-8),
    _problem("10 Meyer", meyer, [0.02, 4000, 250], 87.94585517018),
    _problem("11 Gulf research and development", gulf, [5, 2.5, 0.15], 0, 0.0380),
    _problem("12 Box three-dimensional", box, [0, 10, 20], 0),
    _problem("13 Powell singular", extended_powell, [3, -1, 0, 1], 0),
    _problem("14 Wood", wood, [-3, -1, -3, -1], 0),
    _problem("15 Kowalik and Osborne", kowalik_osborne, [0.25, 0.39, 0.415, 0.39], 3.0750560384924e-4, 1.02734e-3),
    _problem("16 Brown and Dennis", brown_dennis, [25, 5, -5, -1], 85822.20162635628),
    _problem("17 Osborne 1", osborne_1, [0.5, 1.5, -1, 0.01, 0.02], 5.4648946974644e-5),
    _problem("18 Biggs EXP6", biggs_exp6, [1, 2, 1, 1, 1, 1], 0, 5.655649925e-3),
    _problem("19 Osborne 2", osborne_2, [1.3, 0.65, 0.65, 0.7, 0.6, 3, 5, 7, 2, 4.5, 5.5], 4.0137736293547e-2),
    _problem("20 Watson, 6", watson, np.zeros(6), 2.2876700535523e-3),
    _problem("20 Watson, 9", watson, np.zeros(9), 1.3997601382109e-6),
    _problem("21 extended Rosenbrock, 20", extended_rosenbrock, _alternating(20, -1.2, 1), 0),
    _problem("22 extended Powell singular, 20", extended_powell, _alternating(20, 3, -1, 0, 1), 0),
    _problem("23 penalty I, 4", penalty_1, range(1, 5), 2.2499775008999e-5),
    _problem("23 penalty I, 10", penalty_1, range(1, 11), 7.0876514670904e-5),
    _problem("24 penalty II, 4", penalty_2, np.full(4, 0.5), 9.3762930073591e-6),
    _problem("24 penalty II, 10", penalty_2, _HALF, 2.936605374567e-4),
    _problem("25 variably dimensioned, 10", variably_dimensioned, 1 - np.arange(1, 11) / 10, 0),
    _problem("26 trigonometric, 10", trigonometric, np.full(10, 0.1), 0, 2.795056121876e-5),
    _problem("27 Brown almost-linear, 10", brown_almost_linear, _HALF, 0, 1),
    _problem("28 discrete boundary value, 10", discrete_boundary_value, _ARC, 0),
    _problem("29 discrete integral equation, 10", discrete_integral_equation, _ARC, 0),
    _problem("30 Broyden tridiagonal, 10", broyden_tridiagonal, -np.ones(10), 0),
    _problem("31 Broyden banded, 10", broyden_banded, -np.ones(10), 0),
    _problem("32 linear, full rank, 10", linear_full_rank, np.ones(10), 10),
    _problem("33 linear, rank 1, 10", linear_rank_1, np.ones(10), 20 * 19 / 82),
    _problem("34 linear, rank 1 with zeros, 10", linear_rank_1_with_zeros, np.ones(10), (400 + 60 - 6) / (2 * 37)),
    _problem("35 Chebyquad, 8", chebyquad, _grid(8), 3.5168737256779e-3),
    _problem("35 Chebyquad, 10", chebyquad, _grid(10), 4.772713866e-3, 6.503954800e-3),
]
