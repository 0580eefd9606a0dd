"""What a reducer of gradients calls: to sum a bucket over ranks, and to look at it before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from mpishard.comm.request import ChainedRequest, Request
from mpishard.parameters.gradient_buckets import Bucket

Array = Any
Transfer = Request | ChainedRequest


class BucketSums(Protocol):
    """What sums buckets over ranks for a `GradientReducer`, which decides when.  Collective, except `reset`.

    In this package it is always a `mpishard.data_parallel.strategy.Strategy`.
    """

    def sum_copies(self, bucket: Bucket, gradient: Array) -> None:
        """Add the terms of the other ranks of this model replica to a gradient; in a reproducible run without ties."""

    def start(self, bucket: Bucket, gradient: Array, earlier: Sequence[Array] = ()) -> Transfer | None:
        """Start the sum of a bucket over the data axis; None if there is nothing to wait for.

        With None the result is stored already, and the memory of the gradient is free.

        `earlier` are the partial sums that belong to other terms of the sum than the gradient, oldest first.
        """

    def finish(self, started: Sequence[tuple[Bucket, Array, Transfer]]) -> None:
        """Wait for sums, given as ``(bucket, gradient, start(bucket, gradient))``, and store their results."""

    def add_uses(self) -> None:
        """Add the gradients of the uses of tied tensors, after all sums of a reproducible step."""

    def reset(self) -> None:
        """Forget the sums of this step; the next gradients belong to another."""


class Inspector(Protocol):
    """What looks at a rank's own gradients before they are summed."""

    def look(self, bucket: Bucket, gradient: Array) -> None:
        """Look at the complete local gradient of a bucket."""

    def forget(self) -> None:
        """Forget what was found in this step."""
