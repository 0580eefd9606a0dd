"""A sample of the grid of faults in ``tests/faults.py``: whoever fails, the run ends with the bits of one rank."""

from __future__ import annotations

import random

import faults
import pytest

SEED, PARTS = 5, 2
LAUNCH = faults.launcher()
needs_ulfm = pytest.mark.skipif(LAUNCH is None, reason="deaths are healed in place under Open MPI only")


@pytest.fixture(scope="module")
def reference():
    return faults.expected()


def outlives(case, reference):
    ended = faults.run(case, LAUNCH, reference)
    assert not ended.problem, f"{case.name}: {ended.problem}\n{ended.output}"


def sample():
    """Each case from another part of the grid."""
    draw = random.Random(SEED)
    victims, phases = draw.sample(list(faults.VICTIMS), PARTS), draw.sample(faults.PHASES, PARTS)
    kinds, strategies = draw.sample(faults.KINDS, PARTS), draw.sample(faults.STRATEGIES, PARTS)
    return [faults.single(*parts) for parts in zip(victims, phases, kinds, strategies, strict=True)]


@needs_ulfm
@pytest.mark.parametrize("case", sample(), ids=lambda case: case.name)
def test_one_process_fails(case, reference):
    outlives(case, reference)


@needs_ulfm
@pytest.mark.parametrize("number", [1, 2], ids=["two at once", "neighbours at once"])
def test_two_processes_fail(number, reference):
    outlives(faults.several("ZeRO1")[number], reference)
