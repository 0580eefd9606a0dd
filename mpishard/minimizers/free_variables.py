"""The variables in which conjugate gradients run: those of the free elements, scaled."""

from __future__ import annotations

from typing import Any

from mpishard.backend.array import empty, module_of
from mpishard.minimizers import cg_formulas
from mpishard.minimizers.limits import Limits

Array = Any


class FreeVariables:
    """Variables of the free elements, in which the diagonal of the user's inverse Hessian is 1.

    With the user's diagonal p they are ``x / sqrt(p)``, and gradients there are ``sqrt(p) g``; at fixed elements both
    are 0.  A callable preconditioner scales nothing; it is applied to gradients.  Not collective, but for
    `preconditioned` if the user's callable is.

    Parameters
    ----------
    limits : Limits
        Of the minimisation.
    like : array
        Of the dtype and device of the vectors.

    Attributes
    ----------
    weights : 1-D array or None
        The root of p, 0 at fixed elements; None if all are free and p is 1.

    Raises
    ------
    ValueError
        If the limits have both a diagonal and a callable.
    """

    def __init__(self, limits: Limits, like: Array) -> None:
        if limits.scaling is not None and limits.precondition is not None:
            raise ValueError("a scaling and a precondition were given; leave one of them out")
        self._precondition = limits.precondition
        module = module_of(like)
        self.weights: Array | None = None
        if limits.scaling is not None:
            self.weights = module.sqrt(limits.scaling.astype(like.dtype))
        if limits.fixed is not None:
            if self.weights is None:
                self.weights = module.ones(limits.fixed.size, like.dtype)
            self.weights[limits.fixed] = 0

    @property
    def diagonal(self) -> bool:
        """Whether `preconditioned` gives back what it is given."""
        return self._precondition is None

    def scaled(self, gradient: Array) -> Array:
        """A gradient in these variables: a new array, or the given one if there are no weights."""
        if self.weights is None:
            return gradient
        out = empty(gradient.size, gradient.dtype, gradient)
        cg_formulas.weighted(out, gradient, self.weights)
        return out

    def preconditioned(self, gradient: Array) -> Array:
        """The user's callable of a gradient in these variables; without one, the gradient itself."""
        if self._precondition is None:
            return gradient
        return self.scaled(self._precondition(gradient))

    def unscaled(self, step: Array) -> Array:
        """A step in these variables as one of the point: a new array, or the given one if there are no weights."""
        return self.scaled(step)  # x = sqrt(p) (x / sqrt(p))
