"""The base of the update rules: the new value of one parameter from its gradient and its own state.

A rule is a frozen record of hyper-parameters, independent of any rank.  The caller keeps its state in flat *slot*
arrays as large as the parameters, so that any slice of parameters, gradient and slots can be updated separately with
the same result.

Gradients are sums over samples.  A rule uses them as ``gradients / divisor * clip``, where `divisor` is the global
number of samples and `clip` the factor of clipping by the global norm.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar, NamedTuple, Protocol

from mpishard.arguments import flag, integer, listed, number, returned, shown
from mpishard.backend.array import Kernel

Array = Any


# Hyper-parameters that other code changes between two steps, as schedulers of PyTorch do.


class LiveValues(Protocol):
    """Such values of one rule; each step uses those of that moment, which must be the same on all ranks."""

    @property
    def names(self) -> Collection[str]:
        """The fields of the rule that follow the values."""

    @property
    def by_name(self) -> Mapping[str, str]:
        """The values now, as text."""

    @property
    def fingerprint(self) -> int:
        """A number of 62 bits that depends on all of `by_name`."""

    @property
    def remedy(self) -> str:
        """The remedy where the values differ between ranks, for a message."""

    def check(self) -> None:
        """Raise ValueError unless a step can use the values; `step` compares the ranks."""

    def restore(self, configuration: Mapping[str, Any]) -> str:
        """Take the values from a `Rule.configuration` that was saved; returns the reason if it takes none, else ""."""


# Parameter groups: tensors, chosen by their names, that a rule updates with their own hyper-parameters.


class GroupValues(NamedTuple):
    """The values of a rule's groups for one tensor."""

    weight_decay: float | None = None  # None: the rule's own
    lr_factor: float = 1.0  # on the rule's learning rate


@dataclass(frozen=True)
class ParameterGroup:
    """Tensors that a rule updates with their own weight decay or learning rate.

    Give groups to a rule: ``AdamW(lr=1e-3, weight_decay=0.1, groups=[ParameterGroup("*.bias", weight_decay=0)])``.

    Parameters
    ----------
    patterns : str or sequence of str
        The group has the tensors whose names match any of these patterns, as file names in a shell: ``*`` stands for
        any characters, ``?`` for one, ``[...]`` for one of several.
    weight_decay : float, optional
        In place of the rule's.
    lr_factor : float, optional
        Multiplies the rule's learning rate at all steps; with 0 the tensors stay as they are.

    Raises
    ------
    TypeError, ValueError
        If a pattern is no text or empty, a number is below 0, or neither number is given.
    """

    patterns: str | Sequence[str]
    weight_decay: float | None = field(default=None, kw_only=True)
    lr_factor: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        patterns = (self.patterns,) if isinstance(self.patterns, str) else self.patterns
        if not isinstance(patterns, Sequence) or not all(isinstance(each, str) for each in patterns):
            raise TypeError(f'ParameterGroup: patterns={shown(self.patterns)} must be texts such as "*.bias"')
        if not patterns or not all(patterns):
            raise ValueError(f'ParameterGroup: patterns={shown(self.patterns)} name no tensor; give some as "*.bias"')
        object.__setattr__(self, "patterns", tuple(patterns))
        if self.weight_decay is None and self.lr_factor is None:
            raise ValueError(f"{self._name} has no own value; give weight_decay or lr_factor")
        for name in ("weight_decay", "lr_factor"):
            if getattr(self, name) is not None:
                value = number(f"{self._name}: {name}", getattr(self, name), least=0)
                object.__setattr__(self, name, value)

    @property
    def _name(self) -> str:
        return f"ParameterGroup({', '.join(map(repr, self.patterns))})"

    def __str__(self) -> str:
        values = {"weight_decay": self.weight_decay, "lr_factor": self.lr_factor}
        return f"{', '.join(self.patterns)}: " + " ".join(
            f"{name}={value}" for name, value in values.items() if value is not None
        )

    def matching(self, names: Iterable[str]) -> list[str]:
        """The names that any of its patterns matches.

        Parameters
        ----------
        names : iterable of str
            Of all tensors of a model.

        Returns
        -------
        list of str
            In their order.

        Raises
        ------
        ValueError
            If a pattern matches none of them.
        """
        names = list(names)
        for pattern in self.patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(
                    f"{self._name}: {pattern!r} matches none of the tensors {listed(names)}; "
                    "give a pattern that matches some, or leave it out"
                )
        return [name for name in names if any(fnmatchcase(name, pattern) for pattern in self.patterns)]


def values_by_tensor(groups: Sequence[ParameterGroup], names: Sequence[str]) -> list[GroupValues]:
    """The values of a rule's groups for each tensor of the model, in the order of the names.

    Raises ValueError if a pattern matches no tensor, or two groups have different values for one.
    """
    weight_decay: dict[str, tuple[float, ParameterGroup]] = {}
    lr_factor: dict[str, tuple[float, ParameterGroup]] = {}
    for group in groups:
        for name in group.matching(names):
            for what, known, value in (
                ("weight_decay", weight_decay, group.weight_decay),
                ("lr_factor", lr_factor, group.lr_factor),
            ):
                if value is None:
                    continue
                earlier, other = known.setdefault(name, (value, group))
                if earlier != value:
                    raise ValueError(
                        f"{name!r} is in two parameter groups that differ: {what} is {earlier} in ({other}) and "
                        f"{value} in ({group}); give patterns that do not overlap, or the same value"
                    )
    return [
        GroupValues(
            weight_decay[name][0] if name in weight_decay else None, lr_factor[name][0] if name in lr_factor else 1.0
        )
        for name in names
    ]


# -- rules -------------------------------------------------------------------------------------------------------------

LearningRate = float | Callable[[int], float]
_AT_LEAST_0 = ("momentum", "dampening", "weight_decay", "eps", "lr_decay", "initial_accumulator_value")
ADDRESS = re.compile(" at 0x[0-9a-fA-F]+")


@dataclass(frozen=True)
class Rule(ABC):
    """Base of the update rules.

    The hyper-parameters of a rule are its fields.  Those of type float must be finite, those of type bool flags.
    Those that are called momentum, dampening, weight_decay, eps, lr_decay or initial_accumulator_value must be at least
    0, `alpha` and each of `betas` at least 0 and below 1.

    Parameters
    ----------
    lr : float or callable
        Learning rate, or a function of the step (see `mpishard.optim.lr_schedules`).  Steps count from 1.
    groups : sequence of ParameterGroup
        Tensors that have their own weight decay or learning rate.  Checked against the names of the tensors when
        an optimizer gets its parameters.
    ema_decay : float, optional
        Keep an exponential moving average of the parameters too, as one more state array: after a step it is this times
        itself plus the rest times the parameters, after the first one the parameters.  At least 0 and below 1.

    Raises
    ------
    TypeError, ValueError
        If a hyper-parameter is no number or out of its range.
    """

    lr: LearningRate
    groups: Sequence[ParameterGroup] = field(default=(), kw_only=True)
    ema_decay: float | None = field(default=None, kw_only=True)
    norm_based: ClassVar[bool] = False  # has two halves around norms of whole tensors, as LAMB
    whole_tensors: ClassVar[bool] = False  # needs whole tensors, each on one rank, as Muon

    def __post_init__(self) -> None:
        if not callable(self.lr):
            self._check("lr")
        self._check_groups()
        if self.ema_decay is not None:
            self._check("ema_decay", below=1.0)
        for each in fields(self):
            kind = getattr(each.type, "__name__", each.type)  # a name where annotations are postponed
            if each.name in _AT_LEAST_0:
                self._check(each.name)
            elif each.name == "alpha":
                self._check("alpha", below=1.0)
            elif each.name == "betas":
                self._check_betas(getattr(self, each.name))
            elif kind == "float":  # of a rule of the user's own
                self._check(each.name, least=None)
            elif kind in ("bool", "int"):
                what, checked = f"{type(self).__name__}: {each.name}", flag if kind == "bool" else integer
                object.__setattr__(self, each.name, checked(what, getattr(self, each.name)))

    def _check_groups(self) -> None:
        given, what = self.groups, f"{type(self).__name__}: groups"
        if not isinstance(given, Sequence) or not all(isinstance(group, ParameterGroup) for group in given):
            raise TypeError(f"{what}={shown(given)} must be a list of ParameterGroup")
        object.__setattr__(self, "groups", tuple(given))
        if any(group.weight_decay is not None for group in given) and not hasattr(self, "weight_decay"):
            raise ValueError(f"{what} give a weight_decay, which {type(self).__name__} does not have; leave it out")

    def _check(self, name: str, least: float | None = 0, below: float | None = None) -> None:
        value = number(f"{type(self).__name__}: {name}", getattr(self, name), least=least, below=below)
        object.__setattr__(self, name, value)

    def _check_betas(self, betas: Any) -> None:
        what = f"{type(self).__name__}: betas"
        if not isinstance(betas, Sequence) or isinstance(betas, str) or len(betas) != 2:
            raise TypeError(f"{what}={shown(betas)} must be two numbers of at least 0 and below 1")
        checked = tuple(number(f"{what}[{i}]", beta, least=0, below=1) for i, beta in enumerate(betas))
        object.__setattr__(self, "betas", checked)

    @property
    def live(self) -> LiveValues | None:
        """The values that other code changes between two steps; None for most rules, which have none."""
        return None

    @property
    def own_steps(self) -> Any:
        """What takes the steps in the place of `update`, with state of its own; None for most rules."""
        return None

    @property
    @abstractmethod
    def slots(self) -> tuple[str, ...]:
        """Names of the state arrays, each as large as the parameters; an option that is off needs no array."""

    @property
    @abstractmethod
    def kernel(self) -> Kernel:
        """The compiled formula of ``(parameters, gradients, *slots, /, divisor, clip, *scalars(step))``."""

    @property
    def is_one_formula(self) -> bool:
        """True if `update` applies `kernel` and does nothing else, so that many ranges may be updated in one launch."""
        return type(self).update is Rule.update and not self.kernel.largest

    @property
    def halves(self) -> tuple[Kernel, Kernel] | None:
        """Of a rule with ``norm_based``: the formulas of its halves, if these do nothing else; None otherwise.

        The first is that of ``(parameters, gradients, *slots, out, /, divisor, clip, *scalars(step))``, the second that
        of ``(parameters, direction, /, rate)``, with the learning rate times the trust ratio.
        """
        return None

    @abstractmethod
    def scalars(self, step: int) -> tuple[float, ...]:
        """The scalars of the formula at this step, computed in float64.

        Parameters
        ----------
        step : int
            Counts from 1.

        Returns
        -------
        tuple of float
            In the order of the formula, after `divisor` and `clip`.
        """

    def initial(self, slot: str) -> float:
        """The value that fills `slot` before the first step.

        Parameters
        ----------
        slot : str
            One of `slots`.

        Returns
        -------
        float
            0, unless the rule says otherwise.
        """
        return 0.0

    def is_spare(self, slot: str) -> bool:
        """Whether a saved state may have an array that the rule does not have: one of zeros.

        Parameters
        ----------
        slot : str
            Its name.

        Returns
        -------
        bool
            False, unless the rule says otherwise.
        """
        return False

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step.

        Parameters
        ----------
        step : int
            Counts from 1.

        Returns
        -------
        float
            `lr`, or what it returns for `step`.

        Raises
        ------
        ValueError
            If `step` is below 1, or `lr` returns anything but a finite number of at least 0.
        """
        if step < 1:
            raise ValueError(f"steps count from 1, got step {step}")
        if not callable(self.lr):
            return self.lr
        given = self.lr(step)
        try:
            rate = returned(given)
        except (TypeError, ValueError):
            rate = math.nan
        if not 0.0 <= rate < math.inf:
            raise ValueError(
                f"{type(self).__name__}: lr({step}) must be a number of at least 0 and finite, got {shown(given)}"
            )
        return rate

    def scaled(self, factor: float) -> Rule:
        """The same rule with `factor` times its learning rate, at all steps.

        Parameters
        ----------
        factor : float
            At least 0; with 1 the result is this rule itself.

        Returns
        -------
        Rule
            A copy, with every other hyper-parameter as here.
        """
        lr = self.lr
        if factor == 1:
            return self
        return replace(self, lr=(lambda step: factor * lr(step)) if callable(lr) else factor * lr)

    def by_tensor(self, names: Sequence[str]) -> list[Rule]:
        """The rule of each tensor: this one, with the values of the groups that the tensor is in.

        Parameters
        ----------
        names : sequence of str
            Of all tensors of a model.

        Returns
        -------
        list of Rule
            In the order of the names, one object for all tensors of the same values; of the same slots and formula.

        Raises
        ------
        ValueError
            If a pattern of a group matches no tensor, or two groups have different values for one.
        """
        known: dict[GroupValues, Rule] = {GroupValues(): self}
        by_tensor = values_by_tensor(self.groups, names)
        for values in by_tensor:
            if values not in known:
                own: dict[str, Any] = {} if values.weight_decay is None else {"weight_decay": values.weight_decay}
                known[values] = replace(self, **own).scaled(values.lr_factor)
        return [known[values] for values in by_tensor]

    def by_shape(self, shapes: Mapping[str, tuple[int, ...]]) -> list[Rule]:
        """The rule of each tensor, for a rule that also chooses by shapes; as `by_tensor` for others.

        Parameters
        ----------
        shapes : mapping of str to tuple of int
            Of all tensors of a model, by name.

        Returns
        -------
        list of Rule
            As of `by_tensor`, in the order of the names.

        Raises
        ------
        ValueError
            As `by_tensor`.
        """
        return self.by_tensor(list(shapes))

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
        """Take step `step` in place, in one pass over memory.

        Parameters
        ----------
        parameters, gradients : array
            1-D, contiguous, float32 or float64, of one size, dtype and device.  Gradients are only read.
        slots : sequence of arrays
            The state arrays, in the order of the property `slots`, with the size, dtype and device of the parameters;
            filled with `initial` before step 1.
        step : int
            Counts from 1.
        divisor, clip : float
            The gradient used is ``gradients / divisor * clip``.

        Raises
        ------
        TypeError, ValueError
            If an array, the number of arrays or the step is invalid; nothing has changed then.
        """
        self._check_slots(slots)
        self.kernel(parameters, gradients, *slots, divisor, clip, *self.scalars(step))

    def _check_slots(self, slots: Sequence[Array]) -> None:
        if len(slots) != len(self.slots):
            raise ValueError(f"{self} has the slots {self.slots}, got {len(slots)} arrays for them")

    def configuration(self) -> dict[str, float | str | bool]:
        """The hyper-parameters as plain numbers, strings and flags, for saving; a schedule by its repr.

        The result is the same on all ranks: the repr of a user's function has no memory address.

        Returns
        -------
        dict
            ``"rule"`` with the name of the class, and each hyper-parameter by its name; `betas` as ``"beta1"`` and
            ``"beta2"``, the groups as a text and `ema_decay`, if given.
        """
        plain: dict[str, float | str | bool] = {"rule": type(self).__name__}
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name == "betas":
                plain["beta1"], plain["beta2"] = value
            elif each.name == "groups":
                plain |= {"groups": "; ".join(map(str, value))} if value else {}
            elif each.name == "ema_decay":
                plain |= {} if value is None else {"ema_decay": value}
            else:
                plain[each.name] = ADDRESS.sub("", repr(value)) if callable(value) else value
        return plain
