"""Sharded parameters: each data rank keeps a share, and a unit is gathered only while it is used (ZeRO-3).

Rajbhandari et al., "ZeRO" (2020), section 5.3; units as in Zhao et al., "PyTorch FSDP" (2023), section 4.2.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from mpishard.backend import array as arrays
from mpishard.comm.agreement import held_by
from mpishard.comm.axis import Axis
from mpishard.comm.call_matching import CollectiveMismatchError, is_truncation
from mpishard.comm.channel import Request
from mpishard.launch.job_notes import raised_by_all
from mpishard.layout.boxes import run_lengths, split
from mpishard.layout.tensors import Piece
from mpishard.parameters.buckets import BlockPool

Array = Any

# The last gathers that are kept for a message, and the prime below which the hash of all stays.
_KEPT = 10_000
_PRIME = 2**52 - 47
_ONE_ORDER = (
    "All ranks must call the same layers in one order: let what leaves layers out, as LayerDrop does, draw the same "
    "random numbers on all ranks, or use zero=2, whose parameters are whole"
)


class UnitMemory(ABC):
    """Gives out the memory of a unit while it is gathered."""

    @property
    def nbytes(self) -> int:
        """Bytes that are kept, and that no unit uses."""
        return 0

    @abstractmethod
    def allocate(self, unit: int) -> Array:
        """Memory for all elements of a unit, with any content."""

    @abstractmethod
    def release(self, unit: int) -> None:
        """Free the memory of a unit."""


class PooledMemory(UnitMemory):
    """Blocks of a pool, for units of these numbers of elements."""

    def __init__(self, sizes: Sequence[int], like: Array) -> None:
        self._sizes = sizes
        self._pool = BlockPool(sizes, like)
        self._blocks: dict[int, Array] = {}

    @property
    def nbytes(self) -> int:
        return self._pool.nbytes

    def allocate(self, unit: int) -> Array:
        self._blocks[unit] = self._pool.allocate(self._sizes[unit])
        return self._blocks[unit]

    def release(self, unit: int) -> None:
        self._pool.release(self._blocks.pop(unit))


class GatherOrder:
    """The units that this rank has gathered since the ranks last compared their order.

    A gather of MPI takes any two pieces of one size, so that ranks which gather different units get a mixture of both.
    `marks` ride on an exchange that each step has before the parameters change. A module of PyTorch compares them when
    its backward pass begins, too: in this the sums of other units would meet gathers.
    """

    def __init__(self) -> None:
        self._hash = 0  # of the names in their order; exact as a float64
        self._names: deque[str] = deque(maxlen=_KEPT)
        self._count = 0

    def note(self, name: str) -> None:
        """Note that the unit of a tensor is gathered next."""
        self._hash = (self._hash * 1_000_003 + zlib.crc32(name.encode()) + 1) % _PRIME
        self._names.append(name)
        self._count += 1

    @property
    def marks(self) -> tuple[int, int]:
        """Two numbers whose maxima over ranks add up to 0 if all ranks have gathered the same units in one order."""
        return self._hash, -self._hash

    def restart(self) -> None:
        """Begin again, after a comparison."""
        self._hash = self._count = 0
        self._names.clear()

    def difference(self, axis: Axis) -> CollectiveMismatchError:
        """The error for ranks that have gathered other units; begins again. Collective over the axis."""
        by_rank = axis.allgather_object((self._count, list(self._names)))
        self.restart()
        gathers = [dict(enumerate(names, count - len(names) + 1)) for count, names in by_rank]
        numbers = sorted(set().union(*gathers))
        first = next((n for n in numbers if len({each.get(n) for each in gathers}) > 1), 0)
        units = [f"that of {each[first]!r}" if first in each else "none" for each in gathers]
        found = ", ".join(held_by(axis.members, units))
        error = CollectiveMismatchError(
            f"ranks have gathered other units since the last step (zero=3), which mixes their values: unit {first} in "
            f"order is {found}.  No step was taken.  {_ONE_ORDER}; Mesh(debug=True) raises in the call of the layer"
        )
        return raised_by_all(error, axis.size)


class ShardedUnits:
    """This rank's shares of all units of consecutive tensors, and the units that are gathered now.

    Methods that gather units (`prefetch`, `use`, `gather`, `rewrite`) are collective over `axis`, whose ranks share
    every unit evenly: all of them must call them in the same order. `units` are runs of `pieces` that cover all of
    them.
    """

    def __init__(self, pieces: Sequence[Piece], units: Sequence[tuple[int, int]], axis: Axis, like: Array) -> None:
        self.axis = axis
        self.views: dict[str, Array] = {}  # the tensors gathered now, by name
        self.order = GatherOrder()  # a module shares it with the units of its frozen parameters
        self._pieces = pieces
        self._units = units
        self._like = like
        # By unit: its range in the flat order, its cut over the ranks, and the start of this rank's share in the shard.
        self._extents = [
            (pieces[first].start, pieces[last - 1].start + pieces[last - 1].size) if last > first else (0, 0)
            for first, last in units
        ]
        self._cuts = [split(stop - start, axis.size) for start, stop in self._extents]
        self._starts = [0]
        for cuts in self._cuts:
            self._starts.append(self._starts[-1] + cuts[axis.rank + 1] - cuts[axis.rank])
        self.shard: Array = arrays.zeros(self._starts[-1], like.dtype, like=like)  # this rank's shares, end to end
        self.memory: UnitMemory = PooledMemory([stop - start for start, stop in self._extents], like)
        self._blocks: dict[int, Array] = {}
        self._pending: dict[int, Request] = {}
        self._users: Counter[int] = Counter()

    @property
    def own(self) -> list[tuple[int, int]]:
        """This rank's share of each unit, as a range in flat order."""
        rank = self.axis.rank
        return [
            (start + cuts[rank], start + cuts[rank + 1])
            for (start, _), cuts in zip(self._extents, self._cuts, strict=True)
        ]

    @property
    def shares(self) -> list[Array]:
        """This rank's share of every unit, views of `shard`."""
        return [self.share(unit) for unit in range(len(self._units))]

    @property
    def nbytes(self) -> int:
        """Bytes held: the shares, and the memory for gathered units."""
        return int(self.shard.nbytes + self.memory.nbytes + sum(block.nbytes for block in self._blocks.values()))

    def share(self, unit: int) -> Array:
        """This rank's share of a unit, a view of `shard`."""
        return self.shard[self._starts[unit] : self._starts[unit + 1]]

    def fill(self, flat: Array) -> None:
        """Fill the shares from a flat array of all parameters, the same on all ranks."""
        for unit, (start, stop) in enumerate(self.own):
            self.share(unit)[...] = flat[start:stop]

    def assign(self, piece: Piece, unit: int, values: Array) -> None:
        """Set a tensor to `values`, of which this rank keeps its share."""
        if piece.name in self.views:
            self.views[piece.name][...] = values
        start, stop = self.own[unit]
        first, last = max(start, piece.start), min(stop, piece.start + piece.size)
        if first < last:
            flat = values.reshape(-1)
            self.share(unit)[first - start : last - start] = flat[first - piece.start : last - piece.start]

    def prefetch(self, units: Iterable[int]) -> None:
        """Start to gather the units that are not gathered yet."""
        for unit in units:
            if unit in self._blocks:
                continue
            start, stop = self._extents[unit]
            self._note(unit)
            block = self._blocks[unit] = self.memory.allocate(unit)
            self._pending[unit] = self.axis.start_all_gather(
                block[: stop - start], self.share(unit), run_lengths(self._cuts[unit]), label="parameters"
            )

    def use(self, units: Sequence[int]) -> None:
        """Gather units, unless that has begun, and wait for them; `release` them afterwards."""
        self.prefetch(units)
        for unit in units:
            self._users[unit] += 1
            if unit in self._pending:
                block = self._wait(unit)
                first, last = self._units[unit]
                origin = self._extents[unit][0]
                for piece in self._pieces[first:last]:
                    start = piece.start - origin
                    self.views[piece.name] = block[start : start + piece.size].reshape(piece.shape)

    def release(self, units: Iterable[int]) -> None:
        """End one use of each unit; its memory is freed after the last use.

        Raises RuntimeError if one is not in use.
        """
        for unit in units:
            if not self._users[unit]:
                name = self._pieces[self._units[unit][0]].name
                raise RuntimeError(
                    f"the unit of {name!r} was released, but is not in use: each use() takes one release(), and an "
                    "optimizer's step in between, which changes the parameters, releases all"
                )
            self._users[unit] -= 1
            if not self._users[unit]:
                self._free(unit)

    def free_all(self) -> None:
        """Discard all gathered units, since the shares change."""
        self.free(list(self._blocks))
        self._users.clear()

    def is_gathered(self, unit: int) -> bool:
        """Return True if a unit is gathered, or being gathered."""
        return unit in self._blocks

    def free(self, units: Iterable[int]) -> None:
        """Free those of the units that are gathered, and end all uses of them."""
        for unit in units:
            self._users.pop(unit, None)
            if unit in self._blocks:
                self._free(unit)

    def broadcast_gathered(self, units: Iterable[int]) -> None:
        """Broadcast rank 0's values of gathered units, and take this rank's shares from them. Collective."""
        for unit in units:
            start, stop = self._extents[unit]
            cuts, block = self._cuts[unit], self._blocks[unit][: stop - start]
            self.axis.broadcast(block, label="parameters")
            self.share(unit)[...] = block[cuts[self.axis.rank] : cuts[self.axis.rank + 1]]

    def compare_order(self) -> None:
        """Raise CollectiveMismatchError on all ranks if they have gathered other units. Collective."""
        marks = self.axis.all_reduce(np.array(self.order.marks), op="max", label="control")
        if marks.sum():
            raise self.order.difference(self.axis)

    def abandon(self) -> None:
        """Abandon the gathers under way, after their communicators were revoked."""
        for pending in self._pending.values():
            pending.abandon()
        self._pending.clear()

    def gather(self, flat: Array) -> None:
        """Fill a flat array of all parameters, unit by unit."""
        for unit, (start, stop) in enumerate(self._extents):
            self.axis.all_gather(flat[start:stop], self.share(unit), run_lengths(self._cuts[unit]), label="parameters")

    def rewrite(self, change: Callable[[Array, int, int], None]) -> None:
        """Gather each unit into `block`, change its tensors by ``change(block, first, last)``, and keep the share.

        `first` and `last` (exclusive) are its tensors.
        """
        self.free_all()
        for unit, ((first, last), (start, stop)) in enumerate(zip(self._units, self._extents, strict=True)):
            block = arrays.empty(stop - start, self._like.dtype, like=self._like)
            cuts = self._cuts[unit]
            self.axis.all_gather(block, self.share(unit), run_lengths(cuts), label="parameters")
            change(block, first, last)
            self.share(unit)[...] = block[cuts[self.axis.rank] : cuts[self.axis.rank + 1]]

    def _note(self, unit: int) -> None:
        """Note the next gather; in debug mode compare it with those of the other ranks."""
        first, last = self._units[unit]
        if self.axis.size == 1 or first == last:
            return
        self.order.note(self._pieces[first].name)
        if self.axis.compares_calls:
            self.compare_order()

    def _wait(self, unit: int) -> Array:
        """Wait for a gather.  Raises CollectiveMismatchError if MPI says that other ranks gather a longer unit.

        Of units of one size MPI says nothing, nor MPICH of others: `GatherOrder` finds these.
        """
        try:
            return self._pending.pop(unit).wait()
        except Exception as error:
            if not is_truncation(error):
                raise
            raise CollectiveMismatchError(
                f"this rank gathers the unit of {self._pieces[self._units[unit][0]].name!r}, and another a longer one "
                f"(zero=3; MPI: message truncated).  {_ONE_ORDER}; MPISHARD_DEBUG=1 names the units of all ranks"
            ) from error

    def _free(self, unit: int) -> None:
        if unit in self._pending:
            self._wait(unit)
        first, last = self._units[unit]
        for piece in self._pieces[first:last]:
            self.views.pop(piece.name, None)
        del self._blocks[unit]
        self.memory.release(unit)
