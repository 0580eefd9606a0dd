"""Meshes: shapes, neighbours, errors, communicators given back, and calls that do not match in debug mode."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref

import numpy as np
import pytest
from hybrid import factorisations
from mpi4py import MPI

import mpishard
from mpishard.comm.abort import _AbortOnException
from mpishard.comm.agreement import in_words
from mpishard.comm.call_matching import CollectiveMismatchError
from mpishard.comm.channel import Family
from mpishard.launch.job_notes import ECHO, ON_ALL_RANKS
from mpishard.layout.tensors import ModelParallelRank

# Meshes: shapes, coordinates, neighbours, errors, and communicators given back.


several = pytest.mark.mpi(min_size=2)


def test_all_ranks_are_data_parallel_by_default(mesh, comm):
    assert mesh.shape == {"pipeline": 1, "data": comm.size, "tensor": 1}
    assert (mesh.data.rank, mesh.data.size) == (comm.rank, comm.size)
    assert mesh.tensor.size == mesh.pipeline.size == 1
    assert mesh.node.size == comm.Split_type(MPI.COMM_TYPE_SHARED).size
    assert mesh.device is None or mesh.device >= 0
    with mpishard.Mesh(comm, data=1, tensor=-1) as inferred:
        assert inferred.tensor.size == comm.size


@pytest.mark.quick
def test_tensor_varies_fastest_then_data_then_pipeline(comm):
    for data, tensor, pipeline in factorisations(comm.size):
        with mpishard.Mesh(comm, data=data, tensor=tensor, pipeline=pipeline) as mesh:
            place = (mesh.pipeline.rank, mesh.data.rank, mesh.tensor.rank)
            assert np.ravel_multi_index(place, (pipeline, data, tensor)) == comm.rank
            assert mesh.coordinates == dict(zip(("pipeline", "data", "tensor"), place, strict=True))
            assert mesh.place == ModelParallelRank(mesh.tensor.rank, tensor, mesh.pipeline.rank, pipeline)
            for own, axis in enumerate((mesh.pipeline, mesh.data, mesh.tensor)):
                neighbours = axis.comm.allgather(place)
                assert [neighbour[own] for neighbour in neighbours] == list(range(axis.size))
                assert len({neighbour[:own] + neighbour[own + 1 :] for neighbour in neighbours}) == 1


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": 0}, "data=0"),
        ({"tensor": -2}, "tensor=-2"),
        ({"pipeline": 1.5}, "pipeline=1.5"),
        ({"data": -1, "tensor": -1}, "only one can be inferred"),
        ({"data": 7, "tensor": 3}, r"data=7 x tensor=3 needs 21 ranks, got \d"),
        ({"tensor": 16}, r"tensor=16 needs a multiple of 16 ranks, got \d"),
    ],
)
@pytest.mark.quick
def test_bad_sizes_are_an_error_on_all_ranks(comm, sizes, message):
    with pytest.raises(ValueError, match=message):
        mpishard.Mesh(comm, **sizes)


@several
def test_sizes_that_differ_or_are_bad_on_one_rank_are_an_error_on_all(comm):
    with pytest.raises(ValueError, match=r"data=\d x tensor=1 on rank 0 and .* on rank 1"):
        mpishard.Mesh(comm, **({"tensor": -1, "data": 1} if comm.rank == 1 else {}))
    sizes = {"tensor": comm.size + 1} if comm.rank == 1 else {}
    message = rf"^{'' if comm.rank == 1 else 'rank 1: '}mesh pipeline=1 x data=1 x tensor={comm.size + 1} needs"
    with pytest.raises(ValueError, match=message) as found:
        mpishard.Mesh(comm, **sizes)
    assert hasattr(found.value, ECHO) == (comm.rank != 1) and not hasattr(found.value, ON_ALL_RANKS)


@several
def test_versions_that_differ_between_ranks_are_an_error_on_all(comm, monkeypatch):
    odd = comm.rank == 1
    with monkeypatch.context() as other:
        other.setattr("mpishard.comm.mesh_checks.VERSION", "0.0.7" if odd else "0.0.8")
        other.setattr("platform.node", lambda: "second" if odd else "first")
        with pytest.raises(ValueError, match="version of mpishard") as found:
            mpishard.Mesh(comm)
    others = in_words("rank", [rank for rank in range(comm.size) if rank != 1])
    assert f"it is 0.0.8 on {others} (host first), and 0.0.7 on rank 1 (host second)" in str(found.value)
    with mpishard.Mesh(comm) as mesh:  # the communicators were given back, and one version makes a mesh
        assert mesh.size == comm.size


@several
@pytest.mark.parametrize("options", [{"data": 7, "tensor": 3}, {"timeout": -1.0}])
def test_an_error_of_all_ranks_is_reported_as_one(comm, monkeypatch, options):
    with pytest.raises(ValueError) as found:
        mpishard.Mesh(comm, **options)
    said = []
    monkeypatch.setattr("mpishard.comm.abort.abort", said.append)
    monkeypatch.setattr("mpishard.comm.abort.FIRST_S", 0.0)
    for error in (found.value, ValueError("of this rank")):
        _AbortOnException()(type(error), error, error.__traceback__)
    assert said[0].startswith(f"mpishard: all {comm.size} ranks failed and end the job; of rank {comm.rank}:\n")
    assert said[1].startswith(f"mpishard: rank {comm.rank} of {comm.size} failed and ends the job\n")


# Meshes from communicators of an application.


def application(comm, ways, strided, reverse=False):
    """The communicators of `ways` groups, and across them, as an application makes them; and the places in them."""
    size = comm.size // ways
    group, place = (comm.rank % ways, comm.rank // ways) if strided else divmod(comm.rank, size)
    if reverse:
        group, place = ways - 1 - group, size - 1 - place
    return comm.Split(group, place), comm.Split(place, group), group, place


@pytest.mark.quick
@pytest.mark.parametrize("strided, reverse", [(False, False), (True, False), (True, True)])
def test_a_mesh_has_the_order_of_the_applications_communicators(comm, strided, reverse):
    for ways in (each for each in range(1, comm.size + 1) if comm.size % each == 0):
        space, groups, group, place = application(comm, ways, strided, reverse)
        with mpishard.Mesh(comm, space=space, groups=groups) as mesh:
            assert mesh.shape == {"pipeline": 1, "data": ways, "tensor": comm.size // ways}
            assert (mesh.data.rank, mesh.tensor.rank) == (group, place) == (groups.rank, space.rank)
            assert mesh.rank == group * mesh.tensor.size + place and mesh.size == comm.size
            for axis, given in ((mesh.tensor, space), (mesh.data, groups)):
                assert MPI.Comm.Compare(axis.comm, given) == MPI.CONGRUENT
                assert axis.members == axis.comm.allgather(mesh.rank)
        space.Barrier()  # the application keeps its own
        groups.Barrier()
        space.Free()
        groups.Free()


@several
def test_groups_without_an_order_have_that_of_their_first_ranks(comm):
    ways = 2 if comm.size % 2 == 0 else comm.size
    space, groups, group, place = application(comm, ways, strided=True)
    with mpishard.Mesh(comm, space=space) as mesh:
        assert (mesh.data.rank, mesh.tensor.rank) == (group, place)
    space.Free()
    groups.Free()


@several
@pytest.mark.quick
def test_communicators_that_make_no_grid_are_one_error_on_all_ranks(comm):
    last = comm.rank == comm.size - 1
    unequal = comm.Split(int(last), comm.rank)  # all ranks but the last, and the last
    turned = comm.Split(0, -comm.rank)
    alone, none = MPI.COMM_SELF, MPI.COMM_NULL
    cases = [
        ({"space": comm, "groups": comm}, rf"space and groups .*{comm.size} x {comm.size} is"),
        ({"space": alone, "groups": alone}, rf"1 x 1 is 1, and comm has {comm.size}"),
        ({"space": comm, "groups": alone} if last else {"space": comm}, rf"space and groups on rank {comm.size - 1}"),
        ({} if last else {"space": comm}, rf"neither on rank {comm.size - 1}"),
        ({"groups": comm}, "groups= .* space="),
        ({"space": 3}, "space=3"),
        ({"space": comm, "groups": none}, "groups is a null communicator"),
        ({"space": comm, "tensor": comm.size}, f"tensor={comm.size}"),
        ({"space": turned if last else comm, "groups": alone}, "of these give it"),
    ]
    if comm.size > 2:
        words = rf"space .*{comm.size - 1} on ranks? .*1 on rank {comm.size - 1}"
        cases.append(({"space": unequal, "groups": alone}, words))
    for given, words in cases:
        with pytest.raises((ValueError, TypeError), match=words):
            mpishard.Mesh(comm, **given)
    with pytest.raises(ValueError, match=rf"space has {comm.size - 1} ranks"):
        mpishard.Mesh(MPI.COMM_SELF, space=comm)
    if comm.size % 2 == 0 and comm.size > 2:  # the first group is upside down, and groups know nothing of that
        half = comm.size // 2
        group, place = divmod(comm.rank, half)
        space = comm.Split(group, place if group else -place)
        groups = comm.Split(place, group)
        with pytest.raises(ValueError, match="ranks 0, .* share groups, but are"):
            mpishard.Mesh(comm, space=space, groups=groups)
        space.Free()
        groups.Free()
    unequal.Free()
    turned.Free()
    with mpishard.Mesh(comm, space=comm, groups=alone) as mesh:  # the communicators of all these were given back
        assert mesh.tensor.size == comm.size


@pytest.mark.parametrize("limit", ["soon", "0", "-3", "nan"])
def test_bad_time_limits(comm, environ, limit):
    environ(MPISHARD_TIMEOUT=limit)
    with pytest.raises(ValueError, match="seconds"):
        mpishard.Mesh(comm)


@pytest.mark.full
def test_hundreds_of_meshes_can_be_made_and_freed_or_dropped(comm):
    """More communicators than MPICH has; sub-groups and the threads of the meshes go with them."""
    if comm.size > 4:
        pytest.skip("slow where cores are few, and nothing new")
    for _ in range(400):
        mpishard.Mesh(MPI.COMM_SELF).free()  # single ranks make it quick
    for _ in range(10):
        mesh = mpishard.Mesh(comm)
        mesh.free()
        mesh.free()  # a second time does nothing
    for call in (mesh.world.barrier, lambda: mesh.data.all_reduce(np.ones(3)), lambda: mesh.world.send(np.ones(3), 0)):
        with pytest.raises(RuntimeError, match="freed with its mesh"):
            call()
    threads = threading.active_count()
    for _ in range(200 if comm.size < 3 and MPI.get_vendor()[0] == "MPICH" else 30):
        mpishard.Mesh(comm).data.split("part", 0).all_reduce(np.ones(1))
    for _ in range(250):
        mpishard.Mesh(MPI.COMM_SELF)
    gc.collect()
    mpishard.Mesh(comm).free()
    assert not Family.orphans() and threading.active_count() <= threads + 1


@several
@pytest.mark.quick
def test_a_dropped_mesh_is_freed_once_all_ranks_have_dropped_it(comm):
    gc.collect()
    mpishard.Mesh(comm).free()
    kept = [mpishard.Mesh(comm), mpishard.Mesh(comm)]
    first = kept[0] if comm.rank == 0 else None
    names = sorted(mesh.family.name for mesh in kept)
    kept.clear()
    gc.collect()
    freed = [] if first is None else [first.family.name]
    assert sorted([name for name, _ in Family.orphans()] + freed) == names
    mpishard.Mesh(comm).free()
    if first is not None:
        assert first.world.comm.size == comm.size and not Family.orphans()
        del first
        gc.collect()
    else:
        assert len(Family.orphans()) == 1
    mpishard.Mesh(comm).free()
    assert not Family.orphans()


@pytest.mark.parametrize("what", ["axis", "communicator", "request"])
def test_who_holds_a_part_of_a_mesh_keeps_it(comm, what):
    mesh = mpishard.Mesh(comm)
    ones = np.ones(3)
    pending = mesh.data.start_all_reduce(ones) if what == "request" else None
    held = {"axis": mesh.data, "communicator": mesh.world.comm, "request": pending}[what]
    del mesh, pending
    for _ in range(2):
        gc.collect()
        mpishard.Mesh(comm).free()
    if what == "axis":
        assert held.all_reduce(ones)[0] == comm.size
    elif what == "communicator":
        assert held.allreduce(1) == comm.size
    else:
        assert held.wait()[0] == comm.size
    del held
    gc.collect()
    mpishard.Mesh(comm).free()
    assert not Family.orphans()


def test_checkpoints_that_were_dropped_give_their_communicators_back(comm, tmp_path):
    with mpishard.Mesh(comm) as mesh:
        for _ in range(3):
            mpishard.Checkpoints(comm.bcast(tmp_path), mesh)
            gc.collect()
            assert [name for name, _ in Family.orphans()] == [f"{mesh.family.name}/{mesh.family._dependents}"]
    mpishard.Mesh(comm).free()
    assert not Family.orphans()


@pytest.mark.parametrize("in_cycle", [False, True])
def test_a_collective_that_was_started_and_dropped_keeps_its_communicators_and_buffers(comm, in_cycle):
    """MPI may still use them."""
    ones = np.ones(3)
    array = weakref.ref(ones)
    mesh = mpishard.Mesh(comm)
    name = mesh.family.name
    held = [mesh, mesh.data.start_all_reduce(ones)]
    if in_cycle:
        held.append(held)
    del mesh, held, ones
    gc.collect()
    assert (name in dict(Family.orphans())) == (array() is None) == (comm.size == 1)
    mpishard.Mesh(comm).free()
    comm.allgather(None)


@pytest.mark.full
def test_no_communicator_left_is_an_error_that_says_what_to_free(comm):
    gc.collect()
    mpishard.Mesh(comm).free()
    before, meshes = len(Family._open), []
    if MPI.get_vendor()[0] == "MPICH":
        message = r"no communicator left: \d+ meshes are open .*mesh.free"
        with pytest.raises(RuntimeError, match=message) as found:
            while True:
                meshes.append(mpishard.Mesh(MPI.COMM_SELF))
        assert f" {before + len(meshes)} meshes are open" in str(found.value)
    meshes.clear()
    mpishard.Mesh(comm).free()


@pytest.mark.skipif(MPI.COMM_WORLD.size == 1 or MPI.get_vendor()[0] != "MPICH", reason="needs two ranks of MPICH")
def test_no_communicator_left_that_all_ranks_have(comm):
    own = []
    with pytest.raises(MPI.Exception):
        while True:
            own.append(MPI.COMM_SELF.Dup())
    first, second = own[: len(own) // 2], own[len(own) // 2 :]
    for each in second if comm.rank == 0 else first:
        each.Free()
    with pytest.raises(RuntimeError, match="no communicator left"):
        mpishard.Mesh(comm)
    for each in first if comm.rank == 0 else second:
        each.Free()
    mpishard.Mesh(comm).free()


def test_where_deaths_are_survived_a_family_takes_nothing_in(comm, environ):
    environ(OMPI_MCA_mpi_ft_enable="1")
    family = Family(comm.size)
    family.add(comm)
    assert not family._members and family not in Family._open


@pytest.mark.mpi(min_size=2)
def test_a_question_that_no_rank_has_answered_is_none_of_the_next_mesh(comm):
    mesh = mpishard.Mesh(comm)
    mesh.unwatch()
    mesh._watchdog._send((comm.rank + 1) % comm.size, 1, b"question")
    comm.Barrier()
    mesh.free()
    later = [comm.Dup() for _ in range(12)]
    comm.Barrier()
    assert not any(each.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG) for each in later)
    for each in later:
        each.Free()


def test_blas_gets_the_share_of_the_node_unless_the_user_chose(comm, environ):
    environ(OMP_NUM_THREADS=None, OPENBLAS_NUM_THREADS=None, MKL_NUM_THREADS=None, BLIS_NUM_THREADS=None)
    with mpishard.Mesh(comm) as mesh:
        cores = len(os.sched_getaffinity(0))
        assert mesh.blas_threads >= 1
        assert sum(mesh.node.comm.allgather(mesh.blas_threads)) <= max(cores, mesh.node.size)
        with mpishard.Mesh(MPI.COMM_SELF) as alone:  # the other ranks of the job are still there
            assert alone.blas_threads == mesh.blas_threads
    environ(OPENBLAS_NUM_THREADS="3")
    with mpishard.Mesh(comm) as mesh:
        assert mesh.blas_threads == 3


@pytest.mark.quick
def test_reshaped(comm):
    with mpishard.Mesh(comm) as mesh:
        assert mesh.reshaped() is mesh
        for data, tensor, pipeline in factorisations(comm.size):
            other = mesh.reshaped(data=data, tensor=tensor, pipeline=pipeline)
            assert other.shape == {"pipeline": pipeline, "data": data, "tensor": tensor}
            assert (other.rank, other.size) == (mesh.rank, mesh.size)
            assert mesh.reshaped(tensor=tensor, pipeline=pipeline) is other
            assert (other is mesh) == (data == comm.size)
            before = mesh.ledger.sent(axis="pipeline")
            other.pipeline.all_reduce(np.ones(840))
            assert (mesh.ledger.sent(axis="pipeline") > before) == (pipeline > 1)  # one ledger
            for axis in (mesh.data, other.data):
                axis.all_reduce(np.ones(3))
                assert mesh.ledger.recent[-1].call.members == axis.comm.allgather(mesh.rank)
    with mpishard.Mesh(comm, data=1, tensor=comm.size) as mesh:
        assert mesh.reshaped(data=1, tensor=-1) is mesh
        if comm.size > 1:
            with pytest.raises(ValueError, match="tensor=.* already, but"):
                mesh.reshaped()


def test_an_axis_of_some_ranks(comm):
    with mpishard.Mesh(comm) as mesh:
        ranks = list(range(0, comm.size, 2))
        part = mesh.data.subgroup("even", ranks)
        assert (part is None) == (mesh.rank % 2 == 1)
        assert mesh.data.subgroup("again", ranks[::-1]) is part
        if part is not None:
            assert (part.name, part.rank, part.size) == ("even", mesh.rank // 2, len(ranks))
            assert part.all_reduce(np.array([mesh.rank]))[0] == sum(ranks)
            assert part.members == ranks == mesh.ledger.recent[-1].call.members
            assert mesh.ledger.sent(axis="even") == (0 if len(ranks) == 1 else mesh.ledger.sent())


@pytest.mark.parametrize("where", ["data", "subgroup", "reshaped"])
def test_a_mesh_ends_the_collectives_that_nobody_has_waited_for(comm, where):
    """MPI would go on with them on communicators that are no more, and with memory that is of other arrays by then."""
    values = np.full(2**20, comm.rank + 1.0)  # too long to arrive unless both ends take part
    dropped = values.copy()
    with mpishard.Mesh(comm) as mesh:
        axis = mesh.data
        if where == "subgroup":
            axis = axis.subgroup("all", range(comm.size))
        elif where == "reshaped":
            axis = mesh.reshaped(data=1, tensor=comm.size).tensor
        pending = axis.start_all_reduce(values)
        axis.start_all_reduce(dropped)
        array = weakref.ref(dropped)
        del dropped
        gc.collect()
        assert (array() is None) == (comm.size == 1)
        at_end = array()
    assert np.all(values == sum(range(1, comm.size + 1)))
    assert at_end is None or np.array_equal(at_end, values)
    assert pending.is_over or comm.size == 1
    del at_end
    gc.collect()
    assert array() is None
    comm.allgather(None)


# Debug mode: calls of ranks that do not match are named on every rank, and those that do pass.


@several
@pytest.mark.quick
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
        assert text.count("test_mesh.py:") == mesh.size
        assert np.array_equal(mesh.data.all_reduce(np.ones(3)), np.full(3, mesh.size))  # the axis still works


@several
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
        assert text.count("test_mesh.py:") == mesh.size
        assert len(set(comm.allgather(text))) == 1 and mesh.ledger.active is None


@pytest.mark.mpi(min_size=4)
@pytest.mark.quick
def test_debug_sees_a_circle_of_calls_that_no_two_ranks_share(comm):
    with mpishard.Mesh(comm, tensor=2, debug=True) as mesh, pytest.raises(CollectiveMismatchError) as caught:
        if mesh.rank in (0, 3):  # 0 waits for 1, which waits for 3, for 2, for 0
            mesh.tensor.barrier()
        elif mesh.rank in (1, 2):
            mesh.data.barrier()
        else:
            mesh.world.barrier()
    assert all(f"rank {rank}: barrier(0 x uint8) on axis" in str(caught.value) for rank in range(comm.size))


@several
@pytest.mark.parametrize("op", ["send", "recv"])
def test_debug_sees_messages_that_nobody_is_at_the_other_end_of(comm, op):
    """The message must be longer than what MPI buffers for a receiver that has not come yet."""
    with mpishard.Mesh(comm, debug=True) as mesh:
        large = np.zeros(10**6)
        with pytest.raises(CollectiveMismatchError) as caught:
            if mesh.rank == 0:
                mesh.data.all_reduce(np.zeros(3))
            else:
                getattr(mesh.world, op)(large, 0, tag=3)
        text = str(caught.value)
        assert "rank 0: all_reduce(3 x float64, sum) on axis 'data' called at" in text
        way = "to" if op == "send" else "from"
        assert f"rank 1: {op}(1000000 x float64, {way} rank 0, tag 3) on axis 'world'" in text
        assert text.count("test_mesh.py:") == mesh.size and mesh.ledger.active is None
        comm.Barrier()  # a message that is received here before its sender has looked is no mistake any more
        for rank in range(1, mesh.size):  # the message that was left
            if mesh.rank == 0:
                mesh.world.comm.Recv(large, rank) if op == "send" else mesh.world.comm.Send(large, rank, 3)
        mesh.world.comm.Barrier()


@several
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


@several
def test_debug_knows_what_may_differ_and_what_may_not(comm):
    with mpishard.Mesh(comm, debug=True) as mesh:
        axis = mesh.data
        for mine, theirs in (((3, "sum"), (4, "sum")), ((3, "sum"), (3, "max"))):
            count, op = mine if mesh.rank == 0 else theirs
            with pytest.raises(CollectiveMismatchError, match="differs between its ranks"):
                axis.all_reduce(np.zeros(count), op=op)
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
