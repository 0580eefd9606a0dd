"""The proof that NCCL works here: each kind of call on a few small numbers, before the first real one."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpishard.backend import array as arrays
from mpishard.comm.nccl_queue import NcclQueue

Array = Any


def prove(queue: NcclQueue, rank: int, size: int, like: Array) -> None:
    """Raise RuntimeError unless each kind of call gives the right values. Collective over the communicator.

    NCCL connects the ranks here, for which they wait for each other, and not first in a call that is started. `queue`
    is not used yet.
    """
    own, total = rank + 1, size * (size + 1) // 2
    ranks = np.arange(1, size + 1, dtype=np.float32)
    even = arrays.on_device_of(np.full(size, own, np.float32), like)
    # Rank r has r + 1 elements of the uneven pieces.
    counts = list(range(1, size + 1))
    mine = slice(total_before(own), total_before(own + 1))
    uneven = arrays.on_device_of(np.full(total, own, np.float32), like)
    runs = [slice(each, each + 1) for each in range(size)]

    tops, sums = np.zeros(size, np.float32), np.zeros(total, np.float32)
    tops[rank], sums[mine] = size, total
    expected = [np.full(size, total, np.float32), tops, ranks, ranks, sums, np.repeat(ranks, counts)]
    found = [arrays.zeros(each.size, np.float32, like=like) for each in expected]

    def work() -> None:
        queue.all_reduce(even, found[0], "sum")
        queue.reduce_scatter(even, found[1][rank : rank + 1], [1] * size, "max")
        queue.all_gather(even[:1], found[2], [1] * size)
        queue.all_to_all(even, found[3], runs, runs)
        queue.reduce_scatter(uneven, found[4][mine], counts, "sum")
        queue.all_gather(uneven[mine], found[5], counts)
        queue.broadcast(even, size - 1)

    queue.let_wait(like, queue.queue(like, work))
    found.append(even)
    expected.append(np.full(size, size, np.float32))
    names = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "reduce", "broadcast", "broadcast in place")
    for name, values, right in zip(names, found, expected, strict=True):
        if not np.array_equal(arrays.to_host(values), right):
            raise RuntimeError(f"{name} of NCCL gives wrong values for a few small numbers")


def total_before(count: int) -> int:
    """The sum of the whole numbers below `count`."""
    return count * (count - 1) // 2
