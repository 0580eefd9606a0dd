"""One run of training: its parts, and the work of each of its steps, whatever loop takes them; and the usual loop."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpishard.comm.agreement import DeferredError
from mpishard.data.evaluation import EarlyStopping
from mpishard.data_parallel.results import OptimizationResult, TrainingState
from mpishard.data_parallel.sharded_optimizer import ShardedOptimizer
from mpishard.data_parallel.validation import warn_if_initial_parameters_differ
from mpishard.io import log
from mpishard.launch.exit_codes import note_run
from mpishard.launch.signals import Interrupts
from mpishard.training.audit import REPLICAS, AuditedRunner, check_replicas
from mpishard.training.checkpoints import RunCheckpoints, RunProgress
from mpishard.training.metrics import LossHistory, StepReport
from mpishard.training.objective import Batches, Objective, RunOptions, Scaling, StopCondition, StopRequest
from mpishard.training.step_runner import StepRunner, Validated, Validation, check_sums

_ANNOUNCED = 3  # steps whose samples are known to what reads ahead


class StepOutcome(NamedTuple):
    """A step whose update is done."""

    loss: float  # mean over its samples
    learning_rate: float  # of its update; the step length of a minimisation
    synchronized: bool  # its loss is that of all ranks, which have met in it


class TrainingRun:
    """One run of training, without the loop that decides how long it continues and who takes part.

    Creation is collective over the optimizer's mesh.  `scaling` says how batch size and learning rate follow the number
    of workers.  `begins` is False in a process that joins a running job, where `restore` gives it the progress of the
    run.  With `transactional`, the loop ends each step with an agreement of all ranks: then all know the loss of every
    step, and an error of one rank alone reaches the others.

    `audit`: the share of an `AuditedRunner`, or REPLICAS, where the loop compares what all ranks hold; None: neither.

    `deferred_error` is an error of the user's function or callback on this rank, until all ranks raise it.
    """

    def __init__(
        self,
        problem: Objective[Any],
        optimizer: ShardedOptimizer,
        options: RunOptions,
        scaling: Scaling,
        *,
        begins: bool = True,
        transactional: bool = False,
        audit: float | str | None = None,
    ) -> None:
        self.problem = problem
        self.optimizer = optimizer
        self._callback = options.callback
        self._transactional = transactional
        workers = scaling.first
        optimizer.state.check_run(
            samples=problem.samples,
            batch_size=problem.batch_size,
            scaling=scaling.policy,
            has_product=problem.product is not None,
        )
        self.batches = Batches(problem, optimizer.axis, scaling, in_order=optimizer.state.evaluates_one_function)
        self.deferred_error = DeferredError(optimizer.mesh.world, transactional)
        checks_inputs = begins or optimizer.mesh.debug
        kind = partial(AuditedRunner, share=audit) if isinstance(audit, float) else StepRunner
        self.runner: StepRunner = kind(problem, optimizer, checks_inputs, self.deferred_error)
        if begins:
            warn_if_initial_parameters_differ(optimizer.mesh, self.runner.parameters)
        self.runner.attach()
        self._replicas = check_replicas(optimizer) if audit == REPLICAS else None
        optimizer.settings.arithmetic.note_micro_batches(problem.micro_batch_size)
        self.batches.begin_after(optimizer.state.batches)
        self._samples_before = self.batches.position
        self.losses = LossHistory(optimizer.axis)
        self.validation = Validation(options.evaluate)
        self.stop_early: EarlyStopping | None = options.stop_early
        self._best_saved = 0
        self._stop = StopCondition(problem, options.stop_early)
        self._steps_before, self._skipped_before, self._resumed_steps = optimizer.clock, optimizer.skipped_steps, 0
        self.checkpoints = RunCheckpoints(problem, optimizer, options, self.batches)
        self.checkpoints.check(self.progress, rehearses=begins)
        resumed = self.checkpoints.resume() if begins else None
        if resumed is not None:
            self.restore(resumed)
        elif begins and optimizer.clock:
            optimizer.state.report_continuation()
        elif begins:
            self.checkpoints.warn_of_restart()
        if begins and optimizer.clock:
            optimizer.state.show_point()  # the parameters may be those that an earlier run has ended with
        self.batches.check(workers)
        self.report = StepReport(options.record, problem.steps, options.progress)
        if begins and optimizer.mesh.rank == 0:
            self.report.show(self._resumed_steps)
        self._began = time.perf_counter()
        if begins:
            self.report.begin(self._metadata())

    def rebuild(self, problem: Objective[Any]) -> None:
        """Train the same model from now on, made for another mesh; its values come later.  Collective over the mesh.

        Raises ValueError if the settings of the problem differ from those of the one before.
        """
        if problem.settings != self.problem.settings:
            raise ValueError(f"{problem.settings} for this mesh, {self.problem.settings} before; make them the same")
        self.problem = self.batches.problem = self.checkpoints.problem = problem
        self._stop = StopCondition(problem, self.stop_early)
        self.runner = StepRunner(problem, self.optimizer, self.optimizer.mesh.debug, self.deferred_error)

    # -- progress ---------------------------------------------------------------------------------------------------

    @property
    def progress(self) -> RunProgress:
        """Progress of the run after its last finished step."""
        return RunProgress(
            losses=self.losses.to_array(),
            samples_consumed=self.batches.position,
            first_workers=self.batches.first_workers,
            steps_before=self._steps_before,
            skipped_before=self._skipped_before,
            resumed_steps=self._resumed_steps,
            samples_before=self._samples_before,
            validated=tuple((step, loss) for step, loss in self.validation.history),
            best_saved=self._best_saved,
        )

    def restore(self, progress: RunProgress) -> None:
        """Continue from the progress of a checkpoint or another worker; parameters and optimizer are restored apart."""
        self.losses.restore(progress.losses)
        self.batches.restore(progress.samples_consumed, progress.first_workers)
        self._steps_before, self._skipped_before = progress.steps_before, progress.skipped_before
        self._resumed_steps, self._samples_before = progress.resumed_steps, progress.samples_before
        self.validation.history = [Validated(*each) for each in progress.validated]
        self._best_saved = progress.best_saved

    def report_validation(self) -> None:
        """Report the newest validation loss again: the first rank may have died before it has."""
        if self.validation.history:
            self.report.validation(*self.validation.history[-1])

    @property
    def next_step(self) -> int:
        """The number of the next step, counted from the optimizer's first one."""
        return self._steps_before + len(self.losses) + 1

    @property
    def samples(self) -> int:
        """Samples that this run has used so far."""
        return self.batches.position - self._samples_before

    # -- a step -----------------------------------------------------------------------------------------------------

    def take_step(self, step: int, interrupts: Interrupts | None = None) -> StepOutcome:
        """Compute a step's gradient and update, for `finish_step`.  Collective.

        The update also informs all ranks of a Ctrl-C on this one, which `interrupts` notes.
        """
        optimizer = self.optimizer
        optimizer.config.mesh.ledger.step = step
        batch = self.batches.following()
        if self.problem.expect is not None:
            with self.deferred_error.capture(alone=not self.runner.together):
                self.runner.announce(self.batches.coming(_ANNOUNCED))
        losses, count = self.runner.losses_and_gradient(batch)
        if optimizer.mesh.debug or len(self.losses) == self._resumed_steps:
            self._refuse_misuse()
        synchronized = self._transactional or optimizer.state.synchronizes_next_step
        costs = self.runner.costs
        if synchronized:
            if self.deferred_error.error is None:
                with self.deferred_error.capture(alone=not self.runner.together):
                    optimizer.state.check_rate()
            if self.deferred_error.error is not None:
                losses[...] = math.nan  # tells the others
            loss = self.losses.mean_over_ranks(losses, count, None if costs is None else costs.seconds)
            if math.isnan(loss) and not self.runner.together:
                self._raise_deferred()
        else:
            loss = self.losses.mean_of_rank(losses, count)
        loss = optimizer.state.loss_of_step(loss)
        with self.report.phase("update"):
            optimizer.update(
                count,
                loss=loss,
                rate_factor=self.batches.rate_factor,
                nonfinite_loss=self.runner.nonfinite_loss,
                interrupted=interrupts is not None and interrupts.came,
            )
        return StepOutcome(loss + optimizer.state.added_loss, optimizer.state.counters.learning_rate, synchronized)

    def finish_step(self, outcome: StepOutcome) -> None:
        """Count a step of `take_step`, and report it."""
        state = self.optimizer.state
        if state.ended_batch:
            self.batches.advance()
        self.losses.append(outcome.loss)
        self.report.step(
            self._steps_before + len(self.losses),
            loss=outcome.loss,
            learning_rate=outcome.learning_rate,
            samples=self.batches.position,
            norm=self.optimizer.gradient_norm,
            loss_scale=self.runner.parameters.loss_scale,
            minimization=state.record,
        )

    def evaluate(self) -> None:
        """Compute the validation loss if it is due after the last finished step, and not computed yet.  Collective."""
        step = self.next_step - 1
        if not self.validation.due(step):
            return
        if self.optimizer.sharding.workers_differ:
            self.losses.reduce()
            self.optimizer.state.consolidate()
        assert self.validation.evaluation is not None
        averaged = self.validation.evaluation.averaged
        averages = self.optimizer.averaged_parameters() if averaged and self.optimizer.steps else nullcontext()
        with self.report.phase("validation"), averages:
            loss = self.validation.evaluate(step, self.runner, self.deferred_error)
        self.report.validation(step, loss)

    def stop_request(self, step: int, outcome: StepOutcome) -> StopRequest:
        """Call the callback; returns the request of this rank alone after a step."""
        seconds = time.perf_counter() - self._began
        if self._callback is not None:
            norm, values = self.optimizer.gradient_norm, self.runner.values
            state = TrainingState(
                step,
                outcome.loss,
                outcome.learning_rate,
                norm,
                self.samples,
                seconds,
                values,
                self.validation.last,
            )
            with self.deferred_error.capture():
                if self.deferred_error.error is None and self._callback(state):
                    return StopRequest.CALLBACK
            if self.deferred_error.error is not None:
                return StopRequest.FAILED
        timed_out = self.problem.seconds is not None and seconds >= self.problem.seconds
        return StopRequest.SECONDS if timed_out else StopRequest.NONE

    def why_stop(self, request: int) -> str:
        """The reason to stop, as in `OptimizationResult.stop_reason`, if `request` is the strongest of all ranks.

        Empty without a reason.  `request` is a value of `StopRequest`; if it is FAILED, the call is collective, and all
        ranks raise the error.
        """
        if request == StopRequest.FAILED:
            self._raise_deferred()
        return self._reason(request, self.optimizer.gradient_norm)

    def _reason(self, request: int, norm: float) -> str:
        validated, ended = (each.loss for each in self.validation.history), self.optimizer.state.stop_reason
        return self._stop.reason(request, len(self.losses), norm, ended=ended, validated=validated)

    def _raise_deferred(self) -> None:
        """Raise an error that a rank holds on all ranks; return if none does.  Collective."""
        try:
            self.deferred_error.raise_on_all()
        except BaseException:
            self.runner.parameters.reset_gradients()  # waits for the sums under way
            raise

    def save(self, last: bool) -> None:
        """Save if a save is due.  After the `last` step bring all ranks to one state, also without checkpoints.

        Collective.
        """
        due, best = self.checkpoints.due, self._best_is_due
        with self.report.phase("saving"):
            if last or due or best:
                self.losses.reduce()
                self.optimizer.state.consolidate()
                self.checkpoints.save(self.progress, best, exact=best and self._transactional)
                if best:  # not before: a death within the save leaves it to be done again
                    self._best_saved = self.next_step - 1
            if last:
                self.checkpoints.wait()

    def save_best(self) -> None:
        """Save the best checkpoint if a death came before its save, or `best` was not given before.  Collective."""
        if self._best_is_due:
            self.save(last=False)

    @property
    def _best_is_due(self) -> bool:
        """True if the parameters are the best so far, and not saved as such.  The same on all ranks."""
        step = self.next_step - 1
        return self.checkpoints.keeps_best and self._best_saved < step and self.validation.best_at(step)

    def _refuse_misuse(self) -> None:
        """Raise if the function has changed its inputs: on all ranks, which is collective, or as its other errors.

        Ranks that meet for the first time may have taken different numbers of steps, so that not all come here.
        """
        misuse = self.runner.misuse
        if not self._transactional:
            self.optimizer.world.raise_if_any(misuse)
        elif misuse is not None and self.deferred_error.error is None:
            with self.deferred_error.capture(alone=not self.runner.together):
                raise misuse

    # -- beginning and end ------------------------------------------------------------------------------------------

    def _metadata(self) -> dict[str, Any]:
        """Metadata of this start for the record of the run."""
        optimizer = self.optimizer
        return {
            "optimizer": type(optimizer).__name__,
            "rule": optimizer.rule.configuration(),
            "configuration": optimizer.config,
            "problem": self.problem.settings,
            "evaluation": None if self.validation.evaluation is None else self.validation.evaluation.settings,
            "stop_early": self.stop_early,
            "checkpoints": None if self.checkpoints.folder is None else str(self.checkpoints.folder),
            "best": "validation loss" if self.checkpoints.keeps_best else None,
            "parameters": sum(spec.size for spec in self.runner.parameters.specs),
            "dtype": str(self.runner.parameters.dtype),
            "audit": self.runner.facts if isinstance(self.runner, AuditedRunner) else self._replicas,
            "resumed_steps": self._resumed_steps,
            "steps_before": self._steps_before,
            **optimizer.settings.arithmetic.record,
            **self.problem.facts,
        }

    def begin(self) -> None:
        """Have every update compute what the goals of the problem need."""
        self.optimizer.measure_norm |= self.problem.tolerance is not None

    def reached_goal(self) -> str:
        """The goal that the run had already reached when it resumed, reported on rank 0, or empty."""
        resumed, folder = self._resumed_steps, self.checkpoints.folder
        reason = self._reason(StopRequest.NONE, self.optimizer.gradient_norm if resumed else math.nan)
        if reason and resumed and folder is not None and self.optimizer.mesh.rank == 0:
            by_itself = self.optimizer.state.stop_reason
            goal = f"the end of its method ({reason})" if by_itself else self._stop.described(reason)
            more = "increase `steps`" if reason == "steps" else "set a later goal"
            log.inform(
                f"the run in {folder} is already finished: it reached {goal} at step {self.optimizer.clock}; "
                f"{more} to continue"
            )
        return reason

    def close(self) -> None:
        """Give the gradients back to other code, and end the progress bar."""
        self.runner.detach()
        self.report.close()

    def result(self, reason: str, stopped_by_user: bool = True) -> OptimizationResult[Any]:
        """The result of the run on this rank; `reason` is as in `OptimizationResult.stop_reason`.

        `stopped_by_user`: the signal that stopped it was Ctrl-C, or came from `mpishard run` because that was stopped.
        """
        optimizer, stopped = self.optimizer, reason == "signal"
        optimizer.state.show_result()
        how_to_resume = self.checkpoints.how_to_resume if stopped else ""
        self.report.end(optimizer.clock, reason, how_to_resume)
        note_run(stopped=stopped and stopped_by_user)
        if stopped and optimizer.mesh.rank == 0:
            log.inform(f"stopped after step {optimizer.clock}; {how_to_resume}")
        return OptimizationResult(
            parameters=self.runner.values,
            loss_history=self.losses.to_array(),
            steps=len(self.losses),
            samples=self.samples,
            resumed_steps=self._resumed_steps,
            skipped_steps=optimizer.skipped_steps - self._skipped_before,
            seconds=time.perf_counter() - self._began,
            stop_reason=reason,
            communication=optimizer.config.mesh.ledger.summary(),
            validation_steps=np.array([each.step for each in self.validation.history], np.int64),
            validation_losses=np.array([each.loss for each in self.validation.history], np.float64),
        )


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
                training.deferred_error.raise_on_all()
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
