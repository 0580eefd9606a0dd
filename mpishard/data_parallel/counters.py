"""The numbers in an optimizer's state: steps taken and skipped, the norm of the gradient, and the loss scale."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mpishard.layout.run_state import finite_fact, whole_fact
from mpishard.optim.loss_scale import LossScale


class Counters:
    """The numbers of one optimizer, which a run needs to continue.

    Parameters
    ----------
    loss_scale : float, "dynamic" or None
        The setting of the `LossScale`.

    Attributes
    ----------
    steps : int
        Updates taken.
    skipped_steps : int
        Steps left out because of NaN or infinite gradients.
    gradient_norm : float
        Global 2-norm of the averaged gradient of the last step, before clipping; NaN where it was not measured.  Of a
        method the largest element of the projected gradient.
    scaling : LossScale
        Chooses the loss scale.
    """

    def __init__(self, loss_scale: float | str | None) -> None:
        self.steps: int = 0
        self.skipped_steps: int = 0
        self.gradient_norm: float = math.nan
        self.scaling: LossScale = LossScale(loss_scale)

    @property
    def clock(self) -> int:
        """Steps so far, both taken and skipped."""
        return self.steps + self.skipped_steps

    @property
    def facts(self) -> dict[str, Any]:
        """The numbers as facts of a `RunState`; `restore` reads them."""
        facts = {
            "step": self.clock,
            "steps": self.steps,
            "skipped_steps": self.skipped_steps,
            "loss_scale": self.scaling.value,
        }
        if self.scaling.dynamic:
            facts["good_steps"] = self.scaling.good_steps
        if not math.isnan(self.gradient_norm):
            facts["gradient_norm"] = self.gradient_norm
        return facts

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Continue from `facts`."""
        self.steps, self.skipped_steps = int(facts["steps"]), int(facts["skipped_steps"])
        self.gradient_norm = float(facts.get("gradient_norm", math.nan))
        if "good_steps" in facts:
            self.scaling.restore((float(facts["loss_scale"]), int(facts["good_steps"])))


def check_numbers(facts: Mapping[str, Any]) -> None:
    """Raise ValueError unless the numbers among these facts are valid for `Counters.restore`."""
    for name in ("steps", "skipped_steps"):
        whole_fact(facts, name)
    for name in ("good_steps", "outer_steps"):
        whole_fact(facts, name, 0)
    if "good_steps" in facts or "loss_scale" in facts:
        finite_fact(facts, "loss_scale")
    finite_fact(facts, "gradient_norm", 0.0, above=-1.0)
