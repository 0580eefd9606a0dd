"""Pauses of Python's garbage collection."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """No garbage collection in this context, which makes very many objects that stay, and no cycles of them.

    A collection looks at all objects of the process, again and again while their number grows.

    Yields
    ------
    None
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
