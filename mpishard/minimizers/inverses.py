"""The inverse of the Hessian where a minimisation has ended: of its pairs, or by conjugate gradients.

Vectors are this rank's part.  Elements that are fixed, or at a bound beyond which descent leads, count as known: the
Hessian is restricted to the others and then inverted, and rows and columns of the known ones are 0.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from mpishard.backend import exact
from mpishard.backend.array import empty, zeros
from mpishard.minimizers import formulas, small
from mpishard.minimizers.lbfgs import LBFGS, QuasiNewton
from mpishard.minimizers.method import Method, Minimizer
from mpishard.minimizers.newton import LARGEST_RADIUS, TruncatedNewton, TruncatedNewtonMinimizer
from mpishard.minimizers.steihaug import Ending, FreeVariables

Array = Any
_ACCURACY = 1e-10  # of a solve: the norm of the residual, relative to that of the right side
_ROUNDINGS = 16  # or this many roundings of the dtype
_PRODUCTS = 10  # the most of a solve, for each element


class Inverse(ABC):
    """The inverse of a Hessian. Methods are collective over the ranks of the space."""

    origin: str  # what it is made of, in words

    @abstractmethod
    def times(self, vector: Array) -> Array:
        """The inverse times a vector, which is only read, as a new array."""

    def diagonal(self) -> Array | None:
        """The diagonal as a new array; None where only products with unit vectors tell it."""
        return None


def expect_inverse(method: Method) -> None:
    """Raise ValueError if a method learns nothing of the Hessian, or there is none at the minimum."""
    penalty = getattr(method, "penalty", None)
    if getattr(method, "l1", None) is not None or penalty is not None:
        kind = "L1" if penalty is None else penalty.kinds
        raise ValueError(f"hess_inv: a function with {kind} terms has no Hessian at their kinks; leave hess_inv out")
    if not isinstance(method, LBFGS | TruncatedNewton):
        raise ValueError(
            f"hess_inv: {type(method).__name__} keeps nothing of the Hessian; 'L-BFGS-B' has its pairs, and "
            "'trust-ncg' solves with hessp= or hess="
        )


def inverse_at_end(minimizer: Minimizer, product: Callable[[Array], Array]) -> Inverse:
    """The inverse of the Hessian at the base of a minimisation that has ended.  Collective.

    It keeps the vectors of the minimisation. `product` is the Hessian there times a vector, and collective.
    """
    if isinstance(minimizer, TruncatedNewtonMinimizer):
        return InverseBySolves(minimizer, product)
    assert isinstance(minimizer, QuasiNewton)
    return InverseOfPairs(minimizer) if minimizer.limits.precondition is None else PreconditionedInverse(minimizer)


class InverseOfPairs(Inverse):
    """The inverse of the L-BFGS matrix, restricted to the elements F that are free; A are the others.

    With the pairs as the columns of ``U = (S, Y)``, in variables that are divided by the root of the scaling, it is
    ``gamma I + U C U'`` over F. See `_coefficients`; without A it is equation 3.1 of Byrd, Nocedal and Schnabel (1994).
    """

    def __init__(self, minimizer: QuasiNewton) -> None:
        self._space = minimizer.space
        self._free = FreeVariables(minimizer.limits, minimizer.bounds, minimizer.base)
        self._free.hold(minimizer.base, minimizer.base_gradient)
        history, root = minimizer.history, self._free.root
        self._rows = history.rows
        # If the minimisation has ended with an iteration, its pair is not in the order yet.
        pairs = [*history.order, *history.opened_rows[:1]]
        self._indices = [*pairs, *(history.most + pair for pair in pairs)]
        self._tops = self._space.largest(*(self._rows[index] for index in self._indices)) if pairs else []
        of_free = self._gram(None if root is None else root > 0)
        of_held = self._gram(root == 0) if minimizer.bounds.any else np.zeros_like(of_free)
        while True:
            self._gamma, found = _coefficients(of_free, of_held, minimizer.method.initial_scaling)
            if np.isfinite(found).all():
                break
            # The newest pair has no curvature; or the oldest depends on the others, to rounding.
            count = len(found) // 2
            newest = of_free[count - 1, -1] + of_held[count - 1, -1]
            place = 0 if newest > 0 else count - 1
            gone = [place, count + place]
            of_free, of_held = (np.delete(np.delete(gram, gone, 0), gone, 1) for gram in (of_free, of_held))
            self._indices = np.delete(self._indices, gone).tolist()
            self._tops = np.delete(self._tops, gone).tolist()
        self._coefficients = found
        self.origin = f"{len(found) // 2} pairs"

    def _gram(self, mask: Array | None) -> np.ndarray:
        """The dot products of all rows with each other, over the elements of a mask."""
        size = len(self._indices)
        gram = np.zeros((size, size))
        for column, (index, top) in enumerate(zip(self._indices, self._tops, strict=True)):
            row = self._rows[index]
            gram[:, column] = self._products(row if mask is None else row * mask, top)
        return gram

    def _products(self, vector: Array, top: float) -> list[float]:
        """The dot products of all rows with a vector, whose largest element is `top`.  One all-reduce."""
        tops = [each * top for each in self._tops]
        words = exact.row_dot_words(self._rows, self._indices, vector, tops, self._space.spans)
        if len(words):
            self._space.add(words)
        return self._space.values([(self._rows[index], vector) for index in self._indices], words, tops)

    def times(self, vector: Array) -> Array:
        scaled = self._free.scaled(vector)
        (top,) = self._space.largest(scaled)
        products = self._products(scaled, top)
        out = empty(vector.size, vector.dtype, vector)
        factors = [small.dot(row, products) for row in self._coefficients]
        exact.combine(self._rows, self._indices, factors, scaled, self._gamma, out)
        return self._free.unscaled(out)

    def diagonal(self) -> Array:
        like = self._space.like
        total, part, nothing = (zeros(self._space.size, like.dtype, like=like) for _ in range(3))
        total += self._gamma
        for index, row in zip(self._indices, self._coefficients, strict=True):
            exact.combine(self._rows, self._indices, row, nothing, 0.0, part)
            formulas.multiply(part, part, self._rows[index])
            total += part
        return self._free.scaled(self._free.unscaled(total))


def _coefficients(of_free: np.ndarray, of_held: np.ndarray, initial_scaling: float | None) -> tuple[float, np.ndarray]:
    """gamma and C of `InverseOfPairs`, from (U'U) over F and over A, in the order of S, then Y; C may be NaN.

    With D = diag(s'y) over all elements, and ``below`` and ``not_below`` the parts of a matrix by its diagonal::

        C = T' inv(K) T,  T = [0      gamma I]   K = [-(D + gamma Y_F'Y_F)  E'             ]
                              [I      0      ],      [E                     S_A'S_A / gamma]
        E = below(S_A'Y_A) - not_below(S_F'Y_F)

    which is (5.11) of Byrd, Lu, Nocedal and Zhu (1995) with their W = (Y, S / gamma), as in `ReducedHistory`.
    """
    size = len(of_free) // 2
    curvatures = of_free.diagonal(size) + of_held.diagonal(size)
    square = of_free[-1, -1] + of_held[-1, -1] if size else 1.0
    gamma = float(initial_scaling or (curvatures[-1] / square if size else 1.0))
    if not ((curvatures > 0).all() and square > 0):
        return gamma, np.full_like(of_free, math.nan)
    mixed = np.tril(of_held[:size, size:], -1) - np.triu(of_free[:size, size:])
    of_y = -(np.diag(curvatures) + gamma * of_free[size:, size:])
    matrix = np.block([[of_y, mixed.T], [mixed, of_held[:size, :size] / gamma]])
    # In pairs that are scaled so that s'y = 1 the numbers are of one size.
    scale = np.tile(1 / np.sqrt(curvatures), 2)
    columns = [small.solve(scale[:, None] * matrix * scale, unit) for unit in np.eye(2 * size).tolist()]
    inverse = scale[:, None] * np.array(columns).reshape(matrix.shape) * scale  # which is symmetric
    turned = np.roll(inverse, size, (0, 1)) * np.repeat([1.0, gamma], size)
    return gamma, turned * np.repeat([1.0, gamma], size)[:, None]


class PreconditionedInverse(Inverse):
    """The inverse of the L-BFGS matrix that begins with the user's function, by the two-loop recursion."""

    def __init__(self, minimizer: QuasiNewton) -> None:
        self._minimizer = minimizer
        self.origin = f"{len(minimizer.history)} pairs and a preconditioner"

    def times(self, vector: Array) -> Array:
        minimizer = self._minimizer
        vector = minimizer.bounds.moving(vector).copy()
        (top,) = minimizer.space.largest(vector)
        out = empty(vector.size, vector.dtype, vector)
        minimizer.times_preconditioned(vector, top, 1.0, out)
        return out


class InverseBySolves(Inverse):
    """The inverse of the Hessian itself: conjugate gradients by Hessian products, in the memory of the method's own."""

    origin = "solves with the Hessian"

    def __init__(self, minimizer: TruncatedNewtonMinimizer, product: Callable[[Array], Array]) -> None:
        self._minimizer, self._product = minimizer, product
        minimizer.free.hold(minimizer.row("base"), minimizer.row("base_gradient"))

    def times(self, vector: Array) -> Array:
        cg, free, space = self._minimizer.cg, self._minimizer.free, self._minimizer.space
        scaled = free.scaled(vector)
        (top,) = space.largest(scaled)
        if not 0 < top < math.inf:
            return scaled * (0.0 if top == 0 else math.nan)
        cg.residual[:] = scaled / -top  # the step minimises g's + s'Hs / 2
        square = cg.square()
        if not square > 0:
            raise ValueError(f"preconditioner must be positive definite, but g'P g = {square:g} for a vector g")
        accuracy = max(_ACCURACY, _ROUNDINGS * space.epsilon)
        cg.begin(square, LARGEST_RADIUS, accuracy * math.sqrt(square), _PRODUCTS * space.total)
        while cg.tell_product(self._product(free.unscaled(cg.direction))):
            pass
        if cg.state.ending != Ending.INSIDE.value:
            raise _solve_error(cg.state.ending, cg.state.products)
        return free.unscaled(cg.step) * top


def _solve_error(ending: str, products: int) -> ValueError:
    """The error of a solve that has ended without a solution."""
    if ending in (Ending.CURVATURE.value, Ending.BOUNDARY.value):
        return ValueError(
            "hess_inv: the Hessian at the result is not positive definite, and x no minimum; minimise on, or let hessp "
            "be a Gauss-Newton approximation"
        )
    if ending == Ending.LIMIT.value:
        return ValueError(
            f"hess_inv: {products} Hessian products do not solve with the Hessian, which is badly conditioned; give a "
            "preconditioner"
        )
    return ValueError("hess_inv: a Hessian product at the result is NaN, infinite or too large")
