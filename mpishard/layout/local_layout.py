"""What one rank holds: pieces of global tensors in a flat buffer.  Only this file turns ranks into offsets.

A *piece* is a box and its start in a rank's flat buffer; in the buffer a box is stored in row-major order.  The *local
layout* of a rank is the tuple of its pieces; a *layout* is a sequence of local layouts, one per rank.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from mpishard.layout.boxes import Box, box_shape, box_size, boxes_of_range, nested_split
from mpishard.layout.specs import ParameterSpec


@dataclass(frozen=True)
class Piece:
    """A box of a global tensor, stored row-major in a flat buffer.

    Parameters
    ----------
    name : str
        Of the tensor.
    box : tuple of (int, int)
        Start and stop in each dimension of the global tensor.
    start : int
        The element of the buffer at which it begins.
    """

    name: str
    box: Box
    start: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of the box."""
        return box_shape(self.box)

    @property
    def size(self) -> int:
        """Number of elements of the box."""
        return box_size(self.box)


@dataclass(frozen=True)
class ModelParallelRank:
    """The tensor and pipeline ranks of a rank, which decide which parameters it holds.

    Parameters
    ----------
    tensor_rank, tensor_size : int
        On the tensor axis.
    pipeline_rank, pipeline_size : int
        On the pipeline axis.
    """

    tensor_rank: int = 0
    tensor_size: int = 1
    pipeline_rank: int = 0
    pipeline_size: int = 1

    def runner(self, stage: int) -> int:
        """The pipeline rank that runs a stage.

        Parameters
        ----------
        stage : int
            Virtual stage.

        Returns
        -------
        int
            The stage modulo the number of pipeline ranks.
        """
        return stage % self.pipeline_size

    def runs(self, stage: int) -> bool:
        """Whether this rank runs a stage.

        Parameters
        ----------
        stage : int
            Virtual stage.

        Returns
        -------
        bool
            The same on all tensor ranks.
        """
        return self.runner(stage) == self.pipeline_rank

    def holders(self, spec: ParameterSpec) -> list[int]:
        """The pipeline ranks that hold a tensor.

        Parameters
        ----------
        spec : ParameterSpec
            Of the tensor.

        Returns
        -------
        list of int
            Ascending; several if the tensor is tied.
        """
        return sorted({self.runner(stage) for stage in (spec.stage, *spec.copies)})

    def holds(self, spec: ParameterSpec) -> bool:
        """Whether this rank holds a tensor or a slice of it.

        Parameters
        ----------
        spec : ParameterSpec
            Of the tensor.

        Returns
        -------
        bool
            The same on all tensor ranks.
        """
        return self.pipeline_rank in self.holders(spec)

    def box(self, spec: ParameterSpec) -> Box:
        """The slice of a tensor that belongs to this rank of the tensor axis.

        Parameters
        ----------
        spec : ParameterSpec
            Of the tensor.

        Returns
        -------
        Box
            All of it for a tensor that is not split.

        Raises
        ------
        ValueError
            If the tensor is cut into several slices, and the tensor size does not divide their number.
        """
        if spec.tensor_dim is None:
            return spec.box
        try:
            cuts = nested_split(spec.shape[spec.tensor_dim], self.tensor_size, spec.slices)
        except ValueError as error:
            raise ValueError(f"parameter {spec.name!r}: {error}") from None
        box = list(spec.box)
        box[spec.tensor_dim] = (cuts[self.tensor_rank], cuts[self.tensor_rank + 1])
        return tuple(box)

    def counts(self, spec: ParameterSpec) -> bool:
        """Whether this rank's copy of the tensor is the primary one: the first of its copies and ties.

        Parameters
        ----------
        spec : ParameterSpec
            Of the tensor.

        Returns
        -------
        bool
            True on one of the ranks that hold an element.
        """
        return self.runs(spec.stage) and (spec.tensor_dim is not None or self.tensor_rank == 0)

    def holding(self, specs: Iterable[ParameterSpec]) -> LocalLayout:
        """The local layout of this rank: its slices of the tensors, end to end in their order.

        Parameters
        ----------
        specs : iterable of ParameterSpec
            All tensors of the model.

        Returns
        -------
        tuple of Piece
            None for tensors of other stages.
        """
        pieces: list[Piece] = []
        start = 0
        for spec in specs:
            if self.holds(spec):
                pieces.append(Piece(spec.name, self.box(spec), start))
                start += pieces[-1].size
        return tuple(pieces)


LocalLayout = tuple[Piece, ...]


WHOLE = ModelParallelRank()


def cut_holding(holding: LocalLayout, ranges: Iterable[tuple[int, int]]) -> LocalLayout:
    """The local layout of a new buffer that consists of ranges of another buffer.

    Parameters
    ----------
    holding : tuple of Piece
        The local layout of the other buffer, end to end.
    ranges : iterable of (start, stop)
        Ascending ranges of the other buffer; the new buffer is these ranges end to end.

    Returns
    -------
    tuple of Piece
        Several for a tensor of which a range has a ragged part.
    """
    pieces: list[Piece] = []
    offset = 0
    for start, stop in ranges:
        first = max(0, bisect_right(holding, start, key=lambda piece: piece.start) - 1)
        for whole in itertools.islice(holding, first, None):
            if whole.start >= stop:
                break
            begin, end = max(start, whole.start), min(stop, whole.start + whole.size)
            for box in boxes_of_range(whole.shape, begin - whole.start, end - whole.start):
                within = zip(box, whole.box, strict=True)
                pieces.append(Piece(whole.name, tuple((a + c, b + c) for (a, b), (c, _) in within), offset))
                offset += pieces[-1].size
    return tuple(pieces)
