"""Activations of a module whose layers are cut over the tensor axis: an operation and its adjoint, for autograd.

The pairs are those of `mpishard.nn.tensor_parallel`, along the last dimension of a tensor. `sent` moves rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from mpishard.backend import array as arrays
from mpishard.backend.array import module_of
from mpishard.comm.axis import Axis
from mpishard.nn.tensor_parallel import BACKWARD, FORWARD, AdjointPair, Copy, Reduce
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
    rows_nc = values.contiguous().reshape(x.shape[:-1].numel(), x.shape[-1])  # of which there may be none
    finish_stream(rows_nc)
    array_nc = as_array(rows_nc)
    found_nc = operation(
        [array_nc] if sums else array_nc,
        len(rows_nc),
        lambda *shape: module_of(array_nc).empty(shape, array_nc.dtype),
    )
    arrays.ready(found_nc)
    # No view of another tensor: layers may change in place what they get, as Llama4 does.
    found = as_tensor(found_nc.reshape(*x.shape[:-1], found_nc.shape[-1]))
    if not is_half:
        return found
    return found.to(x.dtype) if sums else x.new_empty(0).set_(found.untyped_storage(), 0, found.shape)


def sent(x_nc: Any, axis: Axis, counts: Sequence[int], out_counts: Sequence[int]) -> Any:
    """Send rows to the ranks of an axis, ``counts[r]`` to rank r, and return those that come, by rank. Collective.

    The adjoint sends them back.
    """
    return _Sent.apply(x_nc, axis, counts, out_counts)


class _Sent(torch.autograd.Function):
    """The rows that `sent` exchanges; its backward pass exchanges the counts, too."""

    @staticmethod
    def forward(ctx: Any, x_nc: Any, axis: Axis, counts: Sequence[int], out_counts: Sequence[int]) -> Any:
        ctx.how = axis, counts, out_counts
        return _exchanged(x_nc, axis, counts, out_counts, FORWARD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_nc: Any) -> tuple[Any, None, None, None]:
        axis, counts, out_counts = ctx.how
        return _exchanged(dy_nc, axis, out_counts, counts, BACKWARD), None, None, None


def _exchanged(x_nc: Any, axis: Axis, counts: Sequence[int], out_counts: Sequence[int], label: str) -> Any:
    columns = x_nc.shape[1]
    leave, come = ([count * columns for count in each] for each in (counts, out_counts))
    return all_to_all(x_nc.detach().reshape(-1), axis, leave, come, label).view(-1, columns)


def all_to_all(x: Any, axis: Axis, counts: Sequence[int], out_counts: Sequence[int], label: str) -> Any:
    """Send runs of a flat tensor, ``counts[r]`` elements to rank r; the runs that come, by rank. Collective."""
    x = x.contiguous()
    found = x.new_empty(sum(out_counts))
    axis.meet()
    bits = (x.view(torch.int16), found.view(torch.int16)) if x.dtype in HALF else (x, found)
    finish_stream(x)
    memory = as_array(bits[1])
    axis.all_to_all(as_array(bits[0]), memory, counts, out_counts, label=label)
    arrays.ready(memory)
    return found
