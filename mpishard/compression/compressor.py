"""The contract of compressors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

Array = Any
_ALIGNMENT = 4  # bytes; what is sent begins with 4-byte numbers


class PieceCompressor(ABC):
    """Makes bytes of any run of a flat gradient, and numbers of these again, without the other runs or ranks.

    A frozen value without state.  How many bytes follows from the number of elements alone, so that ranks need not tell
    each other.
    """

    @abstractmethod
    def nbytes(self, size: int, dtype: np.dtype) -> int:
        """Bytes that `size` elements of a dtype become, a multiple of 4."""

    @abstractmethod
    def compress(self, values: Array, wire: Array) -> None:
        """Fill `wire` from `values`.

        Parameters
        ----------
        values : 1-D array, float32 or float64
            Not changed.
        wire : 1-D array of uint8
            Of `nbytes` elements, at an address that is a multiple of 4, on the device of `values`.
        """

    @abstractmethod
    def decompress(self, wire: Array, values: Array) -> None:
        """Fill `values` from `wire`: what `compress` was given, but for the error.  NaN and infinities stay such."""


def padded(nbytes: int) -> int:
    """The next multiple of 4."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
