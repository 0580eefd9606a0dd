"""Any layout trains the same models: a part of the grid in `tests/helpers/grid.py`, the same one on every run."""

from __future__ import annotations

import grid
import pytest
from grid_cases import MODELS, every_pair
from mpi4py import MPI
from variants import full, quick

pytestmark = pytest.mark.pairs(1)

SIZE = MPI.COMM_WORLD.size


def settings(case):
    return {
        "sizes": (case.data, case.tensor, case.pipeline),
        "zero": case.zero,
        "schedule": case.schedule,
        "micro-batches": case.microbatches - case.pipeline,
        "tied": case.tied,
        "sequence": case.sequence_parallel,
        "rule": case.rule,
        "model": case.model,
    }


CASES = every_pair([case for model in MODELS for case in grid.cases(SIZE, model)], settings)


@pytest.mark.parametrize("steps", [10, *full(grid.STEPS)])
@pytest.mark.parametrize("case", quick(CASES, 4), ids=str)
def test_a_layout_trains_as_one_rank_does(case, comm, steps):
    found = grid.errors(case, comm, steps)
    assert grid.passes(found), found
