"""Transformations of optax as update rules: each rank takes the step of optax on the elements that it updates."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from mpishard.backend import array as arrays
from mpishard.jax.tree import TreeLeaves, as_array, as_jax, check_precision
from mpishard.optim import Rule
from mpishard.optim.rule import ADDRESS, LearningRate, ParameterGroup

Array = Any


_LENGTH = 509
_PRIMITIVE = re.compile(r"= (\w+)")
_OPERAND = re.compile(r" (-?(?:\d[\w.+-]*|inf|nan|True|False)):\w+\[\]")  # a number that the text shows
# They differ with the number of dimensions alone.
_OF_SHAPES = ("broadcast_in_dim", "jit", "pjit", "reshape", "squeeze")


class OfLeaf:
    """The part of a transformation that treats one leaf of a tree, as a transformation of a flat array.

    optax gets the tree with this leaf alone, and with None in the place of the others; it sees the number of dimensions
    of the leaf, and not its shape.  `path` leads to the leaf in the tree; paths in the state end with it.
    """

    def __init__(self, transformation: Any, leaves: TreeLeaves, name: str) -> None:
        self._transformation = transformation
        self._structure = leaves.structure
        self._number = list(leaves.named).index(name)
        self._shape = tuple(leaves.named[name].shape)
        self._flat_shape = (*(1,) * (len(self._shape) - 1), _LENGTH)
        self.path: tuple[Any, ...] = jax.tree_util.tree_flatten_with_path(self._tree(0.0))[0][0][0]

    def init(self, values: Any) -> Any:
        return self._transformation.init(self._tree(self._as_leaf(values)))

    def update(self, gradients: Any, state: Any, values: Any) -> tuple[Any, Any]:
        """The update of a flat array, and the new state."""
        trees = [self._tree(self._as_leaf(each)) for each in (gradients, values)]
        updates, state = self._transformation.update(trees[0], state, trees[1])
        (found,) = jax.tree.leaves(updates)
        return jnp.reshape(found, values.shape), state

    @property
    def program(self) -> str:
        """The first step as a text, which is the same for leaves that are treated equally."""
        traced = self._traced(self._flat_shape)
        return ADDRESS.sub("", f"{traced} {[_numbers(each).tolist() for each in _constants(traced)]}")

    def check(self, name: str) -> None:
        """Raise ValueError if the step depends on the shape of the leaf."""
        flat, whole = map(_operations, (self._traced(self._flat_shape), self._traced(self._shape)))
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


def _constants(traced: Any) -> Iterator[Any]:
    """The arrays that a program and those within it have, such as a learning rate of JAX; its text shows none."""
    yield from getattr(traced, "consts", ())
    for equation in traced.eqns:
        for each in jax.tree.leaves(list(equation.params.values())):
            if hasattr(each, "eqns"):
                yield from _constants(each)


def _operations(traced: Any) -> tuple[Counter[str], set[Any]]:
    """What a program does to arrays of any shape: how often each primitive comes, and the numbers that it is given."""
    text, constants = str(traced), [each for each in _constants(traced) if each.size == 1]
    counts = Counter(each for each in _PRIMITIVE.findall(text) if each not in _OF_SHAPES)
    return counts, {*_OPERAND.findall(text), *(_numbers(each).item() for each in constants)}


def equal_leaves(transformation: Any, leaves: TreeLeaves) -> Mapping[str, Sequence[str]]:
    """The names of leaves that a transformation treats equally, in their order, by the name of the first of them.

    Raises TypeError if the transformation cannot take a step of such a tree, ValueError if what it does to a leaf
    depends on the leaf's shape.
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
_DEEPEST, _MOST_ELEMENTS = 12, 9  # chains within chains; elements of an array
_PLAIN = (bool, int, float, str, np.generic)


class Kept(NamedTuple):
    """The state of a transformation for one flat array."""

    structure: Any  # of the state
    slots: dict[str, int]  # arrays as large as the parameters: by name their number among the leaves
    common: tuple[int, ...]  # the numbers of the other leaves, such as counts, which are the same for all elements


def chooser_in(transformation: Any) -> str:
    """The name of the part of a transformation that chooses tensors, such as ``"masked"``; empty without one.

    Raises TypeError if it is no transformation.
    """
    if not (callable(getattr(transformation, "init", None)) and callable(getattr(transformation, "update", None))):
        is_function = inspect.isfunction(transformation)
        got = f"the function {transformation.__name__}" if is_function else f"a {type(transformation).__name__}"
        raise TypeError(f"rule_of needs a transformation such as optax.adamw(1e-3), got {got}")
    return next((name for name in _names(transformation) if name in _CHOICES), "")


def chooses_leaves(transformation: Any, leaves: TreeLeaves) -> bool:
    """Return True if a step treats leaves of equal values in different ways, as by their paths."""
    values = [np.ones((*(1,) * (len(leaf.shape) - 1), 2), np.float32) for leaf in leaves.named.values()]
    tree = jax.tree.unflatten(leaves.structure, values)
    try:
        state, found = transformation.init(tree), []
        for _ in range(2):  # a learning rate may begin at 0
            updates, state = transformation.update(tree, state, tree)
            found.append([np.reshape(each, -1) for each in jax.tree.leaves(updates)])
    except Exception:  # `checked` says why
        return False
    return not all(np.array_equal(step[0], each, equal_nan=True) for step in found for each in step)


def checked(transformation: Any, whole: Any = None) -> Kept:
    """The state of an element-wise transformation, the same for arrays of any size.

    `whole`, of which it is a part, is for messages.  Raises TypeError if it cannot take a step of a flat array,
    ValueError if what it does to an element depends on others, on the tensor, or on its shape.
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
    elif not all(_close(a[0], b[0], terms=b[1]) for a, b in zip(alone, together, strict=True)):
        why = "what it does to an element depends on others"
    elif not all(_close(_numbers(state[number])[:1], state[number]) for number in flat.common):
        why = "what it counts depends on gradients"
    if why:
        instead = next((text for name, text in _WHOLE_TENSORS.items() if name in names), "")
        raise ValueError(
            f"{what} cannot be divided over ranks: {why}; {instead or 'use transformations of single elements'}"
        )
    return flat


def _kept(transformation: Any, shape: tuple[int, ...]) -> Kept:
    """The state for parameters of this shape, of which nothing is made."""
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

    with jax.debug_nans(False), jax.debug_infs(False):  # settings of the user's, for gradients of the user's
        alone, state = run(start[:, None], list(slopes[:, :, None]), jax.vmap)
        together, _ = run(cut(start), [cut(slope) for slope in slopes], lambda function: function)
    return alone, together, jax.tree.leaves(state)


def _joined(tree: Any) -> np.ndarray:
    return np.concatenate([np.reshape(leaf, -1) for leaf in jax.tree.leaves(tree)])


def _close(one: Any, other: Any, terms: Any = 0.0) -> bool:
    """Return True if numbers are equal but for roundings, also those of larger numbers whose differences they are."""
    one, other = _numbers(one), _numbers(other)
    rounding = 1e-4 * _largest(other) + 2.5e-7 * _largest(_numbers(terms))
    return np.allclose(one, other, rtol=1e-4, atol=rounding, equal_nan=True)


def _largest(values: np.ndarray) -> float:
    return float(np.max(np.abs(values), initial=0.0, where=np.isfinite(values)))


def _numbers(values: Any) -> np.ndarray:
    return np.asarray(_on_host(values), np.float64)


def _on_host(values: Any) -> np.ndarray:
    """An array of NumPy; of a random key its numbers."""
    if isinstance(values, jax.Array) and jnp.issubdtype(values.dtype, jax.dtypes.prng_key):
        values = jax.random.key_data(values)
    return np.asarray(values)


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
        return str(_on_host(thing).tolist()) if thing.size < _MOST_ELEMENTS else f"array of shape {thing.shape}"
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
    """The function of optax that has made it with the arguments of that call; or the class and its attributes."""
    made = [each for each in (transformation.init, transformation.update) if inspect.isfunction(each)]
    if len(made) < 2:
        owner = getattr(transformation.update, "__self__", transformation)
        return type(owner).__name__, dict(getattr(owner, "__dict__", {}))
    options = {name: value for function in made for name, value in _options(function).items()}
    inner = ("init_fn", "init_fns", "update_fn", "init", "update")  # functions next to them
    return _name(made[1]), {name: value for name, value in options.items() if name not in inner}


def _name(function: Callable[..., Any]) -> str:
    """The name of the function which has made this one, or its own."""
    return function.__qualname__.partition(".<locals>")[0].rpartition(".")[2]


def _options(function: Callable[..., Any]) -> dict[str, Any]:
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not set yet
            continue
    return found


# Elements in a call of the compiled step.  It is always the same number, so that there is one program for arrays of all
# lengths, and the bits of an element do not depend on where ranks have cut.
BLOCK = 2**16


class _Formula(NamedTuple):
    """Stands in for the compiled formula of a rule."""

    name: str
    c_body: str = ""

    def expect(self, like: Array) -> None:
        """Check that JAX computes in the dtype of this array."""
        check_precision(like.dtype)


class CompiledSteps:
    """The steps of a transformation that treats each element by itself, compiled by JAX when they are first taken.

    `kept` is the transformation's state; `whole` is the one of which it is a part, if it is one.
    """

    def __init__(self, transformation: Any, whole: Any = None) -> None:
        self.transformation = transformation
        self.kept: Kept = checked(transformation, whole)
        self._common: dict[tuple[int, np.dtype], list[Any]] = {}
        self.take: Any = jax.jit(self._take, static_argnames="first")
        self._advance: Any = jax.jit(self._later_common, static_argnames="dtype")

    def common(self, step: int, dtype: np.dtype) -> list[Any]:
        """The state that is the same for all elements, such as counts, before a step (from 1), by its leaves.

        It follows from the number of steps, so that no checkpoint needs it.
        """
        if (step, dtype) not in self._common:
            self._common = {(step, dtype): self._advance(step - 1, dtype=dtype)}
        return self._common[step, dtype]

    def note(self, step: int, dtype: np.dtype, values: list[Any]) -> None:
        """Keep `values`, which `take` has returned, for `common` before this step.

        The values of the step before it are kept too, for other ranges of elements.
        """
        before = step - 1, dtype
        kept = {before: self._common[before]} if before in self._common else {}
        self._common = kept | {(step, dtype): values}

    def _take(
        self, parameters: Any, gradients: Any, slots: Any, common: Any, factor: Any, rate: Any, *, first: bool
    ) -> tuple[Any, list[Any], list[Any]]:
        """New parameters, slots and common state of a block."""
        state = self.transformation.init(parameters)
        if not first:
            leaves = jax.tree.leaves(state)
            for number, slot in zip(self.kept.slots.values(), slots, strict=True):
                leaves[number] = slot.astype(leaves[number].dtype).reshape(leaves[number].shape)
            for number, value in zip(self.kept.common, common, strict=True):
                leaves[number] = value
            state = jax.tree.unflatten(self.kept.structure, leaves)
        updates, state = self.transformation.update(gradients * factor, state, parameters)
        leaves = jax.tree.leaves(state)
        kept = [leaves[number].astype(parameters.dtype).reshape(-1) for number in self.kept.slots.values()]
        return parameters + (rate * updates).astype(parameters.dtype), kept, self._common_of(leaves)

    def _later_common(self, steps: Any, *, dtype: np.dtype) -> list[Any]:
        """The common state after `steps` steps, which no gradient changes."""
        one = np.zeros(1, dtype)

        def step(_: Any, state: Any) -> Any:
            return self.transformation.update(one, state, one)[1]

        return self._common_of(jax.tree.leaves(jax.lax.fori_loop(0, steps, step, self.transformation.init(one))))

    def _common_of(self, leaves: list[Any]) -> list[Any]:
        return [leaves[number] for number in self.kept.common]


@dataclass(frozen=True)
class OptaxRule(Rule):
    """The formula of a transformation of optax; `rule_of` makes it.

    `lr` multiplies the updates, which have optax's own learning rate already: it is 1 but for groups of tensors.
    `transformation` has the names and options of optax, `slots` the arrays that it keeps, by the names of optax, such
    as ``mu``.  `by_name` has the steps of each tensor, where they differ.
    """

    lr: LearningRate
    transformation: str
    slots: tuple[str, ...] = ()
    steps: CompiledSteps | None = field(default=None, compare=False, repr=False)
    by_name: Mapping[str, CompiledSteps] = field(default_factory=dict, compare=False, repr=False)

    @property
    def kernel(self) -> Any:
        """Stands in for the formula, which optax has."""
        return _Formula("optax")

    def scalars(self, step: int) -> tuple[float, ...]:
        """Empty: optax computes them."""
        return ()

    def learning_rate(self, step: int) -> float:
        """NaN: optax has it, and does not show it."""
        return math.nan

    def by_tensor(self, names: Sequence[str]) -> list[Rule]:
        """The rule of each tensor, see `Rule.by_tensor`."""
        rules = super().by_tensor(names)
        if not self.by_name:
            return rules
        if other := [name for name in names if name not in self.by_name] or [
            name for name in self.by_name if name not in names
        ]:
            raise ValueError(f"rule_of got another tree than the one that is trained: only one has {other[0]!r}")
        known: dict[tuple[int, int], Rule] = {}
        for name, rule in zip(names, rules, strict=True):
            steps = self.by_name[name]
            known.setdefault((id(rule), id(steps)), replace(cast(OptaxRule, rule), steps=steps, by_name={}))
        return [known[id(rule), id(self.by_name[name])] for name, rule in zip(names, rules, strict=True)]

    def configuration(self) -> dict[str, Any]:
        """The transformations and their options, as a text."""
        groups = {"groups": "; ".join(map(str, self.groups))} if self.groups else {}
        average = {} if self.ema_decay is None else {"ema_decay": self.ema_decay}
        return {"rule": "optax", "transformation": self.transformation, **groups, **average}

    def update(
        self,
        parameters: Array,
        gradients: Array,
        slots: Sequence[Array],
        step: int,
        *,
        divisor: float = 1.0,
        clip: float = 1.0,
    ) -> None:
        """Take a step in place, see `Rule.update`."""
        self._check_slots(slots)
        steps, given = self.steps, dict(zip(self.slots, slots, strict=True))
        assert steps is not None  # `by_tensor` has given each tensor its own
        slots = [given[name] for name in steps.kept.slots]
        dtype = np.dtype(parameters.dtype)
        check_precision(dtype)
        common, later = steps.common(step, dtype), None
        factor = self.lr(step) if callable(self.lr) else self.lr
        for start in range(0, parameters.size, BLOCK):
            own = [array[start : start + BLOCK] for array in (parameters, gradients, *slots)]
            values, slopes, *state = map(_block, own)
            results = steps.take(values, slopes, state, common, clip / divisor, factor, first=step == 1)
            new, kept, later = jax.block_until_ready(results)
            for target, source in zip((own[0], *own[2:]), (new, *kept), strict=True):
                target[...] = as_array(source, target)[: target.size]
        arrays.ready(parameters)  # before the last results are gone, see `as_array`; the others outlast their copies
        if later is not None:
            steps.note(step + 1, dtype, later)


def rule_of(
    transformation: Any,
    *,
    tree: Any = None,
    groups: Sequence[ParameterGroup] = (),
    ema_decay: float | None = None,
) -> OptaxRule:
    """An element-wise transformation of optax as a rule, for any optimizer of mpishard.

    Each rank takes optax's step for the elements that it updates, so that the state is divided under ZeRO, and saved
    and moved as that of other rules.  Counts, as those of schedules, follow from the number of steps.  Not collective.

    Parameters
    ----------
    transformation : optax.GradientTransformation
        Such as ``optax.adabelief(optax.cosine_decay_schedule(1e-3, 1000))``, or a chain; ``optax.adamw`` and the others
        that mpishard has are faster there.
    tree : pytree, optional
        The parameters, for a transformation that chooses some of them, as ``masked`` and ``partition`` do.
    groups : sequence of ParameterGroup
        As for the rules of mpishard, with `lr_factor` only.
    ema_decay : float, optional
        As for the rules of mpishard.

    Returns
    -------
    OptaxRule
        For ``as_distributed(tree, mesh, rule)`` and for ``ZeRO2Optimizer(rule, mesh)``.

    Raises
    ------
    TypeError, ValueError
        If it is no transformation; if what it does to an element depends on others or on the shape of the tensor, as
        with clipping by norms, trust ratios and factored moments; if it chooses tensors, and there is no tree; or if it
        is ``optax.ema`` alone, and there is an `ema_decay`.
    """
    chooser, text = chooser_in(transformation), _described(transformation, 0)
    leaves = None if tree is None else TreeLeaves.of(tree)
    options: dict[str, Any] = {"groups": groups, "ema_decay": ema_decay}
    if not chooser and not (leaves is not None and chooses_leaves(transformation, leaves)):
        steps = CompiledSteps(transformation)
        if ema_decay is not None and "ema" in steps.kept.slots:
            raise ValueError(
                "optax.ema alone keeps 'ema', and so does ema_decay: take it in a chain, optax.chain(optax.ema(...))"
            )
        return OptaxRule(1.0, text, tuple(steps.kept.slots), steps, **options)
    if leaves is None:
        raise ValueError(f"optax's {chooser} chooses tensors: give the tree too, rule_of(transformation, tree=tree)")
    by_name: dict[str, CompiledSteps] = {}
    for first, names in equal_leaves(transformation, leaves).items():
        by_name |= dict.fromkeys(names, CompiledSteps(OfLeaf(transformation, leaves, first), transformation))
    slots = dict.fromkeys(name for each in by_name.values() for name in each.kept.slots)
    return OptaxRule(1.0, text, tuple(slots), None, by_name, **options)


def _block(array: Array) -> Any:
    """The elements of a block, with zeros after those of the last one, as an array of JAX."""
    if array.size < BLOCK:
        padded = arrays.zeros(BLOCK, array.dtype, like=array)
        padded[: array.size] = array
        array = padded
    return as_jax(array)
