"""Functions that are compiled just in time: at their first call, by `mpishard.backend.numba_cache`."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from mpishard.backend.garbage import no_garbage_collection, objects_stay
from mpishard.io import log

# Raise it with every change after which a compiled kernel gives other bits, be it in a function that the kernel calls.
# States carry it; those without it count as 1. 2: the exponential of the layers is a shorter one. 3: on devices the
# sums of rows of logits, scores and norms have another order. 4: sums of columns over sparse rows are rounded at other
# places.
KERNELS = 4
_before: list[Callable[[], None]] = []
# Announced calls: by function and types of the arguments, arguments of these types.
_expected: dict[tuple[HostFunction, tuple[Any, ...]], tuple[Any, ...]] = {}


def before_compiling(register: Callable[[], None]) -> Callable[[], None]:
    """Decorator: call `register` before anything is compiled.

    It makes functions known to Numba that compiled functions call.
    """
    _before.append(register)
    return register


def inner(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator for functions that compiled functions call."""

    @before_compiling
    def register() -> None:
        from numba.extending import register_jitable

        register_jitable(function)

    return function


def prepare() -> None:
    """Do the set-up now that the first call of a compiled function does once per process (over a tenth of a second)."""
    _numba_cache().prepare()


def compile_expected() -> None:
    """Compile the functions of all announced calls, or load them."""
    cache = _numba_cache()
    with no_garbage_collection():
        while _expected:
            (function, key), arguments = _expected.popitem()
            _load_or_compile(function.dispatcher(), cache.types_of(arguments), ())
            function._compiled.add(key)


# Seconds of compiling after which the first rank says so: without a line it would look like a hang.
PATIENCE_S = 1.0
_compiled_s = 0.0  # of this process so far, and of its waits for others that compile


def _load_or_compile(dispatcher: Any, types: tuple[Any, ...], expected: Iterable[tuple[Any, tuple[Any, ...]]]) -> None:
    cache = _numba_cache()
    if not cache.load(dispatcher, types):
        with _said_where_long(is_kept=dispatcher.stats.cache_path is not None):
            cache.in_turn((dispatcher, types), expected)


@contextlib.contextmanager
def _said_where_long(is_kept: bool) -> Iterator[None]:
    """Say once that kernels are compiled, on the first rank, when that has taken PATIENCE_S; `is_kept`: on disk."""
    global _compiled_s
    mpi: Any = sys.modules.get("mpi4py.MPI")
    is_other = mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.rank > 0
    if is_other or _compiled_s >= PATIENCE_S:
        yield
        return
    later = "once; later runs load them" if is_kept else "as every run does where no folder can keep them"
    began = time.monotonic()
    line = threading.Timer(PATIENCE_S - _compiled_s, log.inform, [f"compiling kernels for this processor, {later}"])
    line.daemon = True
    line.start()
    try:
        yield
    finally:
        line.cancel()
        _compiled_s += time.monotonic() - began


@functools.cache
def _numba_cache() -> ModuleType:
    """The module that imports Numba: imported at the first call."""
    with no_garbage_collection():  # collections among Numba's objects took a fifth of the time
        from mpishard.backend import numba_cache

        objects_stay()
    return numba_cache


class HostFunction:
    """A function of flat NumPy arrays of one dtype, then scalars, compiled once for all the ranks of a node.

    The first call imports Numba, and loads the function from its cache or compiles it. `options` are those of
    ``numba.njit``, in addition to those of `mpishard.backend.numba_cache.jit`.
    """

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        self._function, self._options = function, options
        self._dispatcher: Any = None
        self._compiled: set[tuple[Any, ...]] = set()

    def __call__(self, arrays: Sequence[np.ndarray], scalars: Sequence[float] = ()) -> Any:
        key = _key(arrays)
        if key not in self._compiled:
            self._compile(key, (*arrays, *scalars))
        return self._dispatcher(*arrays, *scalars)

    def expect(self, arrays: Sequence[np.ndarray], scalars: Sequence[float] = ()) -> None:
        """Announce a call with arguments of these types, so that a rank that compiles also compiles this function."""
        key = _key(arrays)
        if key not in self._compiled:
            _expected[self, key] = (*arrays, *scalars)

    def _compile(self, key: tuple[Any, ...], arguments: tuple[Any, ...]) -> None:
        cache = _numba_cache()
        _expected.pop((self, key), None)
        with no_garbage_collection():  # each would look at all of Numba's objects
            _load_or_compile(self.dispatcher(), cache.types_of(arguments), _take_expected())
        self._compiled.add(key)

    def dispatcher(self) -> Any:
        """Numba's dispatcher of this function, made at its first use."""
        while _before:
            _before.pop(0)()
        if self._dispatcher is None:
            self._dispatcher = _numba_cache().jit(self._function, **self._options)
        return self._dispatcher


def _key(arrays: Sequence[np.ndarray]) -> tuple[Any, ...]:
    """The properties of arrays that decide the types of a call."""
    return (arrays[0].dtype, *[a.flags.writeable for a in arrays])


def _take_expected() -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yield the dispatchers and types of all announced calls, and forget the calls."""
    while _expected:
        (function, _), arguments = _expected.popitem()
        yield function.dispatcher(), _numba_cache().types_of(arguments)
