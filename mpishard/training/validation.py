"""The validation losses of a run, and how they are computed on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpishard.arguments import returned, shown
from mpishard.comm.agreement import DeferredError
from mpishard.data.evaluation import EarlyStopping, Evaluation
from mpishard.data.sampling import MICRO_BATCHES, micro_batches
from mpishard.reduction.tree_sum import tree_sum
from mpishard.training.step_runner import StepRunner, Untouched, arguments_of_loss, check_data

_AT_ONCE = 4  # micro-batches for each stage of a pipeline that pass through it together
_NAMED = 5  # samples that a message lists


class Validated(NamedTuple):
    """The validation loss after a step."""

    step: int
    loss: float


class Validation:
    """The validation losses of one run.

    Without an evaluation nothing is evaluated; losses of a checkpoint are kept all the same.  `history` has all losses
    so far, the same on all ranks.
    """

    def __init__(self, evaluation: Evaluation | None) -> None:
        self.evaluation = evaluation
        self.history: list[Validated] = []
        self._looks = True

    def due(self, step: int) -> bool:
        """Return True if the set is to be evaluated after a step.  The same on all ranks."""
        if self.evaluation is None or step % self.evaluation.every:
            return False
        return not self.history or self.history[-1].step < step

    def best_at(self, step: int) -> bool:
        """Return True if the loss after this step is known and below all earlier ones."""
        if not self.history or self.history[-1].step != step:
            return False
        return all(self.history[-1].loss < each.loss for each in self.history[:-1])

    @property
    def last(self) -> float:
        """The newest loss; NaN before the first."""
        return self.history[-1].loss if self.history else math.nan

    def evaluate(self, step: int, runner: StepRunner, deferred_error: DeferredError) -> float:
        """Compute the loss after a step, and keep it.  Collective over the mesh.

        On all ranks, raises the function's error if it fails on any, FloatingPointError if the loss of any micro-batch
        is NaN or infinite, and ValueError if the function changes what it must only read.
        """
        assert self.evaluation is not None
        evaluation, trained, mesh = self.evaluation, runner.problem, runner.optimizer.mesh
        size = evaluation.micro_batch_size or trained.micro_batch_size or -(-trained.batch_size // MICRO_BATCHES)
        micro = micro_batches(np.arange(evaluation.samples), size)
        losses = np.zeros(len(micro))
        own = range(runner.axis.rank, len(micro), runner.axis.size)
        rounds = -(-len(micro) // runner.axis.size) if runner.together else len(own)
        together = _AT_ONCE * mesh.pipeline.size if mesh.pipeline.size > 1 else 1
        nothing = micro[0][:0]
        call = self._losses_of_model(runner) if evaluation.of_batches else self._losses(runner)
        with deferred_error.capture(alone=not runner.together):
            for first in range(0, rounds, together):
                numbers = list(own[first : first + together])
                empty = [nothing] * (min(together, rounds - first) - len(numbers))
                look = Untouched(runner.parameters, micro[numbers[0]]) if self._looks and numbers else None
                found = call([*(micro[number] for number in numbers), *empty])
                losses[numbers] = [_number(loss) for loss in found[: len(numbers)]]
                problem = None if look is None else look.problem()
                if problem is not None:
                    raise problem
                self._looks = mesh.debug
        deferred_error.raise_on_all()
        runner.axis.all_reduce(losses, label="loss")
        if runner.axis.size < mesh.size:
            mesh.world.broadcast(losses, label="loss")  # what follows from it must be the same on all ranks
        for number in np.flatnonzero(~np.isfinite(losses))[:1].tolist():
            more = ", ..." if len(micro[number]) > _NAMED else ""
            named = ", ".join(map(str, micro[number][:_NAMED].tolist())) + more
            raise FloatingPointError(
                f"the validation loss after step {step} is not finite: {losses[number]} of validation samples {named}; "
                "parameters and state are those of that step"
            )
        loss = tree_sum(losses.tolist()) / (evaluation.samples * evaluation.tokens_per_sample)
        self.history.append(Validated(step, loss))
        return loss

    def _losses(self, runner: StepRunner) -> Callable[[Sequence[np.ndarray]], Sequence[Any]]:
        """The losses of micro-batches by the user's function, one by one."""
        assert self.evaluation is not None
        function = self.evaluation.function
        return lambda micro: [function(runner.values, samples) for samples in micro]

    def _losses_of_model(self, runner: StepRunner) -> Callable[[Sequence[np.ndarray]], Sequence[Any]]:
        """The losses of micro-batches by the model of the problem, which must not cut them further."""
        assert self.evaluation is not None
        batch, model = self.evaluation.function, runner.problem.model
        if hasattr(model, "losses"):
            return lambda micro: model.losses([arguments_of_loss(batch, samples) for samples in micro])
        return lambda micro: [model.loss(*arguments_of_loss(batch, samples)) for samples in micro]


def _number(loss: Any) -> float:
    """The loss of a micro-batch that the function has returned."""
    try:
        return returned(loss)
    except (TypeError, ValueError, RuntimeError):  # PyTorch raises RuntimeError for a tensor of several elements
        what = shown(loss) if loss is None else f"a {type(loss).__name__}"
        raise TypeError(
            f"the function of an Evaluation must return the summed loss of its samples as one number, got {what}"
        ) from None


def check_evaluation(evaluation: Any, stop_early: Any, best: bool, problem: Any) -> None:
    """Raise unless it is an evaluation that fits the problem, and there is one where its losses are needed.

    `evaluation` and `stop_early` are what a user gave to `optimize`; `best`: the checkpoints keep the best one.
    TypeError if they are of another type, or the evaluation is for a model and the problem has none with a loss;
    ValueError if losses are needed without an evaluation.
    """
    if not (stop_early is None or isinstance(stop_early, EarlyStopping)):
        raise TypeError(f"stop_early must be EarlyStopping(patience=5), got {type(stop_early).__name__}")
    if evaluation is None:
        needs = "Checkpoints(best=...)" if best else "" if stop_early is None else "stop_early"
        if needs:
            raise ValueError(f"{needs} needs validation losses; give evaluate=Evaluation(function, samples, every=50)")
        return
    if not isinstance(evaluation, Evaluation):
        raise TypeError(f"evaluate must be an Evaluation(function, samples, every=50), got {type(evaluation).__name__}")
    if evaluation.of_batches:
        check_data(problem.model, evaluation.function, evaluation.samples)
    if evaluation.of_batches and not callable(getattr(problem.model, "loss", None)):
        what = "a problem of a function" if problem.model is None else f"a {type(problem.model).__name__} without one"
        raise TypeError(
            f"Evaluation.for_model needs a model with loss(*batch), got {what}; give "
            "Evaluation(function, samples, every=...), with function(parameters, samples)"
        )
