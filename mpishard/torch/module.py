"""A PyTorch module whose parameters are views into the flat array of mpishard.

Its tensors are checked, and hooks hand each gradient over when autograd has finished it.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import weakref
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from mpishard.arguments import listed
from mpishard.backend import array as arrays
from mpishard.comm.agreement import text_of
from mpishard.comm.axis import Axis
from mpishard.io import log
from mpishard.layout.tensors import Piece
from mpishard.parameters.flat import FlatParameters
from mpishard.torch.buffers import BufferOwner, Buffers
from mpishard.torch.memory import (
    array_module,
    as_array,
    as_numbers,
    as_reals,
    as_tensor,
    finish_stream,
    master_dtype,
    take_changed,
)
from mpishard.torch.units import ShardedModule, Unit, units_of, units_text

Array = Any


# Hooks that hand each gradient over when autograd has finished it, so that it travels during the backward pass.
#
# Where every rank gets all sums (`GradientHooks.sums_over`), a callback at the end of the pass waits for them.  Then
# ``p.grad`` is what DistributedDataParallel leaves there: the mean over ranks, which a loop may change before the step.


_CHANGES = "p.grad since the backward pass"  # among `GradientHooks.calls`

# The next action of ranks that have batches, announced within `mpishard.torch.join`.
PASS, CLIP, STEP, DROP = range(1, 5)


class UnavailableGradient(torch.Tensor):
    """A stand-in in ``p.grad`` where the gradient is on its way to the rank that needs it: any use of it raises.

    But for what ``module.zero_grad(set_to_none=False)`` does with it.
    """

    is_zeroed = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.grad_fn.__get__:
            return None
        if func in (torch.Tensor.requires_grad_, torch.Tensor.zero_):
            args[0].is_zeroed |= func is torch.Tensor.zero_
            return args[0]
        raise RuntimeError(
            "p.grad is not available: under zero=2 and 3, with reproducible sums or a loss scale gradients are reduced "
            "during backward().  To drop all, call optimizer.zero_grad(); to clip, call "
            "optimizer.clip_grad_norm_(max_norm), or give ShardingConfiguration max_gradient_norm or "
            "max_gradient_value; in the place of a GradScaler give it loss_scale='dynamic', and call "
            "optimizer.scale(loss).backward()"
        )


class GradientHooks:
    """A hook on each parameter of a module, called after autograd has added to ``p.grad``.

    The hooks move gradients of `tensors`, which are views into `parameters` or rounded from them, to the gradients of
    these.  Autograd makes ``p.grad`` in the dtype of `parameters`, so that no sum is rounded to that of a tensor.
    """

    def __init__(self, parameters: FlatParameters, tensors: Mapping[str, Any]) -> None:
        # A loop of the user calls backward() and step(), not an optimizer.  Then ``p.grad`` stays, as a view into the
        # gradients, until `clear`, or is UnavailableGradient where they have left: the loop can read it, and set it to
        # None or zero between backward passes, as without mpishard.
        self.serves_loop: bool = False
        self.loss_is_scaled: bool = False  # by that loop, in this step
        # The number of ranks whose mean ``p.grad`` is after a backward pass, where every rank gets all sums; else 0:
        # gradients are on their way then, and a change of ``p.grad`` is refused.
        self.sums_over: Callable[[], int] = lambda: 0
        # Within `mpishard.torch.join` called with the next collective action.
        self.tell: Callable[..., None] | None = None
        # Gradients count as zero: of a pass that is made only since other ranks make it.
        self.discards: bool = False
        # The units of the module under ZeRO-3, whose parameters come and go.
        self.units: ShardedModule | None = None
        self.divide_by: int = 0  # by which a mean is divided; 0: the number of ranks
        # The tensors whose flat gradients are divided: each rank divides before the sums, as DistributedDataParallel
        # does, where a pass moves a gradient.
        self._divided: set[str] = set()
        self._pass: int | None = None  # the pass of autograd under way
        self._ranks: int = 0  # `sums_over` in it
        # What this rank has done since the last step, see `calls`.
        self.compares_calls: bool = False
        self.has_pass: bool = False
        self.takes_mean: bool = True  # of the gradients of all ranks
        self.clips: list[str] = []  # the arguments of `ModuleOptimizer.clip_grad_norm_`
        self.compares_values: bool = False  # of ``p.grad``, where the loop has changed it
        self._changed = 0  # parameters whose ``p.grad`` the loop has changed since `complete`, at the last look
        self._changes = 0  # a hash of which they are, and how often
        self._has_begun_sums = False
        self._parameters = parameters
        self.tensors = dict(tensors)
        self._seen: set[str] = set()
        # The tensor that the hook has left in ``p.grad``, and the version of its values.
        self._kept: dict[str, tuple[Any, int]] = {}
        # What `_make_room` has taken out of ``p.grad`` in the pass under way, for gradients that have not come yet.
        self._taken_out: dict[str, Any] = {}
        self._dropped_alone: str = ""  # a parameter of which the loop has dropped a gradient that had left
        # Means of earlier passes since the last step, in flat order.
        self._earlier: Any = None
        # The passes of autograd whose ends wait for the sums: several where one is made within another, as by reentrant
        # activation checkpoints.
        self._passes: set[int] = set()
        self._has_warned = False
        self._handles: list[Any] = []
        self._moved_from = {name: (p.shape, p.dtype, p.device) for name, p in self.tensors.items()}
        real = as_tensor(parameters.like).dtype
        self.dtype_of = {name: real.to_complex() if p.is_complex() else real for name, p in self.tensors.items()}
        for name, p in self.tensors.items():
            if p.dtype != self.dtype_of[name]:
                p.grad = None
                p.grad_dtype = self.dtype_of[name]
            self._handles.append(p.register_hook(partial(self._make_room, name, p)))
            self._handles.append(p.register_post_accumulate_grad_hook(partial(self._take, name)))

    def remove(self) -> None:
        """Leave gradients to autograd from now on."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.clear()
        for name, p in self.tensors.items():
            if p.dtype != self.dtype_of[name]:
                p.grad_dtype = p.dtype

    @property
    def unused(self) -> list[str]:
        """The parameters that got no gradient since `clear`."""
        return [name for name in self.tensors if name not in self._seen]

    def clear(self, *, keeps_calls: bool = False) -> None:
        """Begin a step: forget which gradients came, and what was called, and let autograd make new ones."""
        self._forget()
        if not keeps_calls:
            self._forget_calls()
        self._pass = None
        self.loss_is_scaled = False
        for p in self.tensors.values():
            p.grad = None
        if self.units is not None:
            self.units.reset()

    def _forget(self) -> None:
        """Forget which gradients came, also while a pass has begun."""
        self._seen.clear()
        self._kept.clear()
        self._divided.clear()
        self._taken_out.clear()
        self._earlier, self._dropped_alone = None, ""
        self._changed = self._changes = 0
        self._has_begun_sums = False
        self._passes.clear()  # some are left after an exception in a pass

    def _forget_calls(self) -> None:
        self.has_pass, self.takes_mean = False, True
        self.clips.clear()

    def drop(self) -> None:
        """Discard the gradients of passes that no step uses.  Collective as `GradientReducer.drop`."""
        if self._parameters.gradients.has_content:
            self._parameters.gradients.drop()
        self.clear()

    def take_drop(self) -> None:
        """Discard the gradients if the loop has dropped all since the last pass, as ``module.zero_grad()`` does.

        Collective as `GradientReducer.drop`.
        """
        if self._kept and all(_is_dropped(self.tensors[name].grad) for name in self._kept):
            self._parameters.gradients.drop()
            for name in self._kept:
                self.tensors[name].grad = None
            self._forget()
            self._forget_calls()

    @property
    def mean_gradients(self) -> Array:
        """The content of ``p.grad`` after `complete`, with later assignments, as one flat array."""
        with contextlib.suppress(ValueError):  # which the step raises, on all ranks
            self.take_changes()
        return self._parameters.gradients.flat

    def complete(self) -> int:
        """Wait for the sums of this step, leave their means in ``p.grad``, and return their divisor. Collective.

        Returns at once where that is done, or `sums_over` is 0, which is the result then.
        """
        reducer, ranks = self._parameters.gradients, self.sums_over()
        if not self._has_begun_sums:
            self.take_drop()
        if not ranks:
            return 0
        if reducer.reduced:
            return self.divide_by or ranks
        self.begin_sums()
        ranks = self.divide_by or ranks
        self._begin_rest()
        reducer.finalize()
        if self._earlier is not None:
            flat = as_tensor(reducer.flat)
            flat.add_(self._earlier)
            finish_stream(flat)
            self._earlier = None
        for name, p in self.tensors.items():
            view = as_numbers(as_tensor(reducer.memory.view(name)[0]), p)
            self._kept[name] = view, view._version
            moved = (p.shape, p.dtype, p.device) != self._moved_from[name]
            # A gradient assigned without a backward pass stays, for `take_changes`; so does a parameter that was moved.
            if not moved and (self._seen or p.grad is None):
                p.grad = view
        return ranks

    def end_pass(self) -> None:
        """Begin those sums that the last pass has not begun.  Collective."""
        self._begin_rest()
        self._parameters.gradients.end_pass()

    def _begin_rest(self) -> None:
        """Take and divide, before their sums begin, gradients that only passes before the last one have written.

        They are what ``p.grad`` is by now: the loop may have dropped or changed it.
        """
        gradients, ranks = self._parameters.gradients, self.sums_over()
        if not ranks or not self._seen or gradients.reduced:
            return
        for name, p in self.tensors.items():
            if name in self._divided:
                continue
            if p.grad is None:
                gradients.memory.written.discard(name)
            elif (p.shape, p.dtype, p.device) == self._moved_from[name]:
                memory = as_tensor(gradients.memory.view(name)[0])
                torch.mul(as_reals(p.grad.detach()), 1 / self._divisor(ranks), out=memory)
                finish_stream(memory)
        self._divided.update(self.tensors)

    def _divisor(self, ranks: int) -> int:
        """The number by which gradients are divided before they are summed over `ranks`."""
        return (self.divide_by or ranks) if ranks else 1

    @property
    def has_begun_sums(self) -> bool:
        """Return True if this step's sums have begun; within `mpishard.torch.join` that was announced."""
        return self._has_begun_sums

    def begin_sums(self) -> None:
        """Announce once in a step that the sums over ranks begin. Collective within `mpishard.torch.join`."""
        if not self._has_begun_sums:
            self._has_begun_sums = True
            if self.tell is not None:
                self.has_pass = True
                self.tell(PASS)

    def end_sums(self) -> None:
        """Start those sums that no gradient has started, before the next announcement. Collective."""
        if self.tell is not None:
            self.begin_sums()
            self.end_pass()

    def pass_without_samples(self) -> None:
        """Take part in a pass of other ranks.  Collective."""
        if self._parameters.gradients.has_content:  # of a pass before, which the others have dropped or kept
            self._parameters.reset_gradients()
            self.clear()
        self.has_pass = True
        self._parameters.gradients.end_pass()
        self.complete()

    def _finish_pass(self, number: int) -> None:
        self._passes.discard(number)
        if self._passes and torch._C._current_autograd_node() is not None:
            return  # the end of the outer pass waits
        self._passes.clear()
        self.complete()

    @property
    def calls(self) -> dict[str, str]:
        """What ranks must have done alike since the last step, or `drop`, as text by name."""
        gradients = self._parameters.gradients
        found = {"clip_grad_norm_": ", ".join(self.clips) or "not called"}
        if self.takes_mean:
            found["a backward pass"] = "made" if self.has_pass else "not made"
        # Within join ranks that have run out of batches take the gradients of another.
        changed = self._changed if self.tell is None else 0
        found[_CHANGES] = f"changed in {changed} parameters [{self._changes:x}]" if changed else "unchanged"
        if changed and self.compares_values:
            found[f"{_CHANGES}, its values"] = text_of(gradients.flat)
        if gradients.on_demand:
            found["the number of passes within no_sync"] = str(gradients.passes_before_last)
        return found if self.compares_calls else {}

    def take_changes(self) -> None:
        """Take gradients that were assigned to ``p.grad`` after `complete`.

        Raises ValueError if a ``p.grad`` was changed since the backward pass, and the step would not see the change.
        """
        reducer = self._parameters.gradients
        complete = self._seen and reducer.reduced and self.sums_over()
        self._changed = self._changes = 0
        for number, (name, p) in enumerate(self.tensors.items()):
            kept, version = self._kept.get(name, (None, 0))
            dropped_alone = name == self._dropped_alone or (p.grad is not None and _is_dropped(p.grad))
            fits = complete and p.grad is not None and p.grad.shape == p.shape
            if fits and p.grad.dtype == self.dtype_of[name]:
                memory, gradient = as_tensor(reducer.memory.view(name)[0]), as_reals(p.grad.detach())
                if gradient.data_ptr() != memory.data_ptr():
                    memory.copy_(gradient)
                finish_stream(memory)
                times = p.grad._version - version if p.grad is kept else -1
                if times:
                    self._changed += 1
                    self._changes = zlib.crc32(b"%d %d" % (number, times), self._changes)
                continue
            left = kept is None or type(kept) is UnavailableGradient
            unchanged = p.grad is kept and not dropped_alone and (left or kept._version == version)
            if not complete and unchanged:
                continue
            was_changed = p.grad is kept and not complete
            how = "dropped" if p.grad is None or dropped_alone else "changed" if was_changed else "assigned"
            if complete and p.grad is None:
                raise ValueError(
                    f"the gradient of parameter {name!r} was dropped after the backward pass, and a step takes all: "
                    "for a gradient of zero call p.grad.zero_() instead; to leave a parameter as it is, set lr of its "
                    "group in optimizer.param_groups to 0; to leave all out, call optimizer.zero_grad() and no step()"
                )
            raise ValueError(
                f"the gradient of parameter {name!r} was {how} after the backward pass, and this step would not see it"
                + ("" if complete else " since gradients go to the other ranks during that pass")
                + ".  To clip, call optimizer.clip_grad_norm_(max_norm), or give ShardingConfiguration "
                "max_gradient_norm or max_gradient_value; to leave gradients out, call optimizer.zero_grad() and "
                "no step(); to make gradients, call backward()"
            )

    def _make_room(self, name: str, p: Any, gradient: Any) -> Any:
        """Before autograd adds to ``p.grad``: do not add to a gradient that is summed already, or has left.

        It may not come: ``torch.autograd.grad`` calls this too.

        Where a pass adds to it again, as a reentrant checkpoint does, the first part is divided already: returns this
        part divided, too; else None, which leaves it as it is.
        """
        task = torch._C._current_graph_task_id()
        if task != self._pass:
            self.take_drop()
            self._pass, self._ranks = task, self.sums_over()
        has_left = type(p.grad) is UnavailableGradient
        if _is_dropped(p.grad) and name not in self._taken_out:
            kept, _ = self._kept.get(name, (None, 0))
            if type(kept) is UnavailableGradient:
                self._dropped_alone = self._dropped_alone or name
        if has_left or (p.grad is not None and self._ranks and self._parameters.gradients.reduced):
            if not self._taken_out:
                torch.autograd.Variable._execution_engine.queue_callback(self._put_back)
            self._taken_out[name] = p.grad
            p.grad = None
        return gradient / self._divisor(self._ranks) if self._passes and name in self._divided else None

    def _put_back(self) -> None:
        for name, gradient in self._taken_out.items():
            self.tensors[name].grad = gradient
        self._taken_out.clear()

    def _begin_another_pass(self, first: str, earlier: Any) -> None:
        """Begin another pass since the last step, as of a loss for real and one for generated images: it is summed too.

        The content of ``p.grad`` after the passes before, changed or not, is added to its mean; of the `first` tensor,
        whose gradient has come, it is `earlier`.
        """
        new, self.tensors[first].grad = self.tensors[first].grad, earlier
        if any(p.grad is not None for p in self.tensors.values()):
            if not self._has_warned:
                self._has_warned = True
                log.inform(
                    "a second backward pass since the last step is summed over the ranks too; make all passes but the "
                    "last within optimizer.no_sync() to sum once"
                )
            self._earlier = torch.zeros_like(as_tensor(self._parameters.gradients.flat))
            for piece in self._parameters.pieces:
                grad = self.tensors[piece.name].grad
                if grad is not None:
                    self._earlier[piece.start : piece.start + piece.size].copy_(as_reals(grad.detach()).reshape(-1))
        self._parameters.reset_gradients()
        self._kept.clear()
        self._divided.clear()
        self._has_begun_sums = False
        for p in self.tensors.values():
            p.grad = None
        self.tensors[first].grad = new

    def _take(self, name: str, p: Any) -> None:
        """Move a gradient from autograd to the flat gradients, and mark it complete in this pass."""
        reducer, divisor = self._parameters.gradients, 1
        earlier, current = self._taken_out.pop(name, None), self._pass
        if self.serves_loop and self._ranks and reducer.reduced:
            self._begin_another_pass(name, earlier)
        self.has_pass = True
        if self.serves_loop and reducer.is_last_pass:
            self.begin_sums()
            if self._ranks and current is not None and current not in self._passes:
                self._passes.add(current)
                # As in DistributedDataParallel, called when this pass of autograd is over.
                torch.autograd.Variable._execution_engine.queue_callback(partial(self._finish_pass, current))
            if self._ranks and name not in self._divided:
                divisor = self._divisor(self._ranks)
                self._divided.add(name)
        try:
            view, adds = reducer.gradient(name)
        except RuntimeError:
            if not self.serves_loop:
                raise
            raise RuntimeError(
                f"a second backward pass reached parameter {name!r}, whose gradient is on its way to the other ranks; "
                "make all passes of a step but the last one within optimizer.no_sync(), or call optimizer.step() or "
                "optimizer.zero_grad() in between"
            ) from None
        memory, gradient = as_tensor(view), p.grad.detach()
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        gradient = as_reals(gradient)
        if gradient.shape != memory.shape or gradient.dtype != memory.dtype:
            p.grad = None  # the parameter was replaced: the step says so, on all ranks
            return
        if self.discards:
            gradient = torch.zeros_like(memory)
        scale = self._parameters.loss_scale if self.serves_loop and not self.loss_is_scaled else 1.0
        stays = self.serves_loop and reducer.keeps_memory and self._parameters.loss_scale == 1.0
        # Where ``p.grad`` stays, autograd adds to it; another tensor there means that the user has dropped the first.
        if divisor > 1:
            torch.mul(gradient, 1 / divisor, out=memory)
        elif not stays or gradient.data_ptr() != memory.data_ptr():
            if scale != 1.0:
                gradient = gradient * scale
            if adds and not stays:
                memory.add_(gradient)
            else:
                memory.copy_(gradient)
        finish_stream(memory)
        self._seen.add(name)
        if stays:
            p.grad = as_numbers(memory, p)
            self._kept[name] = p.grad, memory._version
        elif self.serves_loop:
            nothing = torch.empty((), dtype=self.dtype_of[name], device=p.device)
            p.grad = nothing.expand(p.shape).as_subclass(UnavailableGradient)
            self._kept[name] = p.grad, 0
        else:
            p.grad = None
        if self.units is not None:
            self.units.take(name)
        reducer.mark_ready(name)


def _is_dropped(gradient: Any) -> bool:
    return gradient is None or (type(gradient) is UnavailableGradient and gradient.is_zeroed)


# The tensors of a PyTorch module by name, and the checks that mpishard can train it.

_COMPILED = "_orig_mod."  # torch.compile puts it into the names of a module


@dataclass(frozen=True)
class ModuleTensors:
    """The tensors of a module, by the names in the `state_dict` of the module before `torch.compile`.

    A tensor that has several names, as one that two layers share, has the first of them.
    """

    trained: dict[str, Any]  # those that require a gradient, in the order in which the module registers them,
    # complex ones first
    frozen: dict[str, Any]  # the other parameters
    buffers: dict[str, Any]  # the persistent ones, which are in the `state_dict`

    @classmethod
    def of(cls, module: Any, *, on_meta: bool = False) -> ModuleTensors:
        """The tensors of a module, compiled or not, that can be trained; nothing is changed.

        With `on_meta` parameters may be without values, on the device meta.

        Raises TypeError if it is no module, or a parameter is of a dtype that cannot be trained; ValueError if a layer
        is a SyncBatchNorm, no parameter requires a gradient, or parameters are on several devices, not contiguous,
        without values, or share memory.
        """
        if not isinstance(module, torch.nn.Module):
            given = f"the class {module.__name__}" if isinstance(module, type) else f"a {type(module).__name__}"
            raise TypeError(f"as_distributed of mpishard.torch needs a torch.nn.Module, got {given}")
        for name, child in module.named_modules():
            if isinstance(child, torch.nn.SyncBatchNorm):
                raise ValueError(
                    f"{plain_name(name)!r} is a torch.nn.SyncBatchNorm, which sums over ranks of torch.distributed: "
                    "here it would normalize each rank's samples alone; call "
                    "mpishard.torch.convert_sync_batchnorm(module, mesh) before"
                )
            if isinstance(child, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and child.max_norm is not None:
                if child.weight.requires_grad:
                    raise ValueError(
                        f"{plain_name(name)!r} is a torch.nn.{type(child).__name__} with max_norm={child.max_norm}, "
                        "whose forward pass writes to its weight, on each rank to other rows: set its max_norm = None, "
                        "and scale the rows in the pass, or on all ranks after each step"
                    )
        named = {plain_name(name): p for name, p in module.named_parameters()}
        trained = {name: p for name, p in named.items() if p.requires_grad}
        # Complex ones first: as pairs of reals, they then begin at a multiple of their size in the flat array.
        trained = dict(sorted(trained.items(), key=lambda item: not item[1].is_complex()))
        if not trained:
            frozen = f"all of its {len(named)} parameters are frozen (requires_grad=False)" if named else "it has none"
            raise ValueError(f"this {type(module).__name__} has no parameter to train: {frozen}")
        _check_values(named, on_meta)
        _check_dtypes(trained)
        _check_memory(trained)
        others = {name: p for name, p in named.items() if not p.requires_grad}
        return cls(trained, others, {plain_name(name): buffer for name, buffer in _persistent_buffers(module)})

    @property
    def described(self) -> dict[str, str]:
        """The facts that must be the same on all ranks, as text by name."""
        return {
            "parameters": _listed(self.trained),
            "frozen parameters": _listed(self.frozen),
            "buffers of the module": _listed(self.buffers),
        }

    @property
    def device(self) -> Any:
        """The device of all parameters; the default one if they have no values yet."""
        device = next(iter(self.trained.values())).device
        return torch.get_default_device() if device.type == "meta" else device


def plain_name(name: str) -> str:
    """The name of a tensor in the module before `torch.compile`, from `named_parameters`."""
    return name.replace(_COMPILED, "")


def _persistent_buffers(module: Any) -> list[tuple[str, Any]]:
    """The buffers that are in the `state_dict`, each once."""
    found, seen = [], set()
    for path, child in module.named_modules():
        for name, buffer in child._buffers.items():
            if buffer is None or name in child._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            found.append((f"{path}.{name}" if path else name, buffer))
    return found


def _check_values(named: dict[str, Any], on_meta: bool) -> None:
    """Raise ValueError unless all parameters have values, on one device."""
    for name, p in named.items():
        if isinstance(p, torch.nn.parameter.UninitializedParameter):
            raise ValueError(f"parameter {name!r} is not initialized: run one batch through the module first")
        if p.device.type == "meta" and not on_meta:
            raise ValueError(
                f"parameter {name!r} is on the device meta and has no values: module.to_empty and fill it, or give "
                "as_distributed zero=3 and a function that fills one layer, as "
                "materialize=lambda layer: layer.reset_parameters()"
            )
        if p.device.type != "meta" and p.numel() and not p.untyped_storage().nbytes():
            raise ValueError(
                f"parameter {name!r} has no values: under zero=3 its shares went with the optimizer of as_distributed; "
                "call close() of that, on all ranks, which leaves the module whole"
            )
        if type(p.data) is not torch.Tensor or p.layout is not torch.strided:
            raise ValueError(
                f"parameter {name!r} is a {type(p.data).__name__} of layout {p.layout}, and must be a plain dense "
                "tensor; a module that FSDP or DTensor has divided cannot be divided again"
            )
    devices: dict[str, str] = {}
    for name, p in named.items():
        devices.setdefault(str(p.device), name)
    if len(devices) > 1:
        found = listed(f"{name!r} on {device}" for device, name in devices.items())
        raise ValueError(f"all parameters must be on one device, here {found}: module.to(device)")


def _check_dtypes(trained: dict[str, Any]) -> None:
    """Raise TypeError unless masters of float32 or float64 can be kept of all parameters to train."""
    of_dtype: dict[Any, str] = {}
    for name, p in trained.items():
        of_dtype.setdefault(p.dtype, name)
    found = " and ".join(f"{name!r} is {_short(dtype)}" for dtype, name in of_dtype.items() if dtype not in _DTYPES)
    if found:
        raise TypeError(
            f"parameters to train must be of {', '.join(map(_short, _DTYPES))}, but {found}; use module.float(), and "
            "a lower precision within the forward pass"
        )
    real = master_dtype(trained)
    narrow = [name for dtype, name in of_dtype.items() if dtype not in (real, real.to_complex())]
    if narrow and not _HAS_GRAD_DTYPE:
        raise TypeError(
            f"parameter {narrow[0]!r} is {_short(trained[narrow[0]].dtype)}, whose gradients are summed in "
            f"{_short(real)}: that needs a PyTorch with Tensor.grad_dtype, and this is {torch.__version__}; use "
            "module.float() or module.double(), and torch.autocast for bfloat16"
        )


_HAS_GRAD_DTYPE = hasattr(torch.Tensor, "grad_dtype")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128)


def _check_memory(trained: dict[str, Any]) -> None:
    """Raise ValueError unless each parameter is contiguous, in any of PyTorch's formats, and shares no memory."""
    for name, p in trained.items():
        if not any(p.is_contiguous(memory_format=each) for each in _formats(p.dim())):
            raise ValueError(
                f"parameter {name!r} is not contiguous: shape {tuple(p.shape)}, strides {p.stride()}; "
                "p.data = p.data.contiguous() before"
            )
    placed = {name: p for name, p in trained.items() if p.device.type != "meta"}
    ranges = sorted((p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), name) for name, p in placed.items())
    for (_, stop, first), (start, _, second) in zip(ranges, ranges[1:], strict=False):
        if start < stop:
            raise ValueError(
                f"parameters {first!r} and {second!r} are two that share memory; share the Parameter itself, as "
                "second.weight = first.weight does"
            )


def _formats(dimensions: int) -> list[Any]:
    """The memory formats that a contiguous tensor may have."""
    special = {4: [torch.channels_last], 5: [torch.channels_last_3d]}
    return [torch.contiguous_format, *special.get(dimensions, [])]


def _listed(tensors: dict[str, Any]) -> str:
    """Tensors as a short text that differs where names, shapes or dtypes do."""
    each = [f"{name} {tuple(tensor.shape)} {_short(tensor.dtype)}" for name, tensor in tensors.items()]
    mark = hashlib.blake2b("\n".join(each).encode(), digest_size=4).hexdigest()
    size = sum(tensor.numel() for tensor in tensors.values())
    return f"{len(each)} tensors of {size} elements [{mark}]"


def _short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


# A PyTorch module whose parameters are views into the flat array of mpishard.

_WHEN = "before as_distributed, or after close() of what it returned"


class ModuleState:
    """The parameters of a module as FlatParameters, with its buffers and frozen parameters.

    The parameters become views into one flat array, and keep their values. This is the `CarriedState` of that array.
    `buffers` is the treatment of buffers after each update, see `mpishard.torch.as_distributed`. With `sharding` the
    parameters are views into storages that come and go, see `ShardedModule`.

    A parameter of another dtype than the flat array has its own memory, with values that are rounded from the flat
    array, which has its master.
    """

    def __init__(self, module: Any, tensors: ModuleTensors, buffers: str, sharding: Sharding | None = None) -> None:
        self.module = module
        self.users: int = 0  # optimizers and problems in use that train the module by this state
        self._let_go = False
        self._divides_frozen = False
        self._trained = tensors.trained
        self._frozen = tensors.frozen
        self.parameters: FlatParameters
        self.units: ShardedModule | None = None
        self._rounded: dict[str, tuple[Any, Any]] = {}  # parameters of another dtype than their masters, and these
        if sharding is None:
            # In the order of their indices; channels_last has its own order in memory only.
            real = master_dtype(tensors.trained)
            plain = {name: as_reals(p.detach()).to(real).contiguous() for name, p in tensors.trained.items()}
            self.parameters = FlatParameters.of(plain, module=array_module(tensors.device))
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
                    values = torch.empty_like(p, device=device)
                    torch.utils.swap_tensors(p, torch.nn.Parameter(values, requires_grad=False))
            self.units = ShardedModule(
                module,
                sharding.units,
                tensors.trained,
                tensors.frozen if sharding.divides_frozen else {},
                sharding.axis,
                device,
                sharding.materialize,
            )
            self._divides_frozen = sharding.divides_frozen
            self.parameters = self.units.parameters
            tensors = replace(tensors, buffers=dict(_persistent_buffers(module)))  # those on meta have been replaced
        self.tensors: ModuleTensors = tensors
        names = {id(buffer): name for name, buffer in tensors.buffers.items()}
        owners = [
            BufferOwner(plain_name(f"{path}." if path else ""), child, names) for path, child in module.named_modules()
        ]
        self.buffers: Buffers = Buffers(tensors.buffers, buffers, owners)
        self.hooks: GradientHooks = GradientHooks(self.parameters, tensors.trained)
        self.hooks.units = self.units
        self.parameters.carried = self
        self._memory = [(name, p, self._memory_of(name, p)) for name, p in tensors.trained.items()]
        self._tables = [
            (table, list(table.items())) for child in module.modules() for table in (child._parameters, child._modules)
        ]

    # -- `CarriedState` -----------------------------------------------------------------------------------------------

    @property
    def facts(self) -> dict[str, Any]:
        return dict(self.buffers.facts)

    @property
    def arithmetic(self) -> dict[str, str]:
        """Empty: PyTorch has the threads of BLAS."""
        return {}

    @property
    def calls(self) -> dict[str, str]:
        return self.hooks.calls

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
                values = p.detach().contiguous()
                memory = as_array(values.reshape(-1).view(torch.uint8))
                axis.broadcast(memory, label="parameters")
                arrays.ready(memory)  # PyTorch may continue in another stream of a GPU
                p.data.copy_(values)

    def synchronize(self, axis: Axis) -> None:
        self.round_masters()
        self.buffers.synchronize(axis)

    def consolidate(self, axis: Axis) -> None:
        self.round_masters()
        self.buffers.consolidate(axis)

    # -- parameters of another dtype than their masters ---------------------------------------------------------------

    @property
    def dtype(self) -> Any:
        """That of the flat array, with the masters of all parameters."""
        return as_tensor(self.parameters.like).dtype

    @property
    def masters(self) -> dict[str, Any]:
        """Copies of the masters of parameters of another dtype, by name, as reals. Collective under ZeRO-3."""
        pieces = self._master_pieces
        if not pieces:
            return {}
        flat = as_tensor(self.parameters.gather())
        return {each.name: flat[each.start : each.start + each.size].clone().view(each.shape) for each in pieces}

    @masters.setter
    def masters(self, masters: Mapping[str, Any]) -> None:
        for name, values in masters.items():
            self.parameters.assign(name, as_array(values.to(next(iter(self._trained.values())).device, self.dtype)))
        self.round_masters()

    @property
    def master_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of `masters`. Not collective."""
        return {piece.name: piece.shape for piece in self._master_pieces}

    @property
    def _master_pieces(self) -> list[Piece]:
        piece_of = self.parameters.layout.piece_of
        return [piece_of[name] for name, p in self._trained.items() if p.dtype != self.hooks.dtype_of[name]]

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

        Under ZeRO-3 it has no values then, unless `unshard` has given it some.
        """
        self.users -= 1
        if not self.users:
            self._let_go = True
            if self.units is not None:
                self.units.remove(restores=False)
            self.hooks.remove()
            _states.pop(self.module, None)

    def unshard(self) -> None:
        """Before the last user goes, give the module whole parameters again, under ZeRO-3. Collective then."""
        if self.units is not None and self.users == 1:
            self.units.remove(restores=True)

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
        with torch._C.DisableTorchFunctionSubclass():  # parameters freed under zero=3 have Python functions
            for name, p, memory in self._memory:
                if self._memory_of(name, p) != memory:
                    raise ValueError(
                        f"the memory of parameter {name!r} was replaced after the module was made distributed, as "
                        f"module.to(...), load_state_dict(assign=True) and p.data = ... do; do that {_WHEN}"
                    )
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
        for table, before in self._tables:
            if len(table) != len(before) or any(
                table.get(name) is not each for name, each in before
            ):  # tensors have no truth value
                raise ValueError(f"the module was changed after it was made distributed: {self._changes()}")
        if self.units is not None:
            self.units.check_left("a step")
        self.hooks.take_changes()
        self.buffers.take_back()

    def _changes(self) -> str:
        """A text that names the parameters that are new or gone."""
        now = {plain_name(name): p for name, p in self.module.named_parameters()}
        before = {**self._trained, **self._frozen}
        come = [name for name in now if name not in before]
        gone = [name for name in before if name not in now]
        other = [name for name in now if name in before and now[name] is not before[name]]
        found = [*(f"{name!r} is new" for name in come), *(f"{name!r} is gone" for name in gone)]
        found += [f"{name!r} is another Parameter" for name in other]
        return f"{', '.join(found[:3]) or 'it has other submodules'}; change it {_WHEN}"


@dataclass(frozen=True)
class Sharding:
    """How ZeRO-3 divides the parameters of a module: its units, the axis, and what fills modules without values."""

    units: list[Unit]
    axis: Axis
    materialize: Any
    divides_frozen: bool  # frozen parameters are divided too

    @classmethod
    def of(
        cls,
        module: Any,
        tensors: ModuleTensors,
        shard_units: Any,
        axis: Axis,
        materialize: Any,
        *,
        divides_frozen: bool,
    ) -> Sharding:
        """How a module, compiled or not, is divided; raises as `units_of`, and TypeError for what cannot be called."""
        if materialize is not None and not callable(materialize):
            raise TypeError(f"materialize must be a function of a submodule, got {materialize!r}")
        names = {id(p): name for name, p in tensors.trained.items()}
        frozen = {id(p): name for name, p in tensors.frozen.items()} if divides_frozen else {}
        units = units_of(getattr(module, "_orig_mod", module), shard_units, names, frozen)
        return cls(units, axis, materialize, divides_frozen)

    @property
    def described(self) -> str:
        """The units, as a text that must be the same on all ranks."""
        return units_text(self.units)


_states: weakref.WeakKeyDictionary[Any, ModuleState] = weakref.WeakKeyDictionary()


def state_of(module: Any, tensors: ModuleTensors, buffers: str, sharding: Sharding | None = None) -> ModuleState:
    """The state of a module, compiled or not, without gradients: the one that others use, or a new one. Adds a user.

    With `sharding` it is collective. Raises ValueError if the module was changed since the state was made.
    """
    module, found = _known(module)
    if found is None:
        found = _states[module] = ModuleState(module, tensors, buffers, sharding)
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


def check_divisible(module: Any, zero: int) -> None:
    """Raise ValueError if another optimizer trains a module, and one of the two divides its parameters by ZeRO-3."""
    for _ in range(2):
        found = known_state(module) if isinstance(module, torch.nn.Module) else None
        if found is None or (zero != 3 and found.units is None):
            return
        gc.collect()  # an optimizer without references may be in a circle
    raise ValueError(
        "another optimizer or problem trains this module, and one of the two divides its parameters, as zero=3 does: "
        "call close() of what the other as_distributed returned; after a problem with shard_units load what the "
        "module's state_dict() returns within summon_full_parameters into another module"
    )


def known_state(module: Any) -> ModuleState | None:
    """The state of a module, compiled or not, that was made distributed and was not let go."""
    return _known(module)[1]


def _known(module: Any) -> tuple[Any, ModuleState | None]:
    """The module before `torch.compile`, and its state if it has one."""
    module = getattr(module, "_orig_mod", module)
    return module, _states.get(module)
