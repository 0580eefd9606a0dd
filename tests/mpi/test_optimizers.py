"""Optimizers: one averaged step on all ranks, moving averages, loss scales, and what they keep and send."""

from __future__ import annotations

from dataclasses import replace

import hybrid
import numpy as np
import pytest
from mpi4py import MPI
from steps import SPECS, STRATEGIES, gradients, one_step, start, train, write_gradients
from training_problems import TOKENS, gpt

import mpishard
from mpishard import (
    LAMB,
    LBFGS,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    DDPOptimizer,
    Evaluation,
    Lion,
    LocalSGDOptimizer,
    OptimizationProblem,
    ParameterGroup,
    RMSprop,
    ShardingConfiguration,
    ZeRO1Optimizer,
    ZeRO2Optimizer,
    load_checkpoint,
    nn,
    save_checkpoint,
)
from mpishard.comm import collectives
from mpishard.compression import Int8Compressor
from mpishard.data.sampling import Sampler, share
from mpishard.layout.tensors import ParameterSpec
from mpishard.optim.loss_scale import LossScale
from mpishard.parameters.flat import FlatParameters

pytestmark = pytest.mark.pairs(1)

# Optimizers: one averaged step on all ranks, whatever is sharded, and what they keep and send for it.

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
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)


def reference(rule, size, ranks, dtype=np.float32, steps=3):
    """The rule alone, on the exact mean gradient."""
    parameters = start(size, dtype)
    slots = [np.full(size, rule.initial(slot), dtype) for slot in rule.slots]
    for step in range(steps):
        total = gradients(step, ranks, size, dtype).sum(0)
        rule.update(parameters, total, slots, step + 1, divisor=ranks)
    return parameters


@each_strategy
@each_rule
@pytest.mark.pairs(8)
def test_every_strategy_takes_the_averaged_step_to_the_last_bit(mesh, same_on_all, strategy, rule):
    for size in (1, 7, 57):
        for dtype in (np.float32, np.float64):
            result = train(strategy(rule, mesh), start(size, dtype))
            assert same_on_all(result)
            assert np.array_equal(result, reference(rule, size, mesh.size, dtype))


@pytest.mark.parametrize("rule", [AdamW(lr=0.1), LAMB(lr=0.1)], ids=["AdamW", "LAMB"])
def test_large_and_uneven(mesh, rule):
    expected = reference(rule, 1_000_003, mesh.size, steps=1)
    for strategy in STRATEGIES:
        assert np.array_equal(train(strategy(rule, mesh), start(1_000_003), steps=1), expected)


def takes(optimizer, parameters, steps):
    """Steps along the gradients of a model."""
    for step in steps:
        write_gradients(parameters, gradients(step, optimizer.mesh.size, 40)[optimizer.mesh.rank])
        optimizer.step(parameters)
    return parameters.flat


GROUPS = [ParameterGroup("a", weight_decay=0.3), ParameterGroup(["b", "c", "d"], lr_factor=0.5)]


@each_strategy
@each_rule
@pytest.mark.pairs(8)
def test_every_strategy_updates_parameter_groups_by_their_own_values(mesh, same_on_all, strategy, rule):
    """Cuts of shards and of groups do not meet; the reference updates tensor by tensor."""
    rule, expected, first = replace(rule, groups=GROUPS), start(40), 0
    for spec, own in zip(SPECS, rule.by_tensor([spec.name for spec in SPECS]), strict=True):
        part = slice(first, first := first + spec.size)
        slots = [np.full(spec.size, rule.initial(slot), np.float32) for slot in rule.slots]
        for step in range(3 if spec.size else 0):
            total = gradients(step, mesh.size, 40).sum(0)[part]
            own.update(expected[part], total, slots, step + 1, divisor=mesh.size)
    found = takes(strategy(rule, mesh), FlatParameters.over(start(40), SPECS), range(3))
    assert same_on_all(found)
    assert np.array_equal(found, expected)


@each_strategy
def test_clipping_by_value(mesh, same_on_all, strategy):
    most = 0.75
    expected = start(57)
    for step in range(3):
        mean = np.clip(gradients(step, mesh.size, 57).sum(0) / np.float32(mesh.size), -most, most)
        SGD(lr=0.1).update(expected, mean, [], step + 1)
    result = train(strategy(SGD(lr=0.1), ShardingConfiguration(mesh, max_gradient_value=most)), start(57))
    assert same_on_all(result)
    assert np.array_equal(result, expected)


@each_strategy
def test_overlap_bucket_sizes_and_ways_of_sums_do_not_change_the_bits(mesh, strategy, exchange, monkeypatch):
    library, results = MPI.get_vendor()[0], []
    for overlap, least in ((True, 2**62), (False, 2**62), (True, 0)):  # sums by the library, and by exchanges of pieces
        exchange(range(least, 2**62))
        monkeypatch.setitem(collectives.IN_PARTS_FROM, library, least)
        for group in (1, 16, 1000):
            options = {"overlap_communication": overlap, "minimum_parameter_group_size": group}
            config = ShardingConfiguration(mesh, max_gradient_norm=1.0, **options)
            optimizer = strategy(AdamW(lr=0.1), config)
            results.append(takes(optimizer, FlatParameters.over(start(40), SPECS), range(3)))
    assert all(np.array_equal(result, results[0]) for result in results)


@each_strategy
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


@each_strategy
def test_clipping_by_global_norm(mesh, strategy):
    config = ShardingConfiguration(mesh, max_gradient_norm=0.5)
    optimizer = strategy(SGD(lr=1.0), config)
    flat = np.zeros(57)
    mean = gradients(0, mesh.size, 57, np.float64).mean(0)
    optimizer.step(flat, gradients(0, mesh.size, 57, np.float64)[mesh.rank].copy())
    norm = np.linalg.norm(mean)
    assert optimizer.gradient_norm == pytest.approx(norm, rel=1e-14)
    assert np.allclose(flat, -mean * 0.5 / (norm + 1e-6), rtol=1e-14, atol=0)
    huge = np.zeros(4)
    optimizer = strategy(SGD(lr=1.0), ShardingConfiguration(mesh, max_gradient_norm=1.0))
    optimizer.step(huge, np.full(4, 1e200))
    assert optimizer.gradient_norm == pytest.approx(2e200, rel=1e-14)
    assert np.allclose(huge, -0.5, rtol=1e-12)


@each_strategy
def test_reset_forgets_gradients_whatever_has_become_of_them(mesh, strategy):
    parameters = FlatParameters.over(start(40), SPECS)
    optimizer = strategy(SGD(lr=1.0), mesh)
    for _ in range(2):  # before the optimizer is bound, and after
        write_gradients(parameters, np.ones(40, np.float32))
        parameters.reset_gradients()
        before = parameters.flat.copy()
        one_step(optimizer, parameters, 1.0)
        assert np.array_equal(parameters.flat, before - 1)


@each_strategy
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


@each_strategy
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
@each_strategy
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


def test_another_array_of_the_same_parameters_goes_on(mesh):
    optimizer, flat = DDPOptimizer(AdamW(lr=0.1), mesh), start(7)
    for step in range(3):
        flat = flat.copy()
        optimizer.step(flat, gradients(step, mesh.size, 7)[mesh.rank].copy())
    assert np.array_equal(flat, reference(AdamW(lr=0.1), 7, mesh.size))


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


@each_strategy
def test_accumulated_arrays_then_a_pass_of_the_model(mesh, strategy):
    """What was accumulated for one update is no part of the next."""
    parameters = FlatParameters(SPECS)
    optimizer = strategy(SGD(lr=1.0), ShardingConfiguration(mesh, auto_sync_gradients=False))
    for value in (1, 3):
        optimizer.step(parameters, np.full(40, value, np.float32))
    assert (parameters.gather() == 0).all() and mesh.ledger.sent(label="gradients") == 0
    optimizer.synchronize_optimizer_state()
    assert (parameters.gather() == -2).all()
    for value in (4, 6):
        one_step(optimizer, parameters, value)
        assert (parameters.gather() == -2).all()
    optimizer.synchronize_optimizer_state()
    assert (parameters.gather() == -7).all()


# The exponential moving average of the parameters: state of every optimizer, and a while in their place.

DECAY, STEPS = 0.75, 5


def path(ranks):
    """The parameters after each step, and their average: the first is that of the first step."""
    flat, found, average = start(40), [], np.zeros(40, np.float32)
    for step in range(STEPS):
        SGD(lr=0.1).update(flat, gradients(step, ranks, 40).sum(0), [], step + 1, divisor=ranks)
        keep = np.float32(DECAY if step else 0)
        average = keep * average + np.float32(1 - keep) * flat
        found.append((flat.copy(), average.copy()))
    return found


@each_strategy
def test_every_strategy_keeps_it(mesh, same_on_all, strategy):
    rule = SGD(lr=0.1, ema_decay=DECAY)
    optimizer, parameters = strategy(rule, mesh), FlatParameters.over(start(40), SPECS)
    with pytest.raises(ValueError, match="no average .*before the first step"):
        with optimizer.averaged_parameters():
            pass
    for step, (flat, average) in enumerate(path(mesh.size)):
        takes(optimizer, parameters, [step])
        with optimizer.averaged_parameters():
            assert same_on_all(parameters.flat)
            assert np.array_equal(parameters.flat, average)
        assert np.array_equal(parameters.flat, flat)
    with pytest.raises(ArithmeticError), optimizer.averaged_parameters():
        raise ArithmeticError  # the parameters come back
    assert np.array_equal(parameters.flat, flat)


def test_workers_of_local_sgd_have_one(mesh, same_on_all):
    optimizer = LocalSGDOptimizer(SGD(lr=0.1, ema_decay=DECAY), mesh, sync_every=2)
    parameters = FlatParameters.over(start(40), SPECS)
    takes(optimizer, parameters, range(3))
    with optimizer.averaged_parameters():
        assert same_on_all(parameters.flat)
    assert same_on_all(parameters.flat)


def test_it_goes_on_from_checkpoints_and_bytes_of_another_strategy(mesh, tmp_path):
    folder = mesh.world.comm.bcast(tmp_path)
    rule, expected = SGD(lr=0.1, ema_decay=DECAY), path(mesh.size)[-1]
    first, parameters = STRATEGIES[1](rule, mesh), FlatParameters.over(start(40), SPECS)
    takes(first, parameters, range(3))
    save_checkpoint(folder, parameters, first)
    state, flat = first.serialize(), parameters.flat.copy()
    for strategy in STRATEGIES:
        restored, optimizer = FlatParameters.over(start(40), SPECS), strategy(rule, mesh)
        load_checkpoint(folder, restored, optimizer)
        read, again = FlatParameters.over(flat.copy(), SPECS), strategy(rule, mesh)
        again.deserialize(state)
        for each, values in ((optimizer, restored), (again, read)):
            takes(each, values, range(3, STEPS))
            assert np.array_equal(values.flat, expected[0])
            with each.averaged_parameters():
                assert np.array_equal(values.flat, expected[1])
    with pytest.raises(ValueError, match="slots: ema"):
        load_checkpoint(folder, parameters, DDPOptimizer(SGD(lr=0.1), mesh))


def quadratic(parameters, samples, gradients):
    gradients += len(samples) * parameters
    return 0.5 * len(samples) * float(parameters @ parameters)


def value(parameters, samples):
    return len(samples) * float(parameters.sum())


def test_it_is_evaluated_on_request(mesh):
    problem = OptimizationProblem(quadratic, np.ones(3), 8, 8, steps=4, micro_batch_size=2)
    config, found = ShardingConfiguration(mesh, reproducible=True), []
    for averaged in (False, True):
        optimizer = ZeRO1Optimizer(SGD(lr=0.5, ema_decay=0.5), config)
        evaluate = Evaluation(value, 5, every=2, averaged=averaged)
        result = optimizer.optimize(problem, progress=False, evaluate=evaluate)
        found.append(result.validation_losses.tolist())
        assert np.array_equal(result.parameters, np.full(3, 0.0625))
    # The parameters are 1/2, 1/4, 1/8, 1/16; the averages 1/2, 3/8, 1/4, 5/32.
    assert found == [[0.75, 0.1875], [1.125, 0.46875]]


def test_what_keeps_none(mesh):
    optimizer = DDPOptimizer(AdamW(), mesh)
    for make in (lambda: optimizer, lambda: ZeRO1Optimizer(LBFGS(), mesh)):
        with pytest.raises(ValueError, match="no average .*ema_decay=0.999"):
            with make().averaged_parameters():
                pass
    with pytest.raises(ValueError, match="ema_decay cannot"):
        optimizer.rule = AdamW(ema_decay=0.9)
    task = OptimizationProblem(quadratic, np.ones(3), 8, 8, steps=4)
    with pytest.raises(ValueError, match="averaged=True.*AdamW ema_decay"):
        optimizer.optimize(task, progress=False, evaluate=Evaluation(value, 5, every=2, averaged=True))
    for decay, error in ((1, ValueError), (-0.1, ValueError), ("0.9", TypeError)):
        with pytest.raises(error, match="SGD: ema_decay="):
            SGD(ema_decay=decay)
    with pytest.raises(ValueError, match="outer rule keeps no average"):
        LocalSGDOptimizer(SGD(), mesh, outer=SGD(ema_decay=0.9))


# Loss scaling: gradients arrive multiplied, steps are the same, and an overflow on one rank is one on all.


def succeed(scale, times):
    for _ in range(times):
        scale.succeeded()
    return scale.value


def test_halves_after_an_overflow_and_doubles_after_two_thousand_steps():
    scale = LossScale("dynamic")
    assert scale.value == 2.0**16
    assert scale.overflowed()
    assert succeed(scale, 1999) == 2.0**15
    assert succeed(scale, 1) == 2.0**16
    succeed(scale, 1999)
    assert scale.overflowed()
    assert succeed(scale, 1999) == 2.0**15  # counted anew
    while scale.value > 1:
        assert scale.overflowed()
    assert not scale.overflowed()
    assert scale.value == 1
    for setting, value in ((8.0, 8.0), (None, 1.0)):  # a fixed one stays
        scale = LossScale(setting)
        assert not scale.overflowed()
        assert succeed(scale, 3000) == value
        scale.restore((2.0, 5))
        assert (scale.value, scale.state) == (value, None)


@each_strategy
def test_an_overflow_on_one_rank_skips_on_all(comm, same_on_all, strategy):
    """On every mesh, also where that rank's gradients meet only some of the others."""
    with mpishard.Mesh(comm) as base:
        for mesh in hybrid.meshes(base):
            config = ShardingConfiguration(mesh, loss_scale="dynamic")
            optimizer, parameters = strategy(SGD(lr=1.0), config), hybrid.model(mesh)
            optimizer.bind(parameters)
            assert parameters.loss_scale == optimizer.loss_scale == 2.0**16
            for step in range(4):
                before = parameters.gather()
                gradient = hybrid.local_gradient(parameters, mesh, step) * parameters.loss_scale
                holder = max(comm.allgather(mesh.rank if parameters.size else 0))
                if step in (1, 2) and mesh.rank == holder:
                    gradient[-1:] = np.inf
                write_gradients(parameters, gradient)
                optimizer.step(parameters)
                assert np.array_equal(parameters.gather(), before) == (step in (1, 2) or parameters.size == 0)
            assert parameters.loss_scale == optimizer.loss_scale == 2.0**14
            assert (optimizer.steps, optimizer.skipped_steps) == (2, 2)
            state = optimizer.serialize()
            assert same_on_all(state)
            for bound_before in (False, True):
                again = DDPOptimizer(SGD(lr=1.0), ShardingConfiguration(mesh, loss_scale="dynamic"))
                another = hybrid.model(mesh)
                if bound_before:
                    again.bind(another)
                    assert another.loss_scale == 2.0**16
                again.deserialize(state)
                again.bind(another)
                assert another.loss_scale == again.loss_scale == 2.0**14 and again.skipped_steps == 2


def test_what_is_not_finite_at_one_is_no_matter_of_scale(mesh):
    optimizer = DDPOptimizer(SGD(lr=1.0), ShardingConfiguration(mesh, loss_scale="dynamic"))
    flat = np.zeros(3)
    for _ in range(16):
        optimizer.step(flat, np.full(3, np.nan))
    assert optimizer.loss_scale == 1
    with pytest.raises(FloatingPointError, match="step 17"):
        optimizer.step(flat, np.full(3, np.nan))
    assert not flat.any()


@each_strategy
@pytest.mark.parametrize("bound", [True, False], ids=["bound", "bound by the first step"])
def test_a_model_scales_its_gradients_itself(mesh, strategy, bound):
    results = []
    tokens = np.arange(12).reshape(2, 6) % 7
    for scale in (None, "dynamic", 256.0):
        model = nn.GPT(vocabulary_size=7, context_length=6, width=8, layers=1, heads=2, dtype=np.float64)
        optimizer = strategy(SGD(lr=0.1), ShardingConfiguration(mesh, loss_scale=scale, max_gradient_norm=0.5))
        if bound:
            optimizer.bind(model.parameters)
        for _ in range(2):
            model.loss_and_gradient(tokens, tokens)
            optimizer.step(model.parameters)
        results.append([*model.parameters.gather(), optimizer.gradient_norm])
    assert np.array_equal(results[0], results[1]) and np.array_equal(results[0], results[2])
    assert results[0][-1] > 0.5  # it was clipped


def test_settings_that_contradict(mesh):
    for scale in (0, -1.0, np.inf, np.nan, "static", True):
        with pytest.raises((ValueError, TypeError), match='above 0, or "dynamic", or None'):
            ShardingConfiguration(mesh, loss_scale=scale)
    with pytest.raises(ValueError, match="looks for gradients that overflow"):
        ShardingConfiguration(mesh, loss_scale="dynamic", nonfinite_gradients="ignore")
    optimizer = DDPOptimizer(SGD(), ShardingConfiguration(mesh, loss_scale="dynamic"))
    task = OptimizationProblem(lambda *_: 0.0, np.zeros(3), samples=45, batch_size=15, steps=1)
    with pytest.raises(ValueError, match="loss_scale is for models"):
        optimizer.optimize(task, progress=False)


# Models and rules made distributed in one line.


def descend(model, batch, count):
    """A step of gradient descent on one rank."""
    model.loss_and_gradient(TOKENS[batch, :-1], TOKENS[batch, 1:])
    model.parameters.flat[:] -= 0.1 * model.parameters.gradients.flat / count
    model.parameters.reset_gradients()


def test_sharded_model_and_rule_in_one_line_each(mesh, same_on_all):
    for make in (mpishard.as_distributed, mpishard.as_distributed_for_high_bandwidth):
        model = make(gpt(), mesh)
        optimizer = make(SGD(lr=0.1), mesh)
        assert isinstance(optimizer, DDPOptimizer)
        assert (model.rank, model.world_size) == (mesh.rank, mesh.size)
        reference = gpt()
        for step in range(3):
            batch = Sampler(45, 2 * mesh.size).batch(step + 1)
            (samples,) = share(batch, mesh.rank, mesh.size)
            model.loss_and_gradient(TOKENS[samples, :-1], TOKENS[samples, 1:])
            optimizer.step(model.parameters, count=2 * mesh.size)
            descend(reference, batch, 2 * mesh.size)
        assert np.allclose(model.parameters.flat, reference.parameters.flat, rtol=1e-12, atol=1e-12)
        shards = mesh.world.comm.allgather(model.local_parameter_shard)
        assert np.array_equal(np.concatenate(shards), model.parameters.flat)
        assert same_on_all(model.gather_full_parameters())


def test_low_bandwidth_is_local_sgd_with_compressed_averages(mesh, same_on_all):
    model = mpishard.as_distributed_for_low_bandwidth(gpt(), mesh)
    optimizer = mpishard.as_distributed_for_low_bandwidth(AdamW(lr=0.01), mesh, max_gradient_norm=0.5)
    assert isinstance(model, mpishard.ShardedModel)
    assert isinstance(optimizer, mpishard.LocalSGDOptimizer)
    config = optimizer.config
    assert (optimizer.sync_every, config.hierarchical, config.max_gradient_norm) == (8, True, 0.5)
    assert config.compressor == Int8Compressor()

    def batch(samples):
        return TOKENS[samples, :-1], TOKENS[samples, 1:]

    sizes = {"samples": 45, "batch_size": 15, "tokens_per_sample": TOKENS.shape[1] - 1}
    task = OptimizationProblem.for_model(model.model, batch, **sizes, steps=20)
    result = optimizer.optimize(task, progress=False)
    assert same_on_all(model.gather_full_parameters())
    assert result.loss_history[-1] < result.loss_history[0]
    assert optimizer.outer_steps == 3  # after 8 steps, 16, and the last
    high = mpishard.ShardingConfiguration.create_for_high_bandwidth(mesh)
    assert (high.compressor, high.hierarchical, high.sync_every) == (None, False, 1)


@pytest.mark.parametrize("thing", [3, "model", None, np.zeros(3)])
def test_what_cannot_be_distributed(mesh, thing):
    with pytest.raises(TypeError, match="FlatParameters as `parameters`"):
        mpishard.as_distributed(thing, mesh)
    with pytest.raises(TypeError, match="is distributed already"):
        mpishard.as_distributed(DDPOptimizer(SGD(lr=0.1), mesh), mesh)
    with pytest.raises(TypeError, match="Mesh or a ShardingConfiguration"):
        mpishard.as_distributed(SGD(lr=0.1), thing)


def test_synchronize_then_step_reduces_once(mesh):
    """auto_sync_gradients=False with a model: passes add up, synchronize_gradients reduces, step applies."""
    config = ShardingConfiguration(mesh, auto_sync_gradients=False)
    for steps in (1, 2):  # the first step binds the optimizer, the second finds it bound
        model = mpishard.as_distributed(gpt(), config)
        optimizer = mpishard.as_distributed(SGD(lr=0.1), config)
        reference = gpt()
        for _ in range(steps):
            for part in (0, 1):
                samples = np.arange(2) + 2 * part + 4 * mesh.rank
                model.loss_and_gradient(TOKENS[samples, :-1], TOKENS[samples, 1:])
            model.synchronize_gradients()
            optimizer.step(model.parameters, count=4 * mesh.size)
            descend(reference, np.arange(4 * mesh.size), 4 * mesh.size)
        assert np.allclose(model.parameters.flat, reference.parameters.flat, rtol=1e-12, atol=1e-12)
