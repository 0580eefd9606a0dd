"""The uses of tied tensors in reproducible runs: separate sums, added once at the end of a step.

A table that embedding and output head share has two uses. On one mesh one rank has both, on another two pipeline ranks
have one each. So that the sum has one order on all meshes, each use is summed over micro-batches and the data axis
separately, and then the sums of the uses are added. Where one rank has both, the second one has a separate bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mpishard.backend.array import accumulate
from mpishard.data_parallel.tensor_copies import TensorCopies
from mpishard.parameters.buckets import Bucket
from mpishard.parameters.flat import FlatParameters

Array = Any


@dataclass(frozen=True)
class _SecondUse:
    """The bucket of a second use, the bucket of the first, and the former's place in this rank's part of the latter."""

    bucket: Bucket
    first: Bucket
    part: slice


class TiedUses:
    """The buckets of second uses on this rank, and what is added to what.

    `buckets` are those that cover the parameters; `counts` has for each the elements that each data rank owns.
    """

    def __init__(
        self, parameters: FlatParameters, buckets: Sequence[Bucket], counts: Sequence[Sequence[int]], rank: int
    ) -> None:
        # For each of them, the elements that each data rank owns: the same as of the first use.
        self.counts: list[list[int]] = []
        self._second: list[_SecondUse] = []
        number = {piece.name: index for index, piece in enumerate(parameters.pieces)}
        for name, stage in parameters.second_uses.items():
            index, piece = number[name], parameters.pieces[number[name]]
            first = next(bucket for bucket in buckets if bucket.first <= index < bucket.last)
            stop = piece.start + piece.size
            made = len(buckets) + len(self._second)
            bucket = Bucket(made, index, index + 1, piece.start, stop, stage, second_use=True)
            self.counts.append([])
            start = first.start
            for each, count in enumerate(counts[first.index]):
                begin, end = max(start, piece.start), min(start + count, stop)
                self.counts[-1].append(max(0, end - begin))
                if each == rank:
                    place = slice(begin - start, end - start) if begin < end else slice(0, 0)
                start += count
            self._second.append(_SecondUse(bucket, first, place))
        # Those of second uses; their indices follow those of the other buckets.
        self.buckets: tuple[Bucket, ...] = tuple(use.bucket for use in self._second)
        # Tied tensors have separate buckets, unless all of their stages are on this rank.
        self._tied = [
            (bucket, parameters.pieces[bucket.first].name)
            for bucket in buckets
            if bucket.last == bucket.first + 1 and parameters.local[bucket.first].copies
        ]

    @property
    def incomplete(self) -> set[int]:
        """Indices of the buckets that are not complete when they are summed over the data axis."""
        return {bucket.index for bucket, _ in self._tied} | {use.first.index for use in self._second}

    def add(self, owned: Callable[[Bucket], Array], copies: TensorCopies) -> None:
        """Add the uses of each tied tensor, in this rank's part of the gradient.

        ``owned(bucket)`` is this rank's part of the sum of a bucket over the data axis; `copies` adds over pipeline
        ranks. Collective over the pipeline ranks that share a tie.
        """
        for use in self._second:
            accumulate(owned(use.first)[use.part], owned(use.bucket))
        for bucket, name in self._tied:
            copies.sum_tie(name, owned(bucket))
