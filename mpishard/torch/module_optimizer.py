"""The place of a PyTorch optimizer in the user's own training loop, over the ranks of a mesh."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from mpishard.arguments import listed, number, without_dimensions
from mpishard.backend import array as arrays
from mpishard.comm.agreement import opening
from mpishard.data_parallel.rule_state import clip_factor
from mpishard.data_parallel.settings import agree_on_step
from mpishard.data_parallel.sharded_optimizer import ShardedOptimizer
from mpishard.io import log
from mpishard.parameters.flat import FlatParameters
from mpishard.parameters.reducer import NoSync
from mpishard.torch.live_groups import ParameterGroups, RuleGroups, groups_of
from mpishard.torch.loop_hooks import CLIP, DROP, STEP, LoopHooks, SentHooks, loop_hooks
from mpishard.torch.micro_batches import ModulePasses
from mpishard.torch.module import ModuleState
from mpishard.torch.torch_state import StateDicts, is_of_torch
from mpishard.training.saving import load_checkpoint, save_checkpoint


class ModuleOptimizer(torch.optim.Optimizer):
    """Trains a PyTorch module on all ranks of a mesh; made by `as_distributed`.

    The module is used as before.  After ``loss.backward()`` call `step`.  Every method is collective over the mesh
    unless its docstring says otherwise.

    It is an optimizer of PyTorch for whatever takes one: the schedulers of ``torch.optim.lr_scheduler``,
    ``torch.amp.GradScaler``, hooks, loops such as Lightning's.

    Parameters
    ----------
    state : ModuleState
        Of the module.
    optimizer : ShardedOptimizer
        Bound to its parameters.
    groups : ParameterGroups
        Of its rule.
    passes : ModulePasses
        What `loss_and_gradient` makes of a batch.

    Attributes
    ----------
    optimizer : ShardedOptimizer
        That of mpishard, with `steps`, `gradient_norm`, `rule` and the rest.
    unused_parameters : list of str
        Names of the parameters that got no gradient on this rank in the last step.  Their gradient here counts as zero.
    expert_load : float
        Where ranks have dealt out experts: the largest part that one of the tensor ranks had in the last step of all
        tokens that experts computed, each once for each of its experts.  1 / ranks if they are balanced; NaN without
        such experts.
    """

    def __init__(
        self, state: ModuleState, optimizer: ShardedOptimizer, groups: ParameterGroups, passes: ModulePasses
    ) -> None:
        self._state = state
        self._passes = passes
        self.optimizer = optimizer
        self.unused_parameters: list[str] = []
        self.expert_load: float = math.nan
        self._groups = groups
        self._rule = optimizer.rule
        self._is_made = False
        super().__init__([*groups.groups], groups.defaults)
        self._is_made = True
        state.use(loop_hooks(state, optimizer))
        state.parameters.reset_gradients()
        self._end = weakref.finalize(self, _let_go, state, groups.hook)
        self._end.atexit = False

    def close(self) -> None:
        """Let the module go: it stays as it is, and is trained by this optimizer no more.

        Then layers may be frozen or not, added or moved, and `as_distributed` takes the module again, as for gradual
        unfreezing.  An optimizer that nobody holds any more is closed.  Calling it twice does nothing.  Under
        ``zero=3``, and on tensor or pipeline ranks, the module has all parameters afterwards; where an optimizer is
        dropped without `close`, the module cannot be used.

        Collective under ``zero=3`` and on tensor or pipeline ranks, and if a backward pass outside of `no_sync` was
        made since the last step.

        Raises
        ------
        ValueError
            Within `summon_full_parameters`.
        """
        if self._end.alive:
            self._state.check_not_summoned("close()")
            self._state.hooks.drop()
            self._state.unshard()
        self._end()

    @property
    def _hooks(self) -> LoopHooks:
        """Those of the optimizer that was made last for the module."""
        hooks = self._state.hooks
        if not isinstance(hooks, LoopHooks):
            raise ValueError("a problem of mpishard.torch has trained this module since: call as_distributed again")
        return hooks

    @property
    def module(self) -> Any:
        """The module, as it was given."""
        return self._state.module

    @property
    def parameters(self) -> FlatParameters:
        """Its parameters that are trained, by the names in its ``state_dict``, as views into one flat array."""
        return self._state.parameters

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of parameters, with the values that the next step uses; not collective.

        Schedulers and users set them between two steps; a step compares them over the ranks.  Where the rule has a
        schedule, ``lr`` shows the rate of the last step and cannot be set.

        Returns
        -------
        list of dict
            Those of the optimizer of PyTorch that `as_distributed` was given; for a rule such as ``AdamW(lr=1e-3)`` one
            with its fields as values, or one for each other values of its `groups`.
        """
        return self._groups.groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._groups.groups = groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise RuntimeError: the parameters of a step are those of the module when it was made distributed.

        Parameters
        ----------
        param_group : dict
            As PyTorch has it.

        Raises
        ------
        RuntimeError
            Always.
        """
        if self._is_made:
            raise RuntimeError(
                "a group cannot be added to the optimizer of as_distributed, which has all parameters of the module: "
                "call close(), make a torch optimizer with all groups, or a rule with groups=[ParameterGroup(...)], "
                "and call as_distributed again"
            )
        super().add_param_group(param_group)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a ModuleOptimizer belongs to its mesh and cannot be copied or pickled; save its state_dict()")

    def loss_and_gradient(
        self, function: Callable[..., Any], *batch: Any, reduction: Literal["mean", "sum"] = "mean"
    ) -> float:
        """The loss of this data rank's batch, forward and backward in micro-batches; `step` then updates.

        In the place of a forward pass and ``loss.backward()``, on any mesh; on one with pipeline ranks the only way.
        All ranks of a data rank call it with the same batch, which is cut along the first dimension of its tensors.

        Collective over the mesh with pipeline ranks; else as a backward pass.

        Parameters
        ----------
        function : callable
            ``function(module, *micro_batch)`` calls the module once, and returns the loss of a micro-batch, of shape
            ().  On a pipeline every stage calls it, and those before the last only as far as to the layers of the next
            stage; a micro-batch of a new shape takes one call more, without values.
        *batch : Tensor, or mapping, sequence or dataclass of tensors
            Of equally many samples, at least one; tensors of no dimension, and what is no tensor, are the same for all
            micro-batches.
        reduction : {"mean", "sum"}
            Whether the loss is a mean over the samples, of which that of the batch is the mean weighted by their
            numbers; or a sum, for ``step(count=)``.

        Returns
        -------
        float
            That of this data rank's batch, on all of its ranks.

        Raises
        ------
        TypeError, ValueError
            On every rank of a pipeline, if the batch cannot be cut, ranks have different samples, or the function or
            the order in which the module calls its layers is unfit.
        Exception
            On every rank of a pipeline, if the function or a layer raises one on a stage; the gradients of this step
            are dropped then.
        """
        loss = self._passes.train(self, function, batch, reduction)
        self._hooks.has_pass = True  # also on a stage without a gradient
        return loss

    def loss(self, function: Callable[..., Any], *batch: Any, reduction: Literal["mean", "sum"] = "mean") -> float:
        """The loss of this data rank's batch, without gradients; call ``module.eval()`` before.

        Collective over the mesh with pipeline ranks.

        Parameters
        ----------
        function, *batch, reduction : as for `loss_and_gradient`
            All of them.

        Returns
        -------
        float
            That of this data rank's batch, on all of its ranks.

        Raises
        ------
        TypeError, ValueError
            As `loss_and_gradient`.
        """
        return self._passes.evaluate(self, function, batch, reduction)

    def step(self, closure: Any = None, *, count: float | None = None) -> Any:
        """Average the gradients over the ranks, and update the parameters; the gradients are cleared.

        Parameters
        ----------
        closure : callable, optional
            Called first: makes the gradients, and returns the loss.
        count : float, optional
            Divides the sum of the gradients of all ranks: the global number of samples where the loss is a sum over
            samples.  Default: the number of data ranks, under ``plan="experts"`` of all ranks, for a loss that is a
            mean over a rank's samples, as with DistributedDataParallel.

        Returns
        -------
        object
            What `closure` returned; else None.

        Raises
        ------
        ValueError
            On every rank, if the module of any rank was changed since `as_distributed`, or values of `param_groups`
            differ between ranks or are unfit; or if some ranks have made no backward pass, without `count`, or ranks
            have called `zero_grad` or `clip_grad_norm_` in other ways, or changed other gradients; nothing is updated
            then.
        FloatingPointError
            On every rank, if any gradient is NaN or infinite, as for `ShardedOptimizer.step`.
        CollectiveMismatchError
            On every rank, if ranks have used other layers under ``zero=3``; the gradients are dropped.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.optimizer.rule is not self._rule:
            self._follow_rule()
        self._take_step(count)
        return loss

    def _take_step(self, count: float | None) -> None:
        first = not self.optimizer.clock
        count = without_dimensions(count)  # a sum over ranks of NumPy is no int
        hooks = self._hooks
        if self._state.cuts is not None:
            self._state.cuts.compare_gradients()
            self.expert_load = self._state.cuts.end_expert_tokens()
        ranks = hooks.complete()
        hooks.end_sums()
        self.unused_parameters = hooks.unused
        if hooks.announce is not None:
            hooks.announce(STEP, lambda: (count, self._groups.saved))
        hooks.takes_mean = count is None
        if count is None:
            count = hooks.divide_by or None
        if ranks and (count is None or isinstance(count, (int, float))):  # another count is refused below
            count = (ranks if count is None else count) / ranks
        self._state.take_values()
        try:
            self.optimizer.step(self.parameters, count=count)
        finally:  # Local SGD raises after an average, which has changed the parameters
            arrays.ready(self.parameters.held)  # PyTorch may continue in another stream of a GPU
            self._state.round_masters()
            hooks.clear(keeps_calls=self.parameters.gradients.has_content)  # a step that was refused
        if self._state.units is not None:
            self._state.units.end_step()
        self._groups.show(self.optimizer.steps)
        if first and self.unused_parameters and self.optimizer.mesh.rank == 0:
            log.inform(
                f"no gradient reached {len(self.unused_parameters)} of {len(self.parameters)} parameters on rank 0: "
                f"{listed(self.unused_parameters)}; it counts as zero (see unused_parameters)"
            )

    def _follow_rule(self) -> None:
        """Give the groups the values of a rule that has taken the place of the one before."""
        groups = groups_of(self.optimizer.rule, self._state.all_trained)
        for old, new in zip(self.param_groups, groups.groups, strict=False):
            new.update({name: value for name, value in old.items() if name not in new})
        self._groups, self.defaults = groups, groups.defaults
        if isinstance(groups, RuleGroups):
            self.optimizer.rule = groups.rule
        self._rule = self.optimizer.rule

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, foreach: bool | None = None) -> Any:
        """Scale all gradients so that their global norm is at most `max_norm`, for any `zero`; as FSDP's method.

        ``torch.nn.utils.clip_grad_norm_(module.parameters(), ...)`` does the same where ``p.grad`` has values: under
        ``zero=0`` and ``zero=1``, without tensor and pipeline ranks.

        Parameters
        ----------
        max_norm : float
            Of the mean gradient over the ranks, in Local SGD over those of a worker; a sum with ``step(count=)`` is
            clipped before it is divided.
        norm_type : float
            2, where ranks divide the gradients; else any.
        foreach : bool, optional
            As for ``torch.nn.utils.clip_grad_norm_``.

        Returns
        -------
        Tensor
            The norm before, of shape ().

        Raises
        ------
        ValueError
            On every rank, for another norm than 2 of divided gradients; with ``auto_sync_gradients=False``; or if not
            all ranks have called it with the same arguments, which is found here where ranks divide the gradients, else
            by `step`.
        TypeError
            If `max_norm` or `norm_type` is no number.
        """
        max_norm = number("max_norm", without_dimensions(max_norm), least=0, finite=False)
        norm_type = number("norm_type", without_dimensions(norm_type), finite=False)
        if not self.optimizer.config.auto_sync_gradients:
            raise ValueError(
                "clip_grad_norm_ with auto_sync_gradients=False would end a sum to which steps add: give "
                "ShardingConfiguration(max_gradient_norm=...), which clips the mean of all steps"
            )
        hooks, state = self._hooks, self.optimizer.state
        call = f"max_norm={max_norm:g} norm_type={norm_type:g}"
        if hooks.complete():
            if hooks.announce is None:
                hooks.clips.append(call)
            tensors = list(hooks.tensors.values())
            return torch.nn.utils.clip_grad_norm_(tensors, max_norm, norm_type, foreach=foreach)
        if norm_type != 2:
            raise ValueError(f"norm_type={norm_type:g}: ranks divide the gradients, and measure their 2-norm alone")
        strategy, inspection = state.strategy, state.on_rank.inspection
        hooks.end_sums()
        if hooks.announce is not None:
            hooks.announce(CLIP, lambda: (max_norm,))
        strategy.reducer.finalize()
        divisor = (hooks.divide_by or strategy.ranks_of_step) * self.parameters.loss_scale
        hooks.clips.append(call)
        hooks.takes_mean = False  # not known before the step
        # The ranks that call this compare it with those that do not, and step: both exchange the same words.
        settings, ranks = self.optimizer.settings, strategy.sync_group
        top = agree_on_step(ranks, self.parameters, None, None, settings, inspection.largest())
        norm = inspection.norm_of(top) / divisor if math.isfinite(top) else math.inf
        factor = clip_factor(norm, max_norm)
        for gradient in strategy.gradients():
            gradient *= factor
        return torch.tensor(norm, dtype=self._state.dtype, device=next(iter(hooks.tensors.values())).device)

    def scale(self, loss: Any) -> Any:
        """The loss times the loss scale of the configuration, for ``backward()``; as ``torch.amp.GradScaler.scale``.

        Without it gradients are multiplied when they come, too late for those that float16 has rounded to 0.  The step
        divides by the factor again.  Call it for every backward pass of a step, or for none.

        Parameters
        ----------
        loss : Tensor
            Of any shape and floating-point dtype.

        Returns
        -------
        Tensor
            Of its shape and dtype; the loss itself, times 1, without ``ShardingConfiguration(loss_scale=)``.
        """
        hooks, scaled = self._hooks, loss * self.parameters.loss_scale
        if isinstance(hooks, SentHooks):
            if isinstance(scaled, torch.Tensor) and scaled.requires_grad:  # zero_grad() may come before its pass
                scaled.register_hook(hooks.note_scaled_loss)
            else:
                hooks.note_scaled_loss()
        return scaled

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients of backward passes that no step has used.

        ``module.zero_grad()`` does the same, once the next pass begins or `step` is called.  With
        ``auto_sync_gradients=False`` this drops all since the last update, also what calls of `step` have added.

        Collective if a backward pass outside of `no_sync` was made, and under ZeRO-2 and 3 also after one within it,
        whose sums all ranks drop or none.

        Parameters
        ----------
        set_to_none : bool
            As PyTorch has it; gradients are dropped either way.
        """
        hooks = self._hooks
        if hooks.announce is not None and hooks.has_begun_sums and self.parameters.gradients.has_content:
            hooks.end_sums()
            hooks.announce(DROP)
        hooks.drop()

    def no_sync(self) -> NoSync:
        """A context for a backward pass that is not the last one of its step: gradients add up on this rank.

        Under ZeRO-2 and 3, whose memory of gradients is short, they are summed over the ranks nevertheless, and all
        ranks must make equally many passes.  Otherwise this is not collective.

        Returns
        -------
        context manager
            For one ``with`` statement.

        Raises
        ------
        RuntimeError
            Under ZeRO-2 within `mpishard.torch.join`.
        ValueError
            Under ZeRO-2 and 3 with ``reproducible=True``.
        """
        gradients = self.parameters.gradients
        if self._hooks.announce is not None and gradients.on_demand:
            raise RuntimeError(
                "no_sync() under zero=2 sums over ranks in each pass, which join cannot do: use zero=0 or 1 within join"
            )
        if gradients.on_demand and gradients.reproducible:
            raise ValueError(
                "no_sync() under zero=2 and 3 sums over ranks in each pass, and reproducible=True has one sum a step: "
                "use zero=0 or 1, or make one pass a step"
            )
        return gradients.no_sync(self._hooks.follow_drop)

    @property
    def _state_dicts(self) -> StateDicts:
        return StateDicts(self._state, self.optimizer, self._groups)

    def state_dict(self, format: str = "mpishard") -> dict[str, Any]:
        """The state of the optimizer, for ``torch.save`` on one rank; the module has its own ``state_dict``.

        Parameters
        ----------
        format : {"mpishard", "torch"}
            "torch" is the ``state_dict`` of the optimizer of PyTorch of the same name, for a script without mpishard:
            its ``load_state_dict`` takes it, for the same groups of the same parameters.

        Returns
        -------
        dict
            The same on every rank, for any number of ranks that loads it.  In the format of mpishard with ``masters``
            by name, of parameters whose dtype is not that of the steps.

        Raises
        ------
        ValueError
            On every rank, if compressed gradients of a backward pass are on their way, which no step has used; or
            PyTorch has no such optimizer.
        """
        with opening(self.optimizer.mesh.world, "state_dict") as same:
            same["format"] = format
            if format not in ("mpishard", "torch"):
                raise ValueError(f"format={format!r} must be 'mpishard' or 'torch'")
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self._state.take_values()
        state_dict = self._state_dicts.make(format)
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, on this or another number of ranks; or what that of PyTorch returned.

        The state of an optimizer of PyTorch, as a run under DDP has saved it, is taken by one of the same name, in
        PyTorch or here, with the same groups of the same parameters.  It has no count of the steps of an SGD.

        As in PyTorch, the learning rates and other values of the saved parameter groups replace those here for a torch
        optimizer.  For a rule they do so where something had changed them; else the rule's own hold.  Load the state of
        a scheduler after this.

        Parameters
        ----------
        state_dict : mapping
            The same on every rank.

        Raises
        ------
        ValueError
            On every rank, if it is of another rule or another module, or damaged.
        """
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self._state.take_values()
        with opening(self.optimizer.mesh.world, "load_state_dict") as same:
            same["format"] = "torch" if is_of_torch(state_dict) else "mpishard"
            self._state_dicts.check(state_dict)
        self._state_dicts.load(state_dict)
        self._groups.show(self.optimizer.steps)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def save_checkpoint(self, folder: str | Path, **options: Any) -> Path:
        """Write a checkpoint of parameters, buffers and optimizer state, which any number of ranks can load.

        Parameters
        ----------
        folder : path
            Folder of the run.
        **options
            As for `mpishard.save_checkpoint`.

        Returns
        -------
        Path
            The folder of the checkpoint.

        Raises
        ------
        ValueError, TypeError, OSError, FloatingPointError
            As `mpishard.save_checkpoint`; a ValueError also within `summon_full_parameters`.
        """
        self._state.check_not_summoned("save_checkpoint()", would="save the values from before it")
        self._state.take_values()
        return save_checkpoint(folder, self.parameters, self.optimizer, **options)

    def load_checkpoint(self, folder: str | Path) -> dict[str, Any]:
        """Read the newest complete checkpoint into the module and the optimizer.

        The parameter groups get their saved values, as by `load_state_dict`.

        Parameters
        ----------
        folder : path
            As for `mpishard.load_checkpoint`.

        Returns
        -------
        dict
            The facts of the checkpoint.

        Raises
        ------
        ValueError, TypeError, OSError
            As `mpishard.load_checkpoint`; a ValueError also within `summon_full_parameters`.
        """
        self._state.check_not_summoned("load_checkpoint()")
        facts = load_checkpoint(folder, self.parameters, self.optimizer)
        self._state.hooks.clear()
        self._groups.show(self.optimizer.steps)
        return facts


def _let_go(state: ModuleState, hook: Any) -> None:
    if hook is not None:
        hook.remove()
    state.release()
