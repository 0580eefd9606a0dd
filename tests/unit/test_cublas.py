"""Products by cuBLAS on the stand-in for device memory, with a double of cuBLAS that reads columns at raw addresses."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import cuda_on_host
import fake_cublas
import ml_dtypes
import numpy as np
import pytest
import standin
from waits import launches

from mpishard.backend import array as arrays
from mpishard.backend import cublas
from mpishard.backend.convert import convert
from mpishard.backend.kinds import backend_of
from mpishard.nn.products import DeviceProduct

KINDS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
TOLERANCE = {"float16": 1e-6, "bfloat16": 1e-6, "float32": 1e-6, "float64": 1e-14}


def numbers(shape: Any, kind: str, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(KINDS[kind])


def on_device(host: np.ndarray) -> Any:
    """A copy on the device; bfloat16 as its bits."""
    return standin.on_device(host.view(np.uint16) if host.dtype == ml_dtypes.bfloat16 else host)


def laid_out(host: np.ndarray, layout: str) -> Any:
    """The same matrices on the device: by rows, by columns, in a part of a wider array, or with gaps that BLAS cannot
    read."""
    if layout == "columns":
        return on_device(np.ascontiguousarray(host.swapaxes(-1, -2))).swapaxes(-1, -2)
    if layout == "part":
        wide = np.full((*host.shape[:-2], host.shape[-2] + 3, host.shape[-1] + 2), 7, host.dtype)
        wide[..., 1:-2, 2:] = host
        return on_device(wide)[..., 1:-2, 2:]
    if layout == "gaps":
        wide = np.full((*host.shape[:-1], 2 * host.shape[-1]), 7, host.dtype)
        wide[..., ::2] = host
        return on_device(wide)[..., ::2]
    assert layout == "rows"
    return on_device(host)


def check_every_layout(kind: str, batch: tuple[int, ...], m: int, n: int, k: int, accumulate: bool) -> None:
    result = "float64" if kind == "float64" else "float32"
    a, b, c = numbers((*batch, m, k), kind), numbers((*batch, k, n), kind, 1), numbers((*batch, m, n), result, 2)
    expected = a.astype(np.float64) @ b.astype(np.float64) + (c if accumulate else 0)
    for of_a, of_b, of_c in itertools.product(("rows", "columns", "part", "gaps"), repeat=3):
        out = laid_out(c, of_c)
        assert cublas.multiply(laid_out(a, of_a), laid_out(b, of_b), out, accumulate) is out
        np.testing.assert_allclose(arrays.to_host(out), expected, rtol=0, atol=TOLERANCE[kind] * 50)


@pytest.mark.pairs(8)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("accumulate", [False, True])
def test_every_layout(kind: str, batch: tuple[int, ...], accumulate: bool) -> None:
    check_every_layout(kind, batch, 5, 4, 7, accumulate)


@pytest.mark.parametrize("m, n, k", list(itertools.product((1, 3), repeat=3)))
def test_single_rows_and_columns(m: int, n: int, k: int) -> None:
    check_every_layout("float64", (2,), m, n, k, False)


def test_what_is_around_a_view_stays() -> None:
    whole = on_device(np.full((4, 6, 8), 5.0))
    cublas.multiply(on_device(np.ones((4, 3, 2))), on_device(np.ones((4, 2, 5))), whole[:, 1:4, 2:7])
    expected = np.full((4, 6, 8), 5.0)
    expected[:, 1:4, 2:7] = 2
    np.testing.assert_array_equal(arrays.to_host(whole), expected)


def test_a_result_by_heads_is_one_call_for_each_sequence() -> None:
    """Columns of heads side by side, as attention writes them: sequences and heads have no common step."""
    a, b = numbers((2, 3, 5, 5), "float32"), numbers((2, 3, 5, 4), "float32", 1)
    rows = standin.zeros((2 * 5, 3 * 4), np.float32)
    out = rows.reshape(2, 5, 3, 4).transpose(0, 2, 1, 3)
    fake_cublas.calls.clear()
    cublas.multiply(on_device(a), on_device(b), out)
    np.testing.assert_allclose(arrays.to_host(out), a @ b, rtol=1e-5, atol=1e-5)
    assert [name for name, _, _ in fake_cublas.calls] == ["gemmStridedBatchedEx"] * 2
    fake_cublas.calls.clear()
    cublas.multiply(on_device(a), on_device(b), standin.zeros((2, 3, 5, 4), np.float32))
    assert [name for name, _, _ in fake_cublas.calls] == ["gemmStridedBatchedEx"]


def test_an_operand_that_is_the_same_for_all_is_not_copied() -> None:
    a, b = numbers((3, 4), "float64"), numbers((5, 4, 2), "float64", 1)
    shared = on_device(a)
    view = standin.DeviceArray(shared._memory, np.broadcast_to(shared._host, (5, 3, 4)))
    out = standin.zeros((5, 3, 2))
    cublas.multiply(view, on_device(b), out)
    np.testing.assert_allclose(arrays.to_host(out), a @ b, rtol=1e-13)


def test_vectors_times_matrices() -> None:
    ones, x, sums = np.ones(6), numbers((6, 4), "float64"), standin.zeros(4)
    cublas.multiply(on_device(ones), on_device(x), sums)
    cublas.multiply(on_device(ones), on_device(x), sums, True)
    np.testing.assert_allclose(arrays.to_host(sums), 2 * x.sum(axis=0), rtol=1e-13)


@pytest.mark.parametrize("m, n, k", [(0, 3, 2), (2, 0, 3), (2, 3, 0), (0, 0, 0)])
def test_empty(m: int, n: int, k: int) -> None:
    fake_cublas.calls.clear()
    out = on_device(np.full((m, n), 3.0))
    a, b = standin.zeros((m, k)), standin.zeros((k, n))
    cublas.multiply(a, b, out, True)
    np.testing.assert_array_equal(arrays.to_host(out), np.full((m, n), 3.0))
    cublas.multiply(a, b, out)
    np.testing.assert_array_equal(arrays.to_host(out), np.zeros((m, n)))
    assert not fake_cublas.calls


def test_in_which_type_sums_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(kind: str) -> tuple[int, int]:
        fake_cublas.calls.clear()
        x, result = on_device(numbers((2, 2), kind)), np.float64 if kind == "float64" else np.float32
        cublas.multiply(x, x, standin.zeros((2, 2), result))
        ((_, compute, operands),) = fake_cublas.calls
        return compute, operands

    monkeypatch.setattr(cublas, "_tf32", lambda: False)
    assert [found(kind) for kind in KINDS] == [(68, 2), (68, 14), (68, 0), (70, 1)]
    monkeypatch.setattr(cublas, "_tf32", lambda: True)
    assert [found(kind) for kind in KINDS] == [(68, 2), (68, 14), (77, 0), (70, 1)]


def test_results_in_half_precision() -> None:
    a, b = numbers((3, 5), "bfloat16"), numbers((5, 2), "bfloat16", 1)
    out = standin.zeros((3, 2), np.uint16)
    cublas.multiply(on_device(a), on_device(b), out)
    exact = (a.astype(np.float32) @ b.astype(np.float32)).astype(np.float64)
    np.testing.assert_allclose(arrays.to_host(out).view(ml_dtypes.bfloat16).astype(np.float64), exact, rtol=2**-8)


@pytest.mark.parametrize(
    "types",
    ["float16 uint16 float32", "float32 float32 float16", "float16 float16 float64", "float64 float64 float32"]
    + ["int32 int32 int32"],
)
def test_types_that_do_not_go_together(types: str) -> None:
    with pytest.raises(TypeError, match="got {} times {} into {}".format(*types.split())):
        cublas.multiply(*(standin.zeros((2, 2), each) for each in types.split()))


def test_shapes_that_do_not_go_together() -> None:
    wrong = ["23 23 23", "23 32 23", "423 32 422", "3 32 12"]  # the extents of the operands and of the result
    for shapes in wrong:
        with pytest.raises(ValueError, match="cannot multiply shapes"):
            cublas.multiply(*(standin.zeros(tuple(map(int, shape))) for shape in shapes.split()))


def test_sizes_beyond_those_of_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublas, "LARGEST", 5)
    out = standin.zeros((2, 6))
    with pytest.raises(ValueError, match=r"up to 5, .*\(2, 6\) has 6"):
        cublas.multiply(standin.zeros((2, 3)), standin.zeros((3, 6)), out)
    with pytest.raises(ValueError, match="has 6"):
        cublas.multiply(standin.zeros((6, 2, 3)), standin.zeros((6, 3, 2)), standin.zeros((6, 2, 2)))


def test_products_wait_for_their_stream() -> None:
    a, b, out = on_device(np.ones((2, 2))), on_device(np.ones((2, 2))), standin.zeros((2, 2))
    arrays.ready(out)
    stream = backend_of(out).new_stream(out)
    with stream:
        cublas.multiply(a, b, out)
        a.fill(3)
    assert not arrays.to_host(out).any()
    stream.synchronize()
    np.testing.assert_array_equal(arrays.to_host(out), np.full((2, 2), 2.0))


# -- conversion ----------------------------------------------------------------------------------------------------

HALVES = [np.float16, ml_dtypes.bfloat16]


@pytest.fixture(params=["kernel", "formula"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    backend = backend_of(standin.zeros(1))
    if request.param == "formula":
        monkeypatch.setattr(type(backend), "compiles_cuda", False)
    elif not backend.compiles_cuda:
        pytest.skip("no C++ compiler")
    return request.param


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 1023, 1024, 4099])
def test_flat_numbers_are_rounded_to_nearest_even(way: str, half: Any, size: int) -> None:
    x = np.random.default_rng(size).standard_normal(size + 1).astype(np.float32)
    special = np.array([np.inf, -np.inf, np.nan, 1e30, -1e30, 1e-30, 65519, 65520, 0], np.float32)
    x[: special.size] = special[: x.size]
    with np.errstate(over="ignore"):
        expected = x[1:].astype(half)
    stored = np.float16 if half is np.float16 else np.uint16
    for begin in (0, 1):  # the second is not aligned for vectors
        y = standin.zeros(size + begin, stored)[begin:]
        convert(on_device(x)[1:], y)
        found = arrays.to_host(y).view(half)
        np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
        np.testing.assert_array_equal(found[~np.isnan(found)], expected[~np.isnan(expected)])
        back = standin.zeros(size, np.float32)
        convert(y, back)
        np.testing.assert_array_equal(arrays.to_host(back), found.astype(np.float32))


@pytest.mark.parametrize("half", HALVES)
def test_strided_numbers_are_rounded(way: str, half: Any) -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 5, 40)).astype(np.float32)
    stored = np.float16 if half is np.float16 else np.uint16
    cuts = [np.s_[:, :, :, :, :], np.s_[:, 1:, ::2, :, 3:], np.s_[0, :, :, 1:3, ::3], np.s_[:, 0, :, 0, :]]
    cuts += [np.s_[0, 0, 0, :, 1:2], np.s_[0, 0, 0, 0, 5], np.s_[:, 1:, ::2, :3, 4:], np.s_[:, ::2, :, 1, :36]]
    for cut in cuts:
        for turned in (False, True):
            view, expected = on_device(x)[cut], x[cut].astype(half)
            if turned:
                view, expected = view.transpose(*reversed(range(view.ndim))), expected.T
            target = standin.zeros((*expected.shape, 2), stored)[..., 0]
            convert(view, target)
            np.testing.assert_array_equal(arrays.to_host(target).view(half), expected)
            if expected.ndim:
                wide = standin.zeros((*expected.shape[:-1], expected.shape[-1] + 8), stored)
                convert(view, wide[..., 4:-4])
                found = arrays.to_host(wide).view(half)
                np.testing.assert_array_equal(found[..., 4:-4], expected)
                assert not found[..., :4].any() and not found[..., -4:].any()


@pytest.mark.skipif(cuda_on_host.COMPILER is None, reason="no C++ compiler")
def test_heads_among_columns_are_converted_by_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    started = launches(monkeypatch)
    rows = on_device(numbers((2 * 5, 3 * 3 * 8), "float32"))
    heads = rows.reshape(2, 5, 3, 3, 8).transpose(3, 0, 2, 1, 4)
    for first in (0, 1):  # the second is not aligned
        flat = standin.zeros(heads.size + first, np.uint16)[first:]
        convert(heads, flat.reshape(heads.shape))
    assert started == ["convert_packs", "convert_rows"]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("columns", [8, 13])
def test_rows_of_rounded_matrices_begin_where_cublas_reads_fast(half: Any, columns: int) -> None:
    x, matmul = numbers((5, columns), "float32"), DeviceProduct(np.dtype(half))
    for given in (on_device(x), on_device(np.ascontiguousarray(x.T)).T):
        found = matmul.rounded(given)
        assert max(found.strides) % 16 == 0 and min(found.strides) == 2
        np.testing.assert_array_equal(arrays.to_host(found.copy()).view(half), x.astype(half))
        out = standin.zeros((5, 5), np.float32)
        matmul(found, found.T, out=out)
        exact = x.astype(half).astype(np.float64)
        np.testing.assert_allclose(arrays.to_host(out), exact @ exact.T, rtol=1e-6, atol=1e-6)


def test_both_orders_of_threads(environ: Callable[..., None]) -> None:
    x, y = numbers((40, 33), "float32"), standin.zeros((33, 40), np.float32)
    environ(MPISHARD_CUDA_BACKWARDS="1")
    convert(on_device(x).T, y)
    np.testing.assert_array_equal(arrays.to_host(y), x.T)


def test_what_is_not_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"\(2,\) into .*\(3,\)"):
        convert(standin.zeros(2), standin.zeros(3))
    many = standin.zeros((4,) * 6, np.float32)[::2, ::2, ::2, ::2, ::2, ::2]
    if backend_of(many).compiles_cuda:
        with pytest.raises(ValueError, match="5 dimensions .*got 6"):
            convert(many, standin.zeros(many.shape, np.float16))
