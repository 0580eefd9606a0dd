"""Blocks of memory that buckets of gradients, or gathered units of parameters, use in turns.

A block fits what uses it: a table of tokens may be ten times as large as the other units of its model, and blocks of
the size of the largest one, which any of them could use, would be as large as the table each.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mpishard.backend import array as arrays

Array = Any


def block_sizes(sizes: Iterable[int]) -> dict[int, int]:
    """Elements of the block that something of each of these sizes uses in host memory: less than twice its size.

    The largest size shares its blocks with all above half of it, the next size below that with all above half of that,
    and so on.
    """
    found: dict[int, int] = {}
    shared = 0
    for size in sorted(sizes, reverse=True):
        if not found or 2 * size <= shared:
            shared = size
        found[size] = shared
    return found


class BlockPool:
    """Gives out blocks for some sizes, and takes them back.

    On the host blocks are kept and used again, since new memory comes from the kernel page by page. On a device they
    are freed: its allocator keeps memory, and gives it to whoever asks next on the same stream. `like` has the dtype
    and device of the blocks.
    """

    def __init__(self, sizes: Iterable[int], like: Array) -> None:
        self._like = like
        self._keeps = not arrays.is_device(like)
        sizes = set(sizes)
        self._sizes = block_sizes(sizes) if self._keeps else {size: size for size in sizes}
        self._free: dict[int, list[Array]] = {size: [] for size in self._sizes.values()}

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that are kept and not in use."""
        return sum(int(block.nbytes) for free in self._free.values() for block in free)

    def take(self, size: int) -> Array:
        """A block of at least `size` elements, with any content."""
        free = self._free[self._sizes[size]]
        return free.pop() if free else arrays.empty(self._sizes[size], self._like.dtype, like=self._like)

    def give_back(self, block: Array) -> None:
        """Take back a block that `take` gave out."""
        if self._keeps:
            self._free[block.size].append(block)
