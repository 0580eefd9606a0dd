"""Lines for stderr and stdout, which may be a full disk, a terminal that is gone, or closed: no rank fails by that."""

from __future__ import annotations

import contextlib
import sys
from typing import Any


def say(text: str) -> None:
    """Write lines to the present `sys.stderr`, in one piece, so that those of ranks do not mix."""
    _write(sys.stderr, text)


def show(text: str) -> None:
    """Write what a user has asked to see to the present `sys.stdout`, in one piece."""
    _write(sys.stdout, text)


def is_terminal(stream: Any) -> bool:
    """Return True if a stream is a terminal; not if it is closed, None, or another object that cannot tell."""
    with contextlib.suppress(Exception):
        return bool(stream.isatty())
    return False


def _write(stream: Any, text: str) -> None:
    with contextlib.suppress(Exception):  # a stream of the user's may raise anything, and one that is None has no write
        stream.write(text if text.endswith("\n") else f"{text}\n")
        stream.flush()
