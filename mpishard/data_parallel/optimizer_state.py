"""The state of a run in its optimizer: parameters, slots and numbers, ready to be saved or moved."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

from mpishard.comm.axis import Axis
from mpishard.data_parallel.configuration import ShardingConfiguration
from mpishard.data_parallel.strategies import Strategy
from mpishard.layout.boxes import split
from mpishard.layout.local_layout import LocalLayout, cut_holding
from mpishard.layout.run_state import (
    PARAMETERS,
    SLOT,
    RunState,
    Shard,
    brief,
    counted_pieces,
    finite_fact,
    pieces_of_ranges,
    whole_fact,
)
from mpishard.optim import Rule
from mpishard.optim.loss_scale import LossScale
from mpishard.parameters.flat import FlatParameters

Array = Any
Range = tuple[int, int]


class Stepping(Protocol):
    """The parts of an optimizer that `facts_of` reads."""

    @property
    def rule(self) -> Rule: ...
    @property
    def config(self) -> ShardingConfiguration: ...
    @property
    def steps(self) -> int: ...
    @property
    def skipped_steps(self) -> int: ...
    @property
    def clock(self) -> int: ...
    @property
    def scaling(self) -> LossScale: ...
    @property
    def gradient_norm(self) -> float: ...
    @property
    def further_facts(self) -> Mapping[str, Any]: ...


def shards(strategy: Strategy, slots: Mapping[str, Array]) -> tuple[Shard, ...]:
    """Parameters and slots of this rank, and the compression errors of the sums that it owns."""
    parameters = strategy.parameters
    own = cut_holding(parameters.pieces, strategy.own)
    pairs = zip(strategy.own, strategy.counted, _starts(strategy.own), strict=True)
    counted = _counted(
        parameters, strategy.counted, [offset + first - start for (start, _), (first, _), offset in pairs]
    )
    if parameters.sharded is not None:
        values = Shard(PARAMETERS, parameters.sharded.shard, own, counted)
    else:
        starts = [start for start, _ in strategy.counted]
        values = Shard(PARAMETERS, parameters.flat, parameters.pieces, _counted(parameters, strategy.counted, starts))
    found = [values, *(Shard(SLOT.format(name), slot, own, counted) for name, slot in slots.items())]
    if strategy.compressed is not None:
        ranges = strategy.error_ranges
        left = pieces_of_ranges(parameters.pieces, ranges, _starts(ranges))
        counted = counted_pieces(left, parameters.specs, parameters.place)
        found.append(Shard(strategy.errors_kind, strategy.compressed.owned, left, counted, required=False))
    return tuple(found)


def facts_of(optimizer: Stepping) -> dict[str, Any]:
    """The optimizer's settings, for people to read, and the numbers that `ShardedOptimizer.restore` needs."""
    facts = {
        "optimizer": type(optimizer).__name__,
        "rule": type(optimizer.rule).__name__,
        "rule.json": optimizer.rule.configuration(),
        "slots.json": list(optimizer.rule.slots),
        "sharding.json": optimizer.config.settings(),
        "mesh.json": dict(optimizer.config.mesh.shape),
        "step": optimizer.clock,
        "steps": optimizer.steps,
        "skipped_steps": optimizer.skipped_steps,
        "loss_scale": optimizer.scaling.value,
    }
    if optimizer.scaling.dynamic:
        facts["good_steps"] = optimizer.scaling.good_steps
    if not math.isnan(optimizer.gradient_norm):
        facts["gradient_norm"] = optimizer.gradient_norm
    return facts | dict(optimizer.further_facts)


def check_numbers(facts: Mapping[str, Any]) -> None:
    """Raise ValueError unless the numbers among these facts are valid for `ShardedOptimizer.restore`."""
    for name in ("steps", "skipped_steps"):
        whole_fact(facts, name)
    for name in ("good_steps", "outer_steps"):
        whole_fact(facts, name, 0)
    if "good_steps" in facts or "loss_scale" in facts:
        finite_fact(facts, "loss_scale")
    finite_fact(facts, "gradient_norm", 0.0, above=-1.0)


def check_rule(rule: Rule, saved: str, saved_slots: Collection[str]) -> None:
    """Raise ValueError unless the saved state is of a rule with the name and the slots of `rule`."""
    if (saved, sorted(saved_slots)) != (type(rule).__name__, sorted(rule.slots)):
        theirs, ours = (brief(", ".join(sorted(names)) or "none") for names in (saved_slots, rule.slots))
        raise ValueError(
            f"the state is of the rule {brief(saved)} (slots: {theirs}), but this optimizer has {type(rule).__name__} "
            f"(slots: {ours}); make the rule as it was when it was saved, or leave its state and take the parameters "
            "alone"
        )


def changed_numbers(rule: Rule, saved: Any, of: str = "") -> list[str]:
    """Descriptions of a rule's settings that differ from the `configuration` in its saved state."""
    if not isinstance(saved, Mapping):
        return []
    changed = [(name, value, saved[name]) for name, value in rule.configuration().items() if name in saved]
    return [f"{of}{name}={value} in place of {brief(then)}" for name, value, then in changed if then != value]


def parameters_alone(parameters: FlatParameters, axis: Axis) -> RunState:
    """The state of a model without an optimizer: its parameters, divided evenly among the ranks of the data axis."""
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
