"""A step's gradients, from the backward pass that writes them to the sums over ranks that an optimizer uses.

What is known of a step is in `GradientProgress`, the memory in `BucketMemory`, the ways to sum are `BucketSums`; the
`GradientReducer` brings them together.

In a reproducible run the micro-batches of a rank are terms of a sum in a fixed order, and `keep_apart` says how they
are added. Each but the last becomes a partial sum when it is complete; the last is reduced together with these sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from mpishard.backend import array as arrays
from mpishard.backend.array import accumulate
from mpishard.comm.channel import ChainedRequest, Request
from mpishard.comm.mesh import Mesh
from mpishard.layout.tensors import Piece
from mpishard.parameters.buckets import Bucket, BucketMemory, second_use
from mpishard.parameters.progress import DROP, BucketOrder, GradientPhase, GradientProgress

Array = Any


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


# What a reducer of gradients calls to sum a bucket over ranks.

PendingSum = Request | ChainedRequest
Started = Sequence[tuple[Bucket, Array, PendingSum]]  # each: ``(bucket, gradient, start(bucket, gradient))``


class BucketSums:
    """Sums buckets over ranks for a `GradientReducer`, which decides when. Collective, except `reset`.

    Here gradients stay on their rank, as before an optimizer has bound the parameters.
    """

    def sum_copies(self, bucket: Bucket, gradient: Array) -> None:
        """Add the terms of the other ranks of this model replica to a gradient.

        In a reproducible run no bucket is tied: `add_uses` adds the uses of a tied tensor.
        """

    def start(self, bucket: Bucket, gradient: Array, earlier: Sequence[Array] = ()) -> PendingSum | None:
        """Start the sum of a bucket over the data axis; None if nothing is to be waited for.

        With None the result is stored already, and the memory of the gradient is free. `earlier` are the partial sums
        that belong to other terms of the sum than the gradient, oldest first.
        """
        return None

    def finish(self, started: Started) -> None:
        """Wait for sums, and store their results.  Here they are where they belong."""
        for _, _, transfer in started:
            transfer.wait()

    def add_uses(self, memory: BucketMemory) -> None:
        """Add the gradients of the uses of tied tensors, after all sums of a reproducible step."""
        raise NotImplementedError(f"{type(self).__name__} is not for reproducible=True")

    def reset(self) -> None:
        """Forget the sums of this step; the next gradients belong to another."""


# The context of a backward pass that is not the last one of its step.


class NoSync:
    """The context of `GradientReducer.no_sync`; it may be entered again, also inside itself."""

    def __init__(self, reducer: GradientReducer, before: Callable[[], None]) -> None:
        self._reducer = reducer
        self._before = before

    def __enter__(self) -> None:
        self._before()
        self._reducer.progress.hold()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if kind is None:
                self._reducer.end_pass()
        finally:
            self._reducer.progress.let_go(kind is None)


# All of it together.


class GradientReducer:
    """Owns the gradients of one model on one rank for the duration of a step.

    A backward pass asks for memory by `gradient`, writes to it, and calls `mark_ready`. Passes before the last one of a
    step run within `no_sync`; with `accumulates` also between calls of `end_pass`, but not in a training loop.
    `finalize` ends the last pass and waits for the sums; `reset` begins the next step.

    `sums` adds up complete buckets over ranks; without it the gradients stay local. Without `overlap` each sum is
    waited for as soon as it has started. With `on_demand` (ZeRO-2 and 3) a bucket has memory from its first gradient
    until its sum, and one sum is under way at a time. `reproducible`: micro-batches may be kept apart as partial sums;
    a gradient is then reduced over tensor ranks before it is added to another.
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
        self._pieces = pieces
        self.on_demand = on_demand
        self.overlap: bool = overlap
        self.progress: GradientProgress = GradientProgress(pieces, buckets, on_demand, accumulates, sums is not None)
        # Called with each bucket of this rank's gradients, before anything is added to it: in a reproducible run with
        # that of each micro-batch.
        self.observers: list[Callable[[Bucket, Array], None]] = []
        self.forget_observed: Callable[[], None] = lambda: None  # in `reset`
        self.accumulation = Accumulation()  # gradients of the caller that wait for an update
        self._sums: BucketSums = BucketSums() if sums is None else sums
        self._pending: list[tuple[Bucket, Array, PendingSum]] = []
        self._second: dict[str, str] = {
            piece.name: second_use(piece.name)
            for bucket in self.buckets
            if bucket.second_use
            for piece in pieces[bucket.first : bucket.last]
        }
        self.reproducible: bool = reproducible
        # Micro-batches are kept apart: those of one pass, one by one in each virtual stage, or else the passes.
        self._apart = self._in_pass = False
        self._weights_come = False  # in a later pass of this micro-batch, which completes its gradients
        runs = [order.buckets for order in self.progress.orders] if reproducible else ()
        self.memory: BucketMemory = BucketMemory(pieces, buckets, like, on_demand, runs)

    # -- what is known ------------------------------------------------------------------------------------------------

    @property
    def flat(self) -> Array:
        """The one flat gradient buffer, in flat order (only where memory is not on demand)."""
        return self.memory.flat

    @property
    def keeps_memory(self) -> bool:
        """Return True if a gradient stays where it is, in the flat buffer, for all backward passes of all steps."""
        return not self.on_demand and not self.reproducible

    @property
    def is_last_pass(self) -> bool:
        """That of the progress."""
        return self.progress.is_last_pass

    @property
    def has_content(self) -> bool:
        """That of the progress."""
        return self.progress.has_content

    @property
    def reduced(self) -> bool:
        """Return True if all sums of this step's gradients are complete; nothing can be added then."""
        return self.progress.phase is GradientPhase.REDUCED

    # -- backward passes ----------------------------------------------------------------------------------------------

    def gradient(self, name: str, second: bool = False) -> tuple[Array, bool]:
        """The memory for the gradient of tensor `name`, and True to add to it, False to overwrite its content.

        The memory is a view of the tensor's shape, valid until the tensor is marked ready; with `second` it is for the
        gradient of the tensor's second use on this rank, where that is kept apart. Raises RuntimeError if the gradient
        is reduced already.
        """
        key = self._second.get(name, name) if second else name
        if self.memory.early.writing:
            return self.memory.early_view(key)
        order = self.progress.order_of(key)
        if self.on_demand and not order.left and not self.is_last_pass:
            self._begin(order)  # the last pass has reduced all buckets, and this is another
        if self.progress.is_summed(key):
            raise RuntimeError(
                f"the gradient of {name!r} is reduced already, so another backward pass cannot add to it; call step() "
                f"in between, or {DROP}; or set auto_sync_gradients=False to accumulate over several passes"
            )
        return self.memory.view(key), self.progress.write(key)

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
        name = self._pieces[0].name if self._pieces else "name"
        raise TypeError(
            f"gradients of a start with names are added to by name, gradients[{name!r}] += ...; a start that is one "
            "flat array has a flat gradient"
        )

    def completed(self, bucket: Bucket) -> Array:
        """The gradient of a bucket, with zeros for tensors that have none."""
        return self.memory.zeroed(bucket, self.progress.missing(bucket))

    def use_external(self, flat: Array) -> None:
        """Use `flat`, this rank's whole gradient, as the memory of this step; afterwards it is the caller's again."""
        self.progress.write_buckets(self.memory.lend(flat))

    def mark_ready(self, name: str) -> None:
        """Mark the gradient of `name` as complete in this pass, so that its bucket may be reduced."""
        if not self._weights_come:
            self._reduce(self.progress.mark_ready(name))

    def no_sync(self, before: Callable[[], None] = lambda: None) -> NoSync:
        """A context, for one ``with`` statement, for a backward pass that is not the last one of the step.

        Its gradients stay local where memory is kept. Where memory is on demand (ZeRO-2 and 3) they are summed across
        ranks nevertheless, collectively over the data axis, at the latest at the exit: the next pass writes to the same
        memory, and this rank keeps only its part of the sums. Entering raises RuntimeError if the last pass has begun
        to reduce.  `before` is called at each entry.
        """
        # A new one: kept here, it would keep the memory of the gradients until a collection.
        return NoSync(self, before)

    def begin_virtual_stage(self, virtual_stage: int, last: bool) -> None:
        """Begin a micro-batch's backward pass of a virtual stage; `last`: no other follows in this pass."""
        for name, early in self.memory.early.take(virtual_stage).items():
            view = self.memory.view(name)
            view[...] = view + early if self.progress.write(name) else early
        self.progress.begin_microbatch(virtual_stage, last)

    def end_virtual_stage(self, virtual_stage: int) -> None:
        """End a micro-batch's pass of a virtual stage; reduce its other buckets. Collective over the data axis."""
        progress, more = self.progress, self.progress.has_more(virtual_stage)
        for order in progress.orders:
            if order.virtual_stage != virtual_stage or order.tied:
                continue
            if self._apart and self._in_pass and more:
                self._keep(order)
            if progress.sums_now(order):
                self._reduce(progress.take(order))
            if self.on_demand and more:
                self._begin(order)  # after the last micro-batch `end_pass` does this
            progress.end(order)
        if self.is_last_pass and not more:
            progress.begin_sums()  # a rank without gradients, too: other stages have tied ones that all sum

    def end_pass(self) -> None:
        """End a backward pass; in the last one reduce the other buckets, with zeros for what has no gradient.

        Collective over the data axis in the last pass, and where memory is on demand in every pass.
        """
        self._end_pass(self.is_last_pass)

    def finalize(self) -> None:
        """End the last pass, if that is not done, and wait for all sums.  Collective over the data axis."""
        if self.reduced:
            return
        self._end_pass(last=True)
        self._wait_all()
        if self.reproducible:
            self._sums.add_uses(self.memory)
        self.progress.end_sums()

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
        sums = self.progress.phase is GradientPhase.REDUCING  # of tied tensors, at the end
        if (self.progress.has_begun or sums) and (self.on_demand or self.is_last_pass):
            self.end_pass()
        self.reset()

    def reset(self) -> None:
        """Discard the gradients: the next pass starts from zero.  Waits for sums under way; see also `drop`."""
        self._wait_all()
        self.progress.reset()
        self.memory.forget()
        self._apart = self._in_pass = self._weights_come = False
        self.accumulation.forget()
        self._sums.reset()
        self.forget_observed()

    # -- micro-batches that are kept apart ----------------------------------------------------------------------------

    def keep_apart(self, tree_merges: Sequence[int], *, in_pass: bool = False) -> None:
        """Keep the gradients of this step's micro-batches apart, as terms of a sum in a fixed order.

        Only for reproducible runs, before the first backward pass of a step. `tree_merges` has for each micro-batch of
        this rank how many of the partial sums before it are added to it, the newest first; ``[0]`` if it has none,
        empty where each micro-batch is reduced separately, on demand. `in_pass`: one pass has all of them, one by one
        in each virtual stage; else each backward pass is a micro-batch.
        """
        assert self.reproducible
        for partials in set(self.memory.partials.values()):
            partials.begin(tree_merges)
        self._apart, self._in_pass = bool(tree_merges), in_pass

    def push_external(self, flat: Array) -> Array:
        """Keep a micro-batch apart whose gradient is the caller's array, which is the reducer's from now on.

        Returns uninitialised memory for the next one.
        """
        for bucket in self.buckets:
            self._observe(bucket, flat[bucket.start : bucket.stop])
        return self.memory.push_external(flat)

    def begin_input_gradient(self, virtual_stage: int) -> None:
        """Begin a micro-batch's input gradient, whose weight gradient comes later, and completes all."""
        self._weights_come = True
        if self._in_pass:
            self.memory.early.begin(virtual_stage)

    def end_input_gradient(self) -> None:
        """End a micro-batch's input gradient; not collective."""
        self._weights_come = False
        self.memory.early.end()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _end_pass(self, last: bool) -> None:
        progress = self.progress
        if self.reduced:
            return
        if last:
            progress.begin_sums()
        for order in progress.orders:
            if last:
                self._reduce(progress.take(order))
            elif self.on_demand and not order.tied:
                self._reduce(progress.take(order))
                self._begin(order)
            else:
                if self._apart and not self._in_pass:
                    self._keep(order)
                progress.end(order)

    def _keep(self, order: BucketOrder) -> None:
        """Make a complete micro-batch a separate partial sum; the next one starts a separate gradient."""
        self.memory.partials[order.buckets[0].index].check(is_last=False)
        for bucket in reversed(order.buckets):
            gradient = self.completed(bucket)
            self._observe(bucket, gradient)
            self._sums.sum_copies(bucket, gradient)
        self.memory.push(order.buckets)
        self.progress.forget_buckets(order.buckets)

    def _observe(self, bucket: Bucket, gradient: Array) -> None:
        for observe in self.observers:
            observe(bucket, gradient)

    def _release(self, bucket: Bucket) -> None:
        """Free the memory of a bucket whose sum is stored, where that is on demand."""
        if self.on_demand:
            self.memory.release(bucket)
            self.progress.forget_buckets([bucket])

    def _wait_all(self) -> None:
        """Wait until no sum is under way."""
        if self._pending:
            self._sums.finish(self._pending)
            for bucket, _, _ in self._pending:
                self._release(bucket)
            self._pending.clear()

    def _begin(self, order: BucketOrder) -> None:
        self._wait_all()
        self.progress.begin(order)

    def _reduce(self, buckets: Iterable[Bucket]) -> None:
        """Start the sums of buckets."""
        sums = self._sums
        for bucket in buckets:
            gradient = self.completed(bucket)
            earlier: Sequence[Array] = ()
            self._observe(bucket, gradient)
            if self.reproducible:
                sums.sum_copies(bucket, gradient)
                earlier = self.memory.partials[bucket.index].complete(bucket, gradient)
            if self.on_demand:
                self._wait_all()  # ZeRO-2 saves memory by having few buckets at a time
            if not self.reproducible:
                sums.sum_copies(bucket, gradient)
            for _, _, pending in self._pending:
                pending.test()  # MPI moves data only while it is called
            started = sums.start(bucket, gradient, earlier)
            if started is None:
                self._release(bucket)
            else:
                self._pending.append((bucket, gradient, started))
            if not self.overlap:
                self._wait_all()
