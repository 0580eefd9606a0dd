"""What decides an optimizer's steps: its settings and the arguments of a call.

Ranks with different settings take different steps: their copies of the model diverge, or they wait in different
collectives.  `agree_on_step` compares parameters, divisor and settings before each step.  `agree_whether_begun` does so
before what all do between two steps.  If ranks differ, all raise one error (`mpishard.comm.agreement`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Any, Protocol

import numpy as np

from mpishard.backend import array as arrays
from mpishard.comm.agreement import REMEDY, agree_on_settings, fingerprint, gather_difference, gather_in_call, text_of
from mpishard.comm.axis import Axis, ModelParallelGroup
from mpishard.data_parallel.arithmetic import Arithmetic
from mpishard.data_parallel.configuration import SHARDING, ShardingConfiguration
from mpishard.data_parallel.strategies import Sharding
from mpishard.io import log
from mpishard.layout.run_state import brief
from mpishard.minimizers import Method
from mpishard.optim import Muon, Rule
from mpishard.optim.rule import LiveValues
from mpishard.parameters.flat import FlatParameters
from mpishard.version import VERSION

_CALLS_REMEDY = (
    "make the same passes and calls on each rank, and zero_grad() drops them; where a rank has no samples, use "
    "mpishard.torch.join, or step(count=) with losses that are sums over samples"
)
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
    def sharding(self) -> Sharding: ...
    @property
    def world(self) -> Axis: ...
    @property
    def measure_norm(self) -> bool: ...


class Settings:
    """The settings of one optimizer and their fingerprint, computed again if its rule or configuration is replaced.

    What else its bits depend on is in `arithmetic`.  `options` returns those of its state as text, but for the values
    that other code changes between two steps, which `live` returns.  Whoever changes one of the options calls
    `note_change`.
    """

    def __init__(
        self,
        optimizer: Configured,
        options: Callable[[], Mapping[str, str]],
        live: Callable[[], LiveValues | None],
    ) -> None:
        self.arithmetic = Arithmetic()
        self._optimizer = optimizer
        self._options = options
        self._live = live
        self._rule: Rule | Method | None = None
        self._config: ShardingConfiguration | None = None
        self._known: Mapping[str, str] = {}  # `_fixed` of these two
        self._fingerprint = self._live_fingerprint = 0

    @property
    def changed(self) -> bool:
        """Return True if a setting was replaced or changed since the last comparison or fingerprint."""
        live = self.live
        return self._replaced or (live is not None and live.fingerprint != self._live_fingerprint)

    @property
    def live(self) -> LiveValues | None:
        """The settings that other code changes between two steps, if there are any."""
        return self._live()

    @property
    def remedy(self) -> str:
        """The remedy where settings differ between ranks, for messages."""
        return REMEDY if self.live is None else self.live.remedy

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
        names = {"optimizer": type(optimizer).__name__, "strategy": optimizer.sharding.name}
        described = {name: text_of(value) for name, value in config.items()}
        return {"mpishard": VERSION, **names, **described, **self._options()}

    def agree_on_state(self, parameters: FlatParameters, problem: Exception | None) -> None:
        """`agree` before the state for these parameters is made, also on what decides that, and bits. Collective."""
        further = {
            "measure_norm": str(self._optimizer.measure_norm),
            "strategy": self._optimizer.sharding.fitting(parameters).name,
            "module of the parameters": arrays.module_of(parameters.like).__name__,
            "parameters sharded": str(parameters.sharded is not None),
            "parameters": parameters.description,
            "parameters(digest)": f"{parameters.fingerprint:x}",
        }
        self.agree(further, problem)
        self.arithmetic.take(parameters, self._optimizer.config, self._optimizer.world)

    def agree(
        self, further: Mapping[str, str] | None = None, problem: Exception | None = None, what: str = "settings"
    ) -> None:
        """Raise on all ranks unless the optimizer's settings, and the `further` ones, are the same on all ranks.

        Collective. The other parameters are those of `agree_on_settings`.
        """
        # Where nothing was replaced, arrays among the settings, such as bounds, are not read again.
        fixed, live = self._fixed() if self._replaced else self._known, self.live
        settings = {**fixed, **({} if live is None else live.by_name), **(further or {})}
        agree_on_settings(self._optimizer.world, settings, problem, what=what, remedy=self.remedy)
        self._note(fixed)
        self._live_fingerprint = 0 if live is None else live.fingerprint

    def report(self, own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        """Report on rank 0 what differs between facts of this run and saved ones: of the rules, and of bits."""
        optimizer, changed = self._optimizer, _changed(own, saved)
        if changed and optimizer.world.rank == 0:
            log.inform(f"the saved state continues with {', '.join(changed)}")
        self.arithmetic.note(saved, optimizer.config, optimizer.world.rank)

    @property
    def _replaced(self) -> bool:
        return self._optimizer.rule is not self._rule or self._optimizer.config is not self._config

    def _note(self, settings: Mapping[str, str]) -> None:
        self._rule, self._config, self._known = self._optimizer.rule, self._optimizer.config, settings
        self._fingerprint = fingerprint(settings)


def settings_of_method(method: Method) -> dict[str, str]:
    """All settings that decide the steps of a method."""
    return {"rule": type(method).__qualname__, **_fields_of(method, ())}


def settings_of_rule(rule: Rule, of: str = "") -> dict[str, str]:
    """All settings that decide the steps of a rule; a function of the step appears as its values."""
    live = rule.live
    # Values that other code changes between two steps are compared by themselves.
    settings = {"rule": type(rule).__qualname__, **_fields_of(rule, () if live is None else live.names)}
    settings.pop("lr", None)  # compared by value below: a number and a schedule may give the same rates
    settings["slots"] = ", ".join(f"{slot} from {text_of(rule.initial(slot))}" for slot in rule.slots)
    settings["formula"] = f"{rule.kernel.name} {fingerprint({'': rule.kernel.c_body}):x}"
    if live is None or "lr" not in live.names:
        settings |= {f"lr({step})": _value(rule.learning_rate, step) for step in _STEPS}
    if live is None:
        settings |= {f"scalars({step})": _value(rule.scalars, step) for step in _STEPS}
    if isinstance(rule, Muon):
        settings |= settings_of_rule(rule.rest, "rest ")
    return {f"{of}{name}": text for name, text in settings.items()}


def _value(function: Callable[[int], Any], step: int) -> str:
    """A function's value at a step, to nine digits since processors may differ in the last; or its error's name."""
    try:
        found = function(step)
        return f"({', '.join(f'{value:.9g}' for value in found)})" if isinstance(found, tuple) else f"{found:.9g}"
    except Exception as error:  # a schedule may end with the run, before the last of the compared steps
        return type(error).__name__


def _fields_of(rule: Rule | Method, without: Collection[str]) -> dict[str, str]:
    names = [field.name for field in fields(rule) if field.compare and field.name not in without]
    return {name: text_of(getattr(rule, name)) for name in names}


def _changed(facts: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """Descriptions of the settings of rules and of clipping that differ between the facts and saved ones."""
    changed = []
    for of, name in (("", "rule.json"), ("outer ", "outer_rule.json"), ("", SHARDING)):
        ours, theirs = facts.get(name), saved.get(name)
        if not (isinstance(ours, Mapping) and isinstance(theirs, Mapping)):
            continue
        if name == SHARDING:  # the rest is how a step is spread over ranks
            ours, theirs = ({key: each[key] for key in _CLIPPING if key in each} for each in (ours, theirs))
        else:
            ours, theirs = ({"groups": "none", **each} for each in (ours, theirs))
        both = [(key, value, theirs[key]) for key, value in ours.items() if key in theirs and key != "live"]
        differ = [(key, value, then) for key, value, then in both if value != then]
        changed += [f"{of}{key}={value} in place of {brief(then)}" for key, value, then in differ]
    return changed


# Comparisons of ranks.


def agree_on_step(
    ranks: Axis | ModelParallelGroup,
    parameters: FlatParameters | None,
    count: float | None,
    problem: Exception | None,
    settings: Settings | None = None,
    largest: float = math.inf,
) -> float:
    """Raise on all of some ranks if any has a problem, or if their arguments of `step` differ. Collective over them.

    A problem of any rank is raised as it is, a difference as ValueError on every rank. `parameters` is None where this
    rank has a problem; `count` is the divisor that it was given. Returns the maximum over the ranks of `largest`, a
    number that is not negative: it travels with the comparison.
    """
    if len(ranks.members) == 1:  # nothing to compare
        if problem is not None:
            raise problem
        return largest
    model = -1 if parameters is None else parameters.fingerprint ^ parameters.model_fingerprint
    if settings is not None:
        model ^= settings.fingerprint
    calls = {} if parameters is None else parameters.carried.calls
    if calls:
        model ^= fingerprint(calls)
    # One that was refused may be no number.
    number = -1 if count is None or problem is not None else int(np.float64(count).view(np.int64))
    # The bits of floating-point numbers that are not negative have the order of the numbers.
    order = int(np.float64(largest).view(np.int64))
    shared = np.array([problem is not None, model, -model, number, -number, order], np.int64)
    ranks.all_reduce(shared, op="max", label="control")
    if shared[0]:
        ranks.raise_together(problem)
    assert parameters is not None
    if shared[1] != -shared[2]:
        models = gather_in_call(ranks, "step", (parameters.fingerprint, parameters.description))
        if len({model for model, _ in models}) == 1:
            if any(calls != each for each in ranks.allgather_object(dict(calls))):
                raise gather_difference(ranks, calls, "calls since the last step", _CALLS_REMEDY)
            by_name, remedy = ({}, REMEDY) if settings is None else (settings.by_name(), settings.remedy)
            raise gather_difference(ranks, {**by_name, **parameters.model_settings}, remedy=remedy)
        found = ", ".join(f"rank {rank} {what}" for rank, (_, what) in zip(ranks.members, models, strict=True))
        raise ValueError(f"all ranks must have the same parameters in the same order; here: {found}")
    if shared[3] != -shared[4]:
        raise ValueError(f"count must be the global number, the same on all ranks; got {ranks.allgather_object(count)}")
    return float(shared[5:].view(np.float64)[0])


def agree_whether_begun(world: Axis, has_begun: bool, settings: Settings) -> bool:
    """Return True if all ranks have taken a first step, False if none has. Collective over the ranks.

    Raises ValueError on every rank if only some have, or if settings differ.
    """
    states = world.allgather_object((has_begun, settings.fingerprint))
    waiting = [rank for rank, (begun, _) in enumerate(states) if not begun]
    if waiting:
        if len(waiting) < len(states):
            raise ValueError(f"ranks {waiting} have not called step() yet")
        return False
    if len(set(states)) > 1:
        raise gather_difference(world, settings.by_name(), remedy=settings.remedy)
    return True
