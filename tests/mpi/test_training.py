"""The training loop: the same run on any number of ranks, and how it ends."""

from __future__ import annotations

import functools
import os
import signal
import time
import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hybrid import factorisations
from mpi4py import MPI
from training_problems import DATA, TARGETS, TOKENS, gpt, gpt_problem, large_gpt_problem, least_squares, problem
from variants import full

import mpishard
from mpishard import (
    SGD,
    AdamW,
    DDPOptimizer,
    FlatParameters,
    LocalSGDOptimizer,
    OptimizationProblem,
    ShardingConfiguration,
    ZeRO1Optimizer,
    ZeRO2Optimizer,
    ZeRO3Optimizer,
)
from mpishard.data.sampling import Sampler
from mpishard.launch.exit_codes import ScriptEnding
from mpishard.layout.tensors import ParameterSpec

pytestmark = pytest.mark.pairs(1)

# The training loop: the same run on any number of ranks, every sample once, and what functions and models may do.

STRATEGIES = [DDPOptimizer, ZeRO1Optimizer, ZeRO2Optimizer, ZeRO3Optimizer]


def alone(strategy, rule, make_problem, **options):
    """The same run on this rank alone."""
    with mpishard.Mesh(MPI.COMM_SELF) as mesh:
        return strategy(rule, ShardingConfiguration(mesh, **options)).optimize(make_problem(), progress=False)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("micro_batch_size", [None, 1, 3])
@pytest.mark.quick
def test_own_gradient_on_any_number_of_ranks(mesh, same_on_all, strategy, micro_batch_size):
    expected = alone(strategy, AdamW(lr=0.1), problem)
    task = problem(micro_batch_size=micro_batch_size)
    result = strategy(AdamW(lr=0.1), mesh).optimize(task, progress=False)
    assert not task.start.any()  # it stays as it was
    assert np.allclose(result.loss_history, expected.loss_history, rtol=1e-12, atol=1e-12)
    assert np.allclose(result.parameters, expected.parameters, rtol=1e-12, atol=1e-12)
    assert same_on_all(result.parameters)
    assert same_on_all(result.loss_history)
    # 5 steps an epoch, the last of 5 samples only
    assert (result.steps, result.samples, result.stop_reason) == (12, 110, "steps")
    whole = np.arange(45), np.zeros(6)
    assert least_squares(result.parameters, *whole) < least_squares(np.zeros(6), *whole)
    assert result.communication["data.all_reduce loss"]["calls"] == 12


def named_fit(parameters, samples, gradients):
    residual = DATA[samples, :3] @ parameters["k"] + parameters["b"] - TARGETS[samples]
    gradients["k"] += DATA[samples, :3].T @ residual
    gradients["b"] += residual.sum()
    return 0.5 * float(residual @ residual)


@pytest.mark.parametrize("strategy", [*STRATEGIES, LocalSGDOptimizer, "elastic"])
def test_the_result_has_the_names_of_the_start(mesh, same_on_all, strategy):
    start = FlatParameters.of({"k": np.zeros(3), "b": np.zeros(())})
    task = problem(function=named_fit, start=start, steps=4)
    rule = SGD(lr=0.1)
    optimizer = mpishard.ElasticOptimizer(rule, mesh) if strategy == "elastic" else strategy(rule, mesh)
    result = optimizer.optimize(task, progress=False)
    assert result.parameters is start
    assert result.parameters["k"].shape == (3,) and result.parameters["k"].all() and result.parameters["b"].shape == ()
    assert np.array_equal(result.parameters, result.parameters.flat)
    assert same_on_all(result.parameters["k"])


GPT_RULES = [SGD(lr=0.3, momentum=0.9), AdamW(lr=3e-3)]


@pytest.fixture(scope="module", params=[10, *full(20)])
def gpt_steps(request):
    return request.param


@pytest.fixture(scope="module")
def gpt_alone(gpt_steps):
    """Loss, parameters and last gradient by rule, on one rank; 4 steps an epoch, the last of 6 samples."""
    make = functools.partial(gpt_problem, steps=gpt_steps)
    return {type(rule): alone(DDPOptimizer, rule, make, max_gradient_norm=1.0) for rule in GPT_RULES}


def flat(result):
    """The parameters of a result as one array."""
    parameters = result.parameters
    return parameters if isinstance(parameters, np.ndarray) else parameters.gather()


def exactly_zero_gradient(name, size):
    """Elements whose gradient is zero in exact arithmetic: attention's key bias moves all scores of a query alike.

    What comes out is rounding noise, which Adam divides by its own size; SGD leaves it noise.
    """
    zero = np.zeros(size, bool)
    if name.endswith("attention.qkv.bias"):
        zero.reshape(2, 3, -1)[:, 1] = True  # by head, then query, key, value
    return zero


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("rule", GPT_RULES, ids=["SGD", "AdamW"])
@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_gpt_equals_one_rank(mesh, gpt_alone, gpt_steps, strategy, rule, micro_batch_size):
    """Loss, gradients (through SGD's steps and the norm) and parameters, over epochs with ragged last batches."""
    config = ShardingConfiguration(mesh, max_gradient_norm=1.0)
    task = gpt_problem(micro_batch_size=micro_batch_size, steps=gpt_steps)
    result = strategy(rule, config).optimize(task, progress=False)
    expected = gpt_alone[type(rule)]
    found = flat(result)
    assert np.allclose(result.loss_history, expected.loss_history, rtol=1e-12, atol=1e-12)
    start = 0
    for spec in task.start.specs:
        ours, theirs = (array[start : start + spec.size] for array in (found, expected.parameters.flat))
        if isinstance(rule, AdamW):
            keep = ~exactly_zero_gradient(spec.name, spec.size)
            ours, theirs = ours[keep], theirs[keep]
        assert np.allclose(ours, theirs, rtol=1e-12, atol=1e-12), spec.name
        start += spec.size


@pytest.fixture(scope="module")
def large_gpt_alone():
    return alone(DDPOptimizer, SGD(lr=0.3, momentum=0.9), large_gpt_problem, max_gradient_norm=1.0)


@pytest.mark.parametrize(
    ("zero_stage", "micro_batch_size"),
    [(0, None), (3, 4), *(pytest.param(*each, marks=pytest.mark.full) for each in ((1, 4), (2, 4), (3, None)))],
)
def test_gpt_on_any_mesh(comm, same_on_all, large_gpt_alone, zero_stage, micro_batch_size):
    """The loop over tensor and pipeline ranks, with micro-batches of its own outside those of the pipeline."""
    rule = SGD(lr=0.3, momentum=0.9)
    with mpishard.Mesh(comm) as base:
        for data, tensor, pipeline in factorisations(comm.size):
            if max(tensor, pipeline) > 4:
                continue
            config = ShardingConfiguration(base, max_gradient_norm=1.0)
            optimizer = mpishard.HybridShardedOptimizer(rule, config, pipeline, tensor, data, zero_stage=zero_stage)
            task = large_gpt_problem(optimizer.mesh, micro_batch_size, microbatches=5)
            result = optimizer.optimize(task, progress=False)
            model = mpishard.as_distributed(SimpleNamespace(parameters=task.start), optimizer.config)
            assert same_on_all(result.loss_history)
            assert np.allclose(result.loss_history, large_gpt_alone.loss_history, rtol=1e-12, atol=1e-12)
            whole = model.gather_full_parameters()
            assert np.allclose(whole, large_gpt_alone.parameters, rtol=1e-12, atol=1e-12), optimizer.mesh
            assert result.parameters is task.start
            assert (result.steps, result.samples) == (5, 13 + 13 + 13 + 6 + 13)


@pytest.mark.parametrize("strategy", [ZeRO1Optimizer, ZeRO2Optimizer, ZeRO3Optimizer])
@pytest.mark.parametrize("micro_batch_size", [None, 4, 5])
@pytest.mark.parametrize("reproducible", [False, True])
def test_one_rank_sums_micro_batches_of_a_tied_model_as_ddp_does(strategy, micro_batch_size, reproducible):
    """Nothing is sent; what is sharded on more ranks is written to the same sums."""
    results = []
    for each in (DDPOptimizer, strategy):
        with mpishard.Mesh(MPI.COMM_SELF) as mesh:
            config = ShardingConfiguration(mesh, minimum_parameter_group_size=200, reproducible=reproducible)
            task = large_gpt_problem(mesh, micro_batch_size, sharded_parameters=each is ZeRO3Optimizer)
            result = each(AdamW(lr=3e-3), config).optimize(task, progress=False)
            assert not mesh.ledger.sent()
            results.append((np.array(result.loss_history), result.parameters.gather()))
    (expected_losses, expected), (losses, parameters) = results
    if reproducible or (micro_batch_size is None and strategy is not ZeRO3Optimizer):
        assert np.array_equal(losses, expected_losses) and np.array_equal(parameters, expected)
    else:  # what a pass adds up by itself, it adds to the earlier passes or to zero
        np.testing.assert_allclose(losses, expected_losses, rtol=1e-12, atol=0)
        np.testing.assert_allclose(parameters, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("micro_batch_size", [None, 1, 4])
def test_every_sample_once_an_epoch(mesh, micro_batch_size):
    seen = []

    def record(parameters, samples, gradients):
        seen.append(samples.copy())
        return 0.0

    task = problem(steps=10, micro_batch_size=micro_batch_size, function=record)
    DDPOptimizer(SGD(lr=0.1), mesh).optimize(task, progress=False)
    everything = np.concatenate([x for part in mesh.world.comm.allgather(seen) for x in part])
    assert np.array_equal(np.sort(everything), np.repeat(np.arange(45), 2))
    assert all(len(samples) <= (micro_batch_size or 10) for samples in seen)


@pytest.mark.mpi(min_size=2)
def test_a_batch_smaller_than_the_ranks(mesh):
    with pytest.raises(ValueError, match=f"batch_size={mesh.size - 1} .*the {mesh.size} "):
        DDPOptimizer(SGD(lr=0.1), mesh).optimize(problem(batch_size=mesh.size - 1))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_size": 0}, ValueError, "batch_size=0"),
        ({"micro_batch_size": -1}, ValueError, "micro_batch_size=-1"),
        ({"steps": -1}, ValueError, "steps=-1"),
        ({"tolerance": -1.0}, ValueError, "tolerance=-1.0"),
        ({"start": np.zeros(0)}, ValueError, "start is empty"),
        ({"start": FlatParameters.of({"none": np.zeros((0, 3))})}, ValueError, "start is empty"),
        ({"start": {"a": np.zeros(3)}}, TypeError, "got dict; give mpishard.FlatParameters.of.*minimize"),
        ({"start": [np.zeros(3)]}, TypeError, "got list; give mpishard.FlatParameters.of.*minimize"),
    ],
)
def test_bad_problems(options, error, message):
    with pytest.raises(error, match=message):
        problem(**options)


@pytest.mark.parametrize("mode", ["raise", "ignore"])
@pytest.mark.usefixtures("without_debug")
def test_a_gradient_that_nobody_sees_is_reported_once(mesh, mode):
    def assigns(parameters, samples, gradients):
        gradients = DATA[samples].T @ np.ones(len(samples))
        return float(gradients @ gradients)

    optimizer = DDPOptimizer(SGD(lr=0.1), ShardingConfiguration(mesh, nonfinite_gradients=mode))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.optimize(problem(function=assigns), progress=False)
    of_zeros = [warning for warning in caught if "gradient is exactly zero" in str(warning.message)]
    assert len(of_zeros) == (mesh.rank == 0)
    assert all(warning.filename == __file__ for warning in of_zeros)


def mean(parameters, samples, gradients):
    own = np.zeros_like(gradients)
    loss = least_squares(parameters, samples, own)
    gradients += own / len(samples)
    return loss / len(samples)


def overwriting(parameters, samples, gradients):
    own = np.zeros_like(gradients)
    loss = least_squares(parameters, samples, own)
    gradients[...] = own
    return loss


def penalised(parameters, samples, gradients):
    return least_squares(parameters, samples, gradients) + 100.0


def test_debug_finds_functions_that_return_no_sums(same_on_all):
    with mpishard.Mesh(debug=True) as mesh:
        for wrong, what in ((mean, "returns a mean"), (overwriting, "overwrites"), (penalised, "does not return sums")):
            with pytest.raises(ValueError, match=what):
                DDPOptimizer(SGD(lr=1e-3), mesh).optimize(problem(batch_size=16, function=wrong))
        random = np.random.default_rng(mesh.rank)
        for right in (least_squares, lambda *arguments: least_squares(*arguments) * (1 + random.standard_normal())):
            task = problem(batch_size=16, function=right)
            result = DDPOptimizer(SGD(lr=1e-3), mesh).optimize(task, progress=False)
            assert same_on_all(result.parameters)
        expected = alone(DDPOptimizer, SGD(lr=1e-3), lambda: problem(batch_size=16))
        assert np.allclose(result.parameters, expected.parameters, rtol=1e-12)


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("strategy", [DDPOptimizer, ZeRO2Optimizer])
def test_a_function_must_not_change_what_it_reads(strategy, debug):
    """Found on one rank, refused on all."""

    def changing(what):
        def function(parameters, samples, gradients):
            loss = task.function(parameters, samples, gradients)
            if mesh.rank == mesh.size - 1:
                array = samples if what == "sample indices" else getattr(parameters, "flat", parameters)
                array[...] = array[::-1] * 2
            return loss

        return function

    with mpishard.Mesh(debug=debug) as mesh:
        for make in (problem, gpt_problem):
            for what in ("parameters", "sample indices"):
                task = make(batch_size=16)
                start = np.ones(6) if make is problem else task.start
                wrong = replace(task, function=changing(what), start=start)
                with pytest.raises(ValueError, match=f"changes the {what}"):
                    strategy(SGD(lr=1e-3), mesh).optimize(wrong, progress=False)


def test_a_second_run_says_that_it_resumes(mesh, capsys):
    optimizer = DDPOptimizer(SGD(lr=0.1), mesh)
    message = "resuming at step 2: optimizer state"
    for number in range(3):
        optimizer.optimize(problem(steps=2), progress=False)
        assert (message in capsys.readouterr().err) == (number == 1 and mesh.rank == 0)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("use", ["optimize", "step"])
def test_ranks_that_start_apart_are_told_so(mesh, same_on_all, use):
    start = np.full(6, float(mesh.rank))
    optimizer = DDPOptimizer(SGD(lr=1e-3), mesh)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if use == "step":
            optimizer.step(start, np.ones(6))
        else:
            start = optimizer.optimize(problem(start=start), progress=False).parameters
    said = [str(each.message) for each in caught if "initial parameters differ" in str(each.message)]
    assert len(said) == (mesh.rank == 0)
    assert same_on_all(start)
    again = problem(start=np.full(6, float(mesh.rank)))  # so does a second problem
    assert same_on_all(optimizer.optimize(again, progress=False).parameters)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("what", "message"), [("apart", "parameters differ"), ("zero", "exactly zero")])
def test_a_warning_that_is_an_error_is_raised_on_all(comm, what, message):
    """Also where the first rank's data axis alone would not have found it."""
    with mpishard.Mesh(comm, tensor=2 if comm.size == 4 else 1) as mesh:
        apart = what == "apart" and mesh.tensor.rank == mesh.tensor.size - 1
        start = np.full(6, float(mesh.rank if apart else 1))
        parameters = FlatParameters.over(start, (ParameterSpec("x", (6,)),), mesh.place)  # without a gradient
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises((RuntimeWarning, RuntimeError), match=message):
                DDPOptimizer(SGD(lr=1e-3), mesh).step(parameters)
        mesh.world.barrier()


@pytest.mark.parametrize("strategy", [DDPOptimizer, ZeRO2Optimizer])
def test_debug_looks_at_models_where_they_add_up_by_themselves(strategy):
    with mpishard.Mesh(debug=True) as mesh:
        task = gpt_problem(batch_size=16, steps=1)
        strategy(SGD(lr=0.1), mesh).optimize(task, progress=False)
        wrong = replace(task, function=lambda p, samples, g: task.function(p, samples, g) / max(1, len(samples)))
        if strategy is DDPOptimizer:
            with pytest.raises(ValueError, match="returns a mean"):
                strategy(SGD(lr=0.1), mesh).optimize(wrong, progress=False)


@pytest.mark.parametrize("refused", [False, True])
def test_passes_add_up_by_hand_after_a_run(mesh, folder, refused):
    """With auto_sync_gradients=False; also after a run that raised before its first step."""
    optimizer = DDPOptimizer(SGD(lr=0.1), ShardingConfiguration(mesh, auto_sync_gradients=False))
    task = gpt_problem(steps=1)
    if refused:
        with mpishard.Checkpoints(folder, mesh) as checkpoints, pytest.raises(ValueError, match="the fact 'steps' is"):
            optimizer.optimize(replace(task, facts={"steps": 3}), progress=False, checkpoints=checkpoints)
    else:
        optimizer.optimize(task, progress=False)
    for _ in range(2):
        task.function(task.start, np.arange(3), None)
        optimizer.step(task.start)
    optimizer.synchronize_optimizer_state()
    assert optimizer.steps == 2 - refused


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (lambda rank: {"samples": 40 + rank}, "samples is 40 on rank 0, 41 on rank 1"),
        (lambda rank: {"seed": rank}, "seed is 0 on rank 0, 1 on rank 1"),
        (lambda rank: {"start": np.zeros(6 + rank)}, "start is .*of 6 .* on rank 0, .* of 7 .* on rank 1"),
        (lambda rank: {"start": np.zeros(6, np.float32 if rank else np.float64)}, "start is .* float64 .* float32 "),
    ],
)
def test_ranks_with_different_problems(mesh, options, message):
    with pytest.raises(ValueError, match=message):
        DDPOptimizer(SGD(lr=0.1), mesh).optimize(problem(**options(mesh.rank)), progress=False)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_from_before_the_run_are_no_part_of_it(mesh, strategy):
    results = []
    for look_first in (False, True):
        task = gpt_problem(steps=2)
        optimizer = strategy(SGD(lr=0.1), mesh)
        for _ in range(2):  # the second run finds the optimizer bound
            if look_first:
                task.function(task.start, np.arange(3), None)
            results.append(flat(optimizer.optimize(task, progress=False)).copy())
    assert np.array_equal(results[0], results[2])
    assert np.array_equal(results[1], results[3])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_goes_on_where_its_state_was_saved(mesh, strategy):
    """Samples and learning rate both go by the optimizer's clock."""
    rule = AdamW(lr=mpishard.cosine(0.1, steps=20))
    whole = strategy(rule, mesh).optimize(problem(steps=8), progress=False)
    first = strategy(rule, mesh)
    half = first.optimize(problem(steps=4), progress=False)
    second = strategy(rule, mesh)
    second.deserialize(first.serialize())
    task = problem(start=half.parameters, steps=4)
    rest = second.optimize(task, progress=False)
    assert np.array_equal(rest.parameters, whole.parameters)
    assert np.array_equal(np.concatenate([half.loss_history, rest.loss_history]), whole.loss_history)
    assert half.samples + rest.samples == whole.samples == 75


@pytest.mark.parametrize(
    ("loss", "accepted"),
    [(1, True), (np.float32(1), True), (np.array(1.0), True), (None, False), ("1.0", False), (np.True_, False)],
)
@pytest.mark.usefixtures("without_debug")
def test_what_a_loss_may_be(mesh, loss, accepted):
    task = problem(function=lambda *_: loss, steps=1)
    optimizer = DDPOptimizer(SGD(lr=0.1), mesh)
    if accepted:
        assert optimizer.optimize(task, progress=False).loss_history[0] > 0
    else:
        with pytest.raises(TypeError, match=f"loss .*got a {type(loss).__name__}"):
            optimizer.optimize(task, progress=False)


def test_misunderstandings_are_explained(mesh):
    with pytest.raises(TypeError, match="OptimizationProblem, got function"):
        DDPOptimizer(SGD(lr=0.1), mesh).optimize(least_squares)
    with pytest.raises(TypeError, match="not the class SGD"):
        mpishard.as_distributed(SGD, mesh)
    with pytest.raises((TypeError, ValueError), match="callback=3"):
        DDPOptimizer(SGD(lr=0.1), mesh).optimize(problem(), callback=3 if mesh.rank == mesh.size - 1 else None)


# How a run of training ends: goals, callbacks, signals, time, and errors, of one rank or of all.


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_stops_by_tolerance(mesh, strategy):
    task = problem(batch_size=45, steps=500, tolerance=1e-3)
    result = strategy(SGD(lr=0.5), mesh).optimize(task, progress=False)
    assert result.stop_reason == "tolerance"
    assert 1 < result.steps < 500
    gradient = np.zeros(6)
    least_squares(result.parameters, np.arange(45), gradient)
    assert np.linalg.norm(gradient) / 45 < 1e-3


@pytest.mark.parametrize("listens", ["all", "rank 0"])
def test_stops_by_a_callback_of_any_rank(mesh, comm, same_on_all, listens):
    states, stopper = [], 0 if listens == "rank 0" else mesh.size - 1

    def callback(state):
        states.append(state)
        return state.step == 4 and mesh.rank == stopper

    schedule = mpishard.linear(0.1, steps=10)
    listener = callback if listens == "all" or mesh.rank == 0 else None
    result = DDPOptimizer(SGD(lr=schedule), mesh).optimize(problem(steps=None), callback=listener, progress=False)
    assert comm.allgather((result.steps, result.stop_reason)) == [(4, "callback")] * comm.size
    assert same_on_all(result.loss_history)
    seen = [(state.step, state.learning_rate, state.samples, state.loss) for state in states]
    expected = [(step, schedule(step), 10 * step, result.loss_history[step - 1]) for step in (1, 2, 3, 4)]
    assert seen == (expected if listener else [])


@pytest.mark.quick
def test_a_signal_to_one_rank_stops_all_with_a_checkpoint(mesh, comm, tmp_path):
    folder = comm.bcast(tmp_path)
    with mpishard.Signals() as signals, mpishard.Checkpoints(folder, mesh) as checkpoints:

        def callback(state):
            if state.step == 3 and mesh.rank == mesh.size - 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            return signals(state)

        optimizer = ZeRO1Optimizer(AdamW(lr=0.1), mesh)
        result = optimizer.optimize(problem(), callback=callback, progress=False, checkpoints=checkpoints)
    assert (result.steps, result.stop_reason) == (3, "callback")
    assert comm.allgather(signals.came) == [rank == mesh.size - 1 for rank in range(mesh.size)]
    assert (folder / "latest").resolve().name == "step-00000003"


def test_a_loop_of_ones_own_agrees_to_stop(mesh):
    """The signal comes between the moments at which the ranks ask."""
    with mpishard.Signals() as signals:
        assert not signals.should_stop(mesh)
        if mesh.rank == mesh.size - 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        assert signals.should_stop(mesh) and signals.should_stop(mesh)
        with pytest.raises(TypeError, match=r"ask signals\.should_stop\(mesh\)"):
            signals()
        with pytest.raises(TypeError, match="mesh=3"):
            signals.should_stop(3)


def pressing(press, step, function=least_squares):
    """`function`, which presses in its call for a step; it must be called once a step."""
    calls = iter(range(1, 1000))

    def interrupted(*arguments):
        if next(calls) == step:
            press()
        return function(*arguments)

    return interrupted


@pytest.mark.parametrize("kind", ["default", "ignore", "local"])
@pytest.mark.usefixtures("without_debug")
def test_ctrl_c_on_one_rank_stops_all_with_a_checkpoint(mesh, comm, tmp_path, capfd, ctrl_c, kind):
    def optimizer():
        if kind == "local":
            return LocalSGDOptimizer(AdamW(lr=0.1), mesh, sync_every=3)
        return DDPOptimizer(AdamW(lr=0.1), ShardingConfiguration(mesh, nonfinite_gradients=nonfinite))

    nonfinite = "ignore" if kind == "ignore" else "raise"
    folder, culprit = comm.bcast(tmp_path), mesh.rank == mesh.size - 1
    task = problem(function=pressing(ctrl_c, 3) if culprit else least_squares)
    with mpishard.Checkpoints(folder, mesh) as checkpoints:
        result = optimizer().optimize(task, progress=False, checkpoints=checkpoints)
        assert (result.steps, result.stop_reason) == (3, "signal") and ScriptEnding.interrupted
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        resumed = optimizer().optimize(problem(), progress=False, checkpoints=checkpoints, resume=True)
    assert (resumed.resumed_steps, resumed.stop_reason) == (3, "steps") and not ScriptEnding.interrupted
    errors = capfd.readouterr().err
    assert ("stopped after step 3; optimize(..., resume=True) resumes from" in errors) == (mesh.rank == 0)
    assert ("Ctrl-C: the run ends after this step" in errors) == (culprit and mesh.rank == 0)


def test_the_second_ctrl_c_ends_the_process(ctrl_c):
    def press_twice():
        ctrl_c()
        ctrl_c()

    with mpishard.Mesh(MPI.COMM_SELF) as mesh, pytest.raises(KeyboardInterrupt):
        task = problem(function=pressing(press_twice, 2))
        DDPOptimizer(SGD(lr=0.1), mesh).optimize(task, progress=False)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_stops_when_time_is_over_on_any_rank(mesh, comm):
    def slow(parameters, samples, gradients):
        time.sleep(0.06 if mesh.rank == mesh.size - 1 else 0)
        return 0.0

    task = OptimizationProblem(slow, np.zeros(3), samples=45, batch_size=45, seconds=0.05)
    result = DDPOptimizer(SGD(lr=0.1), mesh).optimize(task, progress=False)
    assert result.stop_reason == "seconds"
    assert len(set(comm.allgather(result.steps))) == 1


@pytest.mark.parametrize("reason", ["callback", "seconds", "signal"])
@pytest.mark.usefixtures("without_debug")
def test_one_rank_stops_all_of_any_mesh(comm, reason, ctrl_c):
    """Ranks of other stages, or of other parts of a tensor, have a data axis of their own."""

    def callback(state):
        late = mesh.rank == culprits[-1] and state.step == 2
        if reason == "seconds" and late:
            time.sleep(seconds)
        return reason == "callback" and late

    culprits = []
    seconds = 0.3 if reason == "seconds" else None
    with mpishard.Mesh(comm) as base:
        for data, tensor, pipeline in [sizes for sizes in factorisations(comm.size) if max(sizes[1:]) <= 4][:4]:
            mesh = base.reshaped(data=data, tensor=tensor, pipeline=pipeline)
            for culprit in {0, mesh.size - 1}:
                culprits.append(culprit)
                task = replace(large_gpt_problem(mesh, microbatches=4), seconds=seconds, steps=20)
                if reason == "signal" and mesh.rank == culprit:
                    task = replace(task, function=pressing(ctrl_c, 2, task.function))
                listener = None if reason == "signal" else callback  # with a callback, ranks agree on stopping
                result = DDPOptimizer(SGD(lr=0.1), mesh).optimize(task, callback=listener, progress=False)
                steps = comm.allgather((result.steps, result.stop_reason))
                assert steps == steps[:1] * comm.size
                assert result.stop_reason == reason
                assert result.steps == 2 or (reason == "seconds" and result.steps < 20)


@pytest.mark.parametrize("elastic", [False, True], ids=["fixed", "elastic"])
@pytest.mark.parametrize("where", ["function", "callback", "expect", "exit"])
@pytest.mark.quick
def test_an_error_of_one_rank_is_raised_on_all(mesh, comm, where, elastic):
    """A script that catches it can go on: no rank waits, and the parameters are those of the last step."""
    if elastic and os.environ.get("OMPI_MCA_mpi_ft_enable") == "1":
        pytest.skip("counts as a death")

    def fail():
        if mesh.rank == comm.size - 1 and len(seen) == 3:
            raise SystemExit(3) if where == "exit" else LookupError("no data")

    def function(parameters, samples, gradients):
        if where in ("function", "exit"):
            fail()
        return least_squares(parameters, samples, gradients)

    def callback(state):
        seen.append(state.parameters.copy())
        if where == "callback":
            fail()

    seen = []
    kind = mpishard.ElasticOptimizer if elastic else DDPOptimizer
    optimizer = kind(SGD(lr=0.01), mesh)
    task = problem(function=function, expect=lambda coming: fail() if where == "expect" else None)
    raised = SystemExit if where == "exit" else LookupError if mesh.rank == comm.size - 1 else RuntimeError
    with pytest.raises(raised) as error:
        optimizer.optimize(task, callback=callback, progress=False)
    if where == "exit":
        assert error.value.code == 3
    elif raised is RuntimeError:
        assert str(error.value).startswith(f"rank {comm.size - 1}: LookupError: no data")
    assert len(seen) == 3
    again = optimizer.optimize(problem(start=seen[-1], steps=2), progress=False)
    assert again.steps == 2 and len(set(comm.allgather(again.parameters.tobytes()))) == 1


@pytest.mark.parametrize("strategy", [LocalSGDOptimizer, DDPOptimizer])
@pytest.mark.parametrize("steps", [3, 12])
def test_an_error_of_one_rank_in_a_model_is_raised_at_the_next_synchronization(mesh, strategy, steps):
    def batch(samples):
        if mesh.rank == mesh.size - 1:
            raise LookupError("no data")
        return TOKENS[samples, :-1], TOKENS[samples, 1:]

    task = OptimizationProblem.for_model(gpt(), batch, samples=45, batch_size=10, tokens_per_sample=8, steps=steps)
    with pytest.raises(LookupError if mesh.rank == mesh.size - 1 else RuntimeError, match="no data"):
        strategy(SGD(lr=0.01), mesh).optimize(task, progress=False)


def test_no_steps_at_all(mesh):
    result = DDPOptimizer(SGD(lr=0.1), mesh).optimize(problem(steps=0), progress=False)
    assert result.steps == result.samples == len(result.loss_history) == 0
    with pytest.raises(ValueError, match="nothing would stop"):
        DDPOptimizer(SGD(lr=0.1), mesh).optimize(problem(steps=None))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.usefixtures("without_debug")
def test_nonfinite_loss_gradients_end_the_loop_on_all_ranks(mesh, strategy):
    def broken(parameters, samples, gradients):
        gradients += np.nan if mesh.rank == 0 and broken.calls == 3 else 1.0
        broken.calls += 1
        return 1.0

    broken.calls = 0
    with pytest.raises(FloatingPointError, match="step 4: 'parameters' on rank 0"):
        strategy(SGD(lr=0.1), mesh).optimize(problem(function=broken, batch_size=15), progress=False)


@pytest.mark.parametrize("strategy", [DDPOptimizer, ZeRO2Optimizer, ZeRO3Optimizer])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nonfinite_loss_with_finite_gradients(mesh, strategy, value):
    def broken(parameters, samples, gradients):
        return least_squares(parameters, samples, gradients) + (value if 7 in samples else 0.0)

    def train(mode, **options):
        optimizer = strategy(SGD(lr=1e-3), ShardingConfiguration(mesh, nonfinite_gradients=mode, **options))
        task = problem(function=broken, batch_size=15, micro_batch_size=1, steps=3)
        return optimizer.optimize(task, progress=False)

    (step,) = [number for number in (1, 2, 3) if 7 in Sampler(45, 15).batch(number)]
    with pytest.raises(FloatingPointError, match=rf"loss at step {step}: {value} of samples 7 on rank \d+"):
        train("raise")
    skipping, ignoring = train("skip", max_gradient_norm=1.0), train("ignore")
    assert (skipping.skipped_steps, ignoring.skipped_steps) == (1, 0)
    for result in (skipping, ignoring):
        assert np.flatnonzero(~np.isfinite(result.loss_history)).tolist() == [step - 1]
    assert np.isfinite(skipping.parameters).all()


def test_infinite_loss_is_no_fault_of_the_loss_scale(mesh):
    optimizer = DDPOptimizer(SGD(lr=0.1), ShardingConfiguration(mesh, loss_scale="dynamic"))
    task = gpt_problem(steps=1)
    broken = replace(task, function=lambda *arguments: task.function(*arguments) + np.inf)
    before = optimizer.loss_scale
    with pytest.raises(FloatingPointError, match="infinite loss at step 1: inf"):
        optimizer.optimize(broken, progress=False)
    assert optimizer.loss_scale == before
