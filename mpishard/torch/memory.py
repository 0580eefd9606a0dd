"""Arrays of mpishard and tensors of PyTorch that share their memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from mpishard.backend import array as arrays
from mpishard.comm.axis import Axis

Array = Any


def as_tensor(array: Array) -> Any:
    """A tensor over the memory of a NumPy or CuPy array; nothing is copied."""
    return torch.from_numpy(array) if isinstance(array, np.ndarray) else torch.utils.dlpack.from_dlpack(array)


def as_reals(tensor: Any) -> Any:
    """A tensor without a gradient as the flat array has it: complex numbers are pairs of reals, in a last dimension."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def as_numbers(tensor: Any, like: Any) -> Any:
    """The inverse of `as_reals`, for a view of the flat array: of complex numbers where `like` has them."""
    return torch.view_as_complex(tensor) if like.is_complex() else tensor


def master_dtype(tensors: Mapping[str, Any]) -> Any:
    """The dtype of the flat array of tensors: float64 if any is float64 or complex128, else float32."""
    is_double = any(p.dtype in (torch.float64, torch.complex128) for p in tensors.values())
    return torch.float64 if is_double else torch.float32


def take_changed(p: Any, master: Any) -> None:
    """Take those values of a parameter into its master that are not the master's, rounded."""
    values = p.detach()
    changed = values != master.to(p.dtype)
    if changed.any():
        master.copy_(torch.where(changed, values.to(master.dtype), master))
    finish_stream(master)


def finish_stream(tensor: Any) -> None:
    """Wait until PyTorch has finished a tensor on a GPU stream of the user's, for which CuPy does not wait."""
    if tensor.is_cuda:
        stream = torch.cuda.current_stream(tensor.device)
        if stream != torch.cuda.default_stream(tensor.device):
            stream.synchronize()


def broadcast_values(tensor: Any, axis: Axis, root: int = 0) -> None:
    """Copy the values of a tensor of any dtype from a rank, if it has values. Collective."""
    if tensor.device.type == "meta":
        return
    values = tensor.detach().contiguous()
    finish_stream(values)
    memory = as_array(values.reshape(-1).view(torch.uint8))
    axis.broadcast(memory, root=root, label="parameters")
    arrays.ready(memory)  # PyTorch may continue in another stream of a GPU
    if values.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(values)


def give_memory(p: Any, values: Any) -> None:
    """Make a parameter on the device meta one with values; class, attributes and identity stay."""
    whole: Any = torch.Tensor._make_subclass(type(p), values, p.requires_grad)
    vars(whole).update(vars(p))
    torch.utils.swap_tensors(p, whole)


def as_array(tensor: Any) -> Array:
    """A NumPy or CuPy array over the memory of a contiguous tensor without a gradient; nothing is copied."""
    return tensor.numpy() if tensor.device.type == "cpu" else array_module(tensor.device).from_dlpack(tensor)


def array_module(device: Any) -> Any:
    """NumPy or CuPy, whichever has arrays on a device.

    Raises ValueError for any other device, ModuleNotFoundError if CuPy is needed and not installed.
    """
    if device.type == "cpu":
        return np
    if device.type != "cuda":
        raise ValueError(f"parameters are on the device {device}, and must be on cpu or cuda: module.to('cpu')")
    return arrays.device_module()
