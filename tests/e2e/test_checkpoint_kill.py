"""A run that is killed while it saves goes on from the checkpoint before or from the new one; one that ends waits."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest

TESTS = Path(__file__).parents[1] / "helpers"
KILLS = 5  # of each of the five runs
LONGEST_S = 0.2  # to the kill; a save takes about a tenth of it

# Loads, looks at every value, and saves over and over until a process outside kills one rank.  The time to the kill
# runs from the first save on, or from its end, so that the run gets on however slow the disk is.
SAVING = """
import os, subprocess, sys
import mpishard
from mpishard.checkpoint import Checkpoints
from runs import assert_is_at, state

run, log, asynchronous, victim, first, delay = sys.argv[1:]
asynchronous, victim = asynchronous == "True", int(victim)

def note(what, step):
    if mesh.rank == 0:
        with open(log, "a") as file:
            file.write(f"{what} {step}\\n")

with mpishard.Mesh() as mesh, Checkpoints(run, mesh, asynchronous=asynchronous) as checkpoints:
    found = state(0, mesh.rank, mesh.size, empty=True)
    contents = checkpoints.load(found)
    step = 0
    if contents is not None:
        step = contents.facts["step"]
        assert_is_at(found, step, mesh.rank, mesh.size)
    note("loaded", step)
    if first == "saved" and victim >= 0:
        step += 1
        checkpoints.save(state(step, mesh.rank, mesh.size))
        checkpoints.wait()
        note("saved", step)
    if mesh.rank == victim:
        subprocess.Popen(["sh", "-c", f"sleep {delay}; kill -9 {os.getpid()}"], stdout=subprocess.DEVNULL)
    while victim >= 0:
        step += 1
        checkpoints.save(state(step, mesh.rank, mesh.size))
        note("saved", step)
"""

ENDING = """
import sys, time
import mpishard
from mpishard.checkpoint import Checkpoints, save as saving
from runs import state

write, fails = saving.write_pieces, sys.argv[2] == "True"

def slow(path, *arguments, **options):
    time.sleep(0.5)
    if fails:
        raise OSError(5, "Input/output error", str(path))
    write(path, *arguments, **options)

saving.write_pieces = slow
mesh = mpishard.Mesh()
Checkpoints(sys.argv[1], mesh).save(state(1, mesh.rank, mesh.size), asynchronous=True)
"""


def packages():
    """Where scripts find mpishard as these tests do, and what tests share."""
    spec = importlib.util.find_spec("mpishard")
    return os.pathsep.join([str(Path(spec.origin).parents[1]), str(TESTS)])


def alone(ranks, *arguments, **environment):
    """A script without a launcher, which is quicker."""
    finished = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, **environment},
    )
    return SimpleNamespace(code=finished.returncode, all=f"{finished.stdout}\n{finished.stderr}")


def killed_again_and_again(number, launch, ranks, asynchronous, tmp_path):
    """Returns the steps on disk at each start, and how many kills left something unfinished."""
    script, run, log = tmp_path / "saving.py", tmp_path / f"run-{number}", tmp_path / f"log-{number}"
    random = np.random.default_rng(number)
    started, loaded, unfinished = 0, [], 0
    for start in range(KILLS + 1):
        last = start == KILLS
        victim = -1 if last else int(random.integers(ranks))
        delay = f"{random.uniform(0, LONGEST_S):.4f}"
        first = "saved" if start % 2 else "unsaved"
        flags = ("-W", "error::RuntimeWarning")  # a kill leaves nothing damaged that a load would warn about
        finished = launch(ranks, *flags, script, run, log, asynchronous, victim, first, delay, PYTHONPATH=packages())
        assert (finished.code == 0) == last, finished.all
        lines = [line.split() for line in log.read_text().splitlines()]
        begun = [place for place, (what, _) in enumerate(lines) if what == "loaded"][-1]
        assert len(loaded) < sum(what == "loaded" for what, _ in lines), finished.all
        now = int(lines[begun][1])
        # What was saved before the kill is on disk, or the one that was being saved; not known to be finished yet, an
        # asynchronous one may be missing.
        assert started - asynchronous <= now <= started + 1, (loaded, started, now)
        loaded.append(now)
        started = int(lines[-1][1])
        names = os.listdir(run) if run.exists() else []  # a first kill may come before there is a folder
        unfinished += not last and any(name.startswith(".unfinished-") for name in names)
    return loaded, unfinished


@pytest.mark.quick
def test_kills_at_random_moments_of_saving(mpirun, tmp_path):
    (tmp_path / "saving.py").write_text(SAVING)
    runs = [(0, mpirun, 2, True), *((number, alone, 1, number % 2 == 0) for number in range(1, 5))]
    with ThreadPoolExecutor(len(runs)) as pool:
        chains = list(pool.map(lambda run: killed_again_and_again(*run, tmp_path), runs))
    # They went on from what was saved, and many kills came in the middle of saving.
    assert all(len(loaded) == KILLS + 1 and loaded[-1] >= KILLS // 2 for loaded, _ in chains), chains
    assert sum(unfinished for _, unfinished in chains) > KILLS, chains


@pytest.mark.parametrize("fails", [False, True])
def test_a_script_that_ends_waits_for_its_last_save(mpirun, tmp_path, fails):
    script = tmp_path / "ending.py"
    script.write_text(ENDING)
    finished = mpirun(2, script, tmp_path / "run", fails, PYTHONPATH=packages())
    assert finished.code == 0, finished.all
    if fails:
        assert "step 1 was not saved: rank 0 failed" in finished.errors
        assert os.listdir(tmp_path / "run") == []
    else:
        assert finished.errors == ""
        with h5py.File(tmp_path / "run" / "latest" / "index.h5") as index:
            assert index.attrs["step"] == 1
