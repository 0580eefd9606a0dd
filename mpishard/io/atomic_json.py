"""Small JSON files with which processes send notes to each other; each file appears as a whole (atomic rename)."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from pathlib import Path
from typing import Any

from mpishard.io import files


def write_note(path: Path, content: Any, *, private: bool = False) -> None:
    """Write a file that only the owner can read: under a temporary name, then renamed.

    Not collective.

    Parameters
    ----------
    path : path
        Replaced if it exists.
    content : object
        What JSON can hold.
    private : bool
        Whether the folder must be private to the owner.

    Raises
    ------
    NotPrivateError
        If the folder must be private and is not.
    OSError
        With the path; no temporary file is left.
    """
    beside = f".{path.name}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        with files.opened(path.parent, private=private) as folder:
            try:
                with os.fdopen(files.create(beside, 0o600, folder), "w") as file:
                    json.dump(content, file)
                os.rename(beside, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(beside, dir_fd=folder)
                raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def read_note(path: Path, *, private: bool = False) -> Any:
    """Read a file.

    Not collective.

    Parameters
    ----------
    path : path
        Of the file.
    private : bool
        Whether the folder must be private to the owner.

    Returns
    -------
    object
        The content; None if there is no file.

    Raises
    ------
    NotPrivateError
        If the folder must be private, and is not.
    ValueError
        If the file is not JSON.
    """
    # Another user may have put a pipe there; without O_NONBLOCK opening it would wait.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with files.opened(path.parent, private=private) as folder:
            with os.fdopen(os.open(path.name, flags, dir_fd=folder)) as file:
                return json.load(file)
    except FileNotFoundError:
        return None


def remove_notes(folder: Path, *prefixes: str) -> None:
    """Remove files of a private folder.

    Not collective.

    Parameters
    ----------
    folder : path
        Private to its owner.
    *prefixes : str
        Beginnings of names; without one all files are removed.

    Raises
    ------
    NotPrivateError
        If the folder is not private.
    """
    with files.opened(folder, private=True) as descriptor:
        for name in os.listdir(descriptor):
            if name.startswith(prefixes or ""):
                os.unlink(name, dir_fd=descriptor)
