"""Compiles functions with Numba, or loads them from its cache; the processes of one user on one node share the work.

Ranks that start together with a cold cache lock bytes of a file, so that each function is compiled once.  If the file
cannot be opened, or a lock is held for long, every process compiles for itself.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import io
import os
import stat
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import numba
import numpy as np
import xxhash
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.core.runtime.nrt import rtsys

# Compilation in turns.

# After so long a process does not wait for others any more, and compiles for itself.
_WAIT_S = 30.0
_POLL_S = 0.01
# Bytes from here on are locks of cores, bytes before are locks of names.
_CORES = 2**32


def load_or_make(name: str, load: Callable[[], bool], make: Callable[[], None]) -> None:
    """Load the function `name` from the cache, or make it. If another process makes it, wait and then load it.

    `load` returns True if it was in the cache; `make` compiles it and puts it there. If the process that makes it dies,
    another one does. At most as many processes make functions as the node has cores. The others wait for a core without
    calling `load`, which would take processor time from those that compile.
    """
    if load():
        return
    deadline = time.monotonic() + _WAIT_S
    while _file() is not None and time.monotonic() < deadline:
        with core() as free, attempt(name) if free else contextlib.nullcontext(False) as mine:
            if mine:
                if not load():
                    make()
                return
        if not free:
            time.sleep(_POLL_S)
            continue
        # A shared lock: all waiting processes load at the same time.
        while not _lock(_byte(name), shared=True) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        _unlock(_byte(name))
        if load():
            return
    make()


@contextlib.contextmanager
def attempt(name: str) -> Iterator[bool]:
    """Yield True if this process may make `name` within the context."""
    with _held(_byte(name)) as mine:
        yield mine


@contextlib.contextmanager
def core() -> Iterator[bool]:
    """Yield True if a core of the node is free: fewer processes are in this context than the node has cores."""
    with contextlib.ExitStack() as stack:
        yield any(stack.enter_context(_held(_CORES + core)) for core in range(os.cpu_count() or 1))


@contextlib.contextmanager
def _held(byte: int) -> Iterator[bool]:
    mine = _lock(byte)
    try:
        yield mine
    finally:
        if mine:
            _unlock(byte)


def _byte(name: str) -> int:
    return zlib.crc32(name.encode())


def _lock(byte: int, shared: bool = False) -> bool:
    """Try to lock one byte of the file, without waiting; returns whether it is locked."""
    file = _file()
    if file is None:
        return False
    try:
        fcntl.lockf(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB, 1, byte)
    except OSError as error:
        return error.errno not in (errno.EAGAIN, errno.EACCES)  # on a file system without locks nobody holds one
    return True


def _unlock(byte: int) -> None:
    file = _file()
    if file is not None:
        with contextlib.suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_UN, 1, byte)


def _file() -> int | None:
    """The lock file of this user on this node, open; None if other users could write or lock it."""
    return _open(os.path.join(tempfile.gettempdir(), f"mpishard-{os.getuid()}.lock"))


@functools.cache
def _open(path: str) -> int | None:
    """Open the file for good: closing it in one thread would release the locks of all threads."""
    # Any user can guess the name in a world-writable folder, and put a file or link there first.
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    found = os.fstat(file)
    ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and found.st_nlink == 1
    if ours and not found.st_mode & 0o077:
        return file
    os.close(file)
    return None


# Numba's dispatcher of a function, and the types of its arguments.
Function = tuple[Any, tuple[Any, ...]]


class _CheckedFiles(IndexDataCacheFile):
    """The files of Numba's cache, each with its hash behind it: what is damaged is compiled again."""

    @contextlib.contextmanager
    def _open_for_write(self, filepath: str) -> Iterator[Any]:
        content = io.BytesIO()
        yield content
        with super()._open_for_write(filepath) as file:
            file.write(content.getvalue() + xxhash.xxh3_128_digest(content.getvalue()))

    def _load_index(self) -> Any:
        return super()._load_index() if _is_sound(self._index_path) else {}

    def _load_data(self, name: str) -> Any:
        path = self._data_path(name)
        if not _is_sound(path):
            raise OSError(errno.EIO, "its hash is of other content", path)  # to Numba as if it were missing
        return super()._load_data(name)


def _is_sound(path: str) -> bool:
    """Return True if there is such a file, with its hash behind it, which pickle does not read."""
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        return False
    return xxhash.xxh3_128_digest(memoryview(content)[:-16]) == content[-16:]


class _Cache(FunctionCache):
    """Numba's cache, which here loads without the imports that only compiling needs (a third of a second per process).

    The compiler itself refreshes the context before it compiles. Numba finds a function again as long as its own file
    is the same; here what else is compiled with it, and the options, must be the same too.
    """

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        super().__init__(function)
        stamp = self._impl.locator.get_source_stamp()
        self._cache_file = _CheckedFiles(self._cache_path, self._impl.filename_base, stamp)
        settings = sorted((name, sorted(each) if isinstance(each, set) else each) for name, each in options.items())
        self._mark = hashlib.sha256(repr((settings, _compiled_with(function))).encode()).hexdigest()

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        with self._guard_against_spurious_io_errors():
            return self._load_overload(sig, target_context)

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return (*super()._index_key(sig, codegen), self._mark)


def _compiled_with(function: Any) -> list[str]:
    """The numbers that a function takes from its module, and the content of the files of the functions that it calls.

    An overload stands in the file of the function that it is for.
    """
    found, files, left, seen = set(), set(), [function], {function}
    while left:
        caller = left.pop()
        for name in caller.__code__.co_names:
            value = caller.__globals__.get(name)
            if isinstance(value, FunctionType) and value not in seen:
                seen.add(value)
                left.append(value)
                files.add(value.__code__.co_filename)
            elif isinstance(value, int | float | np.generic):
                found.add(f"{caller.__module__}.{name} = {value!r}")
    return [*sorted(found), *(_content(file) for file in sorted(files))]


@functools.cache
def _content(file: str) -> str:
    """A hash of a file; of nothing, where there is no such file: then only Numba's own check is left."""
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return ""


def jit(function: Callable[..., Any], **options: Any) -> Any:
    """``numba.njit`` without the GIL, with NumPy's division, and with a cache on disk where that is possible.

    Without ``error_model="numpy"`` every division carries a check for zero, which keeps loops from being vectorised.
    Functions that make arrays need ``_nrt=True``, Numba's runtime, which counts references: each process compiles it,
    which takes as long as loading ten functions, and with it a function takes a tenth longer to compile.
    """
    # These functions are not called from C; a wrapper for that would take a tenth of the compile time.
    options = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True, "_nrt": False, **options}
    if options["_nrt"]:
        rtsys.initialize(cpu_target.target_context)
    dispatcher = numba.njit(**options)(function)
    # RuntimeError: neither the folder of the source nor the user's cache folder is writable.
    with contextlib.suppress(RuntimeError):
        dispatcher._cache = _Cache(function, options)
    return dispatcher


def prepare() -> None:
    _ = cpu_target.target_context  # made at the first use


def types_of(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Numba's types of the arguments."""
    return tuple(map(numba.typeof, arguments))


def in_turn(wanted: Function, expected: Iterable[Function]) -> None:
    """Load a function, or compile it unless another process of this user and node does.

    The processes that compile also compile the `expected` functions, each another one.
    """
    dispatcher, types = wanted
    if dispatcher.stats.cache_path is None:  # without a cache it cannot load what another process compiles
        dispatcher.compile(types)
    elif not _load(dispatcher, types):
        _share(wanted, expected)
        load_or_make(_name(dispatcher), lambda: _load(dispatcher, types), lambda: dispatcher.compile(types))


def _share(wanted: Function, expected: Iterable[Function]) -> None:
    """If a core is free, compile the functions that are neither cached nor being compiled by another process."""
    with core() as free:
        # The longest first, so that all processes finish at about the same time.
        functions = sorted([wanted, *expected], key=_length, reverse=True) if free else []
        for dispatcher, types in functions:
            if dispatcher.stats.cache_path is None or _load(dispatcher, types):
                continue
            with attempt(_name(dispatcher)) as mine:
                if mine and not _load(dispatcher, types):
                    dispatcher.compile(types)


def _length(function: Function) -> int:
    return len(function[0].py_func.__code__.co_code)


def _name(dispatcher: Any) -> str:
    function = dispatcher.py_func
    return f"{function.__code__.co_filename}:{function.__qualname__}"


def _load(dispatcher: Any, types: tuple[Any, ...]) -> bool:
    """Load a function from the cache as the dispatcher does; returns whether it is loaded now."""
    with global_compiler_lock:
        if types in dispatcher.overloads:
            return True
        found = dispatcher._cache.load_overload(types, dispatcher.targetctx)
        if found is None:
            return False
        dispatcher._cache_hits[types] += 1
        dispatcher.targetctx.insert_user_function(found.entry_point, found.fndesc, [found.library])
        dispatcher.add_overload(found)
        return True
