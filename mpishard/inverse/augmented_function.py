"""The augmented Lagrangian of a function under constraints, as a function that the loop of `minimize` minimises."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpishard.arguments import shown
from mpishard.backend import array as arrays
from mpishard.comm.errors import OneRank, raised_on_all
from mpishard.inverse.functions import Attempts, Functions, sum_of_values
from mpishard.inverse.unknowns import Unknowns, copy_of_point
from mpishard.minimizers.method import Progress

if TYPE_CHECKING:
    from mpishard.comm.axis import Axis, ModelParallelGroup

Array = Any
_LARGEST_MULTIPLIER = 1e16  # with which a minimisation begins: they stay bounded where none exist
# Between which the first penalty is chosen: Birgin and Martinez (2014, chapter 12) allow far larger ones, with which
# line searches meet the kink of the gradient where a constraint begins to count.
_PENALTIES = 1.0, 10.0


class Constraints(NamedTuple):
    """What a user says of the constraints: functions of a point, and limits, numbers or arrays.

    Limits may also be functions, called when the constraints were.
    """

    function: Callable[..., Any]
    adjoint: Callable[..., Any]
    lower: Any = 0.0
    upper: Any = 0.0
    forward: Callable[..., Any] | None = None  # the Jacobian times a direction
    hessp: Callable[..., Any] | None = None  # the Hessian of the Lagrangian times a direction


class Evaluation(NamedTuple):
    """This rank's value, its flat gradient, and its constraints at a point."""

    value: float
    gradient: Array  # None if it is not known
    constr: np.ndarray


class Distances(NamedTuple):
    """The largest numbers over all constraints of all ranks."""

    violation: float = math.nan  # by which a constraint is beyond its limits
    complementarity: float = math.nan  # the smaller one of a multiplier, and what is left to its limit
    residual: float = math.nan  # what the penalty weighs
    multiplier: float = math.nan  # in the gradient, and at the beginning of this minimisation
    shift: float = math.nan


class AugmentedFunction:
    """The augmented Lagrangian with the multipliers of this rank. Methods are collective, unless they say otherwise.

    A constraint c with the multiplier y has the term ``penalty / 2 r^2 - y r``. Its residual r is c less the point
    between its limits that is nearest to ``c - y / penalty``; for an equation it is c. In the gradient it has the
    multiplier ``y - penalty r``, which is 0 where ``c - y / penalty`` is between the limits (Powell, Hestenes and
    Rockafellar).
    """

    def __init__(
        self,
        functions: Functions,
        constraints: Constraints,
        args: Any,
        unknowns: Unknowns,
        world: Axis | OneRank,
        reduction: str | None,
    ) -> None:
        self._functions, self._constraints = functions, constraints
        self._args = args if isinstance(args, tuple) else (args,)
        self.unknowns = unknowns
        self.world = world
        self._sums = reduction == "sum"
        # The terms of all constraints are rounded once: the partition is no part of the result.
        self._sums_here = self._sums and unknowns.is_cut_by_application
        # Of ranks that share the unknowns, whose functions may wait for each other: after each one all must agree.
        self._meeting = functions.meeting = world if unknowns.is_split or self._sums_here else None
        self.penalty = 1.0
        self.lower: np.ndarray = np.empty(0)
        self.upper: np.ndarray = np.empty(0)
        self.shifts: np.ndarray = np.empty(0)  # the multipliers y of this minimisation
        self.multipliers: np.ndarray = np.empty(0)  # those of the gradient at the best iterate
        self.distances = Distances()
        self.best: Evaluation | None = None  # at the best iterate, if that is known
        self._last: Evaluation | None = None
        self.is_at_best = False  # the next evaluation is there

    # -- at the start -------------------------------------------------------------------------------------------------

    def begin(
        self,
        progress: Callable[[], Progress],
        together: Axis | ModelParallelGroup | OneRank,
        multipliers: Any,
        penalty: float | None,
        retries: int,
    ) -> None:
        """Evaluate at the point that the unknowns show; take the multipliers and the penalty.

        It is the best iterate of a minimisation, or its start; `progress` tells where that is then. Without a penalty
        choose one. `together` are the ranks that call the functions together.
        """
        self._progress = progress
        attempts = Attempts(together, retries)
        attempt = attempts(lambda: self._evaluated(self.unknowns.point()))
        with raised_on_all(self.world):
            if attempt.problem is not None:
                raise attempt.problem
            self.best = attempt.found
            assert self.best is not None
            size = self.best.constr.size
            self.lower, self.upper = (self._limits(name, size) for name in ("lower", "upper"))
            wrong = np.flatnonzero(~((self.lower <= self.upper) & (self.lower < math.inf) & (self.upper > -math.inf)))
            if wrong.size:
                first = int(wrong[0])
                raise ValueError(
                    f"constraint {first} has lower={self.lower[first]:g} and upper={self.upper[first]:g}; give "
                    "lower <= upper, and infinite ones where there is no limit"
                )
            self.shifts = np.zeros(size) if multipliers is None else reals("multipliers must be", multipliers).copy()
            if self.shifts.size != size:
                raise ValueError(f"there are {self.shifts.size} multipliers, but {size} constraints; give one each")
            if not np.isfinite(self.shifts).all():
                raise ValueError("multipliers must be finite")
        sizes = self.world.allgather_object(size)
        if not self._sums and len(set(sizes)) > 1:
            other = next(rank for rank, each in enumerate(sizes) if each != sizes[0])
            raise ValueError(
                f"constraints returned {sizes[0]} numbers on rank 0, and {sizes[other]} on rank {other}: return all of "
                "them on each rank; if each rank has some, say reduction='sum'"
            )
        self.is_at_best = True
        self.penalty = self._first_penalty(self.best) if penalty is None else penalty

    def _limits(self, name: str, size: int) -> np.ndarray:
        given = getattr(self._constraints, name)
        found = reals(f"{name} must be", given() if callable(given) else given)
        if found.size not in (1, size):
            raise ValueError(f"{name} has {found.size} limits, but there are {size} constraints; give one each, or one")
        return np.broadcast_to(found, (size,))

    def _first_penalty(self, start: Evaluation) -> float:
        """A penalty by which the constraints at the start weigh at most ten times as much as the function."""
        beyond = start.constr - np.clip(start.constr, self.lower, self.upper)
        values, parts = self._of_all(start.value, beyond * beyond)
        value = sum_of_values(values) if self._sums else values[0]
        squares = sum_of_values([part for each in parts for part in each] if self._sums else parts[0])
        least, most = _PENALTIES
        chosen = most * max(1.0, abs(value)) / max(1.0, 0.5 * squares)
        return min(max(chosen, least), most) if math.isfinite(chosen) else most

    def take_shifts(self, of_all: np.ndarray) -> None:
        """Take this rank's multipliers from those of `shifts_of_all`."""
        counts = self._counts()
        with raised_on_all(self.world):
            if of_all.size != sum(counts):
                raise ValueError(
                    f"the checkpoint has multipliers of {of_all.size} constraints, and these are {sum(counts)}; give "
                    "the constraints of then, or resume=False"
                )
        first = sum(counts[: self.world.rank]) if self._sums else 0
        self.shifts = of_all[first : first + self.shifts.size].astype(np.float64)

    def shifts_of_all(self) -> np.ndarray:
        """The multipliers of all ranks, by rank."""
        counts = self._counts()
        if not self._sums or isinstance(self.world, OneRank):
            return self.shifts
        return self.world.all_gather(np.empty(sum(counts)), self.shifts, counts, label="multipliers")

    def _counts(self) -> list[int]:
        """The number of constraints of each rank, or where all have the same that of one."""
        return self.world.allgather_object(self.shifts.size) if self._sums else [self.shifts.size]

    # -- evaluations --------------------------------------------------------------------------------------------------

    def value_and_gradient(self, x: Any) -> tuple[float, Any]:
        """The augmented Lagrangian, on a mesh with "sum" this rank's part of it.

        Collective if the unknowns are split or cut by the application, and only then.
        """
        unknowns = self.unknowns  # whose values are those of x
        self.note_best()
        best = self.best if self.is_at_best else None
        found = self._evaluated(x) if best is None or best.gradient is None else best
        self.is_at_best = False
        residuals, multipliers = self._terms(found.constr)
        with raised_on_all(self._meeting):
            flat = found.gradient - self._adjoint(multipliers)
        self._last = found
        terms = residuals * (0.5 * self.penalty * residuals - self.shifts)
        if self._sums_here:
            values, parts = self._of_all(found.value, terms)
            total = sum_of_values(values) + sum_of_values([part for each in parts for part in each])
            if math.isfinite(total):
                return total if self.world.rank == 0 else 0.0, unknowns.like_x0(flat)
        return found.value + sum_of_values(terms), unknowns.like_x0(flat)

    def _evaluated(self, x: Any) -> Evaluation:
        """The user's functions at the unknowns, whose values are those of x."""
        unknowns = self.unknowns
        with raised_on_all(self._meeting):
            value, given = self._functions.value_and_gradient(x)
            gradient = unknowns.vector("the gradient", given).copy()  # the user may write into the same array again
        with raised_on_all(self._meeting):
            found = self._constraints.function(unknowns.point(), *self._args)
            constr = reals("constraints must return", found)
            if self.best is not None and constr.size != self.best.constr.size:
                raise ValueError(
                    f"constraints returned {constr.size} numbers, but {self.best.constr.size} at x0; return as many"
                )
        return Evaluation(value, gradient, constr)

    def _terms(self, constr: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The residuals of constraints, and their multipliers in the gradient.  Not collective."""
        wanted = constr - self.shifts / self.penalty
        inside = (self.lower < wanted) & (wanted < self.upper)
        residuals = np.where(inside, self.shifts / self.penalty, constr - np.clip(wanted, self.lower, self.upper))
        return residuals, np.where(inside, 0.0, self.shifts - self.penalty * residuals)

    def _adjoint(self, v: np.ndarray) -> Array:
        product = self._constraints.adjoint(self.unknowns.point(), v, *self._args)
        return self.unknowns.vector("the product of adjoint", product)

    def _of_all(self, value: float, terms: np.ndarray) -> tuple[tuple[float, ...], tuple[list[float], ...]]:
        """The values of all ranks, and of the terms of each rank a few numbers with the same sum."""
        values, parts = zip(*self.world.allgather_object((value, _exact_parts(terms))), strict=True)
        return values, parts

    def product(self, x: Any, direction: Any) -> Any:
        """The Hessian of the augmented Lagrangian at the best iterate times a direction.  Collective as gradients."""
        given, unknowns = self._constraints, self.unknowns
        self.note_best()
        assert given.hessp is not None and given.forward is not None and self.best is not None
        _, multipliers = self._terms(self.best.constr)
        with raised_on_all(self._meeting):
            found = given.hessp(copy_of_point(x), copy_of_point(direction), multipliers.copy(), *self._args)
            product = unknowns.vector("the product of hessp", found).copy()  # adjoint may write into the same array
        with raised_on_all(self._meeting):
            along = reals("forward must return", given.forward(copy_of_point(x), direction, *self._args))
            if along.size != multipliers.size:
                raise ValueError(f"forward returned {along.size} numbers, but there are {multipliers.size} constraints")
        holds = (self.lower == self.upper) | (multipliers != 0)
        with raised_on_all(self._meeting):
            product = product + self._adjoint(np.where(holds, self.penalty * along, 0.0))
        return unknowns.like_x0(product)

    # -- at the best iterate ------------------------------------------------------------------------------------------

    def note_best(self) -> None:
        """Keep the last evaluation if the minimisation has taken its point.  Not collective."""
        progress = self._progress()
        if self._last is not None and (progress.accepted or progress.evaluations == 1):
            self.best = self._last

    def measure(self, again: bool = False) -> None:
        """Measure the constraints at the best iterate, and take their multipliers there.

        Or measure them `again`, after `begin_again`.
        """
        self.note_best()
        assert self.best is not None
        constr = self.best.constr
        residuals, self.multipliers = (constr, self.shifts) if again else self._terms(constr)
        y = self.multipliers
        left = np.where(y > 0, constr - self.lower, np.where(y < 0, self.upper - constr, 0.0))
        beyond = constr - np.clip(constr, self.lower, self.upper)
        numbers = beyond, np.minimum(abs(left), abs(y)), residuals, y, self.shifts
        own = [float(np.max(np.abs(each), initial=0.0)) for each in numbers]
        tops = np.array(self.world.allgather_object([math.nan if math.isnan(each) else each for each in own]))
        if len(tops) > 1 and not self._sums:
            from mpishard.inverse.mesh_run import check_identical

            check_identical("values of the constraints", np.ascontiguousarray(tops[:, 0]))
        self.distances = Distances(*np.max(tops, axis=0).tolist())

    def not_finite(self) -> str:
        """The first constraint that was NaN or infinite in the last evaluation, in words; empty if none was."""
        constr = np.empty(0) if self._last is None else self._last.constr
        wrong = np.flatnonzero(~np.isfinite(constr))
        by_rank = self.world.allgather_object(f"constraint {wrong[0]} is {constr[wrong[0]]:g}" if wrong.size else "")
        rank = next((rank for rank, found in enumerate(by_rank) if found), 0)
        where = f" on rank {rank}" if self._sums and by_rank[rank] and len(by_rank) > 1 else ""
        return f"{by_rank[rank]}{where}"

    def begin_again(self, penalty: float) -> None:
        """Take another penalty and the multipliers of the gradient, to minimise from the best iterate.  Not collective.

        After `measure`.
        """
        self.penalty, self.is_at_best = penalty, True
        self.shifts = np.clip(self.multipliers, -_LARGEST_MULTIPLIER, _LARGEST_MULTIPLIER)

    def continue_from(
        self, penalty: float, shifts: np.ndarray, value: float, constr: np.ndarray, is_at_best: bool
    ) -> None:
        """Continue with these numbers of a state; the value and the constraints are at the best iterate."""
        self.penalty, self.shifts, self.is_at_best = penalty, shifts, is_at_best
        self.best, self._last = Evaluation(value, None, constr), None

    @property
    def constr(self) -> np.ndarray:
        """This rank's constraints at the best iterate."""
        assert self.best is not None
        return self.best.constr

    def value(self) -> float:
        """The user's function at the best iterate, of all ranks."""
        assert self.best is not None
        values = self.world.allgather_object(self.best.value)
        return sum_of_values(values) if self._sums else float(values[0])


def _exact_parts(numbers: np.ndarray) -> list[float]:
    """A few numbers whose sum is exactly that of many; the last one is not finite if one of many is not."""
    parts: list[float] = []
    rest = sum_of_values(numbers)
    while rest:
        parts.append(rest)
        rest = sum_of_values(np.append(numbers, np.negative(parts))) if math.isfinite(rest) else 0.0
    return parts


def reals(what: str, given: Any) -> np.ndarray:
    """A flat float64 array of real numbers, on the host."""
    try:
        found = np.atleast_1d(np.asarray(arrays.to_host(given)))  # subclasses, such as np.matrix, do other things
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{what} an array of numbers, got {shown(given)}") from None
    if found.dtype.kind not in "biuf":
        raise TypeError(f"{what} real numbers, got {shown(given)}")
    return found.reshape(-1).astype(np.float64)
