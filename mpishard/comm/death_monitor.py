"""A process beside the ranks of a node that reports which rank died first.

When a rank is killed, MPICH's launcher kills the others within a millisecond and then names a process, not always the
one that died first, so no rank can report it.  The death monitor is not a rank and lives a moment longer.  It is a
plain Python process with a socket to every rank.  It ends when the first socket closes or when it is dismissed, so it
never outlives the job.
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

# Seconds that a rank waits for the death monitor to be ready; on a busy machine Python starts slowly.
_PATIENCE_S = 10.0

# argv: host, number of ranks, number of ranks on this node, patience.  Descriptor 0 is a listening socket.  A rank
# connects, sends its rank and process number, and gets an answer when all are watched: of ranks that ended earlier the
# order would not be known.  Anybody on the node can connect to the socket; the kernel tells the user id.
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
((first, _),) = events.poll(maxevents=1)  # of several closed sockets the first
who, process = ranks[first][1].split()
sys.exit(f"mpishard: rank {who} of {size} (process {process} on {host}) has died")
"""


class _Exit:
    """Replaces ``os._exit`` of a rank while a death monitor is active: such an exit never counts as success.

    MPICH's launcher ends the job at such an exit, and in half of the runs seen the job's exit code was this rank's 0.
    """

    def __init__(self) -> None:
        self._rank, self._really_exit = os.getpid(), os._exit

    def __call__(self, status: int) -> NoReturn:
        if os.getpid() == self._rank:  # not in a fork of the rank
            status = status or 1
        self._really_exit(status)


def _watch_exits(wanted: bool) -> None:
    """Replace or restore ``os._exit``.  Not under Open MPI: with ULFM it ends the whole job at a code other than 0."""
    if wanted and not isinstance(os._exit, _Exit) and MPI.get_vendor()[0] != "Open MPI":
        os._exit = _Exit()
    elif not wanted and isinstance(os._exit, _Exit):
        os._exit = os._exit._really_exit


def silence_death_monitors() -> None:
    """Stop reporting deaths, since this rank has reported its error and is about to end the job.  Not collective."""
    for monitor in DeathMonitor._active:
        if monitor._number:
            with contextlib.suppress(OSError):
                os.kill(monitor._number, signal.SIGKILL)


class DeathMonitor:
    """Watches the ranks of `comm` that share a node with this one.  Get one by `DeathMonitor.over`."""

    _active: ClassVar[list[DeathMonitor]] = []

    @classmethod
    def over(cls, comm: MPI.Intracomm) -> DeathMonitor:
        """The active monitor of these ranks, or a new one: starting a process takes longer than making a mesh.

        The caller dismisses and closes it.  Collective, as `dismiss` and `close` are; all ranks call them in one order.
        """
        group = comm.Get_group()
        for known in cls._active:
            if MPI.Group.Compare(group, known._group) == MPI.IDENT:
                group.Free()
                known._users += 1
                return known
        return cls(comm, group)

    def __init__(self, comm: MPI.Intracomm, group: MPI.Group) -> None:
        self._group, self._users = group, 1
        self._active.append(self)
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
        """Start the process; returns the socket address, which accepts connections at once, and the process number."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind("")  # Linux picks a free abstract address; elsewhere this fails: no monitor
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
        """Stop reporting deaths to this user.  A rank may end once all have passed a barrier after this."""
        self._users -= 1
        if self._users:
            return
        self._active.remove(self)
        _watch_exits(bool(self._active))
        if not MPI.Is_finalized():
            self._group.Free()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        """Close the socket, after that barrier."""
        if not self._users and self._socket is not None:
            self._socket.close()
            self._socket = None
