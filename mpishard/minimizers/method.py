"""What all minimisers share: their options, one minimisation as a state machine, and its stop tests.

A minimisation wants value and gradient at a point, and takes them by `tell`.  Between two evaluations its whole state
is in its vectors, its point and its metadata: a run that ends there resumes with the next evaluation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, ClassVar

import numpy as np

from mpishard.arguments import integer, number, printable, shown
from mpishard.io import log
from mpishard.minimizers.penalty import AtReference, PenaltyOfVectors
from mpishard.minimizers.space import LocalSpace, Space

Array = Any

# Something about each element: one number, a flat array, or by tensor name a number or an array; None: nothing.
Elements = Any


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """Base of the methods, which choose the length of their steps by themselves from values and gradients.

    A method is a frozen record of options, independent of any rank; `make` starts a minimisation by it.

    Parameters
    ----------
    gtol : float
        Stop when the largest element of the projected gradient is at most this: of ``x - P(x - g)``, where P projects
        into the bounds; without bounds, of the gradient.
    ftol : float
        Stop when an iteration decreases the value by at most this times the largest of both values and 1.
    xtol : float
        Stop when no element of an iteration's step is larger than this times the largest of the point and 1.
    maxiter, maxfun : int
        Stop after this number of iterations or evaluations.
    fixed : array of bool, mapping or None
        True for elements that keep their value: a flat array as long as the parameters, or by tensor name an array of
        its shape or True.
    inner_product : float, array, mapping, RieszMap or None
        Positive weights w of the inner product ``sum(w * a * b)``, such as the diagonal of a mass matrix: one number, a
        flat array, or by tensor name.  Gradients are partial derivatives g; what descends is their Riesz map ``g / w``,
        whose largest element `gtol` bounds.  A `RieszMap` for one that is no diagonal, without bounds.  Default: 1.
    preconditioner : float, array, mapping, callable or None
        Initial inverse Hessian: a positive diagonal, as for `inner_product`, or a function of a flat array, symmetric
        and positive definite, called on all ranks.  Default: the inverse of `inner_product`.

    Raises
    ------
    TypeError, ValueError
        If an option is invalid.
    """

    needs_products: ClassVar[bool] = False  # with the Hessian
    takes_batches: ClassVar[bool] = False  # whether each iteration may be of other samples
    call: ClassVar[str] = "minimize"  # whose method it is, for messages and records

    gtol: float = 1e-5
    ftol: float = 2.220446049250313e-09
    xtol: float = 0.0
    maxiter: int = 15000
    maxfun: int = 15000
    fixed: Elements = None
    inner_product: Elements | RieszMap = None
    preconditioner: Elements | Callable[[Array], Array] = None

    def __post_init__(self) -> None:
        for name in ("gtol", "ftol", "xtol"):
            object.__setattr__(self, name, number(f"{type(self).__name__}: {name}", getattr(self, name), least=0))
        for name in ("maxiter", "maxfun"):
            value = integer(f"{type(self).__name__}: {name}", getattr(self, name), least=0)
            object.__setattr__(self, name, value)

    @property
    @abstractmethod
    def slots(self) -> tuple[str, ...]:
        """Names of the vectors of the state, each as large as the parameters."""

    @abstractmethod
    def make(self, space: Space, vectors: Array, point: Array, limits: Limits) -> Minimizer:
        """A minimisation by this method.

        Parameters
        ----------
        space : Space
            Of the vectors.
        vectors : 2-D array
            This rank's part of the state: a row for each name in `slots`.  The caller keeps and saves it.
        point : 1-D array
            This rank's part of the start; the minimisation writes there where it wants to evaluate next.
        limits : Limits
            What is known of the elements.

        Returns
        -------
        Minimizer
            Before its first evaluation: call `begin`, or `restore` after the vectors are filled.
        """

    def initial(self, slot: str) -> float:
        """The value that fills `slot` before the first evaluation: 0.

        Parameters
        ----------
        slot : str
            One of `slots`.

        Returns
        -------
        float
            0.
        """
        return 0.0

    def configuration(self) -> dict[str, float | str | bool]:
        """The options as plain numbers, strings and flags, for saving.

        Returns
        -------
        dict
            ``"rule"`` with the name of the class, and each option that is one number, string or flag by its name.
        """
        plain: dict[str, float | str | bool] = {"rule": type(self).__name__}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float | str | bool):
                plain[field.name] = value
        return plain


@dataclass(frozen=True)
class RieszMap:
    """An inner product that is no diagonal, such as the mass matrix M of finite elements: ``(a, b) = a' M b``.

    As `inner_product` of a method it makes ``M^-1 g`` of partial derivatives g: steps descend along it, and `gtol`
    bounds its largest element.  The number of iterations then does not depend on how the mesh is refined.

    Parameters
    ----------
    apply : callable
        ``apply(x)`` returns M x, ``solve(g)`` the x with ``M x = g``; both take and return what a `preconditioner`
        does: whole vectors, or this rank's part of a `Partition`, where they may be collective over the ranks that
        share the field.  M is symmetric and positive definite.
    solve : callable
        The inverse of `apply`.

    Raises
    ------
    TypeError
        If one is not callable.
    """

    apply: Callable[[Array], Array]
    solve: Callable[[Array], Array]

    def __post_init__(self) -> None:
        for name in ("apply", "solve"):
            if not callable(getattr(self, name)):
                raise TypeError(f"RieszMap: {name}={shown(getattr(self, name))} must be a function of a vector")


# The user's options about the elements of the point on this rank: bounds, fixed elements, and their scale.


@dataclass(frozen=True)
class Limits:
    """This rank's part of the options about elements; None where an option is not given.

    `lower` and `upper` are infinite where an element has no bound. `weights`, which are positive, make the inner
    product ``sum(weights * a * b)``; stop tests then look at ``gradient / weights``. The initial inverse Hessian comes
    in one of two forms, up to a factor that the method chooses. `scaling` is its diagonal p, which is positive.
    ``precondition(vector)`` is its product with a vector of this rank's elements, and collective; it must be symmetric
    and positive definite. `solve` in place of `weights` is the Riesz map of an inner product that is no diagonal, and
    `apply` its inverse; `factor` is L of an inner product with the inverse L L'. They are collective, too. Terms
    ``l1_weights |x - l1_reference|`` are added to the function; no weight is negative, and the reference is None where
    it is 0 for all elements. The terms of `penalty` are added, too.
    """

    lower: Array | None = None
    upper: Array | None = None
    fixed: Array | None = None  # True for elements that keep their value
    weights: Array | None = None
    scaling: Array | None = None
    precondition: Callable[[Array], Array] | None = None
    solve: Callable[[Array], Array] | None = None
    apply: Callable[[Array], Array] | None = None
    factor: Callable[[Array], Array] | None = None
    l1_weights: Array | None = None
    l1_reference: Array | None = None
    penalty: PenaltyOfVectors | None = None

    def __post_init__(self) -> None:
        if self.scaling is not None and self.precondition is not None:
            raise ValueError("a scaling and a precondition were given; leave one of them out")

    def riesz(self, gradient: Array) -> Array | None:
        """The Riesz map of a gradient, by which it is measured; None if that is the gradient.  Collective."""
        if self.solve is not None:
            return self.solve(gradient)
        return None if self.weights is None else gradient / self.weights

    def expect_no_operators(self, method: str) -> None:
        """Raise ValueError if there are bounds or L1 terms, and an inner product or preconditioner is no diagonal."""
        if self.lower is None and self.upper is None and self.l1_weights is None:
            return
        what = "RieszMap as inner_product" if self.solve is not None else "function as preconditioner"
        if self.solve is not None or self.precondition is not None:
            raise ValueError(
                f"{method} with bounds or L1 terms takes no {what}, since its steps would leave the free elements; "
                "give a diagonal"
            )

    def expect_no_bounds(self, method: str) -> None:
        """Raise ValueError if there are bounds, for a method without them."""
        if self.lower is not None or self.upper is not None:
            raise ValueError(f"{method} takes no bounds; use LBFGSB, or fix elements")


def log_projected_start(moved: int) -> None:
    """Log that `moved` elements of the start, unless 0, were out of bounds; callers choose the rank that logs."""
    if moved:
        log.inform(f"{moved} elements of the start lie outside of their bounds, and begin at the nearest bound")


# One minimisation as a state machine.


class Wanted(Enum):
    """The next evaluation that a minimisation wants."""

    GRADIENT = "gradient"  # value and gradient at the point
    PRODUCT = "product"  # the Hessian at the point, times a direction
    NOTHING = "nothing"  # it has ended


@dataclass(frozen=True)
class Progress:
    """The progress of a minimisation; `value`, `gradient_norm` and `projected_norm` are at the last accepted point."""

    iterations: int = 0  # accepted steps
    evaluations: int = 0  # values with gradients
    products: int = 0  # Hessian products
    value: float = float("nan")
    gradient_norm: float = float("nan")  # largest absolute element of the gradient, and of the projected gradient
    projected_norm: float = float("nan")
    step_length: float = 0.0  # of the last accepted step, as a multiple of its direction
    accepted: bool = False  # the last call of `tell` has ended an iteration
    asymmetry: float = 0.0  # the largest difference of Hessian products a'(H b) and b'(H a), as a share of |a| |H b|
    not_finite: int = 0  # evaluations in line searches whose value or gradient was NaN or infinite


class Minimizer(ABC):
    """One minimisation by one method; `begin`, `tell` and `tell_product` are collective over the ranks of the space.

    `vectors` has a row for each name in `slots`, kept and saved by the caller. `point`, which the caller only reads, is
    where the next evaluation is wanted, and in the end the best iterate.
    """

    method: Method

    def __init__(self, slots: tuple[str, ...], space: Space, vectors: Array, point: Array, limits: Limits) -> None:
        self.space = space
        self.epsilon = space.epsilon  # the relative rounding error of values and gradients
        self.point = point
        self.limits = limits
        self.wanted: Wanted = Wanted.GRADIENT  # the next evaluation, at `point`
        self.progress: Progress = Progress()
        self.stop_reason: str = ""  # empty until it has ended
        # The function is another one in each iteration, such as one of other samples.  A line search then evaluates it
        # again at the new iterate before the next direction, since pairs compare gradients of one function
        # (Schraudolph, Yu and Günter 2007, section 3.1.2).
        self.stochastic = False
        self.added_value = 0.0  # what terms of the method's own, such as L1 terms, have added to the last value told
        self.vectors = vectors
        # For each row of `vectors` a number that is raised when the row is written, the same on all ranks, for those
        # who keep copies of the rows.  Empty, as at first, if the minimisation does not report its writes.
        self.versions: list[int] = []
        self._slots = slots

    def row(self, slot: str) -> Array:
        return self.vectors[self._slots.index(slot)]

    def note_written(self, *rows: int) -> None:
        """Raise the versions of these rows, or of all, since they were written or are about to be."""
        for row in rows or range(len(self.versions)):
            self.versions[row] += 1

    @property
    def best(self) -> Array:
        """The last accepted iterate, also while a line search continues elsewhere; not a copy."""
        return self.point if self.stop_reason else self.row("base")

    @property
    def gradient(self) -> Array:
        """The gradient at the last accepted iterate, with L1 terms the subgradient of least norm; not a copy."""
        return self.row("base_gradient")

    @property
    def at_reference(self) -> AtReference | None:
        """The elements, or groups, of `best` that are at their reference; None where no term has any.  Collective."""
        return None

    @property
    def duality_gap(self) -> float | None:
        """The gap of a penalty with a dual field at the last accepted iterate; None without one.  Collective."""
        return None

    def added_at(self, point: Array) -> float:
        """What terms of the method's own add to the value of the function at a point.  Collective."""
        return 0.0

    @property
    def longest_finite_step(self) -> float:
        """The longest step of the last line search at which value and gradient were finite, 0 if none was."""
        return self.progress.step_length

    @property
    def direction(self) -> Array:
        """The vector to multiply by the Hessian when a product is wanted."""
        raise NotImplementedError(f"{type(self).__name__} wants no Hessian products")

    @abstractmethod
    def begin(self) -> int:
        """Start at the point, projected into the bounds; return the number of elements on all ranks that this moved."""

    def forget(self) -> bool:
        """Drop what was learned of the curvature from earlier iterates; return True if there was anything."""
        return False

    @abstractmethod
    def tell(self, value: float, gradient: Array) -> None:
        """Take the value and this rank's part of the gradient, which is only read, and decide what is wanted next.

        The value is the same on all ranks; NaN or infinite outside of the domain of the function.
        """

    def tell_product(self, product: Array) -> None:
        """Take the Hessian times `direction`, this rank's part, which is only read."""
        raise NotImplementedError(f"{type(self).__name__} wants no Hessian products")

    def take_digits(self, digits: int) -> None:
        """Take note that the next value and gradient have no more than this number of binary digits."""
        self.epsilon = max(self.space.epsilon, 2.0**-digits)

    def reopen(self) -> None:
        """After the end, want another evaluation, at the last iterate, since a limit was lifted."""
        self.wanted, self.stop_reason = Wanted.GRADIENT, ""

    @abstractmethod
    def to_metadata(self) -> dict[str, Any]:
        """The state without vectors and point, as plain numbers (also infinities and NaN), strings and lists."""

    @abstractmethod
    def restore(self, metadata: Mapping[str, Any]) -> None:
        """Continue from `to_metadata`, after vectors and point were filled.

        Raises ValueError, and changes nothing, if something is missing or invalid.
        """


# A trial of saved numbers: can a method resume from them? Asked before anything changes.

ELEMENTS = "elements"  # in the metadata: a hash of bounds, L1 terms, fixed elements, inner product and preconditioner


def check_metadata(method: Method, metadata: Mapping[str, Any], elements: str) -> None:
    """Raise ValueError, with both sides, unless a minimisation by the method can be restored from this metadata.

    A minimisation without elements tries it. `metadata` is of `Minimizer.to_metadata`, possibly with other options, and
    of a hash of those about elements, which must be equal to `elements`.
    """
    if metadata.get(ELEMENTS, elements) != elements:
        more = ", and for x_scale='jac' the same x0" * (method.call == "least_squares")
        raise ValueError(
            "the state is of a run with other bounds, L1 terms (or other terms without a gradient), fixed elements, "
            "inner_product or preconditioner, on "
            f"which what {type(method).__name__} has learned depends; give the same ones{more}, or start from the "
            "saved parameters alone"
        )
    nothing = np.zeros(0)
    minimizer = method.make(LocalSpace(0, nothing), np.zeros((len(method.slots), 0)), nothing, Limits())
    try:
        minimizer.restore(metadata)
    except ValueError as error:
        raise ValueError(printable(str(error))) from None
    except (TypeError, KeyError, IndexError, AttributeError, OverflowError) as error:  # of a file that others wrote
        raise ValueError(f"{type(method).__name__}: the saved state cannot be restored: {error!r}") from None


# The stop tests that all methods share, after an iteration and after an evaluation.

LARGEST_PRODUCT = 2.0**1000  # dot products with larger terms are NaN, see `Space.dots`

# Reasons for which a method cannot continue, in words.
FAILURES = {
    "line search": "the line search found no lower value along a descent direction, so that the gradient does not fit "
    "the function to rounding; mpishard.check_gradient compares them",
    "wall": "steps end where the value or the gradient is NaN or infinite, and the gradient still leads there: "
    "keep the unknowns inside by bounds, or let the function have finite values beyond",
    "unbounded": "the value keeps falling, as if it had no lower limit",
    "range": "the square of the gradient is too small or too large for a float64; scale the function",
    "not finite": "the value, the gradient or a Hessian product is NaN or infinite",
    "indefinite": "the prior's precision R must be positive definite, but v'R v is negative for some v",
}


def converged(
    method: Method, progress: Progress, value_before: float, step_top: float = 1.0, point_top: float = 0.0
) -> str:
    """The test by which the iteration that has just ended converged: "gradient", "decrease" or "step"; empty if none.

    `value_before` is NaN at the start, where the gradient alone decides; `step_top` and `point_top` are the largest
    absolute elements of the step and the point.
    """
    if progress.projected_norm <= method.gtol:
        return "gradient"
    if value_before - progress.value <= method.ftol * max(abs(value_before), abs(progress.value), 1.0):
        return "decrease"
    if value_before == value_before and step_top <= method.xtol * max(point_top, 1.0):
        return "step"
    return ""


def exhausted(method: Method, progress: Progress) -> str:
    """The limit that a minimisation has reached, "iterations" or "evaluations"; empty if it may continue."""
    if progress.iterations >= method.maxiter:
        return "iterations"
    return "evaluations" if progress.evaluations >= method.maxfun else ""


def lifted(method: Method, progress: Progress, reason: str) -> bool:
    """Return True if the limit at which a minimisation ended is now farther away: options may change between two runs.

    Only limits on iterations and evaluations, and `gtol`, count.
    """
    if reason == "gradient":
        return progress.projected_norm > method.gtol
    if reason in ("iterations", "evaluations"):
        return not exhausted(method, progress)
    return False


def out_of_range(progress: Progress) -> str:
    """The reason to end where the square of the gradient is out of the range of floats: "range" at the start.

    After iterations "decrease", if nothing is left to gain, or "unbounded".
    """
    if progress.iterations and progress.gradient_norm < 1:
        return "decrease"
    return "unbounded" if progress.iterations and progress.value < 0 else "range"
