"""Calls of device memory under way: what overlaps, what waits for what, and how long memory lives."""

from __future__ import annotations

import contextlib
import gc
import weakref

import numpy as np
import pytest
import standin
from buffers import late, read

from mpishard.backend import array as arrays
from mpishard.comm import staging
from mpishard.comm.deferred import DEFERRED


@pytest.fixture
def log(monkeypatch):
    """What is queued and called, in order."""
    entries = []

    def note(owner, name, word):
        usual = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given: entries.append(word) or usual(*given))

    note(standin.StandIn, "start_to_host", "out")
    note(standin.StandIn, "start_to_device", "back")
    note(staging.StagedRequest, "_start", "mpi")
    return entries


@pytest.fixture
def nothing_passes(monkeypatch):
    """Looking whether an event is over does not let its stream go on."""
    monkeypatch.setattr(standin.Event, "done", property(lambda self: self._stream.finished >= self._number))


@pytest.mark.usefixtures("small_pieces")
def test_a_blocking_call_copies_one_piece_while_mpi_has_another(mesh, log):
    mesh.data.all_reduce(late(np.ones(20)))
    assert log == ["out", "out", "mpi", "back", "out", "mpi", "back", "out", "mpi", "back", "out", *["mpi", "back"] * 2]


@pytest.mark.usefixtures("small_pieces", "nothing_passes")
def test_a_started_call_leaves_the_host_alone(mesh, log):
    """No wait at all for the computation, nor after MPI for the copies back."""
    values = late(np.full(18, mesh.rank + 1.0))
    stream = standin.current_stream()
    queued = len(stream.queue)
    pending = mesh.data.start_all_reduce(values)
    assert log == ["out"] * 5 and len(stream.queue) == queued
    assert not pending.test() and log == ["out"] * 5 and len(stream.queue) == queued
    pending._pieces[1].copied.synchronize()
    while "back" not in log:
        assert not pending.test()
    # Two pieces are through MPI while the device has yet to copy the third out.
    assert log[:6] == ["out"] * 5 + ["mpi"]
    assert not pending._pieces[2].copied.done
    pending._pieces[-1].copied.synchronize()
    pending.wait()
    assert log.count("mpi") == log.count("back") == 5
    assert not pending._back.done and stream.queue  # the current stream waits, the host has not
    assert (read(values) == mesh.size * (mesh.size + 1) / 2).all()


@pytest.mark.usefixtures("nothing_passes")
@pytest.mark.parametrize("standin_kind", [standin.AwareArray], indirect=True)
@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "messages"])
def test_a_started_call_by_device_pointers_returns_while_the_kernel_before_it_is_under_way(mesh, standin_kind, op):
    """And reads nothing before that kernel is done, nor writes what it has yet to overwrite."""
    axis, each = mesh.data, 5
    own, total = np.full(each * axis.size, axis.rank + 1.0), axis.size * (axis.size + 1) / 2
    by_rank = np.repeat(np.arange(axis.size) + 1.0, each)
    mine, out = late(own, standin_kind), late(np.zeros(each * axis.size), standin_kind)
    stream = standin.current_stream()
    queued = len(stream.queue)
    if op == "messages":
        source = (axis.rank - 1) % axis.size
        started = [axis.start_recv(out, source), axis.start_send(mine, (axis.rank + 1) % axis.size)]
        expected = np.full(each * axis.size, source + 1.0)
    else:
        given, expected = {
            "all_reduce": ((mine, out), np.full(each * axis.size, total)),
            "reduce_scatter": ((mine, out[:each]), np.full(each, total)),
            "all_gather": ((out, mine[:each]), by_rank),
            "all_to_all": ((mine, out), by_rank),
            "broadcast": ((mine, axis.size - 1), np.full(each * axis.size, float(axis.size))),
        }[op]
        started = [getattr(axis, f"start_{op}")(*given)]
    assert len(stream.queue) == queued
    assert not any(pending.test() for pending in started)
    assert len(stream.queue) == queued and len(DEFERRED.waiting) == len(started)
    stream.synchronize()
    found = [pending.wait() for pending in started]
    assert not DEFERRED.waiting
    assert np.array_equal(read(found[0]), expected)


@pytest.mark.usefixtures("small_pieces")
def test_a_result_is_there_for_the_stream_that_is_current_at_the_wait_and_for_that_at_the_start(mesh):
    values = late(np.full(18, 1.0))
    backend = arrays.backend_of(values)
    pending, other = mesh.data.start_all_reduce(values), backend.new_stream(values)
    with other:
        pending.wait()
        assert (read(values) == mesh.size).all()
    assert (read(mesh.data.start_all_reduce(values).wait()) == mesh.size**2).all()


@pytest.mark.usefixtures("small_pieces")
def test_streams_wait_where_the_device_of_the_buffer_is_the_current_one(mesh, monkeypatch):
    """CUDA has a default stream for each device, all under one name."""
    values, entered, seen = late(np.full(18, 1.0)), [], []
    backend, usual = arrays.backend_of(values), standin.Stream.wait_event

    @contextlib.contextmanager
    def on_device_of(like):
        entered.append(like)
        yield
        entered.pop()

    def wait_event(stream, event):
        if stream in (other, start):
            seen.append((stream, len(entered)))
        usual(stream, event)

    pending, other, start = mesh.data.start_all_reduce(values), backend.new_stream(values), standin.current_stream()
    monkeypatch.setattr(type(backend), "on_device_of", staticmethod(on_device_of))
    monkeypatch.setattr(standin.Stream, "wait_event", wait_event)
    with other:
        pending.wait()
    assert seen == [(other, 1), (start, 1)]
    assert (read(values) == mesh.size).all()


@pytest.mark.usefixtures("small_pieces")
def test_memory_lives_until_its_call_is_over_and_no_longer(mesh, standin_kind):
    axis = mesh.data
    gone = []

    def watched(values):
        array = late(values, standin_kind)
        gone.append(weakref.ref(array._memory))
        return array

    streams = standin.current_stream()
    piece = watched(np.full(9, axis.rank + 1.0))
    gathered, arrived = standin.empty(9 * axis.size, kind=standin_kind), watched(np.zeros(4))
    pending = [
        axis.start_all_gather(gathered, piece, [9] * axis.size),
        axis.start_send(watched(np.full(4, 7.0)), (axis.rank + 1) % axis.size),
        axis.start_recv(arrived, (axis.rank - 1) % axis.size),
    ]
    del piece
    gc.collect()
    streams.synchronize()
    assert all(ref() is not None for ref in gone)
    assert (read(pending[2].wait()) == 7).all()
    for each in pending:
        each.wait()
    assert np.array_equal(read(gathered), np.repeat(np.arange(1.0, axis.size + 1), 9))
    del arrived, pending, each
    standin.current_stream().synchronize()
    gc.collect()
    assert all(ref() is None for ref in gone)


@pytest.mark.usefixtures("small_pieces")
def test_a_request_that_nobody_holds_is_finished(mesh, standin_kind):
    values = late(np.full(18, 1.0), standin_kind)
    mesh.data.start_all_reduce(values)
    gc.collect()
    while DEFERRED.waiting or DEFERRED._begun:
        DEFERRED.progress()
    assert (read(values) == mesh.size).all()
