"""Collectives against their definition: all kinds of memory, paths, nodes, adjoints, the ledger."""

from __future__ import annotations

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from buffers import FORMS, lengths, numbers, uneven
from devices import KINDS_OVER_MPI, use_over_mpi
from steps import SPECS, gradients, start, train

from mpishard import AdamW, DDPOptimizer, FlatParameters, Mesh, ShardingConfiguration
from mpishard.backend import array as arrays
from mpishard.comm import collectives, staged_collectives
from mpishard.comm.agreement import gather_difference
from mpishard.launch.job_notes import ON_ALL_RANKS
from mpishard.reduction.hierarchical import node_axes, nodes_of_data

# Collectives against their definition: all kinds of memory, uneven pieces, adjoints, the ledger.

SIZES = (0, 1, 7, 57)
each_way = pytest.mark.parametrize("call", FORMS.values(), ids=FORMS)
each_exchange = pytest.mark.parametrize("exchanged", [range(0), range(2**62)])


class Memory:
    """How the tests make and read buffers, on the host or a device."""

    def __init__(self, device=None):
        self.device = device

    def buffer(self, values):
        if self.device is None:
            return values.copy()
        # The copy is queued behind a slow stream: it is only there once the stream has been waited for.
        array, staged = self.device.empty(values.shape, values.dtype), self.device.put(values)
        array[...] = staged
        return array

    def values(self, buffer):
        if self.device is None:
            return buffer
        # As a kernel sees it that is queued now, without waiting for anything before.
        seen = self.device.empty(buffer.shape, buffer.dtype)
        seen[...] = buffer
        return arrays.to_host(seen)


@pytest.fixture(params=["host", *KINDS_OVER_MPI, "standin in pieces", "aware in pieces"])
def memory(request, monkeypatch):
    kind, _, in_pieces = request.param.partition(" in ")
    if in_pieces:
        monkeypatch.setattr(staged_collectives, "PIECE_BYTES", 32)
    return Memory() if kind == "host" else Memory(use_over_mpi(kind, monkeypatch))


@pytest.fixture(params=["one call", "many parts"])
def axis(request, shared_mesh, monkeypatch):
    """The data axis; with a count limit of 5 elements it goes the way of buffers of more than 2**31."""
    if request.param == "many parts":
        for channel in (shared_mesh.data._channel, shared_mesh.data._channel_of_started):
            monkeypatch.setattr(channel, "largest_count", 5)
    return shared_mesh.data


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "float16", "complex128", ml_dtypes.bfloat16])
@pytest.mark.pairs
@pytest.mark.quick
def test_all_reduce(axis, memory, dtype):
    if dtype is ml_dtypes.bfloat16 and memory.device is not None and memory.device.name.startswith("cupy"):
        pytest.skip("CuPy has no such type")
    for size in SIZES:
        check_all_reduce(axis, memory, size, dtype)


def check_all_reduce(axis, memory, size, dtype):
    parts = [numbers(rank, size, dtype) for rank in range(axis.size)]
    found = {"sum": sum(parts)}
    if dtype != "complex128":  # which has no order
        found["max"] = np.max(np.array(parts, np.float64), axis=0).astype(dtype)
    for call in FORMS.values():
        for op, expected in found.items():
            mine, out = memory.buffer(parts[axis.rank]), memory.buffer(np.zeros_like(parts[0]))
            assert call(axis, "all_reduce", mine, out, op) is out
            assert np.array_equal(memory.values(out), expected)
            assert np.array_equal(memory.values(mine), parts[axis.rank])
            mine = memory.buffer(parts[axis.rank])
            assert call(axis, "all_reduce", mine, op=op) is mine
            assert np.array_equal(memory.values(mine), expected)


def unaligned(values):
    found = np.frombuffer(bytearray(b" " + values.tobytes()), np.uint8)[1:].view(values.dtype)
    assert not found.flags.aligned or not values.size
    return found


def test_buffers_that_are_not_aligned(shared_mesh):
    axis, memory = shared_mesh.data, Memory()
    memory.buffer = unaligned
    check_all_reduce(axis, memory, 7, "float64")
    mine = unaligned(numbers(axis.rank, 5))
    whole = axis.all_gather(unaligned(np.zeros(5 * axis.size)), mine, [5] * axis.size)
    assert np.array_equal(whole, np.concatenate([numbers(rank, 5) for rank in range(axis.size)]))
    for each in (mine, unaligned(numbers(axis.rank, 5, np.float16))):
        assert np.array_equal(axis.broadcast(each), numbers(0, 5))
    pending = axis.start_send(unaligned(numbers(axis.rank, 3)), (axis.rank + 1) % axis.size)
    source = (axis.rank - 1) % axis.size
    assert np.array_equal(axis.recv(unaligned(np.zeros(3)), source), numbers(source, 3))
    pending.wait()


@pytest.mark.parametrize(("op", "function"), [("min", np.min), ("prod", np.prod)])
def test_other_operations(axis, op, function):
    parts = [numbers(rank, 7) for rank in range(axis.size)]
    assert np.array_equal(axis.all_reduce(parts[axis.rank].copy(), op=op), function(parts, axis=0))


@pytest.mark.parametrize("cut", ["even", "uneven"])
@pytest.mark.parametrize("dtype", ["float64", "float16"])
@each_exchange
@pytest.mark.pairs
@pytest.mark.quick
def test_reduce_scatter_and_all_gather(axis, memory, cut, dtype, exchanged, exchange):
    exchange(exchanged)
    for size in SIZES:
        counts, cuts = None if cut == "even" else uneven(size, axis.size), lengths(size, axis.size, cut)
        own = slice(sum(cuts[: axis.rank]), sum(cuts[: axis.rank + 1]))
        parts = [numbers(rank, size, dtype) for rank in range(axis.size)]
        total = sum(parts)
        in_place = np.full(size, 99, dtype)
        in_place[own] = total[own]
        for call in FORMS.values():
            whole, piece = memory.buffer(parts[axis.rank]), memory.buffer(np.zeros_like(total[own]))
            assert call(axis, "reduce_scatter", whole, piece, counts) is piece
            assert np.array_equal(memory.values(piece), total[own])
            assert np.array_equal(memory.values(whole), parts[axis.rank])
            front = call(axis, "reduce_scatter", whole, counts=counts)  # which later pieces have yet to send
            assert np.array_equal(memory.values(front), total[own])
            gathered = memory.buffer(np.full(size, 99, dtype))
            assert call(axis, "all_gather", gathered, memory.buffer(total[own]), counts) is gathered
            assert np.array_equal(memory.values(gathered), total)
            whole = memory.buffer(in_place)
            assert call(axis, "all_gather", whole, counts=counts) is whole
            assert np.array_equal(memory.values(whole), total)


@pytest.mark.parametrize("dtype", ["float64", "float16"])
@pytest.mark.pairs
@pytest.mark.quick
def test_all_to_all(axis, memory, dtype):
    ranks = range(axis.size)
    for size in SIZES:
        counts = [[(size + 3 * rank + to) % 5 for to in ranks] for rank in ranks]
        values = [numbers(rank, sum(counts[rank]), dtype) for rank in ranks]
        runs = [np.split(values[rank], np.cumsum(counts[rank])[:-1])[axis.rank] for rank in ranks]
        arriving = [counts[rank][axis.rank] for rank in ranks]
        for call in FORMS.values():
            out = memory.buffer(np.zeros(sum(arriving), dtype))
            assert call(axis, "all_to_all", memory.buffer(values[axis.rank]), out, counts[axis.rank], arriving) is out
            assert np.array_equal(memory.values(out), np.concatenate(runs))


def test_all_to_all_may_leave_a_ranks_own_run_where_it_is(axis, memory):
    arriving = [0 if rank == axis.rank else 2 for rank in range(axis.size)]
    out, values = memory.buffer(np.zeros(sum(arriving))), memory.buffer(numbers(axis.rank, 2 * axis.size))
    axis.all_to_all(values, out, [2] * axis.size, arriving, keep_own=True)
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


@each_way
@pytest.mark.parametrize("first, out_first", [(0, 0), (0, 3), (3, 0)])
@pytest.mark.pairs
def test_the_buffers_of_a_call_may_overlap(axis, memory, call, first, out_first):
    for each in (0, 6):
        size = each * axis.size
        parts = [numbers(rank, size) for rank in range(axis.size)]
        own = slice(each * axis.rank, each * axis.rank + each)
        for name, expected in (("all_to_all", np.concatenate([x[own] for x in parts])), ("all_reduce", sum(parts))):
            whole = memory.buffer(values_of(parts[axis.rank], size + 3, first))
            out = whole[out_first : out_first + size]
            assert call(axis, name, whole[first : first + size], out) is out
            assert np.array_equal(memory.values(out), expected)
        assert call(axis, "all_reduce", out, out) is out
        assert np.array_equal(memory.values(out), axis.size * sum(parts))


@each_way
@pytest.mark.parametrize("each, last", [(3, 3), (0, 8), (3, 0), (0, 0)])
@pytest.mark.parametrize("place", ["own", "front", "between"])
@pytest.mark.pairs
def test_a_piece_may_lie_in_the_buffer_of_the_whole(axis, memory, call, each, last, place, exchange):
    counts = [each] * (axis.size - 1) + [last]
    size, start, count = sum(counts), each * axis.rank, counts[axis.rank]
    first = {"own": start, "front": 0, "between": min(1, size - count)}[place]
    whole = memory.buffer(values_of(numbers(axis.rank, count), size, first))
    assert call(axis, "all_gather", whole, whole[first : first + count], counts) is whole
    assert np.array_equal(memory.values(whole), np.concatenate([numbers(r, c) for r, c in enumerate(counts)]))
    parts = [numbers(rank, size) for rank in range(axis.size)]
    for exchanged in (range(0), range(2**62)):  # by the library, and as an exchange of pieces
        exchange(exchanged)
        whole = memory.buffer(parts[axis.rank])
        piece = whole[first : first + count]
        assert call(axis, "reduce_scatter", whole, piece, counts) is piece
        assert np.array_equal(memory.values(piece), sum(parts)[start : start + count])


@pytest.mark.parametrize("dtype", ["float64", "float16"])
@pytest.mark.pairs
@pytest.mark.quick
def test_broadcast_from_every_root(axis, memory, dtype):
    for root in range(axis.size):
        for size in SIZES:
            for call in FORMS.values():
                buffer = memory.buffer(numbers(axis.rank, 2 * size, dtype).reshape(2, size))
                assert call(axis, "broadcast", buffer, root) is buffer
                assert np.array_equal(memory.values(buffer), numbers(root, 2 * size, dtype).reshape(2, size))


@pytest.mark.parametrize("dtype", ["float64", "float16"])
@pytest.mark.pairs
@pytest.mark.quick
def test_messages_round_the_ring(axis, memory, dtype):
    to, source = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    for size in SIZES:
        first, second = (memory.buffer(np.zeros(size, dtype)) for _ in range(2))
        receives = [axis.start_recv(first, source), axis.start_recv(second, source)]
        sends = [axis.start_send(memory.buffer(numbers(axis.rank + each, size, dtype)), to) for each in (0, 9)]
        assert receives[1].wait() is second and receives[0].wait() is first
        assert np.array_equal(memory.values(first), numbers(source, size, dtype))
        assert np.array_equal(memory.values(second), numbers(source + 9, size, dtype))
        for each in sends:
            each.wait()


def test_waiting_twice_and_testing(mesh):
    pending = mesh.data.start_all_reduce(np.full(4, float(mesh.rank)))
    while not pending.test():
        pass
    for _ in range(2):
        assert np.array_equal(pending.wait(), np.full(4, mesh.size * (mesh.size - 1) / 2))
    assert mesh.ledger.totals["data", "all_reduce", ""].calls == 1


@pytest.mark.mpi(min_size=2)
def test_testing_a_receive(mesh):
    pending = mesh.data.start_recv(np.zeros(4), (mesh.rank - 1) % mesh.size)
    assert not pending.test()
    mesh.data.barrier()
    mesh.data.send(np.ones(4), (mesh.rank + 1) % mesh.size)
    while not pending.test():
        pass
    assert (pending.wait() == 1).all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.quick
def test_adjoints(shared_mesh, size):
    """<A x, y> = <x, A' y> for every collective, with exact arithmetic."""
    axis = shared_mesh.data
    cuts = lengths(size, axis.size, "even")
    whole_x, whole_y = numbers(axis.rank, size), numbers(axis.rank + 100, size)
    piece_x, piece_y = numbers(axis.rank + 200, cuts[axis.rank]), numbers(axis.rank + 300, cuts[axis.rank])

    def dot(x, y):
        """<x, y> over the ranks, each holding its part."""
        return axis.comm.allreduce(float(np.dot(x, y)))

    assert dot(axis.all_reduce(whole_x.copy()), whole_y) == dot(whole_x, axis.all_reduce(whole_y.copy()))
    gathered = axis.all_gather(np.zeros(size), piece_x)
    assert dot(gathered, whole_y) == dot(piece_x, axis.reduce_scatter(whole_y.copy()))
    scattered = axis.reduce_scatter(whole_x.copy())
    assert dot(scattered, piece_y) == dot(whole_x, axis.all_gather(np.zeros(size), piece_y))

    counts = [(axis.rank + to) % 3 for to in range(axis.size)]  # symmetric, so it is its own transpose
    x, y = numbers(axis.rank + 400, sum(counts)), numbers(axis.rank + 500, sum(counts))
    forth, back = (axis.all_to_all(each, np.zeros_like(each), counts, counts) for each in (x, y))
    assert dot(forth, y) == dot(x, back)

    root = axis.size - 1
    sent = axis.broadcast(whole_x.copy(), root)
    assert dot(sent, whole_y) == dot(whole_x, axis.all_reduce(whole_y.copy()) * (axis.rank == root))


@pytest.mark.parametrize("size", [1, 8, 57, 840])
def test_ledger_bytes_are_those_of_the_ring(mesh, size):
    axis, n = mesh.data, mesh.size
    axis.all_reduce(np.zeros(size, np.float32), label="a")
    axis.start_all_reduce(np.zeros(size, np.float32), label="b").wait()
    axis.reduce_scatter(np.zeros(size, np.float32), label="c")
    axis.all_gather(np.zeros(size, np.float32), label="d")
    for label, of_each in {"a": 8, "b": 8, "c": 4, "d": 4}.items():
        sent = mesh.ledger.sent(label=label)
        assert sum(axis.comm.allgather(sent)) == of_each * (n - 1) * size
        assert size % n or sent * n == of_each * (n - 1) * size
    entry = mesh.ledger.recent[-1]
    assert (entry.call.op, entry.call.elements, entry.call.axis, entry.call.sequence) == ("all_gather", size, "data", 3)
    assert "test_collectives.py" in entry.call.site and entry.seconds >= 0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda axis: axis.start_all_reduce(np.zeros(4)[::2]), ValueError, "contiguous"),
        (lambda axis: axis.all_reduce([1.0]), TypeError, "array, got list$"),
        (lambda axis: axis.broadcast(SimpleNamespace(numpy=list)), TypeError, "got SimpleNamespace; pass its numpy"),
        (lambda axis: axis.all_reduce(np.zeros((4, 4))[:, :2]), ValueError, "contiguous"),
        (lambda axis: axis.all_reduce(np.zeros(3), np.zeros(4)), ValueError, r"\(3,\) and float64 \(4,\)"),
        (lambda axis: axis.reduce_scatter(np.zeros(3), counts=[9] * axis.size), ValueError, "do not cut a buffer of 3"),
        (lambda axis: axis.all_gather(np.zeros(3), np.zeros(99)), ValueError, "piece .*got 99"),
        (lambda axis: axis.broadcast(np.zeros(3), 99), ValueError, "from rank 99"),
        (lambda axis: axis.all_to_all(np.zeros(3), np.zeros(3, np.float32)), TypeError, "need one dtype"),
        (lambda axis: axis.all_reduce(np.zeros(3), op="mean"), ValueError, "sum, max, min, prod, got 'mean'"),
        (lambda axis: axis.broadcast(np.zeros(3, object)), TypeError, "numbers, got one of object"),
        (lambda axis: axis.all_reduce(np.zeros(3, bool)), TypeError, r"'sum' for bool; .*view\(numpy.uint8\)"),
        (lambda axis: axis.all_reduce(np.zeros(3, complex), op="max"), TypeError, "'max' for complex128"),
        (lambda axis: axis.send(np.zeros(3), 99), ValueError, "send names rank 99"),
        (lambda axis: axis.recv(np.zeros(3), 99), ValueError, "recv names rank 99"),
        (lambda axis: axis.send(np.zeros(3), 0, -5), ValueError, r"tag=-5"),
        (lambda axis: axis.recv(np.zeros(3), 0, -5), ValueError, r"tag=-5"),
        (lambda axis: axis.subgroup("s", [0, 99]), ValueError, r"ranks=\[0, 99\]"),
        (lambda axis: axis.subgroup("s", [0, 0]), ValueError, r"ranks=\[0, 0\]"),
        (lambda axis: axis.subgroup("s", 5), TypeError, "ranks=5"),
        (lambda axis: axis.raise_if_any("text"), TypeError, "got 'text'"),
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
    assert getattr(found.value, ON_ALL_RANKS, 0) == (mesh.size == 1)


@pytest.mark.mpi(min_size=3)
def test_other_ranks_name_the_rank_of_the_mesh_that_has_failed(mesh):
    last, problem = mesh.size - 1, None
    part = mesh.world.subgroup("part", range(1, mesh.size))
    if part is not None:
        with pytest.raises(ValueError, match="bad lunch") as found:
            part.raise_if_any(ValueError("bad lunch") if mesh.rank == last else None)
        problem = found.value
    with pytest.raises(ValueError, match="bad lunch") as found:
        mesh.world.raise_if_any(problem)
    assert str(found.value) == ("bad lunch" if mesh.rank == last else f"rank {last}: bad lunch")


def test_an_error_that_all_ranks_have_alike_is_known_for_one(mesh):
    for text, alike in (("bad lunch", True), (f"bad lunch on rank {mesh.rank}", mesh.size == 1)):
        with pytest.raises(ValueError, match=text) as found:
            mesh.world.raise_if_any(ValueError(text))
        assert getattr(found.value, ON_ALL_RANKS, 0) == mesh.size * alike
    with pytest.raises(ValueError, match="same settings") as found:
        raise gather_difference(mesh.world, {"lr": str(mesh.rank)})
    assert getattr(found.value, ON_ALL_RANKS) == mesh.size


each_kind = pytest.mark.parametrize("memory", ["host", "standin", "aware"], indirect=True)


@pytest.mark.mpi(min_size=2)
@pytest.mark.usefixtures("without_debug")
@each_kind
@pytest.mark.quick
def test_a_blocking_call_may_come_before_or_after_a_started_one(mesh, memory):
    axis = mesh.data
    one, two = memory.buffer(np.ones(1000)), memory.buffer(np.ones(3))
    if axis.rank == 0:
        pending = axis.start_all_reduce(one)
        axis.all_reduce(two)
    else:
        axis.all_reduce(two)
        pending = axis.start_all_reduce(one)
    assert (memory.values(pending.wait()) == axis.size).all() and (memory.values(two) == axis.size).all()


@pytest.mark.mpi(min_size=2)
@each_kind
def test_a_message_that_is_too_short_is_an_error(mesh, memory):
    axis = mesh.data
    if axis.rank == 0:
        axis.send(memory.buffer(np.ones(3)), 1)
    if axis.rank == 1:
        with pytest.raises(ValueError, match="24 bytes .*40"):
            axis.recv(memory.buffer(np.zeros(5)), 0)


# A collective by MPI's function, as an exchange of pieces, or on the fast path, which ranks need not all take.


ODD = {
    "unaligned": unaligned,
    "a part of another": lambda values: np.append(7.0, values)[1:],
    "a subclass": lambda values: values.view(np.recarray),
    "not in place": lambda values: values,
    "cut by default": lambda values: values,
}


@pytest.mark.mpi(min_size=2)
@each_exchange
@pytest.mark.parametrize("each_has, odd_has", [(4, 4), (4, 0), (0, 9)])
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.pairs
def test_one_rank_has_another_kind_of_buffer(shared_mesh, exchange, monkeypatch, odd, each_has, odd_has, exchanged):
    """Ranks in one collective need not prepare it alike, nor all take its fast path."""
    if odd == "cut by default" and each_has != odd_has:
        pytest.skip("cut otherwise")
    axis, ranks, slow = shared_mesh.data, shared_mesh.data.size, []
    exchange(exchanged)
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
        in_place = not (is_odd and odd == "not in place")

        out = None if in_place else np.zeros(size)
        assert np.array_equal(axis.all_reduce(made(numbers(axis.rank, size)), out), total)
        out = None if in_place else np.zeros(counts[axis.rank])
        assert np.array_equal(axis.reduce_scatter(made(numbers(axis.rank, size)), out, cuts), total[own])
        whole = np.full(size, 99.0)
        whole[own] = total[own]
        assert np.array_equal(axis.all_gather(made(whole), None if in_place else total[own].copy(), cuts), total)

        fast = not is_odd or odd in ("a part of another", "cut by default")
        fast = fast and not shared_mesh.debug  # which looks at every call
        exchanges = bool(exchanged) and max(counts) * (ranks - 1) <= 2 * size
        assert slow == ["reduce_scatter"] * (exchanges or not fast) + ["all_gather"] * (not fast)


@pytest.mark.mpi(min_size=3)
def test_pieces_too_uneven_to_exchange(shared_mesh, exchange, monkeypatch):
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
            exchange(allowed)
            made.clear()
            piece = axis.reduce_scatter(numbers(axis.rank, size), counts=counts)
            assert np.array_equal(piece, sum(numbers(rank, size) for rank in range(ranks))[own])
            assert bool(made) == (exchanged and bool(allowed))


@pytest.mark.mpi(min_size=2)
def test_exchanges_under_way_share_no_memory_and_what_they_leave_is_used_again(shared_mesh, exchange, monkeypatch):
    axis = shared_mesh.data
    others, spare = axis.size - 1, []
    monkeypatch.setattr(axis._started, "_spare", spare)
    exchange(range(2**62))
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


# Sums by nodes: the same as over all ranks at once, with less between the nodes.

SIZE = 601


def sent(mesh, axis):
    """Bytes of gradients that this rank has sent on an axis, by the beginning of its name."""
    totals = mesh.ledger.summary().items()
    return sum(total["bytes"] for name, total in totals if name.startswith(axis) and "gradients" in name)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("nodes", [True, 2, 3, 4])
@pytest.mark.quick
def test_the_sum_is_the_same_to_the_last_bit(mesh, same_on_all, nodes, overlap):
    found = []
    options = {"overlap_communication": overlap, "minimum_parameter_group_size": 10, "max_gradient_norm": 0.5}
    for hierarchical in (False, nodes):
        config = ShardingConfiguration(mesh, hierarchical=hierarchical, **options)
        flat = start(sum(spec.size for spec in SPECS))
        optimizer = DDPOptimizer(AdamW(lr=0.1), config)
        optimizer.bind(FlatParameters.over(flat, SPECS))
        found.append(train(optimizer, flat).tobytes())
        by_nodes = isinstance(hierarchical, int) and hierarchical > 1 and mesh.size % hierarchical == 0
        assert (sent(mesh, "data across nodes") > 0) == (by_nodes and mesh.size > hierarchical)
    assert found[0] == found[1]
    assert same_on_all(found)


@pytest.mark.quick
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
        with pytest.raises(ValueError, match="hierarchical=.*above 1"):
            ShardingConfiguration(mesh, hierarchical=wrong)
    for given in (np.int64(2), np.True_):
        assert ShardingConfiguration(mesh, hierarchical=given) == ShardingConfiguration(mesh, hierarchical=given.item())
    with pytest.raises(ValueError, match="reproducible=True"):
        ShardingConfiguration(mesh, hierarchical=True, reproducible=True)
