"""Loops of PyTorch: schedulers, hooks, closures, and uneven numbers of batches."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest

import mpishard
from mpishard import LocalSGDOptimizer, ParameterGroup, ShardingConfiguration

torch = pytest.importorskip("torch")
import torch_passes  # noqa: E402
from torch.optim import lr_scheduler  # noqa: E402
from torch_models import (  # noqa: E402
    RULE,
    assert_same_parameters,
    images,
    loss_of,
    make,
    pytorch_ranks,
    samples_of,
    smooth,
)

# What is made for optimizers of PyTorch takes that of mpishard: schedulers, hooks, closures; beside PyTorch alone.

STEPS = 8


def sequential(optimizer):
    parts = [lr_scheduler.LinearLR(optimizer, 0.25, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, 5)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])


SCHEDULERS = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.2, factor=0.3),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: step / 4),
    "sequential": sequential,
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3),
}
ADAMAX = {"lr": 0.02, "eps": 1e-6}
RULES = {
    "adamw": (mpishard.AdamW(lr=0.02, weight_decay=0.1), torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.1}),
    "sgd": (mpishard.SGD(lr=0.2, momentum=0.9), torch.optim.SGD, {"lr": 0.2, "momentum": 0.9}),
    "rule_of": (mpishard.torch.rule_of(torch.optim.Adamax, **ADAMAX), torch.optim.Adamax, ADAMAX),
}


def advance(scheduler, loss):
    scheduler.step(*[round(loss, 6)] * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))


def doubles():
    return smooth().double()


def backward(mesh, module, step):
    x, y = images()
    loss = loss_of(module, x.to(next(module.parameters()).dtype), y, samples_of(mesh, step))
    loss.backward()
    return loss


def alone(mesh, make_optimizer, make_scheduler, steps=STEPS, module=None):
    """The losses and rates of PyTorch alone, which has the samples of all ranks."""
    module, (x, y), history = module or doubles(), images(), []
    optimizer = make_optimizer(module)
    scheduler = make_scheduler(optimizer)
    for step in range(steps):
        order = np.concatenate(mesh.world.allgather_object(samples_of(mesh, step)))
        optimizer.zero_grad()
        loss = loss_of(module, x.double(), y, order)
        loss.backward()
        optimizer.step()
        history.append([loss.item(), *(group["lr"] for group in optimizer.param_groups)])
        advance(scheduler, loss.item())
    return np.array(history)


def take_steps(mesh, module, optimizer, scheduler, steps):
    """Ours; the scheduler gets the mean of the ranks' losses."""
    history = []
    for step in steps:
        optimizer.zero_grad()
        loss = backward(mesh, module, step)
        optimizer.step()
        mean = float(np.mean(mesh.world.allgather_object(loss.item())))
        history.append([mean, *(group["lr"] for group in optimizer.param_groups)])
        advance(scheduler, mean)
    return history


# Of each kind one; those that cycle a momentum find it in `betas` or `momentum`.
PAIRS = [*zip(SCHEDULERS, itertools.cycle(RULES), strict=False), ("one cycle", "adamw"), ("cyclic", "sgd")]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("name", "rule"), PAIRS)
def test_schedulers_of_pytorch_take_our_optimizer(mesh, name, rule):
    """Made for a rule, and for an optimizer of PyTorch: rates and losses of PyTorch alone."""
    ours, kind, options = RULES[rule]
    wanted = alone(mesh, lambda module: kind(module.parameters(), **options), SCHEDULERS[name])
    for number, given in enumerate([ours, lambda module: kind(module.parameters(), **options)]):
        module = doubles()
        made = given(module) if number else given
        optimizer = mpishard.torch.as_distributed(module, mesh, made, zero=(len(name) + number) % 3)
        assert isinstance(optimizer, torch.optim.Optimizer)
        scheduler = SCHEDULERS[name](optimizer)
        np.testing.assert_allclose(take_steps(mesh, module, optimizer, scheduler, range(STEPS)), wanted, rtol=1e-9)
    assert ours == RULES[rule][0] and ours.lr == options["lr"]  # the rule that was given is as it was


@pytest.mark.parametrize("zero", [0, 2])
def test_each_group_of_a_rule_has_its_own_schedule(mesh, zero):
    def grouped(module):
        groups = [{"params": [module[1].weight, module[3].weight]}]
        groups += [{"params": [module[1].bias, module[3].bias], "weight_decay": 0.0, "lr": 0.005}]
        return torch.optim.AdamW(groups, lr=0.02, weight_decay=0.1)

    def schedule(optimizer):
        return lr_scheduler.LambdaLR(optimizer, [lambda step: step / 4, lambda step: 0.5**step])

    module = doubles()
    rule = mpishard.AdamW(0.02, weight_decay=0.1, groups=[ParameterGroup("*.bias", weight_decay=0, lr_factor=0.25)])
    optimizer = mpishard.torch.as_distributed(module, mesh, rule, zero=zero)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2]
    found = take_steps(mesh, module, optimizer, schedule(optimizer), range(STEPS))
    np.testing.assert_allclose(found, alone(mesh, grouped, schedule), rtol=1e-9, atol=1e-15)


def adafactor(module):
    groups = [{"params": [module[1].weight, module[3].weight], "d": 2.0}]
    groups += [{"params": [module[1].bias, module[3].bias], "weight_decay": 0.0, "lr": 0.05}]
    return torch.optim.Adafactor(groups, lr=0.2, weight_decay=0.1)


class Counting(torch.optim.Optimizer):
    """Averages of its points by weights that it keeps in its groups, with the rates so far, as without a schedule."""

    def __init__(self, params, lr=0.1, k=0):
        super().__init__(params, {"lr": lr, "k": k, "weights": 0.0, "largest": torch.tensor(0.0), "phase": "first"})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["k"] += 1
            group["phase"] = "first" if group["k"] < 3 else "then"
            group["largest"] = torch.clamp(group["largest"], min=group["lr"])
            weight = group["largest"].item() ** 2 * group["k"]
            group["weights"] += weight
            device = group["params"][0].device  # as some do, of groups that are never empty
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["z"] = p.to(device, copy=True)
                state["z"] -= group["lr"] * p.grad * (2 if group["phase"] == "then" else 1)
                p.lerp_(state["z"], weight / group["weights"])


def counting(module):
    return grouped(Counting, module)


def grouped(kind, module):
    """Two groups, of which ranks may have elements of one alone."""
    rest = [p for p in module.parameters() if p is not module[3].bias]
    return kind([{"params": rest}, {"params": [module[3].bias], "lr": 0.05, "k": 3}], lr=0.2)


@pytest.mark.parametrize(
    ("zero", "theirs", "ours"),
    [
        (0, adafactor, adafactor),
        (
            1,
            lambda module: torch.optim.NAdam(module.parameters()),
            lambda _: mpishard.torch.rule_of(torch.optim.NAdam, 2e-3),
        ),
        (2, adafactor, adafactor),
        (3, adafactor, adafactor),
        *((zero, counting, counting) for zero in range(4)),
    ],
)
def test_divided_steps_are_those_of_pytorch_and_continue_under_another_stage(mesh, folder, zero, theirs, ours):
    """Of whole tensors, each on one rank, or of elements with counters; with groups and a scheduler."""
    whole, found, saved = doubles(), [], None
    wanted = alone(mesh, theirs, SCHEDULERS["cosine"], module=whole)
    for number, steps in enumerate((range(3), range(3, STEPS))):
        module = doubles()
        units = {"shard_units": torch.nn.Linear} if (zero + number) % 4 == 3 else {}
        optimizer = mpishard.torch.as_distributed(module, mesh, ours(module), zero=(zero + number) % 4, **units)
        scheduler = SCHEDULERS["cosine"](optimizer)
        if number:
            optimizer.load_checkpoint(folder)
            scheduler.load_state_dict(saved)
        found += take_steps(mesh, module, optimizer, scheduler, steps)
        optimizer.save_checkpoint(folder)
        saved = scheduler.state_dict()
    np.testing.assert_allclose(found, wanted, rtol=1e-9)
    optimizer.close()
    assert_same_parameters(module, whole)
    mesh.world.barrier()


class Growing(torch.optim.Optimizer):
    """Keeps numbers of all gradients in its groups, and of a tensor more than arrays of its shape."""

    def __init__(self, params, lr=0.1, most=0.2):
        super().__init__(params, {"lr": lr, "most": most, "d": 1e-2, "k": 0, "means": torch.zeros(2)})

    @torch.no_grad()
    def step(self):
        norm = torch.stack([p.grad.norm() for group in self.param_groups for p in group["params"]]).norm().item()
        for group in self.param_groups:
            group["k"] += 1
            group["d"] = max(group["d"], norm / (10 + group["k"]))
            group["means"] = 0.9 * group["means"] + norm
            rate = group["lr"] * min(1.0, group["most"] / norm) * (1 + group["d"] + group["means"][1].item())
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(start=p.clone(), count=0, largest=p.grad.abs().max(), signs=p.grad > 0)
                state["count"] += 1
                state["largest"] = torch.maximum(state["largest"], p.grad.abs().max())
                factor = 1 + state["largest"] / state["count"] + 0.1 * (state["signs"] == (p.grad > 0))
                p -= rate * factor * (p.grad + 0.01 * (p - state["start"]))


class Normed(torch.optim.Optimizer):
    """Divides by the norm of all gradients, and keeps nothing."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        pairs = [(p, group["lr"]) for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p, _ in pairs]).norm()
        for p, rate in pairs:
            p -= rate * p.grad / norm


@pytest.mark.parametrize("kind", [Growing, Normed])
@pytest.mark.parametrize("how", ["state_dict", "checkpoint"])
def test_an_optimizer_that_looks_at_all_tensors_steps_as_in_pytorch(mesh, folder, how, kind):
    """Where each rank has all of them; and it goes on from its files."""
    whole, found, saved = doubles(), [], {}
    wanted = alone(mesh, lambda module: kind(module.parameters()), SCHEDULERS["cosine"], module=whole)
    for steps in (range(3), range(3, STEPS)):
        module = doubles()
        optimizer = mpishard.torch.as_distributed(module, mesh, kind(module.parameters()))
        scheduler = SCHEDULERS["cosine"](optimizer)
        if steps.start:
            module.load_state_dict(saved["module"])
            scheduler.load_state_dict(saved["scheduler"])
            if how == "checkpoint":
                optimizer.load_checkpoint(folder)
            else:
                optimizer.load_state_dict(saved["optimizer"])
        found += take_steps(mesh, module, optimizer, scheduler, steps)
        if how == "checkpoint":
            optimizer.save_checkpoint(folder)
        saved = {"module": module, "scheduler": scheduler, "optimizer": optimizer}
        saved = {name: each.state_dict() for name, each in saved.items()}
    np.testing.assert_allclose(found, wanted, rtol=1e-9)
    optimizer.close()
    assert_same_parameters(module, whole)
    mesh.world.barrier()


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_numbers_in_groups_are_those_of_pytorch(mesh, zero):
    """On all ranks, also of a group of which a rank has no element; and they come back from a state."""
    whole, module = doubles(), doubles()
    first, theirs = counting(whole), counting(module)
    optimizer = mpishard.torch.as_distributed(module, mesh, theirs, zero=zero)
    for _ in range(3):
        whole.zero_grad()
        backward(mesh, whole, 0)
        first.step()
        backward(mesh, module, 0)
        optimizer.step()
    numbers = [{name: value for name, value in group.items() if name != "params"} for group in first.param_groups]
    assert [{**group, **each} for group, each in zip(theirs.param_groups, numbers, strict=True)] == theirs.param_groups
    assert [(group["k"], group["phase"]) for group in theirs.param_groups] == [(3, "then"), (6, "then")]
    state = optimizer.state_dict()
    optimizer.close()
    again = counting(module)
    optimizer = mpishard.torch.as_distributed(module, mesh, again, zero=(zero + 1) % 4)
    optimizer.load_state_dict(state)
    assert [{**group, **each} for group, each in zip(again.param_groups, numbers, strict=True)] == again.param_groups


class Late(Counting):
    """Which counts the large gradients that no probe has."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["k"] += sum((p.grad.abs() > 1e9).any().item() for p in group["params"])
        super().step()


@pytest.mark.mpi(min_size=2)
def test_numbers_that_depend_on_gradients_are_found_by_the_next_step(mesh):
    module = doubles()
    optimizer = mpishard.torch.as_distributed(module, mesh, Late(module.parameters()), zero=1)
    (1e12 * module[3].bias[0] + 0 * sum(p.sum() for p in module.parameters())).backward()
    optimizer.step()
    before = optimizer.parameters.flat.copy()
    backward(mesh, module, 0)
    with pytest.raises(ValueError, match=r"k of param_groups\[0\]"):
        optimizer.step()
    assert np.array_equal(optimizer.parameters.flat, before)


def test_workers_that_skip_steps_alone_take_no_optimizer_that_counts(mesh):
    module, config = doubles(), mpishard.ShardingConfiguration(mesh, sync_every=2)
    with pytest.raises(ValueError, match="sync_every=2"):
        mpishard.torch.as_distributed(module, config, counting(module))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_an_optimizer_that_looks_at_all_tensors_is_not_divided(mesh, zero):
    module = doubles()
    with pytest.raises(ValueError, match="Growing .*'d'.*zero=0"):
        mpishard.torch.as_distributed(module, mesh, Growing(module.parameters()), zero=zero)


@pytest.mark.parametrize(
    ("dtype", "kind"), [(torch.bfloat16, torch.optim.AdamW), (torch.complex128, torch.optim.RAdam)]
)
def test_an_optimizer_steps_masters_of_other_dtypes_itself(mesh, dtype, kind):
    """And continues under another stage, which divides its state."""
    flats = []
    for zero in (0, 2):
        torch.manual_seed(3)
        module = torch.nn.Linear(4, 3, dtype=dtype)
        optimizer = mpishard.torch.as_distributed(module, mesh, kind(module.parameters(), lr=0.02), zero=zero)
        for step in range(4):
            if step == 2:
                state, values = optimizer.state_dict(), module.state_dict()
                optimizer.close()
                module = torch.nn.Linear(4, 3, dtype=dtype)
                module.load_state_dict(values)
                made = kind(module.parameters(), lr=0.02)
                optimizer = mpishard.torch.as_distributed(module, mesh, made, zero=2 - zero)
                optimizer.load_state_dict(state)
            module(torch.ones(2, 4, dtype=dtype)).abs().float().square().sum().backward()
            optimizer.step()
        flats.append(optimizer.parameters.flat.copy())
    np.testing.assert_allclose(*flats, rtol=1e-6)


@pytest.mark.parametrize("zero", [1, 2])
def test_an_error_in_the_step_of_one_tensor_is_raised_on_all_ranks(mesh, zero):
    """The parameters are as before then, and training may continue."""
    fails = False

    class Fails(torch.optim.Adafactor):
        def step(self, closure=None):
            if fails and self.param_groups[0]["params"][0].shape == (5,):
                raise ValueError("no step of this tensor")
            return super().step(closure)

    module = doubles()
    optimizer = mpishard.torch.as_distributed(module, mesh, Fails(module.parameters()), zero=zero)
    for fails in (False, True, False):
        before = optimizer.parameters.flat.copy()
        backward(mesh, module, 0)
        with pytest.raises(ValueError, match="no step of this tensor") if fails else contextlib.nullcontext():
            optimizer.step()
        assert np.array_equal(optimizer.parameters.flat, before) == fails
        optimizer.zero_grad()


@pytest.mark.parametrize("how", ["state_dict", "checkpoint"])
@pytest.mark.parametrize("scheduler", ["one cycle", "step"])
def test_a_run_with_a_scheduler_continues(mesh, folder, how, scheduler):
    """From its files: the rates and losses of a run without a break."""
    rule, kind, options = RULES["sgd"]
    wanted = alone(mesh, lambda module: kind(module.parameters(), **options), SCHEDULERS[scheduler])
    module, again = doubles(), doubles()
    optimizer = mpishard.torch.as_distributed(module, mesh, rule, zero=1)
    first = SCHEDULERS[scheduler](optimizer)
    take_steps(mesh, module, optimizer, first, range(3))
    saved = module.state_dict(), optimizer.state_dict(), first.state_dict()
    if how == "checkpoint":
        optimizer.save_checkpoint(folder)
    optimizer = mpishard.torch.as_distributed(again, mesh, mpishard.SGD(lr=0.7, momentum=0.9))
    second = SCHEDULERS[scheduler](optimizer)
    if how == "checkpoint":
        optimizer.load_checkpoint(folder)
    else:
        again.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    second.load_state_dict(saved[2])
    found = take_steps(mesh, again, optimizer, second, range(3, STEPS))
    np.testing.assert_allclose(found, wanted[3:], rtol=1e-9)
    mesh.world.barrier()


def test_a_rule_that_nothing_has_changed_keeps_what_it_was_given(mesh):
    module = doubles()
    optimizer = mpishard.torch.as_distributed(module, mesh, mpishard.SGD(lr=0.25))
    backward(mesh, module, 0)
    optimizer.step()
    state = optimizer.state_dict()
    optimizer = mpishard.torch.as_distributed(module, mesh, mpishard.SGD(lr=0.5))
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.5
    optimizer.param_groups[0]["lr"] = 0.125
    backward(mesh, module, 0)
    before, gradient = optimizer.parameters.flat.copy(), optimizer.parameters.gradients.flat.copy()
    optimizer.step()
    np.testing.assert_allclose(optimizer.parameters.flat, before - 0.125 * gradient, rtol=1e-12)
    optimizer.optimizer.rule = mpishard.SGD(lr=1.0)  # a setter of mpishard: the groups follow
    backward(mesh, module, 0)
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 1.0 and optimizer.optimizer.rule.lr == 1.0


SCHEDULED = mpishard.SGD(lr=lambda step: 1 / step)


@pytest.mark.parametrize(
    ("rule", "change", "message"),
    [
        (mpishard.SGD(lr=0.1), {"lr": -1.0}, r"param_groups\[0\]: SGD: lr=-1.0"),
        (mpishard.SGD(lr=0.1), {"momentum": 0.9}, r"\[0\] of the SGD .*momentum_buffer"),
        (mpishard.SGD(lr=0.1), {"weight_decay": "much"}, r"param_groups\[0\]: SGD: weight_decay='much'"),
        (SCHEDULED, {"lr": 0.125}, "0.125, but the SGD has a schedule"),
    ],
)
def test_values_that_a_rule_cannot_have_are_refused_on_all_ranks(mesh, rule, change, message):
    """A schedule of a rule is shown, and cannot be set."""
    module = doubles()
    optimizer = mpishard.torch.as_distributed(module, mesh, rule, zero=1)
    for step in range(1, 4):
        backward(mesh, module, 0)
        optimizer.step()
        assert optimizer.param_groups[0]["lr"] == (1 / step if rule is SCHEDULED else 0.1)
    before = optimizer.parameters.flat.copy()
    backward(mesh, module, 0)
    was = {name: optimizer.param_groups[0][name] for name in change}
    if mesh.rank == mesh.size - 1:
        optimizer.param_groups[0].update(change)
    with pytest.raises((TypeError, ValueError), match=message):
        optimizer.step()
    assert np.array_equal(optimizer.parameters.flat, before)
    optimizer.param_groups[0].update(was)
    optimizer.step()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("given", "name", "other"),
    [(mpishard.AdamW, "lr", 0.25), (mpishard.AdamW, "betas", (0.5, 0.9)), (torch.optim.SGD, "lr", 0.25)],
)
def test_values_of_one_rank_are_refused_on_all(mesh, given, name, other):
    """As that of a scheduler that looks at the rank's own loss."""
    module = doubles()
    rule = given(*[module.parameters()] * (given is torch.optim.SGD), lr=0.5)
    optimizer = mpishard.torch.as_distributed(module, mesh, rule, zero=1)
    backward(mesh, module, 0)
    optimizer.step()
    before = optimizer.parameters.flat.copy()
    backward(mesh, module, 1)
    if mesh.rank == 0:
        optimizer.param_groups[0][name] = other
    shown = str(other).replace("(", r"\(").replace(")", r"\)")
    way_out = "value of param_groups"
    with pytest.raises(ValueError, match=rf"{name} of param_groups\[0\] is {shown} on rank 0, [^;]*: .*{way_out}"):
        optimizer.step()
    assert np.array_equal(optimizer.parameters.flat, before)


def test_closures_and_hooks(mesh):
    """Those of an optimizer of PyTorch, in its order."""
    module, seen = doubles(), []
    optimizer = mpishard.torch.as_distributed(module, mesh, mpishard.SGD(lr=0.1))
    optimizer.register_step_pre_hook(lambda which, args, kwargs: seen.append(("before", which is optimizer)))
    optimizer.register_step_post_hook(lambda which, args, kwargs: seen.append(("after", which is optimizer)))
    optimizer.register_state_dict_pre_hook(lambda which: seen.append("saving"))
    optimizer.register_state_dict_post_hook(lambda which, state: {**state, "more": 7})
    optimizer.register_load_state_dict_pre_hook(lambda which, state: seen.append(state.pop("more")))
    optimizer.register_load_state_dict_post_hook(lambda which: seen.append("loaded"))

    def closure():
        seen.append("closure")
        optimizer.zero_grad(set_to_none=False)
        return backward(mesh, module, 0)

    with torch.no_grad():
        losses = [optimizer.step(closure).item(), optimizer.step(closure=closure).item()]
    assert losses[1] < losses[0]
    assert seen == 2 * [("before", True), "closure", ("after", True)]
    state = optimizer.state_dict()
    assert state["more"] == 7
    optimizer.load_state_dict(state)
    assert seen[6:] == ["saving", 7, "loaded"] and state["more"] == 7


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_overlap_changes_no_bit(mesh, zero):
    flats = []
    for overlap in (True, False):
        module = doubles()
        config = mpishard.ShardingConfiguration(mesh, overlap_communication=overlap, minimum_parameter_group_size=10)
        optimizer = mpishard.torch.as_distributed(module, config, RULE, zero=zero)
        for step in range(3):
            backward(mesh, module, step)
            optimizer.step()
        optimizer.close()
        flats.append(np.concatenate([p.detach().numpy().ravel() for p in module.parameters()]))
    assert np.array_equal(*flats)
    optimizer = mpishard.torch.as_distributed(doubles(), mesh, RULE, zero=zero)
    assert not optimizer.optimizer.config.overlap_communication


@pytest.mark.parametrize("given", ["rule", "torch"])
def test_finding_a_learning_rate_leaves_no_trace(mesh, given):
    """As tools do that save the state before the first step, raise the rate until the loss grows, and load it again."""
    runs = []
    for finds in (True, False):
        module = doubles()
        rule = RULES["sgd"][0] if given == "rule" else torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.9)
        optimizer = mpishard.torch.as_distributed(module, mesh, rule)
        if finds:
            saved = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
            for group in optimizer.param_groups:
                group["lr"] = 1e-4
            take_steps(mesh, module, optimizer, lr_scheduler.ExponentialLR(optimizer, 3.0), range(4))
            module.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        runs.append(take_steps(mesh, module, optimizer, lr_scheduler.ConstantLR(optimizer, 1.0), range(3)))
    assert runs[0] == runs[1] and runs[0][0][1] == 0.2


@pytest.mark.parametrize("kind", ["lamb", "average", "local"])
def test_rates_that_are_set_are_those_of_a_schedule(mesh, same_on_all, kind):
    """Where a step looks at whole tensors, keeps an average of the parameters, or is taken by workers."""
    runs = []
    for lr in (0.02, lambda step: 0.02 * 0.5 ** (step - 1)):
        rule = mpishard.LAMB(lr) if kind == "lamb" else mpishard.AdamW(lr, ema_decay=0.9 if kind == "average" else None)
        if kind == "local":
            rule = LocalSGDOptimizer(rule, ShardingConfiguration(mesh), sync_every=2)
        module = doubles()
        optimizer = mpishard.torch.as_distributed(module, mesh, rule, zero=0 if kind == "local" else 1)
        sets = lr_scheduler.ExponentialLR(optimizer, 0.5) if lr == 0.02 else None
        for step in range(4):
            backward(mesh, module, step)
            optimizer.step()
            assert optimizer.param_groups[0]["lr"] == 0.02 * 0.5**step
            if sets is not None:
                sets.step()
        optimizer.optimizer.synchronize_optimizer_state()
        assert same_on_all(optimizer.parameters.flat)
        runs.append(optimizer.parameters.flat.copy())
    assert np.array_equal(*runs)


# Passes, drops and steps in any order.


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.quick
def test_loops_of_passes_and_drops_have_the_gradients_of_ddp(shared_mesh, zero):
    """`tests/soak/torch_passes_run.py` takes more of them."""
    for seed in range(6):
        assert torch_passes.largest_difference(shared_mesh, seed, zero) < 1e-10, f"seed {seed}"


@pytest.mark.parametrize("zero", [0, 2])
def test_gradients_by_themselves_leave_those_of_the_loop(mesh, zero):
    """Those of torch.autograd.grad are as without ranks, and a drop before them counts."""
    torch.manual_seed(0)
    module = torch.nn.Linear(4, 3).double()
    optimizer = mpishard.torch.as_distributed(module, mesh, mpishard.SGD(lr=1.0), zero=zero)
    x, parameters = torch.arange(8.0).double().reshape(2, 4), list(module.parameters())

    def asks(factor):
        return torch.autograd.grad(factor * module(x).sum(), parameters)[1]

    before = module.bias.detach().clone()
    with optimizer.no_sync():
        (5 * module(x).sum()).backward()
    assert asks(3).tolist() == [6.0] * 3
    module.zero_grad()
    module(x).sum().backward()
    assert asks(3).tolist() == [6.0] * 3
    if zero == 0:
        torch.testing.assert_close(module.bias.grad, torch.full((3,), 2.0).double())
    optimizer.step()
    torch.testing.assert_close(module.bias.detach(), before - 2)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_rank_without_a_pass_is_refused_unless_a_count_divides(mesh, zero):
    last = mesh.size - 1
    for count in (None, 4):
        module = doubles()
        optimizer = mpishard.torch.as_distributed(module, mesh, mpishard.SGD(lr=0.1), zero=zero)
        before = optimizer.parameters.flat.copy()
        if mesh.rank != last:
            backward(mesh, module, 0)
        message = rf"backward pass is made on ranks? .*, not made on rank {last}: .*mpishard.torch.join"
        for _ in range(2 if count is None else 1):  # the second time, too
            with pytest.raises(ValueError, match=message) if count is None else contextlib.nullcontext():
                optimizer.step(count=count)
        assert np.array_equal(optimizer.parameters.flat, before) == (count is None)
        optimizer.zero_grad()
        backward(mesh, module, 0)
        optimizer.step()


@pytest.mark.mpi(min_size=2)
def test_a_count_that_ranks_have_summed_divides_as_a_number(mesh):
    """A number of NumPy or PyTorch, also where a rank has run out and takes that of the others."""
    found = []
    for count in (4, np.int64(4), torch.tensor(4)):
        module = doubles()
        optimizer = mpishard.torch.as_distributed(module, mesh, mpishard.SGD(lr=0.1))
        with mpishard.torch.join(optimizer):
            for step in range(2 - (mesh.rank == 0)):
                backward(mesh, module, step)
                optimizer.step(count=count)
        found.append(optimizer.parameters.flat.copy())
    assert np.array_equal(found, [found[0]] * 3)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_ranks_cut_batches_of_other_sizes_into_equally_many_micro_batches(mesh, zero):
    """Where they meet in each pass: two samples make no three micro-batches."""
    module, whole, (x, y) = doubles(), doubles(), images()
    optimizer = mpishard.torch.as_distributed(module, mesh, mpishard.SGD(lr=0.1), zero=zero, microbatches=3)

    def function(module, x, y):
        return torch.nn.functional.cross_entropy(module(x), y)

    batches = [(x[: 2 + rank].double(), y[: 2 + rank]) for rank in range(mesh.size)]
    losses = [function(whole, *batch) for batch in batches]
    (sum(losses) / mesh.size).backward()
    torch.optim.SGD(whole.parameters(), lr=0.1).step()
    for loss_of_batch in (optimizer.loss, optimizer.loss_and_gradient):
        found = loss_of_batch(function, *batches[mesh.rank])
        assert found == pytest.approx(losses[mesh.rank].item(), rel=1e-12)
    optimizer.step()
    optimizer.close()
    assert_same_parameters(module, whole)


@pytest.mark.parametrize("zero", [2, 3])
def test_passes_that_are_summed_one_by_one_are_refused_with_sums_in_one_order(mesh, zero):
    config = ShardingConfiguration(mesh, reproducible=True)
    optimizer = mpishard.torch.as_distributed(doubles(), config, mpishard.SGD(lr=0.1), zero=zero)
    with pytest.raises(ValueError, match="reproducible=True .*zero=0 or 1"):
        optimizer.no_sync()


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_steps_that_only_add_come_to_one_along_their_mean(mesh, zero):
    """With auto_sync_gradients=False, beside passes within no_sync."""
    found = []
    for auto in (True, False):
        module, config = doubles(), ShardingConfiguration(mesh, auto_sync_gradients=auto)
        optimizer = mpishard.torch.as_distributed(module, config, mpishard.SGD(lr=0.1), zero=zero)
        for step in range(2):
            with optimizer.no_sync() if auto and step == 0 else contextlib.nullcontext():
                backward(mesh, module, step)
            if not auto:
                optimizer.step()
        if auto:
            optimizer.step(count=2 * mesh.size)
        else:
            with pytest.raises(ValueError, match="auto_sync_gradients=False .*max_gradient_norm"):
                optimizer.clip_grad_norm_(1.0)
            optimizer.optimizer.synchronize_optimizer_state()
        found.append(optimizer.parameters.gather())
    np.testing.assert_allclose(*found, rtol=0, atol=1e-12)


@pytest.mark.mpi(min_size=2)
def test_a_worker_of_local_sgd_clips_its_own_gradient(mesh):
    module, local = doubles(), LocalSGDOptimizer(mpishard.SGD(lr=0.1), mesh, sync_every=4)
    optimizer = mpishard.torch.as_distributed(module, mesh, local)
    backward(mesh, module, 0)
    before = optimizer.parameters.flat.copy()
    own = float(torch.cat([p.grad.reshape(-1) for p in module.parameters()]).norm())
    assert float(optimizer.clip_grad_norm_(1e-3)) == pytest.approx(own, rel=1e-12)
    optimizer.step()
    assert np.linalg.norm(optimizer.parameters.flat - before) == pytest.approx(1e-4, rel=1e-2)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_clipping_on_one_rank_is_refused_on_all(mesh, zero):
    module = doubles()
    optimizer = mpishard.torch.as_distributed(module, mesh, mpishard.SGD(lr=0.1), zero=zero)
    before = optimizer.parameters.gather()
    backward(mesh, module, 0)
    with pytest.raises(ValueError, match="max_norm=0.5 norm_type=2 on rank 0, not called on rank"):
        if mesh.rank == 0:
            optimizer.clip_grad_norm_(0.5)
        optimizer.step()
    assert np.array_equal(optimizer.parameters.gather(), before)
    optimizer.zero_grad()
    backward(mesh, module, 0)
    optimizer.clip_grad_norm_(0.5)
    optimizer.step()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("debug", [False, True])
def test_gradients_that_one_rank_alone_changes_are_refused_on_all(comm, zero, debug):
    """By PyTorch's own functions; other values after equally many changes in debug mode only."""

    def clip(module, norm):
        torch.nn.utils.clip_grad_norm_(module.parameters(), norm)

    def replace(module, factor):
        module[3].weight.grad = factor * module[3].weight.grad

    with mpishard.Mesh(comm, debug=debug) as mesh:
        module = doubles()
        optimizer = mpishard.torch.as_distributed(module, mesh, mpishard.SGD(lr=0.1), zero=zero)
        before = optimizer.parameters.flat.copy()
        for change, factor, others in [(clip, 1e-3, None), (replace, 2.0, None), *[(clip, 1e-3, 1e-4)] * debug]:
            backward(mesh, module, 0)
            count = len(list(module.parameters())) if change is clip else 1
            changed = rf"changed in {count} parameters .* on rank 0, unchanged"
            message = changed if others is None else "float64 .* on rank 0, "
            with pytest.raises(ValueError, match=message):
                if mesh.rank == 0 or others is not None:
                    change(module, factor if mesh.rank == 0 else others)
                optimizer.step()
            assert np.array_equal(optimizer.parameters.flat, before)
            optimizer.zero_grad()
        for change in (clip, replace):
            backward(mesh, module, 0)
            change(module, 0.5)
            optimizer.step()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("zero", [1, 0])
def test_a_loop_may_replace_what_is_not_finite(mesh, zero):
    """The NaN of one rank is in the mean on all, and the step takes what the loop has made of it there."""
    module, (x, y) = doubles(), images()
    optimizer = mpishard.torch.as_distributed(module, mesh, mpishard.SGD(lr=0.1), zero=zero)
    before = optimizer.parameters.flat.copy()
    loss = loss_of(module, x.double(), y, samples_of(mesh, 0))
    (loss * (np.nan if mesh.rank == mesh.size - 1 else 1.0)).backward()
    for p in module.parameters():
        p.grad.nan_to_num_(2.0)
    optimizer.step()
    np.testing.assert_allclose(optimizer.parameters.flat, before - 0.2, rtol=0, atol=1e-12)


@pytest.mark.mpi(min_size=2)
def test_sums_that_one_rank_alone_drops_are_refused_on_all(mesh):
    """Under zero=2 passes within no_sync are summed."""
    module = doubles()
    optimizer = mpishard.torch.as_distributed(module, mesh, mpishard.SGD(lr=0.1), zero=2)
    for _ in range(2):
        with optimizer.no_sync():
            backward(mesh, module, 0)
        if mesh.rank == 0:
            optimizer.zero_grad()
    backward(mesh, module, 1)
    with pytest.raises(ValueError, match="passes within no_sync is 0 on rank 0, 2 on rank"):
        optimizer.step()


@pytest.mark.parametrize("zero", [2, 3])
def test_parts_of_the_sums_cannot_be_dropped(mesh, zero):
    module = doubles()
    optimizer = mpishard.torch.as_distributed(module, mesh, mpishard.SGD(lr=0.1), zero=zero)
    with optimizer.no_sync():
        backward(mesh, module, 0)
    module[3].weight.grad = None
    backward(mesh, module, 1)
    with pytest.raises(ValueError, match="'3.weight' was dropped"):
        optimizer.step()


# Uneven numbers of batches, beside the Join of PyTorch and runs in which no rank runs out.

gloo = pytest.fixture(pytorch_ranks)


def batches_of(mesh, rank):
    """The first rank has most."""
    return 2 + 2 * (mesh.size - 1 - rank)


@pytest.mark.parametrize(("zero", "by_all"), [(0, True), (0, False), (1, True), (2, False)])
def test_parameters_are_those_of_the_join_of_pytorch(mesh, gloo, same_on_all, zero, by_all):
    """On all ranks, and so is the state, which takes further steps; the gradients are clipped."""
    from torch.distributed.algorithms.join import Join

    module = doubles()
    theirs = gloo(copy.deepcopy(module))
    sgd = torch.optim.SGD(theirs.parameters(), lr=0.5, momentum=0.9)
    optimizer = mpishard.torch.as_distributed(module, mesh, mpishard.SGD(lr=0.5, momentum=0.9), zero=zero)
    for each, which, join in (
        (theirs, sgd, Join([theirs], divide_by_initial_world_size=by_all)),
        (module, optimizer, mpishard.torch.join(optimizer, divide_by_initial_world_size=by_all)),
    ):
        with join:
            for step in range(batches_of(mesh, mesh.rank)):
                which.zero_grad()
                backward(mesh, each, step)
                if zero and which is optimizer:
                    optimizer.clip_grad_norm_(0.05)
                else:
                    torch.nn.utils.clip_grad_norm_(each.parameters(), 0.05)
                which.step()
    assert_same_parameters(module, theirs.module, rtol=1e-9)
    assert optimizer.optimizer.steps == batches_of(mesh, 0)
    for step in range(2):
        assert same_on_all(optimizer.parameters.flat)
        backward(mesh, module, step)
        optimizer.step()
    assert same_on_all(optimizer.optimizer.serialize().hex())


def samples_of_rank(mesh, step, rank):
    order = np.random.default_rng(step).permutation(40)
    return np.array_split(order[: 8 * mesh.size], mesh.size)[rank]


def sum_of_losses(module, own):
    x, y = images()
    return torch.nn.functional.cross_entropy(module(x[own].double()), y[own], reduction="sum")


@pytest.mark.parametrize(("zero", "reproducible"), [(0, True), (1, False), (2, False), (2, True)])
def test_sums_over_uneven_samples_are_those_of_one_process(mesh, same_on_all, zero, reproducible):
    """With count, a scheduler's rates, passes that no step uses, and an optimizer of PyTorch."""
    having = [[r for r in range(mesh.size) if step < batches_of(mesh, r)] for step in range(batches_of(mesh, 0))]
    samples = [np.concatenate([samples_of_rank(mesh, n, r) for r in ranks]) for n, ranks in enumerate(having)]
    alone, module = doubles(), doubles()
    theirs = [torch.optim.AdamW(each.parameters(), lr=0.05) for each in (alone, module)]
    schedulers = [lr_scheduler.StepLR(each, 2, gamma=0.5) for each in theirs]
    for everyone in samples:
        theirs[0].zero_grad()
        (sum_of_losses(alone, everyone) / len(everyone)).backward()
        theirs[0].step()
        schedulers[0].step()
    config = ShardingConfiguration(mesh, reproducible=reproducible, minimum_parameter_group_size=64)
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
    assert_same_parameters(module, alone, rtol=1e-8, atol=1e-10)


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
    module = smooth()
    optimizer = mpishard.torch.as_distributed(module, mesh, mpishard.SGD(lr=0.1, momentum=0.9))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    (x, y), before = images(), optimizer.parameters.flat.copy()
    with mpishard.torch.join(optimizer):
        for step in range(batches_of(mesh, mesh.rank)):
            module.zero_grad()
            for number in range(2):
                scaler.scale(loss_of(module, x, y, samples_of(mesh, step + number))).backward()
            scaler.step(optimizer)
            scaler.update()
    assert same_on_all(optimizer.parameters.flat)
    assert 0 < np.abs(optimizer.parameters.flat - before).max() < 1


@pytest.mark.mpi(min_size=2)
def test_what_join_cannot_do_is_refused_on_all_ranks(mesh):
    module = smooth()
    optimizer = mpishard.torch.as_distributed(module, mesh, RULE)
    with pytest.raises(RuntimeError, match=r"ranks \[0\] .*throw_on_early_termination=True"):
        with mpishard.torch.join(optimizer, throw_on_early_termination=True):
            for _ in range(min(1, mesh.rank)):
                backward(mesh, module, 0)
                optimizer.step()
    optimizer.close()
    other = mpishard.torch.as_distributed(module, mesh, RULE, zero=2)
    with mpishard.torch.join(other), pytest.raises(ValueError, match="one optimizer at a time on a mesh"):
        mpishard.torch.join(other).__enter__()
    with mpishard.torch.join(other), pytest.raises(RuntimeError, match="use zero=0 or 1 within join"):
        other.no_sync()
    other.close()
    local = LocalSGDOptimizer(RULE, ShardingConfiguration(mesh), sync_every=3)
    normed = mpishard.torch.convert_sync_batchnorm(make("convolutional")[0], mesh)
    for module, rule, message in (
        (smooth(), local, "join is for steps"),
        (normed, RULE, "batch norms that sum over ranks"),
    ):
        refused = mpishard.torch.as_distributed(module, mesh, rule)
        with pytest.raises(ValueError, match=message):
            mpishard.torch.join(refused).__enter__()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("zero", [0, 2])
def test_a_loop_that_has_ended_early_begins_anew(mesh, zero):
    """Nothing is left of the pass that the error has ended, though no rank calls zero_grad before the next one."""
    module, alone = smooth(), smooth()
    optimizer = mpishard.torch.as_distributed(module, mesh, mpishard.SGD(lr=0.1), zero=zero)
    theirs = mpishard.torch.as_distributed(alone, mesh, mpishard.SGD(lr=0.1), zero=zero)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="throw_on_early_termination=True"):
            with mpishard.torch.join(optimizer, throw_on_early_termination=True):
                for step in range(1 + (mesh.rank > 0)):
                    if not zero:
                        with optimizer.no_sync():
                            backward(mesh, module, step)
                    backward(mesh, module, step)
                    optimizer.step()
        for _ in range(1 if zero else 2):
            backward(mesh, alone, 0)
        theirs.step()
    assert_same_parameters(module, alone, rtol=1e-12)


@pytest.mark.mpi(min_size=2)
def test_ranks_that_do_different_things_are_told(mesh):
    module = smooth()
    optimizer = mpishard.torch.as_distributed(module, mesh, RULE, zero=1)
    message = r"ranks .*0.* call step, ranks \[\d.*\] call zero_grad"
    with pytest.raises(RuntimeError, match=message), mpishard.torch.join(optimizer):
        backward(mesh, module, 0)
        if mesh.rank == mesh.size - 1:
            optimizer.zero_grad()
        optimizer.step()


def test_the_loop_of_the_page_on_slurm_leaves_and_comes_back(mesh, folder, monkeypatch):
    """As one that was never asked to; a signal comes to one rank."""
    page = (Path(__file__).parents[2] / "docs/how-to/slurm.md").read_text("utf-8")
    (script,) = (block for block in re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.M) if "torch" in block)
    loss, calls, found = torch.nn.functional.cross_entropy, itertools.count(1), []
    leaves_after = None

    def computed(*arguments):
        if next(calls) == leaves_after and mesh.rank == mesh.size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss(*arguments)

    monkeypatch.setattr(torch.nn.functional, "cross_entropy", computed)
    for name, leaves_after in (("whole", None), ("parted", 7), ("parted", None)):
        calls = itertools.count(1)
        (folder / name).mkdir(exist_ok=True)
        monkeypatch.chdir(folder / name)
        variables: dict = {}
        with pytest.raises(SystemExit) if leaves_after else contextlib.nullcontext() as left:
            exec(script, variables)
        if leaves_after:
            assert left.value.code == 75
            assert (folder / name / "torch-run" / "latest").resolve().name == "step-00000007"
        found.append(variables["model"].weight.detach().clone())
        mesh.world.barrier()
    whole, parted, resumed = found
    assert torch.equal(resumed, whole) and not torch.equal(parted, whole)
    assert variables["step"] == variables["steps"] == next(calls) - 1 + 7
    assert len(list((folder / "parted" / "torch-run").glob("step-*"))) <= 2
