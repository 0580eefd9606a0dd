"""Matrix products by other libraries than NumPy's: which is chosen, and that each gives the product."""

from __future__ import annotations

import ctypes
import multiprocessing
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpishard.backend import gemm
from mpishard.backend.gemm import choice, libraries
from mpishard.backend.gemm.choice import Choice
from mpishard.backend.gemm.libraries import BATCHED, MKL, NUMPY, ONEDNN, PLAIN, SCORES, TRANSPOSED, product_of

REAL = sorted(libraries.installed())


class Recorder:
    """Multiplies by NumPy, as a library that is told addresses."""

    version = "1.0"

    def __init__(self) -> None:
        self.products = []

    def call(self, product):
        self.products.append(product)

        def view(address, rows, columns, operand, kind):
            size = np.dtype(kind).itemsize
            strides = (1, operand.leading) if operand.transposed else (operand.leading, 1)
            strides = (operand.batch, *strides) if product.count else strides
            shape = (product.count, rows, columns) if product.count else (rows, columns)
            end = 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
            memory = np.frombuffer((ctypes.c_char * (end * size)).from_address(address), kind)
            return np.lib.stride_tricks.as_strided(memory, shape, [stride * size for stride in strides])

        def multiply(a, b, out):
            one = view(a, product.m, product.k, product.a, product.dtype)
            other = view(b, product.k, product.n, product.b, product.dtype)
            np.matmul(one, other, out=view(out, product.m, product.n, product.out, product.dtype))

        return multiply


@pytest.fixture(autouse=True)
def choice_of_before():
    before = choice.active()
    choice.activate(Choice())
    yield
    choice.activate(before)


def placed(shape, dtype, random, *, transposed=False, interleaved=False, pad=0, shift=0):
    """Random numbers in an array of that shape, which is a slice of another one."""
    *batch, rows, columns = shape
    inner = [columns, rows] if transposed else [rows, columns]
    outer = [inner[0], *batch, inner[1] + pad] if interleaved else [*batch, inner[0], inner[1] + pad]
    memory = np.empty(int(np.prod(outer)) + shift, dtype)[shift:].reshape(outer)
    array = np.moveaxis(memory, 0, -2) if interleaved else memory
    array = array[..., : inner[1]]
    array = array.swapaxes(-1, -2) if transposed else array
    array[...] = random.standard_normal(shape)
    return array


PLACES = st.fixed_dictionaries(
    {"transposed": st.booleans(), "interleaved": st.booleans(), "pad": st.integers(0, 9), "shift": st.integers(0, 17)}
)
SIZES = st.integers(1, 70)
PRODUCTS = dict(dtype=st.sampled_from([np.float32, np.float64]), count=st.integers(0, 5))
PRODUCTS |= dict(m=SIZES, k=SIZES, n=SIZES, a=PLACES, b=PLACES, out=PLACES)


def operands(random, dtype, count, m, k, n, a, b, out):
    """Two operands and the array of their product, each where it is asked for."""
    batch = (count,) if count else ()
    one, other = placed((*batch, m, k), dtype, random, **a), placed((*batch, k, n), dtype, random, **b)
    return one, other, placed((*batch, m, n), dtype, random, **{**out, "transposed": False})


def addresses(*arrays):
    return [array.ctypes.data for array in arrays]


@settings(max_examples=60, deadline=None)
@given(**PRODUCTS, threads=st.integers(1, 4))
def test_parts_of_a_product_are_the_product_wherever_the_arrays_lie(threads, **drawn):
    one, other, result = operands(np.random.default_rng(0), **drawn)
    product = product_of(one, other, result)
    assert product is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemm, "_LARGE", 1)
        gemm.callable_for(product, Recorder(), threads)(*addresses(one, other, result))
    np.testing.assert_allclose(result, one @ other, rtol=1e-4, atol=1e-4)


def test_large_products_are_cut_into_as_many_parts_as_threads():
    a, b = np.ones((1024, 1024), np.float32), np.ones((1024, 1024), np.float32)
    library = Recorder()
    gemm.callable_for(product_of(a, b, np.empty_like(a)), library, 3)
    assert [part.m for part in library.products] == [342, 342, 340]


@pytest.mark.parametrize(
    ("shapes", "kind"),
    [(((64, 64), (64, 64)), PLAIN), (((3, 64, 64), (3, 64, 64)), BATCHED), (((3, 64, 63), (3, 63, 64)), SCORES)],
)
def test_kinds(shapes, kind):
    a, b = (np.ones(shape, np.float32) for shape in shapes)
    assert product_of(a, b, a @ b).kind == kind
    if kind == PLAIN:
        assert product_of(a.T, b, a.T @ b).kind == TRANSPOSED


@pytest.mark.parametrize(
    ("a", "b", "out"),
    [
        (np.ones(3, np.float32), np.ones((3, 4), np.float32), np.ones(4, np.float32)),
        (np.ones((2, 3), np.float32), np.ones((3, 4)), np.ones((2, 4))),
        (np.ones((2, 0), np.float32), np.ones((0, 4), np.float32), np.ones((2, 4), np.float32)),
        (np.ones((4, 6), np.float32)[:, ::2], np.ones((3, 4), np.float32), np.ones((4, 4), np.float32)),
        (np.ones((4, 3), np.float32)[::-1], np.ones((3, 4), np.float32), np.ones((4, 4), np.float32)),
        (np.ones((4, 3), np.float32), np.ones((3, 4), np.float32), np.ones((4, 4), np.float32).T),
        (np.ones((2, 4, 3), np.float32), np.ones((1, 3, 4), np.float32), np.ones((2, 4, 4), np.float32)),
        (np.ones((4, 3), np.int64), np.ones((3, 4), np.int64), np.ones((4, 4), np.int64)),
    ],
)
def test_numpy_multiplies_what_no_library_takes(a, b, out):
    assert product_of(a, b, out) is None
    choice.activate(Choice.parse(MKL))
    np.testing.assert_array_equal(gemm.matmul(a, b, out), np.matmul(a, b))


def test_a_choice_is_what_its_text_tells():
    text = "bfloat16.plain=onednn,float32.plain=mkl,float64.scores=mkl"
    assert str(Choice.parse(text)) == text
    assert Choice.parse(text.replace(",", " , ")) == Choice.parse(text + ",float32.batched=numpy")
    assert str(Choice.parse(NUMPY)) == str(Choice()) == NUMPY
    assert len(Choice.parse(MKL).libraries) == 10
    assert str(Choice.parse(MKL)) == "bfloat16=mkl,float32=mkl,float64=mkl"
    assert Choice.parse(str(Choice.parse(MKL))) == Choice.parse(MKL)
    assert set(Choice.parse(ONEDNN).libraries) == {"bfloat16.plain", "bfloat16.transposed"}
    assert str(Choice.parse(text).limited_to([MKL])) == "float32.plain=mkl,float64.scores=mkl"
    assert "bfloat16" not in str(Choice.parse(MKL).limited_to([MKL], bfloat16=False))
    assert Choice.parse(ONEDNN).has_bfloat16 and not Choice.parse("bfloat16.plain=onednn").has_bfloat16


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fast", "no library 'fast'; .*onednn"),
        ("float32.plain=mkl,float32.plain=numpy", "named twice"),
        ("float32.plain=fast", "no library 'fast'"),
        ("float16.plain=mkl", "'float16.plain' .*bfloat16, "),
        ("float32=mkl,float32.plain=mkl", "named twice"),
        ("float16=mkl", "'float16' .*bfloat16.plain"),
        ("float32.plain=onednn", "onednn .*bfloat16"),
        ("=", "'' is none of"),
    ],
)
def test_a_text_that_is_no_choice_is_refused(text, message):
    with pytest.raises(ValueError, match=f"MPISHARD_PRODUCTS={text}: .*{message}"):
        Choice.parse(text)


@pytest.mark.parametrize(
    ("installed", "intel", "bfloat16", "expected"),
    [
        ([MKL], True, False, "float32=mkl,float64=mkl"),
        ([MKL], True, True, "bfloat16=mkl,float32=mkl,float64=mkl"),
        ([MKL, ONEDNN], True, True, "bfloat16=onednn,float32=mkl,float64=mkl"),
        ([MKL, ONEDNN], False, True, "bfloat16=onednn"),
        ([MKL, ONEDNN], False, False, NUMPY),
        ([], True, True, NUMPY),
    ],
)
def test_what_is_faster_on_the_processor_is_taken(installed, intel, bfloat16, expected):
    offer = libraries.Offer(dict.fromkeys(installed, "1.0"), intel, bfloat16)
    assert str(choice.fastest_of(offer)) == expected


def test_a_file_that_is_no_library_is_told_and_not_taken(monkeypatch, tmp_path):
    (tmp_path / "libmkl_rt.so.3").write_text("no library")
    for cached in (libraries.installed, libraries.load, libraries.loadable):
        monkeypatch.setattr(libraries, cached.__name__, cached.__wrapped__)
    monkeypatch.setattr(libraries, "installed", lambda: {MKL: tmp_path / "libmkl_rt.so.3"})
    with pytest.warns(UserWarning, match=r"libmkl_rt\.so\.3"):
        assert libraries.loadable() == {}


def test_an_installation_by_other_means_is_found_by_its_variable(environ, monkeypatch, tmp_path):
    (tmp_path / "lib").mkdir()
    library = tmp_path / "lib" / "libdnnl.so.3"
    library.touch()
    for folder in ("prefix", "base_prefix"):
        monkeypatch.setattr(libraries.sys, folder, str(tmp_path / "none"))
    monkeypatch.setattr(libraries.site, "getuserbase", lambda: str(tmp_path / "none"))
    assert libraries.installed.__wrapped__() == {}
    environ(DNNLROOT=str(tmp_path))
    assert libraries.installed.__wrapped__() == {ONEDNN: library}


# -- the libraries themselves -----------------------------------------------------------------------------------------

FLOATS = [name for name in REAL if name == MKL]


def halves(array):
    """The bits of an array as bfloat16, in the same order of memory."""
    return array.astype(ml_dtypes.bfloat16).view(np.uint16)


@pytest.mark.parametrize("name", FLOATS)
@settings(max_examples=60, deadline=None)
@given(**PRODUCTS)
def test_a_library_gives_the_product_wherever_the_arrays_lie(name, dtype, k, **drawn):
    one, other, result = operands(np.random.default_rng(1), dtype, k=k, **drawn)
    libraries.load(name).call(product_of(one, other, result))(*addresses(one, other, result))
    exact = one.astype(np.float64) @ other.astype(np.float64)
    bound = np.abs(one).astype(np.float64) @ np.abs(other)
    assert np.all(np.abs(result - exact) <= 4 * np.finfo(dtype).eps * (k + 1) * bound)


@pytest.mark.parametrize("name", REAL)
@settings(max_examples=40, deadline=None)
@given(m=SIZES, k=SIZES, n=SIZES, a=PLACES, b=PLACES, out=PLACES)
def test_a_library_sums_products_of_bfloat16_in_float32(name, m, k, n, a, b, out):
    if not libraries.multiplies_bfloat16():
        pytest.skip("this processor has no products of bfloat16")
    places = ({**each, "interleaved": False} for each in (a, b, out))
    one, other, result = operands(np.random.default_rng(2), np.float32, 0, m, k, n, *places)
    one, other = halves(one), halves(other)
    libraries.load(name).call(product_of(one, other, result))(*addresses(one, other, result))
    one, other = (gemm.widened(each).astype(np.float64) for each in (one, other))
    bound = np.abs(one) @ np.abs(other)
    assert np.all(np.abs(result - one @ other) <= 4 * np.finfo(np.float32).eps * (k + 1) * bound)


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(2048, 256, 768), (96, 192, 32), (100, 96, 33), (33, 1024, 257), (200, 48, 24)])
def test_the_bits_do_not_depend_on_where_the_arrays_lie(name, transposed, shape):
    m, k, n = shape
    choice.activate(Choice.parse(name))
    dtypes = [dtype for dtype in libraries.TAKES[name] if dtype != "bfloat16" or libraries.multiplies_bfloat16()]
    for dtype in dtypes:
        found = set()
        for pad, shift in ((0, 0), (0, 1), (0, 3), (64, 0), (7, 5), (33, 2)):
            random = np.random.default_rng(3)
            kind = np.float32 if dtype == "bfloat16" else np.dtype(dtype)
            place = {"transposed": transposed, "pad": pad, "shift": shift}
            one, other = placed((m, k), kind, random, **place), placed((k, n), kind, random, pad=2 * pad, shift=shift)
            result = placed((m, n), kind, random, pad=pad, shift=shift)
            if dtype == "bfloat16":  # its operands are rounded copies, which are contiguous
                one, other = (shifted(halves(each), shift) for each in (one, other))
            multiply = gemm.matmul_bfloat16 if dtype == "bfloat16" else gemm.matmul
            found.add(multiply(one, other, result).tobytes())
        assert len(found) == 1


def shifted(array, shift):
    """A contiguous copy of an array, of its order, that begins so many elements after the beginning of memory."""
    order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    copy = np.empty(array.size + shift, array.dtype)[shift:].reshape(array.shape, order=order)
    copy[...] = array
    return copy


@pytest.mark.parametrize("name", FLOATS)
def test_layers_multiply_by_the_library_that_was_chosen(name, monkeypatch):
    choice.activate(Choice.parse(name))
    library, asked = libraries.load(name), []
    call = library.call
    monkeypatch.setattr(library, "call", lambda product: asked.append(product.kind) or call(product))
    a, b = np.ones((64, 96), np.float32), np.ones((96, 128), np.float32)
    out = np.empty((64, 128), np.float32)
    assert gemm.matmul(a, b, out) is out and np.all(out == 96)
    gemm.matmul(a, b, out)
    assert asked == [PLAIN]
    assert gemm.matmul(a[:3], b, out[:3]) is not None and asked == [PLAIN]


@pytest.mark.parametrize("name", REAL)
def test_several_threads_multiply_parts(name):
    random = np.random.default_rng(4)
    for dtype in libraries.TAKES[name]:
        if dtype == "bfloat16" and not libraries.multiplies_bfloat16():
            continue
        kind = np.float64 if dtype == "float64" else np.float32
        a, b = random.standard_normal((2, 512, 512)).astype(kind)
        out = np.empty((512, 512), a.dtype)
        one, other = (halves(each) if dtype == "bfloat16" else each for each in (a, b))
        call = gemm.callable_for(product_of(one, other, out), libraries.load(name), 3, large=1)
        exact = (gemm.widened(one) @ gemm.widened(other)) if dtype == "bfloat16" else a @ b
        for _ in range(5):  # parts and threads meet in any way
            out.fill(0)
            call(*addresses(one, other, out))
            np.testing.assert_allclose(out, exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["NumPy by addresses", *FLOATS])
def test_a_forked_process_has_threads_of_its_own(name):
    """Those of its parent are not there, and are not waited for when it ends."""
    library = libraries.load(name) if name in FLOATS else Recorder()
    a, b = np.random.default_rng(4).standard_normal((2, 512, 512)).astype(np.float32)
    expected = np.empty((512, 512), np.float32)
    call = gemm.callable_for(product_of(a, b, expected), library, 3, large=1)
    call(*addresses(a, b, expected))

    def multiply():
        out = np.empty_like(expected)
        call(*addresses(a, b, out))
        assert np.array_equal(out, expected)

    child = multiprocessing.get_context("fork").Process(target=multiply)
    child.start()
    child.join(60)
    if child.exitcode is None:
        child.kill()
    assert child.exitcode == 0
    multiply()  # the parent still has its own


@pytest.mark.parametrize("name", REAL)
def test_the_threads_of_openmp_are_as_before_after_a_product(name):
    if not libraries.multiplies_bfloat16():
        pytest.skip("this processor has no products of bfloat16")
    openmp = pytest.importorskip("threadpoolctl").threadpool_info
    libraries.load(name)
    before = [pool["num_threads"] for pool in openmp() if pool["user_api"] == "openmp"]
    choice.activate(Choice.parse(name))
    a = halves(np.ones((64, 64), np.float32))
    out = np.empty((64, 64), np.float32)
    assert np.all(gemm.matmul_bfloat16(a, a, out) == 64)
    assert [pool["num_threads"] for pool in openmp() if pool["user_api"] == "openmp"] == before


def test_no_path_of_a_library_is_asked_for_before_a_mesh_is_made(monkeypatch):
    monkeypatch.setattr(libraries, "load", lambda name: pytest.fail(f"{name} was loaded"))
    a = np.ones((256, 256), np.float32)
    assert np.all(gemm.matmul(a, a, np.empty_like(a)) == 256)
    assert Path(libraries.__file__).exists()
