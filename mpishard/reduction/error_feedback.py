"""Error feedback: what compression loses of a gradient is kept and added to the next gradient."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate as running_sums
from typing import Any

from mpishard.backend import array as arrays
from mpishard.backend.array import accumulate
from mpishard.comm.axis import Axis
from mpishard.comm.channel import ChainedRequest
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
        self._parts = {
            bucket.index: slice(*ends) for bucket, *ends in zip(buckets, starts[:-1], starts[1:], strict=True)
        }
        self.scale: float = scale  # the factor by which both are multiplied, as gradients are by a loss scale
        size = sum(bucket.size for bucket in buckets)
        # The part of its gradients that this rank has not sent, in flat order.
        self.errors: Array = arrays.zeros(size, like.dtype, like=like)
        # The errors of the sums that this rank owns, bucket by bucket; always the same array.
        self.owned: Array = arrays.zeros(starts[-1], like.dtype, like=like)
        self._new_errors = arrays.zeros(size, like.dtype, like=like)
        self._new_owned = arrays.zeros(starts[-1], like.dtype, like=like)
        self._sent: set[int] = set()

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
        """Set the other errors to zero, after `owned` was restored with this loss scale."""
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
        """Add the error of the last step, or of an earlier micro-batch; returns the new error's array."""
        extent = slice(bucket.start, bucket.stop)
        before = self._new_errors if bucket.index in self._sent else self.errors
        self._sent.add(bucket.index)
        accumulate(gradient, before[extent])
        return self._new_errors[extent]
