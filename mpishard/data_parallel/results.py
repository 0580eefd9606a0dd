"""What `optimize` takes, what a callback sees meanwhile, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np

if TYPE_CHECKING:
    from mpishard.checkpoint import Checkpoints
    from mpishard.record import RunRecord

# What a run starts from, and what it returns: an array or a FlatParameters.
P = TypeVar("P")


@dataclass(frozen=True)
class TrainingState(Generic[P]):
    """What a callback sees after a step.

    Attributes
    ----------
    step : int
        Steps that the optimizer has behind it; they go on where a restored state stopped, and so do the samples.
    loss : float
        Mean loss over the samples of this step, before its update; in steps in which ranks do not meet, as between the
        averages of `LocalSGDOptimizer`, over those of this rank.
    learning_rate : float
        Of this step.
    gradient_norm : float
        Of the averaged gradient, before clipping; NaN unless clipping or a tolerance needs it.
    samples : int
        Samples that this run has used so far, over all ranks.
    seconds : float
        Since the loop began.
    parameters : array or FlatParameters
        The current parameters, not a copy.
    """

    step: int
    loss: float
    learning_rate: float
    gradient_norm: float
    samples: int
    seconds: float
    parameters: P


@dataclass(frozen=True)
class OptimizationResult(Generic[P]):
    """What came of an optimization, the same on every rank but for `communication`.

    Attributes
    ----------
    parameters : array or FlatParameters
        The final parameters, as they were given: an array for an array, or the FlatParameters that was trained, whose
        tensors have their names: ``result.parameters["bias"]``.  Of a model that is spread over ranks (ZeRO-3, tensor
        or pipeline ranks) each rank has its part, and ``HybridShardedModel.gather_full_parameters`` makes one array.
    loss_history : ndarray, float64 (steps,)
        Mean loss of each step's samples, before its update.
    steps, samples : int
        Steps done and samples used, over all ranks, from the beginning of the run on.
    resumed_steps : int
        Those of the steps that lay behind the checkpoint from which it went on; 0 for a run from the beginning.
    skipped_steps : int
        Steps whose gradients were not finite and were left out, since it went on.
    seconds : float
        Since it went on.
    stop_reason : str
        ``"steps"``, ``"tolerance"``, ``"seconds"`` or ``"callback"``; ``"signal"`` after Ctrl-C, of an elastic run also
        after other signals.
    communication : dict
        What this rank communicated over all axes since the mesh was made: calls, bytes sent and seconds by kind.
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


class Problem(Protocol[P]):
    """What `optimize` can minimise: an `OptimizationProblem`."""

    def minimize(
        self,
        optimizer: Any,
        *,
        callback: Callable[[TrainingState[P]], bool | None] | None,
        progress: bool,
        checkpoints: Checkpoints | None,
        resume: bool,
        record: RunRecord | None,
    ) -> OptimizationResult[P]:
        """Take steps of the optimizer; `ShardedOptimizer.optimize` calls this."""
        ...
