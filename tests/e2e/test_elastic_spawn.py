"""Processes that an elastic run starts, batches that follow, and control from outside."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import faults
import pytest
from mpi4py import MPI

# Workers that were not there at the beginning: spawned while training goes on, or in the place of the dead.

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
spawned = "mpishard_joining" in sys._xoptions
if spawned and case == "failing":
    raise ArithmeticError("no data here")
if spawned and case in ("short", "leaving"):
    time.sleep(600)
tensor = 2 if case == "replica" else 1
tokens = np.random.default_rng(1).integers(0, 11, (45, 9))
START, STEPS, LIMIT_S = time.monotonic(), 5, 200
founder = -1 if spawned else MPI.COMM_WORLD.rank

def batch(samples):
    if spawned and case == "comes back":
        os.kill(os.getpid(), signal.SIGKILL)
    return tokens[samples, :-1], tokens[samples, 1:]

def train(mesh, elastic, callback=None, **options):
    model = nn.GPT(vocabulary_size=11, context_length=8, width=16, layers=2, heads=2, mesh=mesh)
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
    if case in ("respawn", "replica") and state.step > 4 and elastic.agreed_size < seen[0]:
        elastic.resize(seen[0])  # on a busy machine those that were to come may have been given up
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
    end = time.monotonic() + 120
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
    done = mpirun(2, script, "grow", tmp_path)
    assert done.code == 0 and "same: True workers: 2 3 steps" in done.output, done.all
    assert "steps meanwhile: 0" not in done.output, done.all
    assert "another" in done.all and "continuing with 3 workers" in done.all, done.all
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
    done = mpirun(2, script, case, tmp_path)
    assert done.code == 0 and "same: True" in done.output and word in done.all, done.all
    assert done.all.count("could be spawned") == case.startswith("failing"), done.all
    assert "late" not in done.output, done.all
    assert none_is_left(tmp_path)


def test_who_is_on_the_way_ends_with_a_run_that_all_leave(mpirun, tmp_path):
    """By an error that the script catches, or by `sys.exit`, while others wait to be called in."""
    script = """
import sys
import numpy as np
import mpishard
from mpishard.elastic import requests

spawned, made, usual = "mpishard_joining" in sys._xoptions, [], requests.SpawnRequest
requests.SpawnRequest = lambda *arguments: made.append(usual(*arguments)) or made[-1]

def callback(state):
    if state.step == 2:
        elastic.resize(2)
    if not spawned and state.step > 2 and mesh.world.allgather_object(bool(made) and made[-1].here)[0]:
        raise SystemExit(7) if sys.argv[1] == "exits" else ArithmeticError("spoilt")

with mpishard.Mesh() as mesh:
    elastic = mpishard.ElasticOptimizer(mpishard.SGD(lr=0.1), mesh, max_workers=2)
    problem = mpishard.OptimizationProblem(lambda p, s, g: 0.0, np.ones(3), samples=8, batch_size=8)
    try:
        elastic.optimize(problem, callback=callback, progress=False)
    except ArithmeticError:
        pass
"""
    (tmp_path / "script.py").write_text(script)
    for how, code in (("fails", 0), ("exits", 7)):
        done = mpirun(1, tmp_path / "script.py", how, timeout=120)
        assert done.code == code, done.all


def test_one_fails_once_it_has_come(mpirun, script, tmp_path):
    """The others do not wait for ever, though it was alone in its MPI_COMM_WORLD."""
    done = mpirun(2, script, "failing later", tmp_path)
    assert done.code != 0 and "a fault of a spawned process" in done.all and "ends the job" in done.all, done.all
    assert none_is_left(tmp_path)


def test_they_must_take_the_same_samples(mpirun, script, tmp_path):
    done = mpirun(2, script, "other seed", tmp_path)
    assert done.code != 0 and "seed is 0 on ranks 0, 1, 1 on rank 2" in done.all, done.all
    assert none_is_left(tmp_path)


def test_the_shell_waits_for_them(launch, script, tmp_path):
    process = launch(2, script, "shell", tmp_path)
    try:
        end = time.monotonic() + 240
        while not (tmp_path / "control" / "run").exists() and time.monotonic() < end:
            time.sleep(0.05)
        environment = {"OMPI_MCA_btl": "^ofi", **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-m", "mpishard", "resize", str(tmp_path), "3"]
        asked = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
        output, _ = process.communicate(timeout=240)
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
    output, how = faults.execute(command, 240, (tmp_path / "report").exists)
    assert how != "hangs" and f"same: True {word}" in output, output
    assert not re.search(r"steps meanwhile: \d+ late", output), output  # Open MPI says words with "late" in them
    assert none_is_left(tmp_path)


# Workers that were not there at the beginning, and deaths, in a run whose batch goes with its workers.

BATCH_SCRIPT = Path(__file__).parents[1] / "helpers" / "scaled.py"


def test_workers_are_spawned_and_die(mpirun, tmp_path):
    ulfm, report = faults.launcher(), tmp_path / "report"
    if ulfm is None:
        assert mpirun(2, BATCH_SCRIPT, tmp_path).code == 0
    else:
        # After a death the launcher may not end by itself, and its exit code is that of the dead rank.
        output, _ = faults.execute(
            [*ulfm, "-n", "2", sys.executable, str(BATCH_SCRIPT), str(tmp_path)], 240, report.exists
        )
        assert report.exists(), output
    same, *workers = report.read_text().split()
    sizes = [size for place, size in enumerate(workers) if place == 0 or size != workers[place - 1]]
    assert same == "True"
    assert sizes[:2] == ["2", "3"]
    assert (sizes[2:3] == ["2"]) == (ulfm is not None)


# A run under way is resized from a shell, ranks leave it on a signal, all stop on one, and a rank hangs (SIGSTOP).

CONTROL_SCRIPT = """
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
        (folder / "script.py").write_text(CONTROL_SCRIPT)
        self.process = launch(3, folder / "script.py", folder, steps, nap, options=options)

    @property
    def steps(self):
        """Number of workers, step and process of the first worker, of each step."""
        path = self.folder / "steps"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [tuple(map(int, line.split())) for line in lines if line.endswith("\n")]

    def until(self, condition, limit=240.0):
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
    output, _ = going.process.communicate(timeout=240)
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
    output, _ = going.process.communicate(timeout=240)
    assert "has been stopped for" in output
    assert [step for _, step, _ in going.steps] == list(range(1, 41))
    assert 2 in [workers for workers, _, _ in going.steps]  # until another one comes in its place
    (tmp_path / "alone").mkdir()
    mpirun(1, going.folder / "script.py", tmp_path / "alone", 40, 0)
    assert (going.folder / "parameters").read_bytes() == (tmp_path / "alone" / "parameters").read_bytes()


# Processes that are spawned while a run goes on: taken in, sent away, failing, dying, left alone.

# A run without training: founders take steps, and the first one has others come as its cases say.
SPAWNING_SCRIPT = """
import os, signal, sys, threading, time
from pathlib import Path

case, folder = sys.argv[1], Path(sys.argv[2])
(folder / f"pid-{os.getpid()}").touch()
spawned = "mpishard_joining" in sys._xoptions
if spawned and case == "error":
    raise ArithmeticError("no data here")
if spawned and case == "exit":
    sys.exit(3)
if spawned and case == "ends":
    raise SystemExit
import numpy as np
from mpi4py import MPI
from mpishard.elastic.spawning import JoiningProcess
from mpishard.elastic.spawning import in_time
from mpishard.elastic.spawning import SpawnRequest, meet

world = MPI.COMM_WORLD

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

def one_is_starting():
    "Whether a spawned process is there, which is still in MPI_Init as long as the spawn has not returned."
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_text()
        except OSError:
            continue
        if str(folder) in line and "mpishard_joining" in line:
            return True
    return False

def step(comm):
    total = np.ones(100)
    comm.Allreduce(MPI.IN_PLACE, total)
    assert total[0] == comm.size
    time.sleep(0.001)

def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n")  # in one piece
    sys.stdout.flush()

def spawn(comm):
    '''Take steps until the joining processes are here or have failed; the new communicator, or None.'''
    leads, steps, state = comm.rank == 0, 0, np.zeros(1, np.int64)
    request = SpawnRequest(2, (1, 1)) if leads else None
    while not state[0]:
        step(comm)
        steps += 1
        if leads:
            if case == "give up" and steps == 20:
                request.give_up()
            if case == "leader dies" and (folder / "called").exists():
                kill()
            if case == "leader dies in the spawn" and one_is_starting():
                kill()
            state[0] = 1 if request.problem else 2 if request.here else 0
        comm.Bcast(state)
    if state[0] == 2 and case == "dies here" and leads:
        time.sleep(0.5)
    port = comm.bcast(request.call() if leads and state[0] == 2 else "")
    if not port:
        if leads:
            say("problem:", request.problem)
        return None
    members = in_time(lambda: meet(comm, port))
    if leads:
        request.close()
        say("met", members.size, "after", steps)
    return members

def run(members):
    while members.size < most:
        members = spawn(members) or exit(members)
    exit(members)

def exit(members):
    for _ in range(20):
        step(members)
    say("ended with", members.size)
    members.Free()
    if "dies" in case or "killed" in case:  # MPI_Finalize may wait for the dead
        signal.setitimer(signal.ITIMER_REAL, 2)
    sys.exit()

most = 6 if case == "twice" else 4
if spawned:
    if case == "give up":
        time.sleep(600)
    if case == "one is killed" and world.rank == 1:
        kill()
    if case == "dies here" and world.rank == 1:
        threading.Timer(0.3, kill).start()
    if case == "leader dies" and not (folder / "called").exists():
        (folder / "called").touch()
        time.sleep(600)
    run(JoiningProcess.this.join())
members = world.Dup()
try:
    run(members)
except MPI.Exception:
    members.Revoke()
    members = members.Shrink()
    say("survivors:", members.size)
    case = "another dies"
    run(members)
"""

OPEN_MPI = MPI.get_vendor()[0] == "Open MPI"
SPAWNING_ULFM = ["--with-ft", "ulfm", "--mca", "coll", "^han"]
needs_ulfm_of_spawning = pytest.mark.skipif(not OPEN_MPI, reason="deaths are survived in place under Open MPI only")


@pytest.fixture
def script_of_spawning(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SPAWNING_SCRIPT)
    return path


def alive(folder: Path) -> list[int]:
    """Processes of a run, of which the script noted the numbers."""
    numbers = [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]
    return [each for each in numbers if _runs_of_spawning(each, str(folder))]


def _runs_of_spawning(number: int, folder: str) -> bool:
    try:
        return folder in Path(f"/proc/{number}/cmdline").read_text()
    except OSError:
        return False


def all_gone(folder: Path, limit: float = 5.0) -> bool:
    end = time.monotonic() + limit
    while alive(folder) and time.monotonic() < end:
        time.sleep(0.05)
    return not alive(folder)


def test_the_run_goes_on_until_they_are_taken_in(mpirun, script_of_spawning, tmp_path):
    done = mpirun(2, script_of_spawning, "twice", tmp_path)
    assert done.code == 0, done.all
    met = re.findall(r"met (\d+) after (\d+)", done.output)
    assert [size for size, _ in met] == ["4", "6"], done.all
    assert all(int(steps) > 10 for _, steps in met), done.all
    assert done.output.count("ended with 6") == 6
    assert all_gone(tmp_path)


@pytest.mark.parametrize(
    ("case", "word"),
    [
        ("error", "its script failed: ArithmeticError: no data here"),
        ("exit", "its script failed: SystemExit: 3"),
        ("ends", "its script failed: SystemExit"),
        ("give up", "nobody is wanted any more"),
    ],
)
def test_the_run_is_as_it_was_if_they_do_not_come(mpirun, script_of_spawning, tmp_path, case, word):
    done = mpirun(2, script_of_spawning, case, tmp_path)
    assert done.code == 0, done.all
    assert word in done.output, done.all
    assert done.output.count("ended with 2") == 2, done.all
    assert all_gone(tmp_path)


@needs_ulfm_of_spawning
@pytest.mark.parametrize("case", ["one is killed", "dies here"])
def test_one_of_them_dies(launch, script_of_spawning, tmp_path, case):
    process = launch(2, script_of_spawning, case, tmp_path, options=SPAWNING_ULFM)
    output = process.communicate(timeout=240)[0]
    assert re.search("problem: .*has died", output), output
    assert output.count("ended with 2") == 2, output
    assert all_gone(tmp_path)


@needs_ulfm_of_spawning
@pytest.mark.parametrize("case", ["leader dies", "leader dies in the spawn"])
def test_the_leader_dies(launch, script_of_spawning, tmp_path, case):
    """They belong to nobody and go; the next leader has others come."""
    for number in range(5):
        folder = tmp_path / str(number)
        folder.mkdir()
        process = launch(3, script_of_spawning, case, folder, options=SPAWNING_ULFM)
        output = process.communicate(timeout=240)[0]
        # One in twelve times the launcher itself (prterun of Open MPI 5.0.11) crashes where a process dies for which it
        # spawns, with "free(): invalid pointer" or without a word: then nobody is left.
        if process.returncode >= 0 or "met" in output:
            break
    assert output.count("survivors: 2") == 2, (process.returncode, output)
    assert "met 4" in output, (process.returncode, output)
    assert all_gone(folder)
