"""What takes the place of an optimizer of optax in a training loop of the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpishard.data_parallel.sharded_optimizer import ShardedOptimizer
from mpishard.jax.tree_state import TreeState
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
