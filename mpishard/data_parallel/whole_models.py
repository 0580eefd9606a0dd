"""The optimizer of a model that each rank has whole, as those of PyTorch and JAX."""

from __future__ import annotations

from typing import Any

from mpishard.comm.mesh import Mesh
from mpishard.data_parallel.configuration import ShardingConfiguration
from mpishard.data_parallel.optimizers import ZeRO1Optimizer, ZeRO2Optimizer, optimizer_of
from mpishard.data_parallel.sharded_optimizer import ShardedOptimizer
from mpishard.optim import Rule


def configuration_of(mesh: Any) -> ShardingConfiguration:
    """The configuration that a mesh stands for.  Not collective.

    Parameters
    ----------
    mesh : Mesh or ShardingConfiguration
        A configuration is returned as it is.

    Returns
    -------
    ShardingConfiguration
        For a fast network.

    Raises
    ------
    TypeError
        If it is neither.
    """
    if isinstance(mesh, Mesh):
        return ShardingConfiguration.create_for_high_bandwidth(mesh)
    return ShardingConfiguration.of(mesh)


def optimizer_for(what: str, rule: Any, config: ShardingConfiguration, zero: int) -> ShardedOptimizer:
    """The optimizer for these arguments of an `as_distributed`.  Not collective.

    Parameters
    ----------
    what : str
        The model, for messages.
    rule : Rule or ShardedOptimizer
        An optimizer is returned as it is.
    config : ShardingConfiguration
        Of a mesh whose ranks are all data-parallel.
    zero : int
        0, 1 or 2.

    Returns
    -------
    ShardedOptimizer
        Of the mesh.

    Raises
    ------
    TypeError, ValueError
        If an argument is unfit, or they do not go together.
    """
    mesh = config.mesh
    if mesh.data.size < mesh.size:
        raise ValueError(f"{what} is data-parallel, but the mesh is {mesh.sizes}; make it with tensor=1 and pipeline=1")
    if isinstance(zero, bool) or zero not in (0, 1, 2):
        raise ValueError(
            f"zero={zero!r} must be 0, 1 or 2; ZeRO-3, whose parameters come and go, needs a model that asks for them, "
            "such as mpishard.nn.GPT"
        )
    if isinstance(rule, ShardedOptimizer):
        if rule.mesh is not mesh or zero:
            raise ValueError(f"the {type(rule).__name__} brings its own mesh and strategy: give that mesh, and no zero")
        return rule
    if not isinstance(rule, Rule):
        raise TypeError(f"rule must be an update rule such as mpishard.AdamW(lr=1e-3), got {type(rule).__name__}")
    if zero and config.sync_every > 1:
        raise ValueError(
            f"sync_every={config.sync_every} lets ranks take steps by themselves, and zero={zero} divides a state that "
            "all share; use one of the two"
        )
    return {1: ZeRO1Optimizer, 2: ZeRO2Optimizer}[zero](rule, config) if zero else optimizer_of(rule, config)
