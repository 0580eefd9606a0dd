"""A process beside the ranks of a node that says which of them died first.

When a rank is killed, MPICH's launcher kills the others within a millisecond and then names a process, not always the
one that died first, so no rank can tell.  The witness is not a rank and lives that moment longer.  It is a bare Python
that waits on process descriptors; it ends with the first rank that ends, or when it is dismissed: it is never left
over.
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


# Process numbers of the witnesses of this node that are on duty.
_on_duty: set[int] = set()


def silence_witnesses() -> None:
    """The job is about to be ended by this rank, which has said why: what dies now is no news.  Not collective."""
    for number in _on_duty:
        with contextlib.suppress(OSError):
            os.kill(number, signal.SIGKILL)


class Witness:
    """Watches the ranks of `comm` that share a node with this one.  Creation is collective."""

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
        if self._number:
            _on_duty.add(self._number)

    def dismiss(self) -> None:
        """Deaths are no longer news.  Ranks may end once all of them have come to a barrier after this."""
        _on_duty.discard(self._number)
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
