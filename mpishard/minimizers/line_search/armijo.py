"""Backtracking until the value is lower by enough: Armijo's condition, with interpolated steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from mpishard.arguments import number
from mpishard.minimizers.line_search.search import LineSearch, LineSearchState, Trial, Verdict, failed


@dataclass(frozen=True, kw_only=True)
class ArmijoState(LineSearchState):
    """The state of a search, with one more trial."""

    before: Trial = Trial(0.0, 0.0, 0.0)  # the finite trial before the last one; step 0 without one

    @property
    def anchor(self) -> float:
        return 0.0


@dataclass(frozen=True, kw_only=True)
class Armijo(LineSearch[ArmijoState]):
    """Line search that shortens the first step until ``f(a) <= f(0) + ftol a f'(0)``.

    The next step is where a quadratic, later a cubic, through the values so far has its minimum.  It uses no slope but
    the one at step 0, and never lengthens a step.

    Parameters
    ----------
    maxls : int
        The most evaluations, without the one at step 0.
    ftol : float
        Of sufficient decrease; below 1/2.
    shortest, longest : float
        The next step is between these parts of the last one.
    stpmin : float
        The shortest step.

    Raises
    ------
    TypeError, ValueError
        If an option is invalid.

    References
    ----------
    L. Armijo: Minimization of functions having Lipschitz continuous first partial derivatives.  Pacific Journal of
    Mathematics 16, 1-3 (1966).  J. E. Dennis and R. B. Schnabel: Numerical Methods for Unconstrained Optimization and
    Nonlinear Equations (1983), section 6.3.2.
    """

    ftol: float = 1e-4
    shortest: float = 0.1
    longest: float = 0.5
    stpmin: float = 0.0

    state_type: ClassVar[type[LineSearchState]] = ArmijoState

    def __post_init__(self) -> None:
        super().__post_init__()
        checks = {
            "ftol": number("Armijo: ftol", self.ftol, above=0, below=0.5),
            "shortest": number("Armijo: shortest", self.shortest, above=0, below=1),
            "longest": number("Armijo: longest", self.longest, above=0, below=1),
            "stpmin": number("Armijo: stpmin", self.stpmin, least=0),
        }
        for name, value in checks.items():
            object.__setattr__(self, name, value)
        if self.shortest > self.longest:
            raise ValueError(f"Armijo: shortest={self.shortest:g} must be at most longest={self.longest:g}")

    def _first(self, state: ArmijoState) -> ArmijoState:
        return replace(state, before=state.start)

    def _decide(self, state: ArmijoState, trial: Trial) -> tuple[ArmijoState, Verdict]:
        decrease = self.ftol * trial.step * state.start.slope
        if trial.value <= state.start.value + decrease and trial.value < state.start.value:  # also where it rounds to 0
            return state, Verdict.ACCEPT
        try:
            step = _quadratic(state.start, trial) if state.before.step == 0 else _cubic(state, trial)
        except ArithmeticError:
            step = math.nan
        least, most = self.shortest * trial.step, self.longest * trial.step
        step = min(max(step, least), most) if math.isfinite(step) else most
        if step < self.stpmin or step == 0:
            return failed(state, f"the next step is {step:g}, and the shortest {self.stpmin:g} (stpmin)")
        return replace(state, step=step, before=trial), Verdict.EVALUATE


def _quadratic(start: Trial, trial: Trial) -> float:
    """The minimum of the quadratic with value and slope at the start and this value."""
    rise = (trial.value - start.value) / trial.step - start.slope
    return -start.slope * trial.step / (2 * rise)


def _cubic(state: ArmijoState, trial: Trial) -> float:
    """The minimum of the cubic with value and slope at the start and the last two values."""
    one, other, slope = trial.step, state.before.step, state.start.slope
    # The rise of the value above the line at the start, over the square of the step: b + a step.
    rise_one = ((trial.value - state.start.value) / one - slope) / one
    rise_other = ((state.before.value - state.start.value) / other - slope) / other
    a = (rise_one - rise_other) / (one - other)
    b = rise_one - a * one
    root = b * b - 3 * a * slope
    if root < 0:
        return math.nan
    # The form without cancellation; it is that of the quadratic where a is 0.
    return (-b + math.sqrt(root)) / (3 * a) if b < 0 else -slope / (b + math.sqrt(root))
