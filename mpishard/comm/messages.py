"""Short messages that may come at any time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mpi4py import MPI


class Message(NamedTuple):
    source: int
    tag: int
    text: bytes


def messages(comm: MPI.Comm, tag: int = MPI.ANY_TAG) -> Iterator[Message]:
    """Receive the messages that have arrived.  Raises MPI.Exception if a process at the other end has died (ULFM)."""
    status = MPI.Status()
    while comm.Iprobe(MPI.ANY_SOURCE, tag, status):
        buffer = bytearray(status.Get_count(MPI.BYTE))
        comm.Recv([buffer, MPI.BYTE], status.Get_source(), status.Get_tag())
        yield Message(status.Get_source(), status.Get_tag(), bytes(buffer))
