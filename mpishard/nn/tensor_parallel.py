"""Communication of rows and columns over the tensor axis: pairs of operations that are each other's adjoint.

Shoeybi et al., "Megatron-LM" (2019), section 3, and for rows split over the ranks (sequence parallelism) Korthikanti
et al. (2022), section 4.2.  An array over the axis is one of three things:

* *replicated*: every rank holds the same values, which count once;
* *split*: every rank holds some rows or columns;
* *apart*: every rank computes with values of its own, such as the terms of a sum.

The inner product of two arrays is that of one rank where both are replicated, and else the sum over the ranks.  With
these, ``backward`` is the adjoint of ``forward`` for every pair here.  All are collective over the axis; with one rank
they return their argument.

`rows` is the number of rows of the whole array, and ``memory(*shape)`` gives the array for a result where one is
needed.  Axes: n rows, c columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from mpishard.backend.array import module_of
from mpishard.comm.axis import Axis
from mpishard.layout.boxes import counts, split

Array = Any
Memory = Callable[..., Array]

FORWARD, BACKWARD = "activations", "activation gradients"


class AdjointPair(ABC):
    """An operation and its adjoint over the tensor axis.

    Parameters
    ----------
    axis : Axis
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.rank: int = axis.rank
        self.size: int = axis.size

    @abstractmethod
    def forward(self, x_nc: Array, rows: int, memory: Memory) -> Array: ...

    @abstractmethod
    def backward(self, dy_nc: Array, rows: int, memory: Memory) -> Array:
        """The adjoint; it may overwrite `dy`."""

    def _sum(self, x_nc: Array, label: str) -> Array:
        if self.size > 1:
            self.axis.all_reduce(x_nc, label=label)
        return x_nc

    def _gather_rows(self, x_nc: Array, rows: int, memory: Memory, label: str) -> Array:
        if self.size == 1:
            return x_nc
        out_nc = memory(rows, x_nc.shape[1])
        self.axis.all_gather(out_nc, x_nc, self._elements(rows, x_nc.shape[1]), label=label)
        return out_nc

    def _reduce_scatter_rows(self, x_nc: Array, rows: int, memory: Memory, label: str) -> Array:
        if self.size == 1:
            return x_nc
        elements = self._elements(rows, x_nc.shape[1])
        out_nc = memory(counts(split(rows, self.size))[self.rank], x_nc.shape[1])
        self.axis.reduce_scatter(x_nc, out_nc, elements, label=label)
        return out_nc

    def _elements(self, rows: int, columns: int) -> list[int]:
        return [count * columns for count in counts(split(rows, self.size))]


class Copy(AdjointPair):
    """Replicated to apart: the identity; backward sums over the ranks, in place."""

    def forward(self, x_nc: Array, rows: int, memory: Memory) -> Array:
        return x_nc

    def backward(self, dy_nc: Array, rows: int, memory: Memory) -> Array:
        return self._sum(dy_nc, BACKWARD)


class Reduce(AdjointPair):
    """Apart to replicated: sums over the ranks, in place; backward is the identity."""

    def forward(self, x_nc: Array, rows: int, memory: Memory) -> Array:
        return self._sum(x_nc, FORWARD)

    def backward(self, dy_nc: Array, rows: int, memory: Memory) -> Array:
        return dy_nc


class GatherRows(AdjointPair):
    """Split by rows to apart, all rows on every rank; backward sums over the ranks and keeps the own rows."""

    def forward(self, x_nc: Array, rows: int, memory: Memory) -> Array:
        return self._gather_rows(x_nc, rows, memory, FORWARD)

    def backward(self, dy_nc: Array, rows: int, memory: Memory) -> Array:
        return self._reduce_scatter_rows(dy_nc, rows, memory, BACKWARD)


class ReduceScatterRows(AdjointPair):
    """Apart to split by rows: sums over the ranks and keeps the own rows; backward gathers."""

    def forward(self, x_nc: Array, rows: int, memory: Memory) -> Array:
        return self._reduce_scatter_rows(x_nc, rows, memory, FORWARD)

    def backward(self, dy_nc: Array, rows: int, memory: Memory) -> Array:
        return self._gather_rows(dy_nc, rows, memory, BACKWARD)


class GatherColumns(AdjointPair):
    """Split by columns to replicated; backward keeps the own columns.

    Parameters
    ----------
    columns : int
        Of the whole array, cut as `mpishard.layout.boxes.split` does.
    """

    def __init__(self, axis: Axis, columns: int) -> None:
        super().__init__(axis)
        self.cuts: list[int] = split(columns, self.size)

    def forward(self, x_nc: Array, rows: int, memory: Memory) -> Array:
        return _join_columns(self, self.cuts, x_nc, rows, memory, FORWARD)

    def backward(self, dy_nc: Array, rows: int, memory: Memory) -> Array:
        return _own_columns(self, self.cuts, dy_nc, memory)


class ScatterColumns(AdjointPair):
    """Replicated to split by columns; backward gathers.  `columns` as for `GatherColumns`."""

    def __init__(self, axis: Axis, columns: int) -> None:
        super().__init__(axis)
        self.cuts: list[int] = split(columns, self.size)

    def forward(self, x_nc: Array, rows: int, memory: Memory) -> Array:
        return _own_columns(self, self.cuts, x_nc, memory)

    def backward(self, dy_nc: Array, rows: int, memory: Memory) -> Array:
        return _join_columns(self, self.cuts, dy_nc, rows, memory, BACKWARD)


def _own_columns(pair: AdjointPair, cuts: Sequence[int], x_nc: Array, memory: Memory) -> Array:
    if pair.size == 1:
        return x_nc
    first, last = cuts[pair.rank], cuts[pair.rank + 1]
    own_nc = memory(len(x_nc), last - first)
    own_nc[...] = x_nc[:, first:last]
    return own_nc


def _join_columns(pair: AdjointPair, cuts: Sequence[int], x_nc: Array, rows: int, memory: Memory, label: str) -> Array:
    if pair.size == 1:
        return x_nc
    joined_nc = memory(rows, cuts[-1])
    # The pieces of a rank are strided in the whole array: they arrive one after the other and are sorted in.
    arrived = module_of(x_nc).empty(rows * cuts[-1], x_nc.dtype)
    pair.axis.all_gather(arrived, x_nc, [rows * count for count in counts(cuts)], label=label)
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

    Attributes
    ----------
    rank, size : int
    splits_rows : bool
        Whether a rank holds some of the rows only.
    enter : AdjointPair
        From the rows of a rank to all rows, before a column-parallel layer.
    leave : AdjointPair
        From the terms of a row-parallel layer to the rows of a rank.
    """

    def __init__(self, axis: Axis | None = None, sequence_parallel: bool = False) -> None:
        self.axis: Axis = Axis.single("tensor") if axis is None else axis
        self.rank: int = self.axis.rank
        self.size: int = self.axis.size
        self.splits_rows: bool = sequence_parallel and self.size > 1
        self.enter: AdjointPair = GatherRows(self.axis) if self.splits_rows else Copy(self.axis)
        self.leave: AdjointPair = ReduceScatterRows(self.axis) if self.splits_rows else Reduce(self.axis)

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
        return counts(split(rows, self.size))[self.rank] if self.splits_rows else rows


ALONE = TensorParallel()
