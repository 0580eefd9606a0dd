"""The metrics of a run: its losses, and the reports of each step, as fields in the record and as a progress line."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from mpishard.comm.axis import Axis
from mpishard.io.terminal import is_terminal, say
from mpishard.record import RunRecord
from mpishard.record.reading import VALIDATION
from mpishard.reduction.tree_sum import tree_sum


class _Unreduced(NamedTuple):
    """A step without synchronization: its index in the history, this rank's sum, and the terms of all ranks."""

    step: int
    loss_sum: float
    terms: int


class LossHistory:
    """Mean losses, one for each step; in steps without synchronization they are this rank's estimates until `reduce`.

    Losses are summed over the ranks of `axis`.
    """

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._means: list[float] = []
        self._unreduced: list[_Unreduced] = []

    def __len__(self) -> int:
        return len(self._means)

    def to_array(self) -> np.ndarray:
        """A copy of all losses, float64."""
        return np.array(self._means)

    def restore(self, losses: np.ndarray) -> None:
        self._means = losses.tolist()

    def append(self, loss: float) -> None:
        """Add the mean loss of a finished step."""
        self._means.append(loss)

    def mean_over_ranks(self, losses: np.ndarray, terms: int, riders: np.ndarray | None = None) -> float:
        """The mean loss of the next step, with `terms` terms over all ranks; overwrites `losses`.  Collective.

        `riders` are further numbers that are summed over the ranks in the same call, in place.
        """
        if riders is None:
            self._axis.all_reduce(losses, label="loss")
        else:
            both = self._axis.all_reduce(np.concatenate([losses, riders]), label="loss")
            losses[...], riders[...] = both[: len(losses)], both[len(losses) :]
        return tree_sum(losses.tolist()) / terms

    def mean_of_rank(self, losses: np.ndarray, terms: int) -> float:
        """An estimate without communication, as if every rank had this rank's loss; `reduce` corrects it."""
        loss_sum = float(losses[0])
        self._unreduced.append(_Unreduced(len(self), loss_sum, terms))
        return loss_sum * self._axis.size / terms

    def reduce(self) -> None:
        """Replace the estimates of steps without synchronization by means over all ranks.  Collective."""
        if not self._unreduced:
            return
        sums = self._axis.all_reduce(np.array([each.loss_sum for each in self._unreduced]), label="loss")
        for each, loss_sum in zip(self._unreduced, sums.tolist(), strict=True):
            self._means[each.step] = loss_sum / each.terms
        self._unreduced.clear()


# A log gets a line every 5 seconds; in a long run the pause is 5 % of the time so far, at most one minute.
_EVERY_S, _SHARE, _MOST_S = 5.0, 0.05, 60.0


class ProgressBar:
    """Progress of a run on stderr, as a live bar or as lines; it `shows` nothing on ranks above 0.

    Under mpirun stderr is a pipe, not a terminal, so that users see lines there.  `done` is the number of steps before
    a resumed run.
    """

    def __init__(self, total: int | None, shows: bool, unit: str = "step", done: int = 0) -> None:
        self._live = shows and is_terminal(sys.stderr)
        self._shows = shows
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
        pause = min(max(_EVERY_S, _SHARE * (now - self._began)), _MOST_S)
        is_due = now - self._printed >= pause or self._done in (self._first + 1, self._total)
        if self._shows and not self._live and is_due:
            self._printed = now
            shown = {"unit": self._unit, "postfix": note, "ncols": 0, "initial": self._first}
            say(tqdm.format_meter(self._done, self._total, now - self._began, **shown))

    def close(self) -> None:
        self._bar.close()


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
            self._bar = ProgressBar(self._steps, shows=True, done=done)

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

    def audit_found(self, facts: Mapping[str, Any]) -> None:
        """Note what an audit has found."""
        if self._record is not None:
            self._record.audit_found(**facts)

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

    def end(self, step: int, reason: str, how_to_resume: str) -> None:
        """Write why the run has ended after a step."""
        if self._record is not None:
            self._record.end(step, reason, how_to_resume)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
