"""Gradients bucket by bucket: written by a backward pass, handed to a reducer as soon as a bucket is complete.

A bucket is a run of consecutive tensors of at least so many elements.  Buckets are handed over last first, in one
fixed order: a rank that has no samples this time, and so announces nothing, issues the same collectives in the same
order as the others.  Where a rank runs several stages of a pipeline, each stage has an order of its own, and the
schedule, which all ranks of the data axis share, decides how the orders interleave.
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

    `key` tells neighbouring runs of one stage apart; a `tied` tensor is a run by itself, which waits for the last
    backward pass of the step, since another stage adds to its gradient.
    """

    first: int
    last: int
    stage: int = 0
    key: object = None
    tied: bool = False


def make_runs(tensors: Iterable[tuple[int, object, bool]]) -> list[Run]:
    """Join neighbouring tensors of one key, given as ``(stage, key, tied)`` in flat order; a tied one stays alone."""
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

    `sizes` are the numbers of elements to go by, where ranks whose pieces differ in size shall cut alike.
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
    """The buckets of one run that are handed over in turn, from the last to the first, and the next to go."""

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
        Elements of each tensor to hold against `minimum`; default those of its piece.
    reduce : callable or None
        ``reduce(bucket, array)`` takes the complete local gradient of one bucket; it may start a transfer and return.
        ``release(bucket)`` must be called once the array may be written again (at once where nothing is in flight).
    settle : callable or None
        ``settle(bucket, array)`` completes the gradient of one micro-batch with what other ranks have computed of it,
        before it is added to those set aside.
    drain : callable or None
        Waits until nothing that `reduce` started is under way.
    on_demand : bool
        False: one flat buffer for all buckets, kept, in which micro-batches add up, reduced after the last of them.
        True: a bucket has memory from its first gradient until it is reduced, after every micro-batch (ZeRO-2).  The
        buckets of tied tensors are kept until the last one all the same.

    Attributes
    ----------
    hold : bool
        True: keep finished buckets until `end_pass`, since more passes will add to them.
    merges : int
        How many of the gradients that were set aside belong to one sum with the gradient under way.
    reduced : bool
        Whether this step's gradients are complete and reduced; nothing can be added then.
    inspect : callable or None
        ``inspect(bucket, array)`` sees the complete local gradient before `reduce` does.
    peak_bytes : int
        Most bytes of gradient memory held so far.
    on_reset : list of callables
        Called by `reset`: whoever keeps something of this step's gradients forgets it here.
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
        self._settle = reduce_within_replica
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
        self._aside: list[Array] = []
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
        """Take `flat`, which holds this rank's whole gradient, as the memory of this step; then it is the caller's."""
        self._written.update(self._shapes)
        self._lent = {bucket.index: flat[bucket.start : bucket.stop] for bucket in self.buckets}

    def push_partial(self, tree_merges: int) -> None:
        """End a micro-batch whose gradient stays apart from that of the next, in one sum with some set aside before.

        Collective as `reduce_within_replica` is, and not for memory on demand.

        Parameters
        ----------
        merges : int
            How many of those set aside before belong to the sum: newest plus next newest, and so on.
        """
        flat, self._flat = self.flat, None
        for bucket in reversed(self.buckets):
            self._complete(bucket, flat[bucket.start : bucket.stop])
        self._written.clear()
        for stage in self._stages:
            self._unfinish(stage)
        self._flat = self.swap_external(flat, tree_merges)

    def swap_external(self, flat: Array, tree_merges: int) -> Array:
        """The same for a gradient of the caller (see `use_external`); returns memory for the next, of any content."""
        for _ in range(tree_merges):
            other = self._aside.pop()
            accumulate(flat, other)
            self._spare.append(other)
        self._aside.append(flat)
        return self._another()

    def earlier(self, bucket: Bucket) -> list[Array]:
        """What was set aside for a bucket and does not belong to one sum with the gradient under way, oldest first."""
        kept = self._aside[: len(self._aside) - self.tree_merges]
        return [flat[bucket.start : bucket.stop] for flat in kept]

    @property
    def reduces(self) -> bool:
        """Whether buckets go to a reducer: an optimizer has bound these gradients."""
        return self._reduce is not None

    @property
    def has_content(self) -> bool:
        """Whether gradients were written or reduced since the last `reset`."""
        return bool(self._written) or self.reduced or any(stage.next < stage.last for stage in self._stages)

    @property
    def nbytes(self) -> int:
        """Bytes of gradient memory held now."""
        own = sum(flat.nbytes for flat in (*self._aside, *self._spare))
        own += 0 if self._flat is None else self._flat.nbytes
        return int(own + sum(a.nbytes for a in self._memory.values()) + sum(a.nbytes for a in self._free))

    def of_bucket(self, bucket: Bucket) -> Array:
        """The gradient of one bucket, where memory is not on demand: what `reduce` was given."""
        return self._array(bucket)

    def gradient(self, name: str) -> tuple[Array, bool]:
        """Where the gradient of tensor `name` goes, and whether to add to it (else: overwrite what is there)."""
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
        """The end of ``gradients[name] += ...``, which has added in place."""
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
        """Announce that this pass writes no more to the gradient of `name`: its bucket may be reduced."""
        bucket, _, _ = self._bucket_of[name]
        self._finished[bucket.index].add(name)
        stage = self._stage_of[bucket.index]
        if not stage.tied and (self.on_demand or not (self.no_sync or stage.no_sync)):
            self._hand_over(stage)

    def begin_stage(self, stage: int, last: bool) -> None:
        """Tell whether the pass that writes the gradients of `stage` now is the last of this step's."""
        for each in self._stages:
            if each.stage == stage:
                each.no_sync = not last

    def end_stage(self, stage: int) -> None:
        """End one micro-batch of one stage: reduce what is due.  All ranks of the data axis must be at this point."""
        for each in reversed(self._stages):
            if each.stage != stage or each.tied:
                continue
            if self.on_demand or not (self.no_sync or each.no_sync):
                self._launch_rest(each)
            # Where only `no_sync` says that more passes come, `end_pass` follows, and makes room for them.
            if self.on_demand and each.no_sync:
                self._begin_pass(each)
            self._unfinish(each)

    def end_pass(self, last: bool = True) -> None:
        """End one micro-batch: reduce what is due; tensors without a gradient count as zero.  Collective."""
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
        """Forget the gradients: the next pass starts from zero."""
        for stage in self._stages:
            self._begin_pass(stage)
            stage.no_sync = False
        self._written.clear()
        self._lent.clear()
        self._spare += self._aside
        self._aside.clear()
        self.tree_merges = 0
        self.reduced = False
        for forget in self.on_reset:
            forget()

    def release(self, bucket: Bucket) -> None:
        """The reducer no longer needs the memory of `bucket`."""
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
        for flat in self._aside[len(self._aside) - self.tree_merges :][::-1]:
            accumulate(memory, flat[bucket.start : bucket.stop])
        if self.inspect is not None:
            for partial in (*self.earlier(bucket), memory):
                self.inspect(bucket, partial)
        if self._reduce is None:
            self.release(bucket)
        else:
            self._reduce(bucket, memory)

    def _complete(self, bucket: Bucket, memory: Array) -> None:
        """Make what a micro-batch has left in a bucket its whole gradient."""
        for piece in self._pieces[bucket.first : bucket.last]:
            if piece.name not in self._written:
                _, start, stop = self._bucket_of[piece.name]
                memory[start:stop] = 0
        if self._settle is not None:
            self._settle(bucket, memory)

    def _another(self) -> Array:
        """Memory for a whole gradient, with any content."""
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
            # Blocks are as large as the largest bucket, so that any bucket can use a block that is free.
            largest = max(each.size for each in self.buckets)
            block = self._free.pop() if self._free else arrays.empty(largest, self._like.dtype, like=self._like)
            self._memory[bucket.index] = block
            self._note_peak()
        return self._memory[bucket.index][: bucket.size]

    def _note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.nbytes)
