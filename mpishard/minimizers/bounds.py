# mypy: allow-untyped-defs
"""Bounds on the elements of the point, and elements that are fixed: this rank's part."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpishard.backend.array import elementwise, empty, largest, to_host
from mpishard.minimizers.formulas import advance
from mpishard.minimizers.method import Limits
from mpishard.minimizers.space import Space

Array = Any


@elementwise
def clip(x, lower, upper, /):
    """``x`` moved to the nearest value between its bounds; a NaN stays."""
    x = lower if x < lower else x
    x = upper if x > upper else x
    return x


@elementwise
def projected_gradient(out, x, g, lower, upper, /):
    """``x - P(x - g)``, without the rounding of ``x - g`` where no bound is met."""
    out = x - lower if x - g < lower else (x - upper if x - g > upper else g)
    return out


# An element is held if it is at a bound, or beyond it, to which descent by the (scaled) gradient h leads, or if its
# bounds are equal; the others are free.


@elementwise
def mark_free(out, x, h, lower, upper, /):
    """1 where an element is free, else 0."""
    out = (0.0 if x <= lower else 1.0) if h > 0.0 else ((0.0 if x >= upper else 1.0) if h < 0.0 else 1.0)
    out = out if lower < upper else 0.0
    return out


@elementwise
def keep_free(h, x, lower, upper, /):
    """``h`` where an element is free, else 0."""
    h = (0.0 if x <= lower else h) if h > 0.0 else ((0.0 if x >= upper else h) if h < 0.0 else h)
    h = h if lower < upper else 0.0
    return h


@elementwise
def zero_of_equal(g, lower, upper, /):
    """0 in place of what is not finite where bounds are equal: such elements keep their value."""
    g = g if lower < upper else (g if g - g == 0.0 else 0.0)
    return g


# The path of steepest descent, ``P(x - t h)`` with h the (scaled) gradient.
#
# The mask `free` is returned, though it stays as it is: only an array that a formula writes may be of bool.


@elementwise
def find_breakpoints(descent, t, x, h, lower, upper, /, never):
    """``h`` where an element moves, else 0; and its breakpoint t, at which it meets its bound: 0 where it does not.

    The largest number is one over the first breakpoint.
    """
    t = (x - lower if h > 0.0 else x - upper) / h
    t = t if h != 0.0 else (0.0 if x <= lower else (0.0 if x >= upper else never))
    t = t if t > 0.0 else 0.0
    t = t if lower < upper else 0.0
    descent = h if t > 0.0 else 0.0
    soon = 1.0 / t if t > 0.0 else 0.0
    return descent, t, largest(soon)


@elementwise
def beyond_cauchy_point(t, free, /, length):
    """Mark the elements that have not met their bounds."""
    free = 1.0 if t > length else 0.0
    return free


@elementwise
def project_step(d, free, x, g, lower, upper, /):
    """The step ``P(x + d) - x`` of free elements; of others that to the bound.

    The second of the largest numbers is one over the step length at which the first element meets its bound.
    """
    held = lower - x if g > 0.0 else (upper - x if g < 0.0 else 0.0)
    d = lower - x if x + d <= lower else (upper - x if x + d >= upper else d)
    d = d if free > 0.0 else held
    close = d / (upper - x) if d > 0.0 else (d / (lower - x) if d < 0.0 else 0.0)
    return d, free, largest(d), largest(close)


@elementwise
def steps_from_cauchy_point(d, descent, free, x, lower, upper, /, length):
    """The way ``d`` from the Cauchy point of free elements to ``x + d``, and one over the part of it that bounds leave.

    ``descent`` is what steepest descent subtracts in a step of length 1.
    """
    d = d + length * descent if free > 0.0 else 0.0
    up = upper - (x - length * descent)
    down = (x - length * descent) - lower
    up = up if up > 0.0 else 0.0
    down = down if down > 0.0 else 0.0
    over = (d / up if up < d else 0.0) if d > 0.0 else ((-d / down if down < -d else 0.0) if d < 0.0 else 0.0)
    return d, free, largest(over)


@elementwise
def backtrack_to_bounds(d, descent, /, length, part):
    """The step to the Cauchy point, and from there this part of the way ``d``."""
    d = part * d - length * descent
    return d


@elementwise
def move_base(base, h, x, g, lower, upper, /):
    """Copy ``x`` and ``g``; measure ``x - P(x - g)``, and g where no bound holds an element."""
    base = x
    h = g
    projected = x - lower if x - g < lower else (x - upper if x - g > upper else g)
    kept = (0.0 if x <= lower else g) if g > 0.0 else ((0.0 if x >= upper else g) if g < 0.0 else g)
    kept = kept if lower < upper else 0.0
    return base, h, largest(projected), largest(kept)


@elementwise
def move_base_and_pair(base, h, s, y, x, g, lower, upper, /):
    """`move_base`, and before it the step from the base and the change of the gradient."""
    s = x - base
    y = g - h
    base = x
    h = g
    projected = x - lower if x - g < lower else (x - upper if x - g > upper else g)
    kept = (0.0 if x <= lower else g) if g > 0.0 else ((0.0 if x >= upper else g) if g < 0.0 else g)
    kept = kept if lower < upper else 0.0
    return base, h, s, y, largest(projected), largest(kept), largest(s), largest(y)


@elementwise
def advance_inside(x, base, d, lower, upper, /, step):
    """``x = P(base + step d)``."""
    x = base + step * d
    x = lower if x < lower else x
    x = upper if x > upper else x
    return x


class Bounds:
    """The bounds of this rank's elements, and which elements are fixed: these keep their values, also out of bounds.

    `lower` and `upper` are infinite where an element is fixed or has no bound, and None if no element has one.
    """

    def __init__(self, limits: Limits, space: Space) -> None:
        self.lower, self.upper, self.fixed = limits.lower, limits.upper, limits.fixed
        if self.any:
            self.lower = self._whole(self.lower, -np.inf, space)
            self.upper = self._whole(self.upper, np.inf, space)
        self._spans = space.spans
        self._has_equal = self.any and bool((to_host(self.lower) == to_host(self.upper)).any())
        copies = self.fixed is not None or self._has_equal
        self._work: Array | None = empty(space.size, space.like.dtype, space.like) if copies else None

    @property
    def any(self) -> bool:
        """Return True if there are bounds; the same on all ranks."""
        return self.lower is not None or self.upper is not None

    def outside(self, point: Array) -> int:
        """The number of elements of a vector outside of their bounds, of those that count on this rank."""
        if not self.any or not point.size:
            return 0
        wrong = (point < self.lower) | (point > self.upper)
        return sum(int(to_host(wrong[start:stop].sum())) for start, stop in self._spans)

    def project(self, point: Array) -> None:
        """Move each element between its bounds, in place."""
        if self.any:
            clip(point, self.lower, self.upper)

    def advance(self, point: Array, base: Array, direction: Array, step: float) -> None:
        """``P(base + step direction)``, written to the point."""
        if self.any:
            advance_inside(point, base, direction, self.lower, self.upper, step)
        else:
            advance(point, base, direction, step)

    def moving(self, gradient: Array) -> Array:
        """The gradient with 0 at fixed elements, and in place of NaN where bounds are equal.

        It is the gradient itself, or working memory that the next call overwrites.
        """
        if self._work is None:
            return gradient
        self._work[:] = gradient
        if self.fixed is not None:
            self._work[self.fixed] = 0
        if self._has_equal:
            zero_of_equal(self._work, self.lower, self.upper)
        return self._work

    def projected_gradient(self, point: Array, gradient: Array, out: Array) -> Array:
        """``x - P(x - g)``, where P projects into the bounds; `out` is returned."""
        projected_gradient(out, point, gradient, self.lower, self.upper)
        return out

    def bounded_and_open(self) -> tuple[int, int]:
        """The numbers of elements of this rank that have a bound, and that have less than two."""
        if self.lower is None or self.upper is None or not self.lower.size:
            return 0, 0
        low: Array = self.lower > -np.inf
        high: Array = self.upper < np.inf
        both = low & high
        if self.fixed is not None:
            both = both | self.fixed
        return int(to_host((low | high).sum())), low.size - int(to_host(both.sum()))

    def _whole(self, bound: Array | None, without: float, space: Space) -> Array:
        if bound is not None and self.fixed is None:
            return bound
        whole = empty(space.size, space.like.dtype, space.like)
        whole[:] = without if bound is None else bound
        if self.fixed is not None:
            whole[self.fixed] = without
        return whole
