"""Small JSON files with which processes send notes to each other; each file appears as a whole (atomic rename)."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from pathlib import Path
from typing import Any

from mpishard.io import files

_DEEPEST = 100  # lists and objects in each other; Python fails at some 1000, less what calls are under way


def parsed(text: str | bytes) -> Any:
    """The value of a JSON text that others may have written; ValueError if it is none, or nested more than 100 deep."""
    text = text if isinstance(text, str) else text.decode()
    deep = ValueError(f"its lists and objects are more than {_DEEPEST} deep")
    try:
        found = json.loads(text)
    except RecursionError:
        raise deep from None
    if text.count("[") + text.count("{") <= _DEEPEST:
        return found
    layer = [found]
    for _ in range(_DEEPEST + 1):
        inner = [each for each in layer if isinstance(each, dict | list)]
        layer = [value for each in inner for value in (each.values() if isinstance(each, dict) else each)]
        if not layer:
            return found
    raise deep


def write_note(path: Path, content: Any, *, private: bool = False) -> None:
    """Write a file that only the owner can read, under a temporary name, which is then renamed.

    NotPrivateError if the folder must be private to the owner and is not.
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
    """The content of a file; None if it does not exist, ValueError if it is not JSON.

    NotPrivateError if the folder must be private to the owner and is not.
    """
    try:
        with files.opened(path.parent, private=private) as folder:
            data = files.read(path, folder=folder, links=False)
    except FileNotFoundError:
        return None
    try:
        return parsed(data)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None


def remove_notes(folder: Path, *prefixes: str) -> None:
    """Remove files of a private folder whose names begin with one of some prefixes; without prefixes all."""
    with files.opened(folder, private=True) as descriptor:
        for name in os.listdir(descriptor):
            if name.startswith(prefixes or ""):
                os.unlink(name, dir_fd=descriptor)
