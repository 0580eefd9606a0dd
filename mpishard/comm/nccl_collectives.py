"""The collectives of an axis that uses NCCL: device buffers by NCCL where the ranks can, all others by MPI.

A call is queued on a separate stream behind what the current stream has to do, and `Request.wait` lets the current
stream wait for it. The host waits for nothing, so that the time which the ledger notes is that of queueing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
from mpi4py import MPI

from mpishard.backend import array as arrays
from mpishard.backend.kinds import backend_of
from mpishard.comm.capabilities import heals_in_place
from mpishard.comm.channel import OPS, Fields, Request
from mpishard.comm.collectives import Collectives, check_alike, check_piece
from mpishard.comm.ledger import Ledger, all_reduce_elements, ring_elements
from mpishard.comm.nccl import NcclLink
from mpishard.comm.nccl_queue import Event, NcclQueue, Stream, computes_with, starts
from mpishard.comm.staging import is_half

Array = Any
Counts = Sequence[int] | None


class NcclCollectives:
    """The methods of `Collectives`, for an axis of ``Mesh(collectives="nccl")``.

    `by_mpi` takes all that NCCL does not: buffers of the host, sums of dtypes that it does not know, and all buffers if
    the ranks cannot use it. All ranks must take one way in a call by what they all know, the dtype and the operation,
    so a buffer that is on the device of one rank is on the device of all; debug mode compares it. Half precision is
    summed in float32, as on MPI's way, and rounded once.
    """

    def __init__(self, by_mpi: Collectives, link: NcclLink, *, started: bool) -> None:
        self.by_mpi = by_mpi
        self.link = link
        self._started = started
        self._channel = by_mpi.channel
        self._channel.compares_memory = True
        # Asked of buffers of the host only.
        self.is_plain = by_mpi.is_plain
        self.is_plain_reduce_scatter = by_mpi.is_plain_reduce_scatter
        self.counts = by_mpi.counts
        self.gather = by_mpi.gather

    def all_reduce(self, buffer: Array, out: Array | None, op: str, label: str) -> Request:
        if not self._takes(buffer, op):
            return self.by_mpi.all_reduce(buffer, out, op, label)
        channel, queue = self._channel, self._queue
        call = channel.begin("all_reduce", buffer, label, op)
        queue.check("all_reduce", buffer)
        target = buffer if out is None else out
        check_alike(buffer, target)
        kept: list[Array] = [buffer, target]

        def work() -> None:
            source = self._widened(buffer, kept) if is_half(buffer.dtype) else buffer
            if source is not buffer:
                queue.all_reduce(source, source, op)
                target.reshape(-1)[...] = source
            else:
                in_place = self._is_at(buffer, target)
                queue.all_reduce(buffer if in_place else self._apart(buffer, target, kept), target, op)

        sent = all_reduce_elements(buffer.size, channel.size, channel.rank)
        return self._request(call, sent, buffer, work, target, kept)

    def reduce_scatter(self, buffer: Array, out: Array | None, counts: Counts, op: str, label: str) -> Request:
        """Start a reduce-scatter."""
        if not self._takes(buffer, op):
            return self.by_mpi.reduce_scatter(buffer, out, counts, op, label)
        channel, queue = self._channel, self._queue
        call = channel.begin("reduce_scatter", buffer, label, op, counts)
        queue.check("reduce_scatter", buffer)
        pieces = self.counts(buffer, counts)
        start, count = starts(pieces)[channel.rank], pieces[channel.rank]
        flat = buffer.reshape(-1)
        piece = flat[:count] if out is None else out
        check_piece(piece, count, buffer)
        kept: list[Array] = [flat, piece]

        def work() -> None:
            source = self._widened(flat, kept) if is_half(flat.dtype) else flat
            own = source[start : start + count]
            # NCCL writes into the piece's place in the source, or outside of the source.
            into = own
            if source is flat and (out is not None or start < count):
                into = piece.reshape(-1)
                if count and arrays.overlap(piece, flat) and not self._is_at(piece, own):
                    into = queue.empty(count, flat.dtype, flat)
                    kept.append(into)
            queue.reduce_scatter(source, into, pieces, op)
            if count and not self._is_at(into, piece):
                piece.reshape(-1)[...] = into

        sent = ring_elements("reduce_scatter", pieces, channel.rank)
        return self._request(call, sent, buffer, work, piece, kept)

    def all_gather(self, buffer: Array, piece: Array | None, counts: Counts, label: str) -> Request:
        if not self._takes(buffer):
            return self.by_mpi.all_gather(buffer, piece, counts, label)
        channel, queue = self._channel, self._queue
        call = channel.begin("all_gather", buffer, label, "", counts)
        queue.check("all_gather", buffer)
        pieces = self.counts(buffer, counts)
        start, count = starts(pieces)[channel.rank], pieces[channel.rank]
        flat = buffer.reshape(-1)
        own = flat[start : start + count]
        given = own if piece is None else piece
        check_piece(given, count, buffer)
        kept: list[Array] = [flat, given]

        def work() -> None:
            source = given
            if count and not self._is_at(given, own):
                source = self._apart(given, flat, kept)
            queue.all_gather(source, flat, pieces)

        sent = ring_elements("all_gather", pieces, channel.rank)
        return self._request(call, sent, buffer, work, buffer, kept)

    def all_to_all(
        self, buffer: Array, out: Array, counts: Counts, out_counts: Counts, keep_own: bool, label: str
    ) -> Request:
        if not self._takes(buffer):
            return self.by_mpi.all_to_all(buffer, out, counts, out_counts, keep_own, label)
        channel, queue = self._channel, self._queue
        call = channel.begin("all_to_all", buffer, label)
        queue.check("all_to_all", buffer)
        runs, arriving = (
            [slice(start, start + count) for start, count in zip(starts(each), each, strict=True)]
            for each in (self.counts(buffer, counts), self.counts(out, out_counts))
        )
        if buffer.dtype != out.dtype:
            raise TypeError(f"all_to_all from {buffer.dtype} to {out.dtype}; both buffers need one dtype")
        if keep_own:
            runs[channel.rank] = slice(0, 0)
        lengths = [run.stop - run.start for run in runs]
        kept: list[Array] = [buffer, out]

        def work() -> None:
            queue.all_to_all(self._apart(buffer, out, kept), out, runs, arriving)

        sent = ring_elements("all_to_all", lengths, channel.rank)
        return self._request(call, sent, buffer, work, out, kept)

    def broadcast(self, buffer: Array, root: int, label: str) -> Request:
        channel = self._channel
        if not 0 <= root < channel.size or not self._takes(buffer):
            return self.by_mpi.broadcast(buffer, root, label)
        queue = self._queue
        call = channel.begin("broadcast", buffer, label, f"root {root}")
        queue.check("broadcast", buffer)
        last = channel.rank == (root - 1) % channel.size
        sent = 0 if last else buffer.size
        return self._request(call, sent, buffer, lambda: queue.broadcast(buffer, root), buffer, [buffer])

    @property
    def _queue(self) -> NcclQueue:
        return self.link.queue(started=self._started)

    def _takes(self, buffer: Array, op: str | None = None) -> bool:
        """Return True if NCCL takes a call with this buffer; `op`: of a reduction.

        Collective at the first that it could.
        """
        if type(buffer) is np.ndarray or not arrays.is_device(buffer) or not buffer.flags.c_contiguous:
            return False
        if op is not None and (op not in OPS or not (computes_with(buffer.dtype) or is_half(buffer.dtype))):
            return False
        return self.link.carries(buffer)

    def _widened(self, flat: Array, kept: list[Array]) -> Array:
        """Queue a copy in float32."""
        wide = self._queue.empty(flat.size, np.float32, flat)
        wide[...] = flat.reshape(-1)
        kept.append(wide)
        return wide

    def _apart(self, source: Array, target: Array, kept: list[Array]) -> Array:
        """The source, or a copy where NCCL would write into it while it reads."""
        if not arrays.overlap(source, target):
            return source
        copy = self._queue.empty(source.size, source.dtype, source)
        copy[...] = source.reshape(-1)
        kept.append(copy)
        return copy

    def _is_at(self, one: Array, other: Array) -> bool:
        """Return True if two arrays of elements begin at one address."""
        backend = backend_of(one)
        return backend.address(one) == backend.address(other)

    def _request(
        self, call: Fields, sent: int, buffer: Array, work: Callable[[], None], result: Array, kept: list[Array]
    ) -> NcclRequest:
        queue, ledger = self._queue, self._channel.ledger
        event = queue.queue(buffer, work)
        stream = backend_of(buffer).current_stream(buffer)
        queued = _Queued(queue, self._channel.comm, self.link, event, buffer, stream)
        ledger.note_queued(call, partial(queue.is_over, event))
        return NcclRequest(ledger, call, sent * buffer.itemsize, queued, result, kept)


class _Queued:
    """A call that is queued, with the methods of an ``MPI.Request`` that `Request` uses."""

    def __init__(
        self, queue: NcclQueue, comm: MPI.Intracomm, link: NcclLink, event: Event, like: Array, stream: Stream
    ) -> None:
        self._queue, self._comm, self._link, self._event = queue, comm, link, event
        self._like, self._stream = like, stream

    def Test(self, status: object = None) -> bool:
        """Return True if the device has done it, or has failed."""
        return self._queue.is_over(self._event)

    def Wait(self, status: object = None) -> None:
        """Let the current stream wait for it, and that in which it was queued.

        Where others survive a death, the host waits too: NCCL does not report one, and kernels that wait for a dead
        rank would hold up all that waits for the device.
        """
        if heals_in_place() and not self._queue.aborted:
            self._wait_or_abort()
        if self._queue.aborted:
            raise MPI.Exception(MPI.ERR_REVOKED)
        self._queue.let_wait(self._like, self._event, self._stream)

    def _wait_or_abort(self) -> None:
        while not self.Test():
            time.sleep(0)  # other threads may run
            try:
                self._comm.Iprobe()  # fails if a rank has died, or somebody has revoked the axis
            except MPI.Exception:
                self._link.abort()
                raise

    def finish(self) -> None:
        """Wait until the device no longer uses the buffers; kernels of a communicator that was aborted end soon."""
        try:
            self._event.synchronize()
        except RuntimeError:  # of CUDA, where a device has failed
            pass


class NcclRequest(Request):
    """A `Request` of NCCL: its `wait` lets the current stream wait for the result, and the host does not.

    `wait` returns `result`; the device uses the arrays `read` until then.
    """

    def __init__(
        self, ledger: Ledger, call: Fields, sent: int, queued: _Queued, result: Array, read: Sequence[Array]
    ) -> None:
        super().__init__(ledger, call, sent, [cast(MPI.Request, queued)], lambda: result, read)
        self._queued = queued

    def abandon(self) -> None:
        """Wait until NCCL no longer uses the buffers, which it does not after `NcclLink.abort`."""
        self._queued.finish()
        self._call = None
