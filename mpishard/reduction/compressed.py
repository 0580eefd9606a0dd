"""Sums of gradients over an axis, sent compressed: with error feedback, by owners of parts, and of low rank.

What compression loses of a gradient is kept and added to the next one (`CompressedSums`).  In `PieceSums` every rank
sends each part of a bucket to its owner, which adds up the parts in the dtype of the gradients and sends the sum to all
who need it, compressed; both ends keep the error (Tang et al., "DoubleSqueeze", 2019).  `PowerSGDSums` approximates
(Vogels et al., "PowerSGD", 2019, algorithms 1, 2): the error of a rank is its gradient minus the projection of its
gradient onto the common subspace, which is linear, so that it does not matter which rank holds the errors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate as running_sums
from typing import Any, NamedTuple

import numpy as np

from mpishard.backend import array as arrays
from mpishard.backend.array import accumulate
from mpishard.comm.axis import Axis
from mpishard.comm.channel import ChainedRequest
from mpishard.compression import PieceCompressor
from mpishard.compression.compressors import PowerSGDCompressor, matrix_shape, orthonormal
from mpishard.layout.boxes import run_of
from mpishard.layout.tensors import Piece
from mpishard.parameters.buckets import Bucket

Array = Any


class CompressedSums(ABC):
    """Adds up the gradients of one model over an axis, and sends fewer bytes than they have.

    The applied gradients plus the errors of all ranks are the sum of all gradients (Seide et al., 2014; Karimireddy et
    al., "EF-SignSGD", 2019). A step that is not taken loses nothing: the errors are then still those of the last step
    for which `keep` was called. `counts` has by bucket and rank the number of elements that the rank owns.
    """

    def __init__(
        self, axis: Axis, buckets: Sequence[Bucket], counts: Sequence[Sequence[int]], like: Array, scale: float
    ) -> None:
        self._axis = axis
        self._buckets = buckets
        self._counts = counts
        self._like = like
        starts = [0, *running_sums(pieces[axis.rank] for pieces in counts)]
        # By bucket: where the errors of its sum are in `owned`.
        self._parts = {
            bucket.index: slice(*ends) for bucket, *ends in zip(buckets, starts[:-1], starts[1:], strict=True)
        }
        size = sum(bucket.size for bucket in buckets)
        # The part of its gradients that this rank has not sent, in flat order.
        self.errors: Array = arrays.zeros(size, like.dtype, like=like)
        # The errors of the sums that this rank owns, bucket by bucket; always the same array.
        self.owned: Array = arrays.zeros(starts[-1], like.dtype, like=like)
        # `errors` and `owned` are multiplied by this, as gradients are by a loss scale.
        self.scale: float = scale
        # What takes their place if the step is taken.
        self._new_errors = arrays.zeros(size, like.dtype, like=like)
        self._new_owned = arrays.zeros(starts[-1], like.dtype, like=like)
        self._sent: set[int] = set()  # buckets of which this step has sent a gradient
        self.in_use: bool = True  # the gradients of this step are compressed

    @property
    def sending(self) -> bool:
        """Return True if a pass has begun to send its gradients, and no step has used them (`keep_bucket`, `reset`)."""
        return bool(self._sent)

    @property
    def nbytes(self) -> int:
        """Bytes held between steps."""
        return 2 * int(self.errors.nbytes + self.owned.nbytes)

    @abstractmethod
    def start(self, bucket: Bucket, gradient: Array, target: Array) -> ChainedRequest:
        """Start to sum a bucket; the result's `wait` returns `target`. Collective over the axis.

        The content of `gradient`, this rank's, is undefined afterwards; `target` receives the sum of this rank's part,
        and may be a view of it.
        """

    @abstractmethod
    def start_gather(self, bucket: Bucket, gradient: Array) -> ChainedRequest:
        """Start to fill a gradient with the whole sum, after the wait for `start`. Collective over the axis.

        `gradient` has the sum of this rank's part in its place; the other parts are overwritten.
        """

    def keep(self) -> None:
        """Take over the errors of this step, in which every bucket was summed, since the step is taken."""
        self.errors, self._new_errors = self._new_errors, self.errors
        self.owned[...] = self._new_owned

    def keep_bucket(self, bucket: Bucket) -> None:
        """Take over the errors of one bucket that was summed, so that its next sum can begin."""
        extent, part = slice(bucket.start, bucket.stop), self._parts[bucket.index]
        self.errors[extent] = self._new_errors[extent]
        self.owned[part] = self._new_owned[part]
        self._sent.discard(bucket.index)

    def reset(self) -> None:
        """Begin a new step."""
        self._sent.clear()

    def fold(self) -> None:
        """Add the errors of all ranks to `owned` at the owners; `errors` is then zero. Collective over the axis.

        The total of all errors stays the same. In this form they can be saved or moved to another number of ranks.
        """
        pending = [
            self._axis.start_reduce_scatter(self.errors[bucket.start : bucket.stop], counts=pieces, label="errors")
            for bucket, pieces in zip(self._buckets, self._counts, strict=True)
        ]
        for bucket, folded in zip(self._buckets, pending, strict=True):
            accumulate(self.owned[self._parts[bucket.index]], folded.wait())
        self.errors[...] = 0

    def forget(self, scale: float) -> None:
        """Set `errors` to zero, after `owned` was restored with this loss scale: a saved state has no others."""
        self.errors[...] = 0
        self.scale = scale

    def rescale(self, scale: float) -> None:
        """Change the scale of the errors to the loss scale of the next gradients."""
        if scale != self.scale:
            self.errors *= scale / self.scale
            self.owned *= scale / self.scale
            self.scale = scale

    # -- for the subclasses -----------------------------------------------------------------------------------------

    def _with_errors(self, bucket: Bucket, gradient: Array) -> Array:
        """Add the error of the last step, or of an earlier micro-batch; returns where the new error goes."""
        extent = slice(bucket.start, bucket.stop)
        before = self._new_errors if bucket.index in self._sent else self.errors
        self._sent.add(bucket.index)
        accumulate(gradient, before[extent])
        return self._new_errors[extent]


class PieceSums(CompressedSums):
    """`CompressedSums` with a compressor that works on any run of elements."""

    def __init__(self, compressor: PieceCompressor, **layout: Any) -> None:
        super().__init__(**layout)
        self._compressor = compressor
        self._received: set[int] = set()  # buckets to whose sum the error of its owner was added in this step

    def keep_bucket(self, bucket: Bucket) -> None:
        super().keep_bucket(bucket)
        self._received.discard(bucket.index)

    def reset(self) -> None:
        super().reset()
        self._received.clear()

    def start(self, bucket: Bucket, gradient: Array, target: Array) -> ChainedRequest:
        compressor, dtype, axis = self._compressor, self._like.dtype, self._axis
        new_error = self._with_errors(bucket, gradient)
        pieces = self._counts[bucket.index]
        sizes = self._sizes(bucket)
        packed = arrays.empty(sum(sizes), np.uint8, like=self._like)
        offset = first = 0
        for count, nbytes in zip(pieces, sizes, strict=True):
            part, out = slice(first, first + count), packed[offset : offset + nbytes]
            compressor.split(gradient[part], out, new_error[part])
            offset, first = offset + nbytes, first + count
        mine = sizes[axis.rank]
        arrived = arrays.empty(mine * axis.size, np.uint8, like=self._like)
        pending = axis.start_all_to_all(packed, arrived, sizes, [mine] * axis.size, label="gradients")

        def finish() -> Array:
            pending.wait()
            total = arrays.zeros(target.size, dtype, like=self._like)
            for rank in range(axis.size):
                compressor.add(arrived[rank * mine : (rank + 1) * mine], total)
            part = self._parts[bucket.index]
            if bucket.index not in self._received:
                accumulate(total, self.owned[part])
                self._new_owned[part] = 0
            self._received.add(bucket.index)
            target[...] = total
            return target

        return ChainedRequest(pending, finish)

    def start_gather(self, bucket: Bucket, gradient: Array) -> ChainedRequest:
        compressor, rank = self._compressor, self._axis.rank
        pieces, sizes = self._counts[bucket.index], self._sizes(bucket)
        packed = arrays.empty(sum(sizes), np.uint8, like=self._like)
        own, out = gradient[run_of(pieces, rank)], packed[run_of(sizes, rank)]
        compressor.split(own, out, self._new_owned[self._parts[bucket.index]])
        pending = self._axis.start_all_gather(packed, counts=sizes, label="gradients")

        def finish() -> Array:
            pending.wait()
            offset = first = 0
            for count, nbytes in zip(pieces, sizes, strict=True):
                compressor.decompress(packed[offset : offset + nbytes], gradient[first : first + count])
                offset, first = offset + nbytes, first + count
            return gradient

        return ChainedRequest(pending, finish)

    def _sizes(self, bucket: Bucket) -> list[int]:
        """Compressed bytes of each rank's part of a bucket."""
        return [self._compressor.nbytes(count, self._like.dtype) for count in self._counts[bucket.index]]


# Low-rank approximations.


class _Matrix(NamedTuple):
    """A tensor that is compressed: its slice of the bucket, and its shape as a matrix."""

    name: str
    extent: slice
    rows: int
    columns: int


class PowerSGDSums(CompressedSums):
    """`CompressedSums` with a `PowerSGDCompressor`; `gathers`: `start_gather` follows `start`.

    The second sum is then taken there, concurrently for all buckets. The bases are not saved: `fold` starts again with
    random ones, in a run that continues as in one that is resumed; the first step afterwards approximates less well.
    Every rank computes the products itself: where CPUs or numbers of BLAS threads differ between ranks, the copies of
    the parameters can drift apart in the last bits under DDP; under ZeRO the owners send them to all.
    """

    def __init__(self, compressor: PowerSGDCompressor, pieces: Sequence[Piece], gathers: bool, **layout: Any) -> None:
        super().__init__(**layout)
        self._gathers = gathers
        self._matrix_rank = compressor.rank  # of the approximations; that of this process is ``axis.rank``
        self._compressor = compressor
        self._matrices: dict[int, list[_Matrix]] = {}
        self._vectors: dict[int, list[slice]] = {}
        for bucket in self._buckets:
            self._matrices[bucket.index], self._vectors[bucket.index] = matrices, vectors = [], []
            for piece in pieces[bucket.first : bucket.last]:
                extent = slice(piece.start - bucket.start, piece.start - bucket.start + piece.size)
                if compressor.compresses(piece.shape):
                    matrices.append(_Matrix(piece.name, extent, *matrix_shape(piece.shape)))
                else:
                    vectors.append(extent)
        self._bases: dict[str, Array] = {}
        self._new_bases: dict[str, Array] = {}
        # By bucket: the result of the first sum, and the right factors for the second.
        self._halfway: dict[int, tuple[Array, Array]] = {}

    def start(self, bucket: Bucket, gradient: Array, target: Array) -> ChainedRequest:
        matrix_rank, axis, matrices = self._matrix_rank, self._axis, self._matrices[bucket.index]
        own = run_of(self._counts[bucket.index], axis.rank)  # this rank's part of the bucket
        bases = self._new_bases
        if bucket.index not in self._sent:
            bases = self._bases
            accumulate(gradient[own], self.owned[self._parts[bucket.index]])
            self._new_owned[self._parts[bucket.index]] = 0
        new_error = self._with_errors(bucket, gradient)
        vectors = self._vectors[bucket.index]
        plain = sum(extent.stop - extent.start for extent in vectors)
        first = arrays.empty(plain + matrix_rank * sum(each.rows for each in matrices), gradient.dtype, like=gradient)
        offset = 0
        for extent in vectors:
            first[offset : offset + extent.stop - extent.start] = gradient[extent]
            offset += extent.stop - extent.start
        for each, p in zip(matrices, self._factors(first[plain:], [each.rows for each in matrices]), strict=True):
            basis = bases.get(each.name)
            if basis is None:
                basis = self._compressor.first_basis(each.name, each.columns, gradient)
            p[...] = self._matrix(gradient, each) @ orthonormal(basis)
        pending = axis.start_all_reduce(first, label="gradients")

        def finish() -> Array:
            pending.wait()
            self._project(bucket, gradient, first, new_error)
            if not self._gathers:
                self.start_gather(bucket, gradient).wait()
                target[...] = gradient[own].copy()
            return target

        return ChainedRequest(pending, finish)

    def _project(self, bucket: Bucket, gradient: Array, first: Array, new_error: Array) -> None:
        """Compute the right factors of this rank's gradient, and its `new_error`."""
        matrices = self._matrices[bucket.index]
        second = arrays.empty(self._matrix_rank * sum(each.columns for each in matrices), gradient.dtype, like=gradient)
        for each, p, q in zip(matrices, *self._both(bucket, first, second), strict=True):
            p[...] = orthonormal(p)
            q[...] = self._matrix(gradient, each).T @ p
            self._matrix(new_error, each)[...] = self._matrix(gradient, each) - p @ q.T
        for extent in self._vectors[bucket.index]:
            new_error[extent] = 0
        self._halfway[bucket.index] = first, second

    def start_gather(self, bucket: Bucket, gradient: Array) -> ChainedRequest:
        first, second = self._halfway.pop(bucket.index)
        pending = self._axis.start_all_reduce(second, label="gradients")

        def finish() -> Array:
            pending.wait()
            for each, p, q in zip(self._matrices[bucket.index], *self._both(bucket, first, second), strict=True):
                self._matrix(gradient, each)[...] = p @ q.T
                self._new_bases[each.name] = q
            offset = 0
            for extent in self._vectors[bucket.index]:
                gradient[extent] = first[offset : offset + extent.stop - extent.start]
                offset += extent.stop - extent.start
            return gradient

        return ChainedRequest(pending, finish)

    def _both(self, bucket: Bucket, first: Array, second: Array) -> tuple[list[Array], list[Array]]:
        """Left and right factors of the matrices of a bucket; in `first` the left factors follow the vectors."""
        matrices = self._matrices[bucket.index]
        plain = sum(extent.stop - extent.start for extent in self._vectors[bucket.index])
        left = self._factors(first[plain:], [each.rows for each in matrices])
        return left, self._factors(second, [each.columns for each in matrices])

    def keep(self) -> None:
        super().keep()
        self._bases = dict(self._new_bases)

    def keep_bucket(self, bucket: Bucket) -> None:
        super().keep_bucket(bucket)
        for each in self._matrices[bucket.index]:
            self._bases[each.name] = self._new_bases[each.name]

    def fold(self) -> None:
        super().fold()
        self._bases.clear()

    def forget(self, scale: float) -> None:
        super().forget(scale)
        self._bases.clear()

    def _factors(self, flat: Array, lengths: Sequence[int]) -> list[Array]:
        """Views of matrices, end to end in a flat array, with these numbers of rows and `_matrix_rank` columns each."""
        found, offset = [], 0
        for length in lengths:
            found.append(flat[offset : offset + self._matrix_rank * length].reshape(length, self._matrix_rank))
            offset += self._matrix_rank * length
        return found

    @staticmethod
    def _matrix(flat: Array, matrix: _Matrix) -> Array:
        return flat[matrix.extent].reshape(matrix.rows, matrix.columns)


@dataclass(frozen=True)
class CompressedSumsMaker:
    """Makes the `CompressedSums` of a model: ``compressor.make_sums(CompressedSumsMaker(...))``."""

    axis: Axis
    buckets: Sequence[Bucket]
    counts: Sequence[Sequence[int]]  # by bucket and rank, the number of elements that the rank owns
    like: Array  # has the dtype and device of the gradients
    scale: float  # the loss scale that the first gradients contain
    pieces: Sequence[Piece] = ()  # the tensors of all buckets
    gathers: bool = True  # all ranks get the sums, as for `PowerSGDSums`

    def of_pieces(self, compressor: PieceCompressor) -> CompressedSums:
        """Sums of gradients that are compressed piece by piece, without errors yet."""
        return PieceSums(compressor, **self._layout)

    def of_low_rank(self, compressor: PowerSGDCompressor) -> CompressedSums:
        """Sums of low-rank approximations of gradients, without errors yet."""
        return PowerSGDSums(compressor, self.pieces, self.gathers, **self._layout)

    @property
    def _layout(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("axis", "buckets", "counts", "like", "scale")}
