"""The wanted number of workers of an elastic run: each rank's request, and the number that all have agreed on."""

from __future__ import annotations

from mpishard.arguments import integer
from mpishard.elastic.external_requests import Outside

_NUMBER = 2**24


class WorkerTarget:
    """The wanted number of workers, within limits; the last request of any rank counts.

    Parameters
    ----------
    workers : int
        Number at the beginning; 0 in a joining process, which gets the number from the run.
    min_workers, max_workers : int
        Limits of `resize`.

    Attributes
    ----------
    request, agreed : int
        This rank's last request, and the last one that all ranks know.  A request is an integer: the number of the
        request in the high bits, the number of workers in the low ones.  So the largest of all requests is the last.
    most : int
        Limit of the workers: `max_workers`, or fewer if a batch has fewer samples.
    """

    def __init__(self, workers: int, min_workers: int, max_workers: int) -> None:
        self.min_workers = min_workers
        self.max_workers = self.most = max_workers
        self.request: int = workers
        self.agreed: int = workers

    @property
    def agreed_size(self) -> int:
        """The number of workers on which all ranks have agreed."""
        return self.agreed % _NUMBER

    def resize(self, workers: int) -> None:
        """Request a number of workers, see `ElasticOptimizer.resize`; not collective."""
        workers = integer("workers", workers)
        if not self.min_workers <= workers <= self.max_workers:
            raise ValueError(
                f"resize({workers}) is outside of min_workers={self.min_workers} to max_workers={self.max_workers}"
            )
        if workers > self.most:
            raise ValueError(
                f"resize({workers}): batch_size={self.most} gives some of them no sample; ask for at most {self.most}"
            )
        # Requests are numbered, so that the last one counts, whichever rank made it.  The numbers of requests are even,
        # so that a request made before a death is newer than the smaller (odd) number that `cap_workers` sets after it.
        self.request = (max(self.request, self.agreed) // _NUMBER // 2 + 1) * 2 * _NUMBER + int(workers)

    def adopt_request(self, request: int) -> None:
        """Set the number of workers to a request that all ranks have agreed on."""
        self.agreed = max(request, self.agreed)

    def cap_workers(self, processes: int) -> None:
        """Lower the number of workers to `processes`, after deaths; `resize` may request more again."""
        if processes < self.agreed_size:
            self.agreed = (self.agreed // _NUMBER + 1) * _NUMBER + processes

    def look_outside(self, outside: Outside, workers: int, step: int) -> None:
        """Make a request from outside of the script this rank's.  The first worker calls this after each step."""
        wanted = outside.wanted(workers, step, self.agreed_size > workers)
        if wanted is not None:
            self.resize(wanted)
