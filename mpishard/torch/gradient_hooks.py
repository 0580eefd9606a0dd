"""Hooks that hand each gradient over when autograd has finished it, so that it travels during the backward pass.

Each class is a way to take gradients, and has a `_take`, which autograd calls: `ProblemHooks` for the training loops of
mpishard, those of `mpishard.torch.loop_hooks` for a loop of the user's.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from mpishard.parameters.flat import FlatParameters
from mpishard.torch.memory import as_reals, as_tensor, finish_stream
from mpishard.torch.sharded_module import ShardedModule

Array = Any


class GradientHooks:
    """A hook on each parameter of a module, called after autograd has added to ``p.grad``.

    The hooks move gradients of `tensors`, which are views into `parameters` or rounded from them, to the gradients of
    these.  Autograd makes ``p.grad`` in the dtype of `parameters`, so that no sum is rounded to that of a tensor.
    `units` are those of the module under ZeRO-3, whose parameters come and go.
    """

    def __init__(self, parameters: FlatParameters, tensors: Mapping[str, Any], units: ShardedModule | None) -> None:
        self.tensors = dict(tensors)
        real = as_tensor(parameters.like).dtype
        self.dtype_of = {name: real.to_complex() if p.is_complex() else real for name, p in self.tensors.items()}
        self._parameters = parameters
        self._units = units
        self._seen: set[str] = set()  # parameters whose gradient has come since `clear`
        self._handles: list[Any] = []

    def attach(self) -> None:
        """Take gradients from now on."""
        for name, p in self.tensors.items():
            if p.dtype != self.dtype_of[name]:
                p.grad = None
                p.grad_dtype = self.dtype_of[name]
            self._handles.append(p.register_post_accumulate_grad_hook(partial(self._take, name)))

    def remove(self) -> None:
        """Leave gradients to autograd from now on."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.clear()
        for name, p in self.tensors.items():
            if p.dtype != self.dtype_of[name]:
                p.grad_dtype = p.dtype

    @property
    def unused(self) -> list[str]:
        """The parameters that got no gradient since `clear`."""
        return [name for name in self.tensors if name not in self._seen]

    @property
    def calls(self) -> dict[str, str]:
        """What ranks must have done alike since the last step, as text by name."""
        return {}

    def clear(self) -> None:
        """Begin a step: forget which gradients came, and let autograd make new ones."""
        self._forget()
        for p in self.tensors.values():
            p.grad = None
        if self._units is not None:
            self._units.reset()

    def drop(self) -> None:
        """Discard the gradients of passes that no step uses.  Collective as `GradientReducer.drop`."""
        if self._parameters.gradients.has_content:
            self._parameters.gradients.drop()
        self.clear()

    def take_changes(self) -> None:
        """Take what was changed in ``p.grad`` since the backward pass; ValueError where the step would not see it."""
        for name, p in self.tensors.items():
            if p.grad is not None:
                raise not_seen(name, "assigned")

    # -- for the ways to take gradients -------------------------------------------------------------------------------

    def _take(self, name: str, p: Any) -> None:
        """Move a gradient from autograd to the flat gradients, and mark it complete in this pass."""
        raise NotImplementedError

    def _forget(self) -> None:
        """Forget which gradients came, also while a pass has begun."""
        self._seen.clear()

    def _memory_of(self, name: str) -> tuple[Array, bool]:
        """The memory for a gradient, see `GradientReducer.gradient`."""
        return self._parameters.gradients.gradient(name)

    def _find(self, name: str, p: Any) -> tuple[Any, Any, bool] | None:
        """The memory for a gradient, the gradient that has come, and whether it is added to what is there.

        None if the parameter was replaced: the step says so, on all ranks.
        """
        if p.grad is None:
            raise RuntimeError(
                f"a hook on parameter {name!r} has set p.grad to None, and a step takes all gradients: for a gradient "
                "of zero let it call p.grad.zero_()"
            )
        view, adds = self._memory_of(name)
        memory, gradient = as_tensor(view), p.grad.detach()
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        gradient = as_reals(gradient)
        if gradient.shape != memory.shape or gradient.dtype != memory.dtype:
            p.grad = None
            return None
        return memory, gradient, adds

    def _finish(self, name: str, memory: Any) -> None:
        """Mark the gradient that was written to its memory as complete in this pass."""
        finish_stream(memory)
        self._seen.add(name)
        self._parameters.gradients.mark_ready(name)


class ProblemHooks(GradientHooks):
    """Hooks for the function of a problem: the gradients of its passes add up, and ``p.grad`` is None after each."""

    # Gradients count as zero: of a pass that is made only since other ranks make it.
    discards = False

    def _take(self, name: str, p: Any) -> None:
        found = self._find(name, p)
        if found is None:
            return
        memory, gradient, adds = found
        if self.discards:
            gradient = torch.zeros_like(memory)
        if adds:
            memory.add_(gradient)
        else:
            memory.copy_(gradient)
        p.grad = None
        self._finish(name, memory)


def not_seen(name: str, how: str, why: str = " since gradients go to the other ranks during that pass") -> ValueError:
    """That a step would not see a change of ``p.grad``."""
    return ValueError(
        f"the gradient of parameter {name!r} was {how} after the backward pass, and this step would not see it{why}.  "
        "To clip, call optimizer.clip_grad_norm_(max_norm), or give ShardingConfiguration max_gradient_norm or "
        "max_gradient_value; to leave gradients out, call optimizer.zero_grad() and no step(); to make gradients, call "
        "backward()"
    )
