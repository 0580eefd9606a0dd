"""A sample of the grid of ``tests/faults.py``: whichever rank fails, the bits are those of a run without faults."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from dataclasses import asdict

import fault_run
import faults
import launching
import pytest

LAUNCH = faults.launcher()
pytestmark = pytest.mark.skipif(LAUNCH is None, reason="deaths are healed in place under Open MPI only")
# Each victim, kind and layout, and most phases.
SAMPLE = [
    ("first", "reduction", "kill", "ZeRO2"),
    ("middle", "agreement", "exception", "DDP"),
    ("last", "all-gather", "stop", "ZeRO3"),
    ("spare", "resize", "exit", "ZeRO1"),
    ("first", "heal", "kill", "ZeRO1"),
    ("last", "forward", "exit", "pipeline"),
    ("spawned", "update", "kill", "tensor"),
    ("middle", "called", "kill", "ZeRO1"),
    ("last", "joined", "kill", "ZeRO1"),
    ("spawned", "joined", "exception", "ZeRO1"),
    ("first", "reported", "kill", "ZeRO1"),
    ("first", "last-save", "kill", "ZeRO1"),
]
AT_ONCE, NEIGHBOURS, RESPAWNED = 1, 2, 3


@functools.cache
def reference(tensor=1, pipeline=1):
    return faults.expected(LAUNCH, tensor, pipeline)


def outlives(case):
    ended = faults.run(case, LAUNCH, reference(case.tensor, case.pipeline))
    assert not ended.problem, f"{case.name}: {ended.problem}\n{ended.output}"


@pytest.mark.parametrize("parts", SAMPLE, ids=" ".join)
def test_one_process_fails(parts):
    outlives(faults.single(*parts))


def test_two_processes_fail_at_once():
    outlives(faults.several("ZeRO3")[AT_ONCE])


def test_one_fails_who_came_for_another():
    outlives(faults.several("ZeRO2")[RESPAWNED])


def test_an_error_of_mpi_that_tells_of_no_death_ends_the_run(tmp_path):
    script = """
import numpy as np
from mpi4py import MPI
import mpishard

def function(parameters, samples, gradients):
    return 0.5 * parameters @ parameters

def callback(state):
    raise MPI.Exception(MPI.ERR_TRUNCATE)

with mpishard.Mesh() as mesh:
    optimizer = mpishard.ElasticOptimizer(mpishard.SGD(lr=0.1), mesh)
    problem = mpishard.OptimizationProblem(function, np.ones(3), samples=8, batch_size=8, steps=10)
    optimizer.optimize(problem, callback=callback, progress=False)
"""
    output, how = faults.execute([*LAUNCH, "-n", "2", sys.executable, "-c", script], 60)
    assert how == "in order" and "in callback" in output and "MPI_ERR_TRUNCATE" in output, output


def test_neighbours_fail_at_once_and_the_run_begins_again(tmp_path):
    """In place it can only say so; `mpishard run` goes on from the newest checkpoint."""
    case = faults.several("ZeRO1")[NEIGHBOURS]
    outlives(case)
    script = [sys.executable, fault_run.__file__, json.dumps(asdict(case)), str(tmp_path), "100"]
    done = subprocess.run(
        [sys.executable, "-m", "mpishard", "run", "--elastic", "-n", str(case.processes), *script],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=launching.environment(),
        timeout=100,
    )
    assert done.returncode == 0, done
    assert "newest checkpoint" in done.stderr and "start 2" in done.stderr, done
    found = [json.loads(file.read_text()) for file in tmp_path.glob("result-*")]
    assert found and all(each == reference() for each in found), found
