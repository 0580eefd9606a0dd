"""Debug mode: calls of ranks that do not match are named on every rank, and those that do pass."""

from __future__ import annotations

import time

import numpy as np
import pytest
from mpi4py import MPI

import mpishard
from mpishard.comm.call_matching import CollectiveMismatchError


@pytest.mark.mpi(min_size=2)
def test_debug_names_both_call_sites_on_every_rank(comm):
    with mpishard.Mesh(comm, debug=True) as mesh:
        mesh.data.all_reduce(np.zeros(3))
        with pytest.raises(CollectiveMismatchError) as caught:
            if mesh.rank == 0:
                mesh.data.all_reduce(np.zeros(5))
            else:
                mesh.data.broadcast(np.zeros(3))
        text = str(caught.value)
        assert "rank 0: all_reduce(5 x float64, sum)" in text
        assert "rank 1: broadcast(3 x float64, root 0)" in text
        assert text.count("test_call_matching.py:") == mesh.size
        assert np.array_equal(mesh.data.all_reduce(np.ones(3)), np.full(3, mesh.size))  # the axis still works


@pytest.mark.mpi(min_size=2)
@pytest.mark.every_variant
@pytest.mark.parametrize("later", [False, True])
def test_debug_names_calls_of_different_axes_on_every_rank(comm, later):
    with mpishard.Mesh(comm, debug=True) as mesh:
        for again in range(2):  # numbers of calls no longer agree
            with pytest.raises(CollectiveMismatchError, match="ranks wait for each other in different") as caught:
                if mesh.rank == 0:
                    (mesh.data.start_all_reduce if later else mesh.data.all_reduce)(np.zeros(3))
                else:
                    mesh.world.allgather_object("a value") if again == 0 else mesh.data.all_reduce(np.zeros(3))
        text = str(caught.value)
        assert "rank 0: all_reduce(3 x float64, sum) on axis 'data' called at" in text
        assert "rank 1: allgather_object(0 x uint8) on axis 'world' called at" in text
        assert text.count("test_call_matching.py:") == mesh.size
        assert len(set(comm.allgather(text))) == 1 and mesh.ledger.active is None


@pytest.mark.mpi(min_size=4)
@pytest.mark.every_variant
def test_debug_sees_a_circle_of_calls_that_no_two_ranks_share(comm):
    with mpishard.Mesh(comm, tensor=2, debug=True) as mesh, pytest.raises(CollectiveMismatchError) as caught:
        if mesh.rank in (0, 3):  # 0 waits for 1, which waits for 3, for 2, for 0
            mesh.tensor.barrier()
        elif mesh.rank in (1, 2):
            mesh.data.barrier()
        else:
            mesh.world.barrier()
    assert all(f"rank {rank}: barrier(0 x uint8) on axis" in str(caught.value) for rank in range(comm.size))


@pytest.mark.mpi(min_size=2)
@pytest.mark.every_variant
@pytest.mark.parametrize("op", ["send", "recv"])
def test_debug_sees_messages_that_nobody_is_at_the_other_end_of(comm, op):
    """The message must be longer than what MPI buffers for a receiver that has not come yet."""
    with mpishard.Mesh(comm, debug=True) as mesh:
        large = np.zeros(10**6)
        with pytest.raises(CollectiveMismatchError) as caught:
            if mesh.rank == 0:
                mesh.data.all_reduce(np.zeros(3))
            else:
                getattr(mesh.world, op)(large, 0)
        text = str(caught.value)
        assert "rank 0: all_reduce(3 x float64, sum) on axis 'data' called at" in text
        assert f"rank 1: {op}(1000000 x float64, {'to' if op == 'send' else 'from'} rank 0) on axis 'world'" in text
        assert text.count("test_call_matching.py:") == mesh.size and mesh.ledger.active is None
        comm.Barrier()  # a message that is received here before its sender has looked is no mistake any more
        for rank in range(1, mesh.size):  # the message that was left
            if mesh.rank == 0:
                mesh.world.comm.Recv(large, rank) if op == "send" else mesh.world.comm.Send(large, rank)
        mesh.world.comm.Barrier()


@pytest.mark.faults
@pytest.mark.mpi(min_size=2)
def test_debug_lets_messages_pass(comm):
    """Early or late, with other calls in between, from anybody, and to oneself."""
    with mpishard.Mesh(comm, debug=True) as mesh:
        axis = mesh.data
        for late in (0, 1):
            if axis.rank == late:
                time.sleep(0.6)
            if axis.rank == 0:
                started = axis.start_send(np.full(10**6, 1.0), 1, 5)
                axis.all_reduce(np.zeros(3))
                axis.send(np.full(3, 2.0), 1, 5)
                started.wait()
            else:
                axis.all_reduce(np.zeros(3))
            if axis.rank == 1:
                assert axis.recv(np.zeros(10**6), 0, 5)[-1] == 1
                assert axis.recv(np.zeros(3), MPI.ANY_SOURCE, MPI.ANY_TAG)[-1] == 2
        own = axis.start_send(np.ones(3), axis.rank)
        assert axis.recv(np.zeros(3), axis.rank).all()
        own.wait()


@pytest.mark.mpi(min_size=2)
def test_debug_sees_other_counts_and_operations(comm):
    with mpishard.Mesh(comm, debug=True) as mesh:
        for mine, theirs in (((3, "sum"), (4, "sum")), ((3, "sum"), (3, "max"))):
            count, op = mine if mesh.rank == 0 else theirs
            with pytest.raises(CollectiveMismatchError, match="differs between its ranks"):
                mesh.data.all_reduce(np.zeros(count), op=op)


@pytest.mark.mpi(min_size=2)
def test_debug_knows_what_may_differ_and_what_may_not(comm):
    with mpishard.Mesh(comm, debug=True) as mesh:
        axis = mesh.data
        counts = [axis.rank + to + 1 for to in range(axis.size)]  # symmetric, and of another sum on each rank
        axis.all_to_all(np.zeros(sum(counts)), np.zeros(sum(counts)), counts, counts)
        axis.reduce_scatter(np.zeros(2 * axis.size), counts=[2] * axis.size if axis.rank == 0 else None)
        mine = [axis.size, *[0] * (axis.size - 1)]
        with pytest.raises(CollectiveMismatchError, match="cut as"):
            axis.reduce_scatter(np.zeros(axis.size), counts=mine if axis.rank == 0 else mine[::-1])


def test_debug_lets_a_mesh_be_freed_that_is_released(comm):
    """A spare of an elastic run has released it when an error of a worker ends the run."""
    mesh = mpishard.Mesh(comm, debug=True)
    mesh.release()
    mesh.free()
