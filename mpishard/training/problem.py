"""Minimising a sum over samples: the problem."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishard.arguments import flag, shown
from mpishard.data_parallel.results import OptimizationResult, P, TrainingState
from mpishard.data_parallel.sharded_optimizer import ShardedOptimizer
from mpishard.parameters.flat import FlatParameters, Model
from mpishard.record import RunRecord
from mpishard.training.loop import Loop
from mpishard.training.objective import Objective
from mpishard.training.options import RunOptions

if TYPE_CHECKING:
    from mpishard.checkpoint import Checkpoints  # with h5py: only for those who have checkpoints


@dataclass(frozen=True)
class OptimizationProblem(Objective[P]):
    """What to minimise: the mean over samples of a loss.

    Parameters
    ----------
    function : callable
        ``function(parameters, samples, gradients) -> loss``: for one micro-batch, whose sample indices are `samples`
        (int64, never empty), return the summed loss and ADD its gradient into `gradients`.  Parameters and samples are
        to be read only: a function that changes them is refused in the first step.  Parameters and gradients are flat
        arrays like `start`; if `start` is a FlatParameters they are that and its `GradientBuckets`, which are added to
        by name, ``gradients["k"] += ...``, or written by its model.  Where ranks wait for each other inside a model
        (ZeRO-2 and 3, tensor or pipeline ranks) all of them are called equally often, some with no samples.
    start : 1-D array or FlatParameters
        Where to start; rank 0's values count, and other ranks get these, with a warning if theirs differ.  An array is
        copied, to memory that DLPack shares with JAX too; a FlatParameters is trained in place.
    samples : int
        Number of samples.
    batch_size : int
        Samples a step, over all ranks; at least the number of data-parallel ranks and at most `samples`.
    micro_batch_size : int, optional
        Most samples in one call of `function`; default: a rank's whole share of the batch, or with
        ``ShardingConfiguration(reproducible=True)`` a sixteenth of the batch.
    steps : int, optional
        Stop after so many steps of this run; those before the checkpoint that it goes on from are among them.
    tolerance : float, optional
        Stop when the 2-norm of the averaged gradient is at most this.
    seconds : float, optional
        Stop after the step in which this time is over on any rank.
    seed : int
        Decides the order of the samples.
    facts : mapping
        What else the checkpoints of the run shall say, see `save_checkpoint`; a model's architecture by itself.
    tokens_per_sample : int
        How many equal terms the loss of one sample sums over; losses and gradients are means over all of them.

    At least one of `steps`, `tolerance` and `seconds` must be given, or a callback that stops.
    """

    @classmethod
    def for_model(
        cls,
        model: Model,
        batch: Callable[[np.ndarray], tuple[Any, ...]],
        *,
        samples: int,
        batch_size: int,
        micro_batch_size: int | None = None,
        steps: int | None = None,
        tolerance: float | None = None,
        seconds: float | None = None,
        seed: int = 0,
        tokens_per_sample: int = 1,
        facts: Mapping[str, Any] | None = None,
    ) -> OptimizationProblem[FlatParameters]:
        """Train a model: ``batch(samples)`` gives the arguments of ``model.loss_and_gradient``; the rest as above."""
        architecture = getattr(model, "architecture", None)
        own = {}
        if is_dataclass(architecture) and not isinstance(architecture, type):
            own = {"model.json": asdict(architecture)}

        def function(parameters: Any, samples: np.ndarray, gradients: Any) -> float:
            return model.loss_and_gradient(*batch(samples))

        return OptimizationProblem(
            function,
            model.parameters,
            samples,
            batch_size,
            micro_batch_size=micro_batch_size,
            steps=steps,
            tolerance=tolerance,
            seconds=seconds,
            seed=seed,
            tokens_per_sample=tokens_per_sample,
            facts={**own, **(facts or {})},
        )

    def minimize(
        self,
        optimizer: ShardedOptimizer,
        *,
        callback: Callable[[TrainingState[P]], bool | None] | None = None,
        progress: bool = True,
        checkpoints: Checkpoints | None = None,
        resume: bool = False,
        record: RunRecord | None = None,
        loop: Callable[[Objective[P], ShardedOptimizer, RunOptions], Loop] | None = None,
    ) -> OptimizationResult[P]:
        """Run the loop; `ShardedOptimizer.optimize` calls this and tells of the options.

        `loop` makes it, for optimizers that need another one than `Loop`.
        """
        problem: Exception | None = None
        try:
            _check_options(callback, progress, checkpoints, resume, record)
        except (TypeError, ValueError) as error:
            problem = error
        given = {"checkpoints": checkpoints is not None, "record": record is not None, "resume": resume}
        self._agree_on_problem(optimizer, given, problem)
        watches = np.array([callback is not None or self.seconds is not None], np.int64)
        watching = bool(optimizer.world.all_reduce(watches, op="max", label="control")[0])
        if self.steps is None and self.tolerance is None and not watching:
            raise ValueError("nothing would stop this optimization; give steps, tolerance, seconds or a callback")
        options = RunOptions(callback, progress, watching, checkpoints, resume, record)
        return (loop or Loop)(self, optimizer, options).run()

    def _agree_on_problem(
        self, optimizer: ShardedOptimizer, given: Mapping[str, Any], problem: Exception | None
    ) -> None:
        """Raise on all ranks if any has a problem, or if they solve different ones or in different ways."""
        start = self.start if isinstance(self.start, FlatParameters) else FlatParameters.over(self.start)
        own = {"start": f"{start.description} ({start.fingerprint:x})", **self.settings, **given}
        optimizer.settings.agree({name: str(value) for name, value in own.items()}, problem)


def _check_options(callback: Any, progress: Any, checkpoints: Any, resume: Any, record: Any) -> None:
    """Raise unless these options of `minimize` are what they should be."""
    if not (callback is None or callable(callback)):
        raise TypeError(f"callback={shown(callback)} must be a function of a TrainingState")
    if not (checkpoints is None or hasattr(checkpoints, "due")):
        raise TypeError(f"checkpoints must be Checkpoints(folder, mesh), got {type(checkpoints).__name__}")
    if not (record is None or isinstance(record, RunRecord)):
        raise TypeError(f"record must be RunRecord(folder, mesh), got {type(record).__name__}")
    flag("progress", progress)
    if flag("resume", resume) and checkpoints is None:
        raise ValueError("resume=True needs to know from where; give checkpoints=Checkpoints(folder, mesh)")
