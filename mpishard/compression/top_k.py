"""Sparse compression: only the largest elements, with their indices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpishard.arguments import number
from mpishard.backend import array as arrays
from mpishard.compression import kernels
from mpishard.compression.compressor import PieceCompressor

Array = Any
_SAMPLE = 1 << 14


@dataclass(frozen=True)
class TopKCompressor(PieceCompressor):
    """The elements of largest magnitude, a fraction of all, as values and indices (Lin et al., "DGC", 2018).

    Among equal magnitudes the first are sent.  NaN counts as the largest magnitude, so that it reaches the other ranks.

    Parameters
    ----------
    fraction : float
        Fraction of the elements of each run to send, rounded up to whole elements; above 0 and at most 1.

    Raises
    ------
    TypeError, ValueError
        If `fraction` is no number above 0 and at most 1.
    """

    fraction: float = 0.01

    def __post_init__(self) -> None:
        object.__setattr__(self, "fraction", number("fraction", self.fraction, above=0, most=1))

    def count(self, size: int) -> int:
        """Number of elements that are sent of `size` elements.

        Parameters
        ----------
        size : int
            Number of elements of the run.

        Returns
        -------
        int
            At most `size`, and at least 1 unless `size` is 0.
        """
        return min(size, math.ceil(self.fraction * size))

    def nbytes(self, size: int, dtype: np.dtype) -> int:
        return self.count(size) * (4 + np.dtype(dtype).itemsize)

    def compress(self, values: Array, wire: Array) -> None:
        if values.size:
            self._send(values, wire)

    def decompress(self, wire: Array, values: Array) -> None:
        values[...] = 0
        if values.size:
            places, chosen = self._received(wire, values)
            values[places] = chosen

    def split(self, values: Array, wire: Array, rest: Array) -> None:
        rest[...] = values
        if values.size:
            places, chosen = self._send(values, wire)
            with np.errstate(invalid="ignore"):
                rest[places] = chosen - chosen  # zero, unless it is not finite

    def add(self, wire: Array, total: Array) -> None:
        if total.size:
            places, chosen = self._received(wire, total)
            with np.errstate(invalid="ignore"):
                total[places] += chosen

    def _send(self, values: Array, wire: Array) -> tuple[Array, Array]:
        count = self.count(values.size)
        places = (_largest_on_device if arrays.is_device(values) else _largest)(values, count)
        chosen = values[places]
        # Values are copied in words of 4 bytes: after an odd number of indices, the address is not aligned for float64.
        words = wire.view(np.uint32)
        words[:count] = places
        words[count:] = chosen.view(np.uint32)
        return places, chosen

    def _received(self, wire: Array, values: Array) -> tuple[Array, Array]:
        count, words = self.count(values.size), wire.view(np.uint32)
        return words[:count], words[count:].copy().view(values.dtype)


def _largest_on_device(values: Array, count: int) -> Array:
    """Ascending indices of the `count` values of largest magnitude."""
    module, (bits, mask) = arrays.module_of(values), kernels.bits(values)
    return module.sort(module.argsort(-(bits & mask), kind="stable")[:count])


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    bits, mask = kernels.bits(values)
    places = np.empty(values.size, np.uint32)
    least = spare = 0
    for low in dict.fromkeys((_safe_guess(bits, mask, count), 0)):
        found = kernels.above((bits, places), (mask, low))
        if found >= count:
            magnitudes = bits[places[:found]] & mask
            magnitudes.partition(found - count)
            least = int(magnitudes[found - count])
            spare = count - int(np.count_nonzero(magnitudes > least))
            break
    else:  # zeros are among the largest
        spare = count - found
        found = kernels.above((bits, places), (mask, -1))
    kernels.pick((bits, places[:found]), (mask, least, spare))
    return places[:count]


def _safe_guess(bits: np.ndarray, mask: int, count: int) -> int:
    """A magnitude that slightly more than `count` values probably exceed, or -1.

    It is estimated from a sample; the odd stride of the sample is unlikely to be the length of a row.
    """
    sample = bits[:: bits.size // _SAMPLE | 1] & mask
    expected = count / bits.size * sample.size
    rank = math.ceil(expected + 4 * math.sqrt(expected)) + 1
    return int(np.partition(sample, -rank)[-rank]) if rank <= sample.size else -1
