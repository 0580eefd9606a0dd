"""Measures a `MachineProfile`: all ranks compute and communicate at the same time, and each figure is a median."""

from __future__ import annotations

import functools
import math
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from mpi4py import MPI

from mpishard.backend import gemm
from mpishard.comm.axis import Axis
from mpishard.comm.ledger import Ledger
from mpishard.comm.mesh import Mesh, checked_mesh
from mpishard.estimate.estimates import estimate
from mpishard.estimate.profile import Link, MachineProfile
from mpishard.nn import GPT, kernels

SIZES = (16, 32, 64, 128, 256, 512, 1024)
_ROWS = 1024
_REPEATS = 9
LARGE = 2**20  # elements of a message; 4 MiB
_SMALL_CALLS = 50


def measure(mesh: Mesh) -> MachineProfile:
    """Measure the machine that a mesh runs on, in some ten seconds.

    Collective over the mesh.  The links between several nodes are measured by groups of one rank per node, all groups
    at once.  The data axis of a mesh with one tensor group per node would use the links in this way.

    Parameters
    ----------
    mesh : Mesh
        Of any shape; all of its ranks compute and communicate at the same time.

    Returns
    -------
    MachineProfile
        The same on every rank.

    Raises
    ------
    TypeError
        If `mesh` is no Mesh.
    """
    world = checked_mesh(mesh).world
    ranks_per_node = int(world.all_reduce(np.array([mesh.node.size]), op="max", label="control")[0])
    node = _links(mesh.node, world) if ranks_per_node > 1 else {}
    network = {}
    if ranks_per_node < mesh.size:
        part = world.comm.Split(mesh.node.rank, mesh.rank)
        assert isinstance(part, type(world.comm))
        across = Axis("across", part, Ledger())
        network = _links(across, world)
        across.free()
    profile = MachineProfile(
        products=tuple((size, _products(world, size)) for size in SIZES),
        memory_bandwidth=_memory_bandwidth(world),
        exponentials=_exponentials(world),
        node=node or network,
        network=network,
        ranks_per_node=ranks_per_node if network else 0,
        name=f"{platform.node()}, {mesh.size} rank{'s' if mesh.size > 1 else ''}",
    )
    return replace(profile, efficiency=_efficiency(world, profile))


def _seconds(world: Axis, call: Callable[[], object], calls: int = 1) -> float:
    """Median over repeats of the seconds of one call on the slowest rank; the first repeat is a warm-up."""
    times = []
    for _ in range(_REPEATS + 1):
        world.barrier()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        took = np.array([(time.perf_counter() - began) / calls])
        times.append(float(world.all_reduce(took, op="max", label="control")[0]))
    return statistics.median(times[1:])


def _products(world: Axis, size: int) -> float:
    """Operations per second of a product of shapes (rows, 4 size) and (4 size, size)."""
    x = np.ones((_ROWS, 4 * size), np.float32)
    weight = np.ones((4 * size, size), np.float32)
    out = np.empty((_ROWS, size), np.float32)
    calls = max(1, SIZES[-1] ** 2 // (8 * size**2))
    seconds = _seconds(world, lambda: gemm.matmul(x, weight, out), calls)
    return 2 * _ROWS * 4 * size * size / seconds


def _memory_bandwidth(world: Axis) -> float:
    """Bytes per second of an addition of two arrays far larger than the caches (two reads and a write)."""
    one, other, out = (np.ones(2**23, np.float32) for _ in range(3))
    return 3 * out.nbytes / _seconds(world, lambda: np.add(one, other, out=out))


def _exponentials(world: Axis) -> float:
    """GELUs per second, with their derivatives, of arrays in cache."""
    x, y, bias = (np.zeros((256, 256), np.float32) for _ in range(3))
    return x.size / _seconds(world, lambda: kernels.gelu(x, bias[0], y), 8)


def _efficiency(world: Axis, profile: MachineProfile) -> float:
    """Ratio of predicted to measured time of a small transformer, one on each rank."""
    model = GPT(vocabulary_size=256, context_length=128, width=192, layers=2, heads=6)
    tokens = np.random.default_rng(0).integers(0, 256, (_ROWS // 128, 128))
    predicted = estimate(model.architecture, batch=len(tokens), profile=profile).compute
    return predicted / _seconds(world, lambda: model.loss_and_gradient(tokens, tokens))


def _links(axis: Axis, world: Axis) -> dict[str, Link]:
    """Links of all operations over all axes of this name at once; the figures are for the largest axis."""
    ranks = int(world.all_reduce(np.array([axis.size]), op="max", label="control")[0])
    partner = axis.rank ^ 1
    received = np.empty(LARGE, np.float32)

    def send(buffer: np.ndarray) -> None:
        if partner < axis.size:
            pending = axis.start_send(buffer, partner)
            axis.recv(received[: buffer.size], partner)
            pending.wait()

    # Each operation, and the fraction of the buffer that a rank sends in it.
    share = (ranks - 1) / ranks
    operations: dict[str, tuple[Callable[[np.ndarray], object], float]] = {
        "all_reduce": (axis.all_reduce, 2 * share),
        "all_gather": (axis.all_gather, share),
        "reduce_scatter": (axis.reduce_scatter, share),
        "send": (send, 1.0),
    }
    large, small = np.zeros(LARGE, np.float32), np.zeros(ranks, np.float32)
    links = {}
    for operation, (call, sent) in operations.items():
        latency = _seconds(world, functools.partial(call, small), _SMALL_CALLS)
        # The latency is not subtracted: it is a small part of this time, but its noise on a busy machine is large.
        moving = _seconds(world, functools.partial(call, large), 2)
        rounds = 1.0 if operation == "send" else math.log2(ranks)
        links[operation] = Link(latency / rounds, sent * large.nbytes / moving)
    return links


# Times the collectives of an axis by size, and in turn the same operations by mpi4py alone.

MESSAGE_SIZES = tuple(4**exponent for exponent in range(5, 13))  # bytes; 1 KiB to 16 MiB
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


def measure_collectives(mesh: Mesh, sizes: Sequence[int] = MESSAGE_SIZES) -> list[Timing]:
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
