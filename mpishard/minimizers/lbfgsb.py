"""L-BFGS with bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpishard.backend.array import empty
from mpishard.minimizers.bounds import arrive, cut, divide, keep_free
from mpishard.minimizers.formulas import unweigh, weigh
from mpishard.minimizers.history import ReducedHistory
from mpishard.minimizers.lbfgs import LBFGS, QuasiNewton
from mpishard.minimizers.limits import Limits
from mpishard.minimizers.method import Elements
from mpishard.minimizers.space import Space

Array = Any
_HALVINGS = 30
_LEAST_DESCENT = 0.1  # a step cut by bounds has a slope of at least this part of that of the step that was not cut


@dataclass(frozen=True, kw_only=True)
class LBFGSB(LBFGS):
    """The L-BFGS method with bounds, which all points keep at which it evaluates.

    Elements that a short step of steepest descent leads to a bound go there, and are held in the iteration (the active
    set of Bertsekas, 1982).  The quadratic model of the others is minimised (Byrd, Lu, Nocedal and Zhu, 1995, section
    5.1), and the minimum is projected into the bounds (Morales and Nocedal, 2011).  If that is no step of descent, the
    step of the others is halved before it is projected.  The line search goes from the last iterate towards this point,
    or beyond it as far as the bounds allow.

    The generalised Cauchy point of L-BFGS-B would take a sorted list of the breakpoints of all ranks; on test problems
    both ways take the same number of evaluations, within a few percent.

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

    Raises
    ------
    TypeError, ValueError
        If an option is invalid.

    References
    ----------
    R. H. Byrd, P. Lu, J. Nocedal and C. Zhu: A limited memory algorithm for bound constrained optimization.  SIAM
    Journal on Scientific Computing 16, 1190-1208 (1995).  J. L. Morales and J. Nocedal: Remark on "Algorithm 778:
    L-BFGS-B".  ACM Transactions on Mathematical Software 38, 7 (2011).  D. P. Bertsekas: Projected Newton methods for
    optimization problems with simple constraints.  SIAM Journal on Control and Optimization 20, 221-246 (1982).
    """

    bounds: Elements = None

    def make(self, space: Space, vectors: Array, point: Array, limits: Limits) -> QuasiNewton:
        if limits.lower is None and limits.upper is None:
            return super().make(space, vectors, point, limits)
        if limits.precondition is not None:
            raise ValueError(
                "LBFGSB with bounds takes no function as preconditioner, since its steps would leave the free "
                "elements; give a diagonal"
            )
        return BoundedQuasiNewton(self, space, vectors, point, limits)


class BoundedQuasiNewton(QuasiNewton):
    """A minimisation by L-BFGS with bounds.  Methods are collective over the ranks of the space.

    Parameters
    ----------
    method : LBFGSB
    space : Space
    vectors : 2-D array
        Rows as `LBFGSB.slots`.
    point : 1-D array
    limits : Limits
    """

    history: ReducedHistory

    def __init__(self, method: LBFGSB, space: Space, vectors: Array, point: Array, limits: Limits) -> None:
        super().__init__(method, space, vectors, point, limits)
        self._bounded = self._boxed = True

    def begin(self) -> int:
        bounded, open_sides = self.space.count(*self.bounds.kinds())
        self._bounded, self._boxed = bounded > 0, open_sides == 0
        return super().begin()

    def to_metadata(self) -> dict[str, Any]:
        return {**super().to_metadata(), "bounded": self._bounded, "boxed": self._boxed}

    def restore(self, metadata: Mapping[str, Any]) -> None:
        super().restore(metadata)
        self._bounded, self._boxed = bool(metadata.get("bounded", True)), bool(metadata.get("boxed", True))

    def _make_history(self, space: Space, rows: Array) -> ReducedHistory:
        return ReducedHistory(space, rows)

    def _move_base(self, gradient: Array) -> tuple[float, float, float]:
        learned = len(self.history.opened) == len(self._pair_tops)
        if self.method.xtol or self.limits.weights is not None or self._root is not None or not learned:
            return super()._move_base(gradient)
        lower, upper = self.bounds.lower, self.bounds.upper
        tops = arrive(self.base, self.base_gradient, self.point, gradient, lower, upper)
        projected_top, weighted_top, *of_pair = self.space.maxima(*tops, *self._pair_tops)
        self._measured([*of_pair, weighted_top])
        return 0.0, self._gradient_top, projected_top

    def _to_measure(self) -> tuple[Array, ...]:
        return (*self.history.opened, self._weighted_gradient())

    def _measured(self, tops: list[float]) -> None:
        self._weighted_top = tops.pop()
        if tops:
            self.history.measure(*tops)

    def _weighted_gradient(self) -> Array:
        """The gradient of elements that no bound holds in place, in scaled variables, in the memory of the point."""
        keep_free(self._descent(self.point), self.base, self.bounds.lower, self.bounds.upper, 0.0)
        return self._scaled(self.point)

    def _steepest(self, out: Array) -> Array:
        """As `_descent`; `out` is working memory that is not always used, and the result is only read."""
        return self.base_gradient if self._root is None else self._descent(out)

    def _descent(self, out: Array) -> Array:
        """What steepest descent in scaled variables subtracts from the base, for a step of length 1; this is `out`."""
        out[:] = self.base_gradient
        if self._root is not None:
            weigh(out, out, self._root)
            weigh(out, out, self._root)
        return out

    def _scaled(self, step: Array) -> Array:
        """A step in scaled variables, in place."""
        if self._root is not None:
            unweigh(step, step, self._root)
        return step

    def _turn(self) -> tuple[float, float, float, float]:
        d, work, reach = self._direction, self.point, self.history.reach
        sides = self.bounds.lower, self.bounds.upper
        free = empty(d.size, np.bool_, like=d)
        divide(work, d, free, self.base, self._steepest(work), *sides, reach)
        # A step to the bound may be twice as long as what leads there, by rounding.
        tops = self._weighted_top, 2 * reach * self._weighted_top
        gamma, of_s, of_y, product = self.history.reduced_times(
            free, self._scaled(work), self._scaled(d), tops, self.method.initial_scaling
        )
        slope, factor, square_of_free = math.nan, 1.0, math.nan
        for _ in range(_HALVINGS):
            self.history.combine(of_s, of_y, work, -gamma, d)
            if self._root is not None:
                weigh(d, d, self._root)
            top, closest = self.space.maxima(*cut(d, self.base, self._steepest(work), *sides, reach, factor))
            if self._root is not None:
                self._weigh_free(work)
            pairs, limits = [(self.base_gradient, d)], [self._gradient_top * top]
            if not self._has_scale:
                pairs, limits = [*pairs, (d, d)], [*limits, top * top]
            if closest >= 1 and math.isnan(square_of_free):
                pairs, limits = [*pairs, (work, work)], [*limits, self._weighted_top * self._weighted_top]
            slope, *squares = self.space.dots(pairs, limits)
            square = math.nan if self._has_scale else squares.pop(0)
            square_of_free = squares[0] if squares else square_of_free
            # The slope along the step that is not cut follows from its coefficients.
            uncut = product - gamma * square_of_free if closest >= 1 else math.inf
            if not slope >= 0 and not slope > _LEAST_DESCENT * factor * uncut:
                break
            factor /= 2
        first_time = self.progress.iterations == 0
        first = 1.0 if first_time and self._boxed else self._first_step(slope, square)
        most = 1.0 if first_time and self._bounded else (1 / closest if closest > 0 else math.inf)
        return top, slope, first, most

    def _weigh_free(self, out: Array) -> None:
        """Write the gradient of free elements in scaled variables, 0 for others."""
        keep_free(self._descent(out), self.base, self.bounds.lower, self.bounds.upper, self.history.reach)
        self._scaled(out)
