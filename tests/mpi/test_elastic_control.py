"""What changes an elastic run from outside of its script: signals to one rank and to all, and discovery."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import mpishard
from mpishard.elastic.control import ControlFolder
from mpishard.elastic.optimizer import ElasticOptimizer

pytestmark = pytest.mark.faults

ROWS = np.random.default_rng(0).standard_normal((48, 6))


def loss(parameters, samples, gradients):
    residual = ROWS[samples, :5] @ parameters - ROWS[samples, 5]
    gradients += ROWS[samples, :5].T @ residual
    return 0.5 * residual @ residual


class Run:
    """Twenty steps; on each worker `act(step)` is called after each, and its return value is the callback's."""

    def __init__(self, comm=None, steps=20, checkpoints=None, **options):
        self.comm = MPI.COMM_WORLD if comm is None else comm
        self.steps = steps
        self.checkpoints = checkpoints
        self.options = options
        self.workers = []

    def go(self, act=lambda step: None):
        def callback(state):
            self.workers.append(self.optimizer.current_workers)
            return act(state.step)

        problem = mpishard.OptimizationProblem(
            loss, np.zeros(5), samples=48, batch_size=16, micro_batch_size=2, steps=self.steps, seed=3
        )
        with mpishard.Mesh(self.comm) as mesh:
            config = mpishard.ShardingConfiguration(mesh, reproducible=True)
            inner = mpishard.ZeRO2Optimizer(mpishard.AdamW(lr=0.05), config)
            self.optimizer = ElasticOptimizer(inner, **self.options)
            kept = None if self.checkpoints is None else mpishard.Checkpoints(self.checkpoints, mesh)
            self.result = self.optimizer.optimize(
                problem, callback=callback, progress=False, checkpoints=kept, resume=kept is not None
            )
            if kept is not None:
                kept.close()
        self.reason = self.result.stop_reason
        return self


def same_bits(result, reference):
    return np.array_equal(result.parameters, reference.parameters) and np.array_equal(
        result.loss_history, reference.loss_history
    )


@pytest.fixture(scope="module")
def alone():
    """The run on one rank."""
    return Run(MPI.COMM_SELF).go().result


@pytest.fixture
def at_once(monkeypatch):
    """A rank that gets the signal does not wait for others to get it, too."""
    monkeypatch.setattr("mpishard.launch.signals._SKEW_S", 0.0)


@pytest.fixture
def folder(tmp_path):
    """The same on all ranks."""
    return Path(MPI.COMM_WORLD.bcast(str(tmp_path / "run")))


def signal_self(*numbers):
    for number in numbers:
        os.kill(os.getpid(), number)


@pytest.mark.mpi
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_all_ranks_stop_at_a_signal(number, alone, folder):
    before = signal.getsignal(number)
    first = Run(checkpoints=folder).go(lambda step: signal_self(number) if step == 4 else None)
    assert first.reason == "signal" and first.result.steps == 4
    assert signal.getsignal(number) == before
    second = Run(checkpoints=folder).go()
    assert second.result.resumed_steps == 4 and second.reason == "steps"
    assert same_bits(second.result, alone)


@pytest.mark.mpi
def test_what_ends_the_run_anyway_comes_first():
    run = Run(steps=4).go(lambda step: signal_self(signal.SIGUSR1) if step == 4 else None)
    assert run.reason == "steps"


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("which", ["first", "last"])
def test_one_rank_leaves_and_the_others_go_on(which, alone, at_once):
    world = MPI.COMM_WORLD
    who = {"first": 0, "last": world.size - 1}[which]
    run = Run().go(lambda step: signal_self(signal.SIGTERM) if step == 4 and world.rank == who else None)
    assert run.reason == "steps" and same_bits(run.result, alone)
    gathered = world.allgather(run.workers)
    assert gathered[who] == [world.size] * 4
    other = gathered[1 if who == 0 else 0]
    assert other == [world.size] * 4 + [world.size - 1] * 16


@pytest.mark.mpi(min_size=3)
def test_two_ranks_leave_one_after_the_other_and_one_that_waits_comes_in(alone, at_once):
    world = MPI.COMM_WORLD
    leaves_after = {0: 4, 1: 8}.get(world.rank)
    run = Run(max_workers=world.size - 1).go(lambda step: signal_self(signal.SIGUSR1) if step == leaves_after else None)
    assert run.reason == "steps" and same_bits(run.result, alone)
    gathered = world.allgather(run.workers)
    assert gathered[0] == [world.size - 1] * 4
    assert gathered[1] == [world.size - 1] * 8
    # The one that waited took the first one's place.
    assert gathered[world.size - 1] == [world.size - 1] * 4 + [world.size - 2] * 12


@pytest.mark.mpi(min_size=3)
def test_a_spare_that_is_asked_to_leave_is_not_taken(alone, at_once):
    world = MPI.COMM_WORLD
    spare = world.size - 1
    process = world.allgather(os.getpid())[spare]

    def act(step):
        if world.rank == 0 and step == 1:
            run.optimizer.resize(world.size - 1)
        if world.rank == 0 and step == 4:
            os.kill(process, signal.SIGUSR1)
            time.sleep(0.1)
        if world.rank == 0 and step == 8:
            run.optimizer.resize(world.size)

    run = Run()
    run.go(act)
    assert run.result.stop_reason == "steps" and same_bits(run.result, alone)
    gathered = world.allgather(run.workers)
    assert gathered[spare] == [world.size] and gathered[0] == [world.size] + [world.size - 1] * 19


@pytest.mark.mpi(min_size=2)
def test_too_few_workers_would_be_left(at_once):
    world = MPI.COMM_WORLD
    run = Run(min_workers=world.size)
    run.go(lambda step: signal_self(signal.SIGTERM) if step == 4 and world.rank == 1 else None)
    assert run.reason == "signal" and run.result.steps == 4


@pytest.mark.mpi(min_size=2)
def test_discovery(alone):
    deadline = time.monotonic() + 20

    def act(step):
        time.sleep(0.002)
        return run.optimizer.current_workers == 1 or time.monotonic() > deadline

    run = Run(discover=lambda: 0, steps=None)  # below the limits: one
    run.go(act)
    workers = MPI.COMM_WORLD.allgather(run.workers)[0]
    assert workers[0] == MPI.COMM_WORLD.size and workers[-1] == 1


@pytest.mark.mpi
def test_a_control_folder_that_others_can_open(folder):
    if MPI.COMM_WORLD.rank == 0:
        ControlFolder(folder).make()
        ControlFolder(folder).path.chmod(0o770)
    MPI.COMM_WORLD.barrier()
    with pytest.raises(ValueError, match="nobody else may open"):
        Run(folder=folder).go()


@pytest.mark.mpi
def test_the_control_folder_is_gone_after_the_run(folder):
    there = []
    path = ControlFolder(folder).path
    Run(folder=folder).go(lambda step: there.append(path.exists()))
    MPI.COMM_WORLD.barrier()
    assert all(there) and len(there) == 20 and not path.exists()


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"failure_timeout": 0}, ValueError, "failure_timeout=0 must be a number above 0"),
        ({"min_workers": "a"}, TypeError, "min_workers='a' must be a whole number"),
        ({"max_workers": 2.5}, TypeError, "max_workers=2.5 must be a whole number"),
        ({"discover": 3}, TypeError, "discover=3 must be a function, or the path of a file"),
    ],
)
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        Run(**options).go()


@pytest.mark.mpi
def test_a_place_where_no_control_folder_can_be_made(folder):
    if MPI.COMM_WORLD.rank == 0:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.touch()
    MPI.COMM_WORLD.barrier()
    with pytest.raises(FileExistsError, match="cannot be made: File exists; give it a folder that"):
        Run(folder=folder).go()
