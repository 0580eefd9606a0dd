"""The memory of gathered units, and the class of the parameters of freed ones.

Freed parameters are views into a storage of 0 bytes, which PyTorch reads without a check: meanwhile their class is one
whose operations raise.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from mpishard.layout.tensors import Piece
from mpishard.parameters.zero3_units import UnitMemory
from mpishard.torch.memory import array_module, as_numbers, as_reals, finish_stream, give_memory, take_changed
from mpishard.torch.units import HOW_TO_SAVE, tensors_in

Array = Any

_ALIGNMENT = 64  # bytes, of new memory of PyTorch
_HUGE_PAGES_FROM = 2**21  # bytes, that of one
_MADVISE: Any = getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_HUGEPAGE") else None
# The functions of PyTorch that a freed parameter has nevertheless, and the attributes that it has not.
_METADATA = frozenset(
    "__dir__ __len__ _has_compatible_shallow_copy_type data_ptr dim dim_order element_size get_device ndimension "
    "nelement numel size storage_offset "
    "stride untyped_storage requires_grad_ register_hook register_post_accumulate_grad_hook backward grad view_as "
    "empty_like full_like ones_like zeros_like new_empty new_full new_ones new_tensor new_zeros".split()
)
_VALUES = frozenset("data T mT H mH real imag".split())
# Functions that return the tensor itself where there is nothing to change, as Module.to calls them for all parameters.
_CONVERSIONS = frozenset("to type cpu cuda float double half bfloat16".split())


class FreedParameter:
    """Comes before the class of a parameter while it is freed: all but its metadata and gradient raises RuntimeError.

    Autograd does not see classes, and finds the parameter as it is.
    """

    __slots__ = ()
    whole_class: Any  # the class while it is gathered
    why_freed: str = "parameters have no values here under zero=3"  # a parameter has its own text

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(f"{self.why_freed}.  As for the module: {HOW_TO_SAVE}")

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__reduce_ex__(4)


def _use_freed(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """The ``__torch_function__`` of a FreedParameter."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        needs_values = getattr(func.__self__, "__name__", "data") in _VALUES
        if name == "__set__" and needs_values and args[0] is args[1]:  # Module.to has changed nothing
            return None
    elif name in _CONVERSIONS and _is_freed(args[0]) and _changes_nothing(func, *args, **(kwargs or {})):
        return args[0]
    else:
        asks = name.startswith(("is_", "_is_")) and name != "is_nonzero"
        needs_values = name not in _METADATA and not asks
    if needs_values:
        raise RuntimeError(next(filter(_is_freed, tensors_in((args, kwargs))), cls).why_freed)
    with torch._C.DisableTorchFunctionSubclass():
        found = func(*args, **(kwargs or {}))
    if name == "view_as" and _is_freed(args[0]):  # by which PyTorch finds the node of a leaf
        found.__class__, found.why_freed = type(args[0]), args[0].why_freed
    return found


def _changes_nothing(convert: Any, p: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether a conversion would return the parameter itself."""
    with torch._C.DisableTorchFunctionSubclass():
        like = torch.empty([0] * p.dim(), dtype=p.dtype, device=p.device)
        return convert(like, *args, **kwargs) is like


def _is_freed(tensor: Any) -> bool:
    return issubclass(type(tensor), FreedParameter)


@cache
def _freed_class(own: Any) -> Any:
    """The class of a freed parameter, one for all: torch.compile compiles again for each other one."""
    use: Any = classmethod(torch.compiler.disable(_use_freed))  # torch.compile would get its conditions wrong
    known = {"__slots__": (), "__module__": own.__module__, "whole_class": own, "__torch_function__": use}
    return type(own)(own.__name__, (FreedParameter, own), known)


class UnitStorages(UnitMemory):
    """The memory of gathered units: storages of PyTorch, into which their parameters are views, of 0 bytes when freed.

    `paths` are those of the units by name of a tensor. Pieces count elements of `like`, bytes where tensors have
    several dtypes. A tensor of another dtype than a floating-point `like` has its own storage, with values that `round`
    makes of those that were gathered.
    """

    def __init__(
        self, runs: Sequence[Sequence[Piece]], tensors: Mapping[str, Any], like: Any, paths: Mapping[str, str]
    ) -> None:
        self._runs = [list(run) for run in runs]
        self._tensors = tensors
        self._why_freed = {name: _why_freed(name, path) for name, path in paths.items()}
        self._wholes: list[Any] = [torch.empty(0, dtype=like.dtype, device=like.device) for _ in runs]
        self._sizes = [sum(piece.size for piece in run) for run in runs]
        # Elements before a unit, which align it as in a flat array: products of other alignments round otherwise.
        self._leads = [self._lead_of(run, _ALIGNMENT // like.element_size()) for run in self._runs]
        self._unit_of = {piece.name: number for number, run in enumerate(runs) for piece in run}
        # By unit its pieces of another dtype by name, each with the memory of its parameter.
        self._rounded = [
            {piece.name: (piece, self._memory_of(piece)) for piece in run if self._is_rounded(piece)} for run in runs
        ]

    def allocate(self, unit: int) -> Array:
        self.show(unit)
        whole, size, lead = self._wholes[unit], self._sizes[unit], self._leads[unit]
        whole.untyped_storage().resize_((lead + size) * whole.element_size())
        for _, memory in self._rounded[unit].values():
            memory.untyped_storage().resize_(memory.numel() * memory.element_size())
        if whole.is_cuda:
            finish_stream(whole)
            return array_module(whole.device).from_dlpack(self._view(unit, 0, (size,), whole.dtype))
        nbytes = size * whole.element_size()
        address = whole.untyped_storage().data_ptr() + lead * whole.element_size()
        _advise_huge_pages(address, nbytes)
        # Tensor.numpy() would fix the size of the storage for ever.
        memory = (ctypes.c_char * max(1, nbytes)).from_address(address)
        return np.frombuffer(memory, str(whole.dtype).removeprefix("torch."), size)

    def release(self, unit: int) -> None:
        self.show(unit)  # a hidden parameter would refuse its other memory
        for memory in self._memories(unit):
            finish_stream(memory)
        if not all(memory.untyped_storage().resizable() for memory in self._memories(unit)):
            self._leave(unit)  # since p.detach().numpy() has fixed a size for ever
        for memory in self._memories(unit):
            memory.untyped_storage().resize_(0)
        self.hide(unit)

    def hide(self, unit: int) -> None:
        """Make the parameters of a unit those of a freed one, whose operations raise."""
        for piece in self._runs[unit]:
            p = self._tensors[piece.name]
            if not _is_freed(p):
                own: Any = type(p)
                p.__class__ = _freed_class(own)
                p.why_freed = self._why_freed[piece.name]

    def show(self, unit: int) -> None:
        """Give the parameters of a gathered unit their own class back."""
        for piece in self._runs[unit]:
            p = self._tensors[piece.name]
            if _is_freed(p):
                p.__class__ = type(p).whole_class
                del p.why_freed

    def round(self, unit: int) -> None:
        """Give the parameters of another dtype the values of a gathered unit."""
        for piece, memory in self._rounded[unit].values():
            memory.copy_(self._master_of(unit, piece))

    def take_values(self, unit: int) -> None:
        """Take what was written to such parameters into the gathered unit."""
        for piece, memory in self._rounded[unit].values():
            take_changed(memory, self._master_of(unit, piece))

    def attach_parameters(self, unit: int) -> None:
        """Make the parameters of a gathered unit views into its memory, with the values that they have."""
        for p, view in self._views(unit):
            if p.device.type == "meta":
                give_memory(p, view)
            else:
                view.copy_(p.detach())
                p.data = view
            p.grad = None

    def detach_parameters(self, unit: int) -> None:
        """Give the parameters of a gathered unit memory of their own."""
        for piece in self._runs[unit]:
            p = self._tensors[piece.name]
            p.data = p.detach().clone()
        self._runs[unit] = []

    def invalidate(self) -> None:
        """Learn that the shares are lost, so that freed parameters say so."""
        for name, p in self._tensors.items():
            if _is_freed(p):
                p.why_freed = (
                    f"parameter {name!r} has no values: under zero=3 its shares went with the optimizer of "
                    "as_distributed, which was collected as garbage; call its close() before, on all ranks, which "
                    "leaves the module whole"
                )

    def is_here(self, name: str) -> bool:
        """Whether a parameter has the memory of its unit, gathered or not."""
        unit = self._unit_of[name]
        memory = self._rounded[unit][name][1] if name in self._rounded[unit] else self._wholes[unit]
        return bool(self._tensors[name].untyped_storage()._cdata == memory.untyped_storage()._cdata)

    def _leave(self, unit: int) -> None:
        """Leave the memory of a gathered unit to the arrays that share it, and take other memory."""
        here = [self.is_here(piece.name) for piece in self._runs[unit]]
        nbytes = self._wholes[unit].untyped_storage().nbytes()
        self._wholes[unit] = torch.empty_like(self._wholes[unit])
        self._wholes[unit].untyped_storage().resize_(nbytes)
        for name, (piece, memory) in self._rounded[unit].items():
            self._rounded[unit][name] = piece, torch.empty_like(memory)
        for (p, view), was_here in zip(self._views(unit), here, strict=True):
            p.data = view if was_here else p.data  # which a step refuses

    def _memories(self, unit: int) -> list[Any]:
        return [self._wholes[unit], *(memory for _, memory in self._rounded[unit].values())]

    def _views(self, unit: int) -> Iterator[tuple[Any, Any]]:
        """The parameters of a gathered unit, each with the view into its memory that it has or is to have."""
        rounded = self._rounded[unit]
        for piece in self._runs[unit]:
            own = rounded[piece.name][1] if piece.name in rounded else self._master_of(unit, piece)
            yield self._tensors[piece.name], own

    def _is_rounded(self, piece: Piece) -> bool:
        dtype = self._wholes[0].dtype
        return dtype.is_floating_point and as_reals(self._tensors[piece.name].detach()).dtype != dtype

    def _lead_of(self, run: Sequence[Piece], aligned: int) -> int:
        is_real = all(self._tensors[piece.name].dtype.is_floating_point for piece in run)  # others have own rules
        return run[0].start % aligned if run and is_real and self._wholes[0].dtype.is_floating_point else 0

    def _memory_of(self, piece: Piece) -> Any:
        p = self._tensors[piece.name]
        memory = torch.empty(p.shape, dtype=p.dtype, device=self._wholes[0].device)
        memory.untyped_storage().resize_(0)
        return memory

    def _master_of(self, unit: int, piece: Piece) -> Any:
        p, dtype = self._tensors[piece.name], self._wholes[unit].dtype
        start = piece.start - self._runs[unit][0].start
        if not dtype.is_floating_point:  # bytes
            return self._view(unit, start // p.element_size(), p.shape, p.dtype)
        return as_numbers(self._view(unit, start, piece.shape, dtype), p)

    def _view(self, unit: int, start: int, shape: tuple[int, ...], dtype: Any) -> Any:
        whole = self._wholes[unit]
        strides = torch.empty(shape, device="meta").stride()
        start += self._leads[unit] * whole.element_size() // dtype.itemsize
        return torch.empty(0, dtype=dtype, device=whole.device).set_(whole.untyped_storage(), start, shape, strides)


def _advise_huge_pages(address: int, nbytes: int) -> None:
    """Ask Linux for huge pages: the first use of each new page of 4 kB takes longer than to fill it."""
    if _MADVISE is not None and nbytes >= _HUGE_PAGES_FROM:
        start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (address + nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
        _MADVISE(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)  # an error changes nothing


def _why_freed(name: str, path: str) -> str:
    unit = f"its unit {path!r}" if path else "the module itself"
    return (
        f"parameter {name!r} has no values here: under zero=3 each rank keeps a share of it, and has all of it only "
        f"while {unit} is in its forward or backward pass.  To read or change it, enter "
        "`with mpishard.torch.summon_full_parameters(module):`, on all ranks.  If a forward pass uses it without "
        f"calling {unit}, make the module that does a unit with shard_units, or use zero=2"
    )
