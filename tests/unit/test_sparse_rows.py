"""Sums over the rows of a matrix, column by column, that do not depend on the order of the rows or on who has which."""

from __future__ import annotations

from fractions import Fraction

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from mpishard.backend.sparse_rows import SparseRows, units, values

sparse = pytest.importorskip("scipy.sparse", reason="SciPy is not installed (extra: test)")


def wild(seed, rows, columns, decades=9):
    """Columns of very different sizes, and some rows and columns of zeros."""
    random = np.random.default_rng(seed)
    found = random.standard_normal((rows, columns)) * 10.0 ** random.integers(-decades, decades + 1, columns)
    found *= random.random((rows, columns)) < 0.6
    found[random.random(rows) < 0.1] = 0
    found[:, random.random(columns) < 0.1] = 0
    return found


def summed(parts, whole):
    """The sums over the rows of all parts, with the units of the whole."""
    unit = units(SparseRows.tops(*whole))
    return values(sum(rows.words(factors, unit) for rows, factors in parts), unit)


@pytest.mark.parametrize("decades", [9, 140])
@given(st.integers(1, 60), st.integers(0, 60), st.sampled_from([1, 3, 8]), st.sampled_from([np.uint32, np.uint64]))
def test_any_cut_and_order_gives_the_same_bits_near_the_exact_sum(decades, rows, cut, columns, index):
    random, cut = np.random.default_rng(rows), min(cut, rows)
    matrix, factors = wild(rows, rows, columns, decades), wild(columns, rows, 1).reshape(-1)

    def rows_of(own):
        made = SparseRows.of(sparse.csr_array(matrix[own]))
        return made._replace(columns=made.columns.astype(index), starts=made.starts.astype(index)), factors[own]

    whole, order = rows_of(slice(None)), random.permutation(rows)
    found = summed([whole], whole)
    assert np.array_equal(summed([rows_of(order[:cut]), rows_of(order[cut:])], whole), found)
    assert np.array_equal(summed([(SparseRows.of(matrix), factors)], whole), found)
    products = matrix * factors[:, None]
    tops = abs(products).max(axis=0)
    assert np.array_equal(SparseRows.tops(*whole), tops)
    for column, sum_, top in zip(products.T, found, tops, strict=True):
        exact = sum(map(Fraction, column))
        most = abs(exact) * Fraction(2) ** -53 + rows * Fraction(top) * Fraction(2) ** -62
        assert abs(Fraction(sum_) - exact) <= most
    assert np.allclose(whole[0].times(np.arange(columns)), matrix @ np.arange(columns), rtol=1e-12)


@pytest.mark.parametrize("sign", [1, -1])
def test_sums_far_beyond_one_integer(sign):
    """Products at their bound, of one sign and then of the other: each overflows the integer of the column."""
    factors = sign * np.repeat([1.0, -1.0, 0.5], [3000, 2999, 77])
    rows = SparseRows.of(np.ones((len(factors), 1)))
    bound = rows, np.array([np.nextafter(2, 0) / 2] * len(factors))
    for count in (1, 2, 3, 4, 3000, 3001, len(factors)):
        part = rows._replace(starts=rows.starts[: count + 1])
        assert summed([(part, factors[:count])] * 3, bound) == 3 * factors[:count].sum()


def test_rows_of_many_elements_and_of_none():
    """Whole numbers, so that sums are exact: rows that are longer than a block, and some that end with one."""
    lengths = np.array([0, 0, 3000, 1024, 0, 72, 1, 0, 1023, 2, 0])
    random = np.random.default_rng(4)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    data, columns = random.integers(-99, 100, starts[-1]).astype(float), random.integers(0, 50, starts[-1])
    matrix = sparse.csr_array((np.append(data, 7.0), np.append(columns, 1), starts), (len(lengths), 50))
    rows, factors = SparseRows.of(matrix), random.integers(-99, 100, len(lengths)).astype(float)
    assert np.array_equal(summed([(rows, factors)], (rows, factors)), matrix.T @ factors)
    x = random.integers(-99, 100, 50).astype(float)
    assert np.array_equal(rows.times(x), matrix @ x)


def test_indices_of_scipy_are_not_copied():
    matrix = sparse.random_array((30, 20), density=0.2, format="csr", rng=np.random.default_rng(1))
    rows = SparseRows.of(matrix)
    pairs = (rows.data, matrix.data), (rows.columns, matrix.indices), (rows.starts, matrix.indptr)
    assert all(np.shares_memory(*pair) for pair in pairs)
    powers = 2.0 ** np.arange(-10, 10)
    assert np.array_equal(rows.divided(powers).times(powers), rows.times(np.ones(20)))


def test_products_that_are_not_known():
    matrix = np.array([[1.0, np.nan, np.inf, 1e300], [2.0, 1.0, 1.0, 1e300]])
    rows, factors = SparseRows.of(matrix), np.array([1.0, 10.0])
    tops = rows.tops(factors)
    found = values(rows.words(factors, units(tops)), units(tops))
    assert tops[1] == tops[2] == np.inf and found[0] == 21 and np.isnan(found[1:3]).all()
