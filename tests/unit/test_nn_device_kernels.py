"""The CUDA functions of the layers against the formulas, on the stand-in for device memory, and on CuPy.

Every call is made again, on the stand-in with the other order of threads: bits may not depend on that.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import layer_formulas
import layer_kernels
import ml_dtypes
import numpy as np
import pytest
from devices import chosen as standin
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_kernels import arguments, normal

from mpishard.backend import array as arrays
from mpishard.nn import device_kernels, kernels
from mpishard.nn.layers import operations

pytestmark = pytest.mark.usefixtures("chosen_device")

BACKWARDS = "MPISHARD_CUDA_BACKWARDS"
TOLERANCE = {np.float32: 3e-6, np.float64: 1e-13}
# Of what is copied, or multiplied once.
TOLERANCES = {
    "drop": {np.float32: 1e-7, np.float64: 1e-15},
    "lookup": dict.fromkeys(TOLERANCE, 1e-30),
    "merge_heads": dict.fromkeys(TOLERANCE, 1e-30),
    "scatter_add": {dtype: 10 * each for dtype, each in TOLERANCE.items()},
    "split_heads": dict.fromkeys(TOLERANCE, 1e-7),
}
# Rows, columns: a warp a row with and without packs, a block a row, no rows.
SHAPES = [(1, 1), (5, 3), (0, 8), (13, 64), (9, 130), (3, 5000), (2, 5001)]
HALVES = {np.uint16: ml_dtypes.bfloat16, np.float16: np.float16}
Given = Sequence[Any]
each_dtype = pytest.mark.parametrize("dtype", TOLERANCE)


def on_device(argument: Any, shift: int = 0) -> Any:
    """A copy of an array in device memory, `shift` elements after an aligned place."""
    if not isinstance(argument, np.ndarray):
        return argument
    place = standin.empty(argument.size + shift, argument.dtype)[shift:].reshape(argument.shape)
    if argument.size:
        arrays.copy_to_device(argument, place)
    return place


def on_stand_in(name: str, arguments: Given, shift: int = 0) -> list[Any]:
    """The arrays, and the result if there is one, after a call with copies of the arguments."""
    copies = [on_device(argument, shift) for argument in arguments]
    result = getattr(device_kernels, name)(*copies)
    found = [arrays.to_host(copy) for copy in copies if isinstance(copy, standin.DeviceArray)]
    return found + ([] if result is None else [float(result)])


def assert_same_bits(first: Given, second: Given) -> None:
    assert all(np.array_equal(one, other, equal_nan=True) for one, other in zip(first, second, strict=True))


def outcome(name: str, arguments: Given) -> list[Any]:
    """As `on_stand_in`; the same bits in any order of threads."""
    first = on_stand_in(name, arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(BACKWARDS, "1")
        assert_same_bits(first, on_stand_in(name, arguments))
    return first


def expected(name: str, arguments: Given) -> list[Any]:
    """By the formula, in float64."""
    wide = [
        each.astype(np.float64) if isinstance(each, np.ndarray) and each.dtype.kind == "f" else each
        for each in (a.copy() if isinstance(a, np.ndarray) else a for a in arguments)
    ]
    result = getattr(layer_formulas, name)(*wide)
    return [each for each in wide if isinstance(each, np.ndarray)] + ([] if result is None else [result])


def compare(name: str, arguments: Given, scratch: Sequence[int] = ()) -> None:
    """Every array but scratch comes out as by the formula."""
    tolerance = TOLERANCES.get(name, TOLERANCE)[arguments[0].dtype.type]
    wanted, found = expected(name, arguments), outcome(name, arguments)
    for place, (one, other) in enumerate(zip(wanted, found, strict=True)):
        if place not in scratch:
            finite = np.abs(one, where=np.isfinite(one), out=np.zeros_like(one)) if np.size(one) else np.zeros(1)
            np.testing.assert_allclose(other, one, rtol=0, atol=tolerance * np.max(finite, initial=1))


def test_names_and_parameters_are_those_of_the_formulas() -> None:
    functions = {name: each for name, each in vars(layer_formulas).items() if inspect.isfunction(each)}
    own = [name for name, each in functions.items() if each.__module__ == layer_formulas.__name__ and name[0] != "_"]
    assert len(own) == 23
    for name in own:
        found, wanted = (inspect.signature(getattr(each, name)) for each in (device_kernels, layer_formulas))
        assert found.parameters == wanted.parameters, name


def test_who_gets_which_operations() -> None:
    device = standin.zeros(3)
    assert operations(np.zeros(3)) is kernels
    assert operations(device) is device_kernels


@each_dtype
@pytest.mark.parametrize("rows, columns", SHAPES)
@pytest.mark.parametrize("name", [name for name in layer_kernels.ROWS if name != "scatter_add"])
def test_rows(name, dtype, rows, columns):
    for each in layer_kernels.of_rows(name, dtype, rows, columns):
        compare(name, each)


@pytest.mark.parametrize(
    "dtype, columns", [(np.float32, 17001), (np.float32, 20000), (np.float64, 8300), (np.float64, 9001)]
)
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "layer_norm_backward", "rms_norm_backward"])
def test_rows_that_registers_do_not_hold(name, dtype, columns):
    compare(name, arguments(name, dtype, n=2, c=columns))


@pytest.mark.parametrize("rows", [0, 1, 3, 8])
@pytest.mark.parametrize(
    "dtype, columns",
    [(np.float32, columns) for columns in (16384, 16385, 16386, 16391, 56066, 56067, 56068, 56071)]
    + [(np.float64, columns) for columns in (8192, 8193, 28033, 28034)],
)
def test_cross_entropy_of_long_rows(dtype, columns, rows):
    """At the lengths that registers, and shared memory of an H100, hold: fewer rows than blocks, and more."""
    (logits,) = normal(dtype, (rows, columns))
    if rows > 1:
        logits[-1, -3:] = [6, -8, 10]  # the largest is in the part that is read again
    ends = [0, columns - 1, 1, columns - 2, 2, columns - 3, 3, 5000]  # single elements and packs
    compare("cross_entropy", [5 * logits, np.array(ends[:rows], np.int64)])


def same_bits_in_other_forms(name, arguments, monkeypatch):
    """Without as much shared memory, with another number of multiprocessors, and elsewhere in memory."""
    first = on_stand_in(name, arguments)
    assert_same_bits(first, on_stand_in(name, arguments, shift=1))
    monkeypatch.setattr(device_kernels, "most_shared", lambda like: 0)
    monkeypatch.setattr(device_kernels, "processors", lambda like: 5)
    assert_same_bits(first, on_stand_in(name, arguments))


@pytest.mark.parametrize("dtype, stride", [(np.float32, 50260), (np.float32, 50257), (np.float64, 9001)])
def test_bits_of_long_rows_depend_on_their_shape_alone(dtype, stride, monkeypatch):
    (logits,) = normal(dtype, (6, stride))
    gradient = np.zeros(logits.shape, np.uint16 if dtype is np.float32 else dtype)
    given = [5 * logits, np.arange(6), gradient, stride - 1, 2.0]
    same_bits_in_other_forms("cross_entropy_rounded", given, monkeypatch)


@pytest.mark.parametrize("stored", [np.float32, np.uint16, np.float16])
@pytest.mark.parametrize(
    "columns, stride",
    [(5, 8), (8, 8), (13, 16), (509, 512), (509, 511), (50257, 50264), (50257, 50259), (56066, 57344), (60001, 60008)],
)
def test_gradients_with_a_gap_behind_their_rows(stored, columns, stride):
    """Rounded, scaled, and zero in the gap, whatever the logits have there."""
    (logits,) = normal(np.float32, (3, stride))
    logits[:, columns:] = [np.nan] * (stride - columns)
    targets = np.array([columns - 1, 0, 2])
    *_, gradient, loss = outcome("cross_entropy_rounded", [logits, targets, np.ones((3, stride), stored), columns, 8.0])
    right, _, right_loss = expected("cross_entropy", [logits[:, :columns], targets])
    assert loss == pytest.approx(right_loss, rel=1e-6)
    assert not gradient[:, columns:].any()
    values = gradient[:, :columns].astype(np.float32) if stored != np.uint16 else None
    if values is None:
        values = gradient[:, :columns].copy().view(ml_dtypes.bfloat16).astype(np.float32)
    step = {np.float32: 1e-6, np.uint16: 2.0**-8, np.float16: 2.0**-11}[stored]
    np.testing.assert_allclose(values, 8 * right, rtol=step, atol=step * 8 * np.abs(right).max() * 2.0**-8)


def test_empty_vocabularies():
    """Of a rank that has no columns."""
    logits, targets = np.zeros((3, 0)), np.array([0, 1, 2])
    top, total, picked = np.zeros((3, 3))
    compare("exponentials", [logits, targets, top, total, picked, 5, 5])
    compare("cross_entropy_of_sums", [logits, targets, total + 2, picked, 5])
    assert np.array_equal(outcome("row_maximum", [logits, top])[1], [-np.inf] * 3)


@pytest.mark.parametrize("rows, columns, table, first", [(1, 1, 1, 0), (50, 33, 4, 2), (700, 8, 3, 0), (20, 4, 9, 30)])
@pytest.mark.parametrize("dtype, counted", [(np.float32, 2**15), (np.float64, 2**15), (np.float64, 0)])
def test_scatter_add(dtype, counted, rows, columns, table, first, monkeypatch):
    monkeypatch.setattr(device_kernels, "COUNTED_ROWS", counted)  # beyond so many tokens CuPy sorts them
    dy, dweight = normal(dtype, (rows, columns), (table, columns))
    indices = np.random.default_rng(1).integers(0, table + 3, rows)
    compare("scatter_add", [dy, indices, dweight, first])


def test_lookup_and_scatter_add_are_adjoint():
    weight, dy = normal(np.float64, (6, 20), (31, 20))
    indices = np.random.default_rng(3).integers(0, 9, 31)
    _, _, y = outcome("lookup", [weight, indices, np.empty_like(dy), 1, 9])
    _, _, dweight = outcome("scatter_add", [dy, indices, np.zeros_like(weight), 1])
    assert np.vdot(y, dy) == pytest.approx(np.vdot(weight, dweight), rel=1e-13)


@each_dtype
@pytest.mark.parametrize("width", [4, 5, 64, 130])
@pytest.mark.parametrize(
    "name, kinds", [("split_heads", 3), ("merge_heads", 3), ("split_with_products", 1), ("split_with_products", 2)]
)
def test_heads(name, kinds, dtype, width):
    compare(name, layer_kernels.of_heads(name, dtype, kinds, 2, 3, 11, width))


@each_dtype
@pytest.mark.parametrize("width", [4, 64, 130])
@pytest.mark.parametrize("apart", [0, 1])
@pytest.mark.parametrize("backward", [0, 1])
def test_rotate(dtype, width, apart, backward):
    x, angle = normal(dtype, (3, 11, width), (11, width // 2))
    compare("rotate", [x, np.cos(angle), np.sin(angle), apart, backward])


@each_dtype
@pytest.mark.parametrize("length, first, last", [*((20, *keys) for keys in layer_kernels.KEYS), (40, 8, 40)])
def test_causal_softmax(dtype, length, first, last):
    compare("causal_softmax", layer_kernels.of_softmax(dtype, length, first, last), scratch=[2])
    for each in layer_kernels.of_softmax_backward(dtype, length, first, last):
        compare("causal_softmax_backward", each)


@each_dtype
@pytest.mark.parametrize("keys, queries", [(512, 36), (513, 4), (516, 16), (1100, 20), (1101, 21), (2500, 8)])
def test_softmax_of_more_keys_than_registers_hold(dtype, keys, queries):
    """Of float32 those of 512 keys; the others' are in shared memory, which holds those of 2240 on an H100."""
    scores, logsum = normal(dtype, (2, keys, queries), (2, keys))
    compare("causal_softmax", [9 * scores, logsum, np.empty(queries, dtype), keys - queries, 0.4], scratch=[2])


@pytest.mark.parametrize("stored", [None, np.uint16])
@pytest.mark.parametrize("keys, queries", [(20, 20), (600, 600), (1100, 36)])
def test_bits_of_the_softmax_depend_on_its_shape_alone(stored, keys, queries, monkeypatch):
    scores, logsum = normal(np.float32, (2, keys, queries), (2, keys))
    rounded = [] if stored is None else [np.zeros(scores.shape, stored)]
    given = [9 * scores, logsum, np.zeros(queries, np.float32), keys - queries, 0.4, *rounded]
    same_bits_in_other_forms("causal_softmax", given, monkeypatch)


@pytest.mark.parametrize("stored", HALVES)
@pytest.mark.parametrize("keys, queries", [(20, 20), (20, 7), (1100, 20)])
def test_softmax_may_store_what_it_has_rounded(stored, keys, queries):
    """Its results in float32, rounded: forward but for the error of powers of 2, backward to the bit."""
    offset = keys - queries
    scores, logsum = normal(np.float32, (3, keys, queries), (3, keys))
    rounded = np.zeros(scores.shape, stored)
    given = [9 * scores, logsum, np.empty(queries, np.float32), offset, 0.4]
    (plain, sums, _), (_, other_sums, _, found) = (
        outcome("causal_softmax", given),
        outcome("causal_softmax", [*given, rounded]),
    )
    np.testing.assert_allclose(other_sums, sums, rtol=5e-7, atol=1e-6)
    half = HALVES[stored]
    step, smallest = (float(getattr(ml_dtypes.finfo(half), name)) for name in ("eps", "smallest_subnormal"))
    np.testing.assert_allclose(found.view(half).astype(np.float32), plain, rtol=step / 2 + 1e-5, atol=smallest / 2)
    scores, gradients, *statistics = normal(np.float32, *[(2, queries, keys)] * 2, *[(2, keys)] * 2)
    given = [scores, gradients, *statistics, 0.4]
    plain = outcome("causal_softmax_backward", given)[:2]
    found = outcome("causal_softmax_backward", [*given, *(np.zeros(scores.shape, stored) for _ in range(2))])[-2:]
    for one, other in zip(plain, found, strict=True):
        assert np.array_equal(other.view(HALVES[stored]), one.astype(HALVES[stored]))


@pytest.mark.parametrize(
    "name, place, stored",
    [
        *((name, place, np.uint16) for name, place in (layer_kernels.RESULTS | layer_kernels.RESULTS_OF_HEADS).items()),
        ("gelu", 2, np.float16),
        ("swiglu", 2, np.float16),
    ],
)
def test_results_may_be_stored_in_half_precision(name, place, stored):
    given = arguments(name, np.float32, n=10, c=84, s=3, b=2, h=7, t=5, d=4)
    given[1 if place == 0 else 0].reshape(-1)[:6] = [np.nan, np.inf, -np.inf, 0, -0.0, 1e5]
    plain = outcome(name, given)
    half = list(given)
    half[place] = np.zeros(given[place].shape, stored)
    rounded = outcome(name, half)
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = plain[place].astype(HALVES[stored])
    found = rounded[place].view(HALVES[stored])
    np.testing.assert_array_equal(found.astype(np.float32), wanted.astype(np.float32))
    for number, (one, other) in enumerate(zip(plain, rounded, strict=True)):
        assert number == place or np.array_equal(one, other, equal_nan=True)


@pytest.mark.parametrize("stored", HALVES)
@pytest.mark.parametrize("rows, columns", [*SHAPES, (1, 8), (50, 40), (700, 24), (700, 12)])
def test_gelu_backward_of_rounded(stored, rows, columns):
    """Of the formulas in float64 rounded once, and sums as exact as float32 is, which are added."""
    half = HALVES[stored]
    dx, before, dbias = normal(np.float32, (rows, columns), (rows, columns), columns)
    before *= 4
    before.reshape(-1)[:7] = np.array([0, -0.0, 9, -9, 60, -60, 200], np.float32)[: before.size]
    dx, before = dx.astype(half), before.astype(half)
    found, kept, sums = outcome("gelu_backward_of_rounded", [dx.view(stored), before.view(stored), dbias])
    slope = before.astype(np.float64)
    layer_formulas.gelu(slope, np.zeros(columns), np.empty_like(slope))
    exact = dx.astype(np.float64) * slope
    precision = float(ml_dtypes.finfo(half).eps) / 2
    np.testing.assert_allclose(found.view(half).astype(np.float64), exact, rtol=1.05 * precision, atol=1e-5)
    np.testing.assert_array_equal(kept.view(half), before)
    np.testing.assert_allclose(sums, dbias + exact.sum(axis=0), rtol=0, atol=1e-5 * max(1, rows) ** 0.5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_gelu_backward_of_rounded_hides_no_bad_numbers(bad):
    zeros, one = np.zeros((2, 3, 16), np.float16)
    one[1, 5] = bad
    for dx, before in ([one, zeros], [zeros, one]):
        found, _, sums = on_stand_in("gelu_backward_of_rounded", [dx, before, np.zeros(16, np.float32)])
        assert np.isnan(found[1, 5]) or found[1, 5] == bad
        assert not np.isfinite(sums[5]) and np.isfinite(np.delete(sums, 5)).all()


@pytest.mark.parametrize("columns", [64, 66])
def test_bits_do_not_depend_on_where_memory_begins(columns):
    """Threads take the same elements where they cannot load 16 bytes at once."""
    rows = 6
    wide, narrow = normal(np.float32, (2, rows, columns), columns)
    names = ["layer_norm", "layer_norm_backward", "gelu", "gelu_backward", "swiglu"]
    calls = [(name, arguments(name, np.float32, n=rows, c=columns)) for name in names]
    calls += [("gelu_backward_of_rounded", [*wide.astype(np.float16), 0 * narrow])]
    for name, each in [*calls, ("cross_entropy", [wide[0], np.arange(rows)])]:
        assert_same_bits(on_stand_in(name, each), on_stand_in(name, each, shift=1))


@settings(max_examples=20)
@given(st.integers(0, 70), st.integers(1, 700), st.sampled_from([np.float32, np.float64]))
def test_any_shape(rows, columns, dtype):
    for name in ("layer_norm", "layer_norm_backward", "gelu_backward", "cross_entropy"):
        for each in layer_kernels.of_rows(name, dtype, rows, columns):
            compare(name, each)


@pytest.mark.parametrize("rows, columns", [(1100, 3), (9000, 8)])
def test_column_sums_over_many_rows(rows, columns):
    """Of so many parts that they are added up in several rounds."""
    for name in ("rms_norm_backward", "gelu_backward"):
        compare(name, arguments(name, np.float64, n=rows, c=columns))
    zeros, sums = np.zeros((rows, columns), np.float16), np.ones(columns, np.float32)
    found = outcome("gelu_backward_of_rounded", [zeros + np.float16(1), zeros, sums])[2]
    assert np.array_equal(found, np.full(columns, 1 + rows / 2))  # the derivative at 0 is 1/2


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("columns", [8, 20000])
def test_bad_numbers_are_not_hidden(bad, columns):
    x = np.zeros((1, columns), np.float32)
    for place in (3, columns - 1):
        x[:] = 0
        x[0, place] = bad
        *_, loss = on_stand_in("cross_entropy", [x, np.array([0])])
        assert not np.isfinite(loss)
        c, one = np.ones(columns, np.float32), np.empty(1, np.float32)
        y = on_stand_in("layer_norm", [x, c, c, np.empty_like(x), one, one, 1e-5])[3]
        assert np.isnan(y).all()
        y = on_stand_in("gelu", [x, 0 * c, np.empty_like(x)])[2]
        assert not np.isfinite(y[0, place])


def test_wrong_arrays_are_refused():
    x, bias = standin.zeros((4, 8), np.float32), standin.zeros(8, np.float32)
    with pytest.raises(ValueError, match=r"add_bias .*\(4, 8\) with strides"):
        device_kernels.add_bias(x, bias, standin.zeros((4, 16), np.float32)[:, ::2])
    with pytest.raises(TypeError, match="bias as float32, got float64"):
        device_kernels.add_bias(x, standin.zeros(8), x)
