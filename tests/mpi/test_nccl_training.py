"""Training with NCCL for device buffers, by its double: the numbers of MPI, and no sum whose order matters."""

from __future__ import annotations

import nccl_double
import numpy as np
import pytest
import standin
from buffers import late
from steps import STRATEGIES, gradients, start

import mpishard
from mpishard import nn
from mpishard.backend import array as arrays


@pytest.fixture
def double(comm):
    with nccl_double.installed() as state:
        yield state
        assert state.alive == 0


def both_ways(comm, run):
    """What `run` returns for a mesh whose collectives go by MPI, and for one with NCCL."""
    found = []
    for collectives in ("mpi", "nccl"):
        with mpishard.Mesh(comm, collectives=collectives) as mesh:
            found.append(run(mesh))
            assert mesh.data.device_collectives == collectives
    return found


def sums_of_floats():
    """Those of more elements than the proof of a new communicator has."""
    return [each for each in nccl_double.calls if "educe" in each[0] and each[2].startswith("float") and each[1] > 16]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_is_that_by_mpi(comm, double, strategy):
    """Uneven parts, several buckets and accumulation; gradients are whole numbers, whose sums have no rounding."""

    def run(mesh):
        config = mpishard.ShardingConfiguration(mesh, minimum_parameter_group_size=50, max_gradient_norm=1.0)
        optimizer, flat = strategy(mpishard.AdamW(lr=0.01), config), late(start(211))
        for step in range(3):
            optimizer.step(flat, late(gradients(step, mesh.size, 211)[mesh.rank]))
        return arrays.to_host(flat), optimizer.serialize()

    (by_mpi, state), (by_nccl, other_state) = both_ways(comm, run)
    assert sums_of_floats() or comm.size == 1
    assert np.array_equal(by_nccl, by_mpi) and (by_mpi != start(211)).all()
    assert other_state == state


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_reproducible_runs_take_no_sum_of_nccl(comm, double, strategy):
    """The double adds in another order than MPI: any sum that depends on it would show."""

    def run(mesh):
        config = mpishard.ShardingConfiguration(mesh, reproducible=True, max_gradient_norm=1.0)
        optimizer, flat = strategy(mpishard.AdamW(lr=0.01), config), late(start(211))
        for step in range(3):
            gradient = np.random.default_rng([step, mesh.rank]).standard_normal(211).astype(np.float32)
            optimizer.step(flat, late(gradient))
        return arrays.to_host(flat)

    by_mpi, by_nccl = both_ways(comm, run)
    assert np.array_equal(by_nccl, by_mpi)
    assert not sums_of_floats()
    assert nccl_double.calls


@pytest.mark.parametrize("shards", [1, 24])
@pytest.mark.parametrize("axis", ["data", "tensor"])
def test_a_model(comm, double, axis, shards):
    """Gathers of sharded parameters, sums over rows and columns; with shards in one order, and so of the same bits."""
    tokens, targets = np.random.default_rng(0).integers(0, 12, (2, 3, 5))
    module = arrays.module_of(standin.empty(1))
    found = []
    for collectives in ("mpi", "nccl"):
        with mpishard.Mesh(comm, **{axis: comm.size}, collectives=collectives) as mesh:
            options = {"sharded_parameters": axis == "data", "sequence_parallel": axis == "tensor"}
            model = nn.GPT(12, 5, 24, 1, 24, np.float64, mesh=mesh, module=module, shards=shards, **options)
            loss = model.loss_and_gradient(tokens, targets)
            gradient = [arrays.to_host(model.parameters.gradient(name)[0]) for name in model.parameters]
            found.append((loss, *gradient))
            if comm.size > 1:
                assert getattr(mesh, axis).device_collectives == collectives
    for one, other in zip(*found, strict=True):
        if shards > 1 or axis == "data":
            assert np.array_equal(one, other)
        else:
            np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-11)


def test_sums_by_nodes(comm, double):
    if comm.size != 4:
        pytest.skip("two nodes of two ranks")

    def run(mesh):
        config = mpishard.ShardingConfiguration(mesh, hierarchical=2, minimum_parameter_group_size=50)
        optimizer, flat = mpishard.DDPOptimizer(mpishard.AdamW(lr=0.01), config), late(start(211))
        for step in range(3):
            optimizer.step(flat, late(gradients(step, mesh.size, 211)[mesh.rank]))
        return arrays.to_host(flat)

    by_mpi, by_nccl = both_ways(comm, run)
    assert np.array_equal(by_nccl, by_mpi)
