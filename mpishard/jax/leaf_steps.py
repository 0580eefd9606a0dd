"""A transformation of optax that chooses tensors, as masks do: what it is for each leaf of a tree."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mpishard.jax.tree_leaves import TreeLeaves

_LENGTH = 509
_ADDRESS = re.compile(" at 0x[0-9a-fA-F]+")
_PRIMITIVE = re.compile(r"= (\w+)")
# They differ with the number of dimensions alone.
_OF_SHAPES = ("broadcast_in_dim", "jit", "pjit", "reshape", "squeeze")


class OfLeaf:
    """The part of a transformation that treats one leaf of a tree, as a transformation of a flat array.

    optax gets the tree with this leaf alone, and with None in the place of the others; it sees the number of dimensions
    of the leaf, and not its shape.

    Parameters
    ----------
    transformation : optax.GradientTransformation
        For the whole tree.
    leaves : TreeLeaves
        Of the tree.
    name : str
        Of the leaf.

    Attributes
    ----------
    path : tuple
        To the leaf in the tree, with which paths in the state end.
    """

    def __init__(self, transformation: Any, leaves: TreeLeaves, name: str) -> None:
        self._transformation = transformation
        self._structure = leaves.structure
        self._number = list(leaves.named).index(name)
        self._shape = tuple(leaves.named[name].shape)
        self.path: tuple[Any, ...] = jax.tree_util.tree_flatten_with_path(self._tree(0.0))[0][0][0]

    def init(self, values: Any) -> Any:
        """The state for a flat array."""
        return self._transformation.init(self._tree(self._as_leaf(values)))

    def update(self, gradients: Any, state: Any, values: Any) -> tuple[Any, Any]:
        """The update of a flat array, and the new state."""
        trees = [self._tree(self._as_leaf(each)) for each in (gradients, values)]
        updates, state = self._transformation.update(trees[0], state, trees[1])
        (found,) = jax.tree.leaves(updates)
        return jnp.reshape(found, values.shape), state

    @property
    def program(self) -> str:
        """The first step as a text, which is the same for leaves that are treated alike."""
        return _ADDRESS.sub("", str(self._traced((*(1,) * (len(self._shape) - 1), _LENGTH))))

    def check(self, name: str) -> None:
        """Raise ValueError if the step depends on the shape of the leaf."""
        flat, whole = (
            Counter(each for each in _PRIMITIVE.findall(program) if each not in _OF_SHAPES)
            for program in (self.program, str(self._traced(self._shape)))
        )
        if flat != whole:
            raise ValueError(
                f"what optax does to {name!r} depends on its shape {self._shape}, and cannot be divided over ranks"
            )

    def _traced(self, shape: tuple[int, ...]) -> Any:
        leaf = jax.ShapeDtypeStruct(shape, jnp.float32)

        def step(gradients: Any, values: Any) -> Any:
            tree = self._tree(values)
            return self._transformation.update(self._tree(gradients), self._transformation.init(tree), tree)

        return jax.make_jaxpr(step)(leaf, leaf)

    def _as_leaf(self, values: Any) -> Any:
        return jnp.reshape(values, (*(1,) * (len(self._shape) - 1), math.prod(values.shape)))

    def _tree(self, leaf: Any) -> Any:
        others = [None] * self._structure.num_leaves
        return jax.tree.unflatten(self._structure, [*others[: self._number], leaf, *others[self._number + 1 :]])


def alike(transformation: Any, leaves: TreeLeaves) -> Mapping[str, Sequence[str]]:
    """The names of leaves that a transformation treats alike, by the name of the first of them.  Not collective.

    Parameters
    ----------
    transformation : optax.GradientTransformation
        For the tree.
    leaves : TreeLeaves
        Of the tree.

    Returns
    -------
    mapping of str to sequence of str
        In the order of the leaves.

    Raises
    ------
    TypeError
        If the transformation cannot take a step of such a tree.
    ValueError
        If what it does to a leaf depends on the shape of the leaf.
    """
    first: dict[str, str] = {}
    found: dict[str, list[str]] = {}
    for name in leaves.named:
        try:
            part = OfLeaf(transformation, leaves, name)
            program = part.program
        except Exception as error:
            raise TypeError(
                f"optax cannot take a step of this tree, at {name!r}: {type(error).__name__}: {error}"
            ) from None
        part.check(name)
        found.setdefault(first.setdefault(program, name), []).append(name)
    return found
