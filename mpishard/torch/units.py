"""The units of a PyTorch module under ZeRO-3: which submodules they are, and the parameters of each.

A unit is a submodule with the parameters that no unit within it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any

import torch

# A list of layers is divided further where one of them has more than this part of all parameters.
_LARGEST_PART = 4
# Elements of a layer that "auto" makes a unit, at least: the messages of smaller ones take longer than their bytes.
SMALLEST_UNIT = 2**15
_COMPILED = "_orig_mod."  # torch.compile puts it into the names of a module
_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict)
HOW_TO_SAVE = (
    "to save it, call save_checkpoint() of the optimizer of as_distributed, or give torch.save() what its state_dict() "
    "returns within summon_full_parameters; to copy it, call close() on all ranks before"
)


class ModuleHook(partial):
    """A function that was put into a module, and its arguments: the first has what pickle and copy shall raise."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.args[0].__reduce_ex__(protocol)


def check_not_summoned(divided: Any, what: str, would: str = "be undone at its end") -> None:
    """Raise ValueError where a module that ranks divide is whole now: `what` would not do what it says."""
    if divided.is_summoned:
        raise ValueError(f"{what} within summon_full_parameters would {would}: leave the context before")


def uncompiled(module: Any) -> Any:
    """The module before `torch.compile`."""
    return getattr(module, "_orig_mod", module)


@dataclass(eq=False)
class Unit:
    """A submodule whose own parameters are gathered together, and the passes in which it is used now."""

    path: str
    module: Any
    names: list[str] = field(default_factory=list)  # of the trained parameters, in flat order
    frozen: list[str] = field(default_factory=list)  # of the other parameters, if they are divided too
    children: list[Any] = field(default_factory=list)  # modules in it, and in no unit within it, itself included
    runs: list[int] = field(default_factory=list)  # the numbers of the runs of these tensors, see `ShardedModule`
    calls: list[UnitCall] = field(default_factory=list)  # forward passes under way, the innermost last
    # Forward passes since the last step whose backward pass has not ended, and those of which it has begun.
    waiting: set[UnitCall] = field(default_factory=set)
    opened: set[UnitCall] = field(default_factory=set)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"a module under zero=3 belongs to its mesh and cannot be copied or pickled: {HOW_TO_SAVE}")


@dataclass(eq=False)
class UnitCall:
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


def plain_name(name: str) -> str:
    """The name of a tensor or submodule in the module before `torch.compile`."""
    return name.replace(_COMPILED, "")


def tensors_in(found: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """The tensors in what a forward pass takes or returns; those of attributes only with `seen`, objects looked at."""
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, Mapping):
        for each in found.values():
            yield from tensors_in(each, seen)
    elif isinstance(found, (list, tuple, set)):
        for each in found:
            yield from tensors_in(each, seen)
    elif is_dataclass(found):
        for each in fields(found):
            yield from tensors_in(getattr(found, each.name, None), seen)  # a field may have no value
    elif seen is not None and hasattr(found, "__dict__") and not isinstance(found, (torch.nn.Module, type)):
        if id(found) not in seen:
            seen.add(id(found))
            for each in vars(found).values():
                yield from tensors_in(each, seen)
