"""Launchers, hosts, signals, batch scripts, and what follows the end of a job."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mpi4py import MPI

import mpishard
from mpishard.cli import main
from mpishard.launch.exit_codes import START_AGAIN
from mpishard.launch.job_notes import Ended, Failure, Heal, Notes
from mpishard.launch.launchers import Host, HostMonitor, Probe, check_shell, parse_hosts, sweep
from mpishard.launch.processes import Leftovers
from mpishard.launch.restart_policy import JobHistory, JobOutcome, Policy, Start, Stop, decide
from mpishard.launch.signals import ctrl_c_again, ctrl_c_deferred

# A launcher that does not fit the MPI starts several worlds of one rank, which a mesh refuses to train in.

SRUN = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4"}
OWN = MPI.get_vendor()[0]
OF_THIS_MPI = (
    {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
    if OWN == "Open MPI"
    else {"PMI_RANK": "1", "PMI_SIZE": "4"}
)


@pytest.fixture(autouse=True)
def no_launcher(environ: Callable[..., None]) -> None:
    environ(SLURM_STEP_ID=None, PMI_RANK=None, OMPI_COMM_WORLD_RANK=None)


@pytest.mark.parametrize(
    ("environment", "launcher", "way_out"),
    [
        (SRUN, "srun", f"use srun --mpi={'pmix' if OWN == 'Open MPI' else 'pmi2'}, or the mpirun of {OWN}"),
        (OF_THIS_MPI, f"mpirun of {OWN}", "mpirun"),
    ],
)
def test_worlds_of_one_rank_are_refused(
    environment: dict[str, str], launcher: str, way_out: str, environ: Callable[..., None]
) -> None:
    environ(**environment)
    for comm in (None, MPI.COMM_WORLD):
        with pytest.raises(ValueError, match=f"MPI_COMM_WORLD: {launcher} started 4 .*{way_out}"):
            mpishard.Mesh(comm)
    with mpishard.Mesh(MPI.COMM_SELF) as mesh:
        assert mesh.size == 1


@pytest.mark.parametrize(
    "environment",
    [
        # python script.py in a script for sbatch, or in the shell of salloc
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
        # srun --pty bash, or srun -n 1
        {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        # mpirun -n 1 in a script for sbatch, whose processes on other hosts come by srun
        {**SRUN, **OF_THIS_MPI, "OMPI_COMM_WORLD_SIZE": "1", "PMI_SIZE": "1", "MPI_LOCALNRANKS": "1"},
    ],
)
def test_one_process_that_was_meant_to_be_one(environment: dict[str, str], environ: Callable[..., None]) -> None:
    environ(**environment)
    with mpishard.Mesh() as mesh:
        assert mesh.size == 1


# Hosts: those that are named, that answer or are lost, and what is left on them.


def test_hosts():
    assert parse_hosts("a:4, b") == (Host("a", 4), Host("b", 1))
    for text in ("", "a:", "a:0", "a:x", "a,a:2", "-x", "a,,b"):
        with pytest.raises(ValueError, match="hosts"):
            parse_hosts(text)
    assert Host(socket.gethostname()).is_local and Host("localhost").is_local and not Host("elsewhere").is_local


@pytest.fixture
def shell(tmp_path):
    """Reaches every host but `dead`, which refuses, and `cut`, which is silent; the hosts are this machine."""
    path = tmp_path / "shell"
    path.write_text('#!/bin/sh\ncase $1 in dead) exit 255;; cut) exec sleep 600;; esac\nshift\nexec sh -c "$*"\n')
    path.chmod(0o700)
    return str(path)


def test_hosts_that_answer(shell):
    began = time.monotonic()
    hosts = parse_hosts("localhost,dead,a,cut,b")
    assert [host.name for host in Probe(hosts, shell, 3.0).wait()] == ["localhost", "a", "b"]
    assert time.monotonic() - began < 50  # silence lasts for 60
    assert Probe(parse_hosts("a,b"), shell, 60.0).wait() == parse_hosts("a,b")
    assert Probe(parse_hosts("a"), shell, 1.0, "exit 3").wait() == ()


def test_hosts_that_nothing_reaches(shell):
    check_shell(parse_hosts("a,b"), f"{shell} -o option")
    check_shell(parse_hosts("localhost"), "/nowhere/ssh")
    with pytest.raises(ValueError, match="/nowhere/ssh .*--remote-shell"):
        check_shell(parse_hosts("localhost,a"), "/nowhere/ssh -q")
    for shell in (" ", "ssh '-q"):
        with pytest.raises(ValueError, match="--remote-shell is .*give a program"):
            check_shell(parse_hosts("a"), shell)


def test_a_host_that_is_silent_twice_is_lost(tmp_path):
    path = tmp_path / "shell"
    path.write_text(f'#!/bin/sh\nfor f in {tmp_path}/$1-*; do [ -e "$f" ] && rm "$f" && exit 255; done; exit 0\n')
    path.chmod(0o700)
    hosts = parse_hosts("localhost,a,b")
    (tmp_path / "a-1").touch()
    (tmp_path / "b-1").touch()
    (tmp_path / "b-2").touch()
    patrol = HostMonitor(hosts, str(path), 0.0, 20.0)
    seen, deadline = [], time.monotonic() + 120
    while (tmp_path / "b-2").exists() or not seen:
        assert time.monotonic() < deadline
        lost = patrol.look()
        seen += [lost] if lost else []
    assert seen == [{hosts[2]}]
    assert HostMonitor(hosts[:1], str(path), 0.0, 20.0).look() == set()
    assert HostMonitor(hosts, "/nowhere/shell", 0.0, 20.0).look() == set()  # no process can be started


def test_what_is_left_on_a_host_is_killed(shell, tmp_path):
    run = str(tmp_path / "a run's $folder")
    processes = [
        subprocess.Popen(["sleep", "600"], env={**os.environ, "MPISHARD_RUN": value}) for value in (run, f"{run}-other")
    ]
    try:
        sweep(parse_hosts("dead,a"), shell, 20.0, "MPISHARD_RUN", run)
        assert processes[0].wait(120) == -signal.SIGKILL
        assert processes[1].poll() is None
    finally:
        for process in processes:
            process.kill()
            process.wait()


# What the supervisor removes after a job: what is certainly the job's.

MAP = """
import mmap, sys
files = [open(path, "r+b") for path in sys.argv[1:]]
kept = [mmap.mmap(file.fileno(), 0) for file in files]
print(flush=True)
sys.stdin.read()
"""


def test_segments_that_are_made_one_after_another_are_seen_soon():
    """A rank that dies in its first second leaves no time for a later look."""
    now, seen, looks = [0.0], iter([set(), {"a"}, {"a", "b"}, {"a", "b"}]), []
    leftovers = Leftovers(lambda: looks.append(now[0]) or next(seen), lambda: now[0])
    for tenth in range(40):
        now[0] = tenth / 10
        leftovers.look()
    assert len(looks) == 4 and looks[-1] < 1.5


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no shared memory in a folder")
def test_segments_that_a_dead_process_of_the_job_had(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    unique = f"{os.getpid()}_{time.monotonic_ns()}"
    names = (f"mpich_shm_{unique}", f"sm_segment.host.{unique}", f"users_{unique}", f"mpich_shm_other_{unique}")
    mpich, open_mpi, users, others = paths = [Path("/dev/shm") / name for name in names]
    (tmp_path / "ompi.77").mkdir()
    (tmp_path / "ompi.78").mkdir()
    try:
        for path in paths:
            path.write_bytes(bytes(4096))
        mapped = [sys.executable, "-I", "-S", "-c", MAP, *map(str, (mpich, open_mpi, users))]
        leftovers = Leftovers(clock=itertools.count(step=10.0).__next__)
        with subprocess.Popen(mapped, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            leftovers.look()
            leftovers.remove(0)
            assert all(path.exists() for path in paths)
            process.kill()
        leftovers.remove(77)
        assert [path.exists() for path in paths] == [False, False, True, True]
        assert [path.name for path in tmp_path.iterdir()] == ["ompi.78"]
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def test_a_job_ends_in_order_where_there_is_no_temporary_folder(monkeypatch):
    def gettempdir():
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", gettempdir)
    Leftovers().remove(77)


# Ctrl-C: for what it waits, that it is not lost, and the exit code of a script that it has stopped in order.


@pytest.fixture(autouse=True)
def python_takes_ctrl_c() -> Iterator[None]:
    """As in a program that was not started in the background, where it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_it_waits_for_the_end_of_a_start() -> None:
    went_on = False
    with pytest.raises(KeyboardInterrupt), ctrl_c_deferred():
        signal.raise_signal(signal.SIGINT)
        went_on = True
    assert went_on and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(ValueError, match="another"), ctrl_c_deferred():
        raise ValueError("another")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_who_takes_it_already_gets_it_at_once() -> None:
    seen: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    with ctrl_c_deferred():
        signal.raise_signal(signal.SIGINT)
        assert seen == [signal.SIGINT]


def test_it_comes_again_where_python_has_ignored_it() -> None:
    ignored: Any = SimpleNamespace(exc_type=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        ctrl_c_again(ignored)
        threading.Event().wait(60)


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ("note_run(True)", 130),
        ("note_run(True); sys.exit()", 130),
        ("note_run(True); sys.exit(0)", 130),
        ("note_run(True); sys.exit(75)", 75),
        ("note_run(True); raise SystemExit(3)", 3),
        ("note_run(True); raise ArithmeticError", 1),
        ("note_run(True); note_run(False)", 0),
        ("note_run(False)", 0),
    ],
)
def test_the_exit_code_of_a_script_whose_run_was_stopped(lines: str, code: int, tmp_path: Path) -> None:
    """And all is closed in order first."""
    imports = "import sys; from mpishard.launch.exit_codes import note_run"
    program = f"{imports}; file = open('out', 'w'); file.write('x'); {lines}"
    environment = {"PYTHONPATH": str(Path(mpishard.__file__).parents[1])}
    command = [sys.executable, "-c", program]
    finished = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=240, check=False)
    assert finished.returncode == code, finished.stderr
    assert (tmp_path / "out").read_text() == "x"


# What follows the end of a job: the end of the run, or a start of which ranks on which hosts.

FAILURE = Failure("ValueError", "1.5 is bad", "train.py:7", 12)
ELASTIC = Policy(elastic=True)
SHRINKING = replace(ELASTIC, replace=False)
HOSTS = parse_hosts("a:2,b:2,c:1")


def ended_with(code, *, half_started=False, lost=False, stopped=0, healed=0, **notes):
    """How a job ended that had started, with these notes of its processes."""
    heal = Heal(healed, 0, 0.0) if healed else None
    return JobOutcome(code, Notes(**{"started": True, "heal": heal, **notes}), half_started, lost, stopped)


KILLED = ended_with(137, step=10)


def after(outcome, policy=ELASTIC, history=None, hosts=(), answering=None):
    history = history or JobHistory(4, 4)
    return decide(policy, history, outcome, hosts, hosts if answering is None else answering)


@pytest.mark.parametrize("policy", [Policy(), ELASTIC])
@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (ended_with(10), 138),  # as MPICH's launcher has it
        (ended_with(138, step=10), 138),
        (replace(ended_with(11), asked_to_leave=True), 138),  # 9 of ranks that it has killed is mixed in
        (replace(ended_with(75, ended=Ended(75)), asked_to_leave=True), 75),
    ],
)
def test_a_job_that_is_asked_to_leave_is_not_started_again(outcome, code, policy):
    assert after(outcome, policy).code == code


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (ended_with(0, ended=Ended(0)), 0),
        (ended_with(137, ended=Ended(0)), 0),  # after a heal
        (ended_with(-9, ended=Ended(0)), 0),  # a launcher that did not end
        (ended_with(0, ended=Ended(3)), 3),
        (ended_with(3, ended=Ended(None)), 3),
        (ended_with(-11, ended=Ended(None)), 139),
        (ended_with(137, ended=Ended(None), healed=3), 0),
        (ended_with(3, ended=Ended(None), healed=3), 3),
        (ended_with(75, given_up=Ended(75)), 75),
        (ended_with(75, ended=Ended(0), given_up=Ended(75)), 75),
        (ended_with(75, ended=Ended(75), given_up=Ended(74)), 75),
        (ended_with(1, ended=Ended(0), given_up=Ended(1), failure=FAILURE, healed=3), 0),
        (ended_with(75, given_up=Ended(75), aborted=True), 75),
        (ended_with(0, ended=Ended(0), stopped=15), 0),
        (ended_with(0, stopped=15), 143),
        # stopped in order, by a signal that stands for Ctrl-C in the ranks
        (ended_with(0, ended=Ended(130), stopped=15), 143),
        (ended_with(0, ended=Ended(130), stopped=2), 130),
        (ended_with(75, ended=Ended(75), stopped=15), 75),
    ],
)
def test_what_ends_a_run(outcome, code):
    assert [after(outcome, Policy(elastic=elastic)).code for elastic in (True, False)] == [code, code]


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (KILLED, 137),
        (ended_with(0), 1),
        (ended_with(-9), 137),
        (ended_with(137, failure=FAILURE), 1),
        (ended_with(0, ended=Ended(0), aborted=True), 1),
        (ended_with(0, ended=Ended(0), aborted=True, healed=3), 1),
        (ended_with(137, ended=Ended(None), aborted=True, healed=3), 137),
        (ended_with(137, started=False, half_started=True), 1),
    ],
)
def test_without_elastic_a_failure_is_the_end(outcome, code):
    follows = after(outcome, Policy())
    assert follows.code == code and isinstance(follows, Stop) and follows.why


@pytest.mark.parametrize(
    ("outcome", "changes", "ranks"),
    [
        (KILLED, {}, 4),
        (ended_with(0, step=10), {}, 4),
        (KILLED, {"replace": False}, 3),
        (ended_with(137, step=10, healed=2), {"replace": False}, 2),
        (ended_with(137, step=10, healed=2), {}, 4),
        (KILLED, {"replace": False, "multiple_of": 2}, 2),
        (KILLED, {"replace": False, "min_workers": 3}, 3),
        (ended_with(-9, step=10), {}, 4),  # the launcher was killed
        (ended_with(1, step=10, failure=FAILURE), {}, 4),
        (ended_with(1, step=10, ended=Ended(0), failure=FAILURE), {}, 4),
    ],
)
def test_ranks_that_are_left(outcome, changes, ranks):
    assert after(outcome, replace(ELASTIC, **changes)).ranks == ranks


def test_too_few_ranks():
    assert "3 ranks remain and 4 are needed" in after(KILLED, replace(SHRINKING, min_workers=4)).why
    assert isinstance(after(KILLED, replace(SHRINKING, multiple_of=4)), Stop)
    assert isinstance(after(KILLED, SHRINKING, JobHistory(1, 1)), Stop)


def test_a_start_has_a_multiple_of_what_the_meshes_of_an_earlier_one_need():
    """Also where the next start dies before it has a mesh; fewer ranks only where no such multiple is left."""
    first = after(ended_with(137, step=10, multiple_of=4))
    second = after(ended_with(137, started=False), history=first.history)
    assert (first.ranks, second.ranks) == (4, 4)
    assert after(ended_with(137, step=10, multiple_of=1), history=second.history).history.multiple_of == 1
    eight = after(ended_with(137, multiple_of=4), history=JobHistory(8, 8, restarts=1))
    assert eight.ranks == 4
    lost = after(ended_with(137, step=10, multiple_of=4), history=JobHistory(5, 5), hosts=HOSTS, answering=HOSTS[1:])
    assert lost.ranks == 3


def test_starts_that_lose_ranks_in_succession():
    """Of as many once more, since a dead process is no dead core, and then of fewer, until one gets further."""
    history, seen = JobHistory(4, 4), []
    for step in (5, 5, 5, 9, 9):
        follows = after(ended_with(137, step=step), history=history)
        history = follows.history
        seen.append(follows.ranks)
    assert seen == [4, 3, 2, 4, 3]
    never = after(ended_with(137, step=0), replace(ELASTIC, min_workers=4), JobHistory(4, 4, restarts=1))
    assert never.ranks == after(ended_with(137, step=0)).ranks == 4  # the latter is the first start of all


def test_hosts_that_are_left():
    history = JobHistory(5, 5)
    lost = after(KILLED, history=history, hosts=HOSTS, answering=HOSTS[1:])
    assert (lost.ranks, lost.hosts, lost.history.ranks) == (3, HOSTS[1:], 5)
    back = after(ended_with(137, step=11), history=lost.history, hosts=HOSTS)  # it answers again
    assert (back.ranks, back.hosts) == (5, HOSTS)
    fewer = after(ended_with(137, step=11), SHRINKING, lost.history, HOSTS)
    assert (fewer.ranks, fewer.hosts) == (4, HOSTS)
    assert after(ended_with(137, step=10, lost=True), history=history, hosts=HOSTS).ranks == 5  # unclear which
    assert after(KILLED, history=history, hosts=HOSTS, answering=()).code == 137


def test_only_progress_resets_the_count_of_restarts():
    history, starts = JobHistory(10, 10), []
    for step in (5, 5, 5, 9, 9, 9, 8, 9):
        follows = after(ended_with(137, step=step), history=history)
        starts.append(isinstance(follows, Start))
        history = follows.history if starts[-1] else history
    assert starts == [True, True, True, True, True, True, False, False]
    assert "3 restarts have brought it no further than step 9" in follows.why
    assert history.step == 9


def test_the_same_failure_twice():
    failed = ended_with(1, step=12, failure=FAILURE)
    first, between = after(failed), after(KILLED, history=after(failed).history)
    for changes, history, decision in (
        ({"message": "1.6 is bad"}, first.history, Stop),
        ({"step": 13}, first.history, Start),
        ({"kind": "OSError"}, first.history, Start),
        ({"where": "train.py:8"}, first.history, Start),
        ({}, between.history, Start),
    ):
        again = ended_with(1, step=12, failure=replace(FAILURE, **changes))
        assert isinstance(after(again, history=history), decision), changes


def test_what_all_ranks_were_refused_alike_is_not_tried_again():
    def refused(step=0, **changes):
        return ended_with(1, step=step, failure=replace(FAILURE, **{"step": 0, "on_all_ranks": True, **changes}))

    follows = after(refused(), hosts=HOSTS)
    assert follows.code == 1 and follows.why == (
        "failed by ValueError at train.py:7 on all ranks, before any step: another start would end the same way"
    )
    # What one rank has met, what has come with a step, and what follows a loss of ranks or hosts may come otherwise.
    early = ended_with(1, failure=replace(FAILURE, step=1, on_all_ranks=True))
    for outcome in (refused(on_all_ranks=False), early, refused(step=3)):
        assert isinstance(after(outcome), Start)
    for options in (
        {"history": JobHistory(4, 4, restarts=1)},
        {"history": JobHistory(4, 4, step=3)},
        {"hosts": HOSTS, "answering": HOSTS[1:]},
    ):
        assert isinstance(after(refused(), **options), Start), options


def test_a_job_that_never_started():
    outcome = ended_with(127, started=False)
    for policy in (ELASTIC, Policy()):
        follows = after(outcome, policy)
        assert follows.code == 127
        assert follows.why == "did not start, or its script never imported mpishard (the launcher reports 127)"
    assert isinstance(after(outcome, history=JobHistory(4, 4, step=3)), Start)
    assert after(ended_with(1, started=False), hosts=HOSTS, answering=HOSTS[:1]).ranks == 2


@pytest.mark.parametrize("lost", [{"code": 137, "half_started": True}, {"code": 9}, {"code": 139}, {"code": -9}])
def test_ranks_that_die_before_they_import_mpishard(lost):
    """As others, but a second time in succession it is taken for the script's own failure."""
    lost = ended_with(started=False, **lost)
    first = after(lost)
    assert first.ranks == 4
    second = after(lost, history=first.history)
    assert second.code and "the same twice" in second.why
    assert isinstance(after(lost, history=after(KILLED, history=first.history).history), Start)
    assert isinstance(after(lost, replace(ELASTIC, max_restarts=0)), Stop)


def test_a_failure_after_the_training_is_no_lost_rank():
    follows = after(ended_with(137, step=12, aborted=True, failure=replace(FAILURE, trained=True)))
    assert follows == Stop(1, "failed by ValueError at train.py:7 after its training")


@pytest.mark.parametrize("changes", [{"min_workers": 0}, {"multiple_of": 0}, {"max_restarts": -1}])
def test_senseless_policies(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        Policy(**changes)


# How a batch script of ``slurm/`` leaves, under stand-ins for Slurm's commands, the launcher and the training.

TRAIN = Path(__file__).parents[2] / "slurm" / "train.sbatch"

PROGRAMS = {
    # Says which MPI it has, and the size of the world, unless the first $FAILS launches fail; and trains.
    "python": """
case $* in
-c*) echo "MPICH Version: 5" ;;
*" -c "*)
    echo >>launches
    [ "$(wc -l <launches)" -gt "$FAILS" ] || { echo "srun: error: it is busy" >&2; exit 1; }
    echo 2
    ;;
*) exit "$CODE" ;;
esac""",
    "mpirun": "true",
    "srun": '[ "$SILENT" = no ] || [ ! -e launches ]',  # all nodes answer, but for those that fall silent
    "squeue": "echo 9; echo 1",
    # Does not answer its first $DEAF calls; $ANSWER: a request that is taken is answered.
    "scontrol": """
calls=$(($(cat calls 2>/dev/null || echo 0) + 1))
echo "$calls" >calls
if [ "$calls" -le "$DEAF" ]; then
    echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2
    exit 1
elif [ "$1" = requeue ]; then
    echo "$2" >>requeued
    [ "$ANSWER" = yes ] || { echo "Unexpected message received for job $2" >&2; exit 1; }
else
    echo "JobId=1 JobName=train JobState=$STATE Restarts=$(cat requeued 2>/dev/null | wc -l) PreemptTime=None"
fi
""",
}


# Sourced by Bash before the script.  Nobody waits: the script's clock goes on by itself.
CLOCK = "sleep() { SECONDS=$((SECONDS + ${1%.*} + 1)); }"


@pytest.fixture
def leave(tmp_path):
    """Run the script to its end; what it wrote, its exit code, and the jobs that were queued again."""
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "train.py").touch()
    (tmp_path / "clock").write_text(CLOCK)

    def run(
        deaf=0,
        answer="yes",
        state="RUNNING",
        fails=0,
        silent="no",
        code=START_AGAIN,
        words=(str(TRAIN), "train.py"),
        **environment,
    ):
        given = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_NUM_NODES": "2", **environment}
        stand_ins = {"PATH": f"{tmp_path}:{os.defpath}", "BASH_ENV": str(tmp_path / "clock")}
        stand_ins |= {"DEAF": str(deaf), "ANSWER": answer, "STATE": state}
        stand_ins |= {"FAILS": str(fails), "SILENT": silent, "CODE": str(code)}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": 30, "check": False}
        done = subprocess.run(["bash", *words], cwd=tmp_path, env={**given, **stand_ins}, **streams)
        requeued = tmp_path / "requeued"
        return done.stdout, done.returncode, requeued.read_text().split() if requeued.exists() else []

    return run


@pytest.mark.parametrize(("deaf", "answer"), [(0, "yes"), (0, "no"), (1, "yes"), (2, "no"), (4, "yes")])
def test_a_job_is_queued_again_once_however_late_slurm_answers(leave, deaf, answer):
    log, code, requeued = leave(deaf, answer)
    assert requeued == ["1"] and code == START_AGAIN, log
    assert log.count("job 1 leaves with code 75 and is queued again") == 1, log


@pytest.mark.parametrize(
    ("kind", "arguments", "elastic", "options"),
    [
        ("slurm", [], "", "--text a b"),
        ("array", [], "", "--text a b --lr 1e-3 --output sweep-0-output/lr-1e-3"),
        ("elastic", [], "--elastic ", "--text a b --workers 1"),
        ("elastic", ["train.py", "of sbatch"], "--elastic ", "of sbatch --workers 1"),
    ],
)
def test_a_printed_script_needs_no_other_file(kind, arguments, elastic, options, leave, tmp_path, capsys):
    """And gives the training script the words that it was printed with, or those of sbatch."""
    assert main(["script", kind, "--", "python", "train.py", "--text", "a b"]) == 0
    printed = capsys.readouterr().out
    (needs,) = (line for line in printed.splitlines() if line.startswith("PYTHON=${"))
    assert needs.endswith("pip install 'mpishard[cli]'")
    (tmp_path / "printed").write_text(printed)
    log, code, _ = leave(code=0, words=("printed", *arguments), SPARES="1", NOTES=str(tmp_path))
    started = f"-m mpishard run {elastic}--folder {tmp_path}/.mpishard-job-cluster-1 -n 2 -- {tmp_path}/python train.py"
    assert code == 0 and f"{started} {options} \n" in log, log


@pytest.mark.parametrize(
    ("script", "launcher", "words"),
    [
        ("train", "auto", "-n 2 --log-dir logs -- "),
        ("train", "elastic", "-n 2 --log-dir logs -- "),
        ("train", "srun", "--open-mode=append --output=logs/rank-%t.log "),
        ("array", "auto", "-n 2 --log-dir logs/lr-1e-3 -- "),
    ],
)
def test_each_rank_has_a_log_of_its_own(script, launcher, words, leave, tmp_path):
    (tmp_path / "slurm").symlink_to(TRAIN.parent)
    (tmp_path / "srun").write_text('#!/usr/bin/env bash\ncase $* in *" -c "*) echo 2 ;; esac\n')
    log, code, _ = leave(code=0, words=(f"slurm/{script}.sbatch", "train.py"), LAUNCHER=launcher, LOG_DIR="logs")
    assert code == 0 and f"{words}{tmp_path}/python train.py" in log and (tmp_path / "logs").is_dir(), log


def test_one_of_an_array_is_queued_again_by_its_full_name(leave):
    log, _, requeued = leave(SLURM_ARRAY_JOB_ID="17", SLURM_ARRAY_TASK_ID="1")
    assert requeued == ["17_1"], log


@pytest.mark.parametrize(
    ("deaf", "environment", "code", "said"),
    [
        (
            2,
            {"state": "CANCELLED"},
            START_AGAIN,
            "leaves with code 75; it is CANCELLED, so this script does not queue it",
        ),
        (10**6, {"PATIENCE": "0"}, 2, "Slurm did not queue job 1 again within 0 s; submit it again, and it goes on"),
    ],
    ids=["cancelled", "Slurm never answers"],
)
def test_a_job_that_is_not_queued_again(leave, deaf, environment, code, said):
    log, left_with, requeued = leave(deaf, **environment)
    assert left_with == code and not requeued and said in log, log


@pytest.mark.parametrize(
    ("script", "environment", "options"),
    [
        ("optimize(resume=True)", {}, ""),
        ('add_argument("--resume")', {}, "--resume"),
        ('add_argument("--resume")', {"RESUME": ""}, ""),
        ("optimize(resume=True)", {"RESUME": "--again yes"}, "--again yes"),
    ],
)
def test_a_script_gets_the_option_to_resume_that_it_has(leave, tmp_path, script, environment, options):
    (tmp_path / "train.py").write_text(script)
    log, _, requeued = leave(**environment)
    assert requeued == ["1"] and f"train.py {options}\n" in log, log


@pytest.mark.parametrize(
    ("options", "code", "queued", "said"),
    [
        ({"fails": 2}, START_AGAIN, True, "job 1: no rank has begun; it is tried again for"),
        ({"fails": 10**6}, 2, False, "started no rank within 300 s under MPICH Version: 5"),
        ({"fails": 10**6, "silent": "yes"}, START_AGAIN, True, "srun: error: it is busy"),
        ({"PYTHON": "/nowhere/python"}, 2, False, "there is no /nowhere/python; activate its environment"),
        ({"NOTES": "/nowhere"}, 2, False, "/nowhere cannot be written; set NOTES to a folder"),
        ({"code": 138}, 138, True, "leaves with code 138 and is queued again"),  # the ranks got SIGUSR1
        ({"code": 3}, 3, False, "start 0 of job 1"),
    ],
)
def test_a_start_that_fails_is_queued_again_where_the_cause_may_pass(leave, options, code, queued, said):
    log, left_with, requeued = leave(**options)
    assert (left_with, requeued) == (code, ["1"] * queued) and said in log, log


def test_notes_of_jobs_that_were_killed_are_removed(leave, tmp_path):
    for name in ("big-7", "big-9", "other-7"):
        (tmp_path / f".mpishard-job-{name}").mkdir()
    log, _, _ = leave(SLURM_CLUSTER_NAME="big")
    assert sorted(path.name[14:] for path in tmp_path.glob(".mpishard-job-*")) == ["big-9", "other-7"], log
