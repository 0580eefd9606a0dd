"""Matrix products of device arrays by cuBLAS, of views as they lie in memory, added to what is there if asked.

cuBLAS reads columns.  Rows of C are columns of its transpose, so that ``C = A B`` is computed as ``C' = B' A'``.
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
    """How a matrix lies in memory: by rows or by columns, and how many elements from one to the next."""

    by_columns: bool
    leading: int


def multiply(a: Array, b: Array, out: Array, accumulate: bool = False) -> Array:
    """``out = a b``, or ``out += a b``, summed in float32 (float64 for float64), queued on the current stream.

    Products of float32 are rounded to TF32 only if the environment variable ``CUPY_TF32`` is 1, as CuPy's are.

    Parameters
    ----------
    a : array, shape (..., m, k) or (k,)
        float16, bits of bfloat16 (uint16), float32 or float64.  What BLAS cannot read as it lies is copied first.
    b : array, shape (..., k, n)
        Of the same dtype.
    out : array, shape (..., m, n) or (n,)
        A view or not; of the same dtype, or float32 for operands in half precision.
    accumulate : bool
        Add to what `out` has.

    Returns
    -------
    array
        `out`.

    Raises
    ------
    TypeError
        Dtypes that do not go together.
    ValueError
        Shapes that do not go together, or a size of 2^31 or more.
    """
    _check(a, b, out)
    if a.ndim == 1:
        multiply(a[None, :], b, out[None, :], accumulate)
    elif out.size and not a.shape[-1]:
        if not accumulate:
            out[...] = 0
    elif out.size:
        _multiply(_readable(a), _readable(b), out, accumulate)
    return out


def _check(a: Array, b: Array, out: Array) -> None:
    if not (a.dtype == b.dtype and a.dtype in TYPES and TYPES.get(out.dtype) in RESULTS[TYPES[a.dtype]]):
        raise TypeError(
            f"cuBLAS multiplies float16, bits of bfloat16 (uint16), float32 or float64, both alike, into the same or, "
            f"from half precision, float32; got {a.dtype} times {b.dtype} into {out.dtype}"
        )
    fits = a.ndim >= 1 and b.ndim == max(2, a.ndim) and a.shape[-1] == b.shape[-2]
    if not fits or out.shape != (*a.shape[:-1], b.shape[-1]) or a.shape[:-2] != b.shape[:-2]:
        raise ValueError(f"cannot multiply shapes {a.shape} and {b.shape} into {out.shape}")


def _readable(matrix: Array) -> Array:
    """The operand, or a copy of one that BLAS cannot read."""
    if _layout(matrix) is None or any(stride < 0 for stride in matrix.strides):
        return matrix.copy()
    return matrix


def _multiply(a: Array, b: Array, out: Array, accumulate: bool) -> None:
    layout = _layout(out)
    if layout is None or any(s <= 0 < n - 1 for s, n in zip(out.strides, out.shape, strict=True)):
        whole = arrays.empty(out.shape, out.dtype, like=out)
        _multiply(a, b, whole, False)
        if accumulate:
            out += whole
        else:
            out[...] = whole
        return
    if layout.by_columns:
        a, b, out = (each.swapaxes(-1, -2) for each in (b, a, out))
    queue = backend_of(out).cublas
    compute, (zero, one) = _computed_in(a.dtype)
    left, right, result = (_known_layout(each) for each in (b, a, out))
    m, n, k = out.shape[-1], out.shape[-2], a.shape[-1]
    _check_sizes(out, m, n, k, left.leading, right.leading, result.leading)
    for count, steps, places in _batches(b, a, out):
        _check_sizes(out, count)
        addresses = [
            backend_of(out).address(each) + place * each.itemsize
            for each, place in zip((b, a, out), places, strict=True)
        ]
        operands = [
            (address, TYPES[each.dtype], layout.leading, step)
            for address, each, layout, step in zip(addresses, (b, a, out), (left, right, result), steps, strict=True)
        ]
        one_product = count == 1
        first, second, third = (each[:3] if one_product else each for each in operands)
        shape = TRANSPOSED if left.by_columns else PLAIN, TRANSPOSED if right.by_columns else PLAIN, m, n, k
        product = *shape, one, *first, *second, one if accumulate else zero, *third
        if one_product:
            queue(out, "gemmEx", *product, compute, GEMM_DEFAULT)
        else:
            queue(out, "gemmStridedBatchedEx", *product, count, compute, GEMM_DEFAULT)


def _layout(matrix: Array) -> _Layout | None:
    """How the last two dimensions lie in memory; None if BLAS cannot read them so."""
    (rows, columns), (row, column) = matrix.shape[-2:], matrix.strides[-2:]
    if row % matrix.itemsize or column % matrix.itemsize:
        return None
    row, column = row // matrix.itemsize, column // matrix.itemsize
    if (column == 1 or columns == 1) and (row >= columns or rows == 1):
        return _Layout(False, row if rows > 1 else columns)
    if (row == 1 or rows == 1) and (column >= rows or columns == 1):
        return _Layout(True, column if columns > 1 else rows)
    return None


def _known_layout(matrix: Array) -> _Layout:
    layout = _layout(matrix)
    assert layout is not None
    return layout


def _check_sizes(out: Array, *sizes: int) -> None:
    if max(sizes) > LARGEST:
        raise ValueError(
            f"cuBLAS takes sizes and leading dimensions up to {LARGEST}, but the product of shape {out.shape} has "
            f"{max(sizes)}; use smaller micro-batches, or more tensor ranks"
        )


def _batches(*operands: Array) -> Iterator[tuple[int, list[int], list[int]]]:
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
