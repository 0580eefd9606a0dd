"""oneDNN, through the matrix products of its C interface; for bfloat16 in contiguous arrays.

It cuts sums into blocks by the strides of the arrays: of products of float32 in slices of wider matrices 32 of 240 were
seen to have other bits than in contiguous arrays, of bfloat16 few (version 3.2, an Intel processor with AMX).  A layout
would decide results that way, so float32 is left to other libraries.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

from mpishard.backend.products.shapes import Call, Operand, Product

# Numbers of oneDNN 3: dnnl_types.h and dnnl_common_types.h.
_CPU, _IN_ORDER = 1, 1
_BFLOAT16, _FLOAT32 = 2, 3
_SOURCE, _WEIGHTS, _DESTINATION = 1, 33, 17
_MOST_DIMENSIONS = 12


class _Argument(ctypes.Structure):
    _fields_ = (("index", c_int), ("memory", c_void_p))


class _Version(ctypes.Structure):
    _fields_ = (("major", c_int), ("minor", c_int), ("patch", c_int))


class OneDnn:
    """The library; for bfloat16.

    Parameters
    ----------
    path : Path
        Of ``libdnnl``.
    """

    def __init__(self, path: Path) -> None:
        self._library = library = ctypes.CDLL(str(path))
        library.dnnl_version.restype = ctypes.POINTER(_Version)
        found = library.dnnl_version().contents
        self.version: str = f"{found.major}.{found.minor}.{found.patch}"
        if found.major != 3:
            raise OSError(f"{path} is oneDNN {self.version}, and its C interface is not that of version 3")
        library.dnnl_memory_set_data_handle.argtypes = (c_void_p, c_void_p)
        self._engine, self._stream = c_void_p(), c_void_p()
        self._do("engine_create", byref(self._engine), _CPU, c_size_t(0))
        self._do("stream_create", byref(self._stream), self._engine, _IN_ORDER)
        # It takes threads from OpenMP's pool, unless told for each call that one is enough.
        self._get_threads: Any = getattr(library, "omp_get_max_threads", lambda: 1)
        self._set_threads: Any = getattr(library, "omp_set_num_threads", None)

    def call(self, product: Product) -> Call | None:
        if product.dtype != "bfloat16":
            return None
        m, k, n = product.m, product.k, product.n
        kinds = (
            self._describe(m, k, product.a, _BFLOAT16),
            self._describe(k, n, product.b, _BFLOAT16),
            self._describe(m, n, product.out, _FLOAT32),
        )
        plan, primitive = c_void_p(), c_void_p()
        # Positions: of the bias, there is none; of attributes, these are the defaults.
        self._do("matmul_primitive_desc_create", byref(plan), self._engine, *kinds[:2], None, kinds[2], None)
        self._do("primitive_create", byref(primitive), plan)
        memories = [c_void_p() for _ in kinds]
        for memory, kind in zip(memories, kinds, strict=True):
            self._do("memory_create", byref(memory), kind, self._engine, c_void_p())
        places = (_SOURCE, _WEIGHTS, _DESTINATION)
        arguments = (_Argument * 3)(*(_Argument(place, each) for place, each in zip(places, memories, strict=True)))
        return _Call(self, primitive, memories, arguments)

    def execute(self, primitive: c_void_p, arguments: Any) -> None:
        """Run a primitive in this thread alone.  Not collective."""
        threads = self._get_threads()
        if threads > 1:
            self._set_threads(1)
        try:
            self._do("primitive_execute", primitive, self._stream, len(arguments), arguments)
        finally:
            if threads > 1:
                self._set_threads(threads)

    def _describe(self, rows: int, columns: int, where: Operand, dtype: int) -> c_void_p:
        strides = (1, where.leading) if where.transposed else (where.leading, 1)
        numbers, found = c_int64 * _MOST_DIMENSIONS, c_void_p()
        described = (2, numbers(rows, columns), dtype, numbers(*strides))
        self._do("memory_desc_create_with_strides", byref(found), *described)
        return found

    def _do(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, f"dnnl_{name}")(*arguments)
        if status:
            raise RuntimeError(f"oneDNN {self.version}: dnnl_{name} returned status {status}")


class _Call:
    """A primitive and its memory objects, which are destroyed with it."""

    def __init__(self, owner: OneDnn, primitive: c_void_p, memories: list[c_void_p], arguments: Any) -> None:
        self._owner, self._primitive, self._memories, self._arguments = owner, primitive, memories, arguments

    def __call__(self, *addresses: int) -> None:
        library = self._owner._library
        for memory, address in zip(self._memories, addresses, strict=True):
            library.dnnl_memory_set_data_handle(memory, address)
        self._owner.execute(self._primitive, self._arguments)

    def __del__(self) -> None:
        library = self._owner._library
        for memory in self._memories:
            library.dnnl_memory_destroy(memory)
        library.dnnl_primitive_destroy(self._primitive)
