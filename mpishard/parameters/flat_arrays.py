"""Flat arrays that callers give: checked, or made of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mpishard.backend import array as arrays
from mpishard.backend.array import FLOATS, is_array
from mpishard.layout.specs import ParameterSpec

Array = Any


def check_flat(what: str, array: Array, *, written: bool = False) -> None:
    """Raise unless `array` is a contiguous 1-D float32 or float64 array, and writeable where `written`.

    Not collective.

    Parameters
    ----------
    what : str
        Names it in messages.
    array : object
        What a caller gave.
    written : bool
        Whether it is written to.

    Raises
    ------
    TypeError
        If it is no array, or not of float32 or float64.
    ValueError
        If it is not flat, contiguous and aligned, or read-only although it is written to; or on another GPU than the
        current one.
    """
    if type(array) is np.ndarray and array.ndim == 1 and array.dtype in FLOATS and array.flags.carray:
        return  # contiguous, aligned and writeable: asked at every step
    if not is_array(array):
        raise TypeError(f"{what} must be a flat NumPy or CuPy array, got {type(array).__name__}")
    if array.ndim != 1:
        raise ValueError(f"{what} must be flat (1-D), got shape {array.shape}; pass array.reshape(-1)")
    if array.dtype not in FLOATS:
        raise TypeError(f"{what} must be float32 or float64, got {array.dtype}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{what} must be contiguous in memory; pass a copy (array.copy())")
    if not getattr(array.flags, "aligned", True):
        raise ValueError(
            f"{what} must begin at a multiple of {array.itemsize} bytes in memory, as a view of bytes may not; "
            "pass a copy (array.copy())"
        )
    if written and not getattr(array.flags, "writeable", True):
        raise ValueError(f"{what} are read-only, but are written to; pass a copy (array.copy())")
    arrays.check_current(array)


def flat_of_tensors(tensors: Mapping[str, Any], module: Any) -> tuple[Array, list[ParameterSpec]]:
    """A new flat array with copies of tensors, and their names and shapes: see `FlatParameters.of`."""
    if not isinstance(tensors, Mapping):
        raise TypeError(f"tensors must be a mapping of names to tensors, got {type(tensors).__name__}")
    if not tensors:
        raise ValueError("there are no tensors to name: the mapping is empty")
    values = {name: _from_dlpack(name, tensor, module) for name, tensor in tensors.items()}
    dtypes = sorted({str(value.dtype) for value in values.values()})
    if len(dtypes) > 1:
        raise TypeError(f"tensors must be all float32 or all float64, got {' and '.join(dtypes)}")
    flat = arrays.joined(list(values.values()))
    return flat, [ParameterSpec(name, each.shape) for name, each in values.items()]


def _from_dlpack(name: str, tensor: Any, module: Any) -> Array:
    try:
        return module.from_dlpack(tensor)
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        kind = f"{type(tensor).__name__} of {tensor.dtype}" if hasattr(tensor, "dtype") else type(tensor).__name__
        raise TypeError(
            f"tensor {name!r} is a {kind}, and must be one of float32 or float64 that {module.__name__}.from_dlpack "
            f"takes: {error}"
        ) from None
