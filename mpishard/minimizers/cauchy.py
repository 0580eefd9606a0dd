"""The generalised Cauchy point: the first minimum of the quadratic model along the projected path of steepest descent.

The path ``P(x - t g)`` bends at breakpoints, where an element meets its bound. Between two of them the model
``g'z + z'Bz / 2`` with ``B = theta I - W M W'`` is quadratic; its slope follows from sums of g'g and W'g over the
elements that still move, and of W'z over the others (Byrd, Lu, Nocedal and Zhu, 1995, section 4). Breakpoints are put
into bins whose sums are added over the ranks, and the bin where the slope changes its sign is divided until it has one
breakpoint. Sums are exact: integers in fixed point, the `words` of `backend/exact.py`, whose scale follows from the
largest product, the `tops`. They are those of a sorted list, whichever rank has the elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mpishard.backend import array as arrays
from mpishard.backend import exact
from mpishard.backend.exact_norms import largest
from mpishard.backend.exact_rows import sorted_words
from mpishard.minimizers import small
from mpishard.minimizers.space import Space

Array = Any
_BINS = 32
_BLOCK = 2**15  # elements of which masks are in the cache


class Curvature:
    """``W M W'`` of the pairs in their order, by products with W: ``u' W M W' v`` is a difference of two dot products.

    `sy`, (m, m), is S'Y on and below its diagonal, `ss` is S'S, and `theta` the size of the initial Hessian. `lower` is
    the Cholesky factor of ``theta S'S + L D^-1 L'`` in pairs that are scaled so that s'y = 1; None if rounding has left
    none.
    """

    def __init__(self, sy: np.ndarray, ss: np.ndarray, theta: float) -> None:
        self._scale = 1 / np.sqrt(np.diag(sy))
        self._theta = theta
        self._below = self._scale[:, None] * np.tril(sy, -1) * self._scale
        size = self._scale[:, None] * ss * self._scale * theta
        self.lower = small.cholesky(size + small.times(self._below, self._below.T))

    def halves(self, of_s: np.ndarray, of_y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For vectors with these products with S and Y, float64 (m, vectors), what `product` takes."""
        assert self.lower is not None
        first = self._scale[:, None] * of_y
        second = self._theta * self._scale[:, None] * of_s + small.times(self._below, first)
        return first, small.solve_lower(self.lower, second)

    def low_rank(self, of_s: np.ndarray, of_y: np.ndarray) -> tuple[list[float], list[float]]:
        """``W M W' v`` of a vector with these products with S and Y, (m,): its coefficients of S and of Y."""
        assert self.lower is not None
        first, second = self.halves(of_s[:, None], of_y[:, None])
        # The transposed of the lower triangle, with rows and columns in reverse, is a lower triangle.
        solved = small.solve_lower(self.lower.T[::-1, ::-1], second[::-1])[::-1]
        of_y = self._scale[:, None] * (small.times(self._below.T, solved) - first)
        return (self._theta * self._scale * solved[:, 0]).tolist(), of_y[:, 0].tolist()


def product(one: tuple[np.ndarray, np.ndarray], other: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """``u' W M W' v`` for each of several u and v, of their `Curvature.halves`."""
    total = np.zeros(one[0].shape[1])
    for sign, u, v in zip((-1.0, 1.0), one, other, strict=True):
        for each, of_other in zip(u, v, strict=True):
            total += sign * (each * of_other)
    return total


@dataclass(frozen=True)
class Sums:
    """The sums that the slope between two breakpoints follows from, as int64 words.

    Rows of `moving`, (rows + 1, 2), are products of each row, and last of the steepest descent itself, with the
    steepest descent of the elements that still move; rows of `arrived`, (rows, 2), are products of each row with the
    steps of the elements that have met their bounds.
    """

    moving: np.ndarray
    arrived: np.ndarray


class Breakpoints(NamedTuple):
    """Where the elements of this rank meet their bounds on the path."""

    lengths: Array  # of each element: 0 if it cannot move, infinite without a bound
    soonest: float  # one over the least length above 0, rounded to the dtype of the lengths; 0 without one
    steps: Callable[[Array], Array]  # from the indices of some elements to their steps to their bounds


class Path:
    """The path of steepest descent from a point, and the model along it. Methods are collective.

    `indices` are the numbers of the rows with all s, then all y. `descent` is what a step of length 1 subtracts: the
    gradient, 0 where an element cannot move. `words` and `tops` are the products of the rows and of the descent, (rows
    + 1, 2), with the descent, over all ranks, and the bounds with which they were made.

    After `minimize`, `words` are those over the elements that do not meet their bounds, and `arrived`, float64 (rows,),
    has the products of the rows with the steps of the others.
    """

    def __init__(
        self,
        space: Space,
        rows: Array,
        indices: Sequence[int],
        curvature: Curvature,
        theta: float,
        descent: Array,
        breakpoints: Breakpoints,
        words: np.ndarray,
        tops: Sequence[float],
    ) -> None:
        self._space, self._rows, self._indices = space, rows, list(indices)
        self._curvature, self._theta = curvature, theta
        self._descent, self._breakpoints, self._type = descent, breakpoints, breakpoints.lengths.dtype.type
        self.words, self._tops = words, list(tops)
        self.arrived = np.zeros(len(self._indices))
        self._step_tops = [0.0] * len(self._indices)
        self._least = 0.0  # curvature along the path

    def minimize(self, row_tops: Sequence[float]) -> float:
        """The length of the path to the first minimum of the model that the bins show; NaN if the model has none.

        `row_tops` has the largest element of each row.
        """
        low, high, square = 0.0, 0.0, float(exact.approximate_values(self.words[-1:], self._tops[-1:])[0])
        self._least = self._space.epsilon * self._theta * square
        while True:
            slope, bend = self._line()
            minimum = self._rounded(-slope / bend) if bend > 0 else math.nan
            if not minimum < math.inf:
                return math.nan
            if minimum <= low:
                return low
            high = self._rounded(max(minimum, 2 * low))
            found = self._between(low, high)
            first, last, top = self._space.maxima(*found.ends, found.largest_step)
            if last < 0 or -first > minimum:
                return minimum
            self._step_tops = [top * each for each in row_tops]
            before = self.arrived
            start = Sums(self.words, np.zeros((len(self._indices), 2), np.int64))
            length, end = self._scan(found, 0, found.index.size, start, -first, last, high)
            self.words = end.moving
            self.arrived = before + exact.approximate_values(end.arrived, self._step_tops)
            if not math.isnan(length):
                return length
            low = high

    def _line(self) -> tuple[float, float]:
        """Slope at length 0 and bend of the quadratic function of the present elements."""
        slopes, bends = self._lines(self.words[None], np.zeros((1, len(self._indices), 2), np.int64))
        return float(slopes[0]), float(bends[0])

    def _lines(self, moving: np.ndarray, arrived: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Slope at length 0 and bend of the quadratic functions of several sets of elements."""
        sums = exact.approximate_values(moving, self._tops)
        with_steps = self.arrived + exact.approximate_values(arrived, self._step_tops)
        m, square = len(self._indices) // 2, sums[:, -1]
        of_descent = self._curvature.halves(sums[:, :m].T, sums[:, m:-1].T)
        of_steps = self._curvature.halves(with_steps[:, :m].T, with_steps[:, m:].T)
        bends = np.maximum(self._theta * square - product(of_descent, of_descent), self._least)
        return product(of_descent, of_steps) - square, bends

    def _rounded(self, length: float) -> float:
        """A length as the dtype of the breakpoints has it, so that all compare with it equally."""
        with np.errstate(over="ignore"):
            return float(self._type(length))

    def _between(self, low: float, high: float) -> _Found:
        """This rank's elements, of those that count, with breakpoints beyond `low` up to `high`."""
        lengths, soonest, steps = self._breakpoints
        module = arrays.module_of(lengths)
        high = min(high, float(np.finfo(lengths.dtype).max))
        parts = []
        block = max(lengths.size, 1) if arrays.is_device(lengths) else _BLOCK
        with np.errstate(over="ignore"):
            none = self._type(1) / self._type(high) > soonest  # rounded quotients keep the order, or become equal
        for start, stop in () if none else self._space.spans:
            for begin in range(start, stop, block):
                part = lengths[begin : min(begin + block, stop)]
                parts.append(module.flatnonzero((part > low) & (part <= high)) + begin)
        index = module.concatenate(tuple(parts)) if parts else arrays.empty(0, np.int64, like=lengths)
        return _Found(index, lengths, self._descent, steps)

    def _scan(
        self, found: _Found, begin: int, end: int, start: Sums, first: float, last: float, beyond: float
    ) -> tuple[float, Sums]:
        """The minimum among the breakpoints from `first` to `last`, or between the last one and `beyond`.

        Returns its length, NaN if the model still falls at `beyond`, and the sums there.
        """
        edges = _edges(first, last)
        starts = found.divide(begin, end, edges)
        words = self._words(found, starts)
        self._space.add(words)
        filled = starts[:-1] < starts[1:]
        ends = np.full((2, len(edges) + 1), -math.inf)
        if filled.any():
            ends[:, filled] = found.ends_of(starts[:-1][filled], end)
        if len(edges):
            self._space.maximize(ends.reshape(-1))
        else:
            ends[:, 0] = -first, last
        left = exact.normalized((start.moving - np.cumsum(words[:, 0], axis=0)).reshape(-1, 2))
        left = left.reshape(words[:, 0].shape)
        gone = start.arrived + np.cumsum(words[:, 1, :-1], axis=0)
        gone = exact.normalized(gone.reshape(-1, 2)).reshape(gone.shape)
        slopes, bends = self._lines(left, gone)
        here = start
        bins = [b for b in range(len(starts) - 1) if ends[1, b] >= 0]
        for place, b in enumerate(bins):
            low, high = -float(ends[0, b]), float(ends[1, b])
            after = Sums(left[b], gone[b])
            slope, bend = float(slopes[b]), float(bends[b])
            if not slope + high * bend < 0:
                if low == high or slope != slope:
                    return high, after
                return self._scan(found, int(starts[b]), int(starts[b + 1]), here, low, high, high)
            is_last = place + 1 == len(bins)
            following = beyond if is_last else -float(ends[0, bins[place + 1]])
            if not slope + following * bend < 0:
                just_below = float(np.nextafter(self._type(following), self._type(0)))
                return max(high, min(self._rounded(-slope / bend), just_below)), after
            here = after
        return math.nan, here

    def _words(self, found: _Found, starts: np.ndarray) -> np.ndarray:
        """The words over each bin of this rank, (bins, 2, rows + 1, 2): with the descent, and with the steps."""
        count = len(self._indices)
        words = np.zeros((len(starts) - 1, 2, count + 1, 2), np.int64)
        tops = self._tops[:-1], self._step_tops
        words[:, :, :-1] = sorted_words(
            self._rows, self._indices, found.index, starts, (found.descent, found.steps), tops
        )
        own = self._descent.reshape(1, -1)
        words[:, :1, -1:] = sorted_words(own, (0,), found.index, starts, (found.descent,), [self._tops[-1:]])
        return words


class _Found:
    """Elements with breakpoints between two lengths of the path, and what the sums take of them."""

    def __init__(self, index: Array, lengths: Array, descent: Array, steps: Callable[[Array], Array]) -> None:
        self.index, of_dtype = index, steps(index)
        self.lengths = lengths[index].astype(np.float64)
        self.descent, self.steps = descent[index].astype(np.float64), of_dtype.astype(np.float64)
        self.largest_step = largest(of_dtype) if index.size else 0.0
        if not math.isfinite(self.largest_step):
            self.largest_step = math.inf
        self._is_sorted = False
        self.ends = -math.inf, -math.inf  # the least length, negated, and the greatest
        if index.size:
            self.ends = -float(self.lengths.min()), float(self.lengths.max())

    def divide(self, begin: int, end: int, edges: np.ndarray) -> np.ndarray:
        """Put the elements from `begin` to `end` into bins that end with these lengths, and a last one.

        Returns where each bin begins, and where the last one ends.  In a bin they stay in the order of memory, in which
        reading takes least time: sums do not depend on it.  On a device, where a sort takes less than a copy to the
        host, they are in the order of their lengths.
        """
        part, module = slice(begin, end), arrays.module_of(self.lengths)
        lengths = self.lengths[part]
        if not arrays.is_device(lengths):
            bins = np.searchsorted(edges, lengths).astype(np.uint8)
            self._permute(part, np.argsort(bins, kind="stable"))
            within = np.cumsum(np.bincount(bins, minlength=len(edges) + 1))[:-1]
        else:
            if not self._is_sorted:  # the first time, with all elements
                self._permute(part, module.argsort(lengths))
                self._is_sorted = True
            there = np.asarray(edges, like=lengths)
            within = arrays.to_host(module.searchsorted(self.lengths[part], there, side="right"))
        return begin + np.concatenate([[0], within, [end - begin]]).astype(np.int64)

    def _permute(self, part: slice, order: Array) -> None:
        for values in (self.index, self.lengths, self.descent, self.steps):
            values[part] = values[part][order]

    def ends_of(self, starts: np.ndarray, end: int) -> tuple[np.ndarray, np.ndarray]:
        """The least length, negated, and the greatest of each of these bins, none of which is empty."""
        if not arrays.is_device(self.lengths):
            lengths = self.lengths[:end]
            return -np.minimum.reduceat(lengths, starts), np.maximum.reduceat(lengths, starts)
        places = np.concatenate([starts, starts[1:] - 1, [end - 1]])
        low, high = np.split(arrays.to_host(self.lengths[np.asarray(places, like=self.lengths)]), 2)
        return -low, high


def _edges(first: float, last: float) -> np.ndarray:
    """The ends of all bins but the last one between two positive numbers, each once.

    The integers of the bits of floats are in the order of the floats, and about their logarithms where these are far
    apart: a few divisions separate any two floats.
    """
    low, high = (int(np.float64(each).view(np.int64)) for each in (first, last))
    edges = sorted({low + (high - low) * place // _BINS for place in range(1, _BINS)} - {high})
    return np.array(edges, np.int64).view(np.float64)
