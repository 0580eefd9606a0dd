"""Compressors: what they send, what they leave behind, and that nothing of it is lost over the steps."""

from __future__ import annotations

from types import SimpleNamespace

import cuda_on_host
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpishard.backend import array as arrays
from mpishard.compression import (
    BFloat16Compressor,
    Float16Compressor,
    Int8Compressor,
    PieceCompressor,
    PowerSGDCompressor,
    SignCompressor,
    TopKCompressor,
)

ALL = [Float16Compressor(), BFloat16Compressor(), Int8Compressor(), Int8Compressor(block=7), SignCompressor(block=16)]
ALL += [TopKCompressor(0.1), TopKCompressor(1.0)]
each = pytest.mark.parametrize("compressor", ALL, ids=str)
needs_compiler = pytest.mark.skipif(cuda_on_host.COMPILER is None, reason="no C++ compiler")


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


def special(size, dtype):
    """Numbers of all kinds, in runs and mixed: not finite, zeros, not normal, rounded up, too large, equal."""
    limits = np.finfo(np.float16), np.finfo(np.float32), np.finfo(dtype)
    kinds = [0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 65519.0, 65520.0, 1 + 2**-11, 1 + 2**-11 + 2**-20, -1 - 2**-8]
    kinds += [sign * each for kind in limits for each in (kind.tiny, kind.smallest_subnormal) for sign in (1, -3)]
    kinds += [kind.max for kind in limits] + [1.0] * 5
    values = random(size, dtype)
    where = np.random.default_rng(1).random(size) < 0.4
    where[: size // 4] = False
    with np.errstate(over="ignore"):
        values[where] = np.random.default_rng(2).choice(np.array(kinds, dtype), int(where.sum()))
    values[size // 2 : size // 2 + 16] = 0
    last = values[size // 2 + 16 : size // 2 + 32]
    last[:] = np.finfo(np.float32).smallest_subnormal * np.arange(last.size)
    return values


MANY = [*ALL, SignCompressor(block=5), SignCompressor(block=1), SignCompressor(), Int8Compressor(block=1)]
each_of_many = pytest.mark.parametrize("compressor", MANY, ids=str)
each_dtype = pytest.mark.parametrize("dtype", [np.float32, np.float64])
each_size = pytest.mark.parametrize("size", [0, 1, 5, 64, 1003])


def filled(make, size, dtype, compressor):
    values = make(size, dtype)
    return values, np.full(compressor.nbytes(size, values.dtype), 77, np.uint8)


@each_of_many
@each_dtype
@each_size
@pytest.mark.parametrize("make", [random, special])
@needs_compiler
@np.errstate(all="ignore")
def test_device_and_host_make_the_same_of_it(device, compressor, make, dtype, size):
    """The same bytes, and the same bits of these, what is left, and sums.  The wire begins at an odd word."""
    values, wire = filled(make, size, dtype, compressor)
    whole = device.put(np.full(wire.size + 4, 77, np.uint8))
    device_values, device_wire = device.put(values), whole[4:]
    compressor.compress(values, wire)
    compressor.compress(device_values, device_wire)
    assert arrays.to_host(whole).tobytes() == bytes([77] * 4) + wire.tobytes()
    assert arrays.to_host(device_values).tobytes() == values.tobytes()
    for function in (compressor.decompress, compressor.add):
        found = random(size, dtype, seed=3)
        device_found = device.put(found)
        function(wire, found)
        function(device_wire, device_found)
        np.testing.assert_array_equal(arrays.to_host(device_found), found, strict=True)
    rest, device_rest, again = np.empty(size, dtype), device.put(np.empty(size, dtype)), np.full_like(wire, 77)
    compressor.split(values, again, rest)
    compressor.split(device_values, device_wire, device_rest)
    assert arrays.to_host(device_wire).tobytes() == again.tobytes() == wire.tobytes()
    np.testing.assert_array_equal(arrays.to_host(device_rest), rest, strict=True)


@pytest.mark.parametrize("compressor", [Int8Compressor(block=2), SignCompressor(block=2)], ids=str)
@each_dtype
@needs_compiler
@np.errstate(all="ignore")
def test_a_scale_that_is_nan_has_the_same_bits_on_every_processor(device, compressor, dtype):
    """What arithmetic makes of NaN has the sign and the payload of an operand here, and none of it on GPUs."""
    quiet, whole = {np.float32: (0x7FC00000, np.uint32), np.float64: (0x7FF8 << 48, np.uint64)}[dtype]
    sign = 1 << (8 * dtype().itemsize - 1)
    values = np.zeros(9, dtype)  # the last block has one element
    values.view(whole)[::2] = [quiet, quiet | sign, quiet + (quiet >> 12), 2 * sign - 1, sign - 1]
    values[1] = -np.inf
    wire = np.zeros(compressor.nbytes(9, values.dtype), np.uint8)
    device_wire = device.put(wire)
    compressor.compress(values, wire)
    compressor.compress(device.put(values), device_wire)
    assert (wire[: 4 * 5].view(np.uint32) == 0x7FC00000).all()
    assert arrays.to_host(device_wire).tobytes() == wire.tobytes()


@each_of_many
@each_dtype
@pytest.mark.parametrize("make", [random, special])
def test_one_pass_is_as_good_as_two(compressor, make, dtype):
    values, wire = filled(make, 1001, dtype, compressor)
    rest, total, other = np.empty_like(values), random(values.size, dtype, seed=3), np.empty_like(values)
    sums = total.copy()
    compressor.split(values, wire, rest)
    compressor.add(wire, total)
    PieceCompressor.split(compressor, values, wire, other)
    PieceCompressor.add(compressor, wire, sums)
    np.testing.assert_array_equal(rest, other)
    np.testing.assert_array_equal(total, sums)


@pytest.mark.parametrize(
    ("compressor", "dtype"), [(Float16Compressor(), np.float16), (BFloat16Compressor(), ml_dtypes.bfloat16)], ids=str
)
@np.errstate(invalid="ignore")
def test_casts_round_as_others_do_and_all_halves_arrive(compressor, dtype):
    for make in (random, special):
        values = make(10_000, np.float32)
        if dtype == np.float16:
            values = np.where(np.isinf(values), values, values.clip(-65504, 65504))
        np.testing.assert_array_equal(sent(compressor, values), values.astype(dtype).astype(np.float32))
    for wide in (np.float32, np.float64):
        every = np.arange(1 << 16, dtype=np.uint16).view(dtype).astype(wide)
        np.testing.assert_array_equal(sent(compressor, every), every)
    largest = np.array([1e6, -1e6, 3.0], np.float32)
    if dtype == np.float16:  # which has no number beyond
        np.testing.assert_array_equal(sent(compressor, largest), [65504, -65504, 3])


@pytest.mark.parametrize("fraction", [0.001, 0.01, 0.3])
@pytest.mark.parametrize("kind", ["random", "zeros", "sparse", "equal", "rows", "nan"])
@each_dtype
def test_top_k_counts_exactly_however_they_lie(kind, fraction, dtype):
    """More elements than its sample has."""
    size = 100_003
    values, places = random(size, dtype), np.arange(size)
    if kind in ("zeros", "sparse", "rows"):
        values *= {"zeros": 0, "sparse": places % 400 == 7, "rows": 1.0 + 99 * (places % 7 == 0)}[kind]
    if kind == "equal":
        values = np.copysign(dtype(2), values)
    if kind == "nan":
        values[5000:90_000] = np.nan
    compressor = TopKCompressor(fraction)
    wire = np.zeros(compressor.nbytes(size, values.dtype), np.uint8)
    compressor.compress(values, wire)
    count = compressor.count(size)
    ordered = np.argsort(np.where(np.isnan(values), -np.inf, -np.abs(values)), kind="stable")
    np.testing.assert_array_equal(wire[: 4 * count].view(np.uint32), np.sort(ordered[:count]))


def test_eight_bits_of_numbers_that_are_not_normal():
    values = np.arange(-127, 128, dtype=np.float32) * np.finfo(np.float32).smallest_subnormal * 5
    np.testing.assert_array_equal(sent(Int8Compressor(), values), values)


@each
@each_dtype
def test_any_number_of_elements_arrives_and_what_is_not_finite_as_such(compressor, dtype):
    for size in (0, 1, 2, 3, 7, 16, 255, 256, 1000):
        values = random(size, dtype)
        found = sent(compressor, values)
        assert found.dtype == dtype and np.isfinite(found).all()
        # No compressor makes the error larger than what it was given.
        assert np.linalg.norm(values - found) <= np.linalg.norm(values) * (1 + 1e-6)
    assert not sent(compressor, np.zeros(50, dtype)).any()
    for bad in (np.nan, np.inf, -np.inf):
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
    "kind, wrong",
    [(TopKCompressor, 0), (TopKCompressor, 1.5), (Int8Compressor, 0), (SignCompressor, 2.5)]
    + [(PowerSGDCompressor, wrong) for wrong in (0, -1, 1.5, True, "4")],
)
def test_bad_settings(kind, wrong):
    message = "above 0 and at most 1" if kind is TopKCompressor else "whole number of at least 1"
    with pytest.raises((ValueError, TypeError), match=message):
        kind(wrong)


# Says which of its methods a compressor has chosen.
KINDS = SimpleNamespace(of_pieces=lambda each: ("pieces", each), of_low_rank=lambda each: ("low rank", each))


@pytest.mark.parametrize("compressor", [*ALL, PowerSGDCompressor(2)], ids=str)
def test_a_compressor_chooses_what_sums_with_it(compressor):
    """And says which collectives that takes, of a matrix and a vector over 3 ranks."""
    low_rank = isinstance(compressor, PowerSGDCompressor)
    assert compressor.make_sums(KINDS) == ("low rank" if low_rank else "pieces", compressor)
    assert compressor.by_nodes == (not low_rank)
    found = compressor.collectives([(10, 20), (4,)], np.dtype(np.float64), 3)
    if low_rank:
        assert found == [("all_reduce", [2 * 10 + 4], 8), ("all_reduce", [2 * 20], 8)]
    else:
        sizes = [compressor.nbytes(68, np.dtype(np.float64))] * 3
        assert found == [("all_to_all", sizes, 1), ("all_gather", sizes, 1)]
