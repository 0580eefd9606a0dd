"""Optimizers: one averaged step on all ranks, whatever is sharded, and what they keep and send for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from mpi4py import MPI
from steps import SPECS, STRATEGIES, gradients, one_step, start, train, write_gradients

import mpishard
from mpishard import (
    LAMB,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    DDPOptimizer,
    Lion,
    ParameterGroup,
    RMSprop,
    ShardingConfiguration,
    ZeRO1Optimizer,
    ZeRO2Optimizer,
)
from mpishard.backend import array as arrays
from mpishard.comm import collectives
from mpishard.data_parallel import summation
from mpishard.layout.tensors import ParameterSpec
from mpishard.parameters.flat import FlatParameters

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


GROUPS = [ParameterGroup("a", weight_decay=0.3), ParameterGroup(["b", "c", "d"], lr_factor=0.5)]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_every_strategy_updates_parameter_groups_by_their_own_values(mesh, same_on_all, strategy, rule):
    """Cuts of shards and of groups do not meet; the reference updates tensor by tensor."""
    rule, expected, first = replace(rule, groups=GROUPS), start(40), 0
    for spec, own in zip(SPECS, rule.by_tensor([spec.name for spec in SPECS]), strict=True):
        part = slice(first, first := first + spec.size)
        slots = [np.full(spec.size, rule.initial(slot), np.float32) for slot in rule.slots]
        for step in range(3 if spec.size else 0):
            total = gradients(step, mesh.size, 40).sum(0)[part]
            own.update(expected[part], total, slots, step + 1, divisor=mesh.size)
    parameters, optimizer = FlatParameters.over(start(40), SPECS), strategy(rule, mesh)
    for step in range(3):
        write_gradients(parameters, gradients(step, mesh.size, 40)[mesh.rank])
        optimizer.step(parameters)
    assert same_on_all(parameters.flat)
    assert np.array_equal(parameters.flat, expected)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_clipping_by_value(mesh, same_on_all, strategy):
    most = 0.75
    expected = start(57)
    for step in range(3):
        mean = np.clip(gradients(step, mesh.size, 57).sum(0) / np.float32(mesh.size), -most, most)
        SGD(lr=0.1).update(expected, mean, [], step + 1)
    result = train(strategy(SGD(lr=0.1), ShardingConfiguration(mesh, max_gradient_value=most)), start(57))
    assert same_on_all(result)
    assert np.array_equal(result, expected)


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


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_overlap_bucket_sizes_and_ways_of_sums_do_not_change_the_bits(mesh, strategy, monkeypatch):
    library, results = MPI.get_vendor()[0], []
    for overlap, least in ((True, 2**62), (False, 2**62), (True, 0)):  # sums by the library, and by exchanges of pieces
        monkeypatch.setitem(collectives.EXCHANGED_BYTES, library, range(least, 2**62))
        monkeypatch.setitem(summation.IN_PARTS_FROM, library, least)
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
        agreements = 4 * 2 * 8 * 8  # eight numbers a step
        assert mesh.ledger.sent(label="control") == mesh.ledger.sent() - sent <= agreements
        # Ranks agree on arguments and on finite gradients at once, but in the first steps.
        mesh.ledger.clear()
        train(optimizer, flat, steps=4)
        agreements = {name: each["calls"] for name, each in mesh.ledger.summary().items() if "control" in name}
        assert agreements == ({} if mesh.size == 1 else {"world.all_reduce control": 4})


def test_bytes_of_state_and_gradients_a_rank(mesh):
    """The formulas of the ZeRO paper: state / N; gradients whole, or / N and a bucket."""
    specs = [ParameterSpec(str(i), (840,)) for i in range(5)]
    whole, bucket = 5 * 840 * 4, 840 * 4
    at_a_time = 2 if mesh.size > 1 else 1  # one is summed while another is written; on one rank nothing is under way
    for strategy, overlap, state, gradient in [
        (DDPOptimizer, True, 2 * whole, whole),
        (ZeRO1Optimizer, True, 2 * whole // mesh.size, whole),
        (ZeRO2Optimizer, False, 2 * whole // mesh.size, whole // mesh.size + bucket),
        (ZeRO2Optimizer, True, 2 * whole // mesh.size, whole // mesh.size + at_a_time * bucket),
    ]:
        parameters = FlatParameters(specs)
        config = ShardingConfiguration(mesh, minimum_parameter_group_size=840, overlap_communication=overlap)
        optimizer = strategy(AdamW(lr=0.1), config)
        optimizer.bind(parameters)
        for _ in range(2):
            write_gradients(parameters, np.ones(parameters.size, np.float32))
            optimizer.step(parameters)
        assert (optimizer.state.nbytes, optimizer.state.gradient_bytes) == (state, gradient), strategy.__name__


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
        parameters.mark_ready("d")
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


def test_another_array_of_the_same_parameters_goes_on(mesh):
    expected = train(DDPOptimizer(AdamW(lr=0.1), mesh), start(7), steps=3)
    optimizer = DDPOptimizer(AdamW(lr=0.1), mesh)
    flat = start(7)
    for step in range(3):
        flat = flat.copy()
        optimizer.step(flat, gradients(step, mesh.size, 7)[mesh.rank].copy())
    assert np.array_equal(flat, expected)


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


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("rule", [AdamW(lr=0.1), LAMB(lr=0.1)], ids=lambda rule: type(rule).__name__)
def test_device_arrays_take_the_same_steps(mesh, device, strategy, rule):
    there = device.put(start(57))
    optimizer = strategy(rule, ShardingConfiguration(mesh, max_gradient_norm=1.0))
    on_host = strategy(rule, ShardingConfiguration(mesh, max_gradient_norm=1.0))
    flat = start(57)
    for step in range(3):
        gradient = gradients(step, mesh.size, 57)[mesh.rank]
        optimizer.step(there, device.put(gradient))
        on_host.step(flat, gradient.copy())
    assert np.array_equal(arrays.to_host(there), flat)
    assert optimizer.serialize() == on_host.serialize()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_accumulated_arrays_then_a_pass_of_the_model(mesh, strategy):
    """What was accumulated for one update is no part of the next."""
    parameters = FlatParameters(SPECS)
    optimizer = strategy(SGD(lr=1.0), ShardingConfiguration(mesh, auto_sync_gradients=False))
    for value in (1, 3):
        optimizer.step(parameters, np.full(40, value, np.float32))
    optimizer.synchronize_optimizer_state()
    assert (parameters.gather() == -2).all()
    write_gradients(parameters, np.full(40, 5, np.float32))
    optimizer.step(parameters)
    optimizer.synchronize_optimizer_state()
    assert (parameters.gather() == -7).all()
