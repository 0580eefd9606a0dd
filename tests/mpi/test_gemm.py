"""All ranks multiply by the same libraries."""

from __future__ import annotations

import numpy as np
import pytest

import mpishard
from mpishard.backend import gemm, process
from mpishard.backend.gemm import choice, libraries, timing
from mpishard.backend.gemm.choice import VARIABLE, Choice, Status
from mpishard.comm import agreement as product_choice
from mpishard.comm.agreement import agree_on_gemm_libraries
from mpishard.data_parallel.settings import ARITHMETIC

VERSIONS = {"mkl": "2026.2", "onednn": "3.2.0"}


@pytest.fixture(autouse=True)
def made_up(monkeypatch, comm):
    """Libraries on all ranks, which are the faster on a higher rank."""
    monkeypatch.setattr(choice, "_process", choice._Process())
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(product_choice, "loadable", lambda: VERSIONS)
    monkeypatch.setattr(product_choice, "multiplies_bfloat16", lambda: True)
    fastest = ["float32.plain=mkl,bfloat16.plain=onednn", "float32.scores=mkl"][comm.rank % 2]
    monkeypatch.setattr(timing, "fastest", lambda libraries: Choice.parse(fastest).limited_to(libraries))


@pytest.fixture
def part_differs(comm, mesh, monkeypatch):
    """Rank 0 multiplies by MKL, the others by NumPy's library since they resumed another run, on a mesh of theirs."""
    monkeypatch.setattr(choice, "_process", choice._Process())
    with mpishard.Mesh(comm), mpishard.Mesh(comm.Split(comm.rank > 0)) as part:
        if comm.rank > 0:
            choice.go_on_with(choice.going_on_from("numpy", part.product_libraries))
    if comm.rank == 0:
        choice.activate(Choice.parse("mkl"), VERSIONS)


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


def test_all_ranks_do_as_rank_0_has_measured(comm):
    assert active_on_all(comm) == "bfloat16.plain=onednn,float32.plain=mkl"


def test_the_variable_decides(comm, monkeypatch):
    monkeypatch.setenv(VARIABLE, "float64.plain=mkl")
    assert active_on_all(comm) == "float64.plain=mkl"
    monkeypatch.setenv(VARIABLE, "numpy")
    assert active_on_all(comm) == "numpy"


def test_ranks_that_join_do_as_the_others_do(comm, monkeypatch):
    if comm.rank == comm.size - 1:
        choice.activate(Choice.parse("float64.batched=mkl"), VERSIONS)
    assert active_on_all(comm) == "float64.batched=mkl"


def test_ranks_that_were_spawned_follow_those_that_they_join(mesh, comm, monkeypatch):
    monkeypatch.setattr(choice, "_process", choice._Process())
    agree_on_gemm_libraries(mesh.world, spawned=True)
    assert not choice.is_made() and str(choice.active()) == "bfloat16.plain=onednn,float32.plain=mkl"
    if comm.rank == comm.size - 1:
        choice.activate(Choice.parse("float64.batched=mkl"), VERSIONS)
    for _ in range(2):
        agree_on_gemm_libraries(mesh.world, spawned=comm.rank == 0)
        assert choice.is_made() and str(choice.active()) == "float64.batched=mkl"


@pytest.mark.mpi(min_size=2)
def test_ranks_that_were_spawned_need_not_have_the_variable(mesh, comm, monkeypatch):
    """Launchers do not pass it on."""
    monkeypatch.setattr(choice, "_process", choice._Process())
    joins = comm.rank == comm.size - 1
    monkeypatch.setenv(VARIABLE, "" if joins else "float64=mkl")
    if joins:
        choice.activate(Choice.parse("mkl"), VERSIONS, status=Status.FOR_NOW)
    else:
        choice.activate(Choice.parse("float64=mkl"), VERSIONS)
    for _ in range(2):
        agree_on_gemm_libraries(mesh.world)
        assert choice.is_made() and str(choice.active()) == "float64=mkl"
    monkeypatch.setattr(choice, "_process", choice._Process())
    monkeypatch.setenv(VARIABLE, "" if joins else "float64=mkl")
    with pytest.raises(ValueError, match=f"{VARIABLE} is float64=mkl on rank 0 and unset on rank {comm.size - 1}"):
        agree_on_gemm_libraries(mesh.world)


def test_a_library_that_one_rank_lacks_or_has_in_another_version_is_not_taken(comm, monkeypatch):
    if comm.rank == comm.size - 1:
        monkeypatch.setattr(product_choice, "loadable", lambda: {"onednn": "3.2.0"})
    assert active_on_all(comm) == "bfloat16.plain=onednn"
    monkeypatch.setattr(choice, "_process", choice._Process())
    if comm.rank == 0:
        monkeypatch.setattr(product_choice, "loadable", lambda: {"mkl": "1", "onednn": "3.2.1"})
    assert active_on_all(comm) == ("numpy" if comm.size > 1 else "bfloat16.plain=onednn,float32.plain=mkl")


def test_bfloat16_needs_the_instructions_on_all_ranks(comm, monkeypatch):
    monkeypatch.setattr(product_choice, "multiplies_bfloat16", lambda: comm.rank > 0)
    assert active_on_all(comm) == "float32.plain=mkl"
    assert not gemm.has_fast_bfloat16()


@pytest.mark.parametrize(
    ("text", "message"),
    [("fast", "there is no library 'fast'"), ("mkl", "wants mkl, but not every rank has the same version of it")],
)
def test_a_variable_that_cannot_be_followed_is_an_error_on_all_ranks(comm, monkeypatch, text, message):
    monkeypatch.setenv(VARIABLE, text)
    if comm.rank == comm.size - 1:
        monkeypatch.setattr(product_choice, "loadable", dict)
    with pytest.raises(ValueError, match=message):
        mpishard.Mesh(comm)


@pytest.mark.mpi(min_size=2)
def test_a_variable_that_differs_is_an_error_on_all_ranks(comm, monkeypatch):
    if comm.rank == comm.size - 1:
        monkeypatch.setenv(VARIABLE, "mkl")
    message = f"{VARIABLE} is unset on rank 0 and mkl on rank {comm.size - 1}; set the same"
    with pytest.raises(ValueError, match=message):
        mpishard.Mesh(comm)


def test_a_reproducible_run_records_the_libraries(optimizer):
    choice.activate(Choice.parse("float32.plain=mkl"), VERSIONS)
    optimizer.step(np.ones(3), np.ones(3))
    facts = optimizer.state.numerics.own
    assert facts["products"] == "float32.plain=mkl" and facts["libraries for products"] == "mkl 2026.2"


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_joins_a_reproducible_run_without_its_library_is_refused(mesh, comm, monkeypatch, optimizer):
    optimizer.step(np.ones(3), np.ones(3))
    joined = comm.rank == comm.size - 1
    if joined:
        choice.activate(Choice(), status=Status.FOR_NOW)
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
    assert active_on_all(comm) == str(Choice.parse("mkl"))


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


def test_a_run_goes_on_with_libraries_that_its_own_mesh_has(comm, mesh, monkeypatch, optimizer):
    """Whatever a later mesh of some of its ranks has."""
    optimizer.step(np.ones(3), np.ones(3))
    numerics, config = optimizer.state.numerics, optimizer.config
    saved = {"sharding.json": {"reproducible": True}, ARITHMETIC: dict(numerics.own)}
    with monkeypatch.context() as lacking:
        if comm.rank == 0:
            lacking.setattr(product_choice, "loadable", dict)
        with mpishard.Mesh(comm.Split(comm.rank > 0)):
            pass
    assert comm.rank > 0 or str(choice.active()) == "numpy"
    numerics.check(saved, config)
    numerics.restore(saved, config)
    assert str(choice.active()) == saved[ARITHMETIC]["products"] != "numpy"
    numerics.agree(config, mesh.world)
