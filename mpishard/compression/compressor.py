"""The interface of compressors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import numpy as np

from mpishard.backend import array as arrays
from mpishard.layout.boxes import run_lengths, split

Array = Any
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
_ALIGNMENT = 4  # bytes; a message begins with 4-byte numbers


@arrays.elementwise
def _leave(rest, whole, /):  # type: ignore[no-untyped-def]
    """``rest = whole - rest``"""
    rest = whole - rest
    return rest


class Collective(NamedTuple):
    """One collective of a sum."""

    operation: str  # name of a method of an axis
    counts: Sequence[int]  # elements of each rank, or one number for all
    itemsize: int  # bytes of an element


class SumsMaker(Protocol[T_co]):
    """Makes the object that sums gradients, for each kind of compressor; `Compressor.make_sums` chooses a method."""

    def of_pieces(self, compressor: PieceCompressor) -> T_co:
        """The object that sums the gradients of each rank piece by piece."""

    def of_low_rank(self, compressor: Any) -> T_co:
        """The object that sums the factors of matrices; `compressor` is a PowerSGDCompressor."""


class Compressor(ABC):
    """Makes the messages of a sum of gradients smaller.  A frozen value without state.

    Attributes
    ----------
    by_nodes : bool
        Whether it compresses any run of elements, so that sums by nodes can compress what they send between nodes.
    """

    by_nodes: ClassVar[bool]

    @abstractmethod
    def make_sums(self, maker: SumsMaker[T]) -> T:
        """Make what sums gradients with this compressor.  Collective if that is.

        Parameters
        ----------
        maker : SumsMaker
            It knows the model, its buckets and the ranks.

        Returns
        -------
        T
            The result of the one method of `maker` that is for this kind of compressor.
        """

    @abstractmethod
    def collectives(self, shapes: Sequence[Sequence[int]], dtype: np.dtype, ranks: int) -> list[Collective]:
        """The collectives of one sum whose result all ranks get.

        Parameters
        ----------
        shapes : sequence of shapes
            Of the tensors of a bucket.
        dtype : dtype
            Of the gradients.
        ranks : int
            The number of ranks that sum.
        """


class PieceCompressor(Compressor):
    """Encodes any run of a flat gradient as bytes, and decodes these, independently of other runs and ranks.

    The number of bytes depends only on the number and dtype of elements, so that ranks need not send it.  A subclass
    must define the three abstract methods; it may also override `split` and `add`, to do in one pass what these do in
    two.
    """

    by_nodes: ClassVar[bool] = True

    def make_sums(self, maker: SumsMaker[T]) -> T:
        return maker.of_pieces(self)

    def collectives(self, shapes: Sequence[Sequence[int]], dtype: np.dtype, ranks: int) -> list[Collective]:
        size = sum(prod(shape) for shape in shapes)
        sizes = [self.nbytes(count, dtype) for count in run_lengths(split(size, ranks))]
        return [Collective("all_to_all", sizes, 1), Collective("all_gather", sizes, 1)]

    @abstractmethod
    def nbytes(self, size: int, dtype: np.dtype) -> int:
        """Number of bytes for `size` elements of a dtype, a multiple of 4.

        Parameters
        ----------
        size : int
            Number of elements, 0 or more.
        dtype : dtype
            Float32 or float64.
        """

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
        """Fill `values` from `wire`: the values of `compress`, with an error.  NaN and infinities stay non-finite.

        Parameters
        ----------
        wire : 1-D array of uint8
            What `compress` has filled, of `nbytes` elements.
        values : 1-D array, float32 or float64
            Overwritten; of the size and dtype that were compressed, on the device of `wire`.
        """

    def split(self, values: Array, wire: Array, rest: Array) -> None:
        """`compress`, and fill `rest` with `values` minus the decompressed values; the two share no memory.

        Parameters
        ----------
        values : 1-D array, float32 or float64
            Not changed.
        wire : 1-D array of uint8
            Of `nbytes` elements, on the device of `values`.
        rest : 1-D array
            Of the size, dtype and device of `values`.
        """
        self.compress(values, wire)
        self.decompress(wire, rest)
        _leave(rest, values)

    def add(self, wire: Array, total: Array) -> None:
        """Add the values of `decompress` to `total`, with the same bits.

        Parameters
        ----------
        wire : 1-D array of uint8
            What `compress` has filled.
        total : 1-D array, float32 or float64
            Changed in place; of the size and dtype that were compressed, on the device of `wire`.
        """
        term = arrays.empty(total.size, total.dtype, like=total)
        self.decompress(wire, term)
        arrays.accumulate(total, term)


class FusedCompressor(PieceCompressor):
    """A compressor with compiled loops for NumPy arrays and CUDA functions for device arrays.

    Both give the same bytes, except for the bits of NaN, and of sums within 1e-16 of a tie in rounding.
    """

    def compress(self, values: Array, wire: Array) -> None:
        self.split(values, wire, values[:0] if arrays.runs_cuda(values) else np.empty(0, values.dtype))

    def decompress(self, wire: Array, values: Array) -> None:
        self._decompress(wire, values, False)

    def split(self, values: Array, wire: Array, rest: Array) -> None:
        if not values.size:
            return
        if arrays.runs_cuda(values):
            self._compress_by_cuda(values, wire, rest)
        else:
            self._compress_on_host(values, wire, rest)

    def add(self, wire: Array, total: Array) -> None:
        self._decompress(wire, total, True)

    def _decompress(self, wire: Array, values: Array, add: bool) -> None:
        if not values.size:
            return
        if arrays.runs_cuda(values):
            self._decompress_by_cuda(wire, values, add)
        else:
            self._decompress_on_host(wire, values, add)

    @abstractmethod
    def _compress_on_host(self, values: np.ndarray, wire: np.ndarray, rest: np.ndarray) -> None:
        """`split`, or `compress` if `rest` is empty."""

    @abstractmethod
    def _decompress_on_host(self, wire: np.ndarray, values: np.ndarray, add: bool) -> None:
        """`add`, or `decompress`."""

    @abstractmethod
    def _compress_by_cuda(self, values: Array, wire: Array, rest: Array) -> None:
        """As `_compress_on_host`."""

    @abstractmethod
    def _decompress_by_cuda(self, wire: Array, values: Array, add: bool) -> None:
        """As `_decompress_on_host`."""


def padded(nbytes: int) -> int:
    """The next multiple of 4."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
