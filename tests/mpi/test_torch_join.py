"""Uneven numbers of batches, beside the Join of PyTorch and runs in which no rank runs out."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import mpishard
from mpishard import LocalSGDOptimizer, ShardingConfiguration

torch = pytest.importorskip("torch")
from torch_models import RULE, images, loss_of, make, samples_of, smooth  # noqa: E402


@pytest.fixture
def gloo(mesh, folder):
    """PyTorch's own ranks, in the same processes."""
    where = f"file://{folder}/rendezvous"
    torch.distributed.init_process_group("gloo", init_method=where, rank=mesh.rank, world_size=mesh.size)
    yield torch.nn.parallel.DistributedDataParallel
    torch.distributed.destroy_process_group()


def batches_of(mesh, rank):
    """The first rank has most."""
    return 2 + 2 * (mesh.size - 1 - rank)


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("by_all", [True, False])
def test_parameters_are_those_of_the_join_of_pytorch(mesh, gloo, same_on_all, zero, by_all):
    """On all ranks, and so is the state, which takes further steps; the gradients are clipped."""
    from torch.distributed.algorithms.join import Join

    x, y = images()
    module = smooth().double()
    theirs = gloo(copy.deepcopy(module))
    sgd = torch.optim.SGD(theirs.parameters(), lr=0.5, momentum=0.9)
    with Join([theirs], divide_by_initial_world_size=by_all):
        for step in range(batches_of(mesh, mesh.rank)):
            sgd.zero_grad()
            loss_of(theirs, x.double(), y, samples_of(mesh, step)).backward()
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.05)
            sgd.step()
    optimizer = mpishard.torch.as_distributed(module, mesh, mpishard.SGD(lr=0.5, momentum=0.9), zero=zero)
    with mpishard.torch.join(optimizer, divide_by_initial_world_size=by_all):
        for step in range(batches_of(mesh, mesh.rank)):
            optimizer.zero_grad()
            loss_of(module, x.double(), y, samples_of(mesh, step)).backward()
            if zero:
                optimizer.clip_grad_norm_(0.05)
            else:
                torch.nn.utils.clip_grad_norm_(module.parameters(), 0.05)
            optimizer.step()
    for p, q in zip(module.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)
    assert optimizer.optimizer.steps == batches_of(mesh, 0)
    for step in range(2):
        assert same_on_all(optimizer.parameters.flat)
        loss_of(module, x.double(), y, samples_of(mesh, step)).backward()
        optimizer.step()
    assert len(set(mesh.world.allgather_object(optimizer.optimizer.serialize().hex()))) == 1


def samples_of_rank(mesh, step, rank):
    order = np.random.default_rng(step).permutation(40)
    return np.array_split(order[: 8 * mesh.size], mesh.size)[rank]


def sum_of_losses(module, own):
    x, y = images()
    return torch.nn.functional.cross_entropy(module(x[own].double()), y[own], reduction="sum")


@pytest.mark.parametrize("kind", ["torch", "reproducible"])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_sums_over_uneven_samples_are_those_of_one_process(mesh, same_on_all, zero, kind):
    """With count, a scheduler's rates, passes that no step uses, and an optimizer of PyTorch."""
    having = [[r for r in range(mesh.size) if step < batches_of(mesh, r)] for step in range(batches_of(mesh, 0))]
    samples = [np.concatenate([samples_of_rank(mesh, n, r) for r in ranks]) for n, ranks in enumerate(having)]

    alone, module = smooth().double(), smooth().double()
    theirs = [torch.optim.AdamW(each.parameters(), lr=0.05) for each in (alone, module)]
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, gamma=0.5) for each in theirs]
    for everyone in samples:
        theirs[0].zero_grad()
        (sum_of_losses(alone, everyone) / len(everyone)).backward()
        theirs[0].step()
        schedulers[0].step()
    config = ShardingConfiguration(mesh, reproducible=kind == "reproducible", minimum_parameter_group_size=64)
    optimizer = mpishard.torch.as_distributed(module, config, theirs[1], zero=zero)
    with mpishard.torch.join(optimizer):
        for step in range(batches_of(mesh, mesh.rank)):
            if step % 3 == 1:
                sum_of_losses(module, samples_of_rank(mesh, 0, mesh.rank)).backward()  # dropped
            optimizer.zero_grad()
            sum_of_losses(module, samples_of_rank(mesh, step, mesh.rank)).backward()
            optimizer.step(count=len(samples[step]))
            schedulers[1].step()
    assert same_on_all(optimizer.parameters.flat)
    for p, q in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("buffers", ["broadcast", "average"])
def test_buffers_are_those_of_ranks_that_have_batches(mesh, same_on_all, buffers):
    module, x, y = make("convolutional")
    optimizer = mpishard.torch.as_distributed(module, mesh, RULE, buffers=buffers)
    last = mesh.size - 1  # the only one with a second batch
    with mpishard.torch.join(optimizer):
        for step in range(1 + (mesh.rank == last)):
            loss_of(module, x, y, samples_of(mesh, step)).backward()
            if step == 1:
                wanted = module[1].running_mean.clone()
            optimizer.step()
    found = module[1].running_mean.numpy()
    assert same_on_all(found) and int(module[1].num_batches_tracked) == 2
    if mesh.rank == last:
        assert np.array_equal(found, wanted.numpy())


def test_what_a_loop_makes_of_the_gradients_is_what_all_ranks_step(mesh, same_on_all):
    """A GradientScaler, whose factor ranks that have run out do not know, and several passes that add up."""
    module, (x, y) = smooth(), images()
    optimizer = mpishard.torch.as_distributed(module, mesh, mpishard.SGD(lr=0.1, momentum=0.9))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = optimizer.parameters.flat.copy()
    with mpishard.torch.join(optimizer):
        for step in range(batches_of(mesh, mesh.rank)):
            module.zero_grad()
            for number in range(2):
                scaler.scale(loss_of(module, x, y, samples_of(mesh, step + number))).backward()
            scaler.step(optimizer)
            scaler.update()
    assert same_on_all(optimizer.parameters.flat)
    assert 0 < np.abs(optimizer.parameters.flat - before).max() < 1


def test_what_join_cannot_do_is_refused_on_all_ranks(mesh):
    if mesh.size == 1:
        pytest.skip("needs two ranks, one of which runs out")
    module, x, y = make("convolutional")
    optimizer = mpishard.torch.as_distributed(module, mesh, RULE)
    with pytest.raises(RuntimeError, match=r"ranks \[0\] have run out of batches, and throw_on_early_termination=True"):
        with mpishard.torch.join(optimizer, throw_on_early_termination=True):
            for _ in range(min(1, mesh.rank)):
                loss_of(module, x, y, samples_of(mesh, 0)).backward()
                optimizer.step()
    optimizer.close()
    other = mpishard.torch.as_distributed(module, mesh, RULE, zero=2)
    with mpishard.torch.join(other), pytest.raises(ValueError, match="one optimizer at a time on a mesh"):
        mpishard.torch.join(other).__enter__()
    with mpishard.torch.join(other), pytest.raises(RuntimeError, match="use zero=0 or 1 within join"):
        other.no_sync()
    other.close()
    slow = LocalSGDOptimizer(RULE, ShardingConfiguration(mesh), sync_every=3)
    slow = mpishard.torch.as_distributed(smooth(), ShardingConfiguration(mesh), slow)
    with pytest.raises(ValueError, match="join is for steps that all ranks take together"):
        mpishard.torch.join(slow).__enter__()
    normed = mpishard.torch.convert_sync_batchnorm(make("convolutional")[0], mesh)
    normed = mpishard.torch.as_distributed(normed, mesh, RULE)
    with pytest.raises(ValueError, match="batch norms that sum over ranks"):
        mpishard.torch.join(normed).__enter__()


def test_ranks_that_do_different_things_are_told(mesh):
    if mesh.size == 1:
        pytest.skip("needs two ranks, which differ")
    module, (x, y) = smooth(), images()
    optimizer = mpishard.torch.as_distributed(module, mesh, RULE, zero=1)
    with pytest.raises(
        RuntimeError, match=r"must do the same, but ranks .*0.* call step, ranks \[\d.*\] call zero_grad"
    ):
        with mpishard.torch.join(optimizer):
            loss_of(module, x, y, samples_of(mesh, 0)).backward()
            if mesh.rank == mesh.size - 1:
                optimizer.zero_grad()
            optimizer.step()
