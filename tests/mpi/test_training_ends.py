"""How a run of training ends: goals, callbacks, signals, time, and errors, of one rank or of all."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import numpy as np
import pytest
from hybrid import factorisations
from mpi4py import MPI
from training_problems import TOKENS, gpt, gpt_problem, large_gpt_problem, least_squares, problem

import mpishard
from mpishard import (
    SGD,
    AdamW,
    DDPOptimizer,
    LocalSGDOptimizer,
    OptimizationProblem,
    ShardingConfiguration,
    ZeRO1Optimizer,
    ZeRO2Optimizer,
    ZeRO3Optimizer,
)
from mpishard.data.sampling import Sampler
from mpishard.launch.exit_codes import ScriptEnding

STRATEGIES = [DDPOptimizer, ZeRO1Optimizer, ZeRO2Optimizer, ZeRO3Optimizer]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_stops_by_tolerance(mesh, strategy):
    task = problem(batch_size=45, steps=500, tolerance=1e-3)
    result = strategy(SGD(lr=0.5), mesh).optimize(task, progress=False)
    assert result.stop_reason == "tolerance"
    assert 1 < result.steps < 500
    gradient = np.zeros(6)
    least_squares(result.parameters, np.arange(45), gradient)
    assert np.linalg.norm(gradient) / 45 < 1e-3


def test_stops_by_a_callback_on_any_rank(mesh, same_on_all):
    def callback(state):
        states.append(state)
        return state.step == 4 and mesh.rank == mesh.size - 1

    states = []
    schedule = mpishard.linear(0.1, steps=10)
    result = DDPOptimizer(SGD(lr=schedule), mesh).optimize(problem(steps=None), callback=callback, progress=False)
    assert (result.steps, result.stop_reason) == (4, "callback")
    assert [state.step for state in states] == [1, 2, 3, 4]
    assert [state.learning_rate for state in states] == [schedule(step) for step in (1, 2, 3, 4)]
    assert [state.samples for state in states] == [10, 20, 30, 40]
    assert np.array_equal([state.loss for state in states], result.loss_history)
    assert same_on_all(result.loss_history)


@pytest.mark.faults
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


@pytest.fixture
def ctrl_c():
    """Presses Ctrl-C in this process, which may have been started where it is ignored, as in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)
    ScriptEnding.interrupted = False  # or the tests would end with its exit code


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
    task = replace(problem(), function=pressing(ctrl_c, 3) if culprit else least_squares)
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
        task = replace(problem(), function=pressing(press_twice, 2))
        DDPOptimizer(SGD(lr=0.1), mesh).optimize(task, progress=False)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.faults
def test_stops_when_time_is_over_on_any_rank(mesh, comm):
    def slow(parameters, samples, gradients):
        time.sleep(0.06 if mesh.rank == mesh.size - 1 else 0)
        return 0.0

    task = OptimizationProblem(slow, np.zeros(3), samples=45, batch_size=45, seconds=0.05)
    result = DDPOptimizer(SGD(lr=0.1), mesh).optimize(task, progress=False)
    assert result.stop_reason == "seconds"
    assert len(set(comm.allgather(result.steps))) == 1


@pytest.mark.faults
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
@pytest.mark.parametrize("where", ["function", "callback", "exit"])
def test_an_error_of_one_rank_is_raised_on_all(mesh, comm, where, elastic):
    """A script that catches it can go on: no rank waits, and the parameters are those of the last step."""
    if elastic and os.environ.get("OMPI_MCA_mpi_ft_enable") == "1":
        pytest.skip("counts as a death")

    def fail():
        if mesh.rank == comm.size - 1 and len(seen) == 3:
            raise SystemExit(3) if where == "exit" else LookupError("no data")

    def function(parameters, samples, gradients):
        if where != "callback":
            fail()
        return least_squares(parameters, samples, gradients)

    def callback(state):
        seen.append(state.parameters.copy())
        if where == "callback":
            fail()

    seen = []
    kind = mpishard.ElasticOptimizer if elastic else DDPOptimizer
    optimizer = kind(SGD(lr=0.01), mesh)
    task = replace(problem(), function=function)
    raised = SystemExit if where == "exit" else LookupError if mesh.rank == comm.size - 1 else RuntimeError
    with pytest.raises(raised) as error:
        optimizer.optimize(task, callback=callback, progress=False)
    if where == "exit":
        assert error.value.code == 3
    elif raised is RuntimeError:
        assert f"rank {comm.size - 1} " in str(error.value) and "LookupError: no data" in str(error.value)
    assert len(seen) == 3
    again = optimizer.optimize(replace(problem(), start=seen[-1], steps=2), progress=False)
    assert again.steps == 2 and len(set(comm.allgather(again.parameters.tobytes()))) == 1


def test_an_error_between_synchronizations_is_raised_at_the_next(mesh, comm):
    def function(parameters, samples, gradients):
        if mesh.rank == comm.size - 1:
            raise LookupError("no data")
        return least_squares(parameters, samples, gradients)

    for steps in (3, 12):
        task = replace(problem(steps=steps), function=function)
        with pytest.raises(LookupError if mesh.rank == comm.size - 1 else RuntimeError, match="no data"):
            mpishard.LocalSGDOptimizer(SGD(lr=0.01), mesh).optimize(task, progress=False)


def test_an_error_of_one_rank_in_a_model(mesh, comm):
    def batch(samples):
        if mesh.rank == comm.size - 1:
            raise LookupError("no data")
        return TOKENS[samples, :-1], TOKENS[samples, 1:]

    task = OptimizationProblem.for_model(gpt(), batch, samples=45, batch_size=10, tokens_per_sample=8, steps=2)
    with pytest.raises(LookupError if mesh.rank == comm.size - 1 else RuntimeError, match="no data"):
        DDPOptimizer(SGD(lr=0.01), mesh).optimize(task, progress=False)


def test_no_steps_at_all(mesh):
    result = DDPOptimizer(SGD(lr=0.1), mesh).optimize(problem(steps=0), progress=False)
    assert result.steps == result.samples == len(result.loss_history) == 0


def test_nothing_that_stops(mesh):
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
    task = OptimizationProblem(broken, np.zeros(3), samples=45, batch_size=15, steps=10)
    with pytest.raises(FloatingPointError, match="step 4: 'parameters' on rank 0"):
        strategy(SGD(lr=0.1), mesh).optimize(task, progress=False)


@pytest.mark.parametrize("strategy", [DDPOptimizer, ZeRO2Optimizer, ZeRO3Optimizer])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nonfinite_loss_with_finite_gradients(mesh, strategy, value):
    def broken(parameters, samples, gradients):
        return least_squares(parameters, samples, gradients) + (value if 7 in samples else 0.0)

    def train(mode, **options):
        optimizer = strategy(SGD(lr=1e-3), ShardingConfiguration(mesh, nonfinite_gradients=mode, **options))
        task = OptimizationProblem(broken, np.zeros(6), samples=45, batch_size=15, micro_batch_size=1, steps=3)
        return optimizer.optimize(task, progress=False)

    (step,) = [number for number in (1, 2, 3) if 7 in Sampler(45, 15).batch(number)]
    with pytest.raises(FloatingPointError, match=rf"loss at step {step}: {value} of samples 7 on rank \d+; parameters"):
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
    with pytest.raises(FloatingPointError, match="infinite loss at step 1: inf of samples"):
        optimizer.optimize(broken, progress=False)
    assert optimizer.loss_scale == before


def test_a_callback_on_rank_0_alone(mesh, comm):
    seen = []
    callback = (lambda state: seen.append(state.step) or state.step == 3) if mesh.rank == 0 else None
    task = problem(steps=None)
    result = DDPOptimizer(SGD(lr=0.1), mesh).optimize(task, callback=callback, progress=False)
    assert comm.allgather((result.steps, result.stop_reason)) == [(3, "callback")] * comm.size
    assert seen == ([1, 2, 3] if mesh.rank == 0 else [])
