"""The vectors of a minimisation: what a method may ask of them, wherever their elements are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from mpishard.minimizers.counted_space import CountedSpace

Array = Any


class Space(Protocol):
    """Flat vectors that are divided over ranks, and their sums, whose bits do not depend on who holds what.

    A method works element by element on its own part of a vector, and takes every scalar from here; so all ranks decide
    the same, on any number of ranks.  Methods are collective over the ranks of the space.

    Attributes
    ----------
    size : int
        Elements of a vector on this rank.
    total : int
        Elements on all ranks, each counted once.
    like : array
        An empty array of the dtype and device of the vectors.
    spans : tuple of (start, stop)
        The elements of this rank that count in sums; no other rank counts them.
    """

    size: int
    total: int
    like: Array
    spans: tuple[tuple[int, int], ...]

    def add(self, numbers: np.ndarray) -> None:
        """Replace an int64 array by its sum over the ranks, for words of `exact_dot`.  One all-reduce."""
        ...

    def largest(self, *vectors: Array) -> list[float]:
        """The largest absolute value of each vector; infinite if an element is NaN or infinite.  One all-reduce."""
        ...

    def dots(self, pairs: Sequence[tuple[Array, Array]], tops: Sequence[float]) -> list[float]:
        """The dot product of each pair of vectors.

        One all-reduce of two int64 a product.

        Parameters
        ----------
        pairs : sequence of (array, array)
        tops : sequence of float
            For each pair the product of the `largest` of both.

        Returns
        -------
        list of float
            Each rounded once.
        """
        ...

    def row_dots(self, rows: Array, indices: Sequence[int], vector: Array, tops: Sequence[float]) -> list[float]:
        """The dot products of some rows of a 2-D array with one vector, as `dots`, in one pass over memory."""
        ...

    def count(self, *numbers: int) -> list[int]:
        """The sum of each whole number over the ranks, where every element counts once.  One all-reduce."""
        ...

    def whole(self, vector: Array) -> Array:
        """All elements of a vector, on every rank, in the order of the flat parameters."""
        ...

    def own(self, whole: Array) -> Array:
        """This rank's elements of a whole vector.  Not collective."""
        ...


class LocalSpace(CountedSpace):
    """Whole vectors in one process.

    Parameters
    ----------
    size : int
        Elements of a vector.
    like : array
        An array of the dtype and device of the vectors.
    """

    def __init__(self, size: int, like: Array) -> None:
        super().__init__(size, size, like[:0], [(0, size)])

    def add(self, numbers: np.ndarray) -> None:
        """Leave the sums as they are."""

    def maximize(self, numbers: np.ndarray) -> None:
        """Leave the maxima as they are."""

    def whole(self, vector: Array) -> Array:
        """The vector itself."""
        return vector

    def own(self, whole: Array) -> Array:
        """The vector itself."""
        return whole
