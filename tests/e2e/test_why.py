"""Runs that do not go on, or slowly: ``mpishard why`` and ``mpishard top`` name who is to blame."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import os, signal, sys, time
import numpy as np
import mpishard

rows = np.random.default_rng(0).standard_normal((64, 6))
folder, how = sys.argv[1:]

def stuck(mesh):
    rank, buffer = mesh.rank, np.zeros(500_000)
    if how == "asleep" and rank == 2:
        time.sleep(600)
    elif how == "stopped" and rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "mismatch" and rank == 1:
        mesh.data.broadcast(buffer)
    elif how == "ring":  # everybody receives before anybody sends
        mesh.world.recv(buffer, (rank + 1) % 3)

def function(parameters, samples, gradients):
    if how == "straggler":
        time.sleep(0.06 if mesh.rank == 2 else 0.02)
    elif mesh.ledger.step == 5:
        stuck(mesh)
    residual = rows[samples, :5] @ parameters - rows[samples, 5]
    gradients += rows[samples, :5].T @ residual
    return 0.5 * residual @ residual

with mpishard.Mesh() as mesh:
    problem = mpishard.OptimizationProblem(function, np.zeros(5), samples=64, batch_size=16, steps=10_000)
    record = mpishard.RunRecord(folder, mesh, every=0.2)
    mpishard.DDPOptimizer(mpishard.SGD(lr=0.01), mesh).optimize(problem, record=record, progress=False)
"""


def mpishard(*arguments: object) -> str:
    command = [sys.executable, "-m", "mpishard", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def lines_of(folder: Path) -> int:
    try:
        return len((folder / "metrics.jsonl").read_text().splitlines())
    except FileNotFoundError:
        return 0


def ranks_of(folder: Path) -> list[int]:
    return [int(file.stem.rpartition("-")[2]) for file in (folder / "processes").glob("*[0-9].jsonl")]


@pytest.fixture
def start(launch, tmp_path):
    """``start(how, steps)``: the folder of a run that has taken this many steps; the run is killed at the end."""
    jobs = []

    def begin(how: str, steps: int) -> Path:
        script, folder = tmp_path / "train.py", tmp_path / how
        script.write_text(SCRIPT)
        jobs.append((launch(3, script, folder, how), folder))
        deadline = time.monotonic() + 240
        while lines_of(folder) < steps and time.monotonic() < deadline:
            time.sleep(0.05)
        assert lines_of(folder) >= steps
        return folder

    yield begin
    for job, folder in jobs:
        for rank in ranks_of(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)
        try:
            job.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            job.communicate()


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (
            "asleep",
            [
                "ranks 0, 1: in all_reduce #",
                "of data (3 ranks)",
                "train.py",
                "rank 2 is waited for, and computes",
                "(stuck)",
            ],
        ),
        ("stopped", ["ranks 0, 2: in all_reduce #", "rank 1 is waited for: process", "is stopped"]),
        ("mismatch", ["rank 1 is not with the others", "in broadcast #", "in all_reduce #"]),
        ("ring", ["ranks 0-2 wait for each other in a circle (0 for 1 in recv #1 of world", "all receive before any"]),
    ],
)
def test_a_stuck_run(start, how: str, expected: list[str]) -> None:
    folder = start(how, 4)
    time.sleep(1.5)  # what waits for less is nothing unusual
    output = mpishard("why", folder)
    assert all(part in output for part in expected), output
    if how == "asleep":
        data = json.loads(mpishard("why", folder, "--json", "--wait", 0))
        assert [finding["kind"] for finding in data["findings"]] == ["computes"]


def test_signal_quit_writes_where_a_rank_is(start) -> None:
    folder = start("asleep", 4)
    time.sleep(1.5)
    for rank in ranks_of(folder):
        os.kill(rank, signal.SIGQUIT)
    deadline = time.monotonic() + 120
    while len(list((folder / "processes").glob("*.where.json"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    stacks = [file.read_text() for file in (folder / "processes").glob("*.stack")]
    assert sum("in stuck" in stack for stack in stacks) == 1 and sum("all_reduce" in stack for stack in stacks) == 2
    output = mpishard("why", folder, "--wait", 0)
    assert "rank 2 is waited for, and computes" in output, output


def test_a_straggler_is_named(start) -> None:
    folder = start("straggler", 40)
    output = mpishard("top", folder)
    assert "straggler: rank 2" in output and "straggler: rank 0" not in output, output
    (slow,) = json.loads(mpishard("top", folder, "--json"))["stragglers"]
    assert slow["rank"] == 2 and slow["busy"] > 1.5 * slow["median"]
    assert "no rank has waited for long" in mpishard("why", folder)


def test_a_run_that_goes_on_is_traced(start) -> None:
    folder = start("straggler", 4)
    assert str(folder / "trace.json") in mpishard("trace", folder, "--next", 3)
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    whole = [event for event in events if event.get("cat") == "step"]
    steps = sorted({event["args"]["step"] for event in whole})
    assert steps == list(range(steps[0], steps[0] + 3)) and steps[0] > 4 and len(whole) == 9
    slept = {rank: [e["dur"] for e in events if e["pid"] == rank and e.get("cat") == "function"] for rank in range(3)}
    # On a busy machine a sleep may last longer, but not shorter, than what it is asked for.
    assert min(slept[2]) > 59_000 and min(slept[2]) > min(slept[0] + slept[1])
