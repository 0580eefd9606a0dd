"""ZeRO-3 of a PyTorch module: each rank keeps a share of its parameters, and a unit of them is whole while it is used.

A unit is a submodule with the parameters that no unit within it has.  It is gathered before its forward pass and freed
after it, gathered again when the gradient of its output arrives, and freed when the gradients of its inputs are there;
its own gradients have left for their owners by then.  The module's own unit and the one that is used last stay in
memory for the backward pass, which begins with them.  Freed parameters are views into a storage of 0 bytes, which
PyTorch reads without a check: meanwhile their class is one whose operations raise.

Zhao et al., "PyTorch FSDP" (2023), sections 3.2 and 4.2.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from mpishard.arguments import flag
from mpishard.backend import array as arrays
from mpishard.comm.agreement import opening
from mpishard.comm.axis import Axis
from mpishard.comm.errors import raised_on_all
from mpishard.layout.tensors import ParameterSpec, Piece
from mpishard.parameters.flat import FlatParameters, TensorLayout
from mpishard.parameters.zero3_units import ShardedUnits
from mpishard.torch.memory import array_module, as_numbers, as_reals, finish_stream, master_dtype, take_changed

Array = Any

# A list of layers is divided further where one of them has more than this part of all parameters.
_LARGEST_PART = 4
# Elements of a layer that "auto" makes a unit, at least: the messages of smaller ones take longer than their bytes.
SMALLEST_UNIT = 2**15
_HUGE_PAGES_FROM = 2**21  # bytes, that of one
_MADVISE: Any = getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_HUGEPAGE") else None
_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict)
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
_SAVES = (
    "to save it, call save_checkpoint() of the optimizer of as_distributed, or give torch.save() what its state_dict() "
    "returns within summon_full_parameters; to copy it, call close() on all ranks before"
)


# Which submodules are units, and which parameters belong to each.


@dataclass(eq=False)
class Unit:
    """A submodule whose own parameters are gathered together, and the passes in which it is used now."""

    path: str
    module: Any
    names: list[str] = field(default_factory=list)  # of the trained parameters, in flat order
    frozen: list[str] = field(default_factory=list)  # of the other parameters, if they are divided too
    children: list[Any] = field(default_factory=list)  # modules in it, and in no unit within it, itself included
    runs: list[int] = field(default_factory=list)  # the numbers of the runs of these tensors, see `ShardedModule`
    calls: list[_Call] = field(default_factory=list)  # forward passes under way, the innermost last
    # Forward passes since the last step whose backward pass has not ended, and those of which it has begun.
    waiting: set[_Call] = field(default_factory=set)
    opened: set[_Call] = field(default_factory=set)
    seen: set[str] = field(default_factory=set)  # parameters that got a gradient in this backward pass

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"a module under zero=3 belongs to its mesh and cannot be copied or pickled: {_SAVES}")


class _Hook(partial):
    """A hook of a unit, which pickle meets first."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.args[0].__reduce_ex__(protocol)


@dataclass(eq=False)
class _Call:
    """One forward pass of a unit."""

    unit: Unit
    task: int = -1  # the pass of autograd that has reached its output


def units_of(module: Any, shard_units: Any, names: Mapping[int, str], frozen: Mapping[int, str]) -> list[Unit]:
    """The units of a module, itself first.

    `names` has the trained parameters by id, in flat order, and `frozen` the others that are divided.

    Raises TypeError or ValueError if `shard_units` is unfit, or chooses nothing or a list, which has no forward pass.
    """
    chosen = _chosen(module, shard_units)
    units = {id(module): Unit("", module)}
    chains: dict[int, list[Unit]] = {}  # by the id of a parameter: the units around all of its places
    around: dict[str, list[Unit]] = {"": [units[id(module)]]}
    listed: set[int] = set()
    for path, child in module.named_modules(remove_duplicate=False):
        chain = around[path.rpartition(".")[0]] if path else around[""]
        if id(child) in chosen:
            unit = units.setdefault(id(child), Unit(path, child))
            chain = [*chain, unit] if unit not in chain else chain
        around[path] = chain
        if id(child) not in listed:
            listed.add(id(child))
            chain[-1].children.append(child)
        for p in child._parameters.values():
            if p is not None and (id(p) in names or id(p) in frozen):
                known = chains.setdefault(id(p), chain)
                chains[id(p)] = [each for each in known if each in chain]
    for key, name in names.items():
        chains[key][-1].names.append(name)
    for key, name in frozen.items():
        chains[key][-1].frozen.append(name)
    root, *others = units.values()
    for unit in others:
        if not unit.names and not unit.frozen:  # `materialize` fills what else it has nevertheless
            root.children += unit.children
    return [root, *(unit for unit in others if unit.names or unit.frozen)]


def units_text(units: Sequence[Unit]) -> str:
    """Units as a text that must be the same on all ranks."""
    return ", ".join(f"{unit.path} {len(unit.names) + len(unit.frozen)}" for unit in units)


def _chosen(module: Any, shard_units: Any) -> set[int]:
    """The ids of the submodules that `shard_units` makes units."""
    if isinstance(shard_units, str):
        if shard_units != "auto":
            raise ValueError(f'shard_units={shard_units!r} must be "auto", a class of modules, or a predicate')
        return _large_layers(module, sum(p.numel() for p in module.parameters()))
    classes = shard_units if isinstance(shard_units, tuple) else (shard_units,)
    is_unit: Callable[[Any], Any]
    if all(isinstance(each, type) for each in classes) and classes:
        what = " or ".join(each.__name__ for each in classes)
        is_unit = lambda child: isinstance(child, classes)  # noqa: E731
    elif callable(shard_units) and not isinstance(shard_units, torch.nn.Module):
        what, is_unit = f"for which {getattr(shard_units, '__name__', 'shard_units')} is true", shard_units
    else:
        raise TypeError(
            f'shard_units must be "auto", a class of modules or a tuple of them, or a predicate, got {shard_units!r}'
        )
    found = {path: child for path, child in module.named_modules() if path and is_unit(child)}
    if not found:
        raise ValueError(f"the module has no submodule {what}: see module.named_modules() for those that it has")
    for path, child in found.items():
        if isinstance(child, _CONTAINERS):
            raise ValueError(
                f"{path!r} is a {type(child).__name__} and has no forward pass, before which it could be gathered: "
                "choose its layers in shard_units"
            )
    return {id(child) for child in found.values()}


def _large_layers(module: Any, size: int) -> set[int]:
    """The ids of the layers in lists and Sequentials, the outermost ones, that are large enough."""
    found: set[int] = set()
    for child in module.children():
        in_list = isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential))
        own = sum(p.numel() for p in child.parameters())
        is_unit = in_list and own >= SMALLEST_UNIT and not isinstance(child, _CONTAINERS)
        within = set() if is_unit and own * _LARGEST_PART <= size else _large_layers(child, size)
        found |= within | ({id(child)} if is_unit else set())
    return found


# The memory of units, and the hooks that gather and free them.


class FreedParameter:
    """Comes before the class of a parameter while it is freed: all but its metadata and gradient raises RuntimeError.

    Autograd does not see classes, and finds the parameter as it is.
    """

    __slots__ = ()
    whole_class: Any  # the class while it is gathered
    why_freed: str = "parameters have no values here under zero=3"  # a parameter has its own text

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(f"{self.why_freed}.  As for the module: {_SAVES}")

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
        raise RuntimeError(next(filter(_is_freed, _tensors_in((args, kwargs))), cls).why_freed)
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


class UnitStorages:
    """The memory of gathered units: storages of PyTorch, into which their parameters are views, of 0 bytes when freed.

    This is the `UnitMemory` of ShardedUnits. `paths` are those of the units by name of a tensor. Pieces count elements
    of `like`, bytes where tensors have several dtypes. A tensor of another dtype than a floating-point `like` has its
    own storage, with values that `round` makes of those that were gathered.
    """

    def __init__(
        self, runs: Sequence[Sequence[Piece]], tensors: Mapping[str, Any], like: Any, paths: Mapping[str, str]
    ) -> None:
        self._runs = [list(run) for run in runs]
        self._tensors = tensors
        self._why_freed = {name: _why_freed(name, path) for name, path in paths.items()}
        self._wholes: list[Any] = [torch.empty(0, dtype=like.dtype, device=like.device) for _ in runs]
        self._sizes = [sum(piece.size for piece in run) for run in runs]
        self._unit_of = {piece.name: number for number, run in enumerate(runs) for piece in run}
        # By unit its pieces of another dtype by name, each with the memory of its parameter.
        self._rounded = [
            {piece.name: (piece, self._memory_of(piece)) for piece in run if self._is_rounded(piece)} for run in runs
        ]

    def allocate(self, unit: int) -> Array:
        self.show(unit)
        whole, size = self._wholes[unit], self._sizes[unit]
        whole.untyped_storage().resize_(size * whole.element_size())
        for _, memory in self._rounded[unit].values():
            memory.untyped_storage().resize_(memory.numel() * memory.element_size())
        if whole.is_cuda:
            finish_stream(whole)
            return array_module(whole.device).from_dlpack(self._view(unit, 0, (size,), whole.dtype))
        address, nbytes = whole.untyped_storage().data_ptr(), size * whole.element_size()
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
                whole: Any = torch.Tensor._make_subclass(type(p), view, p.requires_grad)
                vars(whole).update(vars(p))
                torch.utils.swap_tensors(p, whole)
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
        return torch.empty(0, dtype=dtype, device=whole.device).set_(whole.untyped_storage(), start, shape, strides)


def _advise_huge_pages(address: int, nbytes: int) -> None:
    """Ask Linux for huge pages: the first use of each new page of 4 kB takes longer than to fill it."""
    if _MADVISE is not None and nbytes >= _HUGE_PAGES_FROM:
        start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (address + nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
        _MADVISE(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)  # an error changes nothing


class ShardedModule:
    """The units of a module under ZeRO-3: their parameters are divided over `axis`, and hooks gather and free them.

    `tensors` are the trained parameters, and `frozen` others that are divided, as bytes, into shares that no state has:
    where other ranks may continue, they stay whole. A run is tensors of one unit that are neighbours in one of the two
    flat arrays; all runs are numbered, those of the trained parameters first.

    Methods are collective over `axis`, whose ranks must run the same units in the same order. `materialize` fills a
    module whose parameters have no values yet, see `as_distributed`. Raises what that raises on any rank, on all.
    """

    def __init__(
        self,
        module: Any,
        units: Sequence[Unit],
        tensors: Mapping[str, Any],
        frozen: Mapping[str, Any],
        axis: Axis,
        device: Any,
        materialize: Any,
    ) -> None:
        self.units = list(units)
        self._module = module
        self._tensors = {**tensors, **frozen}
        self.axis = axis
        self._of_name = {name: unit for unit in units for name in (*unit.names, *unit.frozen)}
        self._passes: list[int] = []  # those of autograd under way, a nested one last
        self._kept: list[_Call] = []  # units that the backward pass uses first, in memory since the forward pass
        self._summoned = False
        first = next(iter(tensors.values()))
        like = self._like = torch.empty(0, dtype=master_dtype(tensors), device=device)
        self.parameters: FlatParameters = FlatParameters(
            [ParameterSpec(name, tuple(as_reals(p.detach()).shape)) for name, p in tensors.items()],
            str(like.dtype).removeprefix("torch."),
            module=array_module(device),
            units=_runs(tensors, self._of_name),
            sharded_over=axis,
        )
        # The largest elements of a unit come first, so that all of them begin at multiples of their size.
        by_unit = [sorted(unit.frozen, key=lambda name: -frozen[name].element_size()) for unit in units]
        self._layouts = [
            self.parameters.layout,
            TensorLayout(
                [ParameterSpec(each, (frozen[each].nbytes,)) for names in by_unit for each in names], units=by_unit
            ),
        ]
        given, others = self._layouts
        self._frozen = ShardedUnits(others.pieces, others.units, axis, array_module(device).zeros(0, np.uint8))
        paths = {name: unit.path for name, unit in self._of_name.items()}
        likes = like, torch.empty(0, dtype=torch.uint8, device=device)
        self._storages = [
            UnitStorages([layout.pieces[first:last] for first, last in layout.units], own, each, paths)
            for layout, own, each in zip(self._layouts, (tensors, frozen), likes, strict=True)
        ]
        self._sharded.memory, self._frozen.memory = self._storages
        self._frozen.order = self._sharded.order
        self._runs = range(len(given.units) + len(others.units))
        for unit in self.units:
            unit.runs = self._runs_of([*unit.names, *unit.frozen])
        if first.device.type == "meta":
            self._materialize(materialize, device)
        else:
            for number in self._runs:
                self._use_runs([number])
                self._attach(number)
                self._write_back([number])
                self._free_runs([number])
        own = {id(p) for p in self._tensors.values()}
        self._handles: list[Any] = []
        for child in self._module.modules():
            if any(id(p) in own for p in child.parameters()):
                self._handles.append(child.register_state_dict_pre_hook(self._check_summoned))
                self._handles.append(child.register_load_state_dict_pre_hook(self._check_summoned))
        torch.compiler.reset()  # a graph from before has no hooks, and torch.compile does not look for any
        # torch.compile would try to trace the messages, and warn of each function that it does not know.
        before_any, after_any = torch.compiler.disable(self._before), torch.compiler.disable(self._after)
        for unit in self.units:
            before, after = _Hook(before_any, unit), _Hook(after_any, unit)
            self._handles += [
                unit.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
                unit.module.register_forward_hook(after, always_call=True),
            ]

    @property
    def described(self) -> str:
        """The units, as a text that must be the same on all ranks."""
        return units_text(self.units)

    @property
    def frozen_bytes(self) -> int:
        """Bytes of this rank's shares of frozen parameters."""
        return int(self._frozen.shard.nbytes)

    def is_here(self, name: str) -> bool:
        """Whether a trained parameter has the memory of its unit, gathered or not."""
        return self._storages[0].is_here(name)

    def note_gradient(self, name: str) -> None:
        """Note that autograd has finished a gradient, before it is marked ready."""
        self._of_name[name].seen.add(name)

    def check_not_summoned(self, what: str, would: str = "be undone at its end") -> None:
        """Raise ValueError within `summon_full_parameters`, in which `what` would not do what it says."""
        if self._summoned:
            raise ValueError(f"{what} within summon_full_parameters would {would}: leave the context before")

    def reset(self) -> None:
        """Begin a step: no backward pass is under way."""
        if self._passes:  # a backward pass that failed
            self._free_kept()
        self._passes.clear()
        for unit in self.units:
            unit.calls.clear()  # KeyboardInterrupt in a forward pass leaves some
            unit.opened.clear()
            unit.seen.clear()
            if all(call.unit is not unit for call in self._kept):  # else other ranks may have it yet
                self._free(unit)

    def end_step(self) -> None:
        """Forget forward passes that had no backward pass."""
        self._free_kept()
        for unit in self.units:
            unit.waiting.clear()

    def remove(self, restores: bool) -> None:
        """Remove the hooks; if `restores`, give the module whole parameters, else leave it without. Then collective."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._free_kept()
        for storages in () if restores else self._storages:
            storages.invalidate()
        for number in self._runs if restores else ():
            self._use_runs([number])
            for _, storages, own in self._parts([number]):
                for each in own:
                    storages.detach_parameters(each)
            self._free_runs([number])

    @contextlib.contextmanager
    def summoned(self, writeback: bool) -> Iterator[None]:
        """Gather all units; at the end rank 0's values are those of all ranks, if `writeback`, or are dropped."""
        if self._summoned:
            yield
            return
        with opening(self.axis, "summon_full_parameters") as same:
            same["writeback"] = flag("writeback", writeback)
        self._use_runs(self._runs)
        self._summoned = True
        try:
            yield
            if writeback:
                self._write_back(self._runs)
        finally:
            self._summoned = False
            self._free_runs(self._runs)

    # -- hooks --------------------------------------------------------------------------------------------------------

    def _check_summoned(self, *_: Any, **__: Any) -> None:
        if not self._summoned:
            raise RuntimeError(
                "under zero=3 a rank has its share of the parameters only: call state_dict() or load_state_dict() of "
                "the module within `with mpishard.torch.summon_full_parameters(module):`, on all ranks, or use "
                "save_checkpoint() and load_checkpoint() of the optimizer of as_distributed"
            )

    def _before(self, unit: Unit, module: Any, args: Any, kwargs: Any) -> None:
        """Gather a unit before its forward pass, and watch for the gradients of its inputs."""
        # On all ranks, also where one has freed them after an error; a checkpoint calls a unit in its backward pass.
        if not unit.opened:
            self._free_kept()
        if torch.is_grad_enabled() and torch._C._functorch.peek_interpreter_stack() is not None:
            raise RuntimeError(
                f"{_named(unit)} was called within a transform of torch.func, such as vmap or jvp, under zero=3: its "
                "parameters would be freed before that has used them; use zero=2, whose parameters are whole"
            )
        call = _Call(unit)
        unit.calls.append(call)
        self._gather(call)
        inputs = [each for each in _tensors_in((args, kwargs)) if each.requires_grad] if torch.is_grad_enabled() else []
        # The gradient of a leaf may be there before those of the unit's parameters are; the end of the pass is later.
        if inputs and not any(each.is_leaf for each in inputs):
            torch.autograd.graph.register_multi_grad_hook(inputs, lambda _: self._close(call))

    def _after(self, unit: Unit, module: Any, args: Any, output: Any) -> None:
        """Free a unit after its forward pass, and watch for the gradient of its output."""
        if not unit.calls:
            return
        call = unit.calls.pop()
        found = [*_tensors_in(output, set())]
        outputs = [each for each in found if each.requires_grad] if torch.is_grad_enabled() else []
        has_failed = sys.exc_info()[0] is not None  # PyTorch calls this hook then, too
        is_number = isinstance(output, int | float | str)
        is_inner = bool(unit.names) and unit is not self.units[0]  # that of the module ends with its own backward pass
        if is_inner and torch.is_grad_enabled() and not (found or is_number or has_failed):
            self._free(unit)
            raise TypeError(
                f"{_named(unit)} returned {'None' if output is None else f'a {type(output).__name__}'}, in which there "
                "is no tensor: under zero=3 the gradients of a unit's outputs begin its backward pass; return its "
                "tensors, also in tuples, mappings or attributes, or choose the module around it in shard_units"
            )
        if outputs:
            unit.waiting.add(call)
            torch.autograd.graph.register_multi_grad_hook(outputs, lambda _: self._open(call), mode="any")
            self._keep_gathered(call)
        else:
            self._free(unit)

    def _open(self, call: _Call) -> None:
        """Gather a unit, since the gradient of its output has arrived."""
        if torch.is_grad_enabled():
            self._free_kept()
            raise RuntimeError(
                "create_graph=True under zero=3: the parameters that gradients of gradients need are freed by then; "
                "use zero=2 or less"
            )
        if not self._passes:
            self._sharded.compare_order()
        call.task = torch._C._current_graph_task_id()
        if call.task not in self._passes:
            self._passes.append(call.task)
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._end_pass, call.task))
        self._gather(call)
        call.unit.opened.add(call)
        call.unit.waiting.add(call)

    def _close(self, call: _Call) -> None:
        """End the backward pass of one use of a unit: free it after the last one, when its gradients are complete."""
        unit = call.unit
        if call not in unit.opened:
            return
        unit.opened.discard(call)
        unit.waiting.discard(call)
        if not unit.waiting:
            self._complete(unit)
        self._free(unit)

    def _end_pass(self, task: int) -> None:
        """End a pass of autograd, which may be within another one: what no input has closed is closed."""
        for unit in self.units:
            for call in [each for each in unit.opened if each.task == task]:
                self._close(call)
        if task in self._passes:
            self._passes.remove(task)
        if not self._passes:
            self._free_kept()
            # Another pass within one `no_sync` can begin when the sums of this one have.
            others = any(unit.seen for unit in self.units) and not self.parameters.gradients.is_last_pass
            for unit in self.units:
                self._complete(unit, others)
                unit.seen.clear()

    def _complete(self, unit: Unit, unused: bool = False) -> None:
        """Mark the gradients that a unit will not get in this pass, so that the sums of the others may start.

        Of a unit that got none only if it is to count as `unused`.
        """
        if unit.seen or unused:
            for name in unit.names:
                if name not in unit.seen:
                    unit.seen.add(name)
                    self.parameters.mark_ready(name)

    # -- units in memory ----------------------------------------------------------------------------------------------

    def _gather(self, call: _Call) -> None:
        """Gather the unit of a call, unless it is in use, or in memory since the forward pass of this very call."""
        unit, kept = call.unit, call in self._kept
        if kept:
            self._kept.remove(call)
        elif any(each.unit is unit for each in self._kept):  # of a forward pass that another rank may have left out
            self._free_kept()
        missing = False
        for sharded, _, own in self._parts(unit.runs):
            missing |= not all(map(sharded.is_gathered, own))
        if missing:
            self._free_kept()
        if missing or kept:
            self._use_runs(unit.runs)

    def _free(self, unit: Unit) -> None:
        if self._is_unused(unit):
            self._free_runs(unit.runs)

    def _is_unused(self, unit: Unit) -> bool:
        return not (unit.calls or unit.opened or self._summoned)

    def _keep_gathered(self, call: _Call) -> None:
        """Leave a unit in memory after its forward pass, until another one but the module itself ends its own."""
        unit = call.unit
        if unit is not self.units[0]:
            self._free_kept()
        if self._is_unused(unit):
            self._kept.append(call)
            for _, storages, own in self._parts(unit.runs):
                for number in own:
                    storages.hide(number)

    def _free_kept(self) -> None:
        for call in self._kept:
            self._free(call.unit)
        self._kept.clear()

    # -- runs of tensors ----------------------------------------------------------------------------------------------

    @property
    def _sharded(self) -> ShardedUnits:
        assert self.parameters.sharded is not None
        return self.parameters.sharded

    def _parts(self, runs: Sequence[int]) -> list[tuple[ShardedUnits, UnitStorages, list[int]]]:
        """The runs of trained parameters, and those of frozen ones: what holds them, and their numbers there."""
        first = len(self._layouts[0].units)
        return [
            (self._sharded, self._storages[0], [number for number in runs if number < first]),
            (self._frozen, self._storages[1], [number - first for number in runs if number >= first]),
        ]

    def _runs_of(self, names: Sequence[str]) -> list[int]:
        """The numbers of the runs of these tensors, ascending."""
        given, others = self._layouts
        found = given.units_of([name for name in names if name in given.unit_of])
        frozen = others.units_of([name for name in names if name in others.unit_of])
        return found + [len(given.units) + number for number in frozen]

    def _use_runs(self, runs: Sequence[int]) -> None:
        for sharded, _, own in self._parts(runs):
            sharded.prefetch(own)
        for sharded, _, own in self._parts(runs):
            sharded.use(own)
        self._ready()
        for _, storages, own in self._parts(runs):
            for number in own:
                storages.show(number)
                storages.round(number)

    def _write_back(self, runs: Sequence[int]) -> None:
        """Write back to the shares, on all ranks, what PyTorch has written to gathered runs on rank 0."""
        for _, storages, own in self._parts(runs):
            for number in own:
                storages.take_values(number)
        finish_stream(self._like)
        for sharded, _, own in self._parts(runs):
            sharded.broadcast_gathered(own)
        self._ready()  # the memory that was read may be freed

    def _free_runs(self, runs: Sequence[int]) -> None:
        for sharded, _, own in self._parts(runs):
            sharded.free(own)

    def _attach(self, number: int) -> None:
        for _, storages, own in self._parts([number]):
            for each in own:
                storages.attach_parameters(each)

    def _ready(self) -> None:
        arrays.ready(self.parameters.held)  # PyTorch may continue in another stream of a GPU

    def _materialize(self, materialize: Any, device: Any) -> None:
        """Fill the parameters and buffers, which are on the device meta, unit by unit, with the values of rank 0."""
        adopted: set[int] = set()
        for unit in self.units:
            own = [name for child in unit.children for name in self._names_in(child)]
            runs = self._runs_of([*own, *unit.names, *unit.frozen])
            self._use_runs(runs)
            with raised_on_all(self.axis):  # of a function of the user's
                for number in [each for each in runs if each not in adopted]:
                    self._attach(number)
                adopted.update(runs)
                for child in unit.children:
                    _fill(child, materialize, device)
            self._write_back(runs)
            self._free_runs(runs)

    def _names_in(self, child: Any) -> list[str]:
        names = {id(p): name for name, p in self._tensors.items()}
        return [names[id(p)] for p in child._parameters.values() if id(p) in names]


def _named(unit: Unit) -> str:
    return f"the unit {unit.path!r}" if unit.path else "the module"


def _why_freed(name: str, path: str) -> str:
    unit = f"its unit {path!r}" if path else "the module itself"
    return (
        f"parameter {name!r} has no values here: under zero=3 each rank keeps a share of it, and has all of it only "
        f"while {unit} is in its forward or backward pass.  To read or change it, enter "
        "`with mpishard.torch.summon_full_parameters(module):`, on all ranks.  If a forward pass uses it without "
        f"calling {unit}, make the module that does a unit with shard_units, or use zero=2"
    )


def _runs(tensors: Mapping[str, Any], of_name: Mapping[str, Unit]) -> list[list[str]]:
    """The tensors in runs of one unit each."""
    runs: list[list[str]] = []
    last: Unit | None = None
    for name in tensors:
        if of_name[name] is not last:
            runs.append([])
        last = of_name[name]
        runs[-1].append(name)
    return runs


def _fill(child: Any, materialize: Any, device: Any) -> None:
    """Give the buffers of a module memory, and let the user's function fill it and the parameters in place."""
    for key, buffer in child._buffers.items():
        if buffer is not None and buffer.device.type == "meta":
            child._buffers[key] = torch.empty_like(buffer, device=device)
    before = dict(child._parameters)
    if not any(each is not None for each in (*before.values(), *child._buffers.values())):
        return
    storages = {key: p.untyped_storage()._cdata for key, p in before.items() if p is not None}
    with torch.no_grad():
        materialize(child)
    for key, p in child._parameters.items():
        if p is not before.get(key) or (p is not None and p.untyped_storage()._cdata != storages[key]):
            raise ValueError(
                f"materialize has replaced {key!r} of a {type(child).__name__}: fill parameters in place, as "
                "reset_parameters() and functions of torch.nn.init do"
            )


def _tensors_in(found: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """The tensors in what a forward pass takes or returns; those of attributes only with `seen`, objects looked at."""
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, Mapping):
        for each in found.values():
            yield from _tensors_in(each, seen)
    elif isinstance(found, (list, tuple, set)):
        for each in found:
            yield from _tensors_in(each, seen)
    elif is_dataclass(found):
        for each in fields(found):
            yield from _tensors_in(getattr(found, each.name, None), seen)  # a field may have no value
    elif seen is not None and hasattr(found, "__dict__") and not isinstance(found, (torch.nn.Module, type)):
        if id(found) not in seen:
            seen.add(id(found))
            for each in vars(found).values():
                yield from _tensors_in(each, seen)
