"""The file-system operations of saving: no other code of a save creates, moves or removes a file.

If the machine stops, each operation has happened as a whole or not at all.  Only those with ``sync`` in their name wait
until the data is on the disk.  All raise OSError with the path.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

_LONG_S = 3600.0


def make_folder(path: Path) -> None:
    """Make a folder, which must not exist."""
    os.mkdir(path)


def write(file: io.FileIO, data: bytes) -> None:
    """Write to a file that `hold` made."""
    with open(file.fileno(), "wb", closefd=False) as stream:
        stream.write(data)


def hold(path: Path) -> io.FileIO:
    """Make an empty, locked file, which is not `abandoned` until it is closed or the process ends."""
    # It gets its name after it is locked, so that no process finds it without its lock.
    unheld = path.with_name(f"{path.name}.unheld")
    file = io.FileIO(unheld, "x")
    try:
        with suppress(OSError):  # some file systems have no locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(unheld, path)
    except BaseException:
        file.close()
        raise
    return file


def refusing_links(path: str, flags: int) -> int:
    """An opener for `open` that follows no symbolic link: OSError if there is one."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def abandoned(path: Path, held: Path) -> bool:
    """Return True if the process is dead that made a file, a link, or a folder with the file `held` in it.

    Without a lock it counts as dead if nothing was changed for an hour.
    """
    try:
        with io.FileIO(held, "r+", opener=refusing_links) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except BlockingIOError:
        return False
    except OSError:
        inside = path.iterdir() if path.is_dir() and not path.is_symlink() else ()
        return time.time() - max(each.lstat().st_mtime for each in (path, *inside)) > _LONG_S


def sync(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a folder; their folders are on the disk as soon as they are made.
        if error.errno != errno.EINVAL or not path.is_dir():
            raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Rename a folder, atomically."""
    os.rename(source, target)


def make_link(link: Path, target: str) -> None:
    """Make a symbolic link."""
    os.symlink(target, link)


def replace_link(source: Path, link: Path) -> None:
    """Replace `link` by the symbolic link `source`, atomically."""
    os.replace(source, link)


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with its content, if it exists."""
    with suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            os.unlink(path)


def free_bytes(path: Path) -> int | None:
    """Free bytes on the disk of a folder, or of its nearest existing parent; None if unknown."""
    for folder in (path, *path.parents):
        try:
            return shutil.disk_usage(folder).free
        except OSError:
            continue
    return None


class DiskFile(io.FileIO):
    """A new file, or one made by `hold`, through which HDF5 writes; it stores errors instead of raising them.

    After the first error it writes nothing but reports success, so that HDF5 can close the file.
    """

    def __init__(self, path: Path, held: bool = False) -> None:
        super().__init__(path, "w+" if held else "x+", opener=refusing_links)
        self.error: BaseException | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        size, done = len(view), 0
        try:
            # One call writes at most 2 GiB, and may write less than requested.
            while self.error is None and done < size:
                done += super().write(view[done:])
        except BaseException as error:
            self.error = error.with_traceback(None)
        return size

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        done = 0
        try:
            while self.error is None and done < len(view) and (count := super().readinto(view[done:])):
                done += count
        except BaseException as error:
            self.error = error.with_traceback(None)
        view[done:] = bytes(len(view) - done)
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        size = self.tell() if size is None else size
        try:
            if self.error is None:
                super().truncate(size)
        except BaseException as error:
            self.error = error.with_traceback(None)
        return size

    def check(self) -> None:
        """Raise the stored error, with the path if it is an OSError."""
        if isinstance(self.error, OSError):
            raise OSError(self.error.errno, self.error.strerror or str(self.error), os.fspath(self.name)) from None
        if self.error is not None:
            raise self.error
