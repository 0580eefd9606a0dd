"""The state of the optimizer of a module as a dictionary: as PyTorch's optimizers have it, or in a form of mpishard."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mpishard.comm.agreement import agree_on_settings, text_of
from mpishard.comm.errors import raised_on_all
from mpishard.data_parallel.full_state import FullState, encode
from mpishard.data_parallel.sharded_optimizer import ShardedOptimizer
from mpishard.layout.tensors import ParameterSpec, tensors_of
from mpishard.optim import Muon, Rule
from mpishard.torch.buffers import as_fact
from mpishard.torch.live_groups import LiveGroups, ParameterGroups, saved_values
from mpishard.torch.memory import as_numbers, as_reals
from mpishard.torch.module import ModuleState
from mpishard.torch.own_steps import WholeSteps
from mpishard.torch.torch_rule import TorchRule
from mpishard.torch.torch_steps import STEP_KEY, pack, unpack


@dataclass(frozen=True)
class StateDicts:
    """Makes and takes the dictionaries of `ModuleOptimizer`, in the form of mpishard or of an optimizer of PyTorch.

    Collective over the mesh, but for `check`.
    """

    module: ModuleState
    optimizer: ShardedOptimizer
    groups: ParameterGroups

    def make(self, format: str) -> dict[str, Any]:
        """The state as a dictionary."""
        whole_steps = self._whole_steps
        if format == "torch":
            if whole_steps is not None:
                return whole_steps.to_torch()
            converter = self._converter()
            self.optimizer.state.consolidate()
            return converter.to_torch(self.optimizer.state.gather())
        image = torch.frombuffer(bytearray(self.optimizer.serialize()), dtype=torch.uint8)
        state_dict: dict[str, Any] = {"mpishard": image}
        if whole_steps is not None:
            state_dict["rest"] = copy.deepcopy(whole_steps.rest)
        if masters := self.module.masters:
            state_dict["masters"] = masters
        return state_dict

    def check(self, state_dict: Mapping[str, Any]) -> None:
        """Raise ValueError unless this is a state, in the form of mpishard of one of this module."""
        if is_of_torch(state_dict):
            return
        if "mpishard" not in state_dict:
            raise ValueError(
                f"this has {', '.join(map(repr, state_dict)) or 'nothing'}; give what state_dict() of the "
                "optimizer of as_distributed returned, which has 'mpishard', or that of an optimizer of PyTorch"
            )
        there = {name: tuple(each.shape) for name, each in state_dict.get("masters", {}).items()}
        here = self.module.master_shapes
        if there and there != here:
            name = next(name for name in [*there, *here] if there.get(name) != here.get(name))
            raise ValueError(
                f"the saved state is of another module: the master of {name!r} has the shape "
                f"{there.get(name, 'of none')} there, and {here.get(name, 'of none')} here; load_checkpoint() of a "
                "save_checkpoint() reads parameters of any dtype"
            )

    def load(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state that has passed `check`."""
        if is_of_torch(state_dict):
            self._load_of_torch(state_dict)
            return
        whole_steps, rest = self._whole_steps, state_dict.get("rest")
        self.optimizer.deserialize(state_dict["mpishard"].cpu().numpy().tobytes())
        if whole_steps is not None:
            with raised_on_all(self.optimizer.mesh.world):
                whole_steps.check_rest(rest, self.optimizer.steps)
            whole_steps.rest = copy.deepcopy(rest or {})
        self.module.masters = state_dict.get("masters", {})

    def _load_of_torch(self, state_dict: Mapping[str, Any]) -> None:
        world, whole_steps, parameters = self.optimizer.mesh.world, self._whole_steps, self.module.parameters
        agree_on_settings(world, _settings_of(state_dict), what="state of the optimizer")
        with raised_on_all(world):
            if whole_steps is not None:
                whole_steps.from_torch(state_dict)
                counters = self.optimizer.state.counters
                counters.steps, counters.skipped_steps = _steps_of(state_dict), 0
                return
            converter = self._converter()
            image = encode(converter.from_torch(state_dict, parameters.specs, parameters.dtype))
        self.optimizer.deserialize(image)

    @property
    def _whole_steps(self) -> WholeSteps | None:
        own_steps = self.optimizer.rule.own_steps if isinstance(self.optimizer.rule, Rule) else None
        return own_steps if isinstance(own_steps, WholeSteps) else None

    def _converter(self) -> _Converter:
        stages, cuts = self.module.stages, self.module.cuts
        wholes = {} if stages is None else stages.wholes
        wholes |= {} if cuts is None else cuts.wholes
        return _Converter(self.optimizer.rule, self.groups, self.module.all_trained, wholes)


def is_of_torch(state_dict: Mapping[str, Any]) -> bool:
    """Return True if a state is in the form of an optimizer of PyTorch."""
    return {"state", "param_groups"} <= state_dict.keys()


class _Converter:
    """Converts the full state of an optimizer for a module to a ``state_dict`` of PyTorch, and back.

    `groups` are those of its rule, and `tensors` the parameters by name; `wholes` stand for those that ranks have cut,
    and have their whole shape. Raises ValueError if PyTorch has no such optimizer.
    """

    def __init__(
        self, rule: Any, groups: ParameterGroups, tensors: Mapping[str, Any], wholes: Mapping[str, Any]
    ) -> None:
        name = type(rule).__name__
        if not isinstance(rule, TorchRule) and (not hasattr(torch.optim, name) or isinstance(rule, Muon)):
            raise ValueError(
                f"the state of {name} has no form of PyTorch, which has no such optimizer for all parameters; use "
                'state_dict(), with format="mpishard"'
            )
        self._rule: Rule = rule
        self._groups = groups
        # By name, of the whole shape and without values, which ranks may have divided.
        self._tensors = {
            name: wholes.get(name, torch.empty(p.shape, dtype=p.dtype, device="meta")) for name, p in tensors.items()
        }
        name_of = {id(p): name for name, p in tensors.items()}
        # In the order of PyTorch's numbers; None for a frozen parameter, which has no state.
        self._names = [name_of.get(id(p)) for group in groups.groups for p in group["params"]]

    def to_torch(self, full: FullState) -> dict[str, Any]:
        """What ``state_dict`` of the optimizer of PyTorch would return after these steps."""
        tensors = [tensors_of(full.slots[slot], full.specs) for slot in self._rule.slots if full.steps]
        state: dict[int, dict[str, Any]] = {}
        for number, name in enumerate(self._names):
            if name is None or not full.steps:
                continue
            parts = [torch.from_numpy(each[name].flatten()) for each in tensors]
            state[number] = self._state_of(name, parts, full.steps)
        numbers = iter(range(len(self._names)))
        groups = [
            {
                **{key: copy.copy(value) for key, value in group.items() if key != "params"},
                "params": [next(numbers) for _ in group["params"]],
            }
            for group in self._groups.groups
        ]
        return {"state": state, "param_groups": groups}

    def from_torch(self, state_dict: Mapping[str, Any], specs: Sequence[ParameterSpec], dtype: np.dtype) -> FullState:
        """The full state that an optimizer of PyTorch has saved.

        Raises ValueError if it is of other parameters, of another kind of optimizer, or not all have taken equally many
        steps.
        """
        saved, groups = state_dict["state"], state_dict["param_groups"]
        sizes, own = ([len(group["params"]) for group in each] for each in (groups, self._groups.groups))
        if sizes != own:
            raise ValueError(
                f"the saved state of PyTorch has groups of {sizes} parameters, and this optimizer of {own}; make it "
                "with the same groups, of the same parameters in the same order"
            )
        numbers = [number for group in groups for number in group["params"]]
        states = {name: saved.get(number, {}) for name, number in zip(self._names, numbers, strict=True) if name}
        steps = {int(each[STEP_KEY]) for each in states.values() if STEP_KEY in each}
        if len(steps) > 1:
            raise ValueError(
                f"the saved state of PyTorch has parameters after {min(steps)} and after {max(steps)} steps, and ranks "
                "that divide a step count one number; load it under zero=0 into an optimizer of PyTorch"
            )
        # Those that keep no count treat the first step alone in another way.
        count = steps.pop() if steps else int(any(states.values()))
        size = sum(spec.size for spec in specs)
        slots = {name: np.zeros(size, dtype) for name in self._rule.slots}
        tensors = {slot: tensors_of(flat, specs) for slot, flat in slots.items()}
        for name in (spec.name for spec in specs):
            self._fill(name, states[name], {slot: each[name].reshape(-1) for slot, each in tensors.items()})
        return FullState(
            rule=type(self._rule).__name__,
            configuration={**self._rule.configuration(), "live": list(map(saved_values, groups))},
            steps=count,
            skipped_steps=0,
            specs=tuple(specs),
            dtype=dtype,
            slots=slots,
        )

    # -- inside -------------------------------------------------------------------------------------------------------

    def _state_of(self, name: str, parts: list[Any], steps: int) -> dict[str, Any]:
        """The state of one parameter, from its part of each slot."""
        p, rule = self._tensors[name], self._rule
        if isinstance(rule, TorchRule) and rule.whole_tensors:
            like = torch.empty(p.shape, dtype=parts[0].dtype if parts else p.dtype)
            groups = self._groups
            live = groups.arguments(groups.number_of[name]) if isinstance(groups, LiveGroups) else rule.values
            return unpack(rule.kind, live, like, parts, steps)
        shape = as_reals(p.detach()).shape
        state = {slot: as_numbers(part.view(shape), p) for slot, part in zip(rule.slots, parts, strict=True)}
        counts = rule.counts if isinstance(rule, TorchRule) else type(rule).__name__ != "SGD"
        return {STEP_KEY: torch.tensor(float(steps)), **state} if counts else state

    def _fill(self, name: str, state: Mapping[str, Any], slots: Mapping[str, np.ndarray]) -> None:
        """Write the state of one parameter into its part of each slot."""
        p, rule = self._tensors[name], self._rule
        arrays = {key: value for key, value in state.items() if key != STEP_KEY and value is not None}
        if isinstance(rule, TorchRule) and rule.whole_tensors:
            parts = [torch.from_numpy(slot[: p.numel()]) for slot in slots.values()]
            if arrays:
                pack(arrays, torch.empty(p.shape, dtype=parts[0].dtype if parts else p.dtype), parts)
            return
        if arrays and set(arrays) != set(slots):
            raise ValueError(
                f"the saved state of PyTorch has {', '.join(arrays) or 'nothing'} of parameter {name!r}, and "
                f"{type(rule).__name__} keeps {', '.join(slots) or 'nothing'}; make the optimizer as it was"
            )
        for key, value in arrays.items():
            if value.shape != p.shape:
                raise ValueError(
                    f"the saved state of PyTorch has {key} of the shape {tuple(value.shape)} where parameter {name!r} "
                    f"has {tuple(p.shape)}; make the groups of the same parameters in the same order"
                )
            flat = as_reals(value.detach().cpu()).reshape(-1)
            slots[key][: flat.numel()] = flat.to(torch.float64).numpy()


def _steps_of(state_dict: Mapping[str, Any]) -> int:
    """The most steps that a parameter has taken in a state of PyTorch; 1 where something is kept without a count."""
    states = [each for each in state_dict["state"].values() if each]
    return max((int(each.get(STEP_KEY, 1)) for each in states), default=0)


def _settings_of(state_dict: Mapping[str, Any]) -> dict[str, str]:
    """What must be the same on all ranks of a state of PyTorch, as text by name."""
    items = [(f"state of parameter {number}", state_dict["state"][number]) for number in state_dict["state"]]
    items += [(f"param_groups[{number}]", group) for number, group in enumerate(state_dict["param_groups"])]
    return {
        f"{key} of the {what}": text_of(as_fact(value) if isinstance(value, torch.Tensor) else value)
        for what, each in items
        for key, value in each.items()
    }
