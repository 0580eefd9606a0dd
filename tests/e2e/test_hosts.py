"""Jobs of several hosts: one that goes on without a host (all cases: ``helpers/hosts.py``), and one that hangs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import hosts
import namespaces
import pytest

from mpishard.launch.launchers import find_launcher

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
    program = Path(hosts.__file__).with_name("hanging.py")
    options = ["--watch", "--watch-folder", str(tmp_path / "watch"), "--timeout", "4", "--hosts", "h1:2,h2:1,h3:1"]
    command = [sys.executable, "-m", "mpishard", "run", *options, "--", "python", str(program), "other_order"]
    with namespaces.hosts(3) as three:
        done = subprocess.run(
            three[0].command(command, tmp_path),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=hosts.TIME_LIMIT,
            env=hosts.environment(),
        )
        left = [line for host in three for line in host.processes().values()]
    assert done.returncode == 1, done.stdout + done.stderr
    assert "ranks 0, 1, 3 on h1, h3: in Allreduce" in done.stderr
    assert "likely cause: rank 2 on h2 is not with the others" in done.stderr
    assert not left
