"""Sources of whole tensors, read one box at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from math import prod
from typing import Any, Protocol

import numpy as np

from mpishard.checkpoint.contents import Contents
from mpishard.checkpoint.piece_reader import PieceReader
from mpishard.checkpoint.pieces import StoredPiece
from mpishard.layout.boxes import Box, box_shape, boxes_of_range, inside, intersect

BLOCK = 2**22  # elements read at once


class Source(Protocol):
    """The tensors of a model by name, with one array for each kind.  No method is collective."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """The metadata, as `RunState.facts`."""

    @property
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes by name, in the model's order."""

    @property
    def kinds(self) -> Mapping[str, np.dtype]:
        """Dtypes by kind, as `Shard.kind`."""

    def read(self, kind: str, name: str, box: Box) -> np.ndarray:
        """The values in a box of a tensor: contiguous, shaped like the box.

        Parameters
        ----------
        kind, name : str
            The kind of array, and the tensor.
        box : Box
            Inside the tensor.

        Returns
        -------
        array
            Of the dtype of its kind.
        """


class Stored(AbstractContextManager["Stored"]):
    """The tensors of a checkpoint whose hashes are correct; a `Source`.  No method is collective.

    Parameters
    ----------
    contents : Contents
        Those of the checkpoint.
    """

    def __init__(self, contents: Contents) -> None:
        self.facts: dict[str, Any] = contents.facts
        self.tensors: dict[str, tuple[int, ...]] = contents.tensors
        self.kinds: dict[str, np.dtype] = contents.kinds
        self._reader = PieceReader(contents)
        self._pieces: dict[tuple[str, str], list[StoredPiece]] = defaultdict(list)
        for piece in contents.pieces:
            self._pieces[piece.kind, piece.name].append(piece)

    def read(self, kind: str, name: str, box: Box) -> np.ndarray:
        """The values in a box of a tensor, from all pieces that it touches.

        Parameters
        ----------
        kind, name : str
            The kind of array, and the tensor.
        box : Box
            Inside the tensor.

        Returns
        -------
        array
            Contiguous, shaped like the box.

        Raises
        ------
        ValueError
            If a piece does not match the index.
        """
        values = np.empty(box_shape(box), self.kinds[kind])
        for piece in self._pieces[kind, name]:
            common = intersect(box, piece.box)
            if common is not None:
                self._reader.read(piece, common, values[inside(common, box)])
        return values

    def __exit__(self, *exception: object) -> None:
        self._reader.__exit__(None, None, None)


def total_bytes(source: Source, kinds: Iterable[str]) -> int:
    """The size of the tensors of these kinds in bytes."""
    return sum(map(prod, source.tensors.values())) * sum(source.kinds[kind].itemsize for kind in kinds)


def blocks(shape: Sequence[int]) -> Iterator[Box]:
    """Boxes of at most `BLOCK` elements that cover a tensor in row-major order."""
    size = prod(shape)
    for start in range(0, size, BLOCK):
        yield from boxes_of_range(shape, start, min(start + BLOCK, size))
