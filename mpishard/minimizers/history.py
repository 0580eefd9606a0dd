"""The pairs of steps and changes of gradients of a quasi-Newton method, and their dot products.

The inverse Hessian that they define is never formed. It is applied by its compact form (Byrd, Nocedal and Schnabel,
"Representations of quasi-Newton matrices and their use in limited memory methods", Mathematical Programming 63, 1994,
equation 3.1): dot products with all pairs give, identically on every rank, the coefficients of a sum over the pairs.

Dot products are summed exactly, as the `words` of `mpishard.backend.exact`. A `top` bounds the elements of a vector, or
the terms of a dot product, and fixes the scale of its words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from mpishard.backend import exact
from mpishard.backend.exact_rows import Factor, words_with
from mpishard.minimizers import small
from mpishard.minimizers.cauchy import Breakpoints, Curvature, Path
from mpishard.minimizers.gram import Gram, prepare_all
from mpishard.minimizers.space import Space

Array = Any
# Some rows times a vector: numbers of the rows, the vector, this rank's words, and the tops with which they were made.
Words = tuple[Sequence[int], Array, np.ndarray, list[float]]
_LARGE = 2.0**499  # products of larger elements count as infinite


class History:
    """The newest m pairs (s, y), in the 2 m rows of one array: all s, then all y. The caller keeps and saves the rows.

    `order` has the pairs in use, oldest first: pair j is in the rows j and m + j.
    """

    def __init__(self, space: Space, rows: Array) -> None:
        self.space = space
        self.rows = rows
        self.most = len(rows) // 2
        self.forget()

    def __len__(self) -> int:
        return len(self.order)

    def forget(self) -> None:
        m = self.most
        self.order: list[int] = []
        self._new = -1  # the pair whose products are not known yet
        self._tops = [0.0] * (2 * m)
        # [i][j] is s_i'y_j, known where i is no newer than j; in `ReducedHistory` where it is no older.
        self.sy = [[0.0] * m for _ in range(m)]
        self.yy = [[0.0] * m for _ in range(m)]

    def open(self) -> tuple[Array, Array]:
        """The rows s and y for a new pair; the oldest pair is dropped if there is no room."""
        full = len(self.order) == self.most
        self._new = self.order.pop(0) if full else min(set(range(self.most)) - set(self.order))
        return self.rows[self._new], self.rows[self.most + self._new]

    @property
    def opened(self) -> tuple[Array, ...]:
        """The rows s and y of the new pair; empty without one."""
        return tuple(self.rows[row] for row in self.opened_rows)

    @property
    def opened_rows(self) -> tuple[int, ...]:
        return (self._new, self.most + self._new) if self._new >= 0 else ()

    def set_tops(self, s_top: float, y_top: float) -> None:
        """Set the largest elements of the new pair; drop the pair if one of them is 0, too large or not finite."""
        self._tops[self._new], self._tops[self.most + self._new] = s_top, y_top
        if not (0 < s_top < _LARGE and 0 < y_top < _LARGE):
            self._new = -1

    def products(self, vector: Array, top: float) -> tuple[list[float], list[float]]:
        """The dot products of each s and of each y, in order, with a vector. Collective: one all-reduce.

        The new pair is added before, if there is one and its curvature is positive.
        """
        new = self._take_new()
        factors = [self._factor(vector, top), *([self._factor(*self.newest_y)] if new >= 0 else [])]
        words = words_with(self.rows, self._all_rows, factors, self.space.spans)
        found, *of_new = self._values(self._parts(factors, words))
        size = len(self.order)
        if of_new:
            for products, values in zip((self.sy, self.yy), (of_new[0][:size], of_new[0][size:]), strict=True):
                for pair, value in zip(self.order, values, strict=True):
                    products[pair][new] = value
            for pair in self.order:
                self.yy[new][pair] = self.yy[pair][new]
        sg, yg = found[:size], found[size:]
        if new >= 0 and not (self.sy[new][new] > 0 and self.yy[new][new] > 0):
            self.order.pop()
            return sg[:-1], yg[:-1]
        return sg, yg

    def y_products(self, vector: Array, top: float) -> list[float]:
        """The dot products of each y, in order, with a vector.  Collective: one all-reduce."""
        return self._values([self._words(self._rows_of_y, vector, top)])[0]

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

        `sg` and `yg` are the `products` of g; `gamma` is the size of the initial inverse Hessian.
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
        """``out = factor vector + a sum over the pairs``; no coefficients are zeros."""
        indices = [*(self.order if of_s else ()), *(self._rows_of_y if of_y else ())]
        exact.combine(self.rows, indices, [*of_s, *of_y], vector, factor, out)

    def to_metadata(self) -> dict[str, Any]:
        """All but the rows, as plain numbers and lists."""
        sy, yy = ([list(row) for row in products] for products in (self.sy, self.yy))
        return {"order": list(self.order), "new": self._new, "tops": list(self._tops), "sy": sy, "yy": yy}

    def restore(self, metadata: Mapping[str, Any]) -> None:
        """Continue from `to_metadata`.

        Raises ValueError, and changes nothing, if something is missing or the number of pairs differs.
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
        """Put the new pair at the end of the order; return it, or -1."""
        new, self._new = self._new, -1
        if new >= 0:
            self.order.append(new)
        return new

    def _words(self, indices: Sequence[int], vector: Array, top: float) -> Words:
        """The products of some rows with a vector whose largest element is `top`, before they are summed."""
        tops = [self._tops[index] * top for index in indices]
        return indices, vector, exact.row_dot_words(self.rows, indices, vector, tops, self.space.spans), tops

    def _factor(self, vector: Array, top: float, of_free: bool | None = None) -> Factor:
        """A vector by which all rows are multiplied; `top` bounds its elements."""
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
        stops = accumulate(map(len, parts))
        return [words[stop - len(part) : stop] for part, stop in zip(parts, stops, strict=True)]

    def _values(self, parts: Sequence[Words], sums: Sequence[np.ndarray] | None = None) -> list[list[float]]:
        """The products of each part, by one all-reduce of all if their sums are not given; rarely by two more."""
        if sums is None:
            sums = self._sum([words for _, _, words, _ in parts])
        pairs = [(self.rows[index], vector) for indices, vector, _, _ in parts for index in indices]
        tops = [top for _, _, _, tops in parts for top in tops]
        found = iter(self.space.values(pairs, np.concatenate(sums), tops))
        return [[next(found) for _ in indices] for indices, _, _, _ in parts]


# The pairs of a quasi-Newton method with bounds: its Hessian, and that of the free elements, inverted.
#
# This is L-BFGS-B (Byrd, Lu, Nocedal and Zhu, "A limited memory algorithm for bound constrained optimization", 1995):
# the generalised Cauchy point of section 4, and the subspace minimisation of section 5.1.  The Hessian is restricted to
# the free elements and then inverted, not the inverse restricted.  So pairs remain of use, whatever elements were free
# when they were made.


class CauchyPoint(NamedTuple):
    """The end of steepest descent, and the sums that the subspace minimisation takes from it."""

    length: float  # of the path; NaN if the pairs define no model, to rounding
    # Int64 (rows, 2): products of each s and y with the gradient of the elements that have not met their bounds.
    words: np.ndarray
    tops: list[float]  # with which `words` were made
    arrived: np.ndarray  # float64 (rows,): products of each s and y with the steps of the other elements


class ReducedHistory(History):
    """The newest m pairs (s, y), and their dot products over all elements, over free ones and over the others.

    Of S'Y it has s_i'y_j where i is no older than j, the other triangle than `History`, so that `products`, `solve` and
    what uses them are not for it; the rest is known over the free elements only.
    """

    def __init__(self, space: Space, rows: Array) -> None:
        m = len(rows) // 2
        of_s, of_y = range(m), range(m, 2 * m)
        self._free_gram = Gram(space, rows, of_s, of_y)
        # With s and y exchanged: products of a y with no older s, and of s with s.
        self._held_gram = Gram(space, rows, of_y, of_s, of_free=False)
        self._grams = self._free_gram, self._held_gram
        super().__init__(space, rows)

    def forget(self) -> None:
        super().forget()
        self.ss = [[0.0] * self.most for _ in range(self.most)]
        for gram in self._grams:
            gram.clear()

    def set_tops(self, s_top: float, y_top: float) -> None:
        super().set_tops(s_top, y_top)
        self._follow()

    def to_metadata(self) -> dict[str, Any]:
        tops = [[[*pairs, top] for pairs, top in gram.finer_tops.items()] for gram in self._grams]
        return {**super().to_metadata(), "ss": [list(row) for row in self.ss], "bounds": tops}

    def restore(self, metadata: Mapping[str, Any]) -> None:
        if "ss" not in metadata and "order" in metadata:
            raise ValueError(
                "the saved history of L-BFGS-B is of a release without the generalised Cauchy point, whose next points "
                "are others; continue with that release, or take the parameters alone as a start"
            )
        try:
            of_grams = [{(int(i), int(j)): float(top) for i, j, top in tops} for tops in metadata["bounds"]]
            ss = [[float(value) for value in row] for row in metadata["ss"]]
        except (KeyError, TypeError) as error:
            raise ValueError(f"the history of a quasi-Newton method cannot be restored: {error!r}") from None
        super().restore(metadata)
        self.ss = ss
        for gram in self._grams:
            gram.clear()
        self._follow()
        for gram, tops in zip(self._grams, of_grams, strict=True):
            gram.refine(tops)

    def cauchy_point(
        self,
        descent: Array,
        breakpoints: Breakpoints,
        top: float,
        initial_scaling: float | None,
    ) -> CauchyPoint:
        """The minimum of the model along the path of steepest descent, which bends where elements meet their bounds.

        Collective. The new pair is added before, if there is one and its curvature is positive. `descent` and
        `breakpoints` are as of `Path`, and `top` is the `largest` of the descent; `initial_scaling` is gamma, the size
        of the initial inverse Hessian, None for s'y / y'y of the newest pair.
        """
        words, tops = self._products_with(descent, top)
        gamma = self._gamma(initial_scaling)
        curvature = self._curvature(gamma)
        while curvature.lower is None:  # the pairs depend on each other, to rounding
            words, tops = self._drop(0, words, tops)
            curvature = self._curvature(gamma)
        rows = self._all_rows
        if not rows:
            return CauchyPoint(self._gamma(initial_scaling), words[:0], [], np.zeros(0))
        path = Path(self.space, self.rows, rows, curvature, 1 / gamma, descent, breakpoints, words, tops)
        length = path.minimize([self._tops[row] for row in rows])
        return CauchyPoint(length, path.words[:-1], tops[:-1], path.arrived)

    def subspace_step(
        self, free: Array, g: Array, point: CauchyPoint, initial_scaling: float | None
    ) -> tuple[float, list[float], list[float]]:
        """The step of the free elements to the minimum of the quadratic model, where the others are at their bounds.

        Collective: one all-reduce. `free` marks this rank's elements that have not met their bounds at the Cauchy
        point, and `g` has their gradient; of others it may become 0. Returns gamma and coefficients of s and y, oldest
        first: the step is ``-gamma g`` and the sum over the pairs, of the free elements.
        """
        gamma, size = self._gamma(initial_scaling), len(self.order)
        if not size:
            return gamma, [], []
        sums = self._sum(prepare_all(self._grams, free))
        for gram in self._grams:
            gram.take(sums.pop(0))
        total = self.space.total
        if any(exact.is_doubtful(*each, total) for each in zip(point.words.tolist(), point.tops, strict=True)):
            g *= free  # the products are made again
        (of_g,) = self._values([(self._all_rows, g, point.words, point.tops)], [point.words])
        sg, yg, sz, yz = of_g[:size], of_g[size:], point.arrived[:size], point.arrived[size:]
        curvatures = np.array([self.sy[pair][pair] for pair in self.order])
        # With D = diag(s'y), the step z of the others, and sums over free (F) and other elements (A), solve for the
        # coefficients: gamma a of y, b of s.
        #   [-(D + gamma Y_F'Y_F)  E'             ] [a]   [Y_A'z - gamma Y_F'g ]
        #   [E                     S_A'S_A / gamma] [b] = [S_A'z / gamma - S_F'g],
        #   E = below(S_A'Y_A) - not_below(S_F'Y_F)
        # This follows from (5.11) of the paper, with its W = (Y, S / gamma).
        of_free, of_held = self._free_gram, self._held_gram
        below = np.tril(of_held.sy.T, -1)
        mixed = below - of_free.sy
        matrix = np.block([[-(np.diag(curvatures) + gamma * of_free.yy), mixed.T], [mixed, of_held.yy / gamma]])
        right = np.concatenate([np.subtract(yz, np.multiply(gamma, yg)), np.subtract(np.divide(sz, gamma), sg)])
        # In pairs that are scaled so that s'y = 1 the numbers are of one size.
        scale = np.tile(1 / np.sqrt(curvatures), 2)
        solution = np.array(small.solve(scale[:, None] * matrix * scale, (scale * right).tolist())) * scale
        return gamma, solution[size:].tolist(), (gamma * solution[:size]).tolist()

    def _curvature(self, gamma: float) -> Curvature:
        size = len(self.order)
        sy, ss = (np.array([[of[i][j] for j in self.order] for i in self.order]) for of in (self.sy, self.ss))
        return Curvature(sy.reshape(size, size), ss.reshape(size, size), 1 / gamma)

    def _drop(self, place: int, words: np.ndarray, tops: list[float]) -> tuple[np.ndarray, list[float]]:
        """Forget the pair at this place of the order; the words and tops of products with all rows without its own."""
        gone = place, len(self.order) + place
        pair = self.order.pop(place)
        for gram in self._grams:
            gram.drop(pair)
        return np.delete(words, gone, axis=0), [top for k, top in enumerate(tops) if k not in gone]

    def _gamma(self, initial_scaling: float | None) -> float:
        return initial_scaling or (self.gamma() if self.order else 1.0)

    def _follow(self) -> None:
        """Give the Gram matrices the pairs of this history."""
        order = [*self.order, *([self._new] if self._new >= 0 else [])]
        for gram in self._grams:
            for pair in set(gram.order) - set(order):
                gram.drop(pair)
        for pair in order:
            if pair == self._new or pair not in self._free_gram.order:
                s_top, y_top = self._tops[pair], self._tops[self.most + pair]
                self._free_gram.add(pair, s_top, y_top)
                self._held_gram.add(pair, y_top, s_top)

    def _products_with(self, vector: Array, top: float) -> tuple[np.ndarray, list[float]]:
        """The words of each s, each y and the vector with the vector, over all ranks, and their tops.

        The new pair is added as by `products`.
        """
        new, rows = self._take_new(), self._all_rows
        size, known = len(self.order), self._free_gram.mask
        factors = [self._factor(vector, top)]
        if new >= 0:
            s, y = self.rows[new], self.rows[self.most + new]
            factors.append(self._factor(s, self._tops[new]))
            if known is not None:
                # Over the elements that were free before; the Gram matrices follow when the new ones are known.
                factors += [self._factor(y, self._tops[self.most + new], True)]
                factors += [self._factor(s, self._tops[new], False)]
        found = words_with(self.rows, rows, factors, self.space.spans, known)
        parts = self._parts(factors[:2], found)
        square = np.zeros((1, 2), np.int64)
        square[0] = exact.dot_words(vector, vector, top * top, self.space.spans)
        parts.append(([], vector, square, [top * top]))
        if new >= 0:
            parts.append(self._words([self.most + new], *self.newest_y))
        sums = self._sum([*(words for _, _, words, _ in parts), *found[2:]])
        rows_with = [(self.rows[row], vector) for row in rows]
        words, tops = self.space.refined(rows_with, sums[0], parts[0][-1])
        if new < 0:
            return np.concatenate([words, sums[1]]), [*tops, top * top]
        if known is not None:
            self._free_gram.learn(sums[4])
            # The pairs of s with s and s with y come in the order of y with s and y with y.
            self._held_gram.learn(np.roll(sums[5], size, axis=0))
        doubtful = exact.is_doubtful(sums[1][2 * size - 1].tolist(), parts[1][-1][-1], self.space.total)
        of_s, of_y = self._values([parts[1], parts[3]], [sums[1], sums[3]])
        self.yy[new][new] = of_y[0]
        for place, pair in enumerate(self.order):
            self.ss[new][pair] = self.ss[pair][new] = of_s[place]
            self.sy[new][pair] = of_s[size + place]
        if not (self.sy[new][new] > 0 and self.yy[new][new] > 0):
            words, tops = self._drop(size - 1, words, tops)
        elif doubtful:
            self._refine(new)
        return np.concatenate([words, sums[2]]), [*tops, top * top]

    def _refine(self, new: int) -> None:
        """Measure the tops of products of s and y of the new pair and the others. Collective."""
        pairs = [*((pair, new) for pair in self.order), *((new, pair) for pair in self.order[:-1])]  # of s, of y
        tops = self.space.largest_products([(self.rows[i], self.rows[self.most + j]) for i, j in pairs])
        size = len(self.order)
        self._free_gram.refine(dict(zip(pairs[:size], tops[:size], strict=True)))
        # The diagonal, and where the y is older.
        of_held = zip(pairs[size - 1 :], tops[size - 1 :], strict=True)
        self._held_gram.refine({(j, i): top for (i, j), top in of_held})
