"""Sums of squares that do not depend on how the terms are cut."""

from __future__ import annotations

import math

import cuda_on_host
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from standin import StandIn, on_device
from standin import empty as empty_on_device
from waits import counted_waits

from mpishard.backend.exact import LargestValues, largest, largest_of, norm, norm_of, sum_of_squares, sums_of_squares
from mpishard.backend.ranges import Range, Ranges


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


@pytest.mark.parametrize("by_cuda", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_device_memory_gives_the_same_bits(device, dtype, by_cuda, monkeypatch):
    monkeypatch.setattr(StandIn, "compiles_cuda", by_cuda and StandIn.compiles_cuda)
    array = wild(999, dtype)
    there = device.put(array)
    assert largest(there) == largest(array)
    assert np.array_equal(sum_of_squares(there, largest(array), 999), sum_of_squares(array, largest(array), 999))
    gaps = device.empty(2 * 999, dtype)[::2]
    gaps[...] = there
    assert largest(gaps) == largest(array)
    ranges = Ranges([Range(0, 3, 500), Range(0, 500, 999)])
    assert largest_of([there], ranges) == largest_of([array], ranges)


by_cuda = pytest.mark.skipif(cuda_on_host.COMPILER is None, reason="no C++ compiler")
NUMBERS = {
    "wild": lambda size, dtype: wild(size, dtype),
    "equal": lambda size, dtype: np.full(size, 0.1, dtype),
    "zeros": lambda size, dtype: np.zeros(size, dtype),
    "tiny": lambda size, dtype: wild(size, dtype) * np.finfo(dtype).smallest_subnormal,
    "huge": lambda size, dtype: np.linspace(-1, 1, size, dtype=dtype) * np.finfo(dtype).max,
}
SIZES = [1, 31, 16_384, 16_385, 50_001]


def as_bits(numbers):
    return np.array(numbers, np.float64).tobytes()


@by_cuda
@pytest.mark.parametrize("backwards", ["", "1"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", NUMBERS)
def test_many_ranges_of_a_device_give_the_bits_of_the_host(kind, dtype, backwards, monkeypatch):
    if backwards:
        monkeypatch.setenv("MPISHARD_CUDA_BACKWARDS", backwards)
    host = [NUMBERS[kind](size, dtype) for size in SIZES]
    device = [on_device(array) for array in host]
    parts = [(row, *cut) for row, size in enumerate(SIZES) for cut in ((0, size), (size // 3, size), (5, 5))]
    ranges = Ranges([Range(row, min(a, SIZES[row]), min(b, SIZES[row]), row) for row, a, b in parts])
    tops = largest_of(host, ranges)
    assert as_bits(largest_of(device, ranges)) == as_bits(tops)
    bounds, terms = [largest(array) for array in host], [4 * size for size in SIZES]
    assert as_bits(sums_of_squares(device, ranges, bounds, terms)) == as_bits(
        sums_of_squares(host, ranges, bounds, terms)
    )
    for one, other in zip(device, host, strict=True):
        assert as_bits(largest(one)) == as_bits(largest(other))
        assert as_bits(norm_of(one)) == as_bits(norm_of(other))
        assert norm_of(other) > 0 or not other.any()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_device_shows_what_is_not_finite(dtype, value):
    host = [wild(size, dtype) for size in SIZES]
    ranges = Ranges.whole(host)
    for place in (0, -1):
        for row, array in enumerate(host):
            bad = array.copy()
            bad[place] = value
            found = largest_of([on_device(each) for each in (*host[:row], bad, *host[row + 1 :])], ranges)
            assert [math.isfinite(top) for top in found] == [number != row for number in range(len(host))]
            assert math.isnan(found[row]) == math.isnan(value) and not math.isfinite(largest(on_device(bad)))


@by_cuda
def test_largest_values_wait_on_the_device(monkeypatch):
    host = [wild(size, np.float32) for size in (7, 40_000)]
    device, values = [on_device(array) for array in host], LargestValues(3, np.float32, empty_on_device(1))
    waits = counted_waits(monkeypatch)
    values.take(device, Ranges.whole(device), first=1)
    values.take(device[:1], Ranges.whole(device[:1]), first=1)
    assert not waits
    assert values.values().tolist() == [0.0, largest(host[0]), largest(host[1])]
    assert len(waits) == 1
    values.clear()
    assert not values.values().any()


def test_no_ranges_and_nothing_in_them():
    device = [empty_on_device(0, np.float32), empty_on_device(3, np.float32)]
    assert largest_of(device, Ranges([])) == [] and largest_of([], Ranges([])) == []
    ranges = Ranges([Range(0, 0, 0), Range(1, 2, 2)])
    assert largest_of(device, ranges) == [0.0, 0.0]
    assert not sums_of_squares(device, ranges, [1.0], [5]).any()
    assert sums_of_squares([], Ranges([]), [], []).shape == (0, 2)
