"""Hooks that hand each gradient over when autograd has finished it, so that it travels during the backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from mpishard.parameters.flat import FlatParameters
from mpishard.torch.memory import as_tensor, finish_stream


class GradientHooks:
    """A hook on each parameter of a module, called after autograd has added to ``p.grad``.

    Parameters
    ----------
    parameters : FlatParameters
        Their gradients get those of the module.
    tensors : mapping of str to Parameter
        The parameters of the module, which are views into `parameters`.

    Attributes
    ----------
    keeps : bool
        Whether ``p.grad`` stays, as a view into the gradients, until `clear`.  A loop of the user's own can then look
        at it, and set it to None or zero between two backward passes, as without mpishard.
    scales : bool
        Whether the gradients lack the loss scale, since the loss was not multiplied by it.
    """

    def __init__(self, parameters: FlatParameters, tensors: Mapping[str, Any]) -> None:
        self.keeps: bool = False
        self.scales: bool = False
        self._parameters = parameters
        self._tensors = dict(tensors)
        self._seen: set[str] = set()
        for name, p in self._tensors.items():
            p.register_post_accumulate_grad_hook(partial(self._take, name))

    @property
    def unused(self) -> list[str]:
        """The parameters that got no gradient since `clear`.  Not collective."""
        return [name for name in self._tensors if name not in self._seen]

    def clear(self) -> None:
        """Begin a step: forget which gradients came, and let autograd make new ones.  Not collective."""
        self._seen.clear()
        for p in self._tensors.values():
            p.grad = None

    def _take(self, name: str, p: Any) -> None:
        """Move a gradient from autograd to the flat gradients, and say that it is complete in this pass."""
        reducer = self._parameters.gradients
        try:
            view, adds = reducer.gradient(name)
        except RuntimeError:
            if not self.keeps:
                raise
            raise RuntimeError(
                f"a second backward pass reached parameter {name!r}, whose gradient is on its way to the other ranks; "
                "make all passes of a step but the last one within optimizer.no_sync(), or call optimizer.step() or "
                "optimizer.zero_grad() in between"
            ) from None
        memory, gradient = as_tensor(view), p.grad.detach()
        if gradient.shape != memory.shape or gradient.dtype != memory.dtype:
            p.grad = None  # the parameter was replaced: the step says so, on all ranks
            return
        scale = self._parameters.loss_scale if self.scales else 1.0
        keeps = self.keeps and reducer.keeps_memory and scale == 1.0
        # Where ``p.grad`` stays, autograd adds to it; another tensor there means that the user has dropped the first.
        if not keeps or gradient.data_ptr() != memory.data_ptr():
            if gradient.layout is not torch.strided:
                gradient = gradient.to_dense()
            if scale != 1.0:
                gradient = gradient * scale
            if adds and not keeps:
                memory.add_(gradient)
            else:
                memory.copy_(gradient)
        finish_stream(memory)
        p.grad = memory if keeps else None
        self._seen.add(name)
        reducer.mark_ready(name)
