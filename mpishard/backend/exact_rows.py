"""Dot products of the rows of a matrix with several vectors, over parts of the elements, in one pass over the rows.

The words are those of `mpishard.backend.exact.dot_words`.  Rows are what takes time to read: they are read once for all
that is asked of them, a block of elements after the other.  Words are integers: those over a set of elements are those
over another set, plus those of the elements that came, less those of the elements that went, without any error
(`changed_words`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpishard.backend import exact
from mpishard.backend.array import is_device
from mpishard.backend.exact import CARRY, Spans, touch_next
from mpishard.backend.jit_function import HostFunction, inner

Array = Any


_MOST = 4  # vectors of one pass
_BLOCK = 4096  # elements of which all rows are in the second-level cache
_ALL = 2
_LAST_BITS = 2**CARRY - 1


class Factor(NamedTuple):
    """A vector that rows are multiplied by, or some of its elements."""

    vector: Array
    tops: Sequence[float]  # for each row a bound on the products, as in `exact.dot_words`
    of_free: bool | None = None  # the elements that count: those where the mask is True, or False; None: all


def words_with(
    rows: Array,
    indices: Sequence[int],
    factors: Sequence[Factor],
    spans: Spans,
    free: Array | None = None,
) -> np.ndarray:
    """The words of the dot products of some rows with up to four vectors, over the elements in `spans`.

    `free` is the mask, where a factor has one.  It takes less time if the last one of four is a part of the second one.
    Returns int64 (factors, rows, 2).
    """
    words = np.zeros((len(factors), len(indices), 2), np.int64)
    if is_device(rows):
        pairs = [(index, -1) for index in indices]
        for found, (vector, tops, of_free) in zip(words, factors, strict=True):
            counted = exact.EVERY if of_free is None else exact.FREE if of_free else exact.HELD
            found[...] = exact.pair_words(rows, vector, pairs, exact.magic_numbers(tops), spans, counted, after=free)
        return words
    if len(indices) and len(spans):
        vectors = [factor.vector for factor in factors] + [factors[0].vector[:0]] * (_MOST - len(factors))
        mask = np.empty(0, np.uint8) if free is None else free.view(np.uint8)
        which = np.array([_ALL if factor.of_free is None else factor.of_free for factor in factors], np.int64)
        magic = exact.magic_numbers([factor.tops for factor in factors])
        split = len(factors) == _MOST and _is_part(factors[3], factors[1])
        numbers = np.array(indices, np.int64), np.array(spans, np.int64)
        buffers = np.empty((2 * _MOST + len(indices), _BLOCK)), np.empty((3, _BLOCK), np.int64)
        marked = np.empty(_BLOCK, np.uint8)
        marks = np.empty((4, 2)), np.empty((8, 2), np.int64)
        _rows_with((rows, *vectors, mask, which, *numbers, magic, words, *buffers, marked, *marks), (int(split),))
    return words


def sorted_words(
    rows: Array,
    indices: Sequence[int],
    index: Array,
    starts: np.ndarray,
    factors: Sequence[Array],
    tops: Sequence[Sequence[float]],
) -> np.ndarray:
    """The words of the dot products of some rows with vectors, over each of several groups of elements.

    `indices` are those of the contiguous float32 or float64 `rows`; `index` has the elements, those of one group end to
    end, like the rows in kind, and `starts`, int64 (groups + 1,), where in it each group begins, and the last one ends.
    `factors` has the elements of each vector at `index`, `tops` for each vector and row a bound on the products.
    Returns int64 (groups, vectors, rows, 2), whose second words are in ``[0, 2**34)``.
    """
    words = [np.zeros((len(starts) - 1, len(indices), 2), np.int64) for _ in factors]
    magic = [exact.magic_numbers(each) for each in tops]
    part = slice(int(starts[0]), int(starts[-1]))
    if part.start == part.stop or not len(indices):
        return np.stack(words, axis=1)
    if is_device(rows):
        each = zip(factors, magic, strict=True)
        return np.stack([exact.group_words(rows, indices, index, starts, *of_factor) for of_factor in each], axis=1)
    picked, numbers = np.empty((len(indices), _BLOCK)), np.array(indices, np.int64)
    for found, factor, marks in zip(words, factors, magic, strict=True):
        _sorted((rows, numbers, index, starts, factor, marks, picked, found))
    return np.stack(words, axis=1)


def expect(like: Array) -> None:
    """As `exact.expect_norms`, calls of `words_with` and `sorted_words` with writeable arrays."""
    if is_device(like):
        return
    rows, number, flag = np.empty((0, 0), like.dtype), np.empty(0, np.int64), np.empty(0, np.uint8)
    words, pairs, wide = np.empty((0, 0, 2), np.int64), np.empty((0, 2), np.int64), np.empty((0, 0))
    marks = pairs.view(np.float64), pairs
    magic = words.view(np.float64)
    _rows_with.expect(
        (rows, *(rows.reshape(-1),) * _MOST, flag, number, number, pairs, magic, words, *marks, flag, *marks), (0,)
    )
    _sorted.expect((rows, number, number, number, np.empty(0), wide, wide, words))


def _is_part(part: Factor, whole: Factor) -> bool:
    """Return True if the products with a vector are some of those with another one."""
    return part.vector is whole.vector and whole.of_free is None and list(part.tops) == list(whole.tops)


@inner
def _fill(part, mask, wanted, factor):  # type: ignore[no-untyped-def]
    """Write the elements of a vector that count, 0 for others; returns how many are not 0."""
    if wanted == _ALL:
        for i in range(factor.size):
            factor[i] = part[i]
    else:
        for i in range(factor.size):
            factor[i] = part[i] if mask[i] == wanted else 0.0
    count = 0
    for i in range(factor.size):
        count += factor[i] != 0.0
    return count


@inner
def _add_four(one, other, left, right, magic, sums):  # type: ignore[no-untyped-def]
    """Add the bits of two rows times two vectors; integers, which are vectorised.  They wrap around."""
    first0, first1, first2, first3 = magic[0, 0], magic[1, 0], magic[2, 0], magic[3, 0]
    both0, both1 = first0 + magic[0, 1], first1 + magic[1, 1]
    both2, both3 = first2 + magic[2, 1], first3 + magic[3, 1]
    high0 = low0 = high1 = low1 = high2 = low2 = high3 = low3 = np.int64(0)
    for i in range(one.size):
        x, y = np.float64(one[i]), np.float64(other[i])
        product0, product1, product2, product3 = x * left[i], y * left[i], x * right[i], y * right[i]
        coarse0, coarse1, coarse2, coarse3 = product0 + first0, product1 + first1, product2 + first2, product3 + first3
        high0 += np.float64(coarse0).view(np.int64)
        high1 += np.float64(coarse1).view(np.int64)
        high2 += np.float64(coarse2).view(np.int64)
        high3 += np.float64(coarse3).view(np.int64)
        low0 += np.float64(product0 + (both0 - coarse0)).view(np.int64)
        low1 += np.float64(product1 + (both1 - coarse1)).view(np.int64)
        low2 += np.float64(product2 + (both2 - coarse2)).view(np.int64)
        low3 += np.float64(product3 + (both3 - coarse3)).view(np.int64)
    for k, (high, low) in enumerate(((high0, low0), (high1, low1), (high2, low2), (high3, low3))):
        sums[k, 0] += high
        sums[k, 1] += low


@inner
def _add_eight(one, other, left, middle, right, part, marks0, marks1, sums):  # type: ignore[no-untyped-def]
    """As `_add_four`, with four vectors, of which the last has elements of the second one, and else zeros.

    Their products are the same. Bits of the last are of its elements other than 0 only.
    """
    first0, first1, first2 = marks0[0, 0], marks0[1, 0], marks0[2, 0]
    first4, first5, first6 = marks1[0, 0], marks1[1, 0], marks1[2, 0]
    both0, both1, both2 = first0 + marks0[0, 1], first1 + marks0[1, 1], first2 + marks0[2, 1]
    both4, both5, both6 = first4 + marks1[0, 1], first5 + marks1[1, 1], first6 + marks1[2, 1]
    high0 = low0 = high1 = low1 = high2 = low2 = high3 = low3 = np.int64(0)
    high4 = low4 = high5 = low5 = high6 = low6 = high7 = low7 = np.int64(0)
    for i in range(one.size):
        x, y, counts = np.float64(one[i]), np.float64(other[i]), part[i] != 0.0
        product0, product1, product2 = x * left[i], x * middle[i], x * right[i]
        product4, product5, product6 = y * left[i], y * middle[i], y * right[i]
        coarse0, coarse1, coarse2 = product0 + first0, product1 + first1, product2 + first2
        coarse4, coarse5, coarse6 = product4 + first4, product5 + first5, product6 + first6
        bits1, bits5 = np.float64(coarse1).view(np.int64), np.float64(coarse5).view(np.int64)
        fine1 = np.float64(product1 + (both1 - coarse1)).view(np.int64)
        fine5 = np.float64(product5 + (both5 - coarse5)).view(np.int64)
        high0 += np.float64(coarse0).view(np.int64)
        high1 += bits1
        high2 += np.float64(coarse2).view(np.int64)
        high3 += bits1 if counts else 0
        high4 += np.float64(coarse4).view(np.int64)
        high5 += bits5
        high6 += np.float64(coarse6).view(np.int64)
        high7 += bits5 if counts else 0
        low0 += np.float64(product0 + (both0 - coarse0)).view(np.int64)
        low1 += fine1
        low2 += np.float64(product2 + (both2 - coarse2)).view(np.int64)
        low3 += fine1 if counts else 0
        low4 += np.float64(product4 + (both4 - coarse4)).view(np.int64)
        low5 += fine5
        low6 += np.float64(product6 + (both6 - coarse6)).view(np.int64)
        low7 += fine5 if counts else 0
    highs = high0, high1, high2, high3, high4, high5, high6, high7
    lows = low0, low1, low2, low3, low4, low5, low6, low7
    for k in range(8):
        sums[k, 0], sums[k, 1] = highs[k], lows[k]


@inner
def _add_two(one, other, factor, magic, sums):  # type: ignore[no-untyped-def]
    """As `_add_four`, with one vector."""
    first0, first1 = magic[0, 0], magic[1, 0]
    both0, both1 = first0 + magic[0, 1], first1 + magic[1, 1]
    high0 = low0 = high1 = low1 = np.int64(0)
    for i in range(one.size):
        product0, product1 = np.float64(one[i]) * factor[i], np.float64(other[i]) * factor[i]
        coarse0, coarse1 = product0 + first0, product1 + first1
        high0 += np.float64(coarse0).view(np.int64)
        high1 += np.float64(coarse1).view(np.int64)
        low0 += np.float64(product0 + (both0 - coarse0)).view(np.int64)
        low1 += np.float64(product1 + (both1 - coarse1)).view(np.int64)
    for k, (high, low) in enumerate(((high0, low0), (high1, low1))):
        sums[k, 0] += high
        sums[k, 1] += low


@inner
def _take(high, low, count, magic, words):  # type: ignore[no-untyped-def]
    """Add the sums of the bits of `count` products to words."""
    low += words[1] - count * np.float64(magic[1]).view(np.int64)
    words[0] += high - count * np.float64(magic[0]).view(np.int64) + (low >> CARRY)
    words[1] = low & _LAST_BITS


@inner
def _add_one(one, other, magic, words):  # type: ignore[no-untyped-def]
    """Add the products of the elements of two arrays to words."""
    first, both = magic[0], magic[0] + magic[1]
    high = low = np.int64(0)
    for i in range(one.size):
        product = one[i] * other[i]
        coarse = product + first
        high += np.float64(coarse).view(np.int64)
        low += np.float64(product + (both - coarse)).view(np.int64)
    _take(high, low, one.size, magic, words)


@inner
def _find(marked, index):  # type: ignore[no-untyped-def]
    """Write the places of ones among zeros; returns their number."""
    ones = 0
    for i in range(marked.size):
        ones += marked[i]
    count = 0
    if ones:
        for i in range(marked.size):
            index[count] = i
            count += marked[i]
    return count


@inner
def _gather(rows, indices, begin, index, picked):  # type: ignore[no-untyped-def]
    """Copy some elements of rows: of four rows at a time, since then more reads are under way.

    The last row may come several times.
    """
    for k in range(0, indices.size, 4):
        k1, k2, k3 = min(k + 1, indices.size - 1), min(k + 2, indices.size - 1), min(k + 3, indices.size - 1)
        row0, row1, row2, row3 = rows[indices[k]], rows[indices[k1]], rows[indices[k2]], rows[indices[k3]]
        values0, values1, values2, values3 = picked[k], picked[k1], picked[k2], picked[k3]
        for i in range(index.size):
            j = begin + index[i]
            values0[i], values1[i], values2[i], values3[i] = row0[j], row1[j], row2[j], row3[j]


def _rows_with_loop(
    rows: np.ndarray,
    vector0: np.ndarray,
    vector1: np.ndarray,
    vector2: np.ndarray,
    vector3: np.ndarray,
    mask: np.ndarray,
    which: np.ndarray,
    indices: np.ndarray,
    spans: np.ndarray,
    magic: np.ndarray,
    words: np.ndarray,
    buffers: np.ndarray,
    places: np.ndarray,
    marked: np.ndarray,
    marks: np.ndarray,
    sums: np.ndarray,
    split: int,
) -> None:
    touched = 0.0
    factors, few, picked = buffers[:_MOST], buffers[_MOST : 2 * _MOST], buffers[2 * _MOST :]
    index, dense, sparse = places[0], places[1], places[2]
    for s in range(len(spans)):
        stop = spans[s, 1]
        for begin in range(spans[s, 0], stop, _BLOCK):
            size = min(_BLOCK, stop - begin)
            denses = sparses = count = 0
            for v in range(which.size):
                vector = vector0 if v == 0 else (vector1 if v == 1 else (vector2 if v == 2 else vector3))
                part, flags = vector[begin : begin + size], mask[begin : begin + size]
                count = _fill(part, flags, which[v], factors[v, :size])
                if 8 * count > size:
                    dense[denses] = v
                    denses += 1
                elif count:
                    sparse[sparses] = v
                    sparses += 1
            # Two rows at a time, and two or all vectors; the last row may be its own neighbour.
            together = split and denses == _MOST
            if together:
                for k in range(0, indices.size, 2):
                    j = min(k + 1, indices.size - 1)
                    touched += touch_next(rows, indices, k + 2, 2, begin, size, stop)
                    one = rows[indices[k], begin : begin + size]
                    other = rows[indices[j], begin : begin + size]
                    vectors = factors[0, :size], factors[1, :size], factors[2, :size], factors[3, :size]
                    _add_eight(one, other, *vectors, magic[:, k], magic[:, j], sums)
                    for v in range(_MOST):
                        terms = size if v < _MOST - 1 else count
                        _take(sums[v, 0], sums[v, 1], terms, magic[v, k], words[v, k])
                        if j > k:
                            _take(sums[_MOST + v, 0], sums[_MOST + v, 1], terms, magic[v, j], words[v, j])
            for d in range(_MOST if together else 0, denses, 2):
                v, w = dense[d], dense[min(d + 1, denses - 1)]
                for k in range(0, indices.size, 2):
                    j = min(k + 1, indices.size - 1)
                    if d == 0:
                        touched += touch_next(rows, indices, k + 2, 2, begin, size, stop)
                    for p in range(2):
                        marks[0, p], marks[1, p] = magic[v, k, p], magic[v, j, p]
                        marks[2, p], marks[3, p] = magic[w, k, p], magic[w, j, p]
                        sums[0, p] = sums[1, p] = sums[2, p] = sums[3, p] = 0
                    one = rows[indices[k], begin : begin + size]
                    other = rows[indices[j], begin : begin + size]
                    if w > v:
                        _add_four(one, other, factors[v, :size], factors[w, :size], marks, sums)
                    else:
                        _add_two(one, other, factors[v, :size], marks, sums)
                    _take(sums[0, 0], sums[0, 1], size, magic[v, k], words[v, k])
                    if j > k:
                        _take(sums[1, 0], sums[1, 1], size, magic[v, j], words[v, j])
                    if w > v:
                        _take(sums[2, 0], sums[2, 1], size, magic[w, k], words[w, k])
                    if j > k and w > v:
                        _take(sums[3, 0], sums[3, 1], size, magic[w, j], words[w, j])
            # From here on the rows are in the cache.
            if sparses:
                marked[:size] = 0
                for d in range(sparses):
                    factor = factors[sparse[d]]
                    for i in range(size):
                        marked[i] |= factor[i] != 0.0
                count = _find(marked[:size], index)
                _gather(rows, indices, begin, index[:count], picked)
                for d in range(sparses):
                    v = sparse[d]
                    for i in range(count):
                        few[d, i] = factors[v, index[i]]
                    for k in range(indices.size):
                        _add_one(picked[k, :count], few[d, :count], magic[v, k], words[v, k])
    few[0, 0] = touched  # else the compiler would not read them


def _sorted_loop(
    rows: np.ndarray,
    indices: np.ndarray,
    index: np.ndarray,
    starts: np.ndarray,
    factor: np.ndarray,
    magic: np.ndarray,
    picked: np.ndarray,
    words: np.ndarray,
) -> None:
    most = picked.shape[1]
    for group in range(starts.size - 1):
        for begin in range(starts[group], starts[group + 1], most):
            end = min(begin + most, starts[group + 1])
            _gather(rows, indices, 0, index[begin:end], picked)
            for k in range(indices.size):
                _add_one(picked[k, : end - begin], factor[begin:end], magic[k], words[group, k])


_rows_with = HostFunction(_rows_with_loop)
_sorted = HostFunction(_sorted_loop)


_BLOCK_OF_CHANGES = 1024  # elements of which the factors are in the cache
_SCAN = 64  # elements that are looked at together for a change


def changed_words(
    rows: Array,
    pairs: Sequence[tuple[int, int]],
    tops: Sequence[float],
    before: Array | None,
    after: Array,
    spans: Spans,
) -> np.ndarray:
    """The words of dot products of pairs of rows over the elements `after`, less those over the elements `before`.

    `tops` has for each a bound on the products of elements, as in `exact.dot_words`; None for no element; only
    elements in `spans` can count at all. Returns int64 (pairs, 2), of which the second words are in ``[0, 2**34)``.
    """
    words = np.zeros((len(pairs), 2), np.int64)
    if not len(pairs) or not len(spans):
        return words
    magic = exact.magic_numbers(tops)
    if is_device(rows):
        which = exact.FREE if before is None else exact.CHANGED
        return exact.pair_words(rows, rows[0], pairs, magic, spans, which, before, after)
    used, rights = sorted({row for pair in pairs for row in pair}), sorted({other for _, other in pairs})
    of_used, of_right = ({row: place for place, row in enumerate(side)} for side in (used, rights))
    places = np.array([(of_used[one], of_right[other]) for one, other in pairs], np.int64)
    seconds = [of_used[row] for row in rights]
    keep = 0 if before is None else 1
    flags = [mask.view(np.uint8) for mask in (after if before is None else before, after)]
    numbers = [np.array(side, np.int64) for side in (used, seconds)]
    left, right = (np.empty((len(side), _BLOCK_OF_CHANGES)) for side in (used, seconds))
    index, sign = np.empty(_BLOCK_OF_CHANGES, np.int64), np.empty(_BLOCK_OF_CHANGES)
    marks = magic, magic.view(np.int64)
    _changed((rows, *numbers, places, *flags, np.array(spans), *marks, left, right, index, sign, words), (keep,))
    return words


def expect_changes(like: Array) -> None:
    """As `exact.expect_norms`, a call of `changed_words` with writeable arrays."""
    if is_device(like):
        return
    number, flag, pair = np.empty(0, np.int64), np.empty(0, np.uint8), np.empty((0, 2), np.int64)
    marks = pair.view(np.float64), pair
    wide = np.empty((0, 0))
    buffers = wide, wide, number, np.empty(0), pair
    _changed.expect((np.empty((0, 0), like.dtype), number, number, pair, flag, flag, pair, *marks, *buffers), (0,))


def _changed_loop(
    rows: np.ndarray,
    used: np.ndarray,
    seconds: np.ndarray,
    places: np.ndarray,
    before: np.ndarray,
    after: np.ndarray,
    spans: np.ndarray,
    magic: np.ndarray,
    bits: np.ndarray,
    left: np.ndarray,
    right: np.ndarray,
    index: np.ndarray,
    sign: np.ndarray,
    words: np.ndarray,
    keep: int,
) -> None:
    mask = np.uint8(255 * keep)
    for s in range(len(spans)):
        position, stop = spans[s, 0], spans[s, 1]
        while position < stop:
            # The next elements that have changed, as many as the buffers hold.
            count = 0
            while position < stop and count <= index.size - _SCAN:
                old, new = before[position : min(position + _SCAN, stop)], after[position : min(position + _SCAN, stop)]
                changes = 0
                for i in range(new.size):
                    changes += new[i] ^ (old[i] & mask)
                if changes:
                    for i in range(new.size):
                        change = np.int64(new[i]) - np.int64(old[i] & mask)
                        index[count] = position + i
                        sign[count] = change
                        count += change != 0
                position += new.size
            if count == 0:
                continue
            _gather(rows, used, 0, index[:count], left)
            for k in range(seconds.size):
                part, factors = left[seconds[k]], right[k]
                for i in range(count):
                    factors[i] = part[i] * sign[i]
            # As in `mpishard.backend.exact`.
            for k in range(len(places)):
                one, other = left[places[k, 0], :count], right[places[k, 1], :count]
                first, both = magic[k, 0], magic[k, 0] + magic[k, 1]
                high = low = np.int64(0)
                for i in range(count):
                    product = one[i] * other[i]
                    coarse = product + first
                    fine = product + (both - coarse)
                    high += np.float64(coarse).view(np.int64)
                    low += np.float64(fine).view(np.int64)
                low += words[k, 1] - count * bits[k, 1]
                carry = low >> CARRY
                words[k, 0] += high - count * bits[k, 0] + carry
                words[k, 1] = low - (carry << CARRY)


_changed = HostFunction(_changed_loop)
