"""Loss scaling: gradients arrive multiplied, steps are the same, and an overflow on one rank is one on all."""

from __future__ import annotations

import hybrid
import numpy as np
import pytest
from steps import STRATEGIES, gradients, start, write_gradients

import mpishard
from mpishard import SGD, AdamW, DDPOptimizer, OptimizationProblem, ShardingConfiguration, nn
from mpishard.optim.rule import LossScale


def test_halves_after_an_overflow_and_doubles_after_two_thousand_steps():
    scale = LossScale("dynamic")
    assert scale.value == 2.0**16
    assert scale.overflowed()
    for _ in range(1999):
        scale.succeeded()
    assert scale.value == 2.0**15
    scale.succeeded()
    assert scale.value == 2.0**16
    for _ in range(1999):
        scale.succeeded()
    assert scale.overflowed()
    for _ in range(1999):
        scale.succeeded()
    assert scale.value == 2.0**15  # counted anew
    while scale.value > 1:
        assert scale.overflowed()
    assert not scale.overflowed()
    assert scale.value == 1


def test_a_fixed_one_stays():
    for setting, value in ((8.0, 8.0), (None, 1.0)):
        scale = LossScale(setting)
        assert not scale.overflowed()
        for _ in range(3000):
            scale.succeeded()
        scale.restore((2.0, 5))
        assert (scale.value, scale.state) == (value, None)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("setting", ["dynamic", 1024.0])
def test_the_same_step_and_norm_as_without(mesh, strategy, setting):
    results = []
    for scale in (None, setting):
        config = ShardingConfiguration(mesh, loss_scale=scale, max_gradient_norm=1.0)
        optimizer = strategy(AdamW(lr=0.1), config)
        flat = start(57)
        for step in range(3):
            optimizer.step(flat, gradients(step, mesh.size, 57)[mesh.rank] * np.float32(optimizer.loss_scale))
        results.append((flat, optimizer.gradient_norm))
    assert np.array_equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_overflow_on_one_rank_skips_on_all(comm, same_on_all, strategy):
    """On every mesh, also where that rank's gradients meet only some of the others."""
    with mpishard.Mesh(comm) as base:
        for mesh in hybrid.meshes(base):
            config = ShardingConfiguration(mesh, loss_scale="dynamic")
            optimizer, parameters = strategy(SGD(lr=1.0), config), hybrid.model(mesh)
            optimizer.bind(parameters)
            assert parameters.loss_scale == optimizer.loss_scale == 2.0**16
            for step in range(4):
                before = parameters.gather()
                gradient = hybrid.local_gradient(parameters, mesh, step) * parameters.loss_scale
                holder = max(comm.allgather(mesh.rank if parameters.size else 0))
                if step in (1, 2) and mesh.rank == holder:
                    gradient[-1:] = np.inf
                write_gradients(parameters, gradient)
                optimizer.step(parameters)
                assert np.array_equal(parameters.gather(), before) == (step in (1, 2) or parameters.size == 0)
            assert parameters.loss_scale == optimizer.loss_scale == 2.0**14
            assert (optimizer.steps, optimizer.skipped_steps) == (2, 2)
            state = optimizer.serialize()
            assert same_on_all(state)
            again = DDPOptimizer(SGD(lr=1.0), ShardingConfiguration(mesh, loss_scale="dynamic"))
            again.deserialize(state)
            assert (again.loss_scale, again.skipped_steps) == (2.0**14, 2)
            another = hybrid.model(mesh)
            again.bind(another)
            assert another.loss_scale == 2.0**14
            running = DDPOptimizer(SGD(lr=1.0), ShardingConfiguration(mesh, loss_scale="dynamic"))
            running.bind(another)
            assert another.loss_scale == 2.0**16
            running.deserialize(state)
            assert another.loss_scale == running.loss_scale == 2.0**14


def test_what_is_not_finite_at_one_is_no_matter_of_scale(mesh):
    optimizer = DDPOptimizer(SGD(lr=1.0), ShardingConfiguration(mesh, loss_scale="dynamic"))
    flat = np.zeros(3)
    for _ in range(16):
        optimizer.step(flat, np.full(3, np.nan))
    assert optimizer.loss_scale == 1
    with pytest.raises(FloatingPointError, match="step 17"):
        optimizer.step(flat, np.full(3, np.nan))
    assert not flat.any()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("bound", [True, False], ids=["bound", "bound by the first step"])
def test_a_model_scales_its_gradients_itself(mesh, strategy, bound):
    results = []
    tokens = np.arange(12).reshape(2, 6) % 7
    for scale in (None, "dynamic", 256.0):
        model = nn.GPT(7, 6, 8, 1, 2, np.float64)
        optimizer = strategy(SGD(lr=0.1), ShardingConfiguration(mesh, loss_scale=scale))
        if bound:
            optimizer.bind(model.parameters)
        for _ in range(2):
            model.loss_and_gradient(tokens, tokens)
            optimizer.step(model.parameters)
        results.append(model.parameters.gather())
    assert np.array_equal(results[0], results[1]) and np.array_equal(results[0], results[2])


@pytest.mark.parametrize("scale", [0, -1.0, np.inf, np.nan, "static", True])
def test_bad_scales(mesh, scale):
    with pytest.raises((ValueError, TypeError), match='must be a finite number above 0, or "dynamic", or None'):
        ShardingConfiguration(mesh, loss_scale=scale)


def test_settings_that_contradict(mesh):
    with pytest.raises(ValueError, match="looks for gradients that overflow"):
        ShardingConfiguration(mesh, loss_scale="dynamic", nonfinite_gradients="ignore")
    optimizer = DDPOptimizer(SGD(), ShardingConfiguration(mesh, loss_scale="dynamic"))
    task = OptimizationProblem(lambda *_: 0.0, np.zeros(3), samples=45, batch_size=15, steps=1)
    with pytest.raises(ValueError, match="loss_scale is for models"):
        optimizer.optimize(task, progress=False)
