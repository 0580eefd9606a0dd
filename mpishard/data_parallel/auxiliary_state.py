"""The state of an optimizer besides that of its rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mpishard.comm.axis import Axis
from mpishard.data_parallel.rank_state import Counters, RankState
from mpishard.layout.run_state import Shard

if TYPE_CHECKING:
    from mpishard.data_parallel.full_state import FullState  # imports h5py, which only `serialize` and `gather` need


class AuxiliaryState:
    """State that an optimizer has in addition to that of its rule, such as the averages of `LocalSGDOptimizer`.

    `OptimizerState` calls these methods, within its own of the same names; collective where those are.  Here they are
    those of a state without arrays and numbers, whose copies never differ; subclasses override what they have.
    """

    # Copies that should be equal may differ, until `broadcast`.
    may_differ: bool = False

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings that decide the steps; the same on all ranks."""
        return {}

    @property
    def facts(self) -> Mapping[str, Any]:
        """Facts of a `RunState`; `check` and `restore` read them."""
        return {}

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays on this rank."""
        return 0

    @property
    def needs_consolidation(self) -> bool:
        """True if `consolidate` has something to do."""
        return False

    @property
    def synchronizes_next_step(self) -> bool:
        """True if the next update waits for the other data ranks."""
        return True

    @property
    def compares_next_step(self) -> bool:
        """True if all ranks, and not only those of one worker, compare their arguments of the next `step`."""
        return True

    def make(self, on_rank: RankState, counters: Counters) -> None:
        """Create the state that accompanies this state of the rule."""

    def shards(self) -> tuple[Shard, ...]:
        """Its live arrays."""
        return ()

    def check(self, facts: Mapping[str, Any]) -> None:
        """Raise ValueError unless it can continue from these facts."""

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Continue from these facts, after its arrays were filled."""

    def add_to(self, full: FullState, world: Axis) -> FullState:
        """A full state with this state too."""
        return full

    def fill(self, full: FullState) -> None:
        """Continue from a full state."""

    def broadcast(self) -> None:
        """Make all copies of its arrays equal."""

    def consolidate(self) -> None:
        """Bring all workers to one state."""

    def abandon(self) -> None:
        """Drop what is pending, which cannot finish after a rank has died."""
