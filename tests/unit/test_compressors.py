"""Compressors: what they send, what they leave behind, and that nothing of it is lost over the steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpishard.compression import (
    BFloat16Compressor,
    Float16Compressor,
    Int8Compressor,
    SignCompressor,
    TopKCompressor,
)

ALL = [
    Float16Compressor(),
    BFloat16Compressor(),
    Int8Compressor(),
    Int8Compressor(block=7),
    SignCompressor(block=16),
    TopKCompressor(0.1),
    TopKCompressor(1.0),
]
each = pytest.mark.parametrize("compressor", ALL, ids=str)


def sent(compressor, values):
    """What arrives, through bytes in the middle of a larger buffer."""
    nbytes = compressor.nbytes(values.size, values.dtype)
    assert nbytes % 4 == 0
    buffer = np.full(nbytes + 16, 77, np.uint8)
    before = values.copy()
    compressor.compress(values, buffer[8 : 8 + nbytes])
    assert (buffer[:8] == 77).all() and (buffer[8 + nbytes :] == 77).all()
    np.testing.assert_array_equal(values, before)
    found = np.full_like(values, np.nan)
    compressor.decompress(buffer[8 : 8 + nbytes].copy(), found)
    return found


def random(size, dtype, seed=0):
    generator = np.random.default_rng(seed)
    return (generator.standard_normal(size) * np.exp(generator.standard_normal(size))).astype(dtype)


@each
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 16, 255, 256, 1000])
def test_any_number_of_elements(compressor, size, dtype):
    values = random(size, dtype)
    found = sent(compressor, values)
    assert found.dtype == dtype and np.isfinite(found).all()
    # No compressor makes the error larger than what it was given.
    assert np.linalg.norm(values - found) <= np.linalg.norm(values) * (1 + 1e-6)


@each
def test_zeros_stay_zeros(compressor):
    assert not sent(compressor, np.zeros(50)).any()


@each
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_arrives_as_such(compressor, bad):
    values = random(40, np.float32)
    values[17] = bad
    assert not np.isfinite(sent(compressor, values)).all()


@each
def test_the_error_is_sent_later(compressor):
    """Sum of what was sent plus the residual is the sum of the gradients (error feedback)."""
    residual, total, gone = np.zeros(300), np.zeros(300), np.zeros(300)
    for step in range(200):
        gradient = random(300, np.float64, seed=step)
        total += gradient
        residual += gradient
        found = sent(compressor, residual)
        residual -= found
        gone += found
    assert np.abs(gone + residual - total).max() <= 1e-12 * np.abs(total).max() * 200
    assert np.linalg.norm(residual) < 0.5 * np.linalg.norm(total)


def test_bytes():
    n = 10_000
    assert Float16Compressor().nbytes(n, np.float32) == BFloat16Compressor().nbytes(n, np.float32) == 2 * n
    assert Int8Compressor(block=100).nbytes(n, np.float32) == n + 4 * 100
    assert SignCompressor(block=1000).nbytes(n, np.float32) == n // 8 + 2 + 4 * 10 - 2 * (n // 8 % 4 == 0)
    assert TopKCompressor(0.01).nbytes(n, np.float32) == 100 * 8
    assert TopKCompressor(0.01).nbytes(n, np.float64) == 100 * 12


def test_top_k_sends_the_largest():
    values = np.array([1.0, -5.0, 0.5, 4.0, -2.0])
    np.testing.assert_array_equal(sent(TopKCompressor(0.4), values), [0, -5, 0, 4, 0])
    np.testing.assert_array_equal(sent(TopKCompressor(1.0), values), values)


def test_halves_do_not_overflow():
    values = np.array([1e6, -1e6, 3.0], np.float32)
    np.testing.assert_array_equal(sent(Float16Compressor(), values), [65504, -65504, 3])


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=60), st.integers(1, 20))
@settings(max_examples=100, deadline=None)
def test_eight_bits_are_within_half_a_level(values, block):
    values = np.array(values, np.float32)
    found = sent(Int8Compressor(block), values)
    for start in range(0, values.size, block):
        part = slice(start, start + block)
        level = np.abs(values[part]).max() / 127
        assert np.abs(values[part] - found[part]).max() <= level * 0.501 + 1e-43


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TopKCompressor(0), "above 0 and at most 1"),
        (lambda: TopKCompressor(1.5), "above 0 and at most 1"),
        (lambda: Int8Compressor(0), "whole number of at least 1"),
        (lambda: SignCompressor(2.5), "whole number of at least 1"),
    ],
)
def test_bad_settings(make, message):
    with pytest.raises(ValueError, match=message):
        make()
