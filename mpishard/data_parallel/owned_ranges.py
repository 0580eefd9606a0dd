"""The elements of the flat parameters that a rank updates, and those that it contributes to sums.

The strategy decides: `Strategy._shares` in ``strategy.py`` cuts each bucket into one share for each data rank, and
`_make_ownership` there and in ``strategies.py`` chooses the ranges that a rank owns. This file has what follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from mpishard.data_parallel.owned_parts import OwnedPart, parts_of
from mpishard.parameters.flat import FlatParameters

Array = Any
Range = tuple[int, int]


class OwnedRanges:
    """The elements of one rank, as ranges of its flat parameters.

    `own` are the ascending ranges that this rank updates; a state array holds them end to end. `counted` has for each
    the part that this rank stands for in sums over ranks, such as norms: all of it, unless several data ranks update
    the same elements, as in DDP: each then stands for another part, so that every element counts once. `in_team` is the
    same for sums over the ranks that take a step together.
    """

    def __init__(
        self,
        parameters: FlatParameters,
        own: list[Range],
        counted: list[Range],
        in_team: list[Range] | None = None,
    ) -> None:
        self.own = own
        self.counted = counted
        self._in_team = counted if in_team is None else in_team
        self._layout = parameters.layout  # not the parameters: others of the same layout may take their place

    @property
    def size(self) -> int:
        """Number of elements that this rank updates."""
        return sum(stop - start for start, stop in self.own)

    def state_views(self, slot: Array) -> list[Array]:
        """The parts of a state array that belong to the ranges in `own`."""
        views, offset = [], 0
        for start, stop in self.own:
            views.append(slot[offset : offset + stop - start])
            offset += stop - start
        return views

    def states_of(self, slots: Sequence[Array]) -> list[list[Array]]:
        """For each range in `own` its parts of all state arrays, in their order."""
        if len(self.own) == 1:
            return [list(slots)]
        views = [self.state_views(slot) for slot in slots]
        return [[part[number] for part in views] for number in range(len(self.own))]

    def counted_views(self, owned: Sequence[Array]) -> list[Array]:
        """Cut arrays that cover the ranges in `own` down to the ranges in `counted`."""
        ranges = zip(owned, self.own, self.counted, strict=True)
        return [array[start - origin : stop - origin] for array, (origin, _), (start, stop) in ranges]

    @cached_property
    def owned_parts(self) -> list[OwnedPart]:
        """The ranges in `own`, cut at tensors."""
        return self._parts(self.own)

    @cached_property
    def counted_parts(self) -> list[OwnedPart]:
        """This rank's parts in sums over the model: each logical element is on exactly one rank of the team."""
        specs, model_rank = self._layout.specs, self._layout.place
        return [part for part in self._parts(self._in_team) if model_rank.counts(specs[part.tensor])]

    def _parts(self, ranges: Sequence[Range]) -> list[OwnedPart]:
        number = {spec.name: index for index, spec in enumerate(self._layout.specs)}
        tensors = [number[piece.name] for piece in self._layout.pieces]
        return parts_of(self._layout.pieces, tensors, ranges, [start for start, _ in self.own])
