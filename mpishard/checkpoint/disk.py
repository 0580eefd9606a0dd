"""What saving does to the file system, step by step: nothing else in it creates, moves or removes a file.

Each function is one step that either happened or did not when the machine stops there, and is on the disk, not only in
its cache, where the name says ``sync``.  All raise OSError with the path.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def make_folder(path: Path) -> None:
    """Make a folder, which must not be there yet."""
    os.mkdir(path)


def write(path: Path, data: bytes) -> None:
    """Write a new file."""
    with open(path, "xb") as file:
        file.write(data)


def sync(path: Path) -> None:
    """Return when the content of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Give a folder its name, at once."""
    os.rename(source, target)


def make_link(link: Path, target: str) -> None:
    """Make a symbolic link."""
    os.symlink(target, link)


def replace_link(source: Path, link: Path) -> None:
    """Put the symbolic link `source` in the place of `link`, at once."""
    os.replace(source, link)


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with all that is in it; not being there is as good."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            os.unlink(path)
    except FileNotFoundError:
        pass


def free_bytes(path: Path) -> int | None:
    """Bytes that are free on the disk of a folder or of the nearest folder above that is there; None if unknown."""
    for folder in (path, *path.parents):
        try:
            return shutil.disk_usage(folder).free
        except OSError:
            continue
    return None
