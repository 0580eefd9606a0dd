"""Elastic runs that change the tensor and pipeline sizes of their mesh while they go."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI
from steps import STRATEGIES

from mpishard import AdamW, DDPOptimizer, ElasticOptimizer, Mesh, OptimizationProblem, ShardingConfiguration, nn

TOKENS = np.random.default_rng(1).integers(0, 11, (45, 9))
STEPS = 8
# By step the mesh that is asked for after it, as far as there are ranks for it.
SEQUENCE = {
    1: {"tensor": 2},
    2: {"data": 2, "tensor": 2},
    3: {"data": 3},
    4: {"tensor": 2, "pipeline": 2},
    5: {"pipeline": 2},
    6: {"data": 1},
}
ANY = [{}, {"tensor": 2}, {"pipeline": 2}, {"tensor": 2, "pipeline": 2}]


def ranks_of(sizes):
    return int(np.prod(list(sizes.values())))


def problem(mesh, steps=STEPS, dtype=np.float64, tied=True, **options):
    many = mesh.pipeline.size > 1
    model = nn.GPT(11, 8, 16, 2, 2, dtype, seed=3, mesh=mesh, tied=tied, microbatches=2 if many else 1, **options)
    return OptimizationProblem.for_model(
        model,
        lambda samples: (TOKENS[samples, :-1], TOKENS[samples, 1:]),
        samples=45,
        batch_size=16,
        micro_batch_size=4,
        tokens_per_sample=8,
        steps=steps,
    )


def inner(strategy, mesh, **options):
    options = {"max_gradient_norm": 0.5, "minimum_parameter_group_size": 500} | options
    return strategy(AdamW(lr=0.01), ShardingConfiguration(mesh, **options))


def whole(result, axis):
    """All parameters by name, whatever this rank has of them."""
    parameters = result.parameters
    full = {spec.name: np.full(spec.shape, np.nan) for spec in parameters.specs}
    flat = parameters.gather()
    parts = [(p.name, p.box, flat[p.start : p.start + p.size].reshape(p.shape)) for p in parameters.pieces]
    for each in axis.comm.allgather(parts):
        for name, box, part in each:
            full[name][tuple(slice(*side) for side in box)] = part
    return full


@pytest.fixture(scope="module")
def expected():
    """The run of one rank that is not elastic."""
    with Mesh(MPI.COMM_SELF) as mesh:
        result = inner(DDPOptimizer, mesh).optimize(problem(mesh), progress=False)
        return whole(result, mesh.world), result.loss_history


def same(result, mesh, expected):
    found = whole(result, mesh.world)
    assert sorted(found) == sorted(expected[0])
    for name, values in expected[0].items():
        np.testing.assert_allclose(found[name], values, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(result.loss_history, expected[1], rtol=1e-12)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_takes_one_mesh_after_the_other(comm, strategy, expected):
    wanted = {step: sizes for step, sizes in SEQUENCE.items() if ranks_of(sizes) <= comm.size}
    noted = {}
    with Mesh(comm) as mesh:
        optimizer = ElasticOptimizer(inner(strategy, mesh), layouts=ANY)

        def callback(state):
            noted[state.step] = {name: size for name, size in mesh.shape.items() if size > 1}
            if state.step in wanted:
                optimizer.resize(mesh=wanted[state.step])

        result = optimizer.optimize(problem, callback=callback, progress=False)
        assert mesh.size == comm.size
        same(result, mesh, expected)
    now = {"data": comm.size}
    for step in range(1, STEPS + 1):
        if comm.rank == 0:
            assert noted[step] == {name: size for name, size in now.items() if size > 1}
        assert (step in noted) == (comm.rank < ranks_of(now))
        now = wanted.get(step, now)
