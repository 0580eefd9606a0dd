"""The buffer to hand to MPI for an array: the array itself where MPI can take it, else a staged or widened copy.

This is the one place that makes a device buffer ready before MPI or the host reads it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpishard.backend import array as arrays
from mpishard.comm.capabilities import probe

Array = Any


def stage_out(buffer: Array, *, reads: bool = True, arithmetic: bool = False) -> Array:
    """The flat array to hand to MPI for a buffer.  Not collective.

    Parameters
    ----------
    buffer : array
        Contiguous, of any shape; NumPy or device.
    reads : bool
        Whether the call needs the content.
    arithmetic : bool
        Whether MPI computes with the elements, not only moves them.  MPI has no bfloat16 and seldom float16 arithmetic,
        so these are then widened to float32.

    Returns
    -------
    array, (buffer.size,)
        `buffer` itself, or memory of the host: as float32 or uint16 for half precision.
    """
    flat = buffer.reshape(-1)
    if type(buffer) is np.ndarray and buffer.itemsize != 2 and flat.flags.aligned:
        return flat  # what follows, for the most frequent case
    half = is_half(flat.dtype)
    if arrays.is_device(buffer):
        arrays.ready(buffer)  # the readiness gate: the work queued on the stream is done now
        if not half and _takes_device_pointers(buffer):
            return flat
        staged = arrays.pinned_empty(flat.size, flat.dtype, like=buffer)
        if reads:
            arrays.copy_to_host(flat, staged)
        flat = staged
    elif not flat.flags.aligned:
        flat = flat.copy()  # MPI has no type for unaligned elements
    if half:
        return flat.astype(np.float32) if arithmetic else flat.view(np.uint16)
    return flat


def stage_in(staged: Array, buffer: Array) -> Array:
    """Copy `staged` back into `buffer` after the call, unless they share memory.  Not collective.

    Parameters
    ----------
    staged : array
        From `stage_out`, with what MPI has written.
    buffer : array
        What `stage_out` was given.

    Returns
    -------
    array
        `buffer`.
    """
    if type(staged) is np.ndarray is type(buffer) and np.may_share_memory(staged, buffer):
        return buffer  # what follows, for the most frequent case
    if arrays.is_device(staged) or (not arrays.is_device(buffer) and np.may_share_memory(staged, buffer)):
        return buffer
    widened = is_half(buffer.dtype) and staged.dtype == np.float32
    values = staged.astype(buffer.dtype) if widened else staged.view(buffer.dtype)
    if arrays.is_device(buffer):
        arrays.copy_to_device(values, buffer.reshape(-1))
    else:
        buffer.reshape(-1)[...] = values
    return buffer


def is_half(dtype: np.dtype) -> bool:
    """Whether it is float16 or bfloat16.  Not collective.

    Parameters
    ----------
    dtype : dtype
        Of an array.

    Returns
    -------
    bool
        False for integers of 2 bytes.
    """
    return dtype.itemsize == 2 and dtype.kind not in "iu"


def _takes_device_pointers(buffer: Array) -> bool:
    """Whether this MPI was seen to take device memory."""
    return hasattr(buffer, "__cuda_array_interface__") and probe(device=True).device_buffers
