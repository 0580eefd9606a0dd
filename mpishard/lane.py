"""A communicator on which calls come in one order on all ranks; in debug mode they compare each before it starts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpishard.ledger import Call, Ledger

_RECORD_BYTES = 400


class CollectiveMismatchError(RuntimeError):
    """The ranks of an axis are not in the same collective."""


class Lane:
    """A communicator, in debug mode another one for comparing, and the number of calls so far.

    Creation is collective, and so is `free`.
    """

    def __init__(self, comm: MPI.Intracomm, debug: bool) -> None:
        self.comm = comm
        self.calls = 0
        self.check_comm = comm.Dup() if debug and comm.size > 1 else None

    def free(self) -> None:
        if self.check_comm is not None:
            self.check_comm.Free()
        self.comm.Free()

    def revoke(self) -> None:
        """Make every operation on it fail, on all ranks.  Not collective (ULFM)."""
        for comm in (self.comm, self.check_comm):
            if comm is not None and comm != MPI.COMM_NULL and not comm.Is_revoked():
                comm.Revoke()

    def compare(self, ledger: Ledger, fields: tuple[Any, ...], detail: str, counts: Sequence[int] | None) -> None:
        """Debug: all ranks tell what they are about to do, and all raise where they differ.  Collective."""
        comm = self.check_comm
        if comm is None:
            return
        call = Call(*fields).placed(sys._getframe())
        # Runs of an all_to_all differ in length between ranks, and so may its buffers.
        size = "" if call.op == "all_to_all" else f"{call.elements} x "
        cut = "" if counts is None else f" cut as {list(counts)}"
        what = f"{call.op}({size}{call.dtype}{f', {detail}' if detail else ''}{cut})"
        own = np.zeros(_RECORD_BYTES, np.uint8)
        text = f"{what}\t{call.site}".encode()[:_RECORD_BYTES]
        own[: len(text)] = np.frombuffer(text, np.uint8)
        told = np.empty((comm.size, _RECORD_BYTES), np.uint8)
        ledger.active = fields
        comm.Allgather(own, told)
        ledger.active = None
        said = [row.tobytes().rstrip(b"\0").decode(errors="replace").partition("\t") for row in told]
        if any(other[0] != said[comm.rank][0] for other in said):
            lines = [f"  rank {rank}: {doing} called at {site}" for rank, (doing, _, site) in enumerate(said)]
            raise CollectiveMismatchError(
                f"call #{call.sequence} on axis {call.axis!r} differs between its ranks:\n" + "\n".join(lines)
            )
