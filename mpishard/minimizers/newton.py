"""Truncated Newton and Gauss-Newton methods in a trust region, from products with the Hessian."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from mpishard.arguments import integer, number
from mpishard.backend.array import empty
from mpishard.minimizers import formulas, small
from mpishard.minimizers.bounds import Bounds
from mpishard.minimizers.line_search.search import NOT_FINITE_LIMIT
from mpishard.minimizers.method import (
    LARGEST_PRODUCT,
    Elements,
    Limits,
    Method,
    Minimizer,
    Progress,
    Wanted,
    converged,
    exhausted,
    out_of_range,
)
from mpishard.minimizers.space import Space
from mpishard.minimizers.steihaug import Ending, FreeVariables, SteihaugCG, SteihaugState

Array = Any

# Algorithm 4.1 of Nocedal and Wright, with eta = 0: every lower value is accepted.  After a bad step the radius becomes
# half of the step's length: the algorithm's quarter costs a sixth more evaluations and products on the set of Moré,
# Garbow and Hillstrom.
_SHRINK_BELOW, _SHRINK = 0.25, 0.5
_NOT_FINITE_SHRINK = 0.25
_GROW_ABOVE, _GROW = 0.75, 2.0
_NOISE = 1000  # units in the last place of a value, or of an element, that are too few to judge a step by
LARGEST_RADIUS = 1e150  # its square is finite
_SLOTS = ("base", "base_gradient", "step", "residual", "direction")
_OF_BASE, _OF_STEP = (0, 1), (2, 3, 4)  # their rows


@dataclass(frozen=True, kw_only=True)
class TruncatedNewton(Method):
    """Newton's method with conjugate gradients in a trust region, from Hessian-vector products.

    Each iteration minimises the quadratic model approximately by Steihaug's conjugate gradients, one product at a time,
    until the residual is ``min(forcing, |g| ** forcing_power)`` times the gradient g.  Directions of negative curvature
    are followed to the boundary of the region.  With Gauss-Newton products ``J'(J v)`` it is a Gauss-Newton method, and
    for a regularised one add the product with the Hessian of the regulariser.

    The norm of gradient and residual is that of the preconditioner, and the norm of steps that of its inverse.

    With bounds, an iteration holds the elements that are at a bound from which descent leads outside (Bertsekas 1982).
    The step of the others is projected into the bounds; where that changes it, one more product tells what the model
    says of it.

    Parameters
    ----------
    gtol, ftol, xtol : float
        When it stops: see `Method`.  `ftol` and `xtol` do not apply to a step that was cut at the region's boundary.
    maxiter, maxfun : int
        When it stops, too; `maxfun` counts no products.
    fixed, inner_product, preconditioner : object
        What is known of the elements: see `Method`.
    bounds : pair, mapping or None
        The lower and the upper bounds, each a number, a flat array as long as the parameters, or None; or by tensor
        name such pairs.
    forcing, forcing_power : float
        Of the accuracy of the model's minimum: `forcing` is below 1.  A power of 0.5 gives superlinear convergence, 1
        quadratic, 0 a constant.
    maxcg : int or None
        The most products an iteration; None for twice the number of elements.
    initial_radius : float or None
        Of the trust region.  None for the length of the first step of steepest descent that the model proposes.
    max_radius : float
        The largest radius.

    Raises
    ------
    TypeError, ValueError
        If an option is invalid.

    References
    ----------
    T. Steihaug: The conjugate gradient method and trust regions in large scale optimization.  SIAM Journal on Numerical
    Analysis 20, 626-637 (1983).  J. Nocedal and S. J. Wright: Numerical Optimization (2006), algorithms 4.1 and 7.2.
    D. P. Bertsekas: Projected Newton methods for optimization problems with simple constraints.  SIAM Journal on
    Control and Optimization 20, 221-246 (1982).
    """

    needs_products: ClassVar[bool] = True

    bounds: Elements = None
    forcing: float = 0.5
    forcing_power: float = 0.5
    maxcg: int | None = None
    initial_radius: float | None = None
    max_radius: float = math.inf

    def __post_init__(self) -> None:
        super().__post_init__()
        checks: dict[str, dict[str, Any]] = {
            "forcing": {"above": 0, "below": 1},
            "forcing_power": {"least": 0},
            "max_radius": {"above": 0, "finite": False},
        }
        if self.initial_radius is not None:
            checks["initial_radius"] = {"above": 0, "otherwise": "None for the first step of the model"}
        for name, limits in checks.items():
            object.__setattr__(self, name, number(f"TruncatedNewton: {name}", getattr(self, name), **limits))
        if self.initial_radius is not None and not self.initial_radius < self.max_radius:
            raise ValueError(
                f"TruncatedNewton: initial_radius={self.initial_radius:g} must be below max_radius={self.max_radius:g}"
            )
        if self.maxcg is not None:
            object.__setattr__(self, "maxcg", integer("TruncatedNewton: maxcg", self.maxcg, least=1))

    @property
    def slots(self) -> tuple[str, ...]:
        return _SLOTS

    def make(self, space: Space, vectors: Array, point: Array, limits: Limits) -> TruncatedNewtonMinimizer:
        if limits.solve is not None:
            limits.expect_no_operators("TruncatedNewton")
        return TruncatedNewtonMinimizer(self, space, vectors, point, limits)


class TruncatedNewtonMinimizer(Minimizer):
    """A minimisation by `TruncatedNewton`. Methods are collective over the ranks of the space.

    Between two iterations the point is the base. While products are wanted it stays there; then it is the end of the
    step, until `tell`.

    The rows ``step``, ``residual`` and ``direction`` are those of conjugate gradients, in the variables `free`. Between
    two runs of these, in `tell` and while the product of a projected step is wanted, ``direction`` has the step of the
    point, and ``residual`` the gradient at the trial, both in the user's variables.
    """

    method: TruncatedNewton

    def __init__(self, method: TruncatedNewton, space: Space, vectors: Array, point: Array, limits: Limits) -> None:
        super().__init__(method.slots, space, vectors, point, limits)
        self.versions = [0] * len(_SLOTS)
        self.method = method
        self.bounds = Bounds(limits, space)
        self.free = FreeVariables(limits, self.bounds, point)
        self._max_radius = min(method.max_radius, LARGEST_RADIUS)
        step, residual, direction = (self.row(slot) for slot in ("step", "residual", "direction"))
        self.cg = SteihaugCG(space, self.free, step, residual, direction, self._max_radius)
        self._radius = self._gradient_square = math.nan
        self._gradient_top = 0.0
        self._not_finite = 0  # trials one after the other
        self._decrease = 0.0  # that the model says for the step
        self._at_wall = False  # whether a trial was not finite since the last step that ended inside of the region
        self._refused = False  # whether a step since the last iterate was, that should have been felt in the value
        self._clipped = False  # whether the product of a step is wanted that was projected into the bounds

    @property
    def direction(self) -> Array:
        return self.row("direction") if self._clipped else self.free.unscaled(self.row("direction"))

    def begin(self) -> int:
        self.progress, self.stop_reason, self.wanted = Progress(), "", Wanted.GRADIENT
        self._radius, self._gradient_square = min(self.method.initial_radius or 0.0, self._max_radius), math.nan
        self._gradient_top, self._not_finite = 0.0, 0
        self._decrease, self._at_wall, self._refused, self._clipped = 0.0, False, False, False
        outside = self.bounds.outside(self.point)
        self.bounds.project(self.point)
        self.row("base")[:] = self.point
        self.note_written()
        return self.space.count(outside)[0]

    def tell(self, value: float, gradient: Array) -> None:
        self._expect(Wanted.GRADIENT)
        self.note_written(*_OF_STEP)
        step, trial_gradient, base = (self.row(slot) for slot in ("direction", "residual", "base"))
        trial_gradient[:] = self.bounds.moving(gradient)
        formulas.advance(step, self.point, base, -1.0)
        riesz = self._riesz(trial_gradient)
        gradient_top, step_top, base_top, *rest = self.space.largest(trial_gradient, step, base, *riesz)
        tops = (gradient_top, rest[0] if rest else gradient_top, rest[-1] if rest else gradient_top)
        finite = math.isfinite(value) and math.isfinite(gradient_top)
        before = self.progress
        self.progress = replace(before, evaluations=before.evaluations + 1, accepted=False)
        if math.isnan(before.value):
            reason = "" if finite else "not finite"
            if finite:
                self._take(value, *tops)
                reason = converged(self.method, self.progress, math.nan)
        else:
            reason = ""
            if self._judge(value, gradient_top, step_top):
                self._take(value, *tops)
                reason = self._converged(before.value, step_top, base_top)
            elif finite and step_top > _NOISE * self.epsilon * base_top and self._decrease > self._noise(value):
                self._refused = True
            self._not_finite = 0 if finite else self._not_finite + 1
            self._at_wall = self._at_wall or not finite
            if self._not_finite > NOT_FINITE_LIMIT or (step_top == 0 and not finite):
                reason = "unbounded" if value == -math.inf else "not finite"
            elif step_top == 0:
                reason = reason or self._no_step()
        self._continue(reason or exhausted(self.method, self.progress))

    def _expect(self, what: Wanted) -> None:
        if self.wanted is Wanted.NOTHING:
            raise ValueError(f"this minimisation has ended ({self.stop_reason}); begin() starts another at its point")
        if self.wanted is not what:
            raise ValueError(f"this minimisation wants a {self.wanted.value} next, and was told a {what.value}")

    def _riesz(self, gradient: Array) -> list[Array]:
        """The vectors of stop tests in addition to the gradient: its Riesz map, and the projection of that."""
        riesz = self.limits.riesz(gradient)
        if not self.bounds.any:
            return [] if riesz is None else [riesz]
        riesz = gradient if riesz is None else riesz
        return [riesz, self.bounds.projected_gradient(self.point, riesz, empty(riesz.size, riesz.dtype, riesz))]

    def _judge(self, value: float, gradient_top: float, step_top: float) -> bool:
        """Choose the next radius; return True if the step is accepted."""
        model, old = self.cg.state, self.progress.value
        ratio = -math.inf
        if math.isfinite(value) and math.isfinite(gradient_top):
            decrease = old - value
            if max(abs(decrease), self._decrease) <= self._noise(value) and not model.cut:
                # Near the minimum the values differ by rounding errors, but the gradients still tell.
                tops = (self._gradient_top * step_top, gradient_top * step_top)
                rows = (self.row("base_gradient"), self.row("residual"))
                before, after = self.space.dots([(row, self.row("direction")) for row in rows], tops)
                decrease = -0.5 * (before + after)
            ratio = decrease / self._decrease if self._decrease > 0 else 0.0
        self._radius = model.radius
        if ratio < _SHRINK_BELOW:
            shrink = _SHRINK if ratio > -math.inf else _NOT_FINITE_SHRINK
            self._radius = shrink * min(model.radius, math.sqrt(model.step_square))
        elif ratio > _GROW_ABOVE and model.cut:
            self._radius = min(_GROW * model.radius, self._max_radius)
        return ratio > 0

    def _noise(self, value: float) -> float:
        """The rounding error of the difference of this value and the last one."""
        return _NOISE * self.epsilon * max(abs(self.progress.value), abs(value))

    def _take(self, value: float, gradient_top: float, riesz_top: float, projected_top: float) -> None:
        """The point becomes the base; the gradient there is in the residual."""
        started = not math.isnan(self.progress.value)
        self.row("base")[:] = self.point
        self.row("base_gradient")[:] = self.row("residual")
        self.note_written(*_OF_BASE)
        self.progress = replace(
            self.progress,
            iterations=self.progress.iterations + started,
            value=value,
            gradient_norm=riesz_top,
            projected_norm=projected_top,
            step_length=float(started),
            accepted=started,
        )
        self._gradient_top, self._gradient_square = gradient_top, math.nan
        self._at_wall, self._refused = self._at_wall and self.cg.state.cut, False

    def _no_step(self) -> str:
        """The reason for which steps have become too short to move the point."""
        return "line search" if self._refused else "wall" if self._at_wall else "step"

    def _converged(self, value_before: float, step_top: float, point_top: float) -> str:
        """The reason for which the method has converged; of a step that was cut only the gradient counts."""
        reason, model = converged(self.method, self.progress, value_before, step_top, point_top), self.cg.state
        if not model.cut or reason == "gradient":
            return reason
        return "unbounded" if model.radius >= LARGEST_RADIUS else ""

    def _continue(self, reason: str) -> None:
        """Go back to the base; end there, or begin the next step."""
        self.point[:] = self.row("base")
        if reason:
            self.stop_reason = reason
            self.wanted = Wanted.NOTHING
            return
        self.free.hold(self.row("base"), self.row("base_gradient"))
        self.row("residual")[:] = self.free.scaled(self.row("base_gradient"))
        if math.isnan(self._gradient_square):
            self._gradient_square = self.cg.square()
            if self._gradient_square < 0:
                square = f"g'P g = {self._gradient_square:g}"
                raise ValueError(f"preconditioner must be positive definite, but {square} for the gradient g")
            if not 0 < self._gradient_square < LARGEST_PRODUCT:
                self.wanted, self.stop_reason = Wanted.NOTHING, out_of_range(self.progress)
                return
        norm = math.sqrt(self._gradient_square)
        tolerance = min(self.method.forcing, small.power(norm, self.method.forcing_power)) * norm
        most = self.method.maxcg or 2 * self.space.total
        self.cg.begin(self._gradient_square, self._radius, tolerance, most)
        self.wanted = Wanted.PRODUCT

    def tell_product(self, product: Array) -> None:
        self._expect(Wanted.PRODUCT)
        self.note_written(*_OF_STEP)
        self.progress = replace(self.progress, products=self.progress.products + 1, accepted=False)
        if self._clipped:
            self._tell_clipped(product)
            return
        goes_on = self.cg.tell_product(product)
        if self.cg.state.asymmetry > self.progress.asymmetry:
            self.progress = replace(self.progress, asymmetry=self.cg.state.asymmetry)
        if goes_on:
            return
        if self.cg.state.ending == Ending.NOT_FINITE.value:
            self._continue("not finite")
        elif self.cg.state.ending == Ending.RANGE.value:
            self._continue(out_of_range(self.progress))
        else:
            self._try()

    def _try(self) -> None:
        """Go to the end of the step; if it is outside of the bounds, ask for the product of the projected step."""
        base, step = self.row("base"), self.row("direction")
        formulas.advance(self.point, base, self.free.unscaled(self.row("step")), 1.0)
        self._decrease = self.cg.state.decrease
        if self.bounds.any and self.space.count(self.bounds.outside(self.point))[0]:
            self.bounds.project(self.point)
            formulas.advance(step, self.point, base, -1.0)
            self.point[:] = base
            self._clipped = True
        else:
            self.wanted = Wanted.GRADIENT

    def _tell_clipped(self, product: Array) -> None:
        """Take the Hessian times the projected step."""
        self._clipped = False
        gradient, step = self.row("base_gradient"), self.row("direction")
        product = self.bounds.moving(product)
        product_top, step_top = self.space.largest(product, step)
        if not math.isfinite(product_top):
            self._continue("not finite")
            return
        tops = (self._gradient_top * step_top, product_top * step_top)
        slope, curvature = self.space.dots([(gradient, step), (product, step)], tops)
        self._decrease = -(slope + 0.5 * curvature)
        if step_top == 0:
            self._continue(self._no_step())
        elif self._decrease <= 0:
            self._radius = _SHRINK * min(self.cg.state.radius, math.sqrt(self.cg.state.step_square))
            self._continue("")
        else:
            formulas.advance(self.point, self.row("base"), step, 1.0)
            self.bounds.project(self.point)
            self.wanted = Wanted.GRADIENT

    def reopen(self) -> None:
        super().reopen()
        self.progress = replace(self.progress, value=math.nan)  # the next evaluation gives it again

    def to_metadata(self) -> dict[str, Any]:
        return {
            "wanted": self.wanted.value,
            "stop_reason": self.stop_reason,
            "progress": asdict(self.progress),
            "conjugate_gradients": asdict(self.cg.state),
            "radius": self._radius,
            "gradient_square": self._gradient_square,
            "gradient_top": self._gradient_top,
            "not_finite": self._not_finite,
            "decrease": self._decrease,
            "at_wall": self._at_wall,
            "refused": self._refused,
            "clipped": self._clipped,
        }

    def restore(self, metadata: Mapping[str, Any]) -> None:
        try:
            wanted, reason = Wanted(metadata["wanted"]), str(metadata["stop_reason"])
            progress, state = Progress(**metadata["progress"]), SteihaugState(**metadata["conjugate_gradients"])
            radius, square, top = (float(metadata[name]) for name in ("radius", "gradient_square", "gradient_top"))
            not_finite, decrease = int(metadata["not_finite"]), float(metadata["decrease"])
            refused, clipped = bool(metadata["refused"]), bool(metadata["clipped"])
            at_wall = bool(metadata.get("at_wall", False))
        except (KeyError, TypeError) as error:
            raise ValueError(f"TruncatedNewton: the saved state cannot be restored: {error!r}") from None
        self.wanted, self.stop_reason, self.progress = wanted, reason, progress
        self.cg.state, self._radius, self._gradient_square, self._gradient_top = state, radius, square, top
        self._not_finite, self._decrease, self._refused, self._clipped = not_finite, decrease, refused, clipped
        self._at_wall = at_wall
        self.free.hold(self.row("base"), self.row("base_gradient"))


# Gauss-Newton steps for sums of squares of many unknowns, by conjugate gradients in a trust region.

_TRUSTED = 0.25  # of the decrease that the model predicts: with less, a small one does not mean convergence


@dataclass(frozen=True, kw_only=True)
class GaussNewton(TruncatedNewton):
    """`TruncatedNewton` with the tolerances of SciPy's least squares.

    A step ends it that decreases the cost by less than `ftol` of it, about as the model predicts, or whose largest
    element is below ``xtol * (xtol + the point's)``.
    """

    call: ClassVar[str] = "least_squares"

    forcing: float = 0.01

    def make(self, space: Space, vectors: Array, point: Array, limits: Limits) -> GaussNewtonMinimizer:
        return GaussNewtonMinimizer(self, space, vectors, point, limits)


class GaussNewtonMinimizer(TruncatedNewtonMinimizer):
    """A minimisation by `GaussNewton`, with its own test of convergence."""

    def _converged(self, value_before: float, step_top: float, point_top: float) -> str:
        method, value = self.method, self.progress.value
        decrease = value_before - value
        if self.progress.projected_norm <= method.gtol:
            return "gradient"
        if decrease < method.ftol * value_before and decrease > _TRUSTED * self._decrease:
            return "decrease"
        return "step" if step_top < method.xtol * (method.xtol + point_top) else ""
