"""The exponential moving average of the parameters: state of every optimizer, and a while in their place."""

from __future__ import annotations

import numpy as np
import pytest
from steps import SPECS, STRATEGIES, gradients, start, write_gradients

from mpishard import (
    LBFGS,
    SGD,
    AdamW,
    DDPOptimizer,
    Evaluation,
    LocalSGDOptimizer,
    OptimizationProblem,
    ShardingConfiguration,
    ZeRO1Optimizer,
    load_checkpoint,
    save_checkpoint,
)
from mpishard.parameters.flat import FlatParameters

DECAY, STEPS = 0.75, 5


def path(ranks):
    """The parameters after each step, and their average: the first is that of the first step."""
    flat, found, average = start(40), [], np.zeros(40, np.float32)
    for step in range(STEPS):
        SGD(lr=0.1).update(flat, gradients(step, ranks, 40).sum(0), [], step + 1, divisor=ranks)
        keep = np.float32(DECAY if step else 0)
        average = keep * average + np.float32(1 - keep) * flat
        found.append((flat.copy(), average.copy()))
    return found


def take(optimizer, parameters, steps):
    for step in steps:
        write_gradients(parameters, gradients(step, optimizer.mesh.size, 40)[optimizer.mesh.rank])
        optimizer.step(parameters)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_keeps_it(mesh, same_on_all, strategy):
    rule = SGD(lr=0.1, ema_decay=DECAY)
    optimizer, parameters = strategy(rule, mesh), FlatParameters.over(start(40), SPECS)
    with pytest.raises(ValueError, match="no average of the parameters before the first step"):
        with optimizer.averaged_parameters():
            pass
    for step, (flat, average) in enumerate(path(mesh.size)):
        take(optimizer, parameters, [step])
        with optimizer.averaged_parameters():
            assert same_on_all(parameters.flat)
            assert np.array_equal(parameters.flat, average)
        assert np.array_equal(parameters.flat, flat)
    with pytest.raises(ArithmeticError), optimizer.averaged_parameters():
        raise ArithmeticError  # the parameters come back
    assert np.array_equal(parameters.flat, flat)


def test_it_goes_on_from_checkpoints_and_bytes_of_another_strategy(mesh, tmp_path):
    folder = mesh.world.comm.bcast(tmp_path)
    rule, expected = SGD(lr=0.1, ema_decay=DECAY), path(mesh.size)[-1]
    first, parameters = STRATEGIES[1](rule, mesh), FlatParameters.over(start(40), SPECS)
    take(first, parameters, range(3))
    save_checkpoint(folder, parameters, first)
    state, flat = first.serialize(), parameters.flat.copy()
    for strategy in STRATEGIES:
        restored, optimizer = FlatParameters.over(start(40), SPECS), strategy(rule, mesh)
        load_checkpoint(folder, restored, optimizer)
        read, again = FlatParameters.over(flat.copy(), SPECS), strategy(rule, mesh)
        again.deserialize(state)
        for each, values in ((optimizer, restored), (again, read)):
            take(each, values, range(3, STEPS))
            assert np.array_equal(values.flat, expected[0])
            with each.averaged_parameters():
                assert np.array_equal(values.flat, expected[1])
    with pytest.raises(ValueError, match="slots: ema"):
        load_checkpoint(folder, parameters, DDPOptimizer(SGD(lr=0.1), mesh))


def quadratic(parameters, samples, gradients):
    gradients += len(samples) * parameters
    return 0.5 * len(samples) * float(parameters @ parameters)


def value(parameters, samples):
    return len(samples) * float(parameters.sum())


def test_it_is_evaluated_on_request(mesh):
    problem = OptimizationProblem(quadratic, np.ones(3), 8, 8, steps=4, micro_batch_size=2)
    config, found = ShardingConfiguration(mesh, reproducible=True), []
    for averaged in (False, True):
        optimizer = ZeRO1Optimizer(SGD(lr=0.5, ema_decay=0.5), config)
        evaluate = Evaluation(value, 5, every=2, averaged=averaged)
        result = optimizer.optimize(problem, progress=False, evaluate=evaluate)
        found.append(result.validation_losses.tolist())
        assert np.array_equal(result.parameters, np.full(3, 0.0625))
    # The parameters are 1/2, 1/4, 1/8, 1/16; the averages 1/2, 3/8, 1/4, 5/32.
    assert found == [[0.75, 0.1875], [1.125, 0.46875]]


def test_workers_of_local_sgd_have_one(mesh, same_on_all):
    optimizer = LocalSGDOptimizer(SGD(lr=0.1, ema_decay=DECAY), mesh, sync_every=2)
    parameters = FlatParameters.over(start(40), SPECS)
    take(optimizer, parameters, range(3))
    with optimizer.averaged_parameters():
        assert same_on_all(parameters.flat)
    assert same_on_all(parameters.flat)


def test_what_keeps_none(mesh):
    optimizer = DDPOptimizer(AdamW(), mesh)
    for make in (lambda: optimizer, lambda: ZeRO1Optimizer(LBFGS(), mesh)):
        with pytest.raises(ValueError, match="keeps no average of the parameters; give the rule ema_decay=0.999"):
            with make().averaged_parameters():
                pass
    with pytest.raises(ValueError, match="ema_decay cannot be given or left out"):
        optimizer.rule = AdamW(ema_decay=0.9)
    with pytest.raises(ValueError, match="averaged=True. needs an average of the parameters; give AdamW ema_decay"):
        optimizer.optimize(
            OptimizationProblem(quadratic, np.ones(3), 8, 8, steps=4),
            progress=False,
            evaluate=Evaluation(value, 5, every=2, averaged=True),
        )
    for decay, error in ((1, ValueError), (-0.1, ValueError), ("0.9", TypeError)):
        with pytest.raises(error, match="SGD: ema_decay="):
            SGD(ema_decay=decay)
    with pytest.raises(ValueError, match="outer rule keeps no average"):
        LocalSGDOptimizer(SGD(), mesh, outer=SGD(ema_decay=0.9))
