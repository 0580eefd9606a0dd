"""The compressors: what gradients look like on the wire.

Casts to 16 bits, 8 bits and 1 bit with scales, the largest elements only, and low-rank products (PowerSGD).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import numpy as np

from mpishard.arguments import integer, number
from mpishard.backend import array as arrays
from mpishard.backend.cuda_source import PRELUDE, CudaSource, launch
from mpishard.backend.jit_function import HostFunction
from mpishard.backend.random import normal
from mpishard.compression import kernels
from mpishard.compression.compressor import (
    Collective,
    Compressor,
    FusedCompressor,
    PieceCompressor,
    SumsMaker,
    T,
    padded,
)

Array = Any

# The loops over device arrays, of one pass over memory as those of ``kernels.py``.  `rest` is empty, or gets the values
# minus the decompressed values; with `add` the decompressed values are added.  Contracting a * b + c would give other
# bytes than the host.
SOURCE = CudaSource(PRELUDE.with_name("compressors.cu"), ("--fmad=false",))
_THREADS = 256


def _blocks(threads: int) -> int:
    return -(-threads // _THREADS)


# Rounded to nearest even; float64 is rounded to float32 first, on host and device.
class _Cast(FusedCompressor):
    _to: ClassVar[HostFunction]
    _from: ClassVar[HostFunction]
    _device_dtype: ClassVar[Any]
    _largest: ClassVar[float]

    def nbytes(self, size: int, dtype: np.dtype) -> int:
        return padded(2 * size)

    def _compress_on_host(self, values: np.ndarray, wire: np.ndarray, rest: np.ndarray) -> None:
        self._to((values, _bits(wire, values.size), rest))

    def _decompress_on_host(self, wire: np.ndarray, values: np.ndarray, add: bool) -> None:
        self._from((values, _bits(wire, values.size)), (add,))

    def _compress_by_cuda(self, values: Array, wire: Array, rest: Array) -> None:
        halves = _bits(wire, values.size).view(self._device_dtype)
        function = SOURCE.function("to_halves", REAL=values.dtype, STORED=halves.dtype)
        size = values.size
        launch(function, _blocks(size), _THREADS, values, halves, rest, size, self._largest, rest.size > 0)

    def _decompress_by_cuda(self, wire: Array, values: Array, add: bool) -> None:
        halves = _bits(wire, values.size).view(self._device_dtype)
        function = SOURCE.function("from_halves", REAL=values.dtype, STORED=halves.dtype)
        launch(function, _blocks(values.size), _THREADS, halves, values, values.size, add)


@dataclass(frozen=True)
class Float16Compressor(_Cast):
    """IEEE half precision: 11 bits, up to 65504; a larger value is sent as 65504, and its remainder in later steps."""

    _to, _from = kernels.to_float16, kernels.from_float16
    _device_dtype, _largest = np.float16, kernels.LARGEST_HALF


@dataclass(frozen=True)
class BFloat16Compressor(_Cast):
    """The upper half of a float32: 8 bits of precision, and the range of a float32."""

    _to, _from = kernels.to_bfloat16, kernels.from_bfloat16
    _device_dtype, _largest = np.uint16, np.inf

    # In integers, since CuPy has no bfloat16.


def _bits(wire: Array, size: int) -> Array:
    return wire[: 2 * size].view(np.uint16)


@dataclass(frozen=True)
class PowerSGDCompressor(Compressor):
    """The best approximation of low rank that one step of subspace iteration finds (Vogels et al., "PowerSGD", 2019).

    A gradient of shape (m, ...) is a matrix M of m rows and n columns.  It is sent as P = M Q and as M' P', where P' is
    the orthonormal P: ``rank * (m + n)`` elements, each summed over the ranks.  Q is the result of the last step.
    Tensors that would not be smaller, such as vectors, are sent uncompressed; so is a flat array without named tensors.

    Parameters
    ----------
    rank : int
        Number of columns of P and Q.

    Raises
    ------
    TypeError, ValueError
        If `rank` is no whole number of at least 1.
    """

    by_nodes: ClassVar[bool] = False  # what it sends is small already

    rank: int = 4

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", integer("rank", self.rank, least=1))

    def make_sums(self, maker: SumsMaker[T]) -> T:
        return maker.of_low_rank(self)

    def collectives(self, shapes: Sequence[Sequence[int]], dtype: np.dtype, ranks: int) -> list[Collective]:
        first = sum(self.first_elements(shape) for shape in shapes)
        rest = sum(self.elements(shape) for shape in shapes) - first
        return [Collective("all_reduce", [count], dtype.itemsize) for count in (first, rest)]

    def compresses(self, shape: Sequence[int]) -> bool:
        """Return True if the two factors of a tensor of this shape are smaller than the tensor.

        Parameters
        ----------
        shape : sequence of int
            Of the tensor, or of the piece of it that a rank holds.

        Returns
        -------
        bool
            False for vectors and scalars.
        """
        rows, columns = matrix_shape(shape)
        return self.rank * (rows + columns) < rows * columns

    def elements(self, shape: Sequence[int]) -> int:
        """Number of elements that are summed for a tensor of this shape.

        Parameters
        ----------
        shape : sequence of int
            Of the tensor.

        Returns
        -------
        int
            ``rank * (m + n)``, or all elements of a tensor that is not compressed.
        """
        return self.rank * sum(matrix_shape(shape)) if self.compresses(shape) else prod(shape)

    def first_elements(self, shape: Sequence[int]) -> int:
        """Number of these that are summed first: those of P, or of an uncompressed tensor.

        Parameters
        ----------
        shape : sequence of int
            Of the tensor.

        Returns
        -------
        int
            ``rank * m``, or all elements of a tensor that is not compressed.
        """
        return self.rank * matrix_shape(shape)[0] if self.compresses(shape) else prod(shape)

    def first_basis(self, name: str, columns: int, like: Array) -> Array:
        """Q of the first step, ``(columns, rank)``, of the dtype and device of `like`: random, by the tensor's name.

        Parameters
        ----------
        name : str
            Of the tensor; it keys the random numbers.
        columns : int
            Columns of the matrix, n.
        like : array
            Float32 or float64, of NumPy or CuPy.

        Returns
        -------
        array
            Normally distributed, the same on all ranks.
        """
        host = normal(0, name, (columns, self.rank), dtype=like.dtype)
        return np.asarray(host, like=like)


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a tensor as a matrix: first extent, product of the others; (1, 1) for a scalar."""
    return (shape[0], prod(shape[1:])) if shape else (1, 1)


def orthonormal(columns: Array) -> Array:
    """Orthonormal columns (m, min(m, n)), in new memory, whose span contains that of the columns of a matrix (m, n).

    Float32 or float64, of NumPy or CuPy.
    """
    return arrays.module_of(columns).linalg.qr(columns)[0]


@dataclass(frozen=True)
class _Blockwise(FusedCompressor):
    block: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", integer("block", self.block, least=1))

    def _parts(self, wire: Array, size: int) -> tuple[Array, Array]:
        """The scales, and the bytes after them."""
        scales = 4 * -(-size // self.block)
        return wire[:scales].view(np.float32), wire[scales:]


@dataclass(frozen=True)
class Int8Compressor(_Blockwise):
    """Integers from -127 to 127 times the scale of their block, its largest magnitude / 127 (Dettmers, 2016).

    A block with NaN or an infinity has a scale that is not finite, and all of it is decompressed to that scale.

    Parameters
    ----------
    block : int
        Elements that share a scale.

    Raises
    ------
    TypeError, ValueError
        If `block` is no whole number of at least 1.
    """

    block: int = 256

    def nbytes(self, size: int, dtype: np.dtype) -> int:
        return 4 * -(-size // self.block) + padded(size)

    def _compress_on_host(self, values: np.ndarray, wire: np.ndarray, rest: np.ndarray) -> None:
        scales, codes = self._parts(wire, values.size)
        bits, mask = kernels.bits(values)
        kernels.to_int8((values, bits, scales, codes.view(np.int8), rest), (int(self.block), mask))

    def _decompress_on_host(self, wire: np.ndarray, values: np.ndarray, add: bool) -> None:
        scales, codes = self._parts(wire, values.size)
        kernels.from_int8((values, scales, codes.view(np.int8)), (int(self.block), add))

    def _compress_by_cuda(self, values: Array, wire: Array, rest: Array) -> None:
        scales, codes = self._parts(wire, values.size)
        function = SOURCE.function("to_int8", REAL=values.dtype, STORED=np.float16)
        launch(function, scales.size, _THREADS, values, scales, codes, rest, values.size, self.block, rest.size > 0)

    def _decompress_by_cuda(self, wire: Array, values: Array, add: bool) -> None:
        scales, codes = self._parts(wire, values.size)
        function = SOURCE.function("from_int8", REAL=values.dtype, STORED=np.float16)
        launch(function, _blocks(values.size), _THREADS, scales, codes, values, values.size, self.block, add)


@dataclass(frozen=True)
class SignCompressor(_Blockwise):
    """One bit per element, the sign, times the mean magnitude of its block (Karimireddy et al., "EF-SignSGD", 2019).

    Parameters
    ----------
    block : int
        Elements that share a scale.

    Raises
    ------
    TypeError, ValueError
        If `block` is no whole number of at least 1.
    """

    block: int = 1024

    def nbytes(self, size: int, dtype: np.dtype) -> int:
        return 4 * -(-size // self.block) + padded(-(-size // 8))

    def _compress_on_host(self, values: np.ndarray, wire: np.ndarray, rest: np.ndarray) -> None:
        kernels.to_signs((values, *self._parts(wire, values.size), rest), (int(self.block),))

    def _decompress_on_host(self, wire: np.ndarray, values: np.ndarray, add: bool) -> None:
        kernels.from_signs((values, *self._parts(wire, values.size)), (int(self.block), add))

    def _compress_by_cuda(self, values: Array, wire: Array, rest: Array) -> None:
        scales, signs = self._parts(wire, values.size)
        of_scales = SOURCE.function("to_sign_scales", REAL=values.dtype, STORED=np.float16)
        launch(of_scales, scales.size, _THREADS, values, scales, rest, values.size, self.block, rest.size > 0)
        of_bits = SOURCE.function("to_signs", REAL=values.dtype, STORED=np.float16)
        launch(of_bits, _blocks(-(-values.size // 8)), _THREADS, values, signs, values.size)

    def _decompress_by_cuda(self, wire: Array, values: Array, add: bool) -> None:
        scales, signs = self._parts(wire, values.size)
        function = SOURCE.function("from_signs", REAL=values.dtype, STORED=np.float16)
        launch(function, _blocks(values.size), _THREADS, scales, signs, values, values.size, self.block, add)


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
