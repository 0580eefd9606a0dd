"""Products of columns that do not depend on how the rows are cut, and Gram matrices that follow the free elements."""

from __future__ import annotations

import math
from fractions import Fraction

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from mpishard.backend import numba_cache
from mpishard.backend.exact import combine
from mpishard.backend.exact_gram import ExactGram, exponents, gram, gram_words, solve
from mpishard.backend.exact_rows import Factor, sorted_words, words_with
from mpishard.backend.jit_function import HostFunction
from mpishard.minimizers.gram import Gram, prepare_all
from mpishard.minimizers.space import LocalSpace

# Products of columns that do not depend on how the rows are cut, and systems with the square of a condition number.


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
            high, low = Fraction(found.high[i, j]), Fraction(found.low[i, j])
            exact = (high + low) * Fraction(factors[i]) * Fraction(factors[j])
            exact += Fraction(factors[i]) if i == j else 0
            error = abs(Fraction(scaled.high[i, j]) + Fraction(scaled.low[i, j]) - exact)
            assert error <= abs(exact) * Fraction(2) ** -98


def test_a_singular_matrix_has_no_solution():
    matrix = wild(2, 30, 3, 1)
    matrix[:, 2] = 2 * matrix[:, 0]
    found = products(matrix)
    assert np.isnan(solve(found, (np.ones(3), np.zeros(3)))[0]).all()


# Gram matrices that follow the free elements exactly.

M = 4
S_ROWS, Y_ROWS = [1, 2, 3, 4], [8, 7, 6, 5]


class CountingSpace(LocalSpace):
    """Counts the sums that are asked for."""

    sums = 0

    def add(self, numbers):
        self.sums += 1


def history(size, dtype=np.float64):
    random = np.random.default_rng(5)
    return (random.standard_normal((2 * M + 1, size)) * 10.0 ** random.integers(-4, 5, (2 * M + 1, 1))).astype(dtype)


def gram_of(rows, order=(), space=None):
    gram = Gram(space or LocalSpace(rows.shape[1], rows[0]), rows, S_ROWS, Y_ROWS)
    for pair in order:
        add(gram, rows, pair)
    return gram


def add(gram, rows, pair):
    gram.add(pair, *LocalSpace(rows.shape[1], rows[0]).largest(rows[S_ROWS[pair]], rows[Y_ROWS[pair]]))


def same(one, other):
    return one.order == other.order and np.array_equal(one.sy, other.sy) and np.array_equal(one.yy, other.yy)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("masked", [False, True])
def test_both_matrices_by_age(dtype, masked):
    rows = history(1500, dtype)
    free = np.random.default_rng(1).random(1500) < 0.6 if masked else None
    order = [2, 0, 3]
    gram = gram_of(rows, order)
    gram.update(free)
    chosen = rows.astype(np.float64)[:, slice(None) if free is None else free]
    s, y = chosen[[S_ROWS[pair] for pair in order]], chosen[[Y_ROWS[pair] for pair in order]]
    for i in range(3):
        for j in range(3):
            assert gram.yy[i, j] == pytest.approx(math.fsum(y[i] * y[j]), rel=1e-12)
            assert gram.sy[i, j] == (pytest.approx(math.fsum(s[i] * y[j]), rel=1e-12) if i <= j else 0)


def test_no_pairs_and_no_elements():
    gram = gram_of(history(0))
    gram.update()
    gram.update(np.ones(0, bool))
    assert gram.sy.shape == gram.yy.shape == (0, 0)
    add(gram, history(0), 1)
    gram.update()
    assert gram.sy == gram.yy == 0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("seed", range(4))
def test_any_changes_give_the_bits_of_computing_anew(dtype, seed):
    rows, random = history(2500, dtype), np.random.default_rng(seed)
    space = CountingSpace(2500, rows[0])
    gram, free = gram_of(rows, space=space), None
    for turn in range(25):
        pair = int(random.integers(M))
        if random.random() < 0.6:
            rows[S_ROWS[pair]], rows[Y_ROWS[pair]] = random.standard_normal((2, 2500)) * 10.0 ** random.integers(-6, 7)
            add(gram, rows, pair)
        elif pair in gram.order:
            gram.drop(pair)
        kind = random.integers(5)
        if kind == 0:
            free = None
        elif kind == 1:
            free = random.random(2500) < 0.5
        else:
            free = np.ones(2500, bool) if free is None else free.copy()
            free[random.integers(0, 2500, 30 * (kind - 2))] ^= True
        before = space.sums
        gram.update(free)
        assert space.sums <= before + 1
        anew = gram_of(rows, gram.order)
        anew.update(free)
        assert same(gram, anew), turn


def test_a_history_that_is_filled_again_has_the_same_bits_on_a_device_too(device):
    rows, free = history(1000), np.random.default_rng(2).random(1000) < 0.7
    gram = gram_of(rows, [3, 1, 0])
    gram.update(free)
    for copied, mask in ((rows.copy(), free), (device.put(rows), device.put(free))):
        again = gram_of(copied, [3, 1, 0])
        again.update(mask)
        assert same(again, gram)
    whole = gram_of(rows, [3, 1, 0])
    whole.update()
    again.update()
    assert same(again, whole)
    gram.update()
    assert same(gram, whole)
    gram.update(free)
    again.update(device.put(free))
    assert same(again, gram)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_products_of_free_elements_and_of_others_at_once(dtype):
    rows, random = history(2500, dtype), np.random.default_rng(3)
    space = LocalSpace(2500, rows[0])
    together, apart = ((gram_of(rows), Gram(space, rows, Y_ROWS, S_ROWS, of_free=False)) for _ in range(2))
    free = random.random(2500) < 0.5
    for pair, changes in ((2, 0), (0, 9), (3, 0), (1, 700)):
        s_top, y_top = space.largest(rows[S_ROWS[pair]], rows[Y_ROWS[pair]])
        for of_free, of_others in (together, apart):
            of_free.add(pair, s_top, y_top)
            of_others.add(pair, y_top, s_top)
        free = free.copy()
        free[random.integers(0, 2500, changes)] ^= True
        for one, words, other in zip(together, prepare_all(together, free), apart, strict=True):
            one.take(words)
            other.update(free)
            assert same(one, other) and one.mask is free


def test_what_is_not_finite_is_shown():
    rows = history(50)
    rows[Y_ROWS[0], 7] = np.nan
    gram = gram_of(rows, [1, 0])
    gram.update()
    assert math.isnan(gram.sy[0, 1]) and math.isnan(gram.yy[1, 1]) and not math.isnan(gram.yy[0, 0])
    with pytest.raises(ValueError, match="as many rows"):
        Gram(LocalSpace(50, rows[0]), rows, [1], [2, 3])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_kernels_are_called_as_announced(monkeypatch, dtype):
    announced, called = set(), set()
    call = HostFunction.__call__

    def record(kernel, arguments, scalars=()):
        called.add((kernel, numba_cache.types_of((*arguments, *scalars))))
        return call(kernel, arguments, scalars)

    def announce(kernel, arguments, scalars=()):
        announced.add((kernel, numba_cache.types_of((*arguments, *scalars))))

    monkeypatch.setattr(HostFunction, "__call__", record)
    monkeypatch.setattr(HostFunction, "expect", announce)
    rows = history(30, dtype)
    gram = gram_of(rows, [0, 1])
    gram.update()
    gram.update(np.zeros(30, bool))
    space = LocalSpace(30, rows[0])
    space.dots([(rows[0], rows[1])], space.largest(rows[0]))
    space.largest_products([(rows[0], rows[1])])
    combine(rows, [0, 1], [1.0, 2.0], rows[2], 1.0, rows[3])
    words_with(rows, [0], [Factor(rows[2], [1.0])], space.spans)
    sorted_words(rows, [0], np.arange(3), np.array([0, 3]), [np.ones(3)], [[1.0]])
    assert called == announced and len(called) == 7
