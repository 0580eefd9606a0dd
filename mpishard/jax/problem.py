"""A function of JAX as an `OptimizationProblem`, for the training loops of mpishard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from mpishard.backend import array as arrays
from mpishard.io import log
from mpishard.jax.tree import TreeLeaves, TreeState, as_jax
from mpishard.parameters.flat import FlatParameters
from mpishard.training.objective import ObjectiveOptions
from mpishard.training.problem import OptimizationProblem
from mpishard.training.step_runner import check_data

_MANY_SHAPES = 8


def problem(
    tree: Any,
    value_and_grad: Callable[..., tuple[Any, Any]],
    batch: Callable[[np.ndarray], tuple[Any, ...]],
    samples: int,
    batch_size: int,
    *,
    facts: Mapping[str, Any] | None = None,
    **options: Unpack[ObjectiveOptions],
) -> OptimizationProblem[FlatParameters]:
    """The problem of training a function of JAX: for ``optimizer.optimize(problem)`` of any optimizer of mpishard.

    Not collective.  The function is compiled by `jax.jit`, once for each shape of a batch.  A run has few of them: all
    micro-batches have `micro_batch_size` samples but the last; or, without it, ranks have shares of two sizes.

    Parameters
    ----------
    tree : pytree
        The parameters, as for `mpishard.jax.parameters_of`.
    value_and_grad : callable
        ``value_and_grad(tree, *batch(samples))`` returns the summed loss of these samples, a scalar, and its gradient,
        a pytree like `tree`: what ``jax.value_and_grad(summed_loss)`` makes.  JAX must be able to trace it.
    batch : callable
        ``batch(samples)`` returns the other arguments of the function, a tuple of arrays or pytrees; `samples` are
        indices, int64.  `mpishard.data.ReadAhead` reads them ahead.
    samples, batch_size : int
        All samples, and those of a step over all ranks.
    facts : mapping, optional
        As for `OptimizationProblem`.
    **options
        As for `OptimizationProblem`: micro_batch_size, steps, tolerance, seconds, seed, tokens_per_sample.

    Returns
    -------
    OptimizationProblem
        Its start has copies of the parameters; ``tree_of(result.parameters)`` is the tree that was trained.

    Raises
    ------
    TypeError, ValueError
        If the tree or an argument is unfit.
    """
    for name, each in (("value_and_grad", value_and_grad), ("batch", batch)):
        if not callable(each):
            raise TypeError(f"{name} must be a function, got {type(each).__name__}")
    state = TreeState(TreeLeaves.of(tree))
    function = LossAndGradient(state, value_and_grad, batch)
    expect = getattr(batch, "expect", None)
    made = OptimizationProblem(
        function, state.parameters, samples, batch_size, facts=facts or {}, expect=expect, **options
    )
    check_data(None, batch, made.samples)
    return made


class LossAndGradient:
    """The function of such a problem: loss and gradient of a micro-batch.  See `problem` for the arguments."""

    def __init__(
        self,
        state: TreeState,
        value_and_grad: Callable[..., tuple[Any, Any]],
        batch: Callable[[np.ndarray], tuple[Any, ...]],
    ) -> None:
        self._state = state
        self._value_and_grad = value_and_grad
        self._batch = batch
        self._shapes = 0
        # It gets the flat array, which JAX shares, and cuts it within the program.
        self._compiled: Any = jax.jit(self._of_flat)

    def __call__(self, parameters: FlatParameters, samples: np.ndarray, gradients: Any) -> float:
        """The summed loss; adds its gradient.  Ranks wait for each other in it under ZeRO-2."""
        if not len(samples):  # other ranks have some
            return 0.0
        arguments = self._batch(samples)
        if not isinstance(arguments, tuple):
            raise TypeError(f"batch(samples) must return a tuple of arguments, got a {type(arguments).__name__}")
        arrays.ready(parameters.held)
        # The optimizer will change the memory: JAX must be done with it.
        value, leaves = jax.block_until_ready(self._compiled(as_jax(parameters.flat), *arguments))
        self._state.add(leaves)
        return float(value)

    def _of_flat(self, flat: Any, *arguments: Any) -> tuple[Any, list[Any]]:
        """Value and leaves of the gradient; runs once for each shape of a batch, while JAX traces it."""
        self._shapes += 1
        if self._shapes == _MANY_SHAPES and self._state.rank == 0:
            log.inform(
                f"JAX has compiled the function for {_MANY_SHAPES} shapes of a batch, and will for each other: let "
                "batch(samples) pad what it returns to a few shapes"
            )
        found = self._value_and_grad(self._state.cut(flat), *arguments)
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise TypeError(
                "value_and_grad must return a value and its gradient, as jax.value_and_grad(function) does, got a "
                f"{type(found).__name__}"
            )
        value, gradients = found
        if (
            isinstance(value, tuple | list | dict)
            or jnp.shape(value) != ()
            or not jnp.issubdtype(jnp.result_type(value), jnp.floating)
        ):
            got = (
                f"a {type(value).__name__} (has_aux=True has no place here)"
                if isinstance(value, tuple | list | dict)
                else f"{jnp.result_type(value)} of shape {jnp.shape(value)}"
            )
            raise TypeError(f"the value of value_and_grad must be the summed loss, one real number, got {got}")
        return value, self._state.leaves_of(gradients)
