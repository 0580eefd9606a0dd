"""The variables in which conjugate gradients run: those of the free elements, scaled."""

from __future__ import annotations

from typing import Any

from mpishard.backend.array import empty, module_of
from mpishard.minimizers import formulas
from mpishard.minimizers.bounds import Bounds, mark_free
from mpishard.minimizers.limits import Limits

Array = Any


class FreeVariables:
    """Variables of the free elements, in which the diagonal of the user's inverse Hessian is 1.

    With the user's diagonal p they are ``x / sqrt(p)``, and gradients there are ``sqrt(p) g``; both are 0 at elements
    that are fixed or held at a bound. A callable preconditioner scales nothing; it is applied to gradients, and
    `preconditioned` is collective if it is. `weights` is the root of p, 0 at elements that are fixed or held; None if
    all are free and p is 1.
    """

    def __init__(self, limits: Limits, bounds: Bounds, like: Array) -> None:
        self._precondition = limits.precondition
        self._bounds = bounds
        module = module_of(like)
        self.weights: Array | None = None
        if limits.scaling is not None:
            self.weights = module.sqrt(limits.scaling.astype(like.dtype))
        if limits.fixed is not None:
            if self.weights is None:
                self.weights = module.ones(like.size, like.dtype)
            self.weights[limits.fixed] = 0
        self._released = self.weights  # the weights where no element is held
        if bounds.any:
            if self._released is None:
                self._released = module.ones(like.size, like.dtype)
            self.weights = self._released.copy()

    def hold(self, point: Array, gradient: Array) -> None:
        """Hold the elements that are at a bound from which descent leads outside; release all others."""
        if self.weights is not None and self._released is not None and self._bounds.any:
            mark_free(self.weights, point, gradient, self._bounds.lower, self._bounds.upper, 0.0)
            self.weights *= self._released

    @property
    def diagonal(self) -> bool:
        """Return True if `preconditioned` returns its argument."""
        return self._precondition is None

    def scaled(self, gradient: Array) -> Array:
        """A gradient in these variables: a new array, or the given one if there are no weights."""
        if self.weights is None:
            return gradient
        out = empty(gradient.size, gradient.dtype, gradient)
        formulas.weighted(out, gradient, self.weights)
        return out

    def preconditioned(self, gradient: Array) -> Array:
        """The user's callable of a gradient in these variables; without one, the gradient itself."""
        if self._precondition is None:
            return gradient
        return self.scaled(self._precondition(gradient))

    def unscaled(self, step: Array) -> Array:
        """A step in these variables as one of the point: a new array, or the given one if there are no weights."""
        return self.scaled(step)  # x = sqrt(p) (x / sqrt(p))
