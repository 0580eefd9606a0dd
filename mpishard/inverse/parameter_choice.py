"""The choice of a regularisation's weight from runs over weights: the L-curve, and its corner.

Weights enter, and for each the misfit and the term; the weight at the corner leaves.  Nothing here needs MPI.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np

from mpishard.arguments import entries, number, path
from mpishard.inverse.pictures import draw_l_curve

_FEWEST = 3  # points that make an angle
_WIDEST = 7 * math.pi / 8  # an angle at a corner is smaller
_SLACK = math.log(1.01)  # runs end at a tolerance: nearer points tell nothing about each other


@dataclass(frozen=True)
class LCurve:
    """The result of `l_curve`.

    Parameters
    ----------
    weights, misfits, terms : tuple of float
        The points, in the order in which they were given.
    corner : int or None
        The index of the corner among them; None if the curve has no corner.
    angle : float
        The angle at the corner, in radians; NaN without a corner.
    """

    weights: tuple[float, ...]
    misfits: tuple[float, ...]
    terms: tuple[float, ...]
    corner: int | None
    angle: float

    @property
    def weight(self) -> float | None:
        """The weight at the corner; None if the curve has no corner."""
        return None if self.corner is None else self.weights[self.corner]

    def __str__(self) -> str:
        """One line."""
        if self.corner is None:
            widest, (least, *_, most) = math.degrees(_WIDEST), sorted(self.weights)
            return f"no corner: no angle is below {widest:g} degrees between the weights {least:g} and {most:g}"
        return f"corner at weight {self.weight:g}: an angle of {math.degrees(self.angle):.0f} degrees"


def l_curve(weights: Any, misfits: Any, terms: Any, *, plot: str | PathLike[str] | None = None) -> LCurve:
    """Find the weight of a regularisation at the corner of the L-curve.

    The L-curve is the norm of the term over the norm of the misfit, both on logarithmic axes, for runs that differ in
    the weight of the term (Hansen and O'Leary 1993).  Where the weight is too small, the term falls steeply with it and
    the misfit stays; where it is too large, the misfit rises and the term stays.  The corner lies between.

    Not collective: each rank that calls it computes by itself.

    Parameters
    ----------
    weights : sequence of float
        At least three, of at least 0, all different, in any order.
    misfits : sequence of float
        By weight the norm of the residual at the result, above 0.
    terms : sequence of float
        By weight the norm that the term measures at the result, without its weight, above 0.  Both may be squares of
        norms, as values of a misfit and of a term are, with any factor: the corner is the same.  That of an `L1` term
        is the sum of absolute values, and goes with a residual that is not squared.
    plot : path, optional
        Draw the curve into this file, whose name says the format (.png, .pdf, .svg); needs matplotlib
        (``mpishard[cli]``).  Call it on one rank then.

    Returns
    -------
    LCurve
        The corner, and the weight there.  It has none if the points make no corner: on a straight or concave curve,
        and if all points are equal.  More weights, smaller or larger ones, may show it.

    Raises
    ------
    ValueError, TypeError
        If there are fewer than three points, or a number is missing, invalid or repeated; or if the misfit falls or the
        term rises as the weight rises, by more than a hundredth: such a run has not converged.
    ModuleNotFoundError
        If `plot` is given and matplotlib is not installed.

    Notes
    -----
    The corner is found by the triangle method, which suits few points.  The points are ordered by falling weight.  Of
    all triangles of two points and the last one, that counts which has the smallest angle at its second point, if the
    curve bends to the origin there and the angle is below 7/8 of pi.  Points that differ by less than a hundredth make
    no angle.

    Hansen and O'Leary, "The use of the L-curve in the regularization of discrete ill-posed problems", SIAM Journal on
    Scientific Computing 14 (1993).  Castellanos, Gomez and Guerra, "The triangle method for finding the corner of the
    L-curve", Applied Numerical Mathematics 43 (2002).

    Examples
    --------
    >>> import mpishard
    >>> curve = mpishard.l_curve([0.01, 0.1, 1, 10, 100], [1.01, 1.1, 2, 11, 101], [101, 11, 2, 1.1, 1.01])
    >>> curve.weight
    1.0
    """
    given = _row("weights", weights, least=0.0)
    heights = {"misfits": _row("misfits", misfits, above=0.0), "terms": _row("terms", terms, above=0.0)}
    for name, values in heights.items():
        if len(values) != len(given):
            raise ValueError(f"{name} has {len(values)} entries and weights has {len(given)}; give one for each weight")
    if len(given) < _FEWEST:
        raise ValueError(f"weights has {len(given)} entries, but a corner needs at least {_FEWEST}; run more weights")
    order = sorted(range(len(given)), key=given.__getitem__)
    for before, after in itertools.pairwise(order):
        if given[before] == given[after]:
            raise ValueError(f"weights has {given[after]:g} at [{before}] and at [{after}]; give each weight once")
    _check_course("misfits", heights["misfits"], given, order, rises=True)
    _check_course("terms", heights["terms"], given, order, rises=False)
    across, up = np.log([heights["misfits"], heights["terms"]])[:, order]
    exact = np.maximum.accumulate(across), np.minimum.accumulate(up)  # as they would be without tolerances
    place, angle = _corner(np.stack(exact, axis=1)[::-1])
    corner = None if place is None else order[::-1][place]
    found = LCurve(tuple(given), tuple(heights["misfits"]), tuple(heights["terms"]), corner, angle)
    if plot is not None:
        draw_l_curve(found.weights, found.misfits, found.terms, corner, str(found), path("plot", plot))
    return found


def _row(name: str, values: Any, *, least: float | None = None, above: float | None = None) -> list[float]:
    """The numbers of an argument, each within its limit."""
    row = entries(name, values, "numbers")
    limits: dict[str, Any] = {"least": least, "above": above, "otherwise": "left out with its run"}
    return [number(f"{name}[{index}]", value, **limits) for index, value in enumerate(row)]


def _check_course(name: str, values: Sequence[float], weights: Sequence[float], order: list[int], rises: bool) -> None:
    """Raise ValueError unless the values rise, or do not rise, as the weight rises."""
    highest = order[0]
    for each in order:
        if (math.log(values[highest]) - math.log(values[each])) * (1 if rises else -1) > _SLACK:
            raise ValueError(
                f"{name} {'fall' if rises else 'rise'} from {values[highest]:.6g} at weight {weights[highest]:g} to "
                f"{values[each]:.6g} at weight {weights[each]:g}, and on an L-curve they {'rise' if rises else 'fall'} "
                "with the weight: lower gtol until these runs converge, or leave out the one that does not"
            )
        if (values[each] > values[highest]) == rises:
            highest = each


def _corner(points: np.ndarray) -> tuple[int | None, float]:
    """The index of the corner and the angle there, None and NaN without one.

    `points` (points, 2) are logarithms of misfit and term, by falling weight: the first is at the right, the last at
    the top.
    """
    best: int | None = None
    smallest = _WIDEST
    for middle in range(1, len(points) - 1):
        before, after = points[:middle] - points[middle], points[-1] - points[middle]
        sides, side = np.hypot(*before.T), math.hypot(*after)
        bends = before[:, 0] * after[1] - before[:, 1] * after[0] > 0
        bends &= (sides > _SLACK) & (side > _SLACK)  # a shorter side has the direction of an error
        cosines = (before @ after)[bends] / (sides[bends] * side)
        angle = math.acos(min(1.0, float(cosines.max(initial=-1.0))))
        if angle < smallest:
            best, smallest = middle, angle
    return best, math.nan if best is None else smallest
