"""The micro-batches of a step that are kept apart: terms of a sum in a fixed order, for reproducible runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpishard.parameters.gradient_buckets import Bucket
from mpishard.parameters.partial_sums import PartialSums
from mpishard.parameters.ready_tracker import BucketOrder

Array = Any


class KeptApart:
    """How many micro-batches there are, which of them are partial sums already, and these sums.

    Parameters
    ----------
    orders : sequence of BucketOrder
        Each has partial sums of its own.
    buckets : sequence of Bucket
        All of them.
    like : array
        An array of the dtype and device of the gradients.

    Attributes
    ----------
    partials : list of PartialSums
        By bucket: that of its order.
    in_pass : bool
        Whether one backward pass has all micro-batches, one by one in each virtual stage; else each pass is one.
    """

    def __init__(self, orders: Sequence[BucketOrder], buckets: Sequence[Bucket], like: Array) -> None:
        self.partials: list[PartialSums] = []
        for order in sorted(orders, key=lambda order: order.first):
            covered = buckets[order.first : order.last + 1]
            self.partials += [PartialSums(covered[0].start, covered[-1].stop, like)] * len(covered)
        self.in_pass: bool = False
        self._merges: tuple[int, ...] = ()

    def begin(self, tree_merges: Sequence[int], in_pass: bool) -> None:
        """Begin a step, as `GradientReducer.keep_apart` says."""
        self._merges, self.in_pass = tuple(tree_merges), in_pass

    def forget(self) -> None:
        """End the step: gradients add up until the next one begins."""
        self.begin((), False)

    def __bool__(self) -> bool:
        """Whether there are micro-batches to keep."""
        return bool(self._merges)

    def push(self, order: BucketOrder) -> int:
        """Count a micro-batch of an order as a partial sum; returns how many sums before it are added to it."""
        self._check(order.pushed + 1 < len(self._merges))
        order.pushed += 1
        return self._merges[order.pushed - 1]

    def complete(self, order: BucketOrder, bucket: Bucket, gradient: Array) -> Sequence[Array]:
        """Add to the last micro-batch's gradient what belongs to its partial sum; returns the other partial sums."""
        if not self._merges:
            return ()
        self._check(order.pushed + 1 == len(self._merges))
        partials, newest = self.partials[bucket.index], self._merges[-1]
        partials.add_newest(bucket, gradient, newest)
        return partials.earlier(bucket, newest)

    def _check(self, as_many: bool) -> None:
        if not as_many:
            raise RuntimeError(
                f"with reproducible=True this backward pass has {len(self._merges)} micro-batches to keep apart, but "
                "the model has made another number of them; losses_and_gradient makes one of each batch that it gets"
            )
