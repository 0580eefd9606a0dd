"""A PyTorch module whose layers are cut over the tensor axis by a plan: the passes of the layers.

A layer that is cut has another forward pass, which communicates as `mpishard.torch.tensor_ops` says.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mpishard.arguments import mark
from mpishard.comm.axis import Axis
from mpishard.comm.errors import raised_on_all
from mpishard.comm.mesh import Mesh
from mpishard.io import log
from mpishard.layout.boxes import run_lengths, split
from mpishard.nn.tensor_parallel import AdjointPair, Copy, GatherColumns, Reduce, ScatterColumns
from mpishard.torch.divided_logits import LossOfLabels, cross_entropy_of_parts
from mpishard.torch.experts import dealt_of_all
from mpishard.torch.memory import as_array
from mpishard.torch.plan_checks import PassRecord, check_numbers, copied, is_plain
from mpishard.torch.plans import LayerCut, dropouts_of, planned, terms_of
from mpishard.torch.tensor_ops import moved
from mpishard.torch.tensor_parallel_module import TensorParallelModule, TensorPart
from mpishard.torch.units import ModuleHook, plain_name, uncompiled

_OF_PARTS = (
    "this was a pass with one rank's part of each layer that the plan cuts.  If the whole module takes these inputs, "
    "the plan does not fit: a layer behind a 'colwise' one gets a part of its features: give it 'rowwise'"
)

_REMEDY = (
    "Between a layer whose outputs are cut and one whose inputs are cut each feature, or head, is for itself: give the "
    "first 'colwise_gather_output' and the second 'rowwise_split_input', or leave both out of the plan; layers packed "
    "in one, as a qkv that chunk(3, -1) takes apart, need ('packed_colwise', 3)"
)


@dataclass(frozen=True)
class _Layer:
    """A layer that is cut, with the forward pass that it had."""

    cut: LayerCut
    forward: Any
    pair: AdjointPair | None  # gathers outputs, or cuts inputs, that the plan has whole

    @property
    def takes(self) -> str:
        return f"the input of {self.cut.path!r}"

    @property
    def gives(self) -> str:
        return f"the output of {self.cut.path!r}"


class CutModule(TensorParallelModule):
    """A module whose layers are cut over the tensor axis of a mesh."""

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
        self._layers = [_layer_of(cut, mesh.tensor) for cut in cuts]
        activations = [what for layer in self._layers for what in _whole_activations(layer)]
        super().__init__(module, mesh, tensors, _parts_of(module, cuts, tensors), terms, activations, checks_pass)
        self._cuts = cuts
        self._enter, self._leave = Copy(self._axis), Reduce(self._axis)
        self._entered: tuple[Any, int, Any] = None, 0, None  # the last input that was entered, its version, the result
        self._dropouts = dropouts_of(module)
        self._loss = LossOfLabels(module, cuts, mesh)
        # Attributes that count heads, each with its value in the whole module.
        counts = {(id(each.attention), each.name): each for cut in cuts for each in cut.counts}
        self._counts = [(each, getattr(each.attention, each.name)) for each in counts.values()]
        self._is_local = False  # a pass sends nothing, and has the shapes of its tensors only
        self._record: PassRecord | None = None  # of the pass under way
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
        text = "\n".join(each)
        return f"{len(self._cuts)} layers cut [{mark(text)}]"

    def check_ranks(self, plan: Any, ranks: int) -> None:
        """Raise ValueError if the plan cannot cut the module over so many tensor ranks. Not collective."""
        forwards = [vars(cut.layer).pop("forward") for cut in self._cuts]
        self._set_attentions(whole=True)
        with torch._C.DisableTorchFunctionSubclass():  # parameters freed under zero=3 have Python functions
            own = {name: self._tensors[name].data for name in self._parts}
            try:
                for name, values in own.items():  # of the whole shape, without memory
                    self._tensors[name].data = values.new_zeros(()).expand(self._parts[name].shape)
                planned(self._module, plan, ranks)
            finally:
                for name, values in own.items():
                    self._tensors[name].data = values
                self._set_attentions(whole=False)
                for cut, forward in zip(self._cuts, forwards, strict=True):
                    cut.layer.forward = forward

    # -- the layers ---------------------------------------------------------------------------------------------------

    def _replace_code(self) -> None:
        # torch.compile would try to trace the messages.
        run, check = map(torch.compiler.disable, (CutModule._run, CutModule._check_input))
        for layer in self._layers:
            cut = layer.cut
            cut.layer.forward = ModuleHook(run, self, layer)
            # PyTorch has paths past the forward pass of a layer, which it takes for layers without hooks.
            self._handles.append(cut.layer.register_forward_pre_hook(ModuleHook(check, self, cut)))

    def _restore_code(self) -> None:
        for cut in self._cuts:
            del cut.layer.forward
        self._loss.remove()

    def _set_attentions(self, *, whole: bool) -> None:
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

    def _run(self, layer: _Layer, *args: Any, **kwargs: Any) -> Any:
        """The forward pass of a layer that is cut."""
        x, *others = (*args, *kwargs.values())
        cut, inner = layer.cut, layer.cut.layer
        if self._record is not None and cut.kind != "Embedding":
            self._record.note(layer.takes, self._own_columns(layer, x) if self.is_summoned else x)
        if self.is_summoned:
            return layer.forward(*args, **kwargs)
        if cut.kind == "Embedding":
            return self._look_up(layer, x)
        if cut.style.cuts == "experts":
            routed = self._gradients.watch(layer.takes, x), *others
            return x if self._is_local else self._gradients.watch(layer.gives, self._deal(layer, *routed))
        if cut.kind == "experts":
            routing = [others[0], moved(others[1], self._enter)] if others else []
            y = layer.forward(self._enter_once(layer, x), *routing)
            return self._gradients.watch(layer.gives, self._moved(y, self._leave))
        weight, bias = inner.weight.t() if cut.kind == "Conv1D" else inner.weight, inner.bias
        if cut.style.cuts == "outputs":
            if cut.shared is not None:
                size, heads = cut.shared.size, list(cut.shared.heads[self._axis.rank])
                weight, bias = (
                    None if p is None else p.unflatten(0, (-1, size))[heads].flatten(0, 1) for p in (weight, bias)
                )
            y = torch.nn.functional.linear(self._enter_once(layer, x), weight, bias)
            if layer.pair is None or (self._loss.keeps(cut) and not self._is_local):
                return y
            return self._gradients.watch(layer.gives, self._moved(y, layer.pair))
        x = x if layer.pair is None else self._moved(self._gradients.watch(layer.takes, x), layer.pair)
        y = self._moved(torch.nn.functional.linear(x, weight), self._leave)
        return self._gradients.watch(layer.gives, y if bias is None else y + bias.to(y.dtype))

    def _deal(self, layer: _Layer, x: Any, index: Any, weights: Any) -> Any:
        """What experts that ranks have dealt out make of tokens."""
        y, tokens = self._dealt(layer.forward, x, index, weights, self._axis, layer.cut.offsets)
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
        return TensorPart(-1, cut.style.packed, cut.offsets, x.shape).of(x, self._axis.rank)

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
        cut, inner = layer.cut, layer.cut.layer
        if cut.style.cuts == "outputs":
            y = layer.forward(x)
            return y if layer.pair is None else self._gradients.watch(layer.gives, self._moved(y, layer.pair))
        first, stop = cut.offsets[self._axis.rank : self._axis.rank + 2]
        has_values = not self._is_local and not x.is_cuda and x.numel()
        if has_values and not (0 <= int(x.min()) and int(x.max()) < cut.offsets[-1]):
            raise IndexError(f"{cut.path!r} has {cut.offsets[-1]} rows, and got {int(x.min())} to {int(x.max())}")
        is_here = (x >= first) & (x < stop)
        padding = inner.padding_idx
        inner.padding_idx = padding - first if padding is not None and first <= padding < stop else None
        try:
            y = layer.forward(torch.where(is_here, x - first, 0))
        finally:
            inner.padding_idx = padding
        y = self._moved(y.masked_fill(~is_here[..., None], 0), self._leave)
        return self._gradients.watch(layer.gives, y)

    def cross_entropy(self, layer: _Layer, logits: Any, targets: Any, ignore_index: int, reduction: str) -> Any:
        """The loss of the outputs of a layer, whole ones or this rank's part."""
        columns = layer.cut.offsets[-1]
        if not self._is_local:
            check_numbers("targets", targets[targets != ignore_index], columns)
        if self._is_local and logits.shape[-1] < columns:
            logits = self._moved(logits, GatherColumns(self._axis, columns))
        if logits.shape[-1] == columns:
            logits_nv, targets_n = logits.reshape(-1, columns), targets.reshape(-1)
            how = {"ignore_index": ignore_index, "reduction": reduction}
            return torch.nn.functional.cross_entropy(logits_nv, targets_n, **how)
        return cross_entropy_of_parts(logits, targets, self._axis, columns, ignore_index, reduction)

    # -- checks -------------------------------------------------------------------------------------------------------

    def _compared_passes(
        self, gathered: Any, module: Any, args: Any, kwargs: Any
    ) -> tuple[PassRecord, PassRecord] | None:
        """Passes without gradients and dropout.

        The first of three sends nothing, so that all ranks raise an error that one has by the shape of its part.
        """
        if not is_plain((args, kwargs)):
            return None

        def record() -> PassRecord:
            self._record = PassRecord()
            given, named = copied((args, kwargs))
            torch.manual_seed(0)
            try:
                self._record.note_output(self._loss.hide(module.forward(*given, **named), None))
                return self._record
            finally:
                self._record = None

        self._loss.begin(kwargs)
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
        return own, whole

    def _misfit(self, error: ValueError) -> str:
        return (
            f"the plan does not fit the code of the module: {error}.  {self._remedy}; for a module that gives other "
            "numbers each time, check_plan=False"
        )

    @staticmethod
    def explain(error: Exception) -> None:
        """Note with an error of a pass without messages that each layer had a rank's part."""
        error.add_note(_OF_PARTS)

    def _before(self, module: Any, args: Any, kwargs: Any) -> Any:
        """Before a pass of the module: compare its inputs over the ranks, and let them draw the same random numbers.

        Those of a pipeline are compared before, as samples.
        """
        if self.is_summoned or self._is_local:
            return
        self._agree_on_progress()
        if self._mesh.pipeline.size == 1:
            self._agree_on_inputs(args, kwargs)
        self._loss.begin(kwargs)
        # Some may drop in evaluation, and rates may change.
        if any(child.training and vars(child).get(name) for child, name in self._dropouts):
            device = next(iter(self._tensors.values())).device
            state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
            self._axis.broadcast(as_array(state), label="control")
            if device.type == "cuda":
                torch.cuda.set_rng_state(state, device)
            else:
                torch.set_rng_state(state)

    def _after(self, module: Any, args: Any, output: Any) -> Any:
        self._loss.end(output)
        self.end_pass()

    def _check_input(self, cut: LayerCut, layer: Any, args: Any) -> None:
        """Raise unless an input has as many columns as this rank has of the layer; not collective."""
        self._check_alive()
        if cut.kind in ("Embedding", "experts") or not args or self.is_summoned:
            return
        weight = layer.weight.t() if cut.kind == "Conv1D" else layer.weight
        columns = cut.offsets[-1] if cut.style.whole and cut.style.cuts == "inputs" else weight.shape[1]
        if args[0].shape[-1] != columns:
            raise ValueError(
                f"{cut.path!r}, whose {cut.style.cuts} the plan cuts, takes {columns} columns on this tensor rank, and "
                f"got {args[0].shape[-1]}: a layer with 'rowwise' takes the part that one with 'colwise' gives, "
                "'rowwise_split_input' and 'colwise' all columns"
            )

    def forget_gradients(self) -> None:
        """Compare no gradients of the passes since the last step, which are dropped. Not collective."""
        self._gradients.begin_after(self._gradients.steps)

    def end_expert_tokens(self) -> float:
        tokens, self._expert_tokens = self._expert_tokens, np.zeros_like(self._expert_tokens)
        return float(tokens.max() / tokens.sum()) if tokens.any() else math.nan

    def compare_gradients(self) -> None:
        self.problem = self._gradients.compare() or self.problem
        if self.check_is_due and self._gradients.steps == 1 and self._mesh.rank == 0:
            log.inform(
                "the plan was not compared with the whole module: no pass of the module itself had tensors and plain "
                "values as its arguments; call the module, and not its parts"
            )


def _layer_of(cut: LayerCut, axis: Axis) -> _Layer:
    pair: AdjointPair | None = None
    if cut.style.whole:
        pair = (GatherColumns if cut.style.cuts == "outputs" else ScatterColumns)(axis, cut.offsets[-1])
    return _Layer(cut, cut.layer.forward, pair)


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


def check_is_whole(module: Any) -> None:
    """Raise ValueError if a module was cut by an optimizer that nobody holds any more."""
    for path, layer in module.named_modules():
        forward = vars(layer).get("forward")
        if isinstance(forward, ModuleHook) and isinstance(forward.args[0], CutModule):
            raise ValueError(
                f"{plain_name(path)!r} has a part of its layer only: the optimizer of as_distributed, which has cut "
                "the module over tensor ranks, was collected as garbage; call its close() before, on all ranks"
            )
