"""When a run stops: at the end of its method, at a goal, at the request of a rank, or when nothing gets better."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from mpishard.data.evaluation import EarlyStopping
from mpishard.training.objective import Objective


class StopRequest(IntEnum):
    """Why a rank requests to stop; the largest of several requests counts.  Not collective."""

    NONE = 0
    SECONDS = 1
    CALLBACK = 2
    SIGNAL = 3
    FAILED = 4


@dataclass(frozen=True)
class StopCondition:
    """Why a run stops after a step, in the words of `OptimizationResult.stop_reason`; empty if the run continues.

    It follows from what all ranks know alike.

    Parameters
    ----------
    problem : Objective
        Its `steps` and `tolerance` are goals.
    stop_early : EarlyStopping, optional
        Stops when the validation loss no longer falls.
    """

    problem: Objective[Any]
    stop_early: EarlyStopping | None = None

    def reason(
        self, request: int, steps: int, norm: float, *, method_ended: str = "", validated: Iterable[float] = ()
    ) -> str:
        """The reason after `steps` steps, with the last gradient's norm and the largest request of all ranks.

        The end of a method comes first; the last is that the validation losses no longer fall.
        """
        requested = StopRequest(request).name.lower() if request else ""
        return method_ended or requested or self.goal(steps, norm) or self._patience(validated)

    def goal(self, steps: int, norm: float) -> str:
        """The goal that is reached; empty if none is."""
        if self.problem.tolerance is not None and norm <= self.problem.tolerance:
            return "tolerance"
        return "steps" if self.problem.steps is not None and steps >= self.problem.steps else ""

    def described(self, reason: str) -> str:
        """A goal with its value, as the user has given it."""
        return f"{reason}={getattr(self.stop_early if reason == 'patience' else self.problem, reason)}"

    def _patience(self, validated: Iterable[float]) -> str:
        return "patience" if self.stop_early is not None and self.stop_early.stops(validated) else ""
