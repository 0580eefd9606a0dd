"""The settings that decide an optimizer's steps, as text by name.

Ranks with different settings take different steps: their copies of the model diverge, or they wait in different
collectives.  `mpishard.comm.agreement` compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Protocol

from mpishard.backend import array as arrays
from mpishard.comm.agreement import WAY_OUT, agree_on_settings, fingerprint, text_of
from mpishard.comm.axis import Axis
from mpishard.data_parallel.configuration import ShardingConfiguration
from mpishard.data_parallel.strategy import Strategy
from mpishard.layout.run_state import brief
from mpishard.minimizers import Method
from mpishard.optim import Rule
from mpishard.optim.live_values import LiveValues
from mpishard.parameters.flat import FlatParameters
from mpishard.version import VERSION

_CLIPPING = ("max_gradient_norm", "max_gradient_value")
# The steps at which schedules are compared: all steps up to 10, then steps that grow by a factor of 1.2.
_STEPS = sorted({*range(1, 11), *(int(1.2**power) for power in range(13, 76))})


class Configured(Protocol):
    """The settings that decide an optimizer's steps, and the ranks that take the steps."""

    @property
    def rule(self) -> Rule | Method: ...
    @property
    def config(self) -> ShardingConfiguration: ...
    @property
    def strategy(self) -> type[Strategy]: ...
    @property
    def world(self) -> Axis: ...
    @property
    def measure_norm(self) -> bool: ...


class HasSettings(Protocol):
    """State with settings, such as a `FurtherState`."""

    @property
    def settings(self) -> Mapping[str, Any]: ...


class Settings:
    """The settings of one optimizer and their fingerprint, computed again if its rule or configuration is replaced.

    `further` is state in addition to that of the rule; whoever changes one of its settings calls `note_change`.
    """

    def __init__(self, optimizer: Configured, further: Sequence[HasSettings]) -> None:
        self._optimizer = optimizer
        self._further = further
        self._rule: Rule | Method | None = None
        self._config: ShardingConfiguration | None = None
        self._fingerprint = self._live_fingerprint = 0

    @property
    def changed(self) -> bool:
        """Return True if a setting was replaced or changed since the last comparison or fingerprint."""
        live = self.live
        return self._replaced or (live is not None and live.fingerprint != self._live_fingerprint)

    @property
    def live(self) -> LiveValues | None:
        """The settings that other code changes between two steps, if there are any."""
        rule = self._optimizer.rule
        return rule.live if isinstance(rule, Rule) else None

    @property
    def way_out(self) -> str:
        """The remedy where settings differ between ranks, for messages."""
        return WAY_OUT if self.live is None else self.live.way_out

    def note_change(self) -> None:
        """Note that a setting has another value: ranks compare with their next step or decision."""
        self._rule = self._config = None

    @property
    def fingerprint(self) -> int:
        """A number of 62 bits that depends on all of `by_name`."""
        if self._replaced:
            self._note(self._fixed())
        live = self.live
        if live is None:
            return self._fingerprint
        self._live_fingerprint = live.fingerprint
        return self._fingerprint ^ self._live_fingerprint

    def by_name(self) -> dict[str, str]:
        """All settings that decide the steps of the optimizer; every rank must have the same.  Without parameters."""
        return {**self._fixed(), **({} if self.live is None else self.live.by_name)}

    def _fixed(self) -> dict[str, str]:
        """The settings that stay until the rule or the configuration is replaced."""
        optimizer = self._optimizer
        config = {field.name: getattr(optimizer.config, field.name) for field in fields(optimizer.config)}
        del config["mesh"]
        further = {name: value for each in self._further for name, value in each.settings.items()}
        kinds = {"mpishard": VERSION, "optimizer": type(optimizer).__name__, "strategy": optimizer.strategy.__name__}
        described = {name: text_of(value) for name, value in (config | further).items()}
        return kinds | described | settings_of_rule(optimizer.rule)

    def of_state(self, parameters: FlatParameters) -> dict[str, str]:
        """Further settings that decide how the state for these parameters is created and used."""
        return {
            "measure_norm": str(self._optimizer.measure_norm),
            "strategy": self._optimizer.strategy.fitting(parameters).__name__,
            "module of the parameters": arrays.module_of(parameters.like).__name__,
            "parameters sharded": str(parameters.sharded is not None),
        }

    def agree(
        self, further: Mapping[str, str] | None = None, problem: Exception | None = None, what: str = "settings"
    ) -> None:
        """Raise on all ranks unless the optimizer's settings, and the `further` ones, are the same on all ranks.

        Collective. The other parameters are those of `agree_on_settings`.
        """
        fixed, live = self._fixed(), self.live
        settings = {**fixed, **({} if live is None else live.by_name), **(further or {})}
        agree_on_settings(self._optimizer.world, settings, problem, what=what, way_out=self.way_out)
        self._note(fixed)
        self._live_fingerprint = 0 if live is None else live.fingerprint

    @property
    def _replaced(self) -> bool:
        return self._optimizer.rule is not self._rule or self._optimizer.config is not self._config

    def _note(self, settings: Mapping[str, str]) -> None:
        self._rule, self._config = self._optimizer.rule, self._optimizer.config
        self._fingerprint = fingerprint(settings)


def settings_of_rule(rule: Rule | Method, of: str = "") -> dict[str, str]:
    """All settings that decide the steps of a rule or method; a function of the step appears as its values."""
    settings = {"rule": type(rule).__qualname__}
    # Values that other code changes between two steps are compared by themselves.
    live = rule.live if isinstance(rule, Rule) else None
    held = [field.name for field in fields(rule) if field.compare and (live is None or field.name not in live.names)]
    settings |= {name: text_of(getattr(rule, name)) for name in held}
    if isinstance(rule, Method):
        return settings
    settings.pop("lr", None)  # compared by value below: a number and a schedule may give the same rates
    settings["slots"] = ", ".join(f"{slot} from {text_of(rule.initial(slot))}" for slot in rule.slots)
    settings["formula"] = f"{rule.kernel.name} {fingerprint({'': rule.kernel.c_body}):x}"
    if live is None or "lr" not in live.names:
        settings |= {f"lr({step})": _value(rule.learning_rate, step) for step in _STEPS}
    if live is None:
        settings |= {f"scalars({step})": _value(rule.scalars, step) for step in _STEPS}
    return {f"{of}{name}": text for name, text in settings.items()}


def changed_settings(facts: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """Descriptions of the settings of rules and of clipping that differ between the facts and saved ones."""
    changed = []
    for of, name in (("", "rule.json"), ("outer ", "outer_rule.json"), ("", "sharding.json")):
        ours, theirs = facts.get(name), saved.get(name)
        if not (isinstance(ours, Mapping) and isinstance(theirs, Mapping)):
            continue
        if name == "sharding.json":  # the rest is how a step is spread over ranks
            ours, theirs = ({key: each[key] for key in _CLIPPING if key in each} for each in (ours, theirs))
        else:
            ours, theirs = ({"groups": "none", **each} for each in (ours, theirs))
        both = [(key, value, theirs[key]) for key, value in ours.items() if key in theirs and key != "live"]
        differ = [(key, value, then) for key, value, then in both if value != then]
        changed += [f"{of}{key}={value} in place of {brief(then)}" for key, value, then in differ]
    return changed


def _value(function: Callable[[int], Any], step: int) -> str:
    """A function's value at a step, to nine digits since processors may differ in the last; or its error's name."""
    try:
        found = function(step)
        return f"({', '.join(f'{value:.9g}' for value in found)})" if isinstance(found, tuple) else f"{found:.9g}"
    except Exception as error:  # a schedule may end with the run, before the last of the compared steps
        return type(error).__name__
