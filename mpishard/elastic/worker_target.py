"""How many workers an elastic run shall have: what its ranks request, and what they have agreed on."""

from __future__ import annotations

from mpishard.arguments import integer
from mpishard.elastic.external_requests import Outside

_NUMBER = 2**24


class WorkerTarget:
    """The number of workers that a run is on its way to, within limits; the last request of any rank counts.

    Parameters
    ----------
    workers : int
        Wanted at the beginning; 0 for a process that comes to a run, and hears there.
    min_workers, max_workers : int
        Limits of what `resize` can ask for.

    Attributes
    ----------
    request, agreed : int
        This rank's last request, and the last that all ranks know of: a number of workers with that of the request
        before it, so that the largest of all ranks' requests is the last one.
    most : int
        How many of `max_workers` the batches of the run have a sample for.
    """

    def __init__(self, workers: int, min_workers: int, max_workers: int) -> None:
        self.min_workers = min_workers
        self.max_workers = self.most = max_workers
        self.request: int = workers
        self.agreed: int = workers

    @property
    def agreed_size(self) -> int:
        """How many workers there shall be."""
        return self.agreed % _NUMBER

    def resize(self, workers: int) -> None:
        """Ask for so many workers, see `ElasticOptimizer.resize`; not collective."""
        workers = integer("workers", workers)
        if not self.min_workers <= workers <= self.max_workers:
            raise ValueError(
                f"resize({workers}) is outside of min_workers={self.min_workers} to max_workers={self.max_workers}"
            )
        if workers > self.most:
            raise ValueError(
                f"resize({workers}): batch_size={self.most} gives some of them no sample; ask for at most {self.most}"
            )
        # Requests are numbered, so that the last one counts, whichever rank it came from; in even numbers, so that one
        # from before deaths is not taken for older than what the run settles for after them.
        self.request = (max(self.request, self.agreed) // _NUMBER // 2 + 1) * 2 * _NUMBER + int(workers)

    def adopt_request(self, request: int) -> None:
        """Take note of a request that all ranks have agreed on."""
        self.agreed = max(request, self.agreed)

    def cap_workers(self, processes: int) -> None:
        """Want no more workers than there are processes, after deaths; `resize` may ask for more."""
        if processes < self.agreed_size:
            self.agreed = (self.agreed // _NUMBER + 1) * _NUMBER + processes

    def look_outside(self, outside: Outside, workers: int, step: int) -> None:
        """Take over what is wanted from outside of the script.  The first of the workers does, after each step."""
        wanted = outside.wanted(workers, step, self.agreed_size > workers)
        if wanted is not None:
            self.resize(wanted)
