"""Optimizers of `torch.optim` as update rules: each rank takes the step of PyTorch on the elements that it updates."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from mpishard.layout.run_state import brief
from mpishard.optim import Rule
from mpishard.optim.parameter_groups import ParameterGroup
from mpishard.torch.memory import as_tensor

Array = Any
_STEP = "step"  # the one number beside arrays that PyTorch's element-wise optimizers keep
_OWN = ("params", "lr", "weight_decay")
_WAY_OUT = "use an element-wise optimizer, such as torch.optim.RAdam"


class _Formula(NamedTuple):
    """What stands for the compiled formula of a rule."""

    name: str
    c_body: str = ""

    def expect(self, dtype: Any) -> None:
        """Nothing is compiled."""


@dataclass(frozen=True)
class TorchRule(Rule):
    """The formula of an optimizer of `torch.optim`; `rule_of` makes it.

    Parameters
    ----------
    lr : float or callable
        The learning rate, or a function of the step.
    kind : type
        The class of `torch.optim`.
    options : mapping
        Its other arguments.
    weight_decay : float
        As PyTorch's; 0 where the class has none.
    source : torch.optim.Optimizer, optional
        Whose options are used as they are at each step, since schedulers change them.
    """

    kind: type
    options: Mapping[str, Any]
    weight_decay: float = 0.0
    source: Any = field(default=None, compare=False, repr=False)
    _slots: tuple[str, ...] = field(default=(), init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        plain = {name: value for name, value in self._options(1e-3).items() if value is not None}
        object.__setattr__(self, "_slots", _slots_of(self.kind, tuple(sorted(plain.items()))))

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of PyTorch, such as ``exp_avg``."""
        return self._slots

    @property
    def kernel(self) -> Any:
        """Names the formula, which PyTorch has."""
        return _Formula(f"torch.optim.{self.kind.__name__}")

    def scalars(self, step: int) -> tuple[float, ...]:
        """None: PyTorch computes them."""
        return ()

    def configuration(self) -> dict[str, Any]:
        """The name of the class and its options, as plain values."""
        options = {name: value for name, value in self.options.items() if value is not None}
        lr = self.learning_rate(1) if callable(self.lr) else self.lr
        own = {"rule": f"torch.optim.{self.kind.__name__}", "lr": lr, "weight_decay": self.weight_decay}
        groups = {"groups": "; ".join(map(str, self.groups))} if self.groups else {}
        average = {} if self.ema_decay is None else {"ema_decay": self.ema_decay}
        return {**own, **groups, **average, **options}

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
        if not parameters.size:
            return
        values = as_tensor(parameters)
        values.grad = as_tensor(gradients) * (clip / divisor)
        optimizer = self.kind([values], **self._options(self.learning_rate(step)))
        state, own = optimizer.state[values], dict(zip(self.slots, map(as_tensor, slots), strict=True))
        if step > 1:
            state |= {**own, _STEP: torch.tensor(float(step - 1))}
        optimizer.step()
        for name, slot in own.items():
            if state[name].data_ptr() != slot.data_ptr():
                slot.copy_(state[name])
        if self.source is not None:
            self.source._opt_called = True  # or schedulers would warn that no step was taken

    def _options(self, lr: float) -> dict[str, Any]:
        """The arguments of the class now."""
        options = dict(self.options)
        if self.source is not None:
            options |= {name: self.source.param_groups[0][name] for name in options}
        if self.weight_decay or "weight_decay" in _arguments(self.kind):
            options["weight_decay"] = self.weight_decay
        return {"lr": lr, **options}


def rule_of(kind: type, lr: float | Callable[[int], float], **options: Any) -> TorchRule:
    """An element-wise optimizer of `torch.optim` as a rule, for any optimizer of mpishard.

    Each rank takes PyTorch's step for the elements that it updates, so that the state is divided under ZeRO, and saved
    and moved as that of other rules.  Not collective.

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
        If the class is no optimizer, an argument is unfit, or what it does to an element depends on others.
    """
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise TypeError(f"rule_of needs a class of torch.optim such as torch.optim.RAdam, got {kind!r}")
    groups, ema_decay = options.pop("groups", ()), options.pop("ema_decay", None)
    given = {name: _plain(value) for name, value in options.items()}
    known = _arguments(kind)
    if unknown := [name for name in given if name not in known]:
        raise TypeError(f"torch.optim.{kind.__name__} has no argument {unknown[0]!r}")
    decay = given.pop("weight_decay", known["weight_decay"].default if "weight_decay" in known else 0.0)
    return TorchRule(lr, kind, given, float(decay), groups=groups, ema_decay=ema_decay)


def rule_of_optimizer(optimizer: Any, names: Mapping[int, str]) -> TorchRule:
    """The rule of an optimizer that was made for the parameters of a module.  Not collective.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        That has taken no step.  Later changes of its first parameter group, as by a scheduler, count.
    names : mapping of int to str
        By id of a parameter its name in the module.

    Returns
    -------
    TorchRule
        With the other parameter groups as groups of it.

    Raises
    ------
    ValueError
        If it has other parameters than the module, or has taken steps; or its groups differ in more than learning
        rate and weight decay.
    """
    kind = type(optimizer)
    if optimizer.state:
        raise ValueError(
            f"this {kind.__name__} has taken steps; give a new one, and load_state_dict of what comes back"
        )
    base, *others = optimizer.param_groups
    if "lr" not in base:
        raise TypeError(f"this {kind.__name__} has no learning rate 'lr' in its parameter groups; {_WAY_OUT}")
    held = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    if missing := [name for number, name in names.items() if number not in held]:
        raise ValueError(
            f"parameter {missing[0]!r} of the module is not in the optimizer; give it all, or set requires_grad=False"
        )
    if len(held) > len(names):
        raise ValueError(f"the optimizer has {len(held) - len(names)} parameters that the module has not")
    arguments = _arguments(kind)
    options = {name: base[name] for name in base if name in arguments and name not in _OWN}
    groups = []
    for group in others:
        if unlike := [name for name in options if group[name] != base[name]]:
            raise ValueError(
                f"parameter groups of the optimizer may differ in lr and weight_decay, not in {unlike[0]!r}"
            )
        patterns = [_literal(names[id(p)]) for p in group["params"] if id(p) in names]
        decay = {"weight_decay": float(group["weight_decay"])} if "weight_decay" in group else {}
        if patterns:
            groups.append(ParameterGroup(patterns, lr_factor=_factor(group["lr"], base["lr"]), **decay))
    whole = float(base.get("weight_decay", 0.0))
    return TorchRule(_LiveRate(optimizer), kind, options, whole, optimizer, groups=groups)


class _LiveRate:
    """The learning rate that an optimizer of PyTorch has now."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def __call__(self, step: int) -> float:
        return float(self._optimizer.param_groups[0]["lr"])

    def __repr__(self) -> str:
        return f"lr of torch.optim.{type(self._optimizer).__name__}"


def _arguments(kind: type) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(kind).parameters


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _factor(lr: Any, base: Any) -> float:
    if not float(base):
        raise ValueError("the first parameter group of the optimizer has lr=0, of which others can be no multiple")
    return float(lr) / float(base)


def _literal(name: str) -> str:
    """The pattern that matches this name alone."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


@functools.cache
def _slots_of(kind: type, options: tuple[tuple[str, Any], ...]) -> tuple[str, ...]:
    """The names of the arrays that an optimizer keeps; raises unless it treats each element by itself."""
    what, given = f"torch.optim.{kind.__name__}", dict(options)
    random = np.random.default_rng(0)
    start, slopes = random.standard_normal(3), random.standard_normal((3, 3))

    def after(elements: slice) -> tuple[Any, dict[str, Any]]:
        values = torch.from_numpy(start[elements].copy())
        optimizer: Any = kind([values], **given)
        for slope in slopes:
            values.grad = torch.from_numpy(slope[elements].copy())
            optimizer.step()
        return values, dict(optimizer.state[values])

    try:
        whole, state = after(slice(None))
        parts = [after(slice(number, number + 1)) for number in range(3)]
    except Exception as error:
        text = brief(" ".join(str(error).split()))  # in one line
        raise TypeError(
            f"{what} cannot take a step of a flat array: {type(error).__name__}: {text}; {_WAY_OUT}"
        ) from None
    slots, other = [], []
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == whole.shape:
            slots.append(name)
        elif name != _STEP and value is not None:
            other.append(name)
    if other or not torch.allclose(whole, torch.cat([part for part, _ in parts]), rtol=1e-12, atol=0):
        why = f"it keeps {other[0]!r} besides" if other else "what it does to an element depends on others"
        raise ValueError(f"{what} cannot be divided over ranks: {why}; {_WAY_OUT}")
    return tuple(slots)
