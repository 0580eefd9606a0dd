"""Arrays of mpishard and arrays of JAX that share their memory, and the precision and threads of XLA."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpishard.backend import array as arrays
from mpishard.backend.kinds import backend_of

Array = Any
_THREADS = "tf_XLAEigen"  # the name of those of XLA that divide an operation


def as_jax(array: Array) -> Any:
    """An array of JAX of the same shape, dtype and device over the memory of an array, NumPy or CuPy and contiguous.

    JAX takes its arrays for constant: whoever changes the memory must have waited for all that was computed from it.
    JAX shares memory that begins at a multiple of 64 bytes on the host and of 16 on a GPU, as that of FlatParameters
    does; other memory is copied.  Raises ValueError for float64 if JAX would make it float32.
    """
    check_precision(array.dtype)
    if isinstance(array, np.ndarray):
        if array.ctypes.data % 64:
            array = arrays.aligned_copy(array)  # which JAX would make with a warning, or without
    elif backend_of(array).address(array) % 16:
        array = arrays.aligned_copy(array)  # JAX would share it, and each program of XLA refuse it
    return jnp.from_dlpack(array)


def as_array(values: Any, like: Array) -> Array:
    """An array of the kind of `like`, only to be read, over the memory of an array of JAX, once that is computed.

    `values` is of JAX on the device of `like`; nothing is copied, unless it is NumPy's for a device.  XLA takes memory
    that nobody holds without waiting for CuPy's stream: who reads the array waits (`mpishard.backend.array.ready`)
    before `values` and it are gone.
    """
    module = arrays.module_of(like)
    if module is np:
        found: Array = np.asarray(values)
        return found
    return (
        module.asarray(values) if isinstance(values, np.ndarray) else module.from_dlpack(jax.block_until_ready(values))
    )


def array_module(platform: str) -> Any:
    """The module ``numpy`` or ``cupy``, whichever has arrays on a platform of JAX such as ``"cpu"``.

    Raises ValueError for other platforms than CPU and NVIDIA or AMD GPU, ModuleNotFoundError if CuPy is needed and not
    installed.
    """
    if platform == "cpu":
        return np
    if platform not in ("gpu", "cuda", "rocm"):
        raise ValueError(f"parameters are on {platform}, and must be on cpu or gpu: jax.device_put(tree, device)")
    return arrays.device_module()


def check_precision(dtype: Any) -> None:
    """Raise ValueError if JAX would compute in float32 with float64 parameters."""
    config: Any = jax.config
    if np.dtype(dtype) == np.float64 and not config.jax_enable_x64:
        raise ValueError(
            "parameters are float64, and JAX makes float32 of them: begin with "
            'jax.config.update("jax_enable_x64", True), or give float32 parameters'
        )


def xla_threads() -> int | None:
    """The number of threads with which XLA divides an operation on the host.

    None before JAX has made its first array, and where the system does not show them.
    """
    found = 0
    for task in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # a thread that has ended
            found += task.read_text().strip() == _THREADS
    return found or None
