"""An NCCL communicator and the stream on which its calls are queued.

The calls take contiguous device arrays.  What only moves is moved as bytes, so that it may be of any dtype.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

from mpishard.backend import array as arrays
from mpishard.backend.kinds import backend_of

Array = Any
Event = Any  # of `mpishard.backend.kinds`
Stream = Any

# By the name of a dtype: with which NCCL computes.
_TYPES = {
    "float32": "NCCL_FLOAT32",
    "float64": "NCCL_FLOAT64",
    "int8": "NCCL_INT8",
    "uint8": "NCCL_UINT8",
    "int32": "NCCL_INT32",
    "uint32": "NCCL_UINT32",
    "int64": "NCCL_INT64",
    "uint64": "NCCL_UINT64",
}
_OPS = {"sum": "NCCL_SUM", "prod": "NCCL_PROD", "max": "NCCL_MAX", "min": "NCCL_MIN"}
_ID_BYTES = 128


def computes_with(dtype: Any) -> bool:
    """Return True if NCCL adds elements of this dtype as they are."""
    return dtype.name in _TYPES


def new_id(nccl: Any) -> bytes:
    """The bytes that all ranks of a new communicator need, made on one of them."""
    found = nccl.get_unique_id()
    # CuPy 14 gives bytes, CuPy 13 signed numbers.
    return found if isinstance(found, bytes) else bytes(each & 0xFF for each in found)


def connect(nccl: Any, size: int, identity: bytes, rank: int) -> Any:
    """Make an ``NcclCommunicator`` on the current device.  Collective over its ranks, not by MPI."""
    assert len(identity) == _ID_BYTES
    try:
        return nccl.NcclCommunicator(size, identity, rank)
    except TypeError:  # before CuPy 14
        return nccl.NcclCommunicator(size, tuple(each - 256 if each > 127 else each for each in identity), rank)


class NcclQueue:
    """An NCCL communicator, which it owns, and its stream.

    Its collectives only queue work, inside the `work` that `queue` calls. All ranks queue them in one order.
    """

    def __init__(self, nccl: Any, communicator: Any, rank: int, like: Array) -> None:
        self._nccl = nccl
        self._communicator = communicator
        self._rank = rank
        self._backend = backend_of(like)
        self._device = self._backend.on_device_of(like)
        self._device_name = self._backend.device_name(like)
        self._device_number = self._backend.device_number(like)
        self._thread = threading.get_ident()  # that has queued last
        self._stream = self._backend.new_stream(like)
        self.aborted = False  # its calls were ended, done or not

    def check(self, what: str, buffer: Array) -> None:
        """Raise unless the buffer is on the device of the communicator, and NCCL has seen no error."""
        if self._backend.on_device_of(buffer) != self._device:
            raise ValueError(
                f"{what} of a buffer on GPU {self._backend.device_name(buffer)}, but NCCL was first used on GPU "
                f"{self._device_name}; keep all device buffers of a rank on one GPU, see Mesh.device"
            )
        if not self.aborted:
            self._communicator.check_async_error()

    def queue(self, like: Array, work: Callable[[], None]) -> Event:
        """Let `work` queue on the stream what is to be done after what is queued on the current stream.

        Returns an event that is over when all of that is done.
        """
        backend, self._thread = self._backend, threading.get_ident()
        with self._device:
            self._stream.wait_event(backend.record(like, backend.current_stream(like)))
            with self._stream:
                work()
            return backend.record(like, self._stream)

    def let_wait(self, like: Array, event: Event, queued_on: Stream | None = None) -> None:
        """Let the current stream wait for an event, and that which was current then; the host does not."""
        with self._device:
            current = self._backend.current_stream(like)
            current.wait_event(event)
            if queued_on is not None and queued_on != current:  # memory may be freed and used there again
                queued_on.wait_event(event)

    def is_over(self, event: Event) -> bool:
        """Return True if an event is over, or can never be, since its device has failed.

        In any thread: one that has not queued anything here, as the watchdog, has the device as its own from now on. To
        leave the device again would make a context on the one before.
        """
        try:
            if threading.get_ident() != self._thread:
                self._backend.use_device(self._device_number)
            return self._backend.is_over(event)
        except RuntimeError:  # of CUDA; whoever waits for the device gets it
            return True

    def free(self) -> None:
        """Wait for all that is queued, and free the communicator.  Collective."""
        with self._device:
            if not self.aborted:
                self._stream.synchronize()
                self._communicator.destroy()
        self.aborted = True

    def abort(self) -> None:
        """End all calls, done or not, and free the communicator."""
        if not self.aborted:
            self.aborted = True
            with self._device:
                self._communicator.abort()

    # -- collectives; what they do is in `mpishard.comm.communicator` -------------------------------------------------

    def all_reduce(self, source: Array, target: Array, op: str) -> None:
        """Into `target`, which may be `source`."""
        if source.size:
            self._communicator.allReduce(
                self._at(source), self._at(target), source.size, *self._how(source, op), self._stream.ptr
            )

    def reduce_scatter(self, source: Array, target: Array, counts: Sequence[int], op: str) -> None:
        """Into `target`, which may be this rank's piece of `source`."""
        how = self._how(source, op)
        if min(counts) == max(counts):
            if counts[0]:
                self._communicator.reduceScatter(self._at(source), self._at(target), counts[0], *how, self._stream.ptr)
            return
        with self._group():
            for root, (start, count) in enumerate(zip(starts(counts), counts, strict=True)):
                if count:
                    piece = self._at(source) + start * source.itemsize
                    into = self._at(target) if root == self._rank else piece
                    self._communicator.reduce(piece, into, count, *how, root, self._stream.ptr)

    def all_gather(self, piece: Array, target: Array, counts: Sequence[int]) -> None:
        """Into `target`; `piece` may be this rank's piece of it."""
        byte, width = self._nccl.NCCL_UINT8, target.itemsize
        if min(counts) == max(counts):
            if counts[0]:
                self._communicator.allGather(
                    self._at(piece), self._at(target), counts[0] * width, byte, self._stream.ptr
                )
            return
        with self._group():
            for root, (start, count) in enumerate(zip(starts(counts), counts, strict=True)):
                if count:
                    into = self._at(target) + start * width
                    source = self._at(piece) if root == self._rank else into
                    self._communicator.broadcast(source, into, count * width, byte, root, self._stream.ptr)

    def all_to_all(self, source: Array, target: Array, runs: Sequence[slice], into: Sequence[slice]) -> None:
        """Run ``s`` of `source` goes to rank ``s``, and its run arrives in run ``s`` of `target`."""
        byte, width, stream = self._nccl.NCCL_UINT8, source.itemsize, self._stream.ptr
        with self._group():
            for rank, (run, arriving) in enumerate(zip(runs, into, strict=True)):
                if run.stop > run.start:
                    nbytes = (run.stop - run.start) * width
                    self._communicator.send(self._at(source) + run.start * width, nbytes, byte, rank, stream)
                if arriving.stop > arriving.start:
                    nbytes = (arriving.stop - arriving.start) * width
                    self._communicator.recv(self._at(target) + arriving.start * width, nbytes, byte, rank, stream)

    def broadcast(self, buffer: Array, root: int) -> None:
        """Over `buffer` of all ranks but `root`."""
        if buffer.size:
            at = self._at(buffer)
            self._communicator.broadcast(at, at, buffer.nbytes, self._nccl.NCCL_UINT8, root, self._stream.ptr)

    def empty(self, size: int, dtype: Any, like: Array) -> Array:
        """Memory for this stream; a pool may give it to later work on the stream once it is dropped."""
        with self._device, self._stream:
            return arrays.empty(size, dtype, like=like)

    def _at(self, array: Array) -> int:
        return self._backend.address(array)

    def _how(self, array: Array, op: str) -> tuple[int, int]:
        return getattr(self._nccl, _TYPES[array.dtype.name]), getattr(self._nccl, _OPS[op])

    @contextlib.contextmanager
    def _group(self) -> Iterator[None]:
        """The calls in here are one, so that none of them waits for another."""
        self._nccl.groupStart()
        try:
            yield
        finally:
            self._nccl.groupEnd()


def starts(counts: Sequence[int]) -> list[int]:
    """The start of each run."""
    return [0, *accumulate(counts[:-1])]
