"""The decisions of the workers of an elastic run after each step: whether it stops, and the next number of workers.

Nothing here is about deaths.  Whether survivors heal or the job starts again is decided elsewhere, hop by hop: the
launcher's option (`mpishard.comm.capabilities.heals_in_place`); the loop, which heals if it may
(`mpishard.elastic.loop`); healing, which gives up if too much is lost (`mpishard.elastic.healing`); and then the
supervisor (`mpishard.launch.restart_policy`).
"""

from __future__ import annotations

import numpy as np

from mpishard.elastic.external_requests import Outside
from mpishard.elastic.membership import Membership, Order
from mpishard.elastic.recruiter import Recruiter
from mpishard.elastic.transactions import Transactions
from mpishard.elastic.worker_mesh import WorkerMesh
from mpishard.elastic.worker_target import WorkerTarget
from mpishard.training.objective import StopRequest
from mpishard.training.run import TrainingRun


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
        outside: Outside,
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
        self._outside = outside
        self._recruiter = recruiter
        self._transactions = transactions
        self._workers = workers

    def decide(self) -> None:
        """Decide on stopping, on processes that leave, and on the wanted number of workers.

        Collective over the workers.
        """
        training, membership, target, outside = self._training, self._membership, self._target, self._outside
        world, settings = training.optimizer.mesh.world, training.optimizer.settings
        ready = 0
        if world.rank == 0:
            mesh = () if self._workers is None else (membership.roles.able, str(self._workers.sizes))
            target.look_outside(outside, membership.roles.workers, self._transactions.status.committed_step, *mesh)
            ready = self._recruiter.recruit()
        asked = outside.signals.report()
        awaited = not ready and self._recruiter.is_starting
        discovered = outside.discovered if world.rank == 0 else -1
        own = [self.request, target.request, asked, -asked, ready, awaited, discovered, settings.changed]
        agreed = world.all_reduce(np.array(own, np.int64), op="max", label="control").tolist()
        stop_request, request, most, least, ready, awaited, outside.discovered, changed = agreed
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
