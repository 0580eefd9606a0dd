"""The checkpoints of a run: the progress that they keep, when they are saved, and how the run resumes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishard.comm.errors import raised_on_all
from mpishard.comm.supervisor_reports import take_restart
from mpishard.data.sampling import Sampler
from mpishard.data_parallel.sharded_optimizer import ShardedOptimizer
from mpishard.io import log
from mpishard.layout.run_state import RunState, brief, whole_fact
from mpishard.nn.model_facts import MODEL, changes
from mpishard.training.objective import Batches, Objective, RunOptions

if TYPE_CHECKING:
    from mpishard.checkpoint import Checkpoints  # with h5py: only for those who have checkpoints

# The facts of validation losses.
_STEPS, _LOSS = "validation_steps", "validation_loss"
_EVALUATION = "evaluation.json"  # the fact that says of which set the validation losses are


@dataclass(frozen=True)
class RunProgress:
    """The progress of a run as one value: what its checkpoints keep, and what the workers that join it get."""

    losses: np.ndarray  # float64, one for each step since the run began, in whatever process that was
    samples_consumed: int  # samples before the next step, counted through all epochs
    first_workers: int  # the number of workers for which batch size and learning rate are given
    steps_before: int  # steps of the optimizer before the run began
    skipped_before: int  # skipped steps of the optimizer before the run began or resumed
    resumed_steps: int  # steps of the run before the checkpoint from which it resumed
    samples_before: int  # `samples_consumed` when the run began
    validated: tuple[tuple[int, float], ...] = ()  # steps after which the validation set was evaluated, and its losses
    best_saved: int = 0  # the step of the best checkpoint so far, which need not be saved again; 0 before the first

    def to_metadata(self) -> dict[str, Any]:
        """The numbers, and the losses as an array, that a checkpoint keeps.

        The optimizer's numbers are in the checkpoint too, and the rest follows from them.
        """
        validated = {}
        if self.validated:
            steps, losses = zip(*self.validated, strict=True)
            validated = {_STEPS: np.array(steps, np.int64), _LOSS: np.array(losses, np.float64)}
        return {
            "samples_consumed": self.samples_consumed,
            "samples_before": self.samples_before,
            "first_workers": self.first_workers,
            "loss": self.losses,
            **validated,
        }

    @classmethod
    def from_metadata(cls, facts: Mapping[str, Any], sampler: Sampler, first_workers: int, batches: int) -> RunProgress:
        """The progress of a run that resumes from a checkpoint with these facts.

        A checkpoint that a training loop of the user's has saved knows neither samples nor losses: then `sampler` says
        how many samples the optimizer's `batches` steps have consumed, and `first_workers` counts.  Raises ValueError
        if a number is invalid, or there are more losses than steps.
        """
        consumed = whole_fact(facts, "samples_consumed", 0)
        first = whole_fact(facts, "first_workers", 1, least=1)
        steps, skipped = whole_fact(facts, "steps"), whole_fact(facts, "skipped_steps")
        clock, losses = steps + skipped, facts.get("loss")
        if not ("samples_consumed" in facts and isinstance(losses, np.ndarray)):
            losses, consumed, first = np.full(clock, math.nan), sampler.consumed(batches), first_workers
        elif "first_workers" not in facts:
            first = first_workers
        if len(losses) > clock:
            raise ValueError(f"the state has {len(losses)} losses of {clock} steps")
        steps_before = clock - len(losses)
        samples_before = whole_fact(facts, "samples_before", sampler.consumed(steps_before))
        validated = _validated(facts, clock)
        return cls(losses, consumed, first, steps_before, skipped, len(losses), samples_before, validated)


def _validated(facts: Mapping[str, Any], clock: int) -> tuple[tuple[int, float], ...]:
    """The validation losses among the facts of a checkpoint after step `clock`; ValueError if they are invalid."""
    steps, losses = facts.get(_STEPS), facts.get(_LOSS)
    if steps is None and not isinstance(losses, np.ndarray):  # a number may be a fact of a loop of the user's
        return ()
    if not (isinstance(steps, np.ndarray) and isinstance(losses, np.ndarray) and steps.shape == losses.shape):
        raise ValueError(f"{_STEPS} and {_LOSS} of the saved state must be arrays of one size")
    ascending = bool((np.diff(steps) > 0).all()) and (not len(steps) or (steps[0] > 0 and steps[-1] <= clock))
    if not (steps.dtype.kind in "iu" and ascending and np.isfinite(losses).all()):
        raise ValueError(f"{_STEPS} and {_LOSS} of the saved state must be ascending steps up to {clock}, and finite")
    return tuple(zip(steps.tolist(), losses.tolist(), strict=True))


class RunCheckpoints:
    """Saves a run and resumes it; does nothing without `Checkpoints` among the options.

    A checkpoint has the facts of `problem`, the state of `optimizer`, and the position in the samples of `batches`.
    `problem` may be replaced by the same one for another mesh.
    """

    def __init__(
        self, problem: Objective[Any], optimizer: ShardedOptimizer, options: RunOptions, batches: Batches
    ) -> None:
        self.problem: Objective[Any] = problem
        self._optimizer = optimizer
        self._batches = batches
        self._checkpoints: Checkpoints | None = options.checkpoints
        self._record = options.record
        self._resumes = options.resume
        self._evaluation = options.evaluate

    @property
    def folder(self) -> Path | None:
        """The folder of the checkpoints; None without any."""
        return None if self._checkpoints is None else self._checkpoints.folder

    @property
    def how_to_resume(self) -> str:
        """A sentence on how to continue a run that was stopped."""
        if self._checkpoints is None:
            return "nothing is saved: checkpoints=Checkpoints(folder, mesh), resume=True makes a run that can resume"
        how = "the same command resumes" if self._resumes else "optimize(..., resume=True) resumes"
        return f"{how} from the checkpoint in {self._checkpoints.folder}"

    def warn_of_restart(self) -> None:
        """Say on the first rank, once a job, that a job that was started again begins from step 0.

        Nothing is said of a run that resumes: it has no checkpoint yet.
        """
        resumes = self._checkpoints is not None and self._resumes
        if not resumes and self._optimizer.world.rank == 0 and take_restart():
            log.warn(f"this job was started again, and training begins from step 0 again; {self.how_to_resume}")

    def check(self, progress: RunProgress, rehearses: bool) -> None:
        """Raise now the errors that would occur at the first save of this progress.  Collective.

        With `rehearses` the folder is written to, too.  On all ranks, raises ValueError if the checkpoints are of other
        ranks or cannot hold the facts, OSError if the folder cannot be written.
        """
        checkpoints = self._checkpoints
        if checkpoints is None:
            return
        from mpishard.checkpoint.index import check_facts

        world = self._optimizer.world
        with raised_on_all(world):
            if (checkpoints.mesh.rank, checkpoints.mesh.size) != (world.rank, world.size):
                raise ValueError("the checkpoints are not of the optimizer's ranks; make both with one mesh")
            check_facts(self._state(progress).facts)
        if rehearses:
            checkpoints.rehearse()

    def resume(self) -> RunProgress | None:
        """Restore parameters and optimizer from the newest checkpoint, if the options say so.  Collective.

        Returns the progress of the run; None if nothing is restored.  On all ranks, raises ValueError if the checkpoint
        is of another model, rule or order of samples, or all are damaged, and OSError if the folder cannot be read.
        """
        if self._checkpoints is None or not self._resumes:
            return None
        optimizer, order = self._optimizer, self._batches.order

        def check(facts: Mapping[str, Any]) -> None:
            optimizer.state.check(facts)
            self._progress(facts)
            changed = [name for name in order if name in facts and not np.array_equal(facts[name], order[name])]
            if changed:
                pairs = ", ".join(f"{name}={brief(facts[name])} there and {order[name]} here" for name in changed)
                raise ValueError(
                    f"the checkpoint is of a run with other samples: {pairs}; their order would not continue.  Take "
                    "the values it was saved with, or load_checkpoint() into the model and begin a new run"
                )

        found = self._checkpoints.load(optimizer.state.capture(), check=check)
        if found is None:
            return None
        optimizer.state.restore_settings(found.facts)
        optimizer.state.restore(found.facts)
        if optimizer.world.rank == 0:
            log.inform(f"resumes from step {optimizer.clock} of {self._checkpoints.folder}")
        self._report_other_model(found.facts)
        progress = self._comparable(self._progress(found.facts), found.facts)
        if not self.keeps_best:
            return progress
        # One whose link a death has prevented, or from before the best was kept, is saved as the best again.  So is one
        # that is ahead of the run, because the newest checkpoints are damaged.
        best = self._checkpoints.best_step
        return replace(progress, best_saved=best if best <= optimizer.clock else 0)

    def _report_other_model(self, facts: Mapping[str, Any]) -> None:
        """Say on rank 0 how the saved model differs, if it has the same tensors: in its heads, or its dropout."""
        now, then = self.problem.facts.get(MODEL), facts.get(MODEL)
        if self._optimizer.world.rank > 0 or not isinstance(now, Mapping) or not isinstance(then, Mapping):
            return
        changed = [f"{name}={new} in place of {brief(old)}" for name, (new, old) in changes(now, then).items()]
        if changed:
            log.warn(f"the saved model continues with {', '.join(changed)}")

    def _comparable(self, progress: RunProgress, facts: Mapping[str, Any]) -> RunProgress:
        """The progress, without the validation losses of another set; a message on rank 0 says so."""
        now, then = self._evaluation, facts.get(_EVALUATION)
        if now is None or not progress.validated or then == now.identity:
            return progress
        if self._optimizer.world.rank == 0:
            log.inform(
                f"the validation set is another one, {now.identity} in place of {brief(then)}: its losses are not "
                "compared with those before"
            )
        return replace(progress, validated=())

    @property
    def keeps_best(self) -> bool:
        """True if the checkpoint of the lowest validation loss is kept.  The same on all ranks."""
        return self._checkpoints is not None and self._checkpoints.best is not None

    @property
    def due(self) -> bool:
        """True if a save is due after the last step.  The same on all ranks."""
        return self._checkpoints is not None and self._checkpoints.due(self._optimizer.clock)

    def save(self, progress: RunProgress, best: bool = False, exact: bool = False) -> None:
        """Save the run at this progress.  Collective.

        `best`: it has the lowest validation loss so far.  `exact`: the save is done before training continues, since a
        death would end one that runs during training.
        """
        if self._checkpoints is not None:
            if self._record is not None:
                self._record.flush()  # no later run repeats the steps before a checkpoint
            self._checkpoints.save(self._state(progress), asynchronous=False if exact else None, best=best)

    def wait(self) -> None:
        """Wait until the last save is on disk.  Collective."""
        if self._checkpoints is not None:
            self._checkpoints.wait()

    def _progress(self, facts: Mapping[str, Any]) -> RunProgress:
        batches = self._optimizer.state.batches_in(facts)
        return RunProgress.from_metadata(facts, self._batches.sampler, self._batches.first_workers, batches)

    def _state(self, progress: RunProgress) -> RunState:
        state = self._optimizer.state.capture().with_facts({**self._batches.order, **progress.to_metadata()})
        if self._evaluation is not None:
            state = state.with_facts({_EVALUATION: self._evaluation.identity})
        return state.with_facts(self.problem.facts)

    # -- for runs that change their ranks ---------------------------------------------------------------------------

    @property
    def own(self) -> list[str]:
        """The ids of the checkpoints that the run has saved, by which it knows the ones that it may remove."""
        return [] if self._checkpoints is None else self._checkpoints.own

    @own.setter
    def own(self, ids: list[str]) -> None:
        if self._checkpoints is not None:
            self._checkpoints.own = ids

    def release(self) -> None:
        """Free the communicators, to `rebind` afterwards.  Collective."""
        if self._checkpoints is not None:
            self._checkpoints.release()

    def rebind(self) -> None:
        """Use the communicators of the mesh after its `rebind`.  Collective."""
        if self._checkpoints is not None:
            self._checkpoints.rebind()

    def revoke(self) -> None:
        """Make a save under way fail on all ranks, after the death of a rank."""
        if self._checkpoints is not None:
            self._checkpoints.revoke()
