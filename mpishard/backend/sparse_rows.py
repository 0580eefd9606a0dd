"""Rows of a matrix that is sparse: products with vectors, and sums over the rows of all ranks, column by column.

The sums depend neither on the order of the rows nor on who has which.  Products are rounded to float64 as usual, then
to a multiple of ``2**(e - 62)``, with ``2**e`` a bound on the products of the column on all ranks, and added as
integers (fixed point, as in `exact`).  An integer of 64 bits a column holds the sum of most; where it would overflow,
the upper part moves to a second one.  There may be up to ``2**33`` products a column on all ranks together.

These loops wait for memory at random places.  So a sum touches 8 bytes a product, as one in floating point does, and
arithmetic has a loop of its own: the less there is between two accesses, the more of them are under way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpishard.backend.array import is_device
from mpishard.backend.exact import CARRY
from mpishard.backend.jit_function import HostFunction

Array = Any
_HIGH = 28  # binary places of the first word; the second has CARRY more
_CARRY_MASK = 2**CARRY - 1
_PLACES = 61  # the sum of a rank moves to the next integer from here on, and its products have one place more
_LARGEST_PRODUCT = 2.0**1000  # of a known product
_BLOCK = 1024  # elements


class SparseRows(NamedTuple):
    """Float64 rows of a matrix with `size` columns: row i has elements ``starts[i]`` to ``starts[i + 1]``.

    `columns` and `starts` are uint32 or uint64.
    """

    data: np.ndarray
    columns: np.ndarray
    starts: np.ndarray
    size: int

    @classmethod
    def of(cls, matrix: Any) -> SparseRows:
        """The rows of a float64 array, or of what has ``tocsr``, as SciPy's sparse matrices do; copied if need be."""
        rows, size = matrix.shape
        if isinstance(matrix, np.ndarray):
            data, starts = matrix.reshape(-1), np.arange(rows + 1) * size
            columns = np.tile(np.arange(size, dtype=np.uint32), rows)
        else:
            csr = matrix.tocsr()
            data, columns, starts = csr.data, csr.indices, csr.indptr
        index = np.uint32 if size <= 2**32 and int(starts[-1]) < 2**32 else np.uint64
        columns, starts = (_unsigned(each, index) for each in (columns, starts))
        return cls(np.ascontiguousarray(data, np.float64), columns, starts, size)

    def times(self, vector: np.ndarray) -> np.ndarray:
        """The product with a vector, a sum for each row in the order of its elements."""
        found = np.empty(len(self.starts) - 1)
        _times((self.columns, self.starts, self.data, vector, found))
        return found

    def tops(self, factors: np.ndarray) -> np.ndarray:
        """The largest absolute product of each column's elements with the factors of their rows; 0 without any."""
        found = np.zeros(self.size)
        _tops((self.columns, self.starts, self.data, factors, found))
        return found

    def divided(self, powers: np.ndarray) -> SparseRows:
        """The rows with each column divided by its power of two; a copy of the elements alone."""
        data = np.empty(len(self.data))
        _divide((self.columns, self.data, powers, data))
        return self._replace(data=data)

    def words(self, factors: np.ndarray, units: np.ndarray) -> np.ndarray:
        """The words of the sum of these products for each column, int64 (2, columns); they may be added over ranks.

        `units` are those of all ranks: one a column, or one for all.
        """
        words, block = np.zeros((2, self.size), np.int64), np.empty(_BLOCK, np.int64)
        scales = 2.0**CARRY / units
        _words((self.columns, self.starts, self.data, factors, scales, block, words))
        return words


def product_with(matrix: Any, like: Array) -> Callable[[Array], Array]:
    """The function of the product of a matrix, an array or a sparse one, with vectors on the device of `like`.

    On the host it has the same bits on any number of threads.
    """
    if is_device(like):
        return lambda vector: matrix @ vector
    rows = SparseRows.of(matrix)
    return lambda vector: rows.times(np.ascontiguousarray(vector, np.float64))


def units(tops: np.ndarray) -> np.ndarray:
    """What the first word of a sum counts, by a bound on its products: powers of two; NaN where these are not known."""
    known = tops < _LARGEST_PRODUCT
    exponents = np.frexp(np.where((tops > 0) & known, tops, 1.0))[1]
    return np.where(known, np.ldexp(1.0, np.maximum(exponents, -960) - _HIGH), np.nan)


def values(words: np.ndarray, units: np.ndarray) -> np.ndarray:
    """The sums, each rounded once, from the total of the words of all ranks."""
    found = np.empty(words.shape[1])
    _values((words, units, found))
    return found


def _unsigned(numbers: np.ndarray, index: type) -> np.ndarray:
    """Numbers from 0 on as unsigned ones, for which Numba asks no question; not copied if they have this size."""
    numbers = np.ascontiguousarray(numbers)
    return numbers.view(index) if numbers.itemsize == np.dtype(index).itemsize else numbers.astype(index)


def _times_loop(
    columns: np.ndarray, starts: np.ndarray, data: np.ndarray, vector: np.ndarray, found: np.ndarray
) -> None:
    for i in range(found.size):
        total = 0.0
        for k in range(starts[i], starts[i + 1]):
            total += data[k] * vector[columns[k]]
        found[i] = total


def _tops_loop(
    columns: np.ndarray, starts: np.ndarray, data: np.ndarray, factors: np.ndarray, found: np.ndarray
) -> None:
    for i in range(factors.size):
        for k in range(starts[i], starts[i + 1]):
            product = abs(data[k] * factors[i])
            if not product <= found[columns[k]]:
                found[columns[k]] = product if product == product else np.inf


def _divide_loop(columns: np.ndarray, data: np.ndarray, powers: np.ndarray, found: np.ndarray) -> None:
    for k in range(data.size):
        found[k] = data[k] / powers[columns[k]]


def _words_loop(
    columns: np.ndarray,
    starts: np.ndarray,
    data: np.ndarray,
    factors: np.ndarray,
    scales: np.ndarray,
    block: np.ndarray,
    words: np.ndarray,
) -> None:
    high, low = words
    row, scale, most = 0, scales[0], 2**_PLACES
    size: Any = np.int64(starts[-1])
    for begin in range(0, size, block.size):
        stop = min(begin + block.size, size)
        k = begin
        while k < stop:
            end: Any = min(np.int64(starts[row + 1]), stop)
            for j in range(k, end):
                scaled = data[j] * factors[row] * (scale if scales.size == 1 else scales[columns[j]])
                block[j - begin] = np.int64(np.rint(scaled))
            k = end
            if k == starts[row + 1]:
                row += 1
        part = columns[begin:stop]
        for j in range(part.size):
            total = low[part[j]] + block[j]
            if total >= most or total < -most:
                carry = (total + most // 2) >> _PLACES
                high[part[j]] += carry
                total -= carry << _PLACES
            low[part[j]] = total
    for j in range(low.size):
        high[j] = (high[j] << (_PLACES - CARRY)) + (low[j] >> CARRY)
        low[j] &= _CARRY_MASK


def _values_loop(words: np.ndarray, units: np.ndarray, found: np.ndarray) -> None:
    unit = units[0]
    for j in range(found.size):
        high, low = words[0, j] + (words[1, j] >> CARRY), words[1, j] & _CARRY_MASK
        total = np.float64(high) + np.float64(low) * 2.0**-CARRY
        found[j] = total * (unit if units.size == 1 else units[j])


_times = HostFunction(_times_loop)
_tops = HostFunction(_tops_loop)
_divide = HostFunction(_divide_loop)
_words = HostFunction(_words_loop)
_values = HostFunction(_values_loop)
