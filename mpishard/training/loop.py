"""The training loop: takes the steps of a problem on all ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from mpishard.data.sampling import Sampler
from mpishard.data_parallel.results import OptimizationResult, TrainingState
from mpishard.data_parallel.sharded_optimizer import ShardedOptimizer
from mpishard.data_parallel.validation import tell_of_other_starts
from mpishard.io import log
from mpishard.launch.endings import note_run
from mpishard.launch.interrupts import Interrupts
from mpishard.layout.run_state import RunState, brief, whole_fact
from mpishard.training.batch_scaling import Scaling
from mpishard.training.loss_history import LossHistory
from mpishard.training.objective import Objective
from mpishard.training.options import RunOptions
from mpishard.training.progress import Progress
from mpishard.training.step_runner import StepRunner
from mpishard.training.stopping import StopCondition, StopRequest
from mpishard.training.sum_check import check_sums

if TYPE_CHECKING:
    from mpishard.checkpoint import Checkpoints  # with h5py: only for those who have checkpoints


class Loop:
    """One run of the training loop.

    Ranks synchronize in the steps in which their optimizer synchronizes.  In other steps a rank knows only its own
    loss, and a request to stop waits for the next synchronization.
    """

    meets_always: ClassVar[bool] = False
    begins = True  # False for a process that joins a running job

    def __init__(
        self,
        problem: Objective[Any],
        optimizer: ShardedOptimizer,
        options: RunOptions,
        scaling: Scaling | None = None,
    ) -> None:
        self.problem = problem
        self.optimizer = optimizer
        self.callback = options.callback
        self.axis = optimizer.axis
        self.watching = options.watching
        self.sampler = Sampler(problem.samples, problem.batch_size, problem.seed)
        self.scaling = scaling or Scaling("constant", self.axis.size)
        workers = self.scaling.first
        # The number of samples before the next step, and the samples of the current step.
        self.position = self.sampler.consumed(optimizer.clock)
        self.batch = np.empty(0, np.int64)
        self.runner = StepRunner(problem, optimizer, looks=self.begins or optimizer.mesh.debug)
        if self.begins:
            tell_of_other_starts(optimizer.mesh, self.runner.parameters)
        self.runner.attach()
        self.losses = LossHistory(self.axis)
        self.stop = StopCondition(problem)
        # Whether ranks synchronized in the last step, and this rank's strongest request to stop since they last did.
        self.synchronizes_next_step = True
        self.requested: int = StopRequest.NONE
        self.interrupts = Interrupts(speaks=optimizer.mesh.rank == 0)
        self.resumes = options.resume
        self.rate = math.nan  # of the last step
        self.record = record = options.record
        self.checkpoints = checkpoints = options.checkpoints
        restored = False
        if checkpoints is not None:
            self.check(checkpoints)
            restored = options.resume and self.resume(checkpoints)
        if self.begins and optimizer.clock and not restored:
            optimizer.state.report_continuation()
        if self.scaling.batch_size(problem.batch_size, workers) < workers:
            raise ValueError(
                f"batch_size={problem.batch_size} gives some of the {workers} data-parallel ranks no sample; "
                f"use at least {workers}, or fewer ranks"
            )
        self.resumed = len(self.losses)
        self.before = optimizer.clock - self.resumed
        self.skipped_before = optimizer.skipped_steps
        self.shows = options.progress
        self.progress = Progress(problem.steps, shown=self.shows and optimizer.mesh.rank == 0, done=self.resumed)
        self.began = time.perf_counter()
        if record is not None and self.begins:
            record.begin(self.told())

    def run(self) -> OptimizationResult[Any]:
        self.optimizer.measure_norm |= self.problem.tolerance is not None
        reason = self.what_was_reached()
        if self.optimizer.mesh.debug and not reason:
            check_sums(self.runner, self.sampler.following(self.position, self.batch_size))
        # If ranks agree in every update, they learn of Ctrl-C there, and need no further collective.
        self.watching |= not self.optimizer.state.agrees_in_update
        try:
            with self.interrupts:
                while not reason:
                    reason = self.step(self.before + len(self.losses) + 1)
                    self.save(last=bool(reason))
        finally:
            self.runner.detach()
            self.progress.close()
        return self.result(reason)

    def result(self, reason: str) -> OptimizationResult[Any]:
        """The result of the run, which ended for this reason."""
        if self.record is not None:
            way_on = self.way_on() if reason == "signal" else ""
            self.record.end(self.optimizer.clock, reason, way_on)
        note_run(stopped=reason == "signal" and self.stopped_by_user)
        if reason == "signal" and self.optimizer.mesh.rank == 0:
            log.inform(f"stopped after step {self.optimizer.clock}; {self.way_on()}")
        return OptimizationResult(
            parameters=self.runner.values,
            loss_history=self.losses.to_array(),
            steps=len(self.losses),
            samples=self.consumed(),
            resumed_steps=self.resumed,
            skipped_steps=self.optimizer.skipped_steps - self.skipped_before,
            seconds=time.perf_counter() - self.began,
            stop_reason=reason,
            communication=self.optimizer.config.mesh.ledger.summary(),
        )

    @property
    def stopped_by_user(self) -> bool:
        """Whether the signal that stopped the run was Ctrl-C, or came from `mpishard run` because that was stopped."""
        return True

    def way_on(self) -> str:
        """A sentence on how to continue a run that was stopped."""
        if self.checkpoints is None:
            return "nothing is saved: checkpoints=Checkpoints(folder, mesh), resume=True makes a run that can go on"
        how = "the same command goes on" if self.resumes else "optimize(..., resume=True) goes on"
        return f"{how} from the checkpoint in {self.checkpoints.folder}"

    def check(self, checkpoints: Checkpoints) -> None:
        """Raise now the errors that would occur at the first save."""
        from mpishard.checkpoint.index import check_facts

        world, problem = self.optimizer.world, None
        try:
            if (checkpoints.mesh.rank, checkpoints.mesh.size) != (world.rank, world.size):
                raise ValueError("the checkpoints are not of the optimizer's ranks; make both with one mesh")
            check_facts(self.state().facts)
        except ValueError as error:
            problem = error
        world.raise_if_any(problem)
        if self.begins:
            checkpoints.rehearse()

    def resume(self, checkpoints: Checkpoints) -> bool:
        """Continue from the newest checkpoint; returns whether there is one."""
        optimizer, run = self.optimizer, self.order()
        losses = np.empty(0)

        def of_loop(facts: Mapping[str, Any]) -> bool:
            """Whether a `Loop` saved these facts, and not a training loop of the user's."""
            return "samples_consumed" in facts and isinstance(facts.get("loss"), np.ndarray)

        def check(facts: Mapping[str, Any]) -> None:
            nonlocal losses
            optimizer.state.check(facts)
            whole_fact(facts, "samples_consumed", 0)
            whole_fact(facts, "first_workers", 1, least=1)
            clock = whole_fact(facts, "steps") + whole_fact(facts, "skipped_steps")
            losses = facts["loss"] if of_loop(facts) else np.full(clock, math.nan)
            if len(losses) > clock:
                raise ValueError(f"the state has {len(losses)} losses of {clock} steps")
            changed = [name for name in run if name in facts and not np.array_equal(facts[name], run[name])]
            if changed:
                pairs = ", ".join(f"{name}={brief(facts[name])} there and {run[name]} here" for name in changed)
                raise ValueError(
                    f"the checkpoint is of a run with other samples: {pairs}; their order would not go on.  Take the "
                    "values it was saved with, or load_checkpoint() into the model and begin a new run"
                )

        found = checkpoints.load(optimizer.state.capture(), check=check)
        if found is not None:
            optimizer.state.report_changes(found.facts)
            optimizer.state.restore(found.facts)
            self.position = self.sampler.consumed(optimizer.clock)
            if of_loop(found.facts):
                self.position = found.facts["samples_consumed"]
                self.scaling = replace(self.scaling, first=found.facts.get("first_workers", self.scaling.first))
            self.losses.restore(losses)
        return found is not None

    @property
    def batch_size(self) -> int:
        """Current number of samples in a step, over all ranks; a step at the end of an epoch may have fewer."""
        return self.scaling.batch_size(self.problem.batch_size, self.axis.size)

    @property
    def rate_factor(self) -> float:
        """The current factor on the learning rate."""
        most = self.problem.samples
        return self.scaling.rate_factor(min(self.batch_size, most) / min(self.problem.batch_size, most))

    def order(self) -> dict[str, int | str]:
        """The values that decide the samples of each step."""
        seed = int(self.problem.seed)
        return {
            "samples": self.problem.samples,
            "batch_size": self.problem.batch_size,
            "seed": seed if seed.bit_length() < 64 else str(seed),  # attributes of HDF5 end at 64 bits
        }

    def told(self) -> dict[str, Any]:
        """Metadata of this start for the record of the run."""
        optimizer = self.optimizer
        return {
            "optimizer": type(optimizer).__name__,
            "rule": optimizer.rule.configuration(),
            "configuration": optimizer.config,
            "problem": self.problem.settings,
            "parameters": sum(spec.size for spec in self.runner.parameters.specs),
            "dtype": str(self.runner.parameters.dtype),
            "resumed_steps": self.resumed,
            "steps_before": self.before,
            **self.problem.facts,
        }

    def state(self) -> RunState:
        """The state that a checkpoint saves now."""
        own = {"samples_consumed": self.position, "first_workers": self.scaling.first, "loss": self.losses.to_array()}
        return self.optimizer.state.capture().with_facts({**self.order(), **own}).with_facts(self.problem.facts)

    def save(self, last: bool) -> None:
        """Save if a save is due; after the last step, bring all ranks to one state even without checkpoints."""
        due = last or (self.checkpoints is not None and self.checkpoints.due(self.optimizer.clock))
        with self.phase("saving"):
            if due:
                self.losses.reduce()
                self.optimizer.state.consolidate()
            if self.checkpoints is None:
                return
            if due:
                if self.record is not None:
                    self.record.flush()  # no later run repeats the steps before a checkpoint
                self.checkpoints.save(self.state())
            if last:
                self.checkpoints.wait()

    def step(self, step: int) -> str:
        """Take one step; returns the reason to stop, or an empty string."""
        loss, rate = self.advance(step)
        return self.conclude(step, loss, rate)

    def advance(self, step: int) -> tuple[float, float]:
        """Compute a step's gradient and update; returns the step's loss and learning rate."""
        self.optimizer.config.mesh.ledger.step = step
        self.batch = self.sampler.following(self.position, self.batch_size)
        losses, count = self.runner.losses_and_gradient(self.batch)
        if self.optimizer.mesh.debug or len(self.losses) == self.resumed:
            self.refuse_misuse()
        self.synchronizes_next_step = self.meets_always or self.optimizer.state.synchronizes_next_step
        mean = self.losses.mean_over_ranks if self.synchronizes_next_step else self.losses.mean_of_rank
        loss = mean(losses, count)
        factor = self.rate_factor
        rate = factor * self.optimizer.rule.learning_rate(self.optimizer.steps + 1)
        with self.phase("update"):
            self.optimizer.update(
                count, rate_factor=factor, nonfinite_loss=self.runner.nonfinite_loss, interrupted=self.interrupts.came
            )
        self.rate = rate
        return loss, rate

    def refuse_misuse(self) -> None:
        """Raise on all ranks if the function has changed its inputs on any rank.  Collective."""
        self.optimizer.world.raise_if_any(self.runner.misuse)

    def conclude(self, step: int, loss: float, rate: float) -> str:
        """Record a finished step; returns the reason to stop, or an empty string."""
        self.note(loss)
        return self.decide(self.stop_request(step, loss, rate))

    def note(self, loss: float) -> None:
        """Add a finished step to the history, the record and the progress line."""
        self.position += len(self.batch)
        self.losses.append(loss)
        norm = self.optimizer.gradient_norm
        if self.record is not None:
            further = {} if math.isnan(norm) else {"gradient_norm": norm}
            scale = self.runner.parameters.loss_scale
            further |= {} if scale == 1 else {"loss_scale": scale}
            step = self.before + len(self.losses)
            self.record.step(step, loss=loss, learning_rate=self.rate, samples=self.position, **further)
        self.progress.advance(f"loss {loss:.4g}" + ("" if math.isnan(norm) else f", gradient {norm:.3g}"))

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A context whose duration the record counts as a phase of the step."""
        return nullcontext() if self.record is None else self.record.phase(name)

    def consumed(self) -> int:
        """Samples that this run has used so far."""
        return self.position - self.sampler.consumed(self.before)

    def stop_request(self, step: int, loss: float, rate: float) -> StopRequest:
        """Call the callback; returns this rank's request after a step."""
        seconds = time.perf_counter() - self.began
        if self.callback is not None:
            norm = self.optimizer.gradient_norm
            if self.callback(TrainingState(step, loss, rate, norm, self.consumed(), seconds, self.runner.values)):
                return StopRequest.CALLBACK
        timed_out = self.problem.seconds is not None and seconds >= self.problem.seconds
        return StopRequest.SECONDS if timed_out else StopRequest.NONE

    def decide(self, request: int) -> str:
        """Agree on whether to stop, if ranks synchronized in this step; returns the reason, or an empty string."""
        self.requested = max(self.requested, request)
        if not self.synchronizes_next_step:
            return self.why_stop(StopRequest.NONE)
        self.losses.reduce()
        if self.watching:
            self.requested = StopRequest.SIGNAL if self.interrupts.came else self.requested
            own = np.array([self.requested, self.optimizer.settings.changed], np.int64)
            self.requested, changed = self.optimizer.world.all_reduce(own, op="max", label="control").tolist()
            if changed:  # by a callback
                self.optimizer.settings.agree()
        elif self.optimizer.state.interrupted:
            self.requested = StopRequest.SIGNAL
        return self.why_stop(self.requested)

    def why_stop(self, request: int) -> str:
        """The reason to stop if `request` is the strongest of all ranks; empty if there is none."""
        return self.stop.reason(request, len(self.losses), self.optimizer.gradient_norm)

    def what_was_reached(self) -> str:
        """The goal that the run had already reached when it resumed, reported on rank 0; empty if there is none."""
        reason = self.stop.goal(len(self.losses), self.optimizer.gradient_norm if self.resumed else math.nan)
        if reason and self.resumed and self.checkpoints is not None and self.optimizer.mesh.rank == 0:
            goal = f"{reason}={getattr(self.problem, reason)}"
            log.inform(
                f"the run in {self.checkpoints.folder} had reached {goal} at step {self.optimizer.clock}: nothing is "
                "left to do.  Ask for more, and it goes on from there"
            )
        return reason
