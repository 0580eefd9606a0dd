"""The values that a rank saves, as host arrays: the live arrays, or a copy that training does not change."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from mpishard.backend import array as arrays
from mpishard.backend.garbage import no_garbage_collection
from mpishard.backend.kinds import backend_of
from mpishard.backend.streams import copy_together
from mpishard.checkpoint.pieces import PieceValues
from mpishard.layout.run_state import RunState, Shard
from mpishard.layout.tensors import LocalLayout, Piece

Array = Any


@dataclass(frozen=True)
class Saved:
    """The values that a checkpoint gets from one rank, and the tables that describe those of all ranks.

    Parameters
    ----------
    tensors : mapping of str to shape
        All tensors of the model.
    kinds : mapping of str to dtype
        Dtypes of parameters and slots.
    facts : mapping
        As `RunState.facts`.
    parts : sequence of PieceValues
        The parts that this rank writes.
    """

    tensors: Mapping[str, tuple[int, ...]]
    kinds: Mapping[str, np.dtype]
    facts: Mapping[str, Any]
    parts: Sequence[PieceValues]


def live_parts(shards: Sequence[Shard]) -> list[PieceValues]:
    """The primary pieces of this rank, as views of its NumPy arrays."""
    return [
        _part(shard.kind, piece, shard.array[piece.start : piece.start + piece.size])
        for shard in shards
        for piece in shard.counted
        if piece.size
    ]


class Snapshot:
    """Copies of the primary pieces of a rank, in host memory that is kept for the next copy."""

    def __init__(self) -> None:
        self._buffers: dict[str, np.ndarray] = {}

    def values(self, state: RunState, *, copied: bool) -> tuple[Saved, Exception | None]:
        """What this rank saves of a state; or nothing, and the error that kept it from having that.

        With `copied` the arrays may change before they are written.  Device arrays are copied in any case.
        """
        facts: dict[str, Any] = {}
        parts: list[PieceValues] = []
        problem = None
        try:
            facts = copy.deepcopy(dict(state.facts))
            copied = copied or any(arrays.is_device(shard.array) for shard in state.shards)
            with no_garbage_collection():
                parts = self.take(state.shards) if copied else live_parts(state.shards)
        except Exception as error:
            problem = error
        tensors = {spec.name: spec.shape for spec in state.specs}
        kinds = {shard.kind: np.dtype(shard.array.dtype) for shard in state.shards}
        return Saved(tensors, kinds, facts, parts), problem

    def take(self, shards: Sequence[Shard]) -> list[PieceValues]:
        """Copy the primary pieces; complete on return.  The last copies are overwritten.

        Contiguous pieces are copied together.  Device arrays are copied to pinned memory, by a stream of their device
        that waits for their computation; the host waits once, for all of them.
        """
        # Buffers that no longer fit are freed before others are made.
        fitting = {shard.kind: self._buffers[shard.kind] for shard in shards if self._fits(shard)}
        gone, self._buffers = len(self._buffers) > len(fitting), fitting
        for backend in {backend_of(shard.array) for shard in shards} if gone else ():
            backend.release_pinned()
        parts: list[PieceValues] = []
        copies: list[tuple[Array, np.ndarray]] = []
        for shard in shards:
            buffer = self._buffer(shard)
            offset = 0
            for run in _runs(shard.counted):
                start, size = run[0].start, sum(piece.size for piece in run)
                copies.append((shard.array[start : start + size], buffer[offset : offset + size]))
                for piece in run:
                    parts.append(_part(shard.kind, piece, buffer[offset : offset + piece.size]))
                    offset += piece.size
        copy_together(copies)
        return parts

    def _buffer(self, shard: Shard) -> np.ndarray:
        if not self._fits(shard):
            size = sum(piece.size for piece in shard.counted)
            self._buffers[shard.kind] = arrays.pinned_empty(size, shard.array.dtype, like=shard.array)
        return self._buffers[shard.kind]

    def _fits(self, shard: Shard) -> bool:
        kept = self._buffers.get(shard.kind)
        size = sum(piece.size for piece in shard.counted)
        return kept is not None and kept.size == size and kept.dtype == shard.array.dtype


def _part(kind: str, piece: Piece, values: np.ndarray) -> PieceValues:
    return PieceValues(kind, piece.name, piece.box, values.reshape(piece.shape))


def _runs(pieces: LocalLayout) -> Iterator[list[Piece]]:
    """Pieces with elements, by start, in contiguous groups."""
    ordered = sorted((piece for piece in pieces if piece.size), key=lambda piece: piece.start)
    before = 0  # elements of earlier pieces: start minus this number is constant in a contiguous group
    distances = []
    for piece in ordered:
        distances.append(piece.start - before)
        before += piece.size
    for _, run in groupby(zip(distances, ordered, strict=True), key=lambda pair: pair[0]):
        yield [piece for _, piece in run]
