"""The committed state to which a run returns after a failure: this rank's arrays, and copies of its neighbour's.

A step is a transaction: everything it changes is copied before.  If it fails before the ranks have agreed, every
survivor returns to the state before the step.  An array that only one rank holds, or one node, has a second copy at the
rank's *buddy*, on another node where there is one.  The buddy is another rank of the data axis; in a run that changes
its mesh any other rank, since it may be asked for slices and stages that no survivor holds.

An array that has a version is copied only if it was written since its last copy.  All ranks write the same arrays in a
step, so that each knows what its neighbour sends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from mpi4py import MPI

from mpishard.backend import array as arrays
from mpishard.comm.axis import Axis
from mpishard.elastic.buddies import buddies, needs_copy
from mpishard.layout.run_state import RunState, Shard
from mpishard.layout.tensors import LocalLayout

Array = Any


class Committed:
    """The last committed state of this rank and of its neighbour, the rank whose buddy it is.

    Creation is collective over `axis`, the ranks that keep each other's copies: the data axis, or the world.
    `identities` and `nodes` are by rank of this axis.  `state` has the live arrays; an array whose elements another
    rank holds too, on another node if there is one, needs no second copy.  `versions()` gives, by kind of shard, a
    number that is raised when the array is written and is the same on all ranks; an array without one counts as written
    in every step.

    `facts` is the metadata of this state once it was asked for: a move may be tried several times, if others die
    meanwhile.
    """

    def __init__(
        self,
        axis: Axis,
        identities: list[int],
        nodes: list[str],
        state: RunState,
        versions: Callable[[], Mapping[str, int]],
    ) -> None:
        self.state = state
        self._axis = axis
        self._versions = versions
        self._before = [arrays.empty(each.array.shape, each.array.dtype, like=each.array) for each in state.shards]
        self._facts: dict[str, Any] | None = None
        self.facts: Mapping[str, Any] | None = None
        layouts = axis.allgather_object(tuple(shard.holding for shard in state.shards))
        to = buddies(nodes)
        self._to, self._source = to[axis.rank], to.index(axis.rank)
        self.neighbour: int = identities[self._source]
        self._theirs: list[LocalLayout] = list(layouts[self._source])
        # By kind of shard: whether this rank's buddy, and this rank for its neighbour, must keep a copy.
        self._gives, self._keeps = (
            [
                shard.required and needs_copy([each[kind] for each in layouts], nodes, rank)
                for kind, shard in enumerate(state.shards)
            ]
            for rank in (axis.rank, self._source)
        )
        # By number of the shard: the neighbour's committed arrays, and what has come of them after the last commit.
        self._copies: dict[int, Array] = {}
        self._fresh: dict[int, Array] = {}
        self._spare: list[Array] = []  # memory for more of these
        # The versions of the arrays when they were copied, when they were sent, and of the buddy's committed copies.
        self._kept: Mapping[str, int] = {}
        self._sent: Mapping[str, int] = {}
        self._copied: Mapping[str, int] = {}
        self.send_copies()
        self.commit()

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Copy the arrays that were written since their last copy, before a step."""
        versions = self._versions()
        for kind in self._written(self._kept, versions):
            self._before[kind][...] = self.state.shards[kind].array
        self._kept = versions
        self._facts, self.facts = dict(facts), None

    def send_copies(self) -> None:
        """Send the buddy what was written, of the arrays that only this rank has.  Collective over the axis."""
        axis = self._axis
        if axis.size == 1:
            return
        pending = []
        self._sent = self._versions()
        written = self._written(self._copied, self._sent)
        # First what goes to memory of the host: it would wait until the copies of device arrays before it are over.
        for kind in written:
            if self._keeps[kind]:
                size = sum(piece.size for piece in self._theirs[kind])
                self._fresh[kind] = self._room(size, self.state.shards[kind].array.dtype)
                pending.append(axis.start_recv(self._fresh[kind], self._source, tag=kind, label="buddy"))
        for kind in written:
            if self._gives[kind]:
                pending.append(axis.start_send(self.state.shards[kind].array, self._to, tag=kind, label="buddy"))
        try:
            for each in pending:
                each.wait()
        except MPI.Exception:
            axis.revoke()  # or this rank would wait for transfers that cannot end
            for each in pending:
                each.abandon()
            raise

    def commit(self) -> None:
        """Make the present state the committed one."""
        self._spare += [self._copies[kind] for kind in self._fresh if kind in self._copies]
        self._copies |= self._fresh
        self._fresh = {}
        self._copied = self._sent
        self._facts = None

    def roll_back(self) -> dict[str, Any] | None:
        """Restore the arrays as they were at `begin`; returns the facts of then, None if no step had begun."""
        facts, self._facts = self._facts, None
        if facts is not None:
            for before, shard in zip(self._before, self.state.shards, strict=True):
                shard.array[...] = before
        self._spare += self._fresh.values()
        self._fresh = {}
        return facts

    def source(self, alive: Collection[int]) -> RunState:
        """The state that this rank can give to others: its own, and that of its neighbour if the neighbour has died."""
        if self.neighbour in alive:
            return self.state
        shards = []
        for kind, shard in enumerate(self.state.shards):
            if not self._keeps[kind]:
                shards.append(shard)
                continue
            own = shard.array.size
            theirs = tuple(replace(piece, start=piece.start + own) for piece in self._theirs[kind])
            array = arrays.joined([shard.array, arrays.on_device_of(self._copies[kind], like=shard.array)])
            shards.append(Shard(shard.kind, array, (*shard.holding, *theirs), (*shard.counted, *theirs)))
        return replace(self.state, shards=tuple(shards))

    def _written(self, since: Mapping[str, int], versions: Mapping[str, int]) -> list[int]:
        """The numbers of the shards that may have been written since these versions."""
        kinds = enumerate(self.state.kinds)
        return [kind for kind, name in kinds if name not in versions or versions[name] != since.get(name)]

    def _room(self, size: int, dtype: np.dtype) -> Array:
        """Memory for an array: of an earlier copy if one has this size and dtype."""
        fitting = (number for number, array in enumerate(self._spare) if (array.size, array.dtype) == (size, dtype))
        number = next(fitting, None)
        return np.empty(size, dtype) if number is None else self._spare.pop(number)
