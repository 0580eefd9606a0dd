"""Compilation in turns: files in place of the lock file, and processes that hold a lock for long or die."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading

import pytest

from mpishard.backend import jit

HOLD = """
import fcntl, sys
file = open(sys.argv[1], "r+")
fcntl.lockf(file, fcntl.LOCK_EX, 1, int(sys.argv[2]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(jit, "_WAIT_S", 0.05)
    return tmp_path / f"mpishard-{os.getuid()}.lock"


@pytest.fixture
def holder(path):
    """A process that holds the turn of "name" until its stdin is closed."""
    assert jit._file() is not None
    command = [sys.executable, "-I", "-S", "-c", HOLD, str(path), str(jit._byte("name"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        yield process


def link(path):
    (path.parent / "target").touch(0o600)
    path.symlink_to(path.parent / "target")


def second_name(path):
    (path.parent / "target").touch(0o600)
    path.hardlink_to(path.parent / "target")


def of_another_user(path):
    if os.getuid() != 0:
        pytest.skip("only root can make files of other users")
    path.touch(0o600)
    os.chown(path, 65534, 65534)


def open_to_all(path):
    path.touch()
    path.chmod(0o666)


@pytest.mark.parametrize("plant", [of_another_user, open_to_all, link, second_name, os.mkfifo, os.mkdir])
def test_what_another_user_may_have_planted_is_not_used(path, plant):
    plant(path)
    assert jit._file() is None
    made = []
    jit.load_or_make("name", lambda: False, lambda: made.append(1))
    assert made == [1]


def test_nobody_makes_anything_while_no_core_is_free(path, monkeypatch):
    monkeypatch.setattr(jit, "_WAIT_S", 30)
    free, made = [False, False, True], []
    monkeypatch.setattr(jit, "core", lambda: contextlib.nullcontext(free.pop(0)))
    jit.load_or_make("name", lambda: False, lambda: made.append(list(free)))
    assert made == [[]]


def test_a_lock_of_ours_is_used(path):
    with jit.attempt("name") as mine:
        assert mine
    assert path.stat().st_mode & 0o777 == 0o600


def test_nobody_waits_without_limit(holder):
    with jit.attempt("name") as mine, jit.attempt("other") as other:
        assert not mine and other
    made = []
    jit.load_or_make("name", lambda: False, lambda: made.append(1))
    assert made == [1]


@pytest.mark.faults
@pytest.mark.parametrize("done", [True, False])
def test_who_waits_loads_what_was_made_or_makes_it(holder, monkeypatch, done):
    monkeypatch.setattr(jit, "_WAIT_S", 30)
    waits, ended, found, made = threading.Event(), threading.Event(), [], []

    def load():
        waits.set()
        return ended.is_set() and done

    def wait():
        jit.load_or_make("name", load, lambda: made.append(1))
        found.append(1)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    waits.wait()
    assert not made and not found
    ended.set()
    holder.kill()
    holder.wait()
    thread.join(20)
    assert found == [1]
    assert made == ([] if done else [1])
