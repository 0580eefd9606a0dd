"""Terms ``weight |x - reference|``: in an orthant around the references, where no sign changes, they are linear.

An iteration moves in one orthant (Andrew and Gao, "Scalable training of L1-regularized log-linear models", 2007): that
of the last iterate, and for elements at their reference that to which descent leads. Its sides are bounds, so that a
method with bounds works in it as it is. An element that has come to a side is at its reference exactly, and may cross
it in the next iteration.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any

from mpishard.backend.array import elementwise, largest, to_host, zeros
from mpishard.minimizers.bounds import Bounds
from mpishard.minimizers.method import Limits
from mpishard.minimizers.penalty import AtReference
from mpishard.minimizers.space import Space

Array = Any
_NEAR = 4  # units in the last place: a step that ends as near to a side is meant to reach it


@elementwise
def enter(h, slopes, low, high, x, g, weight, reference, lower, upper, /):
    """Choose the orthant of ``x``: its sides, the slopes of the terms in it, and the gradient ``h`` with them.

    An element that stays at its reference has equal sides, and no slope.
    """
    at = (1.0 if g + weight < 0.0 else (-1.0 if g - weight > 0.0 else 0.0)) if x == reference else 0.0
    side = 1.0 if x > reference else (-1.0 if x < reference else at)
    slopes = side * weight
    h = g + slopes
    low = lower if side < 0.0 else (reference if lower < reference else lower)
    high = upper if side > 0.0 else (reference if upper > reference else upper)
    low = low if weight > 0.0 else lower
    high = high if weight > 0.0 else upper
    return h, slopes, low, high


@elementwise
def distances(distance, x, reference, /):
    """``|x - reference|``."""
    distance = abs(x - reference)
    return distance, largest(distance)


@elementwise
def trial(h, distance, x, g, slopes, reference, /):
    """`distances`, and the gradient ``h`` with the slopes of the terms."""
    distance = abs(x - reference)
    h = g + slopes
    return h, distance, largest(h), largest(distance)


@elementwise
def smallest_subgradient(out, h, low, high, /):
    """The subgradient of least norm: that of the orthant, and 0 where an element stays at its reference."""
    out = h if low < high else 0.0
    return out


@elementwise
def advance_to_sides(x, base, d, low, high, /, step, near):
    """``x = P(base + step d)``, without the rounding by which a step may end before the side that it was to reach."""
    x = base + step * d
    x = low if x - low < near * (base - low + abs(low)) else x
    x = high if high - x < near * (high - base + abs(high)) else x
    x = low if x < low else x
    x = high if x > high else x
    return x


class Orthant:
    """The L1 terms of this rank's elements, and the orthant of an iteration, between `lower` and `upper`.

    These are the `bounds`, which are given for all elements, or references within them; an element that is fixed has no
    orthant. `gradient` is that at the base, with the slopes of the terms.
    """

    def __init__(self, limits: Limits, bounds: Bounds, space: Space) -> None:
        weights, reference, like = limits.l1_weights, limits.l1_reference, space.like
        assert weights is not None
        self._is_zero = reference is None
        self._space, self._bounds, self._weights = space, bounds, weights
        self._kinks = weights
        if limits.fixed is not None:
            self._kinks = weights.copy()
            self._kinks[limits.fixed] = 0
        self._reference = zeros(space.size, like.dtype, like=like) if reference is None else reference
        self.lower, self.upper, self.gradient, self._slopes, self._trial, self._distances = (
            zeros(space.size, like.dtype, like=like) for _ in range(6)
        )
        self._weight_top: float | None = None

    def enter(self, base: Array, gradient: Array) -> None:
        """Choose the orthant of a base, where the function without the terms has this gradient."""
        bounds = self._bounds
        enter(
            self.gradient,
            self._slopes,
            self.lower,
            self.upper,
            base,
            gradient,
            self._kinks,
            self._reference,
            bounds.lower,
            bounds.upper,
        )

    def advance(self, point: Array, base: Array, direction: Array, step: float) -> None:
        """``base + step direction``, not beyond the orthant, written to the point."""
        near = _NEAR * self._space.epsilon
        advance_to_sides(point, base, direction, self.lower, self.upper, step, near)

    def evaluate(self, point: Array, gradient: Array) -> tuple[float, Array, float]:
        """The value of the terms, and the gradient with their slopes, with its largest element; two all-reduces.

        The gradient is in working memory, as `smallest_subgradient` is.
        """
        tops = trial(self._trial, self._distances, point, gradient, self._slopes, self._reference)
        top, farthest = self._space.maxima(*tops)
        return self._sum(farthest), self._trial, top

    def value(self, point: Array) -> float:
        """The value of the terms.  Collective."""
        (farthest,) = self._space.maxima(*distances(self._distances, point, self._reference))
        return self._sum(farthest)

    def _sum(self, farthest: float) -> float:
        if self._weight_top is None:
            (self._weight_top,) = self._space.largest(self._weights)
        (total,) = self._space.dots([(self._weights, self._distances)], [self._weight_top * farthest])
        return total

    def smallest_subgradient(self) -> Array:
        """The subgradient of least norm at the base, in working memory."""
        smallest_subgradient(self._trial, self.gradient, self.lower, self.upper)
        return self._trial

    def leaving(self, base: Array) -> int:
        """The number of elements, over all ranks, that are at their reference, and descend from there."""
        return self._count((base == self._reference) & (self.lower < self.upper) & (self._kinks > 0))

    def at_reference(self, point: Array) -> AtReference:
        """The elements of a point that are at their reference.  Collective."""
        has_term = self._weights > 0
        at = has_term & (point == self._reference)
        return AtReference(self._count(at), self._count(has_term), self._is_zero)

    def _count(self, marks: Array) -> int:
        own = sum(int(to_host(marks[start:stop].sum())) for start, stop in self._space.spans)
        return self._space.count(own)[0]
