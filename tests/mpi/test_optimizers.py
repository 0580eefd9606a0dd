"""Optimizers: one averaged step on all ranks, whatever is sharded; what they keep, send and refuse."""

from __future__ import annotations

import numpy as np
import pytest
from standin import DeviceArray
from standin import empty as empty_on_device

import mpishard
from mpishard import (
    LAMB,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    DDPOptimizer,
    Lion,
    RMSprop,
    ShardingConfiguration,
    ZeRO1Optimizer,
    ZeRO2Optimizer,
)
from mpishard import array as arrays
from mpishard.layout import ParameterSpec
from mpishard.parameters import FlatParameters

STRATEGIES = [DDPOptimizer, ZeRO1Optimizer, ZeRO2Optimizer]
RULES = [
    SGD(lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    SGD(lr=0.1, momentum=0.9, nesterov=True),
    Adam(lr=0.1, amsgrad=True),
    AdamW(lr=0.1),
    RMSprop(lr=0.1, centered=True, momentum=0.9),
    Adagrad(lr=0.1, lr_decay=0.1),
    Lion(lr=0.1),
    LAMB(lr=0.1),
]


def gradients(step, ranks, size, dtype=np.float32):
    """Small whole numbers for every rank: their sum over ranks is exact in any order."""
    return np.random.default_rng([step, ranks, size]).integers(-8, 9, (ranks, size)).astype(dtype)


def start(size, dtype=np.float32):
    return np.linspace(-1, 1, size).astype(dtype)


def train(optimizer, parameters, steps=3):
    axis = optimizer.axis
    for step in range(steps):
        optimizer.step(parameters, gradients(step, axis.size, len(parameters), parameters.dtype)[axis.rank].copy())
    return parameters


def reference(rule, size, ranks, dtype=np.float32, steps=3):
    """The rule alone, on the exact mean gradient."""
    parameters = start(size, dtype)
    slots = [np.full(size, rule.initial(slot), dtype) for slot in rule.slots]
    for step in range(steps):
        total = gradients(step, ranks, size, dtype).sum(0)
        rule.update(parameters, total, slots, step + 1, divisor=ranks)
    return parameters


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_every_strategy_takes_the_averaged_step_to_the_last_bit(mesh, same_on_all, strategy, rule):
    for size in (1, 7, 57):
        for dtype in (np.float32, np.float64):
            result = train(strategy(rule, mesh), start(size, dtype))
            assert same_on_all(result)
            assert np.array_equal(result, reference(rule, size, mesh.size, dtype))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_large_and_uneven(mesh, rule):
    size = 1_000_003
    ramp = np.arange(size) % 17
    parts = [((ramp + 5 * rank) % 17 - 8).astype(np.float32) for rank in range(mesh.size)]
    expected = start(size)
    rule.update(
        expected, sum(parts), [np.full_like(expected, rule.initial(slot)) for slot in rule.slots], 1, divisor=mesh.size
    )
    for strategy in STRATEGIES:
        flat = start(size)
        strategy(rule, mesh).step(flat, parts[mesh.rank].copy())
        assert np.array_equal(flat, expected)


SPECS = [ParameterSpec("a", (3, 5)), ParameterSpec("b", (0,)), ParameterSpec("c", (1,)), ParameterSpec("d", (2, 3, 4))]


def write_gradients(parameters, flat):
    """What a backward pass does: last tensor first, announced one by one."""
    stop = parameters.size
    for spec in reversed(parameters.specs):
        view, add = parameters.gradient(spec.name)
        value = flat[stop - spec.size : stop].reshape(spec.shape)
        view[...] = view + value if add else value
        parameters.finished(spec.name)
        stop -= spec.size


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_overlap_and_bucket_sizes_do_not_change_the_bits(mesh, strategy):
    results = []
    for overlap in (True, False):
        for group in (1, 16, 1000):
            parameters = FlatParameters.over(start(40), SPECS)
            config = ShardingConfiguration(
                mesh, overlap_communication=overlap, minimum_parameter_group_size=group, max_gradient_norm=1.0
            )
            optimizer = strategy(AdamW(lr=0.1), config)
            for step in range(3):
                write_gradients(parameters, gradients(step, mesh.size, 40)[mesh.rank])
                optimizer.step(parameters)
            results.append(parameters.flat)
    assert all(np.array_equal(result, results[0]) for result in results)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_accumulation_waits_for_synchronize(mesh, strategy):
    """auto_sync_gradients=False: three calls, one step on their mean."""
    total = sum(gradients(step, mesh.size, 40).sum(0) for step in range(3))
    expected = start(40)
    SGD(lr=0.1).update(expected, total, [], 1, divisor=3 * mesh.size)
    config = ShardingConfiguration(mesh, auto_sync_gradients=False, minimum_parameter_group_size=16)

    arrays_only = strategy(SGD(lr=0.1), config)
    flat = start(40)
    for step in range(3):
        arrays_only.step(flat, gradients(step, mesh.size, 40)[mesh.rank].copy())
        assert np.array_equal(flat, start(40))
    assert mesh.ledger.sent(label="gradients") == 0
    arrays_only.synchronize_optimizer_state()
    assert np.array_equal(flat, expected)

    of_model = strategy(SGD(lr=0.1), config)
    parameters = FlatParameters.over(start(40), SPECS)
    for step in range(3):
        write_gradients(parameters, gradients(step, mesh.size, 40)[mesh.rank])
        of_model.step(parameters)
        assert np.array_equal(parameters.flat, start(40))
    of_model.synchronize_optimizer_state()
    assert np.array_equal(parameters.flat, expected)


def test_writing_to_gradients_that_travel_is_refused(mesh):
    parameters = FlatParameters.over(start(40), SPECS)
    optimizer = DDPOptimizer(SGD(lr=0.1), mesh)
    for step in range(2):
        write_gradients(parameters, gradients(step, mesh.size, 40)[mesh.rank])
        optimizer.step(parameters)
    write_gradients(parameters, np.ones(40, np.float32))
    with pytest.raises(RuntimeError, match="auto_sync_gradients=False"):
        write_gradients(parameters, np.ones(40, np.float32))
    optimizer.step(parameters)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bytes_sent_are_twice_n_minus_1_over_n_of_the_parameters(comm, strategy):
    size = 840 * 5  # divisible by every number of ranks here
    with mpishard.Mesh(comm) as mesh:
        optimizer = strategy(AdamW(lr=0.1), mesh)
        flat = start(size)
        train(optimizer, flat, steps=1)
        mesh.ledger.clear()
        train(optimizer, flat, steps=4)
        sent = mesh.ledger.sent(label="gradients") + mesh.ledger.sent(label="parameters")
        assert sent * mesh.size == 4 * 2 * (mesh.size - 1) * flat.nbytes
        assert mesh.ledger.sent(label="control") == mesh.ledger.sent() - sent <= 4 * 100  # agreements


def test_bytes_of_state_and_gradients_a_rank(mesh):
    """The formulas of the ZeRO paper: state / N; gradients whole, or / N and a bucket."""
    specs = [ParameterSpec(str(i), (840,)) for i in range(5)]
    whole, bucket = 5 * 840 * 4, 840 * 4
    for strategy, overlap, state, gradient in [
        (DDPOptimizer, True, 2 * whole, whole),
        (ZeRO1Optimizer, True, 2 * whole // mesh.size, whole),
        (ZeRO2Optimizer, False, 2 * whole // mesh.size, whole // mesh.size + bucket),
        (ZeRO2Optimizer, True, 2 * whole // mesh.size, whole // mesh.size + 2 * bucket),
    ]:
        parameters = FlatParameters(specs)
        config = ShardingConfiguration(mesh, minimum_parameter_group_size=840, overlap_communication=overlap)
        optimizer = strategy(AdamW(lr=0.1), config)
        optimizer.bind(parameters)
        for _ in range(2):
            write_gradients(parameters, np.ones(parameters.size, np.float32))
            optimizer.step(parameters)
        assert (optimizer.state_bytes, optimizer.gradient_bytes) == (state, gradient), strategy.__name__


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_clipping_by_global_norm(mesh, strategy):
    config = ShardingConfiguration(mesh, max_gradient_norm=0.5)
    optimizer = strategy(SGD(lr=1.0), config)
    flat = np.zeros(57)
    mean = gradients(0, mesh.size, 57, np.float64).mean(0)
    optimizer.step(flat, gradients(0, mesh.size, 57, np.float64)[mesh.rank].copy())
    norm = np.linalg.norm(mean)
    assert optimizer.gradient_norm == pytest.approx(norm, rel=1e-14)
    assert np.allclose(flat, -mean * 0.5 / (norm + 1e-6), rtol=1e-14, atol=0)


def one_step(optimizer, parameters, value, **options):
    write_gradients(parameters, np.full(40, value, np.float32))
    optimizer.step(parameters, **options)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_reset_forgets_gradients_whatever_has_become_of_them(mesh, strategy):
    parameters = FlatParameters.over(start(40), SPECS)
    optimizer = strategy(SGD(lr=1.0), mesh)
    for _ in range(2):  # before the optimizer is bound, and after
        write_gradients(parameters, np.ones(40, np.float32))
        parameters.reset_gradients()
        before = parameters.flat.copy()
        one_step(optimizer, parameters, 1.0)
        assert np.array_equal(parameters.flat, before - 1)


@pytest.mark.parametrize("first", STRATEGIES)
@pytest.mark.parametrize("second", STRATEGIES)
def test_another_optimizer_does_not_take_over_gradients_in_the_middle(mesh, first, second):
    parameters = FlatParameters.over(start(40), SPECS)
    one, two = first(SGD(lr=1.0), mesh), second(SGD(lr=1.0), mesh)
    one_step(one, parameters, 1.0)
    before = parameters.flat.copy()
    with pytest.raises(ValueError, match="went to another optimizer"):
        one_step(two, parameters, 1.0)
    assert np.array_equal(parameters.flat, before)
    parameters.reset_gradients()
    two.bind(parameters)
    one_step(two, parameters, 1.0)
    assert np.array_equal(parameters.flat, before - 1)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_tensor_without_gradient_stays_from_the_first_step_on(mesh, strategy):
    parameters = FlatParameters.over(start(40), SPECS)
    write_gradients(parameters, np.ones(40, np.float32))
    parameters.reset_gradients()
    optimizer = strategy(SGD(lr=1.0), mesh)
    for _ in range(2):
        before = parameters["a"].copy()
        view, _ = parameters.gradient("d")
        view[...] = 1
        parameters.finished("d")
        optimizer.step(parameters)
        assert np.array_equal(parameters["a"], before)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_accumulation_needs_no_communication_and_counts_every_call(mesh, strategy):
    config = ShardingConfiguration(mesh, auto_sync_gradients=False)
    optimizer = strategy(SGD(lr=1.0), config)
    flat = np.zeros(8)
    calls = [1 + (rank == 0) for rank in range(mesh.size)]
    optimizer.step(flat, np.ones(8))
    before = mesh.ledger.sent()
    for _ in range(calls[mesh.rank] - 1):  # another number of calls on rank 0
        optimizer.step(flat, np.full(8, 4.0))
    assert mesh.ledger.sent() == before
    optimizer.synchronize_optimizer_state()
    assert np.allclose(flat, -(mesh.size + 4) / sum(calls), rtol=1e-15)


@pytest.mark.mpi(min_size=2)
def test_ranks_that_never_stepped_are_named(mesh):
    optimizer = DDPOptimizer(SGD(lr=1.0), ShardingConfiguration(mesh, auto_sync_gradients=False))
    optimizer.synchronize_optimizer_state()
    single = FlatParameters.over(np.zeros(4))
    if mesh.rank == 0:
        optimizer._parameters = single
    with pytest.raises(ValueError, match=r"have not called step\(\) yet"):
        optimizer.synchronize_optimizer_state()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_without_samples_takes_part(mesh, strategy):
    for auto in (True, False):
        parameters = FlatParameters.over(start(40), SPECS)
        config = ShardingConfiguration(mesh, auto_sync_gradients=auto, minimum_parameter_group_size=16)
        optimizer = strategy(SGD(lr=1.0), config)
        for _ in range(3):
            before = parameters.flat.copy()
            if mesh.rank:
                write_gradients(parameters, np.ones(40, np.float32))
            optimizer.step(parameters, count=mesh.size - 1)
            if not auto:
                optimizer.synchronize_optimizer_state()
            expected = 1.0 if auto else (mesh.size - 1) / mesh.size
            assert np.allclose(before - parameters.flat, expected, rtol=1e-6)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda rank: {"count": 3 + rank}, r"count must be the global number.*\[3, 4"),
        (lambda rank: {"count": 0}, "count=0, the global number of samples, must be above 0"),
        (lambda rank: {"count": np.nan}, "count=nan"),
    ],
)
def test_counts_that_differ_or_make_no_sense(mesh, arguments, message):
    flat = start(7)
    with pytest.raises(ValueError, match=message):
        DDPOptimizer(SGD(lr=0.1), mesh).step(flat, np.ones(7, np.float32), **arguments(mesh.rank))
    assert np.array_equal(flat, start(7))


@pytest.mark.mpi(min_size=2)
def test_parameters_in_another_order_or_dtype_on_one_rank(mesh):
    order = SPECS if mesh.rank else [SPECS[3], *SPECS[:3]]
    with pytest.raises(ValueError, match="in the same order; here: rank 0 .*first 'd', rank 1 .*first 'a'"):
        one_step(DDPOptimizer(SGD(lr=0.1), mesh), FlatParameters(order), 1.0)
    dtype = np.float32 if mesh.rank else np.float64
    optimizer = DDPOptimizer(SGD(lr=0.1), mesh)
    with pytest.raises(ValueError, match="of 7 float64 values.*of 7 float32 values"):
        optimizer.step(np.zeros(7, dtype), np.zeros(7, dtype))
    optimizer.step(np.zeros(7, np.float32), np.zeros(7, np.float32))
    with pytest.raises(ValueError, match="of 7 float32 values, .* given 1 tensors of 7 float64"):
        optimizer.step(np.zeros(7, dtype), np.zeros(7, dtype))


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


def test_the_gradient_array_stays_the_callers(mesh):
    parameters = FlatParameters.over(start(40), SPECS)
    optimizer = DDPOptimizer(SGD(lr=0.1), mesh)
    mine = np.ones(40, np.float32)
    optimizer.step(parameters, mine)
    after = mine.copy()
    write_gradients(parameters, np.full(40, 3, np.float32))
    assert np.array_equal(mine, after)
    optimizer.step(parameters)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_huge_gradients_are_clipped_too(mesh, strategy):
    optimizer = strategy(SGD(lr=1.0), ShardingConfiguration(mesh, max_gradient_norm=1.0))
    flat = np.zeros(4)
    optimizer.step(flat, np.full(4, 1e200))
    assert optimizer.gradient_norm == pytest.approx(2e200, rel=1e-14)
    assert np.allclose(flat, -0.5, rtol=1e-12)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonfinite_gradients_name_tensor_and_rank(mesh, strategy, value):
    parameters = FlatParameters.over(start(40), SPECS)
    optimizer = strategy(AdamW(lr=0.1), ShardingConfiguration(mesh, minimum_parameter_group_size=1))
    write_gradients(parameters, np.ones(40, np.float32))
    optimizer.step(parameters)
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
    write_gradients(parameters, np.ones(40, np.float32))
    optimizer.step(parameters)
    assert optimizer.steps == 2
    assert np.isfinite(parameters.flat).all()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nonfinite_gradients_skip_or_go_on(mesh, strategy):
    bad = np.full(7, np.nan if mesh.rank == 0 else 1.0, np.float32)
    flat = start(7)
    skipping = strategy(SGD(lr=0.1), ShardingConfiguration(mesh, nonfinite_gradients="skip"))
    skipping.step(flat, bad.copy())
    assert (skipping.steps, skipping.skipped_steps) == (0, 1)
    assert np.array_equal(flat, start(7))
    going_on = strategy(SGD(lr=0.1), ShardingConfiguration(mesh, nonfinite_gradients="ignore"))
    going_on.step(flat, bad.copy())
    assert np.isnan(flat).all()


@pytest.mark.mpi(min_size=2)
def test_a_sum_that_overflows_is_told_apart(mesh):
    optimizer = DDPOptimizer(SGD(lr=0.1), mesh)
    with pytest.raises(FloatingPointError, match="overflowed"):
        optimizer.step(start(7), np.full(7, 3e38, np.float32))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: np.ones(8, np.float32), ValueError, "gradients have 8 elements, but parameters have 7"),
        (lambda: np.ones((7, 1), np.float32), ValueError, r"must be flat \(1-D\), got shape \(7, 1\)"),
        (lambda: np.ones(7), TypeError, "gradients are float64, but parameters are float32"),
        (lambda: np.ones(14, np.float32)[::2], ValueError, "gradients must be contiguous"),
        (lambda: [1.0] * 7, TypeError, "gradients must be a flat NumPy or CuPy array, got list"),
        (lambda: empty_on_device(7, np.float32), TypeError, "gradients are a DeviceArray, but parameters a ndarray"),
        (lambda: None, TypeError, "needs the gradients"),
        (lambda: read_only(np.ones(7, np.float32)), ValueError, "gradients are read-only"),
    ],
)
def test_bad_gradients_on_one_rank_raise_on_all(mesh, strategy, make, error, message):
    optimizer = strategy(SGD(lr=0.1, momentum=0.9), mesh)
    flat = train(optimizer, start(7), steps=1)
    before, state = flat.copy(), optimizer.serialize()
    with pytest.raises(error, match=message):
        optimizer.step(flat, make() if mesh.rank == mesh.size - 1 else np.ones(7, np.float32))
    assert np.array_equal(flat, before)
    assert optimizer.serialize() == state


def read_only(array):
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "bad",
    [
        read_only(np.zeros(7, np.float32)),
        np.zeros(7, np.int64),
        np.zeros((2, 2), np.float32),
        np.zeros(14, np.float32)[::2],
    ],
)
def test_bad_parameters(mesh, bad):
    with pytest.raises((TypeError, ValueError), match="parameters (must be|are read-only)"):
        DDPOptimizer(SGD(lr=0.1), mesh).step(bad, np.zeros(7, np.float32))


@pytest.mark.mpi(min_size=2)
def test_ranks_with_different_numbers_of_parameters(mesh):
    size = 7 + (mesh.rank == 0)
    with pytest.raises(ValueError, match="rank 0 1 tensors of 8 float32 values.*rank 1 1 tensors of 7"):
        DDPOptimizer(SGD(lr=0.1), mesh).step(start(size), np.ones(size, np.float32))


def test_an_optimizer_stays_with_its_model(mesh):
    optimizer = DDPOptimizer(SGD(lr=0.1), mesh)
    train(optimizer, start(7), steps=1)
    with pytest.raises(
        ValueError, match="state for 1 tensors of 7 float32 values, first 'parameters', but was given 1 tensors of 8"
    ):
        optimizer.step(start(8), np.ones(8, np.float32))


def test_another_array_of_the_same_parameters_goes_on(mesh):
    expected = train(DDPOptimizer(AdamW(lr=0.1), mesh), start(7), steps=3)
    optimizer = DDPOptimizer(AdamW(lr=0.1), mesh)
    flat = start(7)
    for step in range(3):
        flat = flat.copy()
        optimizer.step(flat, gradients(step, mesh.size, 7)[mesh.rank].copy())
    assert np.array_equal(flat, expected)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("thing", [None, SGD, "adam", 3])
def test_a_rule_that_is_none(mesh, strategy, thing):
    with pytest.raises(TypeError, match="needs an update rule"):
        strategy(thing, mesh)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"minimum_parameter_group_size": 0}, "minimum_parameter_group_size=0"),
        ({"max_gradient_norm": 0.0}, "max_gradient_norm=0.0"),
        ({"nonfinite_gradients": "pray"}, "raise, skip, ignore"),
    ],
)
def test_bad_configurations(mesh, options, message):
    with pytest.raises(ValueError, match=message):
        ShardingConfiguration(mesh, **options)


@pytest.mark.mpi(min_size=2)
def test_first_step_starts_from_the_parameters_of_rank_0(mesh, same_on_all):
    flat = start(7) + mesh.rank
    DDPOptimizer(SGD(lr=0.1), mesh).step(flat, np.zeros(7, np.float32))
    assert np.array_equal(flat, start(7))
    drifted = flat + mesh.rank
    optimizer = DDPOptimizer(SGD(lr=0.1), mesh)
    optimizer.step(drifted, np.zeros(7, np.float32))
    drifted += mesh.rank
    optimizer.synchronize_optimizer_state()
    assert same_on_all(drifted)


@pytest.mark.mpi(min_size=2)
def test_debug_notices_parameters_that_drift(comm):
    with mpishard.Mesh(comm, debug=True) as mesh:
        optimizer = DDPOptimizer(SGD(lr=0.1), mesh)
        flat = train(optimizer, start(7), steps=1)
        if mesh.rank == 1:
            flat[3] += 1e-6
        with pytest.raises(RuntimeError, match=r"after step 2 the parameters of ranks \[1\] differ"):
            optimizer.step(flat, np.ones(7, np.float32))
        optimizer.synchronize_optimizer_state()
        optimizer.step(flat, np.ones(7, np.float32))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("rule", [AdamW(lr=0.1), LAMB(lr=0.1)], ids=lambda rule: type(rule).__name__)
def test_device_arrays_take_the_same_steps(mesh, strategy, rule):
    device = empty_on_device(57, np.float32, kind=DeviceArray)
    arrays.copy_to_device(start(57), device)
    optimizer = strategy(rule, ShardingConfiguration(mesh, max_gradient_norm=1.0))
    on_host = strategy(rule, ShardingConfiguration(mesh, max_gradient_norm=1.0))
    flat = start(57)
    for step in range(3):
        gradient = gradients(step, mesh.size, 57)[mesh.rank]
        staged = empty_on_device(57, np.float32, kind=DeviceArray)
        arrays.copy_to_device(gradient, staged)
        optimizer.step(device, staged)
        on_host.step(flat, gradient.copy())
    assert np.array_equal(arrays.to_host(device), flat)
    assert optimizer.serialize() == on_host.serialize()
