"""Matrix products: as they are, or of operands in half precision (mixed-precision training).

Micikevicius et al., "Mixed precision training" (2018), section 3: weights and activations stay in float32, operands are
rounded to half precision, and the terms of a product are summed in float32.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from mpishard.backend import products
from mpishard.comm.ledger import users_level
from mpishard.comm.staging import is_half
from mpishard.compression.kernels import to_bfloat16
from mpishard.nn.workspace import BITS, Pool

Array = Any
# Called like ``numpy.matmul(a, b, out=out)``.
Matmul = Callable[..., Array]
_NOTHING = np.empty(0, np.float32)


def make_matmul(module: Any, compute_dtype: Any = None) -> Matmul:
    """The matrix product of the arrays of `module`, with operands rounded to `compute_dtype` where that is given.

    Parameters
    ----------
    module : module
        ``numpy`` or ``cupy``.
    compute_dtype : dtype or None
        float16, or bfloat16 of ml_dtypes.  What is too large for it becomes infinite, without a warning.  For NumPy's
        arrays a library multiplies bfloat16 where one was chosen (see `mpishard.backend.products`), and batches, which
        are of attention, stay in float32; else the rounded operands are multiplied in the dtype of the arrays.  CuPy's
        products sum in float32 as well, and round the result to half precision, once, before it becomes float32 again.
    """
    if module is np:
        return products.matmul if compute_dtype is None else _OfRounded(np.dtype(compute_dtype))
    return module.matmul if compute_dtype is None else functools.partial(_of_halves, module, np.dtype(compute_dtype))


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


def check_compute_dtype(compute_dtype: Any, dtype: np.dtype, module: Any) -> None:
    """Raise TypeError unless arrays of `module` and `dtype` can be multiplied in `compute_dtype`."""
    half = check_half("compute_dtype", compute_dtype)
    if dtype != np.float32:
        raise TypeError(f"compute_dtype {half} needs float32 weights, but dtype is {dtype}; pass dtype=numpy.float32")
    try:
        module.zeros(1, np.float32).astype(half)
    except (KeyError, TypeError, ValueError) as error:  # CuPy gained bfloat16 in version 14
        name = module.__name__
        raise TypeError(f"compute_dtype is {half}, but this version of {name} has no such arrays") from error


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
            return products.matmul(a, b, out)  # of attention: see `mpishard.backend.products.shapes`
        with np.errstate(over="ignore", invalid="ignore"):
            one, other = (each.astype(self._half).astype(each.dtype) for each in (a, b))
            return products.matmul(one, other, out)

    @property
    def by_library(self) -> bool:
        """Whether a library multiplies the bits of the rounded operands."""
        return self._is_bfloat16 and products.has_fast_bfloat16()


def takes_bits(matmul: Matmul) -> bool:
    """Whether products by `matmul` round operands, and take the bits of a rounded matrix in its place.

    Not collective.

    Parameters
    ----------
    matmul : callable
        As `make_matmul` gives it.

    Returns
    -------
    bool
        False for all but bfloat16 of NumPy's arrays by a library.
    """
    plain = getattr(matmul, "__wrapped__", matmul)  # in a traced step it is wrapped
    return isinstance(plain, _OfRounded) and plain.by_library


def shared_operand(matmul: Matmul, array: Array, name: str = "shared operand") -> Array:
    """An operand of the next products, rounded once for all of them if they would round it.

    Not collective.

    Parameters
    ----------
    matmul : callable
        As `make_matmul` gives it.
    array : array, shape (n, c)
        The operand.
    name : str
        Of the memory for the rounded operand.

    Returns
    -------
    array
        For products by `matmul` only; overwritten when the next operand of that name is shared.
    """
    return _bits(array, name) if takes_bits(matmul) else array


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


def _of_halves(module: Any, half: np.dtype, a: Array, b: Array, out: Array) -> Array:
    out[...] = module.matmul(a.astype(half), b.astype(half))
    return out
