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
from mpishard.backend.exact_rows import Changes, Factor, words_with
from mpishard.minimizers import small
from mpishard.minimizers.gram import Gram
from mpishard.minimizers.history import History
from mpishard.minimizers.space import Space

Array = Any


class ReducedHistory(History):
    """The newest m pairs (s, y), and their dot products over free elements and over the others.

    Parameters
    ----------
    space : Space
    rows : 2-D array
        As for `History`.
    """

    def __init__(self, space: Space, rows: Array) -> None:
        m = len(rows) // 2
        of_s, of_y = range(m), range(m, 2 * m)
        self._free = Gram(space, rows, of_s, of_y)
        # With s and y exchanged: products of a y with no older s, and of s with s.
        self._held = Gram(space, rows, of_y, of_s, of_free=False)
        self._grams = self._free, self._held
        super().__init__(space, rows)

    def forget(self) -> None:
        super().forget()
        for gram in self._grams:
            gram.clear()

    def measure(self, s_top: float, y_top: float) -> None:
        super().measure(s_top, y_top)
        self._follow()

    def to_metadata(self) -> dict[str, Any]:
        bounds = [[[*pairs, top] for pairs, top in gram.bounds.items()] for gram in self._grams]
        return {**super().to_metadata(), "bounds": bounds}

    def restore(self, metadata: Mapping[str, Any]) -> None:
        try:
            of_grams = [{(int(i), int(j)): float(top) for i, j, top in bounds} for bounds in metadata["bounds"]]
        except (KeyError, TypeError) as error:
            raise ValueError(f"the history of a quasi-Newton method cannot be restored: {error!r}") from None
        super().restore(metadata)
        for gram in self._grams:
            gram.clear()
        self._follow()
        for gram, bounds in zip(self._grams, of_grams, strict=True):
            gram.bound(bounds)

    def reduced_times(
        self, free: Array, g: Array, step: Array, tops: tuple[float, float], initial_scaling: float | None
    ) -> tuple[float, list[float], list[float], float]:
        """The step of the free elements to the minimum of the quadratic model, where the others take a step of theirs.

        Collective: one all-reduce.

        Parameters
        ----------
        free : 1-D array of bool
            This rank's free elements.
        g : 1-D array
            The gradient of free elements, 0 for others.
        step : 1-D array
            The step of the other elements, 0 for free ones.
        tops : (float, float)
            Bounds on the `largest` of both.
        initial_scaling : float or None
            Gamma, the size of the initial inverse Hessian; None for s'y / y'y of the newest pair.

        Returns
        -------
        gamma : float
        of_s, of_y : list of float
            Coefficients, oldest first: the step is ``-gamma g`` and the sum over the pairs, of the free elements.
        product : float
            Of this sum and g.
        """
        sg, yg, sz, yz = self._products_over(free, g, step, tops)
        if not self.order:
            return initial_scaling or 1.0, [], [], 0.0
        gamma = initial_scaling or self.gamma()
        curvatures = np.array([self.sy[pair][pair] for pair in self.order])
        # With D = diag(s'y), the step z of the others, and sums over free (F) and other elements (A), solve for the
        # coefficients: gamma a of y, b of s.
        #   [-(D + gamma Y_F'Y_F)  E'             ] [a]   [Y_A'z - gamma Y_F'g ]
        #   [E                     S_A'S_A / gamma] [b] = [S_A'z / gamma - S_F'g],
        #   E = below(S_A'Y_A) - not_below(S_F'Y_F)
        # This follows from (5.11) of the paper, with its W = (Y, S / gamma).
        below = np.tril(self._held.sy.T, -1)
        mixed = below - self._free.sy
        matrix = np.block([[-(np.diag(curvatures) + gamma * self._free.yy), mixed.T], [mixed, self._held.yy / gamma]])
        right = np.concatenate([np.subtract(yz, np.multiply(gamma, yg)), np.subtract(np.divide(sz, gamma), sg)])
        # In pairs that are scaled so that s'y = 1 the numbers are of one size.
        scale = np.tile(1 / np.sqrt(curvatures), 2)
        solution = np.array(small.solve(scale[:, None] * matrix * scale, (scale * right).tolist())) * scale
        size = len(curvatures)
        of_s, of_y = solution[size:].tolist(), (gamma * solution[:size]).tolist()
        return gamma, of_s, of_y, small.dot([*of_s, *of_y], [*sg, *yg])

    def _follow(self) -> None:
        """Let the Gram matrices have the pairs of this history."""
        order = [*self.order, *([self._new] if self._new >= 0 else [])]
        for gram in self._grams:
            for pair in set(gram.order) - set(order):
                gram.drop(pair)
        for pair in order:
            if pair == self._new or pair not in self._free.order:
                s_top, y_top = self._tops[pair], self._tops[self.most + pair]
                self._free.add(pair, s_top, y_top)
                self._held.add(pair, y_top, s_top)

    def _products_over(
        self, free: Array, g: Array, step: Array, tops: tuple[float, float]
    ) -> tuple[list[float], list[float], list[float], list[float]]:
        """The products of s and y with g, and with the step; the Gram matrices follow the free elements.

        Takes the new pair in, as `products`.
        """
        new, size = self._take_new(), len(self.order)
        factors = [self._factor(g, tops[0]), self._factor(step, tops[1])]
        of_grams, words = self._words_of_grams(free, new, factors)
        parts = self._parts(factors, words)
        if new >= 0:
            parts.append(self._words([new, self.most + new], *self.newest_y))
        on_grams = [gram.prepare(free, words) for gram, words in zip(self._grams, of_grams, strict=True)]
        sums = self._sum([*on_grams, *(words for _, _, words, _ in parts)])
        for gram in self._grams:
            gram.take(sums.pop(0))
        # The step of the others is often 0, which is no reason for a second look.
        of_step = exact_dot.values(sums.pop(1), parts.pop(1)[-1])
        doubtful = new >= 0 and exact_dot.is_doubtful(sums[1][0], parts[1][-1][0], self.space.total)
        of_g, *of_new = self._values(parts, sums)
        if of_new:
            self.sy[new][new], self.yy[new][new] = of_new[0]
        sz, yz = self._without_negative(new, of_step[:size], of_step[size:])
        if len(sz) < size:
            for gram in self._grams:
                gram.drop(new)
            return of_g[: size - 1], of_g[size:-1], sz, yz
        if doubtful:
            self._bound(new)
            for gram in self._grams:
                gram.update(free)
        return of_g[:size], of_g[size:], sz, yz

    def _words_of_grams(
        self, free: Array, new: int, factors: Sequence[Factor]
    ) -> tuple[list[np.ndarray | None], np.ndarray]:
        """The words of all rows with some factors, and those that both Gram matrices want, in one pass over the rows.

        None where a Gram matrix must compute its own.
        """
        rows, spans = self._all_rows, self.space.spans
        follows = [gram.follow() for gram in self._grams]
        if None in follows:
            return [None, None], words_with(self.rows, rows, factors, spans)[0]
        (pairs, tops, before), (of_held, tops_of_held, _) = (known for known in follows if known is not None)
        if new >= 0:
            s_row, y_row = new, self.most + new
            with_y = self._factor(self.rows[y_row], self._tops[y_row], True)
            with_s = self._factor(self.rows[s_row], self._tops[s_row], False)
            factors = [*factors, with_y, with_s]
        changes = Changes(before, [*pairs, *of_held], [*tops, *tops_of_held])
        words, changed = words_with(self.rows, rows, factors, spans, free, changes)
        # The pair of s with s and s with y comes in the order of y with s and y with y.
        of_new = [words[2], np.roll(words[3], len(self.order), axis=0)] if new >= 0 else [changed[:0]] * 2
        # What becomes free is no longer held.
        of_old = changed[: len(pairs)], -changed[len(pairs) :]
        return [np.concatenate(each) for each in zip(of_new, of_old, strict=True)], words

    def _bound(self, new: int) -> None:
        """Bound the products of s and y of the new pair and the others by what they are.  Collective."""
        pairs = [*((pair, new) for pair in self.order), *((new, pair) for pair in self.order[:-1])]  # of s, of y
        tops = self.space.largest_products([(self.rows[i], self.rows[self.most + j]) for i, j in pairs])
        size = len(self.order)
        self._free.bound(dict(zip(pairs[:size], tops[:size], strict=True)))
        # The diagonal, and where the y is older.
        self._held.bound({(j, i): top for (i, j), top in zip(pairs[size - 1 :], tops[size - 1 :], strict=True)})
