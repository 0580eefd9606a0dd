"""How each collective is done by MPI: on the array itself or a staged copy, in one call or in parts.

Each method here starts one collective over a channel and returns its `Request`.  `Communicator` has the blocking and
the started form of each, and says what the arguments are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpishard.backend import array as arrays
from mpishard.comm.capabilities import probe
from mpishard.comm.channel import OPS, Channel
from mpishard.comm.ledger import all_reduce_elements, ring_elements
from mpishard.comm.request import Fields, Request
from mpishard.comm.staging import stage_in, stage_out
from mpishard.layout.boxes import counts as run_lengths
from mpishard.layout.boxes import split

Array = Any
Counts = Sequence[int] | None
# Bytes between which a reduce-scatter is an exchange of pieces and sums of our own, by MPI library.  Open MPI 5 reduces
# the whole buffer and scatters it: that sends 1.25 of what a ring does, and takes several times as long where the
# buffer does not fit the caches.  MPICH 5 takes 1.3 to 3.7 times as long for 200 to 400 kB, longer than for 1 MB; with
# the largest buffers it is as fast (`python benchmarks/reduce_scatter.py`).
EXCHANGED_BYTES: dict[str, range] = {"Open MPI": range(2**15, 2**62), "MPICH": range(2**17, 2**24)}
# Each axis keeps memory for arriving pieces up to this sum, and as much for started calls: new pages from the kernel
# can take longer than the exchange itself, and the C library asks for them each time.
_KEPT_BYTES = 2**24


class Collectives:
    """The collectives over one channel.

    Parameters
    ----------
    channel : Channel
    nonblocking : bool
        Whether a reduction may still be under way when its method returns.

    Notes
    -----
    Each collective is one call of MPI on all ranks, which depends on sizes alone: a rank chooses the fast path of
    `Communicator` by its own arguments, and MPI does not match a blocking collective with a non-blocking one.  It is
    the non-blocking one for all but reductions: the blocking all-gather of MPICH 5 takes twice as long as the
    non-blocking one if pieces differ in size (1 MB and more, 2 and 4 ranks of one node), and a non-blocking all-reduce
    of Open MPI 5 up to twice as long as the blocking one.
    """

    def __init__(self, channel: Channel, *, nonblocking: bool) -> None:
        self.channel = channel
        self._comm = channel.comm
        self._nonblocking = nonblocking
        self._ledger = channel.ledger
        self._rank, self._size = channel.rank, channel.size
        self._spare: list[np.ndarray] = []  # memory for arriving pieces that no exchange is using, in bytes

    def is_plain(self, buffer: Array, op: str = "sum", counts: Counts = None) -> bool:
        """Whether one call of MPI takes these arguments as they are, and no rank compares them.  Not collective."""
        channel = self.channel
        if type(buffer) is not np.ndarray or buffer.itemsize == 2 or not buffer.flags.carray or op not in OPS:
            return False
        if channel.matching is not None or not channel.fits(buffer.size):
            return False
        return counts is None or self._cuts(buffer, counts)

    def is_plain_reduce_scatter(self, buffer: Array, op: str, counts: Counts) -> bool:
        """Whether these arguments are plain, and MPI's own reduce-scatter takes them.  Not collective."""
        return self.is_plain(buffer, op, counts) and not self._exchanges(buffer, op, self.counts(buffer, counts))

    def all_reduce(self, buffer: Array, out: Array | None, op: str, label: str) -> Request:
        """Start an all-reduce."""
        channel, ledger = self.channel, self._ledger
        call = channel.begin("all_reduce", buffer, label, op)
        if out is None:
            out = buffer
            target = stage_out(buffer, arithmetic=True)
            sources: list[Any] = [MPI.IN_PLACE for _ in channel.parts(target)]
        else:
            _check_alike(buffer, out)
            target = stage_out(out, reads=False, arithmetic=True)
            sources = channel.parts(stage_out(buffer, arithmetic=True))
        parts = list(zip(sources, channel.parts(target), strict=True))
        requests = self._calls(call, "allreduce", [(source, part, OPS[op]) for source, part in parts])
        sent = all_reduce_elements(buffer.size, self._size, self._rank) * buffer.itemsize
        return Request(ledger, call, sent, requests, lambda: stage_in(target, out), sources)

    def reduce_scatter(self, buffer: Array, out: Array | None, counts: Counts, op: str, label: str) -> Request:
        """Start a reduce-scatter."""
        channel, rank = self.channel, self._rank
        call = channel.begin("reduce_scatter", buffer, label, op, counts)
        counts = self.counts(buffer, counts)
        sent = ring_elements("reduce_scatter", counts, rank) * buffer.itemsize
        staged = stage_out(buffer, arithmetic=True)
        in_place = out is None
        if out is None:
            out = buffer.reshape(-1)[: counts[rank]]
            target = staged[: counts[rank]]
        else:
            _check_piece(out, counts[rank], buffer)
            target = stage_out(out, reads=False, arithmetic=True)
        if channel.fits(staged.size) and self._exchanges(staged, op, counts):
            exchange, add = self._start_exchange(staged, target, counts)
            return Request(self._ledger, call, sent, [exchange], lambda: stage_in(add(), out), [staged])
        into = target
        if not in_place and (not target.size or arrays.module_of(staged).may_share_memory(staged, target)):
            # MPI takes no buffers that overlap, and MPICH none that begin at one address, be they empty.
            into = arrays.module_of(staged).empty_like(target)

        def finish() -> Array:
            if into is not target:
                target[...] = into
            return stage_in(target, out)

        requests: list[MPI.Request] = []
        if not channel.fits(staged.size):
            self._reduce_pieces(call, staged, into, counts, op, in_place)
        else:
            arguments = (MPI.IN_PLACE, staged) if in_place else (staged, into)
            requests = self._calls(call, "reduce_scatter", [(*arguments, counts, OPS[op])])
        return Request(self._ledger, call, sent, requests, finish, [staged])

    def all_gather(self, buffer: Array, piece: Array | None, counts: Counts, label: str) -> Request:
        """Start an all-gather."""
        channel, rank = self.channel, self._rank
        call = channel.begin("all_gather", buffer, label, "", counts)
        counts = self.counts(buffer, counts)
        starts = _starts(counts)
        staged = stage_out(buffer, reads=piece is None)
        source: Any = MPI.IN_PLACE
        if piece is not None:
            _check_piece(piece, counts[rank], buffer)
            source = stage_out(piece)
        if channel.fits(staged.size):
            requests = [self.gather(source, staged, counts)]
        else:
            if piece is not None:
                staged[starts[rank] : starts[rank] + counts[rank]] = source
                arrays.ready(staged)
            # Above the count limit the owner of each piece broadcasts it, in parts.
            requests = [
                self._comm.Ibcast(part, owner)
                for owner, start in enumerate(starts)
                for part in channel.parts(staged[start : start + counts[owner]])
            ]
        sent = ring_elements("all_gather", counts, rank) * buffer.itemsize
        return Request(self._ledger, call, sent, requests, lambda: stage_in(staged, buffer), [source])

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
        """Start an all-to-all."""
        channel, comm = self.channel, self._comm
        call = channel.begin("all_to_all", buffer, label)
        counts, out_counts = self.counts(buffer, counts), self.counts(out, out_counts)
        if buffer.dtype != out.dtype:
            raise TypeError(f"all_to_all from {buffer.dtype} to {out.dtype}; both buffers need one dtype")
        staged, target = stage_out(buffer), stage_out(out, reads=False)
        starts, out_starts = _starts(counts), _starts(out_counts)
        if keep_own:
            counts[self._rank] = 0
        if self._all_fit(call, max(staged.size, target.size)):
            requests = [comm.Ialltoallv([staged, (counts, starts)], [target, (out_counts, out_starts)])]
        else:
            runs = [target[start : start + count] for start, count in zip(out_starts, out_counts, strict=True)]
            requests = [comm.Irecv(part, rank) for rank, run in enumerate(runs) for part in channel.parts(run)]
            runs = [staged[start : start + count] for start, count in zip(starts, counts, strict=True)]
            requests += [comm.Isend(part, rank) for rank, run in enumerate(runs) for part in channel.parts(run)]
        sent = ring_elements("all_to_all", counts, self._rank) * buffer.itemsize
        return Request(self._ledger, call, sent, requests, lambda: stage_in(target, out), [staged])

    def broadcast(self, buffer: Array, root: int, label: str) -> Request:
        """Start a broadcast."""
        channel = self.channel
        if not 0 <= root < self._size:
            raise ValueError(f"broadcast from rank {root} of axis {channel.name!r}, which has {self._size} ranks")
        call = channel.begin("broadcast", buffer, label, f"root {root}")
        staged = stage_out(buffer, reads=self._rank == root)
        requests = [self._comm.Ibcast(part, root) for part in channel.parts(staged)]
        last = self._rank == (root - 1) % self._size
        sent = 0 if last else buffer.nbytes
        return Request(self._ledger, call, sent, requests, lambda: stage_in(staged, buffer))

    def _calls(self, call: Fields, name: str, calls: Sequence[tuple[Any, ...]]) -> list[MPI.Request]:
        """Make MPI's calls of this name with these arguments; returns what is still under way."""
        if self._nonblocking:
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

    def _exchanges(self, staged: Array, op: str, counts: Sequence[int]) -> bool:
        """Whether a reduce-scatter is an exchange of pieces; the same on all ranks."""
        if self._size == 1 or op != "sum" or arrays.is_device(staged):
            return False
        # What arrives at the owner of the largest piece, which needs memory for it.
        most = max(counts) * (self._size - 1)
        if most > 2 * staged.size or not self.channel.fits(most):
            return False
        return staged.nbytes in EXCHANGED_BYTES.get(probe().library, ())

    def _start_exchange(
        self, staged: Array, target: Array, counts: Sequence[int]
    ) -> tuple[MPI.Request, Callable[[], Array]]:
        """Start to send each rank its piece; the function that is returned then adds up this rank's in `target`."""
        starts, rank, count = _starts(counts), self._rank, counts[self._rank]
        own = staged[starts[rank] : starts[rank] + count]
        sent, arriving = list(counts), [count] * self._size
        sent[rank] = arriving[rank] = 0
        size = count * (self._size - 1) * staged.itemsize
        memory = self._memory(size)
        received = memory[:size].view(staged.dtype)
        exchange = self._comm.Ialltoallv([staged, (sent, starts)], [received, (arriving, _starts(arriving))])

        def add() -> Array:
            total = own
            for start in range(0, received.size, max(count, 1)):
                total = np.add(total, received[start : start + count], out=target)
            if memory.size + sum(each.size for each in self._spare) <= _KEPT_BYTES:
                self._spare.append(memory)
            return target

        return exchange, add

    def _memory(self, size: int) -> np.ndarray:
        """At least so many bytes, that no other exchange is using."""
        self._spare.sort(key=len)
        for index, memory in enumerate(self._spare):
            if memory.size >= size:
                return self._spare.pop(index)
        if self._spare and size <= _KEPT_BYTES:
            self._spare.pop()  # makes room
        return np.empty(size, np.uint8)

    def _reduce_pieces(
        self, call: Fields, staged: Array, target: Array, counts: Sequence[int], op: str, in_place: bool
    ) -> None:
        """Reduce_scatter above the count limit: each piece is reduced to its owner, in parts, one after another."""
        comm, parts = self._comm, self.channel.parts
        self._ledger.active = call
        for rank, (start, count) in enumerate(zip(_starts(counts), counts, strict=True)):
            piece = staged[start : start + count]
            if rank != self._rank:
                for part in parts(piece):
                    comm.Reduce(part, None, OPS[op], rank)
            elif in_place:
                for part in parts(piece):
                    comm.Reduce(MPI.IN_PLACE, part, OPS[op], rank)
                target[...] = piece
            else:
                for part, into in zip(parts(piece), parts(target), strict=True):
                    comm.Reduce(part, into, OPS[op], rank)
        self._ledger.active = None

    def _all_fit(self, call: Fields, count: int) -> bool:
        """Whether the buffers of all ranks fit; for calls whose buffers differ in size between ranks.  Collective."""
        if self.channel.largest_count is None:
            return True
        largest = np.array([count], np.int64)
        self._ledger.active = call
        self._comm.Allreduce(MPI.IN_PLACE, largest, MPI.MAX)
        self._ledger.active = None
        return self.channel.fits(int(largest[0]))

    def counts(self, buffer: Array, counts: Counts) -> list[int]:
        """The elements of the piece of each rank; not collective, ValueError if they do not cut `buffer`."""
        if counts is None:
            return run_lengths(split(buffer.size, self._size))
        if not self._cuts(buffer, counts):
            raise ValueError(
                f"counts {list(counts)} do not cut a buffer of {buffer.size} elements "
                f"for the {self._size} ranks of axis {self.channel.name!r}"
            )
        return list(counts)

    def _cuts(self, buffer: Array, counts: Sequence[int]) -> bool:
        return len(counts) == self._size and sum(counts) == buffer.size and min(counts) >= 0


def _starts(counts: Sequence[int]) -> list[int]:
    starts = [0]
    for count in counts[:-1]:
        starts.append(starts[-1] + count)
    return starts


def _check_alike(one: Array, other: Array) -> None:
    if one.shape != other.shape or one.dtype != other.dtype:
        raise ValueError(
            f"the two buffers differ: {one.dtype} {one.shape} and {other.dtype} {other.shape}; they must be alike"
        )


def _check_piece(piece: Array, count: int, whole: Array) -> None:
    if piece.size != count or piece.dtype != whole.dtype:
        raise ValueError(
            f"this rank's piece must have {count} elements of {whole.dtype}, got {piece.size} of {piece.dtype}"
        )
