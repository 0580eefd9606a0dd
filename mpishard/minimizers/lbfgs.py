"""L-BFGS: the limited-memory quasi-Newton method of Broyden, Fletcher, Goldfarb and Shanno."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from mpishard.arguments import integer, number, shown
from mpishard.backend.array import module_of
from mpishard.minimizers import formulas
from mpishard.minimizers.descent import SLOTS, Descent
from mpishard.minimizers.history import History
from mpishard.minimizers.line_search import HagerZhang, LineSearch, MoreThuente
from mpishard.minimizers.line_search.search import check_line_search
from mpishard.minimizers.method import Limits, Method
from mpishard.minimizers.space import Space

Array = Any
_SEARCHES: Mapping[str, type[LineSearch[Any]]] = {
    "more-thuente": MoreThuente,
    "hager-zhang": HagerZhang,
}
_DAMPING = ("skip", "powell")
_LEAST_CURVATURE = 0.2  # Powell's part of the model's curvature, below which a pair is damped


@dataclass(frozen=True, kw_only=True)
class LBFGS(Method):
    """The L-BFGS method (Liu and Nocedal, 1989), without bounds.

    Its state is ``2 history + 3`` vectors as large as the parameters, and the point.

    Parameters
    ----------
    gtol, ftol, xtol : float
        When it stops: see `Method`.
    maxiter, maxfun : int
        When it stops, too.
    fixed, inner_product, preconditioner : object
        What is known of the elements: see `Method`.
    history : int
        The number m of pairs of steps and changes of the gradient that are kept, at least 1.
    line_search : str or LineSearch
        ``"more-thuente"`` (ftol 1e-3, gtol 0.9, xtol 0.1), ``"hager-zhang"``, or a line search with other options, such
        as ``mpishard.minimizers.line_search.MoreThuente(ftol=1e-4)``, which then has its own `maxls`.
    maxls : int
        The most evaluations of a line search that is given by its name.
    damping : str
        What happens to a pair with too little curvature: ``"skip"`` drops it; ``"powell"`` mixes the change of the
        gradient with what the model of the Hessian says for it (Powell, 1978), and keeps it.
    initial_scaling : float, optional
        Positive: the initial inverse Hessian is this times the identity (or scaling, or preconditioner).  By default 1
        in the first iteration, later s'y / y'y of the newest pair.

    Raises
    ------
    TypeError, ValueError
        If an option is invalid.
    """

    takes_batches: ClassVar[bool] = True

    history: int = 10
    line_search: str | LineSearch[Any] = "more-thuente"
    maxls: int = 20
    damping: str = "skip"
    initial_scaling: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        for field in ("history", "maxls"):
            object.__setattr__(self, field, integer(f"{name}: {field}", getattr(self, field), least=1))
        check_line_search(name, self.line_search, _SEARCHES)
        if self.damping not in _DAMPING:
            raise ValueError(f"{name}: damping={shown(self.damping)} must be one of {', '.join(map(repr, _DAMPING))}")
        if self.initial_scaling is not None:
            scale = number(f"{name}: initial_scaling", self.initial_scaling, above=0, otherwise="None")
            object.__setattr__(self, "initial_scaling", scale)

    @property
    def slots(self) -> tuple[str, ...]:
        """``base``, ``base_gradient``, ``direction``, ``s_0`` to ``s_(m-1)`` and ``y_0`` to ``y_(m-1)``."""
        return (*SLOTS, *(f"{kind}_{pair}" for kind in "sy" for pair in range(self.history)))

    @property
    def search(self) -> LineSearch[Any]:
        """The line search with its options."""
        if isinstance(self.line_search, LineSearch):
            return self.line_search
        return _SEARCHES[self.line_search](maxls=self.maxls)

    def make(self, space: Space, vectors: Array, point: Array, limits: Limits) -> QuasiNewton:
        limits.expect_no_bounds("LBFGS")
        return QuasiNewton(self, space, vectors, point, limits)


class QuasiNewton(Descent):
    """A minimisation by L-BFGS. Methods are collective over the ranks of the space.

    Rows of `vectors` are `LBFGS.slots`. With a scaling p all pairs are kept in variables that are divided by the root
    of p: in them the initial inverse Hessian is a multiple of the identity. Base, gradient and direction are in the
    user's variables.
    """

    method: LBFGS

    def __init__(self, method: LBFGS, space: Space, vectors: Array, point: Array, limits: Limits) -> None:
        super().__init__(method, method.search, space, vectors, point, limits)
        self.history = self._make_history(space, vectors[len(SLOTS) :])
        self._root = None if limits.scaling is None else module_of(limits.scaling).sqrt(limits.scaling)
        self._scaled_top = 0.0  # largest element of the gradient in scaled variables

    def _make_history(self, space: Space, rows: Array) -> History:
        return History(space, rows)

    def forget(self) -> bool:
        had = len(self.history) > 0
        self.history.forget()
        return had

    def to_metadata(self) -> dict[str, Any]:
        return {
            **super().to_metadata(),
            "weighted_top": self._scaled_top,  # its name in saved states
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
        self._scaled_top = top

    def _learn(self, gradient: Array, step: float, slope: float, slope_before: float) -> None:
        curvature, modelled = step * (slope - slope_before), -step * step * slope_before
        powell = self.method.damping == "powell"
        if not powell and curvature <= self.epsilon * -step * slope_before:
            return
        s, y = self.history.open()
        self.note_written(*(len(SLOTS) + row for row in self.history.opened_rows))
        self._write_pair(s, y, gradient)
        if powell and curvature < _LEAST_CURVATURE * modelled:
            # The direction is minus the inverse Hessian times the gradient: so the model's Hessian times s is -step
            # times the gradient.
            part = (1.0 - _LEAST_CURVATURE) * modelled / (modelled - curvature)
            if self._root is None:
                formulas.damp(y, s, self.base_gradient, part, step)
            else:
                formulas.damp_scaled(y, s, self.base_gradient, self._root, part, step)

    def _write_pair(self, s: Array, y: Array, gradient: Array) -> None:
        """Write the step from the base to the point, and the change of the gradient, in scaled variables."""
        if self._root is None:
            formulas.pair(s, y, self.point, gradient, self.base, self.base_gradient)
        else:
            formulas.scaled_pair(s, y, self.point, gradient, self.base, self.base_gradient, self._root)

    def _further_vectors(self) -> tuple[Array, ...]:
        if self._root is None:
            return self.history.opened
        return (*self.history.opened, self._scaled_gradient())

    def _take_further_tops(self, tops: list[float]) -> None:
        self._scaled_top = self._gradient_top if self._root is None else tops.pop()
        if tops:
            self.history.set_tops(*tops)

    def _scaled_gradient(self) -> Array:
        """The gradient at the base in scaled variables; it may be in the memory of the point."""
        if self._root is None:
            return self.base_gradient
        formulas.multiply(self.point, self.base_gradient, self._root)
        return self.point

    def _find_direction(self) -> tuple[float, float, float, float]:
        if self.limits.precondition is not None:
            self.times_preconditioned(self.base_gradient, self._gradient_top, -1.0, self._direction)
        else:
            self._direction_of_pairs()
        d, g = self._direction, self.base_gradient
        (top,) = self.space.largest(d)
        slope, square = self.space.dots([(g, d), (d, d)], [self._gradient_top * top, top * top])
        if slope >= 0 and self.limits.precondition is not None and not len(self.history):
            raise ValueError(f"preconditioner must be positive definite, but g'P g = {-slope:g} for the gradient g")
        return top, slope, self._first_step(slope, square), math.inf

    @property
    def _has_scale(self) -> bool:
        """Return True if the length of the direction is meaningful."""
        return len(self.history) > 0 or self.method.initial_scaling is not None

    def _first_step(self, slope: float, square: float) -> float:
        """1, once the length of the direction is meaningful; before, a direction of length 1 is tried."""
        if self._has_scale:
            return 1.0
        if self._root is not None or self.limits.precondition is not None:
            square = -slope  # the square of the length in scaled variables
        length = math.sqrt(square) if square > 0 else 1.0
        return 1.0 / length if self.progress.iterations == 0 else min(1.0, 1.0 / length)

    def _direction_of_pairs(self) -> None:
        g, d, history = self._scaled_gradient(), self._direction, self.history
        sg, yg = history.products(g, self._scaled_top)
        gamma = self.method.initial_scaling or (history.gamma() if len(history) else 1.0)
        of_s, of_y = history.inverse_times(sg, yg, gamma)
        history.combine([-c for c in of_s], [-c for c in of_y], g, -gamma, d)
        if self._root is not None:
            formulas.multiply(d, d, self._root)

    def times_preconditioned(self, vector: Array, top: float, sign: float, out: Array) -> None:
        """``out = sign`` (1 or -1) times the inverse Hessian times a vector, whose largest element is `top`.

        It is the two-loop recursion in coefficients: the first loop, the preconditioner, and the second loop.
        """
        history = self.history
        products, _ = history.products(vector, top)
        if not len(history):
            scale = sign * (self.method.initial_scaling or 1.0)
            history.combine([], [], self._precondition(vector), scale, out)
            return
        gamma = self.method.initial_scaling or self._preconditioned_gamma()
        of_y = history.solve(products)
        history.combine([], [-c for c in of_y], vector, 1.0, out)
        r = self._precondition(out)
        (top,) = self.space.largest(r)
        of_s = history.solve_second(of_y, [gamma * product for product in history.y_products(r, top)])
        history.combine([sign * c for c in of_s], [], r, sign * gamma, out)

    def _preconditioned_gamma(self) -> float:
        """s'y / y'Py of the newest pair."""
        y, y_top = self.history.newest_y
        r = self._precondition(y)
        (top,) = self.space.largest(r)
        (product,) = self.space.dots([(y, r)], [y_top * top])
        if not product > 0:
            raise ValueError(f"preconditioner must be positive definite, but y'P y = {product:g} for a vector y")
        return self.history.curvature() / product

    def _precondition(self, vector: Array) -> Array:
        """The user's inverse Hessian times a vector, of the elements that move."""
        assert self.limits.precondition is not None
        return self.bounds.moving(self.limits.precondition(vector))
