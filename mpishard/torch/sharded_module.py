"""ZeRO-3 of a PyTorch module: each rank keeps a share of its parameters, and a unit of them is whole while it is used.

A unit is gathered before its forward pass and freed after it, gathered again when the gradient of its output arrives,
and freed when the gradients of its inputs are there; its own gradients have left for their owners by then.  The
module's own unit and the one that is used last stay in memory for the backward pass, which begins with them.

Zhao et al., "PyTorch FSDP" (2023), sections 3.2 and 4.2.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from mpishard.arguments import flag
from mpishard.backend import array as arrays
from mpishard.comm.agreement import opening
from mpishard.comm.axis import Axis
from mpishard.comm.errors import raised_on_all
from mpishard.layout.tensors import WHOLE, ParameterSpec
from mpishard.parameters.flat import FlatParameters
from mpishard.parameters.tensor_layout import TensorLayout
from mpishard.parameters.zero3_units import ShardedUnits
from mpishard.torch.layer_filler import LayerFiller
from mpishard.torch.memory import array_module, finish_stream, master_dtype
from mpishard.torch.tensor_parallel_module import TensorParallelModule, specs_of
from mpishard.torch.unit_storages import UnitStorages
from mpishard.torch.units import ModuleHook, Unit, UnitCall, tensors_in, units_text


class ShardedModule:
    """The units of a module under ZeRO-3: their parameters are divided over `axis`, and hooks gather and free them.

    `tensors` are the trained parameters, and `frozen` others that are divided, as bytes, into shares that no state has:
    where other ranks may continue, they stay whole. A run is tensors of one unit that are neighbours in one of the two
    flat arrays; all runs are numbered, those of the trained parameters first.

    Methods are collective over `axis`, whose ranks must run the same units in the same order. `filler` fills a module
    on the device meta; `cuts` are those over tensor ranks, which were made before. Raises what filling it raises on any
    rank, on all.
    """

    def __init__(
        self,
        module: Any,
        units: Sequence[Unit],
        tensors: Mapping[str, Any],
        frozen: Mapping[str, Any],
        axis: Axis,
        device: Any,
        filler: LayerFiller | None,
        cuts: TensorParallelModule | None,
    ) -> None:
        self.units = list(units)
        self._module = module
        self._tensors = {**tensors, **frozen}
        self.axis = axis
        of_name = {name: unit for unit in units for name in (*unit.names, *unit.frozen)}
        self._passes: list[int] = []  # those of autograd under way, a nested one last
        self._kept: list[UnitCall] = []  # units that the backward pass uses first, in memory since the forward pass
        self.is_summoned: bool = False  # all units are gathered, see `summoned`
        like = self._like = torch.empty(0, dtype=master_dtype(tensors), device=device)
        self.parameters: FlatParameters = FlatParameters(
            specs_of(tensors, cuts),
            str(like.dtype).removeprefix("torch."),
            module=array_module(device),
            place=WHOLE if cuts is None else cuts.place,
            units=_runs(tensors, of_name),
            sharded_over=axis,
        )
        self.parameters.sums_by_mpi = cuts is not None
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
        paths = {name: unit.path for name, unit in of_name.items()}
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
        if filler is not None:
            self._materialize(filler, device)
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
            before, after = ModuleHook(before_any, unit), ModuleHook(after_any, unit)
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

    def reset(self) -> None:
        """Begin a step: no backward pass is under way."""
        if self._passes:  # a backward pass that failed
            self._free_kept()
        self._passes.clear()
        for unit in self.units:
            unit.calls.clear()  # KeyboardInterrupt in a forward pass leaves some
            unit.opened.clear()
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
        if self.is_summoned:
            yield
            return
        with opening(self.axis, "summon_full_parameters") as same:
            same["writeback"] = flag("writeback", writeback)
        self._use_runs(self._runs)
        self.is_summoned = True
        try:
            yield
            if writeback:
                self._write_back(self._runs)
        finally:
            self.is_summoned = False
            self._free_runs(self._runs)

    # -- hooks --------------------------------------------------------------------------------------------------------

    def _check_summoned(self, *_: Any, **__: Any) -> None:
        if not self.is_summoned:
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
        call = UnitCall(unit)
        unit.calls.append(call)
        self._gather(call)
        inputs = [each for each in tensors_in((args, kwargs)) if each.requires_grad] if torch.is_grad_enabled() else []
        # The gradient of a leaf may be there before those of the unit's parameters are; the end of the pass is later.
        if inputs and not any(each.is_leaf for each in inputs):
            self._close_after(call, inputs)

    def _after(self, unit: Unit, module: Any, args: Any, output: Any) -> None:
        """Free a unit after its forward pass, and watch for the gradient of its output."""
        if not unit.calls:
            return
        call = unit.calls.pop()
        found = [*tensors_in(output, set())]
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

    def _open(self, call: UnitCall) -> None:
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

    def _close_after(self, call: UnitCall, inputs: Sequence[Any]) -> None:
        """Close a call when the gradients of its inputs are there.

        PyTorch's `register_multi_grad_hook` would keep the graph in memory, by hooks that have its nodes.
        """
        tasks: list[int] = []  # the passes of autograd in which the gradients came
        count = len(inputs)

        def note(_: Any) -> None:
            tasks.append(torch._C._current_graph_task_id())
            if tasks.count(tasks[-1]) == count:
                self._close(call)

        for each in inputs:
            each.register_hook(note)

    def _close(self, call: UnitCall) -> None:
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
            progress = self.parameters.gradients.progress
            others = progress.has_begun and not progress.is_last_pass
            for unit in self.units:
                self._complete(unit, others)

    def _complete(self, unit: Unit, unused: bool = False) -> None:
        """Mark the gradients that a unit will not get in this pass, so that the sums of the others may start.

        Of a unit that got none only if it is to count as `unused`.
        """
        is_ready = self.parameters.gradients.progress.is_ready
        if unused or any(map(is_ready, unit.names)):
            for name in unit.names:
                if not is_ready(name):
                    self.parameters.mark_ready(name)

    # -- units in memory ----------------------------------------------------------------------------------------------

    def _gather(self, call: UnitCall) -> None:
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
        return not (unit.calls or unit.opened or self.is_summoned)

    def _keep_gathered(self, call: UnitCall) -> None:
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

    def _materialize(self, filler: LayerFiller, device: Any) -> None:
        """Fill the parameters and buffers, which are on the device meta, unit by unit, with the values of rank 0."""
        adopted: set[int] = set()
        names = {id(p): name for name, p in self._tensors.items()}
        for unit in self.units:
            own = [names[id(p)] for child in unit.children for p in child._parameters.values() if id(p) in names]
            runs = self._runs_of([*own, *unit.names, *unit.frozen])
            self._use_runs(runs)
            with raised_on_all(filler.ranks):  # of a function of the user's
                for number in [each for each in runs if each not in adopted]:
                    self._attach(number)
                adopted.update(runs)
                for child in unit.children:
                    filler.fill(child, device)
            self._write_back(runs)
            self._free_runs(runs)
        filler.check_filled()


def _named(unit: Unit) -> str:
    return f"the unit {unit.path!r}" if unit.path else "the module"


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
