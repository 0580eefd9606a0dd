"""What MPI sees of an array: the array itself where MPI can take it, a staged or widened copy where it cannot.

The one place where a device buffer is made ready before MPI or the host reads it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpishard.backend import array as arrays
from mpishard.comm.capabilities import probe

Array = Any


def stage_out(buffer: Array, *, reads: bool = True, arithmetic: bool = False) -> Array:
    """The flat array to hand to MPI for the contiguous `buffer`.

    Parameters
    ----------
    reads : bool
        Whether the call needs the content.
    arithmetic : bool
        Whether MPI computes with the elements, rather than moving them.  MPI has no bfloat16 and seldom float16
        arithmetic, so these are widened to float32 then.
    """
    flat = buffer.reshape(-1)
    half = is_half(flat.dtype)
    if arrays.is_device(buffer):
        arrays.ready(buffer)  # the readiness gate: what was queued on the stream is in memory now
        if not half and _takes_device_pointers(buffer):
            return flat
        wire = arrays.pinned_empty(flat.size, flat.dtype, like=buffer)
        if reads:
            arrays.copy_to_host(flat, wire)
        flat = wire
    elif not flat.flags.aligned:
        flat = flat.copy()  # of which MPI does not know the type else
    if half:
        return flat.astype(np.float32) if arithmetic else flat.view(np.uint16)
    return flat


def stage_in(wire: Array, buffer: Array) -> Array:
    """Bring what MPI left in `wire` back into `buffer`, unless they are the same memory; returns `buffer`."""
    if arrays.is_device(wire) or (not arrays.is_device(buffer) and np.may_share_memory(wire, buffer)):
        return buffer
    widened = is_half(buffer.dtype) and wire.dtype == np.float32
    values = wire.astype(buffer.dtype) if widened else wire.view(buffer.dtype)
    if arrays.is_device(buffer):
        arrays.copy_to_device(values, buffer.reshape(-1))
    else:
        buffer.reshape(-1)[...] = values
    return buffer


def is_half(dtype: np.dtype) -> bool:
    """Whether it is float16 or bfloat16."""
    return dtype.itemsize == 2 and dtype.kind not in "iu"


def _takes_device_pointers(buffer: Array) -> bool:
    """Whether this MPI was seen to take device memory."""
    return hasattr(buffer, "__cuda_array_interface__") and probe(device=True).device_buffers
