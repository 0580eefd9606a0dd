"""Matrix products: as they are, or of operands in half precision (mixed-precision training).

Micikevicius et al., "Mixed precision training" (2018), section 3: weights and activations stay in float32, operands are
rounded to half precision, and the terms of a product are summed in float32.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from mpishard.backend import products
from mpishard.backend.convert import BITS
from mpishard.comm.ledger import users_level
from mpishard.comm.staging import is_half
from mpishard.compression.kernels import to_bfloat16
from mpishard.nn.device_products import DeviceProduct
from mpishard.nn.workspace import Pool

Array = Any
# Called like ``numpy.matmul(a, b, out=out)``.
Matmul = Callable[..., Array]
_NOTHING = np.empty(0, np.float32)


def make_matmul(module: Any, compute_dtype: Any = None) -> Matmul:
    """The matrix product of the arrays of `module`, with operands rounded to `compute_dtype` where that is given.

    What is too large for `compute_dtype`, float16 or bfloat16, becomes infinite, without a warning. For NumPy's arrays
    a chosen library multiplies bfloat16 (`mpishard.backend.products`), batches, which are of attention, stay in
    float32, and else the rounded operands are multiplied in the dtype of the arrays.

    Device arrays get a `DeviceProduct`, which can add the product to `out`: cuBLAS sums rounded operands in float32,
    and the result is not rounded.
    """
    half = None if compute_dtype is None else np.dtype(compute_dtype)
    if module is not np:
        return DeviceProduct(half)
    return products.matmul if half is None else _OfRounded(half)


def check_half(what: str, dtype: Any) -> np.dtype:
    """`dtype`, the argument named `what`, as a dtype; raises TypeError unless it is float16 or bfloat16."""
    try:
        half = np.dtype(dtype)
    except TypeError:  # e.g. "bfloat16" before ml_dtypes has registered it with NumPy
        half = None
    if half is None or not is_half(half):
        raise TypeError(
            f"{what} is {dtype if half is None else half}; it must be float16 or bfloat16 (of ml_dtypes), or None"
        )
    return half


def check_compute_dtype(compute_dtype: Any, dtype: np.dtype) -> None:
    """Raise TypeError unless arrays of `dtype` can be multiplied in `compute_dtype`.

    Device arrays need no arrays of bfloat16, which CuPy has from version 14 on, where it finds CUDA's ``cuda_bf16.h``:
    numbers are rounded to their bits.
    """
    half = check_half("compute_dtype", compute_dtype)
    if dtype != np.float32:
        raise TypeError(f"compute_dtype {half} needs float32 weights, but dtype is {dtype}; pass dtype=numpy.float32")


def warn_if_slow(compute_dtype: Any, module: Any) -> None:
    """Warn where half precision costs time instead of saving it."""
    half = np.dtype(compute_dtype)
    if module is np and not (half.name == "bfloat16" and products.has_fast_bfloat16()):
        warnings.warn(
            f"compute_dtype={half} on NumPy arrays rounds operands and is slower than float32; it is for checking what "
            "half precision does. Fast products are CuPy's: pass module=cupy; and those of bfloat16 on processors with "
            "AVX512_BF16 or AMX: pip install 'mpishard[mkl,onednn]' and give the model a mesh",
            UserWarning,
            stacklevel=users_level(),
        )


class _OfRounded:
    """The product of NumPy arrays of which each is rounded to half precision."""

    def __init__(self, half: np.dtype) -> None:
        self._half = half
        self._is_bfloat16 = half.name == "bfloat16"

    def __call__(self, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> np.ndarray:
        if self.by_library:
            if a.ndim == 2:
                return products.matmul_bfloat16(_bits(a, "left operand"), _bits(b, "right operand"), out)
            return products.matmul(a, b, out)  # of attention: see `mpishard.backend.products.libraries`
        with np.errstate(over="ignore", invalid="ignore"):
            one, other = (each.astype(self._half).astype(each.dtype) for each in (a, b))
            return products.matmul(one, other, out)

    @property
    def by_library(self) -> bool:
        """Return True if a library multiplies the bits of the rounded operands."""
        return self._is_bfloat16 and products.has_fast_bfloat16()


def rounded_dtype(matmul: Matmul) -> np.dtype | None:
    """The dtype in which products by `matmul` take rounded operands.

    uint16 for the bits of bfloat16; float16 on devices only; None if they round no operands, or take all as they are:
    those of NumPy's arrays, but for bfloat16 by a library.
    """
    plain = getattr(matmul, "__wrapped__", matmul)  # in a traced step it is wrapped
    if isinstance(plain, DeviceProduct):
        return plain.rounded_dtype
    return BITS if isinstance(plain, _OfRounded) and plain.by_library else None


def multiply_into(
    matmul: Matmul, a: Array, b: Array, out: Array, accumulate: bool, memory: Callable[[], Array]
) -> None:
    """``out = a b``, or ``out += a b``, in one pass where `matmul` can add.

    `memory` gives an array of the shape of `out`, for a product that is added in a second pass.
    """
    if not accumulate:
        matmul(a, b, out=out)
    elif isinstance(matmul, DeviceProduct):
        matmul(a, b, out=out, accumulate=True)
    else:
        product = memory()
        matmul(a, b, out=product)
        out += product


def shared_operand(matmul: Matmul, array: Array, name: str = "shared operand") -> Array:
    """An operand of the next products by `matmul`, rounded once for all of them if they would round it.

    It is overwritten when the next operand of that name is shared.
    """
    if isinstance(matmul, DeviceProduct):
        return matmul.rounded(array)
    return _bits(array, name) if rounded_dtype(matmul) is not None else array


def rounded_weight(matmul: Matmul, weight: Array, padded: int | None = None) -> Array:
    """A view of parameters as products by `matmul` take it.

    On a device, in a step that keeps rounded weights, it is rounded once for all of them; `padded` as for
    `DeviceProduct.rounded_weight`.
    """
    return matmul.rounded_weight(weight, padded) if isinstance(matmul, DeviceProduct) else weight


_rounded = threading.local()


def _bits(array: np.ndarray, name: str) -> np.ndarray:
    """The bits of a matrix as bfloat16, in memory that is used again when the next one of that name is rounded."""
    transposed = array.strides[-2] < array.strides[-1]
    rows = np.ascontiguousarray(array.T if transposed else array)
    if rows.dtype != BITS:
        pool: Pool = _rounded.__dict__.setdefault("pool", Pool())
        values, rows = rows, pool(name, rows.shape, BITS)
        to_bfloat16((values.reshape(-1), rows.reshape(-1), _NOTHING))
    return rows.T if transposed else rows
