"""Device memory through pinned memory in pieces, and read by MPI itself where MPI can: what arrives.

Never an old value, whatever is late.  Device memory and that of the host may meet in one call.
"""

from __future__ import annotations

import numpy as np
import pytest
import standin
from buffers import late, lengths, numbers, read
from mpi4py import MPI

import mpishard
from mpishard.comm import collectives
from mpishard.comm.call_matching import CollectiveMismatchError
from mpishard.comm.deferred import DEFERRED

SIZES = (0, 1, 7, 33, 210)  # of float64, of which a piece has 4

FORMS = {
    "blocking": lambda axis, name, *given, **options: getattr(axis, name)(*given, **options),
    "started": lambda axis, name, *given, **options: getattr(axis, f"start_{name}")(*given, **options).wait(),
}


@pytest.fixture(params=FORMS)
def call(request):
    return FORMS[request.param]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("dtype", ["float64", "int32", "float16", "bfloat16", "complex128"])
@pytest.mark.parametrize("op", ["sum", "max"])
def test_all_reduce(mesh, standin_kind, call, dtype, op):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    if op == "max" and dtype == "complex128":
        pytest.skip("complex numbers have no order")
    axis = mesh.data
    for size in SIZES:
        parts = [numbers(rank, size, dtype) for rank in range(axis.size)]
        expected = sum(parts) if op == "sum" else np.max(np.array(parts, np.float64), axis=0).astype(dtype)
        mine, out = late(parts[axis.rank], standin_kind), standin.empty((size,), dtype, kind=standin_kind)
        assert call(axis, "all_reduce", mine, out, op) is out
        assert np.array_equal(read(out), expected)
        assert np.array_equal(read(mine), parts[axis.rank])
        mine *= np.dtype(dtype).type(1)  # computed late once more
        assert call(axis, "all_reduce", mine, op=op) is mine
        assert np.array_equal(read(mine), expected)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("cut", ["even", "uneven"])
@pytest.mark.parametrize("dtype", ["float64", "float16"])
@pytest.mark.parametrize("exchanged", [range(0), range(2**62)])
def test_reduce_scatter_and_all_gather(mesh, standin_kind, call, cut, dtype, exchanged, monkeypatch):
    monkeypatch.setitem(collectives.EXCHANGED_BYTES, MPI.get_vendor()[0], exchanged)
    axis = mesh.data
    for size in SIZES:
        counts = lengths(size, axis.size, cut)
        own = slice(sum(counts[: axis.rank]), sum(counts[: axis.rank + 1]))
        parts = [numbers(rank, size, dtype) for rank in range(axis.size)]
        whole, piece = (
            late(parts[axis.rank], standin_kind),
            standin.empty((counts[axis.rank],), dtype, kind=standin_kind),
        )
        assert call(axis, "reduce_scatter", whole, piece, counts) is piece
        assert np.array_equal(read(piece), sum(parts)[own])
        assert np.array_equal(read(whole), parts[axis.rank])
        front = call(axis, "reduce_scatter", whole, counts=counts)  # which later pieces have yet to send
        assert np.array_equal(read(front), sum(parts)[own])
        in_its_place = late(parts[axis.rank], standin_kind)
        call(axis, "reduce_scatter", in_its_place, in_its_place[own], counts)
        assert np.array_equal(read(in_its_place[own]), sum(parts)[own])

        gathered = standin.empty((size,), dtype, kind=standin_kind)
        assert call(axis, "all_gather", gathered, late(sum(parts)[own], standin_kind), counts) is gathered
        assert np.array_equal(read(gathered), sum(parts))
        whole = np.full(size, 99, dtype)
        whole[own] = sum(parts)[own]
        whole = late(whole, standin_kind)
        assert call(axis, "all_gather", whole, counts=counts) is whole
        assert np.array_equal(read(whole), sum(parts))


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_all_to_all_and_broadcast(mesh, standin_kind, call, dtype):
    axis = mesh.data
    for size in SIZES:
        sent = [[(size + 3 * rank + to) % 5 for to in range(axis.size)] for rank in range(axis.size)]
        arriving = [sent[rank][axis.rank] for rank in range(axis.size)]
        values = [numbers(rank, sum(counts), dtype) for rank, counts in enumerate(sent)]
        runs = [np.split(each, np.cumsum(counts)[:-1])[axis.rank] for each, counts in zip(values, sent, strict=True)]
        out = standin.empty((sum(arriving),), dtype, kind=standin_kind)
        call(axis, "all_to_all", late(values[axis.rank], standin_kind), out, sent[axis.rank], arriving)
        assert np.array_equal(read(out), np.concatenate(runs))
        for root in range(axis.size):
            buffer = late(numbers(axis.rank, size, dtype), standin_kind)
            assert call(axis, "broadcast", buffer, root) is buffer
            assert np.array_equal(read(buffer), numbers(root, size, dtype))


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_messages(mesh, standin_kind, dtype):
    axis = mesh.data
    to, source = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    for size in SIZES:
        first, second = (standin.empty((size,), dtype, kind=standin_kind) for _ in range(2))
        receives = [axis.start_recv(first, source), axis.start_recv(second, source)]
        sends = [
            axis.start_send(late(numbers(axis.rank, size, dtype), standin_kind), to),
            axis.start_send(late(numbers(axis.rank + 9, size, dtype), standin_kind), to),
        ]
        assert receives[1].wait() is second and receives[0].wait() is first
        assert np.array_equal(read(first), numbers(source, size, dtype))
        assert np.array_equal(read(second), numbers(source + 9, size, dtype))
        for each in sends:
            each.wait()


@pytest.mark.mpi(min_size=2)
def test_a_message_of_the_host_does_not_overtake_one_of_the_device(mesh, standin_kind):
    axis = mesh.data
    if axis.rank == 0:
        sends = [axis.start_send(late(np.full(5, 1.0), standin_kind), 1), axis.start_send(np.full(5, 2.0), 1)]
        for each in reversed(sends):
            each.wait()
    if axis.rank == 1:
        host, device = np.zeros(5), standin.empty(5, kind=standin_kind)
        axis.recv(host, 0)
        axis.recv(device, 0)
        assert (host == 1).all() and (read(device) == 2).all()


@pytest.mark.mpi(min_size=2)
def test_a_message_that_is_too_short_is_an_error(mesh, standin_kind):
    axis = mesh.data
    if axis.rank == 0:
        axis.send(late(np.ones(3), standin_kind), 1)
    if axis.rank == 1:
        with pytest.raises(ValueError, match="sent 24 bytes to a buffer of 40"):
            axis.recv(standin.empty(5, kind=standin_kind), 0)


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_bits_are_those_of_host_arrays(mesh, call, op, dtype):
    axis = mesh.data
    values = np.random.default_rng(axis.rank).standard_normal(1001).astype(dtype)
    host = call(axis, op, values.copy())
    assert np.array_equal(read(call(axis, op, late(values)))[: host.size].view(np.uint8), host.view(np.uint8))


# -- both kinds of memory in one call ----------------------------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
@pytest.mark.usefixtures("without_debug")
def test_ranks_may_differ_in_their_kind_of_memory_for_one_piece(mesh, call, standin_kind):
    axis = mesh.data
    place, back = (lambda values: late(values, standin_kind), read) if axis.rank % 2 else (np.copy, lambda array: array)
    size = 7 * axis.size
    parts = [numbers(rank, size) for rank in range(axis.size)]
    own = slice(7 * axis.rank, 7 * axis.rank + 7)
    mine = parts[axis.rank]
    assert np.array_equal(back(call(axis, "all_reduce", place(mine))), sum(parts))
    assert np.array_equal(back(call(axis, "reduce_scatter", place(mine))), sum(parts)[own])
    assert np.array_equal(back(call(axis, "all_gather", place(np.zeros(size)), place(sum(parts)[own]))), sum(parts))
    assert np.array_equal(back(call(axis, "broadcast", place(mine), axis.size - 1)), parts[-1])


@pytest.mark.parametrize("exchanged", [range(0), range(2**62)])
def test_one_buffer_of_a_rank_may_be_on_the_host_and_the_other_on_the_device(
    mesh, call, standin_kind, exchanged, monkeypatch
):
    monkeypatch.setitem(collectives.EXCHANGED_BYTES, MPI.get_vendor()[0], exchanged)
    axis, size = mesh.data, 7 * mesh.size
    parts = [numbers(rank, size) for rank in range(axis.size)]
    mine, own = parts[axis.rank], slice(7 * axis.rank, 7 * axis.rank + 7)
    out = standin.empty(size, kind=standin_kind)
    assert np.array_equal(read(call(axis, "all_reduce", mine.copy(), out)), sum(parts))
    out = np.zeros(size)
    assert np.array_equal(call(axis, "all_reduce", late(mine, standin_kind), out), sum(parts))
    assert np.array_equal(call(axis, "all_gather", np.zeros(size), late(sum(parts)[own], standin_kind)), sum(parts))
    out = standin.empty(size, kind=standin_kind)
    assert np.array_equal(read(call(axis, "all_gather", out, sum(parts)[own])), sum(parts))
    assert np.array_equal(call(axis, "reduce_scatter", late(mine, standin_kind), np.zeros(7)), sum(parts)[own])
    out = late(np.zeros(7), standin_kind)
    assert np.array_equal(read(call(axis, "reduce_scatter", mine.copy(), out)), sum(parts)[own])


@pytest.mark.mpi(min_size=2)
@pytest.mark.usefixtures("small_pieces")
def test_ranks_may_differ_in_their_kind_of_memory_in_messages_and_all_to_all(mesh, call, standin_kind):
    axis = mesh.data
    place, back = (lambda values: late(values, standin_kind), read) if axis.rank % 2 else (np.copy, lambda array: array)
    to, source = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    pending, received = axis.start_send(place(numbers(axis.rank, 50)), to), place(np.zeros(50))
    assert np.array_equal(back(call(axis, "recv", received, source)), numbers(source, 50))
    pending.wait()
    out = place(np.zeros(20 * axis.size))
    call(axis, "all_to_all", place(np.full(20 * axis.size, axis.rank + 0.0)), out)
    assert np.array_equal(back(out), np.repeat(np.arange(axis.size), 20))


@pytest.mark.mpi(min_size=2)
@pytest.mark.usefixtures("small_pieces")
def test_debug_mode_says_that_ranks_differ_in_their_kind_of_memory(comm, call):
    with mpishard.Mesh(comm, debug=True) as mesh:
        buffer = np.ones(50) if mesh.rank == 0 else late(np.ones(50))
        with pytest.raises(CollectiveMismatchError, match="in pieces from device memory called at"):
            call(mesh.data, "all_reduce", buffer)
        assert (read(call(mesh.data, "all_reduce", late(np.ones(50)))) == mesh.size).all()


# -- the ledger --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_pieces")
def test_the_ledger_has_the_calls_of_host_arrays(mesh, standin_kind):
    axis, found = mesh.data, []
    for place in (np.copy, lambda values: late(values, standin_kind)):
        mesh.ledger.clear()
        for call in FORMS.values():
            call(axis, "all_reduce", place(np.ones(50)), label="a")
            call(axis, "reduce_scatter", place(np.ones(50)), label="b")
            call(axis, "all_gather", place(np.ones(50)), label="c")
            call(axis, "broadcast", place(np.ones(50)), label="d")
            call(axis, "all_to_all", place(np.ones(2 * axis.size)), place(np.ones(2 * axis.size)), label="e")
        totals = mesh.ledger.totals
        found.append({key: (total.calls, total.sent) for key, total in totals.items()})
        assert all(total.seconds > 0 for total in totals.values())
        assert "test_staging.py" in mesh.ledger.recent[-1].call.site
    assert found[0] == found[1] and mesh.ledger.active is None


@pytest.mark.usefixtures("small_pieces")
def test_the_ledger_shows_the_call_that_waits_for_the_device(mesh, monkeypatch, standin_kind):
    seen = []
    usual = DEFERRED.progress.__func__
    values = late(np.ones(30), standin_kind)
    for _ in range(5):
        values *= 1.0
    pending = mesh.data.start_all_reduce(values, label="slow")
    monkeypatch.setattr(type(DEFERRED), "progress", lambda self: seen.append(mesh.ledger.waiting) or usual(self))
    mesh.world.barrier()
    assert any(each is not None and each.label == "slow" and each.started for each in seen)
    pending.wait()
