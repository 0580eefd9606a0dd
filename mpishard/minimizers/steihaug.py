"""Conjugate gradients for the step of a trust region, by one Hessian product at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from mpishard.backend.array import empty, module_of
from mpishard.minimizers import formulas
from mpishard.minimizers.bounds import Bounds, mark_free
from mpishard.minimizers.method import Limits
from mpishard.minimizers.space import Space

Array = Any


# The variables in which conjugate gradients run: those of the free elements, scaled.


class FreeVariables:
    """Variables of the free elements, in which the diagonal of the user's inverse Hessian is 1.

    With the user's diagonal p they are ``x / sqrt(p)``, and gradients there are ``sqrt(p) g``; both are 0 at elements
    that are fixed or held at a bound. A callable preconditioner scales nothing; it is applied to gradients, and
    `preconditioned` is collective if it is. `root` is that of p, 0 at elements that are fixed or held; None if
    all are free and p is 1.
    """

    def __init__(self, limits: Limits, bounds: Bounds, like: Array) -> None:
        self._precondition = limits.precondition
        self._bounds = bounds
        module = module_of(like)
        self.root: Array | None = None
        if limits.scaling is not None:
            self.root = module.sqrt(limits.scaling.astype(like.dtype))
        if limits.fixed is not None:
            if self.root is None:
                self.root = module.ones(like.size, like.dtype)
            self.root[limits.fixed] = 0
        self._released_root = self.root  # where no element is held
        if bounds.any:
            if self._released_root is None:
                self._released_root = module.ones(like.size, like.dtype)
            self.root = self._released_root.copy()

    def hold(self, point: Array, gradient: Array) -> None:
        """Hold the elements that are at a bound from which descent leads outside; release all others."""
        if self.root is not None and self._released_root is not None and self._bounds.any:
            mark_free(self.root, point, gradient, self._bounds.lower, self._bounds.upper)
            self.root *= self._released_root

    @property
    def has_function(self) -> bool:
        """Return True if the user's preconditioner is a function; else `preconditioned` returns its argument."""
        return self._precondition is not None

    def scaled(self, gradient: Array) -> Array:
        """A gradient in these variables: a new array, or the given one if `root` is None."""
        if self.root is None:
            return gradient
        out = empty(gradient.size, gradient.dtype, gradient)
        formulas.multiply_free(out, gradient, self.root)
        return out

    def preconditioned(self, gradient: Array) -> Array:
        """The user's callable of a gradient in these variables; without one, the gradient itself."""
        if self._precondition is None:
            return gradient
        return self.scaled(self._precondition(gradient))

    def unscaled(self, step: Array) -> Array:
        """A step in these variables as one of the point: a new array, or the given one if `root` is None."""
        return self.scaled(step)  # x = sqrt(p) (x / sqrt(p))


# The iterations.

_FELT = 1e-6  # a square of the residual below this share of the last one is of rounding errors


class Ending(Enum):
    """The reason for which conjugate gradients have ended."""

    NONE = "none"  # they continue
    INSIDE = "inside"  # the residual is small enough
    LIMIT = "limit"  # they have taken as many products as they may; the step is inside
    BOUNDARY = "boundary"  # the step has left the region, and was cut
    CURVATURE = "curvature"  # a direction without positive curvature was followed to the boundary
    NOT_FINITE = "not finite"  # a product is not finite
    RANGE = "range"  # products of products are too large


@dataclass(frozen=True)
class SteihaugState:
    """The numbers of the iteration. Norms and products are in the scaled variables, and preconditioned."""

    radius: float = 0.0  # of the trust region; 0 until the first product decides it
    tolerance: float = 0.0  # the norm of the residual at which the iteration ends
    most: int = 0  # products
    residual_square: float = 0.0
    doubt: float = 0.0  # a bound on the error of `residual_square`
    step_square: float = 0.0  # products of step and direction with each other
    step_direction: float = 0.0
    direction_square: float = 0.0
    decrease: float = 0.0  # of the quadratic model by the step
    products: int = 0  # taken so far
    asymmetry: float = 0.0  # of the last product, as a share of its size
    ending: str = Ending.NONE.value  # the value of an `Ending`

    @property
    def cut(self) -> bool:
        """Return True if the step ends at the boundary of the region."""
        return self.ending in (Ending.BOUNDARY.value, Ending.CURVATURE.value)


class SteihaugCG:
    """The minimum of a quadratic model in a ball, approximately, by Steihaug's conjugate gradients.

    It minimises ``g's + s'Hs / 2`` for ``|s| <= radius``, in the norm of the inverse preconditioner. The step begins at
    0 and only gets longer, so where it leaves the region, or meets a direction without positive curvature, it is cut at
    the boundary. Methods are collective over the ranks of the space; the caller keeps the vectors `step`, `residual`
    and `direction`, which are in the variables `free`; `max_radius` has a finite square.

    A product costs two all-reduces. The new norm of the residual ``r + alpha h`` is computed from products with the old
    one, ``r'r + 2 alpha r'h + alpha^2 h'h``, which are all known with the curvature. Where that sum has lost half of
    its digits, and with a callable preconditioner, the norm is computed anew, by two further all-reduces.

    Sources: T. Steihaug: The conjugate gradient method and trust regions in large scale optimization, SIAM Journal on
    Numerical Analysis 20, 626-637 (1983). The norms of the steps by recurrences: A. R. Conn, N. I. M. Gould, P. L.
    Toint: Trust-Region Methods (2000), algorithm 7.5.1 and equations 7.5.5 to 7.5.7.
    """

    def __init__(
        self, space: Space, free: FreeVariables, step: Array, residual: Array, direction: Array, max_radius: float
    ) -> None:
        self.space = space
        self.free = free
        self.step = step
        self.residual = residual
        self.direction = direction
        self.max_radius = max_radius
        self.state = SteihaugState(ending=Ending.INSIDE.value)

    def square(self) -> float:
        """The square of the norm of the residual."""
        return self._square(self.free.preconditioned(self.residual))

    def _square(self, preconditioned: Array) -> float:
        tops = self.space.largest(self.residual, preconditioned)
        return self.space.dots([(self.residual, preconditioned)], [tops[0] * tops[1]])[0]

    def begin(self, square: float, radius: float, tolerance: float, most: int) -> None:
        """Start with step 0; the residual holds the gradient in the scaled variables, and `square` is that of its norm.

        A radius of 0 is replaced by the length of the first step that the model itself proposes; the iteration ends
        when the norm of the residual is at most `tolerance`, or after `most` products.
        """
        self.step[:] = 0
        self.direction[:] = 0
        formulas.turn(self.direction, self.free.preconditioned(self.residual), 0.0)
        self.state = SteihaugState(
            radius=radius, tolerance=tolerance, most=most, residual_square=square, direction_square=square
        )

    def tell_product(self, product: Array) -> bool:
        """Take the Hessian times the unscaled direction, only read, and continue.

        Returns True if another product is wanted; if not, the step is ready.
        """
        state = replace(self.state, products=self.state.products + 1)
        product = self.free.scaled(product)
        tops = self.space.largest(product, self.direction, self.residual)
        if not math.isfinite(tops[0]):
            self.state = replace(state, ending=Ending.NOT_FINITE.value)
            return False
        pairs = [(other, product) for other in (self.direction, self.residual, product)]
        product_tops = [top * tops[0] for top in (tops[1], tops[2], tops[0])]
        if self.free.has_function:
            (curvature,), mixed, square = self.space.dots(pairs[:1], product_tops[:1]), 0.0, math.nan
        else:
            curvature, mixed, square = self.space.dots(pairs, product_tops)
        if not math.isfinite(curvature):
            self.state = replace(state, ending=Ending.RANGE.value)
            return False
        self.state = replace(state, asymmetry=self._asymmetry(state, curvature, mixed, square))
        length = self._advance(curvature)
        if length is None:
            return False
        formulas.move(self.residual, product, length)
        return self._turn(length, 2 * length * mixed, length * length * square)

    def tell_curvature(self, curvature: float) -> float | None:
        """Take the Hessian's product with the direction from both sides, and move the step.

        It begins an iteration in place of `tell_product`: returns by which multiple of the direction the step has
        moved, and the caller computes the residual there anew, for `tell_residual`.  None if it was cut.
        """
        self.state = replace(self.state, products=self.state.products + 1)
        return self._advance(curvature)

    def tell_residual(self, length: float) -> bool:
        """End an iteration that `tell_curvature` has begun; returns as `tell_product`."""
        return self._turn(length, math.nan, math.nan)

    def _advance(self, curvature: float) -> float | None:
        """Move the step to the minimum along the direction: by this multiple of it.  None if it was cut instead."""
        state = self.state
        length = state.residual_square / curvature if curvature else math.inf
        if state.radius == 0:  # that of the first step of the model, downhill or up; 1 where it has no curvature at all
            radius = abs(length) * math.sqrt(state.direction_square)
            state = replace(state, radius=min(radius if 0 < radius < math.inf else 1.0, self.max_radius))
        step_square = state.step_square + length * (2 * state.step_direction + length * state.direction_square)
        if length < 0 or not step_square < state.radius * state.radius:
            self._cut(state, curvature)
            return None
        formulas.move(self.step, self.direction, length)
        decrease = state.decrease + 0.5 * length * state.residual_square
        self.state = replace(state, decrease=decrease, step_square=step_square)
        return length

    def _asymmetry(self, state: SteihaugState, curvature: float, mixed: float, square: float) -> float:
        """The difference of the second product from a symmetric one; 0 for others, and where rounding hides it."""
        # The residual is the last direction times a number, less this one; with a symmetric matrix the last direction
        # and this one are conjugate, so that only this one counts in the residual's product.
        growth = state.direction_square - state.residual_square
        if state.products != 2 or self.free.has_function or not growth > _FELT * state.residual_square > 0:
            return 0.0
        size = math.sqrt(state.residual_square) * math.sqrt(square)
        found = abs(mixed + curvature) / size if size > 0 else 0.0
        return min(1.0, found) if math.isfinite(found) else 0.0

    def _cut(self, state: SteihaugState, curvature: float) -> None:
        """Go along the direction to the boundary."""
        room = max(0.0, state.radius * state.radius - state.step_square)
        along, across = state.step_direction, state.direction_square
        if room:
            # The larger root of: across length^2 + 2 along length = room.
            size = max(abs(along), math.sqrt(across) * math.sqrt(room))
            part, rest = along / size, math.sqrt(across) * math.sqrt(room) / size
            length = room / (along + size * math.sqrt(part * part + rest * rest))
        else:
            length = 0.0
        formulas.move(self.step, self.direction, length)
        self.state = replace(
            state,
            decrease=state.decrease + length * (state.residual_square - 0.5 * length * curvature),
            step_square=state.radius * state.radius,
            ending=(Ending.BOUNDARY if curvature > 0 else Ending.CURVATURE).value,
        )

    def _turn(self, length: float, mixed: float, square: float) -> bool:
        """Take the next direction, unless the residual is small.

        `mixed` and `square` are the changes of its norm; where they are NaN the norm is computed anew.
        """
        state = self.state
        before = state.residual_square
        epsilon = self.space.epsilon
        after = before + mixed + square
        doubt = state.doubt + 4 * epsilon * (before + abs(mixed) + square)
        preconditioned = self.free.preconditioned(self.residual)
        if not doubt <= math.sqrt(epsilon) * after:  # also where it is NaN
            after, doubt = self._square(preconditioned), 0.0
        ending = Ending.NONE
        if math.sqrt(max(0.0, after)) <= state.tolerance or after <= 0:
            ending = Ending.INSIDE
        elif state.products >= state.most:
            ending = Ending.LIMIT
        else:
            formulas.turn(self.direction, preconditioned, after / before)
        beta = after / before
        self.state = replace(
            state,
            residual_square=after,
            doubt=doubt,
            step_direction=beta * (state.step_direction + length * state.direction_square),
            direction_square=after + beta * beta * state.direction_square,
            ending=ending.value,
        )
        return ending is Ending.NONE
