"""What a minimisation problem of the tests is: a function with its start, bounds and lowest known value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Array = np.ndarray
Residuals = Callable[[Array], tuple[Array, Array]]  # of a point: residuals (m,) and their Jacobian (m, n)
Function = Callable[[Array], tuple[float, Array]]  # of a point: value and gradient


@dataclass(frozen=True)
class Problem:
    """A function, or sum of squares, of n numbers.

    Functions take complex points too: `hessian_product` needs that.

    Parameters
    ----------
    name : str
    start : array
        Where methods begin.
    function : callable
        Value and gradient of a point.
    minimum : float
        The lowest value that is known inside of the bounds.
    lower, upper : array, optional
        Bounds; None for a problem without.
    others : tuple of float
        Values of further local minima, and of infima at infinity, at which methods end as well.
    residuals : callable, optional
        Whose squares the function sums.
    """

    name: str
    start: Array
    function: Function
    minimum: float
    lower: Array | None = None
    upper: Array | None = None
    others: tuple[float, ...] = ()
    residuals: Residuals | None = None

    @property
    def n(self) -> int:
        return self.start.size

    @property
    def bounds(self) -> list[tuple[float, float]] | None:
        """As SciPy takes them."""
        if self.lower is None or self.upper is None:
            return None
        return list(zip(self.lower.tolist(), self.upper.tolist(), strict=True))

    def hessian_product(self, x: Array, direction: Array) -> Array:
        """The second derivative along a direction, to rounding: the gradient at a complex point has no cancellation."""
        length = 1e-100
        return self.function(x + 1j * length * direction)[1].imag / length


def sum_of_squares(residuals: Residuals) -> Function:
    """The sum of the squared residuals, with its gradient 2 J'r."""

    def function(x: Array) -> tuple[float, Array]:
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            r, jacobian = residuals(x)
            return r @ r, 2 * (jacobian.T @ r)

    return function


def numbers(text: str) -> Array:
    """Of a table."""
    return np.array(text.split(), float)
