"""The Gram matrices of a limited-memory history over the elements that are free, kept up to date exactly.

With S and Y the steps and the changes of the gradient as columns, oldest first, the compact form of a quasi-Newton
matrix needs S'Y on and above its diagonal, and Y'Y (Byrd, Nocedal and Schnabel, "Representations of quasi-Newton
matrices and their use in limited memory methods", 1994).  With bounds these sums go over the free elements only (Ni
and Yuan, "A subspace limited memory quasi-Newton algorithm", 1997), and few elements become free or fixed in an
iteration. The sums are whole numbers of a quantum that is fixed when a pair is stored, so adding new elements and
subtracting old ones gives the same bits as computing anew, on any ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpishard.backend import array as arrays
from mpishard.backend import exact, exact_rows
from mpishard.minimizers.space import Space

Array = Any
Entry = tuple[str, int, int]
_FEW = 0.1  # part of the elements below which the host looks them up one by one


class Gram:
    """S'Y on and above its diagonal, and Y'Y, of the pairs of a history; `add` and `drop` pairs, then `update`.

    The same calls are made on all ranks; only `update` is collective. `s_rows` and `y_rows` are the numbers of the
    rows, filled by the caller, of each possible pair; `of_free`: the sums go over the free elements, else over the
    others.
    """

    def __init__(
        self, space: Space, rows: Array, s_rows: Sequence[int], y_rows: Sequence[int], of_free: bool = True
    ) -> None:
        if len(s_rows) != len(y_rows):
            raise ValueError(f"a history has as many rows of s as of y, got {len(s_rows)} and {len(y_rows)}")
        self.order: list[int] = []  # the pairs, oldest first
        # By possible pair the largest absolute value of each vector, over all ranks.
        self.s_tops: list[float] = [0.0] * len(s_rows)
        self.y_tops: list[float] = [0.0] * len(s_rows)
        # By older and younger pair: tops of s'y that are far below the products of `s_tops` and `y_tops`.
        self.finer_tops: dict[tuple[int, int], float] = {}
        self._space = space
        self._rows = rows
        self._of_free = of_free
        self._s_rows, self._y_rows = list(s_rows), list(y_rows)
        # The free elements with which products are known; None before the first `update`, or for all elements.
        self.mask: Array | None = None
        # By kind of product, older pair and younger pair: s'y and y'y over the elements that count, and their words.
        self._words: dict[Entry, np.ndarray] = {}
        self._values: dict[Entry, float] = {}
        self._new: list[Entry] = []
        self._old: list[Entry] = []
        exact_rows.expect_changes(rows)

    def add(self, pair: int, s_top: float, y_top: float) -> None:
        """Take the rows of `pair` as the youngest pair, in place of an older one of this number.

        `s_top` and `y_top` are the largest absolute values of both vectors, over all ranks.
        """
        if pair in self.order:
            self.drop(pair)
        self.s_tops[pair], self.y_tops[pair] = s_top, y_top
        self.order.append(pair)

    def drop(self, pair: int) -> None:
        self.order.remove(pair)
        self.finer_tops = {pairs: top for pairs, top in self.finer_tops.items() if pair not in pairs}
        for entry in [entry for entry in self._words if pair in entry]:
            del self._words[entry]
            self._values.pop(entry, None)

    def refine(self, tops: Mapping[tuple[int, int], float]) -> None:
        """Add to `finer_tops`; the next `update` computes these products anew."""
        self.finer_tops.update(tops)
        for pairs in tops:
            self._words.pop(("sy", *pairs), None)
            self._values.pop(("sy", *pairs), None)

    def clear(self) -> None:
        self.order.clear()
        self.finer_tops.clear()
        self._words.clear()
        self._values.clear()

    def update(self, free: Array | None = None) -> None:
        """Compute the products of new pairs, and update the others after a change of the free elements.

        Collective, one all-reduce; without `free` only where there are new pairs. `free` are this rank's free elements
        from now on, kept, and not to be changed; None if the sums go over all elements.
        """
        words = self.prepare(free)
        if len(words):
            self._space.add(words)
        self.take(words)

    def prepare(self, free: Array | None = None) -> np.ndarray:
        """The first half of `update`, for a caller that adds up words of several kinds at once.

        Returns this rank's words, int64 (products, 2) of the same number on all ranks; `take` takes their sums.
        """
        self._divide()
        words = self._words_over(free)
        self.mask = free
        return words

    def learn(self, words: np.ndarray) -> None:
        """Take the products of the youngest y with each s, then with each y, over `mask`, as sums over the ranks."""
        entries = [entry for entry in self._entries() if entry[2] == self.order[-1]]
        self._words.update(zip(entries, exact.normalized(words), strict=True))

    def take(self, words: np.ndarray) -> None:
        """The second half of `update`: take the words of `prepare`, summed over the ranks."""
        entries = (*self._new, *self._old)
        start = [np.zeros(2, np.int64)] * len(self._new) + [self._words[entry] for entry in self._old]
        totals = exact.normalized(words + start) if entries else words
        self._words.update(zip(entries, totals, strict=True))
        self._values.update(zip(entries, exact.values(totals, list(map(self._top, entries))), strict=True))

    @property
    def sy(self) -> np.ndarray:
        """S'Y of the pairs in `order`, as of the last `update`: s_i'y_j where j is no older than i, else zeros."""
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

    def _divide(self) -> None:
        """Divide the products into new and known ones."""
        entries = self._entries()
        self._new = [entry for entry in entries if entry not in self._words]
        self._old = [entry for entry in entries if entry in self._words]

    def _words_over(self, free: Array | None) -> np.ndarray:
        """The words of new products, and of the changes of the others."""
        if free is None and (self.mask is None or not self._old):
            self._old = []
            return self._whole_words(self._new)
        before, after = map(self._counted, (self.mask, free))
        return np.concatenate([self._new_words(free), self._changed_words(self._old, before, after)])

    def _counted(self, free: Array | None) -> Array:
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
        if kind == "sy" and (older, pair) in self.finer_tops:
            return self.finer_tops[older, pair]
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
            words[places] = exact.row_dot_words(self._rows, indices, y, tops, self._space.spans)
        return words

    def _new_words(self, free: Array | None) -> np.ndarray:
        """This rank's words of new products, over the elements that count; the ways to them differ in time only."""
        entries = self._new
        if not entries:
            return np.zeros((0, 2), np.int64)
        free = self._counted(free)
        count = int(arrays.to_host(free.sum()))
        if count <= _FEW * free.size:
            return self._changed_words(entries, None, free)
        if free.size - count <= _FEW * free.size:
            rest = arrays.module_of(free).logical_not(free)
            return self._whole_words(entries) - self._changed_words(entries, None, rest)
        return self._whole_words(entries, free)

    def _changed_words(self, entries: Sequence[Entry], before: Array | None, after: Array) -> np.ndarray:
        """The words over `after` less those over `before`, of this rank."""
        pairs, tops = list(map(self._row_numbers, entries)), list(map(self._top, entries))
        return exact_rows.changed_words(self._rows, pairs, tops, before, after, self._space.spans)

    def _matrix(self, kind: str) -> np.ndarray:
        matrix = np.zeros((len(self.order), len(self.order)))
        for column, pair in enumerate(self.order):
            matrix[: column + 1, column] = [self._values[kind, older, pair] for older in self.order[: column + 1]]
        return matrix


def prepare_all(grams: Sequence[Gram], free: Array) -> list[np.ndarray]:
    """The words of `Gram.prepare` of each of several matrices of the same rows, which are read once where all can."""
    first = grams[0]
    if first.mask is None or any(gram.mask is not first.mask for gram in grams):
        return [gram.prepare(free) for gram in grams]
    pairs: list[tuple[int, int]] = []
    tops: list[float] = []
    for gram in grams:
        gram._divide()
        pairs += map(gram._row_numbers, gram._old)
        tops += map(gram._top, gram._old)
    changes = exact_rows.changed_words(first._rows, pairs, tops, first.mask, free, first._space.spans)
    found = []
    for gram in grams:
        of_old, changes = np.split(changes, [len(gram._old)])
        # What the free elements gain, the others lose.
        found.append(np.concatenate([gram._new_words(free), of_old if gram._of_free else -of_old]))
        gram.mask = free
    return found
