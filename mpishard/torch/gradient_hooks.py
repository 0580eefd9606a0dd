"""Hooks that hand each gradient over when autograd has finished it, so that it travels during the backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from mpishard.parameters.flat import FlatParameters
from mpishard.torch.memory import as_tensor, finish_stream


class SpreadGradient(torch.Tensor):
    """What stands in ``p.grad`` where the gradient is on its way to the rank that needs it: any use of it raises."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(
            "p.grad has no values here: gradients leave during the backward pass under zero=2, with reproducible sums "
            "or a loss scale.  To clip, give ShardingConfiguration max_gradient_norm or max_gradient_value; the norm "
            "is optimizer.optimizer.gradient_norm after the step"
        )


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
        Whether ``p.grad`` stays, as a view into the gradients, until `clear`; or a SpreadGradient, where these have
        left.  A loop of the user's own can then look at it, and set it to None or zero between two backward passes, as
        without mpishard.
    scales : bool
        Whether the gradients lack the loss scale, since the loss was not multiplied by it.
    """

    def __init__(self, parameters: FlatParameters, tensors: Mapping[str, Any]) -> None:
        self.keeps: bool = False
        self.scales: bool = False
        self._parameters = parameters
        self._tensors = dict(tensors)
        self._seen: set[str] = set()
        # What the hook has left in ``p.grad``, and the version of its values.
        self._kept: dict[str, tuple[Any, int]] = {}
        self._handles: list[Any] = []
        for name, p in self._tensors.items():
            self._handles.append(p.register_hook(partial(_make_room, p)))
            self._handles.append(p.register_post_accumulate_grad_hook(partial(self._take, name)))

    def remove(self) -> None:
        """Leave gradients to autograd from now on.  Not collective."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.clear()

    @property
    def unused(self) -> list[str]:
        """The parameters that got no gradient since `clear`.  Not collective."""
        return [name for name in self._tensors if name not in self._seen]

    def clear(self) -> None:
        """Begin a step: forget which gradients came, and let autograd make new ones.  Not collective."""
        self._seen.clear()
        self._kept.clear()
        for p in self._tensors.values():
            p.grad = None

    def check_untouched(self) -> None:
        """Raise ValueError if a ``p.grad`` is not what its hook has left: the step would not see the change."""
        for name, p in self._tensors.items():
            kept, version = self._kept.get(name, (None, 0))
            if p.grad is kept and (kept is None or type(kept) is SpreadGradient or kept._version == version):
                continue
            how = "dropped" if p.grad is None else "changed" if p.grad is kept else "assigned"
            raise ValueError(
                f"the gradient of parameter {name!r} was {how} after the backward pass, and this step would not see it "
                "since gradients go to the other ranks during that pass.  To clip, give ShardingConfiguration "
                "max_gradient_norm or max_gradient_value; to leave gradients out, call optimizer.zero_grad() and "
                "no step(); to make gradients, call backward()"
            )

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
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        # Where ``p.grad`` stays, autograd adds to it; another tensor there means that the user has dropped the first.
        if not keeps or gradient.data_ptr() != memory.data_ptr():
            if scale != 1.0:
                gradient = gradient * scale
            if adds and not keeps:
                memory.add_(gradient)
            else:
                memory.copy_(gradient)
        finish_stream(memory)
        self._seen.add(name)
        if keeps:
            p.grad = memory
            self._kept[name] = memory, memory._version
        elif self.keeps:
            p.grad = gradient.new_empty(1).expand(gradient.shape).as_subclass(SpreadGradient)
            self._kept[name] = p.grad, 0
        else:
            p.grad = None
        reducer.mark_ready(name)


def _make_room(p: Any, _: Any) -> None:
    """Before autograd adds to ``p.grad``: it cannot add to what stands for a gradient that has left."""
    if type(p.grad) is SpreadGradient:
        p.grad = None
