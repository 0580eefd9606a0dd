"""The libraries for matrix products that are installed in addition to NumPy's: Intel's MKL and oneDNN.

A product is described without the addresses of its arrays (`Product`): sizes, and where rows and columns lie.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import site
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from ctypes import byref, c_double, c_float, c_int, c_int64, c_size_t, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from threadpoolctl import threadpool_info

# A function that computes a product, called with the addresses of a, b and out.
Call = Callable[[int, int, int], None]

# Kinds of products, for which libraries are chosen apart: most of a forward pass; weight gradients, whose `a` is
# transposed; batches; batches of fewer terms than columns, such as the scores of attention.
PLAIN, TRANSPOSED, BATCHED, SCORES = "plain", "transposed", "batched", "scores"
# By dtype those that other libraries may do.  Batches of bfloat16 they may not: oneDNN's were up to four times as fast
# as those of float32 by themselves, but a step with attention in bfloat16 took a tenth longer, though each operand was
# rounded once (heads of 32 channels, an Intel processor with AMX).
KINDS = {
    "float32": (PLAIN, TRANSPOSED, BATCHED, SCORES),
    "float64": (PLAIN, TRANSPOSED, BATCHED, SCORES),
    "bfloat16": (PLAIN, TRANSPOSED),
}

# Fewer multiplications are done before another library is called: Python's part of that call takes 5 us.
_FEW_MULTIPLICATIONS = 2**18
# Products with fewer rows or columns are bound by memory, and shapes of generated texts change with every token.
_FEW_ROWS = 16


@dataclass(frozen=True)
class Operand:
    """Where the elements of a matrix, or of a batch of matrices, lie."""

    transposed: bool  # columns, not rows, lie contiguous
    leading: int  # elements between two rows; between two columns if transposed
    batch: int  # elements between two matrices of a batch


@dataclass(frozen=True)
class Product:
    """``out = a b`` of matrices of m x k and k x n elements; `out` is not transposed."""

    dtype: str  # ``"float32"``, ``"float64"`` or ``"bfloat16"``: of `a` and `b`; `out` of the last is float32
    count: int  # matrices in the batch; 0: the arrays are matrices
    m: int
    k: int
    n: int
    a: Operand
    b: Operand
    out: Operand

    @property
    def kind(self) -> str:
        """One of those in `KINDS`."""
        if self.count:
            return SCORES if self.k < self.n else BATCHED
        return TRANSPOSED if self.a.transposed else PLAIN

    @property
    def bytes(self) -> tuple[int, int]:
        """Of an element of `a` and `b`, and of `out`."""
        return {"float32": (4, 4), "float64": (8, 8), "bfloat16": (2, 4)}[self.dtype]

    @property
    def multiplications(self) -> int:
        """Of numbers."""
        return max(1, self.count) * self.m * self.k * self.n

    @property
    def worth_a_call(self) -> bool:
        """Return True if a library may be asked in place of NumPy: the product is large enough in all directions."""
        return min(self.m, self.n) >= _FEW_ROWS and self.multiplications >= _FEW_MULTIPLICATIONS


# By the characters of their dtypes; bfloat16 is given by its bits.
_DTYPES = {"fff": "float32", "ddd": "float64", "HHf": "bfloat16"}


def product_of(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> Product | None:
    """The product of these arrays of 2 or 3 dimensions; None if only NumPy can do it.

    uint16 stands for the bits of bfloat16, with `out` of float32.
    """
    dtype = _DTYPES.get(a.dtype.char + b.dtype.char + out.dtype.char)
    if dtype is None or not a.ndim == b.ndim == out.ndim or a.ndim not in (2, 3):
        return None
    if a.shape[:-2] != b.shape[:-2] or a.shape[:-2] != out.shape[:-2]:
        return None
    (m, k), n = a.shape[-2:], b.shape[-1]
    if b.shape[-2] != k or out.shape[-2:] != (m, n) or not out.size or not k:
        return None  # NumPy raises, or has nothing to do
    first, second, result = (_operand(each) for each in (a, b, out))
    if first is None or second is None or result is None or result.transposed:
        return None
    return Product(dtype, a.shape[0] if a.ndim == 3 else 0, m, k, n, first, second, result)


def _operand(array: np.ndarray) -> Operand | None:
    if any(stride < 0 or stride % array.itemsize for stride in array.strides):
        return None
    rows, columns = array.shape[-2:]
    *batch, row, column = (stride // array.itemsize for stride in array.strides)
    between = batch[0] if batch else 0
    # Where there is one row or column only, its stride says nothing.
    if (column == 1 or columns == 1) and (row >= columns or rows == 1):
        return Operand(False, max(row, columns), between)
    if (row == 1 or rows == 1) and (column >= rows or columns == 1):
        return Operand(True, max(column, rows), between)
    return None


NUMPY, MKL, ONEDNN = "numpy", "mkl", "onednn"
# By library the dtypes that it multiplies; see oneDNN below for why that one has no more.
TAKES = {MKL: ("float32", "float64", "bfloat16"), ONEDNN: ("bfloat16",)}
# By name: the file, without its version, and the variable that names the folder of an installation by other means.
_FILES = {MKL: ("libmkl_rt.so", "MKLROOT"), ONEDNN: ("libdnnl.so", "DNNLROOT")}
_SETTINGS = ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")


@functools.cache
def installed() -> dict[str, Path]:
    """The files of the libraries that are installed, by name; nothing is loaded."""
    found = {}
    loaded = {pool["internal_api"] for pool in threadpool_info() if pool["user_api"] == "blas"}
    for name, (file, variable) in _FILES.items():
        if name == MKL and loaded == {MKL}:
            continue  # NumPy multiplies by it already, with its own settings
        folders = [Path(prefix, "lib") for prefix in (sys.prefix, sys.base_prefix, site.getuserbase())]
        if root := os.environ.get(variable):
            folders += [Path(root, "lib"), Path(root, "lib", "intel64")]
        for folder in folders:
            if paths := sorted(folder.glob(f"{file}*")):
                found[name] = paths[0]
                break
    return found


@functools.cache
def load(name: str) -> Mkl | OneDnn:
    """The library of that name, loaded; raises OSError if it cannot be."""
    path = installed()[name]
    if name == MKL:
        return Mkl(path)
    return OneDnn(path)


@functools.cache
def loadable() -> dict[str, str]:
    """The versions of the installed libraries that can be loaded, by name; warns of one that cannot."""
    found: dict[str, str] = {}
    try:
        paths = installed()
    except OSError as error:  # of the file system; the other ranks wait for this one
        warnings.warn(f"no library for matrix products is looked for: {error}", UserWarning, stacklevel=2)
        return found
    for name, path in paths.items():
        try:
            found[name] = load(name).version
        except (OSError, AttributeError, RuntimeError) as error:  # a file that is no library, or lacks a function
            warnings.warn(f"{path} cannot be used for matrix products: {error}", UserWarning, stacklevel=2)
    return found


def settings() -> dict[str, str]:
    """The variables of the environment that change what the libraries do, those that are set."""
    return {name: os.environ[name] for name in _SETTINGS if name in os.environ}


def multiplies_bfloat16() -> bool:
    """Return True if the processor has instructions for products of bfloat16."""
    return bool({"avx512_bf16", "amx_bf16"}.intersection(_described("flags").split()))


class Offer(NamedTuple):
    """What a process could multiply by: libraries that can be loaded, on its processor."""

    versions: Mapping[str, str]  # of the libraries, by name
    intel: bool  # the processor is one of Intel
    bfloat16: bool  # the processor has instructions for products of bfloat16

    @classmethod
    def here(cls) -> Offer:
        """That of this process."""
        return cls(loadable(), _described("vendor_id") == "GenuineIntel", multiplies_bfloat16())


@functools.cache
def _described(what: str) -> str:
    """A line of Linux's description of the first core; empty where it is missing."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == what:
                return value.strip()
    return ""


# Intel's Math Kernel Library, through the C interface of its BLAS.

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
            raise OSError("it is in use already, with its own threads")
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
        """The function of the addresses of `a`, `b` and `out` that computes a product by one thread.

        None: the library cannot. Two threads must not call the function at once.
        """
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


# oneDNN, through the matrix products of its C interface; for bfloat16 in contiguous arrays.  It cuts sums into blocks
# by the strides of the arrays: of products of float32 in slices of wider matrices 32 of 240 were seen to have other
# bits than in contiguous arrays, of bfloat16 few (version 3.2, an Intel processor with AMX).  A layout would decide
# results that way, so float32 is left to other libraries.

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
        """As that of `Mkl`."""
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
