"""When a run stops: it has reached a goal of its problem, or a rank has asked for it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from mpishard.training.objective import Objective


class StopRequest(IntEnum):
    """Why a rank asks to stop; of several the largest counts."""

    NONE = 0
    SECONDS = 1
    CALLBACK = 2
    SIGNAL = 3


@dataclass(frozen=True)
class StopCondition:
    """Why a run stops after a step, as `OptimizationResult.stop_reason` says it; an empty reason: it goes on.

    Parameters
    ----------
    problem : Objective
        Its `steps` and `tolerance` are goals.
    """

    problem: Objective[Any]

    def reason(self, request: int, steps: int, norm: float) -> str:
        """The reason after so many steps and a gradient of this norm, where `request` is the largest of all ranks."""
        return StopRequest(request).name.lower() if request else self.goal(steps, norm)

    def goal(self, steps: int, norm: float) -> str:
        """Which goal is reached."""
        if self.problem.tolerance is not None and norm <= self.problem.tolerance:
            return "tolerance"
        return "steps" if self.problem.steps is not None and steps >= self.problem.steps else ""
