"""The processes of an elastic run: the workers train, and the spares wait without keeping a core busy.

One communicator holds all of them.  It changes only when a process dies (ULFM: revoke and shrink) or spawned processes
join.  For every new number of workers the mesh is split from it again.  The calls are those of Bland et al.,
"Post-failure recovery of MPI communication capability" (2013).  `Roles` says who works; `WorkerMesh` has the
communicators of the workers.
"""

from __future__ import annotations

import atexit
import json
import time
from typing import ClassVar, NamedTuple

import numpy as np
from mpi4py import MPI

from mpishard.comm.abort import die
from mpishard.comm.axis import Axis
from mpishard.comm.capabilities import heals_in_place
from mpishard.comm.errors import ErrorForOthers
from mpishard.comm.ledger import Ledger
from mpishard.comm.mesh import Mesh
from mpishard.elastic.mesh_choice import MeshSizes
from mpishard.elastic.roles import Member, Roles
from mpishard.elastic.spawning import JoiningProcess, SpawnRequest, in_time, meet
from mpishard.elastic.stopped_peers import this_process
from mpishard.launch.detection import spawned_cell
from mpishard.layout.tensors import ModelParallelRank
from mpishard.training.checkpoints import RunCheckpoints

_ORDER = 1  # tag
# Between two looks: of a spare for an order, and of a process that has ended its script for the others.
_NAP_S, _END_NAP_S = 0.002, 0.02


def is_joining() -> bool:
    """Return True if this process was spawned by a run that wanted more workers, and has not joined it yet."""
    return spawned_cell() is not None and JoiningProcess.this.waits


def agree(comm: MPI.Intracomm, sound: bool) -> None:
    """Return on all ranks if all are sound, and raise MPI.Exception on all otherwise, or if one has died.

    Collective, over a revoked communicator too.  A rank that waits here continues only when all others come here.  So a
    rank that fails on the way to an agreement must still take part in it.
    """
    if heals_in_place() and not comm.Agree(int(sound)):
        raise MPI.Exception(MPI.ERR_PROC_FAILED)


def _duplicate(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Duplicate a new communicator; MPI.Exception on all its ranks if one dies.  Collective.

    Without the agreements one rank could continue with the duplicate, or wait in it forever, while another one gives
    up.
    """
    agree(comm, True)  # a communicator must not be revoked where it is still being made
    try:
        duplicate = comm.Dup()
    except MPI.Exception:
        comm.Revoke()
        agree(comm, False)
        raise
    agree(comm, True)
    return duplicate


def _shared_axis(comm: MPI.Intracomm) -> Axis:
    """Make the axis of a run and its joining processes; MPI.Exception on all of them if one dies.  Collective."""
    return Axis("membership", comm, Ledger(), later=_duplicate(comm))


class Order(NamedTuple):
    """The next number of workers, and the number of spawned workers that wait to be called in for it.

    No workers: the run fails by an error that all processes raise, or that follows in as many bytes as `recruits` says.
    """

    workers: int
    recruits: int = 0


class Membership:
    """All processes of a run.  Creation is collective over them; in a joining process it waits to be called in.

    A *worker* is one replica of the model: a process, or a cell of tensor x pipeline processes.  A process keeps its
    model-parallel rank for its whole life, since its arrays are cut for that rank.  Any process of the same
    model-parallel rank can take over from it.

    `axis` is over a duplicate of `comm` and has all processes: collectives over it need the spares too.  In a joining
    process `comm` has those that were spawned with it.  The first `workers` workers train; `roles` says which process
    is in which worker.
    """

    lost: ClassVar[bool] = False  # a process was lost in some run of this one: MPI_Finalize may wait for it

    def __init__(self, comm: MPI.Intracomm, place: ModelParallelRank, workers: int) -> None:
        self._place = place
        self._identity: int | None = None
        self._free = 0
        self._leaves = False
        if is_joining():
            atexit.register(_leave)
            try:
                merged = JoiningProcess.this.join()
                self.axis: Axis = in_time(lambda: _shared_axis(merged))
            except MPI.Exception:
                die("mpishard: another process has died while this one came to the run, which continues without both")
            self.assign_roles(0)
            atexit.unregister(_leave)
        else:
            self.axis = Axis("membership", comm.Dup(), Ledger())
            self.assign_roles(workers)

    def assign_roles(self, workers: int, ends: bool = False, leaves: bool = False) -> None:
        """Choose the processes of `workers` workers, see `Roles.assign`.  Collective.

        All processes first exchange their facts.  `ends`: the run ends; one process that knows it is enough.  `leaves`:
        this process, a spare that got a signal, leaves.
        """
        self._leaves |= leaves
        place = self._place
        post = place.pipeline_rank * place.tensor_size + place.tensor_rank
        own = Member(self._identity, self._free, post, workers, self._leaves, ends, Membership.lost, this_process())
        members: list[Member] = self.axis.allgather_object(own)
        Membership.lost |= any(member.lost for member in members)  # joining processes too must finalize in time
        self.roles: Roles = Roles.assign(members, place.tensor_size, place.pipeline_size)
        self._identity = self.identity
        self._free = max(*(member.free for member in members), max(self.roles.identities) + 1)

    def let_go(self, leaves: list[bool]) -> None:
        """Mark processes that leave with the next `split`.  Called by all workers."""
        self.roles = self.roles.with_leaving(leaves)
        self._leaves |= leaves[self.rank]

    @property
    def rank(self) -> int:
        """Number of this process among the members: the workers' processes come first, whatever their axis ranks."""
        return self.roles.ranks.index(self.axis.rank)

    @property
    def identity(self) -> int:
        """Number of this process that stays the same for the whole run."""
        return self.roles.identities[self.rank]

    @property
    def works(self) -> bool:
        """True if this process is part of a worker."""
        return self.rank < self.roles.working

    def send_order(self, order: Order) -> None:
        """Send the spares an order.  Called by rank 0 alone."""
        numbers = np.array(order, np.int64)
        for spare in range(self.roles.working, self.roles.size):
            self.axis.send(numbers, self.roles.ranks[spare], _ORDER, label="control")

    def send_error(self, error: BaseException) -> None:
        """Have the spares raise an error of the workers.  Called by rank 0 alone."""
        text = np.frombuffer(bytearray(json.dumps(ErrorForOthers.of(error, 0)).encode()), np.uint8)
        self.send_order(Order(0, text.size))
        for spare in range(self.roles.working, self.roles.size):
            self.axis.send(text, self.roles.ranks[spare], _ORDER, label="control")

    def fail(self) -> Axis:
        """Order the spares to raise an error with the workers; returns the axis of all."""
        if self.rank == 0:
            self.send_order(Order(0))
        return self.axis

    def wait_for_order(self) -> Order:
        """Sleep until rank 0 sends an order.  Called by spares.

        Raises MPI.Exception if a process dies, and the error that rank 0 sends.
        """
        comm = self.axis.comm
        while not comm.Iprobe(self.roles.ranks[0], _ORDER):
            time.sleep(_NAP_S)
        numbers = np.empty(2, np.int64)
        self.axis.recv(numbers, self.roles.ranks[0], _ORDER, label="control")
        order = Order(*numbers.tolist())
        if not order.workers and order.recruits:
            text = np.empty(order.recruits, np.uint8)
            self.axis.recv(text, self.roles.ranks[0], _ORDER, label="control")
            raise ErrorForOthers(*json.loads(text.tobytes())).made()
        return order

    def call_in(self, spawn: SpawnRequest | None) -> tuple[str, str]:
        """Call in the processes that rank 0 has spawned.  Collective.

        Returns the port where they wait, empty if they do not join, and the reason for that.  `spawn` is that of rank
        0, None on the others.
        """
        port = "" if spawn is None else spawn.call()
        problem = "" if spawn is None else spawn.problem
        of_first: tuple[str, str] = self.axis.allgather_object((port, problem))[self.roles.ranks[0]]
        return of_first

    def take_in(self, port: str, workers: int, spawn: SpawnRequest | None) -> None:
        """Connect to the joining processes, which become the last ranks of the axis.  Collective over both.

        If a process dies meanwhile, this raises MPI.Exception, and the members stay the same.  `spawn`: see `call_in`.
        """
        before, root = self.axis, self.roles.ranks[0]

        def check() -> None:
            before.comm.Iprobe()
            if spawn is not None:
                spawn.check()

        self.axis = in_time(lambda: _shared_axis(meet(before.comm, port, root)), check)
        before.free()
        self.assign_roles(workers)

    def split(self, workers: int, leaves: bool, ends: bool) -> MPI.Intracomm | None:
        """Make a communicator of the processes of `workers` workers; None on the other processes.  Collective.

        Processes that leave are not in it unless the run ends: `ends` is true on any process.  `leaves`: this process,
        a spare that got a signal, leaves.
        """
        self.assign_roles(workers, ends, leaves)
        part = self.axis.comm.Split(0 if self.works else MPI.UNDEFINED, self.rank)
        if part == MPI.COMM_NULL:
            return None
        assert isinstance(part, MPI.Intracomm)
        return part

    def shrink(self) -> None:
        """Remove the lost processes.  Collective over the survivors, whose order on the axis stays.

        If another one dies meanwhile, this raises MPI.Exception on all of them, and the axis stays as it was.
        """
        survivors = self.axis.comm.Shrink()
        assert isinstance(survivors, MPI.Intracomm)
        Membership.lost = True
        self.axis.rebind(survivors, later=_duplicate(survivors))
        self.assign_roles(self.roles.workers)

    def end(self) -> None:
        """End the run: processes that are in no worker end their scripts now, the others continue.  Collective."""
        if self.roles.working < self.roles.size:
            atexit.register(self._await_others)
        else:
            self.axis.free()

    def _await_others(self) -> None:
        """Sleep until all processes have ended their scripts; MPI_Finalize would wait for them with a busy core."""
        try:
            barrier = self.axis.comm.Ibarrier()
            while not barrier.Test():
                time.sleep(_END_NAP_S)
        except MPI.Exception:  # a process has died, which the others may not have detected
            self.axis.revoke()


def _leave() -> None:
    """End a joining process whose script ends early; in MPI_Finalize it and the run would wait for each other."""
    if heals_in_place():
        die("mpishard: this process leaves the run that it has come to, its script has ended")


class WorkerMesh:
    """The communicators of the workers: frees them, makes them again for others, and revokes them after a death.

    `chosen_for` is what the mesh was chosen for, where a run chooses it: the number of processes, and the mesh that was
    asked for, if any.
    """

    def __init__(self, mesh: Mesh, checkpoints: RunCheckpoints) -> None:
        self.mesh = mesh
        self.chosen_for: tuple[int, MeshSizes | None] = (mesh.size, None)
        self._checkpoints = checkpoints
        self._whole = True  # all of them exist, and this process can free them together with the others

    def release(self) -> None:
        """Free the communicators, if they are whole.  Collective over the workers."""
        if self._whole:
            self._checkpoints.release()
            self.mesh.release()
        self._whole = False

    @property
    def sizes(self) -> MeshSizes:
        return MeshSizes(**self.mesh.shape)

    def rebind(self, comm: MPI.Intracomm, sizes: MeshSizes | None) -> None:
        """Make them of the ranks of `comm`, in a mesh of these sizes; None: only the data size changes.

        Collective over the ranks; the communicators are whole after `note_whole`.
        """
        if sizes is None:
            self.mesh.rebind(comm)
        else:
            self.mesh.rebind(comm, tensor=sizes.tensor, pipeline=sizes.pipeline)
        self._checkpoints.rebind()

    def note_whole(self) -> None:
        """Note that all workers have made theirs."""
        self._whole = True

    def revoke(self) -> None:
        """Wake all processes that wait in an operation of the workers."""
        self.mesh.revoke()
        self._checkpoints.revoke()
        self._whole = False
