"""JAX on MPI ranks: `as_distributed` for your own loop, `problem` for `optimize`, `rule_of` for optax.

Input: a function of JAX, a pytree of parameters, a rule or a transformation of optax.
Output: the pytree after each step, the same on all ranks; memory is shared, not copied, where JAX allows.

Read ``tree`` first, then ``distributed``, for users' loops, and ``problem``, for `optimize`; ``optax_rule`` last.

JAX is imported with the first of these names; optax never, since its transformations are given.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpishard.jax.distributed import TreeOptimizer, as_distributed
    from mpishard.jax.optax_rule import rule_of
    from mpishard.jax.problem import problem
    from mpishard.jax.tree import parameters_of, tree_of

__all__ = ["TreeOptimizer", "as_distributed", "parameters_of", "problem", "rule_of", "tree_of"]

_MODULE_OF = {
    "TreeOptimizer": "distributed",
    "as_distributed": "distributed",
    "parameters_of": "tree",
    "problem": "problem",
    "rule_of": "optax_rule",
    "tree_of": "tree",
}


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            import jax  # noqa: F401
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"mpishard.jax.{name} needs JAX: pip install 'mpishard[jax]'", name=error.name
            ) from None
        found = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = found  # `problem` is also the name of its file
        return found


def __dir__() -> list[str]:
    return list(__all__)
