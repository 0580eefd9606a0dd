"""`minimize` and `augmented_lagrangian` as elastic runs: their function becomes an `OptimizationProblem`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from mpishard.backend import array as arrays
from mpishard.comm.errors import raised_on_all
from mpishard.data.sampling import micro_batches, share
from mpishard.data_parallel.method_state import Stages
from mpishard.data_parallel.results import TrainingState
from mpishard.data_parallel.validation import warn_if_initial_parameters_differ
from mpishard.elastic.optimizer import ElasticOptimizer
from mpishard.inverse.corrections import MULTIPLIERS, NUMBERS, Corrections, Course, Verdict
from mpishard.inverse.functions import Attempts, Callback, EvaluationFailed, Functions, failure_in_words, sum_of_values
from mpishard.inverse.mesh_run import HOW_TO_SUM, MinimizingRanks, check_identical, exchange, parameters_of
from mpishard.inverse.result import LoopOptions, MinimizationOutcome, OptimizeResult, Table, result_of
from mpishard.inverse.run_arguments import RunArguments
from mpishard.inverse.run_files import expect_no_constraints, expect_same_function
from mpishard.inverse.unknowns import Unknowns, copy_of_point
from mpishard.io import log
from mpishard.launch.job_notes import ECHO
from mpishard.minimizers.method import Method, Minimizer, Wanted
from mpishard.parameters.flat import FlatParameters
from mpishard.training import OptimizationProblem

Array = Any
# Calls of the function an evaluation, on any number of ranks: then the sums have the same bits on all.
_CALLS = 64
_HOW_TO_DIVIDE = "give samples=N and fun(x, samples)"


@dataclass(frozen=True)
class SumOverSamples(OptimizationProblem[FlatParameters]):
    """A problem that minimises the sum of the losses of all samples, and not their mean.

    With `watched` iterates are gathered for a callback; processes that join must do the same.
    """

    averages: ClassVar[bool] = False
    may_idle: ClassVar[bool] = True
    watched: bool = field(default=False, kw_only=True)

    @property
    def settings(self) -> dict[str, Any]:
        return {**super().settings, "callback": self.watched}


class WholeFunction(SumOverSamples):
    """One sample, the whole function: the ranks without it call the function too."""

    everywhere: ClassVar[bool] = True


class _OneMinimization(Stages):
    """Nothing follows the minimisation, and its checkpoint is not of several ones."""

    def __init__(self, checkpoints: Any) -> None:
        self._checkpoints = checkpoints

    def told(self, minimizer: Minimizer) -> None:
        """Let it end."""

    def check(self, facts: Mapping[str, Any]) -> None:
        expect_no_constraints(facts, getattr(self._checkpoints, "folder", None))


class ElasticMinimization(MinimizingRanks):
    """A minimisation by ranks that come and go. Collective over the mesh, its creation too.

    With `samples`, of which the function is a sum, `functions` take them as an argument after the point or the
    direction; None: each rank computes the whole function. The ranks that share a Partition get the same samples, and
    return one value, or with `reduction` "sum" their parts of it. Raises ValueError or TypeError on all ranks if an
    option of any is invalid.
    """

    def __init__(
        self,
        functions: Functions,
        unknowns: Unknowns,
        method: Method,
        callback: Callback,
        loop: LoopOptions,
        run: RunArguments,
    ) -> None:
        assert run.mesh is not None and run.elastic is not None
        mesh, (options, samples) = run.mesh, run.elastic
        if mesh.size > mesh.data.size and not unknowns.has_fields:
            raise ValueError(
                f"elastic= needs a mesh with a data axis alone, or a Partition as x0, got {mesh.sizes}; where other "
                "fields are cut, ElasticOptimizer(method, mesh).optimize(OptimizationProblem(...)) is elastic"
            )
        self._elastic = ElasticOptimizer(method, mesh, **options)
        super().__init__(unknowns, mesh, self._elastic.optimizer)
        self._functions = functions
        self._samples = samples
        self._sums = run.reduction == "sum"
        self._run = run
        self._callback = callback
        self._parameters = parameters_of(unknowns)
        given = mesh.world.allgather_object((callback.is_given, loop.disp))
        self._watched = any(watched for watched, _ in given)
        self._table = Table(shows=any(disp for _, disp in given))
        self._evaluations = 0  # of the last row
        self._failure = 0, ""  # the last evaluation that has failed on this rank, and what the result says of it
        self._maxtime = loop.maxtime
        self._has_inverse = loop.hess_inv
        self._together = mesh.world if samples is None else mesh.tensor  # they call the function for the same samples
        self._attempts = Attempts(self._together, loop.retries)
        functions.meeting = self._together if unknowns.is_split else None
        self._of_stage: Callable[[], OptimizeResult] | None = None

    def continue_by(self, stages: Stages, intermediate: Callable[[], OptimizeResult]) -> None:
        """Let `stages` decide what follows a minimisation; before `minimize`. The unknowns show the start of all ranks.

        The callback is then called with the `intermediate` result where a minimisation has begun after another one.
        """
        optimizer = self._elastic.optimizer
        warn_if_initial_parameters_differ(self.mesh, self._parameters)
        optimizer.bind(self._parameters)
        self._state.continue_by(stages)
        self._of_stage = intermediate
        self._unknowns.show()

    def minimize(self) -> MinimizationOutcome:
        """Take steps until the method, the callback or a signal ends the minimisation.

        The result is on all ranks that are alive at the end.
        """
        kind, count = (WholeFunction, 1) if self._samples is None else (SumOverSamples, self._samples)
        problem = kind(  # not kept: it refers to this object
            self._add_gradient,
            self._parameters,
            count,
            count,
            micro_batch_size=-(-count // _CALLS),
            seconds=self._maxtime,
            product=self._add_product,
            watched=self._watched,
        )
        if self._of_stage is None:
            self._state.continue_by(_OneMinimization(self._run.checkpoints))
        if self._functions.has_weights and count > 1 and self.mesh.rank == 0:
            log.inform(
                f"terms are added to the sum over {count} samples; an OptimizationProblem adds them to the mean, and "
                f"has the same minimum with weights {count} times smaller"
            )
        found = self._elastic.optimize(
            problem,
            callback=self._after_evaluation,
            progress=False,
            checkpoints=self._run.checkpoints,
            resume=self._run.resume,
            record=self._run.record,
        )
        minimizer, method = self.minimizer, self.minimizer.method
        progress, unknowns, reason = minimizer.progress, self._unknowns, found.stop_reason
        gradient, at_reference = self.gather(minimizer.gradient), minimizer.at_reference
        if self._of_stage is None and found.resumed_steps == found.steps and not math.isnan(progress.value):
            self._check_function(problem)
        unknowns.show()
        _, failure = max(self.mesh.world.allgather_object(self._failure), key=lambda each: each[0])
        hint = failure or unknowns.gradient_hint(reason)
        about = method, progress, hint, at_reference, minimizer.duality_gap
        result = result_of(unknowns.point(), gradient, reason, *about)
        result["jac"] = unknowns.like_x0(gradient)
        if self._has_inverse:
            from mpishard.inverse.inverse_hessian import InverseHessian
            from mpishard.minimizers.inverses import inverse_at_end

            x = unknowns.copy_of(unknowns.given) if minimizer.method.needs_products else None
            inverse = inverse_at_end(minimizer, lambda direction: self._product_after_end(x, direction))
            result["hess_inv"] = InverseHessian(inverse, unknowns, self.own, self.gather, self.mesh)
        if self.mesh.rank == 0:
            self._table.end(result.message)
        return MinimizationOutcome(result, progress, reason, self)

    # -- the problem --------------------------------------------------------------------------------------------------

    def _add_gradient(self, parameters: FlatParameters, samples: np.ndarray, gradients: Any) -> float:
        """The function of the problem."""
        return self._add("the gradient", self._functions.value_and_gradient, samples, gradients)

    def _add_product(
        self, parameters: FlatParameters, direction: FlatParameters, samples: np.ndarray, products: Any
    ) -> None:
        """The product of the problem."""
        along = self._unknowns.as_given(direction.flat)

        def product(x: Any, *these: np.ndarray) -> tuple[float, Any]:
            return 0.0, self._functions.product(x, self._unknowns.like_x0(along.copy()), *these)

        self._add("the Hessian product", product, samples, products)

    def _add(self, what: str, function: Callable[..., tuple[float, Any]], samples: np.ndarray, sums: Any) -> float:
        """Add the vector of samples to the sums by name; return their value. `function` returns both.

        Collective over the ranks that call the function together, of whom only ranks of a Partition may have no
        samples here.
        """
        if self._samples is not None and not len(samples):
            return 0.0
        self._unknowns.show()
        minimizer = self._elastic.optimizer.minimizer
        begun = minimizer is not None and minimizer.wanted is Wanted.GRADIENT and minimizer.progress.evaluations > 0
        which = () if self._samples is None else (samples,)

        def call() -> tuple[float, Array]:
            value, given = function(self._unknowns.point(), *which)
            return value, self._unknowns.vector(what, given)

        attempt = self._attempts(call)
        failed = begun and isinstance(attempt.problem, EvaluationFailed)
        if failed and minimizer is not None and not hasattr(attempt.problem, ECHO):
            rank = self.mesh.rank if self.mesh.size > 1 else None
            words = failure_in_words(minimizer, str(attempt.problem), rank)
            self._failure = minimizer.progress.evaluations, words
        value, vector = (math.nan, None) if attempt.problem is not None else attempt.found
        value, failed = self._agreed(what, value, vector, None if failed else attempt.problem, failed)
        if not len(samples):  # other ranks have the one sample
            return 0.0
        if failed:  # as if the function were infinite here
            return math.inf
        assert vector is not None
        vector = self._unknowns.arranged(vector)
        for piece in self._parameters.pieces:
            sums[piece.name] += vector[piece.start : piece.start + piece.size].reshape(piece.shape)
        return float(value)

    def _agreed(
        self, what: str, value: float, vector: Array | None, problem: BaseException | None, failed: bool
    ) -> tuple[float, bool]:
        """The value of the ranks that share the unknowns, and whether the evaluation has `failed` on any rank.

        Raises on all ranks that call together if one has a problem, or if their results differ: of ranks that all
        compute the whole function only some count. All are compared each time, since ranks may have joined at different
        times.
        """
        together, sharers, whole = self._together, self.mesh.tensor.size, self._samples is None
        if together.size == 1:
            if problem is not None:
                raise problem
            return value, failed
        numbers = [0 if vector is None or not whole else arrays.digest(vector), failed]
        values, facts = exchange(together, problem, value, numbers)
        if facts[:, 1].any():
            return math.inf, True
        if self._sums:
            return sum_of_values(values), False
        check_identical("values", values, _HOW_TO_DIVIDE if whole else HOW_TO_SUM)
        if whole:
            of_groups = [arrays.digest(parts) for parts in np.ascontiguousarray(facts[:, 0]).reshape(-1, sharers)]
            check_identical(f"values of {what}", np.repeat(of_groups, sharers), _HOW_TO_DIVIDE)
        return value, False

    def _check_function(self, problem: SumOverSamples) -> None:
        """Raise ValueError unless the minimisation that had ended before it was resumed is of this function."""
        data, minimizer, checkpoints = self.mesh.data, self.minimizer, self._run.checkpoints
        assert checkpoints is not None
        own = share(np.arange(problem.samples), data.rank, data.size, problem.micro_batch_size)
        with raised_on_all(self.mesh.world):
            value = sum(self._add_gradient(self._parameters, samples, defaultdict(float)) for samples in own)
        total = float(data.all_reduce(np.array([value]), label="control")[0])
        expect_same_function(total + minimizer.added_at(minimizer.best), minimizer.progress.value, checkpoints.folder)

    def _product_after_end(self, x: Any, direction: Array) -> Array:
        """The Hessian at x times a direction, of which this rank has its part; collective over the ranks that are left.

        Samples go to the groups in parts that do not depend on the number of groups, and products are added in the
        order of the parts.
        """
        unknowns, data, count = self._unknowns, self.mesh.data, self._samples
        along = self.gather(direction)
        parts: list[tuple[np.ndarray, ...]] = [()]  # as arguments; all ranks compute a whole function
        if count is not None:
            parts = [(samples,) for samples in micro_batches(np.arange(count), -(-count // _CALLS))]
        total = arrays.zeros(unknowns.given_size, unknowns.flat.dtype, like=unknowns.flat)
        for number, part in enumerate(parts):
            vector = arrays.zeros(total.size, total.dtype, like=total)
            with raised_on_all(self.mesh.world):
                if not part or number % data.size == data.rank:

                    def call(part: tuple[np.ndarray, ...] = part) -> Array:
                        found = self._functions.product(copy_of_point(x), unknowns.like_x0(along.copy()), *part)
                        return unknowns.vector("the Hessian product", found)

                    attempt = self._attempts(call)
                    if attempt.problem is not None:
                        raise attempt.problem
                    vector[...] = attempt.found
            total += data.broadcast(vector, number % data.size, label="product")
        return self.own(total)

    # -- after an evaluation ------------------------------------------------------------------------------------------

    def _after_evaluation(self, state: TrainingState[Any]) -> bool:
        """The callback of the run: returns True to stop. Collective over the workers."""
        progress = self.minimizer.progress
        is_row = progress.accepted or progress.evaluations == 1
        if is_row and progress.evaluations > self._evaluations and self.mesh.rank == 0:
            self._table.row(progress)
        self._evaluations = progress.evaluations
        if self._of_stage is not None:
            return progress.evaluations == 0 and self._callback(self._of_stage)
        if not (progress.accepted and self._watched):
            return False
        best = self.gather(self.minimizer.best)

        def make() -> OptimizeResult:
            return OptimizeResult(
                x=self._unknowns.copy_of(best), fun=progress.value, nit=progress.iterations, nfev=progress.evaluations
            )

        return self._callback(make)


# The outer loop of `augmented_lagrangian` in an elastic run, whose state it is part of.

_CONSTRAINTS, _NUMBERS_AT_BEST = "constraints", "augmented_lagrangian_best.json"  # facts about the best iterate


class ElasticOuterLoop(Stages):
    """Minimises and corrects in turns, by ranks that come and go. Collective over the mesh, its creation too.

    All minimisations are one run: a correction is part of the step that has ended a minimisation, and is taken back
    with it. Multipliers, penalty and the constraints at the best iterate are the same on all workers, and travel with
    the numbers of the method.
    """

    def __init__(
        self,
        corrections: Corrections,
        method: Method,
        callback: Callback,
        loop: LoopOptions,
        run: RunArguments,
    ) -> None:
        self._corrections, self._function = corrections, corrections.function
        self._retries = loop.retries
        self._optimality = math.nan  # at the end of the last minimisation
        functions = Functions(self._function.value_and_gradient, True, self._function.product, ())
        unknowns = self._function.unknowns
        self._inner = ElasticMinimization(functions, unknowns, method, callback, loop, run)

    def run(self, multipliers: Any, penalty: float | None) -> OptimizeResult:
        """Minimise until the method has converged, or something else ends it."""
        inner, corrections, function = self._inner, self._corrections, self._function
        world = inner.mesh.world
        inner.continue_by(self, lambda: corrections.intermediate(corrections.course))
        with raised_on_all(world):
            function.begin(lambda: inner.minimizer.progress, world, multipliers, penalty, self._retries)
        corrections.course = replace(corrections.course, penalty=function.penalty)
        ended = inner.minimize()
        minimizer, optimality = inner.minimizer, self._optimality
        progress, message = minimizer.progress, ended.result.message
        if progress.evaluations:
            verdict, optimality = corrections.verdict(progress, ended.reason, message), progress.projected_norm
        else:  # it was stopped between two minimisations
            function.measure(again=True)
            verdict = Verdict(corrections.course, ended.reason, message)
        gradient = function.unknowns.like_x0(inner.gather(minimizer.gradient))
        return corrections.result(verdict, optimality, minimizer.added_at(minimizer.best), gradient, ended.result)

    def told(self, minimizer: Minimizer) -> None:
        self._function.note_best()
        if minimizer.wanted is not Wanted.NOTHING:
            return
        verdict = self._corrections.verdict(minimizer.progress, minimizer.stop_reason, "")
        if not verdict.reason:
            self._optimality = minimizer.progress.projected_norm
            self._corrections.go_on(verdict.course)
            minimizer.method = replace(minimizer.method, gtol=self._corrections.tolerance)
            minimizer.begin()

    # -- in the state of the run --------------------------------------------------------------------------------------

    @property
    def facts(self) -> Mapping[str, Any]:
        best = self._function.best
        if best is None:
            return {}
        numbers = {"value": best.value, "optimality": self._optimality}
        return {**self._corrections.facts(), _CONSTRAINTS: best.constr, _NUMBERS_AT_BEST: numbers}

    def check(self, facts: Mapping[str, Any]) -> None:
        self._corrections.check(facts)
        best, found, numbers = self._function.best, facts.get(_CONSTRAINTS), facts.get(_NUMBERS_AT_BEST)
        if not (isinstance(found, np.ndarray) and isinstance(numbers, Mapping)):
            raise ValueError("the checkpoint is of a run that was not elastic: leave elastic= out, or resume=False")
        assert best is not None
        if not facts[NUMBERS].size == found.size == best.constr.size:
            raise ValueError(
                f"the checkpoint has multipliers of {facts[NUMBERS].size} constraints, and these are "
                f"{best.constr.size}; give the constraints of then, or resume=False"
            )

    def restore(self, facts: Mapping[str, Any]) -> None:
        corrections, minimizer, numbers = self._corrections, self._inner.minimizer, facts[_NUMBERS_AT_BEST]
        corrections.course = course = Course(**facts[MULTIPLIERS])
        self._optimality = float(numbers["optimality"])
        minimizer.method = replace(minimizer.method, gtol=corrections.tolerance)
        at_best = minimizer.progress.evaluations == 0
        self._function.continue_from(
            course.penalty, facts[NUMBERS], float(numbers["value"]), facts[_CONSTRAINTS], at_best
        )
        if minimizer.wanted is Wanted.NOTHING:  # with other tolerances it may go on
            self.told(minimizer)
