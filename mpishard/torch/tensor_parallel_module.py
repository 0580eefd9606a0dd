"""A PyTorch module that the ranks of a tensor axis divide: its parameters on a rank, and the hooks on its passes.

Each rank has its part of each parameter that is cut, and all of the others.  Subclasses divide the passes:
`mpishard.torch.cut_module` by layers, `mpishard.torch.sequences` by tokens, `mpishard.torch.expert_module` by experts.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from mpishard.arguments import flag
from mpishard.backend import array as arrays
from mpishard.comm.agreement import agree_on_settings, opening, text_of
from mpishard.comm.axis import Axis
from mpishard.comm.errors import raised_on_all
from mpishard.comm.mesh import Mesh
from mpishard.layout.boxes import run_lengths, whole_box
from mpishard.layout.tensors import ModelParallelRank, ParameterSpec
from mpishard.torch.buffers import as_fact, buffers_aside
from mpishard.torch.memory import as_array, as_reals, broadcast_values, finish_stream
from mpishard.torch.plan_checks import PassRecord, ReplicaGradients, is_plain
from mpishard.torch.units import HOW_TO_SAVE, ModuleHook, tensors_in


class TensorPart(NamedTuple):
    """How a parameter is cut: rank r has ``[offsets[r], offsets[r + 1])`` of each of the `packed` layers in `dim`."""

    dim: int
    packed: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]  # of the whole

    def runs(self, rank: int) -> list[tuple[int, int]]:
        """What a rank has of the dimension: a start and a length for each packed layer."""
        start, stop = self.offsets[rank : rank + 2]
        return [(layer * self.offsets[-1] + start, stop - start) for layer in range(self.packed)]

    def of(self, whole: Any, rank: int) -> Any:
        """What a rank has of a tensor."""
        return torch.cat([whole.narrow(self.dim, *run) for run in self.runs(rank)], self.dim)


class TensorParallelModule:
    """A module on the tensor axis of a mesh, and the parts of this rank.

    Nothing is changed before `cut`. `tensors` are all parameters by name, `parts` says how some of them are cut, and
    `terms` names those that stay whole and of whose gradients each rank has a term; `activations` are those of
    `ReplicaGradients`. With `checks_pass` the first pass of the module is compared with one of the whole module.
    Methods are collective over the tensor axis, unless they say otherwise.
    """

    divides_samples = False  # tensor ranks have samples of their own

    def __init__(
        self,
        module: Any,
        mesh: Mesh,
        tensors: Mapping[str, Any],
        parts: Mapping[str, TensorPart],
        terms: frozenset[str],
        activations: Sequence[str],
        checks_pass: bool,
    ) -> None:
        self._module = module
        self._mesh = mesh
        self._axis = mesh.tensor
        # The binding of the axis whose ranks have compared the same passes; others may take their places.
        self._met = mesh.tensor.times_bound
        self._tensors = dict(tensors)
        self._parts = parts
        self._terms = terms
        # Of the trained parameters that are whole: the same on all ranks, or, as `terms`, a term on each.
        uncut = {name: p for name, p in tensors.items() if p.requires_grad and name not in parts}
        self._gradients = ReplicaGradients(self._axis, uncut, terms, activations)
        self._handles: list[Any] = []
        self._noting: list[Any] = []  # handles of hooks on parameters; Python finds no circles through these
        self._is_lost = False
        self._fits_whole = True  # a rank has room for the whole module
        self.is_summoned: bool = False  # the module computes by itself, see `summoned`
        self.check_is_due: bool = checks_pass  # a pass shall be compared with one of the whole module
        self.problem: ValueError | None = None  # what the comparison of gradients has found

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"a module cut over tensor ranks belongs to its mesh and cannot be copied or pickled: {HOW_TO_SAVE}"
        )

    # -- what a subclass says -----------------------------------------------------------------------------------------

    @property
    def described(self) -> str:
        """How the module is divided, as a short text that differs where that does. Not collective."""
        raise NotImplementedError

    def _replace_code(self) -> None:
        """Let the layers compute this rank's part of a pass. Not collective."""
        raise NotImplementedError

    def _restore_code(self) -> None:
        """Undo what `_replace_code` has done to the layers. Not collective."""
        raise NotImplementedError

    def _set_attentions(self, *, whole: bool) -> None:
        """Let attentions work on all heads and tokens, or on those of this rank. Not collective."""
        raise NotImplementedError

    def _before(self, module: Any, args: Any, kwargs: Any) -> Any:
        """Before a pass of the module; returns its arguments, or None where they stay as they are."""
        raise NotImplementedError

    def _after(self, module: Any, args: Any, output: Any) -> Any:
        """After a pass of the module, or an error in it; returns its output, or None where it stays as it is."""
        raise NotImplementedError

    def _compared_passes(
        self, gathered: Any, module: Any, args: Any, kwargs: Any
    ) -> tuple[PassRecord, PassRecord] | None:
        """A pass with these arguments by all ranks, and one by the whole module; None where no two can be made."""
        raise NotImplementedError

    def _misfit(self, error: ValueError) -> str:
        """What is wrong where these passes differ by an `error`. Not collective."""
        raise NotImplementedError

    def compare_gradients(self) -> None:
        """In the first steps compare the gradients of what all ranks have whole; `problem` is what is wrong."""
        raise NotImplementedError

    def end_expert_tokens(self) -> float:
        """The largest part of the tokens of a step that experts of one rank have computed; NaN if there were none.

        Not collective.
        """
        return math.nan

    # -- the parts of this rank ---------------------------------------------------------------------------------------

    @property
    def axis(self) -> Axis:
        """The tensor axis."""
        return self._axis

    @property
    def place(self) -> ModelParallelRank:
        """The model-parallel rank of this process."""
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
        return whole if part is None else part.of(whole, self._axis.rank)

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
        """Leave this rank its part of each parameter, with the values of tensor rank 0, and divide the passes.

        What is on the device meta stays there. If it `is_filled`, the rank has its parts alone already.
        """
        for buffer in buffers.values():
            broadcast_values(buffer, self._axis)
        for name, p in () if is_filled else self._tensors.items():
            broadcast_values(p, self._axis)
            if name in self._parts:
                p.data = self.own_part(name, p.detach()).contiguous()
                p.grad = None
        self._replace_code()
        self._set_attentions(whole=False)
        parts = {id(self._tensors[name]) for name in self._parts}
        refuse = ModuleHook(TensorParallelModule._check_summoned, self)
        for child in self._module.modules():
            if any(id(p) in parts for p in child.parameters()):
                self._handles.append(child.register_state_dict_pre_hook(refuse))
                self._handles.append(child.register_load_state_dict_pre_hook(refuse))
        # torch.compile would try to trace the messages.
        kind = type(self)
        before, after = map(torch.compiler.disable, (kind._before, kind._after))
        self._handles += [
            self._module.register_forward_pre_hook(ModuleHook(before, self), prepend=True, with_kwargs=True),
            self._module.register_forward_hook(ModuleHook(after, self), always_call=True),
        ]

    def watch_gradients(self) -> None:
        """Note the gradients of what all ranks have whole; a parameter that gets memory later loses its hooks.

        Not collective.
        """
        for name, p in self._gradients.tensors.items():
            hook = ModuleHook(TensorParallelModule._note_gradient, self, name)
            self._noting.append(p.register_post_accumulate_grad_hook(hook))

    def _note_gradient(self, name: str, p: Any) -> None:
        self._gradients.note(name, p.grad)

    def remove(self, restores: bool) -> None:
        """Remove what `cut` has changed; if `restores`, give the module whole parameters, else its passes raise.

        Collective then, where parameters are cut; where none is, the module is whole either way.
        """
        if self._is_lost or not self._handles:
            return
        for handle in self._noting:
            handle.remove()
        self._noting.clear()
        if self._parts and not restores:
            self._is_lost = True
            return
        for name in self._parts:
            self._tensors[name].data = self.whole(name, self._tensors[name])
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._restore_code()
        self._set_attentions(whole=True)

    @contextlib.contextmanager
    def summoned(self, writeback: bool, whole_on_data_ranks: bool) -> Iterator[None]:
        """Give the module whole parameters; at the end rank 0's values are those of all ranks, or are dropped.

        Of the data ranks, too, if these are `whole_on_data_ranks`. Meanwhile the module computes by itself.
        """
        if self.is_summoned:
            yield
            return
        with opening(self._axis, "summon_full_parameters") as same:
            same["writeback"] = flag("writeback", writeback)
        own = {name: self._tensors[name].data for name in self._parts}
        self.is_summoned = True
        self._set_attentions(whole=True)
        try:  # a rank may die while the parts are gathered
            for name, values in own.items():
                self._tensors[name].data = self.whole(name, values)
            torch.clear_autocast_cache()  # which has the parts, in half precision
            yield
            for name, p in self._tensors.items() if writeback else ():
                broadcast_values(p, self._mesh.world if whole_on_data_ranks else self._axis)
                if name in own:
                    own[name].copy_(self.own_part(name, p.detach()))
        finally:
            self.is_summoned = False
            self._set_attentions(whole=False)
            for name, values in own.items():
                self._tensors[name].data = values
            torch.clear_autocast_cache()

    def _check_summoned(self, *_: Any, **__: Any) -> None:
        self._check_alive()
        if not self.is_summoned:
            raise RuntimeError(
                f"under tensor={self._axis.size} a rank has its part of the parameters that the plan cuts: call "
                "state_dict() or load_state_dict() of the module within `with "
                "mpishard.torch.summon_full_parameters(module):`, on all ranks, or use save_checkpoint() and "
                "load_checkpoint() of the optimizer of as_distributed"
            )

    def _check_alive(self) -> None:
        if self._is_lost:
            raise RuntimeError(
                "the module has parts of its parameters only, since the optimizer of as_distributed, which has cut it "
                "over tensor ranks, was collected as garbage; call its close() before, on all ranks, which leaves the "
                "module whole"
            )

    # -- a pass beside one of the whole module ------------------------------------------------------------------------

    def check_first_pass(
        self, gathered: Callable[[], contextlib.AbstractContextManager[None]], fits_whole: bool
    ) -> None:
        """Let the next pass be compared with one of the whole module, if that is wanted. Not collective.

        `gathered` makes a context in which this rank has the values of all its parts. To be called after the hooks that
        gather them. Unless the whole module `fits_whole` a rank, only the shapes of a pass are checked.
        """
        self._fits_whole = fits_whole
        if self.check_is_due:
            hook = ModuleHook(torch.compiler.disable(type(self).check_pass), self, gathered)
            self._handles.append(self._module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True))

    def check_pass(self, gathered: Any, module: Any, args: Any, kwargs: Any) -> None:
        """Before the first pass: compare one with these arguments with that of the whole module."""
        if self.is_summoned:
            return
        self._agree_on_progress()
        if not self.check_is_due:
            return
        self._agree_on_inputs(args, kwargs)
        found = self._compared_passes(gathered, module, args, kwargs)
        if found is None:
            return
        own, whole = found
        with raised_on_all(self._axis):
            try:
                own.check(whole)
            except ValueError as error:
                raise ValueError(self._misfit(error)) from None
        self.check_is_due = False

    def _agree_on_progress(self) -> None:
        """Where other ranks have taken the places of some: compare nothing more that any of them has compared."""
        if self._met == self._axis.times_bound:
            return
        compared = np.array([not self.check_is_due, self._gradients.steps], np.int64)
        self._axis.all_reduce(compared, op="max", label="control")
        was_checked, steps = compared.tolist()
        self.check_is_due = not was_checked
        self._gradients.begin_after(steps)
        self._met = self._axis.times_bound

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

    @contextlib.contextmanager
    def _without_trace(self, module: Any, gathered: Any) -> Iterator[None]:
        """A context for passes that are compared: in evaluation mode, with random numbers and buffers of their own."""
        modes = {child: child.training for child in module.modules()}
        device = next(iter(self._tensors.values())).device
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []), gathered():
            try:
                for child in modes:
                    child.training = False
                with buffers_aside(module.modules()):
                    yield
            finally:
                for child, mode in modes.items():
                    child.training = mode
                torch.clear_autocast_cache()  # of weights that have no gradients here


def specs_of(tensors: Mapping[str, Any], cuts: TensorParallelModule | None) -> list[ParameterSpec]:
    """The specs of parameters, which may be cut."""
    shapes = {name: tuple(as_reals(p.detach()).shape) for name, p in tensors.items()}
    if cuts is None:
        return [ParameterSpec(name, shape) for name, shape in shapes.items()]
    return [cuts.spec(name, shape) for name, shape in shapes.items()]
