"""What is told of each step while a run goes on: its fields in the record, and the progress line on stderr."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from mpishard.record import RunRecord
from mpishard.record.reading import VALIDATION
from mpishard.training.progress_bar import ProgressBar


class StepReport:
    """Reports the steps of a run to its record and its progress bar.

    Parameters
    ----------
    record : RunRecord or None
    steps : int or None
        The goal of the run, for the progress bar.
    shows : bool
        Whether the first rank shows the progress.
    """

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
        """Write what the record has collected."""
        if self._record is not None:
            self._record.flush()

    def end(self, step: int, reason: str, way_on: str) -> None:
        """Write why the run has ended after a step."""
        if self._record is not None:
            self._record.end(step, reason, way_on)

    def close(self) -> None:
        """End the progress bar."""
        if self._bar is not None:
            self._bar.close()
