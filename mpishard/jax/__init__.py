"""JAX on MPI ranks: `as_distributed` for your own loop, `problem` for `optimize`, `rule_of` for optax.

Input: a function of JAX, a pytree of parameters, a rule or a transformation of optax.
Output: the pytree after each step, the same on all ranks; memory is shared, not copied, where JAX allows.

Read ``tree`` first, then ``distributed``, for users' loops, and ``problem``, for `optimize`; ``optax_rule`` last.

JAX is imported with the first of these names; optax never, since its transformations are given.
"""

from typing import TYPE_CHECKING

from mpishard.lazy import names_when_used

if TYPE_CHECKING:
    from mpishard.jax.distributed import TreeOptimizer, as_distributed
    from mpishard.jax.optax_rule import rule_of
    from mpishard.jax.problem import problem
    from mpishard.jax.tree import parameters_of, tree_of

__all__ = ["TreeOptimizer", "as_distributed", "parameters_of", "problem", "rule_of", "tree_of"]

if not TYPE_CHECKING:  # a type checker has the names from above
    __getattr__ = names_when_used(
        __name__,
        {
            "distributed": "TreeOptimizer as_distributed",
            "optax_rule": "rule_of",
            "problem": "problem",
            "tree": "parameters_of tree_of",
        },
        needs="JAX",
    )


def __dir__() -> list[str]:
    return list(__all__)
