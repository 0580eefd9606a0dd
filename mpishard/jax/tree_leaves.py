"""The leaves of a pytree of parameters by name, and the checks that mpishard can train them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from mpishard.jax.memory import check_precision


@dataclass(frozen=True)
class TreeLeaves:
    """The leaves of a pytree whose parameters can be trained.

    Parameters
    ----------
    structure : PyTreeDef
        Of the tree.
    named : dict of str to array
        The leaves in the order of the tree.  A name is the path to the leaf, such as ``layers.0.weight``; an array
        alone has the name ``parameters``.
    """

    structure: Any
    named: dict[str, Any]

    @classmethod
    def of(cls, tree: Any) -> TreeLeaves:
        """The leaves of a pytree; nothing is changed.  Not collective.

        Parameters
        ----------
        tree : pytree
            Of arrays of JAX or NumPy.

        Returns
        -------
        TreeLeaves
            Checked.

        Raises
        ------
        TypeError
            If a leaf is no array, or they are not all float32 or all float64.
        ValueError
            If there is none, two have one name, they are on several devices or deleted, or they are float64 and JAX
            computes in float32.
        """
        paths, structure = jax.tree_util.tree_flatten_with_path(tree)
        if not paths:
            raise ValueError(f"there are no parameters: this {type(tree).__name__} has no leaves")
        named: dict[str, Any] = {}
        for path, leaf in paths:
            name = name_of(path)
            if name in named:
                raise ValueError(f"two parameters have the name {name!r}; give the keys of dicts other names")
            named[name] = leaf
        for name, leaf in named.items():
            _check_leaf(name, leaf)
        _check_dtypes(named)
        _check_devices(named)
        return cls(structure, named)

    @property
    def described(self) -> dict[str, str]:
        """What must be the same on all ranks, as text by name."""
        each = [f"{name} {leaf.shape} {leaf.dtype}" for name, leaf in self.named.items()]
        mark = hashlib.blake2b("\n".join(each).encode(), digest_size=4).hexdigest()
        size = sum(leaf.size for leaf in self.named.values())
        return {"parameters": f"{len(each)} arrays of {size} elements [{mark}]"}

    @property
    def platform(self) -> str:
        """The platform of all leaves, as JAX names it."""
        return next((_platforms(leaf)[0] for leaf in self.named.values() if isinstance(leaf, jax.Array)), "cpu")


def name_of(path: Any) -> str:
    """The name of a leaf.  Not collective.

    Parameters
    ----------
    path : tuple
        As `jax.tree_util.tree_flatten_with_path` gives it.

    Returns
    -------
    str
        Its keys with dots between them.
    """
    return jax.tree_util.keystr(path, simple=True, separator=".") or "parameters"


def _check_leaf(name: str, leaf: Any) -> None:
    """Raise unless this is an array with values."""
    if not isinstance(leaf, jax.Array | np.ndarray):
        raise TypeError(
            f"parameter {name!r} is a {type(leaf).__name__}, and must be an array of JAX or NumPy; keep what is not "
            "trained out of the tree, as equinox.partition does"
        )
    if isinstance(leaf, jax.core.Tracer):
        raise TypeError(f"parameter {name!r} has no values under jit, grad or vmap: give the tree outside of them")
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise ValueError(
            f"parameter {name!r} was deleted, as jit with donate_argnums does; give an array that is there"
        )


def _check_dtypes(named: dict[str, Any]) -> None:
    """Raise TypeError unless all leaves are float32, or all float64."""
    of_dtype: dict[str, str] = {}
    for name, leaf in named.items():
        of_dtype.setdefault(str(leaf.dtype), name)
    unfit = {dtype: name for dtype, name in of_dtype.items() if dtype not in ("float32", "float64")}
    found = " and ".join(f"{name!r} is {dtype}" for dtype, name in (unfit or of_dtype).items())
    if unfit:
        raise TypeError(
            f"parameters must be float32 or float64, but {found}; keep what is not trained out of the tree, and cast "
            "to other dtypes in the function"
        )
    if len(of_dtype) > 1:
        raise TypeError(f"parameters must have one dtype, but {found}; cast them: jax.tree.map(jnp.float32, tree)")
    check_precision(next(iter(of_dtype)))


def _check_devices(named: dict[str, Any]) -> None:
    """Raise ValueError unless all leaves of JAX are on one device."""
    on: dict[str, str] = {}
    for name, leaf in named.items():
        if isinstance(leaf, jax.Array):
            for device in leaf.devices():
                on.setdefault(str(device), name)
    if len(on) > 1:
        found = " and ".join(f"{name!r} on {device}" for device, name in list(on.items())[:3])
        raise ValueError(
            f"all parameters must be on one device, here {found}: jax.device_put(tree, jax.devices()[0]); mpishard "
            "divides over ranks, each with its device"
        )


def _platforms(leaf: Any) -> list[str]:
    return sorted(device.platform for device in leaf.devices())
