"""Whether the gradients of a step can be used, which tensor on which rank spoils them, and their global norm."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpishard import summation
from mpishard.gradients import Bucket
from mpishard.optim.strategies import Strategy
from mpishard.optim.tensor_norms import spans_of
from mpishard.parameters import FlatParameters

Array = Any


class Inspection:
    """Looks at the gradients of one optimizer, before and after they are summed over ranks.

    Parameters
    ----------
    strategy : Strategy
    parameters : FlatParameters
        For the names of the tensors.
    """

    def __init__(self, strategy: Strategy, parameters: FlatParameters) -> None:
        self._strategy = strategy
        self._team = strategy.team
        self._pieces = parameters.pieces
        self._elements = sum(spec.size for spec in parameters.specs)
        self._spans = spans_of(strategy.counted_parts)
        self._nonfinite = ""
        strategy.buckets.inspect = self.look
        strategy.buckets.on_reset.append(self.forget)

    def forget(self) -> None:
        """The next gradients are of another step."""
        self._nonfinite = ""

    def look(self, bucket: Bucket, gradient: Array) -> None:
        """Remember the first tensor of this rank whose gradient is NaN or infinite, before it is mixed with others."""
        if self._nonfinite or math.isfinite(summation.largest(gradient)):
            return
        start = 0
        for piece in self._pieces[bucket.first : bucket.last]:
            if not math.isfinite(summation.largest(gradient[start : start + piece.size])):
                self._nonfinite = piece.name
                return
            start += piece.size

    def norm(self, measure: bool) -> float:
        """Agree on whether the summed gradients are finite.  Collective.

        Returns
        -------
        float
            Infinite if they are not; their 2-norm over the team, every logical element counted once, if `measure`;
            else NaN.
        """
        gradients = self._strategy.gradients()
        counted = [gradients[owned][start:stop] for owned, start, stop in self._spans]
        tops = [summation.largest(part) for part in counted]
        finite = not self._nonfinite and all(map(math.isfinite, tops))
        # Maximum and NaN do not go together in MPI: infinity stands for both.
        shared = np.array([max(tops, default=0.0) if finite else math.inf])
        self._team.all_reduce(shared, op="max", label="control")
        top = float(shared[0])
        if not math.isfinite(top) or not measure:
            return math.nan if math.isfinite(top) else math.inf
        squares = np.zeros(2)
        for part in counted:
            squares += summation.sum_of_squares(part, top, self._elements)
        self._team.all_reduce(squares, label="control")
        return summation.norm(squares, top)

    def culprits(self) -> str:
        """Which tensors were not finite on which ranks, in words.  Collective."""
        told = zip(self._team.members, self._team.exchange(self._nonfinite), strict=True)
        named = [f"{name!r} on rank {rank}" for rank, name in told if name]
        return ", ".join(named) or "the sum over ranks overflowed, each rank's own was finite"
