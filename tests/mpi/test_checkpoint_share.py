"""Checkpoints by a share of the run's time."""

from __future__ import annotations

import time

import numpy as np
import pytest

import mpishard
from mpishard import Checkpoints, OptimizationProblem

pytestmark = pytest.mark.faults

ROWS = np.random.default_rng(0).standard_normal((64, 6))


class Timed(Checkpoints):
    """Notes the step of each save and how long it kept this rank; a save may be made longer."""

    def __init__(self, *arguments, longer=0.0, **options):
        self.saved, self.stalls, self.longer = [], [], longer
        super().__init__(*arguments, **options)

    def _save(self, state, asynchronous, best):
        began = time.perf_counter()
        time.sleep(self.longer)
        path = super()._save(state, asynchronous, best)
        self.saved.append(state.facts["step"])
        self.stalls.append(time.perf_counter() - began)
        return path


def problem(**options):
    def loss(parameters, samples, gradients):
        time.sleep(0.0002)
        residual = ROWS[samples, :5] @ parameters - ROWS[samples, 5]
        gradients += ROWS[samples, :5].T @ residual
        return 0.5 * residual @ residual

    return OptimizationProblem(loss, np.zeros(5), samples=64, batch_size=16, micro_batch_size=2, **options)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_saves_take_no_more_than_their_share(mesh, folder, same_on_all, asynchronous):
    share = 0.25
    with Timed(folder, mesh, every=share, asynchronous=asynchronous) as checkpoints:
        result = mpishard.ZeRO1Optimizer(mpishard.AdamW(lr=0.05), mesh).optimize(
            problem(seconds=1.0), checkpoints=checkpoints, progress=False
        )
    assert same_on_all(checkpoints.saved)
    assert checkpoints.saved[0] == 1 and checkpoints.saved[-1] == result.steps
    assert len(set(checkpoints.saved)) == len(checkpoints.saved)
    # The one at the end comes whether it is due or not, and the one before may be longer than any before.
    slowest = np.max(mesh.world.comm.allgather(checkpoints.stalls), axis=0)
    assert slowest[:-2].sum() <= share * result.seconds


def test_the_ranks_agree_by_the_time_that_the_slowest_was_kept(mesh, folder, same_on_all, monkeypatch):
    """By clocks that only saves and steps move: after a save of 6 s at 0.25 the next one comes when 24 s are over."""
    now = [1000.0 * mesh.rank]
    stall = 6.0 if mesh.rank == mesh.size - 1 else 3.0
    with Timed(folder, mesh, every=0.25) as checkpoints:
        monkeypatch.setattr(checkpoints._interval, "clock", lambda: now[0])
        save = checkpoints._save

        def slow(*arguments):
            now[0] += stall
            return save(*arguments)

        def callback(state):
            now[0] += 1.0 + 6.0 - stall if state.step in (2, 20) else 1.0

        monkeypatch.setattr(checkpoints, "_save", slow)
        mpishard.DDPOptimizer(mpishard.SGD(lr=0.05), mesh).optimize(
            problem(steps=50), checkpoints=checkpoints, callback=callback, progress=False
        )
    assert checkpoints.saved == [1, 19, 37, 50]


def test_workers_that_come_and_go(mesh, folder):
    """Whoever comes saves with the others, and nobody waits for an answer that is not given."""
    optimizer = mpishard.ElasticOptimizer(mpishard.AdamW(lr=0.05), mesh)
    workers = {}

    def callback(state):
        workers[state.step] = optimizer.current_workers
        optimizer.resize({0: 1, 1: mesh.size, 2: max(1, mesh.size - 1), 3: (mesh.size + 1) // 2}[state.step // 5 % 4])

    with Timed(folder, mesh, every=0.9, asynchronous=True, longer=0.001) as checkpoints:
        result = optimizer.optimize(problem(steps=60), checkpoints=checkpoints, callback=callback, progress=False)
    assert result.steps == 60
    # A rank takes part in all saves that follow steps of its own; rank 0 always works.
    first = mesh.world.allgather_object(tuple(checkpoints.saved))[0]
    assert first[0] == 1 and first[-1] == 60 and len(first) > 3
    assert checkpoints.saved == [step for step in first if step in workers]


@pytest.mark.parametrize("every", [0, 0.0, 1.0, -0.5, 2.5, "5", float("nan")])
def test_what_is_neither_steps_nor_a_share(mesh, folder, every):
    with pytest.raises(ValueError, match="must be a whole number of steps of at least 1, a share of the run's time"):
        Checkpoints(folder, mesh, every=every)
