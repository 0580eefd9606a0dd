"""The options of an elastic run, its parts, their decisions after each step, and the communicators of its workers.

Nothing here is about deaths.  Whether survivors heal or the job starts again is decided elsewhere, hop by hop: the
launcher's option (`mpishard.comm.capabilities.heals_in_place`); the loop, which heals if it may
(`mpishard.elastic.loop`); healing, which gives up if too much is lost (`mpishard.elastic.resizing`); and then the
supervisor (`mpishard.launch.restart_policy`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from mpishard.comm.mesh import Mesh
from mpishard.elastic.membership import Membership, Order, StoppedPeerMonitor
from mpishard.elastic.mesh_choice import MeshChoice, MeshSizes
from mpishard.elastic.requests import Recruiter, ResizeRequests, WorkerTarget
from mpishard.elastic.transactions import Agreements, Transactions
from mpishard.training.objective import Objective, StopRequest
from mpishard.training.run import TrainingRun
from mpishard.training.run_checkpoints import RunCheckpoints


class WorkerMesh:
    """Frees the communicators, makes them again for other workers, and revokes them after a death.

    `offered`, where a run chooses its mesh: the number of processes for which it has chosen, and the mesh that was
    asked for.
    """

    def __init__(self, mesh: Mesh, checkpoints: RunCheckpoints) -> None:
        self.mesh = mesh
        self.offered: tuple[int, MeshSizes | None] = (mesh.size, None)
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


class Decisions:
    """Collects the requests of all workers, and decides on them; `transactions` learn the decisions.

    `request` is this worker's request to stop after the last step that it has finished.  `recruits`, the number of
    spawned workers that are ready to join, and `awaits_recruits`, true while some are still starting, are the same on
    all workers.  `workers` is given for a run that chooses its mesh: it knows the number of processes for which it has
    chosen.
    """

    def __init__(
        self,
        training: TrainingRun,
        membership: Membership,
        target: WorkerTarget,
        requests: ResizeRequests,
        recruiter: Recruiter,
        transactions: Transactions,
        workers: WorkerMesh | None = None,
    ) -> None:
        self.request: StopRequest = StopRequest.NONE
        self.recruits: int = 0
        self.awaits_recruits: bool = False
        self._training = training
        self._membership = membership
        self._target = target
        self._requests = requests
        self._recruiter = recruiter
        self._transactions = transactions
        self._workers = workers

    def decide(self) -> None:
        """Decide on stopping, on processes that leave, and on the wanted number of workers.

        Collective over the workers.
        """
        training, membership, target, requests = self._training, self._membership, self._target, self._requests
        world, settings = training.optimizer.mesh.world, training.optimizer.settings
        ready = 0
        if world.rank == 0:
            mesh = () if self._workers is None else (membership.roles.able, str(self._workers.sizes))
            target.poll_requests(requests, membership.roles.workers, self._transactions.status.committed_step, *mesh)
            ready = self._recruiter.recruit()
        asked = requests.signals.report()
        awaited = not ready and self._recruiter.is_starting
        discovered = requests.discovered if world.rank == 0 else -1
        own = [self.request, target.request, asked, -asked, ready, awaited, discovered, settings.changed]
        agreed = world.all_reduce(np.array(own, np.int64), op="max", label="control").tolist()
        stop_request, request, most, least, ready, awaited, requests.discovered, changed = agreed
        if changed:  # by a callback
            settings.agree()
        target.adopt_request(request)
        self.recruits, self.awaits_recruits = ready, bool(awaited)
        reason = training.why_stop(stop_request) or ("signal" if -least > 0 else "")
        if most == 2 and not reason:
            membership.let_go(world.allgather_object(asked > 0))
            target.cap_workers(membership.roles.able)
            reason = "signal" if membership.roles.able < target.min_workers else ""
        self._transactions.decide(reason)

    def next_order(self) -> Order | None:
        """The order that changes the workers to the wanted number, None without a change; the same on all workers."""
        membership = self._membership
        if self._transactions.status.stop_reason:
            everybody = membership.roles.working == membership.roles.size
            done = self.suits(membership.roles.most) and everybody
            return None if done else Order(membership.roles.most)
        workers = min(self._target.agreed_size, membership.roles.able + self.recruits)
        if self.suits(workers) and not self.recruits and membership.roles.is_settled:
            return None
        return Order(workers, self.recruits)

    def suits(self, workers: int) -> bool:
        """Return True if the present workers are those for this number; the same on all processes."""
        if self._workers is None:
            return workers == self._membership.roles.workers
        return self._workers.offered == (workers, self._target.agreed_mesh)

    def forget_recruits(self) -> None:
        """Count on no spawned worker any more: they have joined, or a death has changed who is wanted."""
        self.recruits, self.awaits_recruits = 0, False


@dataclass(frozen=True)
class ElasticOptions:
    """Options of an elastic run in addition to the problem and the optimizer."""

    target: WorkerTarget
    requests: ResizeRequests
    monitor: StoppedPeerMonitor  # kills processes of this host that are stopped
    respawn: bool  # processes are spawned to replace the dead
    scaling: str  # the policy of `Scaling`
    choice: MeshChoice | None = None  # None: the tensor and pipeline sizes stay
    build: Callable[[Mesh], Objective[Any]] | None = None  # makes the problem for a mesh; given with `choice`


@dataclass(frozen=True)
class ElasticRun:
    """The parts of an elastic run; each owns one state, and the phases of the loop work on all of them."""

    options: ElasticOptions
    training: TrainingRun
    membership: Membership
    workers: WorkerMesh
    agreements: Agreements
    transactions: Transactions
    decisions: Decisions
    recruiter: Recruiter
