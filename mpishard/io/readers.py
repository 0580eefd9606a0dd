"""Threads that read files: system calls and hashes of large blocks run without the interpreter's lock."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import Any, TypeVar

from mpishard.backend.process import cpu_quota, own_cores

Item = TypeVar("Item")
Result = TypeVar("Result")

_MOST_THREADS = 8  # more of them only wait for each other
# Bytes from which a second thread pays.
_LEAST_SHARE = 2**23


class Readers(AbstractContextManager["Readers"]):
    """The share of one of `processes` processes of the cores of its node, as threads that read."""

    def __init__(self, processes: int = 1) -> None:
        cores = min(len(own_cores()), cpu_quota())
        self._threads = max(1, min(int(cores / processes), _MOST_THREADS))
        self._pool = ThreadPoolExecutor(self._threads, "mpishard-read") if self._threads > 1 else None

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """The results of a function for all items, in their order; it runs in several threads at once."""
        if self._pool is None:
            return [function(item) for item in items]
        futures = [self._pool.submit(function, item) for item in items]
        wait(futures)  # before one raises: no thread writes to memory that the caller then uses otherwise
        return [future.result() for future in futures]

    def share(self, function: Callable[[Item], object], items: Sequence[Item], sizes: Sequence[int]) -> None:
        """Call a function for all items: each thread takes some side by side, of about as many bytes of `sizes`."""
        ends = list(accumulate(sizes))
        threads = min(self._threads, ends[-1] // _LEAST_SHARE) if ends else 0
        if threads < 2:
            for item in items:
                function(item)
            return
        inner = [bisect_right(ends, ends[-1] * thread / threads) for thread in range(1, threads)]
        cuts = [0, *inner, len(items)]

        def run(thread: int) -> None:
            for item in items[cuts[thread] : cuts[thread + 1]]:
                function(item)

        self.map(run, range(threads))


def read_into(file: int, place: int, out: Any) -> None:
    """Fill contiguous memory with bytes of a file from `place` on; the position of its descriptor stays where it is.

    OSError if the disk fails, or the file ends before.
    """
    left = memoryview(out).cast("B")
    # One call reads at most 2 GiB, and may read less than requested.
    while left:
        count = os.preadv(file, [left], place)
        if not count:
            raise OSError(f"the file ends at byte {place}, {len(left)} bytes too early")
        place, left = place + count, left[count:]
