"""The vectors of a minimisation: sums and maxima over their elements, whichever rank has them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpishard.backend import exact, exact_norms, exact_rows
from mpishard.backend.random import normal_at

Array = Any
Pair = tuple[Array, Array]
_MUCH_LESS = 2.0**-10
_FINE = 2.0**10  # of rounding by 2**-53: words have errors of up to 2**-65 of their top an element


class Space(ABC):
    """Flat vectors that are divided over ranks, and their sums, whose bits do not depend on who holds what.

    A method works element by element on its own part of a vector, and takes every scalar from here; so all ranks decide
    equally, on any number of ranks. Methods but `own`, `numbers` and `white_noise` are collective over the ranks of the
    space. Raises ValueError on all ranks if there are more elements than a sum can have.
    """

    def __init__(self, size: int, total: int, like: Array, spans: Sequence[tuple[int, int]]) -> None:
        if total > exact.MOST_TERMS:
            raise ValueError(f"vectors have at most {exact.MOST_TERMS} elements, but these have {total}")
        self.size = size  # elements of a vector on this rank
        self.total = total  # elements on all ranks, each counted once
        self.like = like  # an empty array of the dtype and device of the vectors
        # (start, stop) of this rank's elements that count in sums, ascending; no other rank counts them.
        self.spans: tuple[tuple[int, int], ...] = tuple((start, stop) for start, stop in spans if start < stop)
        exact_norms.expect_norms(like, squares=False)
        exact.expect_dots(like)
        exact_rows.expect(like)

    @property
    def epsilon(self) -> float:
        """The relative rounding error of the dtype: 2**-52 or 2**-23."""
        return float(np.finfo(self.like.dtype).eps)

    @abstractmethod
    def add(self, numbers: np.ndarray) -> None:
        """Replace an int64 array by its sum over the ranks, for words of `exact`.  One all-reduce."""

    @abstractmethod
    def maximize(self, numbers: np.ndarray) -> None:
        """Replace a float64 array without NaN by its maximum over the ranks.  One all-reduce."""

    @abstractmethod
    def whole(self, vector: Array) -> Array:
        """All elements of a vector, on every rank, in the order of the flat parameters."""

    @abstractmethod
    def own(self, whole: Array) -> Array:
        """This rank's elements of a whole vector."""

    @abstractmethod
    def numbers(self) -> np.ndarray:
        """The number of each of this rank's elements in the order of the flat parameters, int64.  Not collective."""

    def white_noise(self, seed: int, name: str) -> Array:
        """A vector of standard normal numbers, which depend on the element's number, the seed and the name alone."""
        return np.asarray(normal_at(seed, name, self.numbers()), self.like.dtype, like=self.like)

    def largest(self, *vectors: Array) -> list[float]:
        """The largest absolute value of each vector; infinite if an element is NaN or infinite.  One all-reduce."""
        return self.maxima(*map(self._largest, vectors))

    def maxima(self, *numbers: float) -> list[float]:
        """The largest of each number over the ranks, of numbers other than NaN.  One all-reduce."""
        tops = np.array(numbers, np.float64)
        self.maximize(tops)
        return [float(top) for top in tops]

    def dots(self, pairs: Sequence[Pair], tops: Sequence[float]) -> list[float]:
        """The dot product of each pair of vectors, rounded once; NaN where its top is not below ``2**1000``.

        `tops` has for each pair the product of the `largest` of both. One all-reduce of two int64 a product; rarely two
        more, see `values`.
        """
        return self.values(pairs, self._summed(pairs, tops), tops)

    def measured_dots(self, *pairs: Pair) -> list[float]:
        """The dot product of each pair, rounded once, also where elements have different units.  Two all-reduces."""
        return self.dots(pairs, self.largest_products(pairs))

    def row_dots(self, rows: Array, row_tops: Sequence[float], vector: Array, size: float) -> list[float]:
        """The dot product of each row of an array with a vector, with errors below rounding of `size`.

        `row_tops` has the `largest` of each row. Two all-reduces, and one pass over memory; one more of both where the
        units of elements differ so much that these say too little of the products.
        """
        (top,) = self.largest(vector)
        tops, pairs = [each * top for each in row_tops], [(row, vector) for row in rows]
        if max(tops, default=0.0) * self.total > _FINE * size:
            tops = self.largest_products(pairs)
        words = exact.row_dot_words(rows, range(len(rows)), vector, tops, self.spans)
        self.add(words)
        return exact.values(words, tops)

    def _summed(self, pairs: Sequence[Pair], tops: Sequence[float]) -> np.ndarray:
        """The words of the dot products over all ranks.  One all-reduce."""
        words = np.zeros((len(pairs), 2), np.int64)
        for k, ((one, other), top) in enumerate(zip(pairs, tops, strict=True)):
            words[k] = exact.dot_words(one, other, top, self.spans)
        self.add(words)
        return words

    def values(self, pairs: Sequence[Pair], words: np.ndarray, tops: Sequence[float]) -> list[float]:
        """The dot products of pairs of vectors, from sums over the ranks of words of `exact.dot_words` with these tops.

        Where the largest elements of both vectors are far from each other, as when the unknowns have different units,
        all products may be so much smaller than `tops` that the words lose them. Such sums are made again, with the
        largest of the products, by two further all-reduces of these sums.
        """
        return exact.values(*self.refined(pairs, words, tops))

    def refined(
        self, pairs: Sequence[Pair], words: np.ndarray, tops: Sequence[float]
    ) -> tuple[np.ndarray, list[float]]:
        """The words, (pairs, 2), and tops of `values`, those of doubtful sums made again."""
        found, found_tops = np.array(words), list(tops)
        known = zip(found.tolist(), tops, strict=True)
        few = [k for k, (pair, top) in enumerate(known) if exact.is_doubtful(pair, top, self.total)]
        if few:
            products = self.largest_products([pairs[k] for k in few])
            finer = {k: top for k, top in zip(few, products, strict=True) if top < _MUCH_LESS * tops[k]}
            if finer:
                again = self._summed([pairs[k] for k in finer], list(finer.values()))
                again, again_tops = self.refined([pairs[k] for k in finer], again, list(finer.values()))
                for place, k in enumerate(finer):
                    found[k], found_tops[k] = again[place], again_tops[place]
        return found, found_tops

    def largest_products(self, pairs: Sequence[Pair]) -> list[float]:
        """The largest absolute value of the products of the elements of each pair of vectors.  One all-reduce."""
        tops = [
            max((exact.largest_product(a[start:stop], b[start:stop]) for start, stop in self.spans), default=0.0)
            for a, b in pairs
        ]
        return self.maxima(*tops)

    def count(self, *numbers: int) -> list[int]:
        """The sum of each whole number over the ranks, where every element counts once.  One all-reduce."""
        sums = np.array(numbers, np.int64)
        self.add(sums)
        return [int(number) for number in sums]

    def _largest(self, vector: Array) -> float:
        tops = [exact_norms.largest(vector[start:stop]) for start, stop in self.spans]
        return max((top if math.isfinite(top) else math.inf for top in tops), default=0.0)


class LocalSpace(Space):
    """Whole vectors in one process."""

    def __init__(self, size: int, like: Array) -> None:
        super().__init__(size, size, like[:0], [(0, size)])

    def add(self, numbers: np.ndarray) -> None:
        """Leave the sums as they are."""

    def maximize(self, numbers: np.ndarray) -> None:
        """Leave the maxima as they are."""

    def whole(self, vector: Array) -> Array:
        return vector

    def own(self, whole: Array) -> Array:
        return whole

    def numbers(self) -> np.ndarray:
        return np.arange(self.size)
