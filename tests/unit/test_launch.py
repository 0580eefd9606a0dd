"""Launchers, hosts, processes that are left, and signals."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mpi4py import MPI

import mpishard
from mpishard.comm.abort import _try_again
from mpishard.launch.launchers import Host, HostMonitor, Probe, check_shell, parse_hosts, sweep
from mpishard.launch.processes import Leftovers
from mpishard.launch.signals import deferred

# A launcher that does not fit the MPI starts several worlds of one rank, which a mesh refuses to train in.

SRUN = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4"}
OWN = MPI.get_vendor()[0]
OF_THIS_MPI = (
    {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
    if OWN == "Open MPI"
    else {"PMI_RANK": "1", "PMI_SIZE": "4"}
)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_STEP_ID", "PMI_RANK", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environment", "launcher", "way_out"),
    [
        (SRUN, "srun", f"use srun --mpi={'pmix' if OWN == 'Open MPI' else 'pmi2'}, or the mpirun of {OWN}"),
        (OF_THIS_MPI, f"mpirun of {OWN}", "mpirun"),
    ],
)
def test_worlds_of_one_rank_are_refused(
    environment: dict[str, str], launcher: str, way_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for comm in (None, MPI.COMM_WORLD):
        with pytest.raises(ValueError, match=f"alone in its MPI_COMM_WORLD: {launcher} started 4 ranks.*{way_out}"):
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
def test_one_process_that_was_meant_to_be_one(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with mpishard.Mesh() as mesh:
        assert mesh.size == 1


# Hosts: those that are named, that answer or are lost, and what is left on them.


@pytest.mark.faults
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
    path.write_text('#!/bin/sh\ncase $1 in dead) exit 255;; cut) exec sleep 60;; esac\nshift\nexec sh -c "$*"\n')
    path.chmod(0o700)
    return str(path)


@pytest.mark.faults
def test_hosts_that_answer(shell):
    began = time.monotonic()
    hosts = parse_hosts("localhost,dead,a,cut,b")
    assert [host.name for host in Probe(hosts, shell, 3.0).wait()] == ["localhost", "a", "b"]
    assert time.monotonic() - began < 50  # silence lasts for 60
    assert Probe(parse_hosts("a,b"), shell, 60.0).wait() == parse_hosts("a,b")
    assert Probe(parse_hosts("a"), shell, 1.0, "exit 3").wait() == ()


@pytest.mark.faults
def test_hosts_that_nothing_reaches(shell):
    check_shell(parse_hosts("a,b"), f"{shell} -o option")
    check_shell(parse_hosts("localhost"), "/nowhere/ssh")
    with pytest.raises(ValueError, match="/nowhere/ssh .* does not exist; .* --remote-shell"):
        check_shell(parse_hosts("localhost,a"), "/nowhere/ssh -q")


@pytest.mark.faults
def test_a_host_that_is_silent_twice_is_lost(tmp_path):
    path = tmp_path / "shell"
    path.write_text(f'#!/bin/sh\nfor f in {tmp_path}/$1-*; do [ -e "$f" ] && rm "$f" && exit 255; done; exit 0\n')
    path.chmod(0o700)
    hosts = parse_hosts("localhost,a,b")
    (tmp_path / "a-1").touch()
    (tmp_path / "b-1").touch()
    (tmp_path / "b-2").touch()
    patrol = HostMonitor(hosts, str(path), 0.0, 20.0)
    seen, deadline = [], time.monotonic() + 20
    while (tmp_path / "b-2").exists() or not seen:
        assert time.monotonic() < deadline
        lost = patrol.look()
        seen += [lost] if lost else []
    assert seen == [{hosts[2]}]
    assert HostMonitor(hosts[:1], str(path), 0.0, 20.0).look() == set()


@pytest.mark.faults
def test_what_is_left_on_a_host_is_killed(shell, tmp_path):
    run = str(tmp_path / "a run's $folder")
    processes = [
        subprocess.Popen(["sleep", "60"], env={**os.environ, "MPISHARD_RUN": value}) for value in (run, f"{run}-other")
    ]
    try:
        sweep(parse_hosts("dead,a"), shell, 20.0, "MPISHARD_RUN", run)
        assert processes[0].wait(5) == -signal.SIGKILL
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


@pytest.mark.faults
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
        leftovers = Leftovers()
        leftovers._next = 0.0
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


# Ctrl-C: for what it waits, that it is not lost, and the exit code of a script that it has stopped in order.


@pytest.fixture(autouse=True)
def python_takes_ctrl_c() -> Iterator[None]:
    """As in a program that was not started in the background, where it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_it_waits_for_the_end_of_a_start() -> None:
    went_on = False
    with pytest.raises(KeyboardInterrupt), deferred():
        signal.raise_signal(signal.SIGINT)
        went_on = True
    assert went_on and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(ValueError, match="another"), deferred():
        raise ValueError("another")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_who_takes_it_already_gets_it_at_once() -> None:
    seen: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    with deferred():
        signal.raise_signal(signal.SIGINT)
        assert seen == [signal.SIGINT]


def test_it_comes_again_where_python_has_ignored_it() -> None:
    ignored: Any = SimpleNamespace(exc_type=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        _try_again(ignored)
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
    finished = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=60, check=False)
    assert finished.returncode == code, finished.stderr
    assert (tmp_path / "out").read_text() == "x"
