"""Ranks whose rules or settings differ all get an error, before they drift apart or wait for each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import mpishard
from mpishard import (
    SGD,
    Adam,
    AdamW,
    DDPOptimizer,
    ElasticOptimizer,
    LocalSGDOptimizer,
    OptimizationProblem,
    ShardingConfiguration,
    ZeRO1Optimizer,
    nn,
)
from mpishard.backend.array import elementwise
from mpishard.optim import Rule

pytestmark = pytest.mark.mpi(min_size=2)


@elementwise
def descend(p, g, /, divisor, clip, lr, pull):
    """``p -= lr * (g / divisor * clip + pull * p)``"""
    p = p - lr * (g / divisor * clip + pull * p)
    return p


@dataclass(frozen=True)
class Pulling(Rule):
    """A rule of a user's own."""

    pull: Any = None  # a function of the step
    note: str = field(default="", compare=False)

    slots = ()
    kernel = descend

    def scalars(self, step):
        return self.learning_rate(step), self.pull(step)


def config(mesh, **options):
    return ShardingConfiguration(mesh, **options)


# What an optimizer is made of on rank 0 and on the others, and the message.
DIFFERENT = {
    "lr": (lambda mesh, odd: DDPOptimizer(SGD(lr=0.2 if odd else 0.1), mesh), r"lr\(1\) is 0.1 on rank 0, 0.2 on rank"),
    "schedule": (
        lambda mesh, odd: DDPOptimizer(SGD(lr=lambda step: 0.1 if step < (40 if odd else 50) else 0.01), mesh),
        r"lr\(\d\d\) is 0.1 on rank 0, 0.01 on rank",
    ),
    "weight decay": (
        lambda mesh, odd: DDPOptimizer(SGD(lr=0.1, weight_decay=0.1 * odd), mesh),
        "weight_decay is 0 on rank 0, 0.1 on",
    ),
    "rule": (lambda mesh, odd: DDPOptimizer((AdamW if odd else Adam)(lr=0.1), mesh), "rule is Adam on rank 0, AdamW"),
    "own rule": (
        lambda mesh, odd: DDPOptimizer(Pulling(lr=0.1, pull=lambda step: 0.1 + odd), mesh),
        r"scalars\(1\) is \(0.1, 0.1\) on rank 0, \(0.1, 1.1\) on rank",
    ),
    "clipping": (
        lambda mesh, odd: DDPOptimizer(SGD(lr=0.1), config(mesh, max_gradient_norm=1.0 if odd else None)),
        "max_gradient_norm is None on rank 0, 1 on rank",
    ),
    "loss scale": (
        lambda mesh, odd: DDPOptimizer(SGD(lr=0.1), config(mesh, loss_scale=4.0 if odd else "dynamic")),
        "loss_scale is dynamic on rank 0, 4 on rank",
    ),
    "strategy": (
        lambda mesh, odd: (ZeRO1Optimizer if odd else DDPOptimizer)(SGD(lr=0.1), mesh),
        "optimizer is DDPOptimizer on rank 0, ZeRO1Optimizer on",
    ),
    "buckets": (
        lambda mesh, odd: DDPOptimizer(SGD(lr=0.1), config(mesh, minimum_parameter_group_size=1 + odd)),
        "minimum_parameter_group_size is 1 on rank 0, 2 on rank",
    ),
    "compression": (
        lambda mesh, odd: DDPOptimizer(SGD(lr=0.1), config(mesh, enable_gradient_compression=bool(odd))),
        "enable_gradient_compression is False on rank 0, True on",
    ),
    "outer rule": (
        lambda mesh, odd: LocalSGDOptimizer(SGD(lr=0.1), mesh, 2, SGD(lr=0.5 + odd)),
        r"outer lr\(1\) is 0.5 on rank 0, 1.5 on rank",
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_settings_that_differ_are_named_on_all_ranks(mesh, case):
    make, message = DIFFERENT[case]
    task = OptimizationProblem(loss, np.ones(4), 16, batch_size=8, steps=2)
    flat = np.ones(4)
    for use in (
        lambda optimizer: optimizer.step(flat, np.ones(4)),
        lambda optimizer: optimizer.optimize(task, progress=False),
        lambda optimizer: mpishard.save_checkpoint("nowhere", flat, optimizer),
    ):
        with pytest.raises(ValueError, match=f"all ranks must have the same settings, but .*{message}"):
            use(make(mesh, int(mesh.rank > 0)))
    assert (flat == 1).all()


def loss(parameters, samples, gradients):
    gradients += parameters * len(samples)
    return parameters @ parameters / 2 * len(samples)


def test_what_takes_the_same_steps_is_the_same(mesh):
    """A number and a function that gives it; other functions of the same values; what a rule does not compare."""
    lr = mpishard.constant(0.5) if mesh.rank else 0.5
    rule = Pulling(lr=lr, pull=(lambda step: 1 / step) if mesh.rank else (lambda step: step**-1), note=str(mesh.rank))
    optimizer = DDPOptimizer(rule, mesh)
    flat = np.ones(4)
    for _ in range(2):
        optimizer.step(flat, np.ones(4))
    assert np.array_equal(flat, np.full(4, -0.5))

    def table(step):
        return [0.5, 0.25][step - 1]  # for two steps and no more

    optimizer = DDPOptimizer(SGD(lr=table), mesh)
    for _ in range(2):
        optimizer.step(flat, np.ones(4))
    assert np.array_equal(flat, np.full(4, -1.25))


def test_a_rule_that_is_changed(mesh):
    """By all ranks alike it may be; by one, all raise and nothing has happened."""
    optimizer = DDPOptimizer(SGD(lr=0.1), mesh)
    flat = np.zeros(4)
    optimizer.step(flat, np.ones(4))
    optimizer.rule = SGD(lr=0.2)
    optimizer.step(flat, np.ones(4))
    if mesh.rank == mesh.size - 1:
        optimizer.rule = SGD(lr=0.3)
    with pytest.raises(ValueError, match=rf"lr\(1\) is 0.2 on rank.* 0.3 on rank {mesh.size - 1}: give"):
        optimizer.step(flat, np.ones(4))
    np.testing.assert_allclose(flat, -0.3, rtol=0, atol=1e-15)
    accumulating = DDPOptimizer(SGD(lr=0.1), config(mesh, auto_sync_gradients=False))
    accumulating.step(flat, np.ones(4))
    accumulating.rule = SGD(lr=0.1 + mesh.rank)
    accumulating.step(flat, np.ones(4))
    with pytest.raises(ValueError, match=r"lr\(1\) is 0.1 on rank 0, 1.1 on rank 1"):
        accumulating.synchronize_optimizer_state()


@pytest.mark.parametrize("make", [DDPOptimizer, LocalSGDOptimizer])
def test_a_rule_that_a_callback_changes(mesh, make):
    optimizer = make(SGD(lr=0.5), mesh)
    task = OptimizationProblem(loss, np.ones(4), 48, batch_size=24, steps=20)

    def on_all(state):
        if state.step == 2:
            optimizer.rule = SGD(lr=0.25)

    def on_one(state):
        if state.step == 22 and mesh.rank == 1:
            optimizer.rule = SGD(lr=0.125)

    result = optimizer.optimize(task, callback=on_all, progress=False)
    np.testing.assert_allclose(result.parameters, 0.5**2 * 0.75**18, rtol=1e-6)
    with pytest.raises(ValueError, match=r"lr\(1\) is 0.25 on rank.* 0.125 on rank 1"):
        optimizer.optimize(task, callback=on_one, progress=False)


def test_states_that_differ(mesh):
    optimizer = DDPOptimizer(Adam(lr=0.1), mesh)
    flat, states = np.ones(4), []
    for _ in range(3):
        optimizer.step(flat, np.ones(4))
        states.append(optimizer.serialize())
    before = optimizer.serialize()
    fresh = DDPOptimizer(Adam(lr=0.1), mesh)
    for each in (optimizer, fresh):
        with pytest.raises(ValueError, match="but steps of the state is 2 on rank 0, 1 on rank"):
            each.deserialize(states[mesh.rank == 0])
    assert optimizer.serialize() == before and fresh.steps == 0
    optimizer.deserialize(states[0])
    assert optimizer.steps == 1
    other = DDPOptimizer(Adam(lr=0.1), mesh)
    other.step(np.ones(4), np.full(4, 2.0))
    values = other.serialize()
    with pytest.raises(ValueError, match="but SHA-256 of the state is"):
        optimizer.deserialize(values if mesh.rank else states[0])
    optimizer.rule = Adam(lr=0.1 + mesh.rank)
    with pytest.raises(ValueError, match=r"lr\(1\) is 0.1 on rank 0, 1.1 on rank 1"):
        optimizer.deserialize(states[0])


def test_a_checkpoint_is_loaded_with_one_rule(mesh, comm, tmp_path_factory):
    folder = comm.bcast(str(tmp_path_factory.mktemp("run")) if comm.rank == 0 else None)
    flat = np.ones(4)
    optimizer = DDPOptimizer(SGD(lr=0.1), mesh)
    optimizer.step(flat, np.ones(4))
    mpishard.save_checkpoint(folder, flat, optimizer)
    optimizer.rule = SGD(lr=0.1 + mesh.rank)
    for each in (optimizer, DDPOptimizer(SGD(lr=0.1 + mesh.rank), mesh)):
        with pytest.raises(ValueError, match=r"lr\(1\) is 0.1 on rank 0, 1.1 on rank 1"):
            mpishard.load_checkpoint(folder, flat, each)


def test_limits_of_an_elastic_run_that_differ(mesh):
    task = OptimizationProblem(loss, np.ones(4), 16, batch_size=8, steps=2)
    optimizer = ElasticOptimizer(SGD(lr=0.1), mesh, scaling="linear" if mesh.rank else "constant")
    with pytest.raises(ValueError, match="scaling is constant on rank 0, linear on rank"):
        optimizer.optimize(task, progress=False)


def test_options_of_a_run_that_differ(mesh):
    optimizer = DDPOptimizer(SGD(lr=0.1), mesh)
    task = OptimizationProblem(loss, np.ones(4), 16, batch_size=8, steps=2)
    with pytest.raises((TypeError, ValueError), match="checkpoints must be Checkpoints"):
        optimizer.optimize(task, checkpoints=3 if mesh.rank else None, progress=False)
    with mpishard.RunRecord("nowhere", mesh) as record:
        with pytest.raises(ValueError, match="record is False on rank 0, True on rank"):
            optimizer.optimize(task, record=record if mesh.rank else None, progress=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(dropout=0.1), "the model's dropout is 0 on rank 0, 0.1 with seed 0 on rank"),
        (dict(recompute=True), "the model's recompute is False on rank 0, True on rank"),
    ],
)
def test_options_of_a_model_that_differ(mesh, comm, options, message):
    model = nn.GPT(11, 4, 8, 1, 2, mesh=mesh, **(options if comm.rank else {}))
    task = OptimizationProblem.for_model(
        model, lambda samples: None, samples=16, batch_size=8, tokens_per_sample=4, steps=2
    )
    optimizer = DDPOptimizer(SGD(lr=0.1), mesh)
    for use in (lambda: optimizer.optimize(task, progress=False), lambda: optimizer.step(model.parameters)):
        with pytest.raises(ValueError, match=f"all ranks must have the same settings, but {message}"):
            use()
