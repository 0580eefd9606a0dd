"""An update: finish the sums of the gradients, agree on whether to use them, clip, and step along them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol, cast

from mpishard.backend import array as arrays
from mpishard.data_parallel.binding import Binding
from mpishard.data_parallel.rank_state import RankState
from mpishard.data_parallel.settings import Configured
from mpishard.data_parallel.slots import EMA
from mpishard.data_parallel.strategy import Strategy
from mpishard.data_parallel.trust_ratio_norms import norms
from mpishard.data_parallel.validation import check_copies
from mpishard.optim import Rule
from mpishard.optim.formulas import clip_by_value, moving_average

Array = Any
# torch.nn.utils.clip_grad_norm_ divides by the norm plus this.
_CLIP_EPSILON = 1e-6


class NormBased(Protocol):
    """What a rule with ``norm_based`` has besides: the halves of its step, before and after norms of whole tensors."""

    def direction(
        self,
        parameters: Array,
        gradients: Array,
        slots: Sequence[Array],
        step: int,
        *,
        divisor: float,
        clip: float,
        out: Array,
    ) -> None:
        """Update the slots, and write the direction of the step into `out`."""
        ...

    def trust_ratio(self, parameter_norm: float, direction_norm: float) -> float:
        """The factor on the direction of one tensor."""
        ...

    def apply(self, parameters: Array, direction: Array, step: int, ratio: float) -> None:
        """Move the parameters of one tensor, or of a slice of it, along the direction."""
        ...


def update(
    optimizer: Configured,
    binding: Binding,
    count: float,
    *,
    rate_factor: float,
    nonfinite_loss: str,
    interrupted: bool,
    exchange_status: bool,
) -> bool:
    """Update the bound parameters; the arguments and the result are those of `ShardedOptimizer.update`.

    Collective over the mesh; between averages of Local SGD over the ranks of a worker.
    """
    config, counters, on_rank, rule = optimizer.config, binding.counters, binding.on_rank, optimizer.rule
    assert isinstance(rule, Rule)
    strategy, inspection = on_rank.strategy, on_rank.inspection
    strategy.reducer.finalize()
    divisor = float(count) * counters.scaling.value
    inspection.nonfinite_loss, inspection.interrupted = nonfinite_loss, interrupted
    usable = _gradients_are_usable(optimizer, binding, divisor, exchange_status)
    if usable:
        clip = 1.0
        if config.max_gradient_norm is not None and not math.isnan(counters.gradient_norm):
            clip = min(1.0, config.max_gradient_norm / (counters.gradient_norm + _CLIP_EPSILON))
        counters.steps += 1
        config.mesh.ledger.step = counters.clock
        if config.max_gradient_value is not None:
            for gradient in strategy.gradients():
                clip_by_value(gradient, divisor, config.max_gradient_value)
            divisor = 1.0
        apply_rule(rule, on_rank, counters.steps, rate_factor=rate_factor, divisor=divisor, clip=clip)
        strategy.publish_parameters()
        strategy.keep_errors()
        counters.scaling.succeeded()
    else:
        counters.skipped_steps += 1
    carried = strategy.parameters.carried
    if carried is not None and not strategy.workers_differ:
        carried.synchronize(strategy.axis)
    on_rank.prepare_step(counters)
    strategy.reducer.reset()
    if config.mesh.debug and not strategy.workers_differ:
        check_copies(strategy.copies, counters.steps)
    return usable


def _gradients_are_usable(optimizer: Configured, binding: Binding, divisor: float, exchange_status: bool) -> bool:
    """Agree on whether to take the step; compute the gradient's norm if clipping or `measure_norm` needs it."""
    counters, inspection = binding.counters, binding.on_rank.inspection
    mode, limit = optimizer.config.nonfinite_gradients, optimizer.config.max_gradient_norm
    counters.gradient_norm = math.nan
    measure = limit is not None or optimizer.measure_norm
    if mode == "ignore" and not measure and not inspection.is_first:
        return True
    norm = inspection.norm(measure, exchange_status)
    if not math.isinf(norm):
        counters.gradient_norm = norm / divisor
        if inspection.finite_loss:
            return True
    elif counters.scaling.overflowed():
        return False
    if mode == "raise":
        what = inspection.culprits(counters.clock + 1)
        binding.strategy.reducer.reset()
        raise FloatingPointError(
            f"{what}; parameters and state are unchanged.  "
            'nonfinite_gradients="skip" leaves such steps out, "ignore" goes on'
        )
    return mode == "ignore"


def apply_rule(rule: Rule, on_rank: RankState, step: int, *, rate_factor: float, divisor: float, clip: float) -> None:
    """Apply the rule: take step `step` along the summed gradients; `divisor` and `clip` as for `Rule.update`.

    Collective over the strategy's team if the rule needs norms of whole tensors; otherwise not collective.
    """
    strategy, slots = on_rank.strategy, [on_rank.slots[name] for name in rule.slots]
    owned, gradients = strategy.values(), strategy.gradients()
    states = strategy.ownership.states_of(slots)
    directions = None
    if rule.norm_based:
        directions = [arrays.empty(values.size, values.dtype, like=values) for values in owned]
    for own_rule, number, start, stop in on_rank.rule_ranges.of(rule, rate_factor):
        values, gradient, state = owned[number], gradients[number], states[number]
        if stop - start != values.size:
            values, gradient = values[start:stop], gradient[start:stop]
            state = [part[start:stop] for part in state]
        if directions is None:
            own_rule.update(values, gradient, state, step, divisor=divisor, clip=clip)
        else:
            out = directions[number][start:stop]
            cast(NormBased, own_rule).direction(values, gradient, state, step, divisor=divisor, clip=clip, out=out)
    if directions is not None:
        rules = [each.scaled(rate_factor) for each in on_rank.rule_ranges.by_tensor(rule)]
        _apply_by_norms([cast(NormBased, each) for each in rules], strategy, owned, directions, step)
    if rule.ema_decay is not None:
        keep = rule.ema_decay if step > 1 else 0.0
        for values, average in zip(owned, strategy.ownership.state_views(on_rank.slots[EMA]), strict=True):
            moving_average(average, values, keep, 1 - keep)


def _apply_by_norms(
    rules: Sequence[NormBased], strategy: Strategy, owned: Sequence[Array], directions: Sequence[Array], step: int
) -> None:
    """Take a step that scales by the norms of whole tensors, of which this rank may own only parts."""
    team, specs = strategy.team, strategy.parameters.specs
    before = norms(team, specs, strategy.ownership.counted_parts, owned)
    after = norms(team, specs, strategy.ownership.counted_parts, directions)
    for tensor, number, start, stop in strategy.ownership.owned_parts:
        ratio = rules[tensor].trust_ratio(before[tensor], after[tensor])
        rules[tensor].apply(owned[number][start:stop], directions[number][start:stop], step, ratio)
