"""What optimizers refuse, and ranks whose rules or settings differ: on all ranks, with nothing changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from standin import empty as empty_on_device
from standin import zeros as on_device
from steps import SPECS, STRATEGIES, one_step, start, train, write_gradients

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
    nn,
)
from mpishard.backend.array import elementwise, to_host
from mpishard.optim import Rule
from mpishard.parameters.flat import FlatParameters

# What optimizers refuse: on all ranks, with nothing changed.

each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
several = pytest.mark.mpi(min_size=2)


@pytest.mark.parametrize("first", STRATEGIES)
@pytest.mark.parametrize("second", STRATEGIES)
def test_another_optimizer_does_not_take_over_gradients_in_the_middle(mesh, first, second):
    parameters = FlatParameters.over(start(40), SPECS)
    one, two = first(SGD(lr=1.0), mesh), second(SGD(lr=1.0), mesh)
    one_step(one, parameters, 1.0)
    before = parameters.flat.copy()
    with pytest.raises(ValueError, match=r"reset_gradients\(\) and bind\(parameters\)"):
        one_step(two, parameters, 1.0)
    assert np.array_equal(parameters.flat, before)
    parameters.reset_gradients()
    two.bind(parameters)
    one_step(two, parameters, 1.0)
    assert np.array_equal(parameters.flat, before - 1)


@several
def test_ranks_that_never_stepped_are_named(mesh):
    optimizer = DDPOptimizer(SGD(lr=1.0), ShardingConfiguration(mesh, auto_sync_gradients=False))
    optimizer.synchronize_optimizer_state()
    if mesh.rank == 0:
        optimizer.state._on_rank = object()
    with pytest.raises(ValueError, match=r"have not called step\(\) yet"):
        optimizer.synchronize_optimizer_state()


@several
def test_counts_that_differ_or_make_no_sense(mesh):
    flat = start(7)
    for count, message in (
        (3 + mesh.rank, r"count .*\[3, 4"),
        (0, "count=0"),
        (np.nan, "count=nan"),
    ):
        with pytest.raises(ValueError, match=message):
            DDPOptimizer(SGD(lr=0.1), mesh).step(flat, np.ones(7, np.float32), count=count)
    assert np.array_equal(flat, start(7))


@several
def test_parameters_in_another_order_dtype_or_number_on_one_rank(mesh):
    order = SPECS if mesh.rank else [SPECS[3], *SPECS[:3]]
    with pytest.raises(ValueError, match="rank 0 .*first 'd', rank 1 .*first 'a'"):
        one_step(DDPOptimizer(SGD(lr=0.1), mesh), FlatParameters(order), 1.0)
    size = 7 + (mesh.rank == 0)
    with pytest.raises(ValueError, match="rank 0 1 tensors of 8 .*rank 1 1 tensors of 7"):
        DDPOptimizer(SGD(lr=0.1), mesh).step(start(size), np.ones(size, np.float32))
    dtype = np.float32 if mesh.rank else np.float64
    optimizer = DDPOptimizer(SGD(lr=0.1), mesh)
    with pytest.raises(ValueError, match="of 7 float64 values.*of 7 float32 values"):
        optimizer.step(np.zeros(7, dtype), np.zeros(7, dtype))
    train(optimizer, start(7), steps=1)
    with pytest.raises(ValueError, match="7 float32 .*7 float64"):
        optimizer.step(np.zeros(7, dtype), np.zeros(7, dtype))


def test_an_optimizer_stays_with_its_model(mesh):
    optimizer = DDPOptimizer(SGD(lr=0.1), mesh)
    train(optimizer, start(7), steps=1)
    message = "1 tensors of 7 .*'parameters', .*1 tensors of 8"
    with pytest.raises(ValueError, match=message):
        optimizer.step(start(8), np.ones(8, np.float32))


def test_a_schedule_that_fails_changes_nothing(mesh):
    def broken(step):
        if step == 2 and broken.fails:
            raise RuntimeError("no rate today")
        return 1.0

    broken.fails = True
    optimizer = DDPOptimizer(SGD(lr=broken), mesh)
    flat = np.zeros(4)
    optimizer.step(flat, np.full(4, float(mesh.rank)))
    before = flat.copy()
    with pytest.raises(RuntimeError, match="no rate today"):
        optimizer.step(flat, np.full(4, float(mesh.rank)))
    assert np.array_equal(flat, before)
    broken.fails = False
    optimizer.step(flat, np.full(4, float(mesh.rank)))
    assert np.array_equal(flat, 2 * before)


def test_writing_to_gradients_that_travel_is_refused(mesh):
    parameters, optimizer = FlatParameters.over(start(40), SPECS), DDPOptimizer(SGD(lr=0.1), mesh)
    for _ in range(2):
        one_step(optimizer, parameters, 1.0)
    write_gradients(parameters, np.ones(40, np.float32))
    with pytest.raises(RuntimeError, match="auto_sync_gradients=False"):
        write_gradients(parameters, np.ones(40, np.float32))
    optimizer.step(parameters)


@each_strategy
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonfinite_gradients_name_tensor_and_rank(mesh, strategy, value):
    parameters = FlatParameters.over(start(40), SPECS)
    optimizer = strategy(AdamW(lr=0.1), ShardingConfiguration(mesh, minimum_parameter_group_size=1))
    one_step(optimizer, parameters, 1.0)
    before, state = parameters.flat.copy(), optimizer.serialize()
    bad = np.ones(40, np.float32)
    culprit = mesh.size - 1
    if mesh.rank == culprit:
        bad[20] = value  # in "d"
    write_gradients(parameters, bad)
    with pytest.raises(FloatingPointError, match=f"step 2: 'd' on rank {culprit}"):
        optimizer.step(parameters)
    assert np.array_equal(parameters.flat, before)
    assert optimizer.serialize() == state
    one_step(optimizer, parameters, 1.0)
    assert optimizer.steps == 2
    assert np.isfinite(parameters.flat).all()


def after_steps(optimizer, flat, steps):
    """Take steps that are finite: after the first ones, ranks find out before the sum that it is finite."""
    for _ in range(steps):
        optimizer.step(flat, np.ones_like(flat))
    return flat.copy()


@pytest.mark.parametrize("earlier", [0, 4])
@each_strategy
def test_nonfinite_gradients_skip_or_go_on(mesh, strategy, earlier):
    bad = np.full(7, np.nan if mesh.rank == 0 else 1.0, np.float32)
    flat = start(7)
    skipping = strategy(SGD(lr=0.1), ShardingConfiguration(mesh, nonfinite_gradients="skip"))
    before = after_steps(skipping, flat, earlier)
    skipping.step(flat, bad.copy())
    assert (skipping.steps, skipping.skipped_steps) == (earlier, 1)
    assert np.array_equal(flat, before)
    going_on = strategy(SGD(lr=0.1), ShardingConfiguration(mesh, nonfinite_gradients="ignore"))
    after_steps(going_on, flat, earlier)
    going_on.step(flat, bad.copy())
    assert np.isnan(flat).all()


@several
@pytest.mark.parametrize("earlier", [0, 4])
@each_strategy
def test_a_sum_that_overflows_is_told_apart(mesh, strategy, earlier):
    optimizer, flat = strategy(SGD(lr=0.1), mesh), start(7)
    before = after_steps(optimizer, flat, earlier)
    with pytest.raises(FloatingPointError, match="overflowed"):
        optimizer.step(flat, np.full(7, 3e38, np.float32))
    assert np.array_equal(flat, before)
    # Near the largest number, but the sum is finite.
    optimizer.step(flat, np.full(7, np.finfo(np.float32).max / (2 * mesh.size), np.float32))
    assert optimizer.steps == earlier + 1 and np.isfinite(flat).all()


def read_only(array):
    array.flags.writeable = False
    return array


def unaligned(size):
    return np.zeros(4 * size + 1, np.uint8)[1:].view(np.float32)


@each_strategy
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: np.ones(8, np.float32), ValueError, "gradients have 8 .*parameters have 7"),
        (lambda: np.ones((7, 1), np.float32), ValueError, r"flat .*\(7, 1\)"),
        (lambda: np.ones(7), TypeError, "gradients are float64, .*float32"),
        (lambda: np.ones(14, np.float32)[::2], ValueError, "gradients .*contiguous"),
        (lambda: [1.0] * 7, TypeError, "gradients .*got list"),
        (lambda: empty_on_device(7, np.float32), TypeError, "gradients are a DeviceArray, .*ndarray"),
        (lambda: None, TypeError, "needs the gradients"),
        (lambda: read_only(np.ones(7, np.float32)), ValueError, "gradients are read-only"),
        (lambda: unaligned(7), ValueError, "gradients .*multiple of 4 bytes"),
    ],
)
@pytest.mark.pairs(8)
def test_bad_gradients_on_one_rank_raise_on_all(mesh, strategy, make, error, message):
    optimizer = strategy(SGD(lr=0.1, momentum=0.9), mesh)
    flat = train(optimizer, start(7), steps=1)
    before, state = flat.copy(), optimizer.serialize()
    with pytest.raises(error, match=message):
        optimizer.step(flat, make() if mesh.rank == mesh.size - 1 else np.ones(7, np.float32))
    assert np.array_equal(flat, before)
    assert optimizer.serialize() == state


def test_bad_parameters(mesh):
    strided, square = np.zeros(14, np.float32)[::2], np.zeros((2, 2), np.float32)
    for bad in (read_only(np.zeros(7, np.float32)), np.zeros(7, np.int64), square, strided, unaligned(7)):
        with pytest.raises((TypeError, ValueError), match="parameters (must be|are read-only)"):
            DDPOptimizer(SGD(lr=0.1), mesh).step(bad, np.zeros(7, np.float32))


@pytest.mark.parametrize("make", [lambda size: np.zeros(size, np.float32), lambda size: on_device(size, np.float32)])
@pytest.mark.parametrize(("first", "named"), [(0, False), (0, True), (3, False), (-3, True)])
@pytest.mark.pairs
def test_gradients_in_the_memory_of_the_parameters_on_one_rank(mesh, make, first, named):
    whole, other = make(20), make(7)
    flat = whole[5:12]
    parameters = FlatParameters.over(flat) if named else flat
    optimizer = DDPOptimizer(SGD(lr=1.0), mesh)
    with pytest.raises(ValueError, match="gradients share memory"):
        optimizer.step(parameters, whole[5 + first : 12 + first] if mesh.rank == mesh.size - 1 else other)
    optimizer.step(parameters, whole[12:19])  # beside them
    assert (to_host(whole) == 0).all()


@each_strategy
@pytest.mark.parametrize("auto", [True, False])
def test_gradients_of_a_pass_and_an_array_do_not_mix(mesh, strategy, auto):
    parameters = FlatParameters(SPECS)
    config = ShardingConfiguration(mesh, auto_sync_gradients=auto)
    optimizer = strategy(SGD(lr=1.0), config)
    optimizer.bind(parameters)
    write_gradients(parameters, np.ones(40, np.float32))
    with pytest.raises(ValueError, match="gradients of their own"):
        optimizer.step(parameters, np.ones(40, np.float32))
    parameters.reset_gradients()
    optimizer.step(parameters, np.ones(40, np.float32))
    if not auto:
        model = mpishard.as_distributed(SimpleNamespace(parameters=parameters), config)
        model.synchronize_gradients()  # of which the array is none
        with pytest.raises(ValueError, match="gradients of their own"):
            optimizer.step(parameters)
        parameters.reset_gradients()
        assert (parameters.gather() == 0).all()
    else:
        assert (parameters.gather() == -1).all()


# Ranks whose rules or settings differ all get an error, before they drift apart or wait for each other.


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


def falling(end):
    return lambda step: 0.1 if step < end else 0.01


def pulling(pull):
    return Pulling(lr=0.1, pull=lambda step: pull)


def ddp(mesh, rule=SGD(lr=0.1), kind=DDPOptimizer, **options):  # noqa: B008
    return kind(rule, config(mesh, **options))


# What an optimizer is made of on rank 0, for which `odd` is 0, and on the others; what differs, and its values there.
DIFFERENT = {
    "lr": (lambda m, odd: ddp(m, SGD(lr=0.2 if odd else 0.1)), r"lr\(1\)", "0.1", "0.2"),
    "schedule": (lambda m, odd: ddp(m, SGD(lr=falling(40 if odd else 50))), r"lr\(\d\d\)", "0.1", "0.01"),
    "weight decay": (lambda m, odd: ddp(m, SGD(lr=0.1, weight_decay=0.1 * odd)), "weight_decay", "0", "0.1"),
    "rule": (lambda m, odd: ddp(m, (AdamW if odd else Adam)(lr=0.1)), "rule", "Adam", "AdamW"),
    "own rule": (lambda m, odd: ddp(m, pulling(0.1 + odd)), r"scalars\(1\)", r"\(0.1, 0.1\)", r"\(0.1, 1.1\)"),
    "clipping": (lambda m, odd: ddp(m, max_gradient_norm=1.0 if odd else None), "max_gradient_norm", "None", "1"),
    "loss scale": (lambda m, odd: ddp(m, loss_scale=4.0 if odd else "dynamic"), "loss_scale", "dynamic", "4"),
    "strategy": (lambda m, odd: ddp(m, kind=STRATEGIES[odd]), "optimizer", "DDPOptimizer", "ZeRO1Optimizer"),
    "compression": (
        lambda m, odd: ddp(m, enable_gradient_compression=bool(odd)),
        *("enable_gradient_compression", "False", "True"),
    ),
    "outer rule": (
        lambda m, odd: LocalSGDOptimizer(SGD(lr=0.1), m, 2, SGD(lr=0.5 + odd)),
        *(r"outer lr\(1\)", "0.5", "1.5"),
    ),
}


@several
@pytest.mark.parametrize("case", DIFFERENT)
def test_settings_that_differ_are_named_on_all_ranks(mesh, case):
    # Configurations and classes are compared where optimizers are made, the rest where they are used.
    make, what, first, other = DIFFERENT[case]
    message = f"{what} is {first} on rank 0, {other} on rank"
    flat = np.ones(4)
    for use in (
        lambda optimizer: optimizer.step(flat, np.ones(4)),
        lambda optimizer: optimizer.optimize(task(), progress=False),
        lambda optimizer: mpishard.save_checkpoint("nowhere", flat, optimizer),
    ):
        with pytest.raises(ValueError, match=f"same (settings|arguments).*{message}"):
            use(make(mesh, int(mesh.rank > 0)))
    assert (flat == 1).all()


def loss(parameters, samples, gradients):
    gradients += parameters * len(samples)
    return parameters @ parameters / 2 * len(samples)


def task(samples=16, batch_size=8, steps=2):
    return OptimizationProblem(loss, np.ones(4), samples, batch_size, steps=steps)


@several
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


@several
def test_a_rule_that_is_changed(mesh):
    """By all ranks alike it may be; by one, all raise and nothing has happened."""
    optimizer = DDPOptimizer(SGD(lr=0.1), mesh)
    flat = np.zeros(4)
    optimizer.step(flat, np.ones(4))
    optimizer.rule = SGD(lr=0.2)
    optimizer.step(flat, np.ones(4))
    if mesh.rank == mesh.size - 1:
        optimizer.rule = SGD(lr=0.3)
    with pytest.raises(ValueError, match=rf"lr\(1\) is 0.2 on rank.* 0.3 on rank {mesh.size - 1}"):
        optimizer.step(flat, np.ones(4))
    np.testing.assert_allclose(flat, -0.3, rtol=0, atol=1e-15)
    accumulating = DDPOptimizer(SGD(lr=0.1), config(mesh, auto_sync_gradients=False))
    accumulating.step(flat, np.ones(4))
    accumulating.rule = SGD(lr=0.1 + mesh.rank)
    accumulating.step(flat, np.ones(4))
    with pytest.raises(ValueError, match=r"lr\(1\) is 0.1 on rank 0, 1.1 on rank 1"):
        accumulating.synchronize_optimizer_state()


@several
@pytest.mark.parametrize("make", [DDPOptimizer, LocalSGDOptimizer])
def test_a_rule_that_a_callback_changes(mesh, make):
    optimizer = make(SGD(lr=0.5), mesh)

    def on_all(state):
        if state.step == 2:
            optimizer.rule = SGD(lr=0.25)

    def on_one(state):
        if state.step == 22 and mesh.rank == 1:
            optimizer.rule = SGD(lr=0.125)

    result = optimizer.optimize(task(48, 24, 20), callback=on_all, progress=False)
    np.testing.assert_allclose(result.parameters, 0.5**2 * 0.75**18, rtol=1e-6)
    with pytest.raises(ValueError, match=r"lr\(1\) is 0.25 on rank.* 0.125 on rank 1"):
        optimizer.optimize(task(48, 24, 20), callback=on_one, progress=False)


@several
def test_states_that_differ(mesh):
    optimizer = DDPOptimizer(Adam(lr=0.1), mesh)
    flat, states = np.ones(4), []
    for _ in range(3):
        optimizer.step(flat, np.ones(4))
        states.append(optimizer.serialize())
    before = optimizer.serialize()
    fresh = DDPOptimizer(Adam(lr=0.1), mesh)
    for each in (optimizer, fresh):
        with pytest.raises(ValueError, match="steps of the state is 2 on rank 0, 1 on rank"):
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


@several
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


@several
def test_options_of_a_run_that_differ(mesh):
    with pytest.raises(ValueError, match="scaling is constant on rank 0, linear on rank"):
        ElasticOptimizer(SGD(lr=0.1), mesh, scaling="linear" if mesh.rank else "constant")
    optimizer = ddp(mesh)
    with pytest.raises((TypeError, ValueError), match="checkpoints .*Checkpoints"):
        optimizer.optimize(task(), checkpoints=3 if mesh.rank else None, progress=False)
    with mpishard.RunRecord("nowhere", mesh) as record:
        with pytest.raises(ValueError, match="record is False on rank 0, True on rank"):
            optimizer.optimize(task(), record=record if mesh.rank else None, progress=False)


@several
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 0.1}, "the model's dropout is 0 on rank 0, 0.1 with seed 0 on rank"),
        ({"recompute": True}, "the model's recompute is False on rank 0, True on rank"),
    ],
)
def test_options_of_a_model_that_differ(mesh, options, message):
    model = nn.GPT(
        vocabulary_size=11, context_length=4, width=8, layers=1, heads=2, mesh=mesh, **(options if mesh.rank else {})
    )
    sizes = {"samples": 16, "batch_size": 8, "tokens_per_sample": 4, "steps": 2}
    of_model = OptimizationProblem.for_model(model, lambda samples: None, **sizes)
    optimizer = ddp(mesh)
    for use in (lambda: optimizer.optimize(of_model, progress=False), lambda: optimizer.step(model.parameters)):
        with pytest.raises(ValueError, match=f"same settings, but {message}"):
            use()
