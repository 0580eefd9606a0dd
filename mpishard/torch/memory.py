"""Arrays of mpishard and tensors of PyTorch that share their memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mpishard.backend import array as arrays

Array = Any


def as_tensor(array: Array) -> Any:
    """A tensor over the memory of an array.  Not collective.

    Parameters
    ----------
    array : array
        NumPy or CuPy.

    Returns
    -------
    Tensor
        Of the shape and dtype of the array, on its device; nothing is copied.
    """
    return torch.from_numpy(array) if isinstance(array, np.ndarray) else torch.utils.dlpack.from_dlpack(array)


def finish_stream(tensor: Any) -> None:
    """Wait for what PyTorch has queued for a tensor on a stream of the user's own, which CuPy does not wait for.

    Not collective.

    Parameters
    ----------
    tensor : Tensor
        On any device; only on a GPU, and on another stream than the default one, there is something to wait for.
    """
    if tensor.is_cuda:
        stream = torch.cuda.current_stream(tensor.device)
        if stream != torch.cuda.default_stream(tensor.device):
            stream.synchronize()


def as_array(tensor: Any) -> Array:
    """An array over the memory of a tensor.  Not collective.

    Parameters
    ----------
    tensor : Tensor
        Contiguous, without a gradient.

    Returns
    -------
    array
        NumPy or CuPy, of the shape and dtype of the tensor, on its device; nothing is copied.
    """
    return tensor.numpy() if tensor.device.type == "cpu" else array_module(tensor.device).from_dlpack(tensor)


def array_module(device: Any) -> Any:
    """NumPy or CuPy, whichever has arrays on a device.  Not collective.

    Parameters
    ----------
    device : torch.device
        Of tensors.

    Returns
    -------
    module
        ``numpy`` or ``cupy``.

    Raises
    ------
    ValueError
        For any other device.
    ModuleNotFoundError
        If CuPy is needed and not installed.
    """
    if device.type == "cpu":
        return np
    if device.type != "cuda":
        raise ValueError(f"parameters are on the device {device}, and must be on cpu or cuda: module.to('cpu')")
    return arrays.device_module()
