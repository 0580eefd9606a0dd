"""Values that ranks hold in the order of the application, and the same values in the order of their numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpishard.backend import array as arrays
from mpishard.comm.axis import Axis
from mpishard.launch.job_notes import raised_by_all
from mpishard.layout.boxes import run_lengths, split

Array = Any


class Rearrangement:
    """Brings values in any order to even runs of their numbers, one run a rank, and back.

    `numbers` are those of this rank's values; together the ranks of `axis` have each number from 0 to below `total`
    once.  Collective over the axis, and the creation over `world`, which has this axis and others.  Raises ValueError
    on all ranks of the world, with the first number that is given twice or out of range.
    """

    def __init__(self, axis: Axis, world: Axis, numbers: np.ndarray, total: int) -> None:
        self._axis = axis
        outside = np.sort(numbers[(numbers < 0) | (numbers >= total)])
        _raise_first(world, outside[:1], f"is not one of 0 to {total - 1}")
        offsets = np.array(split(total, axis.size))
        ranks = np.searchsorted(offsets, numbers, side="right") - 1
        # The places of this rank's values, ordered by the rank that owns their numbers.
        self._order = np.argsort(ranks, kind="stable")
        self._sent: list[int] = np.bincount(ranks, minlength=axis.size).tolist()
        received = np.empty(axis.size, np.int64)
        axis.all_to_all(np.array(self._sent, np.int64), received, label="ids")
        self._received: list[int] = received.tolist()
        arrived = np.empty(sum(self._received), np.int64)
        axis.all_to_all(numbers[self._order].astype(np.int64), arrived, self._sent, self._received, label="ids")
        # The places of the values that arrive, in the run of this rank.
        first, self.size = int(offsets[axis.rank]), run_lengths(offsets.tolist())[axis.rank]
        self._places = arrived - first
        times = np.bincount(self._places, minlength=self.size)
        # As many numbers as values: where one is missing, another one is there twice, which says more of the cause.
        _raise_first(world, first + np.flatnonzero(times > 1)[:1], "is there twice")

    def by_number(self, values: Array) -> Array:
        """This rank's run of the values, of which it has given those of its numbers; a new flat array.  Collective."""
        order, places = self._indices(values)
        found = arrays.empty(self.size, values.dtype, like=values)
        found[places] = self._moved(values[order], self._sent, self._received)
        return found

    def as_given(self, values: Array) -> Array:
        """The reverse of `by_number`: the values of this rank's numbers, from the runs of all ranks.  Collective."""
        order, places = self._indices(values)
        found = arrays.empty(len(order), values.dtype, like=values)
        found[order] = self._moved(values[places], self._received, self._sent)
        return found

    def _indices(self, values: Array) -> list[Array]:
        """The places of what is sent, and of what arrives, on the device of the values."""
        return [np.asarray(each, like=values) for each in (self._order, self._places)]

    def _moved(self, packed: Array, sent: list[int], received: list[int]) -> Array:
        arrived = arrays.empty(sum(received), packed.dtype, like=packed)
        return self._axis.all_to_all(packed, arrived, sent, received, label="fields")


def _raise_first(world: Axis, number: np.ndarray, how: str) -> None:
    """Raise ValueError on all ranks for the first number that is wrong on any, of at most one on each.  Collective."""
    least = np.array([*number, np.iinfo(np.int64).max][:1], np.int64)
    (first,) = world.all_reduce(least, op="min", label="ids").tolist()
    if first != np.iinfo(np.int64).max:
        raise raised_by_all(
            ValueError(
                f"ids must have each number once over all ranks, but {first} {how}: give the values that this rank "
                "owns, without ghosts, and their numbers in the whole field"
            ),
            world.size,
        )
