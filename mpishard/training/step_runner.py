"""Forward and backward passes of a batch: a rank's micro-batches one by one, with their gradients into the buckets.

Debug checks: that a function only reads its arguments, and that it returns sums over its samples.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np

from mpishard.arguments import listed, returned, shown
from mpishard.backend import array as arrays
from mpishard.backend.array import aligned_copy
from mpishard.backend.process import fix_blas_threads
from mpishard.comm.agreement import DeferredError
from mpishard.data import ReadAhead, TokenData
from mpishard.data.evaluation import EarlyStopping, Evaluation
from mpishard.data.sampling import MICRO_BATCHES, TermCosts, micro_batches, share
from mpishard.data.text import Windows
from mpishard.data_parallel.sharded_optimizer import ShardedOptimizer
from mpishard.launch.job_notes import raised_by_all
from mpishard.nn.decoder import Decoder
from mpishard.parameters.flat import FlatParameters
from mpishard.parameters.reducer import GradientReducer
from mpishard.reduction.ordered import OrderedSums
from mpishard.reduction.tree_sum import TermAssignment, tree_sum
from mpishard.training.objective import Objective


class Untouched:
    """Checks one call of a function: create it before the call with the function's inputs, and read `problem` after it.

    Without the check a change of the inputs would silently give wrong results.  Read-only views are no alternative:
    Cython, Numba, PyTorch and JAX accept them with a warning or not at all, even in a correct function that only reads.
    """

    def __init__(self, parameters: FlatParameters, samples: np.ndarray) -> None:
        self._parameters = parameters
        self._samples = samples
        self._before = parameters.digest(), samples.copy()

    def problem(self) -> ValueError | None:
        """The error for inputs that the function has changed, or None."""
        values, samples = self._before
        if self._parameters.digest() != values:
            what, how = "parameters", "the optimizer changes them; for intermediate values take parameters.copy()"
        elif not np.array_equal(self._samples, samples):
            what, how = "sample indices", "for others take samples.copy()"
        else:
            return None
        return ValueError(f"the function changes the {what} that it is given, and must only read them: {how}")


def check_data(model: Any, batch: Any, samples: int) -> None:
    """Raise ValueError if data of this package has fewer samples, or does not fit a model of this package.

    `model` may be a distributed one; `batch` may read its samples by a `ReadAhead`; `samples` is the number of the
    problem, or of the evaluation.
    """
    model = getattr(model, "model", model)
    data = getattr(batch.batch if isinstance(batch, ReadAhead) else batch, "__self__", None)
    if isinstance(data, TokenData | Windows) and samples > len(data):
        raise ValueError(f"samples={samples}, but the data has {len(data)}: give samples=len(data), or less")
    if isinstance(model, Decoder) and isinstance(data, TokenData):
        data.check_model(model.vocabulary_size, model.context_length)


def arguments_of_loss(batch: Any, samples: np.ndarray) -> tuple[Any, ...]:
    """The arguments of a loss that a user's ``batch(samples)`` returns, as a tuple; TypeError if it is not iterable."""
    found = batch(samples)
    if not isinstance(found, Iterable):
        raise TypeError(
            f"batch(samples) must return the arguments of the model's loss, as (tokens, targets), got {shown(found)}"
        )
    return tuple(found)


class StepRunner:
    """Calls the function of a problem for this rank's part of each batch, after a first `attach`.

    FlatParameters of the problem are trained in place, an array is copied.  `checks_inputs`: the first call of the
    function is checked for changes of inputs that it must only read; with ``debug`` of the mesh all calls are.
    `deferred_error` takes an error of the function, unless other ranks wait for this one inside the function.
    ValueError if the optimizer has a loss scale, but the problem has no model that multiplies its gradients by it.

    `misuse` is the error for inputs that a call of the function has changed.  `nonfinite_loss` describes this rank's
    first loss in the last batch that is not finite; empty if all are finite.  `together`: ranks wait for each other
    inside the function, so that all must call it equally often.  `costs`: of the micro-batches, where each step has the
    same ones.
    """

    reducer: GradientReducer
    ordered: OrderedSums | None
    together: bool
    costs: TermCosts | None
    # The context of a micro-batch that is not the last one of its step.
    _another_follows: AbstractContextManager[None]
    # The function adds its gradient to this: the reducer, or a flat array if the function takes flat arrays.
    _gradients: Any

    def __init__(
        self, problem: Objective[Any], optimizer: ShardedOptimizer, checks_inputs: bool, deferred_error: DeferredError
    ) -> None:
        self.problem = problem
        self.optimizer = optimizer
        self.axis = optimizer.axis
        start = problem.start
        self.of_model = isinstance(start, FlatParameters)
        self.parameters = start if isinstance(start, FlatParameters) else FlatParameters.over(aligned_copy(start))
        self.parameters.reset_gradients()  # gradients of an earlier backward pass are not part of this run
        if not self.of_model and optimizer.config.loss_scale is not None:
            raise ValueError(
                "loss_scale is for models, which multiply their gradients by it; the gradient of a function of a flat "
                "array comes as it is: leave loss_scale out"
            )
        self._checks_inputs = checks_inputs
        self._deferred_error = deferred_error
        self._direction: FlatParameters | None = None  # the factor of a Hessian product, if one is wanted
        self.misuse: Exception | None = None
        self.nonfinite_loss = ""

    @property
    def values(self) -> Any:
        """The parameters in the form that the user's function, callback and result have: by name, or one flat array."""
        return self.parameters if self.of_model else self.parameters.flat

    def attach(self) -> None:
        """Bind the parameters to the optimizer; all ranks start from the parameters of the first.  Collective."""
        optimizer = self.optimizer
        strategy = optimizer.bind(self.parameters)
        strategy.copies.broadcast(self.parameters)
        self.reducer = strategy.reducer
        self.ordered = strategy.ordered
        if self.ordered is not None:
            fix_blas_threads()  # a mesh that has moved to other ranks has changed their number
        split = self.parameters.sharded is not None or optimizer.mesh.data.size < optimizer.mesh.size
        # If other ranks wait for this rank inside the model, it must run the model even without samples: they need its
        # part of the model, or they reduce after each micro-batch that the model makes.
        self.together = split or (self.of_model and self.reducer.on_demand) or self.problem.everywhere
        # Steps that repeat the same samples deal them out by what they cost; ranks that meet anew know no costs.
        full = self.problem.batch_size == self.problem.samples
        repeats = full and optimizer.state.evaluates_one_function
        alone = optimizer.mesh.data.size == optimizer.mesh.size
        self.costs = TermCosts() if repeats and alone and self.ordered is not None and not self.together else None
        optimizer.state.begin_run(full)
        self._gradients = self.reducer
        self._another_follows = self.reducer.no_sync()
        if not self.of_model:  # the reducer gets the gradient after the last micro-batch
            self._another_follows = nullcontext()
            self._gradients = arrays.zeros(self.parameters.size, self.parameters.dtype, like=self.parameters.like)

    def detach(self) -> None:
        """Give the reducer back to other code."""
        self.reducer.progress.in_loop = False

    def losses_and_gradient(self, batch: np.ndarray) -> tuple[np.ndarray, int]:
        """Losses of a batch and its global number of terms; the batch's loss is the sum of these losses over ranks.

        Where the minimisation of a method wants a Hessian product, that takes the place of the gradient, and the losses
        are 0.
        """
        self.nonfinite_loss = ""
        self.parameters.step = self.optimizer.clock
        self._direction = self.optimizer.state.direction()
        self.reducer.progress.in_loop = True  # not before: a run that is refused leaves the reducer as it was
        if self.ordered is None:
            losses = np.array([self._forward_backward_shares(batch)])
        else:
            losses = self._forward_backward_terms(batch, self.ordered)
        if not self.of_model:
            self.reducer.use_external(self._gradients)
        # Ranks without samples start their reductions here; the others have started theirs in the backward pass.  No
        # other collective may come before.
        self.reducer.end_pass()
        return losses, self.problem.terms(len(batch))

    def announce(self, batches: Sequence[np.ndarray]) -> None:
        """Inform what reads ahead of the samples that this rank will compute next, by the batches of the next steps."""
        assert self.problem.expect is not None
        coming: list[np.ndarray] = []
        for batch in batches:
            if self.ordered is None:
                coming += share(batch, self.axis.rank, self.axis.size, self.problem.micro_batch_size)
            else:
                micro = micro_batches(batch, self.problem.micro_batch_size)
                coming += [micro[number] for number in self._assignment(len(micro)).terms(self.axis.rank)]
        self.problem.expect([samples for samples in coming if len(samples)])

    def sums_of(self, *parts: np.ndarray) -> tuple[list[float], list[np.ndarray]]:
        """The summed loss of each part's samples on this rank alone, and the accumulated gradient after each part.

        Not for models whose ranks synchronize in a backward pass.  The caller must reset the gradients.
        """
        self.parameters.reset_gradients()
        losses, gradients = [], []
        if not self.of_model:
            self._gradients[...] = 0
        for samples in parts:
            with self._another_follows:
                losses.append(self._forward_backward(samples))
            values = self.reducer.flat if self.of_model else self._gradients
            gradients.append(np.array(arrays.to_host(values), np.float64))
        return losses, gradients

    def _forward_backward_shares(self, batch: np.ndarray) -> float:
        """Forward and backward of this rank's samples, with accumulated gradients; returns the summed loss."""
        shares = share(batch, self.axis.rank, self.axis.size, self.problem.micro_batch_size)
        loss_sum = 0.0
        if not self.of_model:
            self._gradients[...] = 0
        for samples in shares[:-1]:
            with self._another_follows:
                loss_sum += self._forward_backward(samples)
        return loss_sum + self._forward_backward(shares[-1])

    def _forward_backward_terms(self, batch: np.ndarray, ordered: OrderedSums) -> np.ndarray:
        """Forward and backward with each micro-batch as a term of an ordered sum.

        Returns the losses of all micro-batches of the batch; those of other ranks are 0.
        """
        micro = micro_batches(batch, self.problem.micro_batch_size)
        # A pipeline is filled by all micro-batches of this rank in one pass.
        at_once = self._takes_several and self.optimizer.mesh.pipeline.size > 1
        ordered.assignment = assignment = self._assignment(len(micro))
        own = assignment.terms(self.axis.rank)
        tree_merges = assignment.tree_merges(self.axis.rank) or [0]
        rounds = assignment.exchanges if assignment.in_turns else max(1, len(own))
        losses = np.zeros(len(micro))
        if self.costs is not None:
            self.costs.begin(len(micro))
        self.reducer.keep_apart([] if assignment.in_turns else tree_merges, in_pass=at_once)
        if at_once:
            mine = [micro[number] for number in own] + [batch[:0]] * (rounds - len(own))
            losses[own] = self._call(mine)[: len(own)]
            return losses
        for number in range(rounds - 1):
            with self._another_follows:
                if not self.of_model:
                    self._gradients[...] = 0
                losses[own[number]] = self._term(own[number], micro)
                if not self.of_model:
                    self._gradients = self.reducer.push_external(self._gradients)
        if not self.of_model:
            self._gradients[...] = 0
        if len(own) == rounds:
            losses[own[-1]] = self._term(own[-1], micro)
        else:  # a rank with fewer terms still takes part in the collectives of the other ranks in the model
            self._forward_backward(micro[0][:0])
        return losses

    def _assignment(self, terms: int) -> TermAssignment:
        """The assignment of the next step's `terms` terms to ranks."""
        in_turns = self.of_model and self.reducer.on_demand
        cuts = None if self.costs is None else self.costs.cuts(self.axis.size)
        return TermAssignment(terms, self.axis.size, in_turns, cuts)

    def _term(self, number: int, micro: list[np.ndarray]) -> float:
        """Forward and backward of a micro-batch that is a term of an ordered sum; returns its summed loss."""
        if self.costs is None:
            return self._forward_backward(micro[number])
        with self.costs.timed(number):
            return self._forward_backward(micro[number])

    @property
    def _takes_several(self) -> bool:
        """True if the model takes several micro-batches in one call and cuts none of them."""
        return self.of_model and self.problem.several is not None and self._direction is None

    def _forward_backward(self, samples: np.ndarray) -> float:
        """Forward and backward of one micro-batch; returns its summed loss."""
        if not len(samples) and not self.together:
            return 0.0
        return self._call([samples])[0]

    def _call(self, micro_batches: list[np.ndarray]) -> list[float]:
        """The summed losses of micro-batches; 0 once the function has failed on this rank, which is reported later."""
        if self._deferred_error.error is None:
            with self._deferred_error.capture(alone=not self.together):
                return self._called(micro_batches)
        return [0.0] * len(micro_batches)

    def _called(self, micro_batches: list[np.ndarray]) -> list[float]:
        """Call the function for micro-batches: for one, unless it takes several; returns their summed losses."""
        checked = micro_batches if self._checks_inputs else []
        untouched = [Untouched(self.parameters, samples) for samples in checked if len(samples)]
        began = time.perf_counter()
        losses: Sequence[Any] = [0.0]
        if self._direction is not None:
            assert self.problem.product is not None
            direction = self._direction if self.of_model else self._direction.flat
            self.problem.product(self.values, direction, micro_batches[0], self._gradients)
        elif self.ordered is not None and self._takes_several:
            assert self.problem.several is not None
            losses = self.problem.several(self.values, micro_batches, self._gradients)
        else:
            losses = [self.problem.function(self.values, micro_batches[0], self._gradients)]
        self.optimizer.mesh.ledger.note(f"{sum(map(len, micro_batches))} samples", "function", began)
        for each in untouched:
            self.misuse = self.misuse or each.problem()
            self._checks_inputs = self.optimizer.mesh.debug
        return [self._checked(loss, samples) for loss, samples in zip(losses, micro_batches, strict=True)]

    def _checked(self, loss: Any, samples: np.ndarray) -> float:
        """The loss of a micro-batch that the function has returned, as a number."""
        try:
            loss = returned(loss)
        except (TypeError, ValueError, RuntimeError):  # PyTorch raises RuntimeError for a tensor of several elements
            what = f"a {type(loss).__name__}"
            raise TypeError(f"the function must return the summed loss as one number, got {what}") from None
        if not math.isfinite(loss) and not self.nonfinite_loss:
            self.nonfinite_loss = f"{loss} of {f'samples {listed(samples)}' if len(samples) else 'no samples'}"
        number: float = loss
        return number


# A mean in place of a sum differs by a factor of two, rounding in half precision by a thousandth.
_TOLERANCE = 0.02
_AGAIN = 1e-5  # the tolerance between two calls for the same samples


def check_sums(runner: StepRunner, batch: np.ndarray) -> None:
    """Raise ValueError on all ranks unless loss and gradient of a micro-batch are the sums over its two halves.

    Each rank uses its first micro-batch of `batch`.  Parameters and state do not change.  There is no check for models
    whose ranks synchronize inside a backward pass (ZeRO-2 and 3, tensor and pipeline ranks), nor for functions that
    give two results for the same samples.  Collective.
    """
    if runner.together:
        return
    samples = share(batch, runner.axis.rank, runner.axis.size, runner.problem.micro_batch_size)[0]
    half = len(samples) // 2
    problem: Exception | None = None
    if half:
        try:
            problem = _difference(runner, samples[:half], samples[half : 2 * half])
        except Exception as error:  # of the user's function: all ranks must learn of it
            problem = error
        runner.parameters.reset_gradients()
        problem = runner.misuse or problem
    runner.optimizer.world.raise_if_any(problem)


def _difference(runner: StepRunner, first: np.ndarray, second: np.ndarray) -> ValueError | None:
    """The error of a function that does not return sums, or None."""
    both = np.concatenate([first, second])
    (loss,), (gradient,) = runner.sums_of(both)
    losses, (of_first, of_halves) = runner.sums_of(first, second)
    loss_of_halves = sum(losses)
    pairs = (loss, loss_of_halves), (gradient, of_halves)
    if all(_alike(whole, halves) for whole, halves in pairs):
        return None
    (again,), (gradient_again,) = runner.sums_of(both)
    if not (_alike(loss, again, _AGAIN) and _alike(gradient, gradient_again, _AGAIN)):
        return None  # a random function, or one that is not finite
    sums = (
        f"the loss of {len(both)} samples is {loss:.6g} and those of their two halves {losses[0]:.6g} and "
        f"{losses[1]:.6g}, the norm of the gradient {np.linalg.norm(gradient):.6g} and that of the halves', added up, "
        f"{np.linalg.norm(of_halves):.6g}"
    )
    if all(_alike(whole, halves) or _alike(2 * whole, halves) for whole, halves in pairs):
        return ValueError(
            f"the function returns a mean where it must return a sum: {sums}; return the sum over the samples, and add "
            "the sum of their gradients: the one division is by the number of samples of all ranks"
        )
    if _alike(gradient - of_first, of_halves):
        return ValueError(
            f"the function overwrites the gradients where it must add to them: {sums}; use gradients += ..."
        )
    return ValueError(f"the function does not return sums over its samples: {sums}")


def _alike(one: np.ndarray | float, other: np.ndarray | float, tolerance: float = _TOLERANCE) -> bool:
    """Return True if the difference is at most `tolerance` times the largest element."""
    most = max(np.abs(one).max(initial=0), np.abs(other).max(initial=0))
    return bool(np.abs(np.subtract(one, other)).max(initial=0) <= tolerance * most)


_AT_ONCE = 4  # micro-batches for each stage of a pipeline that pass through it together


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
        self._checks_inputs = True

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
        call = self._losses_of_model(runner) if evaluation.of_batches else self._losses(runner)
        with deferred_error.capture(alone=not runner.together):
            for first in range(0, rounds, together):
                numbers = list(own[first : first + together])
                # Where other ranks have more, those of a micro-batch of theirs, whose loss is dropped.
                others = [micro[0]] * (min(together, rounds - first) - len(numbers))
                untouched = Untouched(runner.parameters, micro[numbers[0]]) if self._checks_inputs and numbers else None
                found = call([*(micro[number] for number in numbers), *others])
                losses[numbers] = [_number(loss) for loss in found[: len(numbers)]]
                problem = None if untouched is None else untouched.problem()
                if problem is not None:
                    raise problem
                self._checks_inputs = mesh.debug
        deferred_error.raise_on_all()
        runner.axis.all_reduce(losses, label="loss")
        if runner.axis.size < mesh.size:
            mesh.world.broadcast(losses, label="loss")  # what follows from it must be the same on all ranks
        for number in np.flatnonzero(~np.isfinite(losses))[:1].tolist():
            error = FloatingPointError(
                f"the validation loss after step {step} is not finite: {losses[number]} of validation samples "
                f"{listed(micro[number])}; parameters and state are those of that step"
            )
            raise raised_by_all(error, mesh.size)
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
