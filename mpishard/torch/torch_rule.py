"""Optimizers of `torch.optim` as update rules.

`rule_of` makes one of a class: its `update` is the step of PyTorch along any arrays. The rule of an optimizer that was
made for a module stands for it elsewhere, while `own_steps` has it take its steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch

from mpishard.optim import Rule
from mpishard.torch.live_groups import LiveGroups
from mpishard.torch.memory import as_tensor, finish_stream
from mpishard.torch.own_steps import OwnSteps, ShardSteps, WholeSteps
from mpishard.torch.torch_steps import Division, arguments_of, division_of, take_step

Array = Any


class _Formula(NamedTuple):
    """Stands in for the compiled formula that other rules have."""

    name: str
    c_body: str = ""

    def expect(self, like: Array) -> None:
        """Nothing is compiled."""


@dataclass(frozen=True)
class TorchRule(Rule):
    """The formula of an optimizer of `torch.optim`; `rule_of` makes it."""

    kind: type  # the class of `torch.optim`
    options: Mapping[str, Any]  # its other arguments
    weight_decay: float = 0.0  # 0 where the class has none
    # Groups whose present options are used at each step, since schedulers change them.
    of_optimizer: LiveGroups | None = field(default=None, compare=False, repr=False)
    group: int = field(default=0, compare=False, repr=False)  # the number of its group, of which this is the rule
    # Those of the tensors of a module, if it is known, on which the number of arrays for packed state depends.
    shapes: Sequence[tuple[int, ...]] | None = field(default=None, compare=False, repr=False)
    own_steps: OwnSteps | None = field(default=None, compare=False, repr=False)  # in the place of `update`
    _division: Division = field(default=Division(()), init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        live = self.of_optimizer
        division = division_of(self.kind, self._arguments(1e-3), self.shapes) if live is None else live.division
        object.__setattr__(self, "_division", division)

    @property
    def live(self) -> LiveGroups | None:
        """The groups of an optimizer of PyTorch; None of a class alone."""
        return self.of_optimizer

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of PyTorch, such as ``exp_avg``; of what is packed, ``state1`` and so on."""
        return self._division.slots

    @property
    def counts(self) -> bool:
        """Return True if the optimizer keeps a count of steps in its state."""
        return self._division.counts

    @property
    def kernel(self) -> Any:
        """Names the formula, which PyTorch has."""
        return _Formula(f"torch.optim.{self.kind.__name__}", " ".join(self._division.packed or ()))

    def scalars(self, step: int) -> tuple[float, ...]:
        """None: PyTorch computes them."""
        return ()

    def by_tensor(self, names: Sequence[str]) -> list[Rule]:
        """The rule of each tensor, see `Rule.by_tensor`: that of its group."""
        groups = self.of_optimizer
        if groups is None:
            return super().by_tensor(names)
        numbers = [groups.number_of.get(name) for name in names]
        if None in numbers:
            raise ValueError(f"parameter {names[numbers.index(None)]!r} is in no parameter group of the optimizer")
        of_group: dict[int | None, Rule] = {0: self}
        for number in numbers:
            if number is not None and number not in of_group:
                of_group[number] = replace(self, lr=_LiveRate(groups, number), group=number)
        return [of_group[number] for number in numbers]

    def configuration(self) -> dict[str, Any]:
        """The name of the class and its options, as plain values."""
        options = {"weight_decay": self.weight_decay, **self._arguments(self.learning_rate(1))}
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}
        given = {name: value for name, value in plain.items() if value is not None}
        groups = {"groups": "; ".join(map(str, self.groups))} if self.groups else {}
        average = {} if self.ema_decay is None else {"ema_decay": self.ema_decay}
        live = {} if self.of_optimizer is None else {"live": self.of_optimizer.saved}
        return {"rule": f"torch.optim.{self.kind.__name__}", **given, **groups, **average, **live}

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
        """Take a step in place, see `Rule.update`: of a range of elements, or of one whole tensor in its shape."""
        self._check_slots(slots)
        if parameters.size:
            values, gradient = as_tensor(parameters), as_tensor(gradients) * (clip / divisor)
            arguments = self._arguments(self.learning_rate(step))
            take_step(self.kind, arguments, self._division, values, gradient, [*map(as_tensor, slots)], step)
            finish_stream(values)

    @property
    def values(self) -> dict[str, Any]:
        """All arguments of the class, for groups of parameters."""
        defaults = {name: each.default for name, each in arguments_of(self.kind).items() if name != "params"}
        return {**defaults, **self._arguments(self.learning_rate(1))}

    def with_values(self, values: Mapping[str, Any]) -> TorchRule:
        """The same class with other arguments, which PyTorch checks in the step."""
        own = dict(values)
        lr, decay = own.pop("lr", self.lr), own.pop("weight_decay", self.weight_decay)
        options = {**self.options, **own}
        if [*map(bool, options.values()), bool(decay)] != [*map(bool, self.options.values()), bool(self.weight_decay)]:
            return replace(self, lr=lr, options=options, weight_decay=decay)
        made = copy.copy(self)  # keeps the same arrays, which are not looked for again
        for name, value in (("lr", lr), ("options", options), ("weight_decay", decay)):
            object.__setattr__(made, name, value)
        if not callable(lr):
            made._check("lr")
        return made

    def _arguments(self, lr: float) -> dict[str, Any]:
        """The arguments of the class now."""
        if self.of_optimizer is not None:
            return {**self.of_optimizer.arguments(self.group), "lr": lr}
        decays = self.weight_decay or "weight_decay" in arguments_of(self.kind)
        return {"lr": lr, **self.options, **({"weight_decay": self.weight_decay} if decays else {})}


@dataclass(frozen=True)
class WholeTensorRule(TorchRule):
    """The same of an optimizer that needs whole tensors."""

    whole_tensors: ClassVar[bool] = True

    def is_spare(self, slot: str) -> bool:
        """True for arrays of a state that was packed for tensors of any shape, where those of a module need fewer."""
        return slot not in self.slots and slot.startswith("state")


def rule_of(kind: type, lr: float | Callable[[int], float], **options: Any) -> TorchRule:
    """An optimizer of `torch.optim` as a rule, for any optimizer of mpishard.

    Each rank takes PyTorch's step for the elements that it updates, so that the state is divided under ZeRO, and saved
    and moved as that of other rules.  Where PyTorch needs whole tensors, as for ``Adafactor``, ``NAdam`` and ``ASGD``,
    each tensor goes to one rank for its step; the state is packed into arrays of the size of the parameters.

    Parameters
    ----------
    kind : type
        Such as ``torch.optim.RAdam``, ``Adadelta``, ``Adamax``, ``Rprop``; ``AdamW`` and the others that mpishard has
        are faster there.
    lr : float or callable
        The learning rate, or a function of the step, which counts from 1.
    **options
        The other arguments of the class; `groups` and `ema_decay` as for the rules of mpishard.

    Returns
    -------
    TorchRule
        For ``as_distributed(module, mesh, rule)`` and for ``ZeRO2Optimizer(rule, mesh)``.

    Raises
    ------
    TypeError, ValueError
        If the class is no optimizer, an argument is unfit, or what it does to a tensor depends on others.
    """
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise TypeError(f"rule_of needs a class of torch.optim such as torch.optim.RAdam, got {kind!r}")
    groups, ema_decay = options.pop("groups", ()), options.pop("ema_decay", None)
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in options.items()
    }
    known = arguments_of(kind)
    if unknown := [name for name in given if name not in known]:
        raise TypeError(f"torch.optim.{kind.__name__} has no argument {unknown[0]!r}")
    decay = given.pop("weight_decay", known["weight_decay"].default if "weight_decay" in known else 0.0)
    made = TorchRule(lr, kind, given, float(decay), groups=groups, ema_decay=ema_decay)
    if numbers := made._division.numbers:
        raise ValueError(
            f"torch.optim.{kind.__name__} cannot be a rule, which keeps arrays alone: its step changes "
            f"{', '.join(map(repr, numbers))} of its groups; give the optimizer itself to as_distributed"
        )
    return _fitting(made._division)(lr, kind, given, float(decay), groups=groups, ema_decay=ema_decay)


def rule_of_optimizer(optimizer: Any, tensors: Mapping[str, Any], *, divides: bool = True) -> TorchRule:
    """The rule of an optimizer that was made for the parameters of a module and has taken no step.

    The rule follows later changes of its parameter groups, as by a scheduler; `tensors` are the parameters by name.
    The optimizer takes its steps itself, but where ranks divide them by whole tensors. Raises as `LiveGroups`.
    """
    live = LiveGroups(optimizer, tensors, divides=divides)
    own_steps: OwnSteps | None = None
    if not divides:
        own_steps = WholeSteps(live, tensors)
    elif live.division.packed is None:
        own_steps = ShardSteps(live)
    rate = _LiveRate(live, 0)
    return _fitting(live.division)(rate, live.kind, {}, of_optimizer=live, own_steps=own_steps)


def _fitting(division: Division) -> type[TorchRule]:
    return TorchRule if division.packed is None else WholeTensorRule


class _LiveRate:
    """The present learning rate of a parameter group of an optimizer of PyTorch."""

    def __init__(self, live: LiveGroups, group: int) -> None:
        self._live = live
        self._group = group

    def __call__(self, step: int) -> float:
        return self._live.rate(self._group)

    def __repr__(self) -> str:
        return f"lr of torch.optim.{self._live.kind.__name__}"
