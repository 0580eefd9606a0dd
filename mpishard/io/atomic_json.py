"""Small JSON files by which processes tell each other something; each appears whole."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from pathlib import Path
from typing import Any

from mpishard.io import files


def write_note(path: Path, content: Any, *, private: bool = False) -> None:
    """Write a file that only the owner reads, under another name, and rename it.

    Parameters
    ----------
    private : bool
        The folder must be one that nobody else may open.

    Raises
    ------
    NotPrivateError
        If it is not.
    OSError
        With the path; nothing is left then.
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
    """What is in a file; None if it is not there.

    Raises
    ------
    NotPrivateError
        If the folder must be private, and is not.
    ValueError
        If it is no JSON.
    """
    # A pipe, which anybody may have put there, would be waited for.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with files.opened(path.parent, private=private) as folder:
            with os.fdopen(os.open(path.name, flags, dir_fd=folder)) as file:
                return json.load(file)
    except FileNotFoundError:
        return None


def remove_notes(folder: Path, *prefixes: str) -> None:
    """Remove the files of a private folder whose names begin with one of these; without any, all files."""
    with files.opened(folder, private=True) as descriptor:
        for name in os.listdir(descriptor):
            if name.startswith(prefixes or ""):
                os.unlink(name, dir_fd=descriptor)
