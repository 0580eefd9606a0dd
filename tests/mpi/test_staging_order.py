"""Calls of device memory in any order of starts and waits: no rank waits for ever."""

from __future__ import annotations

import time

import numpy as np
import pytest
from buffers import late, lengths, numbers, read

import mpishard
from mpishard.backend import array as arrays
from mpishard.comm.deferred import DEFERRED, flush


@pytest.mark.mpi(min_size=2)
@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("blocks", ["barrier", "all_reduce", "allgather_object", "comm", "other mesh", "flush", "host"])
def test_a_rank_that_blocks_has_begun_what_it_has_started(mesh, comm, blocks, standin_kind):
    """One rank waits first and then comes to the blocking call, the others the other way round."""
    values = late(np.full(30, mesh.rank + 1.0), standin_kind)
    other = mpishard.Mesh(comm) if blocks == "other mesh" else mesh
    host = mesh.data.start_all_reduce(np.ones(3)) if blocks == "host" else None

    def block():
        if blocks == "barrier" or blocks == "other mesh":
            other.world.barrier()
        elif blocks == "all_reduce":
            mesh.world.all_reduce(np.ones(3))
        elif blocks == "allgather_object":
            mesh.world.allgather_object(1)
        elif blocks == "comm":
            mesh.world.comm.Barrier()
        elif blocks == "flush":
            flush()
            comm.Barrier()
        else:
            host.wait()

    pending = mesh.data.start_all_reduce(values)
    if mesh.rank == mesh.size - 1:
        pending.wait()
    block()
    pending.wait()
    assert (read(values) == mesh.size * (mesh.size + 1) / 2).all()
    if other is not mesh:
        other.free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.usefixtures("without_debug")
def test_a_blocking_call_may_come_before_or_after_a_started_one(mesh, standin_kind):
    axis = mesh.data
    one, two = late(np.ones(1000), standin_kind), late(np.ones(3), standin_kind)
    if axis.rank == 0:
        pending = axis.start_all_reduce(one)
        axis.all_reduce(two)
    else:
        axis.all_reduce(two)
        pending = axis.start_all_reduce(one)
    assert (read(pending.wait()) == axis.size).all() and (read(two) == axis.size).all()


class Program:
    """Calls on several axes, alike on all ranks, and what must come of them."""

    def __init__(self, mesh, seed, kind):
        self.mesh, self.kind = mesh, kind
        self.shared, self.own = np.random.default_rng(seed), np.random.default_rng([seed, mesh.rank])
        self.pending = []

    def run(self, calls):
        for number in range(calls):
            axis = (self.mesh.data, self.mesh.tensor, self.mesh.world)[self.shared.integers(3)]
            name = self.shared.choice(["all_reduce", "reduce_scatter", "all_gather", "broadcast", "message"])
            size, started = int(self.shared.integers(0, 40)), self.shared.random() < 0.7
            on_device, is_late = self.shared.random() < 0.7, self.shared.integers(self.mesh.size)
            if self.mesh.rank == is_late and number % 5 == 0:
                time.sleep(0.005)
            self.make(axis, str(name), number, size, started, on_device)
            while self.pending and self.own.random() < 0.3:
                self.finish()
        while self.pending:
            self.finish()

    def make(self, axis, name, number, size, started, on_device):
        parts = [numbers(1000 * number + member, size) for member in axis.members]
        mine = parts[axis.rank]
        place = (lambda values: late(values, self.kind)) if on_device else np.copy
        cuts = lengths(size, axis.size, "even")
        own = slice(sum(cuts[: axis.rank]), sum(cuts[: axis.rank + 1]))
        expected = {
            "all_reduce": sum(parts),
            "reduce_scatter": sum(parts)[own],
            "all_gather": sum(parts),
            "broadcast": parts[-1],
            "message": parts[axis.rank - 1],
        }[name]
        if name == "message":
            received = place(np.zeros(size))
            send = axis.start_send(place(mine), (axis.rank + 1) % axis.size)
            self.pending.append((axis.start_recv(received, (axis.rank - 1) % axis.size), expected))
            self.pending.append((send, None))
            return
        given = {
            "all_reduce": (place(mine),),
            "reduce_scatter": (place(mine),),
            "all_gather": (place(np.zeros(size)), place(sum(parts)[own])),
            "broadcast": (place(mine), axis.size - 1),
        }[name]
        if started:
            self.pending.append((getattr(axis, f"start_{name}")(*given), expected))
        else:
            self.check(getattr(axis, name)(*given), expected)

    def finish(self):
        request, expected = self.pending.pop(self.own.integers(len(self.pending)))
        if self.own.random() < 0.3:
            request.test()
        self.check(request.wait(), expected)

    def check(self, found, expected):
        if expected is not None:
            assert np.array_equal(read(found) if arrays.is_device(found) else found, expected)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_calls_and_waits(comm, standin_kind, seed):
    """Several axes, both kinds of memory, one rank late, each rank waits in an order of its own; debug mode or not."""
    with mpishard.Mesh(comm, tensor=2 if comm.size % 2 == 0 else 1, debug=seed % 3 == 0) as mesh:
        Program(mesh, seed, standin_kind).run(40)
        assert not DEFERRED.waiting and mesh.ledger.active is None
