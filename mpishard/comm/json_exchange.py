"""Values between ranks as JSON, for waits without a time limit: some rank may wait for a disk.

A disk may take longer than the time limit of a collective, and a thread that blocks in MPI would take a core from the
training.  So these functions poll, and sleep in between.  They need a separate axis, without a watchdog.
"""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np

from mpishard.comm.axis import Axis
from mpishard.comm.channel import Request

# A poll sleeps for this part of the wait so far, and for these seconds at least and at most.
_PART, _FIRST_S, _LONGEST_S = 0.1, 0.0002, 0.02


def finish(pending: Request) -> Any:
    """Wait for `pending` by polling, and return its result; MPI.Exception if a rank dies or revokes the axis (ULFM)."""
    began = time.monotonic()
    while not pending.test():
        time.sleep(min(max(_FIRST_S, _PART * (time.monotonic() - began)), _LONGEST_S))
    return pending.wait()


def gather(axis: Axis, value: Any) -> list[Any]:
    """Gather the values of all ranks, by rank, on rank 0; empty on other ranks.  Collective.

    `value` must be valid for JSON: None, booleans, numbers, strings, lists, and mappings with strings as keys.
    """
    encoded = _encoded(value)
    sizes = _sizes(axis, encoded)
    if axis.rank:
        finish(axis.start_send(encoded, 0))
        return []
    received = [encoded, *(np.empty(size, np.uint8) for size in sizes[1:])]
    receives = [axis.start_recv(buffer, rank) for rank, buffer in enumerate(received) if rank]
    try:
        for receive in receives:
            finish(receive)
    except Exception:
        axis.revoke()  # or the wait for receives that cannot end would not end
        for receive in receives:
            receive.abandon()
        raise
    return [_decoded(buffer) for buffer in received]


def share(axis: Axis, value: Any) -> Any:
    """Share the value of rank 0, as for `gather`, with all ranks.  Collective."""
    encoded = _encoded(value if axis.rank == 0 else None)
    size = np.array([encoded.size], np.int64)
    finish(axis.start_broadcast(size))
    if axis.rank:
        encoded = np.empty(int(size[0]), np.uint8)
    finish(axis.start_broadcast(encoded))
    return _decoded(encoded)


def gather_lists(axis: Axis, own: list[Any]) -> list[Any]:
    """The lists of all ranks, as for `gather`, end to end on all ranks.  Collective."""
    encoded = _encoded(own) if own else np.empty(0, np.uint8)
    sizes = _sizes(axis, encoded)
    if not sizes.any():
        return []
    received = np.empty(sizes.sum(), np.uint8)
    finish(axis.start_all_gather(received, encoded, sizes.tolist()))
    return [each for part in np.split(received, np.cumsum(sizes)[:-1]) if part.size for each in _decoded(part)]


def _sizes(axis: Axis, encoded: np.ndarray) -> np.ndarray:
    sizes = np.zeros(axis.size, np.int64)
    finish(axis.start_all_gather(sizes, np.array([encoded.size], np.int64), [1] * axis.size))
    return sizes


def _encoded(value: Any) -> np.ndarray:
    return np.frombuffer(bytearray(json.dumps(value).encode()), np.uint8)


def _decoded(buffer: np.ndarray) -> Any:
    return json.loads(buffer.tobytes())
