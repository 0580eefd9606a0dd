"""Runs of workers that meet: stopped and resumed, in another layout, resized, and ended by a tolerance."""

from __future__ import annotations

import hybrid
import numpy as np
import pytest
from mpi4py import MPI

import mpishard
from mpishard import (
    SGD,
    AdamW,
    Checkpoints,
    DDPOptimizer,
    ElasticOptimizer,
    LocalSGDOptimizer,
    OptimizationProblem,
    ShardingConfiguration,
)
from mpishard.compression import Int8Compressor
from mpishard.data.sampling import Sampler, share

NESTEROV = SGD(lr=0.7, momentum=0.9, nesterov=True)
ROWS = np.random.default_rng(0).standard_normal((37, 6))


def least_squares(parameters, samples, gradients):
    residual = ROWS[samples, :5] @ parameters - ROWS[samples, 5]
    gradients += ROWS[samples, :5].T @ residual
    return 0.5 * residual @ residual


def problem(steps=None, **changes):
    options = {"samples": len(ROWS), "batch_size": 16, "seed": 4, "steps": steps, **changes}
    return OptimizationProblem(least_squares, np.zeros(5), **options)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.usefixtures("without_debug")
def test_a_run_meets_at_averages_only(mesh, same_on_all, delay):
    """In the end every loss is that of all ranks, and a rank that is to stop waits for the others."""
    expected = DDPOptimizer(SGD(lr=0.0), mesh).optimize(problem(30), progress=False).loss_history
    seen = []

    def callback(state):
        seen.append(state.loss)
        return state.step == 18 and mesh.rank == mesh.size - 1

    optimizer = LocalSGDOptimizer(SGD(lr=0.0), mesh, 4, delay=delay)
    before = mesh.ledger.summary().get("world.all_reduce control", {"calls": 0})["calls"]
    result = optimizer.optimize(problem(30), progress=False, callback=callback)
    assert result.stop_reason == "callback"
    assert result.steps == (20 if delay == 0 else 21)
    np.testing.assert_allclose(result.loss_history, expected[: result.steps], rtol=1e-12)
    assert same_on_all(result.loss_history)
    assert seen[3 + delay] == result.loss_history[3 + delay]  # all ranks were there
    calls = mesh.ledger.summary()["world.all_reduce control"]["calls"] - before
    assert calls <= 5 + 4  # one an average, and those of the first step and at both ends of the run
    first = result.steps
    result = optimizer.optimize(problem(6), progress=False)  # ends between averages
    np.testing.assert_allclose(result.loss_history, expected[first : first + 6], rtol=1e-12)


@pytest.mark.parametrize(
    ("every", "outer", "delay", "compressor"),
    [
        (4, None, 0, None),
        (5, NESTEROV, 5, None),
        (5, NESTEROV, 0, Int8Compressor(block=4)),
        (4, NESTEROV, 2, Int8Compressor(block=4)),
    ],
    ids=str,
)
def test_a_run_goes_on_where_it_stopped(mesh, folder, same_on_all, every, outer, delay, compressor):
    """With the same bits as the run that has saved on its way; on any number of ranks from the same state."""

    def optimizer(mesh):
        config = ShardingConfiguration(mesh, minimum_parameter_group_size=1, gradient_compressor=compressor)
        return LocalSGDOptimizer(AdamW(lr=0.1), config, every, outer, delay=delay)

    with Checkpoints(folder, mesh, every=5) as checkpoints:
        whole = optimizer(mesh).optimize(problem(10), progress=False, checkpoints=checkpoints)
    assert same_on_all(whole.parameters)
    with Checkpoints(folder / "again", mesh, every=5) as checkpoints:
        optimizer(mesh).optimize(problem(5), progress=False, checkpoints=checkpoints)
        resumed = optimizer(mesh)
        result = resumed.optimize(problem(10), progress=False, checkpoints=checkpoints, resume=True)
    assert (result.resumed_steps, result.steps) == (5, 10)
    assert np.array_equal(result.parameters, whole.parameters)
    assert np.array_equal(result.loss_history, whole.loss_history)
    if mesh.rank == 0:  # fewer workers go on from what all had
        with mpishard.Mesh(MPI.COMM_SELF) as one, Checkpoints(folder / "again", one) as checkpoints:
            alone = optimizer(one)
            result = alone.optimize(problem(10), progress=False, checkpoints=checkpoints, resume=True)
            assert np.array_equal(result.parameters, whole.parameters)
            assert alone.outer_steps == resumed.outer_steps
            assert alone.serialize() == resumed_image(folder, one, optimizer(one))
    mesh.world.barrier()


def resumed_image(folder, mesh, optimizer):
    flat = np.zeros(5)
    mpishard.load_checkpoint(folder, flat, optimizer, mesh=mesh)
    return optimizer.serialize()


def test_a_tolerance_ends_all(mesh, same_on_all):
    """Once no worker's own gradient is larger."""

    def consistent(parameters, samples, gradients):
        residual = ROWS[samples, :5] @ (parameters - 1)
        gradients += ROWS[samples, :5].T @ residual
        return 0.5 * residual @ residual

    task = OptimizationProblem(consistent, np.zeros(5), 37, batch_size=37, steps=500, tolerance=0.2)
    optimizer = LocalSGDOptimizer(SGD(lr=0.1), mesh, 4)
    result = optimizer.optimize(task, progress=False)
    assert result.stop_reason == "tolerance" and 1 < result.steps < 500
    assert same_on_all((result.steps, optimizer.gradient_norm)) and same_on_all(result.parameters)


def test_a_run_goes_on_in_another_layout(mesh, folder):
    """Of the same number of workers: to the last digits as the one that has saved and went on."""
    expected = {}
    for each in hybrid.meshes(mesh):
        workers, rule = each.data.size, AdamW(lr=0.1, eps=1e-3)
        config = ShardingConfiguration(each, minimum_parameter_group_size=8)
        optimizer, parameters = LocalSGDOptimizer(rule, config, 3, NESTEROV, delay=1), hybrid.model(each)
        if workers in expected:
            mpishard.load_checkpoint(folder / str(workers), parameters, optimizer)
        else:
            hybrid.train(optimizer, parameters, range(5))
            mpishard.save_checkpoint(folder / str(workers), parameters, optimizer)
        assert (optimizer.clock, optimizer.outer_steps) == (5, 2)
        hybrid.train(optimizer, parameters, range(5, 10))
        optimizer.synchronize_optimizer_state()
        found = hybrid.gathered(parameters, config)
        np.testing.assert_allclose(found, expected.setdefault(workers, found), rtol=0, atol=1e-12)


@pytest.mark.mpi(min_size=2)
def test_workers_that_come_and_go(mesh, same_on_all):
    """Resizes begin from one state, which goes with them."""
    ranks = mesh.size
    optimizer = ElasticOptimizer(LocalSGDOptimizer(SGD(lr=0.05), mesh, 4, NESTEROV))
    sizes = {6: ranks - 1, 12: ranks}

    def callback(state):
        if state.step in sizes:
            optimizer.resize(sizes[state.step])

    result = optimizer.optimize(problem(18), callback=callback, progress=False)
    assert (result.steps, optimizer.current_workers) == (18, ranks)
    assert same_on_all(result.parameters)
    np.testing.assert_allclose(result.parameters, reference_of_resizes(ranks), rtol=0, atol=1e-12)


def reference_of_resizes(ranks):
    sampler, anchor, momentum = Sampler(len(ROWS), 16, 4), np.zeros(5), np.zeros(5)
    for first, workers in ((1, ranks), (7, ranks - 1), (13, ranks)):
        for steps in (range(first, first + 4), range(first + 4, first + 6)):
            own = [anchor.copy() for _ in range(workers)]
            for step in steps:
                batch = sampler.batch(step)
                for worker in range(workers):
                    grad = np.zeros(5)
                    least_squares(own[worker], share(batch, worker, workers)[0], grad)
                    own[worker] -= 0.05 * grad / (len(batch) / workers)
            outer = anchor - np.mean(own, axis=0)
            momentum = 0.9 * momentum + outer
            anchor = anchor - 0.7 * (outer + 0.9 * momentum)
    return anchor
