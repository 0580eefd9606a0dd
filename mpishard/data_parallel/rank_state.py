"""One rank's part of the state of an optimizer: arrays by slot of the rule, and these with layouts, to be moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from mpishard.backend import array as arrays
from mpishard.backend import exact
from mpishard.comm.axis import Axis
from mpishard.data_parallel.full_state import FullState, cut_whole, gather_whole
from mpishard.data_parallel.gradient_norm import Inspection
from mpishard.data_parallel.matrices import Matrices
from mpishard.data_parallel.ownership import RuleRanges
from mpishard.data_parallel.results import Counters
from mpishard.data_parallel.settings import Configured
from mpishard.data_parallel.strategies import Strategy
from mpishard.layout.boxes import split
from mpishard.layout.run_state import PARAMETERS, SLOT, RunState, Shard, counted_pieces, pieces_of_ranges
from mpishard.layout.tensors import LocalLayout, cut_holding
from mpishard.minimizers import Method
from mpishard.optim import Muon, Rule
from mpishard.optim.formulas import clip_by_value, moving_average, muon_apply
from mpishard.parameters.flat import FlatParameters

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


# Arrays with their layouts, ready to be saved or moved.

Range = tuple[int, int]


def shards(strategy: Strategy, slots: Mapping[str, Array]) -> tuple[Shard, ...]:
    """Parameters and slots of this rank, and the compression errors of the sums that it owns."""
    parameters, ownership = strategy.parameters, strategy.ownership
    own = cut_holding(parameters.pieces, ownership.own)
    pairs = zip(ownership.own, ownership.counted, _starts(ownership.own), strict=True)
    counted = _counted(
        parameters, ownership.counted, [offset + first - start for (start, _), (first, _), offset in pairs]
    )
    if parameters.sharded is not None:
        values = Shard(PARAMETERS, parameters.sharded.shard, own, counted)
    else:
        starts = [start for start, _ in ownership.counted]
        values = Shard(PARAMETERS, parameters.flat, parameters.pieces, _counted(parameters, ownership.counted, starts))
    found = [values, *(Shard(SLOT.format(name), slot, own, counted) for name, slot in slots.items())]
    if strategy.compressed is not None:
        ranges = strategy.error_ranges
        left = pieces_of_ranges(parameters.pieces, ranges, _starts(ranges))
        counted = counted_pieces(left, parameters.specs, parameters.place)
        found.append(Shard(strategy.errors_kind, strategy.compressed.owned, left, counted, required=False))
    return tuple(found)


def parameters_alone(parameters: FlatParameters, axis: Axis) -> RunState:
    """The state of a model without an optimizer: one shard, the live parameters.

    They are divided evenly among the ranks of the data axis.
    """
    if parameters.sharded is not None:
        own = parameters.sharded.own
        layout = cut_holding(parameters.pieces, own)
        shard = Shard(PARAMETERS, parameters.sharded.shard, layout, _counted(parameters, own, _starts(own)))
    else:
        cuts = split(parameters.size, axis.size)
        start, stop = cuts[axis.rank], cuts[axis.rank + 1]
        counted = _counted(parameters, [(start, stop)], [start])
        shard = Shard(PARAMETERS, parameters.flat, parameters.pieces, counted)
    return RunState(parameters.specs, (shard,))


def _starts(ranges: Sequence[Range]) -> list[int]:
    """The start of each range when the ranges lie end to end."""
    return [0, *accumulate(stop - start for start, stop in ranges)][:-1]


def _counted(parameters: FlatParameters, ranges: Sequence[Range], starts: Sequence[int]) -> LocalLayout:
    return counted_pieces(pieces_of_ranges(parameters.pieces, ranges, starts), parameters.specs, parameters.place)


class RankState:
    """This rank's state arrays of one optimizer for one set of parameters, and the strategy that divides them.

    Creation is collective over the mesh and makes all copies of the parameters equal.
    """

    def __init__(self, optimizer: Configured, parameters: FlatParameters) -> None:
        self._optimizer = optimizer
        config, rule = optimizer.config, optimizer.rule
        self.strategy: Strategy = optimizer.strategy.fitting(parameters)(config, parameters)
        self._broadcast_carried()
        self.inspection = Inspection(self.strategy, parameters, looks=config.nonfinite_gradients != "ignore")
        # The elements that the rule of each parameter group updates.
        self.rule_ranges = RuleRanges(self.strategy.ownership, parameters.specs)
        self._matrices: Matrices | None = None
        size, like = self.strategy.ownership.size, parameters.like
        if isinstance(rule, Method):
            # With a method in place of a rule: the slots, one below the other, the point last.
            self.slot_rows: Array = make_rows(rule, size, parameters.dtype, like=like)
            self.slots: dict[str, Array] = dict(zip(slot_names(rule), self.slot_rows, strict=True))
            return
        if not arrays.is_device(like):
            rule.kernel.expect(parameters.dtype)
            if isinstance(rule, Muon):
                rule.rest.kernel.expect(parameters.dtype)
                muon_apply.expect(parameters.dtype)
            if rule.ema_decay is not None:
                moving_average.expect(parameters.dtype)
            if config.max_gradient_value is not None:
                clip_by_value.expect(parameters.dtype)
            exact.expect_norms(
                parameters.dtype, config.max_gradient_norm is not None or rule.norm_based or rule.whole_tensors
            )
        # The state of the rule: each array holds the ranges in ``strategy.ownership.own`` end to end.
        self.slots = make_slots(rule, size, parameters.dtype, like=like)

    def matrices(self, rule: Rule) -> Matrices:
        """The matrices that the rule needs whole. Collective over the strategy's team when the rule is a new one."""
        rules = self.rule_ranges.by_tensor(rule)
        names = {spec.name for spec, each in zip(self.parameters.specs, rules, strict=True) if each.whole_tensors}
        if self._matrices is None or self._matrices.names != names:
            self._matrices = Matrices(self.strategy, names)
        return self._matrices

    @property
    def parameters(self) -> FlatParameters:
        """The parameters that the optimizer trains."""
        return self.strategy.parameters

    @property
    def nbytes(self) -> int:
        """Bytes of the slots."""
        return sum(int(slot.nbytes) for slot in self.slots.values())

    def shards(self) -> tuple[Shard, ...]:
        """The live arrays of this rank with their layouts: parameters, slots and compression errors."""
        return shards(self.strategy, self.slots)

    def prepare_step(self, counters: Counters) -> None:
        """Set the loss scale of the parameters, and the compression of the strategy, for the next step."""
        compresses = counters.steps >= self._optimizer.config.compress_after
        self.parameters.loss_scale = counters.scaling.value
        self.strategy.prepare_step(compresses, counters.scaling.value)

    def broadcast(self) -> None:
        """Make all copies of parameters and slots equal.  Collective over the mesh."""
        self.strategy.copies.broadcast()
        self._broadcast_carried()
        for slot in self.slots.values():
            self.strategy.resync(slot)

    def _broadcast_carried(self) -> None:
        if self.parameters.carried is not None:
            self.parameters.carried.broadcast(self.strategy.axis)

    def resume(self, counters: Counters, loss_scale: float) -> None:
        """Prepare the next step after other parameters and state have replaced those of a step under way.

        `loss_scale` is that which the compression errors of the new state contain.
        """
        if self.strategy.compressed is not None:
            self.strategy.compressed.forget(self.strategy.error_scale(loss_scale))
        self.prepare_step(counters)
        self.parameters.reset_gradients()
        if self.parameters.sharded is not None:
            self.parameters.sharded.drop()

    def gather_slots(self, world: Axis) -> dict[str, np.ndarray]:
        """The slots of the whole model, on every rank.  Collective over `world`."""
        return whole_slots(world, self.strategy, self.slots)

    def gather_errors(self, world: Axis) -> dict[str, np.ndarray]:
        """The compression errors of the whole model, by kind, on every rank.  Collective over `world`."""
        return whole_errors(world, self.strategy)

    def fill(self, full: FullState) -> None:
        """Fill this rank's arrays from a full state."""
        fill_slots(self.strategy, self.slots, full.slots)
        fill_errors(self.strategy, full.others)
