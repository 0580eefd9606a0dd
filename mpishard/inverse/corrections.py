"""What `augmented_lagrangian` makes of a minimisation: the end, or other multipliers for the next one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from mpishard.inverse.augmented_function import AugmentedFunction
from mpishard.inverse.result import OptimizeResult
from mpishard.layout.run_state import brief
from mpishard.minimizers.method import Progress

Array = Any
# Bertsekas, section 2.2.5: the penalty grows where a correction has not made the constraints so much smaller.
_GROW, _SMALLER = 10.0, 0.25
_LARGEST_PENALTY = 1e14
FIRST_TOLERANCE, _TIGHTER = 0.01, 0.1  # of the minimisations
_STALLED = 3  # minimisations that change nothing
_STATUS = {"gradient": 0, "iterations": 1, "seconds": 1, "callback": 99, "signal": 99}
_STOPPED = "callback", "signal", "seconds"
_FATAL = ("not finite", "range", "unbounded")
_NO_SOLUTION = (
    "the constraints may have no common solution, or the minimum no multipliers, or adjoint is not that of their "
    "Jacobian, which mpishard.check_adjoint tests"
)
_STILL_GROWS, _SOON = 1.5, 3  # multipliers that none exist for grow by this factor, after so many minimisations
_NO_MULTIPLIERS = (
    "; the multipliers still grow, the largest from {:.3g} to {:.3g} in the last minimisation: the minimum may have "
    "none, as where gradients of constraints are dependent, and then x is less exact than ctol: compare a smaller one"
)
# Facts of a checkpoint: the course of the loop, and the multipliers of all ranks.
MULTIPLIERS, NUMBERS = "augmented_lagrangian.json", "multipliers"


@dataclass(frozen=True)
class Course:
    """Where the outer loop is when a minimisation begins."""

    minimizations: int = 0
    evaluations: int = 0  # of all minimisations so far
    products: int = 0
    penalty: float = math.nan
    tolerance: float = FIRST_TOLERANCE
    before: float = math.inf  # the largest residual of the last minimisation, and the lowest of all
    lowest: float = math.inf
    stalled: int = 0


class Verdict(NamedTuple):
    """The course after a minimisation, and why that was the last one, in a word and in a sentence, or nothing."""

    course: Course
    reason: str = ""
    text: str = ""


class Corrections:
    """Judges the minimisations of an augmented Lagrangian, and corrects its multipliers.

    Not collective, unless a method says so.
    """

    def __init__(self, function: AugmentedFunction, gtol: float, ctol: float, maxiter: int) -> None:
        self.function = function
        self.course = Course()  # where the minimisation under way has begun
        self._gtol, self._ctol, self._maxiter = gtol, ctol, maxiter

    @property
    def tolerance(self) -> float:
        """That of the minimisation under way."""
        return max(self.course.tolerance, self._gtol)

    def verdict(self, progress: Progress, reason: str, message: str) -> Verdict:
        """The verdict on a minimisation that has ended by a reason, in a word and in words.  Collective."""
        function = self.function
        function.measure()
        if reason == "not finite" and (culprit := function.not_finite()):
            message = f"failed: {culprit}{', also after shorter steps' * (progress.evaluations > 1)}"
        course, distances = self.course, function.distances
        # The first evaluation of each minimisation but the first is known.
        new = progress.evaluations - (course.minimizations > 0)
        course = replace(
            course,
            minimizations=course.minimizations + 1,
            evaluations=course.evaluations + new,
            products=course.products + progress.products,
        )
        if reason in (*_STOPPED, *_FATAL):
            return Verdict(course, reason, message)
        met = max(distances.violation, distances.complementarity) <= self._ctol
        if met and progress.projected_norm <= self._gtol:
            text = f"converged: the constraints are met to ctol={self._ctol:g}, the gradient to gtol={self._gtol:g}"
            if course.minimizations >= _SOON and distances.multiplier > _STILL_GROWS * distances.shift:
                text += _NO_MULTIPLIERS.format(distances.shift, distances.multiplier)
            return Verdict(course, "gradient", text)
        moves = distances.residual < 0.5 * course.lowest or reason == "gradient"
        course = replace(
            course,
            stalled=0 if moves else course.stalled + 1,
            lowest=min(course.lowest, distances.residual),
            before=distances.residual,
            tolerance=course.tolerance * _TIGHTER,
        )
        if course.stalled >= _STALLED:
            hint = "mpishard.check_adjoint tests adjoint" if met else _NO_SOLUTION
            last = f"the last minimisation {message}"
            return Verdict(course, "line search", f"failed: nothing gets smaller any more; {last}; {hint}")
        if distances.residual > max(_SMALLER * self.course.before, self._ctol):
            if course.penalty * _GROW > _LARGEST_PENALTY:
                text = f"failed: the penalty has reached {course.penalty:g}; {_NO_SOLUTION}"
                return Verdict(course, "range", text)
            course = replace(course, penalty=course.penalty * _GROW)
        if course.minimizations >= self._maxiter:
            text = f"stopped: the number of minimisations reached maxiter={self._maxiter}"
            return Verdict(course, "iterations", text)
        return Verdict(course)

    def go_on(self, course: Course) -> None:
        """Correct the multipliers, for the next minimisation of this course."""
        self.course = course
        self.function.begin_again(course.penalty)

    def intermediate(self, course: Course) -> OptimizeResult:
        """The result after a minimisation, for the callback."""
        function = self.function
        return OptimizeResult(
            x=function.unknowns.copy_of(function.unknowns.given),
            constr_violation=function.distances.violation,
            multipliers=function.multipliers.copy(),
            penalty=course.penalty,
            nit=course.minimizations,
            nfev=course.evaluations,
        )

    def result(self, verdict: Verdict, optimality: float, added: float, gradient: Array, more: Any) -> OptimizeResult:
        """The result at the end, with `more` of that of the last minimisation.  Collective.

        `added` is what the method adds to the function; the `gradient` is that of the Lagrangian.
        """
        function, (course, reason, text) = self.function, verdict
        distances = function.distances
        found = f"largest constraint {distances.violation:.3g}, largest element of the gradient {optimality:.3g}"
        return OptimizeResult(
            x=function.unknowns.point(),
            fun=function.value() + added,
            constr=function.constr,
            constr_violation=distances.violation,
            multipliers=function.multipliers,
            complementarity=distances.complementarity,
            lagrangian_grad=gradient,
            optimality=optimality,
            penalty=course.penalty,
            nit=course.minimizations,
            nfev=course.evaluations,
            njev=course.evaluations,
            nhev=course.products,
            status=_STATUS.get(reason, 2),
            success=reason == "gradient",
            message=f"{text} ({found})",
            **{name: more[name] for name in ("at_reference",) if name in more},
        )

    # -- in checkpoints -----------------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """What is saved with the minimisation under way.  Collective."""
        return {MULTIPLIERS: asdict(self.course), NUMBERS: self.function.shifts_of_all()}

    def check(self, facts: Mapping[str, Any]) -> None:
        """Raise ValueError unless these are the facts of such a loop."""
        found, numbers = facts.get(MULTIPLIERS), facts.get(NUMBERS)
        if not (isinstance(found, Mapping) and isinstance(numbers, np.ndarray)):
            raise ValueError(
                "the checkpoint is of a minimisation without constraints; give augmented_lagrangian its own folder, or "
                "resume=False"
            )
        names = {field.name for field in fields(Course)}
        if set(found) != names or not all(type(each) in (int, float) for each in found.values()):
            raise ValueError(f"the checkpoint has damaged numbers of augmented_lagrangian: {brief(dict(found))}")
