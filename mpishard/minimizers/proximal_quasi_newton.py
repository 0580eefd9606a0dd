"""A proximal quasi-Newton method, for functions with a `Penalty`: total variation, norms of groups.

An iteration minimises the quadratic model of the pairs plus the penalty itself, between the bounds (Lee, Sun and
Saunders, "Proximal Newton-type methods for minimizing composite functions", SIAM Journal on Optimization 24, 2014), and
a line search goes there. So what the function costs is paid once or twice an iteration, and the kinks of the penalty
cost no evaluations. The model is minimised by proximal steps with momentum, which ends anew where the model would rise
(O'Donoghue and Candès, "Adaptive restart for accelerated gradient schemes", 2015). A proximal step needs the penalty
alone: the low rank of the model is in the point from which it starts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from mpishard.backend.array import zeros
from mpishard.minimizers.cauchy import Curvature, product
from mpishard.minimizers.descent import SLOTS
from mpishard.minimizers.history import History
from mpishard.minimizers.lbfgs import LBFGS, QuasiNewton
from mpishard.minimizers.line_search.backtracking import Backtracking
from mpishard.minimizers.method import Limits
from mpishard.minimizers.penalty import AtReference, Penalty, PenaltyOfVectors
from mpishard.minimizers.space import Space

Array = Any
_STEPS = 60  # proximal steps on a model, at most
_ENOUGH = 0.05  # a step on the model that gains less than this part of what all have gained is the last one
_SLACK = 0.02  # part of what all have gained that the gap of a step may be, too
_FLOOR = 2.0**-50  # of the value: no gap need be smaller
_NEAR = 4  # units in the last place: an element that ends as near to its reference is meant to be there


class ModelHistory(History):
    """The newest pairs, and what the Hessian of the model needs of them: S'Y below its diagonal, S'S, the last y'y."""

    def forget(self) -> None:
        super().forget()
        self.ss = [[0.0] * self.most for _ in range(self.most)]

    def to_metadata(self) -> dict[str, Any]:
        return {**super().to_metadata(), "ss": [list(row) for row in self.ss]}

    def restore(self, metadata: Mapping[str, Any]) -> None:
        try:
            ss = [[float(value) for value in row] for row in metadata["ss"]]
        except (KeyError, TypeError) as error:
            raise ValueError(f"the history of a quasi-Newton method cannot be restored: {error!r}") from None
        super().restore(metadata)
        self.ss = ss

    def learn(self) -> None:
        """Add the new pair, if there is one and its curvature is positive.  Collective."""
        new = self._take_new()
        if new < 0:
            return
        rows, (y, y_top) = self._all_rows, self.newest_y
        of_s = self._words(rows, self.rows[new], self._tops[new])
        with_s, (square,) = self._values([of_s, self._words([self.most + new], y, y_top)])
        for place, pair in enumerate(self.order):
            self.ss[new][pair] = self.ss[pair][new] = with_s[place]
            self.sy[new][pair] = with_s[len(self.order) + place]
        self.yy[new][new] = square
        if not (self.sy[new][new] > 0 and square > 0):
            self.order.pop()

    def products(self, vector: Array, top: float) -> tuple[list[float], list[float]]:
        found = self._values([self._words(self._all_rows, vector, top)])[0]
        return found[: len(self.order)], found[len(self.order) :]

    def curvature_of(self, theta: float) -> Curvature:
        """The low rank of the Hessian; pairs that depend on each other, to rounding, are dropped."""
        while True:
            size = len(self.order)
            sy, ss = (np.array([[of[i][j] for j in self.order] for i in self.order]) for of in (self.sy, self.ss))
            found = Curvature(sy.reshape(size, size), ss.reshape(size, size), theta)
            if found.lower is not None:
                return found
            self.order.pop(0)


class Model:
    """``g'd + d'B d / 2`` for steps d from the base, with ``B = theta I - W M W'`` of the pairs.  Collective.

    `products` of a vector are with the s and the y, float64 (2, pairs).
    """

    def __init__(self, space: Space, history: ModelHistory, theta: float) -> None:
        self.theta = theta
        self._space, self._history = space, history
        self._curvature = history.curvature_of(theta)

    def products(self, vector: Array, top: float) -> np.ndarray:
        return np.array(self._history.products(vector, top)).reshape(2, -1)

    def bend(self, square: float, products: np.ndarray) -> float:
        """``v'B v`` of a vector with this square and these products."""
        halves = self._curvature.halves(products[0][:, None], products[1][:, None])
        return self.theta * square - float(product(halves, halves)[0])

    def times(self, vector: Array, products: np.ndarray, out: Array) -> None:
        """``out = B v``."""
        of_s, of_y = self._curvature.low_rank(products[0], products[1])
        self._history.combine([-c for c in of_s], [-c for c in of_y], vector, self.theta, out)


class ProximalQuasiNewton(QuasiNewton):
    """A minimisation by L-BFGS with a penalty, and maybe with bounds.  Methods are collective over the ranks.

    The row of the gradient has that of the function alone. The rows after the pairs are the dual field at the end of
    the last direction. What is measured is the gradient with the subgradient of the penalty, and its gap.
    """

    history: ModelHistory

    def __init__(self, method: LBFGS, space: Space, vectors: Array, point: Array, limits: Limits) -> None:
        if not isinstance(method.line_search, str) or method.damping != "skip":
            raise ValueError(
                f"LBFGSB with {self._kinds(method)} has a line search of its own, and drops pairs without curvature: "
                "leave line_search, c1, c2 and damping out"
            )
        if limits.scaling is not None or limits.weights is not None or limits.precondition or limits.solve:
            raise ValueError(
                f"LBFGSB with {self._kinds(method)} takes no inner_product and no preconditioner: scale the unknowns"
            )
        super().__init__(method, space, vectors, point, limits)
        self.line_search = Backtracking(maxls=method.maxls)
        self._first_dual = len(SLOTS) + 2 * method.history
        self._dual_rows = vectors[self._first_dual :]
        self._vectors: PenaltyOfVectors | None = limits.penalty
        like = space.like
        self._trial, self._momentum, self._before, self._change, self._subgradient = (
            zeros(space.size, like.dtype, like=like) for _ in range(5)
        )
        self._sides: tuple[np.ndarray, np.ndarray] | None = None

    @staticmethod
    def _kinds(method: LBFGS) -> str:
        penalty: Penalty = method.penalty  # type: ignore[attr-defined]
        return penalty.kinds

    @property
    def at_reference(self) -> AtReference | None:
        return self._penalty.terms.at_reference(self._penalty.whole(self.best))

    @property
    def duality_gap(self) -> float | None:
        penalty = self._penalty
        return penalty.terms.gap(penalty.whole(self.base), penalty.dual(self._dual_rows))

    def added_at(self, point: Array) -> float:
        return self._penalty.terms.value(self._penalty.whole(point))

    def to_metadata(self) -> dict[str, Any]:
        return {**super().to_metadata(), "added_slope": self.added_slope}

    def restore(self, metadata: Mapping[str, Any]) -> None:
        try:
            added = float(metadata["added_slope"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"{type(self.method).__name__}: the saved state cannot be restored: {error!r}") from None
        super().restore(metadata)
        self.added_slope = added

    def _make_history(self, space: Space, rows: Array) -> ModelHistory:
        return ModelHistory(space, rows[: 2 * self.method.history])

    @property
    def _penalty(self) -> PenaltyOfVectors:
        assert self._vectors is not None
        return self._vectors

    def _objective(self, value: float, gradient: Array) -> tuple[float, Array, float]:
        self.added_value = self.added_at(self.point)
        (top,) = self.space.largest(gradient)
        return value + self.added_value, gradient, top

    @property
    def gradient(self) -> Array:
        """The gradient at the base with the subgradient of the penalty, in working memory."""
        penalty = self._penalty
        base, gradient = penalty.whole(self.base), penalty.whole(self.base_gradient)
        dual, sides = penalty.dual(self._dual_rows), self._bounds_of_all()
        found = penalty.terms.subgradient(base, gradient, dual, sides)
        self._subgradient[:] = self.bounds.moving(penalty.own(found))
        return self._subgradient

    def _measure(self) -> tuple[float, float, float]:
        """As without a penalty; but what `gtol` bounds is at least the gap, by the largest of 1 and the base."""
        base_top, riesz_top, projected_top = super()._measure()
        if (gap := self.duality_gap) is not None:
            (top,) = self.space.largest(self.base)
            projected_top = max(projected_top, gap / max(1.0, top))
        return base_top, riesz_top, projected_top

    def _bounds_of_all(self) -> tuple[np.ndarray, np.ndarray]:
        """The sides between which this rank's unknowns move, which have no width where they are fixed."""
        if self._sides is None:
            sides = []
            for bound, without in ((self.bounds.lower, -math.inf), (self.bounds.upper, math.inf)):
                self._trial[:] = without if bound is None else bound
                if self.bounds.fixed is not None:
                    self._trial[self.bounds.fixed] = self.base[self.bounds.fixed]
                sides.append(np.array(self._penalty.whole(self._trial)))
            self._sides = sides[0], sides[1]
        return self._sides

    def _find_direction(self) -> tuple[float, float, float, float]:
        """The step to the minimum of the model with the penalty, nearly, from the base."""
        space, penalty, d, g = self.space, self._penalty, self._direction, self.base_gradient
        self.history.learn()
        model = Model(space, self.history, 1 / self._gamma())
        base, dual, sides = np.array(penalty.whole(self.base)), penalty.dual(self._dual_rows), self._bounds_of_all()
        added = penalty.terms.value(base)
        floor = _FLOOR * max(abs(self.progress.value), added)
        y, new, before, change = self._momentum, self._trial, self._before, self._change
        d[:] = 0
        before[:] = 0
        known = known_before = model.products(d, 0.0)
        alpha, t, beta = model.theta, 1.0, 0.0
        gained = slope = d_top = self.added_slope = 0.0
        for _ in range(_STEPS):
            y[:] = d + d.dtype.type(beta) * (d - before)
            of_y = known + beta * (known - known_before)
            while True:
                model.times(y, of_y, new)
                new[:] = (self.base + y) - (g + new) / new.dtype.type(alpha)
                center = np.array(penalty.whole(new))
                x = base + penalty.whole(y)
                penalty.terms.proximal_point(x, center, alpha, dual, sides, max(floor, _SLACK * gained))
                value = penalty.terms.value(x)
                new[:] = penalty.own(x) - self.base
                change[:] = new - y
                top, change_top = space.largest(new, change)
                tops = [self._gradient_top * top, top * top, change_top * change_top]
                of_g, square, change_square = space.dots([(g, new), (new, new), (change, change)], tops)
                of_new = model.products(new, top)
                if not model.bend(change_square, of_new - of_y) > 1.001 * alpha * change_square:
                    break
                alpha *= 2
            gains = added - value - of_g - 0.5 * model.bend(square, of_new)
            if not gains > gained:
                if beta == 0 or gains != gains:
                    break
                t, beta = 1.0, 0.0  # without momentum, from where it was best
                before[:], known_before = d, known
                continue
            last, gained = gained, gains
            before[:], known_before = d, known
            d[:], known, d_top = new, of_new, top
            self.added_slope = value - added
            slope = of_g + self.added_slope
            if gained - last <= _ENOUGH * gained:
                break
            following = 0.5 * (1 + math.sqrt(1 + 4 * t * t))
            t, beta = following, (t - 1) / following
        self.note_written(*range(self._first_dual, len(self.vectors)))
        for row, whole in zip(self._dual_rows, dual, strict=True):
            row[:] = penalty.own(whole)
        return d_top, slope, 1.0, 1.0

    def _begin_line_search(self) -> None:
        super()._begin_line_search()
        if self.stop_reason == "line search" and not self._direction_top:
            self.stop_reason = "decrease"  # no step lowers the model, to rounding

    def _gamma(self) -> float:
        """The size of the inverse Hessian; before there is a pair, one that makes a step of length 1."""
        if self.method.initial_scaling:
            return self.method.initial_scaling
        if len(self.history):
            return self.history.gamma()
        (square,) = self.space.dots([(self.base_gradient, self.base_gradient)], [self._gradient_top**2])
        return 1 / math.sqrt(square) if 0 < square < math.inf else 1.0

    def _try_step(self, step: float) -> None:
        super()._try_step(step)
        penalty = self._penalty
        x = np.array(penalty.whole(self.point))
        penalty.terms.snap(x, penalty.whole(self.base), _NEAR * self.space.epsilon)
        self.point[:] = penalty.own(x)
