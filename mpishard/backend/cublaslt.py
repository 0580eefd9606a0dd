"""Matrix products with a bias and GELU in the same kernel (an epilogue), by cuBLASLt.

cuBLASLt is called by ``nvmath.bindings.cublasLt`` of the package nvmath-python.  It reads columns, and its biases have
an entry for each row of the result.  Rows of C are columns of its transpose, so that ``C = A B`` is computed as
``C' = B' A'``, where the biases have an entry for each column of C.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mpishard.backend import array as arrays
from mpishard.backend.cublas import COMPUTE_32F, LARGEST, R_32F, TYPES
from mpishard.backend.kinds import backend_of
from mpishard.backend.optional_library import OptionalLibrary

Array = Any

# Of extents that are leading dimensions: that of the pre-activation by the rules of cuBLASLt, all for tensor cores.
MULTIPLE = 8
# Bytes; memory of the device's pools begins at multiples of more.
ALIGNMENT = 16
# What cuBLAS takes itself on GPUs of compute capability 9.
MOST_WORKSPACE_BYTES = 32 << 20
# Micro-batches of ever other lengths are left to plain products.
MOST_SHAPES = 256
# Read from the memory of the host.
_FACTORS = np.array([0, 1], np.float32)


class Shape(NamedTuple):
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
        self._plans: dict[tuple[Shape, np.dtype], _Plan] = {}
        self.usable = True  # nothing has failed so far
        self.proven: set[np.dtype] = set()  # precisions in which a small problem was right; filled by callers

    def takes(self, shape: Shape, half: np.dtype, like: Array) -> bool:
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
                self.give_up(f"cuBLASLt has no kernel with the epilogue for {shape} in {half} ({error})")
        return key in self._plans

    def forward(self, x_nc: Array, weight_cd: Array, bias_d: Array, before_nd: Array, y_nd: Array) -> None:
        """``before = x W + bias`` and ``y = GELU(before)``, of a shape that `takes` was asked for."""
        plan = self._plans[Shape(len(x_nc), x_nc.shape[1], y_nd.shape[1]), y_nd.dtype]
        plan.execute(weight_cd, x_nc, bias_d, before_nd, y_nd)

    def give_up(self, problem: str) -> None:
        """Take no more shapes, and say why."""
        self.usable = False
        LIBRARY.warn_once(problem)


class _Plan:
    """A product with its kernel: ``D' = W' X'`` for columns, where D has the rows of X."""

    def __init__(self, lt: Any, handle: int, shape: Shape, half: np.dtype) -> None:
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
        zero = _FACTORS.ctypes.data
        with backend.on_device_of(result):
            self._lt.matmul(
                self._handle, self._product, zero + _FACTORS.itemsize, a, self._weight, b, self._rows,
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
