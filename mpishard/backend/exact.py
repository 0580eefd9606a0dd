"""Dot products whose bits do not depend on the layout, that is, on which ranks hold which elements.

Products are rounded to float64 as usual (of float32 they are exact), and added as two int64 words (fixed point:
Kulisch, 2013), without error and in any order.  With ``top < 2**e`` a bound on the products, on which all ranks agree
before, the first word counts multiples of ``2**(e - 30)``, the second of ``2**(e - 64)``; the error is at most
``2**-64 * top`` a term.

`values` takes the total words of up to ``2**33 - 1`` terms.  Where `top` is far above all products, `is_doubtful`
returns True.  A `top` of ``2**1000`` or more counts as infinite: the result is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpishard.backend.array import is_device, module_of, to_host
from mpishard.backend.cuda_source import launch
from mpishard.backend.exact_norms import BITS, CHUNK, SOURCE, THREADS, fits_cuda, largest
from mpishard.backend.jit_function import HostFunction, inner
from mpishard.backend.kinds import backend_of
from mpishard.backend.streams import queue_copy

Array = Any
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
        _, mask, bits, real = BITS[8]
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
    _largest_product.expect((vector, vector), (BITS[8][1],))


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
    if not (fits_cuda(rows) and fits_cuda(vector) and vector.dtype == rows.dtype):
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
        launch(function, blocks, THREADS, rows, vector, *masks, table, found, *numbers)
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
    if fits_cuda(rows) and fits_cuda(index) and fits_cuda(factor):
        backend = backend_of(rows)
        table = _table(rows, starts, np.array(indices, np.int64), magic)
        found = backend.zeros(words.shape, np.uint64, rows)
        function = SOURCE.function("words_of_groups", REAL=rows.dtype)
        blocks = len(indices) * -(-int(starts[-1] - starts[0]) // CHUNK)
        numbers = rows.shape[1], len(indices), len(starts) - 1, CHUNK
        launch(function, blocks, THREADS, rows, index, factor, table, found, *numbers)
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
