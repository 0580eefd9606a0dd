"""A step's gradients, from the backward pass that writes them to the sums over ranks that an optimizer uses.

A bucket is reduced as soon as the last backward pass has completed it, in one fixed order, the last first, so that a
rank that marks nothing ready issues the same collectives; the schedule interleaves the orders of a rank's pipeline
stages.

With `on_demand` (ZeRO-2 and 3) each micro-batch is summed. Else a bucket is summed once a step: in the last pass, after
the last micro-batch of its virtual stage (`BucketOrder.more`, set by the pipeline). A tied tensor is always summed at
the end of the last pass.

In a reproducible run the micro-batches of a rank are terms of a sum in a fixed order, and `keep_apart` says how they
are added. Each but the last becomes a partial sum when it is complete; the last is reduced together with these sums.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from mpishard.backend import array as arrays
from mpishard.backend.array import accumulate
from mpishard.comm.channel import ChainedRequest, Request
from mpishard.comm.mesh import Mesh
from mpishard.layout.tensors import Piece
from mpishard.parameters.buckets import Bucket, BucketMemory, PartialSums, names_in, second_use

Array = Any

# How a user drops gradients.
_DROP = "zero_grad() of the optimizer of a PyTorch module, or reset_gradients() of the FlatParameters of another model"


# Gradients of calls of `step` that only add, with ``auto_sync_gradients=False``, until the update that uses them.


class Accumulation:
    """This rank's calls of `step` since the last update, and the sum of the arrays that they were given."""

    def __init__(self) -> None:
        # None if no call had an array, since gradients of models add up in their buckets.
        self.total: Array | None = None
        self._calls = 0

    def add(self, gradients: Array | None) -> None:
        """Count a call of `step`, and add the array that it was given."""
        self._calls += 1
        if gradients is not None:
            if self.total is None:
                self.total = arrays.zeros(gradients.size, gradients.dtype, like=gradients)
            accumulate(self.total, gradients)

    def forget(self) -> None:
        """Start again: the gradients were used, or discarded."""
        self._calls = 0
        self.total = None

    def calls(self, mesh: Mesh) -> int:
        """Number of calls since the last update, over all data ranks. Collective over the mesh.

        Raises ValueError on every rank if tensor or pipeline ranks of one data rank differ in their number of calls.
        """
        calls = int(mesh.data.all_reduce(np.array([self._calls]), label="control")[0])
        if mesh.data.size < mesh.world.size:
            by_rank = mesh.world.allgather_object(calls)
            if len(set(by_rank)) > 1:
                raise ValueError(f"tensor and pipeline ranks must call step() equally often; calls by rank: {by_rank}")
        return calls


# What a reducer of gradients calls: to sum a bucket over ranks, and to look at it before.

PendingSum = Request | ChainedRequest


Started = Sequence[tuple[Bucket, Array, PendingSum]]  # each: ``(bucket, gradient, start(bucket, gradient))``


class BucketSums(ABC):
    """Sums buckets over ranks for a `GradientReducer`, which decides when. Collective, except `reset`."""

    @abstractmethod
    def sum_copies(self, bucket: Bucket, gradient: Array) -> None:
        """Add the terms of the other ranks of this model replica to a gradient.

        In a reproducible run no bucket is tied: `add_uses` adds the uses of a tied tensor.
        """

    @abstractmethod
    def start(self, bucket: Bucket, gradient: Array, earlier: Sequence[Array] = ()) -> PendingSum | None:
        """Start the sum of a bucket over the data axis; None if nothing is to be waited for.

        With None the result is stored already, and the memory of the gradient is free. `earlier` are the partial sums
        that belong to other terms of the sum than the gradient, oldest first.
        """

    def finish(self, started: Started) -> None:
        """Wait for sums, and store their results.  Here they are where they belong."""
        for _, _, transfer in started:
            transfer.wait()

    def add_uses(self, memory: BucketMemory) -> None:
        """Add the gradients of the uses of tied tensors, after all sums of a reproducible step."""
        raise NotImplementedError(f"{type(self).__name__} is not for reproducible=True")

    @abstractmethod
    def reset(self) -> None:
        """Forget the sums of this step; the next gradients belong to another."""


class Inspector(Protocol):
    """An object that looks at a rank's gradients before they are summed."""

    def look(self, bucket: Bucket, gradient: Array) -> None:
        """Look at the complete local gradient of a bucket."""

    def forget(self) -> None:
        """Forget what was found in this step."""


# How far a step's gradients are, and which phase may follow which.


class GradientPhase(Enum):
    """The progress of a step's gradients."""

    ACCUMULATING = "backward passes add to the gradients, and another may follow"
    REDUCING = "the last pass has completed buckets, and their sums over ranks are under way"
    REDUCED = "all sums are complete; nothing can be added until the next step"


# From which phase a step may get to which other one.
TRANSITIONS: tuple[tuple[GradientPhase, GradientPhase], ...] = (
    (GradientPhase.ACCUMULATING, GradientPhase.REDUCING),  # the last pass completes a bucket, or ends
    (GradientPhase.REDUCING, GradientPhase.REDUCED),  # `finalize`
    (GradientPhase.REDUCING, GradientPhase.ACCUMULATING),  # `reset`
    (GradientPhase.REDUCED, GradientPhase.ACCUMULATING),  # `reset`
)


# Which gradients a backward pass has completed, and which bucket is reduced next.


@dataclass
class BucketOrder:
    """Buckets `first` to `last` (inclusive) of one virtual stage, reduced from the last one to the first.

    `next` is the one that is reduced next, or below `first`.
    """

    virtual_stage: int
    tied: bool
    first: int
    last: int
    next: int
    # More micro-batches of the stage follow in this backward pass: its buckets are not summed yet, even in a step's
    # last pass (`GradientReducer.is_last_pass`). A pipeline runs all micro-batches of a rank in one pass.
    more: bool = False
    pushed: int = 0  # micro-batches of this step that are partial sums
    apart: bool = False  # a tied tensor and a second use are separate orders


class ReadyTracker:
    """The buckets of a model in the orders in which they are reduced, and the tensors that are ready in this pass."""

    def __init__(self, pieces: Sequence[Piece], buckets: Sequence[Bucket]) -> None:
        # In flat order, a second use before its virtual stage; end a pass in the reverse order.
        self.orders: list[BucketOrder] = []
        # By the name of a tensor or second use: the index of its bucket, and the order of that.
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
        """Return True if a pass has begun and did not end: a gradient of it is complete."""
        return any(self._ready)

    def mark(self, name: str) -> BucketOrder:
        """Mark the gradient of a tensor as complete in this pass; returns the order of its bucket."""
        index, order = self.places[name]
        self._ready[index].add(name)
        return order

    def next_is_complete(self, order: BucketOrder) -> bool:
        """Return True if all gradients of the order's next bucket are complete; False after its last bucket."""
        return order.next >= order.first and len(self._ready[order.next]) == self._tensors[order.next]

    def end(self, order: BucketOrder) -> None:
        """End a micro-batch: no gradient of the next one is complete yet."""
        for ready in self._ready[order.first : order.last + 1]:
            ready.clear()

    def begin(self, order: BucketOrder) -> None:
        """Begin another pass over the buckets."""
        self.end(order)
        order.next = order.last


# The micro-batches of a step that are kept apart: terms of a sum in a fixed order, for reproducible runs.


class OrderedMicrobatches:
    """The micro-batches of a step, which of them are partial sums already, and these sums, separate for each order."""

    def __init__(self, orders: Sequence[BucketOrder], buckets: Sequence[Bucket], like: Array) -> None:
        self.partials: list[PartialSums] = []  # by bucket: that of its order
        for order in sorted(orders, key=lambda order: order.first):
            covered = buckets[order.first : order.last + 1]
            self.partials += [PartialSums(covered[0].start, covered[-1].stop, like)] * len(covered)
        # One backward pass has all micro-batches, one by one in each virtual stage; else each pass is one.
        self.in_pass: bool = False
        self._merges: tuple[int, ...] = ()

    def begin(self, tree_merges: Sequence[int], in_pass: bool) -> None:
        """Begin a step, as `GradientReducer.keep_apart` says."""
        self._merges, self.in_pass = tuple(tree_merges), in_pass

    def forget(self) -> None:
        """End the step: gradients add up until the next one begins."""
        self.begin((), False)

    def __bool__(self) -> bool:
        """Return True if there are micro-batches to keep."""
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


# The context of a backward pass that is not the last one of its step.


class NoSync:
    """The context of `GradientReducer.no_sync`; it may be entered again, also inside itself.

    Collective where that says so. ``end(complete)`` ends the pass, not `complete` after an exception.
    """

    def __init__(self, begin: Callable[[], None], end: Callable[[bool], None]) -> None:
        self._begin = begin
        self._end = end

    def __enter__(self) -> None:
        self._begin()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end(kind is None)


# All of it together.


class GradientReducer:
    """Owns the gradients of one model on one rank for the duration of a step.

    A backward pass asks for memory by `gradient`, writes to it, and calls `mark_ready`. What is ready is reduced at
    once in the last pass of a step. Passes before it run within `no_sync`; with `accumulates` also between calls of
    `end_pass`, but not in a training loop. `finalize` ends the last pass and waits for the sums; `reset` begins the
    next step.

    `sums` adds up complete buckets over ranks; without it the gradients stay local. Without `overlap` each sum is
    waited for as soon as it has started.

    With `on_demand` (ZeRO-2 and 3) a bucket is reduced after every micro-batch, and has memory from its first gradient
    until then; one reduction is under way at a time. With it or without, a bucket of a tied tensor is kept until the
    last micro-batch.

    `reproducible`: micro-batches may be kept apart as partial sums; a gradient is then reduced over tensor ranks before
    it is added to another.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        buckets: Sequence[Bucket],
        like: Array,
        sums: BucketSums | None = None,
        *,
        on_demand: bool = False,
        overlap: bool = True,
        reproducible: bool = False,
        accumulates: bool = False,
    ) -> None:
        self.buckets: tuple[Bucket, ...] = tuple(buckets)
        self.on_demand = on_demand
        self.overlap: bool = overlap
        self.inspector: Inspector | None = None
        # Called with each bucket of each micro-batch of a reproducible run, before it is added to any other.
        self.watch: Callable[[Bucket, Array], None] | None = None
        self.phase: GradientPhase = GradientPhase.ACCUMULATING
        self.accumulation = Accumulation()  # gradients of the caller that wait for an update
        # Passes within `no_sync` since the last `reset`.  Ranks compare their number where all passes are summed.
        self.passes_before_last: int = 0
        # What makes a pass the last one of its step, see `is_last_pass`.
        self._held = 0  # contexts of `no_sync` that are entered
        self._accumulates = accumulates  # passes outside of `no_sync` may be followed by others
        self._in_loop = False  # but not those of a training loop
        self._sums = sums
        self._has_started_sums = False  # of any bucket since `reset`, also of one whose memory is free again
        self._pending: list[tuple[Bucket, Array, PendingSum]] = []
        self._tracker = ReadyTracker(pieces, buckets)
        self._second: dict[str, str] = {
            piece.name: second_use(piece.name)
            for bucket in self.buckets
            if bucket.second_use
            for piece in pieces[bucket.first : bucket.last]
        }
        self._reproducible = reproducible
        self._microbatches = OrderedMicrobatches(self._tracker.orders if reproducible else (), self.buckets, like)
        self.memory: BucketMemory = BucketMemory(pieces, buckets, like, on_demand, self._microbatches.partials)

    # -- what is known ------------------------------------------------------------------------------------------------

    @property
    def flat(self) -> Array:
        """The one flat gradient buffer, in flat order (only where memory is not on demand)."""
        return self.memory.flat

    @property
    def keeps_memory(self) -> bool:
        """Return True if a gradient stays where it is, in the flat buffer, for all backward passes of all steps."""
        return not self.on_demand and not self._reproducible

    @property
    def is_bound(self) -> bool:
        """Return True if an optimizer has bound these gradients, so that each step sums them over ranks."""
        return self._sums is not None

    @property
    def is_last_pass(self) -> bool:
        """Return True if no other backward pass follows in this step before its gradients are summed over ranks."""
        return self.is_bound and not self._held and (self._in_loop or not self._accumulates)

    @property
    def reduced(self) -> bool:
        """Return True if all sums of this step's gradients are complete; nothing can be added then."""
        return self.phase is GradientPhase.REDUCED

    @property
    def has_content(self) -> bool:
        """Return True if gradients were written or reduced since the last `reset`."""
        return bool(self.memory.written) or self.phase is not GradientPhase.ACCUMULATING or self._has_started_sums

    # -- backward passes ----------------------------------------------------------------------------------------------

    def begin_loop(self) -> None:
        """From now on a training loop has one last pass in each step."""
        self._in_loop = True

    def end_loop(self) -> None:
        """From now on passes are those of other code, whose steps may accumulate several."""
        self._in_loop = False

    def gradient(self, name: str, second: bool = False) -> tuple[Array, bool]:
        """The memory for the gradient of tensor `name`, and True to add to it, False to overwrite its content.

        The memory is a view of the tensor's shape, valid until the tensor is marked ready; with `second` it is for the
        gradient of the tensor's second use on this rank, where that is kept apart. Raises RuntimeError if the gradient
        is reduced already.
        """
        key = self._second.get(name, name) if second else name
        if self.memory.early.writing:
            return self.memory.view(key)
        index, order = self._tracker.places[key]
        if self.on_demand and order.next < order.first and not self.is_last_pass:
            self._begin(order)  # the last pass has reduced all buckets, and this is another
        if self.phase is GradientPhase.REDUCED or index > order.next:
            raise RuntimeError(
                f"the gradient of {name!r} is reduced already, so another backward pass cannot add to it; call step() "
                f"in between, or {_DROP}; or set auto_sync_gradients=False to accumulate over several passes"
            )
        return self.memory.view(key)

    def __getitem__(self, name: str) -> Array:
        """The gradient of tensor `name`, for ``gradients[name] += ...``; zeros where nothing was added yet."""
        view, accumulate = self.gradient(name)
        if not accumulate:
            view[...] = 0
        return view

    def __setitem__(self, name: str, value: Array) -> None:
        """Accept the result of ``gradients[name] += ...``, which has added in place."""
        view, _ = self.gradient(name)
        is_view = type(value) is type(view) and value.shape == view.shape
        if not is_view or (view.size and not arrays.overlap(value, view)):
            raise TypeError(f"gradients[{name!r}] = ... forgets what was added; write gradients[{name!r}] += ...")

    def __iadd__(self, other: Any) -> GradientReducer:
        name = next(iter(self._tracker.places), "name")
        raise TypeError(
            f"gradients of a start with names are added to by name, gradients[{name!r}] += ...; a start that is one "
            "flat array has a flat gradient"
        )

    def mark_ready(self, name: str) -> None:
        """Mark the gradient of `name` as complete in this pass, so that its bucket may be reduced."""
        order = self._tracker.mark(name)
        if not order.tied and (self.on_demand or (self.is_last_pass and not order.more)):
            self._reduce(order, rest=False)

    def no_sync(self, before: Callable[[], None] = lambda: None) -> NoSync:
        """A context, for one ``with`` statement, for a backward pass that is not the last one of the step.

        Its gradients stay local where memory is kept. Where memory is on demand (ZeRO-2 and 3) they are summed across
        ranks nevertheless, collectively over the data axis, at the latest at the exit: the next pass writes to the same
        memory, and this rank keeps only its part of the sums. Entering raises RuntimeError if the last pass has begun
        to reduce.  `before` is called at each entry.
        """

        def begin() -> None:
            before()
            self._begin_without_sync()

        # A new one: kept here, it would keep the memory of the gradients until a collection.
        return NoSync(begin, self._end_without_sync)

    def begin_virtual_stage(self, virtual_stage: int, last: bool) -> None:
        """Begin a micro-batch's backward pass of a virtual stage; `last`: no other follows in this pass."""
        self.memory.take_early(virtual_stage)
        for order in self._tracker.orders:
            if order.virtual_stage == virtual_stage:
                order.more = not last

    def end_virtual_stage(self, virtual_stage: int) -> None:
        """End a micro-batch's pass of a virtual stage; reduce its other buckets. Collective over the data axis."""
        for order in reversed(self._tracker.orders):
            if order.virtual_stage != virtual_stage or order.tied:
                continue
            if self._microbatches and self._microbatches.in_pass and order.more:
                self._keep(order)
            if self.on_demand or (self.is_last_pass and not order.more):
                self._reduce(order)
            if self.on_demand and order.more:
                self._begin(order)  # after the last micro-batch `end_pass` does this
            self._tracker.end(order)

    def end_pass(self) -> None:
        """End a backward pass; in the last one reduce the other buckets, with zeros for what has no gradient.

        Collective over the data axis in the last pass, and where memory is on demand in every pass.
        """
        self._end_pass(self.is_last_pass)

    def finalize(self) -> None:
        """End the last pass, if that is not done, and wait for all sums.  Collective over the data axis."""
        if self.phase is GradientPhase.REDUCED:
            return
        self._enter(GradientPhase.REDUCING)
        for order in reversed(self._tracker.orders):
            self._reduce(order)
        self._wait_all()
        if self._reproducible and self._sums is not None:
            self._sums.add_uses(self.memory)
        self._enter(GradientPhase.REDUCED)

    def abandon(self) -> None:
        """Drop the sums under way, whose communicators were revoked."""
        for _, _, pending in self._pending:
            pending.abandon()
        self._pending.clear()

    def drop(self) -> None:
        """`reset` after passes that no step uses; one that has begun and sums over ranks is ended before.

        Ranks may have started different ones of its sums, and each starts the rest here. So this is collective over the
        data axis after such a pass.
        """
        if self._tracker.begun and (self.on_demand or self.is_last_pass):
            self._end_pass(self.is_last_pass)
        self.reset()

    def reset(self) -> None:
        """Discard the gradients: the next pass starts from zero.  Waits for sums under way; see also `drop`."""
        self._wait_all()
        for order in self._tracker.orders:
            self._tracker.begin(order)
            order.more, order.pushed = False, 0
        self.memory.forget()
        self._microbatches.forget()
        self.accumulation.forget()
        self.passes_before_last, self._has_started_sums = 0, False
        self._enter(GradientPhase.ACCUMULATING)
        if self._sums is not None:
            self._sums.reset()
        if self.inspector is not None:
            self.inspector.forget()

    # -- micro-batches that are kept apart ----------------------------------------------------------------------------

    def keep_apart(self, tree_merges: Sequence[int], *, in_pass: bool = False) -> None:
        """Keep the gradients of this step's micro-batches apart, as terms of a sum in a fixed order.

        Only for reproducible runs, before the first backward pass of a step. `tree_merges` has for each micro-batch of
        this rank how many of the partial sums before it are added to it, the newest first; ``[0]`` if it has none,
        empty where each micro-batch is reduced separately, on demand. `in_pass`: one pass has all of them, one by one
        in each virtual stage; else each backward pass is a micro-batch.
        """
        assert self._reproducible
        self._microbatches.begin(tree_merges, in_pass)

    def push_external(self, flat: Array) -> Array:
        """Keep a micro-batch apart whose gradient is the caller's array, which is the reducer's from now on.

        Returns uninitialised memory for the next one.
        """
        (order,) = self._tracker.orders
        if self.watch is not None:
            for bucket in self.buckets:
                self.watch(bucket, flat[bucket.start : bucket.stop])
        return self.memory.push_external(flat, self._microbatches.push(order))

    def begin_input_gradient(self, virtual_stage: int) -> None:
        """Begin a micro-batch's input gradient, whose weight gradient comes later."""
        if self._microbatches.in_pass:
            self.memory.early.begin(virtual_stage)

    def end_input_gradient(self) -> None:
        """End a micro-batch's input gradient; not collective."""
        self.memory.early.end()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _enter(self, phase: GradientPhase) -> None:
        if phase is not self.phase:
            assert (self.phase, phase) in TRANSITIONS, f"{self.phase} to {phase}"
            self.phase = phase

    def _begin_without_sync(self) -> None:
        if self.phase is not GradientPhase.ACCUMULATING:
            raise RuntimeError(
                "the gradients of this step are being reduced, so that no_sync() comes too late for another backward "
                f"pass; call step() before, or {_DROP}"
            )
        self._held += 1

    def _end_without_sync(self, complete: bool) -> None:
        try:
            if complete:
                self.passes_before_last += 1
                self._end_pass(False)
            else:
                for order in self._tracker.orders:
                    self._tracker.end(order)
        finally:
            self._held -= 1

    def _end_pass(self, last: bool) -> None:
        if self.phase is GradientPhase.REDUCED:
            return
        if last:
            self._enter(GradientPhase.REDUCING)
        for order in reversed(self._tracker.orders):
            if last:
                self._reduce(order)
            elif self.on_demand and not order.tied:
                self._reduce(order)
                self._begin(order)
            else:
                if self._microbatches and not self._microbatches.in_pass:
                    self._keep(order)
                self._tracker.end(order)

    def _keep(self, order: BucketOrder) -> None:
        """Make a complete micro-batch a separate partial sum; the next one starts a separate gradient."""
        tree_merges = self._microbatches.push(order)
        buckets = self.buckets[order.first : order.last + 1]
        for bucket in reversed(buckets):
            gradient = self.memory.zero_missing(bucket)
            if self.watch is not None:
                self.watch(bucket, gradient)
            if self._sums is not None:
                self._sums.sum_copies(bucket, gradient)
        self.memory.push(buckets, tree_merges)

    def _wait_all(self) -> None:
        """Wait until no sum is under way."""
        if self._pending and self._sums is not None:
            self._sums.finish(self._pending)
            for bucket, _, _ in self._pending:
                self.memory.release(bucket)
            self._pending.clear()

    def _begin(self, order: BucketOrder) -> None:
        self._wait_all()
        self._tracker.begin(order)

    def _reduce(self, order: BucketOrder, rest: bool = True) -> None:
        """Start the sums of the buckets of an order that come next: of all the rest, or of those that are complete."""
        sums = self._sums
        while order.next >= order.first and (rest or self._tracker.next_is_complete(order)):
            bucket = self.buckets[order.next]
            gradient = self.memory.zero_missing(bucket)
            earlier: Sequence[Array] = ()
            if self._reproducible:
                if self.watch is not None:
                    self.watch(bucket, gradient)
                if sums is not None:
                    sums.sum_copies(bucket, gradient)
                earlier = self._microbatches.complete(order, bucket, gradient)
            order.next -= 1
            self._has_started_sums = True
            if self.phase is GradientPhase.ACCUMULATING and self.is_last_pass:
                self._enter(GradientPhase.REDUCING)
            if self.inspector is not None:
                for partial in (*earlier, gradient):
                    self.inspector.look(bucket, partial)
            if sums is None:
                self.memory.release(bucket)
                continue
            if self.on_demand:
                self._wait_all()  # ZeRO-2 saves memory by having few buckets at a time
            if not self._reproducible:
                sums.sum_copies(bucket, gradient)
            for _, _, pending in self._pending:
                pending.test()  # MPI moves data only while it is called
            started = sums.start(bucket, gradient, earlier)
            if started is None:
                self.memory.release(bucket)
            else:
                self._pending.append((bucket, gradient, started))
            if not self.overlap:
                self._wait_all()
