"""A collective by MPI's function, as an exchange of pieces, or on the fast path, which ranks need not all take."""

from __future__ import annotations

import numpy as np
import pytest
from buffers import numbers
from mpi4py import MPI

from mpishard.comm import collectives


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
