"""Partial sums of a rank's micro-batches, for runs whose sums have one order whatever the ranks are."""

from __future__ import annotations

from typing import Any

from mpishard.backend import array as arrays
from mpishard.backend.array import accumulate
from mpishard.parameters.gradient_buckets import Bucket

Array = Any


class PartialSums:
    """A stack of gradients of some buckets, each the sum of some of this rank's micro-batches in the current step.

    The order in which they are added is that of `mpishard.reduction.tree_sum`.

    Parameters
    ----------
    start, stop : int
        The range of the flat parameters that the buckets cover.
    like : array
        An array of the dtype and device of the gradients.

    Attributes
    ----------
    block : 1-D array or None
        The memory of the gradient under way; None: the buckets' own.
    spare : list of 1-D arrays
        Memory of earlier partial sums, to use again.
    """

    def __init__(self, start: int, stop: int, like: Array) -> None:
        self.block: Array | None = None
        self.spare: list[Array] = []
        self._start, self._stop = start, stop
        self._like = like
        self._sums: list[Array] = []
        self._own: Array | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the partial sums and of the spare memory, without the buckets' own."""
        blocks = [*self._sums, *self.spare, *(() if self.block is None else (self.block,))]
        return sum(int(block.nbytes) for block in blocks if block is not self._own)

    def push(self, flat: Array, tree_merges: int) -> None:
        """Add the `tree_merges` newest partial sums to a gradient, the newest first; it takes their place."""
        for _ in range(tree_merges):
            other = self._sums.pop()
            accumulate(flat, other)
            self.spare.append(other)
        self._sums.append(flat)

    def push_block(self, own: Array, tree_merges: int) -> None:
        """Push the gradient under way; the next one goes to other memory.  `own` is the memory of the buckets."""
        if self.block is None:
            self.block = self._own = own
        self.push(self.block, tree_merges)
        self.block = self.another()

    def another(self) -> Array:
        """Uninitialised memory for a gradient."""
        if self.spare:
            return self.spare.pop()
        return arrays.empty(self._stop - self._start, self._like.dtype, like=self._like)

    def part(self, bucket: Bucket) -> Array:
        """The memory of a bucket in that of the gradient under way, where that is a `block`."""
        assert self.block is not None
        return self._part(self.block, bucket)

    def add_newest(self, bucket: Bucket, gradient: Array, newest: int) -> None:
        """Add the `newest` partial sums to the gradient under way of a bucket, the newest first."""
        for flat in self._sums[len(self._sums) - newest :][::-1]:
            accumulate(gradient, self._part(flat, bucket))

    def earlier(self, bucket: Bucket, newest: int) -> list[Array]:
        """The partial sums of a bucket, oldest first, without the `newest` that belong to the gradient under way."""
        return [self._part(flat, bucket) for flat in self._sums[: len(self._sums) - newest]]

    def forget(self) -> None:
        """Forget the partial sums, for the next step; their memory is spare."""
        self.spare += self._sums
        if self.block is not None:
            self.spare.append(self.block)
        self.spare = [block for block in self.spare if block is not self._own]
        self._sums.clear()
        self.block = self._own = None

    def _part(self, flat: Array, bucket: Bucket) -> Array:
        return flat[bucket.start - self._start : bucket.stop - self._start]
