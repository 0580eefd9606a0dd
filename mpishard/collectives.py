"""Collectives on flat buffers, for NumPy and device arrays, over one axis of a mesh.

The first argument is always the whole buffer: `all_reduce` sums it, `reduce_scatter` leaves each rank a piece of it,
`all_gather` fills it from everybody's pieces.  Without a second buffer they work in place.  Each has its adjoint here:
all_reduce its own, reduce_scatter and all_gather each other's, all_to_all itself with the counts swapped, broadcast a
reduce to the root.

What MPI sees of an array is its *wire*: the array itself where MPI can take it, a staged or widened copy where it
cannot.  One function makes it, so there is one place where a device buffer is made ready.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpishard import array as arrays
from mpishard.capabilities import probe
from mpishard.layout import counts as run_lengths
from mpishard.layout import split
from mpishard.ledger import Call, Ledger, all_reduce_elements, ring_elements

Array = Any

_OPS = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN, "prod": MPI.PROD}
_RECORD_BYTES = 400


class CollectiveMismatchError(RuntimeError):
    """The ranks of an axis are not in the same collective."""


class Pending:
    """A collective under way.  Its buffers belong to it until `wait` returns.

    `wait` gives what the blocking form would have returned.
    """

    def __init__(
        self, axis: Axis, call: Call, sent: int, requests: Sequence[MPI.Request], finish: Callable[[], Array]
    ) -> None:
        self._axis = axis
        self._call = call
        self._sent = sent
        self._requests = list(requests)
        self._finish = finish
        self._result: Array = None
        self._started_s = time.perf_counter() - call.began
        axis.ledger.active = None

    def test(self) -> bool:
        """Whether `wait` would return at once."""
        return all(request.Test() for request in self._requests)

    def wait(self) -> Array:
        """Finish the collective and return its result; calling it again returns the same."""
        if self._call is not None:
            began = time.perf_counter()
            ledger = self._axis.ledger
            ledger.active = self._call._replace(began=began)
            for request in self._requests:
                request.Wait()
            self._result = self._finish()
            ledger.end(self._call, self._sent, self._started_s + time.perf_counter() - began)
            self._call = None  # type: ignore[assignment]
        return self._result


class Axis:
    """One direction of a mesh: the ranks that differ in one coordinate only, and the collectives over them.

    Buffers are C-contiguous arrays, NumPy or device, of any dtype that MPI knows, or float16 and bfloat16 (reduced in
    float32).  All methods but `send` and `recv` are collective over the axis.  `op` is ``"sum"``, ``"max"``, ``"min"``
    or ``"prod"``; `label` names the purpose in the ledger.  `counts` are elements by rank; without them a buffer is cut
    as `mpishard.layout.split` does.  The ``start_*`` forms return a `Pending` and otherwise do the same.

    Attributes
    ----------
    name : str
    comm : mpi4py.MPI.Intracomm
    rank, size : int
    ledger : Ledger
    """

    def __init__(self, name: str, comm: MPI.Intracomm, ledger: Ledger, *, debug: bool = False) -> None:
        self.name = name
        self.comm = comm
        self.rank = comm.rank
        self.size = comm.size
        self.ledger = ledger
        self.largest_count = None if probe().large_counts else 2**31 - 1
        self._sequence = 0
        self._check_comm = comm.Dup() if debug and comm.size > 1 else None

    def __repr__(self) -> str:
        return f"Axis({self.name!r}, rank={self.rank}, size={self.size})"

    def free(self) -> None:
        """Free the communicators.  Collective."""
        if self._check_comm is not None:
            self._check_comm.Free()
        self.comm.Free()

    # -- collectives ------------------------------------------------------------------------------------------------

    def all_reduce(self, buffer: Array, out: Array | None = None, op: str = "sum", *, label: str = "") -> Array:
        """Combine `buffer` over all ranks into `out` (default: in place) on every rank; returns the result."""
        call = self._begin("all_reduce", buffer, label, op)
        if self._plain(buffer) and out is None:
            self.ledger.active = call
            self.comm.Allreduce(MPI.IN_PLACE, buffer, _OPS[op])
            self.ledger.end(call, all_reduce_elements(buffer.size, self.size, self.rank) * buffer.itemsize)
            return buffer
        return self._all_reduce(call, buffer, out, op).wait()

    def start_all_reduce(self, buffer: Array, out: Array | None = None, op: str = "sum", *, label: str = "") -> Pending:
        return self._all_reduce(self._begin("all_reduce", buffer, label, op), buffer, out, op)

    def reduce_scatter(
        self,
        buffer: Array,
        out: Array | None = None,
        counts: Sequence[int] | None = None,
        op: str = "sum",
        *,
        label: str = "",
    ) -> Array:
        """Combine `buffer` over all ranks and keep piece number `rank` of it.

        The piece goes to `out`, or without it to the front of `buffer`, whose rest is then undefined.
        """
        call = self._begin("reduce_scatter", buffer, label, op)
        return self._reduce_scatter(call, buffer, out, counts, op).wait()

    def start_reduce_scatter(
        self,
        buffer: Array,
        out: Array | None = None,
        counts: Sequence[int] | None = None,
        op: str = "sum",
        *,
        label: str = "",
    ) -> Pending:
        return self._reduce_scatter(self._begin("reduce_scatter", buffer, label, op), buffer, out, counts, op)

    def all_gather(
        self, buffer: Array, piece: Array | None = None, counts: Sequence[int] | None = None, *, label: str = ""
    ) -> Array:
        """Fill `buffer` with everybody's `piece`, by rank; without it the rank's piece already lies in its place."""
        return self._all_gather(self._begin("all_gather", buffer, label), buffer, piece, counts).wait()

    def start_all_gather(
        self, buffer: Array, piece: Array | None = None, counts: Sequence[int] | None = None, *, label: str = ""
    ) -> Pending:
        return self._all_gather(self._begin("all_gather", buffer, label), buffer, piece, counts)

    def all_to_all(
        self,
        buffer: Array,
        out: Array,
        counts: Sequence[int] | None = None,
        out_counts: Sequence[int] | None = None,
        *,
        label: str = "",
    ) -> Array:
        """Send run ``s`` of `buffer` to rank ``s`` and receive rank ``s``'s run into run ``s`` of `out`."""
        return self._all_to_all(self._begin("all_to_all", buffer, label), buffer, out, counts, out_counts).wait()

    def start_all_to_all(
        self,
        buffer: Array,
        out: Array,
        counts: Sequence[int] | None = None,
        out_counts: Sequence[int] | None = None,
        *,
        label: str = "",
    ) -> Pending:
        return self._all_to_all(self._begin("all_to_all", buffer, label), buffer, out, counts, out_counts)

    def broadcast(self, buffer: Array, root: int = 0, *, label: str = "") -> Array:
        """Copy `buffer` of rank `root` to all ranks, in place."""
        return self._broadcast(self._begin("broadcast", buffer, label, str(root)), buffer, root).wait()

    def start_broadcast(self, buffer: Array, root: int = 0, *, label: str = "") -> Pending:
        return self._broadcast(self._begin("broadcast", buffer, label, str(root)), buffer, root)

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        call = self._begin("barrier", _NOTHING, "")
        self.ledger.active = call
        self.comm.Barrier()
        self.ledger.end(call, 0)

    # -- point to point ---------------------------------------------------------------------------------------------

    def send(self, buffer: Array, to: int, tag: int = 0, *, label: str = "") -> None:
        """Send `buffer` to rank `to`; returns when it may be written again.  Not collective."""
        self.start_send(buffer, to, tag, label=label).wait()

    def recv(self, buffer: Array, source: int, tag: int = 0, *, label: str = "") -> Array:
        """Receive into `buffer` from rank `source`; sizes must agree.  Not collective."""
        return self.start_recv(buffer, source, tag, label=label).wait()

    def start_send(self, buffer: Array, to: int, tag: int = 0, *, label: str = "") -> Pending:
        call = self._begin("send", buffer, label)
        requests = [self.comm.Isend(part, to, tag) for part in self._parts(self._wire(buffer))]
        return Pending(self, call, buffer.nbytes, requests, lambda: buffer)

    def start_recv(self, buffer: Array, source: int, tag: int = 0, *, label: str = "") -> Pending:
        call = self._begin("recv", buffer, label)
        wire = self._wire(buffer, reads=False)
        requests = [self.comm.Irecv(part, source, tag) for part in self._parts(wire)]
        return Pending(self, call, 0, requests, lambda: self._unwire(wire, buffer))

    # -- agreement --------------------------------------------------------------------------------------------------

    def agree(self, problem: Exception | None) -> None:
        """Raise on all ranks if any rank has a problem: its own where it has one, else the first rank's.

        Collective; no rank goes on while another raises, so no rank is left waiting.
        """
        bad = np.array([problem is not None], np.int64)
        if not self.all_reduce(bad, op="max", label="control")[0]:
            return
        told = self.comm.allgather(None if problem is None else (type(problem).__name__, str(problem)))
        if problem is not None:
            raise problem
        rank, (kind, text) = next((rank, what) for rank, what in enumerate(told) if what is not None)
        known = {error.__name__: error for error in (ValueError, TypeError, FloatingPointError, RuntimeError)}
        raise known.get(kind, RuntimeError)(f"rank {rank} of axis {self.name!r}: {text}")

    # -- how --------------------------------------------------------------------------------------------------------

    def _all_reduce(self, call: Call, buffer: Array, out: Array | None, op: str) -> Pending:
        if out is None:
            out = buffer
            target = self._wire(buffer, arithmetic=True)
            sources: list[Any] = [MPI.IN_PLACE for _ in self._parts(target)]
        else:
            _same(buffer, out)
            target = self._wire(out, reads=False, arithmetic=True)
            sources = self._parts(self._wire(buffer, arithmetic=True))
        requests = [
            self.comm.Iallreduce(source, part, _OPS[op])
            for source, part in zip(sources, self._parts(target), strict=True)
        ]
        sent = all_reduce_elements(buffer.size, self.size, self.rank) * buffer.itemsize
        return Pending(self, call, sent, requests, lambda: self._unwire(target, out))

    def _reduce_scatter(
        self, call: Call, buffer: Array, out: Array | None, counts: Sequence[int] | None, op: str
    ) -> Pending:
        counts = self._counts(buffer, counts)
        sent = self._ring("reduce_scatter", counts) * buffer.itemsize
        wire = self._wire(buffer, arithmetic=True)
        in_place = out is None
        if out is None:
            out = buffer.reshape(-1)[: counts[self.rank]]
            target = wire[: counts[self.rank]]
        else:
            _piece(out, counts[self.rank], buffer)
            target = self._wire(out, reads=False, arithmetic=True)
        requests = []
        if not self._fits(wire.size):
            self.ledger.active = call
            self._reduce_pieces(wire, target, counts, op, in_place)
        elif in_place:
            requests.append(self.comm.Ireduce_scatter(MPI.IN_PLACE, wire, counts, _OPS[op]))
        else:
            requests.append(self.comm.Ireduce_scatter(wire, target, counts, _OPS[op]))
        return Pending(self, call, sent, requests, lambda: self._unwire(target, out))

    def _all_gather(self, call: Call, buffer: Array, piece: Array | None, counts: Sequence[int] | None) -> Pending:
        counts = self._counts(buffer, counts)
        starts = _starts(counts)
        wire = self._wire(buffer, reads=piece is None)
        source: Any = MPI.IN_PLACE
        if piece is not None:
            _piece(piece, counts[self.rank], buffer)
            source = self._wire(piece)
        if self._fits(wire.size):
            requests = [self.comm.Iallgatherv(source, [wire, (counts, starts)])]
        else:
            if piece is not None:
                wire[starts[self.rank] : starts[self.rank] + counts[self.rank]] = source
                arrays.ready(wire)
            requests = self._broadcast_pieces(wire, counts)
        sent = self._ring("all_gather", counts) * buffer.itemsize
        return Pending(self, call, sent, requests, lambda: self._unwire(wire, buffer))

    def _all_to_all(
        self,
        call: Call,
        buffer: Array,
        out: Array,
        counts: Sequence[int] | None,
        out_counts: Sequence[int] | None,
    ) -> Pending:
        counts, out_counts = self._counts(buffer, counts), self._counts(out, out_counts)
        if buffer.dtype != out.dtype:
            raise TypeError(f"all_to_all from {buffer.dtype} to {out.dtype}; both buffers need one dtype")
        wire, target = self._wire(buffer), self._wire(out, reads=False)
        starts, out_starts = _starts(counts), _starts(out_counts)
        if self._all_fit(max(wire.size, target.size)):
            requests = [self.comm.Ialltoallv([wire, (counts, starts)], [target, (out_counts, out_starts)])]
        else:
            runs = [target[start : start + count] for start, count in zip(out_starts, out_counts, strict=True)]
            requests = [self.comm.Irecv(p, rank) for rank, run in enumerate(runs) for p in self._parts(run)]
            runs = [wire[start : start + count] for start, count in zip(starts, counts, strict=True)]
            requests += [self.comm.Isend(p, rank) for rank, run in enumerate(runs) for p in self._parts(run)]
        sent = self._ring("all_to_all", counts) * buffer.itemsize
        return Pending(self, call, sent, requests, lambda: self._unwire(target, out))

    def _broadcast(self, call: Call, buffer: Array, root: int) -> Pending:
        if not 0 <= root < self.size:
            raise ValueError(f"broadcast from rank {root} of axis {self.name!r}, which has {self.size} ranks")
        wire = self._wire(buffer, reads=self.rank == root)
        requests = [self.comm.Ibcast(part, root) for part in self._parts(wire)]
        last = self.rank == (root - 1) % self.size
        return Pending(self, call, 0 if last else buffer.nbytes, requests, lambda: self._unwire(wire, buffer))

    def _reduce_pieces(self, wire: Array, target: Array, counts: Sequence[int], op: str, in_place: bool) -> None:
        """Reduce_scatter past the count limit: piece after piece, each reduced to its owner by parts."""
        for rank, (start, count) in enumerate(zip(_starts(counts), counts, strict=True)):
            piece = wire[start : start + count]
            if rank != self.rank:
                for part in self._parts(piece):
                    self.comm.Reduce(part, None, _OPS[op], rank)
            elif in_place:
                for part in self._parts(piece):
                    self.comm.Reduce(MPI.IN_PLACE, part, _OPS[op], rank)
                target[...] = piece
            else:
                for part, into in zip(self._parts(piece), self._parts(target), strict=True):
                    self.comm.Reduce(part, into, _OPS[op], rank)

    def _broadcast_pieces(self, wire: Array, counts: Sequence[int]) -> list[MPI.Request]:
        """All_gather past the count limit: each piece broadcast by its owner, by parts."""
        return [
            self.comm.Ibcast(part, rank)
            for rank, start in enumerate(_starts(counts))
            for part in self._parts(wire[start : start + counts[rank]])
        ]

    def _fits(self, count: int) -> bool:
        return self.largest_count is None or count <= self.largest_count

    def _all_fit(self, count: int) -> bool:
        """The same on all ranks of the axis, for calls whose buffers differ in size between ranks.  Collective."""
        if self.largest_count is None:
            return True
        largest = np.array([count], np.int64)
        self.comm.Allreduce(MPI.IN_PLACE, largest, MPI.MAX)
        return self._fits(int(largest[0]))

    def _parts(self, wire: Array) -> list[Array]:
        """`wire` cut so that each part's count fits what this MPI takes in one call."""
        if self._fits(wire.size):
            return [wire]
        flat = wire.reshape(-1)
        step = self.largest_count or flat.size
        return [flat[start : start + step] for start in range(0, flat.size, step)]

    def _counts(self, buffer: Array, counts: Sequence[int] | None) -> list[int]:
        if counts is None:
            return run_lengths(split(buffer.size, self.size))
        if len(counts) != self.size or sum(counts) != buffer.size or min(counts) < 0:
            raise ValueError(
                f"counts {list(counts)} do not cut a buffer of {buffer.size} elements "
                f"for the {self.size} ranks of axis {self.name!r}"
            )
        return list(counts)

    def _ring(self, op: str, pieces: Sequence[int]) -> int:
        return ring_elements(op, pieces, self.rank)

    # -- the wire ---------------------------------------------------------------------------------------------------

    def _plain(self, buffer: Array) -> bool:
        """Whether MPI takes a NumPy `buffer` as it is, in one call, and can compute with it."""
        return type(buffer) is np.ndarray and self._fits(buffer.size) and not _is_half(buffer.dtype)

    def _wire(self, buffer: Array, *, reads: bool = True, arithmetic: bool = False) -> Array:
        """The flat array that MPI shall see of `buffer`.

        `reads`: the call needs its content.  `arithmetic`: MPI computes with the elements rather than moving them.
        """
        flat = buffer.reshape(-1)
        half = _is_half(flat.dtype)
        if arrays.is_device(buffer):
            arrays.ready(buffer)  # the readiness gate: what was queued on the stream is in memory now
            if _takes_device_pointers(buffer, arithmetic):
                return flat
            wire = arrays.pinned_empty(flat.size, flat.dtype, like=buffer)
            if reads:
                arrays.copy_to_host(flat, wire)
            flat = wire
        if half:
            return flat.astype(np.float32) if arithmetic else flat.view(np.uint16)
        return flat

    def _unwire(self, wire: Array, buffer: Array) -> Array:
        """Bring what MPI left in `wire` back into `buffer`, unless they are the same memory; returns `buffer`."""
        if arrays.is_device(wire):
            return buffer
        if arrays.is_device(buffer):
            half = _is_half(buffer.dtype)
            narrow = wire.astype(buffer.dtype) if half and wire.dtype == np.float32 else wire.view(buffer.dtype)
            arrays.copy_to_device(narrow, buffer.reshape(-1))
        elif not np.may_share_memory(wire, buffer):
            buffer.reshape(-1)[...] = wire
        return buffer

    # -- the ledger -------------------------------------------------------------------------------------------------

    def _begin(self, op: str, buffer: Array, label: str, detail: str = "") -> Call:
        if type(buffer) is not np.ndarray and not arrays.is_array(buffer):
            raise TypeError(f"{op} needs a NumPy or CuPy array, got {type(buffer).__name__}")
        if not buffer.flags.c_contiguous:
            raise ValueError(f"{op} needs a contiguous buffer, got a strided one of shape {buffer.shape}")
        self._sequence += 1
        call = self.ledger.begin(self.name, self._sequence, op, buffer.dtype, buffer.size, label)
        if self._check_comm is not None and op not in ("send", "recv"):
            self._check(call, detail)
        return call

    def _check(self, call: Call, detail: str) -> None:
        """Debug: all ranks tell what they are about to do, and all raise where they differ.  Collective."""
        assert self._check_comm is not None
        what = f"{call.op}({call.elements} x {call.dtype}{f', {detail}' if detail else ''})"
        own = np.zeros(_RECORD_BYTES, np.uint8)
        text = f"{what}\t{call.site}".encode()[:_RECORD_BYTES]
        own[: len(text)] = np.frombuffer(text, np.uint8)
        told = np.empty((self.size, _RECORD_BYTES), np.uint8)
        self.ledger.active = call
        self._check_comm.Allgather(own, told)
        self.ledger.active = None
        said = [row.tobytes().rstrip(b"\0").decode(errors="replace").partition("\t") for row in told]
        if any(other[0] != what for other in said):
            lines = [f"  rank {rank}: {doing} called at {site}" for rank, (doing, _, site) in enumerate(said)]
            raise CollectiveMismatchError(
                f"call #{call.sequence} on axis {self.name!r} differs between its ranks:\n" + "\n".join(lines)
            )


_NOTHING = np.empty(0, np.uint8)


def _is_half(dtype: np.dtype) -> bool:
    """float16 or bfloat16, which is what MPI cannot or may not compute with: such buffers are reduced in float32."""
    return dtype.itemsize == 2 and dtype.kind not in "iu"


def _takes_device_pointers(buffer: Array, arithmetic: bool) -> bool:
    """Whether MPI was seen to take device memory in non-blocking calls, which all but the plainest calls are."""
    if not hasattr(buffer, "__cuda_array_interface__") or _is_half(buffer.dtype):
        return False
    proven = probe(device=True)
    return proven.device_nonblocking if arithmetic else proven.device_buffers


def _starts(counts: Sequence[int]) -> list[int]:
    starts = [0]
    for count in counts[:-1]:
        starts.append(starts[-1] + count)
    return starts


def _same(one: Array, other: Array) -> None:
    if one.shape != other.shape or one.dtype != other.dtype:
        raise ValueError(
            f"the two buffers differ: {one.dtype} {one.shape} and {other.dtype} {other.shape}; they must be alike"
        )


def _piece(piece: Array, count: int, whole: Array) -> None:
    if piece.size != count or piece.dtype != whole.dtype:
        raise ValueError(
            f"this rank's piece must have {count} elements of {whole.dtype}, got {piece.size} of {piece.dtype}"
        )
