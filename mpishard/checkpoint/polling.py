"""What ranks tell each other while some of them wait for a disk.

A disk may take longer than any collective should, and a thread that blocks in MPI would take a core from the training:
so these ask now and then, in between they sleep.  They need an axis of their own that no watchdog counts on.
"""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np

from mpishard.comm.axis import Axis
from mpishard.comm.request import Request

_FIRST_S, _LONGEST_S = 0.0005, 0.02


def finish(pending: Request) -> Any:
    """What `pending.wait` returns, waited for asleep; MPI.Exception if somebody dies or revokes the axis (ULFM)."""
    pause_s = _FIRST_S
    while not pending.test():
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_S)
    return pending.wait()


def gather(axis: Axis, value: Any) -> list[Any]:
    """Everybody's value, by rank, on rank 0; nothing on the others.  Collective.

    `value` is what JSON can hold: None, booleans, numbers, strings, lists, and mappings with strings as keys.
    """
    told = _encoded(value)
    sizes = _sizes(axis, told)
    if axis.rank:
        finish(axis.start_send(told, 0))
        return []
    heard = [told, *(np.empty(size, np.uint8) for size in sizes[1:])]
    receives = [axis.start_recv(buffer, rank) for rank, buffer in enumerate(heard) if rank]
    try:
        for receive in receives:
            finish(receive)
    except Exception:
        axis.revoke()  # or those that cannot end would be waited for
        for receive in receives:
            receive.abandon()
        raise
    return [_decoded(buffer) for buffer in heard]


def share(axis: Axis, value: Any) -> Any:
    """The value of rank 0, see `gather`, on all ranks.  Collective."""
    told = _encoded(value if axis.rank == 0 else None)
    size = np.array([told.size], np.int64)
    finish(axis.start_broadcast(size))
    if axis.rank:
        told = np.empty(int(size[0]), np.uint8)
    finish(axis.start_broadcast(told))
    return _decoded(told)


def gather_lists(axis: Axis, own: list[Any]) -> list[Any]:
    """Everybody's list, see `gather`, one after the other on all ranks.  Collective."""
    told = _encoded(own) if own else np.empty(0, np.uint8)
    sizes = _sizes(axis, told)
    if not sizes.any():
        return []
    heard = np.empty(sizes.sum(), np.uint8)
    finish(axis.start_all_gather(heard, told, sizes.tolist()))
    return [each for part in np.split(heard, np.cumsum(sizes)[:-1]) if part.size for each in _decoded(part)]


def _sizes(axis: Axis, told: np.ndarray) -> np.ndarray:
    sizes = np.zeros(axis.size, np.int64)
    finish(axis.start_all_gather(sizes, np.array([told.size], np.int64), [1] * axis.size))
    return sizes


def _encoded(value: Any) -> np.ndarray:
    return np.frombuffer(bytearray(json.dumps(value).encode()), np.uint8)


def _decoded(buffer: np.ndarray) -> Any:
    return json.loads(buffer.tobytes())
