"""Collectives against their definition: both kinds of memory, paths, nodes, adjoints, the ledger."""

from __future__ import annotations

import numpy as np
import pytest
from buffers import numbers, uneven
from devices import KINDS_OVER_MPI, use_over_mpi
from mpi4py import MPI
from steps import SPECS, gradients, start, train

from mpishard import AdamW, DDPOptimizer, FlatParameters, Mesh, ShardingConfiguration
from mpishard.backend import array as arrays
from mpishard.comm import collectives
from mpishard.comm.agreement import differing
from mpishard.launch.job_notes import ALIKE
from mpishard.reduction.hierarchical import node_axes, nodes_of_data

# Collectives against their definition: both kinds of memory, uneven pieces, adjoints, the ledger.

SIZES = (0, 1, 7, 57)


class Host:
    """How the tests make and read buffers; `Device` does the same for memory the host must not touch."""

    name = "numpy"

    def buffer(self, values):
        return values.copy()

    def values(self, buffer):
        return buffer


class OnDevice(Host):
    def __init__(self, device):
        self.name, self.device = device.name, device

    def buffer(self, values):
        # The copy is queued behind a slow stream: it is only there once the stream has been waited for.
        array, staged = self.device.empty(values.shape, values.dtype), self.device.put(values)
        array[...] = staged
        return array

    def values(self, buffer):
        return arrays.to_host(buffer)


@pytest.fixture(params=["host", *KINDS_OVER_MPI])
def memory(request, monkeypatch):
    return Host() if request.param == "host" else OnDevice(use_over_mpi(request.param, monkeypatch))


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
    started = memory.buffer(np.zeros(lengths[axis.rank], dtype))
    assert axis.start_reduce_scatter(whole, started, counts).wait() is started
    assert np.array_equal(memory.values(started), sum(parts)[own])
    assert np.array_equal(memory.values(whole), parts[axis.rank])
    front = axis.start_reduce_scatter(memory.buffer(parts[axis.rank]), counts=counts).wait()
    assert np.array_equal(memory.values(front), sum(parts)[own])
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


def test_all_to_all_where_ranks_only_send_or_only_receive(axis, memory):
    """An empty slice begins where its array does: one address is not one buffer."""
    root = axis.size - 1
    values, nothing = numbers(root, 2 * axis.size), [0] * axis.size
    if axis.rank == root:
        whole = memory.buffer(values)
        axis.all_to_all(whole, whole[:0], [2] * axis.size, nothing, keep_own=True)
        assert np.array_equal(memory.values(whole), values)
    else:
        own = memory.buffer(np.zeros(2))
        axis.all_to_all(own[:0], own, nothing, [0] * root + [2])
        assert np.array_equal(memory.values(own), values[2 * axis.rank : 2 * axis.rank + 2])


def values_of(values, size, first):
    """An array of the host that has these values from element `first` on."""
    whole = np.full(size, 99.0)
    whole[first : first + values.size] = values
    return whole


@pytest.mark.parametrize("way", ["blocking", "started"])
@pytest.mark.parametrize("size, first, out_first", [(0, 0, 0), (7, 0, 0), (7, 0, 3), (7, 3, 0)])
def test_the_buffers_of_an_all_reduce_may_overlap(axis, memory, way, size, first, out_first):
    parts = [numbers(rank, size) for rank in range(axis.size)]
    whole = memory.buffer(values_of(parts[axis.rank], 10, first))
    out = whole[out_first : out_first + size]
    assert call(axis, way, "all_reduce", whole[first : first + size], out) is out
    assert np.array_equal(memory.values(out), sum(parts))
    if first == out_first:
        assert call(axis, way, "all_reduce", out, out) is out
        assert np.array_equal(memory.values(out), axis.size * sum(parts))


@pytest.mark.parametrize("way", ["blocking", "started"])
@pytest.mark.parametrize("each", [0, 3])
@pytest.mark.parametrize("place", ["own", "front", "between"])
def test_the_piece_of_an_all_gather_may_lie_in_the_buffer(axis, memory, way, each, place):
    counts = [each] * (axis.size - 1) + [2]
    own, starts = numbers(axis.rank, counts[axis.rank]), np.cumsum([0, *counts])
    first = {"own": starts[axis.rank], "front": 0, "between": min(1, starts[-1] - own.size)}[place]
    whole = memory.buffer(values_of(own, sum(counts), first))
    assert call(axis, way, "all_gather", whole, whole[first : first + own.size], counts) is whole
    assert np.array_equal(memory.values(whole), np.concatenate([numbers(r, c) for r, c in enumerate(counts)]))


@pytest.mark.parametrize("way", ["blocking", "started"])
@pytest.mark.parametrize("first, out_first", [(0, 0), (0, 1), (2, 0)])
def test_the_buffers_of_an_all_to_all_may_overlap(axis, memory, way, first, out_first):
    size = 2 * axis.size
    whole = memory.buffer(values_of(numbers(axis.rank, size), size + 2, first))
    out = whole[out_first : out_first + size]
    assert call(axis, way, "all_to_all", whole[first : first + size], out) is out
    runs = [numbers(rank, size)[2 * axis.rank : 2 * axis.rank + 2] for rank in range(axis.size)]
    assert np.array_equal(memory.values(out), np.concatenate(runs))


@pytest.mark.parametrize("way", ["blocking", "started"])
@pytest.mark.parametrize("each, last", [(3, 3), (0, 3), (3, 0), (0, 0)])
@pytest.mark.parametrize("place", ["own", "front", "between"])
@pytest.mark.parametrize("exchanged", [range(0), range(2**62)])
def test_the_piece_of_a_reduce_scatter_may_lie_in_the_buffer(
    axis, memory, way, each, last, place, exchanged, monkeypatch
):
    monkeypatch.setitem(collectives.EXCHANGED_BYTES, MPI.get_vendor()[0], exchanged)
    counts = [each] * (axis.size - 1) + [last]
    parts, start, count = [numbers(rank, sum(counts)) for rank in range(axis.size)], each * axis.rank, counts[axis.rank]
    first = {"own": start, "front": 0, "between": min(1, sum(counts) - count)}[place]
    whole = memory.buffer(parts[axis.rank])
    piece = whole[first : first + count]
    assert call(axis, way, "reduce_scatter", whole, piece, counts) is piece
    assert np.array_equal(memory.values(piece), sum(parts)[start : start + count])


def call(axis, way, name, *given):
    return getattr(axis, name)(*given) if way == "blocking" else getattr(axis, f"start_{name}")(*given).wait()


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
    with pytest.raises(ValueError, match="bad lunch") as found:
        mesh.data.raise_if_any(problem)
    assert getattr(found.value, ALIKE, 0) == (mesh.size == 1)


def test_an_error_that_all_ranks_have_alike_is_known_for_one(mesh):
    for text, alike in (("bad lunch", True), (f"bad lunch on rank {mesh.rank}", mesh.size == 1)):
        with pytest.raises(ValueError, match=text) as found:
            mesh.world.raise_if_any(ValueError(text))
        assert getattr(found.value, ALIKE, 0) == mesh.size * alike
    with pytest.raises(ValueError, match="all ranks must have the same settings") as found:
        raise differing(mesh.world, {"lr": str(mesh.rank)})
    assert getattr(found.value, ALIKE) == mesh.size


@pytest.mark.mpi(min_size=2)
@pytest.mark.usefixtures("without_debug")
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


# A collective by MPI's function, as an exchange of pieces, or on the fast path, which ranks need not all take.


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
        fast = fast and not shared_mesh.debug  # which looks at every call
        exchanges = bool(exchanged) and max(counts) * (ranks - 1) <= 2 * size
        assert slow == ["reduce_scatter"] * (exchanges or not fast) + ["all_gather"] * (not fast)


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
    for channel in (axis._channel, axis._channel_of_started):
        monkeypatch.setattr(channel, "largest_count", limit)
    monkeypatch.setitem(collectives.EXCHANGED_BYTES, MPI.get_vendor()[0], exchanged)
    counts = [0, 1] * (axis.size // 2) + [8] * (axis.size % 2)
    size, start = sum(counts), sum(counts[: axis.rank])
    expected = sum(numbers(rank, size) for rank in range(axis.size))[start : start + counts[axis.rank]]
    for reduce in (axis.reduce_scatter, lambda *arguments: axis.start_reduce_scatter(*arguments).wait()):
        buffer = numbers(axis.rank, size)
        own = buffer[start : start + counts[axis.rank]]
        assert np.array_equal(reduce(buffer, own, counts), expected)
        assert np.array_equal(own, expected)


# Sums by nodes: the same as over all ranks at once, with less between the nodes.

SIZE = 601


def sent(mesh, axis):
    """Bytes of gradients that this rank has sent on an axis, by the beginning of its name."""
    return sum(
        total["bytes"] for name, total in mesh.ledger.summary().items() if name.startswith(axis) and "gradients" in name
    )


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("nodes", [True, 2, 3, 4])
def test_the_sum_is_the_same_to_the_last_bit(mesh, same_on_all, nodes, overlap):
    found = []
    for hierarchical in (False, nodes):
        config = ShardingConfiguration(
            mesh,
            hierarchical=hierarchical,
            overlap_communication=overlap,
            minimum_parameter_group_size=10,
            max_gradient_norm=0.5,
        )
        flat = start(sum(spec.size for spec in SPECS))
        optimizer = DDPOptimizer(AdamW(lr=0.1), config)
        optimizer.bind(FlatParameters.over(flat, SPECS))
        found.append(train(optimizer, flat).tobytes())
        by_nodes = isinstance(hierarchical, int) and hierarchical > 1 and mesh.size % hierarchical == 0
        assert (sent(mesh, "data across nodes") > 0) == (by_nodes and mesh.size > hierarchical)
    assert found[0] == found[1]
    assert same_on_all(found)


def test_bytes_between_nodes(mesh):
    """With n ranks on m nodes, ``2 (m - 1) / n`` of the gradient, where a sum at once sends ``2 (n - 1) / n``."""
    size = 64 * mesh.size
    config = ShardingConfiguration(mesh, hierarchical=2)
    flat = start(size)
    DDPOptimizer(AdamW(), config).step(flat, gradients(0, mesh.size, size)[mesh.rank])
    nodes = mesh.size // 2
    if mesh.size % 2 or nodes < 2:
        assert sent(mesh, "data across") == 0
        assert sent(mesh, "data") == 2 * (mesh.size - 1) * 4 * size // mesh.size
    else:
        assert sent(mesh, "data across") == 2 * (nodes - 1) * 4 * size // mesh.size
        assert sent(mesh, "data within") == 4 * size  # half of it each way


def test_device_arrays(mesh, device):
    config = ShardingConfiguration(mesh, hierarchical=2)
    host, optimizer = start(SIZE), DDPOptimizer(AdamW(lr=0.1), config)
    train(optimizer, host)
    there = device.put(start(SIZE))
    optimizer = DDPOptimizer(AdamW(lr=0.1), config)
    for step in range(3):
        gradient = device.put(gradients(step, mesh.size, SIZE)[mesh.rank])
        assert arrays.is_device(gradient)
        optimizer.step(there, gradient)
    assert np.array_equal(arrays.to_host(there), host)


def test_nodes(comm, mesh):
    assert mesh.nodes == [0] * mesh.size  # one machine
    assert nodes_of_data(mesh, True) == [0] * mesh.size
    assert node_axes(mesh, True) is None
    even = mesh.size % 2 == 0 and mesh.size > 2
    assert nodes_of_data(mesh, 2) == ([rank // 2 for rank in range(mesh.size)] if even else [0] * mesh.size)
    axes = node_axes(mesh, 2)
    assert (axes is not None) == even
    if axes is not None:
        assert axes.within.members == [mesh.rank // 2 * 2, mesh.rank // 2 * 2 + 1]
        assert axes.across.members == list(range(mesh.rank % 2, mesh.size, 2))
        assert node_axes(mesh, 2) == axes
    if mesh.size == 8:
        with Mesh(comm, tensor=2) as halves:
            axes = node_axes(halves, 2)
            assert axes is not None
            first = mesh.rank // 4 * 4 + mesh.rank % 2
            assert axes.within.members == [first, first + 2]


def test_what_it_refuses(mesh):
    for wrong in (1, -2, 0.5, "2"):
        with pytest.raises(ValueError, match="hierarchical=.* must be True, False, or a number of ranks above 1"):
            ShardingConfiguration(mesh, hierarchical=wrong)
    with pytest.raises(ValueError, match="reproducible=True sums in one order"):
        ShardingConfiguration(mesh, hierarchical=True, reproducible=True)
