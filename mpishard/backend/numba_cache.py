"""Compiles functions with Numba, or loads them from its cache; the processes of one user on one node share the work.

Ranks that start together with a cold cache lock bytes of a file, so that each function is compiled once.  If the file
cannot be opened, or a lock is held for long, every process compiles for itself.  Functions that were compiled at the
installation (`mpishard compile`) are loaded from its folder, which no other process writes to.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import inspect
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
from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.core.runtime.nrt import rtsys

from mpishard.arguments import mark

# Compilation in turns.

# After so long a process does not wait for others any more, and compiles for itself.
_WAIT_S = 30.0
_POLL_S = 0.01
# Bytes from here on are locks of cores, bytes before are locks of names.
_CORES = 2**32


def load_or_make(name: str, load: Callable[[], bool], make: Callable[[], None], patience: float = _WAIT_S) -> None:
    """Load the function `name` from the cache, or make it. If another process makes it, wait and then load it.

    `load` returns True if it was in the cache; `make` compiles it and puts it there. If the process that makes it dies,
    another one does. At most as many processes make functions as the node has cores. The others wait for a core without
    calling `load`, which would take processor time from those that compile.  After `patience` seconds it is made here.
    """
    if load():
        return
    deadline = time.monotonic() + patience
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
    """The lock file of this user on this node, open; None if there can be none, or if others could write or lock it."""
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError:  # nothing can be written
        return None
    return _open(os.path.join(folder, f"mpishard-{os.getuid()}.lock"))


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
    """The files of Numba's cache, each with its hash behind it: what is damaged is compiled again.

    A file of code also says what it is of. Nodes that write at the same time, or one that is stopped between index and
    code, may leave an index that leads to the code of another processor, or of an earlier source.
    """

    def save(self, key: Any, data: Any) -> None:
        super().save(key, (self._of(key), data))

    def load(self, key: Any) -> Any:
        found = super().load(key)
        return found[1] if found is not None and found[0] == self._of(key) else None

    def _of(self, key: Any) -> str:
        return repr((self._source_stamp, key))

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
    """Return True if there is such a file that can be read, with its hash behind it, which pickle does not read."""
    try:
        content = Path(path).read_bytes()
    except OSError:
        return False
    return xxhash.xxh3_128_digest(memoryview(content)[:-16]) == content[-16:]


# Functions that were compiled at the installation.  Their files do not say for which processor they are, and nodes of
# other kinds may write at the same time: each kind has a folder of its own.

_PACKAGE = Path(__file__).resolve().parents[1]
# The only folder that this process loads from and writes to, of `compile_into`.
_into: Path | None = None


def compile_into(folder: Path) -> Path:
    """From now on load functions of mpishard from this folder alone, and write there what is compiled.

    Returns the folder in it for this processor. Call it before the first function is made.
    """
    global _into
    _into = folder
    return folder / _processor()


def kernels_folder() -> Path:
    """The folder with what was compiled at the installation: `MPISHARD_KERNELS`, or one in the package."""
    named = os.environ.get("MPISHARD_KERNELS")
    return Path(named).absolute() if named else _PACKAGE / "kernels"


@functools.cache
def _processor() -> str:
    """The name of a folder for this processor, with all of its instructions, and this version of Numba."""
    target = cpu_target.target_context.codegen().magic_tuple()  # what Numba compiles for, see NUMBA_CPU_NAME
    # Functions that call Intel's SVML cannot be loaded without it.
    facts = *target, numba.__version__, getattr(numba.config, "USING_SVML", False)
    return f"{target[1]}-{mark(repr(facts))}"


@functools.cache
def _compiled_before(folder: Path) -> Path | None:
    """What was compiled at the installation for this processor; None without it."""
    found = folder / _processor()
    return found if os.path.isdir(found) else None  # also None where it cannot be looked at


def kept_in() -> tuple[Path | None, str | None]:
    """Where kernels are: what was compiled at the installation for this processor, and what processes compile here.

    None: nothing was, and no folder can be written. Each file of mpishard has a folder like the second one.
    """
    return _compiled_before(kernels_folder()), _Cache(kept_in, {}).cache_path


class _Place:
    """A locator of Numba's cache, which says where it keeps a function: in `folder`."""

    def __init__(self, function: Any, file: str, folder: str) -> None:
        self._line, self._py_file, self._folder = function.__code__.co_firstlineno, file, folder

    def ensure_cache_path(self) -> None:
        os.makedirs(self._folder, exist_ok=True)

    def get_cache_path(self) -> str:
        return self._folder

    def get_source_stamp(self) -> str:
        return _content(self._py_file)

    def get_disambiguator(self) -> str:
        return str(self._line)


class _InKernels(_Place):
    """The folder of `compile_into`."""

    @classmethod
    def from_function(cls, function: Any, file: str) -> Any:
        folder = None if _into is None else _folder_in(_into / _processor(), file)
        return None if folder is None else cls(function, file, str(folder))


class _Nowhere(_Place):
    """Where no other place can be written: what was compiled at the installation is loaded all the same."""

    @classmethod
    def from_function(cls, function: Any, file: str) -> Any:
        return cls(function, file, "") if os.path.exists(file) else None


class _Implementation(CompileResultCacheImpl):
    _locator_classes: Any = [_InKernels, *CompileResultCacheImpl._locator_classes, _Nowhere]


def _folder_in(kernels: Path, file: str) -> Path | None:
    """The folder of the functions of a file of mpishard, which may be moved with the package; None of other files."""
    folder = Path(file).resolve().parent
    return kernels / folder.relative_to(_PACKAGE) if folder.is_relative_to(_PACKAGE) else None


class _Cache(FunctionCache):
    """Numba's cache, which here loads without the imports that only compiling needs (a third of a second per process).

    The compiler itself refreshes the context before it compiles. Numba finds a function again as long as its own file
    is the same; here what else is compiled with it, and the options, must be the same too. What was compiled at the
    installation comes first. Without a place that can be written nothing is kept, and `cache_path` is None.
    """

    _impl_class = _Implementation

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        super().__init__(function)
        self._cache_path = self._cache_path or None
        name, file = self._impl.filename_base, inspect.getfile(function)
        self._places: list[_CheckedFiles] = []
        if _into is None and (kernels := _compiled_before(kernels_folder())) and (folder := _folder_in(kernels, file)):
            self._places.append(_CheckedFiles(str(folder), name, _content(file)))
        if self._cache_path is not None:
            stamp = self._impl.locator.get_source_stamp()
            self._cache_file = _CheckedFiles(self._cache_path, name, stamp)
            self._places.append(self._cache_file)
        settings = sorted((name, sorted(each) if isinstance(each, set) else each) for name, each in options.items())
        self._mark = hashlib.sha256(repr((settings, _compiled_with(function))).encode()).hexdigest()

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        key = self._index_key(sig, target_context.codegen())
        for files in self._places:
            found = files.load(key)
            if found is not None:
                return self._impl.rebuild(target_context, found)
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        if self._cache_path is None:
            return
        try:
            super().save_overload(sig, data)
        except OSError:
            # The disk is full, or a quota: this process has its function.
            if _into is not None:
                raise

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
    # RuntimeError: the function is in no file.
    with contextlib.suppress(RuntimeError):
        dispatcher._cache = _Cache(function, options)
    return dispatcher


def prepare() -> None:
    _ = cpu_target.target_context  # made at the first use


def types_of(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Numba's types of the arguments."""
    return tuple(map(numba.typeof, arguments))


def in_turn(wanted: Function, expected: Iterable[Function]) -> None:
    """Compile a function that `load` has not found, or load it where another process of this user and node compiles it.

    The processes that compile also compile the `expected` functions, each another one.
    """
    dispatcher, types = wanted
    if dispatcher.stats.cache_path is None:  # it cannot load what another process compiles
        dispatcher.compile(types)
    else:
        _share(wanted, expected)
        load_or_make(_name(dispatcher), lambda: load(dispatcher, types), lambda: dispatcher.compile(types))


def _share(wanted: Function, expected: Iterable[Function]) -> None:
    """If a core is free, compile the functions that are neither cached nor being compiled by another process."""
    with core() as free:
        # The longest first, so that all processes finish at about the same time.
        functions = [wanted, *expected] if free else []
        for dispatcher, types in sorted(functions, key=lambda each: -len(each[0].py_func.__code__.co_code)):
            if load(dispatcher, types) or dispatcher.stats.cache_path is None:
                continue
            with attempt(_name(dispatcher)) as mine:
                if mine and not load(dispatcher, types):
                    dispatcher.compile(types)


def _name(dispatcher: Any) -> str:
    function = dispatcher.py_func
    return f"{function.__code__.co_filename}:{function.__qualname__}"


def load(dispatcher: Any, types: tuple[Any, ...]) -> bool:
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
