"""`as_distributed` for PyTorch modules, `summon_full_parameters`, and `cross_entropy`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from mpishard.arguments import flag, kind_of
from mpishard.backend import array as arrays
from mpishard.comm.agreement import opening
from mpishard.comm.mesh import Mesh
from mpishard.data_parallel.configuration import ShardingConfiguration
from mpishard.data_parallel.models import configuration_of, optimizer_of_whole_model
from mpishard.data_parallel.optimizers import ZeRO1WithGradients
from mpishard.data_parallel.sharded_optimizer import ShardedOptimizer
from mpishard.torch.buffers import check_mode
from mpishard.torch.cut_module import CutModule
from mpishard.torch.expert_module import ExpertModule
from mpishard.torch.layer_filler import LayerFiller
from mpishard.torch.live_groups import LiveGroups, RuleGroups, groups_of
from mpishard.torch.memory import array_module
from mpishard.torch.micro_batches import ModulePasses, PipelinedPasses, PipelineSettings
from mpishard.torch.module import UnitSharding, check_other_trainers, check_unchanged, known_state, state_of
from mpishard.torch.module_optimizer import ModuleOptimizer
from mpishard.torch.module_tensors import ModuleTensors
from mpishard.torch.plans import EXPERTS
from mpishard.torch.sequences import PLAN, SequenceModule
from mpishard.torch.staged_module import StagedModule
from mpishard.torch.stages import layers_on
from mpishard.torch.tensor_ops import HALF
from mpishard.torch.tensor_parallel_module import TensorParallelModule
from mpishard.torch.torch_rule import rule_of_optimizer
from mpishard.torch.units import ModuleHook


def as_distributed(
    module: Any,
    mesh: Mesh | ShardingConfiguration,
    rule: Any,
    *,
    zero: int = 0,
    buffers: str = "broadcast",
    shard_units: Any = "auto",
    materialize: str | os.PathLike[str] | Callable[[Any], Any] | None = None,
    plan: Mapping[str, Any] | str | None = None,
    check_plan: bool = True,
    stages: Sequence[str] | Mapping[str, Any] | None = None,
    schedule: str = "1f1b",
    chunks: int = 1,
    microbatches: int | None = None,
) -> ModuleOptimizer:
    """Set up a PyTorch module for DDP or ZeRO-1, 2 or 3 over the ranks of a mesh; use the result as its optimizer.

    On a mesh with tensor ranks its layers are cut over these, by a plan; on one with pipeline ranks each keeps the
    layers of its stages, and `ModuleOptimizer.loss_and_gradient` makes the passes; where there are both, each layer of
    a stage is cut.

    The module has no wrapper and is used as before.  Its parameters become views into one flat array, with the values
    of rank 0 on all ranks, and hooks send each gradient as soon as autograd has finished it.  PyTorch gets as many
    threads as the mesh has for a rank.  `ModuleOptimizer.close`, or garbage collection of the result, removes hooks.

    Collective over the mesh.

    Parameters
    ----------
    module : torch.nn.Module
        Its parameters are bfloat16, float16, float32, float64, complex64 or complex128, on one device.  The
        optimizer updates master copies: float32, or float64 for all if any is float64 or complex128; a parameter of
        another dtype is its master, rounded, and ``p.grad`` has the dtype of the masters.  Change the module before:
        freeze, move, load.  ``torch.compile`` may come before or after.
    mesh : Mesh or ShardingConfiguration
        Settings such as `max_gradient_norm`, which clips, are in a configuration.  A mesh alone stands for
        ``ShardingConfiguration.create_for_high_bandwidth(mesh)`` with
        ``overlap_communication=False`` and ``minimum_parameter_group_size=2**21``.
    rule : Rule, torch.optim.Optimizer or ShardedOptimizer
        A rule such as ``mpishard.AdamW(lr=1e-3)``, whose `lr` may be a schedule.  Or an optimizer of PyTorch that was
        made for the parameters of the module.  Under ``zero=0`` it takes its own step on them.  Else it takes its step
        on the rank's shards if it treats each element by itself; if it treats each tensor by itself, each tensor is on
        one rank for the step.  The learning rates and other values are those that its parameter groups have at the
        step, as a scheduler sets them.  Or an optimizer of this mesh with its options, such as
        ``LocalSGDOptimizer(rule, mesh, outer=...)``.
    zero : int
        What ranks divide: 0 nothing (DDP), 1 the optimizer state, 2 the gradients too, 3 also the parameters.  Under 0
        and 1 ``p.grad`` is the mean over ranks after a backward pass, as under DDP, and the step takes it as the loop
        has changed it; for that 1 communicates 1.5 times the bytes of DDP.  Under 3 a unit of the module is whole only
        during its forward and its backward pass; all ranks call the module itself, equally often, and use the same
        layers in the same order.  Frozen parameters are divided, too.
    buffers : {"broadcast", "average", "local"}
        What becomes of persistent buffers, such as the running averages of batch norms, after each step: all ranks take
        those of rank 0, as with DistributedDataParallel; or the mean over ranks, where they are floating-point; or they
        stay as they are, and only a checkpoint has those of rank 0.
    shard_units : type, tuple of type, callable or "auto"
        The submodules that are gathered as one unit under ``zero=3`` (FSDP's auto-wrap policy): a class such as
        ``TransformerEncoderLayer``, classes, or a function of a submodule that returns True.  The module itself is a
        unit with what is left, and with a parameter that two units share.  "auto" takes the layers of its
        ``ModuleList`` and ``Sequential`` that have 32768 elements or more, and looks within those that have more than a
        quarter of all.
    materialize : path or callable, optional
        For a module on the device meta, so that no rank has parameters that it does not keep: a safetensors file, or a
        folder with ``model.safetensors`` or several files and their index, as ``save_pretrained`` writes it, of whose
        tensors each rank reads its parts; their names are those in the module's ``state_dict``.  Or a function:
        ``materialize(layer)`` is called with each submodule that has its own parameters or buffers, when these
        have memory, and fills them in place, as ``lambda layer: layer.reset_parameters()``.  The values of rank 0 are
        taken.  Meanwhile a rank has all parameters of one layer.  After an error in it, the module is in no usable
        state.
    plan : mapping of str to str, tuple or ParallelStyle, "sequence" or "experts", optional
        Which layers the tensor ranks of the mesh divide: the style of each by its name, in which ``*`` is any part, as
        ``{"layers.*.up": "colwise", "layers.*.down": "rowwise"}``.  Styles are the names of transformers "colwise",
        "colwise_gather_output" or "colwise_rep", "rowwise", "rowwise_split_input" or "rowwise_rep", "packed_colwise" or
        ``("packed_colwise", 3)``, "packed_rowwise", "embedding_rowwise", "embedding_colwise", "moe_tp_experts",
        "ep_dispatch_experts", "replicate" and "replicated_with_grad_allreduce", or a ``ColwiseParallel`` or
        ``RowwiseParallel`` of PyTorch.
        Layers that it does not name are whole on each tensor rank.  Default: the plan of the module itself,
        ``module.tp_plan``, as models of transformers have it.  Then all tensor ranks of a data rank call the module
        with the same samples, ``p.grad`` cannot be used, and the module is whole only within `summon_full_parameters`
        and after `ModuleOptimizer.close`; the loss of ``labels`` of a model of transformers in training mode leaves the
        logits in parts, see `cross_entropy`.  Shoeybi et al., "Megatron-LM" (2019), section 3.  With "sequence" tensor
        ranks divide the tokens of each sequence in place of the layers, for a decoder of transformers: each has its
        tokens of what the module returns, and the ``loss`` of all labels.  Jacobs et al., "DeepSpeed Ulysses" (2023),
        section 3.  With "experts" each tensor rank has samples of its own, as data ranks have, and some of the experts
        of a mixture of transformers, for the tokens of all.  Lepikhin et al., "GShard" (2020), section 3.
    check_plan : bool
        Whether the first pass of a module that tensor ranks have cut is compared with that of the whole module, and
        raises ValueError on all tensor ranks where they differ.  This takes three passes without gradients, in
        evaluation mode, and meanwhile the memory of the whole module on each tensor rank.  With `materialize` there is
        one such pass, which checks shapes, and none under ``zero=3`` or on pipeline ranks.
    stages : sequence of str, or mapping, optional
        Where pipeline ranks cut the module: the names of the submodules at which the second and later stages begin, in
        the order of their calls, as ``["layers.4", "layers.8"]``; or a plan as that of transformers, whose keys are the
        names of submodules and lists in this order.  Default: the plan of the module, ``config.base_model_pp_plan``; or
        for a ``Sequential``, or a module with one ``ModuleList`` around its layers, equally many layers of the list a
        stage.  Then ``p.grad`` cannot be used.
    schedule : {"1f1b", "gpipe", "interleaved", "zb-h1"}
        The order in which pipeline stages work, see `mpishard.pipeline.schedule`.  With "zb-h1" the products for
        weights in ``torch.nn.functional.linear`` come after the gradients of inputs, while others wait for these.
    chunks : int
        Stages of a pipeline rank, for the interleaved schedule.
    microbatches : int, optional
        Number of micro-batches into which `ModuleOptimizer.loss_and_gradient` cuts a batch.  Default: 1; on a pipeline
        4 times the number of its ranks.

    Returns
    -------
    ModuleOptimizer
        With `step`, `zero_grad`, `no_sync`, `loss_and_gradient` and `close`.

    Raises
    ------
    TypeError, ValueError
        On every rank, if the module or an argument of any rank is unfit, or they differ between ranks.  The module is
        unchanged then.
    """
    config = configuration_of(mesh, overlap_communication=False, minimum_parameter_group_size=2**21)
    sharding = None
    with opening(config.mesh.world, "as_distributed") as same:  # a class of the user's may raise, too
        mesh = config.mesh
        ranks = mesh.pipeline.size
        order = PipelineSettings.of(schedule, chunks, microbatches, ranks)
        check_other_trainers(module, zero == 3 or mesh.data.size < mesh.size)
        tensors = ModuleTensors.of(module, on_meta=materialize is not None)
        array_module(tensors.device)  # raises for a device that has no arrays
        check_unchanged(module)
        if isinstance(rule, torch.optim.Optimizer):
            divides = zero != 0 or config.sync_every > 1 or mesh.data.size < mesh.size
            rule = rule_of_optimizer(rule, tensors.trained, divides=divides)
            numbers = rule.of_optimizer.division.numbers
            if numbers and config.sync_every > 1:
                raise ValueError(
                    f"sync_every={config.sync_every}: a worker may skip a step alone, and {rule.of_optimizer.what} "
                    f"counts {', '.join(map(repr, numbers))} in its groups; use sync_every=1"
                )
        optimizer = optimizer_of_whole_model(
            "a PyTorch module", rule, config, zero, shards_parameters=True, splits_model=True
        )
        if ranks > 1:
            _check_stages(optimizer, zero)
        checks_pass = flag("check_plan", check_plan) and (materialize is None or (zero != 3 and ranks == 1))
        given = mesh, tensors.trained, tensors.frozen
        cut_layers: CutModule | None = None
        cuts: TensorParallelModule | None
        if isinstance(plan, str) and plan == PLAN:
            cuts = SequenceModule.of(module, *given, checks_pass=checks_pass)
        elif isinstance(plan, str) and plan == EXPERTS:
            cuts = ExpertModule.of_experts(module, *given, checks_pass=checks_pass)
        else:
            cuts = cut_layers = CutModule.of(module, plan, *given, checks_pass=checks_pass)
        staged: StagedModule | None = None
        if ranks > 1:
            layers = layers_on(module, stages, ranks, chunks)
            staged = StagedModule(module, mesh, layers, tensors.trained, tensors.frozen, cut_layers)
            same["stages"] = staged.described
        filler: LayerFiller | None = None
        if materialize is not None:
            filler = LayerFiller(materialize, module, {**tensors.trained, **tensors.frozen}, mesh.world, cuts, staged)
            same["materialize"] = filler.described
        if cuts is not None:
            _check_cuts(optimizer, cuts)
            if zero == 3 and filler is not None and not filler.reads_parts:
                raise ValueError(
                    f"materialize is a function, which fills whole layers, and zero=3 with tensor={mesh.tensor.size} "
                    "has parts of them: give it a folder or file of safetensors, or use zero=2"
                )
            same |= {"plan": cuts.described, "check_plan": check_plan}
        is_plain = not config.reproducible and config.compressor is None and config.loss_scale is None
        if zero == 1 and cuts is None and staged is None and is_plain:
            optimizer = ZeRO1WithGradients(optimizer.rule, config)
        groups = groups_of(optimizer.rule, tensors.trained)
        check_mode(buffers)
        same |= {"zero": zero, "buffers": buffers, **tensors.described}
        same |= {"schedule": schedule, "chunks": chunks, "microbatches": order.microbatches}
        if zero == 3:
            sharding = UnitSharding.of(module, tensors, shard_units, mesh.data, divides_frozen=True)
            same["shard_units"] = sharding.described
        elif not (isinstance(shard_units, str) and shard_units == "auto"):
            raise ValueError(f"shard_units is for zero=3, which divides the parameters; zero={zero!r}")
    torch.set_num_threads(mesh.blas_threads)
    state = state_of(module, tensors, buffers, sharding, cuts, staged, filler)
    before: Any = optimizer.rule
    try:
        if isinstance(groups, RuleGroups):
            optimizer.rule = groups.rule
        optimizer.bind(state.parameters)
        arrays.ready(state.parameters.held)  # PyTorch may continue in another stream of a GPU
    except BaseException as error:
        if isinstance(groups, RuleGroups):
            optimizer.rule = before
        if isinstance(error, TypeError | ValueError) and materialize is None:  # on all ranks
            state.unshard()
        state.release()
        raise
    if isinstance(groups, LiveGroups):
        groups.claim()
    # Ranks meet in each pass: of experts that they have dealt out, under zero=2 in its sums, under zero=3 in its units.
    deals = cuts is not None and cuts.divides_samples
    trains_with = mesh.world if deals or state.parameters.gradients.on_demand else None
    passes = ModulePasses(order, trains_with, mesh.world if deals or sharding is not None else None)
    if staged is not None:
        passes = PipelinedPasses(order, staged, state.parameters, tensors.device)
        if mesh.rank == 0:
            order.warn(ranks)
    return ModuleOptimizer(state, optimizer, groups, passes)


def _check_stages(optimizer: ShardedOptimizer, zero: int) -> None:
    """Raise ValueError for an optimizer that pipeline ranks of a module cannot have."""
    with_pipeline = f"with pipeline={optimizer.mesh.pipeline.size}"
    if zero == 3 or optimizer.sharding.shards_parameters:
        raise ValueError(
            f"zero=3 {with_pipeline}: stages have their parameters whole; use zero=2, or make the mesh with pipeline=1"
        )
    if optimizer.sharding.workers_differ:
        raise ValueError(
            f"{type(optimizer).__name__} {with_pipeline}: workers that take steps by themselves have whole modules; "
            "use sync_every=1 and zero=0 to 2, or make the mesh with pipeline=1"
        )


def _check_cuts(optimizer: ShardedOptimizer, cuts: TensorParallelModule) -> None:
    """Raise ValueError for what tensor ranks of a module cannot do."""
    mesh = optimizer.mesh
    if cuts.divides_samples and not optimizer.config.auto_sync_gradients:
        raise ValueError(
            f"auto_sync_gradients=False with plan={EXPERTS!r}: calls of step are counted over data ranks alone; use "
            "no_sync() for passes that add up"
        )
    if optimizer.sharding.workers_differ:
        raise ValueError(
            f"{type(optimizer).__name__} with tensor={mesh.tensor.size}: workers that take steps by themselves have "
            "whole modules; use sync_every=1 and zero=0 to 3, or make the mesh with tensor=1"
        )


def summon_full_parameters(module: Any, *, writeback: bool = True) -> AbstractContextManager[None]:
    """A context in which a module under ``zero=3``, or on tensor or pipeline ranks, has all parameters, on every rank.

    For its ``state_dict()``, for looking at parameters, and for changing them.  Clone the tensors that are to be used
    after it: they share the memory that is freed then.  Else a module has its parameters always, and nothing happens.
    Passes of a module that tensor or pipeline ranks have cut are those of the whole module meanwhile.

    Collective over the mesh, at entry and exit.

    Parameters
    ----------
    module : torch.nn.Module
        That of `as_distributed`.
    writeback : bool
        Whether the values that rank 0 has at the end are those of all ranks from then on; else changes are dropped.

    Returns
    -------
    context manager
        For one ``with`` statement.

    Raises
    ------
    ValueError
        If the module is not distributed.
    """
    state = known_state(module)
    if state is None:
        raise ValueError("summon_full_parameters is for a module that as_distributed has made distributed")
    return state.summoned(writeback)


def cross_entropy(logits: Any, targets: Any, layer: Any, *, ignore_index: int = -100, reduction: str = "mean") -> Any:
    """The loss of logits that stay where the tensor ranks have computed them.

    For the forward pass of a module of your own whose output layer the plan of `as_distributed` cuts "colwise", as in
    ``return mpishard.torch.cross_entropy(self.head(x), targets, self.head)``.  Ranks take the maximum and two sums of
    each row, and none has whole logits; autograd keeps the gradient of the part, in its memory.  Models of transformers
    do the same by themselves where they are called with ``labels`` in training mode.  Of a layer that is whole it is
    `torch.nn.functional.cross_entropy`.  Shoeybi et al., "Megatron-LM" (2019), section 3.

    Collective over the tensor axis of the mesh, if the layer is cut.

    Parameters
    ----------
    logits : Tensor, shape (..., columns)
        The outputs of the layer: those that this rank has, or all.  Half precision is computed in float32.
    targets : Tensor of int64, shape (...)
        Numbers of the right outputs, of all; the same on all tensor ranks.
    layer : torch.nn.Linear
        The layer.
    ignore_index : int
        Rows with this target do not count.
    reduction : {"mean", "sum"}
        Over the rows that count; the mean of none is NaN.

    Returns
    -------
    Tensor, shape ()
        In nats, the same on all tensor ranks: float64 for logits of float64, else float32.

    Raises
    ------
    TypeError, ValueError
        If `layer` is no `Linear` with these outputs.
    IndexError
        If a target is no output, as of PyTorch's own.
    """
    if not isinstance(layer, torch.nn.Linear):
        raise TypeError(f"layer must be the Linear whose outputs the logits are, got {kind_of(layer)}")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction={reduction!r} must be 'mean' or 'sum'")
    logits = logits.float() if logits.dtype in HALF else logits
    hook = vars(layer).get("forward")
    is_cut = isinstance(hook, ModuleHook) and isinstance(hook.args[0], CutModule)
    if is_cut and hook.args[1].cut.style.cuts == "outputs":  # else they are whole
        return hook.args[0].cross_entropy(hook.args[1], logits, targets, ignore_index, reduction)
    columns = layer.out_features
    if logits.shape[-1] != columns:
        raise ValueError(
            f"logits have {logits.shape[-1]} columns, and the layer has {columns} outputs: give the layer that has "
            "computed them; on pipeline ranks the plan needs 'colwise_gather_output' for it"
        )
    return torch.nn.functional.cross_entropy(
        logits.reshape(-1, columns), targets.reshape(-1), ignore_index=ignore_index, reduction=reduction
    )
