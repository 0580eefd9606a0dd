"""The user's options about the elements of the point on this rank: bounds, fixed elements, and their scale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mpishard.io import log

Array = Any


@dataclass(frozen=True)
class Limits:
    """This rank's part of the options about elements; None where an option is not given.

    `lower` and `upper` are infinite without a bound. With positive `weights` the inner product is
    ``sum(weights * a * b)``, and stop tests look at ``gradient / weights``. The positive `scaling` is the diagonal p of
    the initial inverse Hessian, in units of one number that the method chooses; ``precondition(vector)``, of this
    rank's elements, collective, is such an initial inverse Hessian that is no diagonal, symmetric and positive
    definite.
    """

    lower: Array | None = None
    upper: Array | None = None
    fixed: Array | None = None  # True for elements that keep their value
    weights: Array | None = None
    scaling: Array | None = None
    precondition: Callable[[Array], Array] | None = None

    def __post_init__(self) -> None:
        if self.scaling is not None and self.precondition is not None:
            raise ValueError("a scaling and a precondition were given; leave one of them out")

    def expect_no_bounds(self, method: str) -> None:
        """Raise ValueError if there are bounds, for a method without them."""
        if self.lower is not None or self.upper is not None:
            raise ValueError(f"{method} takes no bounds; use LBFGSB, or fix elements")


def warn_projected_start(moved: int) -> None:
    """Log that `moved` elements of the start, unless 0, were out of bounds; callers choose the rank that logs."""
    if moved:
        log.inform(f"{moved} elements of the start lie outside of their bounds, and begin at the nearest bound")
