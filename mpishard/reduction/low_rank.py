"""Sums of low-rank approximations of gradients over an axis (Vogels et al., "PowerSGD", 2019, algorithms 1, 2).

The error of a rank is its gradient minus the projection of its gradient onto the common subspace.  The projection is
linear: the approximation depends only on the sum over ranks, and it does not matter which rank holds the errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from mpishard.backend import array as arrays
from mpishard.backend.array import accumulate
from mpishard.comm.channel import ChainedRequest
from mpishard.compression.compressors import PowerSGDCompressor, matrix_shape, orthonormal
from mpishard.layout.tensors import Piece
from mpishard.parameters.buckets import Bucket
from mpishard.reduction.error_feedback import CompressedSums

Array = Any


class _Matrix(NamedTuple):
    """A tensor that is compressed: its slice of the bucket, and its shape as a matrix."""

    name: str
    extent: slice
    rows: int
    columns: int


class LowRankSums(CompressedSums):
    """`CompressedSums` with a `PowerSGDCompressor`; `gathers`: `start_gather` follows `start`.

    The second sum is then taken there, concurrently for all buckets. The bases are not saved: `fold` starts again with
    random ones, in a run that continues as in one that is resumed; the first step afterwards approximates less well.
    Every rank computes the products itself: where CPUs or numbers of BLAS threads differ between ranks, the copies of
    the parameters can drift apart in the last bits under DDP; under ZeRO the owners send them to all.
    """

    def __init__(self, compressor: PowerSGDCompressor, pieces: Sequence[Piece], gathers: bool, **layout: Any) -> None:
        super().__init__(**layout)
        self._gathers = gathers
        self._rank = compressor.rank
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
        rank, axis, matrices = self._rank, self._axis, self._matrices[bucket.index]
        own = self._own(bucket)
        bases = self._new_bases
        if bucket.index not in self._sent:
            bases = self._bases
            accumulate(gradient[own], self.owned[self._parts[bucket.index]])
            self._new_owned[self._parts[bucket.index]] = 0
        rest = self._with_errors(bucket, gradient)
        vectors = self._vectors[bucket.index]
        plain = sum(extent.stop - extent.start for extent in vectors)
        first = arrays.empty(plain + rank * sum(each.rows for each in matrices), gradient.dtype, like=gradient)
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
            self._project(bucket, gradient, first, rest)
            if not self._gathers:
                self.start_gather(bucket, gradient).wait()
                target[...] = gradient[own].copy()
            return target

        return ChainedRequest(pending, finish)

    def _project(self, bucket: Bucket, gradient: Array, first: Array, rest: Array) -> None:
        """Compute the right factors of this rank's gradient, and its error `rest`."""
        matrices = self._matrices[bucket.index]
        second = arrays.empty(self._rank * sum(each.columns for each in matrices), gradient.dtype, like=gradient)
        for each, p, q in zip(matrices, *self._both(bucket, first, second), strict=True):
            p[...] = orthonormal(p)
            q[...] = self._matrix(gradient, each).T @ p
            self._matrix(rest, each)[...] = self._matrix(gradient, each) - p @ q.T
        for extent in self._vectors[bucket.index]:
            rest[extent] = 0
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

    def _own(self, bucket: Bucket) -> slice:
        """This rank's part of a bucket."""
        pieces, rank = self._counts[bucket.index], self._axis.rank
        return slice(sum(pieces[:rank]), sum(pieces[: rank + 1]))

    def _factors(self, flat: Array, lengths: Sequence[int]) -> list[Array]:
        """Views of matrices, end to end in a flat array, with these numbers of rows and `rank` columns each."""
        found, offset = [], 0
        for length in lengths:
            found.append(flat[offset : offset + self._rank * length].reshape(length, self._rank))
            offset += self._rank * length
        return found

    @staticmethod
    def _matrix(flat: Array, matrix: _Matrix) -> Array:
        return flat[matrix.extent].reshape(matrix.rows, matrix.columns)
