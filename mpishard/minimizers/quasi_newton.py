"""The iteration of L-BFGS, without bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mpishard.backend.array import module_of
from mpishard.minimizers import lbfgs_formulas as formulas
from mpishard.minimizers.descent import SLOTS, Descent
from mpishard.minimizers.history import History
from mpishard.minimizers.limits import Limits
from mpishard.minimizers.space import Space

if TYPE_CHECKING:
    from mpishard.minimizers.lbfgs import LBFGS

Array = Any
_EPS = 2.220446049250313e-16
_LEAST_CURVATURE = 0.2  # Powell's part of the model's curvature, below which a pair is damped


class QuasiNewton(Descent):
    """A minimisation by L-BFGS.

    With a scaling p all pairs are kept in variables that are divided by the root of p: in them the initial inverse
    Hessian is a multiple of the identity.  Base, gradient and direction are in the user's variables.

    Parameters
    ----------
    method : LBFGS
    space : Space
    vectors : 2-D array
        Rows as `LBFGS.slots`.
    point : 1-D array
    limits : Limits
    """

    method: LBFGS

    def __init__(self, method: LBFGS, space: Space, vectors: Array, point: Array, limits: Limits) -> None:
        super().__init__(method, method.search, space, vectors, point, limits)
        self.history = History(space, vectors[len(SLOTS) :])
        self._root = None if limits.scaling is None else module_of(limits.scaling).sqrt(limits.scaling)
        self._weighted_top = 0.0  # largest element of the gradient in scaled variables

    def forget(self) -> bool:
        had = len(self.history) > 0
        self.history.forget()
        return had

    def to_metadata(self) -> dict[str, Any]:
        return {
            **super().to_metadata(),
            "weighted_top": self._weighted_top,
            "history": self.history.to_metadata(),
        }

    def restore(self, metadata: Mapping[str, Any]) -> None:
        try:
            top, history = float(metadata["weighted_top"]), metadata["history"]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{type(self.method).__name__}: the saved state cannot be restored: {error!r}") from None
        before = self.history.to_metadata()
        self.history.restore(history)
        try:
            super().restore(metadata)
        except ValueError:
            self.history.restore(before)
            raise
        self._weighted_top = top

    def _learn(self, gradient: Array, step: float, slope: float, slope_before: float) -> None:
        curvature, modelled = step * (slope - slope_before), -step * step * slope_before
        powell = self.method.damping == "powell"
        if not powell and curvature <= _EPS * -step * slope_before:
            return
        s, y = self.history.open()
        if self._root is None:
            formulas.pair(s, y, self.point, gradient, self.base, self.base_gradient)
        else:
            formulas.scaled_pair(s, y, self.point, gradient, self.base, self.base_gradient, self._root)
        if powell and curvature < _LEAST_CURVATURE * modelled:
            # The direction is minus the inverse Hessian times the gradient: so the model's Hessian times s is -step
            # times the gradient.
            part = (1.0 - _LEAST_CURVATURE) * modelled / (modelled - curvature)
            if self._root is None:
                formulas.damp(y, s, self.base_gradient, part, step)
            else:
                formulas.damp_scaled(y, s, self.base_gradient, self._root, part, step)

    def _to_measure(self) -> tuple[Array, ...]:
        if self._root is None:
            return self.history.opened
        formulas.weigh(self.point, self.base_gradient, self._root)
        return (*self.history.opened, self.point)

    def _measured(self, tops: list[float]) -> None:
        self._weighted_top = self._gradient_top if self._root is None else tops.pop()
        if tops:
            self.history.measure(*tops)

    def _weighted_gradient(self) -> Array:
        """The gradient at the base in scaled variables; it may be in the memory of the point."""
        if self._root is None:
            return self.base_gradient
        formulas.weigh(self.point, self.base_gradient, self._root)
        return self.point

    def _turn(self) -> tuple[float, float, float, float]:
        self.history.complete()
        if self.limits.precondition is not None:
            self._turn_preconditioned()
        else:
            self._turn_plain()
        d, g = self._direction, self.base_gradient
        (top,) = self.space.largest(d)
        slope, square = self.space.dots([(g, d), (d, d)], [self._gradient_top * top, top * top])
        if slope >= 0 and self.limits.precondition is not None and not len(self.history):
            raise ValueError(f"precondition must be positive definite, but g'P g = {-slope:g} for the gradient g")
        return top, slope, self._first_step(slope, square), math.inf

    def _first_step(self, slope: float, square: float) -> float:
        """1, once the length of the direction means something; before it, a direction of length 1 is tried."""
        if len(self.history) or self.method.initial_scaling is not None:
            return 1.0
        if self._root is not None or self.limits.precondition is not None:
            square = -slope  # the square of the length in scaled variables
        length = math.sqrt(square) if square > 0 else 1.0
        return 1.0 / length if self.progress.iterations == 0 else min(1.0, 1.0 / length)

    def _turn_plain(self) -> None:
        g, d, history = self._weighted_gradient(), self._direction, self.history
        gamma = self.method.initial_scaling or (history.gamma() if len(history) else 1.0)
        of_s, of_y = history.inverse_times(*history.products(g, self._weighted_top), gamma) if len(history) else ([], [])
        history.combine([-c for c in of_s], [-c for c in of_y], g, -gamma, d)
        if self._root is not None:
            formulas.weigh(d, d, self._root)

    def _turn_preconditioned(self) -> None:
        """The two-loop recursion in coefficients: the first loop, the preconditioner, and the second loop."""
        g, d, history = self.base_gradient, self._direction, self.history
        if not len(history):
            history.combine([], [], self._precondition(g), -(self.method.initial_scaling or 1.0), d)
            return
        gamma = self.method.initial_scaling or self._preconditioned_gamma()
        of_y = history.solve(history.s_products(g, self._gradient_top))
        history.combine([], [-c for c in of_y], g, 1.0, d)
        r = self._precondition(d)
        (top,) = self.space.largest(r)
        of_s = history.solve_second(of_y, [gamma * product for product in history.y_products(r, top)])
        history.combine([-c for c in of_s], [], r, -gamma, d)

    def _preconditioned_gamma(self) -> float:
        """s'y / y'Py of the newest pair."""
        y, y_top = self.history.newest_y
        r = self._precondition(y)
        (top,) = self.space.largest(r)
        (product,) = self.space.dots([(y, r)], [y_top * top])
        if not product > 0:
            raise ValueError(f"precondition must be positive definite, but y'P y = {product:g} for a vector y")
        return self.history.curvature() / product

    def _precondition(self, vector: Array) -> Array:
        """The user's inverse Hessian times a vector, of the elements that move."""
        assert self.limits.precondition is not None
        return self.bounds.moving(self.limits.precondition(vector))
