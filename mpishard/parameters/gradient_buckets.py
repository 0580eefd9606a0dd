"""Gradients in buckets: a backward pass writes them, and a reducer gets each bucket as soon as it is complete.

A bucket is a run of consecutive tensors with a least number of elements.  The reducer gets the buckets in one fixed
order, the last bucket first.  So a rank without samples in a step, which marks nothing ready, issues the same
collectives in the same order as the others.  Where a rank runs several pipeline stages, each stage has its own order;
the schedule, the same on all ranks of the data axis, decides how the orders interleave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mpishard.backend import array as arrays
from mpishard.backend.array import accumulate
from mpishard.layout.local_layout import Piece

Array = Any


class Run(NamedTuple):
    """Tensors `first` to `last` (exclusive) of a model, whose gradients are complete together.

    `key` separates neighbouring runs of one stage.  A `tied` tensor is a run by itself: it waits for the last backward
    pass of the step, since another stage adds to its gradient.
    """

    first: int
    last: int
    stage: int = 0
    key: object = None
    tied: bool = False


def make_runs(tensors: Iterable[tuple[int, object, bool]]) -> list[Run]:
    """Join neighbouring tensors with the same key into runs; a tied tensor stays alone.

    `tensors` are ``(stage, key, tied)`` in flat order.
    """
    runs: list[Run] = []
    for index, (stage, key, tied) in enumerate(tensors):
        if runs and not tied and not runs[-1].tied and runs[-1].key == key:
            runs[-1] = runs[-1]._replace(last=index + 1)
        else:
            runs.append(Run(index, index + 1, stage, key, tied))
    return runs


@dataclass(frozen=True)
class Bucket:
    """Tensors `first` to `last` (exclusive) of a model: elements ``[start, stop)`` of its flat buffer."""

    index: int
    first: int
    last: int
    start: int
    stop: int
    tied: bool = False

    @property
    def size(self) -> int:
        return self.stop - self.start


def make_buckets(
    pieces: Sequence[Piece], minimum: int, runs: Sequence[Run] | None = None, sizes: Sequence[int] | None = None
) -> tuple[Bucket, ...]:
    """Group consecutive tensors of a run until a bucket holds `minimum` elements; a short rest joins the last bucket.

    `sizes` replace the sizes of the pieces in this, so that ranks with pieces of other sizes cut alike.
    """
    if minimum < 1:
        raise ValueError(f"minimum_parameter_group_size is {minimum}, but a bucket holds at least 1 element")
    sizes = [piece.size for piece in pieces] if sizes is None else sizes
    buckets: list[Bucket] = []
    for run in [Run(0, len(pieces))] if runs is None else runs:
        cuts = [run.first]
        size = 0
        for index in range(run.first, run.last):
            size += sizes[index]
            if size >= minimum:
                cuts.append(index + 1)
                size = 0
        if len(cuts) > 1:
            cuts[-1] = run.last
        else:
            cuts.append(run.last)
        for first, last in zip(cuts[:-1], cuts[1:], strict=True):
            start = buckets[-1].stop if buckets else 0
            stop = start + sum(piece.size for piece in pieces[first:last])
            buckets.append(Bucket(len(buckets), first, last, start, stop, run.tied))
    return tuple(buckets)


@dataclass
class _Stage:
    """Buckets that are reduced in turn, from the last to the first; `next` is the next one."""

    stage: int
    tied: bool
    first: int
    last: int
    next: int
    no_sync: bool = False


class GradientBuckets:
    """The gradient memory of one model on one rank.

    Parameters
    ----------
    pieces : sequence of Piece
        Tensors in flat order.
    like : array
        An array of the dtype and device that the gradients shall have.
    minimum : int
        Least number of elements in a bucket.
    runs : sequence of Run, optional
        Runs of tensors that no bucket may span; they cover all tensors.  Default: all tensors are one run.
    sizes : sequence of int, optional
        Elements of each tensor to compare with `minimum`; default: the size of its piece.
    reduce : callable or None
        ``reduce(bucket, array)`` gets the complete local gradient of one bucket; it may start a collective and return.
        It calls ``release(bucket)`` once the array may be written again.
    reduce_within_replica : callable or None
        ``reduce_within_replica(bucket, array)`` adds the terms of the other ranks of the model replica to the gradient
        of one micro-batch, before that is added to earlier micro-batches.
    drain : callable or None
        Waits until all that `reduce` started is complete.
    on_demand : bool
        False: one flat buffer for all buckets is kept; micro-batches add up in it, and it is reduced after the last of
        them.  True: a bucket has memory from its first gradient until its reduction, after every micro-batch (ZeRO-2).
        Buckets of tied tensors are kept until the last micro-batch in both cases.

    Attributes
    ----------
    no_sync : bool
        True: keep complete buckets until `end_pass`, since more passes will add to them.
    tree_merges : int
        How many of the newest pushed partial sums belong to one sum with the gradient under way.
    reduced : bool
        Whether this step's gradients are complete and reduced; nothing can be added then.
    inspect : callable or None
        ``inspect(bucket, array)`` gets the complete local gradient before `reduce` does.
    peak_bytes : int
        Most bytes of gradient memory held so far.
    on_reset : list of callables
        Called by `reset`, to discard whatever else is kept of this step's gradients.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        like: Array,
        minimum: int,
        *,
        runs: Sequence[Run] | None = None,
        sizes: Sequence[int] | None = None,
        reduce: Callable[[Bucket, Array], None] | None = None,
        reduce_within_replica: Callable[[Bucket, Array], None] | None = None,
        drain: Callable[[], None] | None = None,
        on_demand: bool = False,
    ) -> None:
        runs = [Run(0, len(pieces))] if runs is None else runs
        self.buckets: tuple[Bucket, ...] = make_buckets(pieces, minimum, runs, sizes)
        self.on_demand = on_demand
        self.inspect: Callable[[Bucket, Array], None] | None = None
        self.no_sync: bool = reduce is None
        self.tree_merges: int = 0
        self.reduced: bool = False
        self.peak_bytes: int = 0
        self.on_reset: list[Callable[[], None]] = []
        self._like = like
        self._reduce = reduce
        self._reduce_within_replica = reduce_within_replica
        self._drain = drain
        self._pieces = tuple(pieces)
        self._bucket_of: dict[str, tuple[Bucket, int, int]] = {}
        for bucket in self.buckets:
            offset = 0
            for piece in self._pieces[bucket.first : bucket.last]:
                self._bucket_of[piece.name] = (bucket, offset, offset + piece.size)
                offset += piece.size
        self._shapes = {piece.name: piece.shape for piece in self._pieces}
        self._stages: list[_Stage] = []
        self._stage_of: list[_Stage] = []
        for bucket in self.buckets:
            run = next(run for run in runs if run.first <= bucket.first and bucket.last <= run.last)
            last = self._stages[-1] if self._stages else None
            if last is None or run.tied or last.tied or last.stage != run.stage:
                self._stages.append(_Stage(run.stage, run.tied, bucket.index, bucket.index, bucket.index))
            self._stages[-1].last = self._stages[-1].next = bucket.index
            self._stage_of.append(self._stages[-1])
        self._flat: Array | None = None
        self._partials: list[Array] = []
        self._spare: list[Array] = []
        self._memory: dict[int, Array] = {}
        self._free: list[Array] = []
        self._lent: dict[int, Array] = {}
        self._written: set[str] = set()
        self._finished: list[set[str]] = [set() for _ in self.buckets]

    @property
    def flat(self) -> Array:
        """The one flat gradient buffer, in flat order (only where memory is not on demand)."""
        if self.on_demand:
            raise ValueError("gradients that live bucket by bucket (ZeRO-2, ZeRO-3) have no flat buffer")
        if self._flat is None:
            self._flat = self._another()
            self._flat[...] = 0
        return self._flat

    def use_external(self, flat: Array) -> None:
        """Use `flat`, this rank's whole gradient, as the memory of this step; afterwards it is the caller's again."""
        self._written.update(self._shapes)
        self._lent = {bucket.index: flat[bucket.start : bucket.stop] for bucket in self.buckets}

    def push_partial(self, tree_merges: int) -> None:
        """End a micro-batch; add partial sums to its gradient, and push the result as a new partial sum.

        The next micro-batch starts a gradient of its own.  Collective as `reduce_within_replica` is.  Not for memory on
        demand.

        Parameters
        ----------
        tree_merges : int
            How many of the newest partial sums are popped and added, the newest first.
        """
        flat, self._flat = self.flat, None
        for bucket in reversed(self.buckets):
            self._complete(bucket, flat[bucket.start : bucket.stop])
        self._written.clear()
        for stage in self._stages:
            self._unfinish(stage)
        self._flat = self.swap_external(flat, tree_merges)

    def swap_external(self, flat: Array, tree_merges: int) -> Array:
        """`push_partial` for the caller's complete gradient `flat`; returns uninitialised memory for the next one."""
        for _ in range(tree_merges):
            other = self._partials.pop()
            accumulate(flat, other)
            self._spare.append(other)
        self._partials.append(flat)
        return self._another()

    def earlier(self, bucket: Bucket) -> list[Array]:
        """The partial sums of a bucket, oldest first, without those that belong to the gradient under way."""
        kept = self._partials[: len(self._partials) - self.tree_merges]
        return [flat[bucket.start : bucket.stop] for flat in kept]

    @property
    def reduces(self) -> bool:
        """Whether a reducer gets the buckets, since an optimizer has bound these gradients."""
        return self._reduce is not None

    @property
    def has_content(self) -> bool:
        """Whether gradients were written or reduced since the last `reset`."""
        return bool(self._written) or self.reduced or any(stage.next < stage.last for stage in self._stages)

    @property
    def nbytes(self) -> int:
        """Bytes of gradient memory held now."""
        own = sum(flat.nbytes for flat in (*self._partials, *self._spare))
        own += 0 if self._flat is None else self._flat.nbytes
        return int(own + sum(a.nbytes for a in self._memory.values()) + sum(a.nbytes for a in self._free))

    def of_bucket(self, bucket: Bucket) -> Array:
        """The gradient of one bucket, the array that `reduce` got (only where memory is not on demand)."""
        return self._array(bucket)

    def gradient(self, name: str) -> tuple[Array, bool]:
        """The memory for the gradient of tensor `name`, and whether to add to it (else: overwrite its content)."""
        bucket, start, stop = self._bucket_of[name]
        stage = self._stage_of[bucket.index]
        if self.on_demand and self.no_sync and stage.next < stage.first:
            self._begin_pass(stage)
        if self.reduced or bucket.index > stage.next:
            raise RuntimeError(
                f"the gradient of {name!r} is reduced already, so another backward pass cannot add to it; call step() "
                "or reset_gradients() in between, or set auto_sync_gradients=False to accumulate over several passes"
            )
        view = self._array(bucket)[start:stop].reshape(self._shapes[name])
        accumulate = name in self._written
        self._written.add(name)
        return view, accumulate

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

    def __iadd__(self, other: Any) -> GradientBuckets:
        name = next(iter(self._bucket_of), "name")
        raise TypeError(
            f"gradients of a start with names are added to by name, gradients[{name!r}] += ...; a start that is one "
            "flat array has a flat gradient"
        )

    def mark_ready(self, name: str) -> None:
        """Mark the gradient of `name` as complete in this pass, so that its bucket may be reduced."""
        bucket, _, _ = self._bucket_of[name]
        self._finished[bucket.index].add(name)
        stage = self._stage_of[bucket.index]
        if not stage.tied and (self.on_demand or not (self.no_sync or stage.no_sync)):
            self._hand_over(stage)

    def begin_stage(self, stage: int, last: bool) -> None:
        """Begin a backward pass of `stage`; `last`: it is the last one of this step."""
        for each in self._stages:
            if each.stage == stage:
                each.no_sync = not last

    def end_stage(self, stage: int) -> None:
        """End one micro-batch of one stage and reduce its remaining buckets.  Collective over the data axis."""
        for each in reversed(self._stages):
            if each.stage != stage or each.tied:
                continue
            if self.on_demand or not (self.no_sync or each.no_sync):
                self._launch_rest(each)
            # If only the buckets' own `no_sync` is set, `end_pass` follows and frees the memory.
            if self.on_demand and each.no_sync:
                self._begin_pass(each)
            self._unfinish(each)

    def end_pass(self, last: bool = True) -> None:
        """End one micro-batch and reduce its other buckets; a tensor without a gradient counts as zero.  Collective."""
        for stage in reversed(self._stages):
            if last or (self.on_demand and not stage.tied):
                self._launch_rest(stage)
            if not last and self.on_demand and not stage.tied:
                self._begin_pass(stage)
            self._unfinish(stage)
        self.reduced = self.reduced or last

    def wait_all(self) -> None:
        """Wait until no reduction is under way."""
        if self._drain is not None:
            self._drain()

    def _begin_pass(self, stage: _Stage) -> None:
        self.wait_all()
        self._unfinish(stage)
        stage.next = stage.last

    def _unfinish(self, stage: _Stage) -> None:
        for names in self._finished[stage.first : stage.last + 1]:
            names.clear()

    def reset(self) -> None:
        """Discard the gradients: the next pass starts from zero."""
        for stage in self._stages:
            self._begin_pass(stage)
            stage.no_sync = False
        self._written.clear()
        self._lent.clear()
        self._spare += self._partials
        self._partials.clear()
        self.tree_merges = 0
        self.reduced = False
        for forget in self.on_reset:
            forget()

    def release(self, bucket: Bucket) -> None:
        """Free the memory of `bucket`, which the reducer no longer needs."""
        if self.on_demand:
            if self._lent.pop(bucket.index, None) is None:
                self._free.append(self._memory.pop(bucket.index))
            for piece in self._pieces[bucket.first : bucket.last]:
                self._written.discard(piece.name)

    def _hand_over(self, stage: _Stage) -> None:
        while stage.next >= stage.first:
            bucket = self.buckets[stage.next]
            if len(self._finished[bucket.index]) < bucket.last - bucket.first:
                return
            self._launch(stage)

    def _launch_rest(self, stage: _Stage) -> None:
        while stage.next >= stage.first:
            self._launch(stage)

    def _launch(self, stage: _Stage) -> None:
        bucket = self.buckets[stage.next]
        memory = self._array(bucket)
        self._complete(bucket, memory)
        stage.next -= 1
        for flat in self._partials[len(self._partials) - self.tree_merges :][::-1]:
            accumulate(memory, flat[bucket.start : bucket.stop])
        if self.inspect is not None:
            for partial in (*self.earlier(bucket), memory):
                self.inspect(bucket, partial)
        if self._reduce is None:
            self.release(bucket)
        else:
            self._reduce(bucket, memory)

    def _complete(self, bucket: Bucket, memory: Array) -> None:
        """Complete a micro-batch's gradient of a bucket: zero what was not written, reduce within the replica."""
        for piece in self._pieces[bucket.first : bucket.last]:
            if piece.name not in self._written:
                _, start, stop = self._bucket_of[piece.name]
                memory[start:stop] = 0
        if self._reduce_within_replica is not None:
            self._reduce_within_replica(bucket, memory)

    def _another(self) -> Array:
        """Uninitialised memory for a whole gradient."""
        if self._spare:
            return self._spare.pop()
        flat = arrays.empty(sum(piece.size for piece in self._pieces), self._like.dtype, like=self._like)
        self.peak_bytes = max(self.peak_bytes, self.nbytes + int(flat.nbytes))
        return flat

    def _array(self, bucket: Bucket) -> Array:
        if bucket.index in self._lent:
            return self._lent[bucket.index]
        if not self.on_demand:
            return self.flat[bucket.start : bucket.stop]
        if bucket.index not in self._memory:
            # Blocks are as large as the largest bucket, so that any bucket can use any free block.
            largest = max(each.size for each in self.buckets)
            block = self._free.pop() if self._free else arrays.empty(largest, self._like.dtype, like=self._like)
            self._memory[bucket.index] = block
            self._note_peak()
        return self._memory[bucket.index][: bucket.size]

    def _note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.nbytes)
