"""Sums of squares that do not depend on how the terms are cut."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from standin import DeviceArray
from standin import empty as empty_on_device

from mpishard.backend import array as arrays
from mpishard.backend.exact_norm import largest, norm, norm_of, sum_of_squares


def wild(size, dtype):
    random = np.random.default_rng(size)
    return (random.standard_normal(size) * 10.0 ** random.integers(-9, 9, size)).astype(dtype)


def parts(array, cuts, top):
    return [sum_of_squares(part, top, array.size) for part in np.split(array, cuts)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(st.integers(1, 500), st.lists(st.integers(0, 500), max_size=5))
def test_any_cut_and_any_order_give_the_same_bits(dtype, size, cuts):
    array = wild(size, dtype)
    top = largest(array)
    expected = sum_of_squares(array, top, size)
    pieces = parts(array, sorted(min(cut, size) for cut in cuts), top)
    assert np.array_equal(sum(pieces), expected)
    assert np.array_equal(sum(pieces[::-1]), expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [1, 7, 1000, 100_003])
def test_close_to_the_exact_sum(dtype, size):
    array = wild(size, dtype)
    exact = math.fsum(float(x) * float(x) for x in array)
    assert norm(sum_of_squares(array, largest(array), size), largest(array)) == pytest.approx(exact**0.5, rel=1e-14)
    assert norm_of(array) == pytest.approx(exact**0.5, rel=1e-14)


@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1e160, 1e300])
def test_huge_and_tiny_numbers_have_a_norm(scale):
    array = np.array([3.0, -4.0, 0.0]) * scale
    assert norm_of(array) == pytest.approx(5 * scale, rel=1e-14)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_largest_shows_what_is_not_finite(dtype, value):
    array = wild(999, dtype)
    assert largest(array) == abs(array).max()
    for place in (0, 500, 998):
        bad = array.copy()
        bad[place] = value
        assert not math.isfinite(largest(bad))


def test_nothing_and_zeros():
    assert norm_of(np.empty(0)) == norm_of(np.zeros(5, np.float32)) == 0.0
    assert largest(np.empty(0, np.float32)) == 0.0
    assert not sum_of_squares(np.empty(0, np.float32), 1.0, 5).any()
    assert not sum_of_squares(np.zeros(9), 0.0, 9).any()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_device_memory_gives_the_same_bits(dtype):
    array = wild(999, dtype)
    device = empty_on_device(999, dtype, kind=DeviceArray)
    arrays.copy_to_device(array, device)
    assert largest(device) == largest(array)
    assert np.array_equal(sum_of_squares(device, largest(array), 999), sum_of_squares(array, largest(array), 999))
