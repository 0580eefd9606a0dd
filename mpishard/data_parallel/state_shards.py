"""This rank's arrays of the state of a run, each with its layout, ready to be saved or moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from mpishard.comm.axis import Axis
from mpishard.data_parallel.strategy import Strategy
from mpishard.layout.boxes import split
from mpishard.layout.run_state import (
    PARAMETERS,
    SLOT,
    RunState,
    Shard,
    counted_pieces,
    pieces_of_ranges,
)
from mpishard.layout.tensors import LocalLayout, cut_holding
from mpishard.parameters.flat import FlatParameters

Array = Any
Range = tuple[int, int]


def shards(strategy: Strategy, slots: Mapping[str, Array]) -> tuple[Shard, ...]:
    """Parameters and slots of this rank, and the compression errors of the sums that it owns."""
    parameters, ownership = strategy.parameters, strategy.ownership
    own = cut_holding(parameters.pieces, ownership.own)
    pairs = zip(ownership.own, ownership.counted, _starts(ownership.own), strict=True)
    counted = _counted(
        parameters, ownership.counted, [offset + first - start for (start, _), (first, _), offset in pairs]
    )
    if parameters.sharded is not None:
        values = Shard(PARAMETERS, parameters.sharded.shard, own, counted)
    else:
        starts = [start for start, _ in ownership.counted]
        values = Shard(PARAMETERS, parameters.flat, parameters.pieces, _counted(parameters, ownership.counted, starts))
    found = [values, *(Shard(SLOT.format(name), slot, own, counted) for name, slot in slots.items())]
    if strategy.compressed is not None:
        ranges = strategy.error_ranges
        left = pieces_of_ranges(parameters.pieces, ranges, _starts(ranges))
        counted = counted_pieces(left, parameters.specs, parameters.place)
        found.append(Shard(strategy.errors_kind, strategy.compressed.owned, left, counted, required=False))
    return tuple(found)


def parameters_alone(parameters: FlatParameters, axis: Axis) -> RunState:
    """The state of a model without an optimizer: one shard, the live parameters.

    They are divided evenly among the ranks of the data axis.
    """
    if parameters.sharded is not None:
        own = parameters.sharded.own
        layout = cut_holding(parameters.pieces, own)
        shard = Shard(PARAMETERS, parameters.sharded.shard, layout, _counted(parameters, own, _starts(own)))
    else:
        cuts = split(parameters.size, axis.size)
        start, stop = cuts[axis.rank], cuts[axis.rank + 1]
        counted = _counted(parameters, [(start, stop)], [start])
        shard = Shard(PARAMETERS, parameters.flat, parameters.pieces, counted)
    return RunState(parameters.specs, (shard,))


def _starts(ranges: Sequence[Range]) -> list[int]:
    """The start of each range when the ranges lie end to end."""
    return [0, *accumulate(stop - start for start, stop in ranges)][:-1]


def _counted(parameters: FlatParameters, ranges: Sequence[Range], starts: Sequence[int]) -> LocalLayout:
    return counted_pieces(pieces_of_ranges(parameters.pieces, ranges, starts), parameters.specs, parameters.place)
