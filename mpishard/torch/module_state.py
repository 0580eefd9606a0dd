"""A PyTorch module whose parameters are views into the flat array of mpishard."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch

from mpishard.backend import array as arrays
from mpishard.comm.axis import Axis
from mpishard.parameters.flat import FlatParameters
from mpishard.torch.buffers import BufferOwner, Buffers
from mpishard.torch.gradient_hooks import GradientHooks
from mpishard.torch.memory import array_module, as_array, as_tensor
from mpishard.torch.module_tensors import ModuleTensors, plain_name

Array = Any
_WHEN = "before as_distributed, or after close() of what it returned"


class ModuleState:
    """The parameters of a module as FlatParameters, and what it has besides: buffers, frozen parameters.

    The parameters become views into one flat array, and keep their values.  This is the `CarriedState` of that array.

    Parameters
    ----------
    module : torch.nn.Module
        With `tensors` as `ModuleTensors.of` found them.
    tensors : ModuleTensors
        Of the module.
    buffers : {"broadcast", "average", "local"}
        What becomes of buffers after each update, see `mpishard.torch.as_distributed`.

    Attributes
    ----------
    module : torch.nn.Module
    parameters : FlatParameters
        By the names in its `state_dict`.
    buffers : Buffers
    hooks : GradientHooks
        They hand gradients from autograd to the parameters.
    users : int
        How many optimizers and problems are in use that train the module by this state.
    """

    def __init__(self, module: Any, tensors: ModuleTensors, buffers: str) -> None:
        self.module = module
        self.users: int = 0
        self._let_go = False
        self._trained = tensors.trained
        self._frozen = tensors.frozen
        # In the order of their indices; channels_last has its own order in memory only.
        plain = {name: p.detach().contiguous() for name, p in tensors.trained.items()}
        self.parameters: FlatParameters = FlatParameters.of(plain, module=array_module(tensors.device))
        for name, p in tensors.trained.items():
            p.data = as_tensor(self.parameters[name])
            p.grad = None
        names = {id(buffer): name for name, buffer in tensors.buffers.items()}
        owners = [
            BufferOwner(plain_name(f"{path}." if path else ""), child, names) for path, child in module.named_modules()
        ]
        self.buffers: Buffers = Buffers(tensors.buffers, buffers, owners)
        self.hooks: GradientHooks = GradientHooks(self.parameters, tensors.trained)
        self.parameters.carried = self
        self._memory = [(name, p, _memory_of(p)) for name, p in tensors.trained.items()]
        self._tables = [
            (table, list(table.items())) for child in module.modules() for table in (child._parameters, child._modules)
        ]

    # -- what CarriedState has --------------------------------------------------------------------------------------

    @property
    def facts(self) -> dict[str, Any]:
        """The buffers, as facts of a state."""
        return dict(self.buffers.facts)

    @property
    def arithmetic(self) -> dict[str, str]:
        """Nothing: PyTorch has the threads of BLAS."""
        return {}

    def check(self, facts: Mapping[str, Any]) -> None:
        """Raise ValueError unless `restore` can read these facts."""
        self.buffers.check(facts)

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Take the buffers from facts."""
        self.buffers.restore(facts)

    def spread(self, axis: Axis) -> None:
        """Copy buffers and frozen parameters from rank 0.  Collective over the axis."""
        self.buffers.spread(axis)
        if axis.size > 1:
            for p in self._frozen.values():
                values = p.detach().contiguous()
                memory = as_array(values.reshape(-1).view(torch.uint8))
                axis.broadcast(memory, label="parameters")
                arrays.ready(memory)  # PyTorch may go on in another stream of a GPU
                p.data.copy_(values)

    def synchronize(self, axis: Axis) -> None:
        """Make the buffers equal on all ranks.  Collective over the axis."""
        self.buffers.synchronize(axis)

    def consolidate(self, axis: Axis) -> None:
        """Make the buffers equal on all ranks, unless they are.  Collective over the axis."""
        self.buffers.consolidate(axis)

    def release(self) -> None:
        """One user less; after the last one the module is one of PyTorch alone, with the values it has.

        Not collective.
        """
        self.users -= 1
        if not self.users:
            self._let_go = True
            self.hooks.remove()
            _states.pop(self.module, None)

    def check_intact(self) -> None:
        """Raise ValueError if parameters were added, removed, replaced, moved, frozen or released since wrapping.

        Or buffers were, but for one that another tensor of its kind has replaced: its values are taken.  Or gradients
        were, since their backward pass.
        """
        if self._let_go:
            raise ValueError(
                "the module was let go: what as_distributed returned was closed, or nobody holds it any more; keep it, "
                "or call as_distributed again"
            )
        for name, p, memory in self._memory:
            if _memory_of(p) != memory:
                raise ValueError(
                    f"the memory of parameter {name!r} was replaced after the module was made distributed, as "
                    f"module.to(...), load_state_dict(assign=True) and p.data = ... do; do that {_WHEN}"
                )
            if not p.requires_grad:
                raise ValueError(f"parameter {name!r} was frozen after the module was made distributed; freeze {_WHEN}")
        for name, p in self._frozen.items():
            if p.requires_grad:
                raise ValueError(
                    f"parameter {name!r} was frozen when the module was made distributed, and requires a gradient now; "
                    f"set requires_grad {_WHEN}"
                )
        for table, before in self._tables:
            if len(table) != len(before) or any(
                table.get(name) is not each for name, each in before
            ):  # tensors have no truth value
                raise ValueError(f"the module was changed after it was made distributed: {self._changes()}")
        self.hooks.take_changes()
        self.buffers.take_back()

    def _changes(self) -> str:
        """The parameters that are there and were not, or were and are not."""
        now = {plain_name(name): p for name, p in self.module.named_parameters()}
        before = {**self._trained, **self._frozen}
        come = [name for name in now if name not in before]
        gone = [name for name in before if name not in now]
        other = [name for name in now if name in before and now[name] is not before[name]]
        found = [*(f"{name!r} is new" for name in come), *(f"{name!r} is gone" for name in gone)]
        found += [f"{name!r} is another Parameter" for name in other]
        return f"{', '.join(found[:3]) or 'it has other submodules'}; change it {_WHEN}"


def _memory_of(p: Any) -> tuple[Any, ...]:
    return p.data_ptr(), p.shape, p.stride(), p.dtype


_states: weakref.WeakKeyDictionary[Any, ModuleState] = weakref.WeakKeyDictionary()


def state_of(module: Any, tensors: ModuleTensors, buffers: str) -> ModuleState:
    """The state of a module: the one that others use, or a new one; the caller is a user more.  Not collective.

    Parameters
    ----------
    module : torch.nn.Module
        Compiled or not.
    tensors : ModuleTensors
        As `ModuleTensors.of` finds them now.
    buffers : str
        See `ModuleState`.

    Returns
    -------
    ModuleState
        With no gradients.

    Raises
    ------
    ValueError
        If the module was changed since the state was made.
    """
    module, found = _known(module)
    if found is None:
        found = _states[module] = ModuleState(module, tensors, buffers)
    else:
        found.check_intact()
        found.buffers.mode = buffers
        found.hooks.clear()
    found.users += 1
    return found


def check_unchanged(module: Any) -> None:
    """Raise ValueError if a module was changed since it was made distributed; do nothing if it never was.

    Not collective.

    Parameters
    ----------
    module : torch.nn.Module
        Compiled or not.

    Raises
    ------
    ValueError
        With what was changed.
    """
    _, found = _known(module)
    if found is not None:
        found.check_intact()


def _known(module: Any) -> tuple[Any, ModuleState | None]:
    """The module before `torch.compile`, and its state if it has one."""
    module = getattr(module, "_orig_mod", module)
    return module, _states.get(module)
