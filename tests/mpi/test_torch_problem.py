"""Optimization problems of PyTorch modules, beside PyTorch on one rank."""

from __future__ import annotations

import numpy as np
import pytest

import mpishard
from mpishard import Checkpoints, DDPOptimizer, OptimizationProblem, ShardingConfiguration, ZeRO2Optimizer

torch = pytest.importorskip("torch")
from torch_models import RULE, SAMPLES, images, smooth  # noqa: E402

BATCH = 16


def losses(module, samples):
    x, y = images()
    return torch.nn.functional.cross_entropy(module(x[samples]), y[samples], reduction="none")


def problem(module, **changes):
    options = {"samples": SAMPLES, "batch_size": BATCH, "steps": 6, "seed": 2, **changes}
    return mpishard.torch.problem(module, losses, **options)


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
@pytest.mark.parametrize("strategy", [DDPOptimizer, ZeRO2Optimizer])
def test_a_problem_has_the_losses_of_pytorch_alone(mesh, strategy, micro_batch_size):
    result = strategy(RULE, mesh).optimize(problem(smooth(), micro_batch_size=micro_batch_size), progress=False)
    assert np.allclose(result.loss_history, alone(), atol=1e-5)


@pytest.mark.parametrize("strategy", [DDPOptimizer, ZeRO2Optimizer])
def test_reproducible_runs_have_the_bits_of_one_rank(mesh, same_on_all, strategy):
    from mpi4py import MPI

    bits = []
    with mpishard.Mesh(MPI.COMM_SELF) as one:
        for each in (mesh, one):
            module = smooth()
            config = ShardingConfiguration(each, reproducible=True)
            strategy(RULE, config).optimize(problem(module, micro_batch_size=2), progress=False)
            bits.append(torch.cat([p.detach().reshape(-1) for p in module.parameters()]).numpy())
    assert np.array_equal(*bits)


def test_a_run_goes_on_with_its_buffers(mesh, folder):
    for steps in (3, 6):
        module = smooth()
        with Checkpoints(folder, mesh) as checkpoints:
            result = ZeRO2Optimizer(RULE, mesh).optimize(
                problem(module, steps=steps), progress=False, checkpoints=checkpoints, resume=True
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


def test_the_problem_is_one_of_mpishard(mesh):
    assert isinstance(problem(smooth()), OptimizationProblem)


def test_workers_that_leave_and_come_change_no_bit(mesh):
    """The buffer, which counts this rank's forward passes, is that of rank 0 for those who come."""
    from mpi4py import MPI

    from mpishard import ElasticOptimizer

    bits = []
    with mpishard.Mesh(MPI.COMM_SELF) as one:
        config = ShardingConfiguration(one, reproducible=True)
        module = smooth()
        DDPOptimizer(RULE, config).optimize(problem(module, micro_batch_size=2), progress=False)
        bits.append(torch.cat([p.detach().reshape(-1) for p in module.parameters()]).numpy())
    module = smooth()
    config = ShardingConfiguration(mesh, reproducible=True)
    optimizer = ElasticOptimizer(ZeRO2Optimizer(RULE, config))

    def resize(state):
        if state.step in (2, 4):
            optimizer.resize(1 if state.step == 2 else mesh.size)

    optimizer.optimize(problem(module, micro_batch_size=2), callback=resize, progress=False)
    bits.append(torch.cat([p.detach().reshape(-1) for p in module.parameters()]).numpy())
    assert np.array_equal(*bits)
    seen = mesh.world.allgather_object(module.seen.tolist())
    assert len(set(map(tuple, seen))) == 1 and seen[0][0] > 6
