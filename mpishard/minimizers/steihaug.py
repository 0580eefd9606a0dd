"""Conjugate gradients for the step of a trust region, by one Hessian product at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from mpishard.minimizers import cg_formulas
from mpishard.minimizers.free_variables import FreeVariables
from mpishard.minimizers.space import Space

Array = Any
_FELT = 1e-6  # a square of the residual below this share of the last one is of rounding errors


class Ending(Enum):
    """Why conjugate gradients have ended."""

    NONE = "none"  # they go on
    INSIDE = "inside"  # the residual is small enough
    LIMIT = "limit"  # they have taken as many products as they may; the step is inside
    BOUNDARY = "boundary"  # the step has left the region, and was cut
    CURVATURE = "curvature"  # a direction without positive curvature was followed to the boundary
    NOT_FINITE = "not finite"  # a product is not finite
    RANGE = "range"  # products of products are too large


@dataclass(frozen=True)
class SteihaugState:
    """The numbers of the iteration.  Norms and products are in the scaled variables, and preconditioned.

    Parameters
    ----------
    radius : float
        Of the trust region; 0 until the first product decides it.
    tolerance : float
        The norm of the residual at which the iteration ends.
    most : int
        The most products.
    residual_square : float
        The square of the norm of the residual.
    doubt : float
        A bound on the error of `residual_square`.
    step_square, step_direction, direction_square : float
        Products of step and direction with each other.
    decrease : float
        By which the step decreases the quadratic model.
    products : int
        How many were told.
    asymmetry : float
        By how much the last product was not symmetric, as a share of its size.
    ending : str
        Why it has ended.
    """

    radius: float = 0.0
    tolerance: float = 0.0
    most: int = 0
    residual_square: float = 0.0
    doubt: float = 0.0
    step_square: float = 0.0
    step_direction: float = 0.0
    direction_square: float = 0.0
    decrease: float = 0.0
    products: int = 0
    asymmetry: float = 0.0
    ending: str = Ending.NONE.value

    @property
    def cut(self) -> bool:
        """Whether the step ends at the boundary of the region."""
        return self.ending in (Ending.BOUNDARY.value, Ending.CURVATURE.value)


class SteihaugCG:
    """The minimum of a quadratic model in a ball, approximately, by Steihaug's conjugate gradients.

    It minimises ``g's + s'Hs / 2`` for ``|s| <= radius``, in the norm of the inverse preconditioner.  The step begins
    at 0 and only gets longer, so where it leaves the region, or meets a direction without positive curvature, it is cut
    at the boundary.  Methods are collective over the ranks of the space.

    Parameters
    ----------
    space : Space
        Of the vectors.
    free : FreeVariables
        The variables of step, residual and direction.
    step, residual, direction : 1-D array
        The vectors of the state, kept by the caller.
    max_radius : float
        The largest radius; its square is finite.

    Attributes
    ----------
    state : SteihaugState
        The numbers of the state.

    Notes
    -----
    A product costs two all-reduces.  The new norm of the residual ``r + alpha h`` is computed from products with the
    old one, ``r'r + 2 alpha r'h + alpha^2 h'h``, which are all known with the curvature.  Where that sum has lost half
    of its digits, and with a callable preconditioner, the norm is computed anew, by two further all-reduces.

    References
    ----------
    T. Steihaug: The conjugate gradient method and trust regions in large scale optimization.  SIAM Journal on Numerical
    Analysis 20, 626-637 (1983).  The norms of the steps by recurrences: A. R. Conn, N. I. M. Gould, P. L. Toint:
    Trust-Region Methods (2000), algorithm 7.5.1 and equations 7.5.5 to 7.5.7.
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
        """Start with step 0; the residual holds the gradient in the scaled variables.

        Parameters
        ----------
        square : float
            From `square`.
        radius : float
            Of the region; 0 for the length of the first step that the model itself proposes.
        tolerance : float
            The norm of the residual at which the iteration ends.
        most : int
            The most products.
        """
        self.step[:] = 0
        self.direction[:] = 0
        cg_formulas.turn(self.direction, self.free.preconditioned(self.residual), 0.0)
        self.state = SteihaugState(
            radius=radius, tolerance=tolerance, most=most, residual_square=square, direction_square=square
        )

    def tell_product(self, product: Array) -> bool:
        """Take the Hessian times the direction, and continue.

        Parameters
        ----------
        product : 1-D array
            Of the unscaled direction; only read.

        Returns
        -------
        bool
            Whether another product is wanted; if not, the step is ready.
        """
        state = replace(self.state, products=self.state.products + 1)
        product = self.free.scaled(product)
        tops = self.space.largest(product, self.direction, self.residual)
        if not math.isfinite(tops[0]):
            self.state = replace(state, ending=Ending.NOT_FINITE.value)
            return False
        pairs = [(other, product) for other in (self.direction, self.residual, product)]
        bounds = [top * tops[0] for top in (tops[1], tops[2], tops[0])]
        if self.free.diagonal:
            curvature, mixed, square = self.space.dots(pairs, bounds)
        else:
            (curvature,), mixed, square = self.space.dots(pairs[:1], bounds[:1]), 0.0, math.nan
        if not math.isfinite(curvature):
            self.state = replace(state, ending=Ending.RANGE.value)
            return False
        state = replace(state, asymmetry=self._asymmetry(state, curvature, mixed, square))
        length = state.residual_square / curvature if curvature else math.inf
        if state.radius == 0:
            state = replace(state, radius=min(_first_radius(length, state.direction_square), self.max_radius))
        step_square = state.step_square + length * (2 * state.step_direction + length * state.direction_square)
        if length < 0 or not step_square < state.radius * state.radius:
            self._cut(state, curvature)
            return False
        cg_formulas.move(self.step, self.direction, length)
        cg_formulas.move(self.residual, product, length)
        state = replace(state, decrease=state.decrease + 0.5 * length * state.residual_square, step_square=step_square)
        return self._turn(state, length, 2 * length * mixed, length * length * square)

    def _asymmetry(self, state: SteihaugState, curvature: float, mixed: float, square: float) -> float:
        """How far the second product is from a symmetric one; 0 for others, and where rounding hides it."""
        # The residual is the last direction times a number, less this one; with a symmetric matrix the last direction
        # and this one are conjugate, so that only this one counts in the residual's product.
        growth = state.direction_square - state.residual_square
        if state.products != 2 or not self.free.diagonal or not growth > _FELT * state.residual_square > 0:
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
        cg_formulas.move(self.step, self.direction, length)
        self.state = replace(
            state,
            decrease=state.decrease + length * (state.residual_square - 0.5 * length * curvature),
            step_square=state.radius * state.radius,
            ending=(Ending.BOUNDARY if curvature > 0 else Ending.CURVATURE).value,
        )

    def _turn(self, state: SteihaugState, length: float, mixed: float, square: float) -> bool:
        """Take the next direction, unless the residual is small; `mixed` and `square` are what its norm changes by."""
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
            cg_formulas.turn(self.direction, preconditioned, after / before)
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


def _first_radius(length: float, direction_square: float) -> float:
    """The length of the first step of the model, downhill or up; 1 where it has no curvature at all."""
    radius = abs(length) * math.sqrt(direction_square)
    return radius if 0 < radius < math.inf else 1.0
