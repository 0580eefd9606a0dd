"""Sums of gradients over an axis, sent compressed to the owners of the parts, and back.

Each part of a bucket has an owner.  Every rank compresses each part of its gradient and sends it to the owner, which
adds up the parts in the dtype of the gradients.  Where all ranks need the sum, the owner sends it to them, compressed.
Both ends keep the error of the compression (Tang et al., "DoubleSqueeze", 2019).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpishard.backend import array as arrays
from mpishard.backend.array import accumulate
from mpishard.comm.channel import ChainedRequest
from mpishard.compression import PieceCompressor
from mpishard.parameters.buckets import Bucket
from mpishard.reduction.error_feedback import CompressedSums

Array = Any


class PieceSums(CompressedSums):
    """`CompressedSums` with a compressor that works on any run of elements."""

    def __init__(self, compressor: PieceCompressor, **layout: Any) -> None:
        super().__init__(**layout)
        self._compressor = compressor
        self._received: set[int] = set()

    def keep_bucket(self, bucket: Bucket) -> None:
        super().keep_bucket(bucket)
        self._received.discard(bucket.index)

    def reset(self) -> None:
        super().reset()
        self._received.clear()

    def start(self, bucket: Bucket, gradient: Array, target: Array) -> ChainedRequest:
        compressor, dtype, axis = self._compressor, self._like.dtype, self._axis
        rest = self._with_errors(bucket, gradient)
        pieces = self._counts[bucket.index]
        sizes = self._sizes(bucket)
        packed = arrays.empty(sum(sizes), np.uint8, like=self._like)
        offset = first = 0
        for count, nbytes in zip(pieces, sizes, strict=True):
            part, out = slice(first, first + count), packed[offset : offset + nbytes]
            compressor.split(gradient[part], out, rest[part])
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
        first = sum(pieces[:rank])
        own = gradient[first : first + pieces[rank]]
        out = packed[sum(sizes[:rank]) : sum(sizes[: rank + 1])]
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
