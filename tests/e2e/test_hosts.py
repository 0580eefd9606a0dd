"""Jobs of several hosts: one that goes on without a host (all cases: ``helpers/hosts.py``), and one that hangs."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import hosts
import namespaces
import pytest

from mpishard.launch.launchers import find_launcher
from mpishard.watch.diagnosis import diagnose
from mpishard.watch.folder import START, ask, end_job, jobs

NO_HOSTS = namespaces.missing()
pytestmark = pytest.mark.skipif(bool(NO_HOSTS), reason=NO_HOSTS)


@pytest.fixture
def case():
    """Open MPI heals in place when all ranks of a host have died; MPICH's launcher ends with the daemon of one."""
    return "processes" if find_launcher().family == "Open MPI" else "host"


def test_a_lost_host(case, tmp_path):
    ended = hosts.run(case, hosts.expected(), tmp_path)
    assert not ended.problem, f"{ended.problem}\n{ended.output}"  # exit code 0, the bits of one rank, no processes left
    if case == "host":
        assert ended.how == "restarted, 4 ranks", ended.output
    elif ended.how != "healed in place":
        # It should heal, and a restart is right only where Open MPI 5 itself is the reason, which was seen if the two
        # ranks die some tenths of a second apart, as on a loaded machine: it crashes if it learns of a death while it
        # makes a communicator, or lets survivors wait for ever.
        assert ended.how == "restarted, 6 ranks", ended.output
        assert any(why in ended.output for why in ("ompi_comm_revoke_local", "(--heal-limit)")), ended.output


def test_a_hang_over_hosts_is_named(tmp_path):
    """The ranks are asked until all are where they stay, and then end the job, as after a time limit."""
    program, folder = Path(hosts.__file__).with_name("hanging.py"), tmp_path / "watch"
    options = ["--watch", "--watch-folder", str(folder), "--timeout", "600", "--hosts", "h1:2,h2:1,h3:1"]
    command = [sys.executable, "-m", "mpishard", "run", *options, "--", "python", str(program), "other_order"]
    found, end = [], time.monotonic() + hosts.TIME_LIMIT
    with namespaces.hosts(3) as three:
        job = subprocess.Popen(three[0].command(command, tmp_path), stdin=subprocess.DEVNULL, env=hosts.environment())
        while [each.kind for each in found] != ["mismatch"] and job.poll() is None and time.monotonic() < end:
            time.sleep(0.1)
            if list(folder.glob(f"*/{START}")):
                asked = ask(jobs(folder)[0], 10)
                found = diagnose(asked.answers, asked.absent, asked.ranks)
        assert [(each.kind, each.ranks) for each in found] == [("mismatch", (2,))]
        assert {answer["rank"]: answer["host"] for answer in asked.answers} == {0: "h1", 1: "h1", 2: "h2", 3: "h3"}
        end_job(jobs(folder)[0], asked)
        assert job.wait(hosts.TIME_LIMIT) == 1
