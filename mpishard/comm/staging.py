"""How MPI gets the memory of an array.

The array itself where MPI can take it, else a widened or aligned copy, or pieces that travel through pinned memory of
the host.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mpi4py import MPI

from mpishard.backend import array as arrays
from mpishard.backend.kinds import Event, backend_of
from mpishard.backend.streams import Slab, copy_streams, record_current
from mpishard.comm.capabilities import probe
from mpishard.comm.channel import Fields, Request
from mpishard.comm.deferred import DEFERRED
from mpishard.comm.ledger import Ledger

Array = Any


# The buffer to hand to MPI for an array: the array itself where MPI can take it, else a widened or aligned copy.
#
# Device memory that MPI cannot take travels through the host in pieces (`is_staged`, `StagedRequest`).  What MPI takes
# itself must be ready: see `Collectives` and `DeferredRequest`.


def wire_of(buffer: Array, *, arithmetic: bool = False) -> Array:
    """The flat array to hand to MPI for a contiguous buffer: itself, or a copy; device memory may not be ready.

    Half precision is copied as uint16, or as float32 for `arithmetic`, in which MPI computes with the elements: it has
    no bfloat16 and seldom float16 arithmetic.
    """
    flat = buffer.reshape(-1)
    if type(buffer) is np.ndarray and buffer.itemsize != 2 and flat.flags.aligned:
        return flat  # what follows, for the most frequent case
    if arrays.is_device(buffer):
        return flat
    if not flat.flags.aligned:
        flat = flat.copy()  # MPI has no type for unaligned elements
    if is_half(flat.dtype):
        return flat.astype(np.float32) if arithmetic else flat.view(np.uint16)
    return flat


def from_wire(wire: Array, buffer: Array) -> Array:
    """Copy `wire`, from `wire_of`, back into `buffer` after the call, unless they share memory."""
    if type(wire) is np.ndarray is type(buffer) and np.may_share_memory(wire, buffer):
        return buffer  # what follows, for the most frequent case
    if arrays.is_device(buffer):
        if not arrays.is_device(wire):
            arrays.copy_to_device(wire, buffer.reshape(-1))
        return buffer
    if np.may_share_memory(wire, buffer):
        return buffer
    widened = is_half(buffer.dtype) and wire.dtype == np.float32
    buffer.reshape(-1)[...] = wire.astype(buffer.dtype) if widened else wire.view(buffer.dtype)
    return buffer


def is_staged(*buffers: Array, withheld: bool = False) -> bool:
    """Return True if a call on these buffers goes through host memory that is copied from and to a device.

    That is so if one of them is device memory that this MPI does not take, or that is `withheld` (see
    `agree_on_device_buffers`), or half precision in device memory.
    """
    for buffer in buffers:
        if type(buffer) is np.ndarray or not arrays.is_device(buffer):
            continue
        has_pointer = hasattr(buffer, "__cuda_array_interface__")
        if withheld or is_half(buffer.dtype) or not (has_pointer and probe(device=True).device_buffers):
            return True
    return False


def is_half(dtype: np.dtype) -> bool:
    """Return True if it is float16 or bfloat16; integers of 2 bytes are not."""
    return dtype.itemsize == 2 and dtype.kind not in "iu"


# A collective or message of device memory under way through pinned memory of the host, in pieces.
#
# Each piece is copied out, goes through MPI, and is copied back independently: while MPI has one piece, the device
# copies the next out and the last one back, and continues its computation. The host waits for a copy only before MPI's
# call that reads it; for what the device does, streams wait for each other.

# Where parts of a buffer are in the memory of a piece: each a flat contiguous array, and the first element there.
Places = Sequence[tuple[Array, int]]
# A blocking call copies this many pieces out before the one in MPI is over; a started call all of them.
AHEAD = 2


@dataclass
class StagedPiece:
    """A piece of a collective: what is copied out, MPI's call on it, and what is copied back."""

    count: int  # elements of its memory on the host
    out: Places  # parts of buffers, maybe NumPy arrays, and where they are in that memory
    back: Places
    # Makes MPI's call on that memory; returns what is still under way; may add to `statuses`.
    start: Callable[[np.ndarray], Sequence[MPI.Request]]
    # Is given the same after the call, before the copies back; may raise ValueError.
    finish: Callable[[np.ndarray], None] | None = None
    statuses: Sequence[MPI.Status] = ()  # one for each of MPI's requests, filled when it ends; or none
    # While it is under way.
    slab: Slab | None = field(default=None, init=False)
    copied: Event | None = field(default=None, init=False)
    wire: np.ndarray | None = field(default=None, init=False)
    requests: Sequence[MPI.Request] = field(default=(), init=False)

    def tests(self) -> list[tuple[MPI.Request, MPI.Status | None]]:
        """MPI's requests, each with its status."""
        statuses: Sequence[MPI.Status | None] = self.statuses or [None] * len(self.requests)
        return list(zip(self.requests, statuses, strict=True))


class StagedRequest(Request):
    """A `Request` over pieces, in the order of MPI's calls; `StagedCollectives` and `PointToPoint` make them.

    After `wait` the results are in stream order: the current stream waits for the copies back, and so does the one that
    was current at the start; the host does not. `read` has the buffers, all of one dtype, of which at least one is on
    the device; they are kept alive until the end.

    `started`: MPI's calls may begin later; else `wait` makes them, and follows at once. `arithmetic`: MPI computes with
    the elements, for which half precision is widened to float32. `overlapping`: a copy back may overwrite what another
    piece has to copy out.
    """

    def __init__(
        self,
        ledger: Ledger,
        call: Fields,
        sent: int,
        pieces: Sequence[StagedPiece],
        read: Sequence[Array],
        result: Array,
        *,
        started: bool,
        arithmetic: bool = False,
        overlapping: bool = False,
    ) -> None:
        self.ledger = ledger
        self.fields = call
        self._pieces = list(pieces)
        self._like = like = next(each for each in read if arrays.is_device(each))
        self._dtype = like.dtype
        self._started = started
        self._half = is_half(self._dtype)
        self._arithmetic = arithmetic
        self._overlapping = overlapping
        self._backend = backend_of(like)
        self._streams = copy_streams(like)
        self._stream = self._backend.current_stream(like)
        self._error: Exception | None = None
        self._over = False
        # How many pieces have been queued for the copy out, have begun in MPI, and are queued for the copy back.
        self._staged = self._begun = self._finished = 0
        self._all_out: Event | None = None
        self._back: Event | None = None
        # The readiness gate: the work queued on the stream so far.  The stream for copies back waits for it only with
        # the first of them, or those of calls that were started before would wait, too.
        self._ready: Event | None = record_current(like)
        self._streams.out.wait_event(self._ready)
        self._stage(len(self._pieces) if started or overlapping else AHEAD)
        super().__init__(ledger, call, sent, (), lambda: result, read)
        if started:
            DEFERRED.add(self)

    # -- a piece's way ------------------------------------------------------------------------------------------------

    def _stage(self, stop: int) -> None:
        """Queue the copies out of the pieces before number `stop`."""
        stop = min(stop, len(self._pieces))
        while self._staged < stop:
            self._copy_out(self._pieces[self._staged])
            self._staged += 1
            if self._staged == len(self._pieces) and self._overlapping:
                self._all_out = self._backend.record(self._like, self._streams.out)

    def _copy_out(self, piece: StagedPiece) -> None:
        out = self._streams.out
        piece.slab = slab = self._streams.pinned.take(piece.count * self._dtype.itemsize, self._like)
        memory = self._memory(piece)
        on_host = [(source, start) for source, start in piece.out if isinstance(source, np.ndarray)]
        queued = False
        if slab.free is not None:  # a copy still reads it
            if on_host:
                slab.free.synchronize()
            else:
                out.wait_event(slab.free)
                queued = True
            slab.free = None
        for source, start in piece.out:
            target = memory[start : start + source.size]
            if isinstance(source, np.ndarray):
                np.copyto(target, source)
            elif source.size:
                self._backend.start_to_host(source, target, out)
                queued = True
        if queued:
            piece.copied = self._backend.record(self._like, out)

    def _memory(self, piece: StagedPiece) -> np.ndarray:
        assert piece.slab is not None
        return piece.slab.bytes[: piece.count * self._dtype.itemsize].view(self._dtype)

    def _start(self, piece: StagedPiece) -> None:
        """Make MPI's call; the copy out is over."""
        memory = self._memory(piece)
        if not self._half:
            piece.wire = memory
        else:
            piece.wire = memory.astype(np.float32) if self._arithmetic else memory.view(np.uint16)
        piece.requests = piece.start(piece.wire)

    def _copy_back(self, piece: StagedPiece) -> None:
        """Queue the copies back; MPI's call is over."""
        wire, slab = piece.wire, piece.slab
        assert wire is not None and slab is not None
        if piece.finish is not None:
            piece.finish(wire)
        memory, back = self._memory(piece), self._streams.back
        queued = False
        for target, start in piece.back:
            source = memory[start : start + target.size]
            if self._half and self._arithmetic:
                source[...] = wire[start : start + target.size].astype(self._dtype)
            if isinstance(target, np.ndarray):
                np.copyto(target, source)
            elif target.size:
                for before in (self._ready, self._all_out):
                    if before is not None:
                        back.wait_event(before)
                self._ready = self._all_out = None
                self._backend.start_to_device(source, target, back)
                queued = True
        event = self._backend.record(self._like, back) if queued else None
        self._back = event or self._back
        self._streams.pinned.give(slab, event)
        piece.slab = piece.wire = None
        piece.requests = ()

    # -- what the queue of calls asks for -----------------------------------------------------------------------------

    def begin(self) -> bool:
        """Begin MPI's calls whose copies out are over, for the queue; return True if all have begun or failed."""
        while self._begun < len(self._pieces) and self._error is None:
            piece = self._pieces[self._begun]
            try:
                if piece.copied is not None and not self._backend.is_over(piece.copied):
                    return False
                self._start(piece)
            except Exception as error:
                self._error = error
                break
            self._begun += 1
        return True

    def advance(self) -> bool:
        """Let MPI move data, and queue the copies back of what has arrived; for the queue.

        Returns True if all is over, copies included, so that nothing has to be kept.
        """
        if self._over or not self._has_arrived():
            return self._over
        try:
            return self._error is not None or self._back is None or self._backend.is_over(self._back)
        except Exception as error:
            self._error = error
            return True

    def _has_arrived(self) -> bool:
        """Return True if MPI is done with all pieces, or one has failed."""
        try:
            while self._finished < self._begun and self._error is None:
                piece = self._pieces[self._finished]
                if not all(not request or request.Test(status) for request, status in piece.tests()):
                    return False
                self._copy_back(piece)
                self._finished += 1
        except Exception as error:
            self._error = error
        return self._error is not None or self._finished == len(self._pieces)

    # -- what the caller asks for -------------------------------------------------------------------------------------

    def test(self) -> bool:
        """Return True if `wait` would return at once: MPI is done; copies back may be under way.

        Raises MPI.Exception if somebody has died or revoked the axis (ULFM).
        """
        if self._over:
            return True
        DEFERRED.progress()
        arrived = self._has_arrived()
        if isinstance(self._error, MPI.Exception):
            raise self._error
        return arrived

    def _complete(self) -> None:
        """Wait for MPI, and let streams wait for the copies back."""
        try:
            if self._started:
                self._wait_for_started()
            else:
                self._make_calls()
            if self._error is not None:
                raise self._error
        except Exception:
            if not self._started:  # nobody has this request to abandon it
                self._settle(self._pieces[self._begun :])
            raise
        if self._back is not None:
            with self._backend.on_device_of(self._like):  # CUDA takes a default stream for that of the current device
                current = self._backend.current_stream(self._like)
                current.wait_event(self._back)
                if current != self._stream:  # memory that was taken on that stream may be freed and used there again
                    self._stream.wait_event(self._back)
        self._end()

    def _wait_for_started(self) -> None:
        DEFERRED.until(self._has_arrived)
        while not self.begin():  # only if another thread has started it
            time.sleep(0)
        while self._error is None and self._finished < len(self._pieces):
            self._wait_for_piece()

    def _make_calls(self) -> None:
        """The blocking form: MPI has one piece after the other, while the device copies others."""
        for number, piece in enumerate(self._pieces):
            self._stage(number + AHEAD)
            if piece.copied is not None:
                piece.copied.synchronize()
            self._start(piece)
            self._begun += 1
            self._wait_for_piece()
            if self._error is not None:
                break

    def _wait_for_piece(self) -> None:
        """Wait for the next piece that MPI has."""
        piece = self._pieces[self._finished]
        try:
            for request, status in piece.tests():
                if request:  # else `test` has completed it
                    request.Wait(status)
            self._copy_back(piece)
        except Exception as error:
            self._error = error
        else:
            self._finished += 1

    def abandon(self) -> None:
        """Wait until neither MPI nor a copy uses the buffers; errors are ignored.

        MPI's calls that have not begun are begun first, as if there had been no copies to wait for. On a communicator
        that was revoked they fail at once.
        """
        if self._over:
            return
        DEFERRED.flush()
        for piece in self._pieces[self._finished : self._begun]:
            for request in piece.requests:
                with contextlib.suppress(MPI.Exception):
                    request.Wait()
        self._settle(self._pieces)
        self._let_go()

    def _settle(self, free: Sequence[StagedPiece]) -> None:
        """End without a result: wait for all copies, and give back the memory of pieces that MPI does not have."""
        with contextlib.suppress(RuntimeError):  # of a device that has failed, which copies no more
            for piece in self._pieces[: self._staged]:
                if piece.copied is not None:
                    piece.copied.synchronize()
            if self._back is not None:
                self._back.synchronize()
        for piece in free:
            if piece.slab is not None:
                self._streams.pinned.give(piece.slab)
        self._call = None
        self._end()

    def _end(self) -> None:
        self._over = True
        self._pieces, self._read = [], ()
        DEFERRED.forget(self)


# A collective or message whose device memory MPI reads and writes itself, and whose calls of MPI begin later.
#
# MPI knows nothing of streams. So its calls begin when the device has done what was queued before the start, and the
# host continues meanwhile.


class DeferredRequest(Request):
    """A `Request` whose calls of MPI begin when the current streams have come to its start.

    `start` makes MPI's calls, none of which may block, fills `statuses`, and returns what is under way; `devices` are
    the buffers in device memory.
    """

    def __init__(
        self,
        ledger: Ledger,
        call: Fields,
        sent: int,
        start: Callable[[], Sequence[MPI.Request]],
        finish: Callable[[], Array],
        read: Sequence[Array],
        devices: Sequence[Array],
        statuses: Sequence[MPI.Status] | None = None,
    ) -> None:
        super().__init__(ledger, call, sent, (), finish, read)
        self.ledger = ledger
        self.fields = call
        self._start = start
        self._filled = statuses
        # The readiness gate: the work queued on the streams so far.
        self._ready = [(backend_of(each), record_current(each)) for each in devices]
        self._has_begun = False
        self._error: Exception | None = None
        DEFERRED.add(self)

    def begin(self) -> bool:
        """Begin MPI's calls if the device has come to them, for the queue; return True if they have begun or failed."""
        if not self._has_begun:
            try:
                if not all(backend.is_over(event) for backend, event in self._ready):
                    return False
                self._requests = self._start()
                self._statuses = self._filled or [None] * len(self._requests)
            except Exception as error:
                self._error = error
            self._has_begun = True
        return True

    def advance(self) -> bool:
        """Let MPI move data, for the queue; return True if MPI is done, or has failed."""
        if self._has_begun and self._error is None:
            try:
                return self._is_complete()
            except Exception as error:
                self._error = error
        return self._error is not None

    def test(self) -> bool:
        DEFERRED.progress()
        is_over = self.advance()
        if isinstance(self._error, MPI.Exception):
            raise self._error
        return is_over

    def abandon(self) -> None:
        """Wait until MPI no longer uses the buffers; errors are ignored.

        MPI's calls that have not begun are begun first. On a communicator that was revoked they fail at once.
        """
        DEFERRED.flush()
        super().abandon()
        DEFERRED.forget(self)

    def _complete(self) -> None:
        DEFERRED.until(self.advance)
        while not self.begin():  # only if another thread has started it
            time.sleep(0)
        if self._error is not None:
            raise self._error
        super()._complete()
        DEFERRED.forget(self)
