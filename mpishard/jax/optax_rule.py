"""Transformations of optax as update rules: each rank takes the step of optax on the elements that it updates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from mpishard.backend import array as arrays
from mpishard.jax.leaf_steps import OfLeaf, alike
from mpishard.jax.memory import as_array, as_jax, check_precision
from mpishard.jax.transformation import Kept, checked, chooser_in, described
from mpishard.jax.tree_leaves import TreeLeaves
from mpishard.optim import Rule
from mpishard.optim.parameter_groups import ParameterGroup
from mpishard.optim.rule import LearningRate

Array = Any
# Elements in a call of the compiled step.  It is always the same number, so that there is one program for arrays of all
# lengths, and the bits of an element do not depend on where ranks have cut.
BLOCK = 2**16


class _Formula(NamedTuple):
    """What stands for the compiled formula of a rule."""

    name: str
    c_body: str = ""

    def expect(self, dtype: Any) -> None:
        """Checks that JAX computes in this dtype."""
        check_precision(dtype)


class CompiledSteps:
    """The steps of a transformation, compiled by JAX when they are first taken.

    Parameters
    ----------
    transformation : optax.GradientTransformation
        That treats each element by itself.
    whole : optax.GradientTransformation, optional
        Of which it is a part.

    Attributes
    ----------
    transformation : optax.GradientTransformation
    kept : Kept
        What it keeps.
    """

    def __init__(self, transformation: Any, whole: Any = None) -> None:
        self.transformation = transformation
        self.kept: Kept = checked(transformation, whole)
        self._common: dict[tuple[int, np.dtype], list[Any]] = {}
        self.take: Any = jax.jit(self._take, static_argnames="first")
        self._advance: Any = jax.jit(self._later_common, static_argnames="dtype")

    def common(self, step: int, dtype: np.dtype) -> list[Any]:
        """What is the same for all elements, such as counts, before a step.  Not collective.

        It follows from the number of steps, so that no checkpoint needs it.

        Parameters
        ----------
        step : int
            Counts from 1.
        dtype : dtype
            Of the parameters.

        Returns
        -------
        list of jax.Array
            In the order of the leaves of the state.
        """
        if (step, dtype) not in self._common:
            self._common = {(step, dtype): self._advance(step - 1, dtype=dtype)}
        return self._common[step, dtype]

    def note(self, step: int, dtype: np.dtype, values: list[Any]) -> None:
        """Keep what `common` shall return before a step, and that of the step before it for other ranges of elements.

        Not collective.

        Parameters
        ----------
        step : int
            As for `common`.
        dtype : dtype
            Of the parameters.
        values : list of jax.Array
            As `take` has returned them.
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
        """The common state after so many steps, which no gradient changes."""
        one = np.zeros(1, dtype)

        def step(_: Any, state: Any) -> Any:
            return self.transformation.update(one, state, one)[1]

        return self._common_of(jax.tree.leaves(jax.lax.fori_loop(0, steps, step, self.transformation.init(one))))

    def _common_of(self, leaves: list[Any]) -> list[Any]:
        return [leaves[number] for number in self.kept.common]


@dataclass(frozen=True)
class OptaxRule(Rule):
    """The formula of a transformation of optax; `rule_of` makes it.

    Parameters
    ----------
    lr : float or callable
        Multiplies the updates, which have optax's own learning rate already; 1 but for groups of tensors.
    transformation : str
        The names and options of optax.
    slots : tuple of str
        The arrays that it keeps, by the names of optax, such as ``mu``.
    steps : CompiledSteps
        Of the transformation.
    by_name : mapping of str to CompiledSteps
        Of each tensor, where they differ.
    """

    lr: LearningRate
    transformation: str
    slots: tuple[str, ...] = ()
    steps: CompiledSteps | None = field(default=None, compare=False, repr=False)
    by_name: Mapping[str, CompiledSteps] = field(default_factory=dict, compare=False, repr=False)

    @property
    def kernel(self) -> Any:
        """Names the formula, which optax has."""
        return _Formula("optax")

    def scalars(self, step: int) -> tuple[float, ...]:
        """None: optax computes them."""
        return ()

    def learning_rate(self, step: int) -> float:
        """NaN: optax has it, and does not tell."""
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
        If it is no transformation, or what it does to an element depends on others or on the shape of the tensor, as
        with clipping by norms, trust ratios and factored moments; or if it chooses tensors, and there is no tree; or if
        it is ``optax.ema`` alone, and there is an `ema_decay`.
    """
    chooser, text = chooser_in(transformation), described(transformation)
    options: dict[str, Any] = {"groups": groups, "ema_decay": ema_decay}
    if not chooser:
        steps = CompiledSteps(transformation)
        if ema_decay is not None and "ema" in steps.kept.slots:
            raise ValueError(
                "optax.ema alone keeps 'ema', and so does ema_decay: take it in a chain, optax.chain(optax.ema(...))"
            )
        return OptaxRule(1.0, text, tuple(steps.kept.slots), steps, **options)
    if tree is None:
        raise ValueError(f"optax's {chooser} chooses tensors: give the tree too, rule_of(transformation, tree=tree)")
    leaves = TreeLeaves.of(tree)
    by_name: dict[str, CompiledSteps] = {}
    for first, names in alike(transformation, leaves).items():
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
