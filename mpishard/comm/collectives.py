"""The calls of MPI for each collective and each message: on the array or a copy of it, in one call or in parts.

First collectives, then messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from mpishard.backend import array as arrays
from mpishard.comm.capabilities import probe
from mpishard.comm.channel import OPS, Channel, Fields, Request
from mpishard.comm.deferred import DEFERRED
from mpishard.comm.ledger import all_reduce_elements, ring_elements
from mpishard.comm.staged_collectives import HostCalls, Runs, StagedCollectives
from mpishard.comm.staging import (
    DeferredRequest,
    StagedPiece,
    StagedRequest,
    from_wire,
    is_staged,
    wire_of,
)
from mpishard.layout.boxes import run_lengths, split, starts_of

Array = Any


Counts = Sequence[int] | None
# Bytes between which a reduce-scatter is an exchange of pieces and sums of our own, by MPI library.  Open MPI 5 reduces
# the whole buffer and scatters it: that sends 1.25 of what a ring does, and takes several times as long where the
# buffer does not fit the caches.  MPICH 5 takes 1.3 to 3.7 times as long for 200 to 400 kB, longer than for 1 MB; with
# the largest buffers it is as fast (`python benchmarks/reduce_scatter.py`).
EXCHANGED_BYTES: dict[str, range] = {"Open MPI": range(2**15, 2**62), "MPICH": range(2**17, 2**24)}
# Bytes from which a started all-reduce takes longer than a reduce-scatter and an all-gather, by MPI library: with
# Open MPI 5 up to twice as long, with MPICH not.
IN_PARTS_FROM: dict[str, int] = {"Open MPI": 2**20}
# Each axis keeps memory for arriving pieces up to this sum, and as much for started calls: new pages from the kernel
# can take longer than the exchange itself, and the C library asks for them each time.
_KEPT_BYTES = 2**24


class Collectives:
    """Starts each collective over a channel and returns its `Request`; `Communicator` says what the arguments are.

    Each collective is one call of MPI on all ranks, which depends on sizes alone: a rank chooses the fast path of
    `Communicator` by its own arguments, and MPI does not match a blocking collective with a non-blocking one. It is the
    non-blocking one for all but reductions: the blocking all-gather of MPICH 5 takes twice as long as the non-blocking
    one if pieces differ in size (1 MB and more, 2 and 4 ranks of one node), and a non-blocking all-reduce of Open MPI 5
    up to twice as long as the blocking one. Where its calls are `started`, a reduction too may still be under way when
    its method returns.

    Device memory that MPI reads itself is ready when MPI's calls begin: the host waits for that in a blocking call, and
    a `DeferredRequest` begins the others later. Its `reduce_scatter` is MPI's own, and that of NumPy arrays may be an
    exchange: a buffer for it is in device memory on all ranks or on none, and debug mode compares that.
    """

    def __init__(self, channel: Channel, *, started: bool) -> None:
        self.channel = channel
        self._comm = channel.comm
        self._is_started = started
        self._ledger = channel.ledger
        self._rank, self._size = channel.rank, channel.size
        self._staged = StagedCollectives(
            channel,
            HostCalls(self.gather, self._exchanges, self._start_exchange, self.exchange_runs),
            started=started,
        )
        self._spare: list[np.ndarray] = []  # memory for arriving pieces that no exchange is using, in bytes

    def is_plain(self, buffer: Array, op: str = "sum", counts: Counts = None) -> bool:
        """Return True if one call of MPI takes these arguments as they are, and no rank compares them."""
        channel = self.channel
        if type(buffer) is not np.ndarray or buffer.itemsize == 2 or not buffer.flags.carray or op not in OPS:
            return False
        if buffer.dtype.kind not in "iuf" or channel.is_freed:
            return False
        if channel.matching is not None or not channel.fits(buffer.size):
            return False
        return counts is None or self._fit(buffer, counts)

    def is_plain_reduce_scatter(self, buffer: Array, op: str, counts: Counts) -> bool:
        """Return True if these arguments are plain, and MPI's own reduce-scatter takes them."""
        return self.is_plain(buffer, op, counts) and not self._exchanges(buffer, op, self.counts(buffer, counts))

    def all_reduce(self, buffer: Array, out: Array | None, op: str, label: str) -> Request:
        channel = self.channel
        devices = _on_device(buffer, out)
        through_host, way = self._way("all_reduce", buffer, devices)
        call = channel.begin("all_reduce", buffer, label, op, **way)
        if through_host:
            if out is not None:
                check_alike(buffer, out)
            sent = all_reduce_elements(buffer.size, self._size, self._rank) * buffer.itemsize
            return self._staged.all_reduce(call, sent, buffer, buffer if out is None else out, op)
        if out is None or out is buffer:
            out = buffer
            target = wire_of(buffer, arithmetic=True)
            sources: list[Any] = [MPI.IN_PLACE for _ in channel.parts(target)]
        else:
            check_alike(buffer, out)
            target = wire_of(out, arithmetic=True)
            sources = channel.parts(_apart(wire_of(buffer, arithmetic=True), target))
        parts = list(zip(sources, channel.parts(target), strict=True))
        calls = [(source, part, OPS[op]) for source, part in parts]
        sent = all_reduce_elements(buffer.size, self._size, self._rank) * buffer.itemsize
        start = partial(self._calls, call, "allreduce", calls)
        return self._request(call, sent, start, lambda: from_wire(target, out), sources, devices)

    def reduce_scatter(self, buffer: Array, out: Array | None, counts: Counts, op: str, label: str) -> Request:
        """Start a reduce-scatter."""
        channel, rank = self.channel, self._rank
        devices = _on_device(buffer, out)
        through_host, way = self._way("reduce_scatter", buffer, devices)
        call = channel.begin("reduce_scatter", buffer, label, op, counts, **way)
        counts = self.counts(buffer, counts)
        sent = ring_elements("reduce_scatter", counts, rank) * buffer.itemsize
        if through_host:
            if out is None:
                out = buffer.reshape(-1)[: counts[rank]]
            check_piece(out, counts[rank], buffer)
            return self._staged.reduce_scatter(call, sent, buffer, out, counts, op)
        wire = wire_of(buffer, arithmetic=True)
        in_place = out is None
        if out is None:
            out = buffer.reshape(-1)[: counts[rank]]
            target = wire[: counts[rank]]
        else:
            check_piece(out, counts[rank], buffer)
            target = wire_of(out, arithmetic=True)
        if channel.fits(wire.size) and self._exchanges(wire, op, counts):
            total = np.empty(target.size, target.dtype) if devices else target  # `out` alone is on a device
            add: list[Callable[[], Array]] = []

            def exchange() -> list[MPI.Request]:
                request, then = self._start_exchange(wire, total, counts)
                add.append(then)
                return [request]

            return self._request(call, sent, exchange, lambda: from_wire(add.pop()(), out), [wire], devices)
        into = target
        if not in_place and (not target.size or arrays.overlap(wire, target)):
            into = arrays.empty(target.size, target.dtype, like=target)
        if channel.fits(wire.size):
            arguments = (MPI.IN_PLACE, wire) if in_place else (wire, into)
            start = partial(self._calls, call, "reduce_scatter", [(*arguments, counts, OPS[op])])
        else:
            start = partial(self._calls, call, "reduce", self._reductions(wire, into, counts, op, in_place))
            if in_place:
                first = starts_of(counts)[rank]
                into = wire[first : first + counts[rank]]

        def finish() -> Array:
            if into is not target:
                target[...] = _apart(into, target)
            return from_wire(target, out)

        return self._request(call, sent, start, finish, [wire], devices)

    def all_gather(self, buffer: Array, piece: Array | None, counts: Counts, label: str) -> Request:
        channel, rank = self.channel, self._rank
        devices = _on_device(buffer, piece)
        through_host, way = self._way("all_gather", buffer, devices)
        call = channel.begin("all_gather", buffer, label, "", counts, **way)
        counts = self.counts(buffer, counts)
        if piece is not None:
            check_piece(piece, counts[rank], buffer)
        sent = ring_elements("all_gather", counts, rank) * buffer.itemsize
        if through_host:
            return self._staged.all_gather(call, sent, buffer, piece, counts)
        starts = starts_of(counts)
        wire = wire_of(buffer)
        source: Any = MPI.IN_PLACE
        if piece is not None:
            source = _apart(wire_of(piece), wire)
        fits = channel.fits(wire.size)
        if not fits and piece is not None:
            wire[starts[rank] : starts[rank] + counts[rank]] = source

        def start() -> list[MPI.Request]:
            if fits:
                return [self.gather(source, wire, counts)]
            # Above the count limit the owner of each piece broadcasts it, in parts.
            return [
                self._comm.Ibcast(part, owner)
                for owner, first in enumerate(starts)
                for part in channel.parts(wire[first : first + counts[owner]])
            ]

        return self._request(call, sent, start, lambda: from_wire(wire, buffer), [source], devices)

    def gather(self, source: Any, buffer: Array, counts: Sequence[int]) -> MPI.Request:
        """MPI's call of an all-gather.

        With equal pieces MPICH 5 takes half as long for 64 to 256 kB as if their sizes could differ.
        """
        if min(counts) == max(counts):
            return self._comm.Iallgather(source, buffer)
        return self._comm.Iallgatherv(source, [buffer, (counts, None)])

    def all_to_all(
        self, buffer: Array, out: Array, counts: Counts, out_counts: Counts, keep_own: bool, label: str
    ) -> Request:
        devices = _on_device(buffer, out)
        through_host, way = self._way("all_to_all", buffer, devices)
        call = self.channel.begin("all_to_all", buffer, label, **way)
        counts, out_counts = self.counts(buffer, counts), self.counts(out, out_counts)
        if buffer.dtype != out.dtype:
            raise TypeError(f"all_to_all from {buffer.dtype} to {out.dtype}; both buffers need one dtype")
        starts, out_starts = starts_of(counts), starts_of(out_counts)
        if keep_own:
            counts[self._rank] = 0
        sent = ring_elements("all_to_all", counts, self._rank) * buffer.itemsize
        runs, arriving = (counts, starts), (out_counts, out_starts)
        fits = self._all_fit(call, max(buffer.size, out.size))
        if through_host:
            return self._staged.all_to_all(call, sent, buffer, out, runs, arriving, fits)
        target = wire_of(out)
        wire = _apart(wire_of(buffer), target)
        start = partial(self.exchange_runs, wire, target, runs, arriving, fits)
        return self._request(call, sent, start, lambda: from_wire(target, out), [wire], devices)

    def exchange_runs(self, wire: Array, target: Array, runs: Runs, arriving: Runs, fits: bool) -> list[MPI.Request]:
        """MPI's calls of an all-to-all; `fits`: whether one takes the buffers of all ranks."""
        comm, parts = self._comm, self.channel.parts
        if fits:
            buffers = [_own_if_empty(each) for each in (wire, target)]
            return [comm.Ialltoallv([buffers[0], runs], [buffers[1], arriving])]
        requests = []
        for rank, (count, start) in enumerate(zip(*arriving, strict=True)):
            requests += [comm.Irecv(part, rank) for part in parts(target[start : start + count])]
        for rank, (count, start) in enumerate(zip(*runs, strict=True)):
            requests += [comm.Isend(part, rank) for part in parts(wire[start : start + count])]
        return requests

    def broadcast(self, buffer: Array, root: int, label: str) -> Request:
        channel = self.channel
        if not 0 <= root < self._size:
            raise ValueError(f"broadcast from rank {root} of axis {channel.name!r}, which has {self._size} ranks")
        devices = _on_device(buffer)
        through_host, way = self._way("broadcast", buffer, devices)
        call = channel.begin("broadcast", buffer, label, f"root {root}", **way)
        last = self._rank == (root - 1) % self._size
        sent = 0 if last else buffer.nbytes
        if through_host:
            return self._staged.broadcast(call, sent, buffer, root)
        wire = wire_of(buffer)

        def start() -> list[MPI.Request]:
            return [self._comm.Ibcast(part, root) for part in channel.parts(wire)]

        return self._request(call, sent, start, lambda: from_wire(wire, buffer), [], devices)

    def _defers(self, devices: Sequence[Array]) -> bool:
        """Return True if a call with these buffers in device memory goes to the queue of `mpishard.comm.deferred`."""
        return self._is_started and bool(devices)

    def _request(
        self,
        call: Fields,
        sent: int,
        start: Callable[[], Sequence[MPI.Request]],
        finish: Callable[[], Array],
        read: Sequence[Array],
        devices: Sequence[Array],
    ) -> Request:
        """The request of MPI's calls, which `start` makes when the buffers in device memory are ready."""
        if self._defers(devices):
            request: Request = DeferredRequest(self._ledger, call, sent, start, finish, read, devices)
        else:
            for each in devices:
                arrays.ready(each)
            request = Request(self._ledger, call, sent, start(), finish, read)
        if self._is_started and self._size > 1:
            self.channel.note_started(request)
        return request

    def _is_staged(self, *buffers: Array) -> bool:
        return is_staged(*buffers, withheld=self.channel.withholds_device_buffers)

    def _way(self, op: str, buffer: Array, devices: Sequence[Array]) -> tuple[bool, dict[str, Any]]:
        """Return True if a call goes through host memory, and what `Channel.begin` has to know of its way."""
        through_host = bool(devices) and self._is_staged(*devices)
        form = ""
        if through_host and op != "all_to_all" and arrays.is_array(buffer) and self._staged.in_pieces(buffer):
            form = "in pieces from device memory"
        elif not through_host and op == "reduce_scatter" and arrays.is_device(buffer):
            form = "by device pointers"  # for NumPy arrays it may be an exchange
        return through_host, {"deferred": self._defers(devices), "form": form}

    def _calls(self, call: Fields, name: str, calls: Sequence[tuple[Any, ...]]) -> list[MPI.Request]:
        """Make MPI's calls of this name with these arguments; returns what is still under way."""
        if self._is_started:
            function = getattr(self._comm, f"I{name}")
            return [function(*arguments) for arguments in calls]
        function = getattr(self._comm, name.capitalize())
        self._ledger.active = call
        try:
            for arguments in calls:
                function(*arguments)
        finally:
            self._ledger.active = None
        return []

    def _exchanges(self, wire: Array, op: str, counts: Sequence[int]) -> bool:
        """Return True if a reduce-scatter is an exchange of pieces; the same on all ranks."""
        if self._size == 1 or op != "sum" or arrays.is_device(wire):
            return False
        # What arrives at the owner of the largest piece, which needs memory for it.
        most = max(counts) * (self._size - 1)
        if most > 2 * wire.size or not self.channel.fits(most):
            return False
        return wire.nbytes in EXCHANGED_BYTES.get(probe().library, ())

    def _start_exchange(
        self, wire: Array, target: Array, counts: Sequence[int]
    ) -> tuple[MPI.Request, Callable[[], Array]]:
        """Start to send each rank its piece; the function that is returned then adds up this rank's in `target`."""
        starts, rank, count = starts_of(counts), self._rank, counts[self._rank]
        own = wire[starts[rank] : starts[rank] + count]
        sent, arriving = list(counts), [count] * self._size
        sent[rank] = arriving[rank] = 0
        size = count * (self._size - 1) * wire.itemsize
        memory = self._memory(size)
        received = memory[:size].view(wire.dtype)
        exchange = self._comm.Ialltoallv([wire, (sent, starts)], [received, (arriving, starts_of(arriving))])

        def add() -> Array:
            total = own
            for start in range(0, received.size, max(count, 1)):
                total = np.add(total, received[start : start + count], out=target)
            if memory.size + sum(each.size for each in self._spare) <= _KEPT_BYTES:
                self._spare.append(memory)
            return target

        return exchange, add

    def _memory(self, size: int) -> np.ndarray:
        """At least `size` bytes, which no other exchange is using."""
        self._spare.sort(key=len)
        for index, memory in enumerate(self._spare):
            if memory.size >= size:
                return self._spare.pop(index)
        if self._spare and size <= _KEPT_BYTES:
            self._spare.pop()  # makes room
        return np.empty(size, np.uint8)

    def _reductions(
        self, wire: Array, into: Array, counts: Sequence[int], op: str, in_place: bool
    ) -> list[tuple[Any, ...]]:
        """The reductions of a reduce_scatter above the count limit: of each piece to its owner, in parts."""
        calls: list[tuple[Any, ...]] = []
        for owner, (first, count) in enumerate(zip(starts_of(counts), counts, strict=True)):
            sources: list[Any] = self.channel.parts(wire[first : first + count])
            targets: list[Any] = [None] * len(sources)
            if owner == self._rank and in_place:
                sources, targets = [MPI.IN_PLACE] * len(sources), sources
            elif owner == self._rank:
                targets = self.channel.parts(into)
            calls += [(*buffers, OPS[op], owner) for buffers in zip(sources, targets, strict=True)]
        return calls

    def _all_fit(self, call: Fields, count: int) -> bool:
        """Return True if the buffers of all ranks fit; for calls whose buffers differ in size between ranks.

        Collective.
        """
        if self.channel.largest_count is None:
            return True
        if DEFERRED.waiting:
            DEFERRED.flush()
        largest = np.array([count], np.int64)
        self._ledger.active = call
        try:
            self._comm.Allreduce(MPI.IN_PLACE, largest, MPI.MAX)
        finally:
            self._ledger.active = None
        return self.channel.fits(int(largest[0]))

    def counts(self, buffer: Array, counts: Counts) -> list[int]:
        """The elements of the piece of each rank; not collective, ValueError if they do not cut `buffer`."""
        if counts is None:
            return run_lengths(split(buffer.size, self._size))
        if not self._fit(buffer, counts):
            raise ValueError(
                f"counts {list(counts)} do not cut a buffer of {buffer.size} elements "
                f"for the {self._size} ranks of axis {self.channel.name!r}"
            )
        return list(counts)

    def _fit(self, buffer: Array, counts: Sequence[int]) -> bool:
        return len(counts) == self._size and sum(counts) == buffer.size and min(counts) >= 0


def is_faster_in_parts(buffer: Array, ranks: int) -> bool:
    """Return True if a reduce-scatter, and an all-gather later, shall take the place of a started all-reduce."""
    least = IN_PARTS_FROM.get(probe().library)
    return least is not None and buffer.nbytes >= least and ranks > 1 and not arrays.is_device(buffer)


def _on_device(*buffers: Array | None) -> list[Array]:
    """Those of the buffers of a call that are in device memory."""
    return [each for each in buffers if arrays.is_device(each)]


def _own_if_empty(buffer: Array) -> Array:
    """The buffer, or a new array in the place of an empty slice, which begins where its array does.

    MPICH refuses one address for two buffers, be they empty, and Open MPI 5 takes it as "in place".
    """
    return buffer if buffer.size else arrays.empty(0, buffer.dtype, like=buffer)


def _apart(source: Array, target: Array) -> Array:
    """The source, or a copy if it has memory of the target: neither MPI nor a copy of CUDA takes two that overlap."""
    return source.copy() if arrays.overlap(source, target) else _own_if_empty(source)


def check_alike(one: Array, other: Array) -> None:
    """Raise ValueError unless source and target have equal shapes and dtypes."""
    if one.shape != other.shape or one.dtype != other.dtype:
        raise ValueError(
            f"the two buffers differ: {one.dtype} {one.shape} and {other.dtype} {other.shape}; they must be the same"
        )


def check_piece(piece: Array, count: int, whole: Array) -> None:
    """Raise ValueError unless a piece has `count` elements, of the dtype of the whole."""
    if piece.size != count or piece.dtype != whole.dtype:
        raise ValueError(
            f"this rank's piece must have {count} elements of {whole.dtype}, got {piece.size} of {piece.dtype}"
        )


# A message of device memory is staged as one piece, unless MPI takes it: its other end may be in memory of the host.


class PointToPoint:
    """The messages over one channel; `Communicator` says what the arguments are.  Nothing here is collective."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def send(self, buffer: Array, to: int, tag: int, label: str) -> Request:
        channel = self._channel
        on_device = arrays.is_device(buffer)
        if tag < 0:
            raise ValueError(f"send(tag={tag}) must be at least 0")
        call = channel.begin("send", buffer, label, peer=to, deferred=on_device)
        if channel.matching is not None:
            channel.note_message("send", to, tag)

        def start(wire: Array) -> list[MPI.Request]:
            return [channel.comm.Isend(part, to, tag) for part in channel.parts(wire)]

        if on_device and self._is_staged(buffer):
            return self._staged(call, buffer.nbytes, buffer, StagedPiece(buffer.size, _whole(buffer), [], start))
        wire = wire_of(buffer)
        given = channel.ledger, call, buffer.nbytes
        if on_device:
            return DeferredRequest(*given, lambda: start(wire), lambda: buffer, [buffer], [buffer])
        return Request(*given, start(wire), lambda: buffer)

    def recv(self, buffer: Array, source: int, tag: int, label: str) -> Request:
        channel = self._channel
        on_device = arrays.is_device(buffer)
        if tag < 0 and tag != MPI.ANY_TAG:
            raise ValueError(f"recv(tag={tag}) must be at least 0, or MPI.ANY_TAG")
        call = channel.begin("recv", buffer, label, peer=source, deferred=on_device)
        if channel.matching is not None:
            channel.note_message("recv", source, tag)
        statuses: list[MPI.Status] = []

        def check() -> None:
            got = sum(status.Get_count(MPI.BYTE) for status in statuses)
            if got != buffer.nbytes:
                raise ValueError(f"rank {source} sent {got} bytes to a buffer of {buffer.nbytes}; sizes must agree")

        def start(wire: Array) -> list[MPI.Request]:
            requests = [channel.comm.Irecv(part, source, tag) for part in channel.parts(wire)]
            statuses.extend(MPI.Status() for _ in requests)
            return requests

        if on_device and self._is_staged(buffer):
            piece = StagedPiece(buffer.size, [], _whole(buffer), start, lambda _: check(), statuses)
            return self._staged(call, 0, buffer, piece)
        wire = wire_of(buffer)

        def finish() -> Array:
            check()
            return from_wire(wire, buffer)

        if on_device:
            return DeferredRequest(channel.ledger, call, 0, lambda: start(wire), finish, [buffer], [buffer], statuses)
        return Request(channel.ledger, call, 0, start(wire), finish, statuses=statuses)

    def _is_staged(self, buffer: Array) -> bool:
        return is_staged(buffer, withheld=self._channel.withholds_device_buffers)

    def _staged(self, call: Fields, sent: int, buffer: Array, piece: StagedPiece) -> StagedRequest:
        return StagedRequest(self._channel.ledger, call, sent, [piece], [buffer], buffer, started=True)

    def wait(self, request: Request, peer: int, tag: int) -> Array:
        """Finish a message to or from `peer`; in debug mode raise if both ends wait in calls that do not match."""
        self._channel.wait_for_message(request.call, peer, tag, request.test)
        return request.wait()


def _whole(buffer: Array) -> list[tuple[Array, int]]:
    return [(buffer.reshape(-1), 0)]
