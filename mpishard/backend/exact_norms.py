"""Norms whose bits do not depend on the layout, that is, on which ranks hold which elements.

Floating-point addition rounds, so a sum depends on its order, and the order on the number of ranks.  Here every square
is first rounded to a multiple of a quantum so coarse that additions are exact (Rump's pre-rounding; Demmel and Nguyen,
"Fast reproducible floating-point summation", 2013), and the remainders in the same way with a finer quantum.  All ranks
must agree on the largest term before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np

from mpishard.backend.array import is_device, module_of, runs_cuda
from mpishard.backend.cuda_source import CudaSource, launch
from mpishard.backend.jit_function import HostFunction
from mpishard.backend.kinds import backend_of
from mpishard.backend.ranges import Ranges

Array = Any

# By element size: the integer of the same size, all its bits but the sign, and how to read it as a number.
BITS: dict[int, tuple[Any, Any, Struct, Struct]] = {
    4: (np.uint32, np.uint32(2**31 - 1), Struct("I"), Struct("f")),
    8: (np.uint64, np.uint64(2**63 - 1), Struct("Q"), Struct("d")),
}

# The functions in CUDA of this file and of `exact`.

# Contracting x * x + C would leave out the rounding that makes the additions exact.
SOURCE = CudaSource(Path(__file__).with_name("cuda") / "exact.cu", ("--fmad=false",))
CHUNK = 16_384  # elements of a block: a reduction at its end costs little then
THREADS = 256


def fits_cuda(array: Array) -> bool:
    """Return True if the functions in CUDA can take the array."""
    return bool(runs_cuda(array) and array.flags.c_contiguous)


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
            launch(function, blocks, THREADS, table, bits, len(ranges), CHUNK, reached=arrays)

    def take_whole(self, array: Array) -> None:
        """Raise the first value to the largest of a whole array."""
        function = SOURCE.function("largest_of_array", REAL=self._dtype)
        launch(function, -(-array.size // CHUNK), THREADS, array, self._bits, array.size, CHUNK)

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


def sums_on_device(arrays: Sequence[Array], ranges: Ranges, scalars: Sequence[Sequence[float]]) -> np.ndarray:
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
    launch(function, blocks, THREADS, table, numbers, partials, len(ranges), CHUNK, reached=arrays)
    launch(SOURCE.function("sums_of_chunks", REAL=like.dtype), len(ranges), THREADS, table, partials, found)
    backend.to_host(found, sums)
    return sums


def largest(array: Array) -> float:
    """Largest absolute value of a flat array, host or device; infinite or NaN if any element is, 0.0 if it is empty."""
    if not array.size:
        return 0.0
    if type(array) is not np.ndarray and is_device(array):
        if not fits_cuda(array):
            return float(abs(array).max())
        found = LargestValues(1, array.dtype, array)
        found.take_whole(array)
        return float(found.values()[0])
    integer, mask, bits, real = BITS[array.dtype.itemsize]
    return float(real.unpack(bits.pack(_largest_bits((array.view(integer),), (mask,))))[0])


def sum_of_squares(array: Array, top: float, terms: int) -> np.ndarray:
    """The sum of squares of a flat array over a power of four near ``top**2``, in two parts, float64 (2,).

    Results may be added, part by part, in any order, with the same bits; `norm` takes the total. `top`, a finite bound
    on the absolute values, and `terms`, a bound on the number of terms, are the same for all arrays whose sums are
    added.
    """
    if not array.size or top == 0:
        return np.zeros(2)
    scale, coarse, fine = _scalars(top, terms)
    if is_device(array):
        if fits_cuda(array):
            return sums_on_device([array], Ranges.whole([array]), [(scale, coarse, fine)])[0]
        scaled = array.astype(module_of(array).float64) * scale
        squares = scaled * scaled  # a power may be rounded in another way
        rounded = (squares + coarse) - coarse
        rest = ((squares - rounded) + fine) - fine
        return np.array([float(rounded.sum()), float(rest.sum())])
    return np.array(_binned_squares((array,), (scale, coarse, fine)))


def largest_of(arrays: Sequence[Array], ranges: Ranges) -> list[float]:
    """`largest` of each range of flat arrays of one dtype; on a device one launch and one copy for all of them.

    Keep `ranges` from call to call.
    """
    if arrays and runs_cuda(arrays[0]):
        found = LargestValues(len(ranges), arrays[0].dtype, arrays[0])
        found.take(arrays, ranges)
        return found.values().tolist()
    return [largest(arrays[row][start:stop]) for row, start, stop, _ in ranges.all]


def sums_of_squares(arrays: Sequence[Array], ranges: Ranges, tops: Sequence[float], terms: Sequence[int]) -> np.ndarray:
    """`sum_of_squares` of each range of arrays, float64 (ranges, 2); on a device two launches and one copy.

    The choice of a range is the number of its entry in `tops` and `terms`.
    """
    if arrays and runs_cuda(arrays[0]):
        sums = sums_on_device(arrays, ranges, list(map(_scalars, tops, terms)))
        sums[[tops[each.choice] == 0 for each in ranges.all]] = 0.0
        return sums
    found = [sum_of_squares(arrays[row][start:stop], tops[k], terms[k]) for row, start, stop, k in ranges.all]
    return np.array(found).reshape(-1, 2)


def norm(parts: np.ndarray, top: float) -> float:
    """The 2-norm of all terms; `parts` is the total of their `sum_of_squares` with the bound `top`."""
    return math.sqrt(parts[0] + parts[1]) * 2.0 ** _exponent(top) if top else 0.0


def norm_of(array: Array) -> float:
    """The 2-norm of one whole flat array; not finite if an element is not, 0.0 if it is empty."""
    top = largest(array)
    return norm(sum_of_squares(array, top, array.size), top) if math.isfinite(top) else top


def expect_norms(like: Array, squares: bool) -> None:
    """Announce a call of `largest` with NumPy arrays of this dtype; with `squares` also one of `sum_of_squares`.

    For a device nothing is compiled ahead.
    """
    if is_device(like):
        return
    integer, mask, _, _ = BITS[like.itemsize]
    _largest_bits.expect((np.empty(0, integer),), (mask,))
    if squares:
        _binned_squares.expect((np.empty(0, like.dtype),), (0.0, 0.0, 0.0))


def _exponent(top: float) -> int:
    """The power of two by which values up to `top` are divided to be below 4; two to it is a normal number."""
    return max(-1022, min(1022, math.frexp(top)[1]))


def _scalars(top: float, terms: int) -> tuple[float, float, float]:
    """The factor on values, a power of two, which loses no bit, and the `_shifts`."""
    return 2.0 ** -_exponent(top), *_shifts(terms)


def _shifts(terms: int) -> tuple[float, float]:
    """Numbers C such that ``(x + C) - C`` rounds x to a quantum of which `terms` terms still add exactly.

    Terms are below 16, so their sum is below ``2**width``, and the first quantum is 52 binary places below that. The
    remainder of a term is below the first quantum; the second quantum is 52 - width places lower.
    """
    width = max(1, terms).bit_length() + 4
    return 1.5 * 2.0**width, 1.5 * 2.0 ** (2 * width - 52)


def _largest_bits_loop(bits: np.ndarray, mask: Any) -> Any:
    # Without their sign, floating-point numbers order like the integers of the same bits, infinity and NaN on top;
    # integers vectorise where a comparison that must mind NaN does not.
    top = bits[0] & mask
    for i in range(bits.size):
        value = bits[i] & mask
        top = value if value > top else top
    return top


def _binned_squares_loop(array: np.ndarray, scale: float, coarse: float, fine: float) -> tuple[float, float]:
    # The additions are exact, so lanes may be added in any order; four of them hide the latency of an addition.
    sum0 = sum1 = sum2 = sum3 = rest0 = rest1 = rest2 = rest3 = 0.0
    whole = array.size // 4 * 4
    for i in range(0, whole, 4):
        x0, x1 = np.float64(array[i]) * scale, np.float64(array[i + 1]) * scale
        x2, x3 = np.float64(array[i + 2]) * scale, np.float64(array[i + 3]) * scale
        square0, square1, square2, square3 = x0 * x0, x1 * x1, x2 * x2, x3 * x3
        rounded0, rounded1 = (square0 + coarse) - coarse, (square1 + coarse) - coarse
        rounded2, rounded3 = (square2 + coarse) - coarse, (square3 + coarse) - coarse
        sum0 += rounded0
        sum1 += rounded1
        sum2 += rounded2
        sum3 += rounded3
        rest0 += ((square0 - rounded0) + fine) - fine
        rest1 += ((square1 - rounded1) + fine) - fine
        rest2 += ((square2 - rounded2) + fine) - fine
        rest3 += ((square3 - rounded3) + fine) - fine
    for i in range(whole, array.size):
        x0 = np.float64(array[i]) * scale
        square0 = x0 * x0
        rounded0 = (square0 + coarse) - coarse
        sum0 += rounded0
        rest0 += ((square0 - rounded0) + fine) - fine
    return (sum0 + sum1) + (sum2 + sum3), (rest0 + rest1) + (rest2 + rest3)


_largest_bits = HostFunction(_largest_bits_loop)
_binned_squares = HostFunction(_binned_squares_loop)
