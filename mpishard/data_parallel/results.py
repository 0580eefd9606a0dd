"""The problem, the callback's argument and the result of `ShardedOptimizer.optimize`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np

if TYPE_CHECKING:
    from mpishard.checkpoint import Checkpoints
    from mpishard.data.evaluation import EarlyStopping, Evaluation
    from mpishard.record import RunRecord


# Type of a run's start and of its final parameters: an array or a FlatParameters.
P = TypeVar("P")


@dataclass(frozen=True)
class TrainingState(Generic[P]):
    """The argument of a callback after a step.

    Parameters
    ----------
    step : int
        Steps of the optimizer so far, including those before a restored state; samples continue in the same way.
    loss : float
        Mean loss over the samples of this step, before its update.  In steps without synchronization, as between the
        averages of `LocalSGDOptimizer`, the mean is over this rank's samples.
    learning_rate : float
        Learning rate of this step; with a method the length of its last step, as a multiple of the direction.
    gradient_norm : float
        2-norm of the averaged gradient, before clipping; NaN unless clipping or a tolerance needs it.  With a method
        such as `LBFGS` the largest element of the projected gradient at the last iterate.
    samples : int
        Samples that this run has used so far, over all ranks.
    seconds : float
        Time since the loop began.
    parameters : array or FlatParameters
        The current parameters, not a copy.
    validation_loss : float
        The newest validation loss of `evaluate`, that after this step if one is due; NaN before the first.
    """

    step: int
    loss: float
    learning_rate: float
    gradient_norm: float
    samples: int
    seconds: float
    parameters: P
    validation_loss: float = math.nan


@dataclass(frozen=True)
class OptimizationResult(Generic[P]):
    """The result of an optimization, the same on every rank except for `communication`.

    Parameters
    ----------
    parameters : array or FlatParameters
        The final parameters, in the form of the start: an array for an array, or the FlatParameters that was trained,
        with tensors by name: ``result.parameters["bias"]``.  If a model is split over ranks (ZeRO-3, tensor or pipeline
        ranks), each rank has its part, and ``HybridShardedModel.gather_full_parameters`` makes one array.
    loss_history : ndarray, float64 (steps,)
        Mean loss of each step's samples, before its update.
    steps, samples : int
        Steps taken and samples used, over all ranks, from the beginning of the run on, including resumed steps.
    resumed_steps : int
        Steps before the checkpoint from which the run resumed; 0 without one.
    skipped_steps : int
        Steps left out for gradients that were not finite, without those before the checkpoint.
    seconds : float
        Duration, without the time before the checkpoint.
    stop_reason : str
        ``"steps"``, ``"tolerance"``, ``"seconds"``, ``"callback"`` or ``"patience"`` of `stop_early`; ``"signal"``
        after Ctrl-C or another signal that ends a run in order.  With a method also its own: ``"gradient"``,
        ``"decrease"`` and ``"step"`` where it has converged, ``"iterations"`` and ``"evaluations"`` at its limits,
        ``"line search"``, ``"wall"``, ``"unbounded"``, ``"range"`` and ``"not finite"`` where it cannot continue.
    communication : dict
        Communication of this rank over all axes since the mesh was made: calls, bytes sent and seconds, by kind.
    validation_steps : ndarray, int64 (evaluations,)
        Steps after which the validation set was evaluated, from the beginning of the run on.
    validation_losses : ndarray, float64 (evaluations,)
        Its mean losses.
    """

    parameters: P
    loss_history: np.ndarray
    steps: int
    samples: int
    resumed_steps: int
    skipped_steps: int
    seconds: float
    stop_reason: str
    communication: dict[str, dict[str, float]]
    validation_steps: np.ndarray
    validation_losses: np.ndarray


class Problem(Protocol[P]):
    """The interface that `optimize` needs, as of an `OptimizationProblem`."""

    def minimize(
        self,
        optimizer: Any,
        *,
        callback: Callable[[TrainingState[P]], bool | None] | None,
        progress: bool,
        checkpoints: Checkpoints | None,
        resume: bool,
        record: RunRecord | None,
        evaluate: Evaluation | None,
        stop_early: EarlyStopping | None,
    ) -> OptimizationResult[P]:
        """Take steps of the optimizer; `ShardedOptimizer.optimize` calls this."""
