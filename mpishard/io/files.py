"""Files in folders into which other users may write, too.

Such a user can put a link to another file there, under a name that is about to be written, or replace a folder in it.
So a new file never takes an existing name, links are not followed, and a folder that must be private is checked again
at every use.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import pwd
import stat
import warnings
from collections.abc import Iterator
from pathlib import Path


class NotPrivateError(ValueError):
    """A folder that must be private to its owner was replaced, or is open to others.

    Not collective.
    """


def create(path: Path | str, mode: int = 0o666, folder: int | None = None) -> int:
    """Make a new file, to read and write.

    Not collective.

    Parameters
    ----------
    path : path
        Relative to `folder` if that is given.
    mode : int
        Permissions, less those that the process masks.
    folder : int, optional
        Descriptor of a folder.

    Returns
    -------
    int
        The descriptor of the file.

    Raises
    ------
    FileExistsError
        If the name exists, also as a link.
    """
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=folder)


def open_to_append(path: Path, mode: int = 0o644) -> int:
    """Open a new or existing file, to read and append.

    Not collective.

    Parameters
    ----------
    path : path
        Of the file.
    mode : int
        Permissions of a new file.

    Returns
    -------
    int
        The descriptor of the file.

    Raises
    ------
    OSError
        If it is a link or no plain file, or cannot be opened.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, mode)
    except OSError as error:
        text = "it is a link, which is not followed" if error.errno == errno.ELOOP else error.strerror
        raise OSError(error.errno, text, str(path)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no file", str(path))
    return descriptor


@contextlib.contextmanager
def opened(folder: Path, *, private: bool = False) -> Iterator[int]:
    """Descriptor of a folder, for operations relative to it.

    Not collective.

    Parameters
    ----------
    folder : path
        Must exist.
    private : bool
        Whether it must belong to this user, and be closed to all others.

    Yields
    ------
    int
        The descriptor, which is closed at the end.

    Raises
    ------
    NotPrivateError
        If it must be private and is no folder, another user's, or open to others.
    OSError
        FileNotFoundError if it does not exist.
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
    """Warn if other users may write into a folder of this run.

    Once per process.  Not collective.

    Parameters
    ----------
    folder : path
        Of a run; one that is missing is left to its next use.

    Warns
    -----
    RuntimeWarning
        With who may write there.
    """
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
    """Whether a group is the private group that many systems make for each user."""
    with contextlib.suppress(KeyError):
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid()).pw_name
        return group.gr_name == user and set(group.gr_mem) <= {user}
    return False
