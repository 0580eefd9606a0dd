"""Sums of gradients over the data axis of which less is sent than they are: compressed, with error feedback.

Every rank sends each owner of a part of a bucket that part of its gradient, compressed, and the owner adds up what
arrives; where all ranks need the sum, the owner sends it compressed to them.  What compression leaves is added to the
next gradient: by each rank to its own (`errors`), and by the owner to its part of the sum (`owned`).  So what was
applied plus these errors is the sum of all gradients (Seide et al., 2014; Karimireddy et al., "EF-SignSGD", 2019; for
both directions Tang et al., "DoubleSqueeze", 2019).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpishard import array as arrays
from mpishard.collectives import Axis
from mpishard.compression import PieceCompressor
from mpishard.gradients import Bucket, accumulate
from mpishard.optim.ordered import Exchange

Array = Any


@arrays.elementwise
def _leave(rest, whole, /):  # type: ignore[no-untyped-def]
    """``rest = whole - rest``"""
    rest = whole - rest
    return rest


class CompressedSums:
    """Adds up the gradients of one model over an axis.

    Nothing is lost when a step is: errors are those of the last step for which `keep` was called.

    Parameters
    ----------
    axis : Axis
        The data axis.
    compressor : PieceCompressor
    size : int
        Elements of the flat gradient.
    own : sequence of int
        Elements of each bucket that this rank owns.
    like : array
        Of the dtype and device of the gradients.

    Attributes
    ----------
    errors : 1-D array
        What this rank has not sent of its gradients, in flat order.
    owned : 1-D array
        What this rank has not made known of the sums that it owns, bucket by bucket.
    """

    def __init__(self, axis: Axis, compressor: PieceCompressor, size: int, own: Sequence[int], like: Array) -> None:
        self._axis = axis
        self._compressor = compressor
        self._like = like
        self._starts = [0]
        for count in own:
            self._starts.append(self._starts[-1] + count)
        self.errors = arrays.zeros(size, like.dtype, like=like)
        self.owned = arrays.zeros(self._starts[-1], like.dtype, like=like)
        self._new_errors = arrays.zeros(size, like.dtype, like=like)
        self._new_owned = arrays.zeros(self._starts[-1], like.dtype, like=like)
        self._sent: set[int] = set()
        self._received: set[int] = set()

    @property
    def nbytes(self) -> int:
        """Bytes held between steps."""
        return 2 * int(self.errors.nbytes + self.owned.nbytes)

    def keep(self) -> None:
        """The step is taken: from now on its errors count.  Every bucket was summed in it."""
        self.errors, self._new_errors = self._new_errors, self.errors
        self.owned, self._new_owned = self._new_owned, self.owned

    def reset(self) -> None:
        """Begin a new step."""
        self._sent.clear()
        self._received.clear()

    def start(self, bucket: Bucket, gradient: Array, pieces: Sequence[int], target: Array) -> Exchange:
        """Start to send each owner its part of a bucket.  Collective over the axis.

        Parameters
        ----------
        gradient : 1-D array
            This rank's; its content is undefined afterwards.
        pieces : sequence of int
            Elements of the bucket that each rank owns.
        target : 1-D array
            Where the sum of this rank's part goes; it may lie in `gradient`.
        """
        compressor, dtype = self._compressor, self._like.dtype
        extent = slice(bucket.start, bucket.stop)
        before = self._new_errors if bucket.index in self._sent else self.errors
        self._sent.add(bucket.index)
        accumulate(gradient, before[extent])
        rest = self._new_errors[extent]
        sizes = [compressor.nbytes(count, dtype) for count in pieces]
        wire = arrays.empty(sum(sizes), np.uint8, like=self._like)
        place = first = 0
        for count, nbytes in zip(pieces, sizes, strict=True):
            part, out = slice(first, first + count), wire[place : place + nbytes]
            compressor.compress(gradient[part], out)
            compressor.decompress(out, rest[part])
            place, first = place + nbytes, first + count
        _leave(rest, gradient)
        mine = sizes[self._axis.rank]
        arrived = arrays.empty(mine * self._axis.size, np.uint8, like=self._like)
        pending = self._axis.start_all_to_all(wire, arrived, sizes, [mine] * self._axis.size, label="gradients")

        def finish() -> Array:
            pending.wait()
            total = arrays.zeros(target.size, dtype, like=self._like)
            term = arrays.empty(target.size, dtype, like=self._like)
            for rank in range(self._axis.size):
                compressor.decompress(arrived[rank * mine : (rank + 1) * mine], term)
                accumulate(total, term)
            place = self._starts[bucket.index]
            part = slice(place, place + target.size)
            if bucket.index not in self._received:
                accumulate(total, self.owned[part])
                self._new_owned[part] = 0
            self._received.add(bucket.index)
            target[...] = total
            return target

        return Exchange(pending, finish)

    def start_gather(self, bucket: Bucket, gradient: Array, pieces: Sequence[int]) -> Exchange:
        """Start to fill `gradient` with everybody's part of the sum, of which this rank's is there.  Collective."""
        compressor, rank = self._compressor, self._axis.rank
        sizes = [compressor.nbytes(count, self._like.dtype) for count in pieces]
        wire = arrays.empty(sum(sizes), np.uint8, like=self._like)
        first = sum(pieces[:rank])
        own = gradient[first : first + pieces[rank]]
        out = wire[sum(sizes[:rank]) : sum(sizes[: rank + 1])]
        compressor.compress(own, out)
        rest = self._new_owned[self._starts[bucket.index] : self._starts[bucket.index + 1]]
        compressor.decompress(out, rest)
        _leave(rest, own)
        pending = self._axis.start_all_gather(wire, counts=sizes, label="gradients")

        def finish() -> Array:
            pending.wait()
            place = first = 0
            for count, nbytes in zip(pieces, sizes, strict=True):
                compressor.decompress(wire[place : place + nbytes], gradient[first : first + count])
                place, first = place + nbytes, first + count
            return gradient

        return Exchange(pending, finish)
