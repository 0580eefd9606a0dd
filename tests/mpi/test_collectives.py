"""Collectives against their definition: both kinds of memory, uneven pieces, adjoints, the ledger, debug mode."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from mpi4py import MPI
from standin import AwareArray, DeviceArray
from standin import empty as empty_on_device

import mpishard
from mpishard.backend import array as arrays
from mpishard.comm import collectives, staging
from mpishard.comm.call_matching import CollectiveMismatchError

SIZES = (0, 1, 7, 57)


def numbers(rank, size, dtype=np.float64):
    """Small whole numbers, so that sums are exact in any order."""
    return np.random.default_rng([rank, size]).integers(-8, 9, size).astype(dtype)


def uneven(size, ranks):
    """Counts that leave the first rank empty-handed and give the last the rest."""
    each = size // ranks // 2
    return [0] + [each] * (ranks - 2) + [size - each * (ranks - 2)] if ranks > 1 else [size]


class Host:
    """How the tests make and read buffers; `Device` does the same for memory the host must not touch."""

    name = "numpy"

    def buffer(self, values):
        return values.copy()

    def values(self, buffer):
        return buffer


class Device(Host):
    def __init__(self, kind):
        self.name, self.kind = kind.__name__, kind

    def buffer(self, values):
        # The copy is queued behind a slow stream: it is only there once the stream has been waited for.
        device = empty_on_device(values.shape, values.dtype, kind=self.kind)
        staged = empty_on_device(values.shape, values.dtype, kind=self.kind)
        arrays.copy_to_device(values, staged)
        device[...] = staged
        return device

    def values(self, buffer):
        return arrays.to_host(buffer)


@pytest.fixture(params=[Host(), Device(DeviceArray), Device(AwareArray)], ids=lambda memory: memory.name)
def memory(request, monkeypatch):
    if request.param.name == "AwareArray":  # an MPI that takes device pointers, as far as the stand-in goes
        aware = replace(staging.probe(), device_buffers=True)
        monkeypatch.setattr(staging, "probe", lambda device=False: aware)
    return request.param


@pytest.fixture(scope="module")
def shared_mesh(comm):
    with mpishard.Mesh(comm) as mesh:
        yield mesh


@pytest.fixture(params=["one call", "many parts"])
def axis(request, shared_mesh, monkeypatch):
    """The data axis; with a count limit of 5 elements it goes the way of buffers of more than 2**31."""
    if request.param == "many parts":
        for channel in (shared_mesh.data._channel, shared_mesh.data._channel_of_started):
            monkeypatch.setattr(channel, "largest_count", 5)
    return shared_mesh.data


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "float16", "complex128"])
def test_all_reduce(axis, memory, dtype):
    for size in SIZES:
        check_all_reduce(axis, memory, size, dtype)


def check_all_reduce(axis, memory, size, dtype):
    parts = [numbers(rank, size, dtype) for rank in range(axis.size)]
    mine = memory.buffer(parts[axis.rank])
    out = memory.buffer(np.zeros_like(parts[0]))
    assert axis.all_reduce(mine, out) is out
    assert np.array_equal(memory.values(out), sum(parts))
    assert np.array_equal(memory.values(mine), parts[axis.rank])
    assert axis.all_reduce(mine) is mine
    assert np.array_equal(memory.values(mine), sum(parts))
    assert axis.start_all_reduce(mine).wait() is mine
    assert np.array_equal(memory.values(mine), sum(parts) * axis.size)


def test_buffers_that_are_not_aligned(shared_mesh):
    axis = shared_mesh.data

    def buffer(values):
        unaligned = np.empty(values.nbytes + 1, np.uint8)[1:].view(values.dtype)
        unaligned[...] = values
        assert not unaligned.flags.aligned or not values.size
        return unaligned

    memory = Host()
    memory.buffer = buffer
    check_all_reduce(axis, memory, 7, "float64")
    mine = buffer(numbers(axis.rank, 5))
    whole = axis.all_gather(buffer(np.zeros(5 * axis.size)), mine, [5] * axis.size)
    assert np.array_equal(whole, np.concatenate([numbers(rank, 5) for rank in range(axis.size)]))
    half = buffer(numbers(axis.rank, 5).astype(np.float16))
    for each in (mine, half):
        assert np.array_equal(axis.broadcast(each), numbers(0, 5))
    pending = axis.start_send(buffer(numbers(axis.rank, 3)), (axis.rank + 1) % axis.size)
    source = (axis.rank - 1) % axis.size
    assert np.array_equal(axis.recv(buffer(np.zeros(3)), source), numbers(source, 3))
    pending.wait()


@pytest.mark.parametrize("odd", ["unaligned", "not in place", "a subclass"])
def test_one_rank_has_another_kind_of_buffer(shared_mesh, odd):
    """Ranks in one all_reduce need not prepare it alike."""
    axis = shared_mesh.data
    mine, out = numbers(axis.rank, 5), None
    if axis.rank == axis.size - 1:
        if odd == "unaligned":
            mine = np.frombuffer(bytearray(b" " + mine.tobytes()), np.uint8)[1:].view(mine.dtype)
        elif odd == "not in place":
            out = np.zeros(5)
        else:
            mine = mine.view(np.recarray)
    assert np.array_equal(axis.all_reduce(mine, out), sum(numbers(rank, 5) for rank in range(axis.size)))


ODD = {
    "unaligned": lambda values: np.frombuffer(bytearray(b" " + values.tobytes()), np.uint8)[1:].view(values.dtype),
    "a part of another": lambda values: np.append(7.0, values)[1:],
    "a subclass": lambda values: values.view(np.recarray),
    "not in place": lambda values: values,
    "cut by default": lambda values: values,
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("exchanged", [range(0), range(2**62)])
@pytest.mark.parametrize("each_has, odd_has", [(4, 4), (4, 0), (0, 9)])
@pytest.mark.parametrize("odd", ODD)
def test_one_rank_has_another_kind_of_buffer_of_pieces(shared_mesh, monkeypatch, odd, each_has, odd_has, exchanged):
    """Ranks in one reduce_scatter or all_gather need not prepare it alike, nor all take its fast path."""
    if odd == "cut by default" and each_has != odd_has:
        pytest.skip("cut otherwise")
    axis, ranks, slow = shared_mesh.data, shared_mesh.data.size, []
    monkeypatch.setitem(collectives.EXCHANGED_BYTES, MPI.get_vendor()[0], exchanged)
    for name in ("reduce_scatter", "all_gather"):
        usual = getattr(collectives.Collectives, name)
        monkeypatch.setattr(
            collectives.Collectives, name, lambda *given, usual=usual, name=name: slow.append(name) or usual(*given)
        )
    for one in range(ranks):
        is_odd = axis.rank == one
        counts = [odd_has if rank == one else each_has for rank in range(ranks)]
        size, start = sum(counts), sum(counts[: axis.rank])
        own = slice(start, start + counts[axis.rank])
        total, slow[:] = sum(numbers(rank, size) for rank in range(ranks)), []
        cuts = None if is_odd and odd == "cut by default" else counts
        made = ODD[odd] if is_odd else np.copy

        mine = made(numbers(axis.rank, size))
        out = np.zeros(counts[axis.rank]) if is_odd and odd == "not in place" else None
        assert np.array_equal(axis.reduce_scatter(mine, out, cuts), total[own])

        whole = np.full(size, 99.0)
        whole[own] = total[own]
        piece = total[own].copy() if is_odd and odd == "not in place" else None
        assert np.array_equal(axis.all_gather(made(whole), piece, cuts), total)

        fast = not is_odd or odd in ("a part of another", "cut by default")
        exchanges = bool(exchanged) and max(counts) * (ranks - 1) <= 2 * size
        assert slow == ["reduce_scatter"] * (exchanges or not fast) + ["all_gather"] * (not fast)


@pytest.mark.parametrize(("op", "function"), [("max", np.max), ("min", np.min), ("prod", np.prod)])
def test_other_operations(axis, op, function):
    parts = [numbers(rank, 7) for rank in range(axis.size)]
    assert np.array_equal(axis.all_reduce(parts[axis.rank].copy(), op=op), function(parts, axis=0))


@pytest.mark.parametrize("cut", ["even", "uneven"])
@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_reduce_scatter_and_all_gather(axis, memory, cut, dtype, monkeypatch):
    library = MPI.get_vendor()[0]
    for size in SIZES:
        for exchanged in (range(0), range(2**62)):  # by the library, and as an exchange of pieces
            monkeypatch.setitem(collectives.EXCHANGED_BYTES, library, exchanged)
            check_reduce_scatter_and_all_gather(axis, memory, size, cut, dtype)


@pytest.mark.mpi(min_size=3)
def test_pieces_too_uneven_to_exchange(shared_mesh, monkeypatch):
    """The owner of nearly all would get that from each other rank; an exchange is made of what is even enough."""
    axis, made = shared_mesh.data, []
    ranks, start = axis.size, collectives.Collectives._start_exchange
    monkeypatch.setattr(
        collectives.Collectives, "_start_exchange", lambda *arguments: made.append(1) or start(*arguments)
    )
    size = 20 * ranks
    even, nearly_all = [20] * ranks, [size - ranks + 1] + [1] * (ranks - 1)
    for counts, limit, exchanged in (
        (even, None, True),
        (even, size, True),
        (nearly_all, None, ranks == 3),  # twice the buffer at most
        (nearly_all, size, False),  # more than one call takes
    ):
        monkeypatch.setattr(axis._channel, "largest_count", limit)
        own = slice(sum(counts[: axis.rank]), sum(counts[: axis.rank + 1]))
        for allowed in (range(0), range(2**62)):
            monkeypatch.setitem(collectives.EXCHANGED_BYTES, MPI.get_vendor()[0], allowed)
            made.clear()
            piece = axis.reduce_scatter(numbers(axis.rank, size), counts=counts)
            assert np.array_equal(piece, sum(numbers(rank, size) for rank in range(ranks))[own])
            assert bool(made) == (exchanged and bool(allowed))


@pytest.mark.mpi(min_size=2)
def test_exchanges_under_way_share_no_memory_and_what_they_leave_is_used_again(shared_mesh, monkeypatch):
    axis = shared_mesh.data
    others, spare = axis.size - 1, []
    monkeypatch.setattr(axis._started, "_spare", spare)
    monkeypatch.setitem(collectives.EXCHANGED_BYTES, MPI.get_vendor()[0], range(2**62))
    monkeypatch.setattr(collectives, "_KEPT_BYTES", 3 * 50 * 8 * others)
    kept = []
    for count, dtype in [(50, np.float64), (50, np.float64), (20, np.float32), (60, np.float64)]:
        parts = [numbers(rank, count * axis.size, dtype) for rank in range(axis.size)]
        requests = [axis.start_reduce_scatter(factor * parts[axis.rank]) for factor in (1, 2, 3)]
        own = slice(axis.rank * count, (axis.rank + 1) * count)
        for factor in (3, 1, 2):
            assert np.array_equal(requests[factor - 1].wait(), factor * sum(parts)[own])
        kept.append({id(memory) for memory in spare})
    assert len(kept[0]) == 3
    assert kept[0] == kept[1] == kept[2]
    assert [memory.size for memory in spare] == [60 * 8 * others] * 2  # three are more than the limit


@pytest.mark.parametrize("limit", [None, 7])
@pytest.mark.parametrize("exchanged", [range(0), range(2**62)])
def test_a_piece_may_be_reduced_to_its_place_in_the_buffer(shared_mesh, monkeypatch, exchanged, limit):
    axis = shared_mesh.data
    monkeypatch.setattr(axis._channel, "largest_count", limit)
    monkeypatch.setitem(collectives.EXCHANGED_BYTES, MPI.get_vendor()[0], exchanged)
    counts = [0, 1] * (axis.size // 2) + [8] * (axis.size % 2)
    size, start = sum(counts), sum(counts[: axis.rank])
    expected = sum(numbers(rank, size) for rank in range(axis.size))[start : start + counts[axis.rank]]
    for reduce in (axis.reduce_scatter, lambda *arguments: axis.start_reduce_scatter(*arguments).wait()):
        buffer = numbers(axis.rank, size)
        own = buffer[start : start + counts[axis.rank]]
        assert np.array_equal(reduce(buffer, own, counts), expected)
        assert np.array_equal(own, expected)


def check_reduce_scatter_and_all_gather(axis, memory, size, cut, dtype):
    counts = None if cut == "even" else uneven(size, axis.size)
    lengths = counts or [len(part) for part in np.array_split(np.zeros(size), axis.size)]
    own = slice(sum(lengths[: axis.rank]), sum(lengths[: axis.rank + 1]))
    parts = [numbers(rank, size, dtype) for rank in range(axis.size)]
    whole = memory.buffer(parts[axis.rank])
    piece = memory.buffer(np.zeros(lengths[axis.rank], dtype))
    assert axis.reduce_scatter(whole, piece, counts) is piece
    assert np.array_equal(memory.values(piece), sum(parts)[own])
    assert np.array_equal(memory.values(whole), parts[axis.rank])
    front = axis.reduce_scatter(whole, counts=counts)
    assert np.array_equal(memory.values(front), sum(parts)[own])

    gathered = memory.buffer(np.full(size, 99, dtype))
    assert axis.all_gather(gathered, piece, counts) is gathered
    assert np.array_equal(memory.values(gathered), sum(parts))
    in_place = np.full(size, 99, dtype)
    in_place[own] = sum(parts)[own]
    in_place = memory.buffer(in_place)
    assert axis.start_all_gather(in_place, counts=counts).wait() is in_place
    assert np.array_equal(memory.values(in_place), sum(parts))


def test_all_to_all(axis, memory):
    for size in SIZES:
        check_all_to_all(axis, memory, size)


def check_all_to_all(axis, memory, size):
    def counts_of(rank):
        return [(size + 3 * rank + to) % 5 for to in range(axis.size)]

    send = [np.split(numbers(rank, sum(counts_of(rank))), np.cumsum(counts_of(rank))[:-1]) for rank in range(axis.size)]
    arriving = [counts_of(rank)[axis.rank] for rank in range(axis.size)]
    out = memory.buffer(np.zeros(sum(arriving)))
    buffer = memory.buffer(np.concatenate(send[axis.rank]))
    axis.all_to_all(buffer, out, counts_of(axis.rank), arriving)
    assert np.array_equal(memory.values(out), np.concatenate([send[rank][axis.rank] for rank in range(axis.size)]))


def test_all_to_all_may_leave_a_ranks_own_run_where_it_is(axis, memory):
    counts = [2] * axis.size
    arriving = [0 if rank == axis.rank else 2 for rank in range(axis.size)]
    out = memory.buffer(np.zeros(sum(arriving)))
    axis.all_to_all(memory.buffer(numbers(axis.rank, 2 * axis.size)), out, counts, arriving, keep_own=True)
    others = [numbers(rank, 2 * axis.size) for rank in range(axis.size) if rank != axis.rank]
    expected = [theirs[2 * axis.rank : 2 * axis.rank + 2] for theirs in others]
    assert np.array_equal(memory.values(out), np.concatenate([np.zeros(0), *expected]))


def test_broadcast_from_every_root(axis, memory):
    for root in range(axis.size):
        buffer = memory.buffer(numbers(axis.rank, 12).reshape(3, 4))
        assert axis.broadcast(buffer, root) is buffer
        assert np.array_equal(memory.values(buffer), numbers(root, 12).reshape(3, 4))


def test_send_and_receive_round_the_ring(axis, memory):
    to, source = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    got = memory.buffer(np.zeros(7))
    pending = axis.start_recv(got, source)
    axis.start_send(memory.buffer(numbers(axis.rank, 7)), to).wait()
    assert pending.wait() is got
    assert np.array_equal(memory.values(got), numbers(source, 7))


def test_waiting_twice_and_testing(mesh):
    buffer = np.full(4, float(mesh.rank))
    pending = mesh.data.start_all_reduce(buffer)
    while not pending.test():
        pass
    total = mesh.size * (mesh.size - 1) / 2
    assert np.array_equal(pending.wait(), np.full(4, total))
    assert np.array_equal(pending.wait(), np.full(4, total))
    assert mesh.ledger.totals["data", "all_reduce", ""].calls == 1


@pytest.mark.mpi(min_size=2)
def test_testing_a_receive(mesh):
    buffer = np.zeros(4)
    pending = mesh.data.start_recv(buffer, (mesh.rank - 1) % mesh.size)
    assert not pending.test()
    mesh.data.barrier()
    mesh.data.send(np.ones(4), (mesh.rank + 1) % mesh.size)
    while not pending.test():
        pass
    assert (pending.wait() == 1).all()


def dot(mesh, x, y):
    """<x, y> over the ranks, each holding its part."""
    return mesh.world.comm.allreduce(float(np.dot(x, y)))


def test_adjoints(shared_mesh):
    """<A x, y> = <x, A' y> for every collective, with exact arithmetic."""
    for size in SIZES:
        check_adjoints(shared_mesh, size)


def check_adjoints(mesh, size):
    axis = mesh.data
    cuts = [len(part) for part in np.array_split(np.zeros(size), axis.size)]
    whole_x, whole_y = numbers(axis.rank, size), numbers(axis.rank + 100, size)
    piece_x, piece_y = numbers(axis.rank + 200, cuts[axis.rank]), numbers(axis.rank + 300, cuts[axis.rank])

    assert dot(mesh, axis.all_reduce(whole_x.copy()), whole_y) == dot(mesh, whole_x, axis.all_reduce(whole_y.copy()))
    gathered = axis.all_gather(np.zeros(size), piece_x)
    assert dot(mesh, gathered, whole_y) == dot(mesh, piece_x, axis.reduce_scatter(whole_y.copy()))
    scattered = axis.reduce_scatter(whole_x.copy())
    assert dot(mesh, scattered, piece_y) == dot(mesh, whole_x, axis.all_gather(np.zeros(size), piece_y))

    counts = [(axis.rank + to) % 3 for to in range(axis.size)]  # symmetric, so it is its own transpose
    x, y = numbers(axis.rank + 400, sum(counts)), numbers(axis.rank + 500, sum(counts))
    forth = axis.all_to_all(x, np.zeros_like(x), counts, counts)
    back = axis.all_to_all(y, np.zeros_like(y), counts, counts)
    assert dot(mesh, forth, y) == dot(mesh, x, back)

    root = axis.size - 1
    sent = axis.broadcast(whole_x.copy(), root)
    reduced = axis.all_reduce(whole_y.copy()) if axis.rank == root else axis.all_reduce(whole_y.copy()) * 0
    assert dot(mesh, sent, whole_y) == dot(mesh, whole_x, reduced)


@pytest.mark.parametrize("size", [1, 8, 57, 840])
def test_ledger_bytes_are_those_of_the_ring(mesh, size):
    axis, n = mesh.data, mesh.size
    axis.all_reduce(np.zeros(size, np.float32), label="a")
    axis.start_all_reduce(np.zeros(size, np.float32), label="b").wait()
    axis.reduce_scatter(np.zeros(size, np.float32), label="c")
    axis.all_gather(np.zeros(size, np.float32), label="d")
    sent = {label: mesh.ledger.sent(label=label) for label in "abcd"}
    everybody = {label: sum(mesh.world.comm.allgather(value)) for label, value in sent.items()}
    assert everybody == {"a": 8 * (n - 1) * size, "b": 8 * (n - 1) * size, "c": 4 * (n - 1) * size} | {
        "d": 4 * (n - 1) * size
    }
    if size % n == 0:
        assert sent["a"] * n == 2 * (n - 1) * 4 * size
        assert sent["c"] * n == sent["d"] * n == (n - 1) * 4 * size
    entry = mesh.ledger.recent[-1]
    assert (entry.call.op, entry.call.elements, entry.call.axis, entry.call.sequence) == ("all_gather", size, "data", 3)
    assert "test_collectives.py" in entry.call.site
    assert entry.seconds >= 0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda axis: axis.start_all_reduce(np.zeros(4)[::2]), ValueError, "contiguous"),
        (lambda axis: axis.all_reduce([1.0]), TypeError, "needs a NumPy or CuPy array, got list"),
        (lambda axis: axis.all_reduce(np.zeros((4, 4))[:, :2]), ValueError, "contiguous"),
        (lambda axis: axis.all_reduce(np.zeros(3), np.zeros(4)), ValueError, r"\(3,\) and float64 \(4,\)"),
        (lambda axis: axis.reduce_scatter(np.zeros(3), counts=[9] * axis.size), ValueError, "do not cut a buffer of 3"),
        (lambda axis: axis.all_gather(np.zeros(3), np.zeros(99)), ValueError, "piece must have .* got 99"),
        (lambda axis: axis.broadcast(np.zeros(3), 99), ValueError, "from rank 99"),
        (lambda axis: axis.all_to_all(np.zeros(3), np.zeros(3, np.float32)), TypeError, "need one dtype"),
        (lambda axis: axis.all_reduce(np.zeros(3), op="mean"), ValueError, "sum, max, min, prod, got 'mean'"),
    ],
)
def test_bad_buffers(shared_mesh, call, error, message):
    with pytest.raises(error, match=message):
        call(shared_mesh.data)
    assert shared_mesh.ledger.active is None


def test_agree_raises_everywhere(mesh):
    mesh.data.raise_if_any(None)
    problem = ValueError("bad lunch") if mesh.rank == mesh.size - 1 else None
    with pytest.raises(ValueError, match="bad lunch"):
        mesh.data.raise_if_any(problem)


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
        assert text.count("test_collectives.py:") == mesh.size
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
        assert text.count("test_collectives.py:") == mesh.size
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
        assert text.count("test_collectives.py:") == mesh.size and mesh.ledger.active is None
        comm.Barrier()  # a message that is received here before its sender has looked is no mistake any more
        for rank in range(1, mesh.size):  # the message that was left
            if mesh.rank == 0:
                mesh.world.comm.Recv(large, rank) if op == "send" else mesh.world.comm.Send(large, rank)
        mesh.world.comm.Barrier()


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
        mine = [axis.size, *[0] * (axis.size - 1)]
        with pytest.raises(CollectiveMismatchError, match="cut as"):
            axis.reduce_scatter(np.zeros(axis.size), counts=mine if axis.rank == 0 else mine[::-1])


@pytest.mark.mpi(min_size=2)
def test_a_blocking_call_may_come_before_or_after_a_started_one(mesh):
    axis = mesh.data
    one, two = np.ones(1000), np.ones(3)
    if axis.rank == 0:
        pending = axis.start_all_reduce(one)
        axis.all_reduce(two)
    else:
        axis.all_reduce(two)
        pending = axis.start_all_reduce(one)
    assert pending.wait().sum() == 1000 * axis.size
    assert two.sum() == 3 * axis.size


@pytest.mark.mpi(min_size=2)
def test_a_message_that_is_too_short_is_an_error(mesh):
    axis = mesh.data
    if axis.rank == 0:
        axis.send(np.ones(3), 1)
    if axis.rank == 1:
        with pytest.raises(ValueError, match="sent 24 bytes to a buffer of 40"):
            axis.recv(np.zeros(5), 0)
