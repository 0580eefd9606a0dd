"""The slices of a model on one rank of the tensor axis, and the communication of rows and columns over it.

Operations come in pairs, each the other's adjoint (Shoeybi et al., "Megatron-LM", 2019, section 3; for rows split over
the ranks Korthikanti et al., 2022, section 4.2).  An array is *replicated* (the same on every rank, counted once),
*sharded* (every rank holds some rows or columns) or *partial* (the terms of a sum that is still to come); inner
products of the last two are summed over ranks.  All are collective over the axis; with one rank they return their
argument.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from mpishard.backend.array import module_of
from mpishard.backend.row_sums import add_by_tree
from mpishard.comm.axis import Axis
from mpishard.layout.boxes import nested_split, run_lengths, split
from mpishard.nn.workspace import Pool
from mpishard.reduction.tree_sum import TreeNode, sort_by_owner, tree_merges, tree_nodes

Array = Any


# A model of S shards is cut into S slices of heads, hidden channels and vocabulary, whatever the tensor size is. Each
# tensor rank computes a run of slices one by one, so that every product has the same shape on any tensor size, and BLAS
# the same bits. Sums over slices follow the tree of `mpishard.reduction.tree_sum`, inside a rank and by exchanges
# across ranks. A model of one shard has one slice on each tensor rank; MPI takes the sums over these in its own order.
# An array that is split by columns has the shape (rows, columns of this rank), and its memory holds one slice after the
# other.


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

    def column_slices(self, x_nc: Array, columns: int) -> Sequence[Array]:
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
        pieces = run_lengths(split(total.size, axis.size))
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
        mine, count, source = len(partial), pieces[axis.rank], partial[0].reshape(-1)
        if mine != 1:
            source = self._memory("partial sums that leave", mine * sum(pieces), partial[0])
            sort_by_owner([each.reshape(-1) for each in partial], pieces, source)
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

    def _memory(self, name: str, size: int, like: Array) -> Array:
        if self._scratch is None:
            self._scratch = Pool.like(like)
        return self._scratch(name, (size,), like.dtype)


@functools.lru_cache(maxsize=256)
def nodes_by_rank(total: int, ranks: int) -> Sequence[Sequence[TreeNode]]:
    """The nodes that each rank adds up, of the tree over `total` slices, a multiple of `ranks`."""
    each = total // ranks
    return [tree_nodes(rank * each, (rank + 1) * each, total) for rank in range(ranks)]


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
    return tree_merges([TreeNode(term, term + 1) for term in range(start, stop)], total)


# Pairs of operations over the axis. What is partial is, on each rank, one array for each sum of its slices
# (`Slices.add`): a sequence of arrays as an argument, one array for all as a result. `rows` counts those of the whole
# array, ``memory(*shape)`` gives the array for a result. Axes: n rows, c columns.

Memory = Callable[..., Array]

FORWARD, BACKWARD = "activations", "activation gradients"


class AdjointPair(ABC):
    """An operation and its adjoint over the tensor axis; sums are taken over `slices`, by default one a rank."""

    def __init__(self, axis: Axis, slices: Slices | None = None) -> None:
        self.axis = axis
        self.slices: Slices = Slices(axis) if slices is None else slices
        self.rank: int = axis.rank
        self.size: int = axis.size

    @abstractmethod
    def forward(self, x_nc: Any, rows: int, memory: Memory) -> Array: ...

    @abstractmethod
    def backward(self, dy_nc: Any, rows: int, memory: Memory) -> Array:
        """The adjoint; it may overwrite `dy`."""

    def _gather_rows(self, x_nc: Array, rows: int, memory: Memory, label: str) -> Array:
        if self.size == 1:
            return x_nc
        out_nc = memory(rows, x_nc.shape[1])
        self.axis.all_gather(out_nc, x_nc, self._elements(rows, x_nc.shape[1]), label=label)
        return out_nc

    def _reduce_scatter_rows(self, terms_nc: Sequence[Array], rows: int, memory: Memory, label: str) -> Array:
        if self.size == 1:
            return terms_nc[0]
        columns = terms_nc[0].shape[1]
        elements = self._elements(rows, columns)
        out_nc = memory(run_lengths(self.slices.rank_cuts(rows))[self.rank], columns)
        return self.slices.reduce_scatter(terms_nc, out_nc, elements, label)

    def _elements(self, rows: int, columns: int) -> list[int]:
        return [count * columns for count in run_lengths(self.slices.rank_cuts(rows))]


class Copy(AdjointPair):
    """Replicated to partial: the identity; backward sums over the ranks, in place."""

    def forward(self, x_nc: Array, rows: int, memory: Memory) -> Array:
        return x_nc

    def backward(self, dy_nc: Sequence[Array], rows: int, memory: Memory) -> Array:
        return self.slices.all_reduce(dy_nc, BACKWARD)


class Reduce(AdjointPair):
    """Partial to replicated: sums over the ranks, in place; backward is the identity."""

    def forward(self, x_nc: Sequence[Array], rows: int, memory: Memory) -> Array:
        return self.slices.all_reduce(x_nc, FORWARD)

    def backward(self, dy_nc: Array, rows: int, memory: Memory) -> Array:
        return dy_nc


class GatherRows(AdjointPair):
    """Sharded by rows to partial, all rows on every rank; backward sums over the ranks and keeps the own rows."""

    def forward(self, x_nc: Array, rows: int, memory: Memory) -> Array:
        return self._gather_rows(x_nc, rows, memory, FORWARD)

    def backward(self, dy_nc: Sequence[Array], rows: int, memory: Memory) -> Array:
        return self._reduce_scatter_rows(dy_nc, rows, memory, BACKWARD)


class ReduceScatterRows(AdjointPair):
    """Partial to sharded by rows: sums over the ranks and keeps the own rows; backward gathers."""

    def forward(self, x_nc: Sequence[Array], rows: int, memory: Memory) -> Array:
        return self._reduce_scatter_rows(x_nc, rows, memory, FORWARD)

    def backward(self, dy_nc: Array, rows: int, memory: Memory) -> Array:
        return self._gather_rows(dy_nc, rows, memory, BACKWARD)


class _ColumnPair(AdjointPair):
    """Sharded by columns at one end.

    `columns` of the whole array are cut into slices as `mpishard.layout.boxes.split` does.
    """

    def __init__(self, axis: Axis, columns: int, slices: Slices | None = None) -> None:
        super().__init__(axis, slices)
        self.columns: int = columns

    def _own_columns(self, x_nc: Array, memory: Memory) -> Array:
        slices = self.slices
        if slices.total == 1:
            return x_nc
        cuts = split(self.columns, slices.total)
        own_nc = memory(len(x_nc), cuts[slices.own.stop] - cuts[slices.own.start])
        for number, part_nc in zip(slices.own, slices.column_slices(own_nc, self.columns), strict=True):
            part_nc[...] = x_nc[:, cuts[number] : cuts[number + 1]]
        return own_nc

    def _join_columns(self, x_nc: Array, rows: int, memory: Memory, label: str) -> Array:
        slices = self.slices
        if slices.total == 1:
            return x_nc
        joined_nc = memory(rows, self.columns)
        # The slices are strided in the whole array: they arrive one after the other and are sorted in.
        arrived = x_nc.reshape(-1)
        if self.size > 1:
            counts = [rows * count for count in run_lengths(slices.rank_cuts(self.columns))]
            arrived = module_of(x_nc).empty(rows * self.columns, x_nc.dtype)
            self.axis.all_gather(arrived, x_nc, counts, label=label)
        cuts = split(self.columns, slices.total)
        for first, last in zip(cuts[:-1], cuts[1:], strict=True):
            joined_nc[:, first:last] = arrived[rows * first : rows * last].reshape(rows, last - first)
        return joined_nc


class GatherColumns(_ColumnPair):
    """Sharded by columns to replicated; backward keeps the own columns."""

    def forward(self, x_nc: Array, rows: int, memory: Memory) -> Array:
        return self._join_columns(x_nc, rows, memory, FORWARD)

    def backward(self, dy_nc: Array, rows: int, memory: Memory) -> Array:
        return self._own_columns(dy_nc, memory)


class ScatterColumns(_ColumnPair):
    """Replicated to sharded by columns; backward gathers."""

    def forward(self, x_nc: Array, rows: int, memory: Memory) -> Array:
        return self._own_columns(x_nc, memory)

    def backward(self, dy_nc: Array, rows: int, memory: Memory) -> Array:
        return self._join_columns(dy_nc, rows, memory, BACKWARD)


class TensorParallel:
    """The tensor axis, as layers use it.

    `enter` and `leave` are collective over the axis.

    Parameters
    ----------
    axis : Axis, optional
        The tensor axis of the mesh; default: `Axis.single`.
    sequence_parallel : bool
        Between the parts of a network that are split by columns, rows are split over the ranks instead of replicated.
    shards : int
        Number of slices by which the network is defined, see `mpishard.nn.Architecture`; the tensors that are split
        must have as many `ParameterSpec.slices`.
    scratch : Pool, optional
        As for `mpishard.nn.tensor_parallel.Slices`.

    Attributes
    ----------
    rank, size : int
    slices : Slices
    splits_rows : bool
        Whether a rank holds some of the rows only.
    enter : AdjointPair
        From the rows of a rank to all rows, before a column-parallel layer.
    leave : AdjointPair
        From the terms of a row-parallel layer to the rows of a rank.
    leave_exactly : AdjointPair
        The same for one array of each rank whose sum has the same bits in any order, as of rows of a table each of
        which one rank has.
    """

    def __init__(
        self,
        axis: Axis | None = None,
        sequence_parallel: bool = False,
        shards: int = 1,
        scratch: Pool | None = None,
    ) -> None:
        self.axis: Axis = Axis.single("tensor") if axis is None else axis
        self.rank: int = self.axis.rank
        self.size: int = self.axis.size
        self.splits_rows: bool = sequence_parallel and self.size > 1
        self.slices: Slices = Slices(self.axis, shards, scratch)
        enter, leave = (GatherRows, ReduceScatterRows) if self.splits_rows else (Copy, Reduce)
        self.enter: AdjointPair = enter(self.axis, self.slices)
        self.leave: AdjointPair = leave(self.axis, self.slices)
        self.leave_exactly: AdjointPair = leave(self.axis, Slices(self.axis, shards, exact=True))

    def rows(self, rows: int) -> int:
        """The number of rows of an array that this rank holds.

        Parameters
        ----------
        rows : int
            Rows of the whole array.

        Returns
        -------
        int
            All, or this rank's share if rows are split.
        """
        return run_lengths(self.slices.rank_cuts(rows))[self.rank] if self.splits_rows else rows

    def first_row(self, rows: int) -> int:
        """The number of the first row of an array that this rank holds.

        Parameters
        ----------
        rows : int
            Rows of the whole array.

        Returns
        -------
        int
            0, unless rows are split.
        """
        return self.slices.rank_cuts(rows)[self.rank] if self.splits_rows else 0

    def sum_row_blocks(self, rows: int, term: Callable[[slice, Array], Any], memory: Callable[[int], Array]) -> Array:
        """A sum over rows as the sum of canonical blocks, along the tree over the slices.

        Collective over the axis if rows are split, in every backward pass of a micro-batch: were the blocks of a rank
        summed over micro-batches first, the order would depend on the ranks.

        Parameters
        ----------
        rows : int
            Rows of the whole array.
        term : callable
            ``term(block, out)`` writes the sum over some of this rank's rows.
        memory : callable
            As for `mpishard.nn.tensor_parallel.Slices.add`.

        Returns
        -------
        array
            The sum over all rows, on every rank, in the first array of `memory`.
        """
        blocks = self.slices.row_blocks(rows, self.splits_rows)
        partial = self.slices.add(lambda index, out: term(blocks[index], out), memory, whole=not self.splits_rows)
        return self.slices.all_reduce(partial, "gradients") if self.splits_rows else partial[0]


ALONE = TensorParallel()
