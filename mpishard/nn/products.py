"""Matrix products: as they are, or of operands in half precision (mixed-precision training).

Micikevicius et al., "Mixed precision training" (2018), section 3: weights and activations stay in float32, operands are
rounded to half precision, and the terms of a product are summed in float32.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from mpishard.backend import blas_threads
from mpishard.comm.ledger import users_level
from mpishard.comm.staging import is_half

Array = Any
# Called like ``numpy.matmul(a, b, out=out)``.
Matmul = Callable[..., Array]


def make_matmul(module: Any, compute_dtype: Any = None) -> Matmul:
    """The matrix product of the arrays of `module`, with operands rounded to `compute_dtype` where that is given.

    Parameters
    ----------
    module : module
        ``numpy`` or ``cupy``.
    compute_dtype : dtype or None
        float16, or bfloat16 of ml_dtypes.  What is too large for it becomes infinite, without a warning.  NumPy has
        no fast half-precision products: the rounded operands are multiplied in the dtype of the arrays.  CuPy's sum
        in float32 as well, and round the result to half precision, once, before it becomes float32 again.
    """
    if compute_dtype is None:
        return blas_threads.matmul if module is np else module.matmul
    compute = _of_rounded if module is np else functools.partial(_of_halves, module)
    return functools.partial(compute, np.dtype(compute_dtype))


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
    if module is np:
        warnings.warn(
            f"compute_dtype={np.dtype(compute_dtype)} on NumPy arrays rounds operands and is slower than float32; "
            "it is for checking what half precision does. Fast half-precision products are CuPy's: pass module=cupy",
            UserWarning,
            stacklevel=users_level(),
        )


def _of_rounded(half: np.dtype, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        return blas_threads.matmul(a.astype(half).astype(a.dtype), b.astype(half).astype(b.dtype), out=out)


def _of_halves(module: Any, half: np.dtype, a: Array, b: Array, out: Array) -> Array:
    out[...] = module.matmul(a.astype(half), b.astype(half))
    return out
