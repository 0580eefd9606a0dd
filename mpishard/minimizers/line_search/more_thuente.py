"""The line search of Moré and Thuente (1994), for steps of sufficient decrease and small slope (strong Wolfe)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from mpishard.arguments import number
from mpishard.minimizers.line_search.search import LineSearch, LineSearchState, Trial, Verdict, settle

# Constants of the authors' own code, dcsrch of MINPACK-2.
_EXTRAPOLATION = (1.1, 4.0)  # the next step is beyond the last one by its progress times a factor in this range
_SHRINK = 0.66  # two trials must reduce the bracket to this part of it, or it is bisected


@dataclass(frozen=True, kw_only=True)
class MoreThuenteState(LineSearchState):
    """The state of a search, with its interval: `low` has the lowest value.

    In the first stage it is that of the auxiliary function.
    """

    low: Trial = Trial(0.0, 0.0, 0.0)
    high: Trial = Trial(0.0, 0.0, 0.0)
    least_trial: float = 0.0  # the next step is between these
    most_trial: float = math.inf
    width: float = math.inf  # of the interval after the last trial, and after the one before
    width_before: float = math.inf
    bracketed: bool = False  # a minimum is known to be between `low` and `high`
    second_stage: bool = False  # a step with sufficient decrease and a slope that is not negative was found

    @property
    def anchor(self) -> float:
        return self.low.step


@dataclass(frozen=True, kw_only=True)
class MoreThuente(LineSearch[MoreThuenteState]):
    """Line search for the strong Wolfe conditions, by an interval that is shown to hold such steps.

    It accepts a step a with ``f(a) <= f(0) + ftol a f'(0)`` and ``|f'(a)| <= gtol |f'(0)|``, or the longest step if
    the function still goes down there.  It tries the same steps as the authors' code, dcsrch of MINPACK-2, but does not
    ask again for a step that was just evaluated when that code ends with a warning.

    Parameters
    ----------
    maxls : int
        The most evaluations, without the one at step 0.
    ftol : float
        Of sufficient decrease.
    gtol : float
        Of the slope; at least `ftol`.
    xtol : float
        It ends when the interval is at most this times its upper end.
    stpmin : float
        The shortest step.

    Raises
    ------
    TypeError, ValueError
        If an option is invalid.

    References
    ----------
    J. J. Moré and D. J. Thuente: Line search algorithms with guaranteed sufficient decrease.  ACM Transactions on
    Mathematical Software 20, 286-307 (1994).
    """

    ftol: float = 1e-3
    gtol: float = 0.9
    xtol: float = 0.1
    stpmin: float = 0.0

    state_type: ClassVar[type[LineSearchState]] = MoreThuenteState

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("ftol", "gtol", "xtol", "stpmin"):
            object.__setattr__(self, name, number(f"MoreThuente: {name}", getattr(self, name), least=0))
        if self.ftol > self.gtol:
            raise ValueError(f"MoreThuente: ftol={self.ftol:g} must be at most gtol={self.gtol:g}")

    def _first(self, state: MoreThuenteState) -> MoreThuenteState:
        step = min(max(state.step, self.stpmin), state.most)
        width = state.most - self.stpmin
        return replace(
            state,
            step=step,
            low=state.start,
            high=state.start,
            most_trial=step + _EXTRAPOLATION[1] * step,
            width=width,
            width_before=2 * width,
        )

    def _decide(self, state: MoreThuenteState, trial: Trial) -> tuple[MoreThuenteState, Verdict]:
        decrease_slope = self.ftol * state.start.slope
        bound = state.start.value + trial.step * decrease_slope
        enough = trial.value <= bound
        if enough and abs(trial.slope) <= self.gtol * -state.start.slope:
            return state, Verdict.ACCEPT
        if enough and trial.step == state.most and trial.slope <= decrease_slope:
            return state, Verdict.ACCEPT
        if state.bracketed and trial.step in (state.low.step, state.high.step):
            return settle(state, trial, f"no step between {state.least_trial:g} and {state.most_trial:g} is better")
        if trial.step == self.stpmin:
            return settle(state, trial, f"the shortest step is {self.stpmin:g} (stpmin)")
        if enough and math.isfinite(state.wall) and state.wall - trial.step <= self.xtol * state.wall:
            return state, Verdict.ACCEPT  # it still goes down, but the function ends there
        state = replace(state, second_stage=state.second_stage or (enough and trial.slope >= 0))
        state = self._narrow(state, trial, decrease_slope, enough)
        if state.step != trial.step and state.step > 0:
            return state, Verdict.EVALUATE
        return settle(state, trial, "rounding errors or xtol end the search at the step with the lowest value")

    def _narrow(self, state: MoreThuenteState, trial: Trial, decrease_slope: float, enough: bool) -> MoreThuenteState:
        """The next interval, and the next step in or beyond it."""
        # In the first stage the interval is chosen by the auxiliary function, f less its line of sufficient decrease,
        # as long as the value is lower but not by enough.
        tilt = decrease_slope if not state.second_stage and trial.value <= state.low.value and not enough else 0.0
        low, high, new = (_tilted(of, tilt) for of in (state.low, state.high, trial))
        step = next_step(low, high, new, state.bracketed, state.least_trial, state.most_trial)
        bracketed = state.bracketed
        if new.value > low.value:
            ends, bracketed = (state.low, trial), True
        elif _opposite(new, low):
            ends, bracketed = (trial, state.low), True
        else:
            ends = (trial, state.high)
        state = replace(state, low=ends[0], high=ends[1], bracketed=bracketed)
        return self._safeguarded(state, trial, step)

    def _safeguarded(self, state: MoreThuenteState, trial: Trial, step: float) -> MoreThuenteState:
        """The state with this step, kept inside of the interval and of what is allowed."""
        low, high = state.low.step, state.high.step
        least, most = min(low, high), max(low, high)
        if state.bracketed:
            if abs(high - low) >= _SHRINK * state.width_before or not math.isfinite(step):
                step = low + 0.5 * (high - low)
            state = replace(state, width_before=state.width, width=abs(high - low))
        else:
            if not math.isfinite(step):
                step = state.most_trial
            least, most = (step + times * (step - low) for times in _EXTRAPOLATION)
        step = min(max(step, self.stpmin), state.most)
        if step >= state.wall:
            step = trial.step + 0.5 * (state.wall - trial.step)
        if state.bracketed and (step <= least or step >= most or most - least <= self.xtol * most):
            # A value so large that the interpolation rounds to step 0 says nothing about the steps in between.
            step = low if low > 0 or most - least <= self.xtol * most else 0.5 * most
        return replace(state, step=step, least_trial=least, most_trial=most)


def _opposite(one: Trial, other: Trial) -> bool:
    """Return True if one slope goes up and the other down."""
    return one.slope < 0 < other.slope or other.slope < 0 < one.slope


def _tilted(trial: Trial, slope: float) -> Trial:
    """The trial of the function less a line of this slope."""
    return Trial(trial.step, trial.value - trial.step * slope, trial.slope - slope) if slope else trial


def next_step(low: Trial, high: Trial, new: Trial, bracketed: bool, least: float, most: float) -> float:
    """The next step by cubic and quadratic interpolation: dcstep of MINPACK-2, section 4 of the paper.

    `low` has the lowest value so far, and `new`, the last trial, is in its direction of descent, between `low` and
    `high` if `bracketed`; else the step is chosen between `least` and `most`. NaN if the numbers are too large.
    """
    try:
        if new.value > low.value:
            return _higher(low, new)
        if _opposite(new, low):
            return _turned(low, new)
        if abs(new.slope) < abs(low.slope):
            return _flatter(low, high, new, bracketed, least, most)
        if bracketed:
            return _towards(new, high, _cubic(new, high)[0])
    except ArithmeticError:
        return math.nan
    return most if new.step > low.step else least


def _higher(low: Trial, new: Trial) -> float:
    """Case 1: a higher value.  The cubic step if it is closer to the lowest, else the mean with the quadratic step."""
    cubic = _towards(low, new, _cubic(low, new)[0])
    span = new.step - low.step
    quadratic = low.step + ((low.slope / ((low.value - new.value) / span + low.slope)) / 2) * span
    return cubic if abs(cubic - low.step) <= abs(quadratic - low.step) else cubic + (quadratic - cubic) / 2


def _turned(low: Trial, new: Trial) -> float:
    """Case 2: a lower value, and a slope of the other sign.  The cubic or the secant step, the farther from the new."""
    cubic, secant = _towards(new, low, _cubic(new, low)[0]), _secant(low, new)
    return cubic if abs(cubic - new.step) > abs(secant - new.step) else secant


def _flatter(low: Trial, high: Trial, new: Trial, bracketed: bool, least: float, most: float) -> float:
    """Case 3: a lower value, and a smaller slope of the same sign."""
    ratio, gamma = _cubic(new, low)
    # The cubic step counts if the cubic rises to infinity along the step and has its minimum beyond it.
    if ratio < 0 and gamma != 0:
        cubic = _towards(new, low, ratio)
    else:
        cubic = most if new.step > low.step else least
    secant = _secant(low, new)
    closer, farther = (cubic, secant) if abs(cubic - new.step) < abs(secant - new.step) else (secant, cubic)
    if not bracketed:
        return min(max(farther, least), most)
    limit = new.step + _SHRINK * (high.step - new.step)
    return min(limit, closer) if new.step > low.step else max(limit, closer)


def _cubic(start: Trial, end: Trial) -> tuple[float, float]:
    """The minimum of the cubic with values and slopes of both, as a part of the way; and its root term gamma."""
    span = end.step - start.step
    theta = 3 * (start.value - end.value) / span + start.slope + end.slope
    scale = max(abs(theta), abs(start.slope), abs(end.slope))
    root = (theta / scale) * (theta / scale) - (start.slope / scale) * (end.slope / scale)
    gamma = math.copysign(scale * math.sqrt(max(0.0, root)), span)
    return ((gamma - start.slope) + theta) / (((gamma - start.slope) + gamma) + end.slope), gamma


def _towards(start: Trial, end: Trial, part: float) -> float:
    """The step that is this part of the way from one trial to the other."""
    return start.step + part * (end.step - start.step)


def _secant(low: Trial, new: Trial) -> float:
    """The step at which the line through both slopes is 0."""
    return new.step + (new.slope / (new.slope - low.slope)) * (low.step - new.step)
