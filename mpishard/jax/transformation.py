"""What a transformation of optax keeps, whether it treats each element by itself, and its options as a text."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# By the names of optax: what looks at whole tensors, or at which tensor it is, and what mpishard has for it.
_WHOLE_TENSORS = {
    "clip_by_global_norm": "ShardingConfiguration(mesh, max_gradient_norm=...) clips",
    "clip_by_block_rms": "ShardingConfiguration(mesh, max_gradient_norm=...) clips by the norm of all gradients",
    "adaptive_grad_clip": "ShardingConfiguration(mesh, max_gradient_norm=...) clips by the norm of all gradients",
    "per_example_global_norm_clip": "ShardingConfiguration(mesh, max_gradient_norm=...) clips",
    "scale_by_trust_ratio": "mpishard.LAMB has trust ratios",
    "apply_if_finite": 'ShardingConfiguration(mesh, nonfinite_gradients="skip") leaves such steps out',
    "zero_nans": 'ShardingConfiguration(mesh, nonfinite_gradients="skip") leaves such steps out',
}
_CHOICES = {"masked", "partition", "multi_transform", "selective_transform"}
# They only hold others.
_AROUND = ("chain", "named_chain", "with_extra_args_support", "identity")
_DEEPEST, _SHOWN = 12, 9  # chains within chains; elements of an array
_LENGTH = 509  # of no array that a transformation would have for other reasons
_PLAIN = (bool, int, float, str, np.generic)


class Kept(NamedTuple):
    """The state of a transformation for one flat array.

    Parameters
    ----------
    structure : PyTreeDef
        Of the state.
    slots : dict of str to int
        Arrays as large as the parameters: by name their number among the leaves.
    common : tuple of int
        The numbers of the other leaves, such as counts, which are the same for all elements.
    """

    structure: Any
    slots: dict[str, int]
    common: tuple[int, ...]


def chooser_in(transformation: Any) -> str:
    """The name of what chooses tensors in a transformation, as masks do; empty if nothing does.  Not collective.

    Parameters
    ----------
    transformation : optax.GradientTransformation
        Of any kind.

    Returns
    -------
    str
        Such as ``"masked"``.

    Raises
    ------
    TypeError
        If it is no transformation.
    """
    if not (callable(getattr(transformation, "init", None)) and callable(getattr(transformation, "update", None))):
        raise TypeError(f"rule_of needs a transformation such as optax.adamw(1e-3), got {_shown(transformation)}")
    return next((name for name in _names(transformation) if name in _CHOICES), "")


def checked(transformation: Any, whole: Any = None) -> Kept:
    """What an element-wise transformation keeps.  Not collective.

    Parameters
    ----------
    transformation : optax.GradientTransformation
        For flat arrays.
    whole : optax.GradientTransformation, optional
        Of which it is a part, for messages.

    Returns
    -------
    Kept
        The same for arrays of any size.

    Raises
    ------
    TypeError
        If it cannot take a step of a flat array.
    ValueError
        If what it does to an element depends on others, on the tensor, or on its shape.
    """
    names = list(dict.fromkeys(_names(transformation if whole is None else whole)))
    what = f"optax's {', '.join(names) or 'transformation'}"
    try:
        flat = _kept(transformation, (_LENGTH,))
        grid = _kept(transformation, (_LENGTH, _LENGTH + 2))
        alone, together, state = _runs(transformation)
    except Exception as error:
        raise TypeError(f"{what} cannot take a step of a flat array: {type(error).__name__}: {error}") from None
    why = ""
    if flat != grid:
        why = "what it keeps depends on the shapes of tensors"
    elif not all(_close(a[0], b[0], beside=b[1]) for a, b in zip(alone, together, strict=True)):
        why = "what it does to an element depends on others"
    elif not all(_close(_numbers(state[number])[:1], state[number]) for number in flat.common):
        why = "what it counts depends on gradients"
    if why:
        instead = next((text for name, text in _WHOLE_TENSORS.items() if name in names), "")
        raise ValueError(
            f"{what} cannot be divided over ranks: {why}; {instead or 'use transformations of single elements'}"
        )
    return flat


def described(thing: Any) -> str:
    """A transformation, a schedule or a number as a text: names and options, the same on all ranks.  Not collective.

    Parameters
    ----------
    thing : object
        As it was given to optax.

    Returns
    -------
    str
        Without memory addresses.
    """
    return _described(thing, 0)


def _kept(transformation: Any, shape: tuple[int, ...]) -> Kept:
    """What it keeps for parameters of this shape, of which nothing is made."""
    parameters = jax.ShapeDtypeStruct(shape, jnp.float32)
    paths, structure = jax.tree_util.tree_flatten_with_path(jax.eval_shape(transformation.init, parameters))
    own = getattr(transformation, "path", ())  # to the one leaf of a tree
    slots, common = [], []
    for number, (path, leaf) in enumerate(paths):
        if leaf.size != math.prod(shape):
            common.append(number)
        elif jnp.issubdtype(leaf.dtype, jnp.floating):
            slots.append((path[: len(path) - len(own)] if path[len(path) - len(own) :] == own else path, number))
        else:
            raise TypeError(f"it keeps an array of {leaf.dtype}")
    last = [_path(path[-1:]) for path, _ in slots]
    short = len(set(last)) == len(last) and not set(last) & {"ema", "point"}  # which mpishard has itself
    named: dict[str, int] = {}
    for path, number in slots:
        # Checkpoints have data sets of these names.
        name = wanted = re.sub(r"\W", "_", _path(path[-1:]) if short else _path(path), flags=re.ASCII)
        for again in itertools.count(2):
            if name not in named:
                break
            name = f"{wanted}_{again}"
        named[name] = number
    return Kept(structure, named, tuple(common))


def _path(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".") or "state"


def _runs(transformation: Any) -> tuple[Any, Any, list[Any]]:
    """Updates and parameters of some steps, of single elements and of two tensors; common state of the elements.

    There is a NaN among the gradients.
    """
    random = np.random.default_rng(0)
    start, slopes = (random.standard_normal(shape).astype(np.float32) for shape in ((8,), (5, 8)))
    slopes *= np.array([1.0, 1e-6, 1e6, 1e3, 1.0], np.float32)[:, None]  # what clips only large ones shows
    slopes[3, 0] = np.nan

    def step(tree: Any, state: Any, gradients: Any) -> tuple[Any, Any, Any]:
        updates, state = transformation.update(gradients, state, tree)
        return updates, jax.tree.map(jnp.add, tree, updates), state

    def run(tree: Any, gradients: list[Any], over: Any) -> tuple[list[Any], Any]:
        begin, advance = jax.jit(over(transformation.init)), jax.jit(over(step))
        state, path = begin(tree), []
        for each in gradients:
            updates, tree, state = advance(tree, state, each)
            path.append([_joined(updates), _joined(tree)])
        return path, state

    def cut(values: np.ndarray) -> Any:
        """A matrix and a vector, but for what knows its tree."""
        return values if hasattr(transformation, "path") else {"a": values[:6].reshape(2, 3), "b": values[6:]}

    alone, state = run(start[:, None], list(slopes[:, :, None]), jax.vmap)
    together, _ = run(cut(start), [cut(slope) for slope in slopes], lambda function: function)
    return alone, together, jax.tree.leaves(state)


def _joined(tree: Any) -> np.ndarray:
    return np.concatenate([np.reshape(leaf, -1) for leaf in jax.tree.leaves(tree)])


def _close(one: Any, other: Any, beside: Any = 0.0) -> bool:
    """Whether numbers are the same but for roundings, those of larger ones of which they are differences, too."""
    one, other = _numbers(one), _numbers(other)
    rounding = 1e-4 * _largest(other) + 2.5e-7 * _largest(_numbers(beside))
    return np.allclose(one, other, rtol=1e-4, atol=rounding, equal_nan=True)


def _largest(values: np.ndarray) -> float:
    return float(np.max(np.abs(values), initial=0.0, where=np.isfinite(values)))


def _numbers(values: Any) -> np.ndarray:
    if isinstance(values, jax.Array) and jnp.issubdtype(values.dtype, jax.dtypes.prng_key):
        values = jax.random.key_data(values)
    return np.asarray(values, np.float64)


# -- names and options, which optax has in closures only --------------------------------------------------------------


def _names(thing: Any, depth: int = 0) -> Iterator[str]:
    """The names of the transformations in a transformation, those of a chain in their order."""
    if depth > _DEEPEST:
        return
    if isinstance(thing, dict):
        thing = tuple(thing.values())
    if _is_transformation(thing):
        name, options = _name_and_options(thing)
        if name not in _AROUND:
            yield name
        yield from _names(options, depth + 1)
    elif isinstance(thing, list | tuple):
        for each in thing:
            yield from _names(each, depth + 1)
    elif inspect.isfunction(thing) and thing.__name__.startswith("update"):
        if (name := _name(thing)) not in _AROUND:
            yield name
        yield from _names(_options(thing), depth + 1)


def _described(thing: Any, depth: int) -> str:
    if thing is None or isinstance(thing, _PLAIN):
        return repr(thing.item() if isinstance(thing, np.generic) else thing)
    if isinstance(thing, np.ndarray | jax.Array):
        return str(np.asarray(thing).tolist()) if thing.size < _SHOWN else f"array of shape {thing.shape}"
    if depth > _DEEPEST:
        return "..."
    if isinstance(thing, dict):
        return f"{{{', '.join(f'{name}: {_described(each, depth + 1)}' for name, each in thing.items())}}}"
    if _is_transformation(thing) or inspect.isfunction(thing):
        named = _name_and_options(thing) if _is_transformation(thing) else (_name(thing), _options(thing))
        texts = [(name, _described(each, depth + 1)) for name, each in sorted(named[1].items())]
        if named[0] in _AROUND and len(texts) == 1:
            return f"{named[0]}{texts[0][1]}" if "chain" in named[0] else texts[0][1]
        return f"{named[0]}({', '.join(f'{name}={text}' for name, text in texts)})"
    if isinstance(thing, list | tuple):
        return f"({', '.join(_described(each, depth + 1) for each in thing)})"
    if isinstance(thing, functools.partial):
        return f"partial{_described((thing.func, *thing.args, dict(thing.keywords)), depth + 1)}"
    return type(thing).__name__


def _is_transformation(thing: Any) -> bool:
    return not isinstance(thing, dict | type) and callable(getattr(thing, "update", None)) and hasattr(thing, "init")


def _name_and_options(transformation: Any) -> tuple[str, dict[str, Any]]:
    """The function of optax that has made it, and what that was given; or the class and its attributes."""
    made = [each for each in (transformation.init, transformation.update) if inspect.isfunction(each)]
    if len(made) < 2:
        owner = getattr(transformation.update, "__self__", transformation)
        return type(owner).__name__, dict(getattr(owner, "__dict__", {}))
    options = {name: value for function in made for name, value in _options(function).items()}
    inner = ("init_fn", "init_fns", "update_fn", "init", "update")  # functions beside them
    return _name(made[1]), {name: value for name, value in options.items() if name not in inner}


def _name(function: Callable[..., Any]) -> str:
    """That of the function which has made this one, or its own."""
    return function.__qualname__.partition(".<locals>")[0].rpartition(".")[2]


def _options(function: Callable[..., Any]) -> dict[str, Any]:
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not set yet
            continue
    return found


def _shown(thing: Any) -> str:
    return f"the function {thing.__name__}" if inspect.isfunction(thing) else f"a {type(thing).__name__}"
