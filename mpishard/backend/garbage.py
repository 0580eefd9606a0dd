"""Pauses of Python's garbage collection."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator


class _Pauses:
    """The number of pauses at this moment, by any threads, and whether collection was on before the first."""

    lock = threading.Lock()
    count = 0
    was_enabled = False


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """No garbage collection in this context, which makes very many objects that stay, and no cycles of them.

    A collection looks at all objects of the process, again and again while their number grows.
    """
    with _Pauses.lock:
        if not _Pauses.count:
            _Pauses.was_enabled = gc.isenabled()
            gc.disable()
        _Pauses.count += 1
    try:
        yield
    finally:
        with _Pauses.lock:
            _Pauses.count -= 1
            if not _Pauses.count and _Pauses.was_enabled:
                gc.enable()


def objects_stay() -> None:
    """Let collections of young objects skip all that exist now; a full collection looks at them as usual.

    After `no_garbage_collection` the next two collections would look at every object that was made in it.
    """
    if not gc.get_freeze_count():  # what the user has frozen stays frozen, and what Python 3.12 has
        gc.freeze()
        gc.unfreeze()  # to the oldest generation
