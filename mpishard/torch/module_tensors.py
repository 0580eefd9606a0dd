"""The tensors of a PyTorch module by name, and the checks that mpishard can train it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mpishard.arguments import listed, mark
from mpishard.torch.memory import master_dtype
from mpishard.torch.units import plain_name

_HAS_GRAD_DTYPE = hasattr(torch.Tensor, "grad_dtype")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128)
# The memory formats that a contiguous tensor of some dimensions may have, too.
_SPECIAL_FORMATS = {4: [torch.channels_last], 5: [torch.channels_last_3d]}


@dataclass(frozen=True)
class ModuleTensors:
    """The tensors of a module, by the names in the `state_dict` of the module before `torch.compile`.

    A tensor that has several names, as one that two layers share, has the first of them.
    """

    # Those that require a gradient: complex ones first, else in the order in which the module registers them.
    trained: dict[str, Any]
    frozen: dict[str, Any]  # the other parameters
    buffers: dict[str, Any]  # the persistent ones, which are in the `state_dict`

    @classmethod
    def of(cls, module: Any, *, on_meta: bool = False) -> ModuleTensors:
        """The tensors of a module, compiled or not, that can be trained; nothing is changed.

        With `on_meta` parameters may be without values, on the device meta.

        Raises TypeError if it is no module, or a parameter is of a dtype that cannot be trained; ValueError if a layer
        is a SyncBatchNorm, no parameter requires a gradient, or parameters are on several devices, not contiguous,
        without values, or share memory.
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
            if isinstance(child, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and child.max_norm is not None:
                if child.weight.requires_grad:
                    raise ValueError(
                        f"{plain_name(name)!r} is a torch.nn.{type(child).__name__} with max_norm={child.max_norm}, "
                        "whose forward pass writes to its weight, on each rank to other rows: set its max_norm = None, "
                        "and scale the rows in the pass, or on all ranks after each step"
                    )
        named = {plain_name(name): p for name, p in module.named_parameters()}
        trained = {name: p for name, p in named.items() if p.requires_grad}
        # Complex ones first: as pairs of reals, they then begin at a multiple of their size in the flat array.
        trained = dict(sorted(trained.items(), key=lambda item: not item[1].is_complex()))
        if not trained:
            frozen = f"all of its {len(named)} parameters are frozen (requires_grad=False)" if named else "it has none"
            raise ValueError(f"this {type(module).__name__} has no parameter to train: {frozen}")
        _check_values(named, on_meta)
        _check_dtypes(trained)
        _check_contiguous(trained)
        others = {name: p for name, p in named.items() if not p.requires_grad}
        _check_memory(trained, {**others, **{plain_name(name): each for name, each in module.named_buffers()}})
        return cls(trained, others, {plain_name(name): buffer for name, buffer in persistent_buffers(module)})

    @property
    def described(self) -> dict[str, str]:
        """The facts that must be the same on all ranks, as text by name."""
        return {
            "parameters": _listed(self.trained),
            "frozen parameters": _listed(self.frozen),
            "buffers of the module": _listed(self.buffers),
        }

    @property
    def device(self) -> Any:
        """The device of all parameters; the default one if they have no values yet."""
        device = next(iter(self.trained.values())).device
        return torch.get_default_device() if device.type == "meta" else device


def persistent_buffers(module: Any) -> list[tuple[str, Any]]:
    """The buffers that are in the `state_dict`, each once."""
    found, seen = [], set()
    for path, child in module.named_modules():
        for name, buffer in child._buffers.items():
            if buffer is None or name in child._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            found.append((f"{path}.{name}" if path else name, buffer))
    return found


def _check_values(named: dict[str, Any], on_meta: bool) -> None:
    """Raise ValueError unless all parameters have values, on one device."""
    for name, p in named.items():
        if isinstance(p, torch.nn.parameter.UninitializedParameter):
            raise ValueError(f"parameter {name!r} is not initialized: run one batch through the module first")
        if p.device.type == "meta" and not on_meta:
            raise ValueError(
                f"parameter {name!r} is on the device meta and has no values: give materialize=, a folder or file of "
                "safetensors, or a function that fills one layer, as lambda layer: layer.reset_parameters()"
            )
        if p.device.type != "meta" and p.numel() and not p.untyped_storage().nbytes():
            raise ValueError(
                f"parameter {name!r} has no values: under zero=3 its shares went with the optimizer of as_distributed; "
                "call close() of that, on all ranks, which leaves the module whole"
            )
        if type(p.data) is not torch.Tensor or p.layout is not torch.strided:
            raise ValueError(
                f"parameter {name!r} is a {type(p.data).__name__} of layout {p.layout}, and must be a plain dense "
                "tensor; a module that FSDP or DTensor has divided cannot be divided again"
            )
    devices: dict[str, str] = {}
    for name, p in named.items():
        devices.setdefault(str(p.device), name)
    if len(devices) > 1:
        found = listed(f"{name!r} on {device}" for device, name in devices.items())
        raise ValueError(f"all parameters must be on one device, here {found}: module.to(device)")


def _check_dtypes(trained: dict[str, Any]) -> None:
    """Raise TypeError unless masters of float32 or float64 can be kept of all parameters to train."""
    of_dtype: dict[Any, str] = {}
    for name, p in trained.items():
        of_dtype.setdefault(p.dtype, name)
    found = " and ".join(f"{name!r} is {_short(dtype)}" for dtype, name in of_dtype.items() if dtype not in _DTYPES)
    if found:
        raise TypeError(
            f"parameters to train must be of {', '.join(map(_short, _DTYPES))}, but {found}; use module.float(), and "
            "a lower precision within the forward pass"
        )
    real = master_dtype(trained)
    narrow = [name for dtype, name in of_dtype.items() if dtype not in (real, real.to_complex())]
    if narrow and not _HAS_GRAD_DTYPE:
        raise TypeError(
            f"parameter {narrow[0]!r} is {_short(trained[narrow[0]].dtype)}, whose gradients are summed in "
            f"{_short(real)}: that needs a PyTorch with Tensor.grad_dtype, and this is {torch.__version__}; use "
            "module.float() or module.double(), and torch.autocast for bfloat16"
        )


def _check_contiguous(trained: dict[str, Any]) -> None:
    """Raise ValueError unless each parameter is contiguous, in any of PyTorch's formats."""
    for name, p in trained.items():
        formats = [torch.contiguous_format, *_SPECIAL_FORMATS.get(p.dim(), [])]
        if not any(p.is_contiguous(memory_format=each) for each in formats):
            raise ValueError(
                f"parameter {name!r} is not contiguous: shape {tuple(p.shape)}, strides {p.stride()}; "
                "p.data = p.data.contiguous() before"
            )


def _check_memory(trained: dict[str, Any], others: dict[str, Any]) -> None:
    """Raise ValueError if a trained parameter shares memory with another, or with one of the others."""
    ranges = []
    for name, each in {**others, **trained}.items():
        if type(each.data) is torch.Tensor and each.layout is torch.strided and each.device.type != "meta":
            last = sum((size - 1) * stride for size, stride in zip(each.shape, each.stride(), strict=True))
            start = each.data_ptr()
            ranges.append((start, start + (last + 1) * each.element_size() if each.numel() else start, name))
    ends = {True: (0, ""), False: (0, "")}  # where the memory of trained ones, and of others, ends so far
    for start, stop, name in sorted(ranges):
        for is_trained, (end, first) in ends.items():
            if start < end and (is_trained or name in trained):
                raise ValueError(
                    f"{first!r} and {name!r} share memory, and a parameter that is trained has its own here: share the "
                    "Parameter itself, as second.weight = first.weight does, or make one of them a clone()"
                )
        ends[name in trained] = max(ends[name in trained], (stop, name))


def _listed(tensors: dict[str, Any]) -> str:
    """Tensors as a short text that differs where names, shapes or dtypes do."""
    each = [f"{name} {tuple(tensor.shape)} {_short(tensor.dtype)}" for name, tensor in tensors.items()]
    size, text = sum(tensor.numel() for tensor in tensors.values()), "\n".join(each)
    return f"{len(each)} tensors of {size} elements [{mark(text)}]"


def _short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
