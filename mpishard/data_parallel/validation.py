"""Checks of configurations, layouts, gradients and copies before and after a step; `settings` compares ranks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection
from typing import Any

import numpy as np

from mpishard.backend import array as arrays
from mpishard.comm.errors import on_any, raised_on_all
from mpishard.comm.ledger import users_level
from mpishard.comm.mesh import Mesh
from mpishard.data_parallel.configuration import ShardingConfiguration
from mpishard.data_parallel.strategies import Sharding, Strategy
from mpishard.layout.run_state import brief
from mpishard.minimizers import Method
from mpishard.minimizers.double_pass import DoublePass
from mpishard.optim import Rule
from mpishard.parameters.flat import FlatParameters, check_flat
from mpishard.parameters.reducer import GradientReducer

Array = Any


def check_configuration(what: str, config: ShardingConfiguration, sharding: Sharding) -> None:
    """Raise ValueError unless the strategy has all that the configuration asks for; `what` names the optimizer."""
    if config.compressor is not None and sharding.shards_parameters:
        raise ValueError(
            f"gradient compression is for DDP, ZeRO-1 and ZeRO-2, not for {what}, which sends parameters most of the "
            "time; use one of these, or a configuration with gradient_compressor=None and "
            "enable_gradient_compression=False"
        )


def check_method(what: str, method: Method, config: ShardingConfiguration, sharding: Sharding) -> None:
    """Raise ValueError unless a method can work with the strategy and the configuration; `what` names the optimizer."""
    name = type(method).__name__
    if not sharding.divides_state:
        raise ValueError(
            f"{what} keeps the whole state on every rank, but {name} divides its vectors over the data axis; use "
            f"as_distributed({name}(...), mesh), which makes a ZeRO1Optimizer"
        )
    given = {
        "gradient compression": config.compressor is not None,
        "max_gradient_norm": config.max_gradient_norm is not None,
        "max_gradient_value": config.max_gradient_value is not None,
        "loss_scale": config.loss_scale is not None,
        "auto_sync_gradients=False": not config.auto_sync_gradients,
        f"sync_every={config.sync_every}": config.sync_every > 1,
    }
    for setting, there in given.items():
        if there:
            raise ValueError(f"{name} needs the gradient of the function as it is, at every step: leave out {setting}")


def check_workers(config: ShardingConfiguration) -> None:
    """Raise ValueError if the configuration asks for what workers that take steps by themselves cannot have."""
    if config.reproducible:
        raise ValueError(
            "reproducible=True gives the same bits on any number of ranks, but what LocalSGDOptimizer comes to "
            "depends on the number of workers; leave it out, or use DDP or ZeRO"
        )
    if not config.auto_sync_gradients:
        raise ValueError(
            "auto_sync_gradients=False accumulates gradients until synchronize_optimizer_state, but here every "
            "step is the worker's own already; leave it out, and accumulate over micro-batches of a step"
        )


def check_replacement(was: Rule, rule: Rule, parameters: FlatParameters | None) -> None:
    """Raise unless `rule` can take the place of the rule `was` of an optimizer, which may have parameters already."""
    if was.own_steps is not rule.own_steps:
        raise ValueError(
            f"{type(rule).__name__} cannot take the place of an optimizer that keeps its own state, as one of PyTorch "
            "does; make a new optimizer"
        )
    if (rule.ema_decay is None) != (was.ema_decay is None):
        raise ValueError("ema_decay cannot be given or left out once there is an optimizer: it is one more slot")
    if parameters is not None:
        if set(rule.slots) != set(was.slots):
            theirs, ours = (", ".join(each.slots) or "nothing" for each in (rule, was))
            raise ValueError(
                f"{type(rule).__name__} keeps {theirs} of each parameter, and this optimizer has {ours}: another rule "
                "needs the same; make a new optimizer"
            )
        rule.by_shape({spec.name: spec.shape for spec in parameters.specs})  # raises for groups of another model


def check_rule_fits(rule: Rule, parameters: FlatParameters, mesh: Mesh, sharding: Sharding) -> None:
    """Raise ValueError unless the strategy can take steps of the rule with these parameters."""
    rule.by_shape({spec.name: spec.shape for spec in parameters.specs})  # raises for groups of another model
    name = type(rule).__name__
    if rule.whole_tensors and rule.own_steps is None and arrays.is_device(parameters.like):
        raise ValueError(
            f"{name} takes its steps of whole tensors on the host, and the parameters are on a device; use AdamW there"
        )
    if rule.whole_tensors and sharding.workers_differ and mesh.data.size < mesh.size:
        raise ValueError(
            f"{name} needs whole matrices, and a worker of Local SGD has them divided on the mesh {mesh.sizes}; make "
            "it with tensor=1 and pipeline=1, or use DDP or ZeRO"
        )


def check_place(parameters: FlatParameters, mesh: Mesh) -> None:
    """Raise ValueError unless the parameters are laid out for this rank's tensor and pipeline rank in the mesh."""
    was, wanted = parameters.place, mesh.place
    if was != wanted:
        raise ValueError(
            f"the parameters are laid out for rank {was.pipeline_rank} of pipeline={was.pipeline_size} and rank "
            f"{was.tensor_rank} of tensor={was.tensor_size}, but the mesh is {mesh.sizes}, and this rank "
            f"{wanted.pipeline_rank} and {wanted.tensor_rank} there; make the model with the mesh of its optimizer "
            "(mesh=optimizer.mesh), or FlatParameters with place=mesh.place"
        )


def check_layout(parameters: FlatParameters, mesh: Mesh, sharding: Sharding) -> None:
    """Raise ValueError unless the strategy can work with these parameters on this mesh."""
    check_place(parameters, mesh)
    if parameters.sharded is None:
        return
    if not sharding.shards_parameters:
        raise ValueError(
            "the parameters are sharded (ZeRO-3), but this optimizer needs them whole; use ZeRO3Optimizer (or "
            "zero_stage=3), or make the model without sharded_parameters"
        )
    if parameters.sharded.axis is not mesh.data:
        raise ValueError(
            "the parameters are sharded (ZeRO-3) over a data axis that is not this optimizer's; make the model and the "
            "optimizer with one mesh"
        )


def check_layout_dependence(parameters: FlatParameters, config: ShardingConfiguration) -> None:
    """Raise ValueError if the bits of a model depend on the layout, but the configuration promises that they do not."""
    if not config.reproducible:
        return
    parameters.carried.check_reproducible(config.mesh.pipeline.size)
    if not config.allow_different_bits and parameters.layout_dependence:
        raise ValueError(
            f"reproducible=True gives the same bits on any layout, but this model has {parameters.layout_dependence}; "
            "leave that out, or allow_different_bits=True in the configuration"
        )


def check_same_model(was: FlatParameters, parameters: FlatParameters, sharding: Sharding) -> None:
    """Raise ValueError unless the state for the parameters `was` also fits these parameters."""
    ours, theirs = ((p.specs, p.dtype, p.units, sharding.fitting(p)) for p in (was, parameters))
    if ours != theirs:
        raise ValueError(
            f"this optimizer has state for {was.description}, but was given {parameters.description}; "
            "use one optimizer for each model"
        )


def check_gradients(parameters: FlatParameters, gradients: Array) -> None:
    """Raise unless the gradients have the shape, dtype and device of the flat parameters, and separate memory."""
    check_flat("gradients", gradients, written=True)
    if gradients.size != parameters.size:
        raise ValueError(f"gradients have {gradients.size} elements, but parameters have {parameters.size}")
    if gradients.dtype != parameters.dtype:
        raise TypeError(f"gradients are {gradients.dtype}, but parameters are {parameters.dtype}; convert one of them")
    if type(gradients) is not type(parameters.like) and (
        arrays.module_of(gradients) is not arrays.module_of(parameters.like)
    ):
        kinds = type(gradients).__name__, type(parameters.like).__name__
        raise TypeError(f"gradients are a {kinds[0]}, but parameters a {kinds[1]}; keep both on one device")
    if arrays.overlap(gradients, parameters.held):
        raise ValueError(
            "gradients share memory with the parameters, so that one would overwrite the other; give them an array of "
            "their own (gradients.copy())"
        )


def check_no_gradients(parameters: FlatParameters) -> None:
    """Raise ValueError if a backward pass has left gradients in these parameters; the caller also gave an array."""
    if parameters.gradients.has_content:
        raise ValueError(
            "these parameters have gradients of their own, from a backward pass, and step() was given an array too, "
            "now or since the last update; use one or the other, parameters.reset_gradients() forgets both"
        )


def check_reducer(parameters: FlatParameters, reducer: GradientReducer | None) -> None:
    """Raise ValueError if the reducer of another optimizer already reduces the gradients of these parameters."""
    theirs = parameters.gradients
    if theirs.progress.is_bound and theirs.has_content and theirs is not reducer:
        raise ValueError(
            "the gradients of these parameters went to another optimizer, which reduces them; "
            "call parameters.reset_gradients() and bind(parameters) of this one before the backward pass whose "
            "gradients it shall use"
        )


def check_count(count: float | None) -> None:
    """Raise ValueError unless `count` is a valid divisor of a sum of gradients."""
    if count is not None and (isinstance(count, bool | str) or not 0 < count < math.inf):
        raise ValueError(f"count={count!r}, the global number of samples, must be finite and above 0")


def check_copies(strategy: Strategy, step: int) -> None:
    """Raise RuntimeError on all ranks if copies of parameters differ.  Collective over the mesh."""
    divergent = strategy.copies.find_divergent(strategy.parameters)
    if divergent:
        first = sorted(set(divergent.values()))
        whose = f"rank {first[0]}" if len(first) == 1 else f"ranks {first}"
        raise RuntimeError(
            f"after step {step} the parameters of ranks {sorted(divergent)} differ from their copies on "
            f"{whose}: something but the optimizer has changed them, or not on all ranks; "
            "synchronize_optimizer_state() makes them the same again"
        )


def warn_if_initial_parameters_differ(mesh: Mesh, parameters: FlatParameters) -> None:
    """Warn on rank 0 if data ranks start from different parameters, which those of data rank 0 will replace.

    Collective over the mesh: where Python makes errors of warnings, all ranks raise it.
    """
    if parameters.sharded is not None or mesh.data.size == 1:
        return
    own = parameters.digest()
    most, least = mesh.data.all_reduce(np.array([own, -own], np.int64), op="max", label="control").tolist()
    differ: bool = most != -least
    if mesh.data.size < mesh.size:  # each stage and slice has its own data axis
        differ = on_any(mesh.world, differ)
    if differ:
        with raised_on_all(mesh.world):
            if mesh.rank == 0:
                warnings.warn(
                    "initial parameters differ between ranks; using rank 0's.  If intended, broadcast them first "
                    "(mesh.world.broadcast(start)); otherwise use one seed on all ranks",
                    RuntimeWarning,
                    stacklevel=users_level(),
                )


def check_saved_rule(
    name: str, own: Collection[str], saved: str, saved_slots: Collection[str], needed: Collection[str]
) -> None:
    """Raise ValueError unless the saved state is of a rule of this name with these slots.

    `needed` are the saved slots without which no rule continues.
    """
    if (saved, sorted(needed)) != (name, sorted(own)):
        theirs, ours = (brief(", ".join(sorted(names)) or "none") for names in (saved_slots, own))
        raise ValueError(
            f"the state is of the rule {brief(saved)} (slots: {theirs}), but this optimizer has {name} "
            f"(slots: {ours}); make the rule as it was when it was saved, or load only the parameters: "
            "load_checkpoint(folder, parameters, mesh=mesh)"
        )


def name_of_kind(rule: Any) -> str:
    """What a saved state is of, for a message: `laplace` by its name, others by those of their rules."""
    return "laplace" if rule == DoublePass.__name__ else brief(rule)


def check_problem(problem: Any) -> None:
    """Raise TypeError unless an object, which a user gave to `optimize`, can be minimised."""
    if not hasattr(problem, "minimize"):
        raise TypeError(f"optimize takes an OptimizationProblem, got {type(problem).__name__}")
