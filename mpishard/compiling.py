"""Numba functions for NumPy arrays: how they are compiled, and how the ranks of a node share the result."""

from __future__ import annotations

import contextlib
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numba
import numpy as np
from numba.core.caching import FunctionCache
from numba.core.registry import cpu_target
from numba.core.runtime.nrt import rtsys


class _Cache(FunctionCache):
    """Numba's cache, that loads without what only compiling needs: imports that take each process a third of a second.

    The compiler itself refreshes the context before it compiles.
    """

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        rtsys.initialize(target_context)  # arrays are counted
        with self._guard_against_spurious_io_errors():
            return self._load_overload(sig, target_context)


def jit(function: Callable[..., Any], **options: Any) -> Any:
    """``numba.njit`` without the GIL, with NumPy's division, and with a cache on disk where one can be.

    Without ``error_model="numpy"`` every division carries a check for zero, which keeps loops from being
    vectorised.
    """
    options = {"nogil": True, "error_model": "numpy", **options}
    dispatcher = numba.njit(**options)(function)
    # RuntimeError: neither the folder of the source nor the user's cache folder is writable.
    with contextlib.suppress(RuntimeError):
        dispatcher._cache = _Cache(function)
    return dispatcher


def prepare() -> None:
    """Do now what the first call of a compiled function does once a process, in some hundredths of a second."""
    rtsys.initialize(cpu_target.target_context)


class HostFunction:
    """A function of 1-D NumPy arrays of one dtype, and scalars, compiled once for all the ranks of a node."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        self._dispatcher = jit(function, **options)
        self._name = f"{function.__code__.co_filename}:{function.__qualname__}"
        self._compiled: set[tuple[Any, ...]] = set()

    def __call__(self, arrays: Sequence[np.ndarray], scalars: Sequence[float] = ()) -> Any:
        arguments = (*arrays, *scalars)
        key = (arrays[0].dtype, *(a.flags.writeable for a in arrays))
        if key not in self._compiled:
            # Without a cache, waiting for another process gains nothing.
            cached = self._dispatcher.stats.cache_path is not None
            with _one_compiler(self._name) if cached else contextlib.nullcontext():
                self._dispatcher.compile(tuple(map(numba.typeof, arguments)))
            self._compiled.add(key)
        return self._dispatcher(*arguments)


@contextlib.contextmanager
def _one_compiler(name: str) -> Iterator[None]:
    """Let one process of this user and node compile `name`, while the others wait to load it from the cache.

    A courtesy between ranks that start together on a cold cache: where it cannot be had, everyone compiles.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            path = os.path.join(tempfile.gettempdir(), f"mpishard-{os.getuid()}.lock")
            handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
            stack.callback(os.close, handle)
            # One byte of the file a function.  Who comes second takes it shared, so that all load at once.
            byte = zlib.crc32(name.encode())
            try:
                fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
            except OSError:
                fcntl.lockf(handle, fcntl.LOCK_SH, 1, byte)
        yield
