"""Rows of two buffers added up in a given order, in one pass over memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpishard.backend.array import is_device
from mpishard.backend.jit_function import HostFunction

Array = Any
# Elements that are added at a time; a few such blocks fit into the first-level cache.
_BLOCK = 1024


def add_by_tree(own: Array, received: Array, starts: Sequence[int], merges: Sequence[int], out: Array) -> None:
    """Add up rows of two flat buffers into `out`, which may be one of them, on a stack.

    The rows have ``out.size`` elements. `starts` has the start of each row in `received`; or, if negative, ``-1 -
    start`` of a row in `own`. `merges` has for each row how often, after it, the two newest values on the stack are
    replaced by their sum, lower plus upper; one is left in the end.
    """
    assert sum(merges) == len(merges) - 1
    if not out.size:
        return
    if is_device(out):
        _add_on_device(own, received, starts, merges, out)
        return
    depth = height = 0
    for pops in merges:
        height = max(height, depth + 1)
        depth += 1 - pops
    stack = np.empty(height * _BLOCK, out.dtype)
    _add((own, received, out, stack, np.array(starts, np.int64), np.array(merges, np.int64)))


def _add_on_device(own: Array, received: Array, starts: Sequence[int], merges: Sequence[int], out: Array) -> None:
    stack: list[Array] = []
    for start, pops in zip(starts, merges, strict=True):
        source, first = (own, -1 - start) if start < 0 else (received, start)
        stack.append(source[first : first + out.size])
        for _ in range(pops):
            upper = stack.pop()
            stack.append(stack.pop() + upper)
    out[...] = stack[0]


def _add_loop(
    own: np.ndarray,
    received: np.ndarray,
    out: np.ndarray,
    stack: np.ndarray,
    starts: np.ndarray,
    merges: np.ndarray,
) -> None:
    for begin in range(0, out.size, _BLOCK):
        count = min(_BLOCK, out.size - begin)
        top = -_BLOCK
        for row in range(starts.size):
            start = starts[row]
            if start < 0:
                term = own[begin - 1 - start : begin - 1 - start + count]
            else:
                term = received[begin + start : begin + start + count]
            pops = merges[row]
            if pops == 0:
                top += _BLOCK
                level = stack[top : top + count]
                for i in range(count):
                    level[i] = term[i]
                continue
            level = stack[top : top + count]
            for i in range(count):
                level[i] += term[i]
            for _ in range(1, pops):
                upper = stack[top : top + count]
                top -= _BLOCK
                lower = stack[top : top + count]
                for i in range(count):
                    lower[i] += upper[i]
        target = out[begin : begin + count]
        for i in range(count):
            target[i] = stack[i]


_add = HostFunction(_add_loop)
