"""The buffer to hand to MPI for an array: the array itself where MPI can take it, else a widened or aligned copy.

Device memory that MPI cannot take travels through the host in pieces (`is_staged`, `StagedRequest`).  What MPI takes
itself must be ready: see `Collectives` and `DeferredRequest`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpishard.backend import array as arrays
from mpishard.comm.capabilities import probe

Array = Any


def stage_out(buffer: Array, *, arithmetic: bool = False) -> Array:
    """The flat array to hand to MPI for a contiguous buffer: itself, or a copy; device memory may not be ready.

    Half precision is copied as uint16, or as float32 for `arithmetic`, in which MPI computes with the elements: it has
    no bfloat16 and seldom float16 arithmetic.
    """
    flat = buffer.reshape(-1)
    if type(buffer) is np.ndarray and buffer.itemsize != 2 and flat.flags.aligned:
        return flat  # what follows, for the most frequent case
    if arrays.is_device(buffer):
        return flat
    if not flat.flags.aligned:
        flat = flat.copy()  # MPI has no type for unaligned elements
    if is_half(flat.dtype):
        return flat.astype(np.float32) if arithmetic else flat.view(np.uint16)
    return flat


def stage_in(staged: Array, buffer: Array) -> Array:
    """Copy `staged`, from `stage_out`, back into `buffer` after the call, unless they share memory."""
    if type(staged) is np.ndarray is type(buffer) and np.may_share_memory(staged, buffer):
        return buffer  # what follows, for the most frequent case
    if arrays.is_device(buffer):
        if not arrays.is_device(staged):
            arrays.copy_to_device(staged, buffer.reshape(-1))
        return buffer
    if np.may_share_memory(staged, buffer):
        return buffer
    widened = is_half(buffer.dtype) and staged.dtype == np.float32
    buffer.reshape(-1)[...] = staged.astype(buffer.dtype) if widened else staged.view(buffer.dtype)
    return buffer


def is_staged(*buffers: Array, withheld: bool = False) -> bool:
    """Return True if a call on these buffers goes through host memory that is copied from and to a device.

    That is so if one of them is device memory that this MPI does not take, or that is `withheld` (see
    `agree_on_device_buffers`), or half precision in device memory.
    """
    return any(
        type(buffer) is not np.ndarray
        and arrays.is_device(buffer)
        and (withheld or is_half(buffer.dtype) or not _takes_device_pointers(buffer))
        for buffer in buffers
    )


def is_half(dtype: np.dtype) -> bool:
    """Return True if it is float16 or bfloat16; integers of 2 bytes are not."""
    return dtype.itemsize == 2 and dtype.kind not in "iu"


def _takes_device_pointers(buffer: Array) -> bool:
    """Return True if this MPI was seen to take device memory."""
    return hasattr(buffer, "__cuda_array_interface__") and probe(device=True).device_buffers
