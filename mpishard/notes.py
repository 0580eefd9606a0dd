"""Small JSON files by which processes tell each other something; each appears whole."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any


def write_note(path: Path, content: Any) -> None:
    """Write a file that only the owner reads, under another name, and rename it.

    Raises
    ------
    OSError
        With the path; nothing is left then.
    """
    beside = path.with_name(f".{path.name}-{os.uname().nodename}-{os.getpid()}")
    try:
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(content, file)
        beside.rename(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from None


def read_note(path: Path) -> Any:
    """What is in a file; None if it is not there."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
