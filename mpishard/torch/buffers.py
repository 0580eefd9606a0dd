"""The buffers of a PyTorch module, such as the running averages of batch norms, kept alike on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mpishard.comm.axis import Axis
from mpishard.layout.run_state import brief
from mpishard.torch.memory import array_module, as_tensor

Array = Any

MODES = ("broadcast", "average", "local")
_FACT = "buffer.{}"


class Buffers:
    """The persistent buffers of a module: views into one flat array for each dtype, so that a message takes all.

    Parameters
    ----------
    tensors : mapping of str to Tensor
        By name.  From now on each is a view; its values stay.
    mode : {"broadcast", "average", "local"}
        What `synchronize` does: copies those of rank 0; or takes the mean of those that are floating-point, and copies
        the others; or nothing.

    Attributes
    ----------
    mode : str
        As given.
    """

    def __init__(self, tensors: Mapping[str, Any], mode: str) -> None:
        self._tensors = dict(tensors)
        self.mode: str = mode
        by_dtype: dict[Any, list[Any]] = {}
        for tensor in self._tensors.values():
            if tensor.numel():
                by_dtype.setdefault(tensor.dtype, []).append(tensor)
        self._flats: list[tuple[Array, bool]] = [_flattened(each) for each in by_dtype.values()]

    @property
    def facts(self) -> dict[str, np.ndarray]:
        """Copies of the values, flat, by the names that they have among the facts of a state.  Not collective."""
        return {_FACT.format(name): _as_numbers(tensor) for name, tensor in self._tensors.items()}

    def check(self, facts: Mapping[str, Any]) -> None:
        """Raise ValueError unless the facts have values for all buffers, or for none.  Not collective.

        The state of an optimizer alone has none, as it has no parameters.

        Parameters
        ----------
        facts : mapping
            Of a saved state.
        """
        for name, tensor in self._tensors.items() if _are_in(facts) else ():
            saved, wanted = facts.get(_FACT.format(name)), _as_numbers(tensor)
            if not isinstance(saved, np.ndarray) or saved.shape != wanted.shape or saved.dtype != wanted.dtype:
                there = "has none" if saved is None else f"has {_shown(saved)}"
                raise ValueError(
                    f"the saved state is of another module: buffer {name!r} has {wanted.size} {wanted.dtype} here, and "
                    f"it {there}"
                )

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Take the values from facts, if they have any.  Not collective.

        Parameters
        ----------
        facts : mapping
            Of a saved state that `check` accepts.
        """
        for name, tensor in self._tensors.items() if _are_in(facts) else ():
            values = torch.from_numpy(np.array(facts[_FACT.format(name)]))
            tensor.detach().copy_(values.view(tensor.dtype).reshape(tensor.shape))

    def spread(self, axis: Axis) -> None:
        """Copy the values of rank 0.  Collective over the axis.

        Parameters
        ----------
        axis : Axis
            The ranks.
        """
        for flat, _ in self._flats:
            axis.broadcast(flat, label="buffers")

    def synchronize(self, axis: Axis) -> None:
        """Make the values equal on all ranks, as the mode says.  Collective over the axis.

        Parameters
        ----------
        axis : Axis
            The ranks.
        """
        if self.mode == "local" or axis.size == 1:
            return
        for flat, floating in self._flats:
            if self.mode == "average" and floating:
                axis.all_reduce(flat, label="buffers")
                flat /= axis.size
            else:
                axis.broadcast(flat, label="buffers")


def _are_in(facts: Mapping[str, Any]) -> bool:
    """Whether a saved state has values of buffers."""
    return any(name.startswith(_FACT.format("")) for name in facts)


def _flattened(tensors: Sequence[Any]) -> tuple[Array, bool]:
    """Move tensors of one dtype into one flat array; returns it, and whether its values can be averaged."""
    first = tensors[0]
    floating = first.dtype in (torch.float32, torch.float64)
    size = sum(tensor.numel() for tensor in tensors)
    module = array_module(first.device)
    # MPI moves those of other dtypes as bytes.
    flat = module.empty(size, str(first.dtype).removeprefix("torch.")) if floating else None
    memory = module.empty(size * first.element_size(), np.uint8) if flat is None else flat
    whole = as_tensor(memory).view(first.dtype)
    start = 0
    for tensor in tensors:
        view = whole[start : start + tensor.numel()].view(tensor.shape)
        view.copy_(tensor.detach())
        tensor.data = view
        start += tensor.numel()
    return memory, floating


def _as_numbers(tensor: Any) -> np.ndarray:
    """A copy of the values as a flat array that a fact can be: bytes where NumPy or a fact lacks the dtype."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if not (flat.dtype.is_floating_point or flat.dtype in _WHOLE) or flat.dtype in _HALF:
        flat = flat.view(torch.uint8)
    values: np.ndarray = flat.numpy()
    return values.copy()


_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_HALF = (torch.float16, torch.bfloat16)


def _shown(saved: Any) -> str:
    return f"{saved.size} {saved.dtype}" if isinstance(saved, np.ndarray) else brief(saved)
