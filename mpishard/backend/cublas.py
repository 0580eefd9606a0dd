"""Matrix products of device arrays by cuBLAS, and by cuBLASLt with a bias and GELU in the same kernel (an epilogue).

Both read columns. Rows of C are columns of its transpose, so that ``C = A B`` is computed as ``C' = B' A'``, where the
biases of cuBLASLt have an entry for each column of C.  cuBLAS takes views as they lie in memory, and adds to the output
if asked.  cuBLASLt is called by ``nvmath.bindings.cublasLt`` of the package nvmath-python.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from mpishard.backend import array as arrays
from mpishard.backend.kinds import backend_of
from mpishard.backend.optional_library import OptionalLibrary

Array = Any


# Of CUDA's library_types.h and cublas_api.h.
R_32F, R_64F, R_16F, R_16BF = 0, 1, 2, 14
COMPUTE_32F, COMPUTE_64F, COMPUTE_32F_FAST_TF32 = 68, 70, 77
PLAIN, TRANSPOSED = 0, 1
GEMM_DEFAULT = -1
# Bits of bfloat16 travel as uint16.
TYPES = {
    np.dtype(np.float32): R_32F,
    np.dtype(np.float64): R_64F,
    np.dtype(np.float16): R_16F,
    np.dtype(np.uint16): R_16BF,
}
# Of operands: what the result may be.
RESULTS = {R_32F: {R_32F}, R_64F: {R_64F}, R_16F: {R_16F, R_32F}, R_16BF: {R_16BF, R_32F}}
LARGEST = 2**31 - 1
# cuBLAS reads the factors from the memory of the host, in the type in which it computes.
_FACTORS = {np.dtype(kind): np.array([0, 1], kind) for kind in (np.float32, np.float64)}


class _Layout(NamedTuple):
    """The layout of a matrix: by rows or by columns, and the number of elements from one to the next."""

    by_columns: bool
    leading: int


class _Matrix(NamedTuple):
    """An array without its address; matrices of batches, or a vector."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    def as_rows(self) -> _Matrix:
        """A vector as a matrix of one row."""
        if len(self.shape) > 1:
            return self
        return _Matrix((1, *self.shape), (self.shape[0] * self.strides[0], *self.strides), self.dtype)

    def transposed(self) -> _Matrix:
        shape, strides = ((*each[:-2], each[-1], each[-2]) for each in (self.shape, self.strides))
        return _Matrix(shape, strides, self.dtype)


class _Product(NamedTuple):
    """A call of cuBLAS: its arguments, and where the address of which operand comes, with an offset in bytes."""

    routine: str
    arguments: list[int]
    operands: tuple[tuple[int, int, int], ...]


# By how operands and result lie: a training multiplies the same shapes in every step.
_products_of: dict[Any, tuple[_Product, ...]] = {}
MOST_PRODUCTS = 10_000


def multiply(a: Array, b: Array, out: Array, accumulate: bool = False) -> Array:
    """``out = a b``, or ``out += a b``, summed in float32 (float64 for float64), queued on the current stream.

    Shapes are (..., m, k) or (k,), (..., k, n) and (..., m, n) or (n,). Operands, of one dtype, may be float16 or bits
    of bfloat16 (uint16), for which `out` may be float32; what BLAS cannot read as it lies is copied first. Products of
    float32 are rounded to TF32 only if the environment variable ``CUPY_TF32`` is 1, as CuPy's are.

    Raises TypeError for dtypes, ValueError for shapes that do not go together, or for a size of 2^31 or more.
    """
    one, other, result = [_Matrix(each.shape, each.strides, each.dtype) for each in (a, b, out)]
    key = one, other, result, accumulate, _tf32()
    products = _products_of.get(key)
    if products is None:
        _check(a, b, out)
        if out.size and not a.shape[-1]:
            if not accumulate:
                out[...] = 0
            return out
        if out.size and not (_is_readable(one) and _is_readable(other) and _is_writable(result)):
            return _multiply_copies(a, b, out, accumulate)
        if len(_products_of) >= MOST_PRODUCTS:
            _products_of.clear()
        products = _products_of[key] = _products(one, other, result, accumulate) if out.size else ()
    if products:
        backend = backend_of(out)
        addresses = backend.address(a), backend.address(b), backend.address(out)
        for routine, arguments, operands in products:
            filled = list(arguments)
            for position, operand, offset in operands:
                filled[position] = addresses[operand] + offset
            backend.cublas(out, routine, *filled)
    return out


def _check(a: Array, b: Array, out: Array) -> None:
    if not (a.dtype == b.dtype and a.dtype in TYPES and TYPES.get(out.dtype) in RESULTS[TYPES[a.dtype]]):
        raise TypeError(
            f"cuBLAS multiplies float16, bits of bfloat16 (uint16), float32 or float64, both the same, into that or, "
            f"from half precision, float32; got {a.dtype} times {b.dtype} into {out.dtype}"
        )
    fits = a.ndim >= 1 and b.ndim == max(2, a.ndim) and a.shape[-1] == b.shape[-2]
    if not fits or out.shape != (*a.shape[:-1], b.shape[-1]) or a.shape[:-2] != b.shape[:-2]:
        raise ValueError(f"cannot multiply shapes {a.shape} and {b.shape} into {out.shape}")


def _is_readable(matrix: _Matrix) -> bool:
    """Return True if BLAS can read it as it lies."""
    return _layout(matrix.as_rows()) is not None and all(stride >= 0 for stride in matrix.strides)


def _is_writable(out: _Matrix) -> bool:
    """Return True if BLAS can write it as it lies."""
    once = all(step > 0 or extent < 2 for step, extent in zip(out.strides, out.shape, strict=True))
    return once and _layout(out.as_rows()) is not None


def _multiply_copies(a: Array, b: Array, out: Array, accumulate: bool) -> Array:
    """With copies of what BLAS cannot read or write as it lies."""
    a, b = (each if _is_readable(_Matrix(each.shape, each.strides, each.dtype)) else each.copy() for each in (a, b))
    if _is_writable(_Matrix(out.shape, out.strides, out.dtype)):
        return multiply(a, b, out, accumulate)
    whole = arrays.empty(out.shape, out.dtype, like=out)
    multiply(a, b, whole)
    if accumulate:
        out += whole
    else:
        out[...] = whole
    return out


def _products(a: _Matrix, b: _Matrix, out: _Matrix, accumulate: bool) -> tuple[_Product, ...]:
    """The calls of cuBLAS for matrices that lie so."""
    a, out = a.as_rows(), out.as_rows()
    first, second = 0, 1
    if _known_layout(out).by_columns:
        a, b, out = (each.transposed() for each in (b, a, out))
        first, second = 1, 0
    compute, (zero, one) = _computed_in(a.dtype)
    left, right, result = (_known_layout(each) for each in (b, a, out))
    m, n, k = out.shape[-1], out.shape[-2], a.shape[-1]
    _check_sizes(out, m, n, k, left.leading, right.leading, result.leading)
    shape = TRANSPOSED if left.by_columns else PLAIN, TRANSPOSED if right.by_columns else PLAIN, m, n, k
    products = []
    for count, steps, places in _batches(b, a, out):
        _check_sizes(out, count)
        routine = "gemmEx" if count == 1 else "gemmStridedBatchedEx"
        arguments: list[int] = [*shape, one]
        operands = []
        for each, layout, step, place, number in zip(
            (b, a, out), (left, right, result), steps, places, (second, first, 2), strict=True
        ):
            if number == 2:
                arguments.append(one if accumulate else zero)
            operands.append((len(arguments), number, place * each.itemsize))
            arguments += [0, TYPES[each.dtype], layout.leading]
            if count > 1:
                arguments.append(step)
        arguments += [compute, GEMM_DEFAULT] if count == 1 else [count, compute, GEMM_DEFAULT]
        products.append(_Product(routine, arguments, tuple(operands)))
    return tuple(products)


def _layout(matrix: _Matrix) -> _Layout | None:
    """The layout of the last two dimensions in memory; None if BLAS cannot read them so."""
    (rows, columns), (row, column) = matrix.shape[-2:], matrix.strides[-2:]
    if row % matrix.itemsize or column % matrix.itemsize:
        return None
    row, column = row // matrix.itemsize, column // matrix.itemsize
    if (column == 1 or columns == 1) and (row >= columns or rows == 1):
        return _Layout(False, row if rows > 1 else columns)
    if (row == 1 or rows == 1) and (column >= rows or columns == 1):
        return _Layout(True, column if columns > 1 else rows)
    return None


def _known_layout(matrix: _Matrix) -> _Layout:
    layout = _layout(matrix)
    assert layout is not None
    return layout


def _check_sizes(out: _Matrix, *sizes: int) -> None:
    if max(sizes) > LARGEST:
        raise ValueError(
            f"cuBLAS takes sizes and leading dimensions up to {LARGEST}, but the product of shape {out.shape} has "
            f"{max(sizes)}; use smaller micro-batches, or more tensor ranks"
        )


def _batches(*operands: _Matrix) -> Iterator[tuple[int, list[int], list[int]]]:
    """Runs of matrices with one step from each to the next: how many, steps, and first places, in elements."""
    extents = list(operands[0].shape[:-2])
    strides = [[each.strides[dim] // each.itemsize for each in operands] for dim in range(len(extents))]
    count, steps = 1, [0] * len(operands)
    while extents:
        if extents[-1] == 1:
            pass
        elif count == 1:
            count, steps = extents[-1], strides[-1]
        elif strides[-1] == [step * count for step in steps]:
            count *= extents[-1]
        else:
            break
        extents.pop(), strides.pop()
    for index in itertools.product(*map(range, extents)):
        places = [0] * len(operands)
        for i, stride in zip(index, strides, strict=True):
            places = [place + i * step for place, step in zip(places, stride, strict=True)]
        yield count, steps, places


def _computed_in(dtype: np.dtype) -> tuple[int, tuple[int, int]]:
    """The type in which cuBLAS adds up, and the addresses of 0 and 1 in it."""
    factors = _FACTORS[np.dtype(np.float64 if dtype == np.float64 else np.float32)]
    address = factors.ctypes.data
    where = address, address + factors.itemsize
    if dtype == np.float64:
        return COMPUTE_64F, where
    return (COMPUTE_32F_FAST_TF32 if dtype == np.float32 and _tf32() else COMPUTE_32F), where


@functools.cache
def _tf32() -> bool:
    return os.environ.get("CUPY_TF32") == "1"


# cuBLASLt.

# Of extents that are leading dimensions: that of the pre-activation by the rules of cuBLASLt, all for tensor cores.
MULTIPLE = 8
# Bytes; memory of the device's pools begins at multiples of more.
ALIGNMENT = 16
# What cuBLAS takes itself on GPUs of compute capability 9.
MOST_WORKSPACE_BYTES = 32 << 20
# Micro-batches of ever other lengths are left to plain products.
MOST_SHAPES = 256
# Read from the memory of the host.
_ZERO_AND_ONE = np.array([0, 1], np.float32)


class FeedForwardShape(NamedTuple):
    """Of the product: rows, their channels, channels that GELU is applied to."""

    rows: int
    width: int
    inner: int


class CublasLt:
    """Products with the epilogue on one device, for one thread.

    All arrays are C-contiguous, in one half precision: float16, or uint16 for the bits of bfloat16. Sums are float32.
    """

    def __init__(self, lt: Any, like: Array) -> None:
        self._lt = lt
        with backend_of(like).on_device_of(like):
            self._handle = lt.create()
        self._plans: dict[tuple[FeedForwardShape, np.dtype], _Plan] = {}
        self.usable = True  # until it refuses a shape

    def takes(self, shape: FeedForwardShape, half: np.dtype, like: Array) -> bool:
        """Return True if cuBLASLt has a kernel for a shape, which is then chosen."""
        aligned = shape.width % MULTIPLE == 0 == shape.inner % MULTIPLE
        if not self.usable or not aligned or min(shape) < 1 or max(shape) > LARGEST:
            return False
        key = shape, half
        if key not in self._plans and len(self._plans) < MOST_SHAPES:
            try:
                with backend_of(like).on_device_of(like):
                    self._plans[key] = _Plan(self._lt, self._handle, shape, half)
            except Exception as error:  # of several classes, some of them nvmath's own
                self.usable = False
                LIBRARY.warn_once(f"cuBLASLt has no kernel with the epilogue for {shape} in {half} ({error})")
        return key in self._plans

    def forward(self, x_nc: Array, weight_cd: Array, bias_d: Array, before_nd: Array, y_nd: Array) -> None:
        """``before = x W + bias`` and ``y = GELU(before)``, of a shape that `takes` was asked for."""
        plan = self._plans[FeedForwardShape(len(x_nc), x_nc.shape[1], y_nd.shape[1]), y_nd.dtype]
        plan.execute(weight_cd, x_nc, bias_d, before_nd, y_nd)


class _Plan:
    """A product with its kernel: ``D' = W' X'`` for columns, where D has the rows of X."""

    def __init__(self, lt: Any, handle: int, shape: FeedForwardShape, half: np.dtype) -> None:
        self._lt, self._handle = lt, handle
        rows, width, inner = shape
        self._weight = lt.matrix_layout_create(TYPES[half], inner, width, inner)
        self._rows = lt.matrix_layout_create(TYPES[half], width, rows, width)
        self._result = lt.matrix_layout_create(TYPES[half], inner, rows, inner)
        self._product = lt.matmul_desc_create(COMPUTE_32F, R_32F)
        kinds = lt.MatmulDescAttribute
        self._set(kinds.EPILOGUE, lt.Epilogue.GELU_AUX_BIAS)
        self._set(kinds.EPILOGUE_AUX_LD, inner)
        # Kernels are chosen by how these are aligned; the addresses come with the product.
        self._set(kinds.BIAS_POINTER, ALIGNMENT)
        self._set(kinds.EPILOGUE_AUX_POINTER, ALIGNMENT)
        self._kernel = self._choose()

    def _set(self, attribute: int, value: int) -> None:
        held = np.array(value, self._lt.get_matmul_desc_attribute_dtype(attribute))
        self._lt.matmul_desc_set_attribute(self._product, attribute, held.ctypes.data, held.nbytes)

    def _choose(self) -> Any:
        """The kernel that cuBLASLt holds for the fastest; its memory begins with what `matmul` takes of it."""
        lt = self._lt
        preference = lt.matmul_preference_create()
        kinds = lt.MatmulPreferenceAttribute
        limits = {kinds.MAX_WORKSPACE_BYTES: MOST_WORKSPACE_BYTES}
        limits |= {getattr(kinds, f"MIN_ALIGNMENT_{operand}_BYTES"): ALIGNMENT for operand in "ABCD"}
        for attribute, value in limits.items():
            held = np.array(value, lt.get_matmul_preference_attribute_dtype(attribute))
            lt.matmul_preference_set_attribute(preference, attribute, held.ctypes.data, held.nbytes)
        found, count = lt.MatmulHeuristicResult(), np.zeros(1, np.int32)
        layouts = self._weight, self._rows, self._result, self._result
        try:
            lt.matmul_algo_get_heuristic(
                self._handle, self._product, *layouts, preference, 1, found.ptr, count.ctypes.data
            )
        finally:
            lt.matmul_preference_destroy(preference)
        if count[0] < 1 or found.state:
            raise RuntimeError("it finds none")
        return found

    def execute(self, weight: Array, rows: Array, bias: Array, before: Array, result: Array) -> None:
        """Queue it on the current stream."""
        backend = backend_of(result)
        operands = weight, rows, result, bias, before
        assert all(each.flags.c_contiguous and each.dtype == result.dtype for each in operands)
        a, b, d, *vectors = (backend.address(each) for each in operands)
        assert not any(address % ALIGNMENT for address in (a, b, d, *vectors))
        workspace = arrays.empty(max(1, int(self._kernel.workspace_size)), np.uint8, like=result)
        kinds = self._lt.MatmulDescAttribute
        for attribute, address in zip((kinds.BIAS_POINTER, kinds.EPILOGUE_AUX_POINTER), vectors, strict=True):
            self._set(attribute, address)
        zero = _ZERO_AND_ONE.ctypes.data
        with backend.on_device_of(result):
            self._lt.matmul(
                self._handle, self._product, zero + _ZERO_AND_ONE.itemsize, a, self._weight, b, self._rows,
                zero, d, self._result, d, self._result, self._kernel.ptr,
                backend.address(workspace), workspace.nbytes, backend.current_stream(result).ptr,
            )  # fmt: skip


LIBRARY = OptionalLibrary(
    title="cuBLASLt",
    package="nvmath-python",
    module="nvmath.bindings.cublasLt",
    variable="MPISHARD_EPILOGUES",
    instead="bias and GELU are computed after the product, by kernels of their own",
    # Descriptions of products are written to at every call, so that threads cannot share them.
    start=CublasLt,
)


def cublaslt_on_device(like: Array) -> CublasLt | None:
    """cuBLASLt of this thread for the device of `like`; None where it is not installed, not wanted, or has failed.

    It is the same at every call, until it fails. The environment variable ``MPISHARD_EPILOGUES`` turns it off if it is
    0.
    """
    found = LIBRARY.on_device(like) if backend_of(like).has_cublas else None
    return found if found is not None and found.usable else None
