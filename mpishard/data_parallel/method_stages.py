"""The next stage of a method: the minimisation of another function, from the last iterate on."""

from __future__ import annotations

from mpishard.arguments import flag
from mpishard.data_parallel.method_state import MethodState
from mpishard.data_parallel.optimizer_state import Binding
from mpishard.data_parallel.settings import Configured


def begin_stage(optimizer: Configured, binding: Binding, state: MethodState | None, keep_history: bool) -> None:
    """Begin it; arguments and errors are those of `ShardedOptimizer.begin_stage`.  Collective over the mesh."""
    if state is None:
        raise TypeError(
            f"{type(optimizer.rule).__name__} is a rule and has no stages: call optimize with the next problem"
        )
    if not binding.is_bound:
        raise ValueError(
            "begin_stage goes on from the last iterate, and this optimizer has no parameters yet: call it between "
            "two calls of optimize, or after load_checkpoint; the first stage needs none"
        )
    problem: Exception | None = None
    try:
        keep_history = flag("keep_history", keep_history)
    except TypeError as error:
        problem = error
    binding.settings.agree({"keep_history": str(keep_history)}, problem)
    state.begin_stage(keep_history)
