"""Nonlinear conjugate gradients by Hager and Zhang (CG_DESCENT)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpishard.arguments import integer, number
from mpishard.minimizers import formulas
from mpishard.minimizers.descent import SLOTS, Descent
from mpishard.minimizers.line_search import HagerZhang, LineSearch, MoreThuente
from mpishard.minimizers.line_search.search import check_line_search
from mpishard.minimizers.method import Limits, Method
from mpishard.minimizers.space import Space

Array = Any
# Steps near the minimum along a direction save more iterations than they cost: with gtol 0.1 the set of Moré, Garbow
# and Hillstrom needs less than half of the evaluations of Hager and Zhang's search, whose slopes may be larger.
_SEARCHES: Mapping[str, tuple[type[LineSearch[Any]], dict[str, float]]] = {
    "more-thuente": (MoreThuente, {"ftol": 1e-4, "gtol": 0.1}),
    "hager-zhang": (HagerZhang, {"epsilon": 1e-12}),
}
_FIRST = 0.01  # the first step moves the point by this part of its largest element (Hager and Zhang 2006, step I0)
# A point whose elements would make a first step this much shorter than the value does is zero but for rounding: steps
# that grow from there do not arrive.
_ROUNDING = 1e-8


@dataclass(frozen=True, kw_only=True)
class NonlinearCG(Method):
    """Nonlinear conjugate gradients by Hager and Zhang, without bounds.

    With the preconditioner P, the gradient g and its change y, the direction is ``d = -P g + beta d``, where::

        beta = max((y'P g - 2 y'P y d'g / d'y) / d'y, eta d'h / d'Q d)

    h is the gradient before, and Q the inverse of P.  Directions always descend, whatever the line search finds.  The
    state is three vectors as large as the parameters.

    Parameters
    ----------
    gtol, ftol, xtol : float
        When it stops: see `Method`.
    maxiter, maxfun : int
        When it stops, too.
    fixed, inner_product, preconditioner : object
        What is known of the elements: see `Method`.
    line_search : str or LineSearch
        ``"more-thuente"`` (ftol 1e-4, gtol 0.1), ``"hager-zhang"`` (epsilon 1e-12), or a line search with other
        options, such as ``mpishard.minimizers.line_search.HagerZhang(sigma=0.5)``, which then has its own `maxls`.
    maxls : int
        The most evaluations of a line search that is given by its name.
    eta : float
        Positive: of the least beta.
    restart : int or None
        Iterations after which the direction is steepest descent again; None for 6 times the number of elements.

    Raises
    ------
    TypeError, ValueError
        If an option is invalid.

    References
    ----------
    W. W. Hager and H. Zhang: A new conjugate gradient method with guaranteed descent and an efficient line search.
    SIAM Journal on Optimization 16, 170-192 (2005), for beta.  The limited memory conjugate gradient method.  SIAM
    Journal on Optimization 23, 2150-2168 (2013), for its least value and the preconditioner.
    """

    line_search: str | LineSearch[Any] = "more-thuente"
    maxls: int = 20
    eta: float = 0.4
    restart: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "maxls", integer("NonlinearCG: maxls", self.maxls, least=1))
        object.__setattr__(self, "eta", number("NonlinearCG: eta", self.eta, above=0))
        if self.restart is not None:
            object.__setattr__(self, "restart", integer("NonlinearCG: restart", self.restart, least=1))
        check_line_search("NonlinearCG", self.line_search, _SEARCHES)

    @property
    def slots(self) -> tuple[str, ...]:
        """``base``, ``base_gradient`` and ``direction``."""
        return SLOTS

    @property
    def search(self) -> LineSearch[Any]:
        """The line search with its options."""
        if isinstance(self.line_search, LineSearch):
            return self.line_search
        kind, options = _SEARCHES[self.line_search]
        return kind(maxls=self.maxls, **options)

    def make(self, space: Space, vectors: Array, point: Array, limits: Limits) -> ConjugateGradients:
        limits.expect_no_bounds("NonlinearCG")
        return ConjugateGradients(self, space, vectors, point, limits)


class ConjugateGradients(Descent):
    """A minimisation by `NonlinearCG`. Methods are collective over the ranks of the space."""

    method: NonlinearCG

    def __init__(self, method: NonlinearCG, space: Space, vectors: Array, point: Array, limits: Limits) -> None:
        super().__init__(method, method.search, space, vectors, point, limits)
        self._square = math.nan  # g'P g at the base
        self._direction_square = math.nan  # d'Q d
        self._turns = 0  # since the last steepest descent
        # From the end of a line search to the next direction, within one call of `tell`:
        self._preconditioned: Array | None = None  # P g
        self._beta = 0.0
        self._decrease = 0.0  # of the value by the last step, from the slope at its beginning

    def begin(self) -> int:
        self._preconditioned, self._beta, self._decrease = None, 0.0, 0.0
        return super().begin()

    def forget(self) -> bool:
        had, self._turns, self._beta, self._decrease = self._turns > 0, 0, 0.0, 0.0
        return had

    def to_metadata(self) -> dict[str, Any]:
        return {
            **super().to_metadata(),
            "square": self._square,
            "direction_square": self._direction_square,
            "turns": self._turns,
            # Parts of a direction that a limit on iterations, lifted later, has prevented; else both are 0.
            "beta": self._beta,
            "decrease": self._decrease,
        }

    def restore(self, metadata: Mapping[str, Any]) -> None:
        try:
            squares = float(metadata["square"]), float(metadata["direction_square"])
            turns = int(metadata["turns"])
            beta, decrease = float(metadata.get("beta", 0.0)), float(metadata.get("decrease", 0.0))
        except (KeyError, TypeError) as error:
            raise ValueError(f"NonlinearCG: the saved state cannot be restored: {error!r}") from None
        super().restore(metadata)
        self._square, self._direction_square = squares
        self._turns = turns
        self._preconditioned, self._beta, self._decrease = None, beta, decrease

    def _learn(self, gradient: Array, step: float, slope: float, slope_before: float) -> None:
        z, before = self._times_preconditioner(gradient), self._square
        top, gradient_top = self.space.largest(z, gradient) if z is not gradient else 2 * self.space.largest(z)
        tops = [gradient_top * top, self._gradient_top * top]
        self._square, mixed = self.space.dots([(gradient, z), (self.base_gradient, z)], tops)
        curvature = slope - slope_before  # y'd
        y_z = self._square - mixed  # y'P g
        y_y = max(0.0, y_z - mixed + before)  # y'P y
        beta = (y_z - 2 * y_y * slope / curvature) / curvature if curvature > 0 else 0.0
        if self._direction_square > 0:  # but for rounding errors
            beta = max(beta, self.method.eta * slope_before / self._direction_square)
        self._preconditioned, self._beta, self._decrease = z, beta, -step * slope_before
        # The square of P g + beta d, of which the products are known.
        self._direction_square = self._square - 2 * beta * slope + beta * beta * self._direction_square
        self._turns += 1
        if self._turns >= (self.method.restart or 6 * self.space.total):
            self.forget()

    def _find_direction(self) -> tuple[float, float, float, float]:
        z, self._preconditioned = self._preconditioned, None
        if z is None:
            z = self._times_preconditioner(self.base_gradient)
        if not self._beta:  # steepest descent: at the start, after a restart, or where another minimisation begins
            self._turns = 0
            self._direction[:] = 0
        formulas.turn(self._direction, z, self._beta)
        top, base_top = self.space.largest(self._direction, self.base)
        (slope,) = self.space.dots([(self.base_gradient, self._direction)], [self._gradient_top * top])
        if not self._beta:
            self._square = self._direction_square = -slope
            if slope > 0:
                raise ValueError(f"preconditioner must be positive definite, but g'P g = {-slope:g} for the gradient g")
        first = self._first_step(slope, top, base_top) if slope < 0 else 1.0
        self._beta = self._decrease = 0.0
        return top, slope, first, math.inf

    def _first_step(self, slope: float, top: float, base_top: float) -> float:
        """The step to try first: it should gain what the last one has gained, or moves the point a little."""
        if self._decrease > 0:
            return self._decrease / -slope
        by_point = _FIRST * base_top / top
        by_value = 2 * _FIRST * abs(self.progress.value) / -slope if self.progress.value else 1 / top
        return by_point if by_point > _ROUNDING * by_value else by_value

    def _times_preconditioner(self, vector: Array) -> Array:
        """P times a vector, of the elements that move: a new array, or the vector itself if P is 1."""
        if self.limits.precondition is None:
            return vector if self.limits.scaling is None else self.limits.scaling * vector
        product = self.limits.precondition(vector)
        if self.limits.fixed is not None:
            product = product.copy()
            product[self.limits.fixed] = 0
        return product
