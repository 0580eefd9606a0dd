"""How far a run has come, as its checkpoints keep it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mpishard.data.sampling import Sampler
from mpishard.training.progress import RunProgress

SAMPLER = Sampler(10, 4)  # steps of 4, 4 and 2 samples
OPTIMIZER = {"steps": 4, "skipped_steps": 1}
LOSSES = np.array([3.0, 2.0, 1.0])


def resumed(**facts):
    return RunProgress.from_metadata({**OPTIMIZER, **facts}, SAMPLER, first_workers=7, batches=5)


def values(progress):
    return (
        progress.losses.tolist(),
        progress.samples_consumed,
        progress.first_workers,
        progress.steps_before,
        progress.skipped_before,
        progress.resumed_steps,
        progress.samples_before,
    )


def test_what_a_checkpoint_keeps():
    kept = RunProgress(LOSSES, 12, 2, 2, 0, 1, 9).to_metadata()
    assert list(kept) == ["samples_consumed", "samples_before", "first_workers", "loss"]
    assert values(resumed(**kept)) == ([3, 2, 1], 12, 2, 2, 1, 3, 9)


def test_a_checkpoint_that_does_not_say_how_many_workers_began():
    assert values(resumed(samples_consumed=12, loss=LOSSES)) == ([3, 2, 1], 12, 7, 2, 1, 3, SAMPLER.consumed(2))


@pytest.mark.parametrize("facts", [{}, {"loss": 0.5}, {"loss": LOSSES}, {"samples_consumed": 3}, {"first_workers": 3}])
def test_a_checkpoint_of_another_training_loop(facts):
    losses, *numbers = values(resumed(**facts))
    assert len(losses) == 5 and all(map(math.isnan, losses))
    assert numbers == [SAMPLER.consumed(5), 7, 0, 1, 5, 0]


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"samples_consumed": -1}, "samples_consumed=-1, which must be a whole number of at least 0"),
        ({"samples_consumed": "x"}, "samples_consumed=x"),
        ({"first_workers": 0}, "first_workers=0, which must be a whole number of at least 1"),
        ({"steps": 1.5}, "steps=1.5"),
        ({"samples_consumed": 8, "loss": np.zeros(6)}, "the state has 6 losses of 5 steps"),
    ],
)
def test_wrong_numbers_are_refused(facts, message):
    with pytest.raises(ValueError, match=message):
        resumed(**facts)
