"""The pairs of a quasi-Newton method where only some elements are free: its Hessian of the free elements, inverted.

This is the subspace minimisation of L-BFGS-B (Byrd, Lu, Nocedal and Zhu, "A limited memory algorithm for bound
constrained optimization", 1995, section 5.1): not the inverse of the whole Hessian is restricted to the free elements,
but the Hessian, and this is inverted.  So pairs remain of use, whatever elements were free when they were made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpishard.backend import exact_dot
from mpishard.minimizers import small
from mpishard.minimizers.counted_space import CountedSpace
from mpishard.minimizers.gram import Gram
from mpishard.minimizers.history import History
from mpishard.minimizers.space import Space

Array = Any


class ReducedHistory(History):
    """The newest m pairs (s, y), and their dot products over free elements and over the others.

    Parameters
    ----------
    space : CountedSpace
    rows : 2-D array
        As for `History`.
    """

    def __init__(self, space: Space, rows: Array) -> None:
        if not isinstance(space, CountedSpace):
            raise TypeError(f"bounds need a space of counted elements, got {type(space).__name__}")
        m = len(rows) // 2
        self._sums: CountedSpace = space
        of_s, of_y = range(m), range(m, 2 * m)
        self._free = Gram(space, rows, of_s, of_y)
        # With s and y exchanged: products of a y with no older s, and of s with s.
        self._held = Gram(space, rows, of_y, of_s)
        super().__init__(space, rows)

    def forget(self) -> None:
        super().forget()
        self._free.clear()
        self._held.clear()

    def measure(self, s_top: float, y_top: float) -> None:
        super().measure(s_top, y_top)
        self._follow()

    def restore(self, metadata: Mapping[str, Any]) -> None:
        super().restore(metadata)
        self._free.clear()
        self._held.clear()
        self._follow()

    def reduced_times(
        self, free: Array, g: Array, top: float, initial_scaling: float | None
    ) -> tuple[float, list[float], list[float]]:
        """The inverse of the Hessian of the free elements, times g.

        Collective: one all-reduce.

        Parameters
        ----------
        free : 1-D array of bool
            This rank's free elements.
        g : 1-D array
            0 where an element is not free.
        top : float
            Its `largest`.
        initial_scaling : float or None
            Gamma, the size of the initial inverse Hessian; None for s'y / y'y of the newest pair.

        Returns
        -------
        gamma : float
        of_s, of_y : list of float
            Coefficients, oldest first: the result is ``gamma g`` and the sum over the pairs, of the free elements.
        """
        sg, yg = self._add_up(free, g, top)
        if not self.order:
            return initial_scaling or 1.0, [], []
        gamma = initial_scaling or self.gamma()
        curvatures = np.array([self.sy[pair][pair] for pair in self.order])
        # With D = diag(s'y), and sums over free (F) and other elements (A), solve for the coefficients a of y, b of s:
        #   [-(D + gamma Y_F'Y_F)  E'             ] [a]   [-gamma Y_F'g]
        #   [E                     S_A'S_A / gamma] [b] = [-S_F'g      ],  E = below(S_A'Y_A) - not_below(S_F'Y_F)
        # which is (5.11) of the paper, with its W = (Y, S / gamma).
        below = np.tril(self._held.sy.T, -1)
        mixed = below - self._free.sy
        matrix = np.block([[-(np.diag(curvatures) + gamma * self._free.yy), mixed.T], [mixed, self._held.yy / gamma]])
        right = np.array([*(-gamma * product for product in yg), *(-product for product in sg)])
        # In pairs that are scaled so that s'y = 1 the numbers are of one size.
        scale = np.tile(1 / np.sqrt(curvatures), 2)
        solution = np.array(small.solve(scale[:, None] * matrix * scale, (scale * right).tolist())) * scale
        of_y, of_s = (-gamma * solution[: len(yg)]).tolist(), (-solution[len(yg) :]).tolist()
        return gamma, of_s, of_y

    def _follow(self) -> None:
        """Let the Gram matrices have the pairs of this history."""
        order = [*self.order, *([self._new] if self._new >= 0 else [])]
        for gram in (self._free, self._held):
            for pair in set(gram.order) - set(order):
                gram.drop(pair)
        for pair in order:
            if pair == self._new or pair not in self._free.order:
                s_top, y_top = self._tops[pair], self._tops[self.most + pair]
                self._free.add(pair, s_top, y_top)
                self._held.add(pair, y_top, s_top)

    def _add_up(self, free: Array, g: Array, top: float) -> tuple[list[float], list[float]]:
        """Take in the new pair, let the products follow the free elements, and return those of s and y with g."""
        m, new, spans = self.most, self._new, self._sums.spans
        self._new = -1
        if new >= 0:
            self.order.append(new)
        parts = [self._free.prepare(free), self._held.prepare(~free)]
        indices = [*self.order, *(m + pair for pair in self.order)]
        tops = [self._tops[index] * top for index in indices]
        parts.append(exact_dot.row_dot_words(self.rows, indices, g, tops, spans))
        of_new: Sequence[float] = ()
        if new >= 0:
            of_new = [self._tops[index] * self._tops[m + new] for index in (new, m + new)]
            parts.append(exact_dot.row_dot_words(self.rows, [new, m + new], self.rows[m + new], of_new, spans))
        words = np.concatenate(parts)
        if len(words):
            self._sums.add(words)
        ends = np.cumsum([len(part) for part in parts])
        on_free, on_held, of_g, rest = np.split(words, ends[:3])
        self._free.take(on_free)
        self._held.take(on_held)
        products = exact_dot.values(of_g, tops)
        sg, yg = products[: len(self.order)], products[len(self.order) :]
        if new >= 0:
            self.sy[new][new], self.yy[new][new] = exact_dot.values(rest, of_new)
            if not self.sy[new][new] > 0:
                self.order.pop()
                self._free.drop(new)
                self._held.drop(new)
                sg.pop()
                yg.pop()
        return sg, yg
