"""Vectors whose elements are divided over the ranks of a strategy, as a `Space`."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpishard.backend import array as arrays
from mpishard.data_parallel.full_parameters import cut_whole, gather_whole
from mpishard.data_parallel.owned_parts import spans_of
from mpishard.data_parallel.strategy import Strategy
from mpishard.minimizers.space import Space

Array = Any


class ShardedSpace(Space):
    """The elements that this rank updates, end to end; every element of the model counts on one rank.

    Parameters
    ----------
    strategy : Strategy
        Divides the elements over the ranks that take a step together.

    Raises
    ------
    ValueError
        If there are more elements than a sum can have, on all ranks alike.
    """

    def __init__(self, strategy: Strategy) -> None:
        ownership, parameters = strategy.ownership, strategy.parameters
        starts = np.cumsum([0, *(stop - start for start, stop in ownership.own)]).tolist()
        spans = [(starts[own] + start, starts[own] + stop) for own, start, stop in spans_of(ownership.counted_parts)]
        total = sum(spec.size for spec in parameters.specs)
        super().__init__(ownership.size, total, parameters.like, spans)
        self._strategy = strategy

    def add(self, numbers: np.ndarray) -> None:
        """Replace an int64 array by its sum over the ranks.  Collective; one all-reduce."""
        self._strategy.team.all_reduce(numbers.reshape(-1), label="dots")

    def maximize(self, numbers: np.ndarray) -> None:
        """Replace a float64 array without NaN by its maximum over the ranks.  Collective; one all-reduce."""
        self._strategy.team.all_reduce(numbers, op="max", label="dots")

    def whole(self, vector: Array) -> np.ndarray:
        """All elements of a vector, on the host of every rank, in the order of the specs.  Collective."""
        strategy = self._strategy
        views = strategy.ownership.counted_views(strategy.ownership.state_views(vector))
        values = np.concatenate([np.empty(0, vector.dtype), *map(arrays.to_host, views)])
        return gather_whole(strategy.mesh.world, strategy.parameters, strategy.ownership.counted, values)

    def own(self, whole: np.ndarray) -> Array:
        """This rank's elements of a whole vector, on the device of the vectors.  Not collective."""
        part = cut_whole(np.asarray(whole, self.like.dtype), self._strategy.parameters, self._strategy.ownership.own)
        if not arrays.is_device(self.like):
            return part
        target = arrays.empty(part.size, part.dtype, like=self.like)
        arrays.copy_to_device(part, target)
        return target
