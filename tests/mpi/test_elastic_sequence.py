"""One run on 2, 8, 3, 5, 1 and 4 workers: the bits of one rank, and every sample once an epoch."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from mpi4py import MPI
from steps import STRATEGIES

import mpishard
from mpishard import AdamW, ElasticOptimizer, OptimizationProblem, ShardingConfiguration, nn
from mpishard.parameters.flat import FlatParameters

SEQUENCE = (2, 8, 3, 5, 1, 4)
STEPS_EACH, STEPS_AN_EPOCH = 2, 3
STEPS = len(SEQUENCE) * STEPS_EACH
SAMPLES, BATCH = 45, 16
TOKENS = np.random.default_rng(1).integers(0, 11, (SAMPLES, 9))


def make(strategy, mesh):
    config = ShardingConfiguration(mesh, max_gradient_norm=0.5, minimum_parameter_group_size=500, reproducible=True)
    return strategy(AdamW(lr=mpishard.cosine(0.02, steps=STEPS, warmup=3)), config)


def problem(mesh, note=lambda samples: None):
    def batch(samples):
        note(samples)
        return TOKENS[samples, :-1], TOKENS[samples, 1:]

    return OptimizationProblem.for_model(
        nn.GPT(11, 8, 16, 1, 2, np.float32, seed=3, mesh=mesh),
        batch,
        samples=SAMPLES,
        batch_size=BATCH,
        micro_batch_size=1,
        steps=STEPS,
        tokens_per_sample=8,
    )


def bits(result):
    found = result.parameters
    parameters = found.gather() if isinstance(found, FlatParameters) else found
    assert parameters.dtype == np.float32
    return parameters.tobytes(), result.loss_history.tobytes()


@pytest.fixture(scope="module")
def alone():
    """The run of one rank that is not elastic, and its samples by step."""
    taken = {}
    with mpishard.Mesh(MPI.COMM_SELF) as mesh:
        optimizer = make(STRATEGIES[0], mesh)
        task = problem(mesh, lambda samples: taken.setdefault(optimizer.clock + 1, []).extend(samples.tolist()))
        return bits(optimizer.optimize(task, progress=False)), taken


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_resize_sequence(mesh, strategy, alone):
    """With fewer than eight ranks, as many workers of each number as there are."""
    expected, batches = alone
    sizes = [min(workers, mesh.size) for workers in SEQUENCE]
    inner, taken, workers = make(strategy, mesh), {}, []
    elastic = ElasticOptimizer(inner, max_workers=sizes[0])
    elastic.max_workers = mesh.size

    def callback(state):
        workers.append(elastic.current_workers)
        if state.step % STEPS_EACH == 0 and state.step < STEPS:
            elastic.resize(sizes[state.step // STEPS_EACH])

    task = problem(mesh, lambda samples: taken.setdefault(inner.clock + 1, []).extend(samples.tolist()))
    result = elastic.optimize(task, callback=callback, progress=False)

    assert bits(result) == expected
    assert result.samples == SAMPLES * STEPS // STEPS_AN_EPOCH
    by_rank = mesh.world.comm.allgather(taken)
    assert mesh.rank > 0 or workers == [size for size in sizes for _ in range(STEPS_EACH)]
    for step in range(1, STEPS + 1):
        shares = [each.get(step, []) for each in by_rank]
        assert sorted(sum(shares, [])) == sorted(batches[step])
        assert [bool(share) for share in shares] == [
            rank < sizes[(step - 1) // STEPS_EACH] for rank in range(mesh.size)
        ]
    for first in range(1, STEPS + 1, STEPS_AN_EPOCH):
        epoch = Counter(
            s for step in range(first, first + STEPS_AN_EPOCH) for each in by_rank for s in each.get(step, [])
        )
        assert epoch == Counter(range(SAMPLES))
