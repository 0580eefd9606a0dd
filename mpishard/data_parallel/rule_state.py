"""The state of an optimizer whose steps an update rule takes: sum the gradients, look at them, clip, apply the rule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mpishard.arguments import kind_of
from mpishard.backend import exact_norms
from mpishard.data_parallel.auxiliary_state import AuxiliaryState
from mpishard.data_parallel.optimizer_state import OptimizerState
from mpishard.data_parallel.rank_state import EMA, RankState, slot_names_of_rule, slots_of_rule
from mpishard.data_parallel.settings import Configured, settings_of_rule
from mpishard.data_parallel.update import Factors, apply_rule
from mpishard.data_parallel.validation import check_copies, check_replacement, check_rule_fits
from mpishard.launch.job_notes import raised_by_all
from mpishard.layout.run_state import whole_fact
from mpishard.minimizers import Method
from mpishard.optim import Muon, Rule
from mpishard.optim.formulas import clip_by_value, moving_average, muon_apply
from mpishard.optim.rule import LiveValues
from mpishard.parameters.flat import FlatParameters

Array = Any


def clip_factor(norm: float, most: float) -> float:
    """What gradients of this norm are multiplied by where it must not be above `most`, as PyTorch has it."""
    return min(1.0, most / (norm + 1e-6))


class RuleState(OptimizerState):
    """The state of an optimizer with an update rule; a rule that takes its own steps brings more `auxiliary` state."""

    def __init__(self, optimizer: Configured, rule: Rule, auxiliary: Sequence[AuxiliaryState] = ()) -> None:
        self._rule = rule
        super().__init__(optimizer, auxiliary if rule.own_steps is None else [*auxiliary, rule.own_steps])

    # -- the rule -----------------------------------------------------------------------------------------------------

    @property
    def rule(self) -> Rule:
        return self._rule

    def replace_rule(self, rule: Any) -> None:
        if isinstance(rule, Method):
            super().replace_rule(rule)
        if not isinstance(rule, Rule):
            wanted = "an update rule such as AdamW(lr=1e-3), or what mpishard.jax.rule_of makes of one of optax"
            raise TypeError(f"rule must be {wanted}, got {kind_of(rule)}")
        check_replacement(self._rule, rule, self.parameters)
        self._rule = rule

    @property
    def slot_names(self) -> tuple[str, ...]:
        return slot_names_of_rule(self._rule)

    def options(self) -> dict[str, str]:
        return super().options() | settings_of_rule(self._rule)

    def live_values(self) -> LiveValues | None:
        return self._rule.live

    def is_spare(self, slot: str) -> bool:
        return self._rule.is_spare(slot)

    def make_slots(self, parameters: FlatParameters, size: int) -> dict[str, Array]:
        """New state by name; on a host the formulas of the next step are compiled now."""
        rule, config, like = self._rule, self._optimizer.config, parameters.like
        rule.kernel.expect(like)
        if isinstance(rule, Muon):
            rule.rest.kernel.expect(like)
            muon_apply.expect(like)
        if rule.ema_decay is not None:
            moving_average.expect(like)
        if config.max_gradient_value is not None:
            clip_by_value.expect(like)
        exact_norms.expect_norms(like, config.max_gradient_norm is not None or rule.norm_based or rule.whole_tensors)
        return slots_of_rule(rule, size, parameters.dtype, like=like)

    def check_fits(self, parameters: FlatParameters) -> None:
        check_rule_fits(self._rule, parameters, self._optimizer.config.mesh, self._optimizer.sharding)

    def moving_averages(self) -> list[Array]:
        if self._rule.ema_decay is None:
            return super().moving_averages()
        if not self.is_bound or not self.counters.steps:
            raise ValueError("there is no average of the parameters before the first step")
        return self.strategy.ownership.state_views(self.on_rank.slots[EMA])

    def begin_stage(self, keep_history: Any) -> None:
        raise TypeError(f"{type(self._rule).__name__} is a rule and has no stages: call optimize with the next problem")

    # -- a step -------------------------------------------------------------------------------------------------------

    def check_step(self) -> None:
        if self._rule.live is not None:
            self._rule.live.check()
        self.check_rate()  # before all changes

    def check_rate(self) -> None:
        self._rule.learning_rate(self.counters.steps + 1)

    def update(self, count: float, *, loss: float, rate_factor: float, exchange_status: bool) -> bool:
        counters, on_rank = self.counters, self.on_rank
        strategy, reducer = on_rank.strategy, on_rank.strategy.reducer
        counters.learning_rate = rate_factor * self._rule.learning_rate(counters.steps + 1)
        reducer.finalize()
        divisor = float(count) * counters.scaling.value
        usable = self._gradients_are_usable(on_rank, divisor, exchange_status)
        if usable:
            self._step(on_rank, divisor, rate_factor)
        else:
            counters.skipped_steps += 1
        if not strategy.sharding.workers_differ:
            on_rank.parameters.carried.synchronize(strategy.axis)
        on_rank.prepare_step(counters)
        reducer.reset()
        if self._optimizer.config.mesh.debug and not strategy.sharding.workers_differ:
            check_copies(strategy, counters.steps)
        return usable

    def _gradients_are_usable(self, on_rank: RankState, divisor: float, exchange_status: bool) -> bool:
        """Agree on whether to take the step; compute the gradient's norm if clipping or `measure_norm` needs it."""
        counters, config = self.counters, self._optimizer.config
        inspection, mode = on_rank.inspection, config.nonfinite_gradients
        counters.gradient_norm = math.nan
        measure = config.max_gradient_norm is not None or self._optimizer.measure_norm
        if mode == "ignore" and not measure and not inspection.is_early:
            on_rank.strategy.compare_units()
            return True
        norm = inspection.agree(measure, exchange_status)
        if not math.isinf(norm):
            counters.gradient_norm = norm / divisor
            if inspection.finite_loss:
                return True
        elif counters.scaling.overflowed():
            return False
        if mode == "raise":
            what = inspection.culprits(counters.clock + 1)
            on_rank.strategy.reducer.reset()
            error = FloatingPointError(
                f"{what}; parameters and state are unchanged.  "
                'nonfinite_gradients="skip" leaves such steps out, "ignore" takes them'
            )
            alone = on_rank.strategy.sharding.workers_differ
            raise error if alone else raised_by_all(error, self._optimizer.world.size)
        return mode == "ignore"

    def _step(self, on_rank: RankState, divisor: float, rate_factor: float) -> None:
        """Clip the summed gradients, of which `divisor` makes the mean, apply the rule, and publish the parameters."""
        counters, config = self.counters, self._optimizer.config
        strategy, clip = on_rank.strategy, 1.0
        if config.max_gradient_norm is not None and not math.isnan(counters.gradient_norm):
            clip = clip_factor(counters.gradient_norm, config.max_gradient_norm)
        counters.steps += 1
        config.mesh.ledger.step = counters.clock
        if config.max_gradient_value is not None:
            rows = [(gradient,) for gradient in strategy.gradients()]
            ranges = on_rank.rule_ranges.of_all(clip_by_value)
            clip_by_value.over_ranges(rows, ranges, [(divisor, config.max_gradient_value)])
            divisor = 1.0
        apply_rule(self._rule, on_rank, counters.steps, Factors(rate_factor, divisor, clip))
        strategy.publish_parameters()
        strategy.keep_errors()
        counters.scaling.succeeded()

    @property
    def agrees_in_update(self) -> bool:
        config, measure_norm = self._optimizer.config, self._optimizer.measure_norm
        inspects = config.nonfinite_gradients != "ignore" or config.max_gradient_norm is not None or measure_norm
        return inspects and not self._optimizer.sharding.workers_differ

    # -- a run --------------------------------------------------------------------------------------------------------

    evaluates_one_function = False
    ends_by_itself = False

    def check_evaluation(self, averaged: bool) -> None:
        if averaged and self._rule.ema_decay is None:
            raise ValueError(
                f"Evaluation(averaged=True) needs an average of the parameters; give {type(self._rule).__name__} "
                "ema_decay=0.999"
            )

    @property
    def batches(self) -> int:
        return self.counters.clock

    def batches_in(self, facts: Mapping[str, Any]) -> int:
        return whole_fact(facts, "steps") + whole_fact(facts, "skipped_steps")
