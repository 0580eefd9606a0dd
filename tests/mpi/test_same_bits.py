"""The same bits in every layout: a part of the grid in `tests/soak/grid_bits_run.py`, the same one on every run."""

from __future__ import annotations

from dataclasses import replace

import breaks
import grid_bits
import pytest
from grid_cases import every_pair
from mpi4py import MPI
from variants import quick

import mpishard
from mpishard.backend.gemm import choice, libraries
from mpishard.pipeline.schedule import SCHEDULES

pytestmark = pytest.mark.pairs(1)

SIZE = MPI.COMM_WORLD.size
SHAPE = "6" if SIZE % 3 == 0 else "8" if SIZE == 8 else "4"
KNOWN = {}
STEPS = 4  # the last batch of an epoch is shorter


UNTIED = list(grid_bits.bits_cases(SIZE, SHAPE))
CASES = [replace(case, tied=tied) for case in UNTIED for tied in (False, True)]


def settings(case):
    names = ("zero", "schedule", "sequence_parallel", "recompute", "tied")
    return {"sizes": (case.data, case.tensor, case.pipeline), **{name: getattr(case, name) for name in names}}


def expected(case, comm):
    """The digests of one rank, computed once for each model."""
    if case.model not in KNOWN:
        KNOWN[case.model] = comm.bcast(grid_bits.run_alone(case, STEPS) if comm.rank == 0 else None)
    return KNOWN[case.model]


@pytest.mark.filterwarnings("ignore:.*micro-batches for .* pipeline stages")
@pytest.mark.parametrize("case", quick(every_pair(CASES, settings), 3), ids=str)
def test_a_layout_has_the_bits_of_one_rank(case, comm):
    with mpishard.Mesh(comm, **case.sizes) as mesh:
        assert grid_bits.run(case, mesh, steps=STEPS) == expected(case, comm)


@pytest.mark.parametrize("what", [name for name in breaks.BREAKS if name != "threads"])
def test_the_comparison_can_fail(what, comm):
    """With another tree over micro-batches or slices, or another block of rows; threads show in larger products."""
    case = grid_bits.BitsCase(SHAPE, data=comm.size, recompute=True)
    unbroken = expected(case, comm)
    with mpishard.Mesh(comm) as mesh, breaks.broken(what):
        assert grid_bits.run(case, mesh, steps=STEPS) != unbroken


def test_the_grid_has_every_schedule():
    assert {case.schedule for case in grid_bits.bits_cases(2, "4")} == set(SCHEDULES)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("axis", ["data", "tensor"])
def test_half_precision_storage_rounds_in_the_same_places(axis, recompute, comm):
    """In the layouts that have it: not with several stages, which do not store what they hand on."""
    case = grid_bits.BitsCase(SHAPE, recompute=recompute, storage="float16", **{axis: comm.size})
    with mpishard.Mesh(comm, **case.sizes) as mesh:
        assert grid_bits.run(case, mesh, steps=STEPS) == expected(case, comm)


LAYOUTS = [
    {"data": SIZE, "zero": 2},
    {"tensor": SIZE},
    {"tensor": SIZE, "sequence_parallel": True, "recompute": True, "tied": True},
    {"pipeline": SIZE, "schedule": "zb-h1"},
    {"pipeline": SIZE, "schedule": "zb-h1", "recompute": True, "tied": True},
]
WIDE = {1: "6-wide", 2: "6-wide", 3: "6-wide", 4: "4-large"}


@pytest.mark.skipif(SIZE not in WIDE, reason="no shape with large products has so many shards")
@pytest.mark.skipif(not libraries.multiplies_bfloat16(), reason="the processor has no products of bfloat16")
@pytest.mark.filterwarnings("ignore:.*micro-batches for .* pipeline stages", "ignore:compute_dtype=bfloat16 on NumPy")
@pytest.mark.parametrize("library", libraries.installed())
def test_products_of_bfloat16_by_a_library_have_the_bits_of_one_rank(library, comm, environ, monkeypatch):
    monkeypatch.setattr(choice, "_active", choice.Choice())
    alone = {}
    for each, tied in (("numpy", False), (library, False), (library, True)):
        environ(**{choice.VARIABLE: each})
        case = grid_bits.BitsCase(WIDE[SIZE], compute="bfloat16", tied=tied)
        alone[each, tied] = comm.bcast(grid_bits.run_alone(case, steps=2) if comm.rank == 0 else None)
    assert alone[library, False] != alone["numpy", False]
    for layout in LAYOUTS:
        case = grid_bits.BitsCase(WIDE[SIZE], compute="bfloat16", **layout)
        with mpishard.Mesh(comm, **case.sizes) as mesh:
            assert choice.active().has_bfloat16
            assert grid_bits.run(case, mesh, steps=2) == alone[library, case.tied], case


@pytest.mark.mpi(min_size=2)
def test_stages_that_round_elsewhere_are_refused(comm):
    case = grid_bits.BitsCase(SHAPE, storage="float16", pipeline=comm.size)
    with mpishard.Mesh(comm, **case.sizes) as mesh, pytest.raises(ValueError, match="storage_dtype"):
        grid_bits.run(case, mesh, steps=STEPS)
