"""`as_distributed` for pytrees of JAX."""

from __future__ import annotations

from typing import Any

from mpishard.comm.agreement import agree_on_settings
from mpishard.comm.mesh import Mesh
from mpishard.data_parallel.configuration import ShardingConfiguration
from mpishard.data_parallel.whole_models import configuration_of, optimizer_for
from mpishard.jax.memory import array_module
from mpishard.jax.optax_rule import rule_of
from mpishard.jax.tree_leaves import TreeLeaves
from mpishard.jax.tree_optimizer import TreeOptimizer
from mpishard.jax.tree_state import TreeState


def as_distributed(tree: Any, mesh: Mesh | ShardingConfiguration, rule: Any, *, zero: int = 0) -> TreeOptimizer:
    """Make a pytree of parameters train on all ranks of a mesh; what is returned takes the place of its optimizer.

    The values of rank 0 become those of all ranks.

    Collective over the mesh.

    Parameters
    ----------
    tree : pytree
        Of arrays of JAX or NumPy, all float32 or all float64, on one device.  They are copied.
    mesh : Mesh or ShardingConfiguration
        Data-parallel only.  Settings such as `max_gradient_norm`, which clips, are in a configuration; a mesh alone
        stands for ``ShardingConfiguration.create_for_high_bandwidth(mesh)``.
    rule : Rule, optax.GradientTransformation or ShardedOptimizer
        Such as ``mpishard.AdamW(lr=1e-3)``; or an element-wise transformation such as ``optax.adamw(1e-3)``, whose
        steps each rank then takes for its part; or an optimizer of this mesh with options of its own, such as
        ``LocalSGDOptimizer(rule, mesh, outer=...)``.
    zero : int
        What ranks divide: 0 nothing (DDP), 1 the optimizer state, 2 the gradients too.

    Returns
    -------
    TreeOptimizer
        With `step` and `tree`.

    Raises
    ------
    TypeError, ValueError
        On every rank, if the tree or an argument of any rank is unfit, or they differ between ranks.
    """
    config = configuration_of(mesh)
    problem: Exception | None = None
    optimizer, leaves, own = None, None, {}
    try:
        leaves = TreeLeaves.of(tree)
        array_module(leaves.platform)  # raises for a device that has no arrays
        if callable(getattr(rule, "update", None)) and callable(getattr(rule, "init", None)):
            rule = rule_of(rule, tree=tree)
        optimizer = optimizer_for("a pytree of JAX", rule, config, zero)
        own = {"zero": str(zero), **leaves.described}
    except Exception as error:  # of a transformation of the user's, too
        problem = error
    agree_on_settings(config.mesh.world, own, problem, what="tree and arguments of as_distributed")
    assert optimizer is not None and leaves is not None
    state = TreeState(leaves)
    optimizer.bind(state.parameters)
    return TreeOptimizer(state, optimizer)
