"""The pairs of steps and changes of gradients of a quasi-Newton method, and their dot products.

The inverse Hessian that they define is never formed.  It is applied by its compact form (Byrd, Nocedal and Schnabel,
"Representations of quasi-Newton matrices and their use in limited memory methods", Mathematical Programming 63, 1994,
equation 3.1): from dot products with all pairs follow, on every rank alike, the coefficients of a sum over the pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpishard.backend import exact_dot
from mpishard.backend.exact_rows import Factor, words_with
from mpishard.minimizers import small
from mpishard.minimizers.space import Space

Array = Any
# Some rows times a vector: numbers of the rows, the vector, this rank's words, and the bounds of the products.
Words = tuple[Sequence[int], Array, np.ndarray, list[float]]
_LARGE = 2.0**499  # products of larger elements count as infinite


class History:
    """The newest m pairs (s, y), in the rows of one array.

    Parameters
    ----------
    space : Space
        Of the vectors.
    rows : 2-D array
        2 m rows: all s, then all y.  The caller keeps and saves them.

    Attributes
    ----------
    order : list of int
        The pairs in use, oldest first: pair j is in the rows j and m + j.
    """

    def __init__(self, space: Space, rows: Array) -> None:
        self.space = space
        self.rows = rows
        self.most = len(rows) // 2
        self.forget()

    def __len__(self) -> int:
        return len(self.order)

    def forget(self) -> None:
        """Drop all pairs.  Not collective."""
        m = self.most
        self.order: list[int] = []
        self._new = -1  # the pair whose products are not known yet
        self._tops = [0.0] * (2 * m)
        self.sy = [[0.0] * m for _ in range(m)]  # [i][j] is s_i'y_j, known where i is no newer than j
        self.yy = [[0.0] * m for _ in range(m)]

    def open(self) -> tuple[Array, Array]:
        """The rows s and y for a new pair; the oldest pair is dropped if there is no room.  Not collective."""
        full = len(self.order) == self.most
        self._new = self.order.pop(0) if full else min(set(range(self.most)) - set(self.order))
        return self.rows[self._new], self.rows[self.most + self._new]

    @property
    def opened(self) -> tuple[Array, ...]:
        """The rows s and y of the new pair; empty if there is none."""
        return tuple(self.rows[row] for row in self.opened_rows)

    @property
    def opened_rows(self) -> tuple[int, ...]:
        """The numbers of these rows."""
        return (self._new, self.most + self._new) if self._new >= 0 else ()

    def measure(self, s_top: float, y_top: float) -> None:
        """Say what the `largest` of the new pair are.  Not collective."""
        self._tops[self._new], self._tops[self.most + self._new] = s_top, y_top
        if not (0 < s_top < _LARGE and 0 < y_top < _LARGE):
            self._new = -1

    def products(self, vector: Array, top: float) -> tuple[list[float], list[float]]:
        """The dot products of each s and of each y, in order, with a vector.

        Before, the new pair is taken in, if there is one and its curvature is positive.  Collective: one all-reduce.
        """
        new = self._take_new()
        factors = [self._factor(vector, top), *([self._factor(*self.newest_y)] if new >= 0 else [])]
        words, _ = words_with(self.rows, self._all_rows, factors, self.space.spans)
        found, *of_new = self._values(self._parts(factors, words))
        size = len(self.order)
        if of_new:
            for products, values in zip((self.sy, self.yy), (of_new[0][:size], of_new[0][size:]), strict=True):
                for pair, value in zip(self.order, values, strict=True):
                    products[pair][new] = value
            for pair in self.order:
                self.yy[new][pair] = self.yy[pair][new]
        return self._without_negative(new, found[:size], found[size:])

    def y_products(self, vector: Array, top: float) -> list[float]:
        """The dot products of each y, in order, with a vector.  Collective: one all-reduce."""
        return self._values([self._words(self._rows_of_y, vector, top)])[0]

    @property
    def newest_y(self) -> tuple[Array, float]:
        """The newest y and its largest element."""
        row = self.most + self.order[-1]
        return self.rows[row], self._tops[row]

    @property
    def reach(self) -> float:
        """About half of the length of the newest s over that of its y, from their largest elements; 0 without pairs."""
        newest = self._new if self._new >= 0 else (self.order[-1] if self.order else -1)
        return 0.5 * self._tops[newest] / self._tops[self.most + newest] if newest >= 0 else 0.0

    def curvature(self) -> float:
        """s'y of the newest pair."""
        newest = self.order[-1]
        return self.sy[newest][newest]

    def gamma(self) -> float:
        """s'y / y'y of the newest pair: the size of the inverse Hessian."""
        newest = self.order[-1]
        return self.sy[newest][newest] / self.yy[newest][newest]

    def inverse_times(self, sg: Sequence[float], yg: Sequence[float], gamma: float) -> tuple[list[float], list[float]]:
        """The inverse Hessian times g, less ``gamma g``, as coefficients of s and y.

        Parameters
        ----------
        sg, yg : sequence of float
            The `products` of g.
        gamma : float
            Of the initial inverse Hessian.
        """
        p = self.solve(sg)
        pairs = range(len(self.order))
        right = []
        for i, row in enumerate(self.order):
            yyp = small.dot([self.yy[row][other] for other in self.order], p)
            right.append(self.sy[row][row] * p[i] + gamma * (yyp - yg[i]))
        return self.solve_transposed(right), [-gamma * p[i] for i in pairs]

    def solve(self, right: Sequence[float]) -> list[float]:
        """Solve R p = right, where R is the upper triangle of S'Y: the first loop of the two-loop recursion."""
        p = [0.0] * len(self.order)
        for i in reversed(range(len(p))):
            row = self.sy[self.order[i]]
            rest = small.dot([row[j] for j in self.order[i + 1 :]], p[i + 1 :])
            p[i] = (right[i] - rest) / row[self.order[i]]
        return p

    def solve_transposed(self, right: Sequence[float]) -> list[float]:
        """Solve R'p = right: the second loop."""
        p = [0.0] * len(self.order)
        for i, row in enumerate(self.order):
            rest = small.dot([self.sy[j][row] for j in self.order[:i]], p[:i])
            p[i] = (right[i] - rest) / self.sy[row][row]
        return p

    def solve_second(self, p: Sequence[float], yr: Sequence[float]) -> list[float]:
        """The coefficients of s after the second loop, from those of the first and the products y'r."""
        curvatures = [self.sy[row][row] for row in self.order]
        return self.solve_transposed([d * a - b for d, a, b in zip(curvatures, p, yr, strict=True)])

    def combine(self, of_s: Sequence[float], of_y: Sequence[float], vector: Array, factor: float, out: Array) -> None:
        """``out = factor vector + a sum over the pairs``; no coefficients are zeros.  Not collective."""
        indices = [*(self.order if of_s else ()), *(self._rows_of_y if of_y else ())]
        exact_dot.combine(self.rows, indices, [*of_s, *of_y], vector, factor, out)

    def to_metadata(self) -> dict[str, Any]:
        """All but the rows, as plain numbers and lists."""
        sy, yy = ([list(row) for row in products] for products in (self.sy, self.yy))
        return {"order": list(self.order), "new": self._new, "tops": list(self._tops), "sy": sy, "yy": yy}

    def restore(self, metadata: Mapping[str, Any]) -> None:
        """Continue from `to_metadata`.

        Raises
        ------
        ValueError
            If something is missing, or is of another number of pairs; nothing has changed then.
        """
        m = self.most
        try:
            order, new = [int(pair) for pair in metadata["order"]], int(metadata["new"])
            tops = [float(top) for top in metadata["tops"]]
            sy, yy = ([[float(value) for value in row] for row in metadata[name]] for name in ("sy", "yy"))
        except (KeyError, TypeError) as error:
            raise ValueError(f"the history of a quasi-Newton method cannot be restored: {error!r}") from None
        if len(tops) != 2 * m or not {*order, new} <= set(range(-1, m)):
            raise ValueError(f"the saved history is of {len(tops) // 2} pairs, but history={m}")
        self.order, self._new, self._tops, self.sy, self.yy = order, new, tops, sy, yy

    @property
    def _rows_of_y(self) -> list[int]:
        return [self.most + pair for pair in self.order]

    @property
    def _all_rows(self) -> list[int]:
        return [*self.order, *self._rows_of_y]

    def _take_new(self) -> int:
        """Put the new pair at the end of the order; it is returned, or -1."""
        new, self._new = self._new, -1
        if new >= 0:
            self.order.append(new)
        return new

    def _without_negative(self, new: int, sg: list[float], yg: list[float]) -> tuple[list[float], list[float]]:
        """Drop the pair that was taken in, and its products, if its curvature or its y'y is not positive."""
        if new >= 0 and not (self.sy[new][new] > 0 and self.yy[new][new] > 0):
            self.order.pop()
            return sg[:-1], yg[:-1]
        return sg, yg

    def _words(self, indices: Sequence[int], vector: Array, top: float) -> Words:
        """The products of some rows with a vector whose largest element is `top`, before they are summed."""
        tops = [self._tops[index] * top for index in indices]
        return indices, vector, exact_dot.row_dot_words(self.rows, indices, vector, tops, self.space.spans), tops

    def _factor(self, vector: Array, top: float, of_free: bool | None = None) -> Factor:
        """A vector that all rows are multiplied by; `top` bounds its elements."""
        return Factor(vector, [self._tops[index] * top for index in self._all_rows], of_free)

    def _parts(self, factors: Sequence[Factor], words: np.ndarray) -> list[Words]:
        """The products of all rows with vectors, before they are summed."""
        rows = self._all_rows
        return [(rows, factor.vector, found, list(factor.tops)) for factor, found in zip(factors, words, strict=False)]

    def _sum(self, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The sums of words over the ranks, by one all-reduce of all parts."""
        words = np.concatenate(parts)
        if len(words):
            self.space.add(words)
        return np.split(words, np.cumsum([len(part) for part in parts])[:-1])

    def _values(self, parts: Sequence[Words], sums: Sequence[np.ndarray] | None = None) -> list[list[float]]:
        """The products of each part, by one all-reduce of all if their sums are not given; rarely by two more."""
        if sums is None:
            sums = self._sum([words for _, _, words, _ in parts])
        pairs = [(self.rows[index], vector) for indices, vector, _, _ in parts for index in indices]
        tops = [top for _, _, _, tops in parts for top in tops]
        found = iter(self.space.values(pairs, np.concatenate(sums), tops))
        return [[next(found) for _ in indices] for indices, _, _, _ in parts]
