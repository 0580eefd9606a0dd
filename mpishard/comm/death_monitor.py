"""A process beside the ranks of a node that says which of them died first.

When a rank is killed, MPICH's launcher kills the others within a millisecond and then names a process, not always the
one that died first, so no rank can tell.  The witness is not a rank and lives that moment longer.  It is a bare Python
at the other end of a socket of every rank; it ends when the first of them closes, or when it is dismissed: it is never
left over.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from typing import ClassVar, NoReturn

from mpi4py import MPI

# Seconds that a rank waits for the witness to be ready; on a busy machine Python takes its time to start.
_PATIENCE_S = 10.0

# argv: host, number of ranks, and of those on this node.  Descriptor 0 is a listening socket; a rank connects and says
# its rank and process, and hears back when all are watched: what ended before that would be seen in no order.  Anybody
# on the node can find the socket and connect; the kernel tells who it is.
_SCRIPT = """
import os, select, socket, struct, sys
host, size, here, patience = sys.argv[1:]
socket.setdefaulttimeout(float(patience))
listener = socket.socket(fileno=0)
events, ranks = select.epoll(), {}
try:
    while len(ranks) < int(here):
        rank = listener.accept()[0]
        if struct.unpack("3i", rank.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1] != os.getuid():
            rank.close()
            continue
        ranks[rank.fileno()] = rank, rank.recv(100).decode()
        events.register(rank, select.EPOLLIN)
    for rank, _ in ranks.values():
        rank.send(b".")
except OSError:
    sys.exit()  # somebody was gone before all were here
((first, _),) = events.poll(maxevents=1)  # of several the one that was ready first
who, process = ranks[first][1].split()
sys.exit(f"mpishard: rank {who} of {size} (process {process} on {host}) has died")
"""


class _Exit:
    """``os._exit`` of a rank while a witness is on duty: a death, which is never told as success.

    MPICH's launcher ends the job then, and in half of those that were seen the code of the job was this rank's 0.
    """

    def __init__(self) -> None:
        self._rank, self._really_exit = os.getpid(), os._exit

    def __call__(self, status: int) -> NoReturn:
        if os.getpid() == self._rank:  # and no fork of it
            status = status or 1
        self._really_exit(status)


def _watch_exits(wanted: bool) -> None:
    """In a run that outlives its ranks the code is another matter: Open MPI then ends the job for one that is not 0."""
    if wanted and not isinstance(os._exit, _Exit) and MPI.get_vendor()[0] != "Open MPI":
        os._exit = _Exit()
    elif not wanted and isinstance(os._exit, _Exit):
        os._exit = os._exit._really_exit


def silence_witnesses() -> None:
    """The job is about to be ended by this rank, which has said why: what dies now is no news.  Not collective."""
    for witness in DeathMonitor._on_duty:
        if witness._number:
            with contextlib.suppress(OSError):
                os.kill(witness._number, signal.SIGKILL)


class DeathMonitor:
    """Watches the ranks of `comm` that share a node with this one.  Get one by `DeathMonitor.over`."""

    _on_duty: ClassVar[list[DeathMonitor]] = []

    @classmethod
    def over(cls, comm: MPI.Intracomm) -> DeathMonitor:
        """The one on duty for these ranks, or a new one: to start a process takes longer than to make a mesh.

        Whoever gets it dismisses and closes it.  Collective, as `dismiss` and `close` are, and in one order.
        """
        group = comm.Get_group()
        for known in cls._on_duty:
            if MPI.Group.Compare(group, known._group) == MPI.IDENT:
                group.Free()
                known._users += 1
                return known
        return cls(comm, group)

    def __init__(self, comm: MPI.Intracomm, group: MPI.Group) -> None:
        self._group, self._users = group, 1
        self._on_duty.append(self)
        _watch_exits(True)
        node = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        address, number = b"", 0
        if node.rank == 0:
            with contextlib.suppress(OSError):
                address, number = self._start(comm.size, node.size)
        address, self._number = node.bcast((address, number))
        if self._number:
            with contextlib.suppress(OSError):
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._socket.settimeout(_PATIENCE_S)
                self._socket.connect(address)
                self._socket.send(f"{comm.rank} {os.getpid()}".encode())
                self._socket.recv(1)
        node.Free()

    def _start(self, ranks: int, ranks_here: int) -> tuple[bytes, int]:
        """Start the process; returns where to connect, which works at once, and its process number."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind("")  # Linux picks a free abstract address; elsewhere this fails, and there is no witness
            listener.listen(ranks_here)
            arguments = MPI.Get_processor_name(), str(ranks), str(ranks_here), str(_PATIENCE_S)
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _SCRIPT, *arguments],
                stdin=listener.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
            return listener.getsockname(), self._process.pid

    def dismiss(self) -> None:
        """Deaths are no longer news to this user.  Ranks may end once all have come to a barrier after this."""
        self._users -= 1
        if self._users:
            return
        self._on_duty.remove(self)
        _watch_exits(bool(self._on_duty))
        if not MPI.Is_finalized():
            self._group.Free()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        """Let go of the socket, after that barrier."""
        if not self._users and self._socket is not None:
            self._socket.close()
            self._socket = None
