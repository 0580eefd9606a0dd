"""The memory of a model's gradients, by bucket: one flat buffer, blocks on demand, or an array of the caller.

With partial sums a bucket's gradient under way may be in another block than the flat buffer, and the gradient of a
second use always is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from mpishard.backend import array as arrays
from mpishard.layout.local_layout import Piece
from mpishard.parameters.block_pool import BlockPool
from mpishard.parameters.early_gradients import EarlyGradients
from mpishard.parameters.gradient_buckets import Bucket, names_in
from mpishard.parameters.partial_sums import PartialSums

Array = Any


class _Place(NamedTuple):
    """A tensor's range in its bucket, and its shape."""

    bucket: Bucket
    start: int
    stop: int
    shape: tuple[int, ...]


class BucketMemory:
    """The gradient memory of one model on one rank, and which tensors have a gradient in it.

    Parameters
    ----------
    pieces : sequence of Piece
        Tensors in flat order.
    buckets : sequence of Bucket
        They cover the pieces.
    like : array
        An array of the dtype and device of the gradients.
    on_demand : bool
        False: one flat buffer for all buckets is kept.  True: a bucket has memory from its first gradient until its
        `release`.
    partials : sequence of PartialSums
        By bucket: the partial sums that it is in, for reproducible runs; else empty.

    Attributes
    ----------
    peak_bytes : int
        Most bytes of gradient memory held so far.
    written : set of str
        The tensors to which a gradient was written; the memory of others has no meaning.
    early : EarlyGradients
        Gradients that are not in the memory of buckets yet.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        buckets: Sequence[Bucket],
        like: Array,
        on_demand: bool,
        partials: Sequence[PartialSums] = (),
    ) -> None:
        self.on_demand = on_demand
        self.peak_bytes: int = 0
        self.written: set[str] = set()
        self._like = like
        self._size = sum(piece.size for piece in pieces)
        self._buckets = tuple(buckets)
        self._partials = tuple(partials)
        self.early: EarlyGradients = EarlyGradients(like)
        self._names = [names_in(bucket, pieces) for bucket in buckets]
        self._places: dict[str, _Place] = {}
        for bucket, names in zip(buckets, self._names, strict=True):
            offset = 0
            for name, piece in zip(names, pieces[bucket.first : bucket.last], strict=True):
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
        own = sum(partials.nbytes for partials in set(self._partials)) + self.early.nbytes
        own += 0 if self._flat is None else self._flat.nbytes
        blocks = (*self._blocks.values(), *self._second.values())
        return int(own + self._pool.nbytes + sum(block.nbytes for block in blocks))

    def view(self, name: str) -> tuple[Array, bool]:
        """The memory for the gradient of tensor `name`, and whether it has content, to which one adds."""
        bucket, start, stop, shape = self._places[name]
        if self.early.writing:
            return self.early.view(name, shape)
        view = self.of_bucket(bucket)[start:stop].reshape(shape)
        has_content = name in self.written
        self.written.add(name)
        return view, has_content

    def of_bucket(self, bucket: Bucket) -> Array:
        """The memory of one bucket; on demand, memory that may be new."""
        if bucket.index in self._lent:
            return self._lent[bucket.index]
        if self._partials and self._partials[bucket.index].block is not None:
            return self._partials[bucket.index].part(bucket)
        if not self.on_demand:
            if bucket.second_use:
                if bucket.index not in self._second:
                    self._second[bucket.index] = self._empty(bucket.size)
                return self._second[bucket.index]
            flat = self.flat if self._flat is None else self._flat
            return flat[bucket.start : bucket.stop]
        if bucket.index not in self._blocks:
            self._blocks[bucket.index] = self._pool.take(bucket.size)
            self.peak_bytes = max(self.peak_bytes, self.nbytes)
        return self._blocks[bucket.index][: bucket.size]

    def zero_missing(self, bucket: Bucket) -> Array:
        """Write zeros for the tensors of a bucket that have no gradient; returns the memory of the bucket."""
        memory = self.of_bucket(bucket)
        for name in self._names[bucket.index]:
            if name not in self.written:
                _, start, stop, _ = self._places[name]
                memory[start:stop] = 0
        return memory

    def use_external(self, flat: Array) -> None:
        """Use `flat`, this rank's whole gradient, as the memory of this step; afterwards it is the caller's again.

        It holds the gradients of all uses of a tensor, so second uses have none of their own.
        """
        for bucket, names in zip(self._buckets, self._names, strict=True):
            if not bucket.second_use:
                self._lent[bucket.index] = flat[bucket.start : bucket.stop]
                self.written.update(names)

    def release(self, bucket: Bucket) -> None:
        """Free the memory of a bucket that is on demand; its tensors have no gradient any more."""
        if self.on_demand:
            if self._lent.pop(bucket.index, None) is None:
                self._pool.give_back(self._blocks.pop(bucket.index))
            self.written.difference_update(self._names[bucket.index])

    def forget(self) -> None:
        """Forget all gradients, those in memory of the caller too."""
        self.written.clear()
        self._lent.clear()
        self.early.forget()
        for partials in set(self._partials):
            partials.forget()

    def push(self, buckets: Sequence[Bucket], tree_merges: int) -> None:
        """Push the gradient of all buckets of one order as a partial sum; the next one is written to other memory."""
        first, last = buckets[0], buckets[-1]
        own = self.of_bucket(first) if first.second_use else self.flat[first.start : last.stop]
        self._partials[first.index].push_block(own, tree_merges)
        for bucket in buckets:
            self.written.difference_update(self._names[bucket.index])
        self.peak_bytes = max(self.peak_bytes, self.nbytes)

    def push_external(self, flat: Array, tree_merges: int) -> Array:
        """Push `flat`, the caller's whole gradient, as a partial sum; returns uninitialised memory for the next one."""
        (partials,) = set(self._partials)
        partials.push(flat, tree_merges)
        another = partials.another()
        self.peak_bytes = max(self.peak_bytes, self.nbytes + int(another.nbytes))
        return another

    def take_early(self, virtual_stage: int) -> None:
        """Copy the early gradients of the oldest micro-batch of a virtual stage to the memory of their buckets."""
        for name, early in self.early.take(virtual_stage).items():
            view, has_content = self.view(name)
            view[...] = view + early if has_content else early

    def _empty(self, size: int) -> Array:
        made = arrays.empty(size, self._like.dtype, like=self._like)
        self.peak_bytes = max(self.peak_bytes, self.nbytes + int(made.nbytes))
        return made
