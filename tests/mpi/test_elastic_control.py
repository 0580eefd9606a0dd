"""What changes an elastic run from outside of its script: signals to one rank and to all, and discovery."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import mpishard
from mpishard.comm import supervisor_reports
from mpishard.elastic.control import ControlFolder
from mpishard.elastic.optimizer import ElasticOptimizer
from mpishard.launch.job_notes import JobNotes

ROWS = np.random.default_rng(0).standard_normal((48, 6))


def loss(parameters, samples, gradients):
    residual = ROWS[samples, :5] @ parameters - ROWS[samples, 5]
    gradients += ROWS[samples, :5].T @ residual
    return 0.5 * residual @ residual


class Run:
    """Twenty steps; on each worker `act(step)` is called after each, and its return value is the callback's."""

    def __init__(self, comm=MPI.COMM_WORLD, steps=20, checkpoints=None, **options):
        self.comm, self.steps, self.checkpoints, self.options, self.workers = comm, steps, checkpoints, options, []

    def go(self, act=lambda step: None):
        def callback(state):
            self.workers.append(self.optimizer.current_workers)
            return act(state.step)

        problem = mpishard.OptimizationProblem(
            loss, np.zeros(5), samples=48, batch_size=16, micro_batch_size=2, steps=self.steps, seed=3
        )
        with contextlib.ExitStack() as stack:
            mesh = stack.enter_context(mpishard.Mesh(self.comm))
            config = mpishard.ShardingConfiguration(mesh, reproducible=True)
            self.optimizer = ElasticOptimizer(mpishard.ZeRO2Optimizer(mpishard.AdamW(lr=0.05), config), **self.options)
            saved = {}
            if self.checkpoints is not None:
                kept = stack.enter_context(mpishard.Checkpoints(self.checkpoints, mesh))
                saved = {"checkpoints": kept, "resume": True}
            self.result = self.optimizer.optimize(problem, callback=callback, progress=False, **saved)
        self.reason = self.result.stop_reason
        return self


def same_bits(result, reference):
    pairs = [(result.parameters, reference.parameters), (result.loss_history, reference.loss_history)]
    return all(np.array_equal(*pair) for pair in pairs)


def signals(number, after, rank=None):
    """An act: a rank, or all, get a signal after a step."""
    gets = rank in (None, MPI.COMM_WORLD.rank)
    return lambda step: os.kill(os.getpid(), number) if gets and step == after else None


@pytest.fixture(scope="module")
def alone():
    """The run on one rank."""
    return Run(MPI.COMM_SELF).go().result


@pytest.fixture
def folder(tmp_path):
    """The same on all ranks."""
    return Path(MPI.COMM_WORLD.bcast(str(tmp_path / "run")))


@pytest.mark.mpi
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_all_ranks_stop_at_a_signal(number, alone, folder):
    before = signal.getsignal(number)
    first = Run(checkpoints=folder).go(signals(number, 4))
    assert first.reason == "signal" and first.result.steps == 4
    assert signal.getsignal(number) == before
    second = Run(checkpoints=folder).go()
    assert second.result.resumed_steps == 4 and second.reason == "steps"
    assert same_bits(second.result, alone)


@pytest.mark.mpi
def test_what_ends_the_run_anyway_comes_first():
    run = Run(steps=4).go(signals(signal.SIGUSR1, 4))
    assert run.reason == "steps"


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("which", ["first", "last"])
def test_one_rank_leaves_and_the_others_go_on(which, alone, at_once):
    world = MPI.COMM_WORLD
    who = {"first": 0, "last": world.size - 1}[which]
    run = Run().go(signals(signal.SIGTERM, 4, who))
    assert run.reason == "steps" and same_bits(run.result, alone)
    gathered = world.allgather(run.workers)
    assert gathered[who] == [world.size] * 4
    other = gathered[1 if who == 0 else 0]
    assert other == [world.size] * 4 + [world.size - 1] * 16


@pytest.fixture
def reports(monkeypatch, folder):
    """Those to a supervisor that does not read them."""
    reports = object.__new__(supervisor_reports.Reports)
    reports._run = JobNotes.create(folder.parent / f"notes-{MPI.COMM_WORLD.rank}")
    reports.is_first, reports.is_silent, reports.restarted = MPI.COMM_WORLD.rank == 0, False, False
    monkeypatch.setattr(supervisor_reports.Reports, "this", reports)
    return reports


@pytest.mark.mpi
@pytest.mark.skipif(os.environ.get("OMPI_MCA_mpi_ft_enable") == "1", reason="where MPI heals it counts as a death")
def test_a_supervisor_awaits_no_step_after_an_error_that_the_script_catches(reports):
    def fail(step):
        assert reports._run.notes.training or MPI.COMM_WORLD.rank
        raise ArithmeticError("spoilt")

    with pytest.raises(ArithmeticError, match="spoilt"):
        Run().go(fail)
    assert reports._run.notes.training is (False if MPI.COMM_WORLD.rank == 0 else None)


@pytest.mark.mpi(min_size=2)
def test_the_first_of_those_that_work_reports_the_steps(at_once, reports):
    """A supervisor would end a run whose first rank has left as one that takes no step."""

    def act(step):
        looks = iter([False, True])
        reports._follow(lambda seconds: next(looks), lambda: step)
        return signals(signal.SIGTERM, 4, 0)(step)

    Run().go(act)
    assert MPI.COMM_WORLD.allgather(reports._run.notes.step)[:2] == [4, 20] and not reports.leads


@pytest.mark.mpi(min_size=3)
def test_two_ranks_leave_one_after_the_other_and_one_that_waits_comes_in(alone, at_once):
    world = MPI.COMM_WORLD
    run = Run(max_workers=world.size - 1)
    run.go(signals(signal.SIGUSR1, {0: 4, 1: 8}.get(world.rank), world.rank))
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
    assert run.reason == "steps" and same_bits(run.result, alone)
    gathered = world.allgather(run.workers)
    assert gathered[spare] == [world.size] and gathered[0] == [world.size] + [world.size - 1] * 19


@pytest.mark.mpi(min_size=2)
def test_too_few_workers_would_be_left(at_once):
    world = MPI.COMM_WORLD
    run = Run(min_workers=world.size)
    run.go(signals(signal.SIGTERM, 4, 1))
    assert run.reason == "signal" and run.result.steps == 4


@pytest.mark.mpi(min_size=2)
def test_discovery(alone):
    deadline = time.monotonic() + 120

    def act(step):
        time.sleep(0.002)
        return run.optimizer.current_workers == 1 or time.monotonic() > deadline

    run = Run(discover=lambda: 0, steps=None)  # below the limits: one
    run.go(act)
    workers = MPI.COMM_WORLD.allgather(run.workers)[0]
    assert workers[0] == MPI.COMM_WORLD.size and workers[-1] == 1


@pytest.mark.mpi
def test_a_folder_that_cannot_be_the_control_folder(folder):
    """Others can open it, or there is a file in its place."""
    for prepare, error, message in (
        (lambda: (ControlFolder(folder).make(), ControlFolder(folder).path.chmod(0o770)), ValueError, "nobody else"),
        (lambda: (shutil.rmtree(folder), folder.touch()), FileExistsError, "File exists"),
    ):
        if MPI.COMM_WORLD.rank == 0:
            prepare()
        MPI.COMM_WORLD.barrier()
        with pytest.raises(error, match=message):
            Run(folder=folder).go()
        MPI.COMM_WORLD.barrier()


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
        ({"failure_timeout": 0}, ValueError, "failure_timeout=0"),
        ({"min_workers": "a"}, TypeError, "min_workers='a'"),
        ({"max_workers": 2.5}, TypeError, "max_workers=2.5"),
        ({"discover": 3}, TypeError, "discover=3"),
    ],
)
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        Run(**options).go()
