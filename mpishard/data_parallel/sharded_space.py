"""Vectors whose elements are divided over the ranks of a strategy, as a `Space`."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpishard.backend import array as arrays
from mpishard.data_parallel.full_state import cut_whole, gather_whole
from mpishard.data_parallel.owned_parts import spans_of
from mpishard.data_parallel.strategy import Strategy
from mpishard.minimizers.space import Space

Array = Any


class ShardedSpace(Space):
    """The elements that this rank updates, end to end; every element of the model counts on one rank.

    Raises ValueError on all ranks if there are more elements than a sum can have.
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

    def whole(self, vector: Array) -> Array:
        """All elements of a vector on every rank, in memory like its own, in the order of the specs.  Collective."""
        strategy = self._strategy
        views = strategy.ownership.counted_views(strategy.ownership.state_views(vector))
        values = np.concatenate([np.empty(0, vector.dtype), *map(arrays.to_host, views)])
        whole = gather_whole(strategy.mesh.world, strategy.parameters, strategy.ownership.counted, values)
        return arrays.on_device_of(whole, self.like)

    def own(self, whole: Array) -> Array:
        """This rank's elements of a whole vector of any memory, on the device of the vectors."""
        host = np.asarray(arrays.to_host(whole), self.like.dtype)
        part = cut_whole(host, self._strategy.parameters, self._strategy.ownership.own)
        return arrays.on_device_of(part, self.like)
