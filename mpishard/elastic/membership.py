"""The processes of an elastic run: the workers, who train, and the spares, who wait without burning a core.

One communicator holds them all, workers first.  It changes only when a process dies (ULFM: revoke and shrink); the
mesh is split from its workers again and again.  Bland et al., "Post-failure recovery of MPI communication capability"
(2013), for the calls.
"""

from __future__ import annotations

import atexit
import time
from collections import Counter
from collections.abc import Iterable
from typing import ClassVar, NamedTuple

import numpy as np
from mpi4py import MPI

from mpishard.comm.axis import Axis
from mpishard.comm.capabilities import heals_in_place
from mpishard.comm.ledger import Ledger
from mpishard.comm.mesh import newcomer_cell
from mpishard.comm.watchdog import die
from mpishard.elastic.guarded_calls import in_time
from mpishard.elastic.joining import JoiningProcess
from mpishard.elastic.spawning import SpawnRequest, meet
from mpishard.elastic.stopped_processes import Peer, this_process
from mpishard.layout.local_layout import ModelParallelRank

_ORDER = 1
# How long a spare sleeps between two looks.
_NAP_S = 0.002
_END_NAP_S = 0.02


def is_newcomer() -> bool:
    """Whether this process was spawned by a run that wanted more workers, and has not been taken in yet."""
    return newcomer_cell() is not None and JoiningProcess.this.waits


def agree(comm: MPI.Intracomm, sound: bool) -> None:
    """Return on all ranks if all are sound, and raise MPI.Exception on all otherwise, or if one has died.

    Collective, over a revoked communicator too.  A rank that waits here is woken by nothing but the others coming here,
    so that who fails on the way to an agreement must still take part in it.
    """
    if heals_in_place() and not comm.Agree(int(sound)):
        raise MPI.Exception(MPI.ERR_PROC_FAILED)


def _shared_axis(comm: MPI.Intracomm) -> Axis:
    """The axis of a crew and its newcomers, on all of them or on none: MPI.Exception if one dies.  Collective."""
    agree(comm, True)  # a communicator must not be revoked where it is still being made
    try:
        axis = Axis("crew", comm, Ledger())
    except MPI.Exception:
        comm.Revoke()
        agree(comm, False)
        raise
    agree(comm, True)
    return axis


class Order(NamedTuple):
    """How many workers there will be, and how many have been spawned for it and wait to be called in."""

    workers: int
    recruits: int = 0


class _Member(NamedTuple):
    """What a process tells the others of itself: `post` numbers its place in a worker, identities are below `free`."""

    identity: int | None
    free: int
    post: int
    workers: int
    leaves: bool
    ends: bool
    lost: bool
    fellow: Peer


class Membership:
    """All processes of a run.  Creation is collective over them; a newcomer waits to be called in.

    A *worker* is one replica of the model: a process, or a cell of tensor x pipeline processes.  For life a process
    stays at one place in such a cell, since its arrays are cut for it, and any of its place can take over from it.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        All of them, of which it is a duplicate; a newcomer has only those with it who were spawned together.
    place : Place
        Of this process.
    workers : int
        How many of them train, the first ones.

    Attributes
    ----------
    axis : Axis
        All of them; collectives over it need the spares too.
    cell : int
        Processes of a worker.
    workers : int
        How many there are; `Mesh.rebind` wants the processes of these in the order that they have here.
    identities : list of int
        By rank; a process keeps its own for the whole run, while its rank changes.
    left : list of bool
        By rank: who has been asked to leave, and waits for the end of the run.
    fellows : list of Fellow
        Processes of the crew.
    """

    lost: ClassVar[bool] = False

    def __init__(self, comm: MPI.Intracomm, place: ModelParallelRank, workers: int) -> None:
        self.workers: int = workers
        self.cell: int = place.tensor_size * place.pipeline_size
        self.fellows: list[Peer] = []
        self._place = place
        self._identity: int | None = None
        self._free = 0
        self._leaves = False
        if is_newcomer():
            atexit.register(_leave)
            try:
                met = JoiningProcess.this.join()
                self.axis: Axis = in_time(lambda: _shared_axis(met))
            except MPI.Exception:
                die("mpishard: another process has died while this one came to the run, which goes on without both")
            self.assign_roles(0)
            atexit.unregister(_leave)
        else:
            self.axis = Axis("crew", comm.Dup(), Ledger())
            self.assign_roles(workers)

    def assign_roles(self, workers: int, ends: bool = False) -> None:
        """Learn who is there and who leaves, and let so many be workers, or as many as there may be.  Collective.

        Those who have no identity get one that nobody has had, and take the number of workers from the others.  Who
        leaves is a worker only if the run ends, as any of them says.
        """
        place = self._place
        post = place.pipeline_rank * place.tensor_size + place.tensor_rank
        own = _Member(self._identity, self._free, post, workers, self._leaves, ends, Membership.lost, this_process())
        crew: list[_Member] = self.axis.allgather_object(own)
        self._free = max(member.free for member in crew)
        Membership.lost |= any(member.lost for member in crew)  # newcomers too must finalize in time
        identities = []
        for member in crew:
            identities.append(self._free if member.identity is None else member.identity)
            self._free += member.identity is None
        self._identity = identities[self.axis.rank]

        ordered = sorted(range(len(crew)), key=lambda rank: crew[rank].leaves)
        able = self._whole(member.post for member in crew if not member.leaves)
        most = self._whole(member.post for member in crew)
        self.workers = min(max(member.workers for member in crew), most if any(m.ends for m in crew) else able)
        posts = [[rank for rank in ordered if crew[rank].post == post] for post in range(self.cell)]
        chosen = [
            posts[stage * place.tensor_size + tensor][worker]
            for stage in range(place.pipeline_size)
            for worker in range(self.workers)
            for tensor in range(place.tensor_size)
        ]
        self._ranks = chosen + [rank for rank in ordered if rank not in chosen]
        self._posts = [crew[rank].post for rank in self._ranks]
        self.identities: list[int] = [identities[rank] for rank in self._ranks]
        self.left: list[bool] = [crew[rank].leaves for rank in self._ranks]
        self.fellows = [crew[rank].fellow for rank in self._ranks]

    def _whole(self, posts: Iterable[int]) -> int:
        """How many cells can be filled with processes of these posts."""
        numbers = Counter(posts)
        return min(numbers[post] for post in range(self.cell))

    def let_go(self, leaves: list[bool]) -> None:
        """All workers: these of their processes leave with the next `split`.  Not collective."""
        for rank, leaving in enumerate(leaves):
            self.left[rank] |= leaving
        self._leaves |= leaves[self.rank]

    @property
    def rank(self) -> int:
        """Place in the crew: workers are before the others, whatever their rank on the axis is."""
        return self._ranks.index(self.axis.rank)

    @property
    def identity(self) -> int:
        """Of this process."""
        return self.identities[self.rank]

    @property
    def size(self) -> int:
        return self.axis.size

    @property
    def able(self) -> int:
        """How many workers there can be of processes that stay."""
        return self._whole(post for post, leaves in zip(self._posts, self.left, strict=True) if not leaves)

    @property
    def most(self) -> int:
        """How many workers there can be of all processes."""
        return self._whole(self._posts)

    @property
    def is_settled(self) -> bool:
        """Whether no worker is about to leave."""
        return not any(self.left[: self.working])

    @property
    def working(self) -> int:
        """How many processes are part of a worker."""
        return self.workers * self.cell

    @property
    def works(self) -> bool:
        """Whether this process is one of them."""
        return self.rank < self.working

    def order(self, order: Order) -> None:
        """Rank 0: tell the spares what to do.  Not collective."""
        told = np.array(order, np.int64)
        for spare in range(self.working, self.size):
            self.axis.send(told, self._ranks[spare], _ORDER, label="control")

    def wait_for_order(self) -> Order:
        """A spare: sleep until rank 0 says what to do.  Raises MPI.Exception if somebody dies."""
        comm = self.axis.comm
        while not comm.Iprobe(self._ranks[0], _ORDER):
            time.sleep(_NAP_S)
        told = np.empty(2, np.int64)
        self.axis.recv(told, self._ranks[0], _ORDER, label="control")
        return Order(*told.tolist())

    def call_in(self, recruitment: SpawnRequest | None) -> tuple[str, str]:
        """Call in those whom rank 0 has recruited: the port where they are met, or why they do not come.  Collective.

        `recruitment`: that of rank 0, None on the others.
        """
        port = "" if recruitment is None else recruitment.call()
        problem = "" if recruitment is None else recruitment.problem
        told: tuple[str, str] = self.axis.allgather_object((port, problem))[self._ranks[0]]
        return told

    def take_in(self, port: str, workers: int, recruitment: SpawnRequest | None) -> None:
        """Meet newcomers, who are the last of the crew from now on, and hear so from it.  Collective.

        If somebody dies meanwhile it raises MPI.Exception, and the crew stays what it was.  `recruitment`: see
        `call_in`.
        """
        before, root = self.axis, self._ranks[0]

        def check() -> None:
            before.comm.Iprobe()
            if recruitment is not None:
                recruitment.check()

        self.axis = in_time(lambda: _shared_axis(meet(before.comm, port, root)), check)
        before.free()
        self.assign_roles(workers)

    def split(self, workers: int, leaves: bool, ends: bool) -> MPI.Intracomm | None:
        """The communicator of so many workers, None on processes that are in none.  Collective.

        Those who leave are in none unless the run ends, as some process knows; `leaves`: this process does, though it
        was in none.
        """
        self._leaves |= leaves
        self.assign_roles(workers, ends)
        part = self.axis.comm.Split(0 if self.works else MPI.UNDEFINED, self.rank)
        if part == MPI.COMM_NULL:
            return None
        assert isinstance(part, MPI.Intracomm)
        return part

    def agree(self, sound: bool = True) -> None:
        """See `raise_if_any`, over all of the crew."""
        agree(self.axis.comm, sound)

    def revoke(self) -> None:
        """Wake all who wait in an operation of the crew.  Not collective."""
        self.axis.revoke()

    def shrink(self) -> None:
        """Go on without the dead.  Collective over the survivors; their order on the axis stays."""
        survivors = self.axis.comm.Shrink()
        assert isinstance(survivors, MPI.Intracomm)
        Membership.lost = True
        self.axis.rebind(survivors)
        self.assign_roles(self.workers)

    def end(self) -> None:
        """The run is over; processes that are in no worker end their scripts now, the others go on.  Collective."""
        if self.working < self.size:
            atexit.register(self._await_others)
        else:
            self.axis.free()

    def _await_others(self) -> None:
        """Sleep until all have ended their scripts; MPI_Finalize would wait for them on a busy core."""
        try:
            barrier = self.axis.comm.Ibarrier()
            while not barrier.Test():
                time.sleep(_END_NAP_S)
        except MPI.Exception:  # somebody has died, which the others may not have seen
            self.axis.revoke()


def _leave() -> None:
    """A script that ends where others wait for this process: not in MPI_Finalize, where it would wait for them."""
    if heals_in_place():
        die("mpishard: this process leaves the run that it has come to, its script has ended")
