"""What compression leaves of the gradients, kept and added to the next ones, so that nothing is lost over the steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate as running_sums
from typing import Any

from mpishard.backend import array as arrays
from mpishard.backend.array import accumulate
from mpishard.comm.axis import Axis
from mpishard.comm.request import ChainedRequest
from mpishard.parameters.buckets import Bucket

Array = Any


class CompressedSums(ABC):
    """Adds up the gradients of one model over an axis, sending less than they are.

    What was applied plus all that is left over, on all ranks, is the sum of all gradients (Seide et al., 2014;
    Karimireddy et al., "EF-SignSGD", 2019).  Nothing is lost when a step is: what is left over is that of the last step
    for which `keep` was called.

    Parameters
    ----------
    axis : Axis
        The data axis.
    buckets : sequence of Bucket
        They cover the flat gradient.
    counts : sequence of sequence of int
        By bucket and rank, elements that the rank owns.
    like : array
        Of the dtype and device of the gradients.

    Attributes
    ----------
    errors : 1-D array
        What this rank has not sent of its gradients, in flat order.
    owned : 1-D array
        What is left of the sums of the parts that this rank owns, bucket by bucket: always this one array.
    scale : float
        What both are multiplied by, as gradients are by a loss scale.
    """

    def __init__(
        self, axis: Axis, buckets: Sequence[Bucket], counts: Sequence[Sequence[int]], like: Array, scale: float
    ) -> None:
        self._axis = axis
        self._buckets = buckets
        self._counts = counts
        self._like = like
        starts = [0, *running_sums(pieces[axis.rank] for pieces in counts)]
        self._parts = {
            bucket.index: slice(*ends) for bucket, *ends in zip(buckets, starts[:-1], starts[1:], strict=True)
        }
        self.scale: float = scale
        size = sum(bucket.size for bucket in buckets)
        self.errors: Array = arrays.zeros(size, like.dtype, like=like)
        self.owned: Array = arrays.zeros(starts[-1], like.dtype, like=like)
        self._new_errors = arrays.zeros(size, like.dtype, like=like)
        self._new_owned = arrays.zeros(starts[-1], like.dtype, like=like)
        self._sent: set[int] = set()

    @property
    def sending(self) -> bool:
        """Whether gradients were sent of which neither `keep` nor `reset` was called."""
        return bool(self._sent)

    @property
    def nbytes(self) -> int:
        """Bytes held between steps."""
        return 2 * int(self.errors.nbytes + self.owned.nbytes)

    @abstractmethod
    def start(self, bucket: Bucket, gradient: Array, target: Array) -> ChainedRequest:
        """Start to sum a bucket.  Collective over the axis.

        Parameters
        ----------
        gradient : 1-D array
            This rank's; its content is undefined afterwards.
        target : 1-D array
            Where the sum of this rank's part goes; it may lie in `gradient`.
        """

    @abstractmethod
    def start_gather(self, bucket: Bucket, gradient: Array) -> ChainedRequest:
        """Start to fill `gradient` with the whole sum, after `start` was waited for.  Collective over the axis."""

    def keep(self) -> None:
        """The step is taken: from now on its errors count.  Every bucket was summed in it."""
        self.errors, self._new_errors = self._new_errors, self.errors
        self.owned[...] = self._new_owned

    def keep_bucket(self, bucket: Bucket) -> None:
        """The same where not every bucket was summed, but this one was, and begin the next sum of it."""
        extent, part = slice(bucket.start, bucket.stop), self._parts[bucket.index]
        self.errors[extent] = self._new_errors[extent]
        self.owned[part] = self._new_owned[part]
        self._sent.discard(bucket.index)

    def reset(self) -> None:
        """Begin a new step."""
        self._sent.clear()

    def fold(self) -> None:
        """Give the errors of all ranks to the owners: `owned` then is all that is left.  Collective over the axis.

        What the ranks have is the same in all, and can be saved or move to another number of ranks.
        """
        pending = [
            self._axis.start_reduce_scatter(self.errors[bucket.start : bucket.stop], counts=pieces, label="errors")
            for bucket, pieces in zip(self._buckets, self._counts, strict=True)
        ]
        for bucket, folded in zip(self._buckets, pending, strict=True):
            accumulate(self.owned[self._parts[bucket.index]], folded.wait())
        self.errors[...] = 0

    def forget(self, scale: float) -> None:
        """`owned` was filled from elsewhere, in this scale: there are no other errors."""
        self.errors[...] = 0
        self.scale = scale

    def rescale(self, scale: float) -> None:
        """Go on with gradients that are multiplied by another number."""
        if scale != self.scale:
            self.errors *= scale / self.scale
            self.owned *= scale / self.scale
            self.scale = scale

    # -- for the kinds of sums --------------------------------------------------------------------------------------

    def _with_errors(self, bucket: Bucket, gradient: Array) -> Array:
        """Add what the last step, or an earlier micro-batch of it, has left; returns where to put what this leaves."""
        extent = slice(bucket.start, bucket.stop)
        before = self._new_errors if bucket.index in self._sent else self.errors
        self._sent.add(bucket.index)
        accumulate(gradient, before[extent])
        return self._new_errors[extent]
