"""Activations of a module whose layers are cut over the tensor axis: an operation and its adjoint, for autograd.

The pairs are those of `mpishard.nn.tensor_parallel`, along the last dimension of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from mpishard.backend import array as arrays
from mpishard.backend.array import module_of
from mpishard.nn.tensor_parallel import AdjointPair, Copy, Reduce
from mpishard.torch.memory import as_array, as_tensor, finish_stream

HALF = (torch.bfloat16, torch.float16)


def moved(x: Any, pair: AdjointPair) -> Any:
    """What the forward operation of a pair makes of a tensor; its backward pass is the adjoint. Collective."""
    return _Moved.apply(x, pair)


class _Moved(torch.autograd.Function):
    """The operations of an `AdjointPair`."""

    @staticmethod
    def forward(ctx: Any, x: Any, pair: AdjointPair) -> Any:
        ctx.pair = pair
        if isinstance(pair, Copy):
            return x.view_as(x)
        pair.axis.meet()
        return _along_columns(pair.forward, x, sums=isinstance(pair, Reduce))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Any) -> tuple[Any, None]:
        pair = ctx.pair
        if isinstance(pair, Reduce):
            return dy, None
        pair.axis.meet()
        return _along_columns(pair.backward, dy, sums=isinstance(pair, Copy)), None


def _along_columns(operation: Callable[..., Any], x: Any, sums: bool) -> Any:
    """An operation of a pair on a tensor, whose last dimension has the columns; `sums`: it takes a term of a sum.

    Sums of half precision are taken in float32.
    """
    is_half, values = x.dtype in HALF, x.detach()
    if sums:  # overwritten
        values = values.float() if is_half else values.clone()
    elif is_half:
        values = values.contiguous().view(torch.int16)  # NumPy has no bfloat16
    rows_nc = values.contiguous().reshape(-1, x.shape[-1])
    finish_stream(rows_nc)
    array_nc = as_array(rows_nc)
    found_nc = operation(
        [array_nc] if sums else array_nc,
        len(rows_nc),
        lambda *shape: module_of(array_nc).empty(shape, array_nc.dtype),
    )
    arrays.ready(found_nc)
    found = as_tensor(found_nc).reshape(*x.shape[:-1], found_nc.shape[-1])
    if not is_half:
        return found
    return found.to(x.dtype) if sums else found.view(x.dtype)
