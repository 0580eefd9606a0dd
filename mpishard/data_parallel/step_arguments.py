"""The arguments of one call of `ShardedOptimizer.step`, checked on their rank before ranks compare them."""

from __future__ import annotations

from typing import Any

from mpishard.data_parallel.optimizer_state import Binding
from mpishard.data_parallel.settings import Configured
from mpishard.data_parallel.validation import check_count, check_gradients, check_no_gradients
from mpishard.minimizers import Method
from mpishard.parameters.flat import FlatParameters, check_flat

Array = Any


def checked_arguments(
    optimizer: Configured,
    binding: Binding,
    parameters: Array | FlatParameters,
    gradients: Array | None,
    count: float | None,
) -> tuple[FlatParameters | None, Exception | None]:
    """The parameters by name, or None and the error in this rank's arguments."""
    try:
        named = _named(binding, parameters, gradients)
        if named.carried is not None:
            named.carried.check_intact()
        if gradients is not None:
            check_gradients(named, gradients)
        waiting = binding.is_bound and binding.strategy.reducer.accumulation.total is not None
        if isinstance(parameters, FlatParameters) and (gradients is not None or waiting):
            check_no_gradients(parameters)
        check_count(count)
        binding.check_model(named)
        if isinstance(optimizer.rule, Method):
            raise TypeError(
                f"{type(optimizer.rule).__name__} decides by the value, which step() does not have; use "
                "optimizer.optimize(problem)"
            )
        if optimizer.rule.live is not None:
            optimizer.rule.live.check()
        optimizer.rule.learning_rate(binding.counters.steps + 1)  # a schedule that raises does so before all changes
    except Exception as error:  # of any kind: all ranks must learn of it
        return None, error
    return named, None


def _named(binding: Binding, parameters: Array | FlatParameters, gradients: Array | None) -> FlatParameters:
    if isinstance(parameters, FlatParameters):
        return parameters
    check_flat("parameters", parameters, written=True)
    if gradients is None:
        raise TypeError("step(parameters, gradients) needs the gradients of a flat array of parameters")
    known = binding.parameters
    same = known is not None and known.sharded is None and known.flat is parameters
    return known if same and known is not None else FlatParameters.over(parameters)
