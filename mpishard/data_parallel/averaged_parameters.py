"""The exponential moving average of the parameters in their place, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mpishard.data_parallel.rank_state import RankState
from mpishard.data_parallel.slots import EMA


@contextmanager
def averaged_parameters(on_rank: RankState) -> Iterator[None]:
    """Put the average in the place of the parameters within the block; needs memory for a copy of what a rank holds.

    Entering is collective over the mesh. Leaving is not, so that the parameters come back after the death of a rank
    too.
    """
    strategy, parameters = on_rank.strategy, on_rank.parameters
    held = parameters.held
    before = held.copy()
    try:
        averages = strategy.ownership.state_views(on_rank.slots[EMA])
        for values, average in zip(strategy.values(), averages, strict=True):
            values[...] = average
        strategy.publish_parameters()
        yield
    finally:
        held[...] = before
        if parameters.sharded is not None:
            parameters.sharded.drop()
