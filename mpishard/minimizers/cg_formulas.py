# mypy: allow-untyped-defs
"""Element-wise formulas of conjugate gradients (see `mpishard.backend.array.elementwise`).

``w`` is the root of the scaling, by which variables are divided and gradients multiplied; it is 0 at fixed elements.
"""

from mpishard.backend.array import elementwise


@elementwise
def weighted(out, v, w, /):
    """``out = w v``, and 0 where w is, whatever v is there."""
    out = w * v if w > 0.0 else 0.0
    return out


@elementwise
def moved(out, v, d, /, length):
    """``out = v + length d``."""
    out = v + length * d
    return out


@elementwise
def move(v, d, /, length):
    """``v += length d``."""
    v = v + length * d
    return v


@elementwise
def turn(d, r, /, beta):
    """``d = beta d - r``."""
    d = beta * d - r
    return d


@elementwise
def turn_weighted(d, r, w, /, beta):
    """``d = beta d - w r``."""
    d = beta * d - w * r
    return d
