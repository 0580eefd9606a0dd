"""The line search of Hager and Zhang (2005), whose conditions can be met in spite of rounding errors in the value."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from mpishard.arguments import number
from mpishard.minimizers.line_search.search import LineSearch, LineSearchState, Trial, Verdict, settle

NEAR_WALL = 0.1  # a step is accepted if the function ends within this part of the way beyond it


@dataclass(frozen=True, kw_only=True)
class HagerZhangState(LineSearchState):
    """The state of a search, with its interval.

    At `low` the function goes down, and its value is not above that at the start by more than its error. At `high` it
    does not go down; while `phase` is ``"halve"`` its value may be too high instead.
    """

    low: Trial = Trial(0.0, 0.0, 0.0)
    high: Trial = Trial(math.inf, math.inf, math.inf)
    before_low: Trial = Trial(0.0, 0.0, 0.0)  # the interval at the last double secant step
    before_high: Trial = Trial(math.inf, math.inf, math.inf)
    phase: str = "bracket"  # of the next trial: "bracket", "halve", "first secant", "second secant" or "bisect"
    checks_width: bool = False  # halving is part of a double secant step, whose progress is checked when it ends

    @property
    def anchor(self) -> float:
        return self.low.step


@dataclass(frozen=True, kw_only=True)
class HagerZhang(LineSearch[HagerZhangState]):
    """Line search for the Wolfe conditions, or approximate ones that only need slopes where values are too close.

    It accepts a step a with ``f(a) <= f(0) + delta a f'(0)`` and ``f'(a) >= sigma f'(0)``, or with
    ``(2 delta - 1) f'(0) >= f'(a) >= sigma f'(0)`` and ``f(a) <= f(0) + epsilon |f(0)|``, or the longest step if the
    function still goes down there.

    Parameters
    ----------
    maxls : int
        The most evaluations, without the one at step 0.
    delta : float
        Of sufficient decrease; below 1/2.
    sigma : float
        Of the slope; at least `delta`, and below 1.
    epsilon : float
        Relative error of the value.
    theta : float
        Where an interval with a high value is divided.
    gamma : float
        A double secant step must reduce the interval to this part of it, or it is bisected.
    rho : float
        The factor by which the step grows until the minimum is bracketed.

    Raises
    ------
    TypeError, ValueError
        If an option is invalid.

    References
    ----------
    W. W. Hager and H. Zhang: A new conjugate gradient method with guaranteed descent and an efficient line search.
    SIAM Journal on Optimization 16, 170-192 (2005), section 4.  The names of options and steps are theirs.
    """

    maxls: int = 50
    delta: float = 0.1
    sigma: float = 0.9
    epsilon: float = 1e-6
    theta: float = 0.5
    gamma: float = 0.66
    rho: float = 5.0

    state_type: ClassVar[type[LineSearchState]] = HagerZhangState

    def __post_init__(self) -> None:
        super().__post_init__()
        checks = {
            "delta": number("HagerZhang: delta", self.delta, above=0, below=0.5),
            "sigma": number("HagerZhang: sigma", self.sigma, above=0, below=1),
            "epsilon": number("HagerZhang: epsilon", self.epsilon, least=0),
            "theta": number("HagerZhang: theta", self.theta, above=0, below=1),
            "gamma": number("HagerZhang: gamma", self.gamma, above=0, below=1),
            "rho": number("HagerZhang: rho", self.rho, above=1),
        }
        for name, value in checks.items():
            object.__setattr__(self, name, value)
        if self.delta > self.sigma:
            raise ValueError(f"HagerZhang: delta={self.delta:g} must be at most sigma={self.sigma:g}")

    def _first(self, state: HagerZhangState) -> HagerZhangState:
        return replace(state, low=state.start, before_low=state.start)

    def _decide(self, state: HagerZhangState, trial: Trial) -> tuple[HagerZhangState, Verdict]:
        if self._accepts(state, trial):
            return state, Verdict.ACCEPT
        # An upper end beyond a step without a finite value brackets nothing.
        phase = "bracket" if state.wall <= state.high.step else state.phase
        if phase == "bracket":
            return self._bracket(state, trial)
        if trial.slope < 0 and self._too_high(state, trial) and phase != "halve":
            state = replace(state, high=trial, checks_width=phase != "bisect")
            return self._halve(state, trial)
        # Steps U1 to U3.  While halving, a value that is too high takes the upper end as well.
        below = trial.slope < 0 and not self._too_high(state, trial)
        state = replace(state, low=trial) if below else replace(state, high=trial)
        if phase == "halve" and trial.slope < 0:
            return self._halve(state, trial)
        if phase == "first secant":
            # Steps S2 and S3: a secant of the end that has moved.
            ends = (state.before_low, state.low) if below else (state.before_high, state.high)
            step = secant(*ends)
            if state.low.step < step < state.high.step:
                return replace(state, step=step, phase="second secant"), Verdict.EVALUATE
        if phase == "bisect" or (phase == "halve" and not state.checks_width):
            return self._double_secant(state, trial)
        return self._check_width(state, trial)

    def _accepts(self, state: HagerZhangState, trial: Trial) -> bool:
        """Return True if the trial meets the Wolfe conditions, T1, or the approximate ones, T2."""
        start = state.start
        if trial.slope < self.sigma * start.slope:
            return trial.step == state.most and trial.value <= start.value + self.delta * trial.step * start.slope
        if trial.value <= start.value + self.delta * trial.step * start.slope:
            return True
        return trial.slope <= (2 * self.delta - 1) * start.slope and not self._too_high(state, trial)

    def _too_high(self, state: HagerZhangState, trial: Trial) -> bool:
        """Return True if the value is above that at the start by more than its error."""
        return trial.value > state.start.value + self.epsilon * abs(state.start.value)

    def _bracket(self, state: HagerZhangState, trial: Trial) -> tuple[HagerZhangState, Verdict]:
        """Steps B1 to B3: continue until the function no longer goes down, or is too high."""
        if trial.slope >= 0:
            return self._double_secant(replace(state, high=trial), trial)
        if self._too_high(state, trial):
            return self._halve(replace(state, high=trial, checks_width=False), trial)
        if trial.step == state.most:
            return settle(state, trial, f"the longest step is {state.most:g}")
        near = state.wall - trial.step <= NEAR_WALL * state.wall
        if math.isfinite(state.wall) and near and trial.value < state.start.value:
            return state, Verdict.ACCEPT  # it still goes down, but the function ends there
        step = min(self.rho * trial.step, state.most)
        if step >= state.wall:
            step = trial.step + 0.5 * (state.wall - trial.step)
        if not trial.step < step < math.inf:
            return settle(state, trial, f"the next step is {step:g}")
        return replace(state, low=trial, step=step, phase="bracket"), Verdict.EVALUATE

    def _halve(self, state: HagerZhangState, trial: Trial) -> tuple[HagerZhangState, Verdict]:
        """Step U3: divide an interval whose upper end goes down, but is too high."""
        step = (1 - self.theta) * state.low.step + self.theta * state.high.step
        return self._inside(replace(state, step=step, phase="halve"), trial)

    def _double_secant(self, state: HagerZhangState, trial: Trial) -> tuple[HagerZhangState, Verdict]:
        """Step S1 of the next round."""
        step = secant(state.low, state.high)
        state = replace(state, before_low=state.low, before_high=state.high)
        if not state.low.step < step < state.high.step:
            return self._bisect(state, trial)
        return replace(state, step=step, phase="first secant"), Verdict.EVALUATE

    def _check_width(self, state: HagerZhangState, trial: Trial) -> tuple[HagerZhangState, Verdict]:
        """Step L2: bisect if the double secant step has not reduced the interval enough."""
        width = state.high.step - state.low.step
        if width > self.gamma * (state.before_high.step - state.before_low.step):
            return self._bisect(state, trial)
        return self._double_secant(state, trial)

    def _bisect(self, state: HagerZhangState, trial: Trial) -> tuple[HagerZhangState, Verdict]:
        step = state.low.step + 0.5 * (state.high.step - state.low.step)
        return self._inside(replace(state, step=step, phase="bisect"), trial)

    def _inside(self, state: HagerZhangState, trial: Trial) -> tuple[HagerZhangState, Verdict]:
        """Continue if there is a step between both ends."""
        if state.low.step < state.step < state.high.step:
            return state, Verdict.EVALUATE
        return settle(state, trial, f"there is no step between {state.low.step:g} and {state.high.step:g}")


def secant(one: Trial, other: Trial) -> float:
    """The step at which the line through both slopes is 0; NaN if they are equal."""
    difference = one.slope - other.slope
    return one.step + (other.step - one.step) * (one.slope / difference) if difference else math.nan
