"""The memory of a model's gradients, by bucket: one flat buffer, blocks on demand, or an array of the caller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from mpishard.backend import array as arrays
from mpishard.layout.local_layout import Piece
from mpishard.parameters.gradient_buckets import Bucket
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
    partials : PartialSums or None
        The partial sums, for reproducible runs.

    Attributes
    ----------
    peak_bytes : int
        Most bytes of gradient memory held so far.
    written : set of str
        The tensors to which a gradient was written; the memory of others has no meaning.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        buckets: Sequence[Bucket],
        like: Array,
        on_demand: bool,
        partials: PartialSums | None,
    ) -> None:
        self.on_demand = on_demand
        self.peak_bytes: int = 0
        self.written: set[str] = set()
        self._like = like
        self._size = sum(piece.size for piece in pieces)
        self._largest = max((bucket.size for bucket in buckets), default=0)
        self._buckets = tuple(buckets)
        self._partials = partials
        self._places: dict[str, _Place] = {}
        for bucket in buckets:
            offset = 0
            for piece in pieces[bucket.first : bucket.last]:
                self._places[piece.name] = _Place(bucket, offset, offset + piece.size, piece.shape)
                offset += piece.size
        names = list(self._places)
        self._names = [names[bucket.first : bucket.last] for bucket in buckets]
        self._flat: Array | None = None
        self._lent: dict[int, Array] = {}
        self._blocks: dict[int, Array] = {}
        self._free: list[Array] = []

    @property
    def flat(self) -> Array:
        """The one flat gradient buffer, in flat order (only where memory is not on demand)."""
        if self.on_demand:
            raise ValueError("gradients that live bucket by bucket (ZeRO-2, ZeRO-3) have no flat buffer")
        if self._flat is None:
            self._flat = self._another()
            self._flat[...] = 0
        return self._flat

    @property
    def nbytes(self) -> int:
        """Bytes of gradient memory held now."""
        own = 0 if self._partials is None else self._partials.nbytes
        own += 0 if self._flat is None else self._flat.nbytes
        return int(own + sum(a.nbytes for a in self._blocks.values()) + sum(a.nbytes for a in self._free))

    def view(self, name: str) -> tuple[Array, bool]:
        """The memory for the gradient of tensor `name`, and whether it has content, to which one adds."""
        bucket, start, stop, shape = self._places[name]
        view = self.of_bucket(bucket)[start:stop].reshape(shape)
        has_content = name in self.written
        self.written.add(name)
        return view, has_content

    def of_bucket(self, bucket: Bucket) -> Array:
        """The memory of one bucket; on demand, memory that may be new."""
        if bucket.index in self._lent:
            return self._lent[bucket.index]
        if not self.on_demand:
            flat = self.flat if self._flat is None else self._flat
            return flat[bucket.start : bucket.stop]
        if bucket.index not in self._blocks:
            # Blocks are as large as the largest bucket, so that any bucket can use any free block.
            block = self._free.pop() if self._free else arrays.empty(self._largest, self._like.dtype, like=self._like)
            self._blocks[bucket.index] = block
            self.peak_bytes = max(self.peak_bytes, self.nbytes)
        return self._blocks[bucket.index][: bucket.stop - bucket.start]

    def zero_missing(self, bucket: Bucket) -> Array:
        """Write zeros for the tensors of a bucket that have no gradient; returns the memory of the bucket."""
        memory = self.of_bucket(bucket)
        for name in self._names[bucket.index]:
            if name not in self.written:
                _, start, stop, _ = self._places[name]
                memory[start:stop] = 0
        return memory

    def use_external(self, flat: Array) -> None:
        """Use `flat`, this rank's whole gradient, as the memory of this step; afterwards it is the caller's again."""
        self.written.update(self._places)
        self._lent = {bucket.index: flat[bucket.start : bucket.stop] for bucket in self._buckets}

    def release(self, bucket: Bucket) -> None:
        """Free the memory of a bucket that is on demand; its tensors have no gradient any more."""
        if self.on_demand:
            if self._lent.pop(bucket.index, None) is None:
                self._free.append(self._blocks.pop(bucket.index))
            self.written.difference_update(self._names[bucket.index])

    def forget(self) -> None:
        """Forget all gradients, those in memory of the caller too."""
        self.written.clear()
        self._lent.clear()

    def push_flat(self, tree_merges: int) -> None:
        """Push the flat buffer as a partial sum; the next gradient is written to another."""
        flat, self._flat = self.flat, None
        self.written.clear()
        self._flat = self.push_external(flat, tree_merges)

    def push_external(self, flat: Array, tree_merges: int) -> Array:
        """Push `flat`, the caller's whole gradient, as a partial sum; returns uninitialised memory for the next one."""
        assert self._partials is not None
        self._partials.push(flat, tree_merges)
        return self._another()

    def _another(self) -> Array:
        """Uninitialised memory for a whole gradient."""
        if self._partials is not None and self._partials.spare:
            return self._partials.spare.pop()
        flat = arrays.empty(self._size, self._like.dtype, like=self._like)
        self.peak_bytes = max(self.peak_bytes, self.nbytes + int(flat.nbytes))
        return flat
