"""The loss of logits whose vocabulary tensor ranks have divided: none of them gathers the logits.

Shoeybi et al., "Megatron-LM" (2019), section 3.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from mpishard.backend import array as arrays
from mpishard.backend.array import module_of
from mpishard.comm.axis import Axis
from mpishard.comm.mesh import Mesh
from mpishard.layout.boxes import split
from mpishard.nn.tensor_parallel import TensorParallel
from mpishard.nn.units import cross_entropy
from mpishard.nn.workspace import Workspace
from mpishard.torch.adapters import model_within
from mpishard.torch.memory import as_array, finish_stream
from mpishard.torch.plan_checks import check_numbers
from mpishard.torch.plans import LayerCut

IGNORED = -100  # the label of a token without a loss, in transformers


def cross_entropy_of_parts(
    logits: Any, targets: Any, axis: Axis, columns: int, ignore_index: int, reduction: str
) -> Any:
    """`torch.nn.functional.cross_entropy` of a rank's part of the last dimension of logits. Collective.

    `columns` counts those of all ranks, which are cut as `mpishard.layout.boxes.split` does.
    """
    targets_n = targets.reshape(-1)
    kept_k = (targets_n != ignore_index).nonzero().squeeze(1)
    loss = _CrossEntropy.apply(logits.reshape(-1, logits.shape[-1]), targets_n, kept_k, axis, columns)
    return loss / len(kept_k) if reduction == "mean" else loss


class _CrossEntropy(torch.autograd.Function):
    """The summed loss of the rows `kept_k`, by that of our own models, which turns logits into its gradient."""

    @staticmethod
    def forward(ctx: Any, logits_nv: Any, targets_n: Any, kept_k: Any, axis: Axis, columns: int) -> Any:
        gradient_kv, targets_k = (each.index_select(0, kept_k) for each in (logits_nv, targets_n))
        finish_stream(gradient_kv)
        memory_kv = as_array(gradient_kv)
        first = split(columns, axis.size)[axis.rank]
        work = Workspace(memory_kv.dtype, module_of(memory_kv))
        loss = cross_entropy(memory_kv, as_array(targets_k), TensorParallel(axis), first, work, columns)
        arrays.ready(memory_kv)
        ctx.rows = len(logits_nv)
        ctx.save_for_backward(gradient_kv, kept_k)
        return logits_nv.new_tensor(loss)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Any) -> tuple[Any, ...]:
        gradient_kv, kept_k = ctx.saved_tensors
        dlogits_nv = gradient_kv.new_zeros(ctx.rows, gradient_kv.shape[1])
        return dlogits_nv.index_copy_(0, kept_k, gradient_kv * dloss), None, None, None, None


class UnavailableLogits(torch.Tensor):
    """A stand-in for logits of which each rank has a part: any use of it raises."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.requires_grad.__get__:  # which hooks ask for
            return False
        raise RuntimeError(
            "logits is not available: with labels in training mode the loss was computed on the parts of the logits "
            "that tensor ranks have.  For whole logits call the model without labels, or after model.eval(), or give "
            "it a loss_function of your own"
        )


class LossOfLabels:
    """The loss that a model of transformers computes of its labels, on the parts of its logits.

    That is so in passes in training mode, of models that leave the loss to their `loss_function`, if this is the one of
    causal language models, and a plan cuts their output layer. Where logits are whole it is transformers' own.
    """

    def __init__(self, module: Any, cuts: Sequence[LayerCut], mesh: Mesh) -> None:
        self._axis = mesh.tensor
        self._model = model_within(module)
        self._head = None if mesh.pipeline.size > 1 else _head_of(self._model, cuts)
        self._theirs: Any = None
        self._own: Any = None  # in the place of theirs
        self.is_due = False  # in the pass under way

    def keeps(self, cut: LayerCut) -> bool:
        """Return True if the outputs of a layer stay in parts in the pass under way. Not collective."""
        return self.is_due and cut is self._head

    def begin(self, kwargs: Mapping[str, Any]) -> None:
        """Find out whether a pass with these arguments has the loss of parts. Not collective.

        Raises IndexError for labels out of range.
        """
        self.is_due = False
        if self._head is None or kwargs.get("labels") is None:
            return
        targets = kwargs.get("shift_labels")
        targets = kwargs["labels"][..., 1:] if targets is None else targets
        check_numbers("labels", targets[targets != kwargs.get("ignore_index", IGNORED)], self._head.offsets[-1])
        if not self._model.training:
            return
        if kwargs.get("return_dict") is False or not self._model.config.return_dict:
            return  # a tuple, in which logits have no name
        from transformers.loss.loss_utils import ForCausalLMLoss

        if self._model.loss_function is ForCausalLMLoss:
            self._theirs, self._own = ForCausalLMLoss, torch.compiler.disable(self._compute)
            self._model.loss_function = self._own
        self.is_due = self._model.loss_function is self._own

    def _compute(
        self,
        logits: Any,
        labels: Any,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = IGNORED,
        shift_labels: Any = None,
        **others: Any,
    ) -> Any:
        """What `ForCausalLMLoss` of transformers returns, in float32 as there. Collective if logits are parts."""
        assert self._head is not None
        columns = self._head.offsets[-1]
        if logits.shape[-1] == columns:
            given = num_items_in_batch, ignore_index, shift_labels
            return self._theirs(logits, labels, vocab_size, *given, **others)
        if shift_labels is None:
            shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        targets, reduction = shift_labels.to(logits.device), "mean" if num_items_in_batch is None else "sum"
        loss = cross_entropy_of_parts(logits.float(), targets, self._axis, columns, ignore_index, reduction)
        return loss if num_items_in_batch is None else loss / num_items_in_batch

    def hide(self, output: Any, instead: Any) -> Any:
        """What a pass has returned, with something in the place of logits that are parts. Not collective."""
        if self.is_due and output is not None:
            output["logits"] = instead
        return output

    def end(self, output: Any) -> None:
        """Hide the logits of a pass; `output` is None after an error. Not collective."""
        self.hide(output, torch.empty(()).as_subclass(UnavailableLogits))
        self.is_due = False

    def remove(self) -> None:
        """Let the model compute its loss by itself. Not collective."""
        if self._own is not None and vars(self._model).get("_loss_function") is self._own:
            del self._model._loss_function


def _head_of(model: Any, cuts: Sequence[LayerCut]) -> LayerCut | None:
    """The cut of the layer whose gathered outputs a model of transformers gives to its `loss_function`."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None or not isinstance(model, library.PreTrainedModel):
        return None
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    if code is None or "loss_function" not in code.co_names:  # T5, as others, computes its loss in its own code
        return None
    head = model.get_output_embeddings()
    of_outputs = [cut for cut in cuts if cut.style.cuts == "outputs" and cut.style.whole]
    own = [cut for cut in of_outputs if cut.layer is head and any(child is head for child in model.children())]
    return own[0] if own else None
