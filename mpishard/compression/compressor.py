"""The contract of compressors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from mpishard.backend import array as arrays

Array = Any
_ALIGNMENT = 4  # bytes; what is sent begins with 4-byte numbers


@arrays.elementwise
def _leave(rest, whole, /):  # type: ignore[no-untyped-def]
    """``rest = whole - rest``"""
    rest = whole - rest
    return rest


class PieceCompressor(ABC):
    """Makes bytes of any run of a flat gradient, and numbers of these again, without the other runs or ranks.

    A frozen value without state.  How many bytes follows from the number of elements alone, so that ranks need not tell
    each other.  Whoever writes one needs the three abstract methods; the others may do in one pass what they do in two.
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

    def split(self, values: Array, wire: Array, rest: Array) -> None:
        """`compress`, and fill `rest` with `values`, which it shares no memory with, minus what `decompress` gives."""
        self.compress(values, wire)
        self.decompress(wire, rest)
        _leave(rest, values)

    def add(self, wire: Array, total: Array) -> None:
        """Add to `total` what `decompress` gives, with the same bits."""
        term = arrays.empty(total.size, total.dtype, like=total)
        self.decompress(wire, term)
        arrays.accumulate(total, term)


class FusedCompressor(PieceCompressor):
    """A compressor with compiled loops for NumPy arrays, and operations on whole arrays for those on a device.

    Both make the same bytes, but for the bits of NaN and of sums that end within 1e-16 of where rounding turns.
    """

    def compress(self, values: Array, wire: Array) -> None:
        if not values.size:
            return
        if arrays.is_device(values):
            self._compress_on_device(values, wire)
        else:
            self._compress_on_host(values, wire, np.empty(0, values.dtype))

    def decompress(self, wire: Array, values: Array) -> None:
        if not values.size:
            return
        if arrays.is_device(values):
            self._decompress_on_device(wire, values)
        else:
            self._decompress_on_host(wire, values, False)

    def split(self, values: Array, wire: Array, rest: Array) -> None:
        if arrays.is_device(values):
            super().split(values, wire, rest)
        elif values.size:
            self._compress_on_host(values, wire, rest)

    def add(self, wire: Array, total: Array) -> None:
        if arrays.is_device(total):
            super().add(wire, total)
        elif total.size:
            self._decompress_on_host(wire, total, True)

    @abstractmethod
    def _compress_on_host(self, values: np.ndarray, wire: np.ndarray, rest: np.ndarray) -> None:
        """`split`, or `compress` if `rest` is empty."""

    @abstractmethod
    def _decompress_on_host(self, wire: np.ndarray, values: np.ndarray, add: bool) -> None:
        """`add`, or `decompress`."""

    @abstractmethod
    def _compress_on_device(self, values: Array, wire: Array) -> None: ...

    @abstractmethod
    def _decompress_on_device(self, wire: Array, values: Array) -> None: ...


def padded(nbytes: int) -> int:
    """The next multiple of 4."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
