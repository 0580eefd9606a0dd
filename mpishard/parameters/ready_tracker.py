"""Which gradients a backward pass has completed, and which bucket is reduced next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpishard.layout.local_layout import Piece
from mpishard.parameters.gradient_buckets import Bucket, names_in


@dataclass
class BucketOrder:
    """Buckets `first` to `last` of one virtual stage, reduced in turn, the last one first; `next` is the next one.

    `apart`: a tied tensor and a second use are an order by themselves.  `more`: more micro-batches of the stage follow
    in this backward pass; how it differs from the reducer's `is_last_pass` is said in
    `mpishard.parameters.gradient_reducer`.  `pushed`: micro-batches of this step that are partial sums.
    """

    virtual_stage: int
    tied: bool
    first: int
    last: int
    next: int
    more: bool = False
    pushed: int = 0
    apart: bool = False


class ReadyTracker:
    """The buckets of a model in the orders in which they are reduced, and the tensors that are ready in this pass.

    Parameters
    ----------
    pieces : sequence of Piece
        Tensors in flat order.
    buckets : sequence of Bucket

    Attributes
    ----------
    orders : list of BucketOrder
        In flat order, a second use before its virtual stage; end a pass in the reverse order.
    places : dict
        By the name of a tensor or second use: the index of its bucket, and the order of that.
    """

    def __init__(self, pieces: Sequence[Piece], buckets: Sequence[Bucket]) -> None:
        self.orders: list[BucketOrder] = []
        self.places: dict[str, tuple[int, BucketOrder]] = {}
        self._tensors = [bucket.last - bucket.first for bucket in buckets]
        self._ready: list[set[str]] = [set() for _ in buckets]
        # A second use is no part of a run: nothing says when it is complete but the end of its virtual stage.
        for bucket in sorted(buckets, key=lambda bucket: not bucket.second_use):
            order = self.orders[-1] if self.orders else None
            apart = bucket.tied or bucket.second_use
            if order is None or apart or order.apart or order.virtual_stage != bucket.virtual_stage:
                order = BucketOrder(bucket.virtual_stage, bucket.tied, bucket.index, bucket.index, bucket.index)
                order.apart = apart
                self.orders.append(order)
            order.last = order.next = bucket.index
            self.places.update(dict.fromkeys(names_in(bucket, pieces), (bucket.index, order)))
        self.orders.sort(key=lambda order: order.virtual_stage)  # as they are, but for second uses

    @property
    def begun(self) -> bool:
        """Whether any bucket was handed over in this pass."""
        return any(order.next < order.last for order in self.orders)

    def mark(self, name: str) -> BucketOrder:
        """Mark the gradient of a tensor as complete in this pass; returns the order of its bucket."""
        index, order = self.places[name]
        self._ready[index].add(name)
        return order

    def is_complete(self, order: BucketOrder) -> bool:
        """Whether all gradients of the next bucket are complete; False after the order's last bucket."""
        return order.next >= order.first and len(self._ready[order.next]) == self._tensors[order.next]

    def end(self, order: BucketOrder) -> None:
        """End a micro-batch: no gradient of the next one is complete yet."""
        for ready in self._ready[order.first : order.last + 1]:
            ready.clear()

    def begin(self, order: BucketOrder) -> None:
        """Begin another pass over the buckets."""
        self.end(order)
        order.next = order.last
