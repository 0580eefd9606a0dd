"""`as_distributed` for pytrees of JAX, and the replacement of an optimizer of optax in the user's own loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpishard.comm.agreement import opening
from mpishard.comm.mesh import Mesh
from mpishard.data_parallel.configuration import ShardingConfiguration
from mpishard.data_parallel.models import configuration_of, optimizer_of_whole_model
from mpishard.data_parallel.sharded_optimizer import ShardedOptimizer
from mpishard.jax.optax_rule import rule_of
from mpishard.jax.tree import TreeLeaves, TreeState
from mpishard.parameters.flat import FlatParameters
from mpishard.training.saving import load_checkpoint, save_checkpoint


class TreeOptimizer:
    """Trains a pytree of parameters on all ranks of a mesh; made by `as_distributed`.

    Every method is collective over the mesh unless its docstring says otherwise.

    Parameters
    ----------
    state : TreeState
        Of the parameters.
    optimizer : ShardedOptimizer
        Bound to them.

    Attributes
    ----------
    optimizer : ShardedOptimizer
        That of mpishard, with `steps`, `gradient_norm`, `rule` and the rest.
    """

    def __init__(self, state: TreeState, optimizer: ShardedOptimizer) -> None:
        self._state = state
        self.optimizer = optimizer

    @property
    def parameters(self) -> FlatParameters:
        """The parameters, by the paths to the leaves, as views into one flat array."""
        return self._state.parameters

    @property
    def tree(self) -> Any:
        """The parameters now, as a pytree like the one that was given: arrays of JAX, which later steps do not change.

        They are copies, made anew each time.
        """
        return self._state.tree

    def step(self, gradients: Any, *, count: float | None = None) -> Any:
        """Average the gradients over the ranks, and update the parameters.

        Parameters
        ----------
        gradients : pytree
            Of the loss of this rank's samples, like the tree.  A rank without samples gives zeros.
        count : float, optional
            Divides the sum of the gradients of all ranks: the global number of samples where the loss is a sum over
            samples.  Default: the number of data ranks, for a loss that is a mean over a rank's samples.

        Returns
        -------
        pytree
            The new parameters, as `tree`.

        Raises
        ------
        TypeError, ValueError
            On every rank, if the gradients of any rank are not like the parameters; nothing is updated then.
        FloatingPointError
            On every rank, if any gradient is NaN or infinite, as for `ShardedOptimizer.step`.
        """
        self._state.unfit = None
        try:
            self._state.add(self._state.leaves_of(gradients))
        except Exception as error:  # of the program that computes them, too
            self._state.unfit = error
        try:
            self.optimizer.step(self.parameters, count=count)
        except Exception:
            self.parameters.reset_gradients()
            raise
        finally:
            self._state.unfit = None
        return self.tree

    def save_checkpoint(self, folder: str | Path, **options: Any) -> Path:
        """Write a checkpoint of parameters and optimizer state, which any number of ranks can load.

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
        """
        return save_checkpoint(folder, self.parameters, self.optimizer, **options)

    def load_checkpoint(self, folder: str | Path) -> dict[str, Any]:
        """Read the newest complete checkpoint into the parameters and the optimizer; `tree` has them then.

        Parameters
        ----------
        folder : path
            As for `mpishard.load_checkpoint`.

        Returns
        -------
        dict
            The facts of the checkpoint.
        """
        return load_checkpoint(folder, self.parameters, self.optimizer)


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
        steps each rank then takes for its part; or an optimizer of this mesh with its own options, such as
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
    with opening(config.mesh.world, "as_distributed") as same:  # a transformation of the user's may raise, too
        leaves = TreeLeaves.of(tree)
        if callable(getattr(rule, "update", None)) and callable(getattr(rule, "init", None)):
            rule = rule_of(rule, tree=tree)
        optimizer = optimizer_of_whole_model("a pytree of JAX", rule, config, zero)
        same |= {"zero": zero, **leaves.described}
    state = TreeState(leaves)
    optimizer.bind(state.parameters)
    return TreeOptimizer(state, optimizer)
