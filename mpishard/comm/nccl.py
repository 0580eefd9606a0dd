"""Collectives of device memory by NCCL.

The queue of its calls, the proof that it works here, the choice made by all ranks of an axis, and the collectives.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
from mpi4py import MPI

from mpishard.backend import array as arrays
from mpishard.backend.kinds import Backend, backend_of
from mpishard.comm.capabilities import heals_in_place
from mpishard.comm.channel import NOTHING, OPS, Channel, Fields, Request
from mpishard.comm.collectives import Collectives, check_alike, check_piece
from mpishard.comm.deferred import DEFERRED
from mpishard.comm.ledger import Ledger, all_reduce_elements, ring_elements
from mpishard.comm.staging import is_half
from mpishard.io import log
from mpishard.layout.boxes import starts_of

Array = Any


# An NCCL communicator and the stream on which its calls are queued.
#
# The calls take contiguous device arrays.  What only moves is moved as bytes, so that it may be of any dtype.

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
            for root, (start, count) in enumerate(zip(starts_of(counts), counts, strict=True)):
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
            for root, (start, count) in enumerate(zip(starts_of(counts), counts, strict=True)):
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


# The proof that NCCL works here: each kind of call on a few small numbers, before the first real one.


def prove(queue: NcclQueue, rank: int, size: int, like: Array) -> None:
    """Raise RuntimeError unless each kind of call gives the right values. Collective over the communicator.

    NCCL connects the ranks here, for which they wait for each other, and not first in a call that is started. `queue`
    is not used yet.
    """
    own, total = rank + 1, size * (size + 1) // 2
    ranks = np.arange(1, size + 1, dtype=np.float32)
    even = arrays.on_device_of(np.full(size, own, np.float32), like)
    # Rank r has r + 1 elements of the uneven pieces.
    counts = list(range(1, size + 1))
    mine = slice(total_before(own), total_before(own + 1))
    uneven = arrays.on_device_of(np.full(total, own, np.float32), like)
    runs = [slice(each, each + 1) for each in range(size)]

    tops, sums = np.zeros(size, np.float32), np.zeros(total, np.float32)
    tops[rank], sums[mine] = size, total
    expected = [np.full(size, total, np.float32), tops, ranks, ranks, sums, np.repeat(ranks, counts)]
    found = [arrays.zeros(each.size, np.float32, like=like) for each in expected]

    def work() -> None:
        queue.all_reduce(even, found[0], "sum")
        queue.reduce_scatter(even, found[1][rank : rank + 1], [1] * size, "max")
        queue.all_gather(even[:1], found[2], [1] * size)
        queue.all_to_all(even, found[3], runs, runs)
        queue.reduce_scatter(uneven, found[4][mine], counts, "sum")
        queue.all_gather(uneven[mine], found[5], counts)
        queue.broadcast(even, size - 1)

    queue.let_wait(like, queue.queue(like, work))
    found.append(even)
    expected.append(np.full(size, size, np.float32))
    names = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "reduce", "broadcast", "broadcast in place")
    for name, values, right in zip(names, found, expected, strict=True):
        if not np.array_equal(arrays.to_host(values), right):
            raise RuntimeError(f"{name} of NCCL gives wrong values for a few small numbers")


def total_before(count: int) -> int:
    """The sum of the whole numbers below `count`."""
    return count * (count - 1) // 2


# The choice whether the device buffers of an axis travel by NCCL, made by all of its ranks at the first of them.

# The first with messages between two ranks (as ncclGetVersion gives it).
_OLDEST = 2_700
_RECORD_BYTES, _MOST_TEXT = 4096, 300
COLLECTIVES = ("mpi", "nccl")


class NcclFacts(NamedTuple):
    """The facts that ranks of an axis exchange before they use NCCL."""

    problem: str  # why this rank cannot use NCCL; empty if it can
    neighbours: int  # ranks of the axis that share memory with it, itself included
    device: str  # its GPU, by a name that no other on its node has
    version: int  # of NCCL


def why_not(facts: Sequence[NcclFacts]) -> str:
    """The reason why the ranks of an axis cannot use NCCL, from their facts by rank; empty if they can."""
    for rank, each in enumerate(facts):
        if each.problem:
            return f"rank {rank}: {each.problem}"
    if any(each.neighbours < len(facts) for each in facts):
        return "its ranks are on several nodes, and NCCL is used inside a node only"
    first: dict[str, int] = {}
    for rank, each in enumerate(facts):
        if first.setdefault(each.device, rank) != rank:
            return (
                f"ranks {first[each.device]} and {rank} share GPU {each.device}, which NCCL refuses; give each rank "
                "its own GPU with cupy.cuda.Device(mesh.device).use(), and start no more ranks than there are GPUs"
            )
    for rank, each in enumerate(facts):
        if each.version != facts[0].version:
            return (
                f"rank 0 has version {facts[0].version} of NCCL and rank {rank} has {each.version}; "
                "install the same on all nodes"
            )
    return ""


class NcclLink:
    """The NCCL communicators of one axis, if all its ranks can use NCCL. Creation is not collective.

    There are two, each with a stream, as of MPI: one for blocking and one for started calls, since a rank may start a
    call before a blocking one that comes first on another rank. With one communicator NCCL would take the two for each
    other and mix their bytes. Kernels of two communicators run concurrently. `said` holds the reasons for MPI that this
    rank has printed for the mesh.
    """

    def __init__(self, channel: Channel, said: set[str]) -> None:
        self.way: str | None = None  # ``"nccl"`` or ``"mpi"``; None: no device buffer has come
        self.reason: str = ""  # why it is ``"mpi"``
        self._channel = channel
        self._said = said
        self._queues: list[NcclQueue] = []

    def carries(self, buffer: Array) -> bool:
        """Return True if device buffers travel by NCCL. Collective at the first of them."""
        if self.way is None:
            ledger = self._channel.ledger
            ledger.active = call = self._channel.begin("connect", NOTHING, "NCCL")
            try:
                self.reason = self._connect(buffer)
            finally:
                ledger.active = None
            ledger.enter(call, 0, ledger.spend(call, call[0]))
            self.way = "mpi" if self.reason else "nccl"
            if self.reason and self._channel.rank == 0 and self.reason not in self._said:
                log.warn(f"device buffers of axis {self._channel.name!r} travel by MPI, not by NCCL: {self.reason}")
            self._said.add(self.reason)
        return self.way == "nccl"

    def queue(self, *, started: bool) -> NcclQueue:
        """That of the calls that are started, or of the blocking ones; only if `carries`."""
        return self._queues[started]

    def free(self) -> None:
        """Wait for all calls, and free the communicators.  Collective."""
        DEFERRED.flush()  # other ranks may wait for these before they come to the calls that this waits for
        for queue in self._queues:
            queue.free()
        self._forget()

    def abort(self) -> None:
        """End all calls, done or not, and forget the communicators; the next device buffer makes new ones."""
        for queue in self._queues:
            queue.abort()
        self._forget()

    def _forget(self) -> None:
        self._queues, self.way, self.reason = [], None, ""

    def _connect(self, like: Array) -> str:
        """Make the communicators; returns why they cannot be used, the same on all ranks.  Collective."""
        backend, comm = backend_of(like), self._channel.comm
        try:
            nccl, problem = backend.nccl(), ""
            version = int(nccl.get_version())
            if version < _OLDEST:
                problem = f"NCCL {version} is too old; install version {_OLDEST} or later"
        except Exception as error:  # without a library, or of one that cannot be loaded
            nccl, version = None, 0
            problem = f"NCCL is missing ({error}); install nvidia-nccl-cu12 or nvidia-nccl-cu13, as CuPy's CUDA is"
        facts = NcclFacts(problem, _neighbours(comm), backend.device_name(like), version)
        reason = why_not([NcclFacts(*each) for each in _exchange(comm, facts)])
        if reason:
            return reason
        made: list[NcclQueue] = []
        for _ in range(2):
            reason = self._agree(lambda: made.append(self._new_queue(nccl, backend, like)))
            if reason:
                break
        for queue in made:
            reason = reason or self._agree(partial(prove, queue, comm.rank, comm.size, like))
        if reason:
            for queue in made:
                queue.abort()
        else:
            self._queues = made
        return reason

    def _new_queue(self, nccl: Any, backend: Backend, like: Array) -> NcclQueue:
        comm, identity = self._channel.comm, np.zeros(129, np.uint8)
        problem = None
        if comm.rank == 0:
            try:
                identity[1:] = np.frombuffer(new_id(nccl), np.uint8)
                identity[0] = 1
            except Exception as error:  # of NCCL: the others must not wait for the number
                problem = error
        comm.Bcast(identity, 0)
        if problem is not None or not identity[0]:
            raise RuntimeError(f"NCCL gives no number for a new communicator ({problem or 'on rank 0'})")
        with backend.on_device_of(like):
            made = connect(nccl, comm.size, identity[1:].tobytes(), comm.rank)
        return NcclQueue(nccl, made, comm.rank, like)

    def _agree(self, work: Callable[[], Any]) -> str:
        """Do something on all ranks that may fail on some; returns what failed, the same on all.  Collective."""
        problem = ""
        try:
            work()
        except MPI.Exception:
            raise
        except Exception as error:  # NcclError, or one of CUDA
            problem = f"{type(error).__name__}: {error}"[:_MOST_TEXT]
        problems = [each for (each,) in _exchange(self._channel.comm, (problem,))]
        return next((f"rank {rank}: {each}" for rank, each in enumerate(problems) if each), "")


def _neighbours(comm: MPI.Intracomm) -> int:
    """The number of ranks of `comm` that share memory with this one. Collective."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    size = node.size
    node.Free()
    return size


def _exchange(comm: MPI.Intracomm, own: tuple[Any, ...]) -> list[list[Any]]:
    """The strings and numbers of all ranks, by rank.  Collective."""
    own = tuple(each[:_MOST_TEXT] if isinstance(each, str) else each for each in own)
    text = json.dumps(own).encode()
    sent, got = np.zeros(_RECORD_BYTES, np.uint8), np.zeros((comm.size, _RECORD_BYTES), np.uint8)
    sent[: len(text)] = np.frombuffer(text, np.uint8)
    comm.Allgather(sent, got)
    return [json.loads(each.tobytes().rstrip(b"\0")) for each in got]


# The collectives of an axis that uses NCCL: device buffers by NCCL where the ranks can, all others by MPI.
#
# A call is queued on a separate stream behind what the current stream has to do, and `Request.wait` lets the current
# stream wait for it. The host waits for nothing, so that the time which the ledger notes is that of queueing.

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
        start, count = starts_of(pieces)[channel.rank], pieces[channel.rank]
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
        start, count = starts_of(pieces)[channel.rank], pieces[channel.rank]
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
            [slice(start, start + count) for start, count in zip(starts_of(each), each, strict=True)]
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
