"""Pinned host memory that is kept: the kernel takes longer to pin pages than a device to fill them."""

from __future__ import annotations

import numpy as np

from mpishard.backend.kinds import Array, Event, backend_of

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
