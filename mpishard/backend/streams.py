"""The streams of a device on which copies to and from the host run beside its computation.

The computation goes on in the caller's current stream.  Copies to the host have one stream and copies to the device
another, so that the bus is used in both directions at once.  Streams wait for each other by events; the host waits for
none of them here but in `copy_together`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpishard.backend.kinds import Array, Backend, Event, Stream, backend_of
from mpishard.backend.pinned import PinnedPool


class CopyStreams:
    """The two streams for copies of one device, and its pinned memory; see `copy_streams`.

    Attributes
    ----------
    out, back : Stream
        For copies to the host, and to the device.
    pinned : PinnedPool
    """

    def __init__(self, like: Array) -> None:
        backend = backend_of(like)
        self.out: Stream = backend.new_stream(like)
        self.back: Stream = backend.new_stream(like)
        self.pinned = PinnedPool()


# Streams and pinned memory belong to a device of this process, as CuPy's memory pools do.
_streams: dict[tuple[Backend, int], CopyStreams] = {}


def copy_streams(like: Array) -> CopyStreams:
    """The streams for copies of the device of `like`, which are made at first use.  Not collective.

    Parameters
    ----------
    like : array
        A device array.

    Returns
    -------
    CopyStreams
        The same for all arrays of a device.
    """
    backend = backend_of(like)
    key = backend, backend.device_number(like)
    found = _streams.get(key)
    if found is None:
        found = _streams[key] = CopyStreams(like)
    return found


def record_current(like: Array) -> Event:
    """An event that is over when all that was queued so far on the current stream of the device of `like` is.

    Parameters
    ----------
    like : array
        A device array.

    Returns
    -------
    Event
        See `Backend.record`.
    """
    backend = backend_of(like)
    return backend.record(like, backend.current_stream(like))


def copy_together(pairs: Sequence[tuple[Array, np.ndarray]]) -> None:
    """Copy device arrays to the host; all copies are queued before the host waits for them, once a device.

    Not collective.

    Parameters
    ----------
    pairs : sequence of (array, NumPy array)
        Contiguous, alike in size and dtype; the second from `pinned_empty`.  NumPy arrays are copied at once.
    """
    last: dict[CopyStreams, Event] = {}
    for source, target in pairs:
        backend = backend_of(source)
        if not backend.device:
            np.copyto(target, source)
        elif source.size:
            streams = copy_streams(source)
            if streams not in last:
                streams.out.wait_event(record_current(source))
            backend.start_to_host(source, target, streams.out)
            last[streams] = backend.record(source, streams.out)
    for event in last.values():
        event.synchronize()
