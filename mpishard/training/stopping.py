"""When a run stops: at a goal of its problem, or at the request of a rank."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

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

    Parameters
    ----------
    problem : Objective
        Its `steps` and `tolerance` are goals.
    """

    problem: Objective[Any]

    def reason(self, request: int, steps: int, norm: float) -> str:
        """The reason after `steps` steps, with the last gradient's norm and the largest request of all ranks."""
        return StopRequest(request).name.lower() if request else self.goal(steps, norm)

    def goal(self, steps: int, norm: float) -> str:
        """The goal that is reached; empty if none is."""
        if self.problem.tolerance is not None and norm <= self.problem.tolerance:
            return "tolerance"
        return "steps" if self.problem.steps is not None and steps >= self.problem.steps else ""
