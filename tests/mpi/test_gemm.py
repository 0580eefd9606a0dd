"""All ranks multiply by the same libraries."""

from __future__ import annotations

import numpy as np
import pytest

import mpishard
from mpishard.backend import gemm, process
from mpishard.backend.gemm import choice, libraries
from mpishard.backend.gemm.choice import VARIABLE, Choice
from mpishard.backend.gemm.libraries import Offer
from mpishard.comm.agreement import agree_on_gemm_libraries
from mpishard.data_parallel.arithmetic import ARITHMETIC
from mpishard.data_parallel.configuration import SHARDING

VERSIONS = {"mkl": "2026.2", "onednn": "3.2.0"}
OFFER = Offer(VERSIONS, intel=True, bfloat16=True)
NOTHING = OFFER._replace(versions={})
FASTER = "bfloat16=onednn,float32=mkl,float64=mkl"


@pytest.fixture(autouse=True)
def as_before_any_mesh():
    """NumPy's library multiplies, in other tests too."""
    before = choice.active()
    choice.activate(Choice())
    yield
    choice.activate(before)


def differ(comm):
    """Have rank 0 multiply by MKL, the others by NumPy's library, as after meshes that have only some of the ranks."""
    choice.activate(Choice.parse("numpy" if comm.rank else "mkl"))


@pytest.fixture
def optimizer(mesh, monkeypatch):
    """A reproducible one."""
    monkeypatch.setattr(process, "load", lambda name: type("Library", (), {"version": VERSIONS[name]}))
    agree_on_gemm_libraries(mesh.world, OFFER, "")
    return mpishard.DDPOptimizer(mpishard.SGD(lr=0.1), mpishard.ShardingConfiguration(mesh, reproducible=True))


def agreed(mesh, comm, offer=OFFER, forced=""):
    """The libraries of all ranks after they have agreed, of which this rank offers these, or is forced to those."""
    agree_on_gemm_libraries(mesh.world, offer, forced)
    texts = comm.allgather(str(choice.active()))
    assert len(set(texts)) == 1
    return texts[0]


def test_what_is_faster_on_all_processors_is_taken(mesh, comm):
    assert agreed(mesh, comm) == FASTER
    assert agreed(mesh, comm, OFFER._replace(intel=comm.rank > 0)) == "bfloat16=onednn"


def test_the_variable_decides(mesh, comm):
    assert agreed(mesh, comm, forced="float64.plain=mkl") == "float64.plain=mkl"
    assert agreed(mesh, comm, forced="numpy") == "numpy"


def test_ranks_agree_where_they_make_a_mesh(comm, environ):
    choice.activate(Choice.parse("mkl"))
    environ(**{VARIABLE: "numpy"})
    with mpishard.Mesh(comm):
        assert str(choice.active()) == "numpy"


@pytest.mark.mpi(min_size=2)
def test_ranks_without_the_variable_do_as_those_that_have_it(mesh, comm):
    """Launchers do not pass it on to processes that are spawned."""
    assert agreed(mesh, comm, forced="float64=mkl" if comm.rank == comm.size - 1 else "") == "float64=mkl"


def test_a_library_that_one_rank_lacks_or_has_in_another_version_is_not_taken(mesh, comm):
    last = OFFER._replace(versions={"onednn": "3.2.0"}) if comm.rank == comm.size - 1 else OFFER
    assert agreed(mesh, comm, last) == "bfloat16=onednn"
    first = OFFER._replace(versions={"mkl": "1", "onednn": "3.2.1"}) if comm.rank == 0 else last
    assert agreed(mesh, comm, first) == ("numpy" if comm.size > 1 else FASTER)


def test_bfloat16_needs_the_instructions_on_all_ranks(mesh, comm):
    assert agreed(mesh, comm, OFFER._replace(bfloat16=comm.rank > 0)) == "float32=mkl,float64=mkl"
    assert not gemm.has_fast_bfloat16()


@pytest.mark.parametrize(
    ("text", "message"),
    [("fast", "no library 'fast'"), ("mkl", "wants mkl")],
)
def test_a_variable_that_cannot_be_followed_is_an_error_on_all_ranks(mesh, comm, text, message):
    with pytest.raises(ValueError, match=message):
        agree_on_gemm_libraries(mesh.world, NOTHING if comm.rank == comm.size - 1 else OFFER, text)


@pytest.mark.mpi(min_size=2)
def test_a_variable_that_differs_is_an_error_on_all_ranks(mesh, comm):
    message = f"{VARIABLE} is numpy on rank 0 and mkl on rank {comm.size - 1}"
    with pytest.raises(ValueError, match=message):
        agree_on_gemm_libraries(mesh.world, OFFER, "mkl" if comm.rank == comm.size - 1 else "numpy")


def test_a_reproducible_run_records_the_libraries(optimizer):
    choice.activate(Choice.parse("float32.plain=mkl"))
    optimizer.step(np.ones(3), np.ones(3))
    facts = optimizer.settings.arithmetic.own
    assert facts["products"] == "float32.plain=mkl" and facts["libraries for products"] == "mkl 2026.2"


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_joins_a_reproducible_run_without_its_library_is_refused(mesh, comm, optimizer):
    optimizer.step(np.ones(3), np.ones(3))
    joined = comm.rank == comm.size - 1
    agree_on_gemm_libraries(mesh.world, NOTHING if joined else OFFER, "")
    noted = optimizer.settings.arithmetic
    if joined:
        noted.note_products()
    with pytest.raises(ValueError, match=r"products is .*mkl on ranks? 0.*numpy on rank"):
        noted.agree(optimizer.config, mesh.world)


@pytest.mark.mpi(min_size=2)
def test_ranks_that_differ_are_told_in_a_reproducible_run_and_agree_in_the_next_mesh(comm, mesh, optimizer):
    differ(comm)
    with pytest.raises(ValueError, match=r"products is .*mkl on rank 0, numpy on rank"):
        optimizer.step(np.ones(3), np.ones(3))
    assert agreed(mesh, comm) == FASTER


@pytest.mark.mpi(min_size=2)
@pytest.mark.skipif("mkl" not in libraries.installed(), reason="needs MKL")
def test_ranks_that_differ_train_as_well(comm, mesh):
    """Their copies of the parameters stay equal."""
    differ(comm)
    count = 32 * comm.size
    data = np.random.default_rng(0).standard_normal((count, 600))
    weights = np.random.default_rng(1).standard_normal((600, 600))

    def function(parameters, samples, gradients):
        rows = data[samples]
        out = gemm.matmul(rows, parameters.reshape(600, 600), np.empty_like(rows))
        gradients += gemm.matmul(rows.T, out, np.empty((600, 600))).reshape(-1)
        return 0.5 * float((out * out).sum())

    def trained():
        optimizer = mpishard.DDPOptimizer(mpishard.SGD(lr=1e-4), mpishard.ShardingConfiguration(mesh))
        problem = mpishard.OptimizationProblem(function, weights.flatten(), count, count, steps=3)
        return optimizer.optimize(problem, progress=False).parameters

    found = trained()
    in_use = comm.allgather(str(choice.active()))
    assert in_use[0] == str(Choice.parse("mkl")) and set(in_use[1:]) == {"numpy"}
    choice.activate(Choice())
    expected = trained()
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
    assert len(set(comm.allgather(found.tobytes()))) == 1


def test_a_reproducible_run_keeps_its_libraries_whatever_a_later_mesh_has(mesh, comm, optimizer):
    parameters = np.ones(3)
    optimizer.step(parameters, np.ones(3))
    ours = str(choice.active())
    assert agreed(mesh, comm, NOTHING) == "numpy" != ours
    optimizer.step(parameters, np.ones(3))
    assert str(choice.active()) == ours == optimizer.settings.arithmetic.own["products"]


def test_a_run_that_resumes_where_other_libraries_multiply_is_told(optimizer):
    optimizer.step(np.ones(3), np.ones(3))
    theirs = optimizer.settings.arithmetic.own | {"products": "numpy"}
    with pytest.raises(ValueError, match=f"numpy there and {FASTER} here; set {VARIABLE}=numpy"):
        optimizer.settings.arithmetic.check({SHARDING: {"reproducible": True}, ARITHMETIC: theirs}, optimizer.config)
