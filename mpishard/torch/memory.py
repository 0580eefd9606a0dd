"""Arrays of mpishard and tensors of PyTorch that share their memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mpishard.backend import array as arrays

Array = Any


def as_tensor(array: Array) -> Any:
    """A tensor over the memory of a NumPy or CuPy array; nothing is copied."""
    return torch.from_numpy(array) if isinstance(array, np.ndarray) else torch.utils.dlpack.from_dlpack(array)


def finish_stream(tensor: Any) -> None:
    """Wait until PyTorch has finished a tensor on a GPU stream of the user's, for which CuPy does not wait."""
    if tensor.is_cuda:
        stream = torch.cuda.current_stream(tensor.device)
        if stream != torch.cuda.default_stream(tensor.device):
            stream.synchronize()


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
