"""`reproducible=True` on pipelines: the bits of one rank, of parameters and losses, whatever the stages are."""

from __future__ import annotations

import functools
import warnings

import numpy as np
import pytest
from mpi4py import MPI
from steps import STRATEGIES

import mpishard
from mpishard import AdamW, DDPOptimizer, OptimizationProblem, ShardingConfiguration, ZeRO1Optimizer, nn
from mpishard.data_parallel.models import HybridShardedModel

TOKENS = np.random.default_rng(1).integers(0, 23, (45, 9))
SCHEDULES = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "interleaved": {"schedule": "interleaved", "chunks": 2},
    "zb-h1": {"schedule": "zb-h1"},
    # Weight gradients of blocks come with the input gradients.
    "zb-h1, recompute": {"schedule": "zb-h1", "recompute": True},
}


def run(mesh, strategy, tied, micro_batch_size=3, wrap=None, model=None, **options):
    """All parameters of the model, and the losses."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*micro-batches for .* pipeline stages")
        gpt = nn.GPT(23, 8, 16, 8, 2, dtype=np.float32, seed=3, mesh=mesh, tied=tied, **(model or {}))
    whole = HybridShardedModel(gpt, mesh)
    problem = OptimizationProblem.for_model(
        gpt if wrap is None else wrap(gpt),
        lambda samples: (TOKENS[samples, :-1], TOKENS[samples, 1:]),
        samples=45,
        batch_size=20,
        steps=4,
        tokens_per_sample=8,
        micro_batch_size=micro_batch_size,
    )
    options = {"max_gradient_norm": 0.5, "minimum_parameter_group_size": 2000} | options
    optimizer = strategy(AdamW(lr=0.01), ShardingConfiguration(mesh, reproducible=True, **options))
    result = optimizer.optimize(problem, progress=False)
    return whole.gather_full_parameters().tobytes(), np.array(result.loss_history).tobytes()


@functools.cache
def alone(tied, micro_batch_size=3):
    """The run of one rank, by DDP."""
    with mpishard.Mesh(MPI.COMM_SELF) as mesh:
        return run(mesh, DDPOptimizer, tied, micro_batch_size)


@pytest.fixture(scope="module")
def meshes(comm):
    """Each number of stages that fits, the other ranks on the data axis."""
    made = [mpishard.Mesh(comm, pipeline=stages) for stages in (2, 3, 4) if comm.size % stages == 0]
    yield made or [mpishard.Mesh(comm)]
    for mesh in made:
        mesh.free()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_bits_of_one_rank(meshes, short, strategy, schedule):
    """With clipping, and batches of 20, 20 and 5 samples in an epoch of 45."""
    turn = STRATEGIES.index(strategy) + list(SCHEDULES).index(schedule)
    for tied in [bool(turn % 2)] if short else [True, False]:
        for mesh in meshes:
            assert run(mesh, strategy, tied, model=SCHEDULES[schedule]) == alone(tied)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_data_ranks_with_fewer_micro_batches_or_none(meshes, strategy):
    """Batches of 3, 3 and 1 micro-batches; with buckets of few tensors, one sum at a time."""
    options = {"minimum_parameter_group_size": 100, "overlap_communication": False}
    for mesh in meshes:
        found = run(mesh, strategy, True, 8, model=SCHEDULES["interleaved"], **options)
        assert found == alone(True, 8) != alone(True)


class Plain:
    """A model that takes one micro-batch in a call."""

    def __init__(self, model):
        self.parameters, self.loss_and_gradient = model.parameters, model.loss_and_gradient


def test_a_model_without_the_method_is_called_for_each_micro_batch(meshes):
    for mesh in meshes:
        found = run(mesh, ZeRO1Optimizer, True, wrap=Plain, model={"microbatches": 1})
        assert found == alone(True)
        assert run(
            mesh, ZeRO1Optimizer, True, wrap=functools.partial(mpishard.as_distributed, mesh_or_config=mesh)
        ) == alone(True)


def test_ties_cost_no_message_a_micro_batch(meshes):
    """The table's gradient goes over the pipeline once a step: on each rank its own share."""
    for mesh in meshes:
        if mesh.pipeline.size == 1 or mesh.tensor.size > 1:
            continue
        mesh.ledger.clear()
        run(mesh, ZeRO1Optimizer, True)
        summary = mesh.ledger.summary()
        calls = [entry["calls"] for kind, entry in summary.items() if "ties" in kind and "gradients" in kind]
        holds = mesh.pipeline.rank in (0, mesh.pipeline.size - 1)
        assert calls == ([4] if holds else [])


def test_storage_in_half_precision_is_refused_on_several_stages(meshes):
    for mesh in meshes:
        if mesh.pipeline.size > 1:
            with pytest.raises(ValueError, match="storage_dtype, which rounds what blocks hand on within a stage"):
                run(mesh, DDPOptimizer, False, model={"storage_dtype": np.float16})
