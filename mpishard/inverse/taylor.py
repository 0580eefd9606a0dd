"""How fast a Taylor remainder falls with the step: its order, where rounding does not hide it.  No MPI."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_AHEAD = 10.0  # a remainder counts if it is so many times larger than the rounding errors
_FLAT = 0.6  # remainders that fall more slowly than this power of the step are errors of the function itself
_FITTED = 3  # remainders in the fit, those of the smallest steps
_SIGNIFICANT = 6.0  # standard deviations
_SLACK = 0.2  # what an order may miss


@dataclass(frozen=True)
class TaylorTest:
    """The remainders of a Taylor series for a row of steps, and the order in which they fall.

    Parameters
    ----------
    name : str
        What is left after which term.
    expected : int
        The order of the remainder if the terms are right.
    steps, remainders : tuple of float
        The steps h, descending, and the absolute remainder of each; NaN or infinite outside of the function's domain.
    used : tuple of bool
        Whether the remainder is in the fit of the order: one of the smallest that rounding does not hide.
    order : float
        The slope of the remainders that are used, in logarithms; NaN if rounding hides all of them.
    error : float
        How well the last term of the series agrees with the function: the smallest remainder relative to that term.
    passed : bool
        Whether the order is as expected, or the agreement is as close as the precision of the values can show.
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
    steps: Sequence[float],
    remainders: Sequence[float],
    terms: Sequence[float],
    rounding: Sequence[float],
    precision: float,
) -> TaylorTest:
    """Fit the order of remainders.

    Parameters
    ----------
    name : str
        As for `TaylorTest`, as `expected`, `steps` and `remainders`.
    expected : int
    steps, remainders : sequence of float
    terms : sequence of float
        For each step the last term of the series that was subtracted.
    rounding : sequence of float
        For each step the size of the rounding errors in the remainder.
    precision : float
        The relative precision of the values.

    Returns
    -------
    TaylorTest
    """
    h, signed = np.asarray(steps, float), np.asarray(remainders, float)
    left = np.abs(signed)
    known = np.isfinite(left)
    floor = np.maximum(_AHEAD * np.asarray(rounding, float), _level_of_tail(h, left, known))
    fitted = np.flatnonzero(known & (left > floor))[-_FITTED:]
    order = float("nan")
    if len(fitted) > 1:  # the last two are the nearest to the limit
        order = max(_slope(h[fitted], left[fitted]), _slope(h[fitted[-2:]], left[fitted[-2:]]))
    if len(fitted) and fitted[-1] + 1 < len(h) and known[fitted[-1] + 1]:
        # What falls below the rounding errors at once, as where a function is piecewise linear, has fallen steeply.
        last, lower = left[fitted[-1]], max(left[fitted[-1] + 1], floor[fitted[-1] + 1])
        order = np.fmax(order, np.log(last / lower) / np.log(h[fitted[-1]] / h[fitted[-1] + 1]) if lower else np.inf)
    relative = np.divide(left, np.abs(terms), out=np.where(left > 0, np.inf, 0.0), where=np.asarray(terms) != 0)
    relative = relative[known]  # two neighbours must be small: one may be so by accident, where terms cancel
    error = float(np.maximum(relative[1:], relative[:-1]).min(initial=np.inf))
    tail = np.flatnonzero(known)
    tail = tail[tail >= fitted[0]] if len(fitted) else tail[:0]
    power = h[tail] ** (expected - 1)
    steep = order > expected + 1.5  # as a piecewise linear function between two kinks
    wrong = not steep and _has_lower_order(h[tail], signed[tail] / power, np.asarray(rounding, float)[tail] / power)
    return TaylorTest(
        name,
        expected,
        tuple(h.tolist()),
        tuple(left.tolist()),
        tuple(bool(index in fitted) for index in range(len(h))),
        float(order),
        error,
        error <= precision**0.5 or (bool(order >= expected - _SLACK) and not wrong),
    )


def _slope(h: np.ndarray, left: np.ndarray) -> float:
    """The slope of the logarithms, by least squares."""
    return float(np.polyfit(np.log(h), np.log(left), 1)[0])


def _has_lower_order(h: np.ndarray, ratios: np.ndarray, rounding: np.ndarray) -> bool:
    """Whether remainders over a power of the step tend to something else than 0 with the step.

    The order alone may not show it, where the wrong part of a term and the next term have different signs.  Fits
    a + b h + c h^2 by least squares, weighted by rounding errors, and asks whether a is significant.
    """
    if len(h) < 5 or not (rounding.all() and np.isfinite(rounding).all()):
        return False
    relative, weights = (
        h / h[0],
        rounding.min() / rounding,
    )  # in units of the smallest error, so that squares are numbers
    columns = np.stack([np.ones_like(h), relative, relative**2], axis=1) * weights[:, None]
    wanted = ratios / rounding
    inverse = np.linalg.inv(columns.T @ columns)
    fit = inverse @ (columns.T @ wanted)
    misfit = columns @ fit - wanted
    deviation = (inverse[0, 0] * max(1.0, float(misfit @ misfit) / (len(h) - 3))) ** 0.5
    return bool(abs(fit[0]) > _SIGNIFICANT * deviation)


def _level_of_tail(h: np.ndarray, left: np.ndarray, known: np.ndarray) -> float:
    """Ten times the median of the remainders at the small steps that no longer fall; 0 if there are none."""
    for first in range(len(h) - 2):
        tail = np.arange(first, len(h))[known[first:] & (left[first:] > 0)]
        if len(tail) > 2 and _slope(h[tail], left[tail]) < _FLAT:
            return 10.0 * float(np.median(left[tail]))
    return 0.0
