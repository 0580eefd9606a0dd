"""Communication of rows and columns over the tensor axis: pairs of operations that are each other's adjoint.

Shoeybi et al., "Megatron-LM" (2019), section 3; for rows split over the ranks Korthikanti et al. (2022), section 4.2.
An array is *replicated* (the same on every rank, counted once), *split* (every rank holds some rows or columns) or
*apart* (separate values, such as terms of a sum); inner products of the last two are summed over ranks. All are
collective over the axis; with one rank they return their argument.

What is apart is, on each rank, one array for each sum of its slices (`mpishard.nn.slices.Slices.add`): a sequence of
arrays as an argument, one array for all as a result. `rows` counts those of the whole array, ``memory(*shape)`` gives
the array for a result. Axes: n rows, c columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from mpishard.backend.array import module_of
from mpishard.comm.axis import Axis
from mpishard.layout.boxes import counts, split
from mpishard.nn.slices import Slices
from mpishard.nn.workspace import Pool

Array = Any
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
        out_nc = memory(counts(self.slices.rank_cuts(rows))[self.rank], columns)
        return self.slices.reduce_scatter(terms_nc, out_nc, elements, label)

    def _elements(self, rows: int, columns: int) -> list[int]:
        return [count * columns for count in counts(self.slices.rank_cuts(rows))]


class Copy(AdjointPair):
    """Replicated to apart: the identity; backward sums over the ranks, in place."""

    def forward(self, x_nc: Array, rows: int, memory: Memory) -> Array:
        return x_nc

    def backward(self, dy_nc: Sequence[Array], rows: int, memory: Memory) -> Array:
        return self.slices.all_reduce(dy_nc, BACKWARD)


class Reduce(AdjointPair):
    """Apart to replicated: sums over the ranks, in place; backward is the identity."""

    def forward(self, x_nc: Sequence[Array], rows: int, memory: Memory) -> Array:
        return self.slices.all_reduce(x_nc, FORWARD)

    def backward(self, dy_nc: Array, rows: int, memory: Memory) -> Array:
        return dy_nc


class GatherRows(AdjointPair):
    """Split by rows to apart, all rows on every rank; backward sums over the ranks and keeps the own rows."""

    def forward(self, x_nc: Array, rows: int, memory: Memory) -> Array:
        return self._gather_rows(x_nc, rows, memory, FORWARD)

    def backward(self, dy_nc: Sequence[Array], rows: int, memory: Memory) -> Array:
        return self._reduce_scatter_rows(dy_nc, rows, memory, BACKWARD)


class ReduceScatterRows(AdjointPair):
    """Apart to split by rows: sums over the ranks and keeps the own rows; backward gathers."""

    def forward(self, x_nc: Sequence[Array], rows: int, memory: Memory) -> Array:
        return self._reduce_scatter_rows(x_nc, rows, memory, FORWARD)

    def backward(self, dy_nc: Array, rows: int, memory: Memory) -> Array:
        return self._gather_rows(dy_nc, rows, memory, BACKWARD)


class GatherColumns(AdjointPair):
    """Split by columns to replicated; backward keeps the own columns.

    `columns` of the whole array are cut into slices as `mpishard.layout.boxes.split` does.
    """

    def __init__(self, axis: Axis, columns: int, slices: Slices | None = None) -> None:
        super().__init__(axis, slices)
        self.columns: int = columns

    def forward(self, x_nc: Array, rows: int, memory: Memory) -> Array:
        return _join_columns(self, self.columns, x_nc, rows, memory, FORWARD)

    def backward(self, dy_nc: Array, rows: int, memory: Memory) -> Array:
        return _own_columns(self, self.columns, dy_nc, memory)


class ScatterColumns(AdjointPair):
    """Replicated to split by columns; backward gathers.  `columns` and `slices` as for `GatherColumns`."""

    def __init__(self, axis: Axis, columns: int, slices: Slices | None = None) -> None:
        super().__init__(axis, slices)
        self.columns: int = columns

    def forward(self, x_nc: Array, rows: int, memory: Memory) -> Array:
        return _own_columns(self, self.columns, x_nc, memory)

    def backward(self, dy_nc: Array, rows: int, memory: Memory) -> Array:
        return _join_columns(self, self.columns, dy_nc, rows, memory, BACKWARD)


def _own_columns(pair: AdjointPair, columns: int, x_nc: Array, memory: Memory) -> Array:
    slices = pair.slices
    if slices.total == 1:
        return x_nc
    cuts = split(columns, slices.total)
    own_nc = memory(len(x_nc), cuts[slices.own.stop] - cuts[slices.own.start])
    for number, part_nc in zip(slices.own, slices.apart(own_nc, columns), strict=True):
        part_nc[...] = x_nc[:, cuts[number] : cuts[number + 1]]
    return own_nc


def _join_columns(pair: AdjointPair, columns: int, x_nc: Array, rows: int, memory: Memory, label: str) -> Array:
    slices = pair.slices
    if slices.total == 1:
        return x_nc
    joined_nc = memory(rows, columns)
    # The slices are strided in the whole array: they arrive one after the other and are sorted in.
    arrived = x_nc.reshape(-1)
    if pair.size > 1:
        arrived = module_of(x_nc).empty(rows * columns, x_nc.dtype)
        pair.axis.all_gather(arrived, x_nc, [rows * count for count in counts(slices.rank_cuts(columns))], label=label)
    cuts = split(columns, slices.total)
    for first, last in zip(cuts[:-1], cuts[1:], strict=True):
        joined_nc[:, first:last] = arrived[rows * first : rows * last].reshape(rows, last - first)
    return joined_nc


class TensorParallel:
    """The tensor axis, as layers use it.

    Not collective; `enter` and `leave` are, over the axis.

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
        As for `mpishard.nn.slices.Slices`.

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
        return counts(self.slices.rank_cuts(rows))[self.rank] if self.splits_rows else rows

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
            As for `mpishard.nn.slices.Slices.add`.

        Returns
        -------
        array
            The sum over all rows, on every rank, in the first array of `memory`.
        """
        blocks = self.slices.row_blocks(rows, self.splits_rows)
        partial = self.slices.add(lambda index, out: term(blocks[index], out), memory, whole=not self.splits_rows)
        return self.slices.all_reduce(partial, "gradients") if self.splits_rows else partial[0]


ALONE = TensorParallel()
