"""Any layout trains the same models: a part of the grid in `tests/helpers/grid.py`, the same one on every run."""

from __future__ import annotations

import grid
import pytest
from grid_cases import MODELS, every_pair
from mpi4py import MPI

SIZE = MPI.COMM_WORLD.size
# Many ranks on few cores take long over a step, and each MPI takes others of these layouts there; `grid.py` takes all
# of them everywhere.
pytestmark = pytest.mark.every_variant if SIZE <= 4 else []


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


@pytest.mark.parametrize(
    "case", every_pair([case for model in MODELS for case in grid.cases(SIZE, model)], settings), ids=str
)
def test_a_layout_trains_as_one_rank_does(case, comm, short):
    found = grid.errors(case, comm, 10 if short or SIZE > 4 else grid.STEPS)
    assert grid.passes(found), found
