"""oneDNN, through the matrix products of its C interface; for bfloat16 in contiguous arrays.

It cuts sums into blocks by the strides of the arrays: of products of float32 in slices of wider matrices 32 of 240 were
seen to have other bits than in contiguous arrays, of bfloat16 few (version 3.2, an Intel processor with AMX).  A layout
would decide results that way, so float32 is left to other libraries.
"""

from __future__ import annotations

import ctypes
import threading
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
    """oneDNN, for bfloat16; `path` is that of ``libdnnl``."""

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
        # It takes threads from OpenMP's pool, unless each call says that one is enough.
        self._get_threads: Any = getattr(library, "omp_get_max_threads", lambda: 1)
        self._set_threads: Any = getattr(library, "omp_set_num_threads", None)

    def call(self, product: Product) -> Call | None:
        if product.dtype != "bfloat16":
            return None
        found = _Call(self, product)
        try:
            found.prepare()
        except RuntimeError:  # what this processor, or this build, does not do
            return None
        return found

    def create(self, product: Product) -> tuple[c_void_p, list[c_void_p]]:
        """The primitive of a product, for this thread alone, and memory objects without memory for its arrays.

        Raises RuntimeError if the library cannot do it.
        """
        m, k, n = product.m, product.k, product.n
        sides = ((m, k, product.a, _BFLOAT16), (k, n, product.b, _BFLOAT16), (m, n, product.out, _FLOAT32))
        kinds = [self._describe(*side) for side in sides]
        plan, primitive = c_void_p(), c_void_p()
        memories = [c_void_p() for _ in kinds]
        try:
            # None: there is no bias; the attributes are the defaults.
            self._do("matmul_primitive_desc_create", byref(plan), self._engine, *kinds[:2], None, kinds[2], None)
            self._do("primitive_create", byref(primitive), plan)
            for memory, kind in zip(memories, kinds, strict=True):
                self._do("memory_create", byref(memory), kind, self._engine, c_void_p())
        finally:
            for kind in kinds:
                self._do("memory_desc_destroy", kind)
            if plan:
                self._do("primitive_desc_destroy", plan)
        return primitive, memories

    def destroy(self, primitive: c_void_p, memories: list[c_void_p]) -> None:
        """Free what `create` has given."""
        for memory in memories:
            self._do("memory_destroy", memory)
        self._do("primitive_destroy", primitive)

    def point(self, memory: c_void_p, address: int) -> None:
        """Let a memory object be the array at an address."""
        self._library.dnnl_memory_set_data_handle(memory, address)

    def execute(self, primitive: c_void_p, arguments: Any) -> None:
        """Run a primitive in this thread alone."""
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


class _Made:
    """The primitive and memory objects of one thread for a product; destroyed with this object."""

    def __init__(self, owner: OneDnn, product: Product) -> None:
        self._owner = owner
        self.primitive, self.memories = owner.create(product)
        places = (_SOURCE, _WEIGHTS, _DESTINATION)
        pairs = zip(places, self.memories, strict=True)
        self.arguments = (_Argument * 3)(*(_Argument(place, memory) for place, memory in pairs))

    def __del__(self) -> None:
        if hasattr(self, "arguments"):
            self._owner.destroy(self.primitive, self.memories)


class _Call:
    """A product, whose primitive each thread makes for itself: its scratch memory is that of the thread."""

    def __init__(self, owner: OneDnn, product: Product) -> None:
        self._owner, self._product = owner, product
        self._of_thread = threading.local()

    def prepare(self) -> _Made:
        """The objects that this thread needs."""
        made: _Made | None = getattr(self._of_thread, "made", None)
        if made is None:
            made = self._of_thread.made = _Made(self._owner, self._product)
        return made

    def __call__(self, *addresses: int) -> None:
        made = self.prepare()
        for memory, address in zip(made.memories, addresses, strict=True):
            self._owner.point(memory, address)
        self._owner.execute(made.primitive, made.arguments)
