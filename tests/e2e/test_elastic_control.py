"""A run under way is resized from a shell, ranks leave it on a signal, all stop on one, and a rank hangs (SIGSTOP)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from mpi4py import MPI

pytestmark = pytest.mark.faults

SCRIPT = """
import os, sys, time
from pathlib import Path
import numpy as np
import mpishard
from mpishard.elastic.optimizer import ElasticOptimizer

here, steps, nap = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
rows = np.random.default_rng(0).standard_normal((64, 6))

def loss(parameters, samples, gradients):
    time.sleep(nap)
    residual = rows[samples, :5] @ parameters - rows[samples, 5]
    gradients += rows[samples, :5].T @ residual
    return 0.5 * residual @ residual

def callback(state):
    if mesh.rank == 0:
        with open(here / "steps", "a") as file:
            file.write(f"{elastic.current_workers} {state.step} {os.getpid()}\\n")

with mpishard.Mesh() as mesh, mpishard.Checkpoints(here / "checkpoints", mesh) as checkpoints:
    (here / f"process-{mesh.rank}").write_text(str(os.getpid()))
    config = mpishard.ShardingConfiguration(mesh, reproducible=True)
    elastic = ElasticOptimizer(
        mpishard.ZeRO2Optimizer(mpishard.AdamW(lr=0.05), config), max_workers=3, failure_timeout=0.5
    )
    problem = mpishard.OptimizationProblem(
        loss, np.zeros(5), samples=64, batch_size=12, micro_batch_size=1, steps=steps, seed=3
    )
    result = elastic.optimize(problem, callback=callback, progress=False, checkpoints=checkpoints, resume=True)
    if mesh.rank == 0:
        (here / "parameters").write_bytes(result.parameters.tobytes())
if result.stop_reason == "signal":
    sys.exit(os.EX_TEMPFAIL)
"""
FOR_EVER = 10**6


class Run:
    """The script under way on three ranks."""

    def __init__(self, launch, folder, steps, nap=0.002, *options):
        self.folder = folder
        folder.mkdir()
        (folder / "script.py").write_text(SCRIPT)
        self.process = launch(3, folder / "script.py", folder, steps, nap, options=options)

    @property
    def steps(self):
        """Number of workers, step and process of the first worker, of each step."""
        path = self.folder / "steps"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [tuple(map(int, line.split())) for line in lines if line.endswith("\n")]

    def until(self, condition, limit=60.0):
        deadline = time.monotonic() + limit
        while not condition(self.steps):
            assert time.monotonic() < deadline and self.process.poll() is None, (self.steps[-3:], self.errors())
            time.sleep(0.02)

    def errors(self):
        return self.process.communicate()[0] if self.process.poll() is not None else ""

    def process_of(self, rank):
        return int((self.folder / f"process-{rank}").read_text())

    def shell(self, *arguments):
        command = [sys.executable, "-m", "mpishard", "resize", self.folder / "checkpoints", *arguments]
        environment = {"OMPI_MCA_btl": "^ofi", **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        return subprocess.run([str(part) for part in command], capture_output=True, text=True, env=environment)


@pytest.fixture
def run(launch, tmp_path):
    started = []

    def start(*arguments):
        started.append(Run(launch, tmp_path / "run", *arguments))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            os.killpg(each.process.pid, signal.SIGKILL)
        each.process.communicate()


def test_resize_then_leave_then_stop(run):
    going = run(FOR_EVER)
    going.until(lambda steps: steps and steps[-1][0] == 3)
    done = going.shell("2")
    assert done.returncode == 0 and "3 -> 2 workers after step" in done.stdout, done
    going.until(lambda steps: steps[-1][0] == 2)
    os.kill(going.process_of(0), signal.SIGTERM)  # the spare takes its place
    going.until(lambda steps: steps[-1][0] == 2 and steps[-1][2] == going.process_of(1))
    os.kill(going.process_of(1), signal.SIGUSR1)
    going.until(lambda steps: steps[-1][0] == 1 and steps[-1][2] == going.process_of(2))
    last = going.steps[-1][1]
    going.process.send_signal(signal.SIGUSR1)  # the launcher passes it on
    output, _ = going.process.communicate(timeout=60)
    assert going.process.returncode == os.EX_TEMPFAIL, output
    (name,) = [path.name for path in (going.folder / "checkpoints").iterdir() if path.name.startswith("step")]
    assert int(name.removeprefix("step-")) == going.steps[-1][1] >= last
    assert not (going.folder / "checkpoints" / "control").exists()
    assert [step for _, step, _ in going.steps] == list(range(1, going.steps[-1][1] + 1))


@pytest.mark.skipif("Open MPI" not in MPI.Get_library_version(), reason="needs an MPI that survives deaths")
def test_a_stopped_rank_counts_as_dead(run, mpirun, tmp_path):
    going = run(40, 0.002, "--with-ft", "ulfm", "--mca", "coll", "^han")
    going.until(lambda steps: len(steps) > 3)
    os.kill(going.process_of(1), signal.SIGSTOP)
    output, _ = going.process.communicate(timeout=60)
    assert "has been stopped for" in output
    assert [step for _, step, _ in going.steps] == list(range(1, 41))
    assert 2 in [workers for workers, _, _ in going.steps]  # until another one comes in its place
    (tmp_path / "alone").mkdir()
    mpirun(1, going.folder / "script.py", tmp_path / "alone", 40, 0)
    assert (going.folder / "parameters").read_bytes() == (tmp_path / "alone" / "parameters").read_bytes()
