"""What the spaces of one and of many ranks share: exact sums over the elements that count here."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpishard.backend import exact_dot, exact_norm
from mpishard.backend.array import is_device

Array = Any


class CountedSpace(ABC):
    """Base of spaces: words of exact sums over spans of this rank's elements; subclasses add them over the ranks.

    Parameters
    ----------
    size : int
        Elements of a vector on this rank.
    total : int
        Elements on all ranks, each counted once.
    like : array
        An empty array of the dtype and device of the vectors.
    spans : sequence of (start, stop)
        The elements of this rank that count, ascending; no other rank counts them.

    Raises
    ------
    ValueError
        If there are more elements than a sum can have, on all ranks alike.
    """

    def __init__(self, size: int, total: int, like: Array, spans: Sequence[tuple[int, int]]) -> None:
        if total > exact_dot.MOST_TERMS:
            raise ValueError(f"vectors have at most {exact_dot.MOST_TERMS} elements, but these have {total}")
        self.size = size
        self.total = total
        self.like = like
        self.spans: tuple[tuple[int, int], ...] = tuple((start, stop) for start, stop in spans if start < stop)
        if not is_device(like):
            exact_norm.expect(like.dtype, squares=False)
            exact_dot.expect(like.dtype)

    @abstractmethod
    def add(self, numbers: np.ndarray) -> None:
        """Replace an int64 array by its sum over the ranks.  Collective; one all-reduce."""

    @abstractmethod
    def maximize(self, numbers: np.ndarray) -> None:
        """Replace a float64 array without NaN by its maximum over the ranks.  Collective; one all-reduce."""

    def largest(self, *vectors: Array) -> list[float]:
        """The largest absolute value of each vector over all ranks; infinite if an element is NaN or infinite.

        Collective; one all-reduce.
        """
        tops = np.array([self._largest(vector) for vector in vectors], np.float64)
        self.maximize(tops)
        return [float(top) for top in tops]

    def dots(self, pairs: Sequence[tuple[Array, Array]], tops: Sequence[float]) -> list[float]:
        """The dot product of each pair of vectors over all ranks.  Collective; one all-reduce of two int64 a pair.

        Parameters
        ----------
        pairs : sequence of (array, array)
        tops : sequence of float
            For each pair the product of the `largest` of both.

        Returns
        -------
        list of float
            Each rounded once; NaN where `top` is not below ``2**1000``.
        """
        words = np.zeros((len(pairs), 2), np.int64)
        for k, ((one, other), top) in enumerate(zip(pairs, tops, strict=True)):
            words[k] = exact_dot.dot_words(one, other, top, self.spans)
        self.add(words)
        return exact_dot.values(words, tops)

    def row_dots(self, rows: Array, indices: Sequence[int], vector: Array, tops: Sequence[float]) -> list[float]:
        """The dot products of some rows of a 2-D array with one vector, as `dots`, in one pass over memory."""
        words = exact_dot.row_dot_words(rows, indices, vector, tops, self.spans)
        self.add(words)
        return exact_dot.values(words, tops)

    def count(self, *numbers: int) -> list[int]:
        """The sum of each whole number over the ranks.  Collective; one all-reduce."""
        sums = np.array(numbers, np.int64)
        self.add(sums)
        return [int(number) for number in sums]

    def _largest(self, vector: Array) -> float:
        tops = [exact_norm.largest(vector[start:stop]) for start, stop in self.spans]
        return max((top if math.isfinite(top) else math.inf for top in tops), default=0.0)
