"""``mpishard run``: the job goes on, ends with the run's own exit code, and leaves no process."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

SOON = 240.0

# Twenty steps with a checkpoint after every fourth; in step 10 of the first start the last rank does FAULT.
TRAINING = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
import mpishard

here, fault, again = Path(sys.argv[1]), sys.argv[2], len(sys.argv) > 3
rows = np.random.default_rng(0).standard_normal((64, 6))

def loss(parameters, samples, gradients):
    residual = rows[samples, :5] @ parameters - rows[samples, 5]
    gradients += rows[samples, :5].T @ residual
    return 0.5 * residual @ residual

def callback(state):
    if mesh.rank == 0:
        with open(here / "steps", "a") as file:
            file.write(f"{mesh.size} {state.step}\\n")
    if state.step == 10 and mesh.rank == mesh.size - 1 and (again or not (here / "fault").exists()):
        (here / "fault").write_text("")
        exec(fault)

with mpishard.Mesh() as mesh, mpishard.Checkpoints(here / "checkpoints", mesh, every=4) as checkpoints:
    problem = mpishard.OptimizationProblem(loss, np.zeros(5), samples=64, batch_size=12, steps=20, seed=3)
    optimizer = mpishard.ZeRO2Optimizer(mpishard.AdamW(lr=0.05), mesh)
    result = optimizer.optimize(problem, callback=callback, progress=False, checkpoints=checkpoints, resume=True)
    if mesh.rank == 0:
        np.save(here / "parameters", result.parameters)
"""


class Run:
    """``mpishard run OPTIONS python SCRIPT FOLDER ARGUMENTS``, under way."""

    def __init__(self, folder, options, script, *arguments):
        self.folder = folder
        folder.mkdir()
        (folder / "script.py").write_text(script)
        package = Path(importlib.util.find_spec("mpishard").origin).parents[1]
        command = [*map(str, options), "python", str(folder / "script.py"), str(folder), *map(str, arguments)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mpishard", "run", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=(folder / "stderr").open("w"),
            # Open MPI's ofi sleeps a second in MPI_Init; the run of `hosts` has it.
            env={"OMPI_MCA_btl": "^ofi", **os.environ, "PYTHONPATH": str(package)},
            cwd=folder,
            start_new_session=True,
        )

    @property
    def errors(self):
        return (self.folder / "stderr").read_text(errors="replace")

    @property
    def steps(self):
        """(ranks, step) of each step that was taken."""
        path = self.folder / "steps"
        return [tuple(map(int, line.split())) for line in path.read_text().splitlines()] if path.exists() else []

    def left(self):
        """Processes of the job, by their command lines."""
        found = []
        for folder in Path("/proc").iterdir():
            try:
                words = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if str(self.folder / "script.py").encode() in words and int(folder.name) != self.process.pid:
                found.append(int(folder.name))
        return found

    def launcher(self):
        """Process number of the launcher, once there is one."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        (launcher,) = map(int, path.read_text().split())
        return launcher

    def wait_for(self, condition):
        deadline = time.monotonic() + SOON
        while not condition():
            assert time.monotonic() < deadline, self.errors
            time.sleep(0.02)

    def code(self):
        """The exit code; nothing of the job may be left with it."""
        try:
            code = self.process.wait(240)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            raise
        assert self.left() == [], self.errors
        return code


@pytest.fixture
def run(tmp_path):
    runs = []

    def start(options, script, *arguments):
        runs.append(Run(tmp_path / f"run-{len(runs)}", options, script, *arguments))
        return runs[-1]

    yield start
    for each in runs:
        for process in [*each.left(), each.process.pid]:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                pass
        each.process.wait()


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Final parameters of a run without a fault on three ranks."""
    whole = Run(tmp_path_factory.mktemp("whole") / "run", ["-n", 3], TRAINING, "")
    assert whole.code() == 0, whole.errors
    assert whole.steps == [(3, step) for step in range(1, 21)]
    return np.load(whole.folder / "parameters.npy")


@pytest.mark.quick
def test_a_killed_rank_costs_the_steps_since_the_checkpoint(run, expected):
    killed = run(["--elastic", "--no-replace", "-n", 3], TRAINING, "os.kill(os.getpid(), signal.SIGKILL)")
    assert killed.code() == 0, killed.errors
    assert killed.steps == [(3, step) for step in range(1, 11)] + [(2, step) for step in range(9, 21)]
    np.testing.assert_allclose(np.load(killed.folder / "parameters.npy"), expected, rtol=0, atol=1e-12)
    assert "start 2, 2 ranks" in killed.errors


def test_a_lost_rank_is_started_again_and_a_launcher_too(run, expected):
    fault = "os.kill(os.getpid(), signal.SIGKILL)"
    replaced = run(["--elastic", "-n", 3], TRAINING, fault)
    unled = run(["--elastic", "-n", 3], TRAINING, "time.sleep(1000)")
    unled.wait_for(lambda: (unled.folder / "fault").exists())
    os.kill(unled.launcher(), signal.SIGKILL)
    for each in (replaced, unled):
        assert each.code() == 0, each.errors
        assert each.steps[-12:] == [(3, step) for step in range(9, 21)]
        np.testing.assert_array_equal(np.load(each.folder / "parameters.npy"), expected)
    assert "lost its launcher to signal 9" in unled.errors


def test_state_that_is_lost(run, expected):
    """Two of three ranks die at once, a rank and its buddy; where deaths are healed, the run says so."""
    config = "mpishard.ShardingConfiguration(mesh, minimum_parameter_group_size=1)"
    elastic = f"mpishard.ElasticOptimizer(mpishard.ZeRO2Optimizer(mpishard.AdamW(lr=0.05), {config}))"
    changes = {
        "mesh.rank == mesh.size - 1": "mesh.rank > 0",
        '"fault"': 'f"fault-{mesh.rank}"',
        "mpishard.ZeRO2Optimizer(mpishard.AdamW(lr=0.05), mesh)": elastic,
    }
    script = TRAINING
    for before, after in changes.items():
        script = script.replace(before, after)
    lost = run(["--elastic", "-n", 3], script, "os.kill(os.getpid(), signal.SIGKILL)")
    assert lost.code() == 0, lost.errors
    assert lost.steps == [(3, step) for step in range(1, 11)] + [(3, step) for step in range(9, 21)]
    np.testing.assert_allclose(np.load(lost.folder / "parameters.npy"), expected, rtol=0, atol=1e-12)
    assert "start 2, 3 ranks" in lost.errors and "failed by" not in lost.errors


ELASTIC = TRAINING.replace("mpishard.ZeRO2Optimizer", "mpishard.ElasticOptimizer")


def test_the_first_rank_speaks_for_a_job_that_has_healed(run, expected):
    """The others end before it does, and no step is to come any more."""
    slow = "        time.sleep(4)\n        np.save"
    script = ELASTIC.replace("        np.save", slow).replace("every=4", "every=4, asynchronous=True")
    options = ["--elastic", "--end-limit", 3, "--heal-limit", 3, "-n", 3]
    healed = run(options, script, "os.kill(os.getpid(), signal.SIGKILL)")
    assert healed.code() == 0, healed.errors
    np.testing.assert_allclose(np.load(healed.folder / "parameters.npy"), expected, rtol=0, atol=1e-12)
    left = sorted(path.name for path in (healed.folder / "checkpoints").glob("step-*"))
    assert left == ["step-00000016", "step-00000020"], healed.errors
    assert "the job is ended" not in healed.errors and "is killed" not in healed.errors, healed.errors


def test_a_script_that_handles_an_error_of_the_run_ends_in_order(run):
    script = (
        ELASTIC.replace("gradients += rows", "gradients += np.nan if (here / 'fault').exists() else rows")
        .replace("    result = optimizer.optimize(", "    try:\n        result = optimizer.optimize(")
        .replace("resume=True)\n", "resume=True)\n    except FloatingPointError:\n        sys.exit(3)\n")
    )
    handled = run(["--elastic", "-n", 2], script, "pass")
    assert handled.code() == 3, handled.errors
    assert "start 2" not in handled.errors, handled.errors


def test_a_failure_that_comes_back_ends_the_run(run):
    failing = run(["--elastic", "-n", 2], TRAINING, "raise ArithmeticError('spoilt')", "again")
    assert failing.code() == 1, failing.errors
    assert failing.steps == [(2, step) for step in range(1, 11)] + [(2, 9), (2, 10)]
    assert "the same failure twice" in failing.errors and "ArithmeticError: spoilt" in failing.errors


def test_a_failure_where_nobody_heals_ends_the_job_soon(run):
    """Before a run, and after an elastic one, which is the script's own failure; one rank waits for no other.

    Three that fail together show one traceback.
    """
    others = "if mesh.rank == 3:\n    time.sleep(1000)\nmesh.world.barrier()\n"
    failure = f"if mesh.rank == 2:\n    raise ValueError('bad input')\n{others}"
    before = run(["--elastic", "-n", 4], f"import time, mpishard\nmesh = mpishard.Mesh()\n{failure}")
    assert before.code() == 1, before.errors
    assert before.errors.count("ValueError: bad input") == 2 and "the same failure twice" in before.errors
    failure = f"if mesh.rank < 3:\n    raise ValueError('bad input')\n{others}"
    after = run(["--elastic", "-n", 4], f"{ELASTIC}\n{textwrap.indent(failure, '    ')}", "pass")
    assert after.code() == 1 and after.errors.count("Traceback") == 1, after.errors
    assert "failed by ValueError" in after.errors and "after its training; the run ends with code 1" in after.errors
    assert "start 2" not in after.errors


def test_settings_that_differ_between_ranks_are_not_tried_again(run):
    script = """
import numpy as np, mpishard
mesh = mpishard.Mesh()
problem = mpishard.OptimizationProblem(lambda *_: 0.0, np.zeros(5), samples=4, batch_size=4, steps=3)
mpishard.DDPOptimizer(mpishard.AdamW(lr=0.1 + mesh.rank), mesh).optimize(problem, progress=False)
"""
    differing = run(["--elastic", "-n", 2], script)
    assert differing.code() == 1, differing.errors
    assert "all ranks must have the same settings, but lr(" in differing.errors, differing.errors
    assert "on all ranks, before any step: another start would end the same way" in differing.errors
    assert "start 2" not in differing.errors, differing.errors


def test_a_rank_that_ends_before_it_imports_mpishard(run):
    script = """
import os, signal, sys
from pathlib import Path
if int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK"))) == 2:
    marker = Path(sys.argv[1]) / "fault"
    if sys.argv[2] == "raise" or not marker.exists():
        marker.write_text("")
        os.kill(os.getpid(), signal.SIGKILL) if sys.argv[2] == "die" else 1 / 0
import mpishard
mpishard.Mesh().world.barrier()
"""
    killed = run(["--elastic", "-n", 4], script, "die")
    assert killed.code() == 0, killed.errors
    assert "lost ranks before all had imported mpishard" in killed.errors and "start 2, 4 ranks" in killed.errors
    failing = run(["--elastic", "-n", 4], script, "raise")
    assert failing.code() == 1, failing.errors
    assert failing.errors.count("ZeroDivisionError") == 2 and "the same twice" in failing.errors


CASES = """
import os, signal, sys
from pathlib import Path
import numpy as np
import mpishard

here, calls, times = Path(sys.argv[1]), [], np.linspace(0, 3, 50)

def residuals(x):
    calls.append(x)
    if len(calls) == 15 and mesh.rank == 1 and not (here / "fault").exists():
        (here / "fault").write_text("")
        os.kill(os.getpid(), signal.SIGKILL)
    return x[0] * np.exp(-x[1] * times) - 3 / (1 + times)

def fit(group):
    rows = slice(group.rank, None, group.size)
    with mpishard.Checkpoints(here / "fit", group, every=1) as checkpoints:
        found = mpishard.least_squares(
            lambda x: residuals(x)[rows], [1, 1], method="lm", mesh=group, checkpoints=checkpoints, resume=True)
    return np.append(found.x, found.nfev)

def case(number, group):
    with open(here / "called", "a") as file:
        file.write(f"{number}\\n")
    return fit(group) if number == 3 else np.full(3, number / 3)

with mpishard.Mesh() as mesh:
    results = mpishard.map_runs(case, range(8), mesh, ranks_each=2, folder=here / "cases", resume=True)
    if mesh.rank == 0:
        rest, calls = len(calls), []
        whole = mpishard.least_squares(residuals, [1, 1], method="lm")
        np.save(here / "results", [*results, [*whole.x, whole.nfev], [rest, len(calls), 0]])
"""


def test_many_runs_continue_after_a_kill_without_those_that_are_done(run):
    """One of them is a fit, in which a rank is shot: it continues from its checkpoint, with the same bits."""
    killed = run(["-n", 2, "--elastic"], CASES)
    assert killed.code() == 0, killed.errors
    called = (killed.folder / "called").read_text().split()
    assert [called.count(str(number)) for number in range(8)] == [2, 2, 2, 4, 2, 2, 2, 2], called
    *results, whole, (rest, calls, _) = np.load(killed.folder / "results.npy").tolist()
    assert results == [whole if number == 3 else [number / 3] * 3 for number in range(8)]
    assert rest < calls, (rest, calls)  # of the residuals, at the second start and in a fit that nothing stopped


def test_a_failure_that_does_not_come_back_is_survived(run):
    failing = run(["--elastic", "-n", 1], TRAINING, "raise ArithmeticError('spoilt')")
    assert failing.code() == 0, failing.errors
    assert failing.steps[-12:] == [(1, step) for step in range(9, 21)]
    assert "training begins from step 0" not in failing.errors, failing.errors
    script = TRAINING.replace("checkpoints=checkpoints, resume=True", "")
    without = run(["--elastic", "-n", 1], script, "raise ArithmeticError('spoilt')")
    assert without.code() == 0, without.errors
    assert without.steps == [(1, step) for step in [*range(1, 11), *range(1, 21)]]
    said = "this job was started again, and training begins from step 0 again"
    assert without.errors.count(said) == 1, without.errors


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("MPI.Finalize(); os._exit(0)", 1, "without its completion marker"),
        ("sys.exit()", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("raise SystemExit(0)", 0, ""),
        ("raise SystemExit(3)", 3, ""),
        ("os.kill(os.getpid(), signal.SIGKILL) if mesh.rank else time.sleep(1000)", None, "lost ranks"),
    ],
)
def test_the_exit_code_is_what_the_run_itself_reports(run, end, code, said):
    script = (
        "import os, signal, sys, time\nassert 'mpi4py' not in sys.modules\nbefore = sys.exit\nimport mpishard\n"
        "from mpi4py import MPI\nmesh = mpishard.Mesh()\nmesh.free()\nassert sys.exit is before\n"
        "def twice(value):\n    return 2 * value\n"
        "assert MPI.COMM_WORLD.bcast(twice) is twice and __file__ == os.path.abspath(sys.argv[0])\n"
    )
    ended = run(["-n", 2], f"{script}MPI.COMM_WORLD.Barrier()\n{end}")
    assert (ended.code() == code) if code is not None else (ended.code() != 0), ended.errors
    assert said in ended.errors
    assert ("the run ends" in ended.errors) == bool(said), ended.errors
    assert re.search(r"(?ms)^mpishard run: starts .*mpirun -n 2\b.*python\S* .*script.py\b", ended.errors)


def test_a_marker_counts_whatever_the_launcher_does(run):
    script = "import sys, time\nimport mpishard\nmesh = mpishard.Mesh()\nmesh.free()\ntime.sleep(1000 * mesh.rank)\n"
    ended = run(["--end-limit", 1, "-n", 2], script)
    assert ended.code() == 0, ended.errors
    assert "its launcher has not for 1 s and is killed" in ended.errors


def test_a_job_that_is_stuck_after_a_death_is_started_again(run):
    script = """
import time
import mpishard
from mpishard.launch.job_notes import JobNotes
folder = JobNotes.from_environment()
if folder.attempt == 0:
    folder.note_healed(1, 0)
    time.sleep(1000)
"""
    stuck = run(["--elastic", "--heal-limit", 1, "-n", 2], script)
    assert stuck.code() == 0, stuck.errors
    assert "no step for 1 s after a death" in stuck.errors and "start 2, 2 ranks" in stuck.errors


def test_a_script_that_does_not_start_is_not_restarted(run):
    broken = run(["--elastic", "-n", 2], "import nothing_of_that_name")
    assert broken.code() == 1, broken.errors
    assert "did not start" in broken.errors and "start 2" not in broken.errors


def is_stopped(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


@pytest.mark.parametrize("stopped", [False, True])
def test_the_job_ends_with_its_supervisor(run, stopped):
    fault = "os.kill(os.getpid(), signal.SIGSTOP)" if stopped else "time.sleep(1000)"
    watched = run(["--elastic", "--folder", "notes", "-n", 2], TRAINING, fault)
    watched.wait_for(lambda: (watched.folder / "fault").exists())
    # One that stops only afterwards stays: the kernel wakes those that are stopped when their launcher dies.
    watched.wait_for(lambda: not stopped or any(map(is_stopped, watched.left())))
    assert len(watched.left()) >= 3
    watched.process.kill()
    watched.process.wait()
    watched.wait_for(lambda: watched.left() == [])


def test_nohup(run):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        kept = run(["-n", 1], TRAINING, "time.sleep(1)")
    finally:
        signal.signal(signal.SIGHUP, before)
    kept.wait_for(lambda: (kept.folder / "fault").exists())
    kept.process.send_signal(signal.SIGHUP)
    assert kept.code() == 0, kept.errors
    assert kept.steps[-1] == (1, 20)


@pytest.mark.parametrize(("how", "code"), [("leave", 75), ("stay", 128 + signal.SIGTERM)])
def test_signals(run, how, code):
    script = """
import signal, sys, time
from pathlib import Path
import mpishard
mesh, here, seen = mpishard.Mesh(), Path(sys.argv[1]), []
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda number, frame: seen.append(number))
(here / f"ready-{mesh.rank}").write_text("")
while signal.SIGUSR1 not in seen:
    time.sleep(0.01)
(here / f"got-{mesh.rank}").write_text("")
while len(seen) < 2:
    time.sleep(0.01)
mesh.world.barrier()
if sys.argv[2] == "leave":
    sys.exit(75)
time.sleep(1000)
"""
    sent = run(["--elastic", "--grace", 2, "-n", 2], script, how)
    sent.wait_for(lambda: all((sent.folder / f"ready-{rank}").exists() for rank in range(2)))
    sent.process.send_signal(signal.SIGUSR1)
    sent.wait_for(lambda: all((sent.folder / f"got-{rank}").exists() for rank in range(2)))
    sent.process.send_signal(signal.SIGTERM)
    assert sent.code() == code, sent.errors


def test_ctrl_c_saves_a_checkpoint_under_any_optimizer(run):
    script = TRAINING.replace("steps=20", "steps=10**6")
    stopped = run(["-n", 2], script, "")
    stopped.wait_for(lambda: len(stopped.steps) > 2)
    stopped.process.send_signal(signal.SIGINT)
    assert stopped.code() == 128 + signal.SIGINT, stopped.errors
    assert "mpishard run: Ctrl-C: the run ends after its step, and saves" in stopped.errors
    step = stopped.steps[-1][1]
    assert f"mpishard: stopped after step {step}; the same command resumes" in stopped.errors
    assert (stopped.folder / "checkpoints" / f"step-{step:08d}").is_dir()
