"""The problem of minimising a mean loss over samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from mpishard.arguments import flag, mapping, shown
from mpishard.comm.errors import CaughtError, on_any
from mpishard.data.evaluation import EarlyStopping, Evaluation
from mpishard.data_parallel.results import OptimizationResult, P, TrainingState
from mpishard.data_parallel.sharded_optimizer import ShardedOptimizer
from mpishard.nn.decoder import Decoder
from mpishard.nn.model_facts import MODEL, fields_of
from mpishard.parameters.flat import FlatParameters, Model
from mpishard.record import RunRecord
from mpishard.training.objective import Objective, ObjectiveOptions, RunOptions
from mpishard.training.run import Loop
from mpishard.training.step_runner import arguments_of_loss, check_data, check_evaluation

if TYPE_CHECKING:
    from mpishard.checkpoint import Checkpoints  # with h5py: only for those who have checkpoints


@dataclass(frozen=True)
class OptimizationProblem(Objective[P]):
    """An optimization problem: minimise the mean of a loss over samples.

    `mpishard.minimize` with ``samples=N`` minimises the sum instead: its value and gradients are N times as large, and
    so are the weights of terms that regularise, and the tolerance of the gradient, for the same result.

    Parameters
    ----------
    function : callable
        ``function(parameters, samples, gradients) -> loss``: for one micro-batch, whose sample indices are `samples`
        (int64, never empty), return the summed loss and ADD its gradient into `gradients`.  The function must only read
        parameters and samples; the first step raises if it changes them.  Parameters and gradients are flat arrays like
        `start`.  If `start` is a FlatParameters, the function gets `start` and its `GradientReducer`; add to them by
        name, ``gradients["k"] += ...``, or let the model write them.  If ranks wait for each other inside a model
        (ZeRO-2 and 3, tensor or pipeline ranks), all ranks call the function equally often, some with no samples.
    start : 1-D array or FlatParameters
        The initial parameters.  All ranks get the values of rank 0, with a warning if theirs differ.  An array is
        copied, to memory that DLPack can share with JAX too; a FlatParameters is trained in place.  Of named arrays,
        `FlatParameters.of` makes one; other trees are for `mpishard.minimize`.
    samples : int
        Number of samples.
    batch_size : int
        Samples in a step, over all ranks; at least the number of data-parallel ranks and at most `samples`.
    micro_batch_size : int, optional
        Maximum number of samples in one call of `function`.  Default: a rank's whole share of the batch, or with
        ``ShardingConfiguration(reproducible=True)`` a sixteenth of the batch.
    steps : int, optional
        Stop after this number of steps, including those before a checkpoint from which the run resumes.
    tolerance : float, optional
        Stop when the 2-norm of the averaged gradient is at most this; with a method such as `LBFGS` the largest element
        of the projected gradient.
    seconds : float, optional
        Stop after the step in which this time is over on any rank.
    seed : int
        Decides the order of the samples.
    tokens_per_sample : int
        Number of equal terms in the loss of one sample; losses and gradients are means over all terms.
    facts : mapping
        Further facts for the checkpoints of the run, see `save_checkpoint`; `for_model` adds a model's architecture.
    product : callable, optional
        ``product(parameters, direction, samples, products)``: ADD the Hessian of the summed loss of these samples, or
        their Gauss-Newton matrix, times `direction` into `products`, as `function` does with gradients.  `direction` is
        like the parameters.  Only `TruncatedNewton` needs it.
    several : callable, optional
        ``several(parameters, micro_batches, gradients) -> losses``: as `function`, for a list of micro-batches, each an
        array of sample indices, which may be empty; return the loss of each.  A run with ``reproducible=True`` calls
        this in place of `function`: on a pipeline with all micro-batches of a rank, which pass through it together,
        else with one.  The function must mark each in the gradients, as `mpishard.pipeline.runtime.Pipeline` does, and
        must not cut them further.  `for_model` makes it of a model's `losses_and_gradient`.
    expect : callable, optional
        ``expect(micro_batches)``: called before each step on each rank with those that it will compute in this step and
        the next ones, each an array of sample indices, in their order; for what reads ahead.  `for_model` gives that of
        `mpishard.data.ReadAhead`.
    model : model, optional
        The model whose loss the function returns, for `Evaluation.for_model`; `for_model` gives it.

    Raises
    ------
    TypeError
        If a function cannot be called, `start` is neither a flat array nor a FlatParameters, a number is of another
        type, or `facts` is no mapping.
    ValueError
        If `start` is empty, a number is out of its range, or `batch_size` is above `samples`.

    Notes
    -----
    At least one of `steps`, `tolerance` and `seconds` is needed, or a callback that stops the run.  A method such as
    `LBFGSB` needs none: it ends by its own limits and tolerances.
    """

    @classmethod
    def for_model(
        cls,
        model: Model,
        batch: Callable[[np.ndarray], tuple[Any, ...]],
        *,
        samples: int,
        batch_size: int,
        facts: Mapping[str, Any] | None = None,
        **options: Unpack[ObjectiveOptions],
    ) -> OptimizationProblem[FlatParameters]:
        """The problem of training a model.  Not collective.

        Parameters
        ----------
        model : model
            An object with ``parameters``, a FlatParameters, and ``loss_and_gradient``, such as `mpishard.nn.GPT`; it
            may also have ``losses_and_gradient``, see `mpishard.parameters.flat.Model`.
        batch : callable
            ``batch(samples)`` returns the arguments of ``model.loss_and_gradient`` for these samples.  A model of
            `mpishard.nn` with dropout gets the numbers of the samples, too.
        samples, batch_size : int
            As for the class.
        facts : mapping, optional
            As for the class; the model's architecture is added.
        **options
            As for the class: micro_batch_size, steps, tolerance, seconds, seed, tokens_per_sample.

        Returns
        -------
        OptimizationProblem
            Its start is ``model.parameters``, which are trained in place.

        Raises
        ------
        TypeError, ValueError
            As for the class; if a `TokenData` has fewer samples than `samples`; or, for a model of `mpishard.nn`, if
            the samples of the `TokenData` are longer than its context, or their vocabulary is larger.
        """
        architecture = fields_of(getattr(model, "architecture", None))
        own = {} if architecture is None else {MODEL: architecture}

        losses_and_gradient: Any = getattr(model, "losses_and_gradient", None)
        whole = getattr(model, "model", model)  # of a model that was made distributed
        drops = isinstance(whole, Decoder) and whole.dropout > 0

        def arguments(samples: np.ndarray) -> tuple[Any, ...]:
            return arguments_of_loss(batch, samples) + ((samples,) if drops else ())

        def function(parameters: Any, samples: np.ndarray, gradients: Any) -> float:
            return model.loss_and_gradient(*arguments(samples))

        def several(parameters: Any, micro_batches: Sequence[np.ndarray], gradients: Any) -> Sequence[float]:
            return losses_and_gradient([arguments(samples) for samples in micro_batches])

        problem = OptimizationProblem(
            function,
            model.parameters,
            samples,
            batch_size,
            facts=own if facts is None else {**own, **mapping("facts", facts, "names and values")},
            several=None if losses_and_gradient is None else several,
            expect=getattr(batch, "expect", None),
            model=model,
            **options,
        )
        check_data(model, batch, problem.samples)
        return problem

    def minimize(
        self,
        optimizer: ShardedOptimizer,
        *,
        callback: Callable[[TrainingState[P]], bool | None] | None = None,
        progress: bool = True,
        checkpoints: Checkpoints | None = None,
        resume: bool = False,
        record: RunRecord | None = None,
        evaluate: Evaluation | None = None,
        stop_early: EarlyStopping | None = None,
        loop: Callable[[Objective[P], ShardedOptimizer, RunOptions], Any] | None = None,
    ) -> OptimizationResult[P]:
        """Run the loop.  Collective over the optimizer's mesh; `ShardedOptimizer.optimize` calls this.

        Parameters
        ----------
        optimizer : ShardedOptimizer
            Takes the steps.
        callback : callable, optional
            See `ShardedOptimizer.optimize`, as for the other options.
        progress : bool
            Whether the first rank shows the progress.
        checkpoints : Checkpoints, optional
            Where the run is saved.
        resume : bool
            Whether to continue from its newest checkpoint.
        record : RunRecord, optional
            What reports the run.
        evaluate : Evaluation, optional
            A validation set.
        stop_early : EarlyStopping, optional
            When its losses end the run.
        loop : callable, optional
            ``loop(problem, optimizer, options)`` takes the place of the training loop.

        Returns
        -------
        OptimizationResult
            Or what `loop` returns.

        Raises
        ------
        ValueError
            On every rank, if an option of any rank is invalid, problems or settings differ between ranks, or nothing
            would stop the run.
        TypeError
            On every rank, if an option of any rank has a wrong type.
        """
        with CaughtError() as caught:
            _check_options(callback, progress, checkpoints, resume, record, optimizer)
            best = getattr(checkpoints, "best", None) is not None
            check_evaluation(evaluate, stop_early, best, self)
            if evaluate is not None:
                optimizer.state.check_evaluation(evaluate.averaged)
        given: dict[str, Any] = {"checkpoints": checkpoints is not None, "record": record is not None, "resume": resume}
        given["stop_early"] = stop_early
        given["evaluation"] = evaluate.settings if caught.error is None and evaluate is not None else None
        self._agree_on_problem(optimizer, given, caught.error)
        watching = on_any(optimizer.world, callback is not None or self.seconds is not None)
        ends = optimizer.state.ends_by_itself or self.steps is not None or self.tolerance is not None
        if not (ends or watching):
            raise ValueError("nothing would stop this optimization; give steps, tolerance, seconds or a callback")
        options = RunOptions(callback, progress, watching, checkpoints, resume, record, evaluate, stop_early)
        result: OptimizationResult[P] = (
            Loop(self, optimizer, options).run() if loop is None else loop(self, optimizer, options)
        )
        return result

    def _agree_on_problem(
        self, optimizer: ShardedOptimizer, given: Mapping[str, Any], problem: Exception | None
    ) -> None:
        """Raise on all ranks if any has an error, or if their problems or settings differ.  Collective."""
        start = self.start if isinstance(self.start, FlatParameters) else FlatParameters.over(self.start)
        own = {
            "start": f"{start.description} ({start.fingerprint:x})",
            **start.model_settings,
            **self.settings,
            **given,
        }
        optimizer.settings.agree({name: str(value) for name, value in own.items()}, problem)


def _check_options(
    callback: Any, progress: Any, checkpoints: Any, resume: Any, record: Any, optimizer: ShardedOptimizer
) -> None:
    """Raise unless these options of `minimize` are valid."""
    if not (callback is None or callable(callback)):
        raise TypeError(f"callback={shown(callback)} must be a function of a TrainingState")
    if not (checkpoints is None or hasattr(checkpoints, "due")):
        raise TypeError(f"checkpoints must be Checkpoints(folder, mesh), got {type(checkpoints).__name__}")
    if not (record is None or isinstance(record, RunRecord)):
        raise TypeError(f"record must be RunRecord(folder, mesh), got {type(record).__name__}")
    if record is not None and record.mesh.ledger is not optimizer.mesh.ledger:
        raise ValueError("the record is not of the optimizer's mesh; make both with one mesh")
    flag("progress", progress)
    if flag("resume", resume) and checkpoints is None:
        raise ValueError("resume=True needs to know from where; give checkpoints=Checkpoints(folder, mesh)")
