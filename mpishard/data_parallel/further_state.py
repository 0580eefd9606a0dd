"""What an optimizer's state asks of state that comes on top of the rule's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from mpishard.comm.axis import Axis
from mpishard.data_parallel.counters import Counters
from mpishard.data_parallel.full_state import FullState
from mpishard.data_parallel.rank_state import RankState
from mpishard.layout.run_state import Shard


class FurtherState(Protocol):
    """State that an optimizer has besides that of its rule, such as the averages of `LocalSGDOptimizer`.

    `Binding` and `OptimizerState` call these methods, within their own of the same names; collective where those are.
    """

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings that decide the steps; the same on all ranks."""
        ...

    @property
    def facts(self) -> Mapping[str, Any]:
        """Facts of a `RunState`; `check` and `restore` read them."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays on this rank."""
        ...

    @property
    def may_differ(self) -> bool:
        """Whether copies that should be equal may differ, until `spread`."""
        ...

    @property
    def needs_consolidation(self) -> bool:
        """Whether `consolidate` has something to do."""
        ...

    @property
    def synchronizes_next_step(self) -> bool:
        """Whether the next update waits for the other data ranks."""
        ...

    @property
    def compares_next_step(self) -> bool:
        """Whether all ranks, and not only those of one worker, compare their arguments of the next `step`."""
        ...

    def make(self, on_rank: RankState, counters: Counters) -> None:
        """Create the state besides this state of the rule."""
        ...

    def shards(self) -> tuple[Shard, ...]:
        """Its live arrays."""
        ...

    def check(self, facts: Mapping[str, Any]) -> None:
        """Raise ValueError unless it can continue from these facts."""
        ...

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Continue from these facts, after its arrays were filled."""
        ...

    def add_to(self, full: FullState, world: Axis) -> FullState:
        """A full state with this state too."""
        ...

    def fill(self, full: FullState) -> None:
        """Continue from a full state."""
        ...

    def spread(self) -> None:
        """Make all copies of its arrays equal."""
        ...

    def consolidate(self) -> None:
        """Bring all workers to one state."""
        ...

    def abandon(self) -> None:
        """Drop what is pending, which cannot finish after a rank has died."""
        ...
