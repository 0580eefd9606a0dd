"""Gradients of calls of `step` that only add, with ``auto_sync_gradients=False``, until the update that uses them."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpishard.backend import array as arrays
from mpishard.backend.array import accumulate
from mpishard.comm.mesh import Mesh

Array = Any


class Accumulation:
    """This rank's calls of `step` since the last update, and the sum of the arrays that they were given.

    Attributes
    ----------
    total : 1-D array or None
        The sum; None if no call had an array, since gradients of models add up in their buckets.
    """

    def __init__(self) -> None:
        self.total: Array | None = None
        self._calls = 0

    def add(self, gradients: Array | None) -> None:
        """Count a call of `step`, and add the array that it was given.  Not collective."""
        self._calls += 1
        if gradients is not None:
            if self.total is None:
                self.total = arrays.zeros(gradients.size, gradients.dtype, like=gradients)
            accumulate(self.total, gradients)

    def forget(self) -> None:
        """Start anew: the gradients were used, or discarded.  Not collective."""
        self._calls = 0
        self.total = None

    def calls(self, mesh: Mesh) -> int:
        """Number of calls since the last update, over all data ranks.  Collective over the mesh.

        Raises
        ------
        ValueError
            On every rank, if tensor or pipeline ranks of one data rank differ in their number of calls.
        """
        calls = int(mesh.data.all_reduce(np.array([self._calls]), label="control")[0])
        if mesh.data.size < mesh.world.size:
            by_rank = mesh.world.allgather_object(calls)
            if len(set(by_rank)) > 1:
                raise ValueError(f"tensor and pipeline ranks must call step() equally often; calls by rank: {by_rank}")
        return calls
