"""Hooks that hand each gradient over when autograd has finished it, so that it travels during the backward pass.

Where every rank gets all sums (`GradientHooks.sums_over`), a callback at the end of the pass waits for them.  Then
``p.grad`` is what DistributedDataParallel leaves there: the mean over ranks, which a loop may change before the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from mpishard.io import log
from mpishard.parameters.flat import FlatParameters
from mpishard.torch.memory import as_tensor, finish_stream


class SpreadGradient(torch.Tensor):
    """What stands in ``p.grad`` where the gradient is on its way to the rank that needs it: any use of it raises."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(
            "p.grad has no values here: gradients leave during the backward pass under zero=2, with reproducible sums "
            "or a loss scale.  To clip, call optimizer.clip_grad_norm_(max_norm), or give ShardingConfiguration "
            "max_gradient_norm or max_gradient_value"
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
    sums_over : callable
        Gives the number of ranks whose mean ``p.grad`` is after a backward pass, where every rank gets all sums; else
        0: gradients are on their way then, and a change of ``p.grad`` is refused.
    """

    def __init__(self, parameters: FlatParameters, tensors: Mapping[str, Any]) -> None:
        self.keeps: bool = False
        self.scales: bool = False
        self.sums_over: Callable[[], int] = lambda: 0
        self._parameters = parameters
        self.tensors = dict(tensors)
        self._seen: set[str] = set()
        # What the hook has left in ``p.grad``, and the version of its values.
        self._kept: dict[str, tuple[Any, int]] = {}
        # Means of earlier passes since the last step, in flat order.
        self._earlier: Any = None
        # The pass of autograd whose end waits for the sums.
        self._pass = -1
        self._told = False
        self._handles: list[Any] = []
        for name, p in self.tensors.items():
            self._handles.append(p.register_hook(partial(self._make_room, p)))
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
        return [name for name in self.tensors if name not in self._seen]

    def clear(self) -> None:
        """Begin a step: forget which gradients came, and let autograd make new ones.  Not collective."""
        self._seen.clear()
        self._kept.clear()
        self._earlier = None
        for p in self.tensors.values():
            p.grad = None

    def complete(self) -> int:
        """Wait for the sums of this step, and leave their means in ``p.grad``; what `sums_over` gives.  Collective.

        Returns at once where that is 0, or it is done.
        """
        reducer, ranks = self._parameters.gradients, self.sums_over()
        if not ranks or reducer.reduced:
            return ranks
        reducer.finalize()
        flat = as_tensor(reducer.flat)
        if ranks > 1:
            flat.div_(ranks)
        if self._earlier is not None:
            flat.add_(self._earlier)
            self._earlier = None
        finish_stream(flat)
        for name, p in self.tensors.items():
            view = as_tensor(reducer.memory.view(name)[0])
            self._kept[name] = view, view._version
            moved = (p.shape, p.dtype, p.device) != (view.shape, view.dtype, view.device)
            # What was assigned without a backward pass stays, for `take_changes`; so does a parameter that was moved.
            if not moved and (self._seen or p.grad is None):
                p.grad = view
        return ranks

    def _finish_pass(self) -> None:
        self.complete()

    def take_changes(self) -> None:
        """Take gradients that were assigned to ``p.grad`` after `complete`.

        Raises
        ------
        ValueError
            If a ``p.grad`` is not what is there since the backward pass, and the step would not see the change.
        """
        reducer = self._parameters.gradients
        complete = self._seen and reducer.reduced and self.sums_over()
        for name, p in self.tensors.items():
            kept, version = self._kept.get(name, (None, 0))
            if complete and p.grad is not None and p.grad.shape == p.shape and p.grad.dtype == p.dtype:
                memory, gradient = as_tensor(reducer.memory.view(name)[0]), p.grad.detach()
                if gradient.data_ptr() != memory.data_ptr():
                    memory.copy_(gradient)
                finish_stream(memory)
                continue
            left = kept is None or type(kept) is SpreadGradient
            if not complete and p.grad is kept and (left or kept._version == version):
                continue
            how = "dropped" if p.grad is None else "changed" if p.grad is kept and not complete else "assigned"
            raise ValueError(
                f"the gradient of parameter {name!r} was {how} after the backward pass, and this step would not see it"
                + ("" if complete else " since gradients go to the other ranks during that pass")
                + ".  To clip, call optimizer.clip_grad_norm_(max_norm), or give ShardingConfiguration "
                "max_gradient_norm or max_gradient_value; to leave gradients out, call optimizer.zero_grad() and "
                "no step(); to make gradients, call backward()"
            )

    def _make_room(self, p: Any, _: Any) -> None:
        """Before autograd adds to ``p.grad``: a gradient that is summed already, or has left, is not added to."""
        if type(p.grad) is SpreadGradient:
            p.grad = None
        if self.keeps and self._parameters.gradients.reduced and self.sums_over():
            self._begin_another_pass()

    def _begin_another_pass(self) -> None:
        """Another backward pass since the last step, as of a loss for real and one for generated images, is summed too.

        What the passes before have left in ``p.grad``, changed or not, is added to its mean.
        """
        if any(p.grad is not None for p in self.tensors.values()):
            if not self._told:
                self._told = True
                log.inform(
                    "a second backward pass since the last step is summed over the ranks too; make all passes but the "
                    "last within optimizer.no_sync() to sum once"
                )
            self._earlier = torch.zeros_like(as_tensor(self._parameters.gradients.flat))
            for piece in self._parameters.pieces:
                grad = self.tensors[piece.name].grad
                if grad is not None:
                    self._earlier[piece.start : piece.start + piece.size].copy_(grad.detach().reshape(-1))
        self._parameters.reset_gradients()
        self._kept.clear()
        for p in self.tensors.values():
            p.grad = None

    def _take(self, name: str, p: Any) -> None:
        """Move a gradient from autograd to the flat gradients, and say that it is complete in this pass."""
        reducer = self._parameters.gradients
        if self.keeps and reducer.is_last_pass:
            current = torch._C._current_graph_task_id()
            if current != self._pass and self.sums_over():
                self._pass = current
                # As DistributedDataParallel does it: called when this pass of autograd is over.
                torch.autograd.Variable._execution_engine.queue_callback(self._finish_pass)
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
