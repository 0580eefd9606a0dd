"""What the supervisor reads, the command lines it makes, and the processes it ends."""

from __future__ import annotations

import errno
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from mpi4py import MPI

import mpishard
from mpishard.comm import supervisor_reports
from mpishard.io.files import write_note
from mpishard.launch import restart_policy
from mpishard.launch.exit_codes import _code_of_script, _main_frame, _ran_to_its_end, _Unknown
from mpishard.launch.job_notes import Ended, Failure, Heal, JobNotes, Notes, raised_by_all
from mpishard.launch.launchers import Launcher, find_launcher, parse_hosts
from mpishard.launch.processes import Offspring, identity
from mpishard.launch.supervisor import Job, Supervisor, _in_lines, _temporary_folder

FAILURE = Failure("ValueError", "1.5 is bad", "train.py:7", 12)
HOSTS = parse_hosts("a:2,b:2,c:1")


def python(*words, **environment):
    """What Python with these words, which ends well, writes to stderr."""
    environment = {**os.environ, "PYTHONPATH": str(Path(mpishard.__file__).parents[1]), **environment}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_what_a_killed_supervisor_has_left_goes_with_the_next_start(tmp_path):
    """And no folder of one that lives, nor anything else."""
    dead, elsewhere = (Path(tempfile.mkdtemp(prefix=".mpishard-run-", dir=tmp_path)) for _ in range(2))
    write_note(dead / "supervisor", identity(os.getpid()))
    write_note(elsewhere / "supervisor", ["another", 1, "0"])  # whose locks a shared disk may not show here
    open_to_others = tmp_path / ".mpishard-run-open"
    open_to_others.mkdir(mode=0o755)
    with _temporary_folder(str(tmp_path)) as first, _temporary_folder(str(tmp_path)) as second:
        assert not dead.exists() and Path(first).is_dir() and Path(second).is_dir()
    assert set(tmp_path.iterdir()) == {elsewhere, open_to_others}


def test_a_command_line_is_broken_as_a_shell_reads_it():
    words = [f"NAME{number}='a b  c'" for number in range(20)]
    line = _in_lines(words)
    assert max(map(len, line.split("\n"))) <= 105 and line.count("\\\n") >= 3
    # shlex keeps an escaped end of a line, which a shell removes
    assert shlex.split(line.replace("\\\n", "")) == [word.replace("'", "") for word in words]


def test_notes_of_a_run(tmp_path):
    first = JobNotes.create(tmp_path / "run")
    assert first.path.stat().st_mode & 0o777 == 0o700
    other = JobNotes.from_environment(first.environment())
    assert other == first and JobNotes.from_environment({}) is None
    assert first.notes == Notes(False, None, 0, None, None, None, None, False)
    assert not first.is_ending and first.is_reporter(True, True) and first.notes.healed == 0
    other.note_started()
    other.note_training(True)
    other.note_cell(4)
    other.note_aborted()
    other.note_step(7)
    other.note_ended(Ended(None))
    other.note_given_up(Ended(3))
    other.note_failure(FAILURE)
    other.note_failure(replace(FAILURE, kind="RuntimeError"), echo=True)
    other.note_healed(3, 7)
    other.note_ending()
    heal = Heal(3, 7, (first.path / "healed-0").stat().st_mtime)
    assert first.notes == Notes(True, True, 7, heal, Ended(None), Ended(3), FAILURE, True, multiple_of=4)
    assert first.is_ending and not first.is_reporter(True, True) and first.notes.healed == 3
    assert first.is_reporter(False, False)
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in first.path.iterdir())
    second = first.next()
    assert second.is_restart and JobNotes.from_environment(second.environment()) == second
    assert not first.is_restart and not other.is_restart
    assert second == JobNotes(first.path, 1) and second.notes == Notes()
    second.note_failure(FAILURE, echo=True)
    assert second.notes.failure == FAILURE
    assert first.is_over and not second.is_over
    again = JobNotes.create(first.path)
    assert not again.is_restart and again.next().is_restart
    (first.path / "step-00000010").mkdir()  # a checkpoint
    (first.path / "training-log.csv").touch()
    again = JobNotes.create(first.path)
    left = {"start", "supervisor", "step-00000010", "training-log.csv"}
    assert again.attempt == 4 and again.notes == Notes() and {path.name for path in first.path.iterdir()} == left
    assert second.is_over and not again.is_over
    (first.path / "start").unlink()
    assert again.is_over


def test_a_note_that_does_not_fit_on_the_disk(tmp_path):
    folder = JobNotes.create(tmp_path / "run")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OSError) as caught:
            folder.note_step(7)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.filename == str(folder.path / "step-0") and caught.value.errno == errno.EFBIG
    assert {path.name for path in folder.path.iterdir()} == {"start", "supervisor"}


def test_a_folder_that_others_may_open(tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(ValueError, match="0700"):
        JobNotes.create(tmp_path)
    tmp_path.chmod(0o700)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="0700"):
        JobNotes.create(tmp_path / "link")


@pytest.mark.parametrize(
    ("status", "to_its_end", "code"),
    [(_Unknown, True, 0), (3, True, 0), (None, False, 0), (0, False, 0), (3, False, 3), (256, False, 0)]
    + [("bad input", False, 1), (True, False, 1), (-1, False, 255), (_Unknown, False, None)],
)
def test_exit_codes(status, to_its_end, code):
    assert _code_of_script(status, to_its_end) == code


@pytest.mark.parametrize(
    ("body", "to_its_end"),
    [("pass", True), ("try:\n    1 / 0\nexcept ZeroDivisionError:\n    pass", True), ("1 / 0", False)]
    + [
        ("raise SystemExit", False),
        ("with open('/dev/null'):\n    pass", True),
        ("for _ in range(3):\n    pass", True),
    ],
)
def test_whether_a_script_ran_to_its_end(body, to_its_end):
    names = {"sys": sys}
    try:
        exec(compile(f"frame = sys._getframe()\n{body}", "<script>", "exec"), names)
    except (ZeroDivisionError, SystemExit):
        pass
    assert _ran_to_its_end(names["frame"]) == to_its_end
    assert not _ran_to_its_end(None)
    assert _main_frame() is None or _main_frame().f_code.co_name == "<module>"


@pytest.fixture
def watched(tmp_path):
    """``watched(seconds, gone)``: what a `ProgressMonitor`, its `monitor`, says of its `folder` that much later."""
    folder, clock = JobNotes.create(tmp_path / "run"), SimpleNamespace(now=0.0)

    def look(seconds, gone=0):
        clock.now += seconds
        return look.monitor.look(gone)

    limits = restart_policy.ProgressLimits(start=20.0, step=100.0, heal=10.0, end=5.0)
    look.folder, look.monitor = folder, restart_policy.ProgressMonitor(folder, limits, lambda: clock.now)
    return look


def test_a_job_that_is_stuck(watched):
    folder = watched.folder
    folder.note_started()
    assert watched(1000) == ""
    folder.note_step(1)
    assert watched(0) == "" and watched(1000) == ""
    folder.note_step(2)
    assert watched(0) == ""  # a step of 1000 s
    folder.note_healed(3, 1)
    assert watched(0) == "" and watched(2999) == "" and "no step for 3000 s after a death" in watched(2)
    folder.note_step(3)
    assert watched(0) == "" and watched(5000) == "" and watched.monitor.step == 3
    folder.note_healed(3, 2)  # of four again, one of which was spawned
    os.utime(folder.path / "healed-0", (1, 1))
    assert watched(0) == "" and "after a death" in watched(3001)
    folder.note_step(4)
    assert watched(0) == "" and watched(5000) == ""
    folder.note_healed(2, 4)
    assert watched(0) == ""
    folder.note_step(5)  # that was under way
    assert watched(0) == "" and "after a death" in watched(3001)
    folder.note_healed(2, 5)
    assert watched(0) == ""
    folder.note_training(False)  # the script may go on for long
    assert watched(0) == "" and watched(5000) == ""
    folder.note_ended(Ended(0))
    assert watched(0) == "" and watched.monitor.has_ended and watched(5) == ""
    assert "launcher has not for 5 s" in watched(1)


def test_a_script_that_trains_twice(watched):
    folder, steps = watched.folder, iter([1, 1, 61, 61, 1, 3, 3])
    folder.note_started()
    reports, looks = object.__new__(supervisor_reports.Reports), []
    reports._run, reports.is_first, reports.is_silent = folder, True, False

    def over(seconds):
        looks.append(watched(1))
        if len(looks) == 5:  # in the second run, before its first step is noted
            folder.note_healed(3, 0)
        reports.step = next(steps, None)
        return reports.step is None

    reports._follow(over, lambda: reports.step)
    assert watched(1000) == "" and not any(looks)
    assert (watched.monitor.step, watched.monitor.furthest) == (3, 61)


def test_what_all_ranks_were_refused_alike_is_noted(tmp_path):
    reports = object.__new__(supervisor_reports.Reports)
    reports._run, reports._process, reports.has_trained = JobNotes.create(tmp_path / "run"), os.getpid(), False

    def refused(call, ranks=1):
        with pytest.raises((TypeError, ValueError, OSError)) as found:
            call()
        reports._note_failure(raised_by_all(found.value, ranks), 0)
        return reports._run.notes.failure.on_all_ranks

    assert refused(lambda: mpishard.cosine(-1.0, 3)) and refused(lambda: mpishard.FlatParameters(5))
    assert not refused(lambda: mpishard.cosine(-1.0, 3), ranks=0)  # nobody has told of other ranks
    assert not refused(lambda: mpishard.cosine(-1.0, 3), ranks=2)  # other ranks than those of the job
    assert not refused(lambda: int("of the user"))  # may have come from a file that is being written
    assert not refused(lambda: mpishard.load_checkpoint(tmp_path, np.ones(1), mesh=mpishard.Mesh(MPI.COMM_SELF)))


def test_a_restart_that_goes_on_from_nothing_says_so_once(tmp_path, capfd, monkeypatch):
    mesh = mpishard.Mesh(MPI.COMM_SELF)

    def add(parameters, samples, gradients):
        gradients += len(samples)
        return 0.0

    def train(optimizer=None, **options):
        problem = mpishard.OptimizationProblem(add, np.zeros(3), samples=2, batch_size=2, steps=1)
        optimizer = optimizer or mpishard.DDPOptimizer(mpishard.SGD(), mesh)
        optimizer.optimize(problem, progress=False, **options)
        return optimizer

    def minimize(**options):
        mpishard.minimize(lambda x: (float(x @ x), 2 * x), np.ones(3), mesh=mesh, **options)

    def said(call, **options):
        capfd.readouterr()
        call(**options)
        return [line for line in capfd.readouterr().err.splitlines() if "started again" in line]

    def restart():
        monkeypatch.setattr(supervisor_reports.Reports, "this", SimpleNamespace(restarted=True))

    nothing = "nothing is saved: checkpoints=Checkpoints(folder, mesh), resume=True makes a run that can resume"
    training = "mpishard: this job was started again, and training begins from step 0 again; "
    assert said(train) == []
    restart()
    assert said(train) == [training + nothing] and said(train) == []
    restart()
    with mpishard.Checkpoints(tmp_path / "a", mesh) as checkpoints:
        assert said(train, checkpoints=checkpoints, resume=True) == []  # there is none yet
        goes_on = f"optimize(..., resume=True) resumes from the checkpoint in {tmp_path / 'a'}"
        assert said(train, checkpoints=checkpoints) == [training + goes_on]
    ahead = train()
    restart()
    assert said(train, optimizer=ahead) == []
    minimization = "mpishard: this job was started again, and minimize begins from x0 again; "
    assert said(minimize) == [minimization + nothing] and said(minimize) == []
    restart()
    with mpishard.Checkpoints(tmp_path / "b", mesh) as checkpoints:
        assert said(minimize, checkpoints=checkpoints, resume=True) == []
        goes_on = f"minimize(..., resume=True) resumes from the checkpoint in {tmp_path / 'b'}"
        assert said(minimize, checkpoints=checkpoints) == [minimization + goes_on]


def test_an_elastic_run_that_takes_no_step(watched):
    folder = watched.folder
    folder.note_started()
    assert watched(0) == "" and watched(1000) == ""
    folder.note_training(True)
    assert watched(0) == "" and watched(99) == "" and "no step for 100 s (--step-limit)" in watched(2)
    folder.note_step(1)
    assert watched(0) == "" and watched(50) == ""
    folder.note_step(2)
    assert watched(0) == "" and watched(149, gone=1) == ""  # the last step took 50 s
    assert watched(149, gone=1) == "" and "no step for 150 s after a death" in watched(2, gone=1)
    folder.note_step(3)  # that was under way
    assert watched(0, gone=1) == "" and "after a death" in watched(151, gone=1)
    folder.note_step(4)
    assert watched(0, gone=1) == "" and watched(101, gone=1) == ""
    folder.note_training(False)
    assert watched(0, gone=1) == "" and watched(9, gone=2) == "" and watched(5000, gone=2) == ""


def test_a_job_that_does_not_start(watched):
    assert watched(0, gone=2) == "" and watched(4, gone=1) == "" and watched(3, gone=0) == ""  # they are being started
    assert watched(0, gone=1) == "" and watched(2, gone=1) == "" and not watched.monitor.half_started
    assert "a rank has ended before all had imported" in watched(2, gone=1) and watched.monitor.half_started
    watched.folder.note_started()
    assert watched(100, gone=1) == ""


def test_a_job_that_starts_for_ever(watched):
    assert watched(20) == "" and not watched.monitor.half_started
    assert "within 20 s (--start-limit)" in watched(1) and watched.monitor.half_started


def test_a_job_that_a_rank_has_aborted(watched):
    for note in (watched.folder.note_aborted, watched.folder.note_started, lambda: watched.folder.note_ended(Ended(0))):
        note()
        assert watched(1) == ""
    assert "has not ended within 3 s" in watched(2)


def test_command_lines():
    mpich, open_mpi = Launcher("/x/mpirun", "MPICH"), Launcher("/x/mpirun", "Open MPI")
    script = ["python", "train.py"]
    assert mpich.command(script, 3, elastic=True) == ["/x/mpirun", "-n", "3", *script]
    assert open_mpi.command(script, 3) == ["/x/mpirun", "-n", "3", *script]
    assert mpich.command(script, 3, hosts=HOSTS, shell="/y/sh") == (
        ["/x/mpirun", "-n", "3", "-hosts", "a:2,b:2,c:1", "-launcher", "ssh", "-launcher-exec", "/y/sh", *script]
    )
    there = {"MPISHARD_RUN": "r", "HOME": "h", "PYTHONPATH": "p"}
    assert open_mpi.command(script, 3, hosts=HOSTS, elastic=True, shell="/y/sh", environment=there) == (
        ["/x/mpirun", "-n", "3", "--with-ft", "ulfm", "--mca", "coll", "^han", "-H", "a:2,b:2,c:1"]
        + ["-x", "MPISHARD_RUN", "-x", "PYTHONPATH", "--prtemca", "plm_ssh_agent", "/y/sh", *script]
    )
    older = Launcher("/x/mpirun", "Open MPI", older=True)
    assert older.command(script, 3, elastic=True) == ["/x/mpirun", "-n", "3", *script]
    assert older.command(script, 3, hosts=HOSTS, shell="/y/sh", environment={}) == (
        ["/x/mpirun", "-n", "3", "-H", "a:2,b:2,c:1", "--mca", "plm_rsh_agent", "/y/sh", *script]
    )


def test_environments():
    mpich, open_mpi = Launcher("/x/mpirun", "MPICH"), Launcher("/x/mpirun", "Open MPI")
    mapping = "PRTE_MCA_rmaps_default_mapping_policy"
    assert mpich.environment({"HOME": "h"}, 8, 2) == {"HOME": "h"}
    assert open_mpi.environment({"HOME": "h"}, 8, 2)["HOME"] == "h"
    assert open_mpi.environment({}, 8, 2)[mapping] == "slot:oversubscribe"
    assert mapping not in open_mpi.environment({}, 2, 2)
    elastic = open_mpi.environment({}, 2, 2, elastic=True)
    assert elastic[mapping] == "slot:oversubscribe"
    deaths = {"PRTE_MCA_state_base_recoverable", "OMPI_MCA_async_mpi_finalize"}
    assert {elastic[name] for name in deaths} == {"1"} and not deaths & set(open_mpi.environment({}, 8, 2))
    assert open_mpi.environment({mapping: "node"}, 8, 2)[mapping] == "node"
    older = Launcher("/x/mpirun", "Open MPI", older=True)
    assert older.environment({}, 8, 2)["OMPI_MCA_rmaps_base_oversubscribe"] == "1"
    assert "OMPI_MCA_rmaps_base_oversubscribe" not in older.environment({}, 2, 2)
    assert not deaths & set(older.environment({}, 2, 2, elastic=True))
    assert open_mpi.environment({mapping: ":oversubscribe"}, 2, 2)[mapping] == "slot:oversubscribe"


@pytest.mark.parametrize(
    ("says", "family", "older"),
    [
        ("mpirun (Open MPI) 5.0.11", "Open MPI", False),
        ("mpirun (Open MPI) 4.1.4", "Open MPI", True),
        ("mpirun.openmpi (OpenRTE) 4.1.4", "Open MPI", True),
        ("prterun (PRRTE) 3.0.8", "Open MPI", False),
        ("HYDRA build", "MPICH", False),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.18.1", "MPICH", False),
    ],
)
def test_families(tmp_path, says, family, older):
    path = tmp_path / "mpirun"
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o700)
    assert find_launcher(str(path)) == Launcher(str(path), family, older)
    with pytest.raises(ValueError, match="/nowhere/mpirun"):
        find_launcher("/nowhere/mpirun")


def test_no_descendant_is_left(tmp_path):
    """Orphans, sessions of their own and stopped processes included; names may be cut within a letter."""
    script = tmp_path / "script.py"
    script.write_text("""
import os, subprocess, time
from mpishard.launch.processes import adopt_orphans, descendants, end_descendants
open("/proc/self/comm", "wb").write(b"b\\xc3")
adopt_orphans()
subprocess.run(["sh", "-c", "setsid sleep 1000 & sleep 1000 & kill -STOP $!"], check=True)
child = subprocess.Popen(["sh", "-c", "sleep 1000; true"])
while len(descendants()) < 4:
    time.sleep(0.01)
before = descendants()
assert end_descendants() == set() == descendants()
assert not any(os.path.exists(f"/proc/{process}") for process in before)
""")
    python(script)


def test_a_child_that_outlives_all_that_it_started():
    with subprocess.Popen(["sh", "-c", "sleep 0.5; read line; exec sleep 600"], stdin=subprocess.PIPE) as child:
        offspring = Offspring(child.pid, 0.2)

        def gone(after):
            time.sleep(after)
            offspring.look(started=True)
            return offspring.gone

        try:
            assert not gone(0) and not gone(0.25)  # it has a child
            began = time.monotonic()
            while not gone(0.02):
                assert time.monotonic() - began < 240
            offspring = Offspring(child.pid, 0.01)
            assert not gone(0.05)  # it has not seen any
        finally:
            child.kill()


@pytest.mark.parametrize(
    "names", [("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"), ("PMI_RANK", "MPI_LOCALNRANKS")]
)
def test_ranks_that_are_gone(names):
    """They are known by what a launcher gives them; what they have started themselves is none."""
    rank = "env {}=$1 {}=3 sh -c 'sleep 600 & echo; read line <&3' & ".format(*names)
    launcher, pipes = (
        f"exec 3<&0; for i in 0 1; do set $i; {rank} done; wait",
        dict.fromkeys(("stdin", "stdout"), subprocess.PIPE),
    )
    with subprocess.Popen(["sh", "-c", launcher], start_new_session=True, **pipes) as child:
        offspring, began = Offspring(child.pid, 0.0), time.monotonic()
        try:
            assert child.stdout.readline() == child.stdout.readline() == b"\n"
            offspring.look(started=False)
            assert offspring.ranks_gone == 1  # it has ended before anybody looked
            child.stdin.write(b"\n")
            child.stdin.flush()
            while offspring.ranks_gone != 2:
                assert time.monotonic() - began < 240
                time.sleep(0.01)
                offspring.look(started=False)
        finally:
            os.killpg(child.pid, signal.SIGKILL)


def test_a_child_of_a_rank_that_ends_meanwhile_is_no_rank():
    """A process that ends has no environment for a moment, in which its children are its own still."""
    ending = "PMI_RANK=0 MPI_LOCALNRANKS=3 sh -c 'echo; exec sleep 600' & wait"
    with subprocess.Popen(["sh", "-c", ending], env={}, stdout=subprocess.PIPE, start_new_session=True) as child:
        offspring = Offspring(child.pid, 0.0)
        try:
            assert child.stdout.readline() == b"\n"
            offspring.look(started=False)
        finally:
            os.killpg(child.pid, signal.SIGKILL)
    assert offspring.ranks_gone == 0


def test_a_process_that_a_rank_starts_reports_nothing(tmp_path):
    """Such as a command of mpishard: its end is not that of the run."""
    folder = JobNotes.create(tmp_path / "run")
    script = """
import subprocess, sys, mpishard
from mpishard.launch.job_notes import JobNotes
subprocess.run([sys.executable, "-c", "import mpishard"], check=True)
assert JobNotes.from_environment().notes.ended is None
"""
    python("-c", script, **folder.environment())
    assert folder.notes.ended == Ended(0)


def test_a_rank_that_nobody_can_end_ends_itself(tmp_path):
    """With the launcher's daemon, once its start is over; another parent is left alone."""
    folder = JobNotes.create(tmp_path / "run")
    daemon = tmp_path / "prted"
    shutil.copy("/bin/sh", daemon)
    script = f"{sys.executable} -c 'import time, mpishard; print(1, flush=True); time.sleep(600)'; echo after"
    given = {**os.environ, **folder.environment(), "PYTHONPATH": str(Path(mpishard.__file__).parents[1])}
    shells = [
        subprocess.Popen([shell, "-c", script], env=given, stdout=subprocess.PIPE, text=True)
        for shell in (str(daemon), "/bin/sh")
    ]
    assert [shell.stdout.readline() for shell in shells] == ["1\n", "1\n"]
    folder.next()
    assert [shell.communicate(timeout=240)[0] for shell in shells] == ["", "after\n"]
    assert shells[0].returncode == -signal.SIGKILL


def test_who_ends_without_a_part_in_the_run_leaves_its_exit_code_to_others(tmp_path):
    folder = JobNotes.create(tmp_path / "run")
    folder.note_healed(3, 1)
    folder.note_ended(Ended(75))
    script = "import mpishard.comm.supervisor_reports as reports\nreports.leave_to_others()\nraise SystemExit(0)"
    for lines, ended in ((script, Ended(75)), (script.replace("reports.leave_to_others()\n", ""), Ended(None))):
        python("-c", lines, **folder.environment())
        assert folder.notes.ended == ended


@pytest.mark.parametrize("begun", [True, False])
def test_what_ctrl_c_does_is_said_each_time(tmp_path, capsys, begun):
    folder, sent = JobNotes.create(tmp_path / "run"), []
    process = SimpleNamespace(send_signal=sent.append)
    supervisor = Supervisor(Job(("true",), ranks=1, launcher="true"))

    def press():
        supervisor._take_signal(signal.SIGINT, None)
        return supervisor._handle_signals(process, folder), capsys.readouterr().err

    if begun:
        folder.note_started()
        ends, said = press()
        assert not ends and sent == [signal.SIGTERM] and folder.is_ending
        assert "Ctrl-C: the run ends after its step, and saves if it has checkpoints" in said
    ends, said = press()
    assert ends and len(sent) == begun
    again = "Ctrl-C again: the ranks are killed, and save nothing more"
    assert (again if begun else "Ctrl-C before the ranks have begun: they are killed") in said


def test_what_the_supervisor_cannot_read_or_write_for_a_while_ends_no_job(tmp_path, monkeypatch):
    """The notes on a shared disk, and stderr; it goes on until the job is stuck."""
    monkeypatch.setattr("mpishard.launch.supervisor._LOOK_S", 0.0)
    supervisor = Supervisor(Job(("true",), ranks=1, launcher="true"))
    look = Mock(side_effect=[OSError(errno.ESTALE, "Stale file handle"), "it is stuck"])
    monitor = SimpleNamespace(look=look, started=False, has_ended=False, step=0)
    process = SimpleNamespace(pid=os.getpid(), poll=lambda: None)
    start = restart_policy.Start(1, (), restart_policy.JobHistory(1, 1))
    folder = JobNotes.create(tmp_path / "run")
    monkeypatch.setattr(sys, "stderr", Mock(write=Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))))
    assert supervisor._watch(process, start, folder, monitor, 0.0) == set()
    assert look.call_count == 2


def test_a_folder_that_another_run_takes(tmp_path, monkeypatch):
    """One of this machine may not while its supervisor lives; one of another ends this run, which leaves it alone."""
    folder = JobNotes.create(tmp_path / "run")
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        write_note(folder.path / "supervisor", identity(other.pid))
        with pytest.raises(ValueError, match=f"run is used by another mpishard run, process {other.pid}; .*--folder"):
            JobNotes.create(folder.path)
    folder, taken = JobNotes.create(folder.path), []
    supervisor = Supervisor(Job(("true",), ranks=1, launcher="true"))

    def watch(process, *_):
        taken.append(folder.next())
        process.wait()  # one that is still starting would be ended by SIGINT
        return set()

    monkeypatch.setattr(supervisor, "_end_all", lambda: None)
    monkeypatch.setattr(supervisor, "_watch", watch)
    assert supervisor._run(folder) == 1
    assert not taken[0].is_over


def test_a_disk_that_fails_for_a_while_does_not_end_the_run(tmp_path, monkeypatch):
    """At Ctrl-C, and at the end of a job, whose notes say how it has ended."""
    monkeypatch.setattr("mpishard.launch.job_notes._AGAIN_S", 0.0)
    supervisor = Supervisor(Job(("true",), ranks=1, launcher="true"))
    folder, fails = JobNotes.create(tmp_path / "run"), OSError(errno.ESTALE, "Stale file handle")
    monkeypatch.setattr(JobNotes, "notes", property(Mock(side_effect=[fails, fails, Notes(ended=Ended(0))])))
    monkeypatch.setattr(JobNotes, "next", Mock(side_effect=[fails, folder]))

    def watch(process, *_):
        supervisor._take_signal(signal.SIGINT, None)
        assert not supervisor._handle_signals(SimpleNamespace(send_signal=lambda number: None), folder)
        process.wait()
        return set()

    monkeypatch.setattr(supervisor, "_watch", watch)
    monkeypatch.setattr(supervisor, "_end_all", lambda: None)
    assert supervisor._run(folder) == 0


def test_the_note_of_the_end_waits_for_a_disk_that_fails_for_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr("mpishard.launch.job_notes._AGAIN_S", 0.0)
    reports, folder = object.__new__(supervisor_reports.Reports), JobNotes.create(tmp_path / "run")
    reports._run, reports._process, reports.is_first, reports.is_silent = folder, os.getpid(), True, False
    reports._stop, reports._thread, reports._ending = Mock(), Mock(), SimpleNamespace(code=0, failed=False)
    fails = OSError(errno.ESTALE, "Stale file handle")
    ended = Mock(side_effect=[fails, None])
    monkeypatch.setattr(supervisor_reports, "step_under_way", lambda: 7)
    monkeypatch.setattr(JobNotes, "note_step", Mock(side_effect=fails))
    monkeypatch.setattr(JobNotes, "note_ended", ended)
    reports._end()
    assert [call.args for call in ended.call_args_list] == [(Ended(0),)] * 2


def test_the_supervisor_never_loads_mpi():
    bare = Path(mpishard.__file__).with_name("launch") / "supervisor_main.py"
    program = f"""
import runpy, sys
names = runpy.run_path({str(bare)!r}, run_name="bare")
sys.argv = ["bare.py", '{{"hosts": {{}}, "policy": {{}}, "limits": {{}}, "launcher": "/nowhere"}}']
assert names["main"]() == 2
assert "mpishard.launch.supervisor" in sys.modules
assert not {{"mpi4py", "numpy", "mpishard.comm.mesh"}} & set(sys.modules)
"""
    assert "launcher /nowhere does not exist" in python("-I", "-c", program)
