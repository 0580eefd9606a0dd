"""Collectives on flat buffers, for NumPy and device arrays, over one axis of a mesh.

The first argument is always the whole buffer: `all_reduce` sums it, `reduce_scatter` leaves each rank a piece of it,
`all_gather` fills it from the pieces of all ranks.  Without a second buffer they work in place.  The adjoint of each is
here too: all_reduce is its own adjoint, reduce_scatter is that of all_gather and the other way round, all_to_all is its
own with the counts swapped, and the adjoint of broadcast is a reduce to the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpishard.backend import array as arrays
from mpishard.comm.capabilities import probe
from mpishard.comm.channel import Channel, Comparison
from mpishard.comm.ledger import Ledger, all_reduce_elements, ring_elements
from mpishard.comm.request import Fields, Request
from mpishard.comm.staging import stage_in, stage_out
from mpishard.deprecated import renamed_method
from mpishard.layout.boxes import counts as run_lengths
from mpishard.layout.boxes import split

Array = Any
Counts = Sequence[int] | None

_OPS = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN, "prod": MPI.PROD}
_NOTHING = np.empty(0, np.uint8)
# The errors that `raise_if_any` can raise on a rank whose own check passed.
_FILE_ERRORS = (OSError, PermissionError, FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)
_KNOWN_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (ValueError, TypeError, FloatingPointError, RuntimeError, *_FILE_ERRORS)
}


def _known_kind(problem: Exception) -> str:
    """The name of the error's class, or of its nearest base class that other ranks can raise too."""
    kinds = [kind.__name__ for kind in type(problem).__mro__]
    return next((name for name in kinds if name in _KNOWN_ERRORS), kinds[0])


class Axis:
    """One direction of a mesh: the ranks that differ in one coordinate only, and the collectives over them.

    Buffers are C-contiguous arrays, NumPy or device, of any dtype that MPI knows, or float16 and bfloat16 (reduced in
    float32).  All methods but `send` and `recv` are collective over the axis.  `op` is ``"sum"``, ``"max"``, ``"min"``
    or ``"prod"``; `label` names the purpose in the ledger.  `counts` are elements by rank; without them a buffer is cut
    as `mpishard.layout.boxes.split` does.

    The ``start_*`` forms return a `Request` and otherwise do the same.  They have a communicator of their own: all
    ranks must start them in one order, but a blocking call may come before them on one rank and after them on another.

    Attributes
    ----------
    name : str
    comm : mpi4py.MPI.Intracomm
    rank, size : int
    members : list of int
        Ranks of the whole mesh that are on it.
    ledger : Ledger
    """

    rank: int
    size: int
    members: list[int]

    def __init__(
        self,
        name: str,
        comm: MPI.Intracomm,
        ledger: Ledger,
        *,
        members: Sequence[int] | None = None,
        later: MPI.Intracomm | None = None,
        comparison: Comparison | None = None,
    ) -> None:
        self.name = name
        self.ledger = ledger
        self.largest_count = None if probe().large_counts else 2**31 - 1
        self._groups: dict[tuple[int, ...], str] = {}
        self.rebind(comm, members=members, later=later, comparison=comparison)

    def rebind(
        self,
        comm: MPI.Intracomm,
        *,
        members: Sequence[int] | None = None,
        later: MPI.Intracomm | None = None,
        comparison: Comparison | None = None,
    ) -> None:
        """Become the axis of other ranks; every holder of this object sees the change.

        Collective over `comm`.  `later` is a duplicate of `comm` for the ``start_*`` forms; default: made here.  The
        old communicators are not freed.
        """
        self.comm = comm
        self._comparison = comparison
        self.rank = comm.rank
        self.size = comm.size
        self.members = list(range(comm.size) if members is None else members)
        self._blocking = Channel(comm, self._comparison)
        self._nonblocking = Channel(comm.Dup() if later is None else later, self._comparison)
        self._subgroups: dict[tuple[int, ...] | str, Axis | None] = {}

    def revoke(self) -> None:
        """Make every operation on its communicators fail on all ranks, also those under way.  Not collective (ULFM)."""
        for part in self._subgroups.values():
            if part is not None:
                part.revoke()
        for channel in (self._blocking, self._nonblocking):
            channel.revoke()

    def __repr__(self) -> str:
        return f"Axis({self.name!r}, rank={self.rank}, size={self.size})"

    def subgroup(self, name: str, ranks: Sequence[int]) -> Axis | None:
        """The axis of `ranks`, a part of this one, in ascending order; None on the other ranks.

        Collective over this axis.  A second call with the same ranks returns the same axis, under its first name.  It
        is freed with this axis.
        """
        key = tuple(sorted(ranks))
        if key not in self._subgroups:
            self._groups.setdefault(key, name)
            self._subgroups[key] = self._part(key, self.comm, 0)
        return self._subgroups[key]

    def split(self, name: str, color: int) -> Axis:
        """The axis of the ranks that give the same color.  Collective over this axis.

        A second call with the same name returns the same axis, until `rebind`.  It is freed with this axis.
        """
        part = self._subgroups.get(name)
        if part is None:
            now, later = (self.comm.Split(color, self.rank) for _ in range(2))
            assert isinstance(now, MPI.Intracomm) and isinstance(later, MPI.Intracomm)
            ranks = MPI.Group.Translate_ranks(now.group, None, self.comm.group)
            members = [self.members[rank] for rank in ranks]
            part = Axis(name, now, self.ledger, members=members, later=later, comparison=self._comparison)
            self._subgroups[name] = part
        return part

    def regain_parts(self, parent: MPI.Intracomm, color: int) -> None:
        """Make the axes of `subgroup` again after `rebind`.  Collective over `parent`; one axis per color."""
        for key in self._groups:
            self._subgroups[key] = self._part(key, parent, color)

    def _part(self, key: tuple[int, ...], parent: MPI.Intracomm, color: int) -> Axis | None:
        now, later = (parent.Split(color if self.rank in key else MPI.UNDEFINED, self.rank) for _ in range(2))
        if self.rank not in key:
            return None
        assert isinstance(now, MPI.Intracomm) and isinstance(later, MPI.Intracomm)
        members = [self.members[rank] for rank in key]
        return Axis(self._groups[key], now, self.ledger, members=members, later=later, comparison=self._comparison)

    def free(self) -> None:
        """Free the communicators.  Collective."""
        for part in self._subgroups.values():
            if part is not None:
                part.free()
        self._nonblocking.free()
        self._blocking.free()

    # -- collectives ------------------------------------------------------------------------------------------------

    def all_reduce(self, buffer: Array, out: Array | None = None, op: str = "sum", *, label: str = "") -> Array:
        """Combine `buffer` over all ranks into `out` (default: in place) on every rank; returns the result."""
        channel, ledger, limit = self._blocking, self.ledger, self.largest_count
        plain = out is None and type(buffer) is np.ndarray and buffer.itemsize != 2 and buffer.flags.carray
        if not plain or op not in _OPS or channel.comparison is not None or (limit is not None and buffer.size > limit):
            return self._all_reduce(channel, buffer, out, op, label).wait()
        # The fast path: a large buffer has evicted the interpreter from the caches, so that every function call here
        # costs microseconds.
        channel.calls += 1
        ledger.active = call = ledger.begin(
            self.name, channel.calls, "all_reduce", buffer.dtype, buffer.size, label, self.members
        )
        try:
            self.comm.Allreduce(MPI.IN_PLACE, buffer, _OPS[op])
        finally:
            ledger.active = None
        sent = all_reduce_elements(buffer.size, self.size, self.rank) * buffer.itemsize
        ledger.enter(call, sent, ledger.spend(call, call[0]))
        return buffer

    def start_all_reduce(self, buffer: Array, out: Array | None = None, op: str = "sum", *, label: str = "") -> Request:
        return self._all_reduce(self._nonblocking, buffer, out, op, label)

    def reduce_scatter(
        self, buffer: Array, out: Array | None = None, counts: Counts = None, op: str = "sum", *, label: str = ""
    ) -> Array:
        """Combine `buffer` over all ranks and keep piece number `rank` of it.

        The piece goes to `out`, or without it to the front of `buffer`, whose rest is then undefined.
        """
        return self._reduce_scatter(self._blocking, buffer, out, counts, op, label).wait()

    def start_reduce_scatter(
        self, buffer: Array, out: Array | None = None, counts: Counts = None, op: str = "sum", *, label: str = ""
    ) -> Request:
        return self._reduce_scatter(self._nonblocking, buffer, out, counts, op, label)

    def all_gather(self, buffer: Array, piece: Array | None = None, counts: Counts = None, *, label: str = "") -> Array:
        """Fill `buffer` with the `piece` of every rank, by rank; without it the rank's piece is in `buffer` already."""
        return self._all_gather(self._blocking, buffer, piece, counts, label).wait()

    def start_all_gather(
        self, buffer: Array, piece: Array | None = None, counts: Counts = None, *, label: str = ""
    ) -> Request:
        return self._all_gather(self._nonblocking, buffer, piece, counts, label)

    def all_to_all(
        self,
        buffer: Array,
        out: Array,
        counts: Counts = None,
        out_counts: Counts = None,
        *,
        keep_own: bool = False,
        label: str = "",
    ) -> Array:
        """Send run ``s`` of `buffer` to rank ``s`` and receive rank ``s``'s run into run ``s`` of `out`.

        With `keep_own` a rank's run for itself stays in `buffer`, and `out_counts` has 0 for it.
        """
        return self._all_to_all(self._blocking, buffer, out, counts, out_counts, keep_own, label).wait()

    def start_all_to_all(
        self,
        buffer: Array,
        out: Array,
        counts: Counts = None,
        out_counts: Counts = None,
        *,
        keep_own: bool = False,
        label: str = "",
    ) -> Request:
        return self._all_to_all(self._nonblocking, buffer, out, counts, out_counts, keep_own, label)

    def broadcast(self, buffer: Array, root: int = 0, *, label: str = "") -> Array:
        """Copy `buffer` of rank `root` to all ranks, in place."""
        return self._broadcast(self._blocking, buffer, root, label).wait()

    def start_broadcast(self, buffer: Array, root: int = 0, *, label: str = "") -> Request:
        return self._broadcast(self._nonblocking, buffer, root, label)

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        call = self._begin(self._blocking, "barrier", _NOTHING, "")
        Request(self.ledger, call, 0, [self.comm.Ibarrier()], lambda: None).wait()

    # -- point to point ---------------------------------------------------------------------------------------------

    def send(self, buffer: Array, to: int, tag: int = 0, *, label: str = "") -> None:
        """Send `buffer` to rank `to`; returns when it may be written again.  Not collective."""
        self._wait(self.start_send(buffer, to, tag, label=label), to, tag)

    def recv(self, buffer: Array, source: int, tag: int = 0, *, label: str = "") -> Array:
        """Receive into `buffer` from rank `source`; ValueError if fewer elements were sent.  Not collective."""
        return self._wait(self.start_recv(buffer, source, tag, label=label), source, tag)

    def start_send(self, buffer: Array, to: int, tag: int = 0, *, label: str = "") -> Request:
        call = self._begin(self._blocking, "send", buffer, label, peer=to)
        self._note_message("send", to, tag)
        requests = [self.comm.Isend(part, to, tag) for part in self._parts(stage_out(buffer))]
        return Request(self.ledger, call, buffer.nbytes, requests, lambda: buffer)

    def start_recv(self, buffer: Array, source: int, tag: int = 0, *, label: str = "") -> Request:
        call = self._begin(self._blocking, "recv", buffer, label, peer=source)
        self._note_message("recv", source, tag)
        staged = stage_out(buffer, reads=False)
        requests = [self.comm.Irecv(part, source, tag) for part in self._parts(staged)]
        statuses = [MPI.Status() for _ in requests]

        def finish() -> Array:
            got = sum(status.Get_count(MPI.BYTE) for status in statuses)
            if got != buffer.nbytes:
                raise ValueError(f"rank {source} sent {got} bytes to a buffer of {buffer.nbytes}; sizes must agree")
            return stage_in(staged, buffer)

        return Request(self.ledger, call, 0, requests, finish, statuses=statuses)

    def _note_message(self, op: str, peer: int, tag: int) -> None:
        """Debug: note that this rank has come to its end of a message."""
        if peer >= 0 <= tag:
            self._blocking.message(op, self.members[self.rank], self.members[peer], tag)

    def _wait(self, pending: Request, peer: int, tag: int) -> Array:
        """Finish a message; in debug mode raise if both ends wait in calls that do not match."""
        if peer >= 0 <= tag:  # not MPI.PROC_NULL, ANY_SOURCE or ANY_TAG
            self._blocking.wait(
                pending.call, self.members[self.rank], self.members[peer], tag, pending.test, self.ledger
            )
        return pending.wait()

    # -- agreement --------------------------------------------------------------------------------------------------

    exchange = renamed_method("Axis", "exchange", "allgather_object")
    agree = renamed_method("Axis", "agree", "raise_if_any")

    def allgather_object(self, value: Any) -> list[Any]:
        """The small plain values (numbers, strings, tuples of them) of all ranks, by rank."""
        call = self._begin(self._blocking, "allgather_object", _NOTHING, "control")
        self.ledger.active = call
        try:
            values = self.comm.allgather(value)
        finally:
            self.ledger.active = None
        self.ledger.enter(call, 0, self.ledger.spend(call, call[0]))
        return values

    def raise_if_any(self, problem: Exception | None) -> None:
        """Raise on all ranks if any rank has a problem: a rank raises its own, or else that of the first rank with one.

        No rank goes on while another raises, so no rank is left waiting.
        """
        bad = np.array([problem is not None], np.int64)
        if self.all_reduce(bad, op="max", label="control")[0]:
            self.raise_together(problem)

    def raise_together(self, problem: Exception | None) -> None:
        """The raising half of `raise_if_any`, once all ranks know that some rank has a problem."""
        problems = self.allgather_object(None if problem is None else (_known_kind(problem), str(problem)))
        if problem is not None:
            raise problem
        rank, (kind, text) = next((rank, known) for rank, known in enumerate(problems) if known is not None)
        raise _KNOWN_ERRORS.get(kind, RuntimeError)(f"rank {rank} of axis {self.name!r}: {text}")

    # -- implementation ---------------------------------------------------------------------------------------------

    def _all_reduce(self, channel: Channel, buffer: Array, out: Array | None, op: str, label: str) -> Request:
        call = self._begin(channel, "all_reduce", buffer, label, op)
        if out is None:
            out = buffer
            target = stage_out(buffer, arithmetic=True)
            sources: list[Any] = [MPI.IN_PLACE for _ in self._parts(target)]
        else:
            _same(buffer, out)
            target = stage_out(out, reads=False, arithmetic=True)
            sources = self._parts(stage_out(buffer, arithmetic=True))
        parts = list(zip(sources, self._parts(target), strict=True))
        requests = []
        if channel is self._nonblocking:
            requests = [channel.comm.Iallreduce(source, part, _OPS[op]) for source, part in parts]
        else:
            # Blocking, as on the fast path of `all_reduce`: each rank chooses that path by its own buffer, and MPI does
            # not match a blocking collective with a non-blocking one.
            self.ledger.active = call
            try:
                for source, part in parts:
                    channel.comm.Allreduce(source, part, _OPS[op])
            finally:
                self.ledger.active = None
        sent = all_reduce_elements(buffer.size, self.size, self.rank) * buffer.itemsize
        return Request(self.ledger, call, sent, requests, lambda: stage_in(target, out), sources)

    def _reduce_scatter(
        self, channel: Channel, buffer: Array, out: Array | None, counts: Counts, op: str, label: str
    ) -> Request:
        call = self._begin(channel, "reduce_scatter", buffer, label, op, counts)
        counts = self._counts(buffer, counts)
        sent = ring_elements("reduce_scatter", counts, self.rank) * buffer.itemsize
        staged = stage_out(buffer, arithmetic=True)
        in_place = out is None
        if out is None:
            out = buffer.reshape(-1)[: counts[self.rank]]
            target = staged[: counts[self.rank]]
        else:
            _piece(out, counts[self.rank], buffer)
            target = stage_out(out, reads=False, arithmetic=True)
        requests = []
        if not self._fits(staged.size):
            self._reduce_pieces(channel, call, staged, target, counts, op, in_place)
        elif in_place:
            requests.append(channel.comm.Ireduce_scatter(MPI.IN_PLACE, staged, counts, _OPS[op]))
        else:
            requests.append(channel.comm.Ireduce_scatter(staged, target, counts, _OPS[op]))
        return Request(self.ledger, call, sent, requests, lambda: stage_in(target, out), [staged])

    def _all_gather(self, channel: Channel, buffer: Array, piece: Array | None, counts: Counts, label: str) -> Request:
        call = self._begin(channel, "all_gather", buffer, label, "", counts)
        counts = self._counts(buffer, counts)
        starts = _starts(counts)
        staged = stage_out(buffer, reads=piece is None)
        source: Any = MPI.IN_PLACE
        if piece is not None:
            _piece(piece, counts[self.rank], buffer)
            source = stage_out(piece)
        if self._fits(staged.size):
            requests = [channel.comm.Iallgatherv(source, [staged, (counts, starts)])]
        else:
            if piece is not None:
                staged[starts[self.rank] : starts[self.rank] + counts[self.rank]] = source
                arrays.ready(staged)
            # Above the count limit the owner of each piece broadcasts it, in parts.
            requests = [
                channel.comm.Ibcast(part, rank)
                for rank, start in enumerate(starts)
                for part in self._parts(staged[start : start + counts[rank]])
            ]
        sent = ring_elements("all_gather", counts, self.rank) * buffer.itemsize
        return Request(self.ledger, call, sent, requests, lambda: stage_in(staged, buffer), [source])

    def _all_to_all(
        self,
        channel: Channel,
        buffer: Array,
        out: Array,
        counts: Counts,
        out_counts: Counts,
        keep_own: bool,
        label: str,
    ) -> Request:
        call = self._begin(channel, "all_to_all", buffer, label)
        counts, out_counts = self._counts(buffer, counts), self._counts(out, out_counts)
        if buffer.dtype != out.dtype:
            raise TypeError(f"all_to_all from {buffer.dtype} to {out.dtype}; both buffers need one dtype")
        staged, target = stage_out(buffer), stage_out(out, reads=False)
        starts, out_starts = _starts(counts), _starts(out_counts)
        if keep_own:
            counts[self.rank] = 0
        if self._all_fit(call, channel, max(staged.size, target.size)):
            requests = [channel.comm.Ialltoallv([staged, (counts, starts)], [target, (out_counts, out_starts)])]
        else:
            runs = [target[start : start + count] for start, count in zip(out_starts, out_counts, strict=True)]
            requests = [channel.comm.Irecv(p, rank) for rank, run in enumerate(runs) for p in self._parts(run)]
            runs = [staged[start : start + count] for start, count in zip(starts, counts, strict=True)]
            requests += [channel.comm.Isend(p, rank) for rank, run in enumerate(runs) for p in self._parts(run)]
        sent = ring_elements("all_to_all", counts, self.rank) * buffer.itemsize
        return Request(self.ledger, call, sent, requests, lambda: stage_in(target, out), [staged])

    def _broadcast(self, channel: Channel, buffer: Array, root: int, label: str) -> Request:
        if not 0 <= root < self.size:
            raise ValueError(f"broadcast from rank {root} of axis {self.name!r}, which has {self.size} ranks")
        call = self._begin(channel, "broadcast", buffer, label, f"root {root}")
        staged = stage_out(buffer, reads=self.rank == root)
        requests = [channel.comm.Ibcast(part, root) for part in self._parts(staged)]
        last = self.rank == (root - 1) % self.size
        sent = 0 if last else buffer.nbytes
        return Request(self.ledger, call, sent, requests, lambda: stage_in(staged, buffer))

    def _reduce_pieces(
        self,
        channel: Channel,
        call: Fields,
        staged: Array,
        target: Array,
        counts: Sequence[int],
        op: str,
        in_place: bool,
    ) -> None:
        """Reduce_scatter above the count limit: each piece is reduced to its owner, in parts, one after another."""
        self.ledger.active = call
        for rank, (start, count) in enumerate(zip(_starts(counts), counts, strict=True)):
            piece = staged[start : start + count]
            if rank != self.rank:
                for part in self._parts(piece):
                    channel.comm.Reduce(part, None, _OPS[op], rank)
            elif in_place:
                for part in self._parts(piece):
                    channel.comm.Reduce(MPI.IN_PLACE, part, _OPS[op], rank)
                target[...] = piece
            else:
                for part, into in zip(self._parts(piece), self._parts(target), strict=True):
                    channel.comm.Reduce(part, into, _OPS[op], rank)
        self.ledger.active = None

    def _fits(self, count: int) -> bool:
        return self.largest_count is None or count <= self.largest_count

    def _all_fit(self, call: Fields, channel: Channel, count: int) -> bool:
        """Whether the buffers of all ranks fit; for calls whose buffers differ in size between ranks.  Collective."""
        if self.largest_count is None:
            return True
        largest = np.array([count], np.int64)
        self.ledger.active = call
        channel.comm.Allreduce(MPI.IN_PLACE, largest, MPI.MAX)
        self.ledger.active = None
        return self._fits(int(largest[0]))

    def _parts(self, staged: Array) -> list[Array]:
        """`staged`, cut into parts that this MPI takes in one call."""
        if self._fits(staged.size):
            return [staged]
        step = self.largest_count or staged.size
        return [staged[start : start + step] for start in range(0, staged.size, step)]

    def _counts(self, buffer: Array, counts: Counts) -> list[int]:
        if counts is None:
            return run_lengths(split(buffer.size, self.size))
        if len(counts) != self.size or sum(counts) != buffer.size or min(counts) < 0:
            raise ValueError(
                f"counts {list(counts)} do not cut a buffer of {buffer.size} elements "
                f"for the {self.size} ranks of axis {self.name!r}"
            )
        return list(counts)

    def _begin(
        self,
        channel: Channel,
        op: str,
        buffer: Array,
        label: str,
        detail: str = "",
        counts: Counts = None,
        peer: int | None = None,
    ) -> Fields:
        """Check what this rank can check alone, and describe the call."""
        if type(buffer) is not np.ndarray and not arrays.is_array(buffer):
            raise TypeError(f"{op} needs a NumPy or CuPy array, got {type(buffer).__name__}")
        if not buffer.flags.c_contiguous:
            raise ValueError(f"{op} needs a contiguous buffer, got a strided one of shape {buffer.shape}")
        if op in ("all_reduce", "reduce_scatter") and detail not in _OPS:
            raise ValueError(f"{op} knows the operations {', '.join(_OPS)}, got {detail!r}")
        channel.calls += 1
        # `peer` is a rank of the axis, or one of MPI's special numbers below zero.
        members = self.members if peer is None or peer < 0 else (self.members[self.rank], self.members[peer])
        call = self.ledger.begin(self.name, channel.calls, op, buffer.dtype, buffer.size, label, members)
        if peer is None:
            channel.compare(self.ledger, call, detail, counts, self.members)
        return call


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
