"""The pairs of steps and changes of gradients of a quasi-Newton method, and their dot products.

The inverse Hessian that they define is never formed.  It is applied by its compact form (Byrd, Nocedal and Schnabel,
"Representations of quasi-Newton matrices and their use in limited memory methods", Mathematical Programming 63, 1994,
equation 3.1): from dot products with all pairs follow, on every rank alike, the coefficients of a sum over the pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mpishard.backend.exact_dot import combine
from mpishard.minimizers import small
from mpishard.minimizers.space import Space

Array = Any
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
        return (self.rows[self._new], self.rows[self.most + self._new]) if self._new >= 0 else ()

    def measure(self, s_top: float, y_top: float) -> None:
        """Say what the `largest` of the new pair are.  Not collective."""
        self._tops[self._new], self._tops[self.most + self._new] = s_top, y_top
        if not (0 < s_top < _LARGE and 0 < y_top < _LARGE):
            self._new = -1

    def complete(self) -> None:
        """Take the new pair in, if there is one, and if its curvature is positive.  Collective: one all-reduce."""
        if self._new < 0:
            return
        new, self._new = self._new, -1
        self.order.append(new)
        for products, values in zip((self.sy, self.yy), self.products(*self.newest_y), strict=True):
            for pair, value in zip(self.order, values, strict=True):
                products[pair][new] = value
        for pair in self.order:
            self.yy[new][pair] = self.yy[pair][new]
        if not self.sy[new][new] > 0:
            self.order.pop()

    def products(self, vector: Array, top: float) -> tuple[list[float], list[float]]:
        """The dot products of each s and of each y, in order, with a vector.  Collective: one all-reduce."""
        found = self._products([*self._rows_of_s, *self._rows_of_y], vector, top)
        return found[: len(self.order)], found[len(self.order) :]

    def s_products(self, vector: Array, top: float) -> list[float]:
        """The dot products of each s with a vector.  Collective: one all-reduce."""
        return self._products(self._rows_of_s, vector, top)

    def y_products(self, vector: Array, top: float) -> list[float]:
        """The dot products of each y with a vector.  Collective: one all-reduce."""
        return self._products(self._rows_of_y, vector, top)

    @property
    def newest_y(self) -> tuple[Array, float]:
        """The newest y and its largest element."""
        row = self.most + self.order[-1]
        return self.rows[row], self._tops[row]

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
        indices = [*(self._rows_of_s if of_s else ()), *(self._rows_of_y if of_y else ())]
        combine(self.rows, indices, [*of_s, *of_y], vector, factor, out)

    def to_metadata(self) -> dict[str, Any]:
        """All but the rows, as plain numbers and lists."""
        return {"order": list(self.order), "new": self._new, "tops": list(self._tops), "sy": self.sy, "yy": self.yy}

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
    def _rows_of_s(self) -> list[int]:
        return list(self.order)

    @property
    def _rows_of_y(self) -> list[int]:
        return [self.most + pair for pair in self.order]

    def _products(self, indices: Sequence[int], vector: Array, top: float) -> list[float]:
        return self.space.row_dots(self.rows, indices, vector, [self._tops[index] * top for index in indices])
