"""The full state of an optimizer as one value, with arrays of the whole model: what every layout can take up."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from mpishard.comm.axis import Axis
from mpishard.layout.boxes import Box, box_size
from mpishard.layout.run_state import brief
from mpishard.layout.tensors import ParameterSpec, cut_holding
from mpishard.parameters.flat import FlatParameters

Array = Any


OUTER = "outer/"  # before the name of a slot of the outer rule, among the kinds of state


@dataclass(frozen=True)
class FullState:
    """The whole state of an optimizer: `slots` maps a slot's name to its flat array over all tensors in `specs`."""

    # One field for each thing in the file that `serialization` writes.
    rule: str
    configuration: Mapping[str, Any]
    steps: int
    skipped_steps: int
    specs: tuple[ParameterSpec, ...]
    dtype: np.dtype
    slots: Mapping[str, np.ndarray]
    loss_scale: tuple[float, int] | None = None  # a dynamic loss scale and the number of steps since it last changed
    outer_rule: str = ""
    outer_steps: int = 0  # steps of the rule `outer_rule` along averages of the parameters
    others: Mapping[str, np.ndarray] = field(default_factory=dict)  # further flat arrays over all tensors, by kind
    minimizer: Mapping[str, Any] = field(default_factory=dict)  # the numbers of a method's minimisation

    @property
    def facts(self) -> dict[str, Any]:
        """The facts of this state for a `RunState`."""
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


# Whole tensors from the parts on the ranks of a mesh, and back: flat arrays in the order of the specs.

Range = tuple[int, int]


def gather_whole(world: Axis, parameters: FlatParameters, ranges: Sequence[Range], values: np.ndarray) -> np.ndarray:
    """All elements of the model, whole, end to end in the order of `specs`, on every rank. Collective over `world`.

    `values` are those of `ranges`, end to end: ascending ranges of this rank's flat order; the ranges of all ranks of a
    data axis contain every element once. The bits are the same on every rank.
    """
    specs = parameters.specs
    number = {spec.name: index for index, spec in enumerate(specs)}
    pieces = [
        piece for piece in cut_holding(parameters.pieces, ranges) if parameters.place.counts(specs[number[piece.name]])
    ]
    own = np.concatenate([values[:0], *(values[piece.start : piece.start + piece.size] for piece in pieces)])
    layouts = world.allgather_object(tuple((number[piece.name], piece.box) for piece in pieces))
    counts = [sum(box_size(box) for _, box in boxes) for boxes in layouts]
    joined = world.all_gather(np.empty(sum(counts), values.dtype), own, counts, label="state")
    whole = np.empty(sum(spec.size for spec in specs), values.dtype)
    tensors = _tensors(whole, specs)
    offset = 0
    for boxes in layouts:
        for tensor, box in boxes:
            target = tensors[tensor][_slices(box)]
            target[...] = joined[offset : offset + box_size(box)].reshape(target.shape)
            offset += box_size(box)
    return whole


def cut_whole(whole: np.ndarray, parameters: FlatParameters, ranges: Sequence[Range]) -> np.ndarray:
    """The values of `ranges` of this rank's flat order, end to end, from a flat array of the whole model."""
    tensors = dict(zip((spec.name for spec in parameters.specs), _tensors(whole, parameters.specs), strict=True))
    pieces = cut_holding(parameters.pieces, ranges)
    return np.concatenate([whole[:0], *(tensors[piece.name][_slices(piece.box)].reshape(-1) for piece in pieces)])


def _tensors(whole: np.ndarray, specs: Sequence[ParameterSpec]) -> list[np.ndarray]:
    starts = accumulate((spec.size for spec in specs), initial=0)
    return [whole[start : start + spec.size].reshape(spec.shape) for spec, start in zip(specs, starts, strict=False)]


def _slices(box: Box) -> tuple[Any, ...]:
    return (*(slice(start, stop) for start, stop in box), ...)
