"""What processes of an elastic run tell each other: after a death, and when the workers change."""

from __future__ import annotations

import numpy as np
import pytest

from mpishard.elastic.transactions import ResizeMetadata, RunStatus
from mpishard.training.progress import RunProgress


@pytest.mark.parametrize(
    ("survivors", "newest"),
    [
        ([(4, 4, "", False), (4, 4, "", False)], (4, 4, "", False)),
        # The agreement on step 5 has come to one of them only.
        ([(4, 4, "", False), (5, 4, "", False)], (5, 4, "", False)),
        # The decision after step 5 has.
        ([(5, 4, "", False), (5, 5, "", False)], (5, 5, "", False)),
        ([(5, 5, "steps", False), (5, 4, "", False)], (5, 5, "steps", False)),
        # The last checkpoint counts as saved where all know that it is.
        ([(5, 5, "steps", True), (5, 5, "steps", False)], (5, 5, "steps", False)),
        ([(5, 5, "steps", True)], (5, 5, "steps", True)),
    ],
)
def test_what_one_survivor_knows_counts_for_all(survivors, newest):
    assert RunStatus.newest(RunStatus(*each) for each in survivors) == newest


@pytest.mark.parametrize(("committed", "decided", "is_decided"), [(3, 3, True), (4, 3, False), (0, 0, True)])
def test_a_death_between_commit_and_decision(committed, decided, is_decided):
    assert RunStatus(committed, decided, "", False).is_decided is is_decided


def test_the_metadata_of_a_resize_come_as_they_were_sent():
    progress = RunProgress(np.array([0.5, 0.25]), 32, 4, 3, 1, 2, 12)
    facts = {"steps": 5, "skipped_steps": 0, "rule.json": {"lr": 0.1}}
    sent = ResizeMetadata(facts, progress, RunStatus(5, 4, "signal", True), 2**25 + 3, -1, ["a", "b"])
    wire = sent.to_wire()
    assert [name for name, value in wire.items() if isinstance(value, np.ndarray)] == ["losses"]  # one broadcast
    assert wire | facts == wire  # the optimizer restores itself from it
    came = ResizeMetadata.from_wire(wire)
    assert came.progress.losses.tolist() == [0.5, 0.25]
    assert (came.optimizer, came.status, came.request) == (facts, sent.status, sent.request)
    assert (came.discovered, came.checkpoints) == (-1, ["a", "b"])
    numbers = ("samples_consumed", "first_workers", "steps_before", "skipped_before", "resumed_steps")
    assert came.progress.samples_before == 12
    assert [getattr(came.progress, name) for name in numbers] == [32, 4, 3, 1, 2]
