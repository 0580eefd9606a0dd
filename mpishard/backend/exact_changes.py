"""Updates exact dot products of rows when other elements count, at the cost of these elements.

The words of `exact_dot` are integers, so the words over a set of elements are those over another set, plus those of the
elements that came, less those of the elements that went, without any error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpishard.backend import exact_dot
from mpishard.backend.array import is_device, module_of
from mpishard.backend.compiled import HostFunction
from mpishard.backend.exact_dot import CARRY, Spans

Array = Any

_BLOCK = 1024  # elements of which the factors are in the cache
_SCAN = 64  # elements that are looked at together for a change
_ON_DEVICE = 2**22  # elements of which the factors are in device memory


def changed_words(
    rows: Array,
    pairs: Sequence[tuple[int, int]],
    tops: Sequence[float],
    before: Array | None,
    after: Array,
    spans: Spans,
) -> np.ndarray:
    """The words of dot products of pairs of rows over the elements `after`, less those over the elements `before`.

    `tops` has for each a bound on the products of elements, as in `exact_dot.dot_words`; None for no element; only
    elements in `spans` can count at all. Returns int64 (pairs, 2), of which the second words are in ``[0, 2**34)``.
    """
    words = np.zeros((len(pairs), 2), np.int64)
    if not len(pairs) or not len(spans):
        return words
    magic = exact_dot.magic_numbers(tops)
    lefts, rights = (sorted(set(side)) for side in zip(*pairs, strict=True))
    of_left, of_right = ({row: place for place, row in enumerate(side)} for side in (lefts, rights))
    places = np.array([(of_left[one], of_right[other]) for one, other in pairs], np.int64)
    if is_device(rows):
        for start, stop in spans:
            for begin in range(start, stop, _ON_DEVICE):
                part = slice(begin, min(begin + _ON_DEVICE, stop))
                old = None if before is None else before[part]
                _on_device(rows[:, part], lefts, rights, places, magic, old, after[part], words)
        return words
    keep = 0 if before is None else 1
    flags = [mask.view(np.uint8) for mask in (after if before is None else before, after)]
    numbers = [np.array(side, np.int64) for side in (lefts, rights)]
    left, right = (np.empty((len(side), _BLOCK)) for side in (lefts, rights))
    index, sign = np.empty(_BLOCK, np.int64), np.empty(_BLOCK)
    marks = magic, magic.view(np.int64)
    _changed((rows, *numbers, places, *flags, np.array(spans), *marks, left, right, index, sign, words), (keep,))
    return words


def expect(dtype: np.dtype) -> None:
    """Announce a call of `changed_words` with writeable NumPy arrays of this dtype."""
    number, flag, pair = np.empty(0, np.int64), np.empty(0, np.uint8), np.empty((0, 2), np.int64)
    marks = pair.view(np.float64), pair
    wide = np.empty((0, 0))
    buffers = wide, wide, number, np.empty(0), pair
    _changed.expect((np.empty((0, 0), dtype), number, number, pair, flag, flag, pair, *marks, *buffers), (0,))


def _on_device(
    rows: Array,
    lefts: Sequence[int],
    rights: Sequence[int],
    places: np.ndarray,
    magic: np.ndarray,
    before: Array | None,
    after: Array,
    words: np.ndarray,
) -> None:
    module = module_of(rows)
    signs = after.astype(module.float64)
    if before is not None:
        signs -= before.astype(module.float64)
    index = module.flatnonzero(signs)
    signs = signs[index]
    left = [rows[row][index].astype(module.float64) for row in lefts]
    right = [rows[row][index].astype(module.float64) * signs for row in rights]
    for k, (one, other) in enumerate(places):
        exact_dot.add_on_device(words[k], magic[k], left[one] * right[other])


def _changed_loop(
    rows: np.ndarray,
    lefts: np.ndarray,
    rights: np.ndarray,
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
                    # Runs of elements are read faster than some of their elements; what has not changed adds zeros.
                    every = 4 * changes > new.size
                    for i in range(new.size):
                        change = np.int64(new[i]) - np.int64(old[i] & mask)
                        index[count] = position + i
                        sign[count] = change
                        count += change != 0 or every
                position += new.size
            if count == 0:
                continue
            run = index[count - 1] - index[0] == count - 1
            for k in range(lefts.size):
                row, factors = rows[lefts[k]], left[k]
                if run:
                    part = row[index[0] : index[0] + count]
                    for i in range(count):
                        factors[i] = part[i]
                else:
                    for i in range(count):
                        factors[i] = row[index[i]]
            for k in range(rights.size):
                row, factors = rows[rights[k]], right[k]
                if run:
                    part = row[index[0] : index[0] + count]
                    for i in range(count):
                        factors[i] = np.float64(part[i]) * sign[i]
                else:
                    for i in range(count):
                        factors[i] = np.float64(row[index[i]]) * sign[i]
            # As in `exact_dot`.
            for k in range(len(places)):
                one, other = left[places[k, 0], :count], right[places[k, 1], :count]
                first, second = magic[k, 0], magic[k, 1]
                high = low = np.int64(0)
                for i in range(count):
                    product = one[i] * other[i]
                    coarse = product + first
                    fine = (product - (coarse - first)) + second
                    high += np.float64(coarse).view(np.int64)
                    low += np.float64(fine).view(np.int64)
                low += words[k, 1] - count * bits[k, 1]
                carry = low >> CARRY
                words[k, 0] += high - count * bits[k, 0] + carry
                words[k, 1] = low - (carry << CARRY)


_changed = HostFunction(_changed_loop)
