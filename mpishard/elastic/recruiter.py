"""What the first of the workers does where there are fewer than are wanted: it has processes spawned."""

from __future__ import annotations

from mpishard.elastic.membership import Membership
from mpishard.elastic.spawning import SpawnRequest
from mpishard.elastic.worker_target import WorkerTarget
from mpishard.io import log
from mpishard.layout.local_layout import ModelParallelRank


class Recruiter:
    """Owns the request for processes that are on the way; on other ranks than the first there is none.

    Nothing of it is collective.

    Parameters
    ----------
    crew : Membership
    target : WorkerTarget
    place : ModelParallelRank
        Its tensor and pipeline size are those of the processes that are spawned.
    first_run : bool
        Whether this is the first run of the process; to another one nobody can come.
    """

    def __init__(self, crew: Membership, target: WorkerTarget, place: ModelParallelRank, first_run: bool) -> None:
        self._crew = crew
        self._target = target
        self._place = place
        self._first_run = first_run
        self._request: SpawnRequest | None = None

    @property
    def is_starting(self) -> bool:
        """Whether some are on the way that may still be starting up, which takes the cores."""
        return self._request is not None and self._request.is_new

    def recruit(self) -> int:
        """See to it that processes come where workers are missing; how many workers wait to be taken in."""
        crew, request = self._crew, self._request
        missing = self._target.agreed_size - crew.able
        if missing <= 0:
            self.dismiss()
        elif request is not None and request.problem:
            self._request = None
            self._do_without(request.problem)
        elif request is not None:
            return request.processes // crew.cell if request.here else 0
        elif not self._first_run:
            self._do_without("they would begin with the first call of `optimize` in their script, and this is another")
        else:
            cell = self._place.tensor_size, self._place.pipeline_size
            self._request = SpawnRequest(missing * crew.cell, cell)
        return 0

    def hand_over(self) -> SpawnRequest | None:
        """The request of those who are here, which is the caller's from now on."""
        request, self._request = self._request, None
        return request

    def dismiss(self) -> None:
        """Nobody is to come any more."""
        if self._request is not None:
            self._request.give_up()
            self._request = None

    def say_none_come(self, problem: str) -> None:
        workers = self._crew.able
        log.warn(f"the run goes on with {workers} workers, no more could be spawned: {problem}")

    def _do_without(self, problem: str) -> None:
        """Want no more workers than there are, unless somebody has asked again since."""
        self.say_none_come(problem)
        if self._target.request <= self._target.agreed:
            self._target.resize(self._crew.able)
