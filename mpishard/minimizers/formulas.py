"""Element-wise formulas of quasi-Newton methods and conjugate gradients (see `mpishard.backend.array.elementwise`)."""

# mypy: allow-untyped-defs
from __future__ import annotations

from mpishard.backend.array import elementwise

# Steps.


@elementwise
def advance(x, b, d, /, step):
    """``x = b + step d``."""
    x = b + step * d
    return x


@elementwise
def move(v, d, /, length):
    """``v += length d``."""
    v = v + length * d
    return v


# Quasi-Newton methods.  ``r`` is the root of the scaling: with it pairs are kept in variables that are divided by it.


@elementwise
def pair(s, y, x, g, b, h, /):
    """Step and change of the gradient, from the base ``b`` with gradient ``h`` to ``x`` with ``g``."""
    s = x - b
    y = g - h
    return s, y


@elementwise
def scaled_pair(s, y, x, g, b, h, r, /):
    """`pair` in scaled variables."""
    s = (x - b) / r
    y = r * (g - h)
    return s, y


@elementwise
def damp(y, s, h, /, part, step):
    """Mix ``y`` with what the model of the Hessian says for it, ``-step h``, where the step has moved."""
    y = part * y - (1.0 - part) * (step * h) if s != 0.0 else y
    return y


@elementwise
def damp_scaled(y, s, h, r, /, part, step):
    """`damp` in scaled variables."""
    y = part * y - (1.0 - part) * (step * (r * h)) if s != 0.0 else y
    return y


@elementwise
def multiply(out, v, r, /):
    """``out = r v``."""
    out = r * v
    return out


@elementwise
def divide(out, v, r, /):
    """``out = v / r``."""
    out = v / r
    return out


# Conjugate gradients.  ``w`` is the root of the scaling, by which variables are divided and gradients multiplied; it is
# 0 at fixed elements.


@elementwise
def multiply_free(out, v, w, /):
    """``out = w v``, and 0 where w is, whatever v is there."""
    out = w * v if w > 0.0 else 0.0
    return out


@elementwise
def turn(d, r, /, beta):
    """``d = beta d - r``."""
    d = beta * d - r
    return d


# LSQR.


@elementwise
def follow(v, d, /, factor):
    """``v = d + factor v``."""
    v = d + factor * v
    return v


@elementwise
def add_squares(total, d, /, factor):
    """``total += (factor d)^2``."""
    total = total + (factor * d) * (factor * d)
    return total
