"""Hooks on gradients for a loop of the user's, which calls ``backward()`` and ``step()``.

The ways to take gradients differ in what ``p.grad`` is after a backward pass: `MeanHooks` leave what
DistributedDataParallel leaves there, `LocalHooks` the gradient of this rank, and `SentHooks` nothing that can be used.
`loop_hooks` chooses.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from mpishard.comm.agreement import text_of
from mpishard.data_parallel.sharded_optimizer import ShardedOptimizer
from mpishard.io import log
from mpishard.parameters.flat import FlatParameters
from mpishard.torch.gradient_hooks import GradientHooks, not_seen
from mpishard.torch.memory import as_numbers, as_reals, as_tensor, finish_stream
from mpishard.torch.module import ModuleState
from mpishard.torch.sharded_module import ShardedModule

Array = Any

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
        if torch._guards.detect_fake_mode() is not None:  # torch.compile asks for its form
            return super().__torch_function__(func, types, args, kwargs or {})
        raise RuntimeError(
            "p.grad is not available: under zero=2 and 3, on tensor and pipeline ranks, with reproducible sums or a "
            "loss scale gradients are reduced during backward().  To drop all, call optimizer.zero_grad(); to clip, "
            "call optimizer.clip_grad_norm_(max_norm), or give ShardingConfiguration max_gradient_norm or "
            "max_gradient_value; in the place of a GradScaler give it loss_scale='dynamic', and call "
            "optimizer.scale(loss).backward()"
        )


def _is_dropped(gradient: Any) -> bool:
    return gradient is None or (type(gradient) is UnavailableGradient and gradient.is_zeroed)


class LoopHooks(GradientHooks):
    """Hooks for a loop of the user's, which calls ``backward()`` and ``step()``.

    They leave something in ``p.grad`` until `clear`.  The loop can set it to None or zero between backward passes, as
    without mpishard.
    """

    def __init__(
        self,
        parameters: FlatParameters,
        tensors: Mapping[str, Any],
        units: ShardedModule | None,
        *,
        compares_calls: bool,
    ) -> None:
        super().__init__(parameters, tensors, units)
        # Within `mpishard.torch.join` a function that is called with the next collective action; None outside of it.
        self.announce: Callable[..., None] | None = None
        # The number by which a mean is divided: under `mpishard.torch.join` of the ranks that have samples, or where
        # tensor ranks have samples of their own that of all; 0: the number of data ranks.
        self.divide_by: int = 0
        # What this rank has done since the last step, see `calls`.
        self.has_pass: bool = False
        self.takes_mean: bool = True  # of the gradients of all ranks
        self.clips: list[str] = []  # the arguments of `ModuleOptimizer.clip_grad_norm_`
        self._compares_calls = compares_calls
        # The sums of this step have begun; within `mpishard.torch.join` that was announced.
        self.has_begun_sums: bool = False
        self._pass: int | None = None  # the pass of autograd under way
        # What the hook has left in ``p.grad``, and the version of its values; None where it has no values.
        self._kept: dict[str, tuple[Any, int | None]] = {}
        # What was taken out of ``p.grad`` in the pass under way, for gradients that have not come yet.
        self._taken_out: dict[str, Any] = {}
        self._places: dict[str, int] = {}  # of the hooks that take gradients, among those on each parameter

    def attach(self) -> None:
        super().attach()
        self._places = {name: handle.id for name, handle in zip(self.tensors, self._handles, strict=True)}
        for name, p in self.tensors.items():
            self._handles.append(p.register_hook(partial(self._make_room, name, p)))

    def clear(self, *, keeps_calls: bool = False) -> None:
        """Begin a step: forget which gradients came, and what was called, and let autograd make new ones."""
        super().clear()
        if not keeps_calls:
            self._forget_calls()
        self._pass = None

    @property
    def calls(self) -> dict[str, str]:
        found = {"clip_grad_norm_": ", ".join(self.clips) or "not called"}
        if self.takes_mean:
            found["a backward pass"] = "made" if self.has_pass else "not made"
        return {**found, **self._more_calls} if self._compares_calls else {}

    def follow_drop(self) -> None:
        """Discard the gradients if the loop has dropped all since the last pass, as ``module.zero_grad()`` does.

        Collective as `GradientReducer.drop`.
        """
        if self._kept and all(_is_dropped(self.tensors[name].grad) for name in self._kept):
            self._parameters.gradients.drop()
            for name in self._kept:
                self.tensors[name].grad = None
            self._forget()
            self._forget_calls()

    def take_changes(self) -> None:
        for name, p in self.tensors.items():
            self._check_kept(name, p)

    def complete(self) -> int:
        """Leave in ``p.grad`` what a step finds there; returns the number of ranks whose mean it is, else 0."""
        if not self.has_begun_sums:
            self.follow_drop()
        return 0

    def begin_sums(self) -> None:
        """Announce once in a step that the sums over ranks begin. Collective within `mpishard.torch.join`."""
        if not self.has_begun_sums:
            if self.announce is not None:
                self.has_pass = True
                self.announce(PASS)  # raises where another rank has run out, and sums must not begin
            self.has_begun_sums = True

    def end_pass(self) -> None:
        """Begin those sums that the last pass has not begun.  Collective."""
        self._parameters.gradients.end_pass()

    def end_sums(self) -> None:
        """Start those sums that no gradient has started, before the next announcement. Collective."""
        if self.announce is not None:
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

    # -- for the ways to take gradients -------------------------------------------------------------------------------

    @property
    def _more_calls(self) -> dict[str, str]:
        return {}

    def _make_room(self, name: str, p: Any, gradient: Any) -> Any:
        """Before autograd adds to ``p.grad``; returns another gradient to be added, or None.

        It may not come: ``torch.autograd.grad`` calls this too.
        """
        task = torch._C._current_graph_task_id()
        if task != self._pass:
            self.follow_drop()
            self._pass = task
        hooks, place = p._post_accumulate_grad_hooks, self._places[name]
        if next(reversed(hooks)) != place:  # one of the user's has come since, and would change what has been taken
            hooks[place] = hooks.pop(place)

    def _take_out(self, name: str, p: Any) -> None:
        """Empty ``p.grad``, so that autograd does not add to it; what was there comes back if no gradient comes."""
        if not self._taken_out:
            torch.autograd.Variable._execution_engine.queue_callback(self._put_back)
        self._taken_out[name] = p.grad
        p.grad = None

    def _put_back(self) -> None:
        for name, gradient in self._taken_out.items():
            self.tensors[name].grad = gradient
        self._taken_out.clear()

    def _begin_take(self) -> None:
        self.has_pass = True
        if self._parameters.gradients.is_last_pass:
            self.begin_sums()

    def _memory_of(self, name: str) -> tuple[Array, bool]:
        try:
            return super()._memory_of(name)
        except RuntimeError:
            raise RuntimeError(
                f"a second backward pass reached parameter {name!r}, whose gradient is on its way to the other ranks; "
                "make all passes of a step but the last one within optimizer.no_sync(), or call optimizer.step() or "
                "optimizer.zero_grad() in between"
            ) from None

    def _leave(self, name: str, p: Any, memory: Any) -> None:
        """Leave the memory of its gradient in ``p.grad``; the next pass adds to it."""
        p.grad = as_numbers(memory, p)
        self._kept[name] = p.grad, memory._version
        self._finish(name, memory)

    def _check_kept(self, name: str, p: Any, is_dropped: bool = False) -> None:
        """Raise ValueError unless ``p.grad`` is as the hook has left it."""
        kept, version = self._kept.get(name, (None, None))
        if is_dropped or p.grad is not kept or (version is not None and kept._version != version):
            raise not_seen(
                name, "dropped" if is_dropped or p.grad is None else "changed" if p.grad is kept else "assigned"
            )

    def _forget(self) -> None:
        super()._forget()
        self._kept.clear()
        self._taken_out.clear()
        self.has_begun_sums = False

    def _forget_calls(self) -> None:
        self.has_pass, self.takes_mean = False, True
        self.clips.clear()


class LocalHooks(LoopHooks):
    """Hooks that leave this rank's gradient in ``p.grad``, as a view of the flat gradients.

    Where a rank gets parts of the sums, compressed ones, or none.  They begin during the pass, so that a change of
    ``p.grad`` after it is refused.
    """

    def _take(self, name: str, p: Any) -> None:
        self._begin_take()
        found = self._find(name, p)
        if found is None:
            return
        memory, gradient, adds = found
        # Autograd has added to ``p.grad``; another tensor there means that the user has dropped the first, or that a
        # step has taken it which only adds.
        if adds and name not in self._kept:
            memory.add_(gradient)
        elif gradient.data_ptr() != memory.data_ptr():
            memory.copy_(gradient)
        self._leave(name, p, memory)


class SentHooks(LoopHooks):
    """Hooks that leave an `UnavailableGradient` in ``p.grad``, since the gradient goes to the rank that needs it.

    Where the memory of gradients is short, their sums have a fixed order, or they are multiplied by a loss scale.
    """

    loss_is_scaled = False  # by the loop, in this step
    _dropped_alone = ""  # a parameter of which the loop has dropped a gradient that had left, and not those of others

    def clear(self, *, keeps_calls: bool = False) -> None:
        super().clear(keeps_calls=keeps_calls)
        self.loss_is_scaled = False

    def note_scaled_loss(self, *_: Any) -> None:
        """Note that the gradients of this step come multiplied by the loss scale."""
        self.loss_is_scaled = True

    def take_changes(self) -> None:
        for name, p in self.tensors.items():
            self._check_kept(name, p, name == self._dropped_alone or (p.grad is not None and _is_dropped(p.grad)))

    @property
    def _more_calls(self) -> dict[str, str]:
        gradients = self._parameters.gradients
        passes = str(gradients.progress.passes_before_last)
        return {"the number of passes within no_sync": passes} if gradients.on_demand else {}

    def _make_room(self, name: str, p: Any, gradient: Any) -> None:
        super()._make_room(name, p, gradient)
        if name in self._kept and name not in self._taken_out and _is_dropped(p.grad):
            self._dropped_alone = self._dropped_alone or name
        if type(p.grad) is UnavailableGradient:
            self._take_out(name, p)

    def _take(self, name: str, p: Any) -> None:
        self._taken_out.pop(name, None)
        self._begin_take()
        found = self._find(name, p)
        if found is None:
            return
        memory, gradient, adds = found
        scale = 1.0 if self.loss_is_scaled else self._parameters.loss_scale
        if scale != 1.0:
            gradient = gradient * scale
        if adds:
            memory.add_(gradient)
        else:
            memory.copy_(gradient)
        nothing = torch.empty((), dtype=self.dtype_of[name], device=p.device)
        p.grad = nothing.expand(p.shape).as_subclass(UnavailableGradient)
        self._kept[name] = p.grad, None
        self._finish(name, memory)

    def _forget(self) -> None:
        super()._forget()
        self._dropped_alone = ""


class MeanHooks(LoopHooks):
    """Hooks that leave the mean over all `ranks` in ``p.grad``, as DistributedDataParallel does.

    Where every rank gets all sums.  Each rank divides its gradients before they are summed, and a callback at the end
    of the pass waits for the sums.  The loop may change ``p.grad`` before the step; ranks compare which gradients were
    changed, and if `compares_values` their values.
    """

    def __init__(
        self,
        parameters: FlatParameters,
        tensors: Mapping[str, Any],
        units: ShardedModule | None,
        *,
        compares_calls: bool,
        compares_values: bool,
        ranks: int,
    ) -> None:
        super().__init__(parameters, tensors, units, compares_calls=compares_calls)
        self._ranks = ranks
        self._compares_values = compares_values
        self._moved_from = {name: (p.shape, p.dtype, p.device) for name, p in self.tensors.items()}
        self._divided: set[str] = set()  # the tensors whose flat gradients are divided
        # The passes of autograd whose ends wait for the sums: several where one is made within another, as by reentrant
        # activation checkpoints.
        self._passes: set[int] = set()
        self._earlier: Any = None  # means of earlier passes since the last step, in flat order
        self._has_warned = False
        self._changed = 0  # parameters whose ``p.grad`` the loop has changed since `complete`, at the last look
        self._changes = 0  # a hash of which they are, and how often

    def complete(self) -> int:
        """Wait for the sums of this step, leave their means in ``p.grad``, and return their divisor. Collective.

        Returns at once where that is done.
        """
        reducer = self._parameters.gradients
        super().complete()
        if reducer.reduced:
            return self._divisor
        self.begin_sums()
        self._begin_rest()
        reducer.finalize()
        if self._earlier is not None:
            flat = as_tensor(reducer.flat)
            flat.add_(self._earlier)
            finish_stream(flat)
            self._earlier = None
        for name, p in self.tensors.items():
            view = as_numbers(as_tensor(reducer.memory.view(name)), p)
            self._kept[name] = view, view._version
            # A gradient assigned without a backward pass stays, for `take_changes`; so does a parameter that was moved.
            if not self._has_moved(name, p) and (self._seen or p.grad is None):
                p.grad = view
        return self._divisor

    @property
    def mean_gradients(self) -> Array:
        """The content of ``p.grad`` after `complete`, with later assignments, as one flat array."""
        with contextlib.suppress(ValueError):  # which the step raises, on all ranks
            self.take_changes()
        return self._parameters.gradients.flat

    def take_changes(self) -> None:
        """Take gradients that were assigned to ``p.grad`` after `complete`; raise ValueError for any before."""
        reducer = self._parameters.gradients
        self._changed = self._changes = 0
        if not (self._seen and reducer.reduced):
            super().take_changes()
            return
        for number, (name, p) in enumerate(self.tensors.items()):
            if p.grad is None:
                raise ValueError(
                    f"the gradient of parameter {name!r} was dropped after the backward pass, and a step takes all: "
                    "for a gradient of zero call p.grad.zero_() instead; to leave a parameter as it is, set lr of its "
                    "group in optimizer.param_groups to 0; to leave all out, call optimizer.zero_grad() and no step()"
                )
            if p.grad.shape != p.shape or p.grad.dtype != self.dtype_of[name]:
                raise not_seen(name, "assigned", "")
            memory, gradient = as_tensor(reducer.memory.view(name)), as_reals(p.grad.detach())
            if gradient.data_ptr() != memory.data_ptr():
                memory.copy_(gradient)
            finish_stream(memory)
            kept, version = self._kept.get(name, (None, None))
            times = p.grad._version - version if p.grad is kept else -1
            if times:
                self._changed += 1
                self._changes = zlib.crc32(b"%d %d" % (number, times), self._changes)

    def end_pass(self) -> None:
        self._begin_rest()
        super().end_pass()

    # -- inside -------------------------------------------------------------------------------------------------------

    @property
    def _divisor(self) -> int:
        """The number by which gradients are divided before they are summed."""
        return self.divide_by or self._ranks

    @property
    def _more_calls(self) -> dict[str, str]:
        # Within join ranks that have run out of batches take the gradients of another.
        changed, what = self._changed if self.announce is None else 0, "p.grad since the backward pass"
        found = {what: f"changed in {changed} parameters [{self._changes:x}]" if changed else "unchanged"}
        if changed and self._compares_values:
            found[f"{what}, its values"] = text_of(self._parameters.gradients.flat)
        return found

    def _make_room(self, name: str, p: Any, gradient: Any) -> Any:
        super()._make_room(name, p, gradient)
        if p.grad is not None and self._parameters.gradients.reduced:
            self._take_out(name, p)
        # Where a pass adds to it again, as a reentrant checkpoint does, the first part is divided already.
        return gradient / self._divisor if self._passes and name in self._divided else None

    def _take(self, name: str, p: Any) -> None:
        reducer, divisor = self._parameters.gradients, 1
        earlier = self._taken_out.pop(name, None)
        if reducer.reduced:
            self._begin_another_pass(name, earlier)
        self._begin_take()
        if reducer.is_last_pass:
            if self._pass is not None and self._pass not in self._passes:
                self._passes.add(self._pass)
                # As in DistributedDataParallel, called when this pass of autograd is over.
                torch.autograd.Variable._execution_engine.queue_callback(partial(self._finish_pass, self._pass))
            if name not in self._divided:
                divisor = self._divisor
                self._divided.add(name)
        found = self._find(name, p)
        if found is None:
            return
        memory, gradient, _ = found
        # Autograd has added to ``p.grad``; another tensor there means that the user has dropped the first.
        if divisor > 1:
            torch.mul(gradient, 1 / divisor, out=memory)
        elif gradient.data_ptr() != memory.data_ptr():
            memory.copy_(gradient)
        self._leave(name, p, memory)

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
        self.has_begun_sums = False
        for p in self.tensors.values():
            p.grad = None
        self.tensors[first].grad = new

    def _finish_pass(self, number: int) -> None:
        self._passes.discard(number)
        if self._passes and torch._C._current_autograd_node() is not None:
            return  # the end of the outer pass waits
        self._passes.clear()
        self.complete()

    def _begin_rest(self) -> None:
        """Take and divide, before their sums begin, gradients that only passes before the last one have written.

        They are what ``p.grad`` is by now: the loop may have dropped or changed it.
        """
        gradients = self._parameters.gradients
        if not self._seen or gradients.reduced:
            return
        for name, p in self.tensors.items():
            if name in self._divided:
                continue
            if p.grad is None:
                gradients[name][...] = 0
            elif not self._has_moved(name, p):
                memory = as_tensor(gradients.gradient(name)[0])
                torch.mul(as_reals(p.grad.detach()), 1 / self._divisor, out=memory)
                finish_stream(memory)
        self._divided.update(self.tensors)

    def _has_moved(self, name: str, p: Any) -> bool:
        return (p.shape, p.dtype, p.device) != self._moved_from[name]

    def _forget(self) -> None:
        super()._forget()
        self._divided.clear()
        self._passes.clear()  # some are left after an exception in a pass
        self._earlier = None
        self._changed = self._changes = 0


def loop_hooks(state: ModuleState, optimizer: ShardedOptimizer) -> LoopHooks:
    """Choose how the gradients of a module are taken for a loop of the user's."""
    strategy, config = optimizer.state.strategy, optimizer.config
    given = state.parameters, state.tensors.trained, state.units
    compares_calls = not optimizer.sharding.workers_differ
    # The norm of a part, as of torch.nn.utils.clip_grad_norm_, would be another one on each tensor or pipeline rank.
    is_cut = state.cuts is not None or state.stages is not None
    if not strategy.reducer.keeps_memory or config.loss_scale not in (None, 1) or is_cut:
        hooks = SentHooks(*given, compares_calls=compares_calls)
        if state.cuts is not None and state.cuts.divides_samples:
            hooks.divide_by = config.mesh.size
        return hooks
    if not (strategy.sums_are_everywhere and config.auto_sync_gradients):
        return LocalHooks(*given, compares_calls=compares_calls)
    return MeanHooks(*given, compares_calls=compares_calls, compares_values=config.mesh.debug, ranks=strategy.axis.size)
