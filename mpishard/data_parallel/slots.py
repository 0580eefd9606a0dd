"""State arrays on this rank, by slot of their rule: create them, gather them to the whole model, and fill them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpishard.backend import array as arrays
from mpishard.comm.axis import Axis
from mpishard.data_parallel.full_state import cut_whole, gather_whole
from mpishard.data_parallel.strategy import Strategy
from mpishard.minimizers import Method
from mpishard.optim import Rule

Array = Any
# The point is saved apart from the parameters: those of a run that has ended are the last accepted iterate.
POINT = "point"
# The exponential moving average of the parameters, after the slots of a rule.
EMA = "ema"


def slot_names(rule: Rule | Method) -> tuple[str, ...]:
    """The names of the state arrays of a rule, or of a method, in their order.

    A rule has its slots, and the average of the parameters if it keeps one; a method its vectors, and the point that it
    wants evaluated.
    """
    if isinstance(rule, Method):
        return (*rule.slots, POINT)
    return rule.slots if rule.ema_decay is None else (*rule.slots, EMA)


def make_rows(method: Method, size: int, dtype: np.dtype, *, like: Array) -> Array:
    """New state of a method for `size` elements: a 2-D array with a row for each slot, on the device of `like`."""
    count = len(slot_names(method))
    return arrays.zeros(count * size, dtype, like=like).reshape(count, size)


def make_slots(rule: Rule, size: int, dtype: np.dtype, *, like: Array) -> dict[str, Array]:
    """New state of a rule for `size` elements, on the device of `like`."""
    slots: dict[str, Array] = {}
    for name in slot_names(rule):
        slots[name] = arrays.zeros(size, dtype, like=like)
        if name in rule.slots and rule.initial(name):
            slots[name][...] = rule.initial(name)
    return slots


def whole_slots(world: Axis, strategy: Strategy, slots: Mapping[str, Array]) -> dict[str, np.ndarray]:
    """The slots of the whole model, on every rank.  Collective over `world`."""
    return {name: _whole_slot(world, strategy, slot) for name, slot in slots.items()}


def _whole_slot(world: Axis, strategy: Strategy, slot: Array) -> np.ndarray:
    counted = strategy.ownership.counted_views(strategy.ownership.state_views(slot))
    values = np.concatenate([np.empty(0, slot.dtype), *map(arrays.to_host, counted)])
    return gather_whole(world, strategy.parameters, strategy.ownership.counted, values)


def fill_slots(strategy: Strategy, slots: Mapping[str, Array], whole: Mapping[str, np.ndarray]) -> None:
    """Fill this rank's slots from those of the whole model."""
    for name, slot in slots.items():
        _fill(strategy, strategy.ownership.own, slot, whole[name])


def whole_errors(world: Axis, strategy: Strategy) -> dict[str, np.ndarray]:
    """The compression errors of the whole model, by kind; empty without compression.  Collective."""
    if strategy.compressed is None:
        return {}
    left = arrays.to_host(strategy.compressed.owned) / strategy.compressed.scale
    return {strategy.errors_kind: gather_whole(world, strategy.parameters, strategy.error_ranges, left)}


def fill_errors(strategy: Strategy, whole: Mapping[str, np.ndarray]) -> None:
    """Set this rank's compression errors from those of the whole model, or to zero without them."""
    if strategy.compressed is None:
        return
    left = strategy.compressed.owned
    if strategy.errors_kind in whole:
        _fill(strategy, strategy.error_ranges, left, whole[strategy.errors_kind])
    else:
        left[...] = 0
    strategy.compressed.forget(scale=1.0)


def _fill(strategy: Strategy, ranges: Sequence[tuple[int, int]], target: Array, whole: np.ndarray) -> None:
    """Fill a state array, which covers `ranges` of the flat parameters, from an array of the whole model."""
    own = cut_whole(whole, strategy.parameters, ranges)
    if arrays.is_device(target):
        arrays.copy_to_device(own, target)
    else:
        target[...] = own
