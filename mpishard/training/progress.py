"""The progress of a run as one value, and its reports: fields in the record and a progress line."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from mpishard.data.sampling import Sampler
from mpishard.layout.run_state import whole_fact
from mpishard.record import RunRecord
from mpishard.record.reading import VALIDATION

# The facts of validation losses.
_STEPS, _LOSS = "validation_steps", "validation_loss"


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
    if steps is None and losses is None:
        return ()
    if not (isinstance(steps, np.ndarray) and isinstance(losses, np.ndarray) and steps.shape == losses.shape):
        raise ValueError(f"{_STEPS} and {_LOSS} of the saved state must be arrays of one size")
    ascending = bool((np.diff(steps) > 0).all()) and (not len(steps) or (steps[0] > 0 and steps[-1] <= clock))
    if not (steps.dtype.kind in "iu" and ascending and np.isfinite(losses).all()):
        raise ValueError(f"{_STEPS} and {_LOSS} of the saved state must be ascending steps up to {clock}, and finite")
    return tuple(zip(steps.tolist(), losses.tolist(), strict=True))


# A log gets a line every 5 seconds; in a long run the pause is 5 % of the time so far, at most one minute.
_EVERY_S, _SHARE, _MOST_S = 5.0, 0.05, 60.0


class ProgressBar:
    """Progress of a run on stderr, as a live bar or as lines; shows nothing if `shown` is False (ranks above 0).

    Under mpirun stderr is a pipe, not a terminal, so that users see lines there.  `done` is the number of steps before
    a resumed run.
    """

    def __init__(self, total: int | None, shown: bool, unit: str = "step", done: int = 0) -> None:
        self._live = shown and sys.stderr.isatty()
        self.shown = shown
        self._total = total
        self._unit = unit
        self._began = time.perf_counter()
        self._printed = self._began
        self._done = self._first = done
        self._bar = tqdm(total=total, unit=unit, initial=done, disable=not self._live)

    def advance(self, note: str) -> None:
        """Count a finished step; `note` describes it."""
        self._done += 1
        if self._live:
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update()
        now = time.perf_counter()
        if (
            self.shown
            and not self._live
            and (now - self._printed >= self._pause(now) or self._done in (self._first + 1, self._total))
        ):
            self._printed = now
            self._print(note)

    def close(self) -> None:
        self._bar.close()

    def _pause(self, now: float) -> float:
        return min(max(_EVERY_S, _SHARE * (now - self._began)), _MOST_S)

    def _print(self, note: str) -> None:
        elapsed = time.perf_counter() - self._began
        line = tqdm.format_meter(
            self._done, self._total, elapsed, unit=self._unit, postfix=note, ncols=0, initial=self._first
        )
        print(line, file=sys.stderr, flush=True)


class StepReport:
    """Reports the steps of a run to its record and, if it `shows`, to the first rank's progress bar up to `steps`."""

    def __init__(self, record: RunRecord | None, steps: int | None, shows: bool) -> None:
        self.shows: bool = shows
        self._record = record
        self._steps = steps
        self._bar: ProgressBar | None = None
        self._validated = ""  # the newest validation loss, for the progress bar
        self._logged = 0  # the step of the newest one that this process has written into the record

    def begin(self, metadata: Mapping[str, Any]) -> None:
        """Write the metadata of this start.  Collective over the ranks of the record."""
        if self._record is not None:
            self._record.begin(metadata)

    def show(self, done: int) -> None:
        """Show the progress on this rank from now on, with `done` steps so far."""
        if self.shows and self._bar is None:
            self._bar = ProgressBar(self._steps, shown=True, done=done)

    def step(
        self,
        step: int,
        *,
        loss: float,
        learning_rate: float,
        samples: int,
        norm: float,
        loss_scale: float,
        minimization: Mapping[str, float],
    ) -> None:
        """Report a finished step; `norm`: of its gradient, NaN if unknown; `minimization`: of a method."""
        known = not math.isnan(norm)
        if self._record is not None:
            further = {"gradient_norm": norm} if known else {}
            further |= {} if loss_scale == 1 else {"loss_scale": loss_scale}
            further |= minimization
            self._record.step(step, loss=loss, learning_rate=learning_rate, samples=samples, **further)
        if self._bar is not None:
            iteration = f", iteration {minimization['iteration']}" if minimization else ""
            gradient = f", gradient {norm:.3g}" if known else ""
            self._bar.advance(f"loss {loss:.4g}{gradient}{iteration}{self._validated}")

    def validation(self, step: int, loss: float) -> None:
        """Report the validation loss after a step; the first rank writes each once."""
        self._validated = f", validation {loss:.4g}"
        record = self._record
        if record is not None and record.mesh.rank == 0 and step > self._logged:
            record.log(step, **{VALIDATION: loss})
            self._logged = step

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A context whose duration the record counts as a phase of the step."""
        return nullcontext() if self._record is None else self._record.phase(name)

    def flush(self) -> None:
        if self._record is not None:
            self._record.flush()

    def end(self, step: int, reason: str, way_on: str) -> None:
        """Write why the run has ended after a step."""
        if self._record is not None:
            self._record.end(step, reason, way_on)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
