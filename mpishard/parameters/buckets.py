"""A model's gradients in buckets: where they are cut, and their memory.

Partial sums and gradients that come early, while those before are not complete, have separate memory. On demand buckets
use blocks of a `BlockPool` in turns, as gathered units of parameters do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mpishard.backend import array as arrays
from mpishard.backend.array import accumulate
from mpishard.backend.kinds import backend_of
from mpishard.layout.tensors import Piece

Array = Any


# Where a model's tensors are cut into buckets: runs of consecutive tensors whose gradients are reduced together.


class TensorRun(NamedTuple):
    """Tensors `first` to `last` (exclusive) of a model, whose gradients are complete together.

    `key` separates neighbouring runs of one virtual stage. A `tied` tensor is a separate run: it waits for the last
    backward pass of the step, since another virtual stage adds to its gradient.
    """

    first: int
    last: int
    virtual_stage: int = 0
    key: object = None
    tied: bool = False


def make_runs(tensors: Iterable[tuple[int, object, bool]]) -> list[TensorRun]:
    """Join neighbouring tensors with the same key into runs; a tied tensor stays alone.

    `tensors` are ``(virtual_stage, key, tied)`` in flat order.
    """
    runs: list[TensorRun] = []
    for index, (virtual_stage, key, tied) in enumerate(tensors):
        if runs and not tied and not runs[-1].tied and runs[-1].key == key:
            runs[-1] = runs[-1]._replace(last=index + 1)
        else:
            runs.append(TensorRun(index, index + 1, virtual_stage, key, tied))
    return runs


@dataclass(frozen=True)
class Bucket:
    """Tensors `first` to `last` (exclusive) of a model: elements ``[start, stop)`` of its flat buffer.

    `virtual_stage` and `tied` are those of its `TensorRun`. With `second_use` it is the second gradient of one tensor,
    which has another place in memory than the range of the tensor.
    """

    index: int
    first: int
    last: int
    start: int
    stop: int
    virtual_stage: int = 0
    tied: bool = False
    second_use: bool = False

    @property
    def size(self) -> int:
        return self.stop - self.start


def names_in(bucket: Bucket, pieces: Sequence[Piece]) -> list[str]:
    """The names under which a reducer has the gradients of a bucket; that of a second use is no tensor's name."""
    names = [piece.name for piece in pieces[bucket.first : bucket.last]]
    return [second_use(name) for name in names] if bucket.second_use else names


def second_use(name: str) -> str:
    """The name of the gradient of a tensor's second use, which no tensor can have."""
    return f"{name}\0second use"


def make_buckets(
    pieces: Sequence[Piece], minimum: int, runs: Sequence[TensorRun] | None = None, sizes: Sequence[int] | None = None
) -> tuple[Bucket, ...]:
    """Group consecutive tensors of a run until a bucket holds `minimum` elements; a short rest joins the last bucket.

    `sizes` replace the sizes of the pieces in this, so that ranks with pieces of other sizes cut identically. No bucket
    spans two `runs`; default: one run of all pieces. Raises ValueError if `minimum` is below 1.
    """
    if minimum < 1:
        raise ValueError(f"minimum_parameter_group_size is {minimum}, but a bucket holds at least 1 element")
    sizes = [piece.size for piece in pieces] if sizes is None else sizes
    buckets: list[Bucket] = []
    for run in [TensorRun(0, len(pieces))] if runs is None else runs:
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
            buckets.append(Bucket(len(buckets), first, last, start, stop, run.virtual_stage, run.tied))
    return tuple(buckets)


# Gradients that a micro-batch writes while those of the micro-batch before are not complete.


class EarlyGradients:
    """Keeps what input gradients write until the weight gradients of their micro-batch.

    A schedule such as ZB-H1 does the input gradient of a micro-batch before the weight gradients of earlier ones.
    Layers write small gradients, those of biases and norms, in the first of the two. Where micro-batches are kept
    apart, these gradients wait here, in separate memory, and are copied when the weight gradients begin.
    """

    def __init__(self, like: Array) -> None:
        self.writing: bool = False  # a micro-batch writes to this memory now
        self._like = like
        # By virtual stage: what each micro-batch has written here since its input gradient, oldest first.  None: it
        # wrote to the usual memory, since no other micro-batch was before it.
        self._waiting: dict[int, deque[dict[str, Array] | None]] = {}
        self._open: dict[str, Array] = {}
        self._free: dict[str, list[Array]] = {}

    @property
    def nbytes(self) -> int:
        held = [array for free in self._free.values() for array in free]
        held += [array for queue in self._waiting.values() for written in queue for array in (written or {}).values()]
        return sum(int(array.nbytes) for array in held)

    def begin(self, virtual_stage: int) -> None:
        """Begin the input gradient of the next micro-batch of a virtual stage."""
        queue = self._waiting.setdefault(virtual_stage, deque())
        self.writing = bool(queue)
        self._open = {}
        queue.append(self._open if self.writing else None)

    def end(self) -> None:
        self.writing = False

    def view(self, name: str, shape: tuple[int, ...]) -> tuple[Array, bool]:
        """Memory for a gradient of the micro-batch under way, and whether it has content."""
        known = name in self._open
        if not known:
            free = self._free.get(name)
            self._open[name] = free.pop() if free else arrays.empty(shape, self._like.dtype, like=self._like)
        return self._open[name], known

    def take(self, virtual_stage: int) -> dict[str, Array]:
        """The gradients of the oldest micro-batch of a virtual stage; its weight gradients begin now."""
        queue = self._waiting.get(virtual_stage)
        written = (queue.popleft() if queue else None) or {}
        for name, array in written.items():
            self._free.setdefault(name, []).append(array)
        return written

    def forget(self) -> None:
        """Forget what waits, after an exception or a step."""
        self._waiting.clear()
        self._open = {}
        self.writing = False


# Partial sums of a rank's micro-batches, for runs whose sums have one order whatever the ranks are.


class PartialSums:
    """A stack of gradients of some buckets, each the sum of some of this rank's micro-batches in the current step.

    The buckets cover elements ``[start, stop)`` of the flat parameters. The gradients are added in the order of
    `mpishard.reduction.tree_sum`.
    """

    def __init__(self, start: int, stop: int, like: Array) -> None:
        self.block: Array | None = None  # the memory of the gradient under way; None: the buckets' own
        # By micro-batch of this step the partial sums that it takes in; how many of them are partial sums already.
        self._tree_merges: tuple[int, ...] = ()
        self._pushed = 0
        self.spare: list[Array] = []  # memory of earlier partial sums, to use again
        self._start, self._stop = start, stop
        self._like = like
        self._sums: list[Array] = []
        self._own: Array | None = None  # the buckets' own memory, if it is in use here; never spare

    @property
    def nbytes(self) -> int:
        """Bytes of the partial sums and of the spare memory, without the buckets' own."""
        blocks = [*self._sums, *self.spare, *(() if self.block is None else (self.block,))]
        return sum(int(block.nbytes) for block in blocks if block is not self._own)

    def begin(self, tree_merges: Sequence[int]) -> None:
        """Begin a step, as `GradientReducer.keep_apart` says."""
        self._tree_merges, self._pushed = tuple(tree_merges), 0

    def check(self, is_last: bool) -> None:
        """Raise RuntimeError unless the micro-batch under way is the last one of this step, or is not."""
        if is_last is (self._pushed + 1 < len(self._tree_merges)):
            raise RuntimeError(
                f"this backward pass has {len(self._tree_merges)} micro-batches to keep apart, but the model has made "
                "another number of them; losses_and_gradient makes one of each batch that it gets"
            )

    def push(self, flat: Array) -> None:
        """Add to a gradient the newest partial sums that belong to it, the newest first; it takes their place."""
        self.check(is_last=False)
        for _ in range(self._tree_merges[self._pushed]):
            other = self._sums.pop()
            accumulate(flat, other)
            self.spare.append(other)
        self._sums.append(flat)
        self._pushed += 1

    def push_block(self, own: Array) -> None:
        """Push the gradient under way; the next one goes to other memory.  `own` is the memory of the buckets."""
        if self.block is None:
            self.block = self._own = own
        self.push(self.block)
        self.block = self.another()

    def another(self) -> Array:
        """Uninitialised memory for a gradient."""
        if self.spare:
            return self.spare.pop()
        return arrays.empty(self._stop - self._start, self._like.dtype, like=self._like)

    def part(self, bucket: Bucket) -> Array:
        """The memory of a bucket in that of the gradient under way, where that is a `block`."""
        assert self.block is not None
        return self._part(self.block, bucket)

    def complete(self, bucket: Bucket, gradient: Array) -> list[Array]:
        """Add to the last gradient of a bucket what belongs to its partial sum; returns the others, oldest first."""
        if not self._tree_merges:
            return []
        self.check(is_last=True)
        others = len(self._sums) - self._tree_merges[-1]
        for flat in self._sums[others:][::-1]:
            accumulate(gradient, self._part(flat, bucket))
        return [self._part(flat, bucket) for flat in self._sums[:others]]

    def forget(self) -> None:
        """Forget the partial sums, for the next step; their memory is spare."""
        self.spare += self._sums
        if self.block is not None:
            self.spare.append(self.block)
        self.spare = [block for block in self.spare if block is not self._own]
        self._sums.clear()
        self.block = self._own = None
        self.begin(())

    def _part(self, flat: Array, bucket: Bucket) -> Array:
        return flat[bucket.start - self._start : bucket.stop - self._start]


# Blocks of memory that buckets of gradients, or gathered units of parameters, use in turns.  A block fits what uses it:
# a table of tokens may be ten times as large as the other units of its model; if all blocks had the size of the largest
# unit, so that any unit could use any block, each would be as large as the table.


def block_sizes(sizes: Iterable[int]) -> dict[int, int]:
    """Elements of the block that something of each of these sizes uses in host memory: less than twice its size.

    The largest size shares its blocks with all above half of it, the next size below that with all above half of that,
    and so on.
    """
    found: dict[int, int] = {}
    shared = 0
    for size in sorted(sizes, reverse=True):
        if not found or 2 * size <= shared:
            shared = size
        found[size] = shared
    return found


class BlockPool:
    """Gives out blocks for some sizes, and takes them back.

    Blocks are kept and used again, unless the allocator of their memory does that (`Backend.pools_memory`). `like` has
    the dtype and device of the blocks.
    """

    def __init__(self, sizes: Iterable[int], like: Array) -> None:
        self._like = like
        self._keeps = not backend_of(like).pools_memory
        sizes = set(sizes)
        self._sizes = block_sizes(sizes) if self._keeps else {size: size for size in sizes}
        self._free: dict[int, list[Array]] = {size: [] for size in self._sizes.values()}

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that are kept and not in use."""
        return sum(int(block.nbytes) for free in self._free.values() for block in free)

    def allocate(self, size: int) -> Array:
        """A block of at least `size` elements, with any content."""
        free = self._free[self._sizes[size]]
        return free.pop() if free else arrays.empty(self._sizes[size], self._like.dtype, like=self._like)

    def release(self, block: Array) -> None:
        """Take back a block that `allocate` gave out."""
        if self._keeps:
            self._free[block.size].append(block)


# The memory of a model's gradients, by bucket: one flat buffer, blocks on demand, or an array of the caller.


class _Place(NamedTuple):
    """A tensor's range in its bucket, and its shape."""

    bucket: Bucket
    start: int
    stop: int
    shape: tuple[int, ...]


class BucketMemory:
    """The gradient memory of one model on one rank; what is in it a `GradientProgress` knows.

    With `on_demand` a bucket has memory from its first gradient until its `release`, else one flat buffer for all is
    kept. `apart` are runs of neighbouring buckets whose gradients may be kept apart as partial sums.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        buckets: Sequence[Bucket],
        like: Array,
        on_demand: bool,
        apart: Iterable[Sequence[Bucket]] = (),
    ) -> None:
        self.on_demand = on_demand
        self.peak_bytes: int = 0  # most bytes of gradient memory held so far
        self._like = like
        self._size = sum(piece.size for piece in pieces)
        self._buckets = tuple(buckets)
        self.partials: dict[int, PartialSums] = {}  # by bucket: those of its run
        for run in apart:
            partials = PartialSums(run[0].start, run[-1].stop, like)
            self.partials.update((bucket.index, partials) for bucket in run)
        self.early: EarlyGradients = EarlyGradients(like)  # gradients that are not in the memory of buckets yet
        self._places: dict[str, _Place] = {}
        for bucket in buckets:
            offset = 0
            for name, piece in zip(names_in(bucket, pieces), pieces[bucket.first : bucket.last], strict=True):
                self._places[name] = _Place(bucket, offset, offset + piece.size, piece.shape)
                offset += piece.size
        self._flat: Array | None = None
        # By bucket: the gradient of a second use, which is not in the flat buffer.
        self._second: dict[int, Array] = {}
        self._lent: dict[int, Array] = {}
        self._blocks: dict[int, Array] = {}
        self._pool = BlockPool((bucket.size for bucket in buckets), like)

    @property
    def flat(self) -> Array:
        """The one flat gradient buffer, in flat order (only where memory is not on demand)."""
        if self.on_demand:
            raise ValueError("gradients that live bucket by bucket (ZeRO-2, ZeRO-3) have no flat buffer")
        if self._flat is None:
            self._flat = self._empty(self._size)
            self._flat[...] = 0
        return self._flat

    @property
    def nbytes(self) -> int:
        """Bytes of gradient memory held now."""
        own = sum(partials.nbytes for partials in set(self.partials.values())) + self.early.nbytes
        own += 0 if self._flat is None else self._flat.nbytes
        blocks = (*self._blocks.values(), *self._second.values())
        return int(own + self._pool.nbytes + sum(block.nbytes for block in blocks))

    def view(self, name: str) -> Array:
        """The memory for the gradient of tensor `name`, of its shape."""
        bucket, start, stop, shape = self._places[name]
        return self.of_bucket(bucket)[start:stop].reshape(shape)

    def early_view(self, name: str) -> tuple[Array, bool]:
        """The memory for the early gradient of tensor `name`, and whether it has content, to which one adds."""
        return self.early.view(name, self._places[name].shape)

    def of_bucket(self, bucket: Bucket) -> Array:
        """The memory of one bucket; on demand, memory that may be new."""
        if bucket.index in self._lent:
            return self._lent[bucket.index]
        partials = self.partials.get(bucket.index)
        if partials is not None and partials.block is not None:
            return partials.part(bucket)
        if not self.on_demand:
            if bucket.second_use:
                if bucket.index not in self._second:
                    self._second[bucket.index] = self._empty(bucket.size)
                return self._second[bucket.index]
            flat = self.flat if self._flat is None else self._flat
            return flat[bucket.start : bucket.stop]
        if bucket.index not in self._blocks:
            self._blocks[bucket.index] = self._pool.allocate(bucket.size)
            self.peak_bytes = max(self.peak_bytes, self.nbytes)
        return self._blocks[bucket.index][: bucket.size]

    def zeroed(self, bucket: Bucket, names: Iterable[str]) -> Array:
        """The memory of a bucket, with zeros for these of its tensors."""
        memory = self.of_bucket(bucket)
        for name in names:
            _, start, stop, _ = self._places[name]
            memory[start:stop] = 0
        return memory

    def lend(self, flat: Array) -> list[Bucket]:
        """Use `flat`, the caller's whole gradient, as the memory of this step; returns the buckets that it is for.

        It holds the gradients of all uses of a tensor, so second uses have no separate ones.
        """
        lent = [bucket for bucket in self._buckets if not bucket.second_use]
        self._lent.update((bucket.index, flat[bucket.start : bucket.stop]) for bucket in lent)
        return lent

    def release(self, bucket: Bucket) -> None:
        """Free the memory of a bucket that is on demand."""
        if self._lent.pop(bucket.index, None) is None:
            self._pool.release(self._blocks.pop(bucket.index))

    def forget(self) -> None:
        """Forget all gradients that are not in the buckets' own memory."""
        self._lent.clear()
        self.early.forget()
        for partials in set(self.partials.values()):
            partials.forget()

    def push(self, buckets: Sequence[Bucket]) -> None:
        """Push the gradient of all buckets of one run as a partial sum; the next one is written to other memory."""
        first, last = buckets[0], buckets[-1]
        own = self.of_bucket(first) if first.second_use else self.flat[first.start : last.stop]
        self.partials[first.index].push_block(own)
        self.peak_bytes = max(self.peak_bytes, self.nbytes)

    def push_external(self, flat: Array) -> Array:
        """Push `flat`, the caller's whole gradient, as a partial sum; returns uninitialised memory for the next one."""
        (partials,) = set(self.partials.values())
        partials.push(flat)
        another = partials.another()
        self.peak_bytes = max(self.peak_bytes, self.nbytes + int(another.nbytes))
        return another

    def _empty(self, size: int) -> Array:
        made = arrays.empty(size, self._like.dtype, like=self._like)
        self.peak_bytes = max(self.peak_bytes, self.nbytes + int(made.nbytes))
        return made
