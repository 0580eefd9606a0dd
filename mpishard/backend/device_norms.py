"""The largest absolute values and pre-rounded sums of squares of `mpishard.backend.exact_norm`, on a device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpishard.backend.cuda_source import CudaSource, launch
from mpishard.backend.kinds import backend_of
from mpishard.backend.ranges import Ranges

Array = Any
# Contracting x * x + C would leave out the rounding that makes the additions exact.
SOURCE = CudaSource(Path(__file__).with_name("cuda") / "norms.cu", ("--fmad=false",))
CHUNK = 16_384  # elements of a block: a reduction at its end costs little then
_THREADS = 256


class LargestValues:
    """Largest absolute values that stay on the device until they are asked for."""

    def __init__(self, count: int, dtype: Any, like: Array) -> None:
        self._dtype = np.dtype(dtype)
        self._bits = backend_of(like).zeros(count, np.uint64, like)

    def take(self, arrays: Sequence[Array], ranges: Ranges, first: int = 0) -> None:
        """Raise the values from number `first` on to the largest of each range; queued, the host does not wait.

        The arrays, the rows of the ranges, are contiguous.
        """
        blocks = ranges.blocks(CHUNK)
        if blocks:
            function = SOURCE.function("largest_of_ranges", REAL=self._dtype)
            table = ranges.table([(array,) for array in arrays], CHUNK)
            bits = self._bits[first : first + len(ranges)]
            launch(function, blocks, _THREADS, table, bits, len(ranges), CHUNK, reached=arrays)

    def take_whole(self, array: Array) -> None:
        """Raise the first value to the largest of a whole array."""
        function = SOURCE.function("largest_of_array", REAL=self._dtype)
        launch(function, -(-array.size // CHUNK), _THREADS, array, self._bits, array.size, CHUNK)

    def clear(self) -> None:
        """Set all values to 0; queued."""
        self._bits.fill(0)

    def values(self) -> np.ndarray:
        """The values, float64, NaN and infinite where an element is.  The host waits for one copy."""
        bits = np.empty(self._bits.size, np.uint64)
        if bits.size:
            backend_of(self._bits).to_host(self._bits, bits)
        if self._dtype == np.float32:
            return bits.astype(np.uint32).view(np.float32).astype(np.float64)
        return bits.view(np.float64)


def sums_of_squares(arrays: Sequence[Array], ranges: Ranges, scalars: Sequence[Sequence[float]]) -> np.ndarray:
    """The pre-rounded sums of squares of each range, float64 (ranges, 2). The host waits for one copy.

    The arrays, the rows of the ranges, are contiguous; each of `scalars` is (scale, coarse, fine), as of the loop of
    the host.
    """
    sums = np.zeros((len(ranges), 2))
    blocks = ranges.blocks(CHUNK)
    if not blocks:
        return sums
    like = arrays[0]
    backend = backend_of(like)
    table = ranges.table([(array,) for array in arrays], CHUNK)
    partials = backend.empty(2 * blocks, np.float64, like)
    found = backend.empty((len(ranges), 2), np.float64, like)
    function = SOURCE.function("squares_of_ranges", REAL=like.dtype)
    numbers = ranges.scalars(scalars, like)
    launch(function, blocks, _THREADS, table, numbers, partials, len(ranges), CHUNK, reached=arrays)
    launch(SOURCE.function("sums_of_chunks", REAL=like.dtype), len(ranges), _THREADS, table, partials, found)
    backend.to_host(found, sums)
    return sums
