"""How far a run has come, as one value: what its checkpoints keep, and what the workers that join it get."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpishard.data.sampling import Sampler
from mpishard.layout.run_state import whole_fact

# The facts of validation losses.
_STEPS, _LOSS = "validation_steps", "validation_loss"


@dataclass(frozen=True)
class RunProgress:
    """How far a run has come.

    Parameters
    ----------
    losses : ndarray, float64
        The loss of each step since the run began, in whatever process that was.
    samples_consumed : int
        Samples before the next step, counted through all epochs.
    first_workers : int
        The number of workers for which batch size and learning rate are given.
    steps_before : int
        Steps of the optimizer before the run began.
    skipped_before : int
        Skipped steps of the optimizer before the run began or resumed.
    resumed_steps : int
        Steps of the run before the checkpoint from which it resumed.
    samples_before : int
        As `samples_consumed`, when the run began.
    validated : tuple of (int, float)
        Steps after which the validation set was evaluated, and its losses.
    best_saved : int
        The step of the best checkpoint so far, which need not be saved again; 0 before the first.
    """

    losses: np.ndarray
    samples_consumed: int
    first_workers: int
    steps_before: int
    skipped_before: int
    resumed_steps: int
    samples_before: int
    validated: tuple[tuple[int, float], ...] = ()
    best_saved: int = 0

    def to_metadata(self) -> dict[str, Any]:
        """What a checkpoint keeps.  The optimizer's numbers are there too, and the rest follows from them.

        Not collective.

        Returns
        -------
        dict
            Numbers, and the losses as an array.
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
        """The progress of a run that resumes from a checkpoint with these facts.  Not collective.

        Parameters
        ----------
        facts : mapping
            Of the checkpoint.  One that a training loop of the user's has saved knows neither samples nor losses.
        sampler : Sampler
            Says how many samples the optimizer's steps have consumed if the checkpoint does not.
        first_workers : int
            Used if the checkpoint has none.
        batches : int
            Of the optimizer's steps, used if the checkpoint does not say how many samples they have consumed.

        Raises
        ------
        ValueError
            If a number is invalid, or there are more losses than steps.
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
