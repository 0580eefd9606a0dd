"""The wanted number of workers of an elastic run: each rank's request, and the number that all have agreed on."""

from __future__ import annotations

from mpishard.arguments import integer
from mpishard.elastic.external_requests import Outside
from mpishard.elastic.mesh_choice import MeshSizes

# The parts of a request, from the lowest bits: workers, tensor and pipeline size of a mesh, and the request's number.
_WORKERS, _SIZE = 2**24, 2**10
_NUMBER = _WORKERS * _SIZE * _SIZE


class WorkerTarget:
    """The wanted number of workers, within limits; the last request of any rank counts.

    `workers` is the number at the beginning; 0 in a joining process, which gets the number from the run.  `request` and
    `agreed` are this rank's last request, and the last one that all ranks know.  A request is an integer: the number of
    the request in the high bits; then the pipeline and tensor size, 0 if no mesh was asked for; and the number of
    workers in the low ones.  So the largest of all requests is the last.  `most` limits the workers: `max_workers`, or
    fewer if a batch has fewer samples.
    """

    def __init__(self, workers: int, min_workers: int, max_workers: int) -> None:
        self.min_workers = min_workers
        self.max_workers = self.most = max_workers
        self.request: int = workers
        self.agreed: int = workers

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
        if workers > self.most:
            raise ValueError(
                f"resize({workers}): batch_size={self.most} gives some of them no sample; ask for at most {self.most}"
            )
        # Requests are numbered, so that the last one counts, whichever rank made it.  The numbers of requests are even,
        # so that a request made before a death is newer than the smaller (odd) number that `cap_workers` sets after it.
        number = (max(self.request, self.agreed) // _NUMBER // 2 + 1) * 2
        self.request = number * _NUMBER + self.encoded(int(workers), mesh)

    def adopt_request(self, request: int) -> None:
        """Set the number of workers to a request that all ranks have agreed on."""
        self.agreed = max(request, self.agreed)

    def cap_workers(self, processes: int) -> None:
        """Lower the number of workers to `processes`, after deaths; `resize` may request more again."""
        if processes < self.agreed_size:
            self.agreed = (self.agreed // _NUMBER + 1) * _NUMBER + processes

    def look_outside(self, outside: Outside, workers: int, step: int, there: int = 0, mesh: str = "") -> None:
        """Take over a request from outside of the script as this rank's.  The first worker calls this after each step.

        `there` is the number of workers that there could be, `mesh` the present one, of a run that may change it.
        """
        wanted = outside.wanted(workers, step, self.agreed_size > max(workers, there), mesh)
        if isinstance(wanted, MeshSizes):
            self.resize(wanted.ranks, wanted)
        elif wanted is not None:
            self.resize(wanted)
