"""Matrix products of NumPy arrays: by NumPy's BLAS, or by a library that is faster on the processor at hand.

`choice` has which library multiplies what; the ranks of a mesh agree on it when the mesh is made.  `libraries` finds
those that are installed; `callable_for` calls one with several threads.
"""

from __future__ import annotations

import functools
import math
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

import numpy as np

from mpishard.backend import process
from mpishard.backend.gemm.choice import Choice, active
from mpishard.backend.gemm.libraries import Call, Mkl, OneDnn, Product, load, product_of

# A thread forgets the products that it has met at this number: generated texts have new shapes all the time,
# and one of oneDNN takes some 150 kB.
_MOST_PLANS = 512
# Multiplications for each thread from which a second one pays.
_LARGE = 2**24


class _Plans(threading.local):
    """The functions for products that a thread has met, most of which it meets in every step again."""

    def __init__(self) -> None:
        self.known: dict[tuple[Any, ...], Any] = {}
        self.choice: Choice | None = None


_plans = _Plans()


def matmul(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> np.ndarray:
    """``numpy.matmul``, by the library that was chosen for such a product; `out` shares no memory with the others.

    The bits depend on shapes, transpositions, library and threads, not on where the arrays lie.
    """
    choice = active()
    call = _planned(choice, a, b, out) if choice.libraries else None
    if call is None:
        return process.matmul(a, b, out=out)
    call(a.ctypes.data, b.ctypes.data, out.ctypes.data)
    return out


def matmul_bfloat16(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> np.ndarray:
    """The product of matrices of bits of bfloat16 (uint16), contiguous or transposed, summed in float32 in `out`."""
    if not out.flags.c_contiguous:  # a slice of a wider matrix would have other bits, see `onednn`
        out[...] = matmul_bfloat16(a, b, np.empty(out.shape, out.dtype))
        return out
    call = _planned(active(), a, b, out)
    if call is None:
        return matmul(widened(a), widened(b), out)
    call(a.ctypes.data, b.ctypes.data, out.ctypes.data)
    return out


def widened(bits: np.ndarray) -> np.ndarray:
    """The float32 values of bits of bfloat16."""
    return np.left_shift(bits, 16, dtype=np.uint32).view(np.float32)


def has_fast_bfloat16() -> bool:
    """Return True if a library multiplies bfloat16 faster than float32 in this process."""
    return active().has_bfloat16


def threads() -> int:
    """The threads that a product may use in this process."""
    found = process.blas_threads()
    if found is None and (chosen := process.chosen_by_user()):
        return int(os.environ[chosen])
    return found or 1


def _planned(choice: Choice, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> Any:
    """The function for a product; None: NumPy's."""
    if _plans.choice is not choice or len(_plans.known) > _MOST_PLANS:
        _plans.choice, _plans.known = choice, {}
    kinds = a.dtype.char, b.dtype.char, out.dtype.char
    key = (a.shape, a.strides, b.shape, b.strides, out.shape, out.strides, kinds, threads())
    try:
        return _plans.known[key]
    except KeyError:
        found = _plans.known[key] = _plan(choice, a, b, out, key[-1])
        return found


def _plan(choice: Choice, a: np.ndarray, b: np.ndarray, out: np.ndarray, count: int) -> Any:
    product = product_of(a, b, out)
    if product is None or not product.worth_a_call:
        return None
    library = choice.libraries.get(f"{product.dtype}.{product.kind}")
    return None if library is None else callable_for(product, load(library), count)


def callable_for(product: Product, library: Mkl | OneDnn, threads: int, large: int = _LARGE) -> Call | None:
    """The function of the addresses of `a`, `b` and `out` that computes a product, with at most `threads` threads.

    Each thread computes some rows, or columns where there are more of these, or some matrices of a batch. The number of
    parts depends on the sizes and on `threads` alone, so that the bits do not vary; each has at least `large`
    multiplications. Two threads must not call it at once. None: the library cannot compute it.
    """
    count = min(threads, product.multiplications // large)
    if count < 2:
        return library.call(product)
    parts = []
    for part, offsets in _parts(product, count):
        call = library.call(part)
        if call is None:
            return None
        parts.append((call, offsets))

    def in_parts(a: int, b: int, out: int) -> None:
        pool = _pool(os.getpid())
        (first, _), *others = parts
        waiting = [pool.submit(call, a + i, b + j, out + k) for call, (i, j, k) in others]
        try:
            first(a, b, out)
        finally:
            wait(waiting)  # they write into memory of the caller
        for each in waiting:
            each.result()

    return in_parts


def _parts(product: Product, count: int) -> Iterator[tuple[Product, tuple[int, int, int]]]:
    """The parts of a product, and the bytes from its arrays to those of the part."""
    bytes_in, bytes_out = product.bytes
    a, b, out = product.a, product.b, product.out
    along = "count" if product.count >= count else "m" if product.m >= product.n else "n"
    size = getattr(product, along)
    step = math.ceil(size / count)
    for first in range(0, size, step):
        elements = {
            "count": (a.batch, b.batch, out.batch),
            "m": (1 if a.transposed else a.leading, 0, out.leading),
            "n": (0, b.leading if b.transposed else 1, 1),
        }[along]
        one, other, result = (first * each for each in elements)
        part = replace(product, **{along: min(step, size - first)})
        yield part, (one * bytes_in, other * bytes_in, result * bytes_out)


@functools.cache
def _pool(process_id: int) -> ThreadPoolExecutor:
    """The threads that compute parts of products, in addition to the caller's; a child process has separate ones."""
    return ThreadPoolExecutor(max(1, len(process.own_cores()) - 1), thread_name_prefix="mpishard-product")
