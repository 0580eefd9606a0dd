"""The Taylor test: the order in which the remainder of a Taylor series falls with the step.

A right gradient g leaves a remainder f(x + h d) - f(x) - h g'd that falls like h^2; a wrong one leaves a part of the
linear term, and falls like h. With the Hessian H, the remainder f(x + h d) - f(x) - h g'd - h^2/2 d'Hd falls like h^3.
Steps at which rounding hides the remainder are left out (Griewank and Walther, Evaluating Derivatives, 2008).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_AHEAD = 10.0  # a remainder counts if it is at least this factor above the rounding errors
_FLAT = 0.6  # remainders that fall more slowly than this power of the step are errors of the function itself
FITTED = 3  # remainders in the fit, those of the smallest steps
_SIGNIFICANT = 6.0  # standard deviations
_SLACK = 0.2  # by which an order may be too low


@dataclass(frozen=True)
class TaylorTest:
    """The remainders of a Taylor series for a row of steps, and the order in which they fall.

    Parameters
    ----------
    name : str
        Of the remainder.
    expected : int
        The order of the remainder if the terms are right.
    steps : tuple of float
        h, descending.
    remainders : tuple of float
        Their absolute values, by step; NaN or infinite outside of the function's domain.
    used : tuple of bool
        Whether a remainder is in the fit of the order: one of the smallest that rounding does not hide.
    order : float
        The slope of the used remainders, in logarithms; NaN if rounding hides all of them.
    error : float
        The smallest remainder relative to the last term of the series.
    passed : bool
        Whether the order is as expected, or the agreement as close as the precision of the values can show.
    """

    name: str
    expected: int
    steps: tuple[float, ...]
    remainders: tuple[float, ...]
    used: tuple[bool, ...]
    order: float
    error: float
    passed: bool


def taylor_test(
    name: str,
    expected: int,
    steps: np.ndarray,
    remainders: np.ndarray,
    terms: np.ndarray,
    rounding: np.ndarray,
    precision: float,
) -> TaylorTest:
    """Fit the order of remainders.

    For each step, `terms` has the last term of the series that was subtracted, and `rounding` the size of the rounding
    errors in the remainder; `precision` is the relative precision of the values.
    """
    left = np.abs(remainders)
    known = np.isfinite(left)
    floor = np.maximum(_AHEAD * rounding, _level_of_tail(steps, left, known))
    seen = np.flatnonzero(known & (left > floor))
    fitted = seen[-FITTED:]
    order = float("nan")
    if len(fitted) > 1:  # the last two are the nearest to the limit
        order = max(_slope(steps[each], left[each]) for each in (fitted, fitted[-2:]))
    after = fitted[-1] + 1 if len(fitted) else len(steps)
    if after < len(steps) and known[after]:
        # A remainder that falls below the rounding errors at once, as of a piecewise linear function, falls steeply.
        last, lower = left[after - 1], max(left[after], floor[after])
        order = np.fmax(order, np.log(last / lower) / np.log(steps[after - 1] / steps[after]) if lower else np.inf)
    relative = np.divide(left, np.abs(terms), out=np.where(left > 0, np.inf, 0.0), where=terms != 0)[known]
    # Two neighbours must be small: one may be so by accident, where terms cancel.
    error = float(np.maximum(relative[1:], relative[:-1]).min(initial=np.inf))
    tail = np.flatnonzero(known)
    tail = tail[tail >= fitted[0]] if len(fitted) else tail[:0]
    power = steps[tail] ** (expected - 1)
    steep = order > expected + 1.5  # as a piecewise linear function between two kinks
    wrong = not steep and _has_lower_order(steps[tail], remainders[tail] / power, rounding[tail] / power)
    used = tuple(bool(index in fitted) for index in range(len(steps)))
    passed = bool(error <= precision**0.5 or (order >= expected - _SLACK and not wrong))
    return TaylorTest(name, expected, tuple(steps.tolist()), tuple(left.tolist()), used, float(order), error, passed)


def _slope(h: np.ndarray, left: np.ndarray) -> float:
    """The slope of the logarithms, by least squares."""
    return float(np.polyfit(np.log(h), np.log(left), 1)[0])


def _has_lower_order(h: np.ndarray, ratios: np.ndarray, rounding: np.ndarray) -> bool:
    """Return True if remainders over a power of the step tend to something else than 0 with the step.

    The order alone may not show it, where the wrong part of a term and the next term have different signs. Fits
    ``a + b h + c h^2`` by least squares, weighted by rounding errors, and tests that a is significant.
    """
    if len(h) < 5 or not (rounding.all() and np.isfinite(rounding).all()):
        return False
    # In units of the smallest error, so that squares are numbers.
    columns = np.vander(h / h[0], 3, increasing=True) * (rounding.min() / rounding)[:, None]
    wanted = ratios / rounding
    inverse = np.linalg.inv(columns.T @ columns)
    fit = inverse @ (columns.T @ wanted)
    misfit = columns @ fit - wanted
    deviation = (inverse[0, 0] * max(1.0, float(misfit @ misfit) / (len(h) - 3))) ** 0.5
    return bool(abs(fit[0]) > _SIGNIFICANT * deviation)


def _level_of_tail(h: np.ndarray, left: np.ndarray, known: np.ndarray) -> float:
    """Ten times the median of the remainders at the small steps that no longer fall; 0 without such steps."""
    for first in range(len(h) - 2):
        tail = np.arange(first, len(h))[known[first:] & (left[first:] > 0)]
        if len(tail) > 2 and _slope(h[tail], left[tail]) < _FLAT:
            return 10.0 * float(np.median(left[tail]))
    return 0.0
