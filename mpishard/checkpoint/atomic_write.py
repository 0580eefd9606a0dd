"""New files and folders that get their name only when they are whole and on the disk."""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mpishard.checkpoint import disk, folder


@contextmanager
def provisional(target: Path, size: int) -> Iterator[Path]:
    """A path beside `target`, for about `size` bytes; after an error it is removed.

    Leftovers of killed processes for the same target are removed first.

    Raises
    ------
    ValueError
        If the target exists, or its folder does not.
    OSError
        With a path, if the disk fails; at once if it has too little space.
    """
    if os.path.lexists(target):
        raise ValueError(f"{target} is there already; give another name, or remove it first")
    if not target.parent.is_dir():
        raise ValueError(f"{target} cannot be made: there is no folder {target.parent}")
    free = disk.free_bytes(target.parent)
    if free is not None and free < size:
        raise OSError(errno.ENOSPC, f"{size} bytes are to be written and {free} are free", str(target))
    folder.sweep(target.parent, re.escape(target.name))
    path = folder.unfinished_path(target, secrets.token_hex(4))
    try:
        yield path
    except BaseException as error:
        disk.remove(path)
        if isinstance(error, OSError) and error.filename is None:
            raise OSError(error.errno, error.strerror or str(error), str(target)) from error
        raise


@contextmanager
def published(target: Path, size: int) -> Iterator[Path]:
    """Like `provisional`, for a file, which at the end is synced and renamed to `target`."""
    with provisional(target, size) as path, disk.hold(path):
        yield path
        disk.sync(path)
        disk.rename(path, target)
    disk.sync(target.parent)
