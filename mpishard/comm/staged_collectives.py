"""Collectives of device memory, cut into pieces that travel through pinned memory of the host.

The cut depends on sizes alone and is the same on all ranks, so that they make the same calls of MPI. A buffer of up
to `PIECE_BYTES` is one piece, and its call the one that is made for NumPy arrays: ranks with a NumPy array and ranks
with a device array may meet in it. Larger buffers must be in device memory on all ranks or on none; in debug mode
CollectiveMismatchError says so. An `all_to_all` is one piece always, since its sizes may differ between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from mpishard.backend import array as arrays
from mpishard.comm.channel import OPS, Channel, Fields
from mpishard.comm.staging import StagedPiece, StagedRequest
from mpishard.layout.boxes import starts_of

Array = Any

Runs = tuple[Sequence[int], Sequence[int]]  # how long they are, and where they begin
# Long enough for the full speed of the bus and the network, short enough that much of a large buffer overlaps.
PIECE_BYTES = 2**22


@dataclass(frozen=True)
class HostCalls:
    """MPI's calls on host memory: methods of `Collectives`."""

    gather: Callable[[Any, Array, Sequence[int]], MPI.Request]  # starts an all-gather
    exchanges: Callable[[Array, str, Sequence[int]], bool]  # return True if a reduce-scatter is an exchange
    # Starts one, and returns what adds up what has arrived.
    start_exchange: Callable[[Array, Array, Sequence[int]], tuple[MPI.Request, Callable[[], Array]]]
    exchange_runs: Callable[[Array, Array, Runs, Runs, bool], list[MPI.Request]]  # starts an all-to-all


class StagedCollectives:
    """The collectives over one channel for device memory that MPI cannot read.

    `started`: its calls are started, and may begin later than their methods return.
    """

    def __init__(self, channel: Channel, host: HostCalls, *, started: bool) -> None:
        self._channel = channel
        self._comm = channel.comm
        self._host = host
        self._started = started
        self._rank, self._size = channel.rank, channel.size

    def all_reduce(self, call: Fields, sent: int, buffer: Array, out: Array, op: str) -> StagedRequest:
        """Start an all-reduce of `buffer` into `out`, which may be the same."""
        comm, flat, target = self._comm, buffer.reshape(-1), out.reshape(-1)

        def start(wire: np.ndarray) -> Sequence[MPI.Request]:
            if self._started:
                return [comm.Iallreduce(MPI.IN_PLACE, wire, OPS[op])]
            comm.Allreduce(MPI.IN_PLACE, wire, OPS[op])
            return []

        pieces = [
            StagedPiece(len(flat[piece]), [(flat[piece], 0)], [(target[piece], 0)], start)
            for piece in self._pieces(flat.size, buffer)
        ]
        overlapping = out is not buffer and arrays.overlap(buffer, out)
        return self._request(call, sent, pieces, buffer, out, arithmetic=True, overlapping=overlapping)

    def broadcast(self, call: Fields, sent: int, buffer: Array, root: int) -> StagedRequest:
        flat = buffer.reshape(-1)

        def start(wire: np.ndarray) -> Sequence[MPI.Request]:
            return [self._comm.Ibcast(wire, root)]

        pieces = []
        for piece in self._pieces(flat.size, buffer):
            place = [(flat[piece], 0)]
            out, back = (place, []) if self._rank == root else ([], place)
            pieces.append(StagedPiece(len(flat[piece]), out, back, start))
        return self._request(call, sent, pieces, buffer, buffer)

    def reduce_scatter(
        self, call: Fields, sent: int, buffer: Array, out: Array, counts: Sequence[int], op: str
    ) -> StagedRequest:
        """Start a reduce-scatter of `buffer` into `out`, which may be a part of it.

        Each piece has a part of the run of each rank.
        """
        flat, target, pieces = buffer.reshape(-1), out.reshape(-1), []
        for first, parts in self._rounds(counts, buffer):
            own = target[first : first + parts[self._rank]]
            pieces.append(self._reduced_piece(_places(flat, counts, first, parts), own, parts, op))
        overlapping = arrays.overlap(buffer, out)
        return self._request(call, sent, pieces, buffer, out, arithmetic=True, overlapping=overlapping)

    def _reduced_piece(self, out: list[tuple[Array, int]], own: Array, parts: Sequence[int], op: str) -> StagedPiece:
        comm, host, rank = self._comm, self._host, self._rank
        add: list[Callable[[], Array]] = []

        def start(wire: np.ndarray) -> Sequence[MPI.Request]:
            if host.exchanges(wire, op, parts):
                exchange, then = host.start_exchange(wire, wire[: parts[rank]], parts)
                add.append(then)
                return [exchange]
            if self._started:
                return [comm.Ireduce_scatter(MPI.IN_PLACE, wire, parts, OPS[op])]
            comm.Reduce_scatter(MPI.IN_PLACE, wire, parts, OPS[op])
            return []

        def finish(wire: np.ndarray) -> None:
            if add:
                add.pop()()

        return StagedPiece(sum(parts), out, [(own, 0)], start, finish)

    def all_gather(
        self, call: Fields, sent: int, buffer: Array, piece: Array | None, counts: Sequence[int]
    ) -> StagedRequest:
        """Start an all-gather; each piece has a part of the run of each rank."""
        flat, rank, pieces = buffer.reshape(-1), self._rank, []
        first_own = starts_of(counts)[rank]
        own = flat[first_own : first_own + counts[rank]] if piece is None else piece.reshape(-1)
        for first, parts in self._rounds(counts, buffer):
            out = [(own[first : first + parts[rank]], starts_of(parts)[rank])]
            back = _places(flat, counts, first, parts, without=rank if piece is None else None)

            def start(wire: np.ndarray, parts: Sequence[int] = parts) -> Sequence[MPI.Request]:
                return [self._host.gather(MPI.IN_PLACE, wire, parts)]

            pieces.append(StagedPiece(sum(parts), out, back, start))
        overlapping = piece is not None and arrays.overlap(buffer, piece)
        read = () if piece is None else (piece,)
        return self._request(call, sent, pieces, buffer, buffer, overlapping=overlapping, read=read)

    def all_to_all(
        self, call: Fields, sent: int, buffer: Array, out: Array, runs: Runs, arriving: Runs, fits: bool
    ) -> StagedRequest:
        """Start an all-to-all; `fits`: whether one call of MPI takes the buffers of all ranks."""
        size = buffer.size

        def start(wire: np.ndarray) -> Sequence[MPI.Request]:
            return self._host.exchange_runs(wire[:size], wire[size:], runs, arriving, fits)

        piece = StagedPiece(size + out.size, [(buffer.reshape(-1), 0)], [(out.reshape(-1), size)], start)
        return self._request(call, sent, [piece], buffer, out)

    def in_pieces(self, buffer: Array) -> bool:
        """Return True if a buffer is more than one piece, so that all ranks must have it in device memory."""
        return buffer.size > self._limit(buffer)

    def _request(
        self, call: Fields, sent: int, pieces: list[StagedPiece], buffer: Array, result: Array, **options: Any
    ) -> StagedRequest:
        read = (buffer, result, *options.pop("read", ()))
        options["started"] = self._started
        request = StagedRequest(self._channel.ledger, call, sent, pieces, read, result, **options)
        if self._started:
            self._channel.note_started(request)
        return request

    def _limit(self, buffer: Array) -> int:
        """The most elements of a piece."""
        limit = max(1, PIECE_BYTES // buffer.itemsize)
        largest = self._channel.largest_count
        return limit if largest is None else min(limit, largest)

    def _pieces(self, size: int, buffer: Array) -> list[slice]:
        """The pieces of a buffer that need not be cut by ranks; at least one, which may be empty."""
        limit = self._limit(buffer)
        return [slice(start, min(size, start + limit)) for start in range(0, max(size, 1), limit)]

    def _rounds(self, counts: Sequence[int], buffer: Array) -> list[tuple[int, list[int]]]:
        """The pieces of a buffer of the runs of all ranks: the first element of each run, and how many of each."""
        limit, longest = self._limit(buffer), max(counts)
        step = longest if sum(counts) <= limit else max(1, limit // self._size)
        return [
            (first, [min(step, max(0, count - first)) for count in counts])
            for first in range(0, max(longest, 1), max(step, 1))
        ]


def _places(
    flat: Array, counts: Sequence[int], first: int, parts: Sequence[int], without: int | None = None
) -> list[tuple[Array, int]]:
    """The parts of the runs of all ranks from element `first` on, and their places in a piece.

    Neighbours in both are one place, so that they are one copy.
    """
    runs: list[list[int]] = []
    for rank, (run, start, part) in enumerate(zip(starts_of(counts), starts_of(parts), parts, strict=True)):
        if not part or rank == without:
            continue
        begin = run + first
        if runs and runs[-1][0] + runs[-1][2] == begin and runs[-1][1] + runs[-1][2] == start:
            runs[-1][2] += part
        else:
            runs.append([begin, start, part])
    return [(flat[begin : begin + part], start) for begin, start, part in runs]
