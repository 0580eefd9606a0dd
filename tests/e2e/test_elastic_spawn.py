"""Workers that were not there at the beginning: spawned while training goes on, or in the place of the dead."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import faults
import pytest

pytestmark = pytest.mark.faults

# What happens is `case`; the run ends some steps after it has, and the first rank says whether its bits are those of a
# run of one replica.
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
from mpi4py import MPI
import mpishard
from mpishard import nn

case, folder = sys.argv[1], Path(sys.argv[2])
(folder / f"process-{os.getpid()}").touch()
spawned = "mpishard_newcomer" in sys._xoptions
if spawned and case == "failing":
    raise ArithmeticError("no data here")
if spawned and case in ("short", "leaving"):
    time.sleep(60)
tensor = 2 if case == "replica" else 1
tokens = np.random.default_rng(1).integers(0, 11, (45, 9))
START, STEPS, LIMIT_S = time.monotonic(), 5, 40
founder = -1 if spawned else MPI.COMM_WORLD.rank

def batch(samples):
    if spawned and case == "comes back":
        os.kill(os.getpid(), signal.SIGKILL)
    return tokens[samples, :-1], tokens[samples, 1:]

def train(mesh, elastic, callback=None, **options):
    model = nn.GPT(11, 8, 16, 2, 2, np.float32, mesh=mesh)
    config = mpishard.ShardingConfiguration(mesh, max_gradient_norm=0.5, reproducible=True)
    optimizer = mpishard.ZeRO1Optimizer(mpishard.AdamW(lr=0.01), config)
    if elastic:
        optimizer = mpishard.ElasticOptimizer(optimizer, max_workers=8, folder=folder)
    problem = mpishard.OptimizationProblem.for_model(
        model, batch, samples=45, seed=int(spawned and case == "other seed"), batch_size=16,
        tokens_per_sample=8, micro_batch_size=2, **options)
    act = None if callback is None else lambda state: callback(optimizer, state)
    fails = spawned and case == "failing inside"  # it goes on from no checkpoint
    result = optimizer.optimize(problem, callback=act, progress=False, resume=fails)
    return model.parameters.gather().tobytes(), result

seen, after = [], []

def is_late():
    return time.monotonic() - START > LIMIT_S

def callback(elastic, state):
    workers = elastic.current_workers
    seen.append(workers)
    time.sleep(0.005)
    if case in ("grow", "short", "failing", "leaving", "failing later", "failing inside", "other seed"):
        if state.step == 3:
            elastic.resize(3)
    elif case in ("respawn", "replica", "comes back") and state.step == 4 and founder == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if case == "leaving" and state.step == 8 and founder == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    if spawned and case == "failing later":
        raise ArithmeticError("a fault of a spawned process")
    happened = state.step > 4 and {
        "grow": workers == 3,
        "shell": workers == 3,
        "failing": elastic.agreed_size == 2 and state.step > 9,
        "failing inside": elastic.agreed_size == 2 and state.step > 9 and (folder / "control" / "run").exists(),
        "leaving": workers == 1,
        "respawn": 2 in seen and workers == 3,
        "replica": 1 in seen and workers == 2,
        "comes back": elastic.agreed_size == 2,
    }.get(case, False)
    if happened:
        after.append(state.step)
    return len(after) > STEPS or is_late()

with mpishard.Mesh(tensor=tensor) as mesh:
    bits, result = train(mesh, True, callback, steps=6 if case == "short" else None)
    if case == "grow":  # spawned processes are none any more, and none can come
        _, again = train(mesh, True, lambda elastic, state: elastic.resize(4 if state.step == 2 else 3), steps=9)
    if mesh.data.rank == 0:
        with mpishard.Mesh(mesh.tensor.comm, tensor=tensor) as alone:
            same = bits == train(alone, False, steps=result.steps)[0]
    if mesh.rank == 0:
        waited = seen[2:].index(3) if 3 in seen else 0
        changes = [size for place, size in enumerate(seen) if place == 0 or size != seen[place - 1]]
        print("same:", same, "workers:", *changes, "steps meanwhile:", waited, "late" * is_late(), flush=True)
        (folder / "report").touch()
"""
ULFM = faults.launcher()
needs_ulfm = pytest.mark.skipif(ULFM is None, reason="deaths are survived in place under Open MPI only")


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def none_is_left(folder):
    numbers = [int(path.name.removeprefix("process-")) for path in folder.glob("process-*")]
    end = time.monotonic() + 10
    while any(_runs(each, folder) for each in numbers) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(_runs(each, folder) for each in numbers)


def _runs(number, folder):
    try:
        with open(f"/proc/{number}/cmdline") as file:
            return str(folder) in file.read()
    except OSError:
        return False


def test_training_goes_on_until_they_are_there(mpirun, script, tmp_path):
    done = mpirun(2, script, "grow", tmp_path, timeout=90)
    assert done.code == 0 and "same: True workers: 2 3 steps" in done.output, done.all
    assert "steps meanwhile: 0" not in done.output, done.all
    assert "another" in done.all and "continues with 3 workers" in done.all, done.all
    assert none_is_left(tmp_path)


@pytest.mark.parametrize(
    ("case", "word"),
    [
        ("short", "workers: 2 steps"),
        ("failing", "continuing with 2 workers; no more could be spawned: "),
        ("failing inside", "continuing with 2 workers; no more could be spawned: "),
        ("leaving", "workers: 2 1 steps"),
    ],
)
def test_the_run_does_not_need_those_who_do_not_come(mpirun, script, tmp_path, case, word):
    """The job ends before they are there, their script fails, or the process that has called them leaves."""
    done = mpirun(2, script, case, tmp_path, timeout=90)
    assert done.code == 0 and "same: True" in done.output and word in done.all, done.all
    assert done.all.count("could be spawned") == case.startswith("failing"), done.all
    assert "late" not in done.output, done.all
    assert none_is_left(tmp_path)


def test_one_fails_once_it_has_come(mpirun, script, tmp_path):
    """The others do not wait for ever, though it was alone in its MPI_COMM_WORLD."""
    done = mpirun(2, script, "failing later", tmp_path, timeout=90)
    assert done.code != 0 and "a fault of a spawned process" in done.all and "ends the job" in done.all, done.all
    assert none_is_left(tmp_path)


def test_they_must_take_the_same_samples(mpirun, script, tmp_path):
    done = mpirun(2, script, "other seed", tmp_path, timeout=90)
    assert done.code != 0 and "seed is 0 on ranks 0, 1, 1 on rank 2" in done.all, done.all
    assert none_is_left(tmp_path)


def test_the_shell_waits_for_them(launch, script, tmp_path):
    process = launch(2, script, "shell", tmp_path)
    try:
        end = time.monotonic() + 30
        while not (tmp_path / "control" / "run").exists() and time.monotonic() < end:
            time.sleep(0.05)
        environment = {"OMPI_MCA_btl": "^ofi", **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-m", "mpishard", "resize", str(tmp_path), "3"]
        asked = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0 and "same: True workers: 2 3 " in output, output
    assert asked.returncode == 0 and "2 -> 3 workers after step" in asked.stdout, asked


@needs_ulfm
@pytest.mark.parametrize(
    ("case", "ranks", "word"),
    [
        ("respawn", 3, "workers: 3 2 3 "),
        ("replica", 4, "workers: 2 1 2 "),
        ("comes back", 3, "workers: 3 2 steps"),
    ],
)
def test_another_one_comes_for_the_dead(script, tmp_path, case, ranks, word):
    """A whole replica where a worker is one; and nobody any more if who comes dies at once."""
    command = [*ULFM, "-n", str(ranks), sys.executable, str(script), case, str(tmp_path)]
    output, how = faults.execute(command, 90, (tmp_path / "report").exists)
    assert how != "hangs" and f"same: True {word}" in output and "late" not in output, output
    assert none_is_left(tmp_path)
