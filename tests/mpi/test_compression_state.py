"""What compression leaves over is state: it outlives saves, other layouts, resizes and changes of the loss scale."""

from __future__ import annotations

import hybrid
import numpy as np
import pytest
from steps import STRATEGIES, write_gradients

from mpishard import (
    SGD,
    AdamW,
    Checkpoints,
    DDPOptimizer,
    ElasticOptimizer,
    FlatParameters,
    Mesh,
    OptimizationProblem,
    ParameterSpec,
    ShardingConfiguration,
    ZeRO1Optimizer,
    ZeRO2Optimizer,
    load_checkpoint,
    save_checkpoint,
)
from mpishard.compression import Int8Compressor, PowerSGDCompressor, SignCompressor, TopKCompressor
from mpishard.data_parallel.full_state import decode

SPECS = [ParameterSpec("matrix", (12, 10)), ParameterSpec("scalar", ()), ParameterSpec("vector", (70,))]
SIZE = sum(spec.size for spec in SPECS)
# Of each sample, whatever the parameters are; three steps are an epoch.
SAMPLES, BATCH = 24, 8
GRADIENTS = np.random.default_rng(3).standard_normal((SAMPLES, SIZE))
COMPRESSORS = [Int8Compressor(16), TopKCompressor(0.05), PowerSGDCompressor(2)]


def zeros():
    return FlatParameters.over(np.zeros(SIZE), SPECS)


def problem(steps):
    def function(parameters, samples, gradients):
        write_gradients(parameters, GRADIENTS[samples].sum(0))
        return 0.0

    return OptimizationProblem(function, zeros(), samples=SAMPLES, batch_size=BATCH, steps=steps)


def configured(mesh, compressor, **options):
    options = {"gradient_compressor": compressor, "minimum_parameter_group_size": 60} | options
    return ShardingConfiguration(mesh, **options)


def left_over(optimizer):
    """What is left of all gradients, in flat order; collective."""
    return decode(optimizer.serialize()).others["gradient_errors"]


def assert_nothing_lost(optimizer, parameters, epochs):
    total, left = epochs * GRADIENTS.sum(0) / BATCH, left_over(optimizer) / BATCH
    assert np.abs(left - parameters.flat - total).max() <= 1e-12 * np.abs(total).max()
    assert np.linalg.norm(left) > 0


@pytest.mark.parametrize("compressor", COMPRESSORS[::2], ids=str)
def test_nothing_is_lost_from_save_to_load_at_other_sizes(comm, folder, compressor):
    """One epoch each, with fewer ranks, with all again, as another strategy and by nodes."""
    fewer = max(1, comm.size // 2)
    runs = [(comm.size, DDPOptimizer, False), (fewer, ZeRO2Optimizer, False), (comm.size, DDPOptimizer, 2)]
    runs += [(fewer, DDPOptimizer, False), (comm.size, ZeRO1Optimizer, False)]
    for epoch, (size, strategy, nodes) in enumerate(runs, start=1):
        part = comm.Split(int(comm.rank < size), comm.rank)
        if comm.rank < size:
            with Mesh(part) as mesh, Checkpoints(folder, mesh) as checkpoints:
                optimizer = strategy(SGD(lr=1.0), configured(mesh, compressor, hierarchical=nodes))
                task = problem(3 * epoch)
                result = optimizer.optimize(task, progress=False, checkpoints=checkpoints, resume=True)
                assert (result.steps, result.resumed_steps) == (3 * epoch, 3 * epoch - 3)
                assert_nothing_lost(optimizer, task.start, epoch)
        part.Free()
        comm.Barrier()


@pytest.mark.parametrize(
    ("strategy", "compressor"), [(DDPOptimizer, COMPRESSORS[0]), (ZeRO2Optimizer, COMPRESSORS[2])], ids=str
)
def test_a_run_that_goes_on_and_one_that_is_resumed_have_the_same_bits(mesh, folder, compressor, strategy):
    found = []
    for name, stops in (("whole", [7]), ("stopped", [2, 4, 7])):
        for steps in stops:
            optimizer = strategy(AdamW(lr=0.1), configured(mesh, compressor, max_gradient_norm=0.5, hierarchical=2))
            task = problem(steps)
            with Checkpoints(folder / name, mesh, every=2) as checkpoints:
                optimizer.optimize(task, progress=False, checkpoints=checkpoints, resume=True)
        found.append((task.start.flat.tobytes(), left_over(optimizer).tobytes()))
    assert found[0] == found[1]


@pytest.mark.parametrize(("strategy", "compressor"), list(zip(STRATEGIES[:3], COMPRESSORS, strict=True)), ids=str)
def test_nothing_is_lost_in_resizes(mesh, compressor, strategy):
    ranks = mesh.size
    sizes = {1: 1, 2: ranks, 4: max(1, ranks - 1), 5: (ranks + 1) // 2, 7: ranks, 9: 1, 10: min(3, ranks), 12: 1}
    optimizer = ElasticOptimizer(strategy(SGD(lr=1.0), configured(mesh, compressor, hierarchical=2)))

    def callback(state):
        if state.step in sizes:
            optimizer.resize(sizes[state.step])

    task = problem(12)
    result = optimizer.optimize(task, progress=False, callback=callback)
    assert (result.steps, optimizer.current_workers) == (12, ranks)
    assert_nothing_lost(optimizer.optimizer, task.start, 4)


@pytest.mark.parametrize("strategy", [DDPOptimizer, ZeRO2Optimizer])
def test_what_is_left_follows_the_loss_scale(mesh, strategy):
    """One that halves after an overflow; and the bytes of the state, for an optimizer without."""
    config = configured(mesh, Int8Compressor(16), loss_scale="dynamic")
    optimizer, parameters = strategy(SGD(lr=1.0), config), zeros()
    total = np.zeros(SIZE)
    for step in range(12):
        gradient = GRADIENTS[step] * (1 + mesh.rank)
        optimizer.step(parameters, gradient * (np.inf if step in (3, 7) else optimizer.loss_scale), count=1)
        if step not in (3, 7):
            total += GRADIENTS[step] * sum(range(1, mesh.size + 1))
    assert (optimizer.skipped_steps, optimizer.loss_scale) == (2, 2.0**14)
    limit = 1e-12 * np.abs(total).max()
    assert np.abs(left_over(optimizer) - parameters.flat - total).max() <= limit
    other = DDPOptimizer(SGD(lr=1.0), configured(mesh, SignCompressor(16)))
    other.deserialize(optimizer.serialize())
    for step in range(12, 20):
        other.step(parameters, GRADIENTS[step] * (1 + mesh.rank), count=1)
        total += GRADIENTS[step] * sum(range(1, mesh.size + 1))
    assert np.abs(left_over(other) - parameters.flat - total).max() <= limit


def test_checkpoints_with_and_without(mesh, folder):
    """A run without compression goes on from one with it, and the other way round, then with nothing left over."""
    config = configured(mesh, Int8Compressor(16))
    first, parameters = DDPOptimizer(SGD(lr=1.0), config), zeros()
    first.step(parameters, GRADIENTS[0].copy())
    save_checkpoint(folder / "with", parameters, first)
    plain = DDPOptimizer(SGD(lr=1.0), mesh)
    load_checkpoint(folder / "with", parameters, plain)
    save_checkpoint(folder / "without", parameters, plain)
    first.step(parameters, GRADIENTS[1].copy())
    assert left_over(first).any()
    load_checkpoint(folder / "without", parameters, first)
    assert first.steps == 1
    assert not left_over(first).any()


@pytest.mark.parametrize(
    ("strategy", "compressor"),
    [(strategy, COMPRESSORS[0]) for strategy in STRATEGIES[:3]]
    + [(DDPOptimizer, COMPRESSORS[2]), (ZeRO2Optimizer, SignCompressor(4))],
    ids=str,
)
def test_tensor_and_pipeline_ranks(comm, strategy, compressor):
    """Copies of a tensor stay alike, which the mesh sees to after each step, and nothing is lost."""
    with Mesh(comm, debug=True) as base:
        for mesh in hybrid.meshes(base):
            config = ShardingConfiguration(mesh, gradient_compressor=compressor, minimum_parameter_group_size=24)
            optimizer, parameters = strategy(SGD(lr=1.0), config), hybrid.model(mesh)
            optimizer.bind(parameters)
            total = -hybrid.START
            for step in range(4):
                hybrid.one_pass(parameters, mesh, step)
                optimizer.step(parameters, count=1)
                total = total + sum(hybrid.whole_gradient(step, rank, mesh.data.size) for rank in range(mesh.data.size))
            left = left_over(optimizer)
            assert np.abs(left - hybrid.gathered(parameters, config) - total).max() <= 1e-12 * np.abs(total).max()
