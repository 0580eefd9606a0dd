"""Sums of squares that come out the same whatever ranks hold the terms: a norm must not depend on the layout.

Floating-point addition rounds, so a sum depends on its order, and the order on the number of ranks.  Here every term
is first rounded to a multiple of a quantum so coarse that additions are exact (Rump's pre-rounding; Demmel and Nguyen,
"Fast reproducible floating-point summation", 2013).  What the rounding leaves goes through the same once more.  The
quantum depends on the largest term and on the number of terms, which all ranks must agree on beforehand.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpishard.array import is_device, module_of
from mpishard.compiling import HostFunction

Array = Any

# By element size: the integer of the same size, and all its bits but the sign.
_BITS: dict[int, tuple[Any, Any]] = {4: (np.uint32, np.uint32(2**31 - 1)), 8: (np.uint64, np.uint64(2**63 - 1))}


def largest(array: Array) -> float:
    """Largest absolute value of a flat float32 or float64 array; infinite or NaN if any element is; 0.0 if empty."""
    if not array.size:
        return 0.0
    if is_device(array):
        return float(abs(array).max())
    integer, mask = _BITS[array.dtype.itemsize]
    top = np.array([_largest_bits((array.view(integer),), (mask,))], integer)
    return float(top.view(array.dtype)[0])


def sum_of_squares(array: Array, largest_value: float, terms: int) -> np.ndarray:
    """The sum of the squares of a flat array in two parts, float64 (2,), which add up without rounding error.

    Parameters
    ----------
    largest_value : float
        A bound on the absolute values, finite; the same for all arrays whose sums are to be added.
    terms : int
        A bound on the number of terms of all these arrays together.

    Notes
    -----
    Element by element additions of such results give the same bits in any order; `total` makes one number of them.
    """
    if not array.size or largest_value == 0:
        return np.zeros(2)
    coarse, fine = _shifts(largest_value, terms)
    if is_device(array):
        squares = array.astype(module_of(array).float64) ** 2
        rounded = (squares + coarse) - coarse
        rest = ((squares - rounded) + fine) - fine
        return np.array([float(rounded.sum()), float(rest.sum())])
    return np.array(_binned_squares((array,), (coarse, fine)))


def total(parts: np.ndarray) -> float:
    """The number that the two parts of a sum stand for."""
    return float(parts[0] + parts[1])


def squared_norm(array: Array) -> float:
    """Sum of squares of one whole flat array; not finite if an element is not."""
    top = largest(array)
    return total(sum_of_squares(array, top, array.size)) if math.isfinite(top) else top


def _shifts(largest_value: float, terms: int) -> tuple[float, float]:
    """Numbers C such that ``(x + C) - C`` rounds x to a quantum of which `terms` terms still add exactly."""
    width = max(1, terms - 1).bit_length() + 1
    top = 2 * math.frexp(largest_value)[1]  # squares are below 2**top
    # The sum of all terms stays below 2**(top + width), a multiple of the quantum 2**(top + width - 52).
    # The rests are below that quantum, so their own lies 52 - width binary places lower.
    first = 1.5 * 2.0 ** min(1023, top + width)
    second = 1.5 * 2.0 ** max(-1022, min(1023, top + 2 * width - 52))
    return first, second


def _largest_bits_loop(bits: np.ndarray, mask: Any) -> Any:
    # Without their sign, floating-point numbers order like the integers of the same bits, infinity and NaN on top;
    # integers vectorise where a comparison that must mind NaN does not.
    top = bits[0] & mask
    for i in range(bits.size):
        value = bits[i] & mask
        top = value if value > top else top
    return top


def _binned_squares_loop(array: np.ndarray, coarse: float, fine: float) -> tuple[float, float]:
    sums = np.zeros(8)
    rests = np.zeros(8)
    whole = array.size // 8 * 8
    for i in range(0, whole, 8):
        for lane in range(8):
            value = np.float64(array[i + lane])
            square = value * value
            rounded = (square + coarse) - coarse
            sums[lane] += rounded
            rests[lane] += ((square - rounded) + fine) - fine
    for i in range(whole, array.size):
        value = np.float64(array[i])
        square = value * value
        rounded = (square + coarse) - coarse
        sums[0] += rounded
        rests[0] += ((square - rounded) + fine) - fine
    return sums.sum(), rests.sum()


_largest_bits = HostFunction(_largest_bits_loop)
_binned_squares = HostFunction(_binned_squares_loop)
