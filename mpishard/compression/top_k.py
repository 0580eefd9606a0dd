"""The largest elements only, with their places."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpishard import array as arrays
from mpishard.compression.compressor import PieceCompressor

Array = Any


@dataclass(frozen=True)
class TopKCompressor(PieceCompressor):
    """A fraction of the elements, those of largest magnitude, as values and indices (Lin et al., "DGC", 2018).

    Parameters
    ----------
    fraction : float
        Of the elements of each run that are sent, rounded up; above 0 and at most 1.
    """

    fraction: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction={self.fraction!r} must be above 0 and at most 1")

    def count(self, size: int) -> int:
        """How many of so many elements are sent."""
        return min(size, math.ceil(self.fraction * size))

    def nbytes(self, size: int, dtype: np.dtype) -> int:
        return self.count(size) * (4 + np.dtype(dtype).itemsize)

    def compress(self, values: Array, wire: Array) -> None:
        count = self.count(values.size)
        indices, chosen = self._parts(wire, count, values.dtype)
        if count == 0:
            return
        # NaN counts as largest, so that it reaches the others.
        where = arrays.module_of(values).argpartition(abs(values), values.size - count)[values.size - count :]
        where.sort()  # neighbours in memory for whoever adds them up
        indices[...] = where
        chosen[...] = values[where]

    def decompress(self, wire: Array, values: Array) -> None:
        indices, chosen = self._parts(wire, self.count(values.size), values.dtype)
        values[...] = 0
        values[indices] = chosen

    def _parts(self, wire: Array, count: int, dtype: np.dtype) -> tuple[Array, Array]:
        return wire[: 4 * count].view(np.uint32), wire[4 * count :].view(dtype)
