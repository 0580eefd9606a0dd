"""Intel's Math Kernel Library, through the C interface of its BLAS."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_float, c_int, c_int64, c_void_p
from pathlib import Path

from mpishard.backend.products.shapes import Call, Product

_ROW_MAJOR, _AS_IT_IS, _TRANSPOSED = 101, 111, 112
_SEQUENTIAL = 1
# The kernels of the processor at hand, whose results do not depend on where operands lie.
_AUTO, _STRICT = 2, 0x10000


class Mkl:
    """MKL, for float32, float64 and bfloat16; `path` is that of ``libmkl_rt``.

    It is loaded without a pool of threads, so that no OpenMP comes with it.
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        if library.MKL_Set_Threading_Layer(_SEQUENTIAL) != _SEQUENTIAL:
            raise OSError("it is in use already, with threads of its own")
        if status := library.MKL_CBWR_Set(_AUTO | _STRICT):
            raise OSError(
                f"it is in use already, or does not give results that depend on sizes alone on this processor: "
                f"MKL_CBWR_Set returned {status}"
            )
        text = ctypes.create_string_buffer(256)
        library.MKL_Get_Version_String(text, len(text))
        words = text.value.decode(errors="replace").split()
        self.version: str = words[words.index("Version") + 1] if "Version" in words[:-1] else "unknown"
        self._of_matrices = {
            "float32": _gemm(library.cblas_sgemm_64, c_float),
            "float64": _gemm(library.cblas_dgemm_64, c_double),
            "bfloat16": _gemm(library.cblas_gemm_bf16bf16f32_64, c_float),
        }
        self._of_batches = {
            "float32": _gemm(library.cblas_sgemm_batch_strided_64, c_float, batched=True),
            "float64": _gemm(library.cblas_dgemm_batch_strided_64, c_double, batched=True),
        }

    def call(self, product: Product) -> Call | None:
        a, b, out = product.a, product.b, product.out
        before = (
            _ROW_MAJOR,
            _TRANSPOSED if a.transposed else _AS_IT_IS,
            _TRANSPOSED if b.transposed else _AS_IT_IS,
            product.m,
            product.n,
            product.k,
            1.0,
        )
        if not product.count:
            gemm = self._of_matrices[product.dtype]
            return lambda one, other, result: gemm(*before, one, a.leading, other, b.leading, 0.0, result, out.leading)
        # In one call where each result ends before the next begins, else MKL refuses it.
        if product.dtype in self._of_batches and out.batch >= product.m * out.leading:
            gemm = self._of_batches[product.dtype]
            first, second = (a.leading, a.batch), (b.leading, b.batch)
            third = (out.leading, out.batch, product.count)
            return lambda one, other, result: gemm(*before, one, *first, other, *second, 0.0, result, *third)
        gemm, (bytes_in, bytes_out) = self._of_matrices[product.dtype], product.bytes

        def each(one: int, other: int, result: int) -> None:
            for index in range(product.count):
                first, second = one + index * a.batch * bytes_in, other + index * b.batch * bytes_in
                third = result + index * out.batch * bytes_out
                gemm(*before, first, a.leading, second, b.leading, 0.0, third, out.leading)

        return each


def _gemm(function: ctypes._NamedFuncPointer, scalar: type, *, batched: bool = False) -> ctypes._NamedFuncPointer:
    """``out = alpha a b + beta out`` with its types; see oneMKL's reference, "cblas_?gemm" and "..._batch_strided"."""
    size = [c_int64] * (2 if batched else 1)
    function.argtypes = [c_int] * 3 + [c_int64] * 3
    function.argtypes += [scalar, c_void_p, *size, c_void_p, *size, scalar, c_void_p, *size]
    if batched:
        function.argtypes += [c_int64]
    function.restype = None
    return function
