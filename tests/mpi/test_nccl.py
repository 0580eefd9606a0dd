"""NCCL for device buffers, by a double: the results of MPI, and MPI wherever NCCL cannot."""

from __future__ import annotations

import contextlib
import itertools

import ml_dtypes
import nccl_double
import numpy as np
import pytest
import standin
from buffers import FORMS, late, lengths, uneven
from steps import STRATEGIES, gradients, start

import mpishard
from mpishard import nn
from mpishard.backend import array as arrays
from mpishard.backend import kinds
from mpishard.comm import nccl
from mpishard.comm.call_matching import CollectiveMismatchError
from mpishard.io import log

# NCCL for device buffers, by a double: the results of MPI, and MPI wherever NCCL cannot.

SIZES = (0, 1, 7, 24, 57)
DTYPES = ["float32", "float64", "int32", "int64", "uint8", "float16", ml_dtypes.bfloat16]


@pytest.fixture
def double(comm):
    with nccl_double.installed() as state:
        yield state
        assert state.alive == 0


@pytest.fixture
def mesh(comm, double):
    with mpishard.Mesh(comm, collectives="nccl") as mesh:
        yield mesh


@pytest.fixture
def warnings(monkeypatch):
    said = []
    monkeypatch.setattr(log, "warn", said.append)
    return said


def numbers(rank, size, dtype=np.float64):
    """Small whole numbers, so that sums are exact in any order."""
    return np.random.default_rng([rank, size]).integers(0, 9, size).astype(dtype)


def check_bits(device, expected):
    host = arrays.to_host(device)
    if not host.size:  # nothing has waited for the device
        nccl_double.run()
    assert host.dtype == expected.dtype
    assert np.array_equal(host, expected)


def check_sums(axis, put, dtype, size, ops=("sum", "max")):
    """All-reduces and reduce-scatters of what `put` makes of NumPy arrays, even and uneven, blocking and started."""
    values = [numbers(rank, size, dtype) for rank in range(axis.size)]
    mine, total = values[axis.rank], sum(values[1:], values[0])
    for call in FORMS.values():
        for op in ops:
            given, out, expected = put(mine), put(np.zeros_like(mine)), axis.all_reduce(mine.copy(), op=op)
            assert call(axis, "all_reduce", given, out, op) is out
            check_bits(out, expected)
            check_bits(given, mine)
            assert call(axis, "all_reduce", given, op=op) is given
            check_bits(given, expected)
        for counts in (None, lengths(size, axis.size, "even"), uneven(size, axis.size)):
            cuts = counts or lengths(size, axis.size, "even")
            own = slice(sum(cuts[: axis.rank]), sum(cuts[: axis.rank + 1]))
            given, out = put(mine), put(np.zeros_like(mine[own]))
            assert call(axis, "reduce_scatter", given, out, counts) is out
            check_bits(out, total[own])
            check_bits(given, mine)
            check_bits(call(axis, "reduce_scatter", given, counts=counts), total[own])
            given = put(mine)  # to the place of the piece within the buffer itself
            check_bits(call(axis, "reduce_scatter", given, given[own], counts), total[own])


def check_copies(axis, put, dtype, size):
    ranks, rank = range(axis.size), axis.rank
    for call in FORMS.values():
        for root in ranks:
            buffer = put(numbers(rank, size, dtype).reshape(1, size))
            assert call(axis, "broadcast", buffer, root) is buffer
            check_bits(buffer, numbers(root, size, dtype).reshape(1, size))
        even = lengths(size, axis.size, "even")
        for counts in (None, even, uneven(size, axis.size), [size] * axis.size):
            cuts = counts or even
            pieces = [numbers(each, cuts[each], dtype) for each in ranks]
            mixed, everything = np.zeros(sum(cuts), dtype), np.concatenate(pieces)
            whole = put(mixed)
            assert call(axis, "all_gather", whole, put(pieces[rank]), counts) is whole
            check_bits(whole, everything)
            mixed[sum(cuts[:rank]) : sum(cuts[: rank + 1])] = pieces[rank]
            check_bits(call(axis, "all_gather", put(mixed), counts=counts), everything)
            sent, out = np.full(axis.size * cuts[rank], rank, dtype), put(np.zeros(sum(cuts), dtype))
            assert call(axis, "all_to_all", put(sent), out, [cuts[rank]] * axis.size, cuts) is out
            check_bits(out, np.concatenate([np.full(cuts[each], each, dtype) for each in ranks]))
    assert axis.device_collectives == "nccl" and axis.why_not_nccl == ""


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_kind(mesh, dtype):
    for size in SIZES:
        check_sums(mesh.data, late, dtype, size, ("sum", "max", "min", "prod"))
        check_copies(mesh.data, late, dtype, size)


@pytest.mark.parametrize("dtype", ["complex64", "complex128", "bool", "int16"])
def test_copies_of_types_that_nccl_does_not_know(mesh, dtype):
    for size in SIZES:
        check_copies(mesh.data, late, dtype, size)


def test_each_kind_on_gpus(comm):
    if arrays.device_count() < comm.size:
        pytest.skip("each rank needs a GPU")
    try:
        kinds.cupy_backend().nccl()
    except ImportError as error:
        pytest.skip(str(error))
    cupy = arrays.device_module()
    with mpishard.Mesh(comm, collectives="nccl") as mesh:
        cupy.cuda.Device(mesh.device).use()
        for stream in (contextlib.nullcontext(), cupy.cuda.Stream(non_blocking=True)):
            for dtype, size in itertools.product(("float32", "float64", "int32", "float16"), (1, 1000, 300_000)):
                with stream:
                    check_sums(mesh.data, cupy.asarray, dtype, size)
                    check_copies(mesh.data, cupy.asarray, dtype, size)


def test_all_to_all_of_other_counts(mesh):
    """Where a rank keeps its own run, none is sent: the next exchange would get it."""
    axis, ranks = mesh.data, range(mesh.size)
    counts = np.array([[(3 * source + target + 1) % 4 for target in ranks] for source in ranks])  # one of each own
    sent, got = counts[axis.rank].tolist(), counts[:, axis.rank].tolist()
    for keep_own in (True, False):
        got[axis.rank] = 0 if keep_own else 1
        values = numbers(axis.rank, sum(sent)) + keep_own
        host = axis.all_to_all(values, np.zeros(sum(got)), sent, got, keep_own=keep_own)
        for call in FORMS.values():
            check_bits(call(axis, "all_to_all", late(values), late(0 * host), sent, got, keep_own=keep_own), host)


def test_ranks_without_anything_to_exchange(mesh):
    """Rank 0 sends to the last rank; the others go on to the next call."""
    axis, last = mesh.data, mesh.data.size - 1
    sent = [0] * last + [5] if axis.rank == 0 else [0] * axis.size
    got = [5] + [0] * last if axis.rank == last else [0] * axis.size
    out = late(np.zeros(sum(got)))
    axis.all_to_all(late(np.arange(5.0)[: sum(sent)]), out, sent, got)
    check_bits(axis.all_reduce(late(np.ones(2))), np.full(2, float(axis.size)))
    check_bits(out, np.arange(5.0)[: sum(got)])


def test_buffers_that_overlap_are_copied_first(mesh):
    axis, size = mesh.data, mesh.data.size
    values = numbers(axis.rank, 2 * size + 1)
    memory = late(values)
    check_bits(axis.all_reduce(memory[:-1], memory[1:]), axis.all_reduce(values[:-1].copy()))
    memory = late(values)
    shifted = axis.all_gather(memory[: 2 * size], memory[2 * axis.rank + 1 : 2 * axis.rank + 3], [2] * size)
    own = values[2 * axis.rank + 1 : 2 * axis.rank + 3]
    check_bits(shifted, axis.all_gather(np.empty(2 * size), own, [2] * size))
    for counts in ([2] * size, [2] * (size - 1) + [3]):
        memory, count = late(values), counts[axis.rank]
        gathered = axis.all_gather(memory[: sum(counts)], memory[:count], counts)
        check_bits(gathered, axis.all_gather(np.empty(sum(counts)), values[:count], counts))
    for first in (0, 1):
        memory = late(values)
        shifted = axis.all_to_all(memory[: 2 * size], memory[first : first + 2 * size])
        check_bits(shifted, axis.all_to_all(values[: 2 * size], np.empty(2 * size)))
    memory = late(values)
    check_bits(
        axis.reduce_scatter(memory[: 2 * size], memory[2 * axis.rank + 1 : 2 * axis.rank + 3], [2] * size),
        axis.reduce_scatter(values[: 2 * size].copy(), np.empty(2), [2] * size),
    )


def test_what_nccl_does_not_take_goes_by_mpi(mesh):
    axis = mesh.data
    axis.all_reduce(late(np.zeros(3)))
    before = len(nccl_double.calls)
    for dtype in ("complex64", "int16"):
        values = numbers(axis.rank, 5, dtype)
        check_bits(axis.all_reduce(late(values)), axis.all_reduce(values.copy()))
        check_bits(axis.reduce_scatter(late(values)), axis.reduce_scatter(values.copy()))
    assert np.array_equal(axis.all_reduce(numbers(axis.rank, 5)), sum(numbers(rank, 5) for rank in range(axis.size)))
    to, source = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    pending = axis.start_send(late(numbers(axis.rank, 4)), to)
    check_bits(axis.recv(late(np.zeros(4)), source), numbers(source, 4))
    pending.wait()
    assert len(nccl_double.calls) == before
    with pytest.raises(ValueError, match="knows the operations"):
        axis.all_reduce(late(np.zeros(3)), op="mean")
    with pytest.raises(ValueError, match="contiguous"):
        axis.all_reduce(late(np.zeros((3, 3)))[:, 1])
    with pytest.raises(ValueError, match="must be the same"):
        axis.all_reduce(late(np.zeros(3)), late(np.zeros(4)))
    with pytest.raises(ValueError, match="piece must have"):
        axis.reduce_scatter(late(np.zeros(axis.size)), late(np.zeros(2)))
    with pytest.raises(ValueError, match="broadcast from rank"):
        axis.broadcast(late(np.zeros(3)), axis.size)
    with pytest.raises(ValueError, match="do not cut"):
        axis.all_gather(late(np.zeros(3)), counts=[4] * axis.size)
    with pytest.raises(TypeError, match="both buffers need one dtype"):
        axis.all_to_all(late(np.zeros(axis.size)), late(np.zeros(axis.size, np.float32)))
    check_bits(axis.all_reduce(late(np.ones(3))), np.full(3, float(axis.size)))


def test_the_host_waits_for_nothing(mesh):
    """Not for the computation before a call, nor for the call; but what comes after it sees its result."""
    axis = mesh.data
    axis.barrier()
    axis.all_reduce(late(np.ones(3)))
    nccl_double.run()
    mine, other, ran = late(numbers(axis.rank, 8)), late(np.ones(8)), []
    before = len(nccl_double.calls)
    standin.current_stream().launch(lambda: ran.append(True))
    request = axis.start_all_reduce(mine)
    assert not request.test()
    request.wait()
    other *= mine
    assert len(nccl_double.calls) == before + 1 and not ran
    check_bits(other, axis.all_reduce(numbers(axis.rank, 8)))
    assert ran and request.test() and request.wait() is mine


def test_the_stream_of_the_start_waits_too(mesh):
    """Memory that was taken there may be freed and used again there."""
    values = late(np.full(7, mesh.rank + 1.0))
    mesh.data.all_reduce(values.copy())
    pending, start = mesh.data.start_all_reduce(values), standin.current_stream()
    with arrays.backend_of(values).new_stream(values) as other:
        queued = len(start.queue)
        pending.wait()
        assert len(start.queue) == queued + 1 and len(other.queue) == 1
    check_bits(values, np.full(7, mesh.size * (mesh.size + 1) / 2))


def test_started_and_blocking_calls_do_not_mix(mesh):
    """Blocking calls of both kinds of memory between the start of a call and its end."""
    axis, size = mesh.data, mesh.data.size
    gathered = [late(np.zeros(3 * size)) for _ in range(3)]
    pending = [axis.start_all_gather(each, late(numbers(axis.rank, 3) + i)) for i, each in enumerate(gathered)]
    total = axis.all_reduce(late(numbers(axis.rank, 9)))
    host = axis.all_reduce(numbers(axis.rank, 9))
    check_bits(total, host)
    for i, each in enumerate(pending):
        check_bits(each.wait(), np.concatenate([numbers(rank, 3) + i for rank in range(size)]))


def test_calls_are_noted_as_those_of_mpi(comm, double):
    def noted(collectives):
        with mpishard.Mesh(comm, collectives=collectives) as mesh:
            axis, size = mesh.data, mesh.data.size
            axis.all_reduce(late(np.ones(7)), label="gradients")
            axis.start_reduce_scatter(late(np.ones(7, np.float16)), label="gradients").wait()
            axis.all_gather(late(np.ones(2 * size)), counts=[2] * size)
            axis.all_to_all(late(np.ones(2 * size)), late(np.ones(2 * size)))
            axis.broadcast(late(np.ones(5)))
            totals = mesh.ledger.totals
            return {key: (each.calls, each.sent) for key, each in totals.items() if key[1] != "connect"}

    assert noted("nccl") == noted("mpi")


def test_debug_mode_compares_the_kind_of_memory(comm, double):
    with mpishard.Mesh(comm, collectives="nccl", debug=True) as mesh:
        check_bits(mesh.data.all_reduce(late(np.ones(3))), np.full(3, float(comm.size)))
        if comm.size > 1:
            buffer = np.ones(3) if comm.rank else late(np.ones(3))
            with pytest.raises(CollectiveMismatchError, match="on the device"):
                mesh.data.all_reduce(buffer)


# -- what NCCL cannot do -----------------------------------------------------------------------------------------------


def falls_back(comm, double, warnings, reason):
    """All ranks use MPI, and rank 0 says why, once."""
    del warnings[:]
    with mpishard.Mesh(comm, collectives="nccl") as mesh:
        assert mesh.data.device_collectives is None
        for axis in (mesh.data, mesh.world):
            for _ in range(2):
                check_bits(axis.all_reduce(late(np.ones(3))), np.full(3, float(comm.size)))
                check_bits(axis.start_all_reduce(late(np.ones(3))).wait(), np.full(3, float(comm.size)))
            assert axis.device_collectives == "mpi"
            assert reason in axis.why_not_nccl
        assert double.alive == 0
    assert len(warnings) == (comm.rank == 0)
    assert all(reason in each and "travel by MPI, not by NCCL" in each for each in warnings)


@pytest.mark.parametrize("why", ["missing", "old", "shared GPU", "nodes", "versions"])
def test_where_nccl_cannot_all_ranks_use_mpi(comm, double, warnings, monkeypatch, why):
    last = comm.size - 1
    if not last and why not in ("missing", "old"):
        pytest.skip("one rank shares no GPU, is on one node and has one version")
    if why == "missing" and comm.rank == last:
        monkeypatch.setattr(standin, "nccl_module", None)
    elif why == "old":
        double.version = 2604
    elif why == "shared GPU" and comm.rank < 2:
        monkeypatch.setattr(standin, "device_name", "0000:17:00.0")
    elif why == "nodes":
        monkeypatch.setattr(nccl, "_neighbours", lambda group: 1)
    elif why == "versions":
        double.version += comm.rank == last
    said = {
        "missing": f"rank {last}: NCCL is missing (the stand-in has no NCCL)",
        "old": "rank 0: NCCL 2604 is too old",
        "shared GPU": "ranks 0 and 1 share GPU 0000:17:00.0",
        "nodes": "several nodes",
        "versions": f"rank 0 has version 23203 of NCCL and rank {last} has 23204",
    }
    falls_back(comm, double, warnings, said[why])


@pytest.mark.parametrize("call", ["get_unique_id", "NcclCommunicator", "allReduce"])
def test_a_communicator_that_cannot_be_made(comm, double, warnings, call):
    # A call that only one rank makes would hang, in NCCL too.
    everywhere = call == "allReduce"
    if comm.rank == 0 or everywhere:
        double.fails = call
    falls_back(comm, double, warnings, f"{call} was told to fail")


@pytest.mark.parametrize("call", ["allReduce", "allGather", "broadcast"])
def test_wrong_values(comm, double, warnings, call):
    if comm.rank == comm.size - 1:
        double.wrong = call
    falls_back(comm, double, warnings, "NCCL gives wrong values")


def test_an_error_that_nccl_reports_later(comm, double):
    with mpishard.Mesh(comm, collectives="nccl") as mesh:
        mesh.data.all_reduce(late(np.ones(3)))
        double.fails = "check_async_error"
        with pytest.raises(nccl_double.NcclError, match="told to fail"):
            mesh.data.all_reduce(late(np.ones(3)))
        double.fails = ""


def test_a_buffer_on_another_gpu(mesh, monkeypatch):
    mesh.data.all_reduce(late(np.ones(3)))
    monkeypatch.setattr(standin, "_device", object())
    with pytest.raises(ValueError, match="keep all device buffers of a rank on one GPU"):
        mesh.data.all_reduce(late(np.ones(3)))


@pytest.mark.parametrize("wrong", ["gloo", None, 1])
def test_other_values(comm, wrong):
    with pytest.raises(ValueError, match=r'on rank 0 must be "mpi" or "nccl"'):
        mpishard.Mesh(comm, collectives=wrong)


def test_ranks_that_ask_for_different_ways(comm):
    if comm.size == 1:
        pytest.skip("one rank asks for one")
    with pytest.raises(ValueError, match=r"'mpi' on rank 0 and 'nccl' on rank 1; give the same"):
        mpishard.Mesh(comm, collectives="nccl" if comm.rank == 1 else "mpi")


# -- axes that end and begin again -------------------------------------------------------------------------------------


def test_axes_of_some_ranks(mesh, comm):
    part = mesh.world.split("halves", comm.rank % 2)
    check_bits(part.all_reduce(late(np.ones(3))), np.full(3, float(part.size)))
    assert part.device_collectives == "nccl" and mesh.world.device_collectives is None
    first = mesh.world.subgroup("first", [0])
    if first is not None:
        check_bits(first.all_gather(late(np.ones(3))), np.ones(3))
        assert first.device_collectives == "nccl"
    other = mesh.reshaped(data=1, tensor=comm.size)
    check_bits(other.tensor.all_reduce(late(np.ones(3))), np.full(3, float(comm.size)))
    assert other.collectives == "nccl" and other.tensor.device_collectives == "nccl"


def test_ranks_that_are_left_make_a_new_communicator(comm, double):
    mesh = mpishard.Mesh(comm, collectives="nccl")
    mesh.unwatch()
    part = mesh.data.split("all", 0)
    for axis in (mesh.data, part):
        check_bits(axis.all_reduce(late(np.ones(3))), np.full(3, float(comm.size)))
    assert double.alive == 4
    # The last rank leaves, and calls of the others can never end.
    double.goes_on = False
    leaves = comm.size > 1 and comm.rank == comm.size - 1
    hung = [] if leaves else [axis.start_all_reduce(late(np.ones(3))) for axis in (mesh.data, mesh.data, part)]
    survivors = comm.Split(int(leaves))
    mesh.data.rebind(survivors)
    assert double.alive == 0 and mesh.data.device_collectives is None
    double.goes_on = True
    for request in hung[:1]:
        request.abandon()
    for request in hung[1:]:
        with pytest.raises(nccl_double.MPI.Exception):
            request.wait()
        request.abandon()
    check_bits(mesh.data.all_reduce(late(np.ones(3))), np.full(3, float(survivors.size)))
    assert mesh.data.device_collectives == "nccl" and double.alive == 2
    mesh.free()


def test_meshes_leave_nothing(comm, double, short):
    for _ in range(5 if short else 20):
        with mpishard.Mesh(comm, collectives="nccl") as mesh:
            check_bits(mesh.data.all_reduce(late(np.ones(3))), np.full(3, float(comm.size)))
            mesh.world.split("halves", comm.rank % 2).start_broadcast(late(np.ones(3)))
            assert double.alive == 4
        assert double.alive == 0


# Training with NCCL for device buffers, by its double: the numbers of MPI, and no sum whose order matters.


def both_ways(comm, run, axis="data", **options):
    """What `run` returns for a mesh whose collectives go by MPI, and for one with NCCL."""
    found = []
    for collectives in ("mpi", "nccl"):
        with mpishard.Mesh(comm, **{axis: comm.size}, collectives=collectives) as mesh:
            found.append(run(mesh, **options))
            used = getattr(mesh, axis).device_collectives
            assert used == collectives or (used is None and axis == "tensor" and comm.size == 1)
    return found


def trained(mesh, *, strategy, dense=False, **options):
    """The parameters after three steps, by gradients whose sums have no rounding or by `dense` ones; and the state."""
    optimizer = strategy(mpishard.AdamW(lr=0.01), mpishard.ShardingConfiguration(mesh, **options))
    flat = late(start(211))
    for step in range(3):
        gradient = gradients(step, mesh.size, 211)[mesh.rank]
        if dense:
            gradient = np.random.default_rng([step, mesh.rank]).standard_normal(211).astype(np.float32)
        optimizer.step(flat, late(gradient))
    return arrays.to_host(flat), optimizer.serialize()


def sums_of_floats():
    """Those of more elements than the proof of a new communicator has."""
    return [each for each in nccl_double.calls if "educe" in each[0] and each[2].startswith("float") and each[1] > 16]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_is_that_by_mpi(comm, double, strategy):
    """Uneven parts, several buckets and accumulation."""
    options = {"minimum_parameter_group_size": 50, "max_gradient_norm": 1.0}
    (by_mpi, state), (by_nccl, other_state) = both_ways(comm, trained, strategy=strategy, **options)
    assert sums_of_floats() or comm.size == 1
    assert np.array_equal(by_nccl, by_mpi) and (by_mpi != start(211)).all()
    assert other_state == state


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_reproducible_runs_take_no_sum_of_nccl(comm, double, strategy):
    """The double adds in another order than MPI: any sum that depends on it would show."""
    options = {"dense": True, "reproducible": True, "max_gradient_norm": 1.0}
    (by_mpi, _), (by_nccl, _) = both_ways(comm, trained, strategy=strategy, **options)
    assert np.array_equal(by_nccl, by_mpi)
    assert not sums_of_floats() and nccl_double.calls


@pytest.mark.parametrize("shards", [1, 24])
@pytest.mark.parametrize("axis", ["data", "tensor"])
def test_a_model(comm, double, axis, shards):
    """Gathers of sharded parameters, sums over rows and columns; with shards in one order, and so of the same bits."""
    module = arrays.module_of(standin.empty(1))
    options = {"sharded_parameters": axis == "data", "sequence_parallel": axis == "tensor"}

    def run(mesh):
        model = nn.GPT(12, 5, 24, 1, 24, np.float64, mesh=mesh, module=module, shards=shards, **options)
        loss = model.loss_and_gradient(*np.random.default_rng(0).integers(0, 12, (2, 3, 5)))
        return loss, *(arrays.to_host(model.parameters.gradient(name)[0]) for name in model.parameters)

    for one, other in zip(*both_ways(comm, run, axis), strict=True):
        if shards > 1 or axis == "data":
            assert np.array_equal(one, other)
        else:
            np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-11)


def test_sums_by_nodes(comm, double):
    if comm.size != 4:
        pytest.skip("two nodes of two ranks")
    options = {"strategy": mpishard.DDPOptimizer, "hierarchical": 2, "minimum_parameter_group_size": 50}
    (by_mpi, _), (by_nccl, _) = both_ways(comm, trained, **options)
    assert np.array_equal(by_nccl, by_mpi)
