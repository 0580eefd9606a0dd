"""Gauss-Newton steps for sums of squares of many unknowns, by conjugate gradients in a trust region."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpishard.minimizers.limits import Limits
from mpishard.minimizers.newton import TruncatedNewton, TruncatedNewtonMinimizer
from mpishard.minimizers.space import Space

Array = Any
_TRUSTED = 0.25  # of the decrease that the model predicts: with less, a small one does not mean convergence


@dataclass(frozen=True, kw_only=True)
class GaussNewton(TruncatedNewton):
    """`TruncatedNewton` with the tolerances of SciPy's least squares.

    A step ends it that decreases the cost by less than `ftol` of it, about as the model predicts, or whose largest
    element is below ``xtol * (xtol + the point's)``.
    """

    forcing: float = 0.01

    def make(self, space: Space, vectors: Array, point: Array, limits: Limits) -> GaussNewtonMinimizer:
        return GaussNewtonMinimizer(self, space, vectors, point, limits)


class GaussNewtonMinimizer(TruncatedNewtonMinimizer):
    def _converged(self, value_before: float, step_top: float, point_top: float) -> str:
        method, value = self.method, self.progress.value
        decrease = value_before - value
        if self.progress.projected_norm <= method.gtol:
            return "gradient"
        if decrease < method.ftol * value_before and decrease > _TRUSTED * self._decrease:
            return "decrease"
        return "step" if step_top < method.xtol * (method.xtol + point_top) else ""
