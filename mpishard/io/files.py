"""Files that other users or programs may have written, or in folders into which they may write.

Such a user can put a link to another file there, under a name that is about to be written, or replace a folder in it.
So a new file never takes an existing name, links are not followed, and a folder that must be private is checked again
at every use.  What is read may be no file: opening a pipe would wait, and a device never ends.

Small JSON files, with which processes send notes to each other, appear as a whole by an atomic rename.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import json
import os
import pwd
import re
import secrets
import stat
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LARGEST_NOTE = 2**26  # bytes of a file that is read as a whole, such as JSON
_KINDS = {stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe", stat.S_IFCHR: "device", stat.S_IFBLK: "device"}


class NotPrivateError(ValueError):
    """A folder that must be private to its owner was replaced, or is open to others."""


def create(path: Path | str, mode: int = 0o666, folder: int | None = None) -> int:
    """Make a new file, to read and write; its descriptor.  FileExistsError if the name exists, also as a link."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=folder)


def open_to_append(path: Path, mode: int = 0o644) -> int:
    """The descriptor of a new or existing file, to read and append; OSError if it is a link or no plain file."""
    return _open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, mode)


def open_to_read(path: Path | str, most: int | None = None, *, folder: int | None = None, links: bool = True) -> int:
    """The descriptor of a regular file, to read; it waits for nothing.

    `folder` is the descriptor of the folder that has it.  OSError for anything else, or a file of more than `most`
    bytes.
    """
    descriptor = _open_regular(path, os.O_RDONLY | (0 if links else os.O_NOFOLLOW), folder=folder)
    size = os.fstat(descriptor).st_size
    if most is not None and size > most:
        os.close(descriptor)
        raise OSError(errno.EFBIG, f"it has {size} bytes, but at most {most} are read", str(path))
    return descriptor


def _open_regular(path: Path | str, flags: int, mode: int = 0, folder: int | None = None) -> int:
    """The descriptor of a regular file; OSError with its path for anything else.

    Without O_NONBLOCK opening a pipe would wait.  What was opened is looked at, since its name may lead elsewhere now.
    """
    name = path if folder is None else os.path.basename(path)
    try:
        descriptor = os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode, dir_fd=folder)
    except OSError as error:
        text = "it is a link, which is not followed" if error.errno == errno.ELOOP else error.strerror
        raise OSError(error.errno, text, str(path)) from None
    found = os.fstat(descriptor).st_mode
    if stat.S_ISREG(found):
        return descriptor
    os.close(descriptor)
    kind = _KINDS.get(stat.S_IFMT(found), "socket")
    code = errno.EISDIR if kind == "folder" else errno.EINVAL
    raise OSError(code, f"it is a {kind}, but must be a regular file", str(path))


def read(path: Path | str, most: int | None = LARGEST_NOTE, *, folder: int | None = None, links: bool = True) -> bytes:
    """The content of a regular file; OSError as `open_to_read`."""
    with os.fdopen(open_to_read(path, most, folder=folder, links=links), "rb") as file:
        return file.read(most)


def time_of(path: Path) -> float:
    """The time at which a file was written, in seconds since 1970; 0 if it does not exist."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def check(path: Path | str) -> None:
    """Raise OSError unless a path leads to a regular file, for a library that opens it by name."""
    os.close(open_to_read(path))


@contextlib.contextmanager
def opened(folder: Path, *, private: bool = False) -> Iterator[int]:
    """Descriptor of a folder, for operations relative to it; closed at the end.

    With `private`, NotPrivateError unless it belongs to this user and is closed to all others.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (os.O_NOFOLLOW if private else 0)
    try:
        descriptor = os.open(folder, flags)
    except OSError as error:
        # For a link Linux has the one error, other systems the other.
        if private and error.errno in (errno.ENOTDIR, errno.ELOOP) and os.path.lexists(folder):
            raise NotPrivateError(f"{folder} must be a folder that nobody else may open (mode 0700)") from None
        raise
    try:
        if private:
            _check_private(folder, os.fstat(descriptor))
        yield descriptor
    finally:
        os.close(descriptor)


def _check_private(folder: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise NotPrivateError(
            f"{folder} belongs to user {found.st_uid}, and this is user {os.geteuid()}: only who has started a run may "
            "use it"
        )
    if found.st_mode & 0o077:
        raise NotPrivateError(f"{folder} must be a folder that nobody else may open (mode 0700)")


def warn_of_writers(folder: Path) -> None:
    """Warn, once per process, if other users may write into a folder of this run; a missing one is left alone."""
    try:
        found = os.stat(folder)
    except OSError:  # a later use of the folder raises
        return
    if found.st_uid not in (0, os.geteuid()):
        who = f"belongs to user {found.st_uid}, who may write into it"
    elif found.st_mode & 0o002:
        who = "may be written by all users"
    elif found.st_mode & 0o020 and not _is_own_group(found.st_gid):
        who = f"may be written by the users of group {found.st_gid}"
    else:
        return
    warnings.warn(
        f"{folder} {who}: they can exchange what this run writes there and reads again; take a folder of your own "
        f"(chmod go-w {folder}), unless you trust them",
        RuntimeWarning,
        stacklevel=1,  # the same line for all callers, so that Python shows it once
    )


def _is_own_group(gid: int) -> bool:
    """Return True if a group is the private group that many systems make for each user."""
    with contextlib.suppress(KeyError):
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid()).pw_name
        return group.gr_name == user and set(group.gr_mem) <= {user}
    return False


# -- notes -------------------------------------------------------------------------------------------------------------

_DEEPEST = 100  # lists and objects in each other; Python fails at some 1000, less what calls are under way


def parsed(text: str | bytes) -> Any:
    """The value of a JSON text that others may have written; ValueError if it is none, or nested more than 100 deep."""
    text = text if isinstance(text, str) else text.decode()
    deep = ValueError(f"its lists and objects are more than {_DEEPEST} deep")
    try:
        found = json.loads(text)
    except RecursionError:
        raise deep from None
    if text.count("[") + text.count("{") > _DEEPEST and is_deep(found):
        raise deep
    return found


def is_deep(value: Any) -> bool:
    """Return True if lists and objects are nested more than 100 deep: `parsed` would refuse their JSON."""
    layer = [value]
    for _ in range(_DEEPEST + 1):
        inner = [each for each in layer if isinstance(each, dict | list)]
        layer = [value for each in inner for value in (each.values() if isinstance(each, dict) else each)]
        if not layer:
            return False
    return True


def write_whole(path: Path, data: bytes) -> None:
    """Write a file next to `path` and rename it, so that a full disk leaves the old file; OSError says the way out."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        if path.exists() and not path.is_file():  # such as /dev/stdout
            path.write_bytes(data)
            return
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise OSError(f"cannot write {path}: {error.strerror}; choose another place for it") from None


def write_note(path: Path, content: Any, *, private: bool = False) -> None:
    """Write a file that only the owner can read, under a temporary name, which is then renamed.

    NotPrivateError if the folder must be private to the owner and is not.
    """
    temporary = f".{path.name}-{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        with opened(path.parent, private=private) as folder:
            try:
                with os.fdopen(create(temporary, 0o600, folder), "w") as file:
                    json.dump(content, file)
                os.rename(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)
                raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def read_note(path: Path, *, private: bool = False, most: int | None = LARGEST_NOTE) -> Any:
    """The content of a file; None if it does not exist, ValueError if it is not JSON.

    OSError if it has more than `most` bytes. NotPrivateError if the folder must be private to the owner and is not.
    """
    try:
        with opened(path.parent, private=private) as folder:
            data = read(path, most, folder=folder, links=False)
    except FileNotFoundError:
        return None
    try:
        return parsed(data)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None


def remove_notes(folder: Path, names: str = "") -> None:
    """Remove the files of a private folder, or those whose names match a pattern.  Folders in it stay."""
    with opened(folder, private=True) as descriptor:
        for name in os.listdir(descriptor):
            if not names or re.fullmatch(names, name):
                with contextlib.suppress(IsADirectoryError):
                    os.unlink(name, dir_fd=descriptor)
