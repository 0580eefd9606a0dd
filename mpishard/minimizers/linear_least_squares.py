"""Linear least squares of many unknowns, from products with the matrix and its adjoint: LSQR and CGLS, step by step.

Both minimise ``|b - A x|^2 + damp^2 |x - x0|^2``, by the same iterates but for rounding, which the same tests judge.
Their scalars are dot products of `Space`, so that all ranks take the same steps.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from mpishard.minimizers import formulas
from mpishard.minimizers.bounds import Bounds
from mpishard.minimizers.least_squares import SAME_FUNCTION
from mpishard.minimizers.method import Limits
from mpishard.minimizers.space import Space
from mpishard.minimizers.steihaug import FreeVariables, SteihaugCG, SteihaugState

Array = np.ndarray
# The reasons for which a method has ended: SciPy's numbers.
ZERO, RESIDUAL, GRADIENT, CONDITION, LIMIT = 0, 1, 2, 3, 7
_SAME_ROWS = 1e-5  # a product with rows in the order of a checkpoint differs by less, also one in float32
_ROUGHLY = 1e-4  # how far products with A and with its adjoint, also those in float32, differ at most
_TO_ROUNDING = 3  # is added to the numbers of tests that hold to the last digit


class Matrix(Protocol):
    """The matrix of the problem; `rows` and `unknowns` are the spaces of its vectors."""

    rows: Space
    unknowns: Space

    def times(self, x: Array) -> Array:
        """A x, the rows of this rank; only read. Collective."""

    def adjoint(self, u: Array, top: float) -> Array:
        """A' u, the unknowns of this rank; only read. `top` is the largest element of u on all ranks. Collective."""


@dataclass(frozen=True)
class Tolerances:
    """When a method ends, as for SciPy's LSQR."""

    atol: float
    btol: float
    conlim: float  # 0: no limit
    iter_lim: int


@dataclass(frozen=True)
class LinearProgress:
    """The norms at the last iterate, and estimates for the damped matrix, by SciPy's names."""

    itn: int = 0
    r1norm: float = 0.0  # |b - A x|
    r2norm: float = 0.0  # the root of the sum that is minimised
    anorm: float = 0.0  # of the matrix, in the Frobenius norm
    acond: float = 0.0
    arnorm: float = 0.0  # |A'(b - A x) - damp^2 (x - x0)|
    xnorm: float = 0.0  # |x - x0|
    step_length: float = 0.0  # of the last step, in its direction


def reason_to_stop(progress: LinearProgress, bnorm: float, tolerances: Tolerances) -> int | None:
    """The test by which a method ends, or None.

    Source: C. C. Paige, M. A. Saunders: LSQR: an algorithm for sparse linear equations and sparse least squares, ACM
    Transactions on Mathematical Software 8, 43-71 (1982), section 6. Of several tests the first one counts.
    """
    found = progress
    if found.itn == 0:
        return ZERO if found.arnorm == 0 else LIMIT if tolerances.iter_lim == 0 else None
    scale, size = found.anorm * found.xnorm, found.anorm * found.r2norm
    slope = found.arnorm / size if size > 0 else 0.0
    inverse = 1 / found.acond if found.acond > 0 else math.inf
    if found.r2norm <= tolerances.btol * bnorm + tolerances.atol * scale:
        return RESIDUAL
    if slope <= tolerances.atol:
        return GRADIENT
    if tolerances.conlim > 0 and inverse <= 1 / tolerances.conlim:
        return CONDITION
    residual = found.r2norm / (bnorm + scale) if bnorm + scale > 0 else math.inf
    for reason, test in ((RESIDUAL, residual), (GRADIENT, slope), (CONDITION, inverse)):
        if 1 + test <= 1:
            return reason + _TO_ROUNDING
    return LIMIT if found.itn >= tolerances.iter_lim else None


class LinearMethod(ABC):
    """A method at work. Collective over the ranks of the matrix, but for the vectors of this rank.

    Its vectors are attributes, `unknown_vectors`, of which the last is the direction of the next step, and one of the
    rows. With `numbers` they are all that it needs to continue.
    """

    row_vector: ClassVar[str]
    unknown_vectors: ClassVar[tuple[str, ...]]

    def __init__(self, matrix: Matrix, damp: float, calc_var: bool) -> None:
        self.matrix, self.damp = matrix, damp
        self.progress = LinearProgress()
        self.bnorm = 0.0
        self.variances: Array | None = np.zeros(matrix.unknowns.size) if calc_var else None  # the diagonal of inv(A'A)
        self._start = (0.0, 0.0, 0.0)  # the norms of b, and at the start of the residual and the gradient
        self._order = (0.0, 0.0)  # a sum over the rows that depends on their order, and how large it may be
        self.fits = True  # A' is the adjoint of A, as far as the first iteration has seen

    @abstractmethod
    def iterate(self) -> Array:
        """The last iterate, not a copy where the method has it as one vector."""

    @abstractmethod
    def begin(self, b: Array, start: Array | None) -> None:
        """Take the start, 0 if it is None, and the right-hand side, whose memory the method keeps."""

    @abstractmethod
    def step(self) -> None:
        """Make one iteration."""

    def note_order(self) -> None:
        """Take the number by which `restore` finds rows in another order: one product. Follows `begin`. Collective."""
        rows, product = self.matrix.rows, self.matrix.times(getattr(self, self.unknown_vectors[-1]))
        order, square = rows.measured_dots((product, rows.white_noise(0, "order")), (product, product))
        self._order = order, math.sqrt(square)

    def vectors(self) -> dict[str, Array]:
        """The vectors by name, that of the rows last."""
        found = {name: getattr(self, name) for name in self.unknown_vectors}
        more = {} if self.variances is None else {"variances": self.variances}
        return found | more | {self.row_vector: getattr(self, self.row_vector)}

    def numbers(self) -> dict[str, Any]:
        """The state without the vectors, as plain numbers."""
        return {"start": list(self._start), "order": self._order[0], "progress": asdict(self.progress)}

    def restore(self, numbers: Mapping[str, Any]) -> None:
        """Continue from `numbers`, after `begin`; the caller fills the vectors.

        Raises ValueError, and changes nothing, if they are of another problem: one with other norms at the start, or
        with rows in another order.
        """
        saved, own = [float(each) for each in numbers["start"]], self._start
        if not all(abs(a - b) <= SAME_FUNCTION * max(abs(a), abs(b)) for a, b in zip(saved, own, strict=True)):
            raise ValueError(
                "the checkpoint is of another problem: |b|, |b - A x0| and |A'(b - A x0)| were "
                f"{', '.join(f'{each:.12g}' for each in saved)}, and by this one they are "
                f"{', '.join(f'{each:.12g}' for each in own)}; give each problem its own folder, or resume=False"
            )
        order, size = self._order
        # A checkpoint from before there was this number says nothing of the order.
        if not abs(float(numbers.get("order", order)) - order) <= _SAME_ROWS * size:
            raise ValueError(
                "the checkpoint does not fit A: its rows had another order.  Give them in the order in which they were "
                "saved, rank after rank: runs of consecutive rows have one on any ranks; or resume=False"
            )
        self.progress = LinearProgress(**numbers["progress"])

    def _compare_adjoint(self, product: Array, r: Array, expected: float) -> None:
        """Compare r'(A v), of the `product` A v, with (A'r)'v, which is `expected`; to the digits of float32."""
        found, *squares = self.matrix.rows.measured_dots((product, r), (product, product), (r, r))
        self.fits = not abs(found - expected) > _ROUGHLY * max(math.sqrt(squares[0] * squares[1]), abs(expected))

    def _residual(self, b: Array, start: Array | None) -> tuple[Array, float, float]:
        """The residual at the start, in the memory of b, with its norm and largest element."""
        self.bnorm, top = _norm(self.matrix.rows, b, "b")
        if start is None:
            return b, self.bnorm, top
        formulas.move(b, self.matrix.times(start), -1.0)
        return b, *_norm(self.matrix.rows, b, "b - A x0")


def _norm(space: Space, vector: Array, what: str) -> tuple[float, float]:
    """The norm of a vector, and its largest element."""
    (top,) = space.largest(vector)
    return _root(space.dots([(vector, vector)], [top * top])[0], top, what), top


def _root(square: float, top: float, what: str) -> float:
    """The norm of a vector from its square; ValueError if that is not in the range of float64."""
    if top == 0:
        return 0.0
    if not 0 < square < math.inf:
        if math.isfinite(top):
            raise ValueError(
                f"{what} is too {'small' if top < 1 else 'large'} for its square in float64: its largest element is "
                f"{top:.3g}; scale A, b or the unknowns"
            )
        raise ValueError(
            f"{what} has an element that is NaN or infinite; A, b and x0, and products with A and A', must be finite"
        )
    return math.sqrt(square)


def _too_large(iteration: int) -> ValueError:
    return ValueError(f"x in iteration {iteration} is too large for its square in float64; scale A, b or the unknowns")


# LSQR.


@dataclass(frozen=True)
class _Bidiagonal:
    """The numbers of the bidiagonalization and of its QR factorization, by the letters of the source."""

    alpha: float = 0.0
    rho_bar: float = 0.0
    phi_bar: float = 0.0
    psi_square: float = 0.0  # the sum of what damping adds to the square of the residual
    d_square: float = 0.0  # the sum of the squares of the columns of D
    # The rotations from the right, which give the norm of x.
    cosine: float = -1.0
    sine: float = 0.0
    zeta: float = 0.0
    x_square: float = 0.0


class LSQR(LinearMethod):
    """The Golub-Kahan bidiagonalization, and with it the least-squares solution in a growing space.

    Source: C. C. Paige, M. A. Saunders, as above; algorithm LSQR, with damping as in section 7 by a rotation a step.
    """

    row_vector = "u"
    unknown_vectors = ("x", "v", "w")

    def __init__(self, matrix: Matrix, damp: float, calc_var: bool) -> None:
        super().__init__(matrix, damp, calc_var)
        size = matrix.unknowns.size
        self.x, self.v, self.w = (np.zeros(size) for _ in range(3))
        self.u = np.empty(0)
        self._state = _Bidiagonal()

    def iterate(self) -> Array:
        return self.x

    def begin(self, b: Array, start: Array | None) -> None:
        if start is not None:
            self.x[:] = start
        self.u, beta, top = self._residual(b, start)
        alpha = 0.0
        if beta > 0:
            self.u *= 1 / beta
            self.v[:] = self.matrix.adjoint(self.u, top / beta)
            alpha, _ = _norm(self.matrix.unknowns, self.v, "A'(b - A x0)")
        if alpha > 0:
            self.v *= 1 / alpha
        self.w[:] = self.v
        self._start = (self.bnorm, beta, alpha * beta)
        self._state = _Bidiagonal(alpha=alpha, rho_bar=alpha, phi_bar=beta)
        self.progress = LinearProgress(r1norm=beta, r2norm=beta, arnorm=alpha * beta)

    def step(self) -> None:
        rows, unknowns, damp = self.matrix.rows, self.matrix.unknowns, self.damp
        old, before = self._state, self.progress
        product = self.matrix.times(self.v)
        if not before.itn:
            self._compare_adjoint(product, self.u, old.alpha)
        formulas.follow(self.u, product, -old.alpha)
        beta, top = _norm(rows, self.u, f"a product with A in iteration {before.itn + 1}")
        alpha = old.alpha
        anorm = math.sqrt(before.anorm * before.anorm + alpha * alpha + beta * beta + damp * damp)
        if beta > 0:
            self.u *= 1 / beta
            formulas.follow(self.v, self.matrix.adjoint(self.u, top / beta), -beta)
        tops = unknowns.largest(self.v, self.w)
        squares = unknowns.dots([(self.v, self.v), (self.w, self.w)], [top * top for top in tops])
        if beta > 0:
            alpha = _root(squares[0], tops[0], f"a product with A' in iteration {before.itn + 1}")
            if alpha > 0:
                self.v *= 1 / alpha

        # Two rotations: of the damping into the diagonal, and of beta from below the diagonal.
        rho_bar = math.hypot(old.rho_bar, damp)
        psi, phi_bar = damp / rho_bar * old.phi_bar, old.rho_bar / rho_bar * old.phi_bar
        rho = math.hypot(rho_bar, beta)
        cosine, sine = rho_bar / rho, beta / rho
        theta, phi = sine * alpha, cosine * phi_bar
        tau = sine * phi

        formulas.move(self.x, self.w, phi / rho)
        if self.variances is not None:
            formulas.add_squares(self.variances, self.w, 1 / rho)
        formulas.follow(self.w, self.v, -theta / rho)

        # A rotation from the right makes the matrix lower triangular, and so gives the norm of x.
        delta, gamma_bar = old.sine * rho, -old.cosine * rho
        right = phi - delta * old.zeta
        last = right / gamma_bar
        if not math.isfinite(last * last):
            raise _too_large(before.itn + 1)
        gamma = math.hypot(gamma_bar, theta)
        state = _Bidiagonal(
            alpha=alpha,
            rho_bar=-cosine * alpha,
            phi_bar=sine * phi_bar,
            psi_square=old.psi_square + psi * psi,
            d_square=old.d_square + squares[1] / (rho * rho),
            cosine=gamma_bar / gamma,
            sine=theta / gamma,
            zeta=right / gamma,
            x_square=old.x_square + (right / gamma) ** 2,
        )
        r2norm = math.sqrt(state.phi_bar * state.phi_bar + state.psi_square)
        xnorm = math.sqrt(old.x_square + last * last)
        square = r2norm * r2norm - damp * damp * xnorm * xnorm
        self._state = state
        self.progress = LinearProgress(
            itn=before.itn + 1,
            r1norm=math.copysign(math.sqrt(abs(square)), square) if damp else r2norm,
            r2norm=r2norm,
            anorm=anorm,
            acond=anorm * math.sqrt(state.d_square),
            arnorm=alpha * abs(tau),
            xnorm=xnorm,
            step_length=abs(phi) / rho,
        )

    def numbers(self) -> dict[str, Any]:
        return super().numbers() | {"bidiagonal": asdict(self._state)}

    def restore(self, numbers: Mapping[str, Any]) -> None:
        state = _Bidiagonal(**numbers["bidiagonal"])
        super().restore(numbers)
        self._state = state


# CGLS.


class CGLS(LinearMethod):
    """Conjugate gradients for the normal equations, by the class that `GaussNewton` uses for its steps.

    The residual of the rows is updated, and that of the normal equations computed from it, and not updated, since the
    latter loses digits. Source: A. Bjorck, T. Elfving, Z. Strakos: Stability of conjugate gradient and Lanczos methods
    for linear least squares problems, SIAM Journal on Matrix Analysis and Applications 19, 720-736 (1998). The norm and
    the condition of the matrix are those of the Lanczos matrix that the steps define.
    """

    row_vector = "r"
    unknown_vectors = ("x0", "moved", "gradient", "direction")

    def __init__(self, matrix: Matrix, damp: float, calc_var: bool) -> None:
        super().__init__(matrix, damp, calc_var)
        space = matrix.unknowns
        self.x0, self.moved, self.gradient, self.direction = (np.zeros(space.size) for _ in range(4))
        self.r = np.empty(0)
        limits = Limits()
        free = FreeVariables(limits, Bounds(limits, space), self.moved)
        self._cg = SteihaugCG(space, free, self.moved, self.gradient, self.direction, math.inf)
        self._d_square = 0.0  # the sum of the squares of the directions, each of length 1 in the norm of the matrix
        self._growth = 0.0  # by which the last direction entered this one, over the last step's length

    def iterate(self) -> Array:
        return self.x0 + self.moved

    def begin(self, b: Array, start: Array | None) -> None:
        if start is not None:
            self.x0[:] = start
        self.r, norm, top = self._residual(b, start)
        slope = 0.0
        if norm > 0:
            np.negative(self.matrix.adjoint(self.r, top), out=self.gradient)
            slope, _ = _norm(self.matrix.unknowns, self.gradient, "A'(b - A x0)")
        self._cg.begin(slope * slope, math.inf, 0.0, sys.maxsize)
        self._start = (self.bnorm, norm, slope)
        self._d_square = self._growth = 0.0
        self.progress = LinearProgress(r1norm=norm, r2norm=norm, arnorm=slope)

    def step(self) -> None:
        rows, damp, before = self.matrix.rows, self.damp, self.progress
        product = self.matrix.times(self.direction)
        norm, _ = _norm(rows, product, f"a product with A in iteration {before.itn + 1}")
        direction_square, square = self._cg.state.direction_square, self._cg.state.residual_square
        if not before.itn:
            self._compare_adjoint(product, self.r, square)
        curvature = norm * norm + damp * damp * direction_square
        length = self._cg.tell_curvature(curvature)
        if length is None and curvature > 0:
            raise _too_large(before.itn + 1)
        if length is None:
            raise ValueError(
                f"A is 0 along the direction of iteration {before.itn + 1}, which it is for none if A' is its adjoint: "
                "mpishard.check_adjoint tests that"
            )
        if self.variances is not None:
            formulas.add_squares(self.variances, self.direction, 1 / math.sqrt(curvature))
        formulas.move(self.r, product, -length)
        norm, top = _norm(rows, self.r, "b - A x")
        self.gradient[:] = self.moved
        formulas.turn(self.gradient, self.matrix.adjoint(self.r, top), damp * damp)
        self._cg.tell_residual(length)
        state = self._cg.state
        self._d_square += direction_square / curvature
        anorm = math.sqrt(before.anorm * before.anorm + 1 / length + self._growth)
        self._growth = state.residual_square / square / length
        self.progress = LinearProgress(
            itn=before.itn + 1,
            r1norm=norm,
            r2norm=math.sqrt(norm * norm + damp * damp * state.step_square),
            anorm=anorm,
            acond=anorm * math.sqrt(self._d_square),
            arnorm=math.sqrt(state.residual_square),
            xnorm=math.sqrt(state.step_square),
            step_length=length,
        )

    def numbers(self) -> dict[str, Any]:
        more = {"d_square": self._d_square, "growth": self._growth}
        return super().numbers() | {"conjugate_gradients": asdict(self._cg.state), **more}

    def restore(self, numbers: Mapping[str, Any]) -> None:
        state = SteihaugState(**numbers["conjugate_gradients"])
        d_square, growth = float(numbers["d_square"]), float(numbers["growth"])
        super().restore(numbers)
        self._cg.state, self._d_square, self._growth = state, d_square, growth
