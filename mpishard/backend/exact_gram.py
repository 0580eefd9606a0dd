"""Products of the columns of a tall matrix with each other, exact on any layout of its rows, and systems of them.

The columns are rounded to multiples of ``2**-65`` of a power of two above their largest element, and cut into three
slices of whole numbers of at most 22 bits.  A matrix product of slices then has no rounding, in any order of BLAS, and
its sums over blocks of rows and over ranks are sums of integers (Ozaki, Ogita, Oishi and Rump: "Error-free
transformations of matrix multiplication by using fast routines of matrix multiplication and its applications",
Numerical Algorithms 59, 95-118, 2012).  The result is rounded once, to a pair of float64, so that the square of a
condition number of ``1e15`` still leaves correct digits: systems are solved in this double-double arithmetic (Dekker:
"A floating-point technique for extending the available precision", Numerische Mathematik 18, 224-242, 1971).

- All ranks must agree on the exponents before; their words may be added in any order.
- There may be up to ``2**33`` rows on all ranks together.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from mpishard.backend.jit_function import HostFunction, inner

_SLICES, _BITS = 3, 22
_GROUPS = 2 * _SLICES - 1  # products of slices of one weight are added
_BLOCK = 2048  # rows whose products of slices have sums of at most 2**53
_WORD = 32
_MASK = 2**_WORD - 1
_SPLITTER = 2.0**27 + 1.0
LARGEST = 2.0**500  # of which the squares are far from infinity
# A pivot below this share of its diagonal element is of rounding errors.
_RANK = 2.0**-100


class ExactGram(NamedTuple):
    """A symmetric matrix, each element the sum of two float64."""

    high: np.ndarray
    low: np.ndarray

    def scaled(self, factors: np.ndarray) -> ExactGram:
        """Rows and columns times these factors."""
        weights = _two_product(factors[:, None], factors[None, :])
        return ExactGram(*_product(self, weights))

    def with_diagonal(self, more: np.ndarray) -> ExactGram:
        """With these numbers added to the diagonal."""
        high, low = self.high.copy(), self.low.copy()
        total, error = _two_sum(high.diagonal(), more)
        np.fill_diagonal(high, total)
        np.fill_diagonal(low, low.diagonal() + error)
        return ExactGram(high, low)

    def form(self, left: np.ndarray, right: np.ndarray) -> float:
        """``left' A right``, rounded in the end."""
        return float(_form((self.high, self.low, _plain(left), _plain(right))))


def exponents(tops: np.ndarray) -> np.ndarray:
    """The exponents e of columns with these largest absolute elements: ``top < 2**e``; int64."""
    return np.where(tops > 0, np.frexp(tops)[1], 0).astype(np.int64)


def gram_words(matrix: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """The words of the products of the columns of some rows; to be added over ranks, and given to `gram`.

    `matrix` is float64 (rows, columns) and finite; `exponents` are those of the rows of all ranks, see `exponents`.
    """
    columns = matrix.shape[1]
    upper = np.triu_indices(columns)
    words = np.zeros((_GROUPS, len(upper[0]), 2), np.int64)
    shifts = (_BITS - 1 - exponents).astype(np.int32)
    for begin in range(0, len(matrix), _BLOCK):
        rest = np.ldexp(matrix[begin : begin + _BLOCK], shifts)
        slices = np.empty((len(rest), _SLICES, columns))
        for k in range(_SLICES):
            np.rint(rest, out=slices[:, k])
            rest = (rest - slices[:, k]) * 2.0**_BITS
        flat = slices.reshape(len(rest), -1)
        blocks = (flat.T @ flat).astype(np.int64).reshape(_SLICES, columns, _SLICES, columns)
        for one in range(_SLICES):
            for other in range(_SLICES):
                sums = blocks[one, :, other, :][upper]
                words[one + other, :, 0] += sums >> _WORD
                words[one + other, :, 1] += sums & _MASK
    return words


def gram(words: np.ndarray, exponents: np.ndarray) -> ExactGram:
    """The matrix, from the total of the words of all ranks."""
    columns = len(exponents)
    one, other = np.triu_indices(columns)
    high = low = np.zeros(len(one))
    for group in reversed(range(_GROUPS)):
        sums = words[group]
        for number, shift in ((sums[:, 1] & _MASK, 0), (sums[:, 0] + (sums[:, 1] >> _WORD), _WORD)):
            total, error = _two_sum(np.ldexp(number.astype(np.float64), shift - group * _BITS), high)
            high, low = _quick_two_sum(total, error + low)
    place = (exponents[one] + exponents[other] - 2 * (_BITS - 1)).astype(np.int32)
    whole = np.zeros((2, columns, columns))
    for matrix, part in zip(whole, (high, low), strict=True):
        matrix[one, other] = matrix[other, one] = np.ldexp(part, place)
    return ExactGram(whole[0], whole[1])


def solve(matrix: ExactGram, right: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, float]:
    """The solution of a positive definite system, and its squared norm by the inverse of the matrix, ``x' A^-1 x``.

    The right side has sums of two float64.  NaN if the matrix is singular, up to rounding.
    """
    high, low = matrix.high.copy(), matrix.low.copy()
    solution, errors = right[0].copy(), right[1].copy()
    _factor((high, low, _RANK * (1 + len(high) / 16) * high.diagonal()))
    if not high.diagonal().all():
        return np.full(len(high), math.nan), math.nan
    _substitute((high, low, solution, errors), (1,))
    found = solution + errors
    square, errors = found.copy(), np.zeros(len(high))
    _substitute((high, low, square, errors), (0,))
    return found, math.fsum(each * each for each in square.tolist())


def inverse_times(matrix: ExactGram, right: ExactGram) -> np.ndarray:
    """The inverse of a positive definite matrix times another one; NaN if it is singular, up to rounding."""
    high, low = matrix.high.copy(), matrix.low.copy()
    _factor((high, low, _RANK * (1 + len(high) / 16) * high.diagonal()))
    found = np.full_like(right.high, math.nan)
    if high.diagonal().all():
        for k in range(len(found.T)):
            solution, errors = right.high[:, k].copy(), right.low[:, k].copy()
            _substitute((high, low, solution, errors), (1,))
            found[:, k] = solution + errors
    return found


def vector_product(vector: tuple[np.ndarray, np.ndarray], factors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The elements, sums of two float64, times these factors."""
    return _product(vector, (factors, np.zeros(len(factors))))


def _plain(vector: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(vector, np.float64)


def _two_sum(a, b):  # type: ignore[no-untyped-def]
    """A sum and its rounding error."""
    total = a + b
    shadow = total - a
    return total, (a - (total - shadow)) + (b - shadow)


def _quick_two_sum(a, b):  # type: ignore[no-untyped-def]
    """The same where the second number is the smaller one."""
    total = a + b
    return total, b - (total - a)


def _two_product(a, b):  # type: ignore[no-untyped-def]
    """A product and its rounding error; without overflow below 2**996."""
    product = a * b
    large, other = _SPLITTER * a, _SPLITTER * b
    a_high, b_high = large - (large - a), other - (other - b)
    a_low, b_low = a - a_high, b - b_high
    return product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def _product(a, b):  # type: ignore[no-untyped-def]
    """The product of two pairs."""
    total, error = _two_product(a[0], b[0])
    return _quick_two_sum(total, error + (a[0] * b[1] + a[1] * b[0]))


@inner
def _split(a):  # type: ignore[no-untyped-def]
    large = 134217729.0 * a
    high = large - (large - a)
    return high, a - high


@inner
def _less_product(high, low, a, a_low, b, b_low):  # type: ignore[no-untyped-def]
    """``(high, low) - (a, a_low) * (b, b_low)``, in double-double arithmetic."""
    a_head, a_tail = _split(a)
    b_head, b_tail = _split(b)
    product = a * b
    error = ((a_head * b_head - product) + a_head * b_tail + a_tail * b_head) + a_tail * b_tail
    error += a * b_low + a_low * b
    total = high - product
    shadow = total - high
    rest = (high - (total - shadow)) - (product + shadow)
    rest += low - error
    result = total + rest
    return result, rest - (result - total)


@inner
def _quotient(high, low, b, b_low):  # type: ignore[no-untyped-def]
    """``(high, low) / (b, b_low)``, in double-double arithmetic."""
    first = high / b
    rest, rest_low = _less_product(high, low, first, 0.0, b, b_low)
    second = (rest + rest_low) / b
    total = first + second
    return total, second - (total - first)


def _factor_loop(high: np.ndarray, low: np.ndarray, smallest: np.ndarray) -> None:
    """Cholesky's factor R of a matrix ``R'R`` into its upper triangle; a row of zeros where a pivot is too small."""
    size = high.shape[0]
    for k in range(size):
        pivot = high[k, k]
        if not pivot > smallest[k]:
            high[k, k:], low[k, k:] = 0.0, 0.0
            continue
        root = math.sqrt(pivot)
        rest, rest_low = _less_product(pivot, low[k, k], root, 0.0, root, 0.0)
        root_low = (rest + rest_low) / (2.0 * root)
        high[k, k], low[k, k] = root, root_low
        for j in range(k + 1, size):
            high[k, j], low[k, j] = _quotient(high[k, j], low[k, j], root, root_low)
        for i in range(k + 1, size):
            a, a_low = high[k, i], low[k, i]
            if a != 0.0:
                for j in range(i, size):
                    high[i, j], low[i, j] = _less_product(high[i, j], low[i, j], a, a_low, high[k, j], low[k, j])


def _substitute_loop(high: np.ndarray, low: np.ndarray, x: np.ndarray, x_low: np.ndarray, back: int) -> None:
    """Solve ``R'y = x`` in the place of x, and then, if that is wanted, ``R z = y``."""
    size = x.size
    for k in range(size):
        x[k], x_low[k] = _quotient(x[k], x_low[k], high[k, k], low[k, k])
        for j in range(k + 1, size):
            x[j], x_low[j] = _less_product(x[j], x_low[j], high[k, j], low[k, j], x[k], x_low[k])
    if back:
        for k in range(size - 1, -1, -1):
            for j in range(k + 1, size):
                x[k], x_low[k] = _less_product(x[k], x_low[k], high[k, j], low[k, j], x[j], x_low[j])
            x[k], x_low[k] = _quotient(x[k], x_low[k], high[k, k], low[k, k])


def _form_loop(high: np.ndarray, low: np.ndarray, left: np.ndarray, right: np.ndarray) -> float:
    total = total_low = 0.0
    for i in range(left.size):
        row = row_low = 0.0
        for j in range(right.size):
            row, row_low = _less_product(row, row_low, high[i, j], low[i, j], -right[j], 0.0)
        total, total_low = _less_product(total, total_low, -left[i], 0.0, row, row_low)
    return total + total_low


_factor = HostFunction(_factor_loop)
_substitute = HostFunction(_substitute_loop)
_form = HostFunction(_form_loop)
