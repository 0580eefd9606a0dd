"""Partial sums of a rank's micro-batches, for runs whose sums have one order whatever the ranks are."""

from __future__ import annotations

from typing import Any

from mpishard.backend.array import accumulate
from mpishard.parameters.gradient_buckets import Bucket

Array = Any


class PartialSums:
    """A stack of whole gradients, each the sum of some of this rank's micro-batches in the current step.

    The order in which they are added is that of `mpishard.reduction.tree_sum`.

    Attributes
    ----------
    newest : int
        How many of the newest partial sums are added to the gradient that the last backward pass writes; the others
        stay terms of their own.
    spare : list of 1-D arrays
        Memory of earlier partial sums, to use again.
    """

    def __init__(self) -> None:
        self.newest: int = 0
        self.spare: list[Array] = []
        self._sums: list[Array] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the partial sums and of the spare memory."""
        return sum(int(flat.nbytes) for flat in (*self._sums, *self.spare))

    def push(self, flat: Array, tree_merges: int) -> None:
        """Add the `tree_merges` newest partial sums to a gradient, the newest first; it takes their place."""
        for _ in range(tree_merges):
            other = self._sums.pop()
            accumulate(flat, other)
            self.spare.append(other)
        self._sums.append(flat)

    def add_newest(self, bucket: Bucket, gradient: Array) -> None:
        """Add the `newest` partial sums to the gradient under way of a bucket, the newest first."""
        for flat in self._sums[len(self._sums) - self.newest :][::-1]:
            accumulate(gradient, flat[bucket.start : bucket.stop])

    def earlier(self, bucket: Bucket) -> list[Array]:
        """The partial sums of a bucket, oldest first, without those that belong to the gradient under way."""
        return [flat[bucket.start : bucket.stop] for flat in self._sums[: len(self._sums) - self.newest]]

    def forget(self) -> None:
        """Forget the partial sums, for the next step; their memory is spare."""
        self.spare += self._sums
        self._sums.clear()
        self.newest = 0
