"""One update of the parameters that this rank owns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpishard.backend import array as arrays
from mpishard.data_parallel.strategies import Strategy
from mpishard.data_parallel.tensor_norms import norms
from mpishard.optim import LAMB, Rule

Array = Any


def take_step(
    rule: Rule, strategy: Strategy, slots: Sequence[Array], step: int, *, divisor: float, clip: float
) -> None:
    """Take step `step` along the gradients that the strategy has summed; `divisor` and `clip` as for `Rule.update`.

    Collective over the strategy's team if the rule needs norms of whole tensors; otherwise not collective.
    """
    owned, gradients = strategy.values(), strategy.gradients()
    views = [strategy.state_views(slot) for slot in slots]
    states = [list(parts) for parts in zip(*views, strict=True)] if views else [[] for _ in owned]
    if isinstance(rule, LAMB):
        _take_step_by_norms(rule, strategy, owned, gradients, states, step, divisor, clip)
        return
    for values, gradient, state in zip(owned, gradients, states, strict=True):
        if values.size:
            rule.update(values, gradient, state, step, divisor=divisor, clip=clip)


def _take_step_by_norms(
    rule: LAMB,
    strategy: Strategy,
    owned: Sequence[Array],
    gradients: Sequence[Array],
    states: Sequence[Sequence[Array]],
    step: int,
    divisor: float,
    clip: float,
) -> None:
    """Take a step that scales by the norms of whole tensors, of which this rank may own only parts."""
    directions = [arrays.empty(values.size, values.dtype, like=values) for values in owned]
    for values, gradient, state, out in zip(owned, gradients, states, directions, strict=True):
        if values.size:
            rule.direction(values, gradient, state, step, divisor=divisor, clip=clip, out=out)
    team, specs = strategy.team, strategy.parameters.specs
    before = norms(team, specs, strategy.counted_parts, owned)
    after = norms(team, specs, strategy.counted_parts, directions)
    for tensor, number, start, stop in strategy.owned_parts:
        ratio = rule.trust_ratio(before[tensor], after[tensor])
        rule.apply(owned[number][start:stop], directions[number][start:stop], step, ratio)
