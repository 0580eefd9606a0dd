"""The Gram matrices of a limited-memory history over the elements that are free, kept up to date exactly.

With S and Y the steps and the changes of the gradient as columns, oldest first, the compact form of a quasi-Newton
matrix needs S'Y on and above its diagonal, and Y'Y (Byrd, Nocedal and Schnabel, "Representations of quasi-Newton
matrices and their use in limited memory methods", 1994).  With bounds these sums go over the free elements only (Ni and
Yuan, "A subspace limited memory quasi-Newton algorithm", 1997), and few elements become free or fixed in an iteration.
The sums are whole numbers of a quantum that is fixed when a pair is stored, so adding what came and subtracting what
went gives the same bits as computing anew, on any ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpishard.backend import array as arrays
from mpishard.backend import exact_changes, exact_dot
from mpishard.minimizers.space import Space

Array = Any
_FEW = 0.1  # part of the elements below which they are looked up one by one
Entry = tuple[str, int, int]


class Gram:
    """S'Y on and above its diagonal, and Y'Y, of the pairs of a history; `add` and `drop` pairs, then `update`.

    The same calls are made on all ranks; only `update` is collective.

    Parameters
    ----------
    space : Space
        Of the rows.
    rows : 2-D array
        The history is among its rows, and filled by the caller.
    s_rows, y_rows : sequence of int
        The numbers of the rows of each pair that there may be.
    of_free : bool
        Whether the sums go over the free elements, or else over the others.

    Attributes
    ----------
    order : list of int
        The pairs, oldest first.
    s_tops, y_tops : list of float
        For each pair that there may be the largest absolute value of both vectors, over all ranks.
    bounds : dict of float
        By older and younger pair: bounds on the products of elements of s'y that are far below those of `s_tops` and
        `y_tops`.
    """

    def __init__(
        self, space: Space, rows: Array, s_rows: Sequence[int], y_rows: Sequence[int], of_free: bool = True
    ) -> None:
        if len(s_rows) != len(y_rows):
            raise ValueError(f"a history has as many rows of s as of y, got {len(s_rows)} and {len(y_rows)}")
        self.order: list[int] = []
        self.s_tops: list[float] = [0.0] * len(s_rows)
        self.y_tops: list[float] = [0.0] * len(s_rows)
        self.bounds: dict[tuple[int, int], float] = {}
        self._space = space
        self._rows = rows
        self._of_free = of_free
        self._s_rows, self._y_rows = list(s_rows), list(y_rows)
        # By kind of product, older pair and younger pair: s'y and y'y over the elements `_free`, and their words.
        self._words: dict[Entry, np.ndarray] = {}
        self._values: dict[Entry, float] = {}
        self._free: Array | None = None
        self._new: list[Entry] = []
        self._old: list[Entry] = []
        if not arrays.is_device(rows):
            exact_changes.expect(rows.dtype)

    def add(self, pair: int, s_top: float, y_top: float) -> None:
        """Take the rows of `pair` as the youngest pair; if it was there before, its old content is forgotten.

        Parameters
        ----------
        pair : int
            Its place in `s_rows` and `y_rows`.
        s_top, y_top : float
            The largest absolute value of each vector, over all ranks.
        """
        if pair in self.order:
            self.drop(pair)
        self.s_tops[pair], self.y_tops[pair] = s_top, y_top
        self.order.append(pair)

    def drop(self, pair: int) -> None:
        """Forget a pair."""
        self.order.remove(pair)
        self.bounds = {pairs: top for pairs, top in self.bounds.items() if pair not in pairs}
        for entry in [entry for entry in self._words if pair in entry]:
            del self._words[entry], self._values[entry]

    def bound(self, tops: Mapping[tuple[int, int], float]) -> None:
        """Add to `bounds`; the next `update` computes these products anew."""
        self.bounds.update(tops)
        for pairs in tops:
            self._words.pop(("sy", *pairs), None)
            self._values.pop(("sy", *pairs), None)

    def clear(self) -> None:
        """Forget all pairs."""
        self.order.clear()
        self.bounds.clear()
        self._words.clear()
        self._values.clear()

    def update(self, free: Array | None = None) -> None:
        """Compute the products of new pairs, and let the others follow a change of the free elements.

        Collective, one all-reduce; without `free` only where there are new pairs.

        Parameters
        ----------
        free : 1-D array of bool, optional
            This rank's free elements, from now on; kept, and not to be changed.  None if the sums go over all elements.
        """
        words = self.prepare(free)
        if len(words):
            self._space.add(words)
        self.take(words)

    def prepare(self, free: Array | None = None, words: np.ndarray | None = None) -> np.ndarray:
        """The first half of `update`, for a caller that adds up words of several kinds at once.  Not collective.

        Parameters
        ----------
        free : 1-D array of bool, optional
            As for `update`.
        words : int64 array (products, 2), optional
            Of `follow`, from a caller that has computed them.

        Returns
        -------
        int64 array (products, 2)
            Words of this rank, as many as on all others; `take` wants their sums.
        """
        self._sort()
        if words is None:
            words = self._words_over(free)
        self._free = free
        return words

    def follow(self) -> tuple[list[tuple[int, int]], list[float], Array] | None:
        """What `prepare` would compute if all pairs but the youngest are known over some free elements.

        Not collective.

        Returns
        -------
        pairs : list of (int, int)
            The products that are known already: numbers of their rows.
        tops : list of float
            Bounds on the products of elements.
        before : 1-D array of bool
            The free elements over which they are known.

        Or None, if more than the youngest pair is new, or nothing is known.  The words that `prepare` takes are those
        of the youngest y with each s, then with each y, over the new elements, if that pair is new; and after them, for
        each of these products, of the new elements less those of the old ones.
        """
        self._sort()
        if self._free is None or not self._old or any(entry[2] != self.order[-1] for entry in self._new):
            return None
        return list(map(self._row_numbers, self._old)), list(map(self._top, self._old)), self._free

    def take(self, words: np.ndarray) -> None:
        """The second half of `update`.

        Parameters
        ----------
        words : int64 array (products, 2)
            What `prepare` has returned, summed over the ranks.
        """
        entries = (*self._new, *self._old)
        start = [np.zeros(2, np.int64)] * len(self._new) + [self._words[entry] for entry in self._old]
        totals = exact_dot.normalized(words + start) if entries else words
        self._words.update(zip(entries, totals, strict=True))
        self._values.update(zip(entries, exact_dot.values(totals, list(map(self._top, entries))), strict=True))

    @property
    def sy(self) -> np.ndarray:
        """S'Y of the pairs in `order`, as of the last `update`: products of an s with no older y, else zeros."""
        return self._matrix("sy")

    @property
    def yy(self) -> np.ndarray:
        """Y'Y of the pairs in `order`, as of the last `update`."""
        upper = self._matrix("yy")
        return upper + np.triu(upper, 1).T

    def _entries(self) -> list[Entry]:
        """All products, those with one younger y side by side."""
        return [
            (kind, older, pair)
            for place, pair in enumerate(self.order)
            for kind in ("sy", "yy")
            for older in self.order[: place + 1]
        ]

    def _sort(self) -> None:
        """Find out which products are known."""
        entries = self._entries()
        self._new = [entry for entry in entries if entry not in self._words]
        self._old = [entry for entry in entries if entry in self._words]

    def _words_over(self, free: Array | None) -> np.ndarray:
        """The words of new products, and of the changes of the others."""
        if free is None and (self._free is None or not self._old):
            self._old = []
            return self._whole_words(self._new)
        before, after = map(self._mask, (self._free, free))
        return np.concatenate([self._first(self._new, after), self._changed(self._old, before, after)])

    def _mask(self, free: Array | None) -> Array:
        """The elements that count."""
        if free is None:
            mask = arrays.empty(self._rows.shape[1], np.bool_, like=self._rows)
            mask.fill(True)
            return mask
        return free if self._of_free else arrays.module_of(free).logical_not(free)

    def _row_numbers(self, entry: Entry) -> tuple[int, int]:
        kind, older, pair = entry
        return (self._s_rows if kind == "sy" else self._y_rows)[older], self._y_rows[pair]

    def _top(self, entry: Entry) -> float:
        kind, older, pair = entry
        if kind == "sy" and (older, pair) in self.bounds:
            return self.bounds[older, pair]
        return (self.s_tops if kind == "sy" else self.y_tops)[older] * self.y_tops[pair]

    def _whole_words(self, entries: Sequence[Entry], free: Array | None = None) -> np.ndarray:
        """The words over all elements of this rank, or all free ones: one pass for each y."""
        words = np.zeros((len(entries), 2), np.int64)
        for pair in {pair: None for _, _, pair in entries}:
            places = [k for k, entry in enumerate(entries) if entry[2] == pair]
            indices = [self._row_numbers(entries[k])[0] for k in places]
            tops = [self._top(entries[k]) for k in places]
            y = self._rows[self._y_rows[pair]]
            y = y if free is None else y * free
            words[places] = exact_dot.row_dot_words(self._rows, indices, y, tops, self._space.spans)
        return words

    def _first(self, entries: Sequence[Entry], free: Array) -> np.ndarray:
        """The words over the free elements, of this rank; the ways to them differ in time only."""
        count = int(arrays.to_host(free.sum()))
        if count <= _FEW * free.size:
            return self._changed(entries, None, free)
        if free.size - count <= _FEW * free.size:
            rest = arrays.module_of(free).logical_not(free)
            return self._whole_words(entries) - self._changed(entries, None, rest)
        return self._whole_words(entries, free)

    def _changed(self, entries: Sequence[Entry], before: Array | None, after: Array) -> np.ndarray:
        """The words over `after` less those over `before`, of this rank."""
        pairs, tops = list(map(self._row_numbers, entries)), list(map(self._top, entries))
        return exact_changes.changed_words(self._rows, pairs, tops, before, after, self._space.spans)

    def _matrix(self, kind: str) -> np.ndarray:
        matrix = np.zeros((len(self.order), len(self.order)))
        for column, pair in enumerate(self.order):
            matrix[: column + 1, column] = [self._values[kind, older, pair] for older in self.order[: column + 1]]
        return matrix
