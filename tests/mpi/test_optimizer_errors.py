"""What optimizers refuse: on all ranks, with nothing changed."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from standin import empty as empty_on_device
from standin import zeros as on_device
from steps import SPECS, STRATEGIES, gradients, one_step, start, train, write_gradients

import mpishard
from mpishard import SGD, AdamW, DDPOptimizer, ShardingConfiguration
from mpishard.backend.array import to_host
from mpishard.parameters.flat import FlatParameters


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


@pytest.mark.mpi(min_size=2)
def test_ranks_that_never_stepped_are_named(mesh):
    optimizer = DDPOptimizer(SGD(lr=1.0), ShardingConfiguration(mesh, auto_sync_gradients=False))
    optimizer.synchronize_optimizer_state()
    if mesh.rank == 0:
        optimizer.state._on_rank = object()
    with pytest.raises(ValueError, match=r"have not called step\(\) yet"):
        optimizer.synchronize_optimizer_state()


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


def after_steps(optimizer, flat, steps):
    """Take steps that are finite: after the first ones, ranks find out before the sum that it is finite."""
    for _ in range(steps):
        optimizer.step(flat, np.ones_like(flat))
    return flat.copy()


@pytest.mark.parametrize("earlier", [0, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
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


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("earlier", [0, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
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
        (lambda: unaligned(7), ValueError, "gradients must begin at a multiple of 4 bytes"),
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


@pytest.mark.parametrize(
    "bad",
    [
        read_only(np.zeros(7, np.float32)),
        np.zeros(7, np.int64),
        np.zeros((2, 2), np.float32),
        np.zeros(14, np.float32)[::2],
        unaligned(7),
    ],
)
def test_bad_parameters(mesh, bad):
    with pytest.raises((TypeError, ValueError), match="parameters (must be|are read-only)"):
        DDPOptimizer(SGD(lr=0.1), mesh).step(bad, np.zeros(7, np.float32))


@pytest.mark.parametrize("make", [lambda size: np.zeros(size, np.float32), lambda size: on_device(size, np.float32)])
@pytest.mark.parametrize(("first", "named"), [(0, False), (0, True), (3, False), (-3, True)])
def test_gradients_in_the_memory_of_the_parameters_on_one_rank(mesh, make, first, named):
    whole, other = make(20), make(7)
    flat = whole[5:12]
    parameters = FlatParameters.over(flat) if named else flat
    optimizer = DDPOptimizer(SGD(lr=1.0), mesh)
    with pytest.raises(ValueError, match="gradients share memory with the parameters"):
        optimizer.step(parameters, whole[5 + first : 12 + first] if mesh.rank == mesh.size - 1 else other)
    optimizer.step(parameters, whole[12:19])  # beside them
    assert (to_host(whole) == 0).all()


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
@pytest.mark.parametrize("auto", [True, False])
def test_gradients_of_a_pass_and_an_array_do_not_mix(mesh, strategy, auto):
    parameters = FlatParameters(SPECS)
    config = ShardingConfiguration(mesh, auto_sync_gradients=auto)
    optimizer = strategy(SGD(lr=1.0), config)
    optimizer.bind(parameters)
    write_gradients(parameters, np.ones(40, np.float32))
    with pytest.raises(ValueError, match="gradients of their own.*given an array too"):
        optimizer.step(parameters, np.ones(40, np.float32))
    parameters.reset_gradients()
    optimizer.step(parameters, np.ones(40, np.float32))
    if not auto:
        model = mpishard.as_distributed(SimpleNamespace(parameters=parameters), config)
        model.synchronize_gradients()  # of which the array is none
        with pytest.raises(ValueError, match="gradients of their own.*given an array too"):
            optimizer.step(parameters)
        parameters.reset_gradients()
        assert (parameters.gather() == 0).all()
    else:
        assert (parameters.gather() == -1).all()
