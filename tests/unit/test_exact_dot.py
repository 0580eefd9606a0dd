"""Dot products that do not depend on how the terms are cut, and combinations of rows."""

from __future__ import annotations

import math
from fractions import Fraction

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from mpishard.backend import array as arrays
from mpishard.backend.exact import combine, dot_words, normalized, row_dot_words, values

DTYPES = [np.float32, np.float64]


def wild(seed, shape, dtype, decades=9):
    random = np.random.default_rng(seed)
    return (random.standard_normal(shape) * 10.0 ** random.integers(-decades, decades + 1, shape)).astype(dtype)


def bound(one, other):
    return float(abs(one).max(initial=0)) * float(abs(other).max(initial=0))


def dot(one, other, top=None):
    top = bound(one, other) if top is None else top
    return values(dot_words(one, other, top, [(0, one.size)])[None], [top])[0]


def exact(one, other):
    """The sum of the products, each rounded to float64 and then to the quantum, without any other error."""
    top = bound(one, other)
    quantum = Fraction(2) ** (max(math.frexp(top)[1], -1010) - 64)
    products = one.astype(np.float64) * other.astype(np.float64)
    return float(sum(round(Fraction(float(product)) / quantum) for product in products) * quantum)


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.integers(1, 300), st.lists(st.integers(0, 300), max_size=5), st.randoms(use_true_random=False))
def test_any_cut_and_any_order_give_the_same_bits(dtype, size, cuts, random):
    one, other = wild(size, (2, size), dtype)
    top, expected = bound(one, other), dot(one, other)
    edges = [0, *sorted(min(cut, size) for cut in cuts), size]
    spans = list(zip(edges, edges[1:], strict=False))
    random.shuffle(spans)
    assert values(dot_words(one, other, top, spans)[None], [top]) == [expected]
    apart = sum(dot_words(one[a:b].copy(), other[a:b].copy(), top, [(0, b - a)]) for a, b in spans)
    assert values(apart[None], [top]) == values(normalized(apart[None]), [top]) == [expected]
    order = np.array(random.sample(range(size), size))
    assert dot(one[order], other[order]) == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 1000, 40_003])
def test_it_is_the_exact_sum_of_the_rounded_products(dtype, size):
    one, other = wild(size, (2, size), dtype, 3)
    assert dot(one, other) == exact(one, other)
    products = one.astype(np.float64) * other.astype(np.float64)
    assert dot(one, other) == pytest.approx(math.fsum(products), abs=size * bound(one, other) * 2.0**-64)


def test_half_a_quantum_is_rounded_to_even_in_both_words():
    halves = np.array([1.0, -1.0, 3.0, 5.0, 1.0 + 2.0**-40])
    for place in (-31, -65):
        one = np.append(np.concatenate([halves, -halves]) * 2.0**place, 0.75)
        ones = np.ones_like(one)
        assert dot(one, ones) == dot(one[::-1].copy(), ones) == exact(one, ones)


@pytest.mark.parametrize(
    "one, other", [(1e-300, 1.0), (5e-324, 1.0), (1e-160, 1e-160), (1e160, 1e140), (1e300, 1e-300)]
)
def test_huge_and_tiny_products(one, other):
    left, right = np.array([1.0, -0.5, 0.25, 0.0]) * one, np.array([1.0, 0.5, 3.0, 2.0]) * other
    assert dot(left, right) == exact(left, right)


def test_nothing_zeros_and_what_is_not_finite():
    assert math.copysign(1, dot(np.zeros(5), np.ones(5))) == 1.0 and dot(np.zeros(5), np.ones(5)) == 0.0
    assert dot(np.empty(0, np.float32), np.empty(0, np.float32)) == 0.0
    assert dot(np.full(5, 1e-200), np.full(5, -1e-200)) == 0.0
    for top in (math.inf, math.nan, 2.0**1000):
        assert math.isnan(dot(np.array([1.0, np.nan]), np.ones(2), top))
    assert values(np.array([[2**61, 0], [-(2**61), 0]]), [2.0**999] * 2) == [math.inf, -math.inf]


def test_as_many_terms_as_there_may_be_do_not_overflow():
    top = 1 - 2.0**-53  # each is rounded up to 2**64 quanta
    words = dot_words(np.full(2**15, top), np.ones(2**15), top, [(0, 2**15)])
    total = normalized(words[None] * np.int64(2**18 - 1))  # as many ranks of as many elements, less than 2**33
    assert values(total, [top]) == [2.0**15 * (2**18 - 1) * top]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_with_one_vector_are_single_dot_products(device, dtype):
    rows, vector = wild(1, (5, 20_000), dtype), wild(2, 20_000, dtype)
    spans, indices = [(3, 17_000), (17_100, 19_999)], [4, 0, 2]
    tops = [bound(rows[k], vector) for k in indices]
    words = row_dot_words(rows, indices, vector, tops, spans)
    alone = [dot_words(rows[k], vector, top, spans) for k, top in zip(indices, tops, strict=True)]
    assert np.array_equal(words, alone)
    assert ((0 <= words[:, 1]) & (words[:, 1] < 2**34)).all()
    assert np.array_equal(row_dot_words(device.put(rows), indices, device.put(vector), tops, spans), words)
    assert not row_dot_words(rows, indices, vector, tops, []).any()
    assert row_dot_words(rows, [], vector, [], spans).shape == (0, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 4097])
def test_a_combination_is_rounded_once_an_element_in_the_order_of_the_rows(device, dtype, size):
    rows, vector = wild(3, (4, size), dtype, 1), wild(4, size, dtype, 1)
    indices, coefficients = [3, 1, 0], [0.3, -1.7, 1e-3]
    expected = 0.7 * vector.astype(np.float64)
    for k, coefficient in zip(indices, coefficients, strict=True):
        expected = expected + coefficient * rows[k].astype(np.float64)
    there, out = device.put(vector), np.empty_like(vector)
    combine(rows, indices, coefficients, vector, 0.7, out)
    assert np.array_equal(out, expected.astype(dtype))
    combine(device.put(rows), indices, coefficients, there, 0.7, there)
    assert np.array_equal(arrays.to_host(there), out)
    combine(rows, indices, coefficients, vector, 0.7, vector)
    assert np.array_equal(vector, out)
    combine(rows, [], [], vector, -1.0, out)
    assert np.array_equal(out, -vector)
