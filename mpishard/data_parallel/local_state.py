"""What Local SGD adds to the state of an optimizer: the averages, and how far workers have gone by themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mpishard.backend import array as arrays
from mpishard.comm.axis import Axis
from mpishard.data_parallel.averages import Averages
from mpishard.data_parallel.counters import Counters
from mpishard.data_parallel.full_state import OUTER, FullState
from mpishard.data_parallel.local_steps import AveragingSchedule, LocalSteps
from mpishard.data_parallel.rank_state import RankState
from mpishard.data_parallel.settings import Configured, settings_of_rule
from mpishard.data_parallel.slots import fill_slots, whole_slots
from mpishard.data_parallel.state_shards import shards
from mpishard.data_parallel.strategies import LocalUpdates
from mpishard.data_parallel.validation import check_copies
from mpishard.layout.run_state import Shard, brief, names_fact
from mpishard.optim import Rule

Array = Any


@arrays.elementwise
def _divide(total, /, count):  # type: ignore[no-untyped-def]
    """``total /= count``"""
    total = total / count
    return total


class LocalState:
    """The state of one `LocalSGDOptimizer` besides that of its rule: a `FurtherState`.

    Methods are collective over the mesh unless their docstrings say otherwise.

    Parameters
    ----------
    optimizer : Configured
    schedule : AveragingSchedule
    outer : Rule or None
        The rule that moves the anchor.

    Attributes
    ----------
    may_differ : bool
        Whether workers may differ although they have taken no step by themselves.
    """

    # Most of its members are those of `FurtherState`.
    may_differ: bool
    needs_consolidation = True

    def __init__(self, optimizer: Configured, schedule: AveragingSchedule, outer: Rule | None) -> None:
        self.may_differ = False
        self._optimizer = optimizer
        self._schedule = schedule
        self._outer = outer
        self._averages: Averages | None = None
        self._steps: LocalSteps
        self._strategy: LocalUpdates
        self._on_rank: RankState
        self._counters: Counters

    @property
    def averages(self) -> Averages:
        """The anchor and the pending averages, once parameters are bound.  Not collective."""
        assert self._averages is not None
        return self._averages

    @property
    def steps(self) -> LocalSteps:
        """The steps since all workers were in one state, once parameters are bound.  Not collective."""
        return self._steps

    @property
    def workers(self) -> int:
        """Number of workers, once parameters are bound.  Not collective."""
        return self._strategy.workers

    @property
    def staleness(self) -> int:
        """Steps between the start of the last average and its use; 0 before the first.  Not collective."""
        return 0 if self._averages is None else self._steps.staleness

    # -- all workers in one state -----------------------------------------------------------------------------------

    def spread(self) -> None:
        """Set the outer rule's state to that of the first worker.  Collective over the mesh."""
        self.may_differ = False
        for slot in self.averages.slots.values():
            self._strategy.resync(slot)

    def consolidate(self) -> None:
        """Bring all workers to one state.  Steps until the next average count from here.  Collective over the mesh."""
        if self._averages is None:
            return
        problem = None
        try:
            if not self._steps.average_all():
                return
        except FloatingPointError as error:
            problem = error
        self._level()
        if problem is not None:
            raise problem

    def _level(self) -> None:
        """Average the rule's state over the workers, and make its numbers equal; the parameters already are."""
        axis, counters = self._optimizer.config.mesh.data, self._counters
        for slot in self._on_rank.slots.values():
            mean = slot.copy()  # if a worker dies during the sum, the slot must not hold half of it
            axis.all_reduce(mean, label="state")
            _divide(mean, axis.size)
            slot[...] = mean
        norm = -1.0 if math.isnan(counters.gradient_norm) else counters.gradient_norm
        numbers = np.array([counters.skipped_steps, norm, -counters.scaling.value, -counters.scaling.good_steps])
        axis.all_reduce(numbers, op="max", label="control")
        skipped, norm, scale, good = numbers.tolist()
        counters.steps, counters.skipped_steps = counters.clock - int(skipped), int(skipped)
        counters.gradient_norm = math.nan if norm < 0 else norm
        counters.scaling.restore((-scale, int(-good)))
        self._on_rank.prepare_step(counters)
        self.averages.steps = [max(self.averages.steps)] * self._schedule.parts
        self._steps.restart()
        if self._optimizer.config.mesh.debug:
            check_copies(self._strategy.copies, counters.steps)

    @property
    def compares_next_step(self) -> bool:
        """Whether the next step both starts and finishes an average.  Not collective."""
        return self._steps.next_starts_and_finishes

    @property
    def synchronizes_next_step(self) -> bool:
        """Whether the next step waits for an average.  Not collective."""
        return self._steps.next_finishes

    # -- state ------------------------------------------------------------------------------------------------------

    @property
    def outer_steps(self) -> int:
        """Averages so far of the part that has had most of them.  Not collective."""
        return 0 if self._averages is None else max(self._averages.steps)

    @property
    def nbytes(self) -> int:
        """Bytes of the anchor, and of the outer rule's state.  Not collective."""
        return self.averages.nbytes

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that decide the steps.  Not collective."""
        own = {**self._schedule.facts, "outer": self._outer_name}
        return own if self._outer is None else own | settings_of_rule(self._outer, of="outer ")

    @property
    def facts(self) -> dict[str, Any]:
        """Facts of a `RunState`.  Not collective."""
        facts: dict[str, Any] = {"local_sgd.json": self._schedule.facts, "outer_steps": self.outer_steps}
        if self._outer is not None:
            facts |= {"outer_rule": self._outer_name, "outer_rule.json": self._outer.configuration()}
            facts |= {"outer_slots.json": list(self._outer.slots)}
        return facts

    def make(self, on_rank: RankState, counters: Counters) -> None:
        """Create the averages of new state.  Collective over the mesh."""
        strategy = on_rank.strategy
        assert isinstance(strategy, LocalUpdates)
        self._check_parts(strategy)
        # State that is made again is that of survivors of a death: no average was possible, so that each worker still
        # has its own parameters and state.
        self.may_differ = self._averages is not None
        self._strategy, self._on_rank, self._counters = strategy, on_rank, counters
        averages = Averages(strategy, self._outer, self._schedule.parts, lasting=self._schedule.delay > 0)
        steps = LocalSteps(strategy.axis, self._schedule, averages, self.staleness)
        self._averages, self._steps = averages, steps

    def shards(self) -> tuple[Shard, ...]:
        """The state of the outer rule, which all workers share.  Not collective."""
        slots = self.averages.slots
        outer = zip(slots, shards(self._strategy, slots)[1 : 1 + len(slots)], strict=True)
        return tuple(replace(shard, kind=OUTER + name) for name, shard in outer)

    def check(self, facts: Mapping[str, Any]) -> None:
        """Raise ValueError unless the facts are of the same outer rule.  Not collective."""
        saved, saved_slots = facts.get("outer_rule", ""), names_fact(facts, "outer_slots.json")
        own = () if self._outer is None else self._outer.slots
        if (saved, sorted(saved_slots)) != (self._outer_name, sorted(own)):
            theirs, ours = (brief(", ".join(sorted(names)) or "none") for names in (saved_slots, own))
            raise ValueError(
                f"the state is of the outer rule {brief(saved) or 'none'} (slots: {theirs}), but this optimizer has "
                f"{self._outer_name or 'none'} (slots: {ours}); give outer= as it was when it was saved, or leave its "
                "state and take the parameters alone"
            )

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Continue from these facts, after the arrays were filled: all workers are in one state.  Not collective."""
        self.averages.discard()
        self.averages.steps = [int(facts.get("outer_steps", 0))] * self._schedule.parts
        self._steps.restart()

    def add_to(self, full: FullState, world: Axis) -> FullState:
        """A full state with that of the outer rule.  Collective over `world`."""
        outer = whole_slots(world, self._strategy, self.averages.slots)
        others = {**full.others, **{OUTER + name: whole for name, whole in outer.items()}}
        return replace(full, outer_rule=self._outer_name, outer_steps=self.outer_steps, others=others)

    def fill(self, full: FullState) -> None:
        """Continue from a full state, which does not contain the parameters: these may differ.  Not collective."""
        averages = self.averages
        averages.discard()
        self.may_differ = True
        fill_slots(self._strategy, averages.slots, {name: full.others[OUTER + name] for name in averages.slots})
        averages.steps = [full.outer_steps] * self._schedule.parts
        self._steps.restart()

    def abandon(self) -> None:
        """Drop pending averages, which cannot finish after a rank has died.  Not collective."""
        self.averages.abandon()

    @property
    def _outer_name(self) -> str:
        return "" if self._outer is None else type(self._outer).__name__

    def _check_parts(self, strategy: LocalUpdates) -> None:
        """Raise on all ranks unless each part gets a bucket on some rank.  Collective over the mesh."""
        # A pipeline stage may have fewer buckets than another, or none.
        most, parts = max(self._optimizer.world.allgather_object(len(strategy.buckets))), self._schedule.parts
        if most < parts and parts > 1:
            raise ValueError(
                f"parts={parts}, but no rank has more than {most} buckets to deal out; use fewer parts, or a "
                f"smaller minimum_parameter_group_size than {self._optimizer.config.minimum_parameter_group_size}"
            )
