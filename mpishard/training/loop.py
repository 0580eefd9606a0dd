"""The training loop: takes the steps of a problem on ranks that stay the same."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpishard.data_parallel.results import OptimizationResult
from mpishard.data_parallel.sharded_optimizer import ShardedOptimizer
from mpishard.launch.signals import Interrupts
from mpishard.training.objective import Objective, RunOptions, Scaling, StopRequest
from mpishard.training.run import StepOutcome, TrainingRun
from mpishard.training.step_runner import check_sums


class Loop:
    """One run of the training loop.  Creation is collective over the optimizer's mesh.

    Ranks synchronize in the steps in which their optimizer synchronizes.  In other steps a rank knows only its own
    loss, and a request to stop waits for the next synchronization.

    Parameters
    ----------
    problem : Objective
        What is minimised.
    optimizer : ShardedOptimizer
        Takes the steps.
    options : RunOptions
        The checked options of the run.
    """

    def __init__(self, problem: Objective[Any], optimizer: ShardedOptimizer, options: RunOptions) -> None:
        self._training = TrainingRun(problem, optimizer, options, Scaling("constant", optimizer.axis.size))
        self._watching = options.watching
        self._interrupts = Interrupts(speaks=optimizer.mesh.rank == 0)
        self._requested: int = StopRequest.NONE  # this rank's strongest request since ranks last synchronized

    def run(self) -> OptimizationResult[Any]:
        """Take steps until a goal is reached or a rank requests to stop.  Collective.

        Returns
        -------
        OptimizationResult
            The result, the same on all ranks except for `communication`.
        """
        training = self._training
        optimizer, batches = training.optimizer, training.batches
        training.begin()
        reason = training.reached_goal()
        training.save_best()
        if optimizer.mesh.debug and not reason:
            check_sums(training.runner, batches.sampler.following(batches.position, batches.size))
        # If ranks agree in every update, they learn of Ctrl-C there, and need no further collective.
        self._watching |= not optimizer.state.agrees_in_update
        try:
            with self._interrupts:
                while not reason:
                    reason = self._step(training.next_step)
                    training.save(last=bool(reason))
        finally:
            training.close()
        return training.result(reason)

    def _step(self, step: int) -> str:
        """Take one step; returns the reason to stop, or an empty string."""
        training = self._training
        outcome = training.take_step(step, self._interrupts)
        training.finish_step(outcome)
        training.evaluate()
        return self._decide(outcome, training.stop_request(step, outcome))

    def _decide(self, outcome: StepOutcome, request: int) -> str:
        """Agree on whether to stop, if ranks synchronized in this step; returns the reason, or an empty string."""
        training = self._training
        optimizer = training.optimizer
        self._requested = max(self._requested, request)
        if not outcome.synchronized:
            reason = training.why_stop(StopRequest.NONE)
            if reason:  # the ranks meet no more in a step
                training.held.raise_on_all()
            return reason
        training.losses.reduce()
        if self._watching:
            self._requested = StopRequest.SIGNAL if self._interrupts.came else self._requested
            own = np.array([self._requested, optimizer.settings.changed], np.int64)
            self._requested, changed = optimizer.world.all_reduce(own, op="max", label="control").tolist()
            if changed:  # by a callback
                optimizer.settings.agree()
        elif optimizer.state.interrupted:
            self._requested = StopRequest.SIGNAL
        return training.why_stop(self._requested)
