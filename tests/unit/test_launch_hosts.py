"""Hosts: those that are named, that answer or are lost, and what is left on them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time

import pytest

from mpishard.launch.launchers import Host, HostMonitor, Probe, check_shell, parse_hosts, sweep

pytestmark = pytest.mark.faults


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


def test_hosts_that_answer(shell):
    began = time.monotonic()
    hosts = parse_hosts("localhost,dead,a,cut,b")
    assert [host.name for host in Probe(hosts, shell, 1.0).wait()] == ["localhost", "a", "b"]
    assert time.monotonic() - began < 10
    assert Probe(parse_hosts("a,b"), shell, 60.0).wait() == parse_hosts("a,b")
    assert Probe(parse_hosts("a"), shell, 1.0, "exit 3").wait() == ()


def test_hosts_that_nothing_reaches(shell):
    check_shell(parse_hosts("a,b"), f"{shell} -o option")
    check_shell(parse_hosts("localhost"), "/nowhere/ssh")
    with pytest.raises(ValueError, match="no /nowhere/ssh .* --remote-shell"):
        check_shell(parse_hosts("localhost,a"), "/nowhere/ssh -q")


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
