"""The tensors of a PyTorch module by name, and the checks that mpishard can train it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch

_COMPILED = "_orig_mod."  # what torch.compile puts into the names of a module
_SHOWN = 3


@dataclass(frozen=True)
class ModuleTensors:
    """The tensors of a module, by the names in the `state_dict` of the module before `torch.compile`.

    A tensor that has several names, as one that two layers share, has the first of them.

    Parameters
    ----------
    trained : dict of str to Parameter
        Those that require a gradient, in the order in which the module registers them.
    frozen : dict of str to Parameter
        The other parameters.
    buffers : dict of str to Tensor
        The persistent buffers, those that are in the `state_dict`.
    """

    trained: dict[str, Any]
    frozen: dict[str, Any]
    buffers: dict[str, Any]

    @classmethod
    def of(cls, module: Any) -> ModuleTensors:
        """The tensors of a module that can be trained; nothing is changed.  Not collective.

        Parameters
        ----------
        module : torch.nn.Module
            Of any kind, compiled or not.

        Returns
        -------
        ModuleTensors
            Checked.

        Raises
        ------
        TypeError
            If it is no module, or its parameters are not all float32 or all float64.
        ValueError
            If a layer is a SyncBatchNorm, no parameter requires a gradient, or parameters are on several devices, not
            contiguous, without values, or share memory.
        """
        if not isinstance(module, torch.nn.Module):
            given = f"the class {module.__name__}" if isinstance(module, type) else f"a {type(module).__name__}"
            raise TypeError(f"as_distributed of mpishard.torch needs a torch.nn.Module, got {given}")
        for name, child in module.named_modules():
            if isinstance(child, torch.nn.SyncBatchNorm):
                raise ValueError(
                    f"{plain_name(name)!r} is a torch.nn.SyncBatchNorm, which sums over ranks of torch.distributed: "
                    "here it would normalize each rank's samples alone; call "
                    "mpishard.torch.convert_sync_batchnorm(module, mesh) before"
                )
        named = {plain_name(name): p for name, p in module.named_parameters()}
        trained = {name: p for name, p in named.items() if p.requires_grad}
        if not trained:
            frozen = f"all of its {len(named)} parameters are frozen (requires_grad=False)" if named else "it has none"
            raise ValueError(f"this {type(module).__name__} has no parameter to train: {frozen}")
        _check_values(named)
        _check_dtypes(trained)
        _check_memory(trained)
        others = {name: p for name, p in named.items() if not p.requires_grad}
        return cls(trained, others, {plain_name(name): buffer for name, buffer in _persistent_buffers(module)})

    @property
    def described(self) -> dict[str, str]:
        """What must be the same on all ranks, as text by name."""
        return {
            "parameters": _listed(self.trained),
            "frozen parameters": _listed(self.frozen),
            "buffers of the module": _listed(self.buffers),
        }

    @property
    def device(self) -> Any:
        """The device of all parameters."""
        return next(iter(self.trained.values())).device


def plain_name(name: str) -> str:
    """The name of a tensor in the module before `torch.compile`.  Not collective.

    Parameters
    ----------
    name : str
        As `named_parameters` gives it.

    Returns
    -------
    str
        Without the parts that `torch.compile` adds.
    """
    return name.replace(_COMPILED, "")


def _persistent_buffers(module: Any) -> list[tuple[str, Any]]:
    """The buffers that are in the `state_dict`, each once."""
    found, seen = [], set()
    for path, child in module.named_modules():
        for name, buffer in child._buffers.items():
            if buffer is None or name in child._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            found.append((f"{path}.{name}" if path else name, buffer))
    return found


def _check_values(named: dict[str, Any]) -> None:
    """Raise ValueError unless all parameters have values, on one device."""
    for name, p in named.items():
        if isinstance(p, torch.nn.parameter.UninitializedParameter):
            raise ValueError(f"parameter {name!r} is not initialized: run one batch through the module first")
        if p.device.type == "meta":
            raise ValueError(f"parameter {name!r} is on the device meta and has no values: module.to_empty and fill it")
        if type(p.data) is not torch.Tensor or p.layout is not torch.strided:
            raise ValueError(
                f"parameter {name!r} is a {type(p.data).__name__} of layout {p.layout}, and must be a plain dense "
                "tensor; a module that FSDP or DTensor has divided cannot be divided again"
            )
    devices: dict[str, str] = {}
    for name, p in named.items():
        devices.setdefault(str(p.device), name)
    if len(devices) > 1:
        found = " and ".join(f"{name!r} on {device}" for device, name in list(devices.items())[:_SHOWN])
        raise ValueError(f"all parameters must be on one device, here {found}: module.to(device)")


def _check_dtypes(trained: dict[str, Any]) -> None:
    """Raise TypeError unless all parameters to train are float32, or all float64."""
    of_dtype: dict[Any, str] = {}
    for name, p in trained.items():
        of_dtype.setdefault(p.dtype, name)
    unfit = {dtype: name for dtype, name in of_dtype.items() if dtype not in (torch.float32, torch.float64)}
    found = " and ".join(f"{name!r} is {_short(dtype)}" for dtype, name in (unfit or of_dtype).items())
    if any(dtype.is_complex for dtype in unfit):
        raise TypeError(
            f"parameters must be float32 or float64, but {found}; keep real and imaginary parts as torch.view_as_real "
            "has them, and compute with torch.view_as_complex of that"
        )
    if unfit:
        raise TypeError(
            f"parameters must be float32 or float64, but {found}; use module.float(), and torch.autocast for bfloat16"
        )
    if len(of_dtype) > 1:
        raise TypeError(f"parameters must have one dtype, but {found}; use module.float() or module.double()")


def _check_memory(trained: dict[str, Any]) -> None:
    """Raise ValueError unless each parameter is contiguous, in any of PyTorch's formats, and has memory of its own."""
    for name, p in trained.items():
        if not any(p.is_contiguous(memory_format=each) for each in _formats(p.dim())):
            raise ValueError(
                f"parameter {name!r} is not contiguous: shape {tuple(p.shape)}, strides {p.stride()}; "
                "p.data = p.data.contiguous() before"
            )
    ranges = sorted((p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), name) for name, p in trained.items())
    for (_, stop, first), (start, _, second) in zip(ranges, ranges[1:], strict=False):
        if start < stop:
            raise ValueError(
                f"parameters {first!r} and {second!r} are two that share memory; share the Parameter itself, as "
                "second.weight = first.weight does"
            )


def _formats(dimensions: int) -> list[Any]:
    """The memory formats that a contiguous tensor may have."""
    special = {4: [torch.channels_last], 5: [torch.channels_last_3d]}
    return [torch.contiguous_format, *special.get(dimensions, [])]


def _listed(tensors: dict[str, Any]) -> str:
    """Tensors as a short text that differs where names, shapes or dtypes do."""
    each = [f"{name} {tuple(tensor.shape)} {_short(tensor.dtype)}" for name, tensor in tensors.items()]
    mark = hashlib.blake2b("\n".join(each).encode(), digest_size=4).hexdigest()
    size = sum(tensor.numel() for tensor in tensors.values())
    return f"{len(each)} tensors of {size} elements [{mark}]"


def _short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
