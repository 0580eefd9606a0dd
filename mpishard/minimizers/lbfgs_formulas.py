# mypy: allow-untyped-defs
"""Element-wise formulas of the quasi-Newton methods (see `mpishard.backend.array.elementwise`).

``r`` is the root of the scaling: with it pairs are kept in variables that are divided by it.
"""

from mpishard.backend.array import elementwise, largest


@elementwise
def pair(s, y, x, g, b, h, /):
    """Step and change of the gradient, from the base ``b`` with gradient ``h`` to ``x`` with ``g``."""
    s = x - b
    y = g - h
    return s, y, largest(s), largest(y)


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
def advance(x, b, d, /, step):
    """``x = b + step d``."""
    x = b + step * d
    return x


@elementwise
def weigh(out, v, r, /):
    """``out = r v``."""
    out = r * v
    return out


@elementwise
def unweigh(out, v, r, /):
    """``out = v / r``."""
    out = v / r
    return out
