"""How far a step's gradients are: which are complete, which buckets are summed next, and which pass is the last one.

A bucket is summed as soon as the last backward pass has completed it, in one fixed order, the last first, so that a
rank that marks nothing ready issues the same collectives; the schedule interleaves the orders of a rank's pipeline
stages.

With `on_demand` (ZeRO-2 and 3) each micro-batch is summed. Else a bucket is summed once a step: in the last pass, after
the last micro-batch of its virtual stage, which the pipeline announces. A tied tensor is always summed at the end of
the last pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby

from mpishard.layout.tensors import Piece
from mpishard.parameters.buckets import Bucket, names_in

# How a user drops gradients.
DROP = "zero_grad() of the optimizer of a PyTorch module, or reset_gradients() of the FlatParameters of another model"


class GradientPhase(Enum):
    """The progress of a step's gradients."""

    ACCUMULATING = "backward passes add to the gradients, and another may follow"
    REDUCING = "the last pass has completed buckets, and their sums over ranks are under way"
    REDUCED = "all sums are complete; nothing can be added until the next step"


@dataclass(eq=False)
class BucketOrder:
    """Neighbouring buckets of one virtual stage, which are summed from the last one to the first.

    The bucket of a tied tensor, or of a second use, is alone. Only `GradientProgress` changes an order.
    """

    virtual_stage: int
    tied: bool
    buckets: Sequence[Bucket]  # in flat order
    ready: Sequence[set[str]]  # by bucket the tensors whose gradients this pass has completed
    left: int  # the buckets that this pass has not begun to sum: the first ones


def _run_of(bucket: Bucket) -> tuple[int, int | None]:
    """What neighbouring buckets of one order have in common."""
    return bucket.virtual_stage, bucket.index if bucket.tied or bucket.second_use else None


class GradientProgress:
    """The account of a step's gradients on one rank; it has no memory and sends nothing.

    `accumulates`: a pass outside of `no_sync` may be followed by others, but not in a training loop. `is_bound`: an
    optimizer has bound the gradients, so that each step sums them over ranks.
    """

    def __init__(
        self, pieces: Sequence[Piece], buckets: Sequence[Bucket], on_demand: bool, accumulates: bool, is_bound: bool
    ) -> None:
        self.phase: GradientPhase = GradientPhase.ACCUMULATING
        self.is_bound = is_bound
        self.in_loop: bool = False  # a training loop makes the passes
        # Passes within `no_sync` since the last `reset`. Ranks compare their number where all passes are summed.
        self.passes_before_last: int = 0
        self._on_demand = on_demand
        self._accumulates = accumulates
        self._held = 0  # contexts of `no_sync` that are entered
        self._has_begun_sums = False  # of any bucket since `reset`, also of one whose memory is free again
        self._written: set[str] = set()  # tensors that have a gradient; the memory of others has no meaning
        self._more: set[int] = set()  # virtual stages of which this pass has further micro-batches
        self._names = [names_in(bucket, pieces) for bucket in buckets]
        orders: list[BucketOrder] = []
        self._places: dict[str, tuple[int, BucketOrder]] = {}  # by name: the number of a bucket in an order
        # A second use comes before its virtual stage: nothing says when it is complete but the end of that.
        in_order = sorted(buckets, key=lambda bucket: not bucket.second_use)
        for (virtual_stage, _), group in groupby(in_order, _run_of):
            run = list(group)
            orders.append(BucketOrder(virtual_stage, run[0].tied, run, [set() for _ in run], len(run)))
            for number, bucket in enumerate(run):
                self._places.update(dict.fromkeys(self._names[bucket.index], (number, orders[-1])))
        # In which a pass ends them: against the flat order.
        self.orders: list[BucketOrder] = sorted(orders, key=lambda order: order.virtual_stage)[::-1]

    # -- passes -------------------------------------------------------------------------------------------------------

    @property
    def is_last_pass(self) -> bool:
        """Return True if no other backward pass follows in this step before its gradients are summed over ranks."""
        return self.is_bound and not self._held and (self.in_loop or not self._accumulates)

    @property
    def has_begun(self) -> bool:
        """Return True if a pass has begun and did not end: a gradient of it is complete."""
        return any(ready for order in self.orders for ready in order.ready)

    @property
    def has_content(self) -> bool:
        """Return True if gradients were written or summed since the last `reset`."""
        return bool(self._written) or self.phase is not GradientPhase.ACCUMULATING or self._has_begun_sums

    def hold(self) -> None:
        """Enter a context in which no pass is the last one of its step."""
        if self.phase is not GradientPhase.ACCUMULATING:
            raise RuntimeError(
                "the gradients of this step are being reduced, so that no_sync() comes too late for another backward "
                f"pass; call step() before, or {DROP}"
            )
        self._held += 1

    def let_go(self, complete: bool) -> None:
        """Leave such a context, after a pass that is `complete`, or has failed."""
        self._held -= 1
        self.passes_before_last += complete
        for order in () if complete else self.orders:
            self.end(order)

    def begin_microbatch(self, virtual_stage: int, last: bool) -> None:
        """Begin the pass of a micro-batch through a virtual stage, the `last` one of this backward pass or not."""
        if last:
            self._more.discard(virtual_stage)
        else:
            self._more.add(virtual_stage)

    def has_more(self, virtual_stage: int) -> bool:
        """Return True if this pass has further micro-batches of a virtual stage."""
        return virtual_stage in self._more

    def sums_now(self, order: BucketOrder) -> bool:
        """Return True if buckets are summed as soon as the micro-batch under way has completed them."""
        return not order.tied and (self._on_demand or (self.is_last_pass and not self.has_more(order.virtual_stage)))

    def begin_sums(self) -> None:
        """Note that the last pass has completed buckets, or ends."""
        if self.phase is GradientPhase.ACCUMULATING:
            self.phase = GradientPhase.REDUCING

    def end_sums(self) -> None:
        """Note that all sums are complete."""
        self.phase = GradientPhase.REDUCED

    def reset(self) -> None:
        """Begin a step."""
        for order in self.orders:
            self.begin(order)
        self._written.clear()
        self._more.clear()
        self.passes_before_last, self._has_begun_sums = 0, False
        self.phase = GradientPhase.ACCUMULATING

    # -- tensors ------------------------------------------------------------------------------------------------------

    def write(self, name: str) -> bool:
        """Note that a tensor gets a gradient; returns True if it has one, to which that is added."""
        has_content = name in self._written
        self._written.add(name)
        return has_content

    def write_buckets(self, buckets: Iterable[Bucket]) -> None:
        """Note that all tensors of these buckets have a gradient."""
        for bucket in buckets:
            self._written.update(self._names[bucket.index])

    def forget_buckets(self, buckets: Iterable[Bucket]) -> None:
        """Note that no tensor of these buckets has a gradient any more."""
        for bucket in buckets:
            self._written.difference_update(self._names[bucket.index])

    def missing(self, bucket: Bucket) -> list[str]:
        """The tensors of a bucket that have no gradient."""
        return [name for name in self._names[bucket.index] if name not in self._written]

    def is_summed(self, name: str) -> bool:
        """Return True if the sum of a tensor's bucket has begun, so that nothing can be added."""
        number, order = self._places[name]
        return self.phase is GradientPhase.REDUCED or number >= order.left

    def order_of(self, name: str) -> BucketOrder:
        """The order of a tensor's bucket."""
        return self._places[name][1]

    def is_ready(self, name: str) -> bool:
        """Return True if the gradient of a tensor is complete in this pass."""
        number, order = self._places[name]
        return name in order.ready[number]

    def mark_ready(self, name: str) -> Iterable[Bucket]:
        """Mark the gradient of a tensor as complete in this pass; returns the buckets that are summed now."""
        number, order = self._places[name]
        order.ready[number].add(name)
        return self.take(order, complete=True) if self.sums_now(order) else ()

    # -- orders -------------------------------------------------------------------------------------------------------

    def take(self, order: BucketOrder, complete: bool = False) -> Iterator[Bucket]:
        """The buckets of an order whose sums begin: those that are next and `complete`, or all the rest."""
        while order.left:
            bucket = order.buckets[order.left - 1]
            if complete and len(order.ready[order.left - 1]) < bucket.last - bucket.first:
                return
            order.left -= 1
            self._has_begun_sums = True
            if self.is_last_pass:
                self.begin_sums()
            yield bucket

    def begin(self, order: BucketOrder) -> None:
        """Begin another pass over the buckets."""
        self.end(order)
        order.left = len(order.buckets)

    def end(self, order: BucketOrder) -> None:
        """End a micro-batch: no gradient of the next one is complete yet."""
        for ready in order.ready:
            ready.clear()
