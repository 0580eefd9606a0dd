"""A double of ``cupy_backends.cuda.libs.cublas``, which reads columns at raw addresses, on the stand-in's stream.

Arguments are checked as CuPy and cuBLAS check them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

HANDLE = 0x7AB1E
DTYPES: dict[int, Any] = {0: np.float32, 1: np.float64, 2: np.float16, 14: ml_dtypes.bfloat16}
# (compute type): its factors, and pairs of types of operands and result.  cublasGemmEx, "supported combinations".
COMBINATIONS = {
    68: (ctypes.c_float, {(2, 2), (2, 0), (14, 14), (14, 0), (0, 0)}),
    77: (ctypes.c_float, {(0, 0)}),
    70: (ctypes.c_double, {(1, 1)}),
}
# What was called: routine, compute type, type of the operands.
calls: list[tuple[str, int, int]] = []


class CUBLASError(RuntimeError):
    pass


def _columns(address: int, kind: int, rows: int, columns: int, leading: int, stride: int, count: int, at: Any) -> Any:
    """Matrices by columns, as the device array (count, rows, columns)."""
    size = np.dtype(DTYPES[kind]).itemsize
    if address % size:
        raise CUBLASError("misaligned address")
    if leading < max(1, rows):
        raise CUBLASError(f"CUBLAS_STATUS_INVALID_VALUE: leading dimension {leading} of {rows} rows")
    return at(address, (count, rows, columns), DTYPES[kind], (stride * size, size, leading * size))


def gemmStridedBatchedEx(
    handle: int, transa: int, transb: int, m: int, n: int, k: int, alpha: int,
    A: int, Atype: int, lda: int, strideA: int, B: int, Btype: int, ldb: int, strideB: int, beta: int,
    C: int, Ctype: int, ldc: int, strideC: int, batchCount: int, computeType: int, algo: int, /,
    *, name: str = "gemmStridedBatchedEx",
) -> None:  # fmt: skip
    from standin import array_at, current_stream

    given = [value for key, value in locals().items() if key not in ("name", "array_at", "current_stream")]
    assert all(type(value) is int for value in given), given
    assert handle == HANDLE and algo == -1 and {transa, transb} <= {0, 1}
    assert all(0 <= value < 2**31 for value in (m, n, k, lda, ldb, ldc, batchCount))
    factor, combinations = COMBINATIONS[computeType]
    if Atype != Btype or (Atype, Ctype) not in combinations:
        raise CUBLASError(f"CUBLAS_STATUS_NOT_SUPPORTED: {Atype} {Btype} {Ctype} {computeType}")
    first, other = factor.from_address(alpha).value, factor.from_address(beta).value
    assert batchCount == 1 or strideC >= (n - 1) * ldc + m or ldc >= (batchCount - 1) * strideC + m, "results overlap"
    calls.append((name, computeType, Atype))
    a = _columns(A, Atype, *((k, m) if transa else (m, k)), lda, strideA, batchCount, array_at)
    b = _columns(B, Btype, *((n, k) if transb else (k, n)), ldb, strideB, batchCount, array_at)
    c = _columns(C, Ctype, m, n, ldc, strideC, batchCount, array_at)
    real: Any = np.float64 if computeType == 70 else np.float32

    def work(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
        with np.errstate(all="ignore"):
            left = a.swapaxes(1, 2) if transa else a
            right = b.swapaxes(1, 2) if transb else b
            product = real(first) * np.matmul(left.astype(real), right.astype(real))
            # Where beta is 0, C is not read.
            c[...] = (product + real(other) * c.astype(real) if other else product).astype(c.dtype)

    current_stream().launch(work, a, b, c)


def gemmEx(
    handle: int, transa: int, transb: int, m: int, n: int, k: int, alpha: int, A: int, Atype: int, lda: int,
    B: int, Btype: int, ldb: int, beta: int, C: int, Ctype: int, ldc: int, computeType: int, algo: int, /,
) -> None:  # fmt: skip
    gemmStridedBatchedEx(
        handle, transa, transb, m, n, k, alpha, A, Atype, lda, 0, B, Btype, ldb, 0, beta, C, Ctype, ldc, 0, 1,
        computeType, algo, name="gemmEx",
    )  # fmt: skip


ROUTINES: dict[str, Callable[..., None]] = {"gemmEx": gemmEx, "gemmStridedBatchedEx": gemmStridedBatchedEx}
