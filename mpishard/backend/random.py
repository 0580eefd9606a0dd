"""Random numbers keyed by names, never by ranks: the same run with another layout draws the same numbers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

# Rounds of the Feistel network below; three suffice for a pseudorandom permutation (Luby and Rackoff, 1988).
_ROUNDS = 6
_BLOCK = 1 << 13  # elements at once, whose intermediate results stay in the cache
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # of splitmix64: 2**64 over the golden ratio


def generator(seed: int, *names: object) -> np.random.Generator:
    """A counter-based generator (Philox) keyed by a seed and any names, e.g. ``generator(0, "dropout", step)``."""
    return np.random.Generator(np.random.Philox(key=_key(seed, *names)))


def normal(seed: int, name: str, shape: Sequence[int], scale: float = 1.0, dtype: Any = np.float32) -> np.ndarray:
    """Normal numbers of mean 0 and standard deviation `scale`, a function of (`seed`, `name`, `shape`) alone.

    Drawn in float64 and rounded to `dtype`, so that float32 and float64 runs start from the same numbers.
    """
    return (generator(seed, name).standard_normal(tuple(shape)) * scale).astype(dtype)


def uniform_in_box(seed: int, name: str, shape: Sequence[int], box: Sequence[tuple[int, int]]) -> np.ndarray:
    """A box of a tensor of uniform numbers in [-1, 1), float64: the same numbers in whichever boxes it is cut.

    Element i of the tensor of this `shape`, in row-major order, is the i-th number of splitmix64 (Steele, Lea and
    Flood, 2014), so that a box, (start, stop) in each dimension, costs time and memory in proportion to its size.
    """
    strides = np.cumprod([1, *shape[:0:-1]], dtype=np.uint64)[::-1]
    count = np.ones(1, np.uint64)  # of the number, from 1
    for (start, stop), stride in zip(box, strides, strict=False):
        count = count[..., None] + np.arange(start, stop, dtype=np.uint64) * stride
    bits = _mix(count * _GOLDEN + np.uint64(_key(seed, name) & 0xFFFFFFFFFFFFFFFF)) >> np.uint64(11)
    return (bits * 2.0**-52 - 1.0).reshape([stop - start for start, stop in box])


def normal_at(seed: int, name: str, numbers: np.ndarray) -> np.ndarray:
    """Standard normal numbers, float64, of elements by their `numbers` from 0: the same whichever rank has which.

    Number i is the i-th of splitmix64, put into the inverse of the normal distribution (Wichura, algorithm AS 241,
    Applied Statistics 37, 1988). The logarithm in its tails is a sum of powers here: every operation is rounded in one
    way, on all processors and in arrays of any length.
    """
    found = np.empty(len(numbers))
    offset = np.uint64(key(seed, name))
    for start in range(0, len(found), _BLOCK):
        block = slice(start, start + _BLOCK)
        count = numbers[block].astype(np.uint64) + np.uint64(1)
        uniform = ((_mix(count * _GOLDEN + offset) >> np.uint64(12)) + 0.5) * 2.0**-52
        found[block] = _normal_quantile(uniform)
    return found


def _normal_quantile(p: np.ndarray) -> np.ndarray:
    """The number that a standard normal one is below with probability p, multiples of 2**-53 between 0 and 1."""
    q = p - 0.5
    tail = np.minimum(p, 1.0 - p)
    found = q * _ratio(0.180625 - q * q, *_CENTRE)
    outer = np.flatnonzero(tail < 0.075)
    root = np.sqrt(-_log(tail[outer]))
    sizes = np.where(root <= 5.0, _ratio(root - 1.6, *_TAIL), _ratio(root - 5.0, *_FAR_TAIL))
    found[outer] = np.copysign(sizes, q[outer])
    return found


def _ratio(x: np.ndarray, above: Sequence[float], below: Sequence[float]) -> np.ndarray:
    """The ratio of two polynomials, whose coefficients come highest power first."""
    top, bottom = np.full_like(x, above[0]), np.full_like(x, below[0])
    for a, b in zip(above[1:], below[1:], strict=True):
        top, bottom = top * x + a, bottom * x + b
    return top / bottom


def _log(x: np.ndarray) -> np.ndarray:
    """The logarithm of positive numbers, to rounding, by the series of the inverse hyperbolic tangent."""
    mantissa, exponent = np.frexp(x)
    small = mantissa < math.sqrt(0.5)
    mantissa, exponent = np.where(small, 2 * mantissa, mantissa), exponent - small
    s = (mantissa - 1.0) / (mantissa + 1.0)
    total = np.zeros_like(s)
    for power in range(23, 0, -2):
        total = total * (s * s) + 1.0 / power
    return exponent * math.log(2) + 2.0 * s * total


# Coefficients of AS 241, of the numerator and the denominator.
_CENTRE = (
    (
        2.5090809287301226727e3,
        3.3430575583588128105e4,
        6.7265770927008700853e4,
        4.5921953931549871457e4,
        1.3731693765509461125e4,
        1.9715909503065514427e3,
        1.3314166789178437745e2,
        3.3871328727963666080e0,
    ),
    (
        5.2264952788528545610e3,
        2.8729085735721942674e4,
        3.9307895800092710610e4,
        2.1213794301586595867e4,
        5.3941960214247511077e3,
        6.8718700749205790830e2,
        4.2313330701600911252e1,
        1.0,
    ),
)
_TAIL = (
    (
        7.74545014278341407640e-4,
        2.27238449892691845833e-2,
        2.41780725177450611770e-1,
        1.27045825245236838258e0,
        3.64784832476320460504e0,
        5.76949722146069140550e0,
        4.63033784615654529590e0,
        1.42343711074968357734e0,
    ),
    (
        1.05075007164441684324e-9,
        5.47593808499534494600e-4,
        1.51986665636164571966e-2,
        1.48103976427480074590e-1,
        6.89767334985100004550e-1,
        1.67638483018380384940e0,
        2.05319162663775882187e0,
        1.0,
    ),
)
_FAR_TAIL = (
    (
        2.01033439929228813265e-7,
        2.71155556874348757815e-5,
        1.24266094738807843860e-3,
        2.65321895265761230930e-2,
        2.96560571828504891230e-1,
        1.78482653991729133580e0,
        5.46378491116411436990e0,
        6.65790464350110377720e0,
    ),
    (
        2.04426310338993978564e-15,
        1.42151175831644588870e-7,
        1.84631831751005468180e-5,
        7.86869131145613259100e-4,
        1.48753612908506148525e-2,
        1.36929880922735805310e-1,
        5.99832206555887937690e-1,
        1.0,
    ),
)


def permuted(indices: np.ndarray, size: int, seed: int, *names: object) -> np.ndarray:
    """The images of `indices` (int64) under a random permutation of ``range(size)``, keyed by `seed` and `names`.

    Costs time and memory in proportion to `indices`, not to `size`: a balanced Feistel network over the next power of
    four, walked along its cycle until the value is in range (Black and Rogaway, 2002).
    """
    if size < 1:
        return np.empty(0, np.int64)
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = np.array([_key(seed, *names, turn) & 0xFFFFFFFFFFFFFFFF for turn in range(_ROUNDS)], np.uint64)
    values = np.asarray(indices, np.uint64).copy()
    outside = np.ones(len(values), bool)
    while outside.any():
        values[outside] = _feistel(values[outside], np.uint64(half), keys)
        outside = values >= size
    return values.astype(np.int64)


def _feistel(values: np.ndarray, half: np.uint64, keys: np.ndarray) -> np.ndarray:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    return (left << half) | right


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def key(seed: int, *names: object) -> int:
    """A key of 64 bits for a seed and any names."""
    return _key(seed, *names) & 0xFFFFFFFFFFFFFFFF


def _key(seed: int, *names: object) -> int:
    text = "\x1f".join([str(int(seed)), *map(str, names)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")
