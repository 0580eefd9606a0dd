"""How a rule steps along summed gradients: element by element, or by tensors that may be split over ranks.

`RuleState.update` comes first: it finishes the sums, agrees on whether to use them, and clips.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpishard.backend import array as arrays
from mpishard.backend import exact_norms
from mpishard.backend.array import Kernel
from mpishard.backend.ranges import Ranges
from mpishard.comm.axis import Axis, ModelParallelGroup
from mpishard.data_parallel.rank_state import EMA, RankState
from mpishard.layout.tensors import ParameterSpec
from mpishard.optim import Muon, Rule
from mpishard.optim.formulas import moving_average

Array = Any


class Factors(NamedTuple):
    """What a step multiplies learning rates by, and what it divides and multiplies summed gradients by."""

    rate_factor: float
    divisor: float
    clip: float


def apply_rule(rule: Rule, on_rank: RankState, step: int, factors: Factors) -> None:
    """Apply the rule: take step `step` along the summed gradients.

    Collective over the strategy's sync group if the rule needs whole tensors or their norms.
    """
    if rule.own_steps is not None:
        rule.own_steps.take_step(*factors)
        return
    strategy, slots = on_rank.strategy, [on_rank.slots[name] for name in rule.slots]
    owned, gradients = strategy.values(), strategy.gradients()
    states = strategy.ownership.states_of(slots)
    rows = [(values, gradient, *state) for values, gradient, state in zip(owned, gradients, states, strict=True)]
    if rule.whole_tensors and not isinstance(rule, Muon):
        _apply_to_tensors(rule, on_rank, rows, step, factors)
    elif rule.whole_tensors:
        _apply_to_matrices(rule, on_rank, rows, step, factors)
    elif rule.norm_based:
        _apply_by_norms(rule, on_rank, rows, step, factors)
    elif owned and arrays.runs_cuda(owned[0]) and rule.is_one_formula:
        _in_one_launch(rule, rule.kernel, on_rank, rows, step, factors)
    else:
        for own_rule, number, start, stop in on_rank.rule_ranges.of(rule, factors.rate_factor):
            values, gradient, *state = _part(rows[number], start, stop)
            own_rule.update(values, gradient, state, step, divisor=factors.divisor, clip=factors.clip)
    if rule.ema_decay is not None:
        keep = rule.ema_decay if step > 1 else 0.0
        averages = strategy.ownership.state_views(on_rank.slots[EMA])
        pairs, ranges = list(zip(averages, owned, strict=True)), on_rank.rule_ranges.of_all(moving_average)
        moving_average.over_ranges(pairs, ranges, [(keep, 1 - keep)])


def _in_one_launch(
    rule: Rule, kernel: Kernel, on_rank: RankState, rows: Sequence[Sequence[Array]], step: int, factors: Factors
) -> None:
    """Apply a formula with the scalars of the rules to all ranges, in one launch of a CUDA function."""
    rules, ranges = on_rank.rule_ranges.for_one_launch(rule, factors.rate_factor)
    kernel.over_ranges(rows, ranges, [(factors.divisor, factors.clip, *each.scalars(step)) for each in rules])


def _part(row: Sequence[Array], start: int, stop: int) -> Sequence[Array]:
    """Elements ``[start, stop)`` of each array of a row."""
    return row if stop - start == row[0].size else [array[start:stop] for array in row]


def _apply_by_norms(
    rule: Rule, on_rank: RankState, rows: Sequence[Sequence[Array]], step: int, factors: Factors
) -> None:
    """Take a step that scales by the norms of whole tensors, of which this rank may own only parts.

    Such a rule has the methods of LAMB: `direction`, `trust_ratio` and `apply`.
    """
    strategy, ranges = on_rank.strategy, on_rank.rule_ranges
    owned = [row[0] for row in rows]
    directions = [arrays.empty(values.size, values.dtype, like=values) for values in owned]
    rows = [(*row, direction) for row, direction in zip(rows, directions, strict=True)]
    rules: list[Any] = [each.scaled(factors.rate_factor) for each in ranges.by_tensor(rule)]
    halves = rule.halves if owned and arrays.runs_cuda(owned[0]) else None
    # Before anything changes: a learning rate may be refused.
    rates = [] if halves is None else [each.learning_rate(step) for each in rules]
    if halves is not None:
        _in_one_launch(rule, halves[0], on_rank, rows, step, factors)
    else:
        for own_rule, number, start, stop in ranges.of(rule, factors.rate_factor):
            values, gradient, *state, out = _part(rows[number], start, stop)
            own: Any = own_rule
            own.direction(values, gradient, state, step, divisor=factors.divisor, clip=factors.clip, out=out)
    specs = strategy.parameters.specs
    vectors = list(zip(ranges.counted, (owned, directions), strict=True))
    before, after = norms(strategy.sync_group, specs, vectors)
    ratios = dict.fromkeys(range(len(specs)), 1.0)
    for tensor in {part.choice for part in ranges.owned.all}:
        ratios[tensor] = rules[tensor].trust_ratio(before[tensor], after[tensor])
    if halves is not None:
        scalars = [(rate * ratios[tensor],) for tensor, rate in enumerate(rates)]
        halves[1].over_ranges(list(zip(owned, directions, strict=True)), ranges.owned, scalars)
        return
    for number, start, stop, tensor in ranges.owned.all:
        rules[tensor].apply(owned[number][start:stop], directions[number][start:stop], step, ratios[tensor])


def _apply_to_matrices(
    rule: Rule, on_rank: RankState, rows: Sequence[Sequence[Array]], step: int, factors: Factors
) -> None:
    """Take a step of Muon for matrices, of which this rank may own only parts, and of its other rule for the rest."""
    strategy, ranges = on_rank.strategy, on_rank.rule_ranges
    specs, matrices = strategy.parameters.specs, on_rank.matrices(rule)
    rules = [each.scaled(factors.rate_factor) for each in ranges.by_tensor(rule)]
    for each in rules:
        each.learning_rate(step)  # before anything changes: it may be refused
    like = strategy.parameters.like
    directions = arrays.empty(strategy.ownership.size, strategy.parameters.dtype, like=like)
    views = strategy.ownership.state_views(directions)
    for own_rule, number, start, stop in ranges.of(rule, factors.rate_factor):
        values, gradient, *state = _part(rows[number], start, stop)
        if isinstance(own_rule, Muon):
            out = views[number][start:stop]
            own_rule.direction(gradient, state[0], step, divisor=factors.divisor, clip=factors.clip, out=out)
        else:
            own_rule.update(values, gradient, state, step, divisor=factors.divisor, clip=factors.clip)
    matrices.orthogonalize(directions, {spec.name: each for spec, each in zip(specs, rules, strict=True)})
    for number, start, stop, tensor in ranges.owned.all:
        own = rules[tensor]
        if isinstance(own, Muon):
            own.apply(rows[number][0][start:stop], views[number][start:stop], step, specs[tensor].shape)


def _apply_to_tensors(
    rule: Rule, on_rank: RankState, rows: Sequence[Sequence[Array]], step: int, factors: Factors
) -> None:
    """Take a step of whole tensors, of which this rank may own only parts: each at one rank, with its state."""
    ownership, specs = on_rank.strategy.ownership, on_rank.parameters.specs
    by_tensor = on_rank.rule_ranges.by_tensor(rule)
    rules = {spec.name: each.scaled(factors.rate_factor) for spec, each in zip(specs, by_tensor, strict=True)}
    for each in rules.values():
        each.learning_rate(step)  # before anything changes: it may be refused
    like = on_rank.parameters.like
    values, gradients = (arrays.empty(ownership.size, like.dtype, like=like) for _ in range(2))
    views = list(zip(rows, ownership.state_views(values), ownership.state_views(gradients), strict=True))
    for (own, gradient, *_), value_view, gradient_view in views:
        value_view[...], gradient_view[...] = own, gradient
    slots = [on_rank.slots[name] for name in rule.slots]
    on_rank.matrices(rule).update(values, gradients, slots, rules, step, divisor=factors.divisor, clip=factors.clip)
    for (own, *_), value_view, _ in views:
        own[...] = value_view


# LAMB's norms, for its trust ratios.  The global norm, for clipping, is in `mpishard.data_parallel.gradient_norm`.


def norms(
    sync_group: Axis | ModelParallelGroup,
    specs: Sequence[ParameterSpec],
    vectors: Sequence[tuple[Ranges, Sequence[Array]]],
) -> list[list[float]]:
    """For each vector the 2-norm of every tensor over all ranks, with the same bits for any cut into parts.

    A vector is its parts, and one array for each owned range. A part chooses the number of its tensor, and every
    element is in the parts of exactly one rank of the sync group. On a device the host waits twice a vector, whatever
    the number of tensors. Collective over the sync group: two all-reduces.
    """
    tops = np.zeros((len(vectors), len(specs)))
    for top, (parts, rows) in zip(tops, vectors, strict=True):
        for part, largest in zip(parts.all, exact_norms.largest_of(rows, parts), strict=True):
            top[part.choice] = max(top[part.choice], largest)
    sync_group.all_reduce(tops.reshape(-1), op="max", label="norms")
    sums = np.zeros((len(vectors), len(specs), 2))
    for total, top, (parts, rows) in zip(sums, tops, vectors, strict=True):
        found = exact_norms.sums_of_squares(rows, parts, top.tolist(), [spec.size for spec in specs])
        for part, squares in zip(parts.all, found, strict=True):
            total[part.choice] += squares
    sync_group.all_reduce(sums.reshape(-1), label="norms")
    return [
        [exact_norms.norm(pair, float(top)) for pair, top in zip(total, row, strict=True)]
        for total, row in zip(sums, tops, strict=True)
    ]
