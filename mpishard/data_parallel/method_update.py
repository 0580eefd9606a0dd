"""A step of a method: finish the sum of the gradient, pass it on, and go where the minimisation evaluates next."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpishard.data_parallel.method_state import MethodState
from mpishard.data_parallel.optimizer_state import Binding
from mpishard.data_parallel.settings import Configured
from mpishard.data_parallel.strategy import Strategy
from mpishard.data_parallel.validation import check_copies
from mpishard.io import log
from mpishard.minimizers.minimizer import Wanted
from mpishard.minimizers.stopping import FAILURES

Array = Any
_ROUNDING = 1e-3  # the most by which losses of the ranks of one model may differ, as a share of them


def update_by_method(
    optimizer: Configured,
    binding: Binding,
    state: MethodState,
    count: float,
    loss: float,
    *,
    nonfinite_loss: str,
    interrupted: bool,
) -> bool:
    """Pass to the minimisation the evaluation that it wanted, and make its next point the parameters.

    It wanted loss and gradient at the parameters, or a Hessian product, which then is where a gradient would be.
    `count` divides the summed gradient; `loss` is the mean. Returns True if loss and gradient were finite. Raises
    RuntimeError if the minimisation has ended. Collective over the mesh.
    """
    on_rank = binding.on_rank
    strategy, inspection, minimizer = on_rank.strategy, on_rank.inspection, state.minimizer
    if minimizer.wanted is Wanted.NOTHING:
        raise RuntimeError(
            f"this minimisation has ended ({minimizer.stop_reason}): there is no next step; make a new optimizer to "
            "start another one"
        )
    strategy.reducer.finalize()
    gradient = state.gradient(float(count))
    # The largest loss of all ranks: where they differ in the last bit, all take the same.  Infinity stands for NaN.
    known = loss if math.isfinite(loss) else math.inf
    inspection.nonfinite_loss = nonfinite_loss
    shared = np.array([known, -known, bool(nonfinite_loss), interrupted])
    strategy.team.all_reduce(shared, op="max", label="control")
    value, least = float(shared[0]), -float(shared[1])
    finite, inspection.interrupted = math.isfinite(value) and not shared[2], bool(shared[3])
    is_first = minimizer.progress.evaluations == 0
    if finite and (is_first or optimizer.config.mesh.debug) and value - least > _ROUNDING * max(abs(value), abs(least)):
        inspection.forget()
        strategy.reducer.reset()
        raise _different_losses(strategy, loss)
    if minimizer.wanted is Wanted.PRODUCT:
        tell_product(optimizer, binding, state, gradient)
    else:
        tell_value(optimizer, binding, state, value if finite else math.inf, gradient)
        state.batches += minimizer.progress.accepted
    state.publish(minimizer.point)
    if minimizer.stop_reason in FAILURES:
        culprits = f": {inspection.culprits(binding.counters.clock)}" if minimizer.stop_reason == "not finite" else ""
        if optimizer.world.rank == 0:
            name = type(optimizer.rule).__name__
            log.inform(f"{name} cannot go on: {FAILURES[minimizer.stop_reason]}{culprits}")
    inspection.forget()
    strategy.reducer.reset()
    if optimizer.config.mesh.debug:
        check_copies(strategy.copies, binding.counters.steps)
    return finite


def _different_losses(strategy: Strategy, loss: float) -> ValueError:
    """The error for ranks that return different losses of the same samples.  Collective over the mesh."""
    losses = strategy.team.allgather_object(loss)
    rank = next(rank for rank, each in enumerate(losses) if each != losses[0])
    return ValueError(
        f"the mean loss of a step is {losses[0]:.9g} on rank {strategy.team.members[0]} and {losses[rank]:.9g} on rank "
        f"{strategy.team.members[rank]}, but all ranks must have one: ranks that share the tensors of a model return "
        "the loss of all of them, as mesh.tensor.all_reduce sums it"
    )


def tell_value(optimizer: Configured, binding: Binding, state: MethodState, value: float, gradient: Array) -> None:
    """Pass value, the same on all ranks, and this rank's elements of the gradient, and count the step.

    Collective over the mesh.
    """
    counters = binding.counters
    counters.steps += 1
    optimizer.config.mesh.ledger.step = counters.clock
    state.report_start()
    state.minimizer.tell(value, gradient)
    counters.gradient_norm = state.minimizer.progress.projected_norm


def tell_product(optimizer: Configured, binding: Binding, state: MethodState, product: Array) -> None:
    """Pass this rank's elements of a Hessian product, and count the step. Collective over the mesh."""
    counters = binding.counters
    counters.steps += 1
    optimizer.config.mesh.ledger.step = counters.clock
    state.minimizer.tell_product(product)
