"""Products of columns that do not depend on how the rows are cut, and systems with the square of a condition number."""

from __future__ import annotations

from fractions import Fraction

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from mpishard.backend.exact_gram import ExactGram, SparseRows, exponents, gram, gram_words, solve, values


def wild(seed, rows, columns, decades=9):
    random = np.random.default_rng(seed)
    return random.standard_normal((rows, columns)) * 10.0 ** random.integers(-decades, decades + 1, columns)


def products(matrix, cuts=()):
    known = exponents(abs(matrix).max(axis=0))
    edges = [0, *cuts, len(matrix)]
    return gram(sum(gram_words(matrix[a:b].copy(), known) for a, b in zip(edges, edges[1:], strict=False)), known)


@given(st.integers(1, 300), st.lists(st.integers(0, 300), max_size=5), st.integers(1, 6))
def test_any_cut_gives_the_same_bits(rows, cuts, columns):
    matrix = wild(rows, rows, columns)
    whole, apart = products(matrix), products(matrix, sorted(min(cut, rows) for cut in cuts))
    assert all(np.array_equal(one, other) for one, other in zip(whole, apart, strict=True))


@pytest.mark.parametrize("rows", [1, 40, 2048, 5001])
def test_it_is_the_exact_product_to_twice_the_digits(rows):
    """Elements within 12 binary places of the largest of their column are taken as they are."""
    random = np.random.default_rng(rows)
    matrix = random.uniform(0.01, 1, (rows, 3)) * random.choice([-1, 1], (rows, 3)) * [1e-120, 1, 1e100]
    found, rational = products(matrix), [[Fraction(each) for each in row] for row in matrix]
    for i in range(3):
        for j in range(3):
            exact = sum(row[i] * row[j] for row in rational)
            size = sum(abs(row[i] * row[j]) for row in rational)
            assert abs(Fraction(found.high[i, j]) + Fraction(found.low[i, j]) - exact) <= size * Fraction(2) ** -103


@pytest.mark.parametrize("condition", [1e4, 1e9, 1e14])
def test_systems_are_solved_as_well_as_by_orthogonal_factors(condition):
    random = np.random.default_rng(5)
    left, right = (np.linalg.qr(random.standard_normal(shape))[0] for shape in ((200, 8), (8, 8)))
    matrix = (left * np.logspace(0, -np.log10(condition), 8)) @ right.T
    found = products(np.column_stack([matrix, matrix @ np.ones(8)]))
    inner = ExactGram(found.high[:8, :8].copy(), found.low[:8, :8].copy())
    solution, square = solve(inner, (found.high[:8, 8], found.low[:8, 8]))
    assert abs(solution - 1).max() <= 1e-15 * condition
    assert square == pytest.approx(solution @ np.linalg.solve(matrix.T @ matrix, solution), rel=1e-3) or condition > 1e6
    residual = np.append(solution, -1.0)
    assert abs(found.form(residual, residual)) <= 1e-28


def test_scaling_and_shifts_have_no_other_error():
    found = products(wild(3, 50, 4, 2))
    factors = np.array([0.1, 3.0, 7.0, 0.3])
    scaled = found.scaled(factors).with_diagonal(factors)
    for i in range(4):
        for j in range(4):
            exact = (
                (Fraction(found.high[i, j]) + Fraction(found.low[i, j])) * Fraction(factors[i]) * Fraction(factors[j])
            )
            exact += Fraction(factors[i]) if i == j else 0
            error = abs(Fraction(scaled.high[i, j]) + Fraction(scaled.low[i, j]) - exact)
            assert error <= abs(exact) * Fraction(2) ** -98


def test_a_singular_matrix_has_no_solution():
    matrix = wild(2, 30, 3, 1)
    matrix[:, 2] = 2 * matrix[:, 0]
    found = products(matrix)
    assert np.isnan(solve(found, (np.ones(3), np.zeros(3)))[0]).all()


@given(st.integers(1, 200), st.integers(0, 200), st.integers(1, 6))
def test_sums_of_columns_have_the_same_bits_for_any_cut_and_order(rows, cut, columns):
    random, cut = np.random.default_rng(rows), min(cut, rows)
    matrix = wild(rows, rows, columns) * (random.random((rows, columns)) < 0.6)
    factors = wild(columns, rows, 1).reshape(-1)
    whole = SparseRows.of(matrix)
    tops = whole.tops(factors)
    assert np.array_equal(tops, abs(matrix * factors[:, None]).max(axis=0))
    expected = values(whole.words(factors, tops), tops)
    order = random.permutation(rows)
    parts = [(SparseRows.of(matrix[own]), factors[own]) for own in (order[:cut], order[cut:])]
    assert np.array_equal(values(sum(part.words(own, tops) for part, own in parts), tops), expected)
    exact = [sum(map(Fraction, column), Fraction()) for column in (matrix * factors[:, None]).T]
    errors = [abs(Fraction(found) - sum_) for found, sum_ in zip(expected, exact, strict=True)]
    assert all(
        error <= abs(sum_) * 2.0**-53 + rows * Fraction(top) * 2**-64
        for error, sum_, top in zip(errors, exact, tops, strict=True)
    )
    assert np.allclose(whole.times(np.arange(columns)), matrix @ np.arange(columns), rtol=1e-12)


def test_sums_of_columns_with_numbers_that_are_not_finite():
    matrix = np.array([[1.0, np.nan, np.inf, 1e300], [2.0, 1.0, 1.0, 1e300]])
    rows, factors = SparseRows.of(matrix), np.array([1.0, 10.0])
    tops = rows.tops(factors)
    found = values(rows.words(factors, tops), tops)
    assert tops[1] == tops[2] == np.inf and found[0] == 21 and np.isnan(found[1:3]).all()
