"""Parameter groups of an optimizer of PyTorch or of a rule; schedulers and users change their values between steps."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from mpishard.comm.agreement import fingerprint
from mpishard.optim import Rule
from mpishard.torch.torch_steps import NOTES, REMEDY, STEP_KEY, Division, arguments_of, check_step, division_of

# How a step is computed, which does not change its result: not compared, and not restored.
_HOW = ("foreach", "fused", "capturable", "differentiable")
_FIXED = ("groups", "ema_decay", "matrices", "rest")  # of a rule


class ParameterGroups:
    """Groups of parameters, each with the values of its steps, which schedulers and users change between two steps.

    The base of those that are the `LiveValues` of a rule; by itself it has the groups of a rule without such values.
    """

    remedy = (
        "give the same on every rank; if it is a value of param_groups, set it there: a scheduler such as "
        "ReduceLROnPlateau needs one number on all ranks, such as the mean of their losses by mesh.world.all_reduce"
    )

    def __init__(self, what: str, groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
        self.what = what  # the owner of the groups, for messages
        self.groups = groups  # as `param_groups` of an optimizer of PyTorch
        self.defaults = defaults  # the values of a group where it does not set them
        self.names: frozenset[str] = frozenset({"lr"})  # the fields of the rule that follow the groups
        self.hook: Any = None  # the handle of one by which their owner refuses to take steps by itself
        self._sizes = [len(group["params"]) for group in groups]
        # The values that are compared between ranks.
        self._options = list(defaults)
        self._last: list[dict[str, Any]] = []
        self._fingerprint = 0

    def show(self, step: int) -> None:
        """Show the learning rates of a step in the groups, where the rule has a schedule."""

    @property
    def saved(self) -> list[dict[str, Any]]:
        """All values of each group but its parameters, for `restore`; also those that only schedulers use."""
        return list(map(saved_values, self.groups))

    # -- `LiveValues` -------------------------------------------------------------------------------------------------

    @property
    def by_name(self) -> dict[str, str]:
        """The values of all groups now, as text."""
        return {
            f"{name} of param_groups[{number}]": _text(value)
            for number, values in enumerate(self._values())
            for name, value in values.items()
        }

    @property
    def fingerprint(self) -> int:
        """A number of 62 bits that depends on all of `by_name`."""
        values = self._values()
        if values != self._last:
            self._last, self._fingerprint = values, fingerprint(self.by_name)
        return self._fingerprint

    def check(self) -> None:
        """Raise ValueError unless the groups are those of the beginning, and a step can use their values."""
        sizes = [len(group["params"]) for group in self.groups]
        if sizes != self._sizes:
            raise ValueError(
                f"{self.what} has parameter groups of {sizes} parameters, and had {self._sizes} when the module was "
                "made distributed; call add_param_group before as_distributed"
            )

    def restore(self, configuration: Mapping[str, Any]) -> str:
        """Take the values of all groups, as PyTorch's `load_state_dict` does."""
        saved, groups = configuration.get("live"), self.groups
        if not isinstance(saved, list) or not all(isinstance(each, Mapping) for each in saved):
            return ""  # of a rule without such values: what differs is reported as for other rules
        if len(saved) != len(groups):
            return (
                f"the saved state has {len(saved)} parameter groups and {self.what} {len(groups)}: their "
                "learning rates and other values stay as they are here"
            )
        for group, values in zip(groups, saved, strict=True):
            for name, value in values.items():
                if not _is_saved(name, value) or (name == "lr" and "lr" not in self.names):
                    continue  # a schedule has its rate
                if isinstance(group.get(name), torch.Tensor) and isinstance(value, float | int):
                    group[name] = torch.full_like(group[name], value)  # groups may share that of the defaults
                else:
                    group[name] = tuple(value) if isinstance(value, list) else value
        return ""

    # -- inside -----------------------------------------------------------------------------------------------------

    def _values(self) -> list[dict[str, Any]]:
        """The values of each group that decide a step."""
        return [{name: _plain(group.get(name)) for name in self._options} for group in self.groups]


class LiveGroups(ParameterGroups):
    """The present groups of an optimizer of PyTorch that was made for the parameters of a module and has taken no step.

    `tensors` are the parameters of the module by name; `divides` says that ranks share its steps, else each rank takes
    them whole. Raises TypeError or ValueError if the optimizer has other parameters than the module, or has taken
    steps; and if steps are to be divided and cannot be, or its groups keep different arrays.
    """

    def __init__(self, optimizer: Any, tensors: Mapping[str, Any], *, divides: bool = True) -> None:
        self.kind = kind = type(optimizer)  # the class of the optimizer
        self.optimizer = optimizer
        self._divides = divides
        self._takes_step = False
        names = {id(p): name for name, p in tensors.items()}
        if any(each and each.get(STEP_KEY, 1) for each in optimizer.state.values()):
            raise ValueError(
                f"this {kind.__name__} has taken steps; give a new one, and load_state_dict of what comes back"
            )
        check_step(kind)
        groups = optimizer.param_groups
        if "lr" not in groups[0]:
            raise TypeError(f"this {kind.__name__} has no learning rate 'lr' in its parameter groups; {REMEDY}")
        _check_parameters(groups, names)
        super().__init__(f"this {kind.__name__}", groups, optimizer.defaults)
        self._arguments = [name for name in groups[0] if name in arguments_of(kind) and name != "params"]
        self._options = [name for name in self._arguments if name not in _HOW]
        if divides:
            self.kind = _with_attributes(optimizer, self.arguments(0))
        # By name of a parameter the number of its group.
        self.number_of: dict[str, int] = {
            names[id(p)]: number for number, group in enumerate(groups) for p in group["params"] if id(p) in names
        }
        self._shapes = [tuple(p.shape) for group in groups for p in group["params"] if id(p) in names]
        # The arrays that the optimizer keeps, the same for all groups; where ranks take whole steps, those that they
        # could divide.
        self.division = Division(())
        self.is_divisible = True
        self._begun: list[dict[str, Any]] = [{} for _ in groups]  # values of its numbers before the first step
        try:
            found = self._common_division()
        except (TypeError, ValueError):
            if divides:
                raise
            self.is_divisible = False
        else:
            # What is packed are reals; those of complex tensors are kept by the optimizer alone.
            self.is_divisible = divides or found.packed is None or not any(p.is_complex() for p in tensors.values())
            self.division = found if self.is_divisible else self.division
        numbers = self.division.numbers
        self._begun = [{name: _plain(each[name]) for name in numbers if name in self._arguments} for each in groups]
        if divides:  # a step that sees other gradients than the probe did must leave the same numbers on all ranks
            self._options += [name for name in numbers if name not in self._options]
        self._known: set[tuple[bool, ...]] = {self._switches(number) for number in range(len(groups))}
        self._checked: list[dict[str, Any]] = []

    def claim(self) -> None:
        """Make the optimizer refuse steps but those of `take_step`, and drop its state of whole tensors if divided."""
        if self._divides:
            self.optimizer.state.clear()
        self.note_state()
        self.hook = self.optimizer.register_step_pre_hook(self._refuse)

    def note_state(self) -> None:
        """Note that the optimizer has the state that it shall have."""
        self._state = self.optimizer.state

    def take_step(self) -> None:
        """The step of the optimizer itself."""
        self._takes_step = True
        try:
            self.optimizer.step()
        finally:
            self._takes_step = False

    @property
    def groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.optimizer.param_groups  # `load_state_dict` replaces the list
        return groups

    @groups.setter
    def groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    def arguments(self, number: int) -> dict[str, Any]:
        """The arguments of the class for a group, as plain values."""
        group = self.optimizer.param_groups[number]
        return {name: _plain(group[name]) for name in self._arguments}

    def rate(self, number: int) -> float:
        return float(self.optimizer.param_groups[number]["lr"])

    def check(self) -> None:
        super().check()
        optimizer = self.optimizer
        if any(optimizer.state.values()) if self._divides else optimizer.state is not self._state:
            raise ValueError(
                f"{self.what} has got a state of its own since the module was made distributed, which no step uses; "
                "call load_state_dict of the optimizer of as_distributed, with what its state_dict returned"
            )
        values = self._values()
        for number, rate in enumerate(each["lr"] for each in values):
            if not 0.0 <= rate < math.inf:
                raise ValueError(
                    f"lr of param_groups[{number}] of {self.what} must be at least 0 and finite, got {rate}"
                )
            if values != self._checked and self.is_divisible and self._switches(number) not in self._known:
                self._check_slots(number)
        self._checked = values
        optimizer._opt_called = True  # or schedulers would warn that no step was taken

    # -- inside -----------------------------------------------------------------------------------------------------

    def _common_division(self) -> Division:
        first, *others = map(self._division, range(len(self.groups)))
        for number, division in enumerate(others, 1):
            if division != first:
                raise ValueError(
                    f"param_groups[{number}] of {self.what} keeps {_listed(division)}, and param_groups[0] "
                    f"{_listed(first)}; give both the same options that decide this, as momentum and amsgrad do"
                )
        return first

    def _refuse(self, *_: Any) -> None:
        """A hook before each step that the optimizer would take by itself."""
        if not self._takes_step:
            raise RuntimeError(
                f"mpishard takes the steps of {self.what}: call step() of the optimizer of as_distributed, and give "
                "that to a GradScaler"
            )

    def _switches(self, number: int) -> tuple[bool, ...]:
        """The options of a group that are on: only these decide which arrays it keeps."""
        return tuple(map(bool, self._probed(number).values()))

    def _probed(self, number: int) -> dict[str, Any]:
        return {**self.arguments(number), **self._begun[number], "lr": 1e-3}

    def _division(self, number: int) -> Division:
        return division_of(self.kind, self._probed(number), self._shapes)

    def _check_slots(self, number: int) -> None:
        """Raise ValueError unless a group with other options keeps no more than before; the same, if it is packed."""
        found, before = self._division(number), self.division
        if more := [name for name in _kept(found) if name not in _kept(before)]:
            raise ValueError(_needs_more(number, self.what, more))
        if found.packed != before.packed:
            raise ValueError(
                f"param_groups[{number}] of {self.what} was changed, and keeps {_listed(found)} now in place of "
                f"{_listed(before)}; set such options before as_distributed"
            )
        self._known.add(self._switches(number))


def _with_attributes(optimizer: Any, arguments: Mapping[str, Any]) -> Any:
    """The class of an optimizer; where it has attributes that its groups lack, one whose optimizers have them, too."""
    kind: Any = type(optimizer)
    own = {name: each for name, each in vars(optimizer).items() if name not in NOTES}
    with contextlib.suppress(Exception):  # which a probe reports
        made = vars(kind([torch.zeros(1)], **arguments))
        plain = [(name, each) for name, each in own.items() if each is None or isinstance(each, float | int | str)]
        if other := [(name, each) for name, each in plain if name not in made or made[name] != each]:
            return _keeping(kind, tuple(other))
    return kind


@functools.cache
def _keeping(kind: Any, attributes: tuple[tuple[str, Any], ...]) -> Any:
    """A class whose optimizers have these attributes from the beginning."""

    def initialize(self: Any, *args: Any, **arguments: Any) -> None:
        kind.__init__(self, *args, **arguments)
        vars(self).update(attributes)

    names = {"__doc__": kind.__doc__, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    code = {"__init__": initialize, "__signature__": inspect.signature(kind)}
    return type(kind)(kind.__name__, (kind,), {**names, **code})


class FollowsGroups(Rule):
    """Mixed into the class of a rule: its values are those of `RuleGroups`, as they are at each step."""

    _live: RuleGroups | None = None

    @property
    def live(self) -> RuleGroups | None:
        """The groups; None in a copy, as `dataclasses.replace` makes it."""
        return self._live

    def by_tensor(self, names: Sequence[str]) -> list[Rule]:
        """The rule of each tensor, see `Rule.by_tensor`: that of its group."""
        if self._live is None:
            return super().by_tensor(names)
        return self._live.by_tensor(names)

    def by_shape(self, shapes: Mapping[str, tuple[int, ...]]) -> list[Rule]:
        """The rule of each tensor, see `Rule.by_shape`: that of its group."""
        return super().by_shape(shapes) if self._live is None else self._live.by_tensor(list(shapes))

    def configuration(self) -> dict[str, Any]:
        """The values, and those of all groups where something has changed them."""
        plain = super().configuration()
        return {**plain, "live": self._live.saved} if self._live is not None and self._live.was_changed else plain


class RuleGroups(ParameterGroups):
    """The groups of a rule of mpishard, with its fields as values: one, or one for each different set by its `groups`.

    Of a rule that already follows groups its present values are taken. Raises ValueError if a pattern of the rule's
    `groups` matches no tensor.
    """

    def __init__(self, rule: Rule, tensors: Mapping[str, Any]) -> None:
        self.rule: Rule = copy.copy(rule)  # of a class of the same name, that follows these groups
        # The class of a rule that follows groups is made by `_following` of its bases, FollowsGroups and the class.
        kind = type(rule).__mro__[2] if isinstance(rule, FollowsGroups) else type(rule)
        self.rule.__dict__.pop("_live", None)
        object.__setattr__(self.rule, "__class__", kind)
        # Pairs of reals are no matrix, whatever the shape of a complex tensor.
        shapes = {name: (p.numel(), 1, 2) if p.is_complex() else tuple(p.shape) for name, p in tensors.items()}
        by_tensor = self.rule.by_shape(shapes)
        # One for each group, changed in place when its group is.
        self._rules = list({id(each): each for each in by_tensor}.values())
        self._first = [copy.copy(each) for each in self._rules]
        number_of = {id(each): number for number, each in enumerate(self._rules)}
        self._number_of = {name: number_of[id(each)] for name, each in zip(tensors, by_tensor, strict=True)}
        groups: list[dict[str, Any]] = [{"params": [], **_values_of(each)} for each in self._rules]
        for name, p in tensors.items():
            groups[self._number_of[name]]["params"].append(p)
        # The values of each group: others than those of the rule where the group is of another one, as Muon's `rest`.
        self._own = [list(_values_of(each)) for each in self._rules]
        super().__init__(f"the {kind.__name__}", groups, _values_of(self.rule))
        self._scheduled = any(callable(each.lr) for each in self._rules)
        self._shown = [group["lr"] for group in groups]
        self.names = frozenset({*(name for own in self._own for name in own), "options", "rest"})
        if self._scheduled:
            self.names -= {"lr"}
            for own in self._own:
                own.remove("lr")
        self._checked = self._values()
        self._saved_first = self.saved
        self.rule.__dict__["_live"] = self
        object.__setattr__(self.rule, "__class__", _following(kind))

    def by_tensor(self, names: Sequence[str]) -> list[Rule]:
        """The rule of each tensor.  Raises ValueError for a name of another module."""
        if other := [name for name in names if name not in self._number_of]:
            raise ValueError(f"parameter {other[0]!r} is in no parameter group of {self.what}")
        return [self._rules[self._number_of[name]] for name in names]

    def show(self, step: int) -> None:
        if self._scheduled:
            self._shown = [each.learning_rate(max(1, step)) for each in self._rules]
            for group, rate in zip(self.groups, self._shown, strict=True):
                group["lr"] = rate

    @property
    def saved(self) -> list[dict[str, Any]]:
        left_out = ("lr",) if self._scheduled else ()
        return [{name: value for name, value in each.items() if name not in left_out} for each in super().saved]

    @property
    def was_changed(self) -> bool:
        """Return True if a group has other values than at the beginning, or additional ones, as of schedulers."""
        return self.saved != self._saved_first

    def check(self) -> None:
        super().check()
        if self._scheduled:
            for number, (group, shown) in enumerate(zip(self.groups, self._shown, strict=True)):
                if group["lr"] != shown:
                    raise ValueError(
                        f"lr of param_groups[{number}] was set to {group['lr']}, but {self.what} has a schedule, "
                        f"{self._first[number].lr!r}; give the rule a number, such as lr={shown:g}, to set it"
                    )
        values = self._values()
        if values == self._checked:
            return
        for number, (rule, own) in enumerate(zip(self._rules, values, strict=True)):
            rule.__dict__.update(self._checked_rule(number, own).__dict__)
        self._checked = values

    def restore(self, configuration: Mapping[str, Any]) -> str:
        """Take the values of all groups, if something had changed them before they were saved; else the rule's own."""
        problem = super().restore(configuration)
        if not isinstance(configuration.get("live"), list):
            for group, first in zip(self.groups, self._first, strict=True):
                group.update({name: value for name, value in _values_of(first).items() if name in self.names})
        self.check()
        return problem

    # -- inside -----------------------------------------------------------------------------------------------------

    def _values(self) -> list[dict[str, Any]]:
        pairs = zip(self._own, self.groups, strict=True)
        return [{name: _plain(group[name]) for name in own} for own, group in pairs]

    def _checked_rule(self, number: int, values: dict[str, Any]) -> Rule:
        """A rule with other values, as its class makes it."""
        first = self._first[number]
        try:
            own: Any = getattr(first, "with_values", None)  # a `TorchRule` has its values in a mapping
            made: Rule = replace(first, **values) if own is None else own(values)
        except (TypeError, ValueError) as error:
            raise type(error)(f"param_groups[{number}]: {error}") from None
        if more := [slot for slot in made.slots if slot not in first.slots]:
            raise ValueError(_needs_more(number, self.what, more))
        if made.slots != first.slots or made.kernel != first.kernel:
            raise ValueError(
                f"param_groups[{number}] of {self.what} was changed, and has another formula now; set such options "
                "before as_distributed"
            )
        return made


@functools.cache
def _following(kind: type) -> type:
    """The class of rules of a class that follow groups."""
    names = {"__doc__": kind.__doc__, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (FollowsGroups, kind), names)


def _values_of(rule: Rule) -> dict[str, Any]:
    """The values of a rule that a group has: its numbers, with the learning rate of the first step."""
    own = [each.name for each in fields(rule) if each.init and each.compare]
    found: dict[str, Any] = getattr(rule, "values", {name: getattr(rule, name) for name in own})
    found = {**found, "lr": rule.learning_rate(1)}
    return {name: value for name, value in found.items() if name not in _FIXED and _is_saved(name, value)}


def groups_of(rule: Any, tensors: Mapping[str, Any]) -> ParameterGroups:
    """The parameter groups of a rule or method: those that it follows, or new ones.

    One group without values where the rule has none that could change.  Raises ValueError if such an optimizer of
    PyTorch needs whole tensors, and one is complex: steps see pairs of reals.
    """
    divides = isinstance(rule, Rule) and rule.own_steps is None
    if divides and rule.whole_tensors and hasattr(rule, "with_values"):
        for name, p in tensors.items():
            if p.is_complex():
                raise ValueError(f"parameter {name!r} is complex, and {rule.kernel.name} needs whole tensors; {REMEDY}")
    if isinstance(rule, Rule) and isinstance(rule.live, LiveGroups):
        return rule.live
    if divides and rule.whole_tensors and getattr(rule, "shapes", ()) is None:  # of a `TorchRule`
        rule = replace(rule, shapes=[tuple(p.shape) for p in tensors.values()])
    # A class with a `by_tensor` of its own chooses the rules of tensors itself, but for a `TorchRule`.
    known = Rule.by_tensor, FollowsGroups.by_tensor
    if isinstance(rule, Rule) and (type(rule).by_tensor in known or hasattr(rule, "with_values")):
        return RuleGroups(rule, tensors)
    return ParameterGroups(f"the {type(rule).__name__}", [{"params": list(tensors.values())}], {})


def _needs_more(number: int, what: str, more: Sequence[str]) -> str:
    return (
        f"param_groups[{number}] of {what} was changed, and needs {', '.join(more)} now, which did not exist when the "
        "module was made distributed; set such options before as_distributed"
    )


def _check_parameters(groups: list[dict[str, Any]], names: Mapping[int, str]) -> None:
    """Raise ValueError unless the groups have the parameters of the module that are trained, and no others."""
    held = {id(p) for group in groups for p in group["params"] if p.requires_grad}
    if missing := [name for number, name in names.items() if number not in held]:
        raise ValueError(
            f"parameter {missing[0]!r} of the module is not in the optimizer; give it all, or set requires_grad=False"
        )
    if len(held) > len(names):
        raise ValueError(
            f"the optimizer has {len(held) - len(names)} parameters that the module does not have: give a module that "
            "has all of them, as torch.nn.ModuleList([encoder, head]), or make an optimizer for the parameters of each"
        )


def _plain(value: Any) -> Any:
    if type(value) in (float, int, bool, type(None)):  # nearly all are, and each step asks
        return value
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    single = isinstance(value, torch.Tensor) and value.numel() == 1
    return value.item() if single or isinstance(value, np.generic) else value


def saved_values(group: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a group that `ParameterGroups.restore` takes, for JSON."""
    return {name: _as_json(value) for name, value in group.items() if _is_saved(name, value)}


def _as_json(value: Any) -> Any:
    plain = _plain(value)
    return list(plain) if isinstance(plain, tuple) else plain


def _is_saved(name: str, value: Any) -> bool:
    if name in ("params", *_HOW):  # a parameter of one element may have no value here
        return False
    plain = _plain(value)
    each = plain if isinstance(plain, tuple) else (plain,)
    return all(isinstance(number, float | int | str) for number in each)


def _text(value: Any) -> str:
    """To nine digits, since processors may differ in the last."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _kept(division: Division) -> tuple[str, ...]:
    return division.slots + division.numbers


def _listed(division: Division) -> str:
    return ", ".join((division.packed or division.slots) + division.numbers) or "no state"
