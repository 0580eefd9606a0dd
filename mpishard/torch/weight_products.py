"""Gradients of weights that come after those of inputs, for pipeline schedules that have both apart.

Of a linear layer the product for the weight is as long as that for the input, and no other stage waits for it.

Qi et al., "Zero Bubble Pipeline Parallelism" (2023), section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode


class WeightProducts(TorchFunctionMode):
    """A context for a forward pass whose weights in `torch.nn.functional.linear` get their gradients by `add`.

    Other gradients are those of the backward pass, as are those under autocast and within activation checkpoints, which
    compute their layers again outside of this context.
    """

    def __init__(self) -> None:
        super().__init__()
        self._factors: list[tuple[Any, Any, Any]] = []  # a weight, the gradient of an output, and the input, as rows
        self._anchor = torch.empty(0, requires_grad=True)  # in the place of the weights, whose hooks must not run yet

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.linear and torch.is_grad_enabled():
            given = {**dict(zip(("input", "weight", "bias"), args, strict=False)), **kwargs}
            x, weight = given["input"], given["weight"]
            is_own = type(weight) is torch.nn.Parameter and weight.requires_grad and not isinstance(x, FakeTensor)
            is_plain = torch._C._autograd._top_saved_tensors_default_hooks(False) is None
            if is_own and is_plain and not torch.is_autocast_enabled(x.device.type):
                rows_nc = x.reshape(-1, x.shape[-1])  # so that the result is no view, which could not be overwritten
                rest = given.get("bias"), weight.detach(), lambda dy, x: self._factors.append((weight, dy, x))
                y_no = _Linear.apply(self._anchor, rows_nc, *rest)
                return y_no.view(*x.shape[:-1], len(weight))
        return func(*args, **kwargs)

    def add(self) -> None:
        """Add the products to the gradients of the weights."""
        products: dict[Any, Any] = {}
        for weight, dy, x in self._factors:
            product = dy.t() @ x.conj()  # which real ones are themselves
            products[weight] = products[weight] + product if weight in products else product
        self._factors.clear()
        if products:
            torch.autograd.backward([*products], [*products.values()])


class _Linear(torch.autograd.Function):
    """A linear layer of rows that notes the factors of the gradient of its weight."""

    @staticmethod
    def forward(ctx: Any, anchor: Any, x: Any, bias: Any, weight: Any, note: Callable[[Any, Any], None]) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.note = note
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Any) -> tuple[None, Any, Any, None, None]:
        x, weight = ctx.saved_tensors
        ctx.note(dy, x)
        dx = dy @ weight.conj() if ctx.needs_input_grad[1] else None
        dbias = dy.sum(0) if ctx.needs_input_grad[2] else None
        return None, dx, dbias, None, None
