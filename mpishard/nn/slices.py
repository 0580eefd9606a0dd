"""The slices of a model on one rank of the tensor axis, and sums over them in the order of a fixed tree.

A model of S shards is cut into S slices of heads, hidden channels and vocabulary, whatever the tensor size is. Each
tensor rank computes a run of slices one by one, so that every product has the same shape on any tensor size, and BLAS
the same bits. Sums over slices follow the tree of `mpishard.reduction.tree_sum`, inside a rank and by exchanges across
ranks. A model of one shard has one slice on each tensor rank; MPI takes the sums over these in its own order.

An array that is split by columns has the shape (rows, columns of this rank), and its memory holds one slice after the
other, each as contiguous rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from mpishard.comm.axis import Axis
from mpishard.layout.boxes import counts, nested_split, split
from mpishard.nn.workspace import Pool
from mpishard.reduction.tree_sum import Node, add_by_tree, nodes, sort_by_owner, tree_merges

Array = Any


class Slices:
    """The slices of this rank, of a model of `shards` shards: 1, or a multiple of the size of the tensor axis.

    With `exact`, only sums are taken whose bits do not depend on the order, so that MPI may choose it. `scratch` is
    memory for parts of sums that arrive from other ranks.
    """

    def __init__(self, axis: Axis, shards: int = 1, scratch: Pool | None = None, *, exact: bool = False) -> None:
        self.shards: int = shards
        self.ordered: bool = shards > 1  # the order of sums is fixed
        self.total: int = shards if self.ordered else axis.size  # slices of all ranks
        assert self.total % axis.size == 0
        each = self.total // axis.size
        self.own: range = range(axis.rank * each, (axis.rank + 1) * each)  # the slices of this rank
        self._axis = axis
        self._scratch = scratch
        self._nodes = nodes_by_rank(self.total, axis.size)
        self._times = tree_merges([node for theirs in self._nodes for node in theirs], self.total)
        self._by_mpi = exact or summed_by_mpi(shards, axis.size)

    # -- slices of arrays -------------------------------------------------------------------------------------------

    def rank_cuts(self, extent: int) -> list[int]:
        """Offsets that cut a whole dimension into the runs of the ranks: one more than there are ranks."""
        return nested_split(extent, self._axis.size, self.shards)

    def offsets(self, extent: int) -> list[int]:
        """Where the slices of this rank begin in its part of a dimension, and the last one ends."""
        cuts = split(extent, self.total)[self.own.start : self.own.stop + 1]
        return [cut - cuts[0] for cut in cuts]

    def cut(self, array: Array, extent: int, dim: int) -> Sequence[Array]:
        """The slices of this rank's part of a parameter or its gradient, as views, one for each of `own`.

        `extent` is that of the whole dimension `dim`, which is split.
        """
        if len(self.own) == 1:
            return (array,)
        offsets = self.offsets(extent)
        before = (slice(None),) * dim
        return [array[(*before, slice(*ends))] for ends in zip(offsets[:-1], offsets[1:], strict=True)]

    def apart(self, x_nc: Array, columns: int) -> Sequence[Array]:
        """The slices of an array that is split by columns, as views of contiguous rows, one for each of `own`.

        `columns` counts those of all ranks.
        """
        if len(self.own) == 1:
            return (x_nc,)
        rows, offsets, flat = len(x_nc), self.offsets(columns), x_nc.reshape(-1)
        return [
            flat[rows * start : rows * stop].reshape(rows, stop - start)
            for start, stop in zip(offsets[:-1], offsets[1:], strict=True)
        ]

    def row_blocks(self, rows: int, splits_rows: bool) -> list[slice]:
        """The blocks over which sums over rows are taken, among the rows that this rank holds of `rows`.

        There is one for each slice of the model; with `splits_rows`, where this rank holds the rows of its blocks only,
        one for each of `own`.
        """
        cuts = self.offsets(rows) if splits_rows else split(rows, self.total)
        return [slice(*ends) for ends in zip(cuts[:-1], cuts[1:], strict=True)]

    # -- sums -------------------------------------------------------------------------------------------------------

    def add(
        self, term: Callable[[int, Array], Any], memory: Callable[[int], Array], whole: bool = False
    ) -> Sequence[Array]:
        """Add up the terms of this rank's slices, along the tree over all slices.

        ``term(index, out)`` writes the term of this rank's slice `index`; ``memory(depth)`` gives the array for the
        term or sum at a place on the stack, the same at every call. With `whole` every rank has a term for every slice
        of the model. Returns one sum for each node of the tree of which this rank has all terms.
        """
        stack: list[Array] = []
        merges = _merges(0, self.total, self.total) if whole else _merges(self.own.start, self.own.stop, self.total)
        for index, times in enumerate(merges):
            out = memory(len(stack))
            term(index, out)
            stack.append(out)
            for _ in range(times):
                upper = stack.pop()
                stack[-1] += upper
        return stack

    def all_reduce(self, partial: Sequence[Array], label: str) -> Array:
        """The sum over the ranks of the sums of `add`, on every rank, in the first of `partial`; all are overwritten.

        Collective over the axis; `label` is for the ledger.
        """
        axis, total = self._axis, partial[0]
        if axis.size == 1:
            return total
        if self._by_mpi:
            axis.all_reduce(total, label=label)
            return total
        pieces = counts(split(total.size, axis.size))
        start = sum(pieces[: axis.rank])
        self.reduce_scatter(partial, total.reshape(-1)[start : start + pieces[axis.rank]], pieces, label)
        axis.all_gather(total, counts=pieces, label=label)
        return total

    def reduce_scatter(self, partial: Sequence[Array], out: Array, pieces: Sequence[int], label: str) -> Array:
        """This rank's piece of the sum over the ranks of the sums of `add`, in `out`, which may be the first of
        `partial`.

        Collective over the axis; `pieces` has the elements of each rank's piece, `label` is for the ledger.
        """
        axis = self._axis
        if self._by_mpi:
            axis.reduce_scatter(partial[0], out, pieces, label=label)
            return out
        mine, count = len(partial), pieces[axis.rank]
        source = partial[0].reshape(-1) if mine == 1 else self._pack(partial, pieces)
        rows = [0 if rank == axis.rank else len(theirs) for rank, theirs in enumerate(self._nodes)]
        received = self._memory("partial sums that arrive", sum(rows) * count, out)
        axis.all_to_all(
            source,
            received,
            [mine * each for each in pieces],
            [each * count for each in rows],
            keep_own=True,
            label=label,
        )
        own = source[mine * sum(pieces[: axis.rank]) :]
        before, after = sum(rows[: axis.rank]), sum(rows)
        starts = [row * count for row in range(before)]
        starts += [-1 - row * count for row in range(mine)]
        starts += [row * count for row in range(before, after)]
        add_by_tree(own, received, starts, self._times, out.reshape(-1))
        return out

    def _pack(self, partial: Sequence[Array], pieces: Sequence[int]) -> Array:
        """The partial sums, sorted by owner, in one array."""
        block = self._memory("partial sums that leave", len(partial) * sum(pieces), partial[0])
        sort_by_owner([each.reshape(-1) for each in partial], pieces, block)
        return block

    def _memory(self, name: str, size: int, like: Array) -> Array:
        if self._scratch is None:
            self._scratch = Pool.like(like)
        return self._scratch(name, (size,), like.dtype)


@functools.lru_cache(maxsize=256)
def nodes_by_rank(total: int, ranks: int) -> Sequence[Sequence[Node]]:
    """The nodes that each rank adds up, of the tree over `total` slices, a multiple of `ranks`."""
    each = total // ranks
    return [nodes(rank * each, (rank + 1) * each, total) for rank in range(ranks)]


def summed_by_mpi(shards: int, ranks: int) -> bool:
    """Return True if MPI may take the sums over ranks: the order is free, or there are two terms.

    The sum of two numbers has the same bits in both orders.
    """
    return shards == 1 or (ranks == 2 and all(len(each) == 1 for each in nodes_by_rank(shards, ranks)))


def most_sums(start: int, stop: int, total: int) -> int:
    """The largest number of sums that `Slices.add` keeps at a time for a run of slices of a tree over `total`."""
    depth = most = 0
    for times in _merges(start, stop, total):
        depth += 1
        most = max(most, depth)
        depth -= times
    return most


@functools.lru_cache(maxsize=256)
def _merges(start: int, stop: int, total: int) -> Sequence[int]:
    """The merges with which the terms ``[start, stop)`` are added up."""
    return tree_merges([Node(term, term + 1) for term in range(start, stop)], total)
