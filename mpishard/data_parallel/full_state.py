"""The full state of an optimizer as one value, with arrays of the whole model: what every layout can take up."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpishard.layout.run_state import brief
from mpishard.layout.specs import ParameterSpec

OUTER = "outer/"  # before the name of a slot of the outer rule, among the kinds of state


@dataclass(frozen=True)
class FullState:
    """The whole state of an optimizer: `slots` maps a slot's name to its flat array over all tensors in `specs`.

    `loss_scale` has a dynamic loss scale and the number of steps since it last changed.  `outer_steps` counts the steps
    of the rule `outer_rule` along averages of the parameters.  `others` has further flat arrays over all tensors, by
    kind.  `minimizer` has the numbers of a method's minimisation.
    """

    # One field for each thing in the file that `serialization` writes.
    rule: str
    configuration: Mapping[str, Any]
    steps: int
    skipped_steps: int
    specs: tuple[ParameterSpec, ...]
    dtype: np.dtype
    slots: Mapping[str, np.ndarray]
    loss_scale: tuple[float, int] | None = None
    outer_rule: str = ""
    outer_steps: int = 0
    others: Mapping[str, np.ndarray] = field(default_factory=dict)
    minimizer: Mapping[str, Any] = field(default_factory=dict)

    @property
    def facts(self) -> dict[str, Any]:
        """What a `RunState` of this state has among its facts."""
        outer = [kind.removeprefix(OUTER) for kind in self.others if kind.startswith(OUTER)]
        return {
            "rule": self.rule,
            "rule.json": self.configuration,
            "slots.json": list(self.slots),
            "steps": self.steps,
            "skipped_steps": self.skipped_steps,
            "outer_rule": self.outer_rule,
            "outer_slots.json": outer,
            "outer_steps": self.outer_steps,
            **({"minimizer.json": self.minimizer} if self.minimizer else {}),
        }

    def check_parameters(self, specs: Sequence[ParameterSpec], dtype: np.dtype) -> None:
        """Raise ValueError unless the state belongs to parameters of these names, shapes and dtype, in this order."""
        saved, wanted = ([(spec.name, spec.shape) for spec in each] for each in (self.specs, specs))
        if saved != wanted:
            pairs = itertools.zip_longest(saved, wanted, fillvalue=("no tensor", ()))
            (name, shape), (other, other_shape) = next(pair for pair in pairs if pair[0] != pair[1])
            raise ValueError(
                f"the state is of other parameters: it has {len(saved)} tensors and this model {len(wanted)}; "
                f"they differ first at {brief(name)} {shape} against {brief(other)} {other_shape}; "
                "make the model as it was when the state was saved, or begin without its state"
            )
        if self.dtype != dtype:
            raise ValueError(f"the state is {self.dtype}, but the parameters are {dtype}")
