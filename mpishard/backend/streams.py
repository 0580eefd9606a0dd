"""The streams of a device on which copies to and from the host run concurrently with its computation; pinned memory.

The computation continues in the caller's current stream. Copies to the host have one stream and copies to the device
another, so that the bus is used in both directions at once. Streams wait for each other by events; the host waits for
none of them here but in `copy_together`. Pinned host memory is kept (`PinnedPool`): the kernel takes longer to pin
pages than a device to fill them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np

from mpishard.backend.kinds import Array, Backend, Event, Stream, backend_of

# What a device's pool keeps at most.  More is pinned while more is under way at once, and given to CuPy's pool after
# that, which keeps it for the next of its size.
KEPT_BYTES = 2**28
_LEAST = 2**12
# Larger slabs have four sizes between two powers of two: less than a quarter of one is not used, and few sizes come to
# lie in CuPy's pool.
_LARGE = 2**22


class Slab:
    """A run of pinned memory."""

    def __init__(self, memory: np.ndarray) -> None:
        self.bytes = memory  # uint8; may be longer than was asked for
        self.free: Event | None = None  # over when the copy that reads it is; None: it may be written now


class PinnedPool:
    """The pinned memory of one device, by size; for one thread at a time.

    Slabs may come back while a copy from them is under way: each has the event of that copy.
    """

    def __init__(self) -> None:
        self._kept: dict[int, list[Slab]] = {}
        self.kept_bytes = 0

    def take(self, nbytes: int, like: Array) -> Slab:
        """A slab of at least `nbytes` bytes.

        If its `free` is not None, whoever writes to it waits for that first, or lets a stream wait.
        """
        size = _rounded(nbytes)
        kept = self._kept.setdefault(size, [])
        for number, slab in enumerate(kept):
            if slab.free is None or slab.free.done:
                slab.free = None
                return self._out(size, number)
        if kept and self.kept_bytes >= KEPT_BYTES:
            return self._out(size, 0)
        return Slab(backend_of(like).pinned_empty(size, np.uint8, like))

    def give(self, slab: Slab, free: Event | None = None) -> None:
        """Give a slab back; `free` is over when the last copy from it is."""
        slab.free = free
        self._kept.setdefault(slab.bytes.size, []).append(slab)
        self.kept_bytes += slab.bytes.size
        if self.kept_bytes > KEPT_BYTES:
            self._shrink()

    def _out(self, size: int, number: int) -> Slab:
        self.kept_bytes -= size
        return self._kept[size].pop(number)

    def _shrink(self) -> None:
        """Drop slabs that no copy reads, the largest first, down to the limit."""
        for size in sorted(self._kept, reverse=True):
            for number in reversed(range(len(self._kept[size]))):
                if self.kept_bytes <= KEPT_BYTES:
                    return
                slab = self._kept[size][number]
                if slab.free is None or slab.free.done:
                    self._out(size, number)


def _rounded(nbytes: int) -> int:
    """The size of the slab for `nbytes` bytes: a power of two, or a multiple of a quarter of one."""
    if nbytes > _LARGE:
        step = 1 << (nbytes - 1).bit_length() - 3
        return -(-nbytes // step) * step
    return max(_LEAST, 1 << (nbytes - 1).bit_length() if nbytes else 0)


class CopyStreams:
    """The two streams for copies of one device, `out` to the host and `back`, and its pinned memory."""

    def __init__(self, like: Array) -> None:
        backend = backend_of(like)
        self.out: Stream = backend.new_stream(like)
        self.back: Stream = backend.new_stream(like)
        self.pinned = PinnedPool()


# Streams and pinned memory belong to a device of this process, as CuPy's memory pools do.
_streams: dict[tuple[Backend, int], CopyStreams] = {}


def copy_streams(like: Array) -> CopyStreams:
    """The streams for copies of the device of `like`, the same for all its arrays; made at first use."""
    backend = backend_of(like)
    key = backend, backend.device_number(like)
    found = _streams.get(key)
    if found is None:
        found = _streams[key] = CopyStreams(like)
    return found


def record_current(like: Array) -> Event:
    """An event that is over when all that was queued so far on the current stream of the device of `like` is."""
    backend = backend_of(like)
    return backend.record(like, backend.current_stream(like))


class PendingNumber:
    """A number of a device on its way to the host: ``float(number)`` waits for it, and what is queued later does not.

    `array`, of shape (1,), is read as of what is queued on the current stream so far.
    """

    def __init__(self, array: Array) -> None:
        backend = backend_of(array)
        stream = backend.current_stream(array)
        pool = copy_streams(array).pinned
        slab = pool.take(array.nbytes, array)
        self._number = slab.bytes[: array.nbytes].view(array.dtype)
        backend.start_to_host(array, self._number, stream)
        self._copied = backend.record(array, stream)
        # Not in __del__: where this is part of a cycle of garbage, Python would call the event's, too, which destroys
        # it, and the pool would ask a destroyed event.
        weakref.finalize(self, pool.give, slab, self._copied).atexit = False

    def __float__(self) -> float:
        self._copied.synchronize()
        return float(self._number[0])


def queue_copy(source: np.ndarray, target: Array) -> None:
    """Copy to an array of a device on its current stream; the host continues, and may change `source` at once."""
    if not target.size:
        return
    backend, pool = backend_of(target), copy_streams(target).pinned
    slab = pool.take(target.nbytes, target)
    if slab.free is not None:
        slab.free.synchronize()
    staged = slab.bytes[: target.nbytes].view(target.dtype).reshape(target.shape)
    staged[...] = source
    stream = backend.current_stream(target)
    backend.start_to_device(staged, target, stream)
    pool.give(slab, backend.record(target, stream))


def copy_together(pairs: Sequence[tuple[Array, np.ndarray]]) -> None:
    """Copy device arrays to the host; all copies are queued before the host waits for them, once a device.

    The arrays of a pair are contiguous and of equal size and dtype, the second from `pinned_empty`. NumPy arrays are
    copied at once.
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
