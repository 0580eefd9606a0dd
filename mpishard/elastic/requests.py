"""From requests for workers to processes: requests from outside, the number that all ranks agree on, new processes.

Signals, other shells and `discover` are asked by `ResizeRequests`; `WorkerTarget` has the agreed number; the first
worker's `Recruiter` spawns processes if there are fewer workers.  After each step `Decisions` decides on all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np

from mpishard.arguments import integer
from mpishard.comm.axis import Axis
from mpishard.comm.capabilities import heals_in_place
from mpishard.comm.errors import raised_on_all
from mpishard.elastic.control import Control, ControlFolder, Discovery, Wanted
from mpishard.elastic.membership import Membership, Order, WorkerMesh, is_joining
from mpishard.elastic.mesh_choice import MeshChoice, MeshSizes
from mpishard.elastic.spawning import SpawnRequest
from mpishard.elastic.transactions import Transactions
from mpishard.io import log
from mpishard.launch.lease import FolderLease
from mpishard.launch.signals import Signals
from mpishard.layout.tensors import ModelParallelRank
from mpishard.training.objective import StopRequest
from mpishard.training.run import TrainingRun


class ResizeRequests:
    """Receives requests while it is entered as a context manager.

    Creation is collective over `axis`, all processes of the run.  Raises ValueError or OSError on every rank if the
    control folder (`folder`: of the run) cannot be made or belongs to another user.  `discover` is the source of a
    `Discovery`; `choice` is given for a run that may change its mesh.
    """

    def __init__(
        self,
        axis: Axis,
        min_workers: int,
        max_workers: int,
        folder: Path | None,
        discover: Callable[[], int] | str | os.PathLike[str] | None,
        choice: MeshChoice | None = None,
    ) -> None:
        self.signals: Signals = Signals()
        self._axis = axis
        self._limits = min_workers, max_workers
        self._discovery = None if discover is None else Discovery(discover)
        self._control: Control | None = None
        self._folder = folder
        self._lease: FolderLease | None = None
        self._leads = axis.rank == 0 and not is_joining()
        if folder is not None:
            control = ControlFolder(folder)
            with raised_on_all(axis):
                if self._leads:
                    self._lease = FolderLease.take(folder)
                    control.make()
            why_mesh_refused = None if choice is None else choice.why_refused
            self._control = Control(control, min_workers, max_workers, why_mesh_refused)

    def __enter__(self) -> ResizeRequests:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._discovery is not None:
            self._discovery.close()
        if self._lease is not None:
            self._lease.release()
        if self._control is None or self._axis.rank or is_joining():
            return
        if kind is None or not heals_in_place():  # after an error here the other processes continue and need the folder
            self._control.close()

    @property
    def discovered(self) -> int:
        """The last number that the run got from `discover`, -1 if none; another rank that asks next must have it."""
        return -1 if self._discovery is None else self._discovery.known

    @discovered.setter
    def discovered(self, number: int) -> None:
        if self._discovery is not None:
            self._discovery.known = number

    def wanted(self, workers: int, step: int, waits: bool, mesh: str = "") -> Wanted | None:
        """The number of workers or the mesh of a new request, or None.  The first worker calls this after each step.

        `waits` is true while the run waits for workers to join; `mesh` is the present one, of a run that may change it.
        """
        if self._folder is not None and not self._leads:  # the first worker so far has left, or died
            self._lease, self._leads = FolderLease.take(self._folder, succeeds=True), True
        found = None if self._discovery is None else self._discovery.news()
        if found is not None:
            found = min(max(found, self._limits[0]), self._limits[1])
        asked = None if self._control is None else self._control.poll(workers, step, waits, mesh)
        return found if asked is None else asked


# The parts of a request, from the lowest bits: workers, tensor and pipeline size of a mesh, and the request's number.
_WORKERS, _SIZE = 2**24, 2**10
_NUMBER = _WORKERS * _SIZE * _SIZE


class WorkerTarget:
    """The wanted number of workers, within limits; the last request of any rank counts.

    `request` and `agreed` are this rank's last request, and the last one that all ranks know.  Both begin with the
    `request` of creation, as of `encoded`; 0 in a joining process, which gets it from the run.  `most` limits the
    workers: `max_workers`, or fewer if a batch has fewer samples.  No mesh of the run has less than `fewest` ranks.

    A request is an integer, of three parts: its own number in the high bits; then the pipeline and tensor size, 0 if no
    mesh was asked for; and the number of workers in the low bits.  So the largest of all requests is the last.
    """

    def __init__(self, request: int, min_workers: int, max_workers: int, fewest: int = 1) -> None:
        self.min_workers = min_workers
        self.max_workers = self.most = max_workers
        self.fewest = fewest
        self.request: int = request
        self.agreed: int = request

    @property
    def least(self) -> int:
        """With fewer workers the run cannot go on."""
        return max(self.min_workers, self.fewest)

    @property
    def agreed_size(self) -> int:
        """The number of workers on which all ranks have agreed."""
        return self.agreed % _WORKERS

    @property
    def agreed_mesh(self) -> MeshSizes | None:
        """The mesh on which all ranks have agreed, of `agreed_size` ranks; None if no mesh was asked for."""
        tensor, pipeline = self.agreed // _WORKERS % _SIZE, self.agreed // _WORKERS // _SIZE % _SIZE
        return MeshSizes(self.agreed_size // (tensor * pipeline), tensor, pipeline) if tensor else None

    @staticmethod
    def encoded(workers: int, mesh: MeshSizes | None) -> int:
        """A request without its number."""
        return workers if mesh is None else mesh.ranks + _WORKERS * (mesh.tensor + _SIZE * mesh.pipeline)

    def resize(self, workers: int, mesh: MeshSizes | None = None) -> None:
        """Request a number of workers, see `ElasticOptimizer.resize`, or as many as a mesh has."""
        workers = integer("workers", workers)
        if mesh is not None and max(mesh.tensor, mesh.pipeline) >= _SIZE:
            raise ValueError(f"the mesh {mesh} has a tensor or pipeline size above {_SIZE - 1}")
        if not self.min_workers <= workers <= self.max_workers:
            raise ValueError(
                f"resize({workers}) is outside of min_workers={self.min_workers} to max_workers={self.max_workers}"
            )
        if workers < self.fewest:
            raise ValueError(f"resize({workers}): no mesh of layouts is as small; ask for at least {self.fewest}")
        if workers > self.most:
            raise ValueError(
                f"resize({workers}): batch_size={self.most} gives some of them no sample; ask for at most {self.most}"
            )
        newest = max(self.request, self.agreed)
        wanted = self.encoded(int(workers), mesh)
        if wanted == newest % _NUMBER:  # asked for after each step, the 2**18 numbers would not last a long run
            return
        # Requests are numbered, so that the last one counts, whichever rank made it.  The numbers of requests are even,
        # so that a request made before a death is newer than the smaller (odd) number that `cap_workers` sets after it.
        self.request = (newest // _NUMBER // 2 + 1) * 2 * _NUMBER + wanted

    def adopt_request(self, request: int) -> None:
        """Note a request that all ranks have agreed on, unless a later one is known."""
        self.agreed = max(request, self.agreed)

    def cap_workers(self, processes: int) -> None:
        """Lower the number of workers to `processes`, after deaths; `resize` may request more again."""
        if processes < self.agreed_size:
            self.agreed = (self.agreed // _NUMBER + 1) * _NUMBER + processes

    def poll_requests(self, requests: ResizeRequests, workers: int, step: int, able: int = 0, mesh: str = "") -> None:
        """Take over a request from outside of the script as this rank's.  The first worker calls this after each step.

        `able`, as of `Roles`, and `mesh`, the present one, are given for a run that may change its mesh.
        """
        wanted = requests.wanted(workers, step, self.agreed_size > max(workers, able), mesh)
        if isinstance(wanted, MeshSizes):
            self.resize(wanted.ranks, wanted)
        elif wanted is not None:
            self.resize(wanted)


class Recruiter:
    """Owns the spawn under way, a request to MPI for more processes; only the first worker ever has one.

    The spawned processes get the tensor and pipeline size of `place`; they can join only the first run of this process
    (`first_run`).  With `respawn`, processes are spawned to replace lost ones.  `last_disruption` is the last step
    before a process died or joined since this one did, else -1; after a death the survivors exchange theirs.
    """

    def __init__(
        self, membership: Membership, target: WorkerTarget, place: ModelParallelRank, first_run: bool, respawn: bool
    ) -> None:
        self.last_disruption: int = -1
        self._respawn = respawn
        self._membership = membership
        self._target = target
        self._place = place
        self._first_run = first_run
        self._spawn: SpawnRequest | None = None

    @property
    def is_starting(self) -> bool:
        """True while spawned processes may still be starting, which takes the cores."""
        return self._spawn is not None and self._spawn.is_new

    def recruit(self) -> int:
        """Request processes if workers are missing, and return the number of spawned workers that are ready to join."""
        membership, spawn = self._membership, self._spawn
        missing = self._target.agreed_size - membership.roles.able
        if missing <= 0:
            self.dismiss()
        elif spawn is not None and spawn.problem:
            self._spawn = None
            self._do_without(spawn.problem)
        elif spawn is not None:
            return spawn.processes // membership.roles.cell if spawn.here else 0
        elif not self._first_run:
            self._do_without("they would begin with the first call of `optimize` in their script, and this is another")
        else:
            cell = self._place.tensor_size, self._place.pipeline_size
            self._spawn = SpawnRequest(missing * membership.roles.cell, cell)
        return 0

    def hand_over(self) -> SpawnRequest | None:
        """Return the spawn whose processes are ready; the caller owns it from now on."""
        spawn, self._spawn = self._spawn, None
        return spawn

    def dismiss(self) -> None:
        """Cancel the spawn, if there is one."""
        if self._spawn is not None:
            self._spawn.give_up()
            self._spawn = None

    def note_lost(self, step: int, last_disruption: int) -> None:
        """Note that processes were lost after a step, and want no others in their place if that would not help.

        A fault that recurs at one step, or kills every new worker, would otherwise spawn new ones forever.
        `last_disruption` is the newest of all survivors.
        """
        if not self._respawn or step <= last_disruption:
            self._target.cap_workers(self._membership.roles.able)
        self.last_disruption = step

    def say_none_come(self, problem: str) -> None:
        workers = self._membership.roles.able
        log.warn(f"continuing with {workers} workers; no more could be spawned: {problem}")

    def _do_without(self, problem: str) -> None:
        """Report the problem and request no more workers than there are, unless a newer request has come."""
        self.say_none_come(problem)
        if self._target.request <= self._target.agreed:
            self._target.resize(self._membership.roles.able)


class Decisions:
    """Collects the requests of all workers, and decides on them; `transactions` learn the decisions.

    `stop_request` is this worker's request to stop after the last step that it has finished.  `recruits`, the number of
    spawned workers that are ready to join, and `awaits_recruits`, true while some are still starting, are the same on
    all workers.  `worker_mesh` is given for a run that chooses its mesh: it knows for what the mesh was chosen.
    """

    def __init__(
        self,
        training: TrainingRun,
        membership: Membership,
        target: WorkerTarget,
        requests: ResizeRequests,
        recruiter: Recruiter,
        transactions: Transactions,
        worker_mesh: WorkerMesh | None = None,
    ) -> None:
        self.stop_request: StopRequest = StopRequest.NONE
        self.recruits: int = 0
        self.awaits_recruits: bool = False
        self._training = training
        self._membership = membership
        self._target = target
        self._requests = requests
        self._recruiter = recruiter
        self._transactions = transactions
        self._worker_mesh = worker_mesh

    def decide(self) -> None:
        """Decide on stopping, on processes that leave, and on the wanted number of workers.

        Collective over the workers.
        """
        training, membership, target, requests = self._training, self._membership, self._target, self._requests
        world, settings = training.optimizer.mesh.world, training.optimizer.settings
        ready = 0
        if world.rank == 0:
            mesh = () if self._worker_mesh is None else (membership.roles.able, str(self._worker_mesh.sizes))
            target.poll_requests(requests, membership.roles.workers, self._transactions.status.committed_step, *mesh)
            ready = self._recruiter.recruit()
        asked = requests.signals.report()
        awaited = not ready and self._recruiter.is_starting
        discovered = requests.discovered if world.rank == 0 else -1
        own = [self.stop_request, target.request, asked, -asked, ready, awaited, discovered, settings.changed]
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
            reason = "signal" if membership.roles.able < target.least else ""
        self._transactions.decide(reason)

    def put_out(self, ranks: Collection[int]) -> None:
        """Have these workers leave with the next order, as after a signal.  Called by all workers."""
        membership = self._membership
        membership.let_go([rank in ranks for rank in range(membership.roles.working)])
        self._target.cap_workers(membership.roles.able)

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
        if self._worker_mesh is None:
            return workers == self._membership.roles.workers
        return self._worker_mesh.chosen_for == (workers, self._target.agreed_mesh)

    def forget_recruits(self) -> None:
        """Count on no spawned worker any more: they have joined, or a death has changed who is wanted."""
        self.recruits, self.awaits_recruits = 0, False
