"""The choice whether the device buffers of an axis travel by NCCL, made by all of its ranks at the first of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpishard.backend.kinds import Backend, backend_of
from mpishard.comm.channel import NOTHING, Channel
from mpishard.comm.deferred import DEFERRED
from mpishard.comm.nccl_proof import prove
from mpishard.comm.nccl_queue import NcclQueue, connect, new_id
from mpishard.io import log

Array = Any
# The first with messages between two ranks (as ncclGetVersion gives it).
_OLDEST = 2_700
_RECORD_BYTES, _MOST_TEXT = 4096, 300
COLLECTIVES = ("mpi", "nccl")


class NcclFacts(NamedTuple):
    """The facts that ranks of an axis exchange before they use NCCL."""

    problem: str  # why this rank cannot use NCCL; empty if it can
    neighbours: int  # ranks of the axis that share memory with it, itself included
    device: str  # its GPU, by a name that no other on its node has
    version: int  # of NCCL


def why_not(facts: Sequence[NcclFacts]) -> str:
    """The reason why the ranks of an axis cannot use NCCL, from their facts by rank; empty if they can."""
    for rank, each in enumerate(facts):
        if each.problem:
            return f"rank {rank}: {each.problem}"
    if any(each.neighbours < len(facts) for each in facts):
        return "its ranks are on several nodes, and NCCL is used inside a node only"
    first: dict[str, int] = {}
    for rank, each in enumerate(facts):
        if first.setdefault(each.device, rank) != rank:
            return (
                f"ranks {first[each.device]} and {rank} share GPU {each.device}, which NCCL refuses; give each rank a "
                "GPU of its own with cupy.cuda.Device(mesh.device).use(), and start no more ranks than there are GPUs"
            )
    for rank, each in enumerate(facts):
        if each.version != facts[0].version:
            return (
                f"rank 0 has version {facts[0].version} of NCCL and rank {rank} has {each.version}; "
                "install the same on all nodes"
            )
    return ""


class NcclLink:
    """The NCCL communicators of one axis, if all its ranks can use NCCL. Creation is not collective.

    There are two, each with a stream, as of MPI: one for blocking and one for started calls, since a rank may start a
    call before a blocking one that comes first on another rank. With one communicator NCCL would take the two for each
    other and mix their bytes. Kernels of two communicators run concurrently. `said` holds the reasons for MPI that this
    rank has printed for the mesh.
    """

    def __init__(self, channel: Channel, said: set[str]) -> None:
        self.way: str | None = None  # ``"nccl"`` or ``"mpi"``; None: no device buffer has come
        self.reason: str = ""  # why it is ``"mpi"``
        self._channel = channel
        self._said = said
        self._queues: list[NcclQueue] = []

    def carries(self, buffer: Array) -> bool:
        """Return True if device buffers travel by NCCL. Collective at the first of them."""
        if self.way is None:
            ledger = self._channel.ledger
            ledger.active = call = self._channel.begin("connect", NOTHING, "NCCL")
            try:
                self.reason = self._connect(buffer)
            finally:
                ledger.active = None
            ledger.enter(call, 0, ledger.spend(call, call[0]))
            self.way = "mpi" if self.reason else "nccl"
            if self.reason and self._channel.rank == 0 and self.reason not in self._said:
                log.warn(f"device buffers of axis {self._channel.name!r} travel by MPI, not by NCCL: {self.reason}")
            self._said.add(self.reason)
        return self.way == "nccl"

    def queue(self, *, started: bool) -> NcclQueue:
        """That of the calls that are started, or of the blocking ones; only if `carries`."""
        return self._queues[started]

    def free(self) -> None:
        """Wait for all calls, and free the communicators.  Collective."""
        DEFERRED.flush()  # other ranks may wait for these before they come to the calls that this waits for
        for queue in self._queues:
            queue.free()
        self._forget()

    def abort(self) -> None:
        """End all calls, done or not, and forget the communicators; the next device buffer makes new ones."""
        for queue in self._queues:
            queue.abort()
        self._forget()

    def _forget(self) -> None:
        self._queues, self.way, self.reason = [], None, ""

    def _connect(self, like: Array) -> str:
        """Make the communicators; returns why they cannot be used, the same on all ranks.  Collective."""
        backend, comm = backend_of(like), self._channel.comm
        try:
            nccl, problem = backend.nccl(), ""
            version = int(nccl.get_version())
            if version < _OLDEST:
                problem = f"NCCL {version} is too old; install version {_OLDEST} or later"
        except Exception as error:  # without a library, or of one that cannot be loaded
            nccl, version = None, 0
            problem = f"NCCL is not there ({error}); install nvidia-nccl-cu12 or nvidia-nccl-cu13, as CuPy's CUDA is"
        facts = NcclFacts(problem, _neighbours(comm), backend.device_name(like), version)
        reason = why_not([NcclFacts(*each) for each in _exchange(comm, facts)])
        if reason:
            return reason
        made: list[NcclQueue] = []
        for _ in range(2):
            reason = self._agree(lambda: made.append(self._new_queue(nccl, backend, like)))
            if reason:
                break
        for queue in made:
            reason = reason or self._agree(partial(prove, queue, comm.rank, comm.size, like))
        if reason:
            for queue in made:
                queue.abort()
        else:
            self._queues = made
        return reason

    def _new_queue(self, nccl: Any, backend: Backend, like: Array) -> NcclQueue:
        comm, identity = self._channel.comm, np.zeros(129, np.uint8)
        problem = None
        if comm.rank == 0:
            try:
                identity[1:] = np.frombuffer(new_id(nccl), np.uint8)
                identity[0] = 1
            except Exception as error:  # of NCCL: the others must not wait for the number
                problem = error
        comm.Bcast(identity, 0)
        if problem is not None or not identity[0]:
            raise RuntimeError(f"NCCL gives no number for a new communicator ({problem or 'on rank 0'})")
        with backend.on_device_of(like):
            made = connect(nccl, comm.size, identity[1:].tobytes(), comm.rank)
        return NcclQueue(nccl, made, comm.rank, like)

    def _agree(self, work: Callable[[], Any]) -> str:
        """Do something on all ranks that may fail on some; returns what failed, the same on all.  Collective."""
        problem = ""
        try:
            work()
        except MPI.Exception:
            raise
        except Exception as error:  # NcclError, or one of CUDA
            problem = f"{type(error).__name__}: {error}"[:_MOST_TEXT]
        problems = [each for (each,) in _exchange(self._channel.comm, (problem,))]
        return next((f"rank {rank}: {each}" for rank, each in enumerate(problems) if each), "")


def _neighbours(comm: MPI.Intracomm) -> int:
    """The number of ranks of `comm` that share memory with this one. Collective."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    size = node.size
    node.Free()
    return size


def _exchange(comm: MPI.Intracomm, own: tuple[Any, ...]) -> list[list[Any]]:
    """The strings and numbers of all ranks, by rank.  Collective."""
    own = tuple(each[:_MOST_TEXT] if isinstance(each, str) else each for each in own)
    text = json.dumps(own).encode()
    sent, got = np.zeros(_RECORD_BYTES, np.uint8), np.zeros((comm.size, _RECORD_BYTES), np.uint8)
    sent[: len(text)] = np.frombuffer(text, np.uint8)
    comm.Allgather(sent, got)
    return [json.loads(each.tobytes().rstrip(b"\0")) for each in got]
