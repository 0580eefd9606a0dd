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


def objects_stay() -> None:
    """Let collections of young objects pass over all that there are now; a full collection looks at them, as before.

    After `no_garbage_collection` the next two collections would look at every object that was made in it.
    """
    if not gc.get_freeze_count():  # what the user has frozen stays frozen
        gc.freeze()
        gc.unfreeze()  # to the oldest generation
