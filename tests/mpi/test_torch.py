"""PyTorch modules on ranks, beside DistributedDataParallel of the same module, one process, and one rank."""

from __future__ import annotations

import contextlib
import copy
import functools

import numpy as np
import pytest
from mpi4py import MPI

import mpishard
from mpishard import (
    Checkpoints,
    DDPOptimizer,
    ElasticOptimizer,
    ShardingConfiguration,
    ZeRO1Optimizer,
    ZeRO2Optimizer,
    ZeRO3Optimizer,
)
from mpishard.comm import collectives
from mpishard.comm.capabilities import probe
from mpishard.data.sampling import Sampler

torch = pytest.importorskip("torch")
import torch_zoo  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_models import (  # noqa: E402
    KINDS,
    RULE,
    SAMPLES,
    assert_same_parameters,
    convolutional,
    images,
    loss_of,
    make,
    pytorch_ranks,
    samples_of,
    smooth,
)

gloo = pytest.fixture(pytorch_ranks)

# PyTorch modules on ranks, beside DistributedDataParallel of the same module.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_losses_are_those_of_ddp(mesh, gloo, kind, zero):
    module, x, y = make(kind)
    theirs = gloo(copy.deepcopy(module), find_unused_parameters=kind == "transformer")
    adamw = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.01)
    ours, _, _ = make(kind, mesh.rank)  # those of rank 0 count
    optimizer = mpishard.torch.as_distributed(ours, mesh, RULE, zero=zero)
    for step in range(6):
        own, losses = samples_of(mesh, step), []
        for each, which in ((theirs, adamw), (ours, optimizer)):
            which.zero_grad()
            loss = loss_of(each, x, y, own)
            loss.backward()
            which.step()
            losses.append(loss.item())
        assert abs(losses[0] - losses[1]) < 1e-5
    assert list(optimizer.parameters) == [name for name, p in module.named_parameters() if p.requires_grad]
    assert optimizer.unused_parameters == (["unused.weight", "unused.bias"] if kind == "transformer" else [])
    for name, p in ours.named_parameters():
        assert p.grad is None
        if p.requires_grad:
            assert p.data_ptr() == optimizer.parameters[name].ctypes.data


def changed(module, clip):
    for number, p in enumerate(module.parameters()):
        if p.grad is not None and number % 2:
            p.grad.mul_(0.25)


def replaced(module, clip):
    for p in module.parameters():
        if p.grad is not None:
            p.grad = p.grad / (1 + p.grad.norm())


def clipped(module, clip):
    """By the largest gradient, by layer, and by value; the norms."""
    norms = [clip(0.05, norm_type=float("inf"), foreach=False)]
    layers = [list(each.parameters()) for each in module.children()]
    norms += [torch.nn.utils.clip_grad_norm_(each, 0.01, norm_type=1) for each in layers if each]
    if not any(p.is_complex() for p in module.parameters()):
        torch.nn.utils.clip_grad_value_(module.parameters(), 1e-3)
    return norms


CHANGES = (lambda module, clip: None, changed, replaced, clipped)


def own_loss(mesh, module, name, step):
    """Of this rank's part of a batch of the zoo."""
    x, y = torch_zoo.samples(name, step)
    own = np.split(np.arange(torch_zoo.SAMPLES), mesh.size)[mesh.rank]
    return torch.nn.functional.cross_entropy(module(x[own]), y[own])


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("name", torch_zoo.MODULES)
@pytest.mark.pairs(14)
@pytest.mark.quick
def test_gradients_after_a_backward_pass_are_those_of_ddp(mesh, gloo, name, zero):
    """And what a loop makes of them is what steps, in each step another thing; several passes before a step add up."""
    theirs, module = gloo(torch_zoo.make(name), find_unused_parameters=name == "unused"), torch_zoo.make(name)
    sgd = torch.optim.SGD(theirs.parameters(), lr=0.5, momentum=0.9)
    optimizer = mpishard.torch.as_distributed(module, mesh, mpishard.SGD(lr=0.5, momentum=0.9), zero=zero)
    clip = functools.partial(torch.nn.utils.clip_grad_norm_, list(theirs.parameters()))
    for step, change in enumerate(CHANGES):
        for each, which in ((theirs, sgd), (module, optimizer)):
            which.zero_grad()
            for number in range(1 + step % 2):
                own_loss(mesh, each, name, step + number).backward()
        found = {name: p.grad for name, p in module.named_parameters()}
        wanted = {name: q.grad for name, q in theirs.module.named_parameters() if q.grad is not None}
        torch.testing.assert_close({name: found[name] for name in wanted}, wanted, rtol=1e-9, atol=1e-12)
        norms = change(module, optimizer.clip_grad_norm_), change(theirs.module, clip)
        torch.testing.assert_close(*(each or [] for each in norms), rtol=1e-9, atol=0)
        for which in (sgd, optimizer):
            which.step()
    assert_same_parameters(module, theirs.module, rtol=1e-9)


@pytest.mark.parametrize("zero", [0, 1])
def test_gradients_that_are_summed_in_parts(mesh, monkeypatch, zero):
    """As large ones are under Open MPI: the gradients and the parameters are those of a sum at once."""
    runs = []
    for least in (2**62, 0):
        monkeypatch.setattr(collectives, "IN_PARTS_FROM", {probe().library: least})
        module, x, y = make("transformer")
        optimizer = mpishard.torch.as_distributed(module, mesh, RULE, zero=zero)
        for step in range(2):
            loss_of(module, x, y, samples_of(mesh, step)).backward()
            gradients = torch.cat([p.grad.reshape(-1) for p in optimizer.param_groups[0]["params"]])
            optimizer.step()
        runs.append((gradients, torch.from_numpy(optimizer.parameters.flat.copy())))
    torch.testing.assert_close(*runs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("given", "zero"), [(torch.optim.SGD, 0), (mpishard.SGD, 1)])
def test_a_gradient_scaler_of_pytorch(mesh, gloo, given, zero):
    """Beside DDP, with a step whose gradients are infinite on one rank: all leave it out."""
    module, x, y = make("convolutional")
    theirs = gloo(copy.deepcopy(module))
    sgd = torch.optim.SGD(theirs.parameters(), lr=0.5, momentum=0.9)
    rule = given(*[module.parameters()] * (given is torch.optim.SGD), lr=0.5, momentum=0.9)
    optimizer = mpishard.torch.as_distributed(module, mesh, rule, zero=zero)
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2) for _ in range(2)]
    for step in range(5):
        for each, which, scaler in zip((theirs, module), (sgd, optimizer), scalers, strict=True):
            which.zero_grad()
            factor = 1e38 if step == 2 and mesh.rank == mesh.size - 1 else 1.0
            scaler.scale(loss_of(each, x, y, samples_of(mesh, step)) * factor).backward()
            scaler.unscale_(which)
            torch.nn.utils.clip_grad_norm_(each.parameters(), 0.5)
            scaler.step(which)
            scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale() == 512.0
    assert_same_parameters(module, theirs.module, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("momentum", "affine"), [(0.1, False), (None, True)])
def test_batch_norms_over_the_ranks_are_those_of_the_whole_batch(mesh, momentum, affine):
    """With other numbers of samples on each rank, none on the last of several."""
    torch.manual_seed(1)
    x, y = (each.double() if each.is_floating_point() else each for each in images())
    options = {"momentum": momentum, "affine": affine}
    layers = [torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4, **options), torch.nn.Tanh(), torch.nn.Flatten()]
    theirs = torch.nn.Sequential(*layers, torch.nn.Linear(144, 5), torch.nn.BatchNorm1d(5, **options)).double()
    ours = mpishard.torch.convert_sync_batchnorm(copy.deepcopy(theirs), mesh)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    sgd = torch.optim.SGD(theirs.parameters(), lr=0.2)
    optimizer = mpishard.torch.as_distributed(ours, mesh, mpishard.SGD(lr=0.2), buffers="local")
    cuts = [0, *(3 * rank * rank + 4 for rank in range(1, mesh.size)), SAMPLES][: mesh.size] + [SAMPLES]
    if mesh.size > 2:
        cuts[-2] = SAMPLES
    own = slice(*cuts[mesh.rank : mesh.rank + 2])
    for _ in range(4):
        sgd.zero_grad()
        torch.nn.functional.cross_entropy(theirs(x), y).backward()
        torch.nn.functional.cross_entropy(ours(x[own]), y[own], reduction="sum").backward()
        sgd.step()
        optimizer.step(count=SAMPLES)
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()), rtol=1e-9, atol=1e-11)
    again = copy.deepcopy(ours).eval()
    torch.testing.assert_close(again(x), theirs.eval()(x))
    with pytest.raises(ValueError, match="more than 1 values a channel|more than 1 value per channel"):
        again.train()(x[: 1 if mesh.rank == 0 else 0])
    norms = mpishard.torch.convert_sync_batchnorm(torch.nn.Sequential(*(torch.nn.BatchNorm1d(3) for _ in "ab")), mesh)
    if mesh.size > 1:
        with pytest.raises(mpishard.CollectiveMismatchError, match="'0' on rank 0, '1' on rank"):
            norms[min(mesh.rank, 1)](torch.ones(2, 3))


@pytest.mark.mpi(min_size=2)
def test_a_batch_norm_over_the_ranks_is_that_of_each_in_evaluation(mesh):
    """As in PyTorch, also where it keeps no averages: one rank alone may evaluate."""
    layer = torch.nn.BatchNorm1d(3, track_running_stats=False).eval()
    ours = mpishard.torch.convert_sync_batchnorm(copy.deepcopy(layer), mesh)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(mesh.rank))
    assert torch.equal(ours(x), layer(x))


def test_the_derivative_of_a_batch_norm_over_the_ranks_and_its_gradient_are_adjoint(mesh):
    """Of the derivative that of the whole batch; an odd number of samples on each rank."""
    torch.manual_seed(0)
    ends = [rank * rank for rank in range(mesh.size + 1)]
    own = slice(*ends[mesh.rank : mesh.rank + 2])
    x, dx, dy = (torch.randn(ends[-1], 3, 5, dtype=torch.float64) for _ in range(3))
    layer = torch.nn.BatchNorm1d(3).double()
    layer.weight.data, layer.bias.data = torch.randn(2, 3, dtype=torch.float64)
    ours = mpishard.torch.convert_sync_batchnorm(copy.deepcopy(layer), mesh)
    _, along = torch.autograd.functional.jvp(layer, x, dx)
    x_own = x[own].requires_grad_()
    (gradient,) = torch.autograd.grad(ours(x_own), x_own, dy[own])
    products = mesh.data.all_reduce(np.array([(gradient * dx[own]).sum().item()]))
    assert products[0] == pytest.approx((along * dy).sum().item(), abs=1e-12)


def test_gradients_are_dropped_as_in_pytorch(mesh):
    """By zero_grad of the optimizer and of the module, after passes that no step uses."""
    module, x, y = make("convolutional")
    module.eval()
    optimizer = mpishard.torch.as_distributed(module, mesh, mpishard.SGD(lr=0.1))
    own = samples_of(mesh, 0)
    before = optimizer.parameters.flat.copy()
    loss_of(module, x, y, own).backward()
    wanted = optimizer.parameters.gradients.flat  # after the sum, in the memory that p.grad shows
    assert module[0].weight.grad.data_ptr() == wanted.ctypes.data
    optimizer.step()
    once = optimizer.parameters.flat.copy()
    for drop in (optimizer.zero_grad, module.zero_grad):
        optimizer.parameters.flat[...] = before
        with optimizer.no_sync():
            loss_of(module, x, y, own[:1]).backward()
        drop()
        loss_of(module, x, y, own).backward()
        optimizer.step()
        assert np.array_equal(optimizer.parameters.flat, once)


@pytest.mark.parametrize("zero", [0, 1])
def test_gradients_are_means_where_a_pass_leaves_some_out_or_adds_twice(mesh, comm, zero):
    """Each rank divides its gradients before they are summed, from whatever pass they are."""

    def passes(module, no_sync):
        x = torch.arange(6.0, dtype=torch.float64).reshape(2, 3).add(mesh.rank).requires_grad_()
        with no_sync():
            module["before"](x).square().sum().backward()
        again = checkpoint(module["twice"], x, use_reentrant=True)
        module["twice"](again.square()).square().sum().backward()
        return [p.grad for p in module.parameters()]

    torch.manual_seed(0)
    module = torch.nn.ModuleDict({name: torch.nn.Linear(3, 3).double() for name in ("before", "twice", "never")})
    own = passes(copy.deepcopy(module), contextlib.nullcontext)
    optimizer = mpishard.torch.as_distributed(module, mesh, mpishard.SGD(lr=0.1), zero=zero)
    for found, *each in zip(passes(module, optimizer.no_sync), *comm.allgather(own), strict=True):
        wanted = sum(torch.zeros_like(found) if gradient is None else gradient for gradient in each) / mesh.size
        torch.testing.assert_close(found, wanted, rtol=1e-14, atol=0)


@pytest.mark.parametrize("buffers", ["broadcast", "average", "local"])
def test_buffers(mesh, comm, same_on_all, buffers):
    module, x, y = make("convolutional")
    optimizer = mpishard.torch.as_distributed(module, mesh, RULE, buffers=buffers)
    alone, inputs = copy.deepcopy(module[1]), []
    module[1].register_forward_pre_hook(lambda _, given: inputs.append(given[0].detach().clone()))
    loss_of(module, x, y, samples_of(mesh, 0)).backward()
    alone(inputs[0])
    optimizer.step()
    means = np.array(comm.allgather(alone.running_mean.numpy().copy()))
    found = module[1].running_mean.numpy()
    wanted = {"broadcast": means[0], "average": means.mean(0), "local": means[mesh.rank]}[buffers]
    assert np.allclose(found, wanted, atol=1e-6)
    assert int(module[1].num_batches_tracked) == 1
    assert buffers == "local" or same_on_all(found)
    alike = module[1].running_var.fill_(1.5 + 2**-22).numpy().copy()  # the mean of three of them is another number
    optimizer.optimizer.state.consolidate()  # as each save does
    assert np.array_equal(module[1].running_var.numpy(), alike)
    module[1].running_var += mesh.rank
    optimizer.optimizer.state.consolidate()
    mean = {"broadcast": 0, "average": (mesh.size - 1) / 2, "local": mesh.rank}[buffers]
    assert np.allclose(module[1].running_var.numpy(), alike + mean, atol=1e-6)


def test_the_state_goes_to_a_file_of_pytorch(mesh, folder):
    _, x, y = make("convolutional")
    module, again = convolutional(bias=False), convolutional(bias=False)
    optimizer = mpishard.torch.as_distributed(module, mesh, RULE, zero=1)
    for step in range(4):
        if step == 2:
            saved = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
            if mesh.rank == 0:
                torch.save(saved, folder / "state.pt")
        loss_of(module, x, y, samples_of(mesh, step)).backward()
        optimizer.step()
    mesh.world.barrier()
    saved = torch.load(folder / "state.pt", weights_only=True)
    again.load_state_dict(saved["model"])
    optimizer = mpishard.torch.as_distributed(again, mesh, RULE, zero=2)
    with pytest.raises(ValueError, match="this has 'state'; .*'mpishard'"):
        optimizer.load_state_dict({"state": {}} if mesh.rank == mesh.size - 1 else saved["optimizer"])
    optimizer.load_state_dict(saved["optimizer"])
    for step in (2, 3):
        loss_of(again, x, y, samples_of(mesh, step)).backward()
        optimizer.step()
    assert_same_parameters(again, module, rtol=1e-5, atol=1e-6)
    mesh.world.barrier()


def grouped(kind, module, **options):
    groups = [
        {"params": [module[1].weight, module[3].weight]},
        {"params": [module[1].bias, module[3].bias], "lr": 0.05},
    ]
    return kind(groups, lr=0.02, **options)


TO_PYTORCH = [
    (0, torch.optim.AdamW, {"amsgrad": True}, None),
    (2, torch.optim.RAdam, {}, None),
    (0, torch.optim.Adafactor, {}, None),
    (2, torch.optim.Adafactor, {}, None),
    (1, torch.optim.SGD, {"momentum": 0.9}, None),
    (1, torch.optim.AdamW, {"weight_decay": 0.1}, mpishard.AdamW),
]


@pytest.mark.parametrize(("zero", "kind", "options", "rule"), TO_PYTORCH)
def test_the_state_comes_from_pytorch_and_goes_back(mesh, zero, kind, options, rule):
    """A run of PyTorch alone, in which ours takes some steps; its rates are those of the state."""
    x, y = images()
    alone, ours = smooth().double(), smooth().double()
    first = grouped(kind, alone, **options)

    def take(module, optimizer, own):
        optimizer.zero_grad()
        loss_of(module, x.double(), y, own).backward()
        optimizer.step()

    def order(step):
        return np.concatenate(mesh.world.allgather_object(samples_of(mesh, step)))

    for step in range(3):
        take(alone, first, order(step))
    first.param_groups[0]["lr"] = 0.01
    ours.load_state_dict(alone.state_dict())
    made = grouped(kind, ours, **options)
    if rule is not None:
        made = rule(0.02, groups=[mpishard.ParameterGroup("*.bias", lr_factor=2.5)], **options)
    optimizer = mpishard.torch.as_distributed(ours, mesh, made, zero=zero)
    optimizer.load_state_dict(first.state_dict())
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.05]
    for step in (3, 4):
        take(alone, first, order(step))
        take(ours, optimizer, samples_of(mesh, step))
    assert_same_parameters(ours, alone, atol=1e-9)
    state = optimizer.state_dict(format="torch")
    optimizer.close()
    back = grouped(kind, ours, **options)
    back.load_state_dict(state)
    for step in (5, 6):
        take(alone, first, order(step))
        take(ours, back, order(step))
    assert_same_parameters(ours, alone, atol=1e-9)


@pytest.mark.mpi(min_size=2)
def test_a_state_of_pytorch_that_does_not_fit_is_refused_on_all_ranks(mesh):
    module = smooth()
    optimizer = mpishard.torch.as_distributed(module, mesh, RULE, zero=1)
    own, state = optimizer.state_dict(), torch.optim.AdamW(module.parameters()).state_dict()
    other = torch.optim.AdamW(list(module.parameters())[:3]).state_dict()
    with pytest.raises(ValueError, match=r"\[3\] parameters, .*\[4\]"):
        optimizer.load_state_dict(other)
    with pytest.raises(ValueError, match="same state"):
        optimizer.load_state_dict(other if mesh.rank else state)
    with pytest.raises(ValueError, match="load_state_dict, but format is"):
        optimizer.load_state_dict(own if mesh.rank else state)
    with pytest.raises(ValueError, match="format='jax'"):
        optimizer.state_dict(format="jax")
    with pytest.raises(ValueError, match="arguments of state_dict, but format is"):
        optimizer.state_dict(format="mpishard" if mesh.rank else "torch")


def test_formats_and_compiled_modules(mesh):
    """channels_last, bfloat16 under autocast, and torch.compile: with the names of the plain module."""
    module, x, y = make("convolutional")
    plain = mpishard.torch.as_distributed(module, mesh, RULE)
    compiled = torch.compile(make("convolutional")[0].to(memory_format=torch.channels_last), backend="eager")
    optimizer = mpishard.torch.as_distributed(compiled, mesh, RULE)
    assert list(optimizer.parameters) == list(plain.parameters)
    own = samples_of(mesh, 0)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = loss_of(compiled, x.to(memory_format=torch.channels_last), y, own)
    rounded.backward()
    loss_of(module, x, y, own).backward()
    plain.step()
    optimizer.step()
    assert optimizer.parameters.dtype == np.float32
    assert np.allclose(optimizer.parameters.flat, plain.parameters.flat, atol=0.03)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_an_optimizer_of_pytorch_with_its_scheduler(mesh, gloo, zero):
    """Its steps, with a weight decay of a group and the rates of a scheduler, are those under DDP."""
    runs = []
    for wrap in (gloo, None):
        module, x, y = make("convolutional")
        groups = [{"params": module[number].parameters()} for number in (0, 1, 5)]
        groups[1]["weight_decay"] = 0.0
        optimizer = torch.optim.RAdam(groups, lr=1e-2, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=9)
        forward = module if wrap is None else wrap(module)
        if wrap is None:
            optimizer = mpishard.torch.as_distributed(module, mesh, optimizer, zero=zero)
        history = []
        for step in range(8):
            optimizer.zero_grad()
            loss = loss_of(forward, x, y, samples_of(mesh, step))
            loss.backward()
            optimizer.step()
            scheduler.step()
            groups[2]["lr"] = 1e-2 / (1 + step)
            history.append(loss.item())
        runs.append(history)
    assert np.allclose(*runs, atol=1e-5)


@pytest.mark.parametrize(("zero", "how"), [(0, "close"), (2, "drop"), (2, "circle")])
def test_a_module_that_was_let_go_is_trained_again(mesh, zero, how):
    """Gradual unfreezing, and then PyTorch alone: the losses are those of the whole batch in PyTorch alone."""
    ours, theirs = smooth().double(), smooth().double()
    x, y = images()
    x, optimizer = x.double(), None
    for phase, trained in enumerate([("3",), ("1", "3"), ("1",)]):
        if optimizer is not None and how == "close":
            optimizer.close()
            optimizer.close()
            with pytest.raises(ValueError, match="module was let go"):
                optimizer.step()
        if optimizer is not None and how == "circle":
            optimizer.register_step_pre_hook(lambda *_, own=optimizer: own.zero_grad)
        optimizer = None
        for module in (ours, theirs):
            for name, p in module.named_parameters():
                p.requires_grad_(name.startswith(trained))
        optimizer = mpishard.torch.as_distributed(ours, mesh, RULE, zero=zero)
        adamw = torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.01)
        for step in range(3 * phase, 3 * phase + 2):
            order = np.concatenate(mesh.world.allgather_object(samples_of(mesh, step)))
            loss = loss_of(theirs, x, y, order)
            adamw.zero_grad()
            loss.backward()
            adamw.step()
            own = loss_of(ours, x, y, samples_of(mesh, step))
            own.backward()
            optimizer.step()
            assert np.mean(mesh.world.allgather_object(own.item())) == pytest.approx(loss.item(), rel=1e-9)
    optimizer.close()
    ours.append(torch.nn.Linear(5, 5).double())  # it is a module of PyTorch alone: no hook is left, and it may change
    loss_of(ours, x, y, samples_of(mesh, 0)).backward()
    assert all(p.grad is not None for p in ours.parameters() if p.requires_grad)


def test_one_of_two_optimizers_is_closed(mesh):
    module, (x, y) = smooth(), images()
    one, other = (mpishard.torch.as_distributed(module, mesh, RULE, zero=1) for _ in range(2))
    one.close()
    before = other.parameters.flat.copy()
    loss_of(module, x, y, samples_of(mesh, 0)).backward()
    other.step()
    assert not np.array_equal(other.parameters.flat, before)


# Optimization problems of PyTorch modules, beside PyTorch on one rank.

BATCH = 16
STRATEGIES = [DDPOptimizer, ZeRO1Optimizer, ZeRO2Optimizer, ZeRO3Optimizer]


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


def losses_by_pytorch_alone(module, losses):
    """Six steps of AdamW on this rank; the module is trained."""
    adamw, history = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.01), []
    for step in range(1, 7):
        loss = losses(module, Sampler(SAMPLES, BATCH, 2).batch(step)).mean()
        adamw.zero_grad()
        loss.backward()
        adamw.step()
        history.append(loss.item())
    return np.array(history)


@pytest.fixture(scope="module")
def alone():
    return losses_by_pytorch_alone(smooth(), losses)


@pytest.mark.parametrize(
    ("strategy", "micro_batch_size"),
    [(DDPOptimizer, None), (DDPOptimizer, 2), (ZeRO2Optimizer, 2), (ZeRO3Optimizer, None), (ZeRO3Optimizer, 2)],
)
def test_a_problem_has_the_losses_of_pytorch_alone(mesh, alone, strategy, micro_batch_size):
    task = problem(smooth(), micro_batch_size=micro_batch_size, **divided(strategy, mesh))
    result = strategy(RULE, mesh).optimize(task, progress=False)
    assert np.allclose(result.loss_history, alone, atol=1e-5)


@pytest.mark.parametrize("how", ["values", "meta", "workers leave and come"])
def test_frozen_parameters_of_a_divided_problem_stay_whole(mesh, how):
    """With the values of rank 0, also on a rank that comes; losses and parameters are those of PyTorch alone."""

    def fresh():
        module = smooth().insert(3, torch.nn.Linear(8, 8)).double()
        module[3].requires_grad_(False)
        module[1].bias.requires_grad_(False)
        return module

    def losses(module, samples):
        x, y = images()
        return torch.nn.functional.cross_entropy(module(x[samples].double()), y[samples], reduction="none")

    def fill(layer):
        for name, p in layer.named_parameters(recurse=False):
            p.copy_(start[names[layer]].get_parameter(name) + mesh.rank)
        for name, buffer in layer.named_buffers(recurse=False):
            buffer.copy_(start.get_buffer(name))

    whole, start = fresh(), fresh()
    history = losses_by_pytorch_alone(whole, losses)
    with torch.device("meta" if how == "meta" else "cpu"):
        module = fresh()
    names = {layer: number for number, layer in enumerate(module)}
    for p in module.parameters() if mesh.rank else ():
        p.data.zero_()
    arguments = {"materialize": fill} if how == "meta" else {}
    task = mpishard.torch.problem(
        module, losses, SAMPLES, BATCH, steps=6, seed=2, mesh=mesh, shard_units=torch.nn.Linear, **arguments
    )
    optimizer = ZeRO3Optimizer(RULE, mesh)
    if how == "workers leave and come":
        optimizer = ElasticOptimizer(optimizer)

    def resize(state):
        if state.step in (2, 4) and how == "workers leave and come":
            optimizer.resize(1 if state.step == 2 else mesh.size)

    result = optimizer.optimize(task, callback=resize, progress=False)
    np.testing.assert_allclose(result.loss_history, history, rtol=1e-9)
    assert torch.equal(module[3].weight, whole[3].weight)  # without summon_full_parameters
    with mpishard.torch.summon_full_parameters(module):
        assert_same_parameters(module, whole)


@pytest.fixture(scope="module")
def bits_of_one_rank():
    with mpishard.Mesh(MPI.COMM_SELF) as one:
        module = smooth()
        optimizer = DDPOptimizer(RULE, ShardingConfiguration(one, reproducible=True))
        optimizer.optimize(problem(module, micro_batch_size=2), progress=False)
        return values(module)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("elastic", [False, True], ids=["fixed", "workers leave and come"])
def test_reproducible_runs_have_the_bits_of_one_rank(mesh, bits_of_one_rank, strategy, elastic):
    """The buffer, which counts this rank's forward passes, is that of rank 0 for those who come."""
    module, optimizer = smooth(), strategy(RULE, ShardingConfiguration(mesh, reproducible=True))
    if elastic:
        optimizer = ElasticOptimizer(optimizer)

    def resize(state):
        if elastic and state.step in (2, 4):
            optimizer.resize(1 if state.step == 2 else mesh.size)

    task = problem(module, micro_batch_size=2, **divided(strategy, mesh))
    optimizer.optimize(task, callback=resize, progress=False)
    assert np.array_equal(values(module), bits_of_one_rank)
    if elastic:
        seen = mesh.world.allgather_object(module.seen.tolist())
        assert len(set(map(tuple, seen))) == 1 and seen[0][0] > 6


def test_units_of_odd_sizes_have_the_bits_of_a_flat_array(mesh):
    """Products of PyTorch round by the alignment of weights."""
    words = torch.from_numpy(np.random.default_rng(0).integers(0, 9, (20, 4)))
    found = []
    for strategy in (DDPOptimizer, ZeRO3Optimizer):
        torch.manual_seed(0)
        layers = torch.nn.Embedding(9, 5), torch.nn.Flatten(), torch.nn.Linear(20, 8), torch.nn.Linear(8, 33)
        module = torch.nn.Sequential(*layers)
        units = dict(mesh=mesh, shard_units=torch.nn.Linear) if strategy is ZeRO3Optimizer else {}
        task = mpishard.torch.problem(
            module, lambda module, own: module(words[own]).square().mean(1), 20, 20, steps=4, **units
        )
        optimizer = strategy(RULE, ShardingConfiguration(mesh, reproducible=True))
        found.append(optimizer.optimize(task, progress=False).loss_history)
    assert np.array_equal(*found)


@pytest.mark.parametrize("strategy", [ZeRO2Optimizer, ZeRO3Optimizer])
def test_a_run_goes_on_with_its_buffers(mesh, folder, alone, strategy):
    for steps in (3, 6):
        module = smooth()
        task = problem(module, steps=steps, **divided(strategy, mesh))
        with Checkpoints(folder, mesh) as checkpoints:
            result = strategy(RULE, mesh).optimize(task, progress=False, checkpoints=checkpoints, resume=True)
    assert result.resumed_steps == 3
    assert np.allclose(result.loss_history, alone, atol=1e-5)
    assert module.seen.tolist() == [6.0, 6.0]
    other = smooth()
    other.register_buffer("more", torch.zeros(3))
    optimizer = mpishard.torch.as_distributed(other, mesh, RULE)
    with pytest.raises(ValueError, match="buffer 'more' has 3 float32"):
        optimizer.load_checkpoint(folder)


def test_all_ranks_evaluate_samples_where_they_wait_for_each_other(mesh):
    """Also those for which none are left; each sample counts once."""

    def evaluated(mesh):
        module, sizes = smooth(), []

        def validation(parameters, samples):
            sizes.append(len(samples))
            with torch.no_grad():
                return losses(module, samples).sum()

        task = problem(module, steps=2, **divided(ZeRO3Optimizer, mesh))
        evaluate = mpishard.Evaluation(validation, 1, every=1)
        result = ZeRO3Optimizer(RULE, mesh).optimize(task, progress=False, evaluate=evaluate)
        assert sizes == [1, 1]
        return result.validation_losses

    with mpishard.Mesh(MPI.COMM_SELF) as one:
        expected = evaluated(one)
    assert np.allclose(evaluated(mesh), expected, atol=1e-5)


def everything(mesh, strategy, steps, folder=None):
    """Parameters, their average, and losses of a run that is evaluated and stops early, and the result."""
    module = smooth()
    groups = [mpishard.ParameterGroup("*.bias", weight_decay=0, lr_factor=0.5)]
    rule = mpishard.torch.rule_of(torch.optim.RAdam, 1e-2, weight_decay=0.1, groups=groups, ema_decay=0.5)
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
    found = [result.loss_history, result.validation_losses, values(module)]
    with optimizer.averaged_parameters():
        found.append(values(module))
    return [each.tobytes() for each in found], result


def test_what_happens_while_training_has_the_same_bits_under_another_strategy(mesh, folder):
    with mpishard.Mesh(MPI.COMM_SELF) as one:
        expected, alone = everything(one, DDPOptimizer, 9)
    for steps, strategy in ((3, DDPOptimizer), (9, ZeRO2Optimizer)):
        found, result = everything(mesh, strategy, steps, folder)
    assert found == expected
    assert (result.steps, result.stop_reason) == (alone.steps, alone.stop_reason) == (6, "patience")
    mesh.world.barrier()
    best = alone.validation_steps[np.argmin(alone.validation_losses)]
    assert (folder / "best").resolve().name == f"step-{best:08d}"


def test_a_module_stays_divided_between_two_problems(mesh, alone):
    module, optimizer = smooth(), ZeRO3Optimizer(RULE, mesh)
    for first in (0, 3):
        task = problem(module, steps=3, **divided(ZeRO3Optimizer, mesh))
        result = optimizer.optimize(task, progress=False)
        assert np.allclose(result.loss_history, alone[first : first + 3], atol=1e-5)
    with pytest.raises(ValueError, match="into the units .*shard_units"):
        problem(module, mesh=mesh, shard_units="auto")
    with pytest.raises(ValueError, match="trains this module.*summon_full_parameters"):
        problem(module)


def test_what_divides_a_problem_is_checked(mesh):
    for arguments in ({"plan": {}}, {"shard_units": "auto"}, {"mesh": mesh, "materialize": print}):
        with pytest.raises(ValueError, match="give mesh with them, and shard_units"):
            problem(smooth(), **arguments)
    with pytest.raises(TypeError, match="mesh=3"):
        problem(smooth(), mesh=3, shard_units="auto")
    if mesh.size > 1:
        with pytest.raises(ValueError, match="shard_units"):
            units = torch.nn.Linear if mesh.rank else "auto"
            problem(torch.nn.Sequential(torch.nn.Linear(3, 3)), mesh=mesh, shard_units=units)
    module = smooth()
    optimizer = mpishard.torch.as_distributed(module, mesh, RULE, zero=3)
    with pytest.raises(ValueError, match="trains this module.*close"):
        problem(module)
    optimizer.close()
    problem(module)


# Modules, ways to take steps, stages of ZeRO: each step is that of one process, or refused on all ranks.

STEPS = 2
# Under zero=2 and 3 gradients leave in the backward pass: PyTorch cannot look at them, a second pass needs `no_sync`.
REFUSED = {
    "clipped by torch": "p.grad .*optimizer.clip_grad_norm_",
    "gan": "second backward pass .*optimizer.no_sync",
    "scaler": "p.grad .*loss_scale='dynamic', .*optimizer.scale",
}
alone_of_zoo = functools.cache(torch_zoo.train)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("name", torch_zoo.MODULES)
@pytest.mark.pairs(14)
@pytest.mark.quick
def test_steps_are_those_of_one_process_with_the_whole_batch(shared_mesh, capsys, name, zero):
    for way in torch_zoo.WAYS if name != "compiled" else ["plain"]:  # compiling takes seconds
        if (name, way) == ("complex", "scaler"):  # PyTorch unscales no complex gradients
            continue
        # A bucket with a parameter that nothing uses waits for the step, under zero=3 for the end of the pass only.
        if zero >= 2 and way in REFUSED and (name, way, zero) != ("unused", "gan", 2):
            with pytest.raises(RuntimeError, match=REFUSED[way]):
                torch_zoo.train(name, way, STEPS, shared_mesh, zero)
            continue
        norms, values = alone_of_zoo(name, way, STEPS)
        capsys.readouterr()
        own_norms, own_values = torch_zoo.train(name, way, STEPS, shared_mesh, zero)
        sums_twice = "a second backward pass" in capsys.readouterr().err
        assert sums_twice == (way == "gan" and zero < 2), way
        assert own_norms == pytest.approx(norms, rel=1e-9), way
        message = f"{way}: {{}}".format
        torch.testing.assert_close(own_values, values, rtol=1e-9, atol=1e-11, msg=message)


# FSDP2 takes parameters of one dtype alone; and compiling takes seconds.
@pytest.mark.parametrize("name", [name for name in torch_zoo.MODULES if name not in ("complex", "compiled")])
def test_steps_and_norms_are_those_of_fsdp2(mesh, gloo, name):
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("this PyTorch has no FSDP2")
    theirs = torch_zoo.make(name)
    fsdp.fully_shard(theirs, mesh=torch.distributed.init_device_mesh("cpu", (mesh.size,)))
    sgd = torch.optim.SGD([p for p in theirs.parameters() if p.requires_grad], lr=0.5, momentum=0.9)
    found = []
    for step, max_norm in enumerate(torch_zoo.MAX_NORMS):
        sgd.zero_grad()
        for number in range(1 + step):
            own_loss(mesh, theirs, name, step + number).backward()
        found.append(torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm).full_tensor())
        sgd.step()
    wanted = {name: p.full_tensor().detach() for name, p in theirs.named_parameters()}
    for zero in (2, 3):
        module = torch_zoo.make(name)
        units = {"shard_units": torch_zoo.is_unit} if zero == 3 else {}
        optimizer = mpishard.torch.as_distributed(module, mesh, mpishard.SGD(lr=0.5, momentum=0.9), zero=zero, **units)
        for step, max_norm in enumerate(torch_zoo.MAX_NORMS):
            for number in range(1 + step):
                with optimizer.no_sync() if number < step else contextlib.nullcontext():
                    own_loss(mesh, module, name, step + number).backward()
            torch.testing.assert_close(optimizer.clip_grad_norm_(max_norm), found[step], rtol=1e-9, atol=0)
            for given, error in (
                ((max_norm, 1), "norm_type=1"),
                ((None,), "max_norm=None"),
                ((-1.0,), "max_norm=-1.0"),
            ):
                with pytest.raises((TypeError, ValueError), match=error):
                    optimizer.clip_grad_norm_(*given)
            optimizer.step()
        optimizer.close()
        own = {name: p.detach() for name, p in module.named_parameters()}
        torch.testing.assert_close(own, wanted, rtol=1e-9, atol=1e-12)
