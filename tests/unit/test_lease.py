"""Who uses a folder: runs that live, have died, or are of an earlier start of a job."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from dataclasses import asdict, replace

import pytest

from mpishard.launch import lease
from mpishard.launch.lease import FolderLease, Holder

HOLD = "import sys, pathlib; from mpishard.launch.lease import FolderLease as F; F.take(pathlib.Path(sys.argv[1]))"


@pytest.fixture
def other(tmp_path):
    """Another process that has the lease until its input ends."""
    words = [sys.executable, "-c", f"{HOLD}; print(flush=True); input()", str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        yield process
        process.kill()


def write(folder, holder, age=0.0):
    path = folder / "holder"
    path.write_text(json.dumps(asdict(holder)))
    now = path.stat().st_mtime
    os.utime(path, (now - age, now - age))


def of_elsewhere(**changes):
    return replace(Holder.this(), machine="another", host="n7", **changes)


def test_a_folder_has_one_run_at_a_time(tmp_path, other, environ):
    with pytest.raises(ValueError, match=rf"process {other.pid} on {os.uname().nodename}, since 2"):
        FolderLease.take(tmp_path)
    environ(MPISHARD_SHARE_FOLDER="1")
    assert FolderLease.take(tmp_path) is None
    environ(MPISHARD_SHARE_FOLDER=None)
    other.stdin.close()
    assert other.wait() == 1 and not (tmp_path / "holder").exists()
    first, second = FolderLease.take(tmp_path), FolderLease.take(tmp_path)
    assert first is second
    first.release()
    assert (tmp_path / "holder").exists()
    second.release()
    assert not list(tmp_path.iterdir())


def test_one_that_was_killed_does_not_count(tmp_path, other):
    other.kill()
    other.wait()
    assert (tmp_path / "holder").exists()
    FolderLease.take(tmp_path).release()


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({"SLURM_JOB_ID": "17"}, {"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "1"}),
        (
            {"MPISHARD_RUN": "/run", "MPISHARD_ATTEMPT": "1"},
            {"MPISHARD_RUN": "/run", "MPISHARD_ATTEMPT": "2"},
        ),
    ],
)
def test_an_earlier_start_of_the_job_is_over(tmp_path, environ, capfd, before, now):
    environ(**now)
    write(tmp_path, replace(Holder.this(before), machine="another", host="n7"))
    FolderLease.take(tmp_path).release()
    assert "waits" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("age", "beats", "lives"),
    [(0, 3, True), (40, 0, False), (29, 0, False), (0, 0, False), (-3600, 0, False)],
)
def test_one_of_another_machine_lives_if_it_gives_signs_of_life(tmp_path, monkeypatch, age, beats, lives):
    write(tmp_path, of_elsewhere(job="17 of big"), age)
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        path = tmp_path / "holder"
        written = path.stat().st_mtime
        later = beats and len(waits) == beats
        # As if the clock of the file system went on.
        monkeypatch.setattr(FolderLease, "_now", lambda self: path.stat().st_mtime + 10 * len(waits) + age)
        os.utime(path, (written + later, written + later))

    monkeypatch.setattr(lease.time, "sleep", sleep)
    if lives:
        with pytest.raises(ValueError, match="Slurm job 17 of big, process .* on n7"):
            FolderLease.take(tmp_path)
    else:
        FolderLease.take(tmp_path).release()
    assert (0 < len(waits) < 5) == (age < 30)  # also where the last sign is from a clock that was set back since


def test_a_first_rank_succeeds_another_of_its_run(tmp_path):
    write(tmp_path, of_elsewhere())
    FolderLease.take(tmp_path, succeeds=True).release()


@pytest.mark.parametrize("text", ["", "[]", '{"host": 1}'])
def test_a_file_that_names_no_holder_has_one_while_it_is_written(tmp_path, monkeypatch, text):
    (tmp_path / "holder").write_text(text)
    os.utime(tmp_path / "holder", (0, 0))
    FolderLease.take(tmp_path).release()


def test_a_full_disk_keeps_no_file_without_a_holder(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        assert FolderLease.take(tmp_path) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())
    FolderLease.take(tmp_path).release()


def test_a_folder_that_cannot_be_written_has_no_lease(tmp_path):
    (tmp_path / "file").write_text("")
    assert FolderLease.take(tmp_path / "file") is None
