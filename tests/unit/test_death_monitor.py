"""The death monitor beside the ranks of a node: which processes it accepts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
from mpi4py import MPI

from mpishard.comm import abort

pytestmark = pytest.mark.faults

CONNECT = """
import os, socket, sys
os.setgid(65534), os.setuid(65534)
there = socket.socket(socket.AF_UNIX)
there.settimeout(20)
there.connect(bytes.fromhex(sys.argv[1]))
try:
    there.send(b"1 666")
    print(there.recv(1))
except OSError:  # closed with what was sent unread
    print(b"")
"""


@pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_no_rank():
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as rank:
        listener.bind("")
        listener.listen(2)
        address = listener.getsockname()
        command = [sys.executable, "-I", "-S", "-c", abort._SCRIPT, "host", "1", "1", "20"]
        with subprocess.Popen(command, stdin=listener.fileno(), stderr=subprocess.PIPE, text=True) as process:
            other = [sys.executable, "-I", "-S", "-c", CONNECT, address.hex()]
            assert subprocess.run(other, capture_output=True, text=True).stdout == "b''\n"
            rank.settimeout(20)
            rank.connect(address)
            rank.send(b"0 77")
            assert rank.recv(1) == b"."
            rank.close()
            assert "rank 0 of 1 (process 77 on host) has died" in process.communicate(timeout=20)[1]


def test_a_rank_that_leaves_by_itself_has_not_succeeded():
    script = """
import os
from mpi4py import MPI
from mpishard.comm.abort import DeathMonitor
first, second = DeathMonitor.over(MPI.COMM_SELF), DeathMonitor.over(MPI.COMM_SELF)
first.dismiss()
child = os.fork()
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
if {dismissed}:
    second.dismiss()
os._exit(0)
"""
    codes = [
        subprocess.run([sys.executable, "-c", script.format(dismissed=dismissed)], timeout=60).returncode
        for dismissed in (False, True)
    ]
    # The launcher of Open MPI calls it a failure itself.
    assert codes == [0 if MPI.get_vendor()[0] == "Open MPI" else 1, 0]
