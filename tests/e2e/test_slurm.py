"""The scripts in ``slurm/`` under a Slurm of six nodes on this machine (``helpers/slurm.py``), as users submit them."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from hosts import SESSIONS

import slurm
from mpishard.launch.launchers import find_launcher

NO_SLURM = slurm.missing()
FAMILY = find_launcher().family
# Jobs wait side by side, so that a third of these tests takes as long as all: they have a day of their own.
pytestmark = pytest.mark.skipif(bool(NO_SLURM), reason=NO_SLURM)

ROOT = Path(__file__).parents[2]
# Small enough to take a few seconds, long enough to pass.
GPT = "--layers 1 --width 32 --heads 2 --context 32 --batch 16 --lr 1e-2 --sample 5 --checkpoint-every 10".split()
# What these tests need as root on one machine and a cluster does not.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_btl": "^ofi",  # it sleeps a second in MPI_Init
}

# Without it requests of MPICH's ranks may be too long for Slurm: see docs/how-to/slurm.md.
BY_SRUN = {"LAUNCHER": "srun", "MPIR_CVAR_CH4_NETMOD": "ofi"}

# A run whose steps take as long as is asked for until it comes back, and in which --fault kills rank 1 after a step of
# the first start.
PACED = """
import argparse, os, signal, sys, time
from pathlib import Path
import numpy as np
import mpishard

parser = argparse.ArgumentParser()
parser.add_argument("--output", type=Path)
for name, default in (("steps", 40), ("pace", 0.0), ("lr", 0.05), ("workers", 0), ("fault", 0), ("every", 1000)):
    parser.add_argument(f"--{name}", type=type(default), default=default)
parser.add_argument("--resume", action="store_true")
options = parser.parse_args()
options.output.mkdir(parents=True, exist_ok=True)
rows = np.random.default_rng(0).standard_normal((64, 6))

def loss(parameters, samples, gradients):
    residual = rows[samples, :5] @ parameters - rows[samples, 5]
    gradients += rows[samples, :5].T @ residual
    return 0.5 * residual @ residual

def callback(state):
    if mesh.rank == 0:
        with open(options.output / "steps", "a") as file:
            file.write(f"{os.environ.get('SLURM_RESTART_COUNT', 0)} {mesh.size} {state.step}\\n")
    if options.fault == state.step and mesh.rank == 1 and not (options.output / "fault").exists():
        (options.output / "fault").write_text("")
        os.kill(os.getpid(), signal.SIGKILL)
    if "SLURM_RESTART_COUNT" not in os.environ:
        time.sleep(options.pace)
    return signals(state)

with mpishard.Signals() as signals, mpishard.Mesh() as mesh:
    problem = mpishard.OptimizationProblem(loss, np.zeros(5), samples=64, batch_size=12, steps=options.steps, seed=3)
    config = mpishard.ShardingConfiguration(mesh, reproducible=True)
    optimizer = mpishard.ZeRO2Optimizer(mpishard.AdamW(lr=options.lr), config)
    if options.workers:
        optimizer = mpishard.ElasticOptimizer(optimizer, max_workers=options.workers)
    with mpishard.Checkpoints(options.output / "checkpoints", mesh, every=options.every) as kept:
        result = optimizer.optimize(
            problem, callback=callback, progress=False, checkpoints=kept, resume=options.resume
        )
if result.stop_reason in ("callback", "signal"):
    sys.exit(os.EX_TEMPFAIL)
"""


def settings():
    """Environment of jobs."""
    package = Path(importlib.util.find_spec("mpishard").origin).parents[1]
    return {**OPEN_MPI, "PYTHONPATH": str(package.resolve())}


class Job:
    """A script of ``slurm/`` under way, in a folder that has what the repository has."""

    def __init__(self, cluster, folder, script, *arguments, options=(), warned=True, **environment):
        self.cluster = cluster
        self.folder = folder
        # That of the test (conftest.py) may end before the job.
        given = {**settings(), SESSIONS: f"{folder}/sessions", "PYTHON": sys.executable, **environment}
        for name in ("slurm", "examples"):
            if not (folder / name).exists():
                (folder / name).symlink_to(ROOT / name)
        (folder / "paced.py").write_text(PACED)
        options = ["--nodes=2", "--ntasks=2", "--time=10", *options]
        path = f"slurm/{script}.sbatch"
        if not warned:
            text = (ROOT / path).read_text()
            path = f"{script}.sbatch"
            (folder / path).write_text(re.sub("#SBATCH --signal=.*", "", text))
        self.number = cluster.submit(path, *arguments, options=options, cwd=folder, environment=given)

    @property
    def log(self):
        """What all jobs in the folder have written."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("*.log")))

    def losses(self, output="run"):
        """The history in the newest checkpoint of a run."""
        with h5py.File(self.folder / output / "checkpoints" / "latest" / "index.h5") as file:
            return file["history/loss"][()]

    def steps(self, output="run"):
        """(start, ranks, step) of each step of a paced run."""
        path = self.folder / output / "steps"
        return [tuple(map(int, line.split())) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for(self, condition, timeout=300.0):
        slurm.wait_until(condition, timeout, lambda: f"of job {self.number}:\n{self.log}")

    def leave(self, task=""):
        """What Slurm does some time before the time limit."""
        self.cluster.call("scancel", "--batch", "--signal=USR1", f"{self.number}{task}")

    def end(self, task="", state="COMPLETED", timeout=300.0):
        """What Slurm says of the job once it is in this state."""
        ended = "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"
        name = f"{self.number}{task}"
        self.wait_for(lambda: self.cluster.state(name) in ended, timeout)
        facts = self.cluster.facts(name)
        assert facts["JobState"] == state, f"{facts}\n{self.log}"
        return facts


@pytest.fixture(scope="module")
def cluster():
    with slurm.slurm() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def away(cluster, tmp_path_factory):
    """All jobs that come back, each once Slurm has asked it to leave.

    They run side by side, since most of their time they wait: to be queued again, and for Slurm to look at time limits,
    which it does every 30 seconds.
    """

    def start(name, *arguments, **options):
        script = name if name in ("elastic", "array") else "train"
        return Job(cluster, tmp_path_factory.mktemp(name), script, *arguments, **options)

    # Of 36 seconds, and asked to leave after 4 to 34 of a minute.
    options = ["--time=1", "--signal=B:USR1@26", "--nodelist=n4", "--nodes=1", "--ntasks=1"]
    arguments = "paced.py", "--steps", 80, "--pace", 0.45, "--output", "run"
    jobs = {"limited": start("limited", *arguments, options=options)}
    # Long enough for Slurm to come to think of taking nodes away.
    arguments = "paced.py", "--steps", 60, "--pace", 0.25, "--every", 4, "--output", "run"
    options = ["--nodelist=n3", "--nodes=1"]
    jobs["taken"] = start("taken", *arguments, options=options)
    # Its steps get SIGTERM, and the batch script nothing, as everywhere where Slurm has no preempt_send_user_signal.
    jobs["ended"] = start("ended", *arguments, options=options, warned=False)
    jobs["lost"] = start("lost", *arguments, options=["--nodelist=n5,n6"])
    apart = "--exclude=n[3-6]"
    arguments = "paced.py", "--steps", 60, "--pace", 0.1
    gpt = "examples/train_gpt.py", *GPT, "--steps", 60, "--output", "run"
    jobs["whole"] = start("whole", *gpt, options=[apart])
    jobs["parted"] = start("parted", *gpt, options=[apart], **(BY_SRUN if FAMILY == "MPICH" else {}))
    faulty = "--fault", 10, "--every", 4, "--output", "run"
    jobs["elastic"] = start("elastic", *arguments, *faulty, options=[apart, "--ntasks=3"], SPARES="1")
    options = [apart, "--array=0-1", "--nodes=1", "--ntasks=1"]
    jobs["array"] = start("array", *arguments, options=options, RATES="0.05 0.01", OUTPUT="rates")

    def take():
        options = "--partition=hi", "--nodelist=n3", "--nodes=1", "--ntasks=4", "--time=1", "--output=other"
        cluster.call("sbatch", *options, "--wrap=true", cwd=jobs["taken"].folder)

    def is_left(job):
        # Marked as down before the batch script has ended, the node may have the job fail.
        words = "sinfo", "--noheader", "--partition=main", "--nodes=n5", "--format=%T"
        return "is queued again" in job.log and cluster.call(*words) == "idle"

    def come_back():
        # As Slurm does by itself once the node has not answered for SlurmdTimeout.
        cluster.call("scontrol", "update", "nodename=n6", "state=DOWN", "reason=lost")
        cluster.start("n6")

    waiting = [
        ("taken", lambda job: job.steps() and len(jobs["ended"].steps()) > 4, take),
        ("lost", lambda job: len(job.steps()) > 4, lambda: cluster.lose("n6")),
        ("lost", is_left, come_back),
        ("parted", lambda job: list(job.folder.glob("run/checkpoints/step-*")), jobs["parted"].leave),
        ("elastic", lambda job: len(job.steps()) >= 20, jobs["elastic"].leave),
        # Its own number is that of the whole array.
        ("array", lambda job: len(job.steps("rates/lr-0.01")) >= 5, lambda: jobs["array"].leave("_1")),
    ]
    is_over = threading.Event()

    def give_orders():
        while not is_over.wait(0.1):
            for each in list(waiting):
                name, is_ready, then = each
                if is_ready(jobs[name]):
                    then()
                    waiting.remove(each)

    # Beside the tests, each of which has a time limit of its own; to the end, since the node ends with the thread.
    orders = threading.Thread(target=give_orders, daemon=True)
    orders.start()
    yield jobs
    is_over.set()
    orders.join()


@pytest.fixture
def submit(cluster, tmp_path):
    jobs = []

    def start(script, *arguments, options=(), **environment):
        jobs.append(Job(cluster, tmp_path, script, *arguments, options=options, **environment))
        return jobs[-1]

    yield start
    for job in jobs:
        cluster.call("scancel", "--quiet", job.number)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Losses of a run of one rank: as many as there are steps, whatever the length of other runs."""
    folder = tmp_path_factory.mktemp("expected")
    (folder / "paced.py").write_text(PACED)
    finished = subprocess.run(
        [sys.executable, "paced.py", "--steps", "80", "--output", "run"],
        cwd=folder,
        env={**os.environ, **settings()},
        timeout=240,
        check=False,
    )
    assert finished.returncode == 0
    with h5py.File(folder / "run" / "checkpoints" / "latest" / "index.h5") as file:
        return file["history/loss"][()]


def test_a_job_that_is_cancelled_leaves_nothing_behind(cluster, submit, away):
    job = submit("train", "paced.py", "--steps", 1000, "--pace", 0.05, "--output", "run")
    job.wait_for(lambda: job.steps("run"))
    cluster.call("scancel", job.number)
    assert job.end(state="CANCELLED")["Restarts"] == "0"
    job.wait_for(lambda: not cluster.processes(f"SLURM_JOB_ID={job.number}"), 10.0)
    time.sleep(0.5)
    assert cluster.state(job.number) == "CANCELLED", job.log


def test_a_run_that_leaves_and_comes_back_has_the_losses_of_one_that_does_not(away):
    parted, whole = away["parted"], away["whole"]
    assert whole.end()["Restarts"] == "0"
    assert parted.end()["Restarts"] == "1", parted.log
    # Or with 143: srun ends the ranks that are still leaving when the first of them has left with 75.
    assert "is queued again" in parted.log
    assert ("srun --mpi=pmi2" in parted.log) == (FAMILY == "MPICH") and "-m mpishard run" in whole.log
    assert parted.log.count("PASS") == whole.log.count("PASS") == 1
    (left,) = re.findall("left after step ([0-9]+), as asked", parted.log)
    assert 10 <= int(left) < 60 and f"{60 - int(left)} steps in " in parted.log
    assert len(whole.losses()) == 60
    np.testing.assert_array_equal(parted.losses(), whole.losses())


def test_a_sweep_and_one_of_its_runs_that_comes_back(away, expected):
    sweep = away["array"]
    assert [sweep.end(f"_{task}")["Restarts"] for task in (0, 1)] == ["0", "1"], sweep.log
    first, second = (sweep.losses(f"rates/lr-{rate}") for rate in ("0.05", "0.01"))
    np.testing.assert_array_equal(first, expected[:60])
    assert len(second) == 60 and second[0] == first[0] and second[-1] != first[-1]


def test_a_job_that_another_takes_the_nodes_of_comes_back(away, expected):
    job = away["taken"]
    assert job.end()["Restarts"] == "1", job.log
    assert "leaves with code 75 and is queued again" in job.log
    assert [step for _, _, step in job.steps()] == list(range(1, 61))
    np.testing.assert_array_equal(job.losses(), expected[:60])


def test_a_job_whose_steps_are_ended_because_another_takes_the_nodes_comes_back(away, expected):
    job = away["ended"]
    assert job.end()["Restarts"] == "1", job.log
    assert "and is queued again" in job.log
    # The daemons of Open MPI's mpirun end at once, and the ranks with them.
    assert FAMILY != "MPICH" or "leaves with code 75" in job.log, job.log
    assert job.steps()[-1] == (1, 2, 60)
    np.testing.assert_array_equal(job.losses(), expected[:60])


def test_a_job_that_loses_a_node_comes_back(away, expected):
    job = away["lost"]
    assert job.end()["Restarts"] == "1", job.log
    assert job.steps()[-1] == (1, 2, 60)
    np.testing.assert_array_equal(job.losses(), expected[:60])


def test_an_elastic_run_that_loses_a_rank_and_comes_back(away, expected):
    job = away["elastic"]
    assert job.end()["Restarts"] == "1", job.log
    assert (job.folder / "run" / "fault").exists()
    assert ("; 2 workers continue from step" in job.log) == (FAMILY == "Open MPI"), job.log
    assert {ranks for _, ranks, _ in job.steps()} == {2}
    np.testing.assert_array_equal(job.losses(), expected[:60])
    assert not list(job.folder.glob(".mpishard-*"))


@pytest.mark.parametrize(
    ("script", "changes", "said"),
    [
        ("train", {"LAUNCHER": "mpiexec"}, "LAUNCHER=mpiexec is none of auto, srun, mpirun and elastic"),
        ("elastic", {"SPARES": "2"}, "2 tasks, SPARES=2 of which wait, leave none to train"),
        ("array", {"RATES": "0.1"}, "task 1 of the array has none of the 1 RATES; give sbatch --array=0-0"),
    ],
)
def test_what_cannot_be_started_is_said(submit, script, changes, said):
    options = ["--array=1"] if script == "array" else []
    job = submit(script, "paced.py", "--output", "run", options=options, **changes)
    assert job.end("_1" if options else "", state="FAILED")["ExitCode"] == "2:0"
    assert said in job.log


def test_a_second_job_with_the_folder_of_one_that_runs_ends(submit):
    first = submit("train", "paced.py", "--steps", 1000, "--pace", 0.05, "--output", "run")
    first.wait_for(lambda: first.steps())
    second = submit("train", "paced.py", "--output", "run")
    assert second.end(state="FAILED")["Restarts"] == "0"
    assert f"run/checkpoints is used by another run (Slurm job {first.number} of tests, process" in second.log
    assert first.cluster.state(first.number) == "RUNNING"


@pytest.mark.skipif(FAMILY != "Open MPI", reason="MPICH starts under both launchers")
def test_a_launcher_that_does_not_fit_the_mpi_is_found_out(submit):
    job = submit("train", "paced.py", "--output", "run", LAUNCHER="srun")
    assert job.end(state="FAILED")["ExitCode"] == "2:0"
    assert "makes worlds of size 1 of 2 tasks under Open MPI" in job.log and "try LAUNCHER=mpirun" in job.log


def test_a_job_leaves_before_its_time_limit_and_comes_back(away, expected):
    job = away["limited"]
    assert int(job.end()["Restarts"]) >= 1, job.log
    assert [step for _, _, step in job.steps()] == list(range(1, 81))
    assert "is queued again" in job.log and f"job {job.number} is asked to leave by SIGUSR1 at 2" in job.log
    assert re.search(r"resumes from step \d+ of \S+/run/checkpoints$", job.log, re.MULTILINE)
    np.testing.assert_array_equal(job.losses(), expected[:80])
