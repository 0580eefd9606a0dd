"""The line search for functions that have no gradient everywhere: shorter steps until the value is low enough."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from mpishard.minimizers.line_search.search import LineSearch, LineSearchState, Trial, Verdict, settle

_DECREASE = 1e-4  # the part of what the slope promises that a step must bring
_SHORTEST, _LONGEST = 0.1, 0.5  # the next step as parts of the last one
_LEAST_STEP = 2.0**-40


@dataclass(frozen=True, kw_only=True)
class Backtracking(LineSearch[LineSearchState]):
    """Line search for sufficient decrease alone (Armijo), by the minimum of a parabola through what is known.

    The slope at step 0 is an upper bound of the derivative there; later ones are not looked at.
    """

    state_type: ClassVar[type[LineSearchState]] = LineSearchState

    def _decide(self, state: LineSearchState, trial: Trial) -> tuple[LineSearchState, Verdict]:
        start, rise = state.start, trial.value - state.start.value
        if rise <= _DECREASE * trial.step * start.slope:
            return state, Verdict.ACCEPT
        if trial.step <= _LEAST_STEP * state.most:
            return settle(state, trial, "the steps became too short")
        parabola = -start.slope * trial.step / (2 * (rise - start.slope * trial.step))
        part = min(max(parabola, _SHORTEST), _LONGEST)
        return replace(state, step=part * trial.step), Verdict.EVALUATE
