"""The largest absolute values of a rank's gradients, which show what is not finite.

On a device they stay there until they are asked for, so that the backward pass continues without the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpishard.backend import array as arrays
from mpishard.backend import exact
from mpishard.backend.exact import LargestValues
from mpishard.backend.ranges import Range, Ranges
from mpishard.layout.tensors import Piece
from mpishard.parameters.buckets import Bucket

Array = Any


class LargestGradients:
    """The largest values of each tensor before the sum over ranks, and of spans of the summed gradients after it.

    `same`: the sums are this rank's gradients, in the same memory: then a tensor is looked at only to find which one is
    not finite.
    """

    def __init__(self, pieces: Sequence[Piece], spans: Ranges, same: bool = False) -> None:
        self._pieces = pieces
        self._spans = spans
        self._same = same
        self._nonfinite = ""
        # By bucket, where nobody has looked yet.
        self._later: dict[int, tuple[Bucket, Array]] = {}
        # On a device: the values of all pieces, then of all spans, and the buckets that were looked at.
        self._values: LargestValues | None = None
        self._looked: dict[int, Bucket] = {}
        self._of_bucket: dict[int, Ranges] = {}

    def look(self, bucket: Bucket, gradient: Array) -> None:
        """Look at this rank's gradient of a bucket, before the sum with other ranks."""
        if self._same:
            self._later[bucket.index] = bucket, gradient
        else:
            self._look(bucket, gradient)

    def _look(self, bucket: Bucket, gradient: Array) -> None:
        if arrays.runs_cuda(gradient):
            ranges = self._of_bucket.get(bucket.index)
            if ranges is None:
                ranges = self._of_bucket[bucket.index] = Ranges(self._parts(bucket))
            self._on_device(gradient).take([gradient], ranges, bucket.first)
            self._looked[bucket.index] = bucket
        elif not self._nonfinite and not math.isfinite(exact.largest(gradient)):
            for piece, (_, start, stop, _) in zip(self._tensors(bucket), self._parts(bucket), strict=True):
                if not math.isfinite(exact.largest(gradient[start:stop])):
                    self._nonfinite = piece.name
                    return

    def of_spans(self, gradients: Sequence[Array]) -> list[float]:
        """The largest values of the spans of summed gradients, one for each; on a device the host waits once."""
        tops = self._of_spans(gradients)
        if all(map(math.isfinite, tops)):
            self._later.clear()
        return tops

    def _of_spans(self, gradients: Sequence[Array]) -> list[float]:
        if not gradients or not arrays.runs_cuda(gradients[0]):
            return exact.largest_of(gradients, self._spans)
        values = self._on_device(gradients[0])
        values.take(gradients, self._spans, len(self._pieces))
        found = values.values()
        self._read(found)
        return found[len(self._pieces) :].tolist()

    @property
    def nonfinite(self) -> str:
        """The first tensor looked at whose gradient is not finite; empty: all are.  On a device the host may wait."""
        for bucket, gradient in self._later.values():
            self._look(bucket, gradient)
        self._later.clear()
        if self._looked and self._values is not None:
            self._read(self._values.values())
        return self._nonfinite

    def forget(self) -> None:
        """Forget what was found; the next gradients belong to another step."""
        self._nonfinite = ""
        self._later.clear()
        self._looked.clear()
        if self._values is not None:
            self._values.clear()

    def _on_device(self, like: Array) -> LargestValues:
        if self._values is None:
            self._values = LargestValues(len(self._pieces) + len(self._spans), like.dtype, like)
        return self._values

    def _read(self, found: np.ndarray) -> None:
        """Find the first tensor that is not finite; what was looked at is known then."""
        for bucket in self._looked.values():
            for number, piece in enumerate(self._tensors(bucket), bucket.first):
                if not self._nonfinite and not math.isfinite(found[number]):
                    self._nonfinite = piece.name
        self._looked.clear()

    def _tensors(self, bucket: Bucket) -> Sequence[Piece]:
        return self._pieces[bucket.first : bucket.last]

    def _parts(self, bucket: Bucket) -> list[Range]:
        """The elements of each tensor of a bucket."""
        ends = np.cumsum([0, *(piece.size for piece in self._tensors(bucket))]).tolist()
        return [Range(0, start, stop) for start, stop in zip(ends, ends[1:], strict=False)]
