"""Gradients bucket by bucket: written by a backward pass, handed to a reducer as soon as a bucket is complete.

A bucket is a run of consecutive tensors of at least so many elements.  Buckets are handed over last first, in one
fixed order: a rank that has no samples this time, and so announces nothing, issues the same collectives in the same
order as the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mpishard import array as arrays
from mpishard.layout import ParameterSpec

Array = Any


@arrays.elementwise
def accumulate(total, addend, /):  # type: ignore[no-untyped-def]
    """``total += addend``, for flat arrays of both kinds."""
    total = total + addend
    return total


@arrays.elementwise
def divide(total, /, divisor):  # type: ignore[no-untyped-def]
    """``total /= divisor``, for flat arrays of both kinds."""
    total = total / divisor
    return total


@dataclass(frozen=True)
class Bucket:
    """Tensors `first` to `last` (exclusive) of a model: elements ``[start, stop)`` of its flat buffer."""

    index: int
    first: int
    last: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def make_buckets(specs: Sequence[ParameterSpec], minimum: int) -> tuple[Bucket, ...]:
    """Group consecutive tensors until a bucket holds `minimum` elements; a short rest joins the last bucket."""
    if minimum < 1:
        raise ValueError(f"minimum_parameter_group_size is {minimum}, but a bucket holds at least 1 element")
    cuts = [(0, 0)]
    stop = 0
    for index, spec in enumerate(specs, start=1):
        stop += spec.size
        if stop - cuts[-1][1] >= minimum:
            cuts.append((index, stop))
    if len(cuts) > 1:
        cuts[-1] = (len(specs), stop)
    else:
        cuts.append((len(specs), stop))
    return tuple(
        Bucket(index, first, last, start, stop)
        for index, ((first, start), (last, stop)) in enumerate(zip(cuts[:-1], cuts[1:], strict=True))
    )


class GradientBuckets:
    """The gradient memory of one model on one rank.

    Parameters
    ----------
    specs : sequence of ParameterSpec
        Tensors in flat order.
    like : array
        An array of the dtype and device that the gradients shall have.
    minimum : int
        Least number of elements in a bucket.
    reduce : callable or None
        ``reduce(bucket, array)`` takes the complete local gradient of one bucket; it may start a transfer and return.
        ``release(bucket)`` must be called once the array may be written again (at once where nothing is in flight).
    drain : callable or None
        Waits until nothing that `reduce` started is under way.
    on_demand : bool
        False: one flat buffer for all buckets, kept, in which micro-batches add up, reduced after the last of them.
        True: a bucket has memory from its first gradient until it is reduced, after every micro-batch (ZeRO-2).

    Attributes
    ----------
    hold : bool
        True: keep finished buckets until `end_pass`, since more passes will add to them.
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
        specs: Sequence[ParameterSpec],
        like: Array,
        minimum: int,
        *,
        reduce: Callable[[Bucket, Array], None] | None = None,
        drain: Callable[[], None] | None = None,
        on_demand: bool = False,
    ) -> None:
        self.buckets = make_buckets(specs, minimum)
        self.on_demand = on_demand
        self.inspect: Callable[[Bucket, Array], None] | None = None
        self.hold = reduce is None
        self.reduced = False
        self.peak_bytes = 0
        self.on_reset: list[Callable[[], None]] = []
        self._like = like
        self._reduce = reduce
        self._drain = drain
        self._specs = tuple(specs)
        self._bucket_of: dict[str, tuple[Bucket, int, int]] = {}
        for bucket in self.buckets:
            offset = 0
            for spec in self._specs[bucket.first : bucket.last]:
                self._bucket_of[spec.name] = (bucket, offset, offset + spec.size)
                offset += spec.size
        self._shapes = {spec.name: spec.shape for spec in self._specs}
        self._flat: Array | None = None
        self._memory: dict[int, Array] = {}
        self._free: list[Array] = []
        self._lent: dict[int, Array] = {}
        self._written: set[str] = set()
        self._finished: list[set[str]] = [set() for _ in self.buckets]
        self._next = len(self.buckets) - 1

    @property
    def flat(self) -> Array:
        """The one flat gradient buffer, in flat order (only where memory is not on demand)."""
        if self.on_demand:
            raise ValueError("gradients that live bucket by bucket (ZeRO-2) have no flat buffer")
        if self._flat is None:
            self._flat = arrays.zeros(sum(spec.size for spec in self._specs), self._like.dtype, like=self._like)
            self._note_peak()
        return self._flat

    def adopt(self, flat: Array) -> None:
        """Take `flat`, which holds this rank's whole gradient, as the memory of this step; then it is the caller's."""
        self._written.update(self._shapes)
        self._lent = {bucket.index: flat[bucket.start : bucket.stop] for bucket in self.buckets}

    @property
    def reduces(self) -> bool:
        """Whether buckets go to a reducer: an optimizer has bound these gradients."""
        return self._reduce is not None

    @property
    def has_content(self) -> bool:
        """Whether gradients were written or reduced since the last `reset`."""
        return bool(self._written) or self.reduced or self._next < len(self.buckets) - 1

    @property
    def nbytes(self) -> int:
        """Bytes of gradient memory held now."""
        own = 0 if self._flat is None else self._flat.nbytes
        return int(own + sum(a.nbytes for a in self._memory.values()) + sum(a.nbytes for a in self._free))

    def of_bucket(self, bucket: Bucket) -> Array:
        """The gradient of one bucket, where memory is not on demand: what `reduce` was given."""
        return self._array(bucket)

    def gradient(self, name: str) -> tuple[Array, bool]:
        """Where the gradient of tensor `name` goes, and whether to add to it (else: overwrite what is there)."""
        bucket, start, stop = self._bucket_of[name]
        if self.on_demand and self.hold and self._next < 0:
            self._begin_pass()
        if self.reduced or bucket.index > self._next:
            raise RuntimeError(
                f"the gradient of {name!r} is reduced already, so another backward pass cannot add to it; call step() "
                "or reset_gradients() in between, or set auto_sync_gradients=False to accumulate over several passes"
            )
        view = self._array(bucket)[start:stop].reshape(self._shapes[name])
        accumulate = name in self._written
        self._written.add(name)
        return view, accumulate

    def finished(self, name: str) -> None:
        """Announce that this pass writes no more to the gradient of `name`: its bucket may be reduced."""
        bucket, _, _ = self._bucket_of[name]
        self._finished[bucket.index].add(name)
        if not self.hold or self.on_demand:
            self._hand_over()

    def end_pass(self, last: bool = True) -> None:
        """End one micro-batch: reduce what is due; tensors without a gradient count as zero.  Collective."""
        if last or self.on_demand:
            while self._next >= 0:
                self._launch(self.buckets[self._next])
        if last:
            self.reduced = True
        elif self.on_demand:
            self._begin_pass()
        self._unfinish()

    def drain(self) -> None:
        """Wait until no reduction is under way."""
        if self._drain is not None:
            self._drain()

    def _begin_pass(self) -> None:
        self.drain()
        self._unfinish()
        self._next = len(self.buckets) - 1

    def _unfinish(self) -> None:
        for names in self._finished:
            names.clear()

    def reset(self) -> None:
        """Forget the gradients: the next pass starts from zero."""
        self._begin_pass()
        self._written.clear()
        self._lent.clear()
        self.reduced = False
        for forget in self.on_reset:
            forget()

    def release(self, bucket: Bucket) -> None:
        """The reducer no longer needs the memory of `bucket`."""
        if self.on_demand:
            if self._lent.pop(bucket.index, None) is None:
                self._free.append(self._memory.pop(bucket.index))
            for spec in self._specs[bucket.first : bucket.last]:
                self._written.discard(spec.name)

    def _hand_over(self) -> None:
        while self._next >= 0:
            bucket = self.buckets[self._next]
            if len(self._finished[bucket.index]) < bucket.last - bucket.first:
                return
            self._launch(bucket)

    def _launch(self, bucket: Bucket) -> None:
        memory = self._array(bucket)
        for spec in self._specs[bucket.first : bucket.last]:
            if spec.name not in self._written:
                _, start, stop = self._bucket_of[spec.name]
                memory[start:stop] = 0
        self._next -= 1
        if self.inspect is not None:
            self.inspect(bucket, memory)
        if self._reduce is None:
            self.release(bucket)
        else:
            self._reduce(bucket, memory)

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
