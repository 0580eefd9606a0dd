"""Device memory through pinned memory in pieces, or read by MPI itself: what arrives, overlaps and fails."""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from dataclasses import replace

import numpy as np
import pytest
import standin
from buffers import FORMS, late, lengths, numbers, read
from mpi4py import MPI

import mpishard
from mpishard.backend import array as arrays
from mpishard.backend import streams
from mpishard.comm import capabilities, staging
from mpishard.comm.call_matching import CollectiveMismatchError
from mpishard.comm.deferred import DEFERRED, flush

# What each collective does of device memory, in pieces and by MPI itself, is in `test_collectives.py`.


@pytest.fixture(params=FORMS)
def call(request):
    return FORMS[request.param]


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


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.pairs
def test_the_bits_are_those_of_host_arrays(mesh, call, op, dtype):
    axis = mesh.data
    values = np.random.default_rng(axis.rank).standard_normal(1001).astype(dtype)
    host = call(axis, op, values.copy())
    assert np.array_equal(read(call(axis, op, late(values)))[: host.size].view(np.uint8), host.view(np.uint8))


# -- both kinds of memory in one call ----------------------------------------------------------------------------------


def content(array):
    return read(array) if arrays.is_device(array) else array


@pytest.fixture
def place(mesh, standin_kind):
    """Puts values in a new buffer: on the device for ranks of odd numbers, on the host for the others."""
    return (lambda values: late(values, standin_kind)) if mesh.rank % 2 else np.copy


@pytest.mark.mpi(min_size=2)
@pytest.mark.usefixtures("without_debug")
def test_ranks_may_differ_in_their_kind_of_memory_for_one_piece(mesh, call, place):
    axis, size = mesh.data, 7 * mesh.size
    parts = [numbers(rank, size) for rank in range(axis.size)]
    mine, total, own = parts[axis.rank], sum(parts), slice(7 * axis.rank, 7 * axis.rank + 7)
    assert np.array_equal(content(call(axis, "all_reduce", place(mine))), total)
    assert np.array_equal(content(call(axis, "reduce_scatter", place(mine))), total[own])
    assert np.array_equal(content(call(axis, "all_gather", place(np.zeros(size)), place(total[own]))), total)
    assert np.array_equal(content(call(axis, "broadcast", place(mine), axis.size - 1)), parts[-1])


@pytest.mark.parametrize("exchanged", [range(0), range(2**62)])
@pytest.mark.parametrize("on_device", [0, 1])
@pytest.mark.pairs
def test_one_buffer_of_a_rank_may_be_on_the_host_and_the_other_on_the_device(
    mesh, call, standin_kind, exchanged, on_device, exchange
):
    exchange(exchanged)
    axis, size = mesh.data, 7 * mesh.size
    parts = [numbers(rank, size) for rank in range(axis.size)]
    mine, total, own = parts[axis.rank], sum(parts), slice(7 * axis.rank, 7 * axis.rank + 7)
    for name, given, expected in (
        ("all_reduce", (mine, np.zeros(size)), total),
        ("all_gather", (np.zeros(size), total[own]), total),
        ("reduce_scatter", (mine, np.zeros(7)), total[own]),
    ):
        buffers = [late(each, standin_kind) if place == on_device else each.copy() for place, each in enumerate(given)]
        assert np.array_equal(content(call(axis, name, *buffers)), expected)


@pytest.mark.mpi(min_size=2)
@pytest.mark.usefixtures("small_pieces")
def test_ranks_may_differ_in_their_kind_of_memory_in_messages_and_all_to_all(mesh, call, place):
    axis = mesh.data
    to, source = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    pending, received = axis.start_send(place(numbers(axis.rank, 50)), to), place(np.zeros(50))
    assert np.array_equal(content(call(axis, "recv", received, source)), numbers(source, 50))
    pending.wait()
    out = place(np.zeros(20 * axis.size))
    call(axis, "all_to_all", place(np.full(20 * axis.size, axis.rank + 0.0)), out)
    assert np.array_equal(content(out), np.repeat(np.arange(axis.size), 20))


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
        assert "buffers.py" in mesh.ledger.recent[-1].call.site  # where `FORMS` are
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


# Calls of device memory that are abandoned or fail leave nothing behind.


@pytest.mark.usefixtures("small_pieces")
def test_abandoned_calls_leave_nothing_behind(mesh, standin_kind):
    axis = mesh.data
    values = [late(np.ones(30), standin_kind) for _ in range(3)]
    refs = [weakref.ref(each._memory) for each in values]
    pending = [axis.start_all_reduce(each) for each in values]
    pending[0].test()
    for each in reversed(pending):
        each.abandon()
        each.abandon()
    assert not DEFERRED.waiting and not DEFERRED._begun
    del values, pending, each
    gc.collect()
    standin.current_stream().synchronize()
    assert all(ref() is None for ref in refs)
    assert (read(axis.start_all_reduce(late(np.ones(30), standin_kind)).wait()) == axis.size).all()


class Revoked:
    """A communicator after `Revoke`."""

    def __getattr__(self, name):
        raise MPI.Exception(MPI.ERR_OTHER)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("then", ["wait", "abandon"])
def test_calls_on_a_revoked_axis_fail_alone(mesh, monkeypatch, then, standin_kind):
    """Other calls that begin them raise nothing."""
    axis = mesh.data
    with monkeypatch.context() as patch:
        for owner in (axis._started, axis._started._staged):
            patch.setattr(owner, "_comm", Revoked())
        pending = axis.start_all_reduce(late(np.ones(30), standin_kind))
        mesh.world.barrier()
        assert not DEFERRED.waiting and mesh.ledger.active is None
    if then == "wait":
        with pytest.raises(MPI.Exception):
            pending.test()
        with pytest.raises(MPI.Exception):
            pending.wait()
    pending.abandon()
    assert mesh.ledger.active is None and not DEFERRED._begun
    assert (read(axis.all_reduce(late(np.ones(30), standin_kind))) == axis.size).all()


@pytest.mark.usefixtures("small_pieces")
def test_a_blocking_call_that_fails_leaves_no_copy_under_way(mesh, monkeypatch):
    axis, values = mesh.data, late(np.ones(30))
    pool = streams.copy_streams(values).pinned
    axis.all_reduce(values)
    standin.current_stream().synchronize()
    kept = pool.kept_bytes
    with monkeypatch.context() as patch:
        patch.setattr(axis._blocking._staged, "_comm", Revoked())
        with pytest.raises(MPI.Exception):
            axis.all_reduce(values)
    assert not streams.copy_streams(values).out.queue and pool.kept_bytes == kept
    assert mesh.ledger.active is None


def test_a_trial_of_device_memory_that_fails_on_one_rank_decides_for_all_of_its_mesh(comm, monkeypatch):
    failing = [0]
    monkeypatch.setattr(capabilities, "claims_device_buffers", lambda: True)
    monkeypatch.setattr(capabilities, "device_count", lambda: 1)
    known = capabilities.probe()
    for module in (capabilities, staging):
        monkeypatch.setattr(
            module, "probe", lambda device=False: replace(known, device_buffers=comm.rank not in failing)
        )
    array, arrived = (standin.zeros(10, kind=standin.AwareArray) for _ in range(2))
    # A mesh of one rank that is made in between decides for itself.
    with mpishard.Mesh(comm) as mesh, mpishard.Mesh(MPI.COMM_SELF) as alone:
        axes = mesh.data, mesh.world, mesh.node, mesh.data.subgroup("part", range(mesh.size))
        assert all(each._is_staged(array) for axis in axes for each in (axis._blocking, axis._started))
        assert alone.data._blocking._is_staged(array) is (comm.rank == 0)
        array.fill(mesh.rank)
        send, recv = mesh.data.start_send(array, mesh.rank), mesh.data.start_recv(arrived, mesh.rank)
        assert isinstance(send, staging.StagedRequest) and isinstance(recv, staging.StagedRequest)
        assert np.all(arrays.to_host(recv.wait()) == mesh.rank)
        send.wait()
        assert np.all(arrays.to_host(mesh.data.all_reduce(array)) == sum(range(mesh.size)))
        failing.clear()
        mesh.release()
        mesh.rebind(comm.Dup())
        assert not mesh.data._blocking._is_staged(array)


# Calls of device memory in any order of starts and waits: no rank waits for ever.


@pytest.mark.mpi(min_size=2)
@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("blocks", ["barrier", "all_reduce", "allgather_object", "comm", "other mesh", "flush", "host"])
def test_a_rank_that_blocks_has_begun_what_it_has_started(mesh, comm, blocks, standin_kind):
    """One rank waits first and then comes to the blocking call, the others the other way round."""
    values = late(np.full(30, mesh.rank + 1.0), standin_kind)
    other = mpishard.Mesh(comm) if blocks == "other mesh" else mesh
    host = mesh.data.start_all_reduce(np.ones(3)) if blocks == "host" else None

    block = {
        "barrier": mesh.world.barrier,
        "other mesh": other.world.barrier,
        "all_reduce": lambda: mesh.world.all_reduce(np.ones(3)),
        "allgather_object": lambda: mesh.world.allgather_object(1),
        "comm": lambda: mesh.world.comm.Barrier(),
        "flush": lambda: (flush(), comm.Barrier()),
        "host": lambda: host.wait(),
    }[blocks]
    pending = mesh.data.start_all_reduce(values)
    if mesh.rank == mesh.size - 1:
        pending.wait()
    block()
    pending.wait()
    assert (read(values) == mesh.size * (mesh.size + 1) / 2).all()
    if other is not mesh:
        other.free()


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
        mine, total = parts[axis.rank], sum(parts)
        place = (lambda values: late(values, self.kind)) if on_device else np.copy
        cuts = lengths(size, axis.size, "even")
        own = slice(sum(cuts[: axis.rank]), sum(cuts[: axis.rank + 1]))
        if name == "message":
            send = axis.start_send(place(mine), (axis.rank + 1) % axis.size)
            receive = axis.start_recv(place(np.zeros(size)), (axis.rank - 1) % axis.size)
            self.pending += [(receive, parts[axis.rank - 1]), (send, None)]
            return
        given, expected = {
            "all_reduce": ((place(mine),), total),
            "reduce_scatter": ((place(mine),), total[own]),
            "all_gather": ((place(np.zeros(size)), place(total[own])), total),
            "broadcast": ((place(mine), axis.size - 1), parts[-1]),
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
            assert np.array_equal(content(found), expected)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.pairs(4)
def test_any_order_of_calls_and_waits(comm, standin_kind, seed):
    """Several axes, both kinds of memory, one rank late, each rank waits in an order of its own; debug mode or not."""
    with mpishard.Mesh(comm, tensor=2 if comm.size % 2 == 0 else 1, debug=seed % 3 == 0) as mesh:
        Program(mesh, seed, standin_kind).run(40)
        assert not DEFERRED.waiting and mesh.ledger.active is None


# Calls of device memory under way: what overlaps, what waits for what, and how long memory lives.


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
