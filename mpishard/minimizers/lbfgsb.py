"""L-BFGS with bounds, and with terms that have no gradient everywhere."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpishard.backend.array import empty, module_of
from mpishard.minimizers.bounds import (
    backtrack_to_bounds,
    beyond_cauchy_point,
    find_breakpoints,
    keep_free,
    move_base,
    move_base_and_pair,
    project_step,
    steps_from_cauchy_point,
)
from mpishard.minimizers.cauchy import Breakpoints
from mpishard.minimizers.formulas import divide, multiply
from mpishard.minimizers.history import ReducedHistory
from mpishard.minimizers.lbfgs import LBFGS, QuasiNewton
from mpishard.minimizers.method import Elements, Limits
from mpishard.minimizers.orthants import Orthant
from mpishard.minimizers.penalty import AtReference, Penalty
from mpishard.minimizers.proximal_quasi_newton import ProximalQuasiNewton
from mpishard.minimizers.space import Space

Array = Any
_FAR = 10.0  # times gtol
_SHORT = 0.5  # part of the direction
_MUCH = 5.0  # times the decrease that `ftol` asks for


@dataclass(frozen=True, kw_only=True)
class LBFGSB(LBFGS):
    """The L-BFGS method with bounds, and terms without a gradient; every point at which it evaluates is feasible.

    An iteration minimises the quadratic model of the pairs along the projected path of steepest descent, as far as its
    first minimum: to the generalised Cauchy point.  Elements that have met their bounds there are held.  The minimum of
    the model of the others (Byrd, Lu, Nocedal and Zhu, 1995, sections 4 and 5.1) is projected into the bounds (Morales
    and Nocedal, 2011); if that is no step of descent, it is taken as far as all of them are inside.  The line search
    goes from the last iterate towards this point, or beyond it as far as the bounds allow.

    The steps are those of SciPy's L-BFGS-B (Zhu, Byrd, Lu and Nocedal, 1997), to rounding, with three differences:

    1. Where rounding leaves no Cholesky factor of the pairs, the oldest are dropped, not all.
    2. Breakpoints go into 32 bins, and the one where the model ceases to fall is divided again.  A minimum inside an
       earlier bin, at whose end the model falls again, is passed by.
    3. An iteration may be cut short to less than half of its direction, and change the value or the point by less than
       `ftol` or `xtol`, while the projected gradient is above 10 gtol.  Then the minimisation ends only if the next
       iteration is such, too.  Even then the pairs are dropped, and it continues, if the projected gradient promises a
       decrease of 5 times what `ftol` asks for.

    Parameters
    ----------
    gtol, ftol, xtol : float
        When it stops: see `Method`.
    maxiter, maxfun : int
        When it stops, too.
    fixed, inner_product, preconditioner : object
        What is known of the elements: see `Method`.  A preconditioner may be a diagonal only.
    history : int
        As of `LBFGS`, like the next four.
    line_search : str or LineSearch
        The line search.
    maxls : int
        The most evaluations of one.
    damping : str
        What happens to a pair with too little curvature.
    initial_scaling : float, optional
        Of the initial inverse Hessian.
    bounds : pair, mapping or None
        The lower and the upper bounds, each a number, a flat array as long as the parameters, or None; or by tensor
        name such pairs.
    l1 : pair or None
        Weights, not negative, and references of terms ``weight |x - reference|`` that are added to the function: each a
        number, a flat array as long as the parameters, or by tensor name; None as reference: 0.  `minimize` makes it of
        each `mpishard.L1`.
    penalty : object or None
        What `minimize` makes of `mpishard.TotalVariation` and `mpishard.GroupL1`.  An iteration then minimises the
        model with these terms, by proximal steps, and the line search asks for a decrease alone (Lee, Sun and Saunders,
        2014); other values of `line_search` and `damping` are refused.

    Raises
    ------
    TypeError, ValueError
        If an option is invalid.

    References
    ----------
    R. H. Byrd, P. Lu, J. Nocedal and C. Zhu: A limited memory algorithm for bound constrained optimization.  SIAM
    Journal on Scientific Computing 16, 1190-1208 (1995).  J. L. Morales and J. Nocedal: Remark on "Algorithm 778:
    L-BFGS-B".  ACM Transactions on Mathematical Software 38, 7 (2011).  C. Zhu, R. H. Byrd, P. Lu and J. Nocedal:
    Algorithm 778: L-BFGS-B.  ACM Transactions on Mathematical Software 23, 550-560 (1997).  G. Andrew and J. Gao:
    Scalable training of L1-regularized log-linear models.  Proceedings of ICML, 33-40 (2007).  J. D. Lee, Y. Sun and
    M. A. Saunders: Proximal Newton-type methods for minimizing composite functions.  SIAM Journal on Optimization 24,
    1420-1443 (2014).
    """

    bounds: Elements = None
    l1: Elements = None
    penalty: Penalty | None = None

    @property
    def slots(self) -> tuple[str, ...]:
        """Those of `LBFGS`, and of a penalty ``dual_0`` and so on."""
        return (*super().slots, *(f"dual_{k}" for k in range(0 if self.penalty is None else self.penalty.duals)))

    def make(self, space: Space, vectors: Array, point: Array, limits: Limits) -> QuasiNewton:
        limits.expect_no_operators("LBFGSB")
        if self.penalty is not None:
            return ProximalQuasiNewton(self, space, vectors, point, limits)
        if limits.l1_weights is not None:
            return OrthantWiseQuasiNewton(self, space, vectors, point, limits)
        if limits.lower is None and limits.upper is None:
            return super().make(space, vectors, point, limits)
        return BoundedQuasiNewton(self, space, vectors, point, limits)


class BoundedQuasiNewton(QuasiNewton):
    """A minimisation by L-BFGS with bounds. Methods are collective over the ranks of the space."""

    history: ReducedHistory

    def __init__(self, method: LBFGSB, space: Space, vectors: Array, point: Array, limits: Limits) -> None:
        super().__init__(method, space, vectors, point, limits)
        self._bounded = self._boxed = True
        self._lower, self._upper = self.bounds.lower, self.bounds.upper  # between which an iteration moves
        self._doubted = -1  # the last iteration with too short a step to end
        self._pair_waits = False  # for `_move_base` to write it

    def begin(self) -> int:
        self._doubted = -1
        bounded, open_sides = self.space.count(*self.bounds.bounded_and_open())
        self._bounded, self._boxed = bounded > 0, open_sides == 0
        return super().begin()

    def to_metadata(self) -> dict[str, Any]:
        return {**super().to_metadata(), "bounded": self._bounded, "boxed": self._boxed, "doubted": self._doubted}

    def restore(self, metadata: Mapping[str, Any]) -> None:
        super().restore(metadata)
        self._bounded, self._boxed = bool(metadata.get("bounded", True)), bool(metadata.get("boxed", True))
        self._doubted = int(metadata.get("doubted", -1))

    def _make_history(self, space: Space, rows: Array) -> ReducedHistory:
        return ReducedHistory(space, rows)

    @property
    def _moves_at_once(self) -> bool:
        """Return True if one pass over the vectors writes the pair, moves the base, and measures all."""
        method, limits = self.method, self.limits
        return not method.xtol and limits.weights is None and self._root is None and method.damping == "skip"

    def _write_pair(self, s: Array, y: Array, gradient: Array) -> None:
        """Leave the pair to `_move_base`, if this does all at once."""
        self._pair_waits = self._moves_at_once
        if not self._pair_waits:
            super()._write_pair(s, y, gradient)

    def _move_base(self, gradient: Array) -> tuple[float, float, float]:
        if not self._moves_at_once:
            return super()._move_base(gradient)
        pair, self._pair_waits = self.history.opened if self._pair_waits else (), False
        move = move_base_and_pair if pair else move_base
        vectors = self.base, self.base_gradient, *pair, self.point, gradient
        tops = move(*vectors, self.bounds.lower, self.bounds.upper)
        projected_top, scaled_top, *of_pair = self.space.maxima(*tops)
        self._take_further_tops([*of_pair, scaled_top])
        return 0.0, self._gradient_top, projected_top

    def _continues_after_small_change(self) -> bool:
        """Continue once after a short step, far from a small projected gradient, with the pair that it has given.

        After another one drop the pairs, if the projected gradient promises far more than that: then the pairs, not the
        problem, are at an end.
        """
        progress = self.progress
        if progress.projected_norm <= _FAR * self.method.gtol or not self._was_cut_short():
            return False
        again, self._doubted = progress.iterations == self._doubted + 1, progress.iterations
        if not again or not len(self.history):
            return not again
        projected = self.bounds.projected_gradient(self.base, self.gradient, self._direction)
        if self._root is not None:
            multiply(projected, projected, self._root)
        (top,) = self.space.largest(projected)
        (square,) = self.space.dots([(projected, projected)], [top * top])
        asked = max(self.method.ftol, self.epsilon) * max(abs(progress.value), 1.0)
        return self.history.gamma() * square > _MUCH * asked and self.forget()

    def _was_cut_short(self) -> bool:
        """Return True if an iteration with too small a change may be followed by one with a larger change."""
        return self.progress.step_length < _SHORT

    def _further_vectors(self) -> tuple[Array, ...]:
        return (*self.history.opened, self._scaled_gradient())

    def _take_further_tops(self, tops: list[float]) -> None:
        self._scaled_top = tops.pop()
        if tops:
            self.history.set_tops(*tops)

    def _scaled_gradient(self) -> Array:
        """The gradient of elements that no bound holds in place, in scaled variables, in the memory of the point."""
        keep_free(self._descent(self.point), self.base, self._lower, self._upper)
        return self._scaled(self.point)

    def _descent(self, out: Array) -> Array:
        """Write to `out`, and return, what steepest descent subtracts from the point in a step of length 1.

        It is steepest descent in scaled variables, seen in the user's: the gradient times p.
        """
        out[:] = self.base_gradient
        if self._root is not None:
            multiply(out, out, self._root)
            multiply(out, out, self._root)
        return out

    def _scaled(self, step: Array) -> Array:
        """Turn a step of the user's variables into one of scaled variables, in place."""
        if self._root is not None:
            divide(step, step, self._root)
        return step

    def _steps_to_bounds(self, index: Array) -> Array:
        """The steps of elements to the bounds to which steepest descent leads them, in scaled variables."""
        lower, upper = self._lower, self._upper
        assert lower is not None and upper is not None
        bound = module_of(index).where(self.base_gradient[index] > 0, lower[index], upper[index])
        step = bound - self.base[index]
        return step if self._root is None else step / self._root[index]

    def _find_direction(self) -> tuple[float, float, float, float]:
        # The point is working memory: it has the descent, in the user's variables and then in scaled ones.
        d, descent, initial_scaling = self._direction, self.point, self.method.initial_scaling
        sides = self._lower, self._upper
        gradient = self.base_gradient if self._root is None else self._descent(descent)
        (soonest,) = find_breakpoints(descent, d, self.base, gradient, *sides, math.inf)
        breakpoints = Breakpoints(d, soonest, self._steps_to_bounds)
        cauchy = self.history.cauchy_point(self._scaled(descent), breakpoints, self._scaled_top, initial_scaling)
        if math.isnan(cauchy.length):
            return 0.0, math.nan, 1.0, math.inf
        free = empty(d.size, np.bool_, like=d)
        beyond_cauchy_point(d, free, cauchy.length)
        model = self.history.subspace_step(free, descent, cauchy, initial_scaling)
        self._write_subspace_step(model, descent)
        top, slope, square, closest = self._project_step(free)
        if not slope < 0 and len(self.history):
            # The projection has turned it away from descent: from the Cauchy point, as far as all are inside.
            self._write_subspace_step(model, descent)
            if self._root is not None:
                multiply(descent, descent, self._root)
            (over,) = self.space.maxima(*steps_from_cauchy_point(d, descent, free, self.base, *sides, cauchy.length))
            backtrack_to_bounds(d, descent, cauchy.length, 1 / max(1.0, over))
            top, slope, square, closest = self._project_step(free)
        first_time = self.progress.iterations == 0
        first = 1.0 if first_time and self._boxed else self._first_step(slope, square)
        most = 1.0 if first_time and self._bounded else (1 / closest if closest > 0 else math.inf)
        return top, slope, first, most

    def _write_subspace_step(self, model: tuple[float, list[float], list[float]], descent: Array) -> None:
        """Write the step of the model to the direction; it is meaningless for elements that are not free."""
        gamma, of_s, of_y = model
        self.history.combine(of_s, of_y, descent, -gamma, self._direction)
        if self._root is not None:
            multiply(self._direction, self._direction, self._root)

    def _project_step(self, free: Array) -> tuple[float, float, float, float]:
        """Project the step; its largest element, its slope, its square, and one over the part inside of the bounds."""
        d, g = self._direction, self.base_gradient
        top, closest = self.space.maxima(*project_step(d, free, self.base, g, self._lower, self._upper))
        pairs, tops = [(g, d)], [self._gradient_top * top]
        if not self._has_scale:
            pairs, tops = [*pairs, (d, d)], [*tops, top * top]
        slope, *squares = self.space.dots(pairs, tops)
        return top, slope, (squares[0] if squares else math.nan), closest


class OrthantWiseQuasiNewton(BoundedQuasiNewton):
    """A minimisation by L-BFGS with L1 terms, and maybe with bounds. Methods are collective over the ranks.

    The row of the gradient has that of the function alone. `base_gradient` has the slopes of the terms, too.
    """

    def __init__(self, method: LBFGSB, space: Space, vectors: Array, point: Array, limits: Limits) -> None:
        if limits.lower is None and limits.upper is None:
            lower = empty(space.size, space.like.dtype, like=space.like)
            lower[...] = -math.inf
            limits = replace(limits, lower=lower)
        super().__init__(method, space, vectors, point, limits)
        self.orthant = Orthant(limits, self.bounds, space)
        self._lower, self._upper = self.orthant.lower, self.orthant.upper
        self._plain_gradient = self._told = self.base_gradient
        self.base_gradient = self.orthant.gradient

    @property
    def gradient(self) -> Array:
        return self.orthant.smallest_subgradient()

    @property
    def at_reference(self) -> AtReference:
        return self.orthant.at_reference(self.best)

    def added_at(self, point: Array) -> float:
        return self.orthant.value(point)

    def restore(self, metadata: Mapping[str, Any]) -> None:
        super().restore(metadata)
        self.orthant.enter(self.base, self._plain_gradient)

    def _objective(self, value: float, gradient: Array) -> tuple[float, Array, float]:
        self._told = gradient
        self.added_value, gradient, top = self.orthant.evaluate(self.point, gradient)
        return value + self.added_value, gradient, top

    @property
    def _moves_at_once(self) -> bool:
        return False

    def _move_base(self, gradient: Array) -> tuple[float, float, float]:
        self.base[:] = self.point
        self._plain_gradient[:] = self._told
        self.orthant.enter(self.base, self._told)
        return self._measure()

    def _further_vectors(self) -> tuple[Array, ...]:
        return (*super()._further_vectors(), self.base_gradient)

    def _take_further_tops(self, tops: list[float]) -> None:
        self._gradient_top = tops.pop()
        super()._take_further_tops(tops)

    def _was_cut_short(self) -> bool:
        # Elements that have just come to their reference may move on, in another orthant.
        return super()._was_cut_short() or self.orthant.leaving(self.base) > 0

    def _try_step(self, step: float) -> None:
        self.orthant.advance(self.point, self.base, self._direction, step)
