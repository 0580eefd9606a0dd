"""Models and rules made distributed in one line."""

from __future__ import annotations

import numpy as np
import pytest
from training_problems import TOKENS, gpt

import mpishard
from mpishard import SGD, AdamW, DDPOptimizer, OptimizationProblem, ShardingConfiguration
from mpishard.compression import Int8Compressor
from mpishard.data.sampling import Sampler, share


def test_sharded_model_and_rule_in_one_line_each(mesh, same_on_all):
    for make in (mpishard.as_distributed, mpishard.as_distributed_for_high_bandwidth):
        model = make(gpt(), mesh)
        optimizer = make(SGD(lr=0.1), mesh)
        assert isinstance(optimizer, DDPOptimizer)
        assert (model.rank, model.world_size) == (mesh.rank, mesh.size)
        reference = gpt()
        for step in range(3):
            batch = Sampler(45, 2 * mesh.size).batch(step + 1)
            (samples,) = share(batch, mesh.rank, mesh.size)
            model.loss_and_gradient(TOKENS[samples, :-1], TOKENS[samples, 1:])
            optimizer.step(model.parameters, count=2 * mesh.size)
            reference.loss_and_gradient(TOKENS[batch, :-1], TOKENS[batch, 1:])
            gradient = reference.parameters.gradients.flat
            reference.parameters.flat[:] -= 0.1 * gradient / (2 * mesh.size)
            reference.parameters.reset_gradients()
        assert np.allclose(model.parameters.flat, reference.parameters.flat, rtol=1e-12, atol=1e-12)
        shards = mesh.world.comm.allgather(model.local_parameter_shard)
        assert np.array_equal(np.concatenate(shards), model.parameters.flat)
        assert same_on_all(model.gather_full_parameters())


def test_low_bandwidth_is_local_sgd_with_compressed_averages(mesh, same_on_all):
    model = mpishard.as_distributed_for_low_bandwidth(gpt(), mesh)
    optimizer = mpishard.as_distributed_for_low_bandwidth(AdamW(lr=0.01), mesh, max_gradient_norm=0.5)
    assert isinstance(model, mpishard.ShardedModel)
    assert isinstance(optimizer, mpishard.LocalSGDOptimizer)
    config = optimizer.config
    assert (optimizer.sync_every, config.hierarchical, config.max_gradient_norm) == (8, True, 0.5)
    assert config.compressor == Int8Compressor()
    task = OptimizationProblem.for_model(
        model.model,
        lambda samples: (TOKENS[samples, :-1], TOKENS[samples, 1:]),
        samples=45,
        batch_size=15,
        steps=20,
        tokens_per_sample=TOKENS.shape[1] - 1,
    )
    result = optimizer.optimize(task, progress=False)
    assert same_on_all(model.gather_full_parameters())
    assert result.loss_history[-1] < result.loss_history[0]
    assert optimizer.outer_steps == 3  # after 8 steps, 16, and the last
    high = mpishard.ShardingConfiguration.create_for_high_bandwidth(mesh)
    assert (high.compressor, high.hierarchical, high.sync_every) == (None, False, 1)


@pytest.mark.parametrize("thing", [3, "model", None, np.zeros(3)])
def test_what_cannot_be_distributed(mesh, thing):
    with pytest.raises(TypeError, match="FlatParameters as `parameters`"):
        mpishard.as_distributed(thing, mesh)
    with pytest.raises(TypeError, match="is distributed already"):
        mpishard.as_distributed(DDPOptimizer(SGD(lr=0.1), mesh), mesh)
    with pytest.raises(TypeError, match="expected a Mesh or a ShardingConfiguration"):
        mpishard.as_distributed(SGD(lr=0.1), thing)


def test_synchronize_then_step_reduces_once(mesh):
    """auto_sync_gradients=False with a model: passes add up, synchronize_gradients reduces, step applies."""
    config = ShardingConfiguration(mesh, auto_sync_gradients=False)
    results = []
    for steps in (1, 2):  # the first step binds the optimizer, the second finds it bound
        model = mpishard.as_distributed(gpt(), config)
        optimizer = mpishard.as_distributed(SGD(lr=0.1), config)
        reference = gpt()
        for _ in range(steps):
            for part in (0, 1):
                samples = np.arange(2) + 2 * part + 4 * mesh.rank
                model.loss_and_gradient(TOKENS[samples, :-1], TOKENS[samples, 1:])
            model.synchronize_gradients()
            optimizer.step(model.parameters, count=4 * mesh.size)
            batch = np.arange(4 * mesh.size)
            reference.loss_and_gradient(TOKENS[batch, :-1], TOKENS[batch, 1:])
            reference.parameters.flat[:] -= 0.1 * reference.parameters.gradients.flat / (4 * mesh.size)
            reference.parameters.reset_gradients()
        results.append(np.allclose(model.parameters.flat, reference.parameters.flat, rtol=1e-12, atol=1e-12))
    assert results == [True, True]
