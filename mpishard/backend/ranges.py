"""Parts of arrays on which one launch of a CUDA function works, and small tables of numbers on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpishard.backend.kinds import Event, Stream, backend_of

Array = Any


class DeviceTable:
    """Numbers that a CUDA function reads, on the device.

    A copy is queued on the current stream, from pinned memory that is used again when the copy is over; so the host
    never waits. New numbers get new memory: what was queued before may still read the old ones.
    """

    def __init__(self) -> None:
        self._numbers: np.ndarray | None = None
        self._device: Array = None
        self._stream: Stream = None
        self._staging: list[tuple[np.ndarray, Event]] = []

    def of(self, numbers: np.ndarray, like: Array) -> Array:
        """The numbers, int64 or float64, on the device of `like`, for work on its current stream.

        That is the same device at every call.
        """
        backend = backend_of(like)
        stream, known = backend.current_stream(like), self._numbers
        if known is None or not (stream == self._stream and _same(known, numbers)):
            staging = self._free(numbers, like)
            staging[...] = numbers
            self._device = backend.empty(numbers.size, numbers.dtype, like)
            backend.start_to_device(staging, self._device, stream)
            self._staging.append((staging, backend.record(like, stream)))
            self._numbers, self._stream = numbers.copy(), stream
        return self._device

    def _free(self, numbers: np.ndarray, like: Array) -> np.ndarray:
        """Pinned memory of the size and dtype of the numbers that no copy uses."""
        for place, (staging, copied) in enumerate(self._staging):
            if copied.done and staging.size == numbers.size and staging.dtype == numbers.dtype:
                del self._staging[place]
                return staging
        # Of another size, as of other parameters: they will not come back.
        self._staging = [each for each in self._staging if not each[1].done]
        return backend_of(like).pinned_empty(numbers.size, numbers.dtype, like)


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    """Return True if two tables have the same bits, also where these are NaN."""
    return one.dtype == other.dtype and np.array_equal(one.view(np.int64), other.view(np.int64))


class Range(NamedTuple):
    """Elements ``[start, stop)`` of each array in row number `row`; `choice` is the number of their set of scalars."""

    row: int
    start: int
    stop: int
    choice: int = 0


class Ranges:
    """Parts of arrays that are given in rows: the arrays of a row have the same size, and each range is a part of all.

    A CUDA function finds them by a table on the device, which is made again when the arrays lie elsewhere than before.
    """

    def __init__(self, ranges: Sequence[Range]) -> None:
        self.all: tuple[Range, ...] = tuple(ranges)
        self._rows, self._starts, self._stops, self._choices = np.array(self.all, np.int64).reshape(-1, 4).T
        self._table = DeviceTable()
        self._scalars = DeviceTable()
        self._fixed: dict[int, np.ndarray] = {}
        # What the last table was made of, and its numbers.
        self._key: Any = None
        self._numbers = np.empty(0, np.int64)

    @classmethod
    def whole(cls, arrays: Sequence[Array]) -> Ranges:
        """All of each array; each array is a separate row."""
        return cls([Range(row, 0, array.size) for row, array in enumerate(arrays)])

    def __len__(self) -> int:
        return len(self.all)

    def blocks(self, chunk: int) -> int:
        """The number of blocks of threads if each works on `chunk` elements, or the rest of a range."""
        return int(self._of_chunks(chunk)[len(self)])

    def table(self, rows: Sequence[Sequence[Array]], chunk: int) -> Array:
        """The table for these arrays, int64, on their device; they are contiguous, and `chunk` is as for `blocks`.

        With n ranges it has the numbers of their first chunks and that of all chunks (n + 1), their sizes (n), their
        choices (n), then for each array of a row the addresses of their first elements (n).
        """
        first = rows[0][0]
        address = backend_of(first).address
        key = chunk, [[(address(array), array.size) for array in row] for row in rows], first.itemsize
        if key != self._key:
            bases, sizes = np.moveaxis(np.array(key[1], np.int64), -1, 0)
            assert (self._stops <= sizes[self._rows, 0]).all(), "a range ends behind its arrays"
            addresses = bases.T[:, self._rows] + self._starts * first.itemsize
            self._key, self._numbers = key, np.concatenate([self._of_chunks(chunk), addresses.reshape(-1)])
        return self._table.of(self._numbers, first)

    def scalars(self, sets: Sequence[Sequence[float]], like: Array) -> Array:
        """The sets of scalars, float64, on the device of `like`, end to end."""
        assert self._choices.max(initial=-1) < len(sets), "a range chooses scalars that are not there"
        numbers = np.array(sets, np.float64).reshape(-1)
        return self._scalars.of(numbers if numbers.size else np.zeros(1), like)

    def _of_chunks(self, chunk: int) -> np.ndarray:
        """The part of the table that does not depend on the arrays."""
        if chunk not in self._fixed:
            sizes = self._stops - self._starts
            first = np.concatenate([[0], np.cumsum(-(-sizes // chunk))])
            self._fixed[chunk] = np.concatenate([first, sizes, self._choices])
        return self._fixed[chunk]
