"""A small array of numbers on a device, which is copied there only when the numbers have changed."""

from __future__ import annotations

from typing import Any

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
