"""Whether gradients of a PyTorch module travel during the backward pass, chosen by the time of the first steps."""

from __future__ import annotations

from time import perf_counter

import numpy as np

from mpishard.data_parallel.sharded_optimizer import ShardedOptimizer
from mpishard.io import log

# Two steps to warm up, then four of each kind in turns; the first is with overlap.
_WARM_UP, _MEASURED = 2, 8
_GAIN = 0.01  # the part of a step's time that must be saved without overlap


class OverlapChoice:
    """Measures steps if ``overlap_communication="auto"``, and then sets `GradientReducer.overlap` for good.

    A step lasts from the end of the one before to its own end: the backward pass is in it. Both settings start the same
    sums in the same order, so that bits stay the same. Where there is nothing to choose gradients overlap, and so under
    ZeRO-3, whose parameters travel in the same pass.
    """

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        config, strategy = optimizer.config, optimizer.state.strategy
        self._optimizer = optimizer
        self._ends: list[float] = []  # of the steps so far
        self._measures = (
            config.overlap_communication == "auto"
            and config.auto_sync_gradients
            and strategy.axis.size > 1
            and len(strategy.buckets) > 1
            and not strategy.shards_parameters
            and not strategy.workers_differ
        )

    def end_step(self) -> None:
        """Note the end of a step, and set the overlap of the next. Collective at the end of the last measured one."""
        if not self._measures:
            return
        self._ends.append(perf_counter())
        reducer, world = self._optimizer.state.strategy.reducer, self._optimizer.world
        reducer.overlap = len(self._ends) % 2 == 0
        if len(self._ends) < _WARM_UP + _MEASURED:
            return
        self._measures = False
        seconds = np.diff(self._ends)[_WARM_UP - 1 :].reshape(-1, 2).min(axis=0)  # with, and without overlap
        world.all_reduce(seconds, op="max", label="control")
        reducer.overlap = bool(seconds[1] > (1 - _GAIN) * seconds[0])
        if world.rank == 0:
            log.inform(
                f"overlap of communication is {'on' if reducer.overlap else 'off'}: a step takes "
                f"{1000 * seconds[0]:.1f} ms with it and {1000 * seconds[1]:.1f} ms without"
            )
