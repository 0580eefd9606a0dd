"""A step's gradients, from the backward pass that writes them to the sums over ranks that an optimizer uses.

A reducer gets each bucket as soon as the last backward pass has completed it.  Buckets are reduced in one fixed order,
the last bucket first.  So a rank that marks nothing ready, as one without samples may, issues the same collectives in
the same order as the others.  Where a rank runs several pipeline stages, each stage has its own order; the schedule,
the same on all ranks of the data axis, decides how the orders interleave.

Three facts say when a complete bucket is summed over ranks.  `on_demand`, fixed by the strategy: gradients have no
memory from one micro-batch to the next (ZeRO-2 and 3), so each micro-batch is summed, whatever the other two say.
`is_last_pass`, set by the caller: no other backward pass follows in this step.  `BucketOrder.more`, set by the
pipeline: more micro-batches of the virtual stage follow in this backward pass.  Without `on_demand` a bucket is summed
once in a step: in the last pass, after the last micro-batch of its virtual stage.  A tied tensor is always summed at
the end of the last pass.

In a reproducible run each rank's micro-batches are terms of a sum in a fixed order.  `keep_apart` says how many there
are: backward passes, or micro-batches of each virtual stage in one pass.  A term that is complete becomes a partial
sum of its order, and the last one is reduced with them.  With `on_demand` each term is reduced by itself.  The uses of
a tied tensor are sums of their own, added once at the end; so no order waits for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpishard.backend import array as arrays
from mpishard.layout.local_layout import Piece
from mpishard.parameters.accumulation import Accumulation
from mpishard.parameters.bucket_memory import BucketMemory
from mpishard.parameters.bucket_sums import BucketSums, Inspector, Transfer
from mpishard.parameters.gradient_buckets import Bucket, second_use
from mpishard.parameters.gradient_phase import TRANSITIONS, GradientPhase
from mpishard.parameters.kept_apart import KeptApart
from mpishard.parameters.no_sync import NoSync
from mpishard.parameters.ready_tracker import BucketOrder, ReadyTracker

Array = Any


class GradientReducer:
    """Owns the gradients of one model on one rank for the duration of a step.

    A backward pass asks for memory by `gradient`, writes to it, and calls `mark_ready`.  What is ready is reduced at
    once in the last pass of a step.  Passes before it run within `no_sync`, or between calls of `end_pass` while
    `is_last_pass` is False.  `finalize` ends the last pass and waits for the sums; `reset` begins the next step.

    The class is long by its docstrings: it has all calls that begin, end or forget anything of a step.

    Parameters
    ----------
    pieces : sequence of Piece
        Tensors in flat order.
    buckets : sequence of Bucket
        They cover the pieces; those of second uses follow.
    like : array
        An array of the dtype and device that the gradients shall have.
    sums : BucketSums, optional
        Sums complete buckets over ranks.  Without it the gradients stay local.
    on_demand : bool
        False: micro-batches add up in memory, and are reduced after the last of them.  True: a bucket has memory from
        its first gradient until its reduction, after every micro-batch, and one reduction is under way at a time
        (ZeRO-2).  Buckets of tied tensors are kept until the last micro-batch in both cases.
    overlap : bool
        False: wait for each sum as soon as it has started.
    reproducible : bool
        Whether micro-batches may be kept apart as partial sums.  A gradient is then reduced over tensor ranks before it
        is added to another.

    Attributes
    ----------
    phase : GradientPhase
    memory : BucketMemory
    is_last_pass : bool
        Whether no other backward pass follows in this step.  False within `no_sync`; else as
        `auto_sync_gradients` says, and True in the steps of a training loop.
    inspector : Inspector or None
    accumulation : Accumulation
        Gradients of the caller that wait for an update.
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
    ) -> None:
        self.buckets: tuple[Bucket, ...] = tuple(buckets)
        self.on_demand = on_demand
        self.phase: GradientPhase = GradientPhase.ACCUMULATING
        self.inspector: Inspector | None = None
        self.is_last_pass: bool = sums is not None
        self.accumulation = Accumulation()
        self._sums = sums
        self._overlap = overlap
        self._tracker = ReadyTracker(pieces, buckets)
        self._second: dict[str, str] = {
            piece.name: second_use(piece.name)
            for bucket in self.buckets
            if bucket.second_use
            for piece in pieces[bucket.first : bucket.last]
        }
        self._reproducible = reproducible
        self._apart = KeptApart(self._tracker.orders if reproducible else (), self.buckets, like)
        self.memory: BucketMemory = BucketMemory(pieces, buckets, like, on_demand, self._apart.partials)
        self._pending: list[tuple[Bucket, Array, Transfer]] = []

    # -- what is known ----------------------------------------------------------------------------------------------

    @property
    def flat(self) -> Array:
        """The one flat gradient buffer, in flat order (only where memory is not on demand)."""
        return self.memory.flat

    @property
    def keeps_memory(self) -> bool:
        """Whether a gradient stays where it is, in the flat buffer, for all backward passes of all steps."""
        return not self.on_demand and not self._reproducible

    @property
    def reduces(self) -> bool:
        """Whether the gradients are reduced, since an optimizer has bound them."""
        return self._sums is not None

    @property
    def reduced(self) -> bool:
        """Whether this step's gradients are complete and reduced; nothing can be added then."""
        return self.phase is GradientPhase.REDUCED

    @property
    def has_content(self) -> bool:
        """Whether gradients were written or reduced since the last `reset`."""
        return bool(self.memory.written) or self.phase is not GradientPhase.ACCUMULATING or self._tracker.begun

    # -- backward passes --------------------------------------------------------------------------------------------

    def gradient(self, name: str, second: bool = False) -> tuple[Array, bool]:
        """The memory for the gradient of tensor `name`, and whether to add to it (else: overwrite its content).

        Parameters
        ----------
        name : str
            Of the tensor.
        second : bool
            Whether to ask for that of its second use on this rank, where that is kept apart.

        Returns
        -------
        array of the tensor's shape, and bool
            A view, valid until the tensor is marked ready.

        Raises
        ------
        RuntimeError
            If its gradient is reduced already.
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
                "or reset_gradients() in between, or set auto_sync_gradients=False to accumulate over several passes"
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
        """Mark the gradient of `name` as complete in this pass, so that its bucket may be reduced.

        Parameters
        ----------
        name : str
            Of the tensor.
        """
        order = self._tracker.mark(name)
        if not order.tied and (self.on_demand or (self.is_last_pass and not order.more)):
            while self._tracker.is_complete(order):
                self._reduce(order)

    def no_sync(self) -> NoSync:
        """A context for a backward pass that is not the last one of the step.

        Its gradients stay local where memory is kept.  Where memory is on demand (ZeRO-2 and 3) they are summed across
        ranks nevertheless, collectively over the data axis, at the latest at the exit: the next pass writes to the same
        memory, and this rank keeps only its part of the sums.

        Returns
        -------
        context manager
            For one ``with`` statement.

        Raises
        ------
        RuntimeError
            At the entry, if the last pass has begun to reduce.
        """
        # A new one: kept here, it would keep the memory of the gradients until a collection.
        return NoSync(self._begin_without_sync, self._end_without_sync)

    def begin_virtual_stage(self, virtual_stage: int, last: bool) -> None:
        """Begin a micro-batch's backward pass of a virtual stage; `last`: no other follows in this pass.

        Parameters
        ----------
        virtual_stage : int
            Its number.
        last : bool
            As above.
        """
        self.memory.take_early(virtual_stage)
        for order in self._tracker.orders:
            if order.virtual_stage == virtual_stage:
                order.more = not last

    def end_virtual_stage(self, virtual_stage: int) -> None:
        """End a micro-batch's pass of a virtual stage; reduce its other buckets.  Collective over the data axis.

        Parameters
        ----------
        virtual_stage : int
            Its number.
        """
        for order in reversed(self._tracker.orders):
            if order.virtual_stage != virtual_stage or order.tied:
                continue
            if self._apart and self._apart.in_pass and order.more:
                self._keep(order)
            if self.on_demand or (self.is_last_pass and not order.more):
                self._reduce_rest(order)
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
        if self.phase is not GradientPhase.REDUCED:
            self._end_pass(True)
            self._wait_all()
            if self._reproducible and self._sums is not None:
                self._sums.add_uses()
            self._enter(GradientPhase.REDUCED)

    def abandon(self) -> None:
        """Drop the sums under way, whose communicators were revoked.  Not collective."""
        for _, _, transfer in self._pending:
            transfer.abandon()
        self._pending.clear()

    def reset(self) -> None:
        """Discard the gradients: the next pass starts from zero.  Waits for sums under way."""
        self._wait_all()
        for order in self._tracker.orders:
            self._tracker.begin(order)
            order.more, order.pushed = False, 0
        self.memory.forget()
        self._apart.forget()
        self.accumulation.forget()
        self._enter(GradientPhase.ACCUMULATING)
        if self._sums is not None:
            self._sums.reset()
        if self.inspector is not None:
            self.inspector.forget()

    # -- micro-batches that are kept apart --------------------------------------------------------------------------

    def keep_apart(self, tree_merges: Sequence[int], *, in_pass: bool = False) -> None:
        """Keep the gradients of this step's micro-batches apart, as terms of a sum in a fixed order.

        Only for reproducible runs, before the first backward pass of a step.

        Parameters
        ----------
        tree_merges : sequence of int
            For each micro-batch of this rank, how many of the partial sums before it are added to it, the newest first;
            ``[0]`` if it has none.  Empty where each micro-batch is reduced by itself, on demand.
        in_pass : bool
            False: each backward pass is a micro-batch.  True: one pass has all of them, one by one in each virtual
            stage.
        """
        assert self._reproducible
        self._apart.begin(tree_merges, in_pass)

    def push_external(self, flat: Array) -> Array:
        """Keep a micro-batch apart whose gradient is the caller's array; not collective.

        Parameters
        ----------
        flat : 1-D array
            This rank's whole gradient of the micro-batch; it is the reducer's from now on.

        Returns
        -------
        1-D array
            Uninitialised memory for the next one.
        """
        (order,) = self._tracker.orders
        return self.memory.push_external(flat, self._apart.push(order))

    def begin_input_gradient(self, virtual_stage: int) -> None:
        """Begin a micro-batch's input gradient, whose weight gradient comes later; not collective.

        Parameters
        ----------
        virtual_stage : int
            Its number.
        """
        if self._apart.in_pass:
            self.memory.early.begin(virtual_stage)

    def end_input_gradient(self) -> None:
        """End a micro-batch's input gradient; not collective."""
        self.memory.early.end()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _enter(self, phase: GradientPhase) -> None:
        if phase is not self.phase:
            assert (self.phase, phase) in TRANSITIONS, f"{self.phase} to {phase}"
            self.phase = phase

    def _begin_without_sync(self) -> bool:
        if self.phase is not GradientPhase.ACCUMULATING:
            raise RuntimeError(
                "the gradients of this step are being reduced, so that no_sync() comes too late for another backward "
                "pass; call step() or reset_gradients() before"
            )
        was_last, self.is_last_pass = self.is_last_pass, False
        return was_last

    def _end_without_sync(self, complete: bool, was_last: bool) -> None:
        try:
            if complete:
                self._end_pass(False)
        finally:
            self.is_last_pass = was_last

    def _end_pass(self, last: bool) -> None:
        if self.phase is GradientPhase.REDUCED:
            return
        if last and self.phase is GradientPhase.ACCUMULATING:
            self._enter(GradientPhase.REDUCING)
        for order in reversed(self._tracker.orders):
            if last:
                self._reduce_rest(order)
            elif self.on_demand and not order.tied:
                self._reduce_rest(order)
                self._begin(order)
            else:
                if self._apart and not self._apart.in_pass:
                    self._keep(order)
                self._tracker.end(order)

    def _keep(self, order: BucketOrder) -> None:
        """Make a complete micro-batch a partial sum of its own; the next one starts a gradient of its own."""
        tree_merges = self._apart.push(order)
        buckets = self.buckets[order.first : order.last + 1]
        for bucket in reversed(buckets):
            gradient = self.memory.zero_missing(bucket)
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

    def _reduce_rest(self, order: BucketOrder) -> None:
        while order.next >= order.first:
            self._reduce(order)

    def _reduce(self, order: BucketOrder) -> None:
        """Complete the next bucket of an order, and start its sum over ranks."""
        bucket, sums = self.buckets[order.next], self._sums
        gradient = self.memory.zero_missing(bucket)
        earlier: Sequence[Array] = ()
        if self._reproducible:
            if sums is not None:
                sums.sum_copies(bucket, gradient)
            earlier = self._apart.complete(order, bucket, gradient)
        order.next -= 1
        if self.phase is GradientPhase.ACCUMULATING and self.is_last_pass:
            self._enter(GradientPhase.REDUCING)
        if self.inspector is not None:
            for partial in (*earlier, gradient):
                self.inspector.look(bucket, partial)
        if sums is None:
            self.memory.release(bucket)
            return
        if self.on_demand:
            self._wait_all()  # ZeRO-2 saves memory by having few buckets at a time
        if not self._reproducible:
            sums.sum_copies(bucket, gradient)
        for _, _, transfer in self._pending:
            transfer.test()  # MPI moves data only while it is called
        started = sums.start(bucket, gradient, earlier)
        if started is None:
            self.memory.release(bucket)
        else:
            self._pending.append((bucket, gradient, started))
        if not self._overlap:
            self._wait_all()
