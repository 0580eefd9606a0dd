"""A PyTorch module whose parameters are views into the flat array of mpishard."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from mpishard.backend import array as arrays
from mpishard.comm.axis import Axis
from mpishard.comm.errors import raised_on_all
from mpishard.comm.mesh import Mesh
from mpishard.layout.boxes import box_shape
from mpishard.layout.tensors import WHOLE
from mpishard.parameters.flat import CarriedState, FlatParameters, flat_of_tensors
from mpishard.torch.buffers import BufferOwner, Buffers
from mpishard.torch.cut_module import CutModule, check_is_whole
from mpishard.torch.gradient_hooks import GradientHooks, ProblemHooks
from mpishard.torch.layer_filler import LayerFiller
from mpishard.torch.memory import (
    array_module,
    as_array,
    as_numbers,
    as_reals,
    as_tensor,
    broadcast_values,
    give_memory,
    master_dtype,
    take_changed,
)
from mpishard.torch.module_tensors import ModuleTensors, persistent_buffers
from mpishard.torch.plans import planned
from mpishard.torch.sharded_module import ShardedModule
from mpishard.torch.staged_module import StagedModule, check_has_all_stages
from mpishard.torch.tensor_parallel_module import TensorParallelModule, specs_of
from mpishard.torch.units import Unit, check_not_summoned, plain_name, uncompiled, units_of, units_text

_WHEN = "before as_distributed, or after close() of what it returned"
_states: weakref.WeakKeyDictionary[Any, ModuleState] = weakref.WeakKeyDictionary()  # by module, before `torch.compile`


@dataclass(frozen=True)
class UnitSharding:
    """How ZeRO-3 divides the parameters of a module: its units, and the axis."""

    units: list[Unit]
    axis: Axis
    divides_frozen: bool  # frozen parameters are divided too

    @classmethod
    def of(
        cls,
        module: Any,
        tensors: ModuleTensors,
        shard_units: Any,
        axis: Axis,
        *,
        divides_frozen: bool,
    ) -> UnitSharding:
        """How a module, compiled or not, is divided; raises as `units_of`."""
        names = {id(p): name for name, p in tensors.trained.items()}
        frozen = {id(p): name for name, p in tensors.frozen.items()} if divides_frozen else {}
        units = units_of(uncompiled(module), shard_units, names, frozen)
        return cls(units, axis, divides_frozen)

    @property
    def described(self) -> str:
        """The units, as a text that must be the same on all ranks."""
        return units_text(self.units)


class ModuleState(CarriedState):
    """The parameters of a module as FlatParameters, with its buffers and frozen parameters.

    The parameters become views into one flat array, and keep their values. This is the `CarriedState` of that array.
    `buffers` is the treatment of buffers after each update, see `mpishard.torch.as_distributed`. With `sharding` the
    parameters are views into storages that come and go, see `ShardedModule`. `filler` fills a module on the device
    meta.

    A parameter of another dtype than the flat array has its own memory, with values that are rounded from the flat
    array, which has its master.
    """

    def __init__(
        self,
        module: Any,
        tensors: ModuleTensors,
        buffers: str,
        sharding: UnitSharding | None = None,
        cuts: TensorParallelModule | None = None,
        stages: StagedModule | None = None,
        filler: LayerFiller | None = None,
    ) -> None:
        self.module = module
        self.cuts = cuts
        self.stages = stages
        self.all_trained: dict[str, Any] = tensors.trained  # also those of other pipeline stages
        real = master_dtype(tensors.trained)
        is_filled = filler is not None and sharding is None
        if filler is not None and is_filled:
            filler.fill_module(tensors.device)
            tensors = replace(tensors, buffers=dict(persistent_buffers(module)))
        if cuts is not None:
            cuts.cut(tensors.buffers, is_filled)
        if stages is not None:
            stages.cut(tensors.buffers, is_filled)
            tensors = replace(tensors, trained=stages.held(tensors.trained), frozen=stages.held(tensors.frozen))
        self.users: int = 0  # optimizers and problems in use that train the module by this state
        self.mesh: Mesh | None = None  # of a problem, whose ranks may divide the module
        self.plan: Any = None  # of a problem
        # Of a problem: raises ValueError unless so many pipeline ranks can divide the module.
        self.layers_on: Callable[[int], object] | None = None
        self._let_go = False
        self._divides_frozen = False
        self._trained = tensors.trained
        self._frozen = tensors.frozen
        self.parameters: FlatParameters
        self.units: ShardedModule | None = None
        self._rounded: dict[str, tuple[Any, Any]] = {}  # parameters of another dtype than their masters, and these
        if sharding is None:
            # In the order of their indices; channels_last has its own order in memory only.
            plain = {name: as_reals(p.detach()).to(real).contiguous() for name, p in tensors.trained.items()}
            flat, _ = flat_of_tensors(plain, array_module(tensors.device))
            specs = specs_of(tensors.trained, cuts) if stages is None else stages.specs
            place = next((each.place for each in (cuts, stages) if each is not None), WHOLE)
            self.parameters = FlatParameters.over(flat, specs, place)
            self.parameters.sums_by_mpi = cuts is not None
            for name, p in tensors.trained.items():
                memory = as_numbers(as_tensor(self.parameters[name]), p)
                if p.dtype == memory.dtype:
                    p.data = memory
                else:
                    self._rounded[name] = p, memory
                p.grad = None
        else:
            device = tensors.device
            for p in () if sharding.divides_frozen else tensors.frozen.values():
                if p.device.type == "meta":
                    give_memory(p, torch.empty_like(p, device=device))
            self.units = ShardedModule(
                module,
                sharding.units,
                tensors.trained,
                tensors.frozen if sharding.divides_frozen else {},
                sharding.axis,
                device,
                filler,
                cuts,
            )
            self._divides_frozen = sharding.divides_frozen
            self.parameters = self.units.parameters
            tensors = replace(tensors, buffers=dict(persistent_buffers(module)))  # those on meta have been replaced
        self.tensors: ModuleTensors = tensors
        if cuts is not None:
            cuts.watch_gradients()
        if cuts is not None and stages is None:
            gathered = nullcontext if self.units is None else partial(self.units.summoned, False)
            cuts.check_first_pass(gathered, fits_whole=filler is None)
        names = {id(buffer): name for name, buffer in tensors.buffers.items()}
        owners = [
            BufferOwner(plain_name(f"{path}." if path else ""), child, names) for path, child in module.named_modules()
        ]
        self.buffers: Buffers = Buffers(tensors.buffers, buffers, owners)
        if stages is not None:
            stages.take_buffers = self.buffers.take_back
        self.problem_hooks: ProblemHooks = ProblemHooks(self.parameters, tensors.trained, self.units)
        self.hooks: GradientHooks = self.problem_hooks  # those in use
        self.hooks.attach()
        self.parameters.carried = self
        self._memory = [(name, p, self._memory_of(name, p)) for name, p in tensors.trained.items()]
        self._tables = [
            (table, list(table.items())) for child in module.modules() for table in (child._parameters, child._modules)
        ]

    def is_divided_over(self, mesh: Mesh | None) -> bool:
        """Whether ranks of this mesh, and of no other, have parts of the parameters."""
        if mesh is None or not self._divided:
            return False
        axes = [(self.units, mesh.data), (self.stages, mesh.pipeline), (self.cuts, mesh.tensor)]
        return all(divided is None or divided.axis is axis for divided, axis in axes)

    def use(self, hooks: GradientHooks) -> None:
        """Take gradients by other hooks from now on."""
        if hooks is not self.hooks:
            self.hooks.remove()
            self.hooks = hooks
            hooks.attach()

    # -- `CarriedState` -----------------------------------------------------------------------------------------------

    @property
    def facts(self) -> dict[str, Any]:
        return dict(self.buffers.facts)

    @property
    def calls(self) -> dict[str, str]:
        return self.hooks.calls

    def check_split(self, tensor: int, pipeline: int) -> None:
        if tensor == pipeline == 1:
            return
        if self.mesh is None:
            raise ValueError(
                "mpishard.torch.problem was not given the mesh, whose tensor and pipeline ranks divide the module"
            )
        if pipeline > 1:
            check_no_units(self.units, pipeline)
            if self.layers_on is not None:
                self.layers_on(pipeline)
        if tensor == 1:
            return
        if self.cuts is None:
            planned(self.module, self.plan, tensor)
        else:
            assert isinstance(self.cuts, CutModule)  # a problem divides no sequences
            self.cuts.check_ranks(self.plan, tensor)

    def check_reproducible(self, pipeline: int) -> None:
        if pipeline > 1:
            raise ValueError(
                f"reproducible=True with pipeline={pipeline}: stages of a PyTorch module sum their micro-batches as "
                "they come; leave it out of the configuration of the optimizer, or make the mesh with pipeline=1"
            )

    def check(self, facts: Mapping[str, Any]) -> None:
        self.buffers.check(facts)

    def restore(self, facts: Mapping[str, Any]) -> None:
        self.buffers.restore(facts)
        self.round_masters()

    def broadcast(self, axis: Axis) -> None:
        """Copy buffers and frozen parameters from rank 0. Collective."""
        self.round_masters()
        self.buffers.broadcast(axis)
        if axis.size > 1 and not self._divides_frozen:  # which have those of rank 0 already
            for p in self._frozen.values():
                broadcast_values(p, axis)

    def synchronize(self, axis: Axis) -> None:
        self.round_masters()
        self.buffers.synchronize(axis)
        if self.stages is not None and self.mesh is not None:  # any rank may be the one that is left
            self.stages.share_buffers()

    def consolidate(self, mesh: Mesh) -> None:
        self.round_masters()
        with raised_on_all(mesh.world):
            self.buffers.take_back()
        self.buffers.consolidate(mesh.data)
        if self.stages is not None:
            self.stages.share_buffers()

    # -- parameters of another dtype than their masters ---------------------------------------------------------------

    @property
    def dtype(self) -> Any:
        """That of the flat array, with the masters of all parameters."""
        return as_tensor(self.parameters.like).dtype

    @property
    def masters(self) -> dict[str, Any]:
        """Copies of the masters of parameters of another dtype, by name, as reals. Collective where ranks divide."""
        names = self._mastered
        if not names:
            return {}
        flat = as_tensor(self.parameters.gather())
        pieces = [piece for piece in self.parameters.pieces if piece.name in names]
        own = {each.name: flat[each.start : each.start + each.size].clone().view(each.shape) for each in pieces}
        if self.stages is not None:
            place = self.parameters.place
            shapes = {spec.name: box_shape(place.box(spec)) for spec in self.parameters.specs if spec.name in names}
            own = self.stages.gathered(own, shapes, flat)
        return own if self.cuts is None else {name: self.cuts.whole(name, values) for name, values in own.items()}

    @masters.setter
    def masters(self, masters: Mapping[str, Any]) -> None:
        for name in [name for name in masters if name in self.parameters]:
            values = masters[name]
            values = values if self.cuts is None else self.cuts.own_part(name, values)
            self.parameters.assign(name, as_array(values.to(next(iter(self._trained.values())).device, self.dtype)))
        self.round_masters()

    @property
    def master_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of `masters`. Not collective."""
        shape_of = {spec.name: spec.shape for spec in self.parameters.specs}
        return {name: shape_of[name] for name in self._mastered}

    @property
    def _mastered(self) -> list[str]:
        """The parameters of another dtype than their masters."""
        return [name for name, p in self.all_trained.items() if p.dtype.to_real() != self.dtype]

    def round_masters(self) -> None:
        """Give the parameters the values of their masters, rounded; after each change of the flat array."""
        if self._rounded:
            arrays.ready(self.parameters.held)
        for p, master in self._rounded.values():
            p.detach().copy_(master)

    def take_values(self) -> None:
        """Take into the masters what was written to their parameters since `round_masters`, as by `load_state_dict`."""
        for p, master in self._rounded.values():
            take_changed(p, master)

    def release(self) -> None:
        """Remove a user; after the last one the module is one of PyTorch alone, with its present values.

        Where ranks divide its parameters it is in no usable state then, unless `unshard` has made it whole.
        """
        self.users -= 1
        if not self.users:
            self._let_go = True
            for divided in self._divided:
                divided.remove(restores=False)
            self.hooks.remove()
            _states.pop(self.module, None)

    def unshard(self) -> None:
        """Before the last user goes, give the module whole parameters again, if ranks divide them. Collective then."""
        for divided in self._divided if self.users == 1 else ():
            divided.remove(restores=True)

    @contextmanager
    def summoned(self, writeback: bool) -> Iterator[None]:
        """A context in which the module has whole parameters, see `summon_full_parameters`."""
        with ExitStack() as stack:
            if self.units is not None:
                stack.enter_context(self.units.summoned(writeback))
            if self.stages is not None:
                stack.enter_context(self.stages.summoned(writeback))
            if self.cuts is not None:
                stack.enter_context(self.cuts.summoned(writeback, self.units is None))
            yield

    def check_not_summoned(self, what: str, **how: str) -> None:
        """Raise ValueError within `summoned`, in which `what` would not do what it says."""
        for divided in self._divided:
            check_not_summoned(divided, what, **how)

    @property
    def _divided(self) -> list[Any]:
        """What ranks have parts of, in the order in which it becomes whole."""
        return [each for each in (self.units, self.stages, self.cuts) if each is not None]

    def _memory_of(self, name: str, p: Any) -> tuple[Any, ...]:
        at = p.data_ptr() if self.units is None else self.units.is_here(name)
        return at, p.shape, p.stride(), p.dtype

    def check_intact(self) -> None:
        """Raise ValueError if parameters were added, removed, replaced, moved, frozen or unfrozen since the start.

        Or buffers were, but for one that another tensor of its kind has replaced: its values are taken.  Or gradients
        were, since their backward pass.
        """
        if self._let_go:
            raise ValueError(
                "the module was let go: the optimizer of as_distributed was closed or collected as garbage; keep it, "
                "or call as_distributed again"
            )
        self.check_not_summoned("a step")
        if self.cuts is not None and self.cuts.problem is not None:
            raise self.cuts.problem
        self.check_parameters()
        with torch._C.DisableTorchFunctionSubclass():  # parameters freed under zero=3 have Python functions
            for name, p in self._trained.items():
                if not p.requires_grad:
                    raise ValueError(
                        f"parameter {name!r} was frozen after the module was made distributed; freeze {_WHEN}"
                    )
            for name, p in self._frozen.items():
                if p.requires_grad:
                    raise ValueError(
                        f"parameter {name!r} was frozen when the module was made distributed, and requires a gradient "
                        f"now; set requires_grad {_WHEN}"
                    )
        self.hooks.take_changes()
        self.buffers.take_back()

    def check_parameters(self) -> None:
        """Raise ValueError if parameters were added, removed, replaced or moved since the start."""
        if self._let_go:
            return
        with torch._C.DisableTorchFunctionSubclass():  # parameters freed under zero=3 have Python functions
            for name, p, memory in self._memory:
                if self._memory_of(name, p) != memory:
                    raise ValueError(
                        f"the memory of parameter {name!r} was replaced after the module was made distributed, as "
                        f"module.to(...), load_state_dict(assign=True) and p.data = ... do; do that {_WHEN}"
                    )
        for table, before in self._tables:
            if len(table) != len(before) or any(
                table.get(name) is not each for name, each in before
            ):  # tensors have no truth value
                raise ValueError(f"the module was changed after it was made distributed: {self._changes()}")

    def _changes(self) -> str:
        """A text that names the parameters that are new or gone."""
        now = {plain_name(name): p for name, p in self.module.named_parameters()}
        now = {name: p for name, p in now.items() if self.stages is None or not self.stages.is_absent(name)}
        before = {**self._trained, **self._frozen}
        come = [name for name in now if name not in before]
        gone = [name for name in before if name not in now]
        other = [name for name in now if name in before and now[name] is not before[name]]
        found = [*(f"{name!r} is new" for name in come), *(f"{name!r} is gone" for name in gone)]
        found += [f"{name!r} is another Parameter" for name in other]
        return f"{', '.join(found[:3]) or 'it has other submodules'}; change it {_WHEN}"


def check_no_units(units: Any, pipeline: int) -> None:
    """Raise ValueError if units of ZeRO-3 shall be divided on a pipeline."""
    if units is not None and pipeline > 1:
        raise ValueError(
            f"shard_units with pipeline={pipeline}: stages have their parameters whole; leave shard_units out and use "
            "ZeRO2Optimizer, or make the mesh with pipeline=1"
        )


def state_of(
    module: Any,
    tensors: ModuleTensors,
    buffers: str,
    sharding: UnitSharding | None = None,
    cuts: TensorParallelModule | None = None,
    stages: StagedModule | None = None,
    filler: LayerFiller | None = None,
) -> ModuleState:
    """The state of a module, compiled or not, without gradients: the one that others use, or a new one. Adds a user.

    With any of the others it is collective. Raises ValueError if the module was changed since the state was made.
    """
    module, found = _known(module)
    if found is None:
        found = _states[module] = ModuleState(module, tensors, buffers, sharding, cuts, stages, filler)
    else:
        found.check_intact()
        found.take_values()
        found.buffers.mode = buffers
        found.hooks.clear()
    found.users += 1
    return found


def check_unchanged(module: Any) -> None:
    """Raise ValueError if a module, compiled or not, was changed since it was made distributed, if it ever was."""
    _, found = _known(module)
    if found is None:
        return
    try:
        found.check_intact()
    except ValueError:
        found = None
        gc.collect()  # an optimizer without references may be in a circle, as a hook that uses it makes one
        _, found = _known(module)
        if found is not None:
            found.check_intact()


def check_other_trainers(module: Any, divides: bool) -> None:
    """Raise ValueError if another optimizer trains a module, and one of the two divides its parameters.

    That is the one which asks if it `divides`. Or if a module was left with parts of them.
    """
    for _ in range(2):
        found = known_state(module) if isinstance(module, torch.nn.Module) else None
        if found is None and isinstance(module, torch.nn.Module):
            check_is_whole(module)
            check_has_all_stages(module)
        if found is None or not (divides or found.units or found.cuts or found.stages):
            return
        gc.collect()  # an optimizer without references may be in a circle
    raise ValueError(
        "another optimizer or problem trains this module, and one of the two divides its parameters, as zero=3, tensor "
        "and pipeline ranks do: "
        "call close() of what the other as_distributed returned; after a problem that has divided it load what the "
        "module's state_dict() returns within summon_full_parameters into another module, and in a function of the "
        "mesh make a module for each mesh"
    )


def known_state(module: Any) -> ModuleState | None:
    """The state of a module, compiled or not, that was made distributed and was not let go."""
    return _known(module)[1]


def _known(module: Any) -> tuple[Any, ModuleState | None]:
    """The module before `torch.compile`, and its state if it has one."""
    module = uncompiled(module)
    return module, _states.get(module)
