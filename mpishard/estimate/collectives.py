"""Times the collectives of an axis by size, and in turn the same operations by mpi4py alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from mpishard.comm.axis import Axis
from mpishard.comm.mesh import Mesh

SIZES = tuple(4**exponent for exponent in range(5, 13))  # bytes; 1 KiB to 16 MiB
_REPEATS = 9
_LEAST_S = 2e-3  # shortest series of calls that are timed together
_MOST_CALLS = 50

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Time of one collective, a method of `Axis`, at one size."""

    axis: str
    ranks: int  # size of the axis
    operation: str
    nbytes: int  # bytes of the whole buffer on one rank
    seconds: float  # of one call by mpishard: median of the slowest rank's times
    bare: float  # as `seconds`, by mpi4py alone
    sent: int  # bytes that a rank sends in a ring

    @property
    def bandwidth(self) -> float:
        """Bytes a second that a rank sends."""
        return self.sent / self.seconds


def measure_collectives(mesh: Mesh, sizes: Sequence[int] = SIZES) -> list[Timing]:
    """Time all operations over all axes with several ranks, with buffers of these sizes in bytes.

    Collective over the mesh; all communicators of an axis are in use at once, as in training.  The result is the same
    on every rank; empty for one rank.
    """
    return [
        _timing(mesh.world, axis, operation, nbytes)
        for axis in (mesh.data, mesh.tensor, mesh.pipeline)
        if axis.size > 1
        for operation in ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
        for nbytes in sizes
    ]


def _timing(world: Axis, axis: Axis, operation: str, nbytes: int) -> Timing:
    count = max(axis.size, nbytes // 4 // axis.size * axis.size)
    ours, bare = _calls(axis, operation, count)
    first = _together(world, ours, 1)
    calls = max(1, min(_MOST_CALLS, int(_LEAST_S / first)))
    _together(world, bare, 1)
    times: tuple[list[float], list[float]] = [], []
    for repeat in range(_REPEATS):
        # The order alternates, so that neither always runs with the caches that the other has left.
        for which in (0, 1) if repeat % 2 else (1, 0):
            times[which].append(_together(world, (ours, bare)[which], calls))
    share = axis.size - 1
    sent = {"all_reduce": 2 * share, "broadcast": axis.size}.get(operation, share) * count * 4 // axis.size
    own, others = map(statistics.median, times)
    return Timing(axis.name, axis.size, operation, count * 4, own, others, sent)


def _together(world: Axis, call: Call, calls: int) -> float:
    """Seconds of one call on the slowest rank."""
    world.barrier()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    took = np.array([(time.perf_counter() - began) / calls])
    return float(world.all_reduce(took, op="max", label="control")[0])


def _calls(axis: Axis, operation: str, count: int) -> tuple[Call, Call]:
    """The call by mpishard, and the same operation by mpi4py."""
    buffer = np.zeros(count, np.float32)
    piece = count // axis.size
    comm, kept = axis.comm, np.zeros(piece, np.float32)
    plain: dict[str, tuple[Call, Call]] = {
        "all_reduce": (lambda: axis.all_reduce(buffer), lambda: comm.Allreduce(MPI.IN_PLACE, buffer)),
        "reduce_scatter": (
            lambda: axis.reduce_scatter(buffer, kept),
            lambda: comm.Reduce_scatter_block(buffer, kept),
        ),
        "all_gather": (lambda: axis.all_gather(buffer, kept), lambda: comm.Allgather(kept, buffer)),
        "broadcast": (lambda: axis.broadcast(buffer), lambda: comm.Bcast(buffer)),
    }
    return plain[operation]
