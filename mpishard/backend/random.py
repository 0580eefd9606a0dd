"""Random numbers keyed by names, never by ranks: the same run with another layout draws the same numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

# Rounds of the Feistel network below; three suffice for a pseudorandom permutation (Luby and Rackoff, 1988).
_ROUNDS = 6
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
