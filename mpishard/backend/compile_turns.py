"""Turns that the processes of one user and node take at compiling.

A courtesy between ranks that start together on a cold cache, by locks on bytes of a file: where the file cannot be had,
or somebody holds a lock for long, everyone compiles.
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

_PATIENCE_S = 30.0
_POLL_S = 0.01
# Bytes from here on stand for cores, those before for names.
_CORES = 2**32


def take(name: str, load: Callable[[], bool], make: Callable[[], None]) -> None:
    """`load` what `name` stands for, or `make` it, unless another process is about to: then wait, and load it.

    If that process dies, another makes it.  Nobody makes anything while as many others do as the node has cores, and
    who waits for them does not look whether `load` succeeds: they need the time.
    """
    if load():
        return
    deadline = time.monotonic() + _PATIENCE_S
    while _file() is not None and time.monotonic() < deadline:
        with core() as free, attempt(name) if free else contextlib.nullcontext(False) as mine:
            if mine:
                if not load():
                    make()
                return
        if not free:
            time.sleep(_POLL_S)
            continue
        # Shared: all who waited load at once.
        while not _lock(_byte(name), shared=True) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        _unlock(_byte(name))
        if load():
            return
    make()


@contextlib.contextmanager
def attempt(name: str) -> Iterator[bool]:
    """Whether it is this process's turn at `name`, within the context."""
    with _held(_byte(name)) as mine:
        yield mine


@contextlib.contextmanager
def core() -> Iterator[bool]:
    """Whether there are fewer processes in this context than cores of the node."""
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
    """Lock one byte of the file without waiting; whether that was possible."""
    file = _file()
    if file is None:
        return False
    try:
        fcntl.lockf(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB, 1, byte)
    except OSError as error:
        return error.errno not in (errno.EAGAIN, errno.EACCES)  # where there are no locks nobody holds one
    return True


def _unlock(byte: int) -> None:
    file = _file()
    if file is not None:
        with contextlib.suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_UN, 1, byte)


def _file() -> int | None:
    """The open file of this user and node; None where there is none that others can neither write nor lock."""
    return _open(os.path.join(tempfile.gettempdir(), f"mpishard-{os.getuid()}.lock"))


@functools.cache
def _open(path: str) -> int | None:
    """It stays open: closing it in one thread would give up the locks of all."""
    # Anybody can guess the name in a folder that all may write, and be there first with a file or link of their own.
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
