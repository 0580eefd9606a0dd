"""The loop that spreads a problem over the ranks, step by step."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from mpishard.arguments import returned
from mpishard.backend import array as arrays
from mpishard.backend.array import aligned_copy
from mpishard.backend.blas_threads import fix_blas_threads
from mpishard.data.sampling import Sampler, micro_batches, share
from mpishard.data_parallel.problem import OptimizationResult, TrainingState
from mpishard.data_parallel.sharded_optimizer import ShardedOptimizer
from mpishard.data_parallel.validation import tell_of_other_starts
from mpishard.launch.endings import note_run
from mpishard.launch.interrupts import Interrupts
from mpishard.layout.run_state import RunState, brief, whole_fact
from mpishard.parameters.flat import FlatParameters
from mpishard.record import RunRecord
from mpishard.reduction.ordered import OrderedSums
from mpishard.reduction.tree_sum import TermAssignment, tree_sum
from mpishard.training.problem import OptimizationProblem
from mpishard.training.progress import Progress
from mpishard.training.scaling import Scaling
from mpishard.training.sum_check import check_sums
from mpishard.training.untouched import Untouched

if TYPE_CHECKING:
    from mpishard.checkpoint import Checkpoints  # with h5py: only for those who have checkpoints

Array = Any
_NAMED = 5  # samples that a message lists
_WISHES = ("", "seconds", "callback", "signal")
_INTERRUPT = 3


class Loop:
    """One run of the training loop.

    Ranks meet in the steps in which their optimizer does.  Between them a rank knows its own loss only, and its wish to
    stop waits.
    """

    meets_always: ClassVar[bool] = False
    begins = True  # False for who comes to a run that goes on

    def __init__(
        self,
        problem: OptimizationProblem[Any],
        optimizer: ShardedOptimizer,
        callback: Callable[[TrainingState[Any]], bool | None] | None,
        progress: bool,
        watching: bool,
        checkpoints: Checkpoints | None,
        resume: bool,
        record: RunRecord | None = None,
        scaling: Scaling | None = None,
    ) -> None:
        self.problem = problem
        self.optimizer = optimizer
        self.callback = callback
        self.axis = optimizer.axis
        self.watching = watching
        self.sampler = Sampler(problem.samples, problem.batch_size, problem.seed)
        self.scaling = scaling or Scaling("constant", self.axis.size)
        workers = self.scaling.first
        # How many samples came before the next step, and those of the step that is being taken.
        self.position = self.sampler.consumed(optimizer.clock)
        self.batch = np.empty(0, np.int64)
        start = problem.start
        self.of_model = isinstance(start, FlatParameters)
        self.parameters = start if isinstance(start, FlatParameters) else FlatParameters.over(aligned_copy(start))
        self.parameters.reset_gradients()  # what a backward pass left before is no part of this run
        if not self.of_model and optimizer.config.loss_scale is not None:
            raise ValueError(
                "loss_scale is for models, which multiply their gradients by it; the gradient of a function of a flat "
                "array comes as it is: leave loss_scale out"
            )
        # Whether the next call of the function is looked at, and what one has changed that it must not.
        self.looks = self.begins or optimizer.mesh.debug
        self.misuse: Exception | None = None
        if self.begins:
            tell_of_other_starts(optimizer.mesh, self.parameters)
        self.attach()
        self.losses: list[float] = []
        # Whether ranks met in the last step; this rank's summed losses of steps before in which they did not, with the
        # number of terms that all have together; and its strongest wish to stop since.
        self.synchronizes_next_step = True
        self.unreduced_losses: list[tuple[float, int]] = []
        self.wished = 0
        self.interrupts = Interrupts(speaks=optimizer.mesh.rank == 0)
        self.resumes = resume
        self.rate = math.nan  # of the last step
        self.nonfinite_loss = ""  # of this rank in the step that is being taken, in words
        self.record = record
        self.checkpoints = checkpoints
        restored = False
        if checkpoints is not None:
            self.check(checkpoints)
            restored = resume and self.resume(checkpoints)
        if self.begins and optimizer.clock and not restored:
            optimizer.tell_of_state()
        if self.scaling.batch_size(problem.batch_size, workers) < workers:
            raise ValueError(
                f"batch_size={problem.batch_size} gives some of the {workers} data-parallel ranks no sample; "
                f"use at least {workers}, or fewer ranks"
            )
        self.resumed = len(self.losses)
        self.before = optimizer.clock - self.resumed
        self.skipped_before = optimizer.skipped_steps
        self.shows = progress
        self.progress = Progress(problem.steps, shown=progress and optimizer.mesh.rank == 0, done=self.resumed)
        self.began = time.perf_counter()
        if record is not None and self.begins:
            record.begin(self.told())

    def attach(self) -> None:
        """Let the optimizer reduce the gradients; all ranks start from the parameters of the first."""
        optimizer = self.optimizer
        strategy = optimizer.bind(self.parameters)
        strategy.replicas.spread()
        self.buckets = strategy.buckets
        self.ordered = strategy.ordered
        if self.ordered is not None:
            fix_blas_threads()  # a mesh made since the optimizer was has set their number again
        self.split = self.parameters.sharded is not None or optimizer.mesh.data.size < optimizer.mesh.size
        # A rank whose peers wait for it inside the model must run it even without samples: for its part of the model,
        # or since they reduce each of the micro-batches that the model may make.
        self.together = self.split or (self.of_model and self.buckets.on_demand)
        self.gradients: Any = self.buckets
        if not self.of_model:
            self.gradients = arrays.zeros(self.parameters.size, self.parameters.dtype, like=self.parameters.like)

    def run(self) -> OptimizationResult[Any]:
        self.optimizer.measure_norm |= self.problem.tolerance is not None
        reason = self.what_was_reached()
        if self.optimizer.mesh.debug and not reason:
            check_sums(self)
        # Where ranks agree in every update, they hear of Ctrl-C there, with no collective more.
        self.watching |= not self.optimizer.agrees_in_update
        try:
            with self.interrupts:
                while not reason:
                    reason = self.step(self.before + len(self.losses) + 1)
                    self.save(last=bool(reason))
        finally:
            self.buckets.no_sync = not self.optimizer.config.auto_sync_gradients
            self.progress.close()
        return self.result(reason)

    def result(self, reason: str) -> OptimizationResult[Any]:
        """What has come of the run, which ended for this reason."""
        if self.record is not None:
            way_on = self.way_on() if reason == "signal" else ""
            self.record.end(self.optimizer.clock, reason, way_on)
        note_run(stopped=reason == "signal" and self.stopped_by_user)
        if reason == "signal" and self.optimizer.mesh.rank == 0:
            print(f"mpishard: stopped after step {self.optimizer.clock}; {self.way_on()}", file=sys.stderr, flush=True)
        return OptimizationResult(
            parameters=self.parameters if self.of_model else self.parameters.flat,
            loss_history=np.array(self.losses),
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
        """Whether a signal that has stopped the run was Ctrl-C, or has come from `mpishard run`, which was to end."""
        return True

    def way_on(self) -> str:
        """How to go on with a run that was stopped, in words."""
        if self.checkpoints is None:
            return "nothing is saved: checkpoints=Checkpoints(folder, mesh), resume=True makes a run that can go on"
        how = "the same command goes on" if self.resumes else "optimize(..., resume=True) goes on"
        return f"{how} from the checkpoint in {self.checkpoints.folder}"

    def check(self, checkpoints: Checkpoints) -> None:
        """Raise now what would go wrong at the first save."""
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
        """Go on where the newest checkpoint stands; returns whether there is one."""
        optimizer, run = self.optimizer, self.order()
        losses = np.empty(0)

        def of_loop(facts: Mapping[str, Any]) -> bool:
            """Whether a loop like this one saved it, and not one of the user's."""
            return "samples_consumed" in facts and isinstance(facts.get("loss"), np.ndarray)

        def check(facts: Mapping[str, Any]) -> None:
            nonlocal losses
            optimizer.check_facts(facts)
            whole_fact(facts, "samples_consumed", 0)
            whole_fact(facts, "first_workers", 1, least=1)
            clock = whole_fact(facts, "steps") + whole_fact(facts, "skipped_steps")
            losses = facts["loss"] if of_loop(facts) else np.full(clock, math.nan)
            if len(losses) > clock:
                raise ValueError(f"the state has {len(losses)} losses of {clock} steps")
            changed = [name for name in run if name in facts and not np.array_equal(facts[name], run[name])]
            if changed:
                told = ", ".join(f"{name}={brief(facts[name])} there and {run[name]} here" for name in changed)
                raise ValueError(
                    f"the checkpoint is of a run with other samples: {told}; their order would not go on.  Take the "
                    "values it was saved with, or load_checkpoint() into the model and begin a new run"
                )

        found = checkpoints.load(optimizer.run_state(), check=check)
        if found is not None:
            optimizer.tell_of_changes(found.facts)
            optimizer.restore(found.facts)
            self.position = self.sampler.consumed(optimizer.clock)
            if of_loop(found.facts):
                self.position = found.facts["samples_consumed"]
                self.scaling = replace(self.scaling, first=found.facts.get("first_workers", self.scaling.first))
            self.losses = losses.tolist()
        return found is not None

    @property
    def batch_size(self) -> int:
        """Samples a step now, over all ranks; fewer at the end of an epoch."""
        return self.scaling.batch_size(self.problem.batch_size, self.axis.size)

    @property
    def rate_factor(self) -> float:
        """What multiplies the learning rate now."""
        most = self.problem.samples
        return self.scaling.rate_factor(min(self.batch_size, most) / min(self.problem.batch_size, most))

    def order(self) -> dict[str, int | str]:
        """What decides the samples of each step."""
        seed = int(self.problem.seed)
        return {
            "samples": self.problem.samples,
            "batch_size": self.problem.batch_size,
            "seed": seed if seed.bit_length() < 64 else str(seed),  # attributes of HDF5 end at 64 bits
        }

    def told(self) -> dict[str, Any]:
        """What the record of the run says of this start."""
        optimizer = self.optimizer
        return {
            "optimizer": type(optimizer).__name__,
            "rule": optimizer.rule.configuration(),
            "configuration": optimizer.config,
            "problem": self.problem.settings,
            "parameters": sum(spec.size for spec in self.parameters.specs),
            "dtype": str(self.parameters.dtype),
            "resumed_steps": self.resumed,
            "steps_before": self.before,
            **self.problem.facts,
        }

    def state(self) -> RunState:
        """What a checkpoint holds now."""
        own = {"samples_consumed": self.position, "first_workers": self.scaling.first, "loss": np.array(self.losses)}
        return self.optimizer.run_state().with_facts({**self.order(), **own}).with_facts(self.problem.facts)

    def save(self, last: bool) -> None:
        """Save if it is time to; after the last step all ranks are alike, saved or not."""
        due = last or (self.checkpoints is not None and self.checkpoints.due(self.optimizer.clock))
        with self.phase("saving"):
            if due:
                self.tell_losses()
                self.optimizer.prepare_save()
            if self.checkpoints is None:
                return
            if due:
                if self.record is not None:
                    self.record.flush()  # steps before a checkpoint are not taken again
                self.checkpoints.save(self.state())
            if last:
                self.checkpoints.wait()

    def step(self, step: int) -> str:
        """Take one step; returns why to stop, or nothing."""
        loss, rate = self.advance(step)
        return self.conclude(step, loss, rate)

    def advance(self, step: int) -> tuple[float, float]:
        """Compute a step and update; returns its loss and its learning rate."""
        self.optimizer.config.mesh.ledger.step = step
        self.batch = self.sampler.following(self.position, self.batch_size)
        self.nonfinite_loss = ""
        losses, count = self.losses_and_gradient(self.batch)
        if self.optimizer.mesh.debug or len(self.losses) == self.resumed:
            self.refuse_misuse()
        self.synchronizes_next_step = self.meets_always or self.optimizer.synchronizes_next_step
        if self.synchronizes_next_step:
            self.axis.all_reduce(losses, label="loss")
            loss = tree_sum(losses.tolist()) / count
        else:
            self.unreduced_losses.append((float(losses[0]), count))
            loss = float(losses[0]) * self.axis.size / count
        factor = self.rate_factor
        rate = factor * self.optimizer.rule.learning_rate(self.optimizer.steps + 1)
        with self.phase("update"):
            self.optimizer.update(
                count, rate_factor=factor, nonfinite_loss=self.nonfinite_loss, interrupted=self.interrupts.came
            )
        self.rate = rate
        return loss, rate

    def refuse_misuse(self) -> None:
        """Raise on all ranks if the function has changed what it must not, on any of them.  Collective."""
        self.optimizer.world.raise_if_any(self.misuse)

    def conclude(self, step: int, loss: float, rate: float) -> str:
        """Note what a step has come to; returns why to stop, or nothing."""
        self.note(loss)
        return self.decide(self.stop_request(step, loss, rate))

    def note(self, loss: float) -> None:
        """A step is done."""
        self.position += len(self.batch)
        self.losses.append(loss)
        norm = self.optimizer.gradient_norm
        if self.record is not None:
            told = {} if math.isnan(norm) else {"gradient_norm": norm}
            told |= {} if self.parameters.loss_scale == 1 else {"loss_scale": self.parameters.loss_scale}
            step = self.before + len(self.losses)
            self.record.step(step, loss=loss, learning_rate=self.rate, samples=self.position, **told)
        self.progress.advance(f"loss {loss:.4g}" + ("" if math.isnan(norm) else f", gradient {norm:.3g}"))

    def phase(self, name: str) -> AbstractContextManager[None]:
        """What happens inside is a phase of the step, for the record."""
        return nullcontext() if self.record is None else self.record.phase(name)

    def losses_and_gradient(self, batch: np.ndarray) -> tuple[np.ndarray, int]:
        """Summed losses of a batch, whose sum over ranks is to be added up, and the global number of its terms."""
        if self.ordered is None:
            losses = np.array([self.forward_backward_shares(batch)])
        else:
            losses = self.forward_backward_terms(batch, self.ordered)
        if not self.of_model:
            self.buckets.use_external(self.gradients)
        # Ranks without samples start their reductions here, the others did so in the backward pass: no other
        # collective may come before.
        self.buckets.end_pass()
        return losses, len(batch) * self.problem.tokens_per_sample

    def forward_backward_shares(self, batch: np.ndarray) -> float:
        """Forward and backward of this rank's samples, whose gradients add up; returns their summed loss."""
        shares = share(batch, self.axis.rank, self.axis.size, self.problem.micro_batch_size)
        loss_sum = 0.0
        if not self.of_model:
            self.gradients[...] = 0
        for number, samples in enumerate(shares, start=1):
            last = number == len(shares)
            self.buckets.no_sync = not last
            loss_sum += self.forward_backward(samples)
            if self.of_model and not last:
                self.buckets.end_pass(last=False)
        return loss_sum

    def forward_backward_terms(self, batch: np.ndarray, ordered: OrderedSums) -> np.ndarray:
        """The same where each micro-batch is a term of an ordered sum; returns the losses of all, 0 for others' own."""
        micro = micro_batches(batch, self.problem.micro_batch_size)
        in_turns = self.of_model and self.buckets.on_demand
        ordered.deal = deal = TermAssignment(len(micro), self.axis.size, in_turns)
        own = deal.terms(self.axis.rank)
        tree_merges = deal.tree_merges(self.axis.rank) or [0]
        losses = np.zeros(len(micro))
        # A rank that lacks a term takes part in what the others do in the model all the same.
        rounds = deal.exchanges if in_turns else max(1, len(own))
        for number in range(rounds):
            last = number == rounds - 1
            self.buckets.no_sync = not last
            self.buckets.tree_merges = tree_merges[-1] if last else 0
            if not self.of_model:
                self.gradients[...] = 0
            if number < len(own):
                losses[own[number]] = self.forward_backward(micro[own[number]])
            else:
                self.forward_backward(micro[0][:0])
            if last:
                break
            if not self.of_model:
                self.gradients = self.buckets.swap_external(self.gradients, tree_merges[number])
            elif in_turns:
                self.buckets.end_pass(last=False)
            else:
                self.buckets.push_partial(tree_merges[number])
        return losses

    def forward_backward(self, samples: np.ndarray) -> float:
        """Forward and backward of one micro-batch; returns its summed loss."""
        if not len(samples) and not self.together:
            return 0.0
        parameters = self.parameters if self.of_model else self.parameters.flat
        look = Untouched(self.parameters, samples) if self.looks and len(samples) else None
        began = time.perf_counter()
        loss = self.problem.function(parameters, samples, self.gradients)
        self.optimizer.mesh.ledger.note(f"{len(samples)} samples", "function", began)
        if look is not None:
            self.misuse = self.misuse or look.problem()
            self.looks = self.optimizer.mesh.debug
        try:
            loss = returned(loss)
        except (TypeError, ValueError, RuntimeError):  # the last of a tensor of PyTorch with more elements
            what = f"a {type(loss).__name__}"
            raise TypeError(f"the function must return the summed loss as one number, got {what}") from None
        if not math.isfinite(loss) and not self.nonfinite_loss:
            self.nonfinite_loss = f"{loss} of {_listed(samples)}"
        return loss

    def consumed(self) -> int:
        """Samples that this run has used so far."""
        return self.position - self.sampler.consumed(self.before)

    def stop_request(self, step: int, loss: float, rate: float) -> int:
        """Whether this rank wishes to stop after a step: 2 for its callback, 1 for the time, else 0."""
        seconds = time.perf_counter() - self.began
        if self.callback is not None:
            parameters = self.parameters if self.of_model else self.parameters.flat
            norm = self.optimizer.gradient_norm
            if self.callback(TrainingState(step, loss, rate, norm, self.consumed(), seconds, parameters)):
                return 2
        return int(self.problem.seconds is not None and seconds >= self.problem.seconds)

    def decide(self, stop_request: int) -> str:
        """Why all ranks stop now, if they do."""
        self.wished = max(self.wished, stop_request)
        if not self.synchronizes_next_step:
            return self.why_stop(0)
        self.tell_losses()
        if self.watching:
            self.wished = _INTERRUPT if self.interrupts.came else self.wished
            wishes = np.array([self.wished, self.optimizer.settings.changed(self.optimizer)], np.int64)
            self.wished, changed = self.optimizer.world.all_reduce(wishes, op="max", label="control").tolist()
            if changed:  # by a callback
                self.optimizer.settings.agree(self.optimizer)
        elif self.optimizer.interrupted:
            self.wished = _INTERRUPT
        return self.why_stop(self.wished)

    def tell_losses(self) -> None:
        """Make the losses of steps in which ranks did not meet those of all ranks.  Collective."""
        if self.unreduced_losses:
            sums = self.axis.all_reduce(np.array([loss for loss, _ in self.unreduced_losses]), label="loss")
            stop = len(self.losses) - (1 if self.synchronizes_next_step else 0)
            told = [loss / count for loss, (_, count) in zip(sums.tolist(), self.unreduced_losses, strict=True)]
            self.losses[stop - len(told) : stop] = told
            self.unreduced_losses.clear()

    def why_stop(self, stop_request: int) -> str:
        """Why to stop if this is the strongest wish of any rank; empty if there is no reason."""
        if stop_request:
            return _WISHES[stop_request]
        return self.what_is_reached(self.optimizer.gradient_norm)

    def what_was_reached(self) -> str:
        """Which goal the run that this one goes on from had come to, and says so; none if it is empty."""
        reason = self.what_is_reached(self.optimizer.gradient_norm if self.resumed else math.nan)
        if reason and self.resumed and self.checkpoints is not None and self.optimizer.mesh.rank == 0:
            goal = f"{reason}={getattr(self.problem, reason)}"
            print(
                f"mpishard: the run in {self.checkpoints.folder} had reached {goal} at step {self.optimizer.clock}: "
                "nothing is left to do.  Ask for more, and it goes on from there",
                file=sys.stderr,
                flush=True,
            )
        return reason

    def what_is_reached(self, norm: float) -> str:
        """Which goal, after a step with a gradient of this norm; none if it is empty."""
        if self.problem.tolerance is not None and norm <= self.problem.tolerance:
            return "tolerance"
        return "steps" if self.problem.steps is not None and len(self.losses) >= self.problem.steps else ""


def _listed(samples: np.ndarray) -> str:
    """Sample indices in words, the first few of them."""
    named = ", ".join(map(str, samples[:_NAMED].tolist()))
    more = f" and {len(samples) - _NAMED} more" if len(samples) > _NAMED else ""
    return f"samples {named}{more}" if named else "no samples"
