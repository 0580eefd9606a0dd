"""A host is lost, and ``mpishard run --elastic`` goes on on the others; ``python tests/hosts.py`` has all cases."""

from __future__ import annotations

import hosts
import namespaces
import pytest

from mpishard.launch.launchers import find_launcher

NO_HOSTS = namespaces.missing()


@pytest.fixture
def case():
    """Open MPI heals in place when all ranks of a host have died; MPICH's launcher ends with the daemon of one."""
    return "processes" if find_launcher().family == "Open MPI" else "host"


@pytest.mark.skipif(bool(NO_HOSTS), reason=NO_HOSTS)
def test_a_lost_host(case, tmp_path):
    ended = hosts.run(case, hosts.expected(), tmp_path)
    assert not ended.problem, f"{ended.problem}\n{ended.output}"  # exit code 0, the bits of one rank, no processes left
    if case == "host":
        assert ended.how == "restarted, 4 ranks", ended.output
    elif ended.how != "healed in place":
        # Open MPI 5 was seen to leave survivors waiting for ever (1 death in 50 on a loaded machine, after another one
        # a moment before).  To end that job and start again is right, if it is why.
        assert ended.how == "restarted, 6 ranks" and "(--heal-limit); the job is ended" in ended.output, ended.output
