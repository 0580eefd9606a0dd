"""The global norm of the gradients, for clipping, and the check that they and the loss are finite.

The largest absolute values show what is not finite.  On a device they stay there until they are asked for, so that the
backward pass continues without the host.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpishard.backend import array as arrays
from mpishard.backend import exact_norms
from mpishard.backend.ranges import Range, Ranges
from mpishard.comm.errors import raised_on_all
from mpishard.comm.ledger import users_level
from mpishard.data_parallel.ownership import spans_of
from mpishard.data_parallel.strategies import Strategy
from mpishard.layout.tensors import Piece
from mpishard.parameters.buckets import Bucket
from mpishard.parameters.flat import FlatParameters

Array = Any

# Where every rank has all sums, and not more elements than these, each looks at all of them: a message takes longer.
_SHORT = 16_384
# The number of first steps that are checked even if no setting requires it.
_FIRST_STEPS = 3


class LargestGradients:
    """The largest values of each tensor before the sum over ranks, and of spans of the summed gradients after it.

    `same`: the sums are this rank's gradients, in the same memory. Then `look` puts off its work: tensors are looked at
    one by one only where a span is not finite, to find which.
    """

    def __init__(self, pieces: Sequence[Piece], spans: Ranges, same: bool = False) -> None:
        self._pieces = pieces
        self._spans = spans
        self._same = same
        self._nonfinite = ""
        # By bucket what `look` has put off.
        self._later: dict[int, tuple[Bucket, Array]] = {}
        # On a device: the values of all pieces, then of all spans, and the buckets that were looked at.
        self._values: exact_norms.LargestValues | None = None
        self._looked: dict[int, Bucket] = {}
        self._of_bucket: dict[int, Ranges] = {}

    def look(self, bucket: Bucket, gradient: Array) -> None:
        """Look at this rank's gradient of a bucket, before the sum with other ranks."""
        if self._same:
            self._later[bucket.index] = bucket, gradient
        else:
            self._look_now(bucket, gradient)

    def _look_now(self, bucket: Bucket, gradient: Array) -> None:
        if arrays.runs_cuda(gradient):
            ranges = self._of_bucket.get(bucket.index)
            if ranges is None:
                ranges = self._of_bucket[bucket.index] = Ranges(self._parts(bucket))
            self._on_device(gradient).take([gradient], ranges, bucket.first)
            self._looked[bucket.index] = bucket
        elif not self._nonfinite and not math.isfinite(exact_norms.largest(gradient)):
            for piece, (_, start, stop, _) in zip(self._tensors(bucket), self._parts(bucket), strict=True):
                if not math.isfinite(exact_norms.largest(gradient[start:stop])):
                    self._nonfinite = piece.name
                    return

    def of_spans(self, gradients: Sequence[Array]) -> list[float]:
        """The largest values of the spans of summed gradients, one for each; on a device the host waits once."""
        tops = self._find_in_spans(gradients)
        if all(map(math.isfinite, tops)):
            self._later.clear()
        return tops

    def _find_in_spans(self, gradients: Sequence[Array]) -> list[float]:
        if not gradients or not arrays.runs_cuda(gradients[0]):
            return exact_norms.largest_of(gradients, self._spans)
        values = self._on_device(gradients[0])
        values.take(gradients, self._spans, len(self._pieces))
        found = values.values()
        self._read(found)
        return found[len(self._pieces) :].tolist()

    @property
    def nonfinite(self) -> str:
        """The first tensor looked at whose gradient is not finite; empty: all are.  On a device the host may wait."""
        for bucket, gradient in self._later.values():
            self._look_now(bucket, gradient)
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

    def _on_device(self, like: Array) -> exact_norms.LargestValues:
        if self._values is None:
            self._values = exact_norms.LargestValues(len(self._pieces) + len(self._spans), like.dtype, like)
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


class GradientInspection:
    """Checks the gradients of one optimizer, before and after they are summed over ranks.

    `looks`: look at each rank's gradients, to name those that are not finite.
    """

    nonfinite_loss: str  # what is NaN or infinite in this rank's loss; `ShardedOptimizer.update` sets it before `agree`
    finite_loss: bool  # the losses of all ranks were finite at the last call of `agree`
    interrupted: bool  # before `agree`: this rank requests to stop; after it: any rank of the sync group does

    def __init__(self, strategy: Strategy, parameters: FlatParameters, looks: bool) -> None:
        self._strategy = strategy
        self._sync_group = strategy.sync_group
        self._elements = sum(spec.size for spec in parameters.specs)
        has_all = strategy.sums_are_everywhere and (strategy.mesh.size == 1 or not strategy.sharding.divides_state)
        self._each_looks_at_all = has_all and parameters.size <= _SHORT
        parts = strategy.ownership.owned_parts if self._each_looks_at_all else strategy.ownership.counted_parts
        self._spans = Ranges([Range(*span) for span in spans_of(parts)])
        # What is not finite on a rank is not finite in sums that all have; a loop may then have changed these.
        self._sums_tell = strategy.sums_are_everywhere
        # Compression adds errors to gradients, and a worker of Local SGD asks its own ranks alone.
        alone = strategy.mesh.size == 1 or strategy.sharding.workers_differ
        self._looks_ahead = looks and not alone and strategy.compressed is None
        # No sum of as many terms as there are ranks, each with this absolute value, is infinite.
        self._safe = float(np.finfo(parameters.dtype).max) / (4 * strategy.mesh.size)
        self._finite_ahead = False  # no sum of this step can be infinite or NaN
        same = strategy.mesh.size == 1 and strategy.reducer.keeps_memory
        self._largest = LargestGradients(parameters.pieces, self._spans, same)
        self._first_steps = _FIRST_STEPS
        self.nonfinite_loss = ""
        self.finite_loss = True
        self.interrupted = False
        if looks:
            strategy.reducer.observers.append(self.look)
            strategy.reducer.forget_observed = self.forget

    def forget(self) -> None:
        """Forget what was found; the next gradients belong to another step."""
        self._largest.forget()
        self._finite_ahead = False
        self.nonfinite_loss = ""

    @property
    def is_early(self) -> bool:
        """Return True if the next step is one of the first few. The same on all ranks."""
        return self._first_steps > 0

    def largest_ahead(self, gradients: Array) -> float:
        """The largest absolute value of this rank's whole gradient before the sum, for ranks to exchange.

        Infinity stands for NaN, and for what only the sums tell. On a device the host would wait for it.
        """
        if not self._looks_ahead or self._first_steps or arrays.is_device(gradients):
            return math.inf
        top = exact_norms.largest(gradients)
        return top if math.isfinite(top) else math.inf

    def note_largest(self, largest: float) -> None:
        """Note the largest `largest_ahead` of all ranks, whose gradients are summed next as they are.

        If it is far from the largest number, no sum can be infinite, and `agree` has nothing to find out.
        """
        self._finite_ahead = largest < self._safe

    def look(self, bucket: Bucket, gradient: Array) -> None:
        """Find this rank's first tensor with a NaN or infinite gradient, before the sum with other ranks."""
        if not self._finite_ahead:
            self._largest.look(bucket, gradient)

    def agree(self, measure: bool, exchange_status: bool) -> float:
        """Agree on whether the summed gradients and the losses are finite, and on whether to stop. Collective.

        `exchange_status`, the same on all ranks: a rank may have set `nonfinite_loss` or `interrupted`. Returns
        infinity if the gradients are not finite; otherwise, if `measure`, their 2-norm over the sync group, which
        counts every logical element once; else NaN. Nothing is exchanged where ranks know it from `note_largest`.
        """
        if self._finite_ahead and not measure and not exchange_status:
            self.finite_loss = True
            return math.nan
        top = self.largest()
        if self._each_looks_at_all and not exchange_status:
            # All ranks find the same in the same sums: what is not finite on one rank is not finite in the sum.
            self.finite_loss = True
        else:
            shared = np.array([top, bool(self.nonfinite_loss), self.interrupted, *self._strategy.unit_marks])
            self._sync_group.all_reduce(shared, op="max", label="control")
            top, nonfinite_loss, interrupted, *marks = shared.tolist()
            self._strategy.agree_on_units(marks)
            self.finite_loss, self.interrupted = not nonfinite_loss, bool(interrupted)
        if self._first_steps:
            self._first_steps = 0 if top == 0 else self._first_steps - 1
            if top == 0:
                with raised_on_all(self._sync_group):  # Python may make errors of warnings
                    if self._strategy.mesh.rank == 0:
                        _warn_of_zero()
        if not math.isfinite(top) or not measure:
            return math.nan if math.isfinite(top) else math.inf
        return self.norm_of(top)

    def largest(self) -> float:
        """The largest absolute value of this rank's part of the summed gradients, for ranks to exchange.

        Infinity stands for NaN, too, with which MPI leaves the maximum undefined.
        """
        tops = self._largest.of_spans(self._strategy.gradients())
        finite = all(map(math.isfinite, tops)) and (self._sums_tell or not self._largest.nonfinite)
        return max(tops, default=0.0) if finite else math.inf

    def norm_of(self, top: float) -> float:
        """The 2-norm of the summed gradients, whose largest value over the ranks is `top` and finite. Collective."""
        gradients, squares = self._strategy.gradients(), np.zeros(2)
        for part in exact_norms.sums_of_squares(gradients, self._spans, [top], [self._elements]):
            squares += part
        if not self._each_looks_at_all:
            self._sync_group.all_reduce(squares, label="control")
        return exact_norms.norm(squares, top)

    def culprits(self, step: int, what: str = "gradient", tensor: str | None = None) -> str:
        """A message that names the tensors and samples that were not finite, and their ranks.  Collective.

        `tensor`: the one of this rank, empty for none; by default the first that was seen.
        """
        tensor = self._largest.nonfinite if tensor is None else tensor
        found = list(
            zip(
                self._sync_group.members,
                self._sync_group.allgather_object((self.nonfinite_loss, tensor)),
                strict=True,
            )
        )
        losses = [f"{loss} on rank {rank}" for rank, (loss, _) in found if loss]
        tensors = [f"{name!r} on rank {rank}" for rank, (_, name) in found if name]
        if not losses:
            where = ", ".join(tensors) or "the sum over ranks overflowed, each rank's own was finite"
            return f"NaN or infinite {what} at step {step}: {where}"
        also = f"; also the {what} of {', '.join(tensors)}" if tensors else ""
        return f"NaN or infinite loss at step {step}: {', '.join(losses)}{also}"


def _warn_of_zero() -> None:
    warnings.warn(
        "the gradient is exactly zero on all ranks.  Likely causes: no backward pass since the last step; or "
        "`gradients = ...`, which binds the name to another array: write gradients += ... (a model writes into "
        "parameters.gradient(name))",
        RuntimeWarning,
        stacklevel=users_level(),
    )
