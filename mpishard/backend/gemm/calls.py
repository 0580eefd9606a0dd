"""Calls of the libraries for matrix products, by one thread or by several."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

from mpishard.backend.gemm.libraries import Call, Library, Product
from mpishard.backend.process import own_cores

# Multiplications for each thread from which a second one pays.
_LARGE = 2**24


def callable_for(product: Product, library: Library, threads: int) -> Call | None:
    """The function of the addresses of `a`, `b` and `out` that computes a product, with at most `threads` threads.

    Each thread computes some rows, or columns where there are more of these, or some matrices of a batch. The number of
    parts depends on the sizes and on `threads` alone, so that the bits do not vary. Two threads must not call it at
    once. None: the library cannot compute it.
    """
    count = min(threads, product.multiplications // _LARGE)
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
def _pool(process: int) -> ThreadPoolExecutor:
    """The threads that compute parts of products, in addition to the caller's; a child process has separate ones."""
    return ThreadPoolExecutor(max(1, len(own_cores()) - 1), thread_name_prefix="mpishard-product")
