"""Steps that an optimizer of PyTorch takes itself: of parameters that each rank has whole, or of the rank's shards.

Under ``zero=0`` it has the module's own parameters, as under DDP. Else it has this rank's shards in their place, as in
PyTorch's ``ZeroRedundancyOptimizer``, if it treats each element by itself. Its groups are the same in both cases, with
what schedulers write there, and numbers that it counts there.

Its state moves to any number of ranks and any stage by the slots of the rule, where ranks could divide it; numbers in
its groups by `ParameterGroups`; the rest of it, which only steps of whole parameters need, by the facts of a state.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from mpishard.comm.axis import Axis
from mpishard.comm.errors import raised_on_all
from mpishard.data_parallel.auxiliary_state import AuxiliaryState
from mpishard.data_parallel.rank_state import Counters, RankState
from mpishard.layout.run_state import brief, whole_fact
from mpishard.layout.tensors import cut_holding
from mpishard.torch.buffers import as_fact, from_fact
from mpishard.torch.live_groups import LiveGroups
from mpishard.torch.memory import as_numbers, as_tensor, finish_stream
from mpishard.torch.torch_steps import REMEDY, STEP_KEY, adopt, pack, state_after

if TYPE_CHECKING:
    from mpishard.data_parallel.full_state import FullState

_REST = "torch_state.json"
_VALUES = "torch_state.{}"
_GROUP = "param_groups[{}]"

Rest = dict[str, dict[str, Any]]


class OwnSteps(AuxiliaryState):
    """The steps of an optimizer of PyTorch by itself, and its state.

    Of an element-wise optimizer the arrays of its state are views into the slots.
    """

    def __init__(self, live: LiveGroups) -> None:
        self._live = live
        self._on_rank: RankState
        self._counters: Counters

    def take_step(self, rate_factor: float, divisor: float, clip: float) -> None:
        """Take a step along the summed gradients, times ``clip / divisor``."""
        if rate_factor != 1:
            raise ValueError(f"{self._live.what} takes its own steps, whose learning rate no loop of mpishard changes")
        self._step_along(clip / divisor)
        finish_stream(as_tensor(self._on_rank.parameters.held))

    def _step_along(self, factor: float) -> None:
        """Take a step along the summed gradients, times a factor."""
        raise NotImplementedError

    def make(self, on_rank: RankState, counters: Counters) -> None:
        """Note the slots into which the arrays of the state are views; subclasses make these."""
        self._on_rank, self._counters = on_rank, counters

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Continue from these facts, after the slots were filled."""
        self._take_slots(int(facts["steps"]))

    def fill(self, full: FullState) -> None:
        """Continue from the slots of a full state."""
        self._take_slots(full.steps)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _take_slots(self, steps: int) -> None:
        """Make the state of the optimizer after some steps, from the slots."""
        raise NotImplementedError

    def _state_of(self, values: Any, group: int, slots: Sequence[Any], steps: int) -> dict[str, Any]:
        """The state of the optimizer for a tensor after some steps, from its part of each slot."""
        live = self._live
        arguments = live.arguments(group)
        if steps:
            return state_after(live.kind, arguments, live.division, values, slots, steps)
        return dict(live.kind([values], **arguments).state.get(values, {}))  # Adagrad begins with one


# Of the shards of this rank.


class _Shard(NamedTuple):
    """Contiguous elements of this rank, of one tensor or several, which one parameter group has."""

    group: int
    values: Any
    views: dict[str, Any]  # by slot
    place: tuple[int, int, int] | None  # elements ``[start, stop)`` of an owned range; None of a stand-in


class ShardSteps(OwnSteps):
    """Steps of this rank's shards, which are in the place of the parameters in the groups meanwhile.

    A group of which this rank has no element gets a stand-in, so that numbers in it change as on other ranks.
    """

    def make(self, on_rank: RankState, counters: Counters) -> None:
        """Cut the parameters and slots of this rank at the groups."""
        super().make(on_rank, counters)
        live, ownership, specs = self._live, on_rank.strategy.ownership, on_rank.parameters.specs
        names = live.division.slots
        places: list[tuple[int, int, int, int]] = []
        for tensor, owned, start, stop in ownership.owned_parts:
            group = live.number_of[specs[tensor].name]
            if places and places[-1][:2] == (group, owned) and places[-1][3] == start:
                start = places.pop()[2]
            places.append((group, owned, start, stop))
        values, states = on_rank.strategy.values(), ownership.states_of([on_rank.slots[name] for name in names])
        shards = []
        for group, *place in places:
            owned, start, stop = place
            views = [as_tensor(slot[start:stop]) for slot in states[owned]]
            own = as_tensor(values[owned][start:stop])
            shards.append(_Shard(group, own, dict(zip(names, views, strict=True)), (owned, start, stop)))
        like = as_tensor(on_rank.parameters.like)
        for group in {*range(len(live.groups))} - {shard.group for shard in shards}:
            shards.append(_Shard(group, like.new_zeros(1), {name: like.new_zeros(1) for name in names}, None))
        self._shards = shards
        self._state: dict[Any, dict[str, Any]] = defaultdict(dict)
        self._is_checked = False
        self._take_slots(counters.steps)

    def _step_along(self, factor: float) -> None:
        steps = self._counters.steps - 1
        if steps != self._steps:  # workers of Local SGD have agreed on another number
            self._take_slots(steps)
        gradients = self._on_rank.strategy.gradients()
        for shard in self._shards:
            if shard.place is None:
                shard.values.grad = torch.zeros_like(shard.values)
                continue
            owned, start, stop = shard.place
            gradient = as_tensor(gradients[owned][start:stop])
            shard.values.grad = gradient if factor == 1 else gradient.mul_(factor)
        with self._in_the_groups(), torch.no_grad():
            self._live.take_step()
        self._steps += 1
        if not self._is_checked:
            group = self._on_rank.strategy.sync_group
            with raised_on_all(group if isinstance(group, Axis) else None):
                self._check_state()
            self._is_checked = True
        for shard in self._shards:
            shard.values.grad = None
            adopt(self._state[shard.values], shard.views)

    def _take_slots(self, steps: int) -> None:
        self._steps = steps
        self._state.clear()
        for shard in self._shards:
            if own := self._state_of(shard.values, shard.group, [*shard.views.values()], steps):
                self._state[shard.values] = own

    def _check_state(self) -> None:
        """Raise ValueError if the optimizer keeps something else of a shard than of the few elements of a probe."""
        for _, values, views, _ in self._shards:
            for key, value in self._state[values].items():
                is_real = isinstance(value, torch.Tensor) and value.is_floating_point()
                fits = key in views and is_real and value.shape == values.shape
                if not (fits or key == STEP_KEY or value is None):
                    raise ValueError(
                        f"{self._live.what} cannot be divided over ranks: of {values.numel()} elements it keeps {key!r}"
                        f", which is not one real number for each; {REMEDY}"
                    )

    @contextmanager
    def _in_the_groups(self) -> Iterator[None]:
        """A context in which the optimizer has the shards with their state, in the place of the parameters."""
        optimizer, groups = self._live.optimizer, self._live.groups
        given, state = [group["params"] for group in groups], optimizer.state
        for number, group in enumerate(groups):
            group["params"] = [shard.values for shard in self._shards if shard.group == number]
        optimizer.state = self._state
        try:
            yield
        finally:
            optimizer.state = state
            for group, params in zip(groups, given, strict=True):
                group["params"] = params


# Of whole parameters.


class WholeSteps(OwnSteps):
    """Steps of the parameters of the module, `tensors` by name, or of the masters of those of another dtype.

    What an optimizer that is not element-wise keeps of a tensor is packed into the slots before a save.
    """

    needs_consolidation = True

    def __init__(self, live: LiveGroups, tensors: Mapping[str, Any]) -> None:
        super().__init__(live)
        self._tensors = dict(tensors)
        self._is_made = False
        self._masters: dict[str, Any] = {}  # of parameters of another dtype
        self._views: dict[str, dict[str, Any]] = {}  # by parameter and slot, of the shape of the parameter
        self._flat: dict[str, list[Any]] = {}  # by parameter its part of each slot, for what is packed

    def _step_along(self, factor: float) -> None:
        memory = self._on_rank.parameters.gradients.memory
        for name, p in self._tensors.items():
            gradient = as_tensor(memory.view(name))
            if factor != 1:
                gradient.mul_(factor)
            self._masters.get(name, p).grad = as_numbers(gradient, p)
        with self._on_masters(), torch.no_grad():
            self._live.take_step()
        self._adopt_all()

    @property
    def rest(self) -> Rest:
        """What the optimizer keeps besides the slots and a count of steps, by parameter or group, and by name."""
        found: Rest = {}
        for name, p in self._tensors.items():
            state = self._live.optimizer.state.get(p, {})
            found[name] = {key: each for key, each in state.items() if not self._is_slot(name, key, each)}
        for number, group in enumerate(self._live.groups):
            tensors = {key: each for key, each in group.items() if isinstance(each, torch.Tensor)}
            found[_GROUP.format(number)] = {key: each for key, each in tensors.items() if each.numel() != 1}
        return {name: own for name, own in found.items() if own}

    @rest.setter
    def rest(self, rest: Mapping[str, Mapping[str, Any]]) -> None:
        for name, own in rest.items():
            for number, group in enumerate(self._live.groups):
                if name == _GROUP.format(number):
                    group.update(own)
            if name in self._tensors:
                self._live.optimizer.state[self._tensors[name]].update(own)

    def check_rest(self, rest: Mapping[str, Mapping[str, Any]] | None, steps: int) -> None:
        """Raise ValueError unless this is the `rest` of such an optimizer for these parameters after some steps.

        None: the saved state has none.
        """
        known = {*self._tensors, *(_GROUP.format(number) for number in range(len(self._live.groups)))}
        if other := [name for name in rest or () if name not in known]:
            raise ValueError(f"the saved state of the optimizer is of another module: it has {brief(other[0])}")
        if steps and rest is None and not self._live.is_divisible:
            raise ValueError(
                f"the saved state has no state of {self._live.what}; it is of another optimizer, or of zero=1 or more"
            )

    def to_torch(self) -> dict[str, Any]:
        """A copy of the ``state_dict`` of the optimizer."""
        return copy.deepcopy(self._live.optimizer.state_dict())

    def from_torch(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a ``state_dict`` of such an optimizer.  Raises ValueError if it has other groups."""
        with self._on_masters():
            self._live.optimizer.load_state_dict(copy.deepcopy(dict(state_dict)))
        self._live.note_state()
        self._adopt_all()

    # -- as auxiliary state --------------------------------------------------------------------------------------------

    @property
    def facts(self) -> dict[str, Any]:
        """The `rest` as facts of a `RunState`.  Raises ValueError if it has anything but tensors, numbers and texts."""
        described: dict[str, dict[str, Any]] = {}
        facts: dict[str, Any] = {}
        for name, own in (self.rest if self._is_made else {}).items():
            for key, value in own.items():
                if isinstance(value, torch.Tensor):
                    number, dtype = len(facts), str(value.dtype).removeprefix("torch.")
                    facts[_VALUES.format(number)] = as_fact(value)
                    value = {"number": number, "dtype": dtype, "shape": list(value.shape)}
                elif not isinstance(value, bool | int | float | str):
                    raise ValueError(
                        f"{self._live.what} keeps {key!r} of {name!r}, a {type(value).__name__}, which a checkpoint "
                        "cannot hold; save state_dict() of the optimizer by torch.save"
                    )
                described.setdefault(name, {})[key] = value
        return {**facts, _REST: described}

    @property
    def nbytes(self) -> int:
        """Bytes of the state that is not in the slots."""
        tensors = [value for own in self.rest.values() for value in own.values() if isinstance(value, torch.Tensor)]
        return sum(each.numel() * each.element_size() for each in tensors)

    def make(self, on_rank: RankState, counters: Counters) -> None:
        """Make the arrays of the state views into the slots."""
        super().make(on_rank, counters)
        self._is_made = True
        parameters, division = on_rank.parameters, self._live.division
        pieces = {piece.name: piece for piece in cut_holding(parameters.pieces, on_rank.strategy.ownership.own)}
        for name, p in self._tensors.items():
            memory, piece = as_tensor(parameters[name]), pieces.get(name)
            start = 0 if piece is None else piece.start  # of an empty one, which has no piece
            master = as_numbers(memory, p)
            if master.dtype != p.dtype:
                self._masters[name] = master
            parts = [as_tensor(on_rank.slots[slot])[start : start + memory.numel()] for slot in division.slots]
            self._flat[name] = parts
            if division.packed is None:
                numbers = [as_numbers(part.view(memory.shape), p) for part in parts]
                self._views[name] = dict(zip(division.slots, numbers, strict=True))
        self._adopt_all()

    def check(self, facts: Mapping[str, Any]) -> None:
        """Raise ValueError unless it can continue from these facts."""
        if "optimizer" in facts:  # else those of a full state, whose rest goes by itself
            self.check_rest(_rest_of(facts) if _REST in facts else None, whole_fact(facts, "steps"))

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Continue from these facts, after the slots were filled."""
        super().restore(facts)
        self.rest = _rest_of(facts, next(iter(self._tensors.values())).device)

    def consolidate(self) -> None:
        """Pack the state of whole tensors into the slots."""
        for name, p in self._tensors.items() if self._is_made and self._live.division.packed is not None else ():
            state = self._live.optimizer.state.get(p, {})
            packed = {key: value for key, value in state.items() if self._is_slot(name, key, value)}
            pack(packed, self._masters.get(name, p), self._flat[name])

    # -- inside -------------------------------------------------------------------------------------------------------

    def _is_slot(self, name: str, key: str, value: Any) -> bool:
        """Return True if a value of the state is in the slots, or is the count of steps of the whole run."""
        division = self._live.division
        if value is None:
            return True  # as a momentum that there is not
        if key == STEP_KEY:
            return self._live.is_divisible and float(value) == self._counters.steps
        return key in division.packed if division.packed is not None else value is self._views[name].get(key)

    def _adopt_all(self) -> None:
        for name, views in self._views.items():
            adopt(self._live.optimizer.state.get(self._tensors[name], {}), views)

    def _take_slots(self, steps: int) -> None:
        live = self._live
        live.optimizer.state.clear()
        for name, p in self._tensors.items() if live.is_divisible else ():
            master, number = self._masters.get(name, p).detach(), live.number_of[name]
            parts = self._flat[name] if live.division.packed is not None else [*self._views[name].values()]
            if own := self._state_of(master, number, parts, steps):
                live.optimizer.state[p] = own
        self._adopt_all()

    @contextmanager
    def _on_masters(self) -> Iterator[None]:
        """A context in which the masters are in the place of parameters of another dtype."""
        optimizer = self._live.optimizer
        given = [group["params"] for group in optimizer.param_groups]
        pairs = [(self._tensors[name], master) for name, master in self._masters.items()]
        master_of = {id(p): master for p, master in pairs}
        for group in optimizer.param_groups if pairs else ():
            group["params"] = [master_of.get(id(p), p) for p in group["params"]]
        for p, master in pairs:
            if p in optimizer.state:
                optimizer.state[master] = optimizer.state.pop(p)
        try:
            yield
        finally:
            for group, params in zip(optimizer.param_groups, given, strict=True):
                group["params"] = params
            for p, master in pairs:
                master.grad = None
                if master in optimizer.state:
                    optimizer.state[p] = optimizer.state.pop(master)


def _rest_of(facts: Mapping[str, Any], device: Any = None) -> Rest:
    """The `WholeSteps.rest` among facts.  Raises ValueError if values of a tensor are not there."""
    found: Rest = {}
    for name, own in facts.get(_REST, {}).items():
        tensors = {key: _value_of(facts, each, device) for key, each in own.items() if isinstance(each, Mapping)}
        found[name] = {**own, **tensors}
    return found


def _value_of(facts: Mapping[str, Any], described: Mapping[str, Any], device: Any) -> Any:
    number, dtype, shape = (described.get(name) for name in ("number", "dtype", "shape"))
    values, kind = facts.get(_VALUES.format(number)), getattr(torch, str(dtype), None)
    if not (isinstance(values, np.ndarray) and isinstance(kind, torch.dtype) and isinstance(shape, list)):
        raise ValueError(f"the saved state of the optimizer lacks the values of {brief(described)}")
    if values.nbytes != math.prod(shape) * kind.itemsize:
        raise ValueError(f"the saved state of the optimizer has {values.nbytes} bytes for {brief(described)}")
    return from_fact(values, kind).reshape(shape).to(device)
