"""Optimization problems of PyTorch modules, beside PyTorch on one rank."""

from __future__ import annotations

import numpy as np
import pytest

import mpishard
from mpishard import (
    Checkpoints,
    DDPOptimizer,
    OptimizationProblem,
    ShardingConfiguration,
    ZeRO1Optimizer,
    ZeRO2Optimizer,
    ZeRO3Optimizer,
)

torch = pytest.importorskip("torch")
from torch_models import RULE, SAMPLES, images, smooth  # noqa: E402

BATCH = 16


def losses(module, samples):
    x, y = images()
    return torch.nn.functional.cross_entropy(module(x[samples]), y[samples], reduction="none")


def problem(module, **changes):
    options = {"samples": SAMPLES, "batch_size": BATCH, "steps": 6, "seed": 2, **changes}
    return mpishard.torch.problem(module, losses, **options)


def divided(strategy, mesh):
    """The arguments by which a problem fits a strategy."""
    return {"mesh": mesh, "shard_units": torch.nn.Linear} if strategy is ZeRO3Optimizer else {}


def values(module):
    with mpishard.torch.summon_full_parameters(module):
        return torch.cat([p.detach().reshape(-1) for p in module.parameters()]).numpy()


def alone():
    """The losses of PyTorch on one rank."""
    from mpishard.data.sampling import Sampler

    module, history = smooth(), []
    adamw = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.01)
    for step in range(1, 7):
        loss = losses(module, Sampler(SAMPLES, BATCH, 2).batch(step)).mean()
        adamw.zero_grad()
        loss.backward()
        adamw.step()
        history.append(loss.item())
    return np.array(history)


@pytest.mark.parametrize("micro_batch_size", [None, 2])
@pytest.mark.parametrize("strategy", [DDPOptimizer, ZeRO2Optimizer, ZeRO3Optimizer])
def test_a_problem_has_the_losses_of_pytorch_alone(mesh, strategy, micro_batch_size):
    task = problem(smooth(), micro_batch_size=micro_batch_size, **divided(strategy, mesh))
    result = strategy(RULE, mesh).optimize(task, progress=False)
    assert np.allclose(result.loss_history, alone(), atol=1e-5)


@pytest.mark.parametrize("strategy", [DDPOptimizer, ZeRO2Optimizer, ZeRO3Optimizer])
def test_reproducible_runs_have_the_bits_of_one_rank(mesh, same_on_all, strategy):
    from mpi4py import MPI

    bits = []
    with mpishard.Mesh(MPI.COMM_SELF) as one:
        for each in (mesh, one):
            module = smooth()
            config = ShardingConfiguration(each, reproducible=True)
            task = problem(module, micro_batch_size=2, **divided(strategy, each))
            strategy(RULE, config).optimize(task, progress=False)
            bits.append(values(module))
    assert np.array_equal(*bits)


@pytest.mark.parametrize("strategy", [ZeRO2Optimizer, ZeRO3Optimizer])
def test_a_run_goes_on_with_its_buffers(mesh, folder, strategy):
    for steps in (3, 6):
        module = smooth()
        with Checkpoints(folder, mesh) as checkpoints:
            result = strategy(RULE, mesh).optimize(
                problem(module, steps=steps, **divided(strategy, mesh)),
                progress=False,
                checkpoints=checkpoints,
                resume=True,
            )
    assert result.resumed_steps == 3
    assert np.allclose(result.loss_history, alone(), atol=1e-5)
    assert module.seen.tolist() == [6.0, 6.0]
    other = smooth()
    other.register_buffer("more", torch.zeros(3))
    optimizer = mpishard.torch.as_distributed(other, mesh, RULE)
    with pytest.raises(ValueError, match="buffer 'more' has 3 float32 here, and it has none"):
        optimizer.load_checkpoint(folder)


def everything(mesh, strategy, steps, folder=None, kind=torch.optim.RAdam):
    """Parameters, their average, and losses of a run that is evaluated and stops early, and the result."""
    module = smooth()
    groups = [mpishard.ParameterGroup("*.bias", weight_decay=0, lr_factor=0.5)]
    rule = mpishard.torch.rule_of(kind, 1e-2, weight_decay=0.1, groups=groups, ema_decay=0.5)
    optimizer = strategy(rule, ShardingConfiguration(mesh, reproducible=True, max_gradient_value=0.01))

    def validation(parameters, samples):
        with torch.no_grad():
            return losses(module, samples + 30).sum()

    options = {
        "evaluate": mpishard.Evaluation(validation, SAMPLES - 30, every=2, averaged=True),
        "stop_early": mpishard.EarlyStopping(patience=2, min_delta=10.0),  # after the third evaluation
        "progress": False,
    }
    task = problem(module, samples=30, micro_batch_size=2, steps=steps)
    if folder is None:
        result = optimizer.optimize(task, **options)
    else:
        with Checkpoints(folder, mesh, best="validation loss") as checkpoints:
            result = optimizer.optimize(task, checkpoints=checkpoints, resume=True, **options)
    found = [result.loss_history, result.validation_losses]
    found.append(torch.cat([p.detach().reshape(-1) for p in module.parameters()]).numpy())
    with optimizer.averaged_parameters():
        found.append(torch.cat([p.detach().reshape(-1) for p in module.parameters()]).numpy())
    return [each.tobytes() for each in found], result


def test_what_happens_while_training_has_the_same_bits_under_another_strategy(mesh, folder):
    from mpi4py import MPI

    with mpishard.Mesh(MPI.COMM_SELF) as one:
        expected, alone = everything(one, DDPOptimizer, 9)
    for steps, strategy in ((3, DDPOptimizer), (9, ZeRO2Optimizer)):
        found, result = everything(mesh, strategy, steps, folder)
    assert found == expected
    assert (result.steps, result.stop_reason) == (alone.steps, alone.stop_reason) == (6, "patience")
    mesh.world.barrier()
    best = alone.validation_steps[np.argmin(alone.validation_losses)]
    assert (folder / "best").resolve().name == f"step-{best:08d}"


def test_a_module_stays_divided_between_two_problems(mesh):
    module, optimizer = smooth(), ZeRO3Optimizer(RULE, mesh)
    for first in (0, 3):
        task = problem(module, steps=3, **divided(ZeRO3Optimizer, mesh))
        result = optimizer.optimize(task, progress=False)
        assert np.allclose(result.loss_history, alone()[first : first + 3], atol=1e-5)
    with pytest.raises(ValueError, match="has divided this module into the units .* give the same shard_units"):
        problem(module, mesh=mesh, shard_units="auto")
    with pytest.raises(ValueError, match=r"another optimizer or problem trains this module.*summon_full_parameters"):
        problem(module)


def test_what_divides_a_problem_is_checked(mesh):
    for arguments in ({"mesh": mesh}, {"shard_units": "auto"}, {"materialize": print}):
        with pytest.raises(ValueError, match="give mesh and shard_units, or none of them"):
            problem(smooth(), **arguments)
    with pytest.raises(TypeError, match="mesh=3 must be a Mesh"):
        problem(smooth(), mesh=3, shard_units="auto")
    if mesh.size > 1:
        with pytest.raises(ValueError, match="shard_units"):
            units = torch.nn.Linear if mesh.rank else "auto"
            problem(torch.nn.Sequential(torch.nn.Linear(3, 3)), mesh=mesh, shard_units=units)
    module = smooth()
    optimizer = mpishard.torch.as_distributed(module, mesh, RULE, zero=3)
    with pytest.raises(ValueError, match=r"another optimizer or problem trains this module.*call close\(\)"):
        problem(module)
    optimizer.close()
    problem(module)


def test_the_problem_is_one_of_mpishard(mesh):
    assert isinstance(problem(smooth()), OptimizationProblem)


@pytest.mark.parametrize("strategy", [DDPOptimizer, ZeRO1Optimizer, ZeRO2Optimizer, ZeRO3Optimizer])
def test_workers_that_leave_and_come_change_no_bit(mesh, strategy):
    """The buffer, which counts this rank's forward passes, is that of rank 0 for those who come."""
    from mpi4py import MPI

    from mpishard import ElasticOptimizer

    bits = []
    with mpishard.Mesh(MPI.COMM_SELF) as one:
        config = ShardingConfiguration(one, reproducible=True)
        module = smooth()
        DDPOptimizer(RULE, config).optimize(problem(module, micro_batch_size=2), progress=False)
        bits.append(values(module))
    module = smooth()
    config = ShardingConfiguration(mesh, reproducible=True)
    optimizer = ElasticOptimizer(strategy(RULE, config))

    def resize(state):
        if state.step in (2, 4):
            optimizer.resize(1 if state.step == 2 else mesh.size)

    task = problem(module, micro_batch_size=2, **divided(strategy, mesh))
    optimizer.optimize(task, callback=resize, progress=False)
    bits.append(values(module))
    assert np.array_equal(*bits)
    seen = mesh.world.allgather_object(module.seen.tolist())
    assert len(set(map(tuple, seen))) == 1 and seen[0][0] > 6
