"""Norms and dot products whose bits do not depend on the layout, that is, on which ranks hold which elements.

Floating-point addition rounds, so a sum depends on its order, and the order on the number of ranks.  Here every term is
first rounded to a multiple of a quantum so coarse that additions are exact (Rump's pre-rounding; Demmel and Nguyen,
"Fast reproducible floating-point summation", 2013).  All ranks must agree on the largest term before.

A norm adds squares in floating point, and the remainders in the same way with a finer quantum.  A dot product adds two
int64 words (fixed point: Kulisch, 2013): with ``top < 2**e`` a bound on the products, the first counts multiples of
``2**(e - 30)``, the second of ``2**(e - 64)``; the error is at most ``2**-64 * top`` a term.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np

from mpishard.backend.array import is_device, module_of, runs_cuda, to_host
from mpishard.backend.cuda_source import CudaSource, launch
from mpishard.backend.jit_function import HostFunction, inner
from mpishard.backend.kinds import backend_of
from mpishard.backend.ranges import Ranges
from mpishard.backend.streams import queue_copy

Array = Any


# CUDA functions for this file, and largest absolute values and pre-rounded sums of squares by them.

# Contracting x * x + C would leave out the rounding that makes the additions exact.
SOURCE = CudaSource(Path(__file__).with_name("cuda") / "exact.cu", ("--fmad=false",))
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
    launch(function, blocks, _THREADS, table, numbers, partials, len(ranges), CHUNK, reached=arrays)
    launch(SOURCE.function("sums_of_chunks", REAL=like.dtype), len(ranges), _THREADS, table, partials, found)
    backend.to_host(found, sums)
    return sums


# Norms.

# By element size: the integer of the same size, all its bits but the sign, and how to read it as a number.
_BITS: dict[int, tuple[Any, Any, Struct, Struct]] = {
    4: (np.uint32, np.uint32(2**31 - 1), Struct("I"), Struct("f")),
    8: (np.uint64, np.uint64(2**63 - 1), Struct("Q"), Struct("d")),
}


def largest(array: Array) -> float:
    """Largest absolute value of a flat array, host or device; infinite or NaN if any element is, 0.0 if it is empty."""
    if not array.size:
        return 0.0
    if type(array) is not np.ndarray and is_device(array):
        if not _runs_cuda(array):
            return float(abs(array).max())
        found = LargestValues(1, array.dtype, array)
        found.take_whole(array)
        return float(found.values()[0])
    integer, mask, bits, real = _BITS[array.dtype.itemsize]
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
        if _runs_cuda(array):
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
    integer, mask, _, _ = _BITS[like.itemsize]
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


# Dot products.  A product is rounded to float64 as usual (of float32 it is exact), then to a multiple of
# ``2**(e - 64)``; these are added as integers, without error and in any order.  `values` takes the total words of up to
# ``2**33 - 1`` terms.  Where `top` is far above all products, `is_doubtful` returns True.  A `top` of ``2**1000`` or
# more counts as infinite: the result is NaN.

Spans = Sequence[tuple[int, int]]

MOST_TERMS = 2**33 - 1
CARRY = 34  # binary places from the first word to the second
_LAST_BITS = 2**CARRY - 1
_SURE_BITS = 20  # a sum with fewer correct bits is doubtful
_PLACES = np.array([52 - 30, 52 - 64])  # from the exponent of a top to those of its `magic_numbers`
_BLOCK = 16384  # elements of the vector that stay in the cache while the rows pass
_BUFFER = 4096  # elements of a sum of rows that stay in the cache
_PAGE = 512  # elements: no small page of memory has fewer


def dot_words(one: Array, other: Array, top: float, spans: Spans) -> np.ndarray:
    """The words of the dot product of the elements in `spans` of two contiguous 1-D arrays, int64 (2,).

    `top` is a bound on the absolute values of the products: the largest of one times the largest of the other. The
    second word is in ``[0, 2**34)``.
    """
    return row_dot_words(one.reshape(1, -1), (0,), other, (top,), spans)[0]


def row_dot_words(
    rows: Array, indices: Sequence[int], vector: Array, tops: Sequence[float], spans: Spans
) -> np.ndarray:
    """The words of the dot products of some rows with one vector, in one pass over memory; int64 (rows, 2).

    `tops` has a bound for each of these rows, as in `dot_words`.
    """
    words = np.zeros((len(indices), 2), np.int64)
    magic = magic_numbers(tops)
    if is_device(rows):
        return pair_words(rows, vector, [(index, -1) for index in indices], magic, spans)
    if words.size and len(spans):
        arrays = (rows, vector, np.array(indices, np.int64), np.array(spans, np.int64))
        _row_dots((*arrays, magic, magic.view(np.int64), words))
    return words


def values(words: np.ndarray, tops: Sequence[float]) -> list[float]:
    """The dot products, each rounded once, of the totals of the words of all ranks, int64 (products, 2).

    `tops` are those that the words were made with: the product is 0.0 where `top` is 0, NaN where it is not finite, or
    ``2**1000`` or more, infinite where it is too large for a float.
    """
    return [_value(high, low, top) for (high, low), top in zip(words.tolist(), tops, strict=True)]


def approximate_values(words: np.ndarray, tops: Sequence[float]) -> np.ndarray:
    """The float64 array (..., products) of many sums, as `values` to a few units in the last place.

    `words` is an int64 array (..., products, 2), `tops` has a bound of each product.
    """
    bounds = np.array(tops, np.float64)
    exponents = np.maximum(np.frexp(np.where(bounds < 2.0**1000, bounds, 1.0))[1], -1010)
    with np.errstate(over="ignore"):
        found = np.ldexp(np.ldexp(words[..., 0].astype(np.float64), CARRY) + words[..., 1], exponents - 64)
    return np.where(bounds > 0, np.where(bounds < 2.0**1000, found, math.nan), np.where(bounds == 0, 0.0, math.nan))


def is_doubtful(words: Sequence[int], top: float, terms: int) -> bool:
    """Return True if the total of a product's words may have few correct bits: `top` is too large for what was added.

    `terms` counts those of all ranks; each adds an error of up to half a quantum.
    """
    high, low = words
    return top > 0 and not (top < 2.0**1000 and abs((high << CARRY) + low) >= terms << _SURE_BITS)


def largest_product(one: Array, other: Array) -> float:
    """The largest absolute value of the products of the elements of two flat arrays; infinite if one is not finite."""
    if is_device(one):
        with np.errstate(over="ignore", invalid="ignore"):
            top = largest(_products(one, other))
    else:
        _, mask, bits, real = _BITS[8]
        top = float(real.unpack(bits.pack(_largest_product((one, other), (mask,))))[0])
    return top if math.isfinite(top) else math.inf


def normalized(words: np.ndarray) -> np.ndarray:
    """The same totals with the second words in ``[0, 2**34)``, so that many of them can be added."""
    carry = words[:, 1] >> CARRY
    return np.stack([words[:, 0] + carry, words[:, 1] & _LAST_BITS], axis=1)


def combine(
    rows: Array, indices: Sequence[int], coefficients: Sequence[float], vector: Array, factor: float, out: Array
) -> None:
    """``out = factor * vector + sum of coefficients * rows``, in one pass over memory.

    Every element is computed independently, in float64 and in the order of `indices`, and rounded to the dtype in the
    end. `out` may be the vector, but none of the rows.
    """
    if is_device(rows):
        wide = module_of(rows).float64
        total = vector.astype(wide) * factor
        for index, coefficient in zip(indices, coefficients, strict=True):
            total += rows[index].astype(wide) * coefficient
        out[...] = total.astype(out.dtype)
    elif out.size:
        numbers = np.array(coefficients, np.float64)
        buffer = np.empty(_BUFFER)
        _combine((rows, vector, np.array(indices, np.int64), numbers, buffer, out), (float(factor),))


def expect_dots(like: Array) -> None:
    """As `expect_norms`, calls of `row_dot_words`, `combine` and `largest_product` with writeable arrays."""
    if is_device(like):
        return
    rows, vector, none = np.empty((0, 0), like.dtype), np.empty(0, like.dtype), np.empty((0, 2), np.int64)
    _row_dots.expect((rows, vector, none[:, 0].copy(), none, none.view(np.float64), none, none))
    _combine.expect((rows, vector, none[:, 0].copy(), np.empty(0), np.empty(0), vector), (1.0,))
    _largest_product.expect((vector, vector), (_BITS[8][1],))


def magic_numbers(tops: Any) -> np.ndarray:
    """Two numbers a product, float64 (..., products, 2): their last places are the quanta of the two words.

    Between ``2**52`` and ``2**53`` quanta the bits of a float64 count quanta; so, if C is in the middle of these, the
    bits of ``x + C``, read as an integer, less the bits of C are the number of quanta nearest to x.

    With D as the second number, the rest is to be added to D; ``x + ((C + D) - (x + C))`` is that, rounded once: the
    sum and the difference in it are exact.
    """
    exponents = np.frexp(np.array(tops, np.float64))[1]  # any number will do where no result is asked for
    return np.ldexp(1.5, np.minimum(np.maximum(exponents, -1010), 1000)[..., None] + _PLACES)


def _value(high: int, low: int, top: float) -> float:
    if not top < 2.0**1000:
        return math.nan
    total = (high << CARRY) + low if top > 0 else 0
    places = 64 - max(math.frexp(top)[1], -1010)  # the last quantum is 2**-places, which is a number
    try:
        return total / (1 << places) if places > 0 else float(total << -places)  # both are rounded correctly
    except OverflowError:
        return math.copysign(math.inf, total)


def _products(one: Array, other: Array) -> Array:
    wide = module_of(one).float64
    return one.astype(wide) * other.astype(wide)


EVERY, FREE, HELD, CHANGED = range(4)  # which elements count


def pair_words(
    rows: Array,
    vector: Array,
    pairs: Sequence[tuple[int, int]],
    magic: np.ndarray,
    spans: Spans,
    which: int = EVERY,
    before: Array | None = None,
    after: Array | None = None,
) -> np.ndarray:
    """The words, int64 (pairs, 2), of the dot products of pairs of rows in device memory; row -1 is the vector.

    `which` says over which elements: EVERY one; FREE, where `after` is True; HELD, where it is False; or CHANGED, the
    sum over `after` less the sum over `before`.  `magic` is of `magic_numbers`. The host waits for one copy.
    """
    words = np.zeros((len(pairs), 2), np.int64)
    if not words.size or not len(spans):
        return words
    if not (_runs_cuda(rows) and _runs_cuda(vector) and vector.dtype == rows.dtype):
        for start, stop in spans:
            part = slice(start, stop)
            for k, (one, other) in enumerate(pairs):
                products = _products(rows[one, part], (vector if other < 0 else rows[other])[part])
                if which != EVERY:
                    products = products * _times(which, before, after, part)
                _add_on_device(words[k], magic[k], products)
        return words
    backend = backend_of(rows)
    table = _table(rows, np.array(pairs, np.int64), magic)
    found = backend.zeros(words.shape, np.uint64, rows)
    none = table.view(np.uint8)
    masks = [none if mask is None else mask.view(np.uint8) for mask in (before, after)]
    function = SOURCE.function("words_of_pairs", REAL=rows.dtype)
    for start, stop in spans:
        blocks = len(pairs) * -(-(stop - start) // CHUNK)
        numbers = rows.shape[1], start, stop, len(pairs), which, CHUNK
        launch(function, blocks, _THREADS, rows, vector, *masks, table, found, *numbers)
    backend.to_host(found, words.view(np.uint64))
    return normalized(words)


def group_words(
    rows: Array, indices: Sequence[int], index: Array, starts: np.ndarray, factor: Array, magic: np.ndarray
) -> np.ndarray:
    """The words, int64 (groups, rows, 2), of the sums of groups of products in device memory, less than 2**28 together.

    The products are those of the elements `index` of some rows with the float64 `factor`.  Those of a group lie end to
    end; `starts`, int64 (groups + 1,), has where each group begins, and where the last one ends. The host waits for one
    copy.
    """
    words = np.zeros((len(starts) - 1, len(indices), 2), np.int64)
    if _runs_cuda(rows) and _runs_cuda(index) and _runs_cuda(factor):
        backend = backend_of(rows)
        table = _table(rows, starts, np.array(indices, np.int64), magic)
        found = backend.zeros(words.shape, np.uint64, rows)
        function = SOURCE.function("words_of_groups", REAL=rows.dtype)
        blocks = len(indices) * -(-int(starts[-1] - starts[0]) // CHUNK)
        numbers = rows.shape[1], len(indices), len(starts) - 1, CHUNK
        launch(function, blocks, _THREADS, rows, index, factor, table, found, *numbers)
        backend.to_host(found, words.view(np.uint64))
        return normalized(words.reshape(-1, 2)).reshape(words.shape)
    part = slice(int(starts[0]), int(starts[-1]))
    last = np.asarray(np.maximum(starts - part.start - 1, 0), like=index)
    for k, row in enumerate(indices):
        first, second = map(float, magic[k])
        products = _products(rows[row][index[part]], factor[part])
        coarse = products + first
        fine = (products - (coarse - first)) + second
        sums = np.zeros((2, len(starts)), np.int64)
        for into, each, bits in zip(sums, (coarse, fine), magic[k].view(np.int64), strict=True):
            total = module_of(products).cumsum(each.view(np.int64) - int(bits))
            into[:] = np.where(starts > part.start, to_host(total[last]), 0)
        words[:, k] = normalized(np.diff(sums, axis=1).T)
    return words


def _table(like: Array, *parts: np.ndarray) -> Array:
    """The 64-bit numbers of arrays, end to end on the device of `like`; queued."""
    numbers = np.concatenate([part.view(np.int64).reshape(-1) for part in parts])
    table = backend_of(like).empty(numbers.size, np.int64, like)
    queue_copy(numbers, table)
    return table


def _runs_cuda(array: Array) -> bool:
    return bool(runs_cuda(array) and array.flags.c_contiguous)


def _times(which: int, before: Array | None, after: Array | None, part: slice) -> Array:
    """How often each element counts."""
    assert after is not None
    free = after[part].astype(np.float64)
    if which == FREE:
        return free
    return 1 - free if before is None else free - before[part].astype(np.float64)


def _add_on_device(words: np.ndarray, magic: np.ndarray, products: Array) -> None:
    """Add some products in device memory to the two words of their sum."""
    first, second = map(float, magic)
    coarse = products + first
    fine = (products - (coarse - first)) + second
    bits = magic.view(np.int64)
    for begin in range(0, products.size, 2**28):  # that many cannot overflow the second word
        part = slice(begin, begin + 2**28)
        size = coarse[part].size
        high, low = (int(to_host(each[part].view(np.int64).sum())) for each in (coarse, fine))
        # The integers of the device have wrapped around.
        high, low = (_wrapped(high - size * int(bits[0])), _wrapped(low - size * int(bits[1])))
        words += (high + (low >> CARRY), low & _LAST_BITS)
    words[:] = normalized(words[None])[0]


def _wrapped(number: int) -> int:
    """The int64 of the same last 64 bits."""
    return (number + 2**63) % 2**64 - 2**63


@inner
def touch_next(rows, indices, k, count, begin, size, stop):  # type: ignore[no-untyped-def]
    """Read an element of each page of `count` rows from number `k` on, in this block or after the last row in the next.

    Processors prefetch up to the end of a page only: so they find the pages of these rows while they work on others.
    """
    if k >= indices.size:
        k, begin = 0, begin + size
    total = 0.0
    for row in range(k, min(k + count, indices.size)):
        for i in range(begin, min(begin + size, stop), _PAGE):
            total += rows[indices[row], i]
    return total


def _row_dots_loop(
    rows: np.ndarray,
    vector: np.ndarray,
    indices: np.ndarray,
    spans: np.ndarray,
    magic: np.ndarray,
    bits: np.ndarray,
    words: np.ndarray,
) -> None:
    for s in range(len(spans)):
        start, stop = spans[s, 0], spans[s, 1]
        for begin in range(start, stop, _BLOCK):
            part = vector[begin : min(begin + _BLOCK, stop)]
            size = part.size
            # Two rows at a time, as one stream does not keep the memory busy; the last may be its own neighbour.
            for k in range(0, indices.size, 2):
                j = min(k + 1, indices.size - 1)
                one, other = rows[indices[k], begin : begin + size], rows[indices[j], begin : begin + size]
                first0, first1 = magic[k, 0], magic[j, 0]
                both0, both1 = first0 + magic[k, 1], first1 + magic[j, 1]
                # Integers, which are vectorised; they wrap around, and are right in the end.
                high0 = low0 = high1 = low1 = np.int64(0)
                for i in range(size):
                    factor = np.float64(part[i])
                    product0, product1 = np.float64(one[i]) * factor, np.float64(other[i]) * factor
                    coarse0, coarse1 = product0 + first0, product1 + first1
                    fine0 = product0 + (both0 - coarse0)
                    fine1 = product1 + (both1 - coarse1)
                    high0 += np.float64(coarse0).view(np.int64)
                    low0 += np.float64(fine0).view(np.int64)
                    high1 += np.float64(coarse1).view(np.int64)
                    low1 += np.float64(fine1).view(np.int64)
                high0 += words[k, 0] - size * bits[k, 0]
                high1 += words[j, 0] - size * bits[j, 0]
                low0 += words[k, 1] - size * bits[k, 1]
                low1 += words[j, 1] - size * bits[j, 1]
                words[k, 0], words[k, 1] = high0 + (low0 >> CARRY), low0 & _LAST_BITS
                words[j, 0], words[j, 1] = high1 + (low1 >> CARRY), low1 & _LAST_BITS


def _largest_product_loop(one: np.ndarray, other: np.ndarray, mask: Any) -> Any:
    top = mask & ~mask
    for i in range(one.size):
        value = np.float64(np.float64(one[i]) * np.float64(other[i])).view(np.uint64) & mask
        top = value if value > top else top
    return top


def _combine_loop(
    rows: np.ndarray,
    vector: np.ndarray,
    indices: np.ndarray,
    coefficients: np.ndarray,
    buffer: np.ndarray,
    out: np.ndarray,
    factor: float,
) -> None:
    whole = indices.size // 4 * 4
    touched = 0.0
    for begin in range(0, out.size, buffer.size):
        size = min(buffer.size, out.size - begin)
        part, result = vector[begin : begin + size], out[begin : begin + size]
        for i in range(size):
            buffer[i] = factor * np.float64(part[i])
        # Four rows at a time need the memory, one at a time the cache.
        for k in range(0, whole, 4):
            row0, row1 = rows[indices[k], begin : begin + size], rows[indices[k + 1], begin : begin + size]
            row2, row3 = rows[indices[k + 2], begin : begin + size], rows[indices[k + 3], begin : begin + size]
            c0, c1, c2, c3 = coefficients[k], coefficients[k + 1], coefficients[k + 2], coefficients[k + 3]
            touched += touch_next(rows, indices, k + 4, 4, begin, size, out.size)
            for i in range(size):
                total = (buffer[i] + c0 * np.float64(row0[i])) + c1 * np.float64(row1[i])
                buffer[i] = (total + c2 * np.float64(row2[i])) + c3 * np.float64(row3[i])
        for k in range(whole, indices.size):
            row, coefficient = rows[indices[k], begin : begin + size], coefficients[k]
            for i in range(size):
                buffer[i] += coefficient * np.float64(row[i])
        for i in range(size):
            result[i] = buffer[i]
    buffer[0] = touched  # else the compiler would not read them


_row_dots = HostFunction(_row_dots_loop)
_combine = HostFunction(_combine_loop)
_largest_product = HostFunction(_largest_product_loop)
