"""Compilation in turns: the processes of one user on one node share the work.

Ranks that start together with a cold cache lock bytes of a file, so that each function is compiled once.  If the file
cannot be opened, or a lock is held for long, every process compiles for itself.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import stat
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator

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
