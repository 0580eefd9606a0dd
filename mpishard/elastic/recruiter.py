"""Spawns processes from the first worker if there are fewer workers than wanted."""

from __future__ import annotations

from mpishard.elastic.membership import Membership
from mpishard.elastic.spawning import SpawnRequest
from mpishard.elastic.worker_target import WorkerTarget
from mpishard.io import log
from mpishard.layout.tensors import ModelParallelRank


class Recruiter:
    """Owns the request for processes that are being spawned; only the first worker has one.

    The spawned processes get the tensor and pipeline size of `place`; they can join only the first run of this process
    (`first_run`).  With `respawn`, processes are spawned to replace the dead.  `last_disruption` is the last step
    before a process died or joined, -1 without one; all processes know it.
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
        self._request: SpawnRequest | None = None

    @property
    def is_starting(self) -> bool:
        """True while spawned processes may still be starting, which takes the cores."""
        return self._request is not None and self._request.is_new

    def recruit(self) -> int:
        """Request processes if workers are missing, and return the number of spawned workers that are ready to join."""
        membership, request = self._membership, self._request
        missing = self._target.agreed_size - membership.roles.able
        if missing <= 0:
            self.dismiss()
        elif request is not None and request.problem:
            self._request = None
            self._do_without(request.problem)
        elif request is not None:
            return request.processes // membership.roles.cell if request.here else 0
        elif not self._first_run:
            self._do_without("they would begin with the first call of `optimize` in their script, and this is another")
        else:
            cell = self._place.tensor_size, self._place.pipeline_size
            self._request = SpawnRequest(missing * membership.roles.cell, cell)
        return 0

    def hand_over(self) -> SpawnRequest | None:
        """Return the request whose processes are ready; the caller owns it from now on."""
        request, self._request = self._request, None
        return request

    def dismiss(self) -> None:
        if self._request is not None:
            self._request.give_up()
            self._request = None

    def note_death(self, step: int, last_disruption: int) -> None:
        """Note that processes have died after a step, and want no others in their place if that would not help.

        A fault that recurs at one step, or kills every new worker, would otherwise spawn new ones forever.
        `last_disruption` is the newest of all survivors.
        """
        if not self._respawn or step <= last_disruption:
            self._target.cap_workers(self._membership.roles.able)
        self.last_disruption = step

    def say_none_come(self, problem: str) -> None:
        workers = self._membership.roles.able
        log.warn(f"the run goes on with {workers} workers, no more could be spawned: {problem}")

    def _do_without(self, problem: str) -> None:
        """Report the problem and request no more workers than there are, unless a newer request has come."""
        self.say_none_come(problem)
        if self._target.request <= self._target.agreed:
            self._target.resize(self._membership.roles.able)
