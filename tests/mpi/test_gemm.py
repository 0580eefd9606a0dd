"""All ranks multiply by the same libraries."""

from __future__ import annotations

import numpy as np
import pytest

import mpishard
from mpishard.backend import gemm, process
from mpishard.backend.gemm import choice, libraries
from mpishard.backend.gemm.choice import VARIABLE, Choice
from mpishard.comm import agreement as product_choice
from mpishard.comm.agreement import agree_on_gemm_libraries
from mpishard.data_parallel.settings import ARITHMETIC

VERSIONS = {"mkl": "2026.2", "onednn": "3.2.0"}


@pytest.fixture(autouse=True)
def made_up(monkeypatch, comm):
    """All ranks have both libraries, and processors of Intel that multiply bfloat16."""
    monkeypatch.setattr(choice, "_active", Choice())
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(product_choice, "loadable", lambda: VERSIONS)
    monkeypatch.setattr(product_choice, "multiplies_bfloat16", lambda: True)
    monkeypatch.setattr(product_choice, "is_intel", lambda: True)


@pytest.fixture
def part_differs(comm, mesh, monkeypatch):
    """Rank 0 multiplies by MKL, the others by NumPy's library, as after meshes that have only some of the ranks."""
    choice.activate(Choice.parse("numpy" if comm.rank else "mkl"))


@pytest.fixture
def optimizer(mesh, monkeypatch):
    """A reproducible one."""
    monkeypatch.setattr(process, "load", lambda name: type("Library", (), {"version": VERSIONS[name]}))
    return mpishard.DDPOptimizer(mpishard.SGD(lr=0.1), mpishard.ShardingConfiguration(mesh, reproducible=True))


def active_on_all(comm):
    with mpishard.Mesh(comm):
        texts = comm.allgather(str(choice.active()))
    assert len(set(texts)) == 1
    return texts[0]


FASTER = "bfloat16=onednn,float32=mkl,float64=mkl"


def test_what_is_faster_on_all_processors_is_taken(comm, monkeypatch):
    assert active_on_all(comm) == FASTER
    monkeypatch.setattr(product_choice, "is_intel", lambda: comm.rank > 0)
    assert active_on_all(comm) == "bfloat16=onednn"


def test_the_variable_decides(comm, monkeypatch):
    monkeypatch.setenv(VARIABLE, "float64.plain=mkl")
    assert active_on_all(comm) == "float64.plain=mkl"
    monkeypatch.setenv(VARIABLE, "numpy")
    assert active_on_all(comm) == "numpy"


@pytest.mark.mpi(min_size=2)
def test_ranks_without_the_variable_do_as_those_that_have_it(comm, monkeypatch):
    """Launchers do not pass it on to processes that are spawned."""
    monkeypatch.setenv(VARIABLE, "float64=mkl" if comm.rank == comm.size - 1 else "")
    assert active_on_all(comm) == "float64=mkl"


def test_a_library_that_one_rank_lacks_or_has_in_another_version_is_not_taken(comm, monkeypatch):
    if comm.rank == comm.size - 1:
        monkeypatch.setattr(product_choice, "loadable", lambda: {"onednn": "3.2.0"})
    assert active_on_all(comm) == "bfloat16=onednn"
    if comm.rank == 0:
        monkeypatch.setattr(product_choice, "loadable", lambda: {"mkl": "1", "onednn": "3.2.1"})
    assert active_on_all(comm) == ("numpy" if comm.size > 1 else FASTER)


def test_bfloat16_needs_the_instructions_on_all_ranks(comm, monkeypatch):
    monkeypatch.setattr(product_choice, "multiplies_bfloat16", lambda: comm.rank > 0)
    assert active_on_all(comm) == "float32=mkl,float64=mkl"
    assert not gemm.has_fast_bfloat16()


@pytest.mark.parametrize(
    ("text", "message"),
    [("fast", "no library 'fast'"), ("mkl", "wants mkl")],
)
def test_a_variable_that_cannot_be_followed_is_an_error_on_all_ranks(comm, monkeypatch, text, message):
    monkeypatch.setenv(VARIABLE, text)
    if comm.rank == comm.size - 1:
        monkeypatch.setattr(product_choice, "loadable", dict)
    with pytest.raises(ValueError, match=message):
        mpishard.Mesh(comm)


@pytest.mark.mpi(min_size=2)
def test_a_variable_that_differs_is_an_error_on_all_ranks(comm, monkeypatch):
    monkeypatch.setenv(VARIABLE, "mkl" if comm.rank == comm.size - 1 else "numpy")
    message = f"{VARIABLE} is numpy on rank 0 and mkl on rank {comm.size - 1}"
    with pytest.raises(ValueError, match=message):
        mpishard.Mesh(comm)


def test_a_reproducible_run_records_the_libraries(optimizer):
    choice.activate(Choice.parse("float32.plain=mkl"))
    optimizer.step(np.ones(3), np.ones(3))
    facts = optimizer.state.numerics.own
    assert facts["products"] == "float32.plain=mkl" and facts["libraries for products"] == "mkl 2026.2"


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_joins_a_reproducible_run_without_its_library_is_refused(mesh, comm, monkeypatch, optimizer):
    optimizer.step(np.ones(3), np.ones(3))
    joined = comm.rank == comm.size - 1
    if joined:
        monkeypatch.setattr(product_choice, "loadable", dict)
    agree_on_gemm_libraries(mesh.world)
    numerics = optimizer.state.numerics
    if joined:
        numerics.note_products()
    with pytest.raises(ValueError, match=r"products is .*mkl on ranks? 0.*numpy on rank"):
        numerics.agree(optimizer.config, mesh.world)


@pytest.mark.mpi(min_size=2)
@pytest.mark.usefixtures("part_differs")
def test_ranks_that_differ_are_told_in_a_reproducible_run_and_agree_in_the_next_mesh(comm, optimizer):
    with pytest.raises(ValueError, match=r"products is .*mkl on rank 0, numpy on rank"):
        optimizer.step(np.ones(3), np.ones(3))
    assert active_on_all(comm) == FASTER


@pytest.mark.mpi(min_size=2)
@pytest.mark.skipif("mkl" not in libraries.installed(), reason="needs MKL")
@pytest.mark.usefixtures("part_differs")
def test_ranks_that_differ_train_as_well(comm, mesh):
    """Their copies of the parameters stay equal."""
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


def test_a_reproducible_run_keeps_its_libraries_whatever_a_later_mesh_has(comm, monkeypatch, optimizer):
    parameters = np.ones(3)
    optimizer.step(parameters, np.ones(3))
    ours = str(choice.active())
    with monkeypatch.context() as lacking:
        lacking.setattr(product_choice, "loadable", dict)
        with mpishard.Mesh(comm):
            assert str(choice.active()) == "numpy" != ours
    optimizer.step(parameters, np.ones(3))
    assert str(choice.active()) == ours == optimizer.state.numerics.own["products"]


def test_a_run_that_resumes_where_other_libraries_multiply_is_told(optimizer):
    optimizer.step(np.ones(3), np.ones(3))
    saved = {"sharding.json": {"reproducible": True}, ARITHMETIC: optimizer.state.numerics.own | {"products": "numpy"}}
    with pytest.raises(ValueError, match=f"numpy there and {FASTER} here; set {VARIABLE}=numpy"):
        optimizer.state.numerics.check(saved, optimizer.config)
