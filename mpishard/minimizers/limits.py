"""What a user says about the elements of the point: bounds, fixed elements, and their scale; this rank's part of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mpishard.io import log

Array = Any


@dataclass(frozen=True)
class Limits:
    """This rank's part of what is known of each element; None where nothing is.

    Parameters
    ----------
    lower, upper : 1-D array, optional
        Bounds, infinite where there is none.
    fixed : 1-D array of bool, optional
        True for elements that keep their value.
    weights : 1-D array, optional
        Positive: the inner product is ``sum(weights * a * b)``; stop tests look at ``gradient / weights``.
    scaling : 1-D array, optional
        Positive: the diagonal p of the initial inverse Hessian, in units of one number that the method chooses.
    precondition : callable, optional
        ``precondition(vector) -> vector``, of this rank's elements, collective: such an initial inverse Hessian that is
        no diagonal.  Symmetric and positive definite.

    Raises
    ------
    ValueError
        If there are both a scaling and a precondition.
    """

    lower: Array | None = None
    upper: Array | None = None
    fixed: Array | None = None
    weights: Array | None = None
    scaling: Array | None = None
    precondition: Callable[[Array], Array] | None = None

    def __post_init__(self) -> None:
        if self.scaling is not None and self.precondition is not None:
            raise ValueError("a scaling and a precondition were given; leave one of them out")

    def expect_no_bounds(self, method: str) -> None:
        """Refuse bounds, for a method without them.

        Parameters
        ----------
        method : str
            Its name.

        Raises
        ------
        ValueError
            If there are any.
        """
        if self.lower is not None or self.upper is not None:
            raise ValueError(f"{method} takes no bounds; use LBFGSB, or fix elements")


def tell_of_projection(moved: int) -> None:
    """Say that the start was outside of its bounds.

    Not collective; callers choose the rank that speaks.

    Parameters
    ----------
    moved : int
        How many elements were; nothing is said of 0.
    """
    if moved:
        log.inform(f"{moved} elements of the start lie outside of their bounds, and begin at the nearest bound")
