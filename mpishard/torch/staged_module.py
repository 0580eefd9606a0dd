"""A PyTorch module of which each pipeline rank keeps the layers of its own stages.

The forward pass of the module runs on every stage. Parameters of other stages are there without values, as PyTorch's
fake tensors, and a layer calls back before it computes: `mpishard.torch.stage_passes` says what it returns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import update_wrapper
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mpishard.arguments import flag, mark
from mpishard.comm.agreement import opening
from mpishard.comm.axis import Axis
from mpishard.comm.mesh import Mesh
from mpishard.layout.tensors import ModelParallelRank, ParameterSpec
from mpishard.torch.buffers import buffers_aside
from mpishard.torch.cut_module import CutModule
from mpishard.torch.memory import as_reals, broadcast_values
from mpishard.torch.stages import StageLayer
from mpishard.torch.units import HOW_TO_SAVE, ModuleHook, plain_name


class Walk(Protocol):
    """A pass through the layers that is under way."""

    def call(self, number: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What a layer returns."""


class StagedModule:
    """The layers of a module on the pipeline axis of a mesh, and the parameters of this rank.

    Nothing is changed before `cut`. `trained` and `frozen` are all parameters by name; those that are in no layer are
    on all stages. `cuts` are those over the tensor axis, which come before. Methods are collective over the pipeline
    axis, unless they say otherwise.
    """

    def __init__(
        self,
        module: Any,
        mesh: Mesh,
        layers: list[StageLayer],
        trained: Mapping[str, Any],
        frozen: Mapping[str, Any],
        cuts: CutModule | None = None,
    ) -> None:
        self.module = module
        self.mesh = mesh
        self.layers = layers
        self.cuts = cuts
        self.count: int = layers[-1].stage + 1  # of virtual stages
        numbers = range(len(layers))
        # By virtual stage the number of its first layer.
        self.firsts: list[int] = [next(n for n in numbers if layers[n].stage == v) for v in range(self.count)]
        self.trained = dict(trained)  # of all stages
        self.mode: Any = FakeTensorMode(allow_non_fake_inputs=True)
        self._axis = mesh.pipeline
        self._tensors = {**trained, **frozen}
        self._forms = {name: (p.shape, p.dtype) for name, p in self._tensors.items()}  # of whole ones
        self._stages = _stages_of(layers, self._tensors, self.count)
        self._forwards: list[Any] = []  # of the layers, by number, and of the module
        self._replaced: list[Any] = []  # these, where one had its own before, as a layer that tensor ranks divide
        # What a call of the module without gradients returns, of its arguments.
        self.forward: Callable[[tuple[Any, ...], Mapping[str, Any]], Any] | None = None
        self._places: dict[str, list[tuple[Any, str]]] = {}  # where an absent parameter is in the module
        self._fakes: dict[str, Any] = {}  # what is there now
        self._stage_of_buffer: dict[str, int] = {}
        self.take_buffers: Callable[[], object] = lambda: None  # takes the values of tensors that have replaced some
        self._buffers: dict[str, Any] = {}
        self._handles: list[Any] = []
        self._walk: Walk | None = None
        self.is_summoned: bool = False  # layers compute by themselves, see `summoned`
        self._is_lost = False

    @property
    def described(self) -> str:
        """The stages, as a short text that differs where they do."""
        text = " ".join(f"{layer.path}:{layer.stage}" for layer in self.layers)
        return f"{len(self.layers)} layers [{mark(text)}]"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"a module cut into pipeline stages belongs to its mesh and cannot be copied or pickled: {HOW_TO_SAVE}"
        )

    @property
    def axis(self) -> Axis:
        """The pipeline axis."""
        return self._axis

    # -- the parameters of this rank ----------------------------------------------------------------------------------

    @property
    def place(self) -> ModelParallelRank:
        """The pipeline rank."""
        return self.mesh.place

    def holds(self, name: str) -> bool:
        """Return True if a parameter is on this rank. Not collective."""
        return any(map(self.place.runs, self._stages[name]))

    def is_absent(self, name: str) -> bool:
        """Return True if the module has a parameter without values now. Not collective."""
        return name in self._fakes

    def held(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Those of some parameters that are on this rank. Not collective."""
        return {name: p for name, p in tensors.items() if self.holds(name)}

    @property
    def specs(self) -> list[ParameterSpec]:
        """Those of all trained parameters."""
        found = []
        for name in self.trained:
            shape, dtype = self._forms[name]
            first, *others = self._stages[name]
            reals = tuple(as_reals(torch.empty(shape, dtype=dtype, device="meta")).shape)
            spec = ParameterSpec(name, reals) if self.cuts is None else self.cuts.spec(name, reals)
            found.append(replace(spec, stage=first, copies=tuple(others)))
        return found

    @property
    def wholes(self) -> dict[str, Any]:
        """All trained parameters by name, as tensors without values."""
        forms = {name: self._forms[name] for name in self.trained}
        return {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in forms.items()}

    def gathered(self, own: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], like: Any) -> dict[str, Any]:
        """Tensors that belong to parameters, such as masters, from the stages that have them.

        `own` are those of this rank, `shapes` those of all by name, `like` a tensor of their dtype and device.
        """
        found = {}
        for name, shape in shapes.items():
            found[name] = own[name] if name in own else like.new_empty(shape)
            self._from_owner(name, found[name])
        return found

    def cut(self, buffers: Mapping[str, Any], is_filled: bool) -> None:
        """Leave this rank the parameters of its stages, with the values of rank 0, and let layers call back.

        If it `is_filled`, the rank has these alone already.
        """
        self._buffers = dict(buffers)
        names = {id(buffer): name for name, buffer in buffers.items()}
        for tensor in (*buffers.values(), *(() if is_filled else self._tensors.values())):
            broadcast_values(tensor, self._axis)
        for layer in self.layers:
            inside = [names[id(each)] for each in layer.module.buffers() if id(each) in names]
            self._stage_of_buffer.update(dict.fromkeys(inside, layer.stage))
        name_of = {id(p): name for name, p in self._tensors.items() if not self.holds(name)}
        for child in self.module.modules():
            for key, p in child._parameters.items():
                if p is not None and id(p) in name_of:
                    self._places.setdefault(name_of[id(p)], []).append((child._parameters, key))
        self._fakes = {name: self._without_values(name) for name in self._places}
        self._leave()
        run, call = torch.compiler.disable(StagedModule._run), torch.compiler.disable(StagedModule._call)
        runs = [(layer.module, ModuleHook(run, self, number)) for number, layer in enumerate(self.layers)]
        for module, hook in (*runs, (self.module, ModuleHook(call, self))):
            self._forwards.append(module.forward)
            self._replaced.append(vars(module).get("forward"))
            module.forward = update_wrapper(hook, module.forward)  # of whose arguments transformers looks for some
        refuse = ModuleHook(StagedModule._check_summoned, self)
        for child in self.module.modules():
            self._handles.append(child.register_state_dict_pre_hook(refuse))
            self._handles.append(child.register_load_state_dict_pre_hook(refuse))

    def _without_values(self, name: str) -> Any:
        p, (shape, dtype) = self._tensors[name], self._forms[name]
        shape = shape if self.cuts is None else self.cuts.own_shape(name, shape)
        with self.mode:
            return torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=p.device), p.requires_grad)

    def remove(self, restores: bool) -> None:
        """Remove what `cut` has changed; if `restores`, give the module all parameters, else its passes raise.

        Collective then.
        """
        if self._is_lost or not self._forwards:
            return
        self.forward = None
        if not restores:
            self._is_lost = True
            return
        self._enter()
        for handle in self._handles:
            handle.remove()
        modules = [layer.module for layer in self.layers]
        for module, replaced in zip((*modules, self.module), self._replaced, strict=True):
            del module.forward
            if replaced is not None:
                module.forward = replaced
        self._handles.clear()
        self._forwards.clear()
        self._replaced.clear()

    def share_buffers(self) -> None:
        """Give all stages the buffers of the layers of each."""
        with contextlib.suppress(ValueError):  # which a step or a save raises
            self.take_buffers()
        for name, stage in self._stage_of_buffer.items():
            broadcast_values(self._buffers[name], self._axis, self.place.runner(stage))

    @contextlib.contextmanager
    def summoned(self, writeback: bool) -> Iterator[None]:
        """Give the module all parameters; at the end rank 0's values are those of all ranks, or are dropped.

        Those of tensor ranks stay cut, and what is written to them is for `CutModule.summoned` within. Collective over
        the mesh. Meanwhile layers compute by themselves.
        """
        if self.is_summoned:
            yield
            return
        with opening(self.mesh.world, "summon_full_parameters") as same:
            same["writeback"] = flag("writeback", writeback)
        with self.with_all_stages(writeback):
            yield

    @contextlib.contextmanager
    def with_all_stages(self, writeback: bool) -> Iterator[None]:
        """`summoned`, without its agreement; collective over the pipeline axis unless values are written back."""
        before = {} if writeback else {name: p.detach().clone() for name, p in self.held(self._tensors).items()}
        try:  # a rank may die while the stages are gathered
            self._enter()
            self.is_summoned = True
            yield
            for p in self._tensors.values() if writeback and self.cuts is None else ():
                broadcast_values(p, self.mesh.world)
        finally:
            self.is_summoned = False
            for name, values in before.items():
                self._tensors[name].detach().copy_(values)
            self._leave()

    def _enter(self) -> None:
        """Put the absent parameters, and the buffers of all stages, into the module."""
        self.share_buffers()
        for name in self._tensors:
            p, (shape, _) = self._tensors[name], self._forms[name]
            if not self.holds(name):
                shape = shape if self.cuts is None else self.cuts.own_shape(name, shape)
                p.data = p.detach().new_empty(shape)
            self._from_owner(name, p)
            for table, key in self._places.get(name, ()):
                table[key] = p

    def _leave(self) -> None:
        """Free the absent parameters, and put those without values in their places."""
        for name, places in self._places.items():
            p = self._tensors[name]
            p.grad = None
            p.data = p.detach().new_empty(0)
            for table, key in places:
                table[key] = self._fakes[name]

    def _from_owner(self, name: str, values: Any) -> None:
        broadcast_values(values, self._axis, self.place.runner(self._stages[name][0]))

    # -- passes -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def following(self, walk: Walk) -> Iterator[None]:
        """A context in which layers return what a pass says. Not collective."""
        self._walk = walk
        try:
            yield
        finally:
            self._walk = None
            if self.cuts is not None:
                self.cuts.end_pass()

    def buffers_without_values(self, layers: Iterable[StageLayer]) -> contextlib.AbstractContextManager[None]:
        """A context in which the buffers of some layers stay as they are: these have others. Not collective."""
        return buffers_aside([child for layer in layers for child in layer.module.modules()], self.mode.from_tensor)

    def buffers_around(self) -> contextlib.AbstractContextManager[None]:
        """A context in which the buffers of modules in no layer stay as they are. Not collective."""
        inside = {child for layer in self.layers for child in layer.module.modules()}
        return buffers_aside([child for child in self.module.modules() if child not in inside])

    @contextlib.contextmanager
    def gradients_aside(self) -> Iterator[None]:
        """A context without ``p.grad``: a parameter without values is made with its gradient. Not collective."""
        found = [(p, p.grad) for p in self._tensors.values() if p.grad is not None]
        try:
            for p, _ in found:
                p.grad = None
            yield
        finally:
            for p, gradient in found:
                p.grad = gradient

    def compute(self, number: int, args: Any, kwargs: Any) -> Any:
        """The forward pass of a layer itself. Not collective."""
        return self._forwards[number](*args, **kwargs)

    def compute_whole(self, args: Any, kwargs: Any) -> Any:
        """The forward pass of the module, as a walk follows it. Not collective."""
        return self._forwards[-1](*args, **kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass of the module, as it is called: without gradients that of all stages."""
        self._check_alive()
        if self.forward is None or self._walk is not None or self.is_summoned or torch.is_grad_enabled():
            return self.compute_whole(args, kwargs)
        return self.forward(args, kwargs)

    def _run(self, number: int, *args: Any, **kwargs: Any) -> Any:
        """The forward pass of a layer, as the module calls it."""
        self._check_alive()
        if self.is_summoned:
            return self.compute(number, args, kwargs)
        if self._walk is None:
            raise RuntimeError(
                f"under pipeline={self._axis.size} a rank has the layers of its stages only: call loss_and_gradient("
                "function, *batch) of the optimizer of as_distributed, with function(module, *batch); or without "
                "gradients the module itself, and not its parts, within torch.no_grad(), on all ranks of a data rank"
            )
        return self._walk.call(number, args, kwargs)

    def _check_alive(self) -> None:
        if self._is_lost:
            raise RuntimeError(
                "the module has the layers of a stage only, since the optimizer of as_distributed, which has cut it, "
                "was collected as garbage; call its close() before, on all ranks, which leaves the module whole"
            )

    def _check_summoned(self, *_: Any, **__: Any) -> None:
        self._check_alive()
        if not self.is_summoned:
            raise RuntimeError(
                f"under pipeline={self._axis.size} a rank has the parameters of its stages: call state_dict() or "
                "load_state_dict() of the module within `with mpishard.torch.summon_full_parameters(module):`, on all "
                "ranks, or use save_checkpoint() and load_checkpoint() of the optimizer of as_distributed"
            )


def _stages_of(layers: list[StageLayer], tensors: Mapping[str, Any], count: int) -> dict[str, tuple[int, ...]]:
    """The virtual stages that have a parameter, by name: those of its layers, or all."""
    name_of = {id(p): name for name, p in tensors.items()}
    found: dict[str, set[int]] = {name: set() for name in tensors}
    for layer in layers:
        for p in layer.module.parameters():
            found[name_of[id(p)]].add(layer.stage)
    return {name: tuple(sorted(stages)) or tuple(range(count)) for name, stages in found.items()}


def check_has_all_stages(module: Any) -> None:
    """Raise ValueError if a module was cut into stages by an optimizer that nobody holds any more."""
    for path, child in module.named_modules():
        forward = vars(child).get("forward")
        if isinstance(forward, ModuleHook) and isinstance(forward.args[0], StagedModule):
            raise ValueError(
                f"{plain_name(path) or type(child).__name__} has the layers of a stage only: the optimizer of "
                "as_distributed, which has cut it, was collected as garbage; call its close() before, on all ranks"
            )
