"""A process beside the ranks of a node that says which of them died first.

When a rank is killed, MPICH's launcher kills the others within a millisecond and then names a process, not always the
one that died first, so no rank can tell.  The witness is not a rank and lives that moment longer.  It is a bare Python
that waits on process descriptors; it ends with the first rank that ends, or when it is dismissed, so it is never left over.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

from mpi4py import MPI

# argv: host, number of ranks, then rank:process of each rank on this node.
_SCRIPT = """
import os, select, sys
host, size, *ranks = sys.argv[1:]
events, watched = select.poll(), {}
for rank, process in (text.split(":") for text in ranks):
    try:
        descriptor = os.pidfd_open(int(process))
    except OSError:
        sys.exit()
    watched[descriptor] = f"rank {rank} of {size} (process {process} on {host})"
    events.register(descriptor, select.POLLIN)
dead = [watched[descriptor] for descriptor, _ in events.poll()]
os.write(2, f"mpishard: {', '.join(dead)} has died\\n".encode())
"""


class Witness:
    """Watches the ranks of `comm` that share a node with this one.  Creation and `dismiss` are collective."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        node = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
        ranks = node.allgather(f"{comm.rank}:{os.getpid()}")
        self._process: subprocess.Popen[bytes] | None = None
        if node.rank == 0 and hasattr(os, "pidfd_open"):
            command = [sys.executable, "-I", "-S", "-c", _SCRIPT, MPI.Get_processor_name(), str(comm.size), *ranks]
            with contextlib.suppress(OSError):
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
                )
        self._number = node.bcast(self._process.pid if self._process is not None else 0)
        node.Free()

    def dismiss(self) -> None:
        """Deaths are no longer news.  The ranks may end once all have returned from a barrier after this."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def silence(self) -> None:
        """The job is about to be ended by a rank of this node, which has said why.  Not collective."""
        with contextlib.suppress(OSError):
            if self._number:
                os.kill(self._number, signal.SIGKILL)
