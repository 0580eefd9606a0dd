"""The global norm of the gradients, for clipping, and the check that they and the loss are finite."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np

from mpishard.backend import exact
from mpishard.backend.ranges import Range, Ranges
from mpishard.comm.ledger import users_level
from mpishard.data_parallel.largest_gradients import LargestGradients
from mpishard.data_parallel.owned_parts import spans_of
from mpishard.data_parallel.strategy import Strategy
from mpishard.parameters.buckets import Bucket
from mpishard.parameters.flat import FlatParameters

Array = Any
# Where every rank has all sums, and not more elements than these, each looks at all of them: a message takes longer.
_SHORT = 16_384
# The number of first steps that are checked even if no setting requires it.
_FIRST_STEPS = 3


class Inspection:
    """Checks the gradients of one optimizer, before and after they are summed over ranks.

    `looks`: look at each rank's gradients, to name those that are not finite.
    """

    nonfinite_loss: str  # what is NaN or infinite in this rank's loss; `ShardedOptimizer.update` sets it before `norm`
    finite_loss: bool  # the losses of all ranks were finite at the last call of `norm`
    interrupted: bool  # before `norm`: this rank requests to stop; after it: any rank of the team does

    def __init__(self, strategy: Strategy, parameters: FlatParameters, looks: bool) -> None:
        self._strategy = strategy
        self._team = strategy.team
        self._elements = sum(spec.size for spec in parameters.specs)
        looks_at_all = strategy.sums_are_everywhere and (strategy.mesh.size == 1 or not strategy.divides_state)
        self._sums_are_everywhere = looks_at_all and parameters.size <= _SHORT
        parts = strategy.ownership.owned_parts if self._sums_are_everywhere else strategy.ownership.counted_parts
        self._spans = Ranges([Range(*span) for span in spans_of(parts)])
        same = strategy.mesh.size == 1 and strategy.reducer.keeps_memory
        self._largest = LargestGradients(parameters.pieces, self._spans, same)
        self._first_steps = _FIRST_STEPS
        self.nonfinite_loss = ""
        self.finite_loss = True
        self.interrupted = False
        strategy.reducer.inspector = self if looks else None

    def forget(self) -> None:
        """Forget what was found; the next gradients belong to another step."""
        self._largest.forget()
        self.nonfinite_loss = ""

    @property
    def is_first(self) -> bool:
        """Return True if the next step is one of the first few. The same on all ranks."""
        return self._first_steps > 0

    def look(self, bucket: Bucket, gradient: Array) -> None:
        """Find this rank's first tensor with a NaN or infinite gradient, before the sum with other ranks."""
        self._largest.look(bucket, gradient)

    def norm(self, measure: bool, exchange_status: bool) -> float:
        """Agree on whether the summed gradients and the losses are finite, and on whether to stop. Collective.

        `exchange_status`, the same on all ranks: a rank may have set `nonfinite_loss` or `interrupted`. Returns
        infinity if the gradients are not finite; otherwise, if `measure`, their 2-norm over the team, which counts
        every logical element once; else NaN.
        """
        gradients = self._strategy.gradients()
        tops = self._largest.of_spans(gradients)
        finite = not self._largest.nonfinite and all(map(math.isfinite, tops))
        # MPI leaves the maximum with a NaN undefined, so that infinity stands for NaN too.
        top = max(tops, default=0.0) if finite else math.inf
        if self._sums_are_everywhere and not exchange_status:
            # All ranks find the same in the same sums: what is not finite on one rank is not finite in the sum.
            self.finite_loss = True
        else:
            shared = np.array([top, bool(self.nonfinite_loss), self.interrupted])
            self._team.all_reduce(shared, op="max", label="control")
            top, nonfinite_loss, interrupted = shared.tolist()
            self.finite_loss, self.interrupted = not nonfinite_loss, bool(interrupted)
        if self._first_steps:
            self._first_steps = 0 if top == 0 else self._first_steps - 1
            if top == 0 and self._strategy.mesh.rank == 0:
                _warn_of_zero()
        if not math.isfinite(top) or not measure:
            return math.nan if math.isfinite(top) else math.inf
        squares = np.zeros(2)
        for part in exact.sums_of_squares(gradients, self._spans, [top], [self._elements]):
            squares += part
        if not self._sums_are_everywhere:
            self._team.all_reduce(squares, label="control")
        return exact.norm(squares, top)

    def culprits(self, step: int, what: str = "gradient") -> str:
        """A message that names the tensors and samples that were not finite, and their ranks.  Collective."""
        found = list(
            zip(
                self._team.members,
                self._team.allgather_object((self.nonfinite_loss, self._largest.nonfinite)),
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
        "the gradient is exactly zero on all ranks.  The likely cause: no backward pass of the module was made since "
        "the last step; or gradients = ... makes another array, which nobody sees: a function adds to the one that it "
        "is given, gradients += ..., and a model writes to what parameters.gradient(name) gives it",
        RuntimeWarning,
        stacklevel=users_level(),
    )
