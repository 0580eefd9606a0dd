"""How far a step's gradients are, and which phase may follow which."""

from __future__ import annotations

from enum import Enum


class GradientPhase(Enum):
    """How far a step's gradients are."""

    ACCUMULATING = "backward passes add to the gradients, and another may follow"
    REDUCING = "the last pass has completed buckets, and their sums over ranks are under way"
    REDUCED = "all sums are complete; nothing can be added until the next step"


# From which phase a step may get to which other one.
TRANSITIONS: tuple[tuple[GradientPhase, GradientPhase], ...] = (
    (GradientPhase.ACCUMULATING, GradientPhase.REDUCING),  # the last pass completes a bucket, or ends
    (GradientPhase.REDUCING, GradientPhase.REDUCED),  # `finalize`
    (GradientPhase.REDUCING, GradientPhase.ACCUMULATING),  # `reset`
    (GradientPhase.REDUCED, GradientPhase.ACCUMULATING),  # `reset`
)
