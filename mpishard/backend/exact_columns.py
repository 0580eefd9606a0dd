"""Sums over the rows of a matrix, column by column, that do not depend on the order of the rows or on who has which.

The words are those of `exact_dot`, two for each column: products are rounded as usual, then to a multiple of
``2**(e - 64)``, where e is the exponent of the column's largest product, and added as integers.  There may be up to
``2**28`` products a column on all ranks together.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mpishard.backend.compiled import HostFunction
from mpishard.backend.exact import CARRY

_HIGH, _LOW = 30, 64  # binary places of the two words
_MASK = 2**CARRY - 1
LARGEST = 2.0**1000  # of a known product


class SparseRows(NamedTuple):
    """Rows of a matrix, each with its elements and their columns.

    Parameters
    ----------
    data : float64 array (elements,)
    columns : int64 array (elements,)
    starts : int64 array (rows + 1,)
        Where the elements of each row begin.
    size : int
        Number of columns.
    """

    data: np.ndarray
    columns: np.ndarray
    starts: np.ndarray
    size: int

    @classmethod
    def of(cls, matrix: Any) -> SparseRows:
        """The rows of a float64 array, or of what has ``tocsr``, as SciPy's sparse matrices do."""
        if not isinstance(matrix, np.ndarray):
            csr = matrix.tocsr()
            columns, starts = (np.ascontiguousarray(each, np.int64) for each in (csr.indices, csr.indptr))
            return cls(np.ascontiguousarray(csr.data, np.float64), columns, starts, matrix.shape[1])
        rows, size = matrix.shape
        columns = np.tile(np.arange(size), rows)
        return cls(np.ascontiguousarray(matrix, np.float64).reshape(-1), columns, np.arange(rows + 1) * size, size)

    def times(self, vector: np.ndarray) -> np.ndarray:
        """The product with a vector, a sum for each row in the order of its elements."""
        found = np.zeros(len(self.starts) - 1)
        _times((self.data, vector, found, self.columns, self.starts))
        return found

    def tops(self, factors: np.ndarray) -> np.ndarray:
        """The largest absolute product of each column's elements with the factors of their rows; 0 without any."""
        found = np.zeros(self.size)
        _tops((self.data, factors, found, self.columns, self.starts))
        return found

    def words(self, factors: np.ndarray, tops: np.ndarray) -> np.ndarray:
        """The words of the sum of these products for each column, int64 (columns, 2); `tops` are those of all ranks."""
        words = np.zeros((self.size, 2), np.int64)
        _words((self.data, factors, _scales(tops), self.columns, self.starts, words))
        return words


def values(words: np.ndarray, tops: np.ndarray) -> np.ndarray:
    """The sums, each rounded once, from the total of the words of all ranks; NaN where a product is not known."""
    high, low = words[:, 0] + (words[:, 1] >> CARRY), words[:, 1] & _MASK
    sums = high.astype(np.float64) + np.ldexp(low.astype(np.float64), _HIGH - _LOW)
    return np.where(tops < LARGEST, np.ldexp(sums, _exponents(tops) - _HIGH), np.nan)


def _exponents(tops: np.ndarray) -> np.ndarray:
    known = (tops > 0) & (tops < LARGEST)
    return np.maximum(np.frexp(np.where(known, tops, 1.0))[1], -980).astype(np.int32)


def _scales(tops: np.ndarray) -> np.ndarray:
    """By what products are multiplied to count units of the first word; 0 where they are not known."""
    return np.where(tops < LARGEST, np.ldexp(1.0, _HIGH - _exponents(tops)), 0.0)


def _times_loop(
    data: np.ndarray, vector: np.ndarray, found: np.ndarray, columns: np.ndarray, starts: np.ndarray
) -> None:
    for i in range(found.size):
        total = 0.0
        for k in range(starts[i], starts[i + 1]):
            total += data[k] * vector[columns[k]]
        found[i] = total


def _tops_loop(
    data: np.ndarray, factors: np.ndarray, found: np.ndarray, columns: np.ndarray, starts: np.ndarray
) -> None:
    for i in range(factors.size):
        for k in range(starts[i], starts[i + 1]):
            product = abs(data[k] * factors[i])
            if not product <= found[columns[k]]:
                found[columns[k]] = product if product == product else np.inf


def _words_loop(
    data: np.ndarray,
    factors: np.ndarray,
    scales: np.ndarray,
    columns: np.ndarray,
    starts: np.ndarray,
    words: np.ndarray,
) -> None:
    for i in range(factors.size):
        for k in range(starts[i], starts[i + 1]):
            j = columns[k]
            if scales[j] != 0.0:
                scaled = data[k] * factors[i] * scales[j]
                whole = np.rint(scaled)
                words[j, 0] += np.int64(whole)
                words[j, 1] += np.int64(np.rint((scaled - whole) * 17179869184.0))


_times = HostFunction(_times_loop)
_tops = HostFunction(_tops_loop)
_words = HostFunction(_words_loop)
