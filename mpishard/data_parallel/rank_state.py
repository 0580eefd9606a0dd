"""The part of an optimizer's state that one rank holds, for the parameters that the optimizer trains."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpishard.backend import array as arrays
from mpishard.backend import exact
from mpishard.comm.axis import Axis
from mpishard.data_parallel.full_state import FullState
from mpishard.data_parallel.gradient_norm import Inspection
from mpishard.data_parallel.results import Counters
from mpishard.data_parallel.rule_ranges import RuleRanges
from mpishard.data_parallel.settings import Configured
from mpishard.data_parallel.slots import (
    fill_errors,
    fill_slots,
    make_rows,
    make_slots,
    slot_names,
    whole_errors,
    whole_slots,
)
from mpishard.data_parallel.state_shards import shards
from mpishard.data_parallel.strategy import Strategy
from mpishard.layout.run_state import Shard
from mpishard.minimizers import Method
from mpishard.optim.formulas import clip_by_value, moving_average
from mpishard.parameters.flat import FlatParameters

Array = Any


class RankState:
    """This rank's state arrays of one optimizer for one set of parameters, and the strategy that divides them.

    Creation is collective over the mesh and makes all copies of the parameters equal.
    """

    def __init__(self, optimizer: Configured, parameters: FlatParameters) -> None:
        self._optimizer = optimizer
        config, rule = optimizer.config, optimizer.rule
        self.strategy: Strategy = optimizer.strategy.fitting(parameters)(config, parameters)
        self._spread_carried()
        self.inspection = Inspection(self.strategy, parameters, looks=config.nonfinite_gradients != "ignore")
        # The elements that the rule of each parameter group updates.
        self.rule_ranges = RuleRanges(self.strategy.ownership, parameters.specs)
        size, like = self.strategy.ownership.size, parameters.like
        if isinstance(rule, Method):
            # With a method in place of a rule: the slots, one below the other, the point last.
            self.slot_rows: Array = make_rows(rule, size, parameters.dtype, like=like)
            self.slots: dict[str, Array] = dict(zip(slot_names(rule), self.slot_rows, strict=True))
            return
        if not arrays.is_device(like):
            rule.kernel.expect(parameters.dtype)
            if rule.ema_decay is not None:
                moving_average.expect(parameters.dtype)
            if config.max_gradient_value is not None:
                clip_by_value.expect(parameters.dtype)
            exact.expect_norms(parameters.dtype, config.max_gradient_norm is not None or rule.norm_based)
        # The state of the rule: each array holds the ranges in ``strategy.ownership.own`` end to end.
        self.slots = make_slots(rule, size, parameters.dtype, like=like)

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

    def spread(self) -> None:
        """Make all copies of parameters and slots equal.  Collective over the mesh."""
        self.strategy.copies.spread()
        self._spread_carried()
        for slot in self.slots.values():
            self.strategy.resync(slot)

    def _spread_carried(self) -> None:
        if self.parameters.carried is not None:
            self.parameters.carried.spread(self.strategy.axis)

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
