"""A PyTorch module whose layers are cut over the tensor axis by a plan: its parts, and its passes.

Each rank of the axis has its part of each parameter that the plan cuts, and all of the others. A layer that is cut has
another forward pass, which communicates as `mpishard.torch.tensor_ops` says.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from mpishard.arguments import flag
from mpishard.backend import array as arrays
from mpishard.comm.agreement import agree_on_settings, opening, text_of
from mpishard.comm.axis import Axis
from mpishard.comm.errors import raised_on_all
from mpishard.comm.mesh import Mesh
from mpishard.io import log
from mpishard.layout.boxes import run_lengths, split, whole_box
from mpishard.layout.tensors import ModelParallelRank, ParameterSpec
from mpishard.nn.tensor_parallel import AdjointPair, Copy, GatherColumns, Reduce, ScatterColumns
from mpishard.torch.buffers import as_fact
from mpishard.torch.experts import dealt_of_all
from mpishard.torch.memory import as_array, as_reals, broadcast_values, finish_stream
from mpishard.torch.plan_checks import PassRecord, ReplicaGradients, copied, is_plain
from mpishard.torch.plans import LayerCut, dropout_rate, planned, terms_of
from mpishard.torch.tensor_ops import moved
from mpishard.torch.units import HOW_TO_SAVE, ModuleHook, plain_name, tensors_in, uncompiled

_OF_PARTS = (
    "this was a pass with one rank's part of each layer that the plan cuts.  If the whole module takes these inputs, "
    "the plan does not fit: a layer behind a 'colwise' one gets a part of its features: give it 'rowwise'"
)

_REMEDY = (
    "Between a layer whose outputs are cut and one whose inputs are cut each feature, or head, is for itself: give the "
    "first 'colwise_gather_output' and the second 'rowwise_split_input', or leave both out of the plan; layers packed "
    "in one, as a qkv that chunk(3, -1) takes apart, need ('packed_colwise', 3)"
)


class TensorPart(NamedTuple):
    """How a parameter is cut: rank r has ``[offsets[r], offsets[r + 1])`` of a dimension.

    Of each of the layers that are `packed` there.
    """

    dim: int
    packed: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]  # of the whole

    def runs(self, rank: int) -> list[tuple[int, int]]:
        """What a rank has of the dimension: a start and a length for each packed layer."""
        start, stop = self.offsets[rank : rank + 2]
        return [(layer * self.offsets[-1] + start, stop - start) for layer in range(self.packed)]


@dataclass(frozen=True)
class _Layer:
    """A layer that is cut, with the forward pass that it had, and what its other side is gathered or cut by."""

    cut: LayerCut
    own: Any
    pair: AdjointPair | None

    @property
    def takes(self) -> str:
        return f"the input of {self.cut.path!r}"

    @property
    def gives(self) -> str:
        return f"the output of {self.cut.path!r}"


class CutModule:
    """The layers of a module that are cut over the tensor axis of a mesh, and the parts of this rank.

    Nothing is changed before `cut`. `tensors` are all parameters by name, `terms` the names of those that stay whole
    and of whose gradients each rank has a term. With `checks_pass` the first pass of the module is compared with one of
    the whole module. Methods are collective over the tensor axis, unless they say otherwise.
    """

    divides_samples = False  # tensor ranks have samples of their own
    _dealt = staticmethod(dealt_of_all)  # how tokens come to experts that are dealt out
    _remedy = _REMEDY  # for a plan that does not fit

    def __init__(
        self,
        module: Any,
        mesh: Mesh,
        cuts: list[LayerCut],
        tensors: Mapping[str, Any],
        terms: frozenset[str],
        checks_pass: bool,
    ) -> None:
        self._module = module
        self._mesh = mesh
        self._axis = mesh.tensor
        self._met = mesh.tensor.times_bound  # as these ranks, which have compared the same passes
        self._cuts = cuts
        self._tensors = dict(tensors)
        self._terms = terms
        self._parts = _parts_of(module, cuts, tensors)
        self._enter, self._leave = Copy(self._axis), Reduce(self._axis)
        self._entered: tuple[Any, int, Any] = None, 0, None  # the last input that was entered, its version, the result
        self._drops = dropout_rate(module) > 0
        self._layers = [self._layer_of(cut) for cut in cuts]
        # Attributes that count heads, each with its value in the whole module.
        counts = {(id(each.attention), each.name): each for cut in cuts for each in cut.counts}
        self._counts = [(each, getattr(each.attention, each.name)) for each in counts.values()]
        # Of the trained parameters that are whole: the same on all ranks, or, as `terms`, a term on each.
        wholes = {name: p for name, p in tensors.items() if p.requires_grad and name not in self._parts}
        activations = [what for layer in self._layers for what in _whole_activations(layer)]
        self._gradients = ReplicaGradients(self._axis, wholes, terms, activations)
        self._handles: list[Any] = []
        self._noting: list[Any] = []  # the handles on parameters, through which Python finds no circles
        self._summoned = False
        self._is_lost = False
        self._is_local = False  # a pass sends nothing, and has the shapes of its tensors only
        self._record: PassRecord | None = None  # of the pass under way
        self._check_is_due = checks_pass  # a pass shall be compared with one of the whole module
        self._fits_whole = True  # which a rank has room for
        self.problem: ValueError | None = None  # what the comparison of gradients has found
        self._expert_tokens = np.zeros(self._axis.size, np.int64)  # in this step, by the experts of each rank

    @classmethod
    def of(
        cls,
        module: Any,
        plan: Any,
        mesh: Mesh,
        trained: Mapping[str, Any],
        frozen: Mapping[str, Any],
        *,
        checks_pass: bool,
    ) -> CutModule | None:
        """The cuts of a module, compiled or not, by a plan or its own; None on a mesh of one tensor rank.

        Not collective. Raises TypeError or ValueError if the plan does not fit the module or the mesh.
        """
        module = uncompiled(module)
        ranks = mesh.tensor.size
        if plan is None and ranks == 1:
            return None
        styles, cuts = planned(module, plan, ranks)
        if ranks == 1:
            return None
        names = {id(p): name for name, p in {**trained, **frozen}.items()}
        shared = [p for cut in cuts if cut.shared is not None for p in cut.layer.parameters()]
        terms = frozenset(names[id(p)] for p in (*terms_of(module, styles), *shared))
        return cls(module, mesh, cuts, {**trained, **frozen}, terms, checks_pass)

    @property
    def described(self) -> str:
        """The cuts, as a short text that differs where they do."""
        each = [f"{cut.path} {cut.style} {cut.offsets}" for cut in self._cuts] + sorted(self._terms)
        mark = hashlib.blake2b("\n".join(each).encode(), digest_size=4).hexdigest()
        return f"{len(self._cuts)} layers cut [{mark}]"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"a module cut over tensor ranks belongs to its mesh and cannot be copied or pickled: {HOW_TO_SAVE}"
        )

    def check_ranks(self, plan: Any, ranks: int) -> None:
        """Raise ValueError if the plan cannot cut the module over so many tensor ranks. Not collective."""
        runs = [vars(cut.layer).pop("forward") for cut in self._cuts]
        self._count_heads(whole=True)
        with torch._C.DisableTorchFunctionSubclass():  # parameters freed under zero=3 have Python functions
            own = {name: self._tensors[name].data for name in self._parts}
            try:
                for name, values in own.items():  # of the whole shape, without memory
                    self._tensors[name].data = values.new_zeros(()).expand(self._parts[name].shape)
                planned(self._module, plan, ranks)
            finally:
                for name, values in own.items():
                    self._tensors[name].data = values
                self._count_heads(whole=False)
                for cut, run in zip(self._cuts, runs, strict=True):
                    cut.layer.forward = run

    # -- the parts of this rank ---------------------------------------------------------------------------------------

    @property
    def axis(self) -> Axis:
        """The tensor axis."""
        return self._axis

    @property
    def place(self) -> ModelParallelRank:
        """The tensor rank."""
        return self._mesh.place

    @property
    def wholes(self) -> dict[str, Any]:
        """The parameters that are cut, by name, as tensors without values of their whole shape."""
        return {
            name: torch.empty(part.shape, dtype=self._tensors[name].dtype, device="meta")
            for name, part in self._parts.items()
        }

    def spec(self, name: str, shape: tuple[int, ...]) -> ParameterSpec:
        """The spec of a parameter that has a shape here. Not collective."""
        part = self._parts.get(name)
        if part is None:
            return ParameterSpec(name, shape, partial=name in self._terms)
        boxes = []
        for start, length in (run for rank in range(self._axis.size) for run in part.runs(rank)):
            box = list(whole_box(part.shape))
            box[part.dim] = (start, start + length)
            boxes.append(tuple(box))
        return ParameterSpec(name, part.shape, parts=tuple(boxes), packed=part.packed)

    def own_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of this rank's part of a parameter of some shape. Not collective."""
        part = self._parts.get(name)
        if part is None:
            return shape
        length = sum(length for _, length in part.runs(self._axis.rank))
        return (*part.shape[: part.dim], length, *part.shape[part.dim + 1 :])

    def own_part(self, name: str, whole: Any) -> Any:
        """This rank's part of a parameter. Not collective."""
        part = self._parts.get(name)
        if part is None:
            return whole
        return torch.cat([whole.narrow(part.dim, *run) for run in part.runs(self._axis.rank)], part.dim)

    def whole(self, name: str, own: Any) -> Any:
        """A parameter, from the parts of all ranks; the parameter itself if it is not cut."""
        part = self._parts.get(name)
        if part is None:
            return own
        values = own.detach().contiguous()
        one = values.numel() // values.shape[part.dim]
        lengths = [part.packed * length for length in run_lengths(part.offsets)]
        counts = [one * length for length in lengths]
        joined = torch.empty(sum(counts), dtype=own.dtype, device=own.device)
        nbytes = [count * own.element_size() for count in counts]
        finish_stream(values)
        memory = as_array(joined.view(torch.uint8))
        self._axis.all_gather(memory, as_array(values.reshape(-1).view(torch.uint8)), nbytes, label="parameters")
        arrays.ready(memory)
        shape = list(own.shape)
        found = []
        for values, length in zip(joined.split(counts), lengths, strict=True):
            shape[part.dim] = length
            found.append(values.view(shape).chunk(part.packed, part.dim))
        return torch.cat([packed for layer in zip(*found, strict=True) for packed in layer], part.dim)

    def cut(self, buffers: Mapping[str, Any], is_filled: bool) -> None:
        """Leave this rank its part of each parameter, with the values of tensor rank 0, and cut the passes.

        What is on the device meta stays there. If it `is_filled`, the rank has its parts alone already.
        """
        for buffer in buffers.values():
            broadcast_values(buffer, self._axis)
        for name, p in () if is_filled else self._tensors.items():
            broadcast_values(p, self._axis)
            if name in self._parts:
                p.data = self.own_part(name, p.detach()).contiguous()
                p.grad = None
        self._count_heads(whole=False)
        # torch.compile would try to trace the messages.
        kind = type(self)
        own = kind._run, kind._check_input, kind._before, kind._after
        run, check, before, after = map(torch.compiler.disable, own)
        for layer in self._layers:
            cut = layer.cut
            cut.layer.forward = ModuleHook(run, self, layer)
            # PyTorch has paths past the forward pass of a layer, which it takes for layers without hooks.
            self._handles.append(cut.layer.register_forward_pre_hook(ModuleHook(check, self, cut)))
        parts = {id(self._tensors[name]) for name in self._parts}
        refuse = ModuleHook(CutModule._check_summoned, self)
        for child in self._module.modules():
            if any(id(p) in parts for p in child.parameters()):
                self._handles.append(child.register_state_dict_pre_hook(refuse))
                self._handles.append(child.register_load_state_dict_pre_hook(refuse))
        self._handles += [
            self._module.register_forward_pre_hook(ModuleHook(before, self), prepend=True, with_kwargs=True),
            self._module.register_forward_hook(ModuleHook(after, self), always_call=True),
        ]

    def watch_gradients(self) -> None:
        """Note the gradients of what all ranks have whole; a parameter that gets memory later loses its hooks.

        Not collective.
        """
        for name, p in self._gradients.tensors.items():
            hook = ModuleHook(CutModule._note_gradient, self, name)
            self._noting.append(p.register_post_accumulate_grad_hook(hook))

    def remove(self, restores: bool) -> None:
        """Remove what `cut` has changed; if `restores`, give the module whole parameters, else its passes raise.

        Collective then.
        """
        if self._is_lost or not self._handles:
            return
        for handle in self._noting:
            handle.remove()
        self._noting.clear()
        if not restores:
            self._is_lost = True
            return
        for name in self._parts:
            self._tensors[name].data = self.whole(name, self._tensors[name])
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for cut in self._cuts:
            del cut.layer.forward
        self._count_heads(whole=True)

    def check_not_summoned(self, what: str, would: str = "be undone at its end") -> None:
        """Raise ValueError within `summoned`, as `ShardedModule.check_not_summoned`. Not collective."""
        if self._summoned:
            raise ValueError(f"{what} within summon_full_parameters would {would}: leave the context before")

    @contextlib.contextmanager
    def summoned(self, writeback: bool, whole_on_data_ranks: bool) -> Iterator[None]:
        """Give the module whole parameters; at the end rank 0's values are those of all ranks, or are dropped.

        Of the data ranks, too, if these are `whole_on_data_ranks`. Meanwhile the module computes by itself.
        """
        if self._summoned:
            yield
            return
        with opening(self._axis, "summon_full_parameters") as same:
            same["writeback"] = flag("writeback", writeback)
        own = {name: self._tensors[name].data for name in self._parts}
        self._summoned = True
        self._count_heads(whole=True)
        try:  # a rank may die while the parts are gathered
            for name, values in own.items():
                self._tensors[name].data = self.whole(name, values)
            yield
            for name, p in self._tensors.items() if writeback else ():
                broadcast_values(p, self._mesh.world if whole_on_data_ranks else self._axis)
                if name in own:
                    own[name].copy_(self.own_part(name, p.detach()))
        finally:
            self._summoned = False
            self._count_heads(whole=False)
            for name, values in own.items():
                self._tensors[name].data = values

    def _count_heads(self, whole: bool) -> None:
        """Let attentions count the heads of the whole module, or of this rank."""
        for count, heads in self._counts:
            setattr(count.attention, count.name, heads if whole else count.values[self._axis.rank])

    # -- passes -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def without_messages(self) -> Iterator[None]:
        """A context whose passes send nothing: tensors have their shapes, and values without meaning.

        Not collective.
        """
        self._is_local = True
        try:
            yield
        finally:
            self._is_local = False

    def end_pass(self) -> None:
        """Forget the inputs of a pass of the module, or of a stage of it. Not collective."""
        self._entered = None, 0, None

    def _layer_of(self, cut: LayerCut) -> _Layer:
        pair: AdjointPair | None = None
        if cut.style.whole:
            pair = (GatherColumns if cut.style.cuts == "outputs" else ScatterColumns)(self._axis, cut.offsets[-1])
        return _Layer(cut, cut.layer.forward, pair)

    def _run(self, layer: _Layer, *args: Any, **kwargs: Any) -> Any:
        """The forward pass of a layer that is cut."""
        x, *others = (*args, *kwargs.values())
        cut, own = layer.cut, layer.cut.layer
        if self._record is not None and cut.kind != "Embedding":
            self._record.note(layer.takes, self._own_columns(layer, x) if self._summoned else x)
        if self._summoned:
            return layer.own(*args, **kwargs)
        if cut.kind == "Embedding":
            return self._look_up(layer, x)
        if cut.style.cuts == "experts":
            routed = self._gradients.watch(layer.takes, x), *others
            return x if self._is_local else self._gradients.watch(layer.gives, self._deal(layer, *routed))
        if cut.kind == "experts":
            routing = [others[0], moved(others[1], self._enter)] if others else []
            y = layer.own(self._enter_once(layer, x), *routing)
            return self._gradients.watch(layer.gives, self._moved(y, self._leave))
        weight, bias = own.weight.t() if cut.kind == "Conv1D" else own.weight, own.bias
        if cut.style.cuts == "outputs":
            if cut.shared is not None:
                size, heads = cut.shared.size, list(cut.shared.heads[self._axis.rank])
                weight, bias = (
                    None if p is None else p.unflatten(0, (-1, size))[heads].flatten(0, 1) for p in (weight, bias)
                )
            y = torch.nn.functional.linear(self._enter_once(layer, x), weight, bias)
            return y if layer.pair is None else self._gradients.watch(layer.gives, self._moved(y, layer.pair))
        x = x if layer.pair is None else self._moved(self._gradients.watch(layer.takes, x), layer.pair)
        y = self._moved(torch.nn.functional.linear(x, weight), self._leave)
        return self._gradients.watch(layer.gives, y if bias is None else y + bias.to(y.dtype))

    def _deal(self, layer: _Layer, x: Any, index: Any, weights: Any) -> Any:
        """What experts that ranks have dealt out make of tokens."""
        y, tokens = self._dealt(layer.own, x, index, weights, self._axis, layer.cut.offsets)
        if torch.is_grad_enabled():
            self._expert_tokens += tokens
        return y

    def _moved(self, x: Any, pair: AdjointPair) -> Any:
        """An operation of the tensor axis; of a pass that sends nothing, a tensor of the shape."""
        if not self._is_local:
            return moved(x, pair)
        if isinstance(pair, GatherColumns):
            return torch.nn.functional.pad(x, (0, pair.columns - x.shape[-1]))
        if isinstance(pair, ScatterColumns):
            return x[..., : run_lengths(split(pair.columns, self._axis.size))[self._axis.rank]]
        return x

    def _own_columns(self, layer: _Layer, x: Any) -> Any:
        """What a layer gets on this rank, of its input in the whole module."""
        cut = layer.cut
        if cut.style.cuts != "inputs" or cut.style.whole:
            return x
        part = TensorPart(-1, cut.style.packed, cut.offsets, x.shape)
        return torch.cat([x.narrow(-1, *run) for run in part.runs(self._axis.rank)], -1)

    def _enter_once(self, layer: _Layer, x: Any) -> Any:
        """An input of layers whose outputs are cut: one for all that get it, so that its gradient is summed once."""
        if self._is_local or not (torch.is_grad_enabled() and x.requires_grad):
            return x
        if layer.cut.is_adapter:  # its input is its own, and comes between layers that share one
            return moved(self._gradients.watch(layer.takes, x), self._enter)
        last, version, entered = self._entered
        if last is not x or version != x._version:
            entered = moved(self._gradients.watch(layer.takes, x), self._enter)
            self._entered = x, x._version, entered
        return entered

    def _look_up(self, layer: _Layer, x: Any) -> Any:
        """Rows of an embedding, of which this rank has some of the columns, or some of the rows."""
        cut, own = layer.cut, layer.cut.layer
        if cut.style.cuts == "outputs":
            y = layer.own(x)
            return y if layer.pair is None else self._gradients.watch(layer.gives, self._moved(y, layer.pair))
        first, stop = cut.offsets[self._axis.rank : self._axis.rank + 2]
        has_values = not self._is_local and not x.is_cuda and x.numel()
        if has_values and not (0 <= int(x.min()) and int(x.max()) < cut.offsets[-1]):
            raise IndexError(f"{cut.path!r} has {cut.offsets[-1]} rows, and got {int(x.min())} to {int(x.max())}")
        is_here = (x >= first) & (x < stop)
        padding = own.padding_idx
        own.padding_idx = padding - first if padding is not None and first <= padding < stop else None
        try:
            y = layer.own(torch.where(is_here, x - first, 0))
        finally:
            own.padding_idx = padding
        y = self._moved(y.masked_fill(~is_here[..., None], 0), self._leave)
        return self._gradients.watch(layer.gives, y)

    # -- checks -------------------------------------------------------------------------------------------------------

    def check_first_pass(
        self, gathered: Callable[[], contextlib.AbstractContextManager[None]], fits_whole: bool
    ) -> None:
        """Let the next pass be compared with one of the whole module, if that is wanted. Not collective.

        `gathered` makes a context in which this rank has the values of all its parts. To be called after the hooks that
        gather them. Unless the whole module `fits_whole` a rank, only the shapes of a pass are checked.
        """
        self._fits_whole = fits_whole
        if self._check_is_due:
            hook = ModuleHook(torch.compiler.disable(type(self)._check_pass), self, gathered)
            self._handles.append(self._module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True))

    def _check_pass(self, gathered: Any, module: Any, args: Any, kwargs: Any) -> None:
        """Before a pass: compare one of the cut module with one of the whole, without gradients and dropout.

        The first of three sends nothing, so that all ranks raise an error that one has by the shape of its part.
        """
        if self._summoned:
            return
        self._meet()
        if not self._check_is_due:
            return
        self._agree_on_inputs(args, kwargs)
        if not is_plain((args, kwargs)):
            return

        def record() -> PassRecord:
            self._record = PassRecord()
            given, named = copied((args, kwargs))
            torch.manual_seed(0)
            try:
                self._record.note_output(module.forward(*given, **named))
                return self._record
            finally:
                self._record = None

        with self._without_trace(module, gathered):
            self._is_local = True
            try:
                with raised_on_all(self._axis):
                    record()
            except Exception as error:
                error.add_note(_OF_PARTS)
                raise
            finally:
                self._is_local = False
            own = whole = PassRecord()
            if self._fits_whole:
                own = record()
                with self.summoned(False, False), raised_on_all(self._axis):
                    whole = record()
        with raised_on_all(self._axis):
            try:
                own.check(whole)
            except ValueError as error:
                raise ValueError(
                    f"the plan does not fit the code of the module: {error}.  {self._remedy}; for a module that gives "
                    "other numbers each time, check_plan=False"
                ) from None
        self._check_is_due = False

    def _meet(self) -> None:
        """Where other ranks have taken the places of some: compare nothing more that any of them has compared."""
        if self._met == self._axis.times_bound:
            return
        compared = np.array([not self._check_is_due, self._gradients.steps], np.int64)
        self._axis.all_reduce(compared, op="max", label="control")
        was_checked, steps = compared.tolist()
        self._check_is_due = not was_checked
        self._gradients.begin_after(steps)
        self._met = self._axis.times_bound

    @property
    def check_is_due(self) -> bool:
        """Whether a pass shall be compared with one of the whole module."""
        return self._check_is_due

    def check_pass(self, module: Any, args: Any, kwargs: Any) -> None:
        """Compare a pass with these arguments now, as of a module that a pipeline passes in stages."""
        self._check_pass(contextlib.nullcontext, module, args, kwargs)

    @staticmethod
    def explain(error: Exception) -> None:
        """Note with an error of a pass without messages that each layer had a rank's part."""
        error.add_note(_OF_PARTS)

    @contextlib.contextmanager
    def _without_trace(self, module: Any, gathered: Any) -> Iterator[None]:
        """A context for passes that are compared: in evaluation mode, with random numbers of their own."""
        modes = {child: child.training for child in module.modules()}
        device = next(iter(self._tensors.values())).device
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []), gathered():
            try:
                for child in modes:
                    child.training = False
                yield
            finally:
                for child, mode in modes.items():
                    child.training = mode

    def _agree_on_inputs(self, args: Any, kwargs: Any) -> None:
        self._check_alive()
        given = [f"{tuple(each.shape)} {text_of(as_fact(each))}" for each in tensors_in((args, kwargs))]
        settings = {f"tensor {number} of the inputs": text for number, text in enumerate(given)}
        agree_on_settings(
            self._axis,
            {"tensors and plain values alone": str(is_plain((args, kwargs))), **settings},
            what="inputs of the module",
            remedy="tensor ranks need the same samples: DistributedSampler(data, mesh.data.size, mesh.data.rank)",
        )

    def _before(self, module: Any, args: Any, kwargs: Any) -> Any:
        """Before a pass of the module: compare its inputs over the ranks, and let them draw the same random numbers.

        Those of a pipeline are compared before, as samples.
        """
        if self._summoned or self._is_local:
            return
        self._meet()
        if self._mesh.pipeline.size == 1:
            self._agree_on_inputs(args, kwargs)
        if self._drops and module.training:
            device = next(iter(self._tensors.values())).device
            state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
            self._axis.broadcast(as_array(state), label="control")
            if device.type == "cuda":
                torch.cuda.set_rng_state(state, device)
            else:
                torch.set_rng_state(state)

    def _after(self, module: Any, args: Any, output: Any) -> Any:
        self.end_pass()

    def _check_input(self, cut: LayerCut, layer: Any, args: Any) -> None:
        """Raise unless an input has as many columns as this rank has of the layer; not collective."""
        self._check_alive()
        if cut.kind in ("Embedding", "experts") or not args or self._summoned:
            return
        weight = layer.weight.t() if cut.kind == "Conv1D" else layer.weight
        columns = cut.offsets[-1] if cut.style.whole and cut.style.cuts == "inputs" else weight.shape[1]
        if args[0].shape[-1] != columns:
            raise ValueError(
                f"{cut.path!r}, whose {cut.style.cuts} the plan cuts, takes {columns} columns on this tensor rank, and "
                f"got {args[0].shape[-1]}: a layer with 'rowwise' takes the part that one with 'colwise' gives, "
                "'rowwise_split_input' and 'colwise' all columns"
            )

    def _check_alive(self) -> None:
        if self._is_lost:
            raise RuntimeError(
                "the module has parts of its parameters only, since the optimizer of as_distributed, which has cut it "
                "over tensor ranks, was collected as garbage; call its close() before, on all ranks, which leaves the "
                "module whole"
            )

    def _check_summoned(self, *_: Any, **__: Any) -> None:
        self._check_alive()
        if not self._summoned:
            raise RuntimeError(
                f"under tensor={self._axis.size} a rank has its part of the parameters that the plan cuts: call "
                "state_dict() or load_state_dict() of the module within `with "
                "mpishard.torch.summon_full_parameters(module):`, on all ranks, or use save_checkpoint() and "
                "load_checkpoint() of the optimizer of as_distributed"
            )

    def _note_gradient(self, name: str, p: Any) -> None:
        self._gradients.note(name, p.grad)

    def end_expert_tokens(self) -> float:
        """The largest part of the tokens of a step that experts of one rank have computed; NaN if there were none.

        Not collective.
        """
        tokens, self._expert_tokens = self._expert_tokens, np.zeros_like(self._expert_tokens)
        return float(tokens.max() / tokens.sum()) if tokens.any() else math.nan

    def compare_gradients(self) -> None:
        """In the first steps compare the gradients of what all ranks have whole; `problem` is what is wrong."""
        self.problem = self._gradients.compare() or self.problem
        if self._check_is_due and self._gradients.steps == 1 and self._mesh.rank == 0:
            log.inform(
                "the plan was not compared with the whole module: no pass of the module itself had tensors and plain "
                "values as its arguments; call the module, and not its parts"
            )


def _whole_activations(layer: _Layer) -> Iterator[str]:
    """What a layer takes and gives that all ranks have whole."""
    cuts, whole = layer.cut.style.cuts, layer.cut.style.whole
    if layer.cut.kind != "Embedding" and (cuts != "inputs" or whole):
        yield layer.takes
    if cuts != "outputs" or whole:
        yield layer.gives


def _parts_of(module: Any, cuts: list[LayerCut], tensors: Mapping[str, Any]) -> dict[str, TensorPart]:
    """How the parameters are cut, by name.  Raises ValueError if layers that share one do not cut it alike."""
    names = {id(p): name for name, p in tensors.items()}
    wanted = {(id(cut.layer), key): (*how, cut.offsets) for cut in cuts for key, how in cut.dimensions.items()}
    found: dict[str, TensorPart] = {}
    cut_by: dict[int, tuple[str, Any]] = {}
    for path, layer in module.named_modules():
        for key, p in layer._parameters.items():
            if p is None:
                continue
            how = wanted.get((id(layer), key))
            first, known = cut_by.setdefault(id(p), (plain_name(path), how))
            if known != how:
                raise ValueError(
                    f"{first!r} and {plain_name(path)!r} share {names[id(p)]!r}, and the plan cuts it in one of them, "
                    "or in two ways: name both in the plan, as {'embed_tokens': 'embedding_rowwise', 'lm_head': "
                    "'colwise_gather_output'}"
                )
            if how is not None:
                if p.is_complex():
                    raise ValueError(
                        f"parameter {names[id(p)]!r} is complex, and cannot be cut: leave its layer out of the plan"
                    )
                found[names[id(p)]] = TensorPart(*how, tuple(p.shape))
    return found


def specs_of(tensors: Mapping[str, Any], cuts: CutModule | None) -> list[ParameterSpec]:
    """The specs of parameters, which may be cut."""
    shapes = {name: tuple(as_reals(p.detach()).shape) for name, p in tensors.items()}
    if cuts is None:
        return [ParameterSpec(name, shape) for name, shape in shapes.items()]
    return [cuts.spec(name, shape) for name, shape in shapes.items()]


def check_is_whole(module: Any) -> None:
    """Raise ValueError if a module was cut by an optimizer that nobody holds any more."""
    for path, layer in module.named_modules():
        forward = vars(layer).get("forward")
        if isinstance(forward, ModuleHook) and isinstance(forward.args[0], CutModule):
            raise ValueError(
                f"{plain_name(path)!r} has a part of its layer only: the optimizer of as_distributed, which has cut "
                "the module over tensor ranks, was collected as garbage; call its close() before, on all ranks"
            )
