"""What decides the steps of an optimizer, as text by name, and whether it is the same on all ranks.

Ranks whose settings differ take different steps: their replicas drift apart, or they wait in different collectives.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from numbers import Real
from typing import Any, Protocol

import numpy as np

from mpishard.backend import array as arrays
from mpishard.comm.axis import Axis
from mpishard.data_parallel.configuration import ShardingConfiguration
from mpishard.data_parallel.model_parallel_group import ModelParallelGroup
from mpishard.data_parallel.strategies import Strategy
from mpishard.optim.rules import Rule
from mpishard.parameters.flat import FlatParameters
from mpishard.version import VERSION

# The steps at which schedules are compared: each up to 10, then each a fifth further than the one before.
_STEPS = sorted({*range(1, 11), *(int(1.2**power) for power in range(13, 76))})
_MOST_SHOWN = 4
_WAY_OUT = "give the same on every rank"


class Configured(Protocol):
    """What decides the steps of an optimizer, and the ranks that take them."""

    @property
    def rule(self) -> Rule: ...
    @property
    def config(self) -> ShardingConfiguration: ...
    @property
    def strategy(self) -> type[Strategy]: ...
    @property
    def world(self) -> Axis: ...
    @property
    def measure_norm(self) -> bool: ...
    @property
    def further_settings(self) -> Mapping[str, Any]: ...


class Settings:
    """The settings of one optimizer, and a number for them, found anew where its rule or configuration is another."""

    def __init__(self, optimizer: Configured) -> None:
        self._optimizer = optimizer
        self._rule: Rule | None = None
        self._config: ShardingConfiguration | None = None
        self._fingerprint = 0

    @property
    def changed(self) -> bool:
        """Whether the optimizer has another rule or configuration than when they were last looked at."""
        return self._optimizer.rule is not self._rule or self._optimizer.config is not self._config

    @property
    def fingerprint(self) -> int:
        """A number of 62 bits that depends on all of `by_name`."""
        if self.changed:
            self._note(self.by_name())
        return self._fingerprint

    def by_name(self) -> dict[str, str]:
        """All that decides the steps of the optimizer but the parameters, for every rank to have the same."""
        optimizer = self._optimizer
        config = {field.name: getattr(optimizer.config, field.name) for field in fields(optimizer.config)}
        del config["mesh"]
        kinds = {"mpishard": VERSION, "optimizer": type(optimizer).__name__, "strategy": optimizer.strategy.__name__}
        described = {name: _text(value) for name, value in (config | dict(optimizer.further_settings)).items()}
        return kinds | described | settings_of_rule(optimizer.rule)

    def of_state(self, parameters: FlatParameters) -> dict[str, str]:
        """What decides how the state for these parameters is made and used, besides `by_name`."""
        return {
            "measure_norm": str(self._optimizer.measure_norm),
            "strategy": self._optimizer.strategy.fitting(parameters).__name__,
            "module of the parameters": arrays.module_of(parameters.like).__name__,
            "parameters sharded": str(parameters.sharded is not None),
        }

    def agree(
        self, further: Mapping[str, str] | None = None, problem: Exception | None = None, what: str = "settings"
    ) -> None:
        """Raise on all ranks unless the optimizer has the same settings on all, and `further` ones are the same too.

        Collective.  The other parameters are those of `agree_on_settings`.
        """
        settings = self.by_name()
        agree_on_settings(self._optimizer.world, {**settings, **(further or {})}, problem, what=what)
        self._note(settings)

    def _note(self, settings: Mapping[str, str]) -> None:
        self._rule, self._config = self._optimizer.rule, self._optimizer.config
        self._fingerprint = fingerprint(settings)


def agree_on_settings(
    ranks: Axis | ModelParallelGroup,
    settings: Mapping[str, str],
    problem: Exception | None = None,
    *,
    what: str = "settings",
    way_out: str = _WAY_OUT,
) -> None:
    """Raise on all of `ranks` if any has a problem, or if their settings differ.  Collective over them.

    Raises
    ------
    ValueError
        That tells which settings differ, and on whom.
    """
    number = fingerprint(settings)
    facts = np.array([problem is not None, number, -number], np.int64)
    ranks.all_reduce(facts, op="max", label="control")
    if facts[0]:
        ranks.raise_together(problem)
    if facts[1] != -facts[2]:
        raise differing(ranks, settings, what, way_out)


def differing(
    ranks: Axis | ModelParallelGroup, settings: Mapping[str, str], what: str = "settings", way_out: str = _WAY_OUT
) -> ValueError:
    """The error for settings that differ between `ranks`.  Collective over them."""
    told = dict(zip(ranks.members, ranks.allgather_object(dict(settings)), strict=True))
    found: dict[str, str] = {}
    for name in dict.fromkeys(name for each in told.values() for name in each):
        holders: dict[str, list[int]] = {}
        for rank, each in told.items():
            holders.setdefault(each.get(name, "not there"), []).append(rank)
        if len(holders) > 1:
            shown = [f"{value} on {_ranks(members)}" for value, members in holders.items()]
            more = f" and {len(shown) - _MOST_SHOWN} more values" if len(shown) > _MOST_SHOWN else ""
            # Of a schedule the first step says enough.
            found.setdefault(name.partition("(")[0], f"{name} is {', '.join(shown[:_MOST_SHOWN])}{more}")
    shown = [text for name, text in found.items() if not name.endswith("scalars")]  # which follow from the others
    shown = shown or list(found.values())
    more = f"; and {len(shown) - _MOST_SHOWN} others" if len(shown) > _MOST_SHOWN else ""
    return ValueError(f"all ranks must have the same {what}, but {'; '.join(shown[:_MOST_SHOWN])}{more}: {way_out}")


def fingerprint(settings: Mapping[str, str]) -> int:
    """A number of 62 bits that depends on all settings, in whatever order."""
    text = repr(sorted(settings.items()))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 2


def settings_of_rule(rule: Rule, of: str = "") -> dict[str, str]:
    """All that decides the steps of a rule; its functions of the step by their values."""
    told = {"rule": type(rule).__qualname__}
    told |= {field.name: _text(getattr(rule, field.name)) for field in fields(rule) if field.compare}
    told.pop("lr", None)  # a number and a schedule may be the same
    told["slots"] = ", ".join(f"{slot} from {_text(rule.initial(slot))}" for slot in rule.slots)
    told["formula"] = f"{rule.kernel.name} {fingerprint({'': rule.kernel.c_body}):x}"
    told |= {f"lr({step})": _value(rule.learning_rate, step) for step in _STEPS}
    told |= {f"scalars({step})": _value(rule.scalars, step) for step in _STEPS}
    return {f"{of}{name}": text for name, text in told.items()}


def _value(function: Callable[[int], Any], step: int) -> str:
    """What a function of the step gives, to nine digits: processors may differ in the last; or how it fails there."""
    try:
        found = function(step)
        return f"({', '.join(f'{value:.9g}' for value in found)})" if isinstance(found, tuple) else f"{found:.9g}"
    except Exception as error:  # a schedule may have no more steps than the run
        return type(error).__name__


def _text(value: Any) -> str:
    """A value as text that is the same in every process; of functions and objects their name only."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if value is None or isinstance(value, bool | Real | str):
        return str(value)
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_text(each)}' for key, each in value.items())}}}"
    if arrays.is_array(value):
        content = hashlib.blake2b(np.ascontiguousarray(arrays.to_host(value)).tobytes(), digest_size=8).hexdigest()
        return f"{value.dtype} {value.shape} {content}"
    if is_dataclass(value) and not isinstance(value, type):
        inside = (f"{field.name}={_text(getattr(value, field.name))}" for field in fields(value) if field.compare)
        return f"{type(value).__name__}({', '.join(inside)})"
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _ranks(ranks: list[int]) -> str:
    """Ranks in words."""
    shown = ", ".join(map(str, ranks[:_MOST_SHOWN]))
    more = f" and {len(ranks) - _MOST_SHOWN} others" if len(ranks) > _MOST_SHOWN else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
