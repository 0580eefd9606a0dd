"""What decides an optimizer's steps and their bits: settings, arguments of a call, and the arithmetic of the machine.

Ranks with different settings take different steps: their copies of the model diverge, or they wait in different
collectives.  `agree_on_step` compares parameters, divisor and settings before each step.  `agree_whether_begun` does so
before what all do between two steps.  If ranks differ, all raise one error (`mpishard.comm.agreement`).

`ShardingConfiguration.reproducible` promises the same bits on any layout, but not with another BLAS kernel, another
number of shards or other micro-batches. A run that would resume with other ones raises, or records that it continued
with them (`Numerics`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Any, Protocol

import numpy as np

from mpishard.backend import array as arrays
from mpishard.backend.gemm import choice
from mpishard.backend.process import arithmetic, fix_blas_threads, of_products
from mpishard.comm.agreement import REMEDY, agree_on_settings, fingerprint, gather_difference, gather_in_call, text_of
from mpishard.comm.axis import Axis, ModelParallelGroup
from mpishard.data_parallel.configuration import ShardingConfiguration
from mpishard.data_parallel.strategies import Sharding
from mpishard.io import log
from mpishard.layout.run_state import brief
from mpishard.minimizers import Method
from mpishard.optim import Muon, Rule
from mpishard.optim.rule import LiveValues
from mpishard.parameters.flat import FlatParameters
from mpishard.version import VERSION

# Names among the facts of a state.
ARITHMETIC, DIFFERENT_BITS = "arithmetic.json", "different_bits.json"
_PROMISE = "arithmetic for the same bits on any layout (reproducible=True)"
_ALLOWED = "ShardingConfiguration(..., allow_different_bits=True) continues, and records it"
# By fact how to have the value that the saved run had; others are of the machine and its libraries.
_REMEDIES = {
    "kernels": "run it with the release of mpishard that made the state",
    "BLAS kernels": "set OPENBLAS_CORETYPE={}",
    "BLAS threads": "set OPENBLAS_NUM_THREADS={}",
    "products": "set MPISHARD_PRODUCTS={}",
    "libraries for products": "have {} on all ranks",
    "XLA threads": "set NPROC={}",
    "shards": "make the model with shards={}",
    "micro_batch_size": "give the problem micro_batch_size={}",
    "dtype": "make the model with dtype={}",
}
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

    What else its bits depend on is in `numerics`.  `options` returns those of its state as text, but for the values
    that other code changes between two steps, which `live` returns.  Whoever changes one of the options calls
    `note_change`.
    """

    def __init__(
        self,
        optimizer: Configured,
        options: Callable[[], Mapping[str, str]],
        live: Callable[[], LiveValues | None],
    ) -> None:
        self.numerics = Numerics()
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
        self.numerics.take(parameters, self._optimizer.config, self._optimizer.world)

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

    # -- what else bits depend on: see `Numerics` ---------------------------------------------------------------------

    def fix_threads(self) -> None:
        """Take one thread for products from now on, if the bits of the run must not depend on their number."""
        if self._optimizer.config.reproducible:
            fix_blas_threads()

    def keep_products(self) -> None:
        """Continue with the libraries for products that the ranks have agreed on, if another mesh has changed them."""
        if self._optimizer.config.reproducible:
            self.numerics.keep_products()

    def note_micro_batches(self, size: int | None) -> None:
        """Note the problem's `micro_batch_size`."""
        self.numerics.own["micro_batch_size"] = "a 16th of the batch" if size is None else str(size)

    @property
    def facts(self) -> dict[str, Any]:
        """The facts for a `RunState`."""
        return self.numerics.facts

    @property
    def record(self) -> dict[str, Any]:
        """The facts for the record of a run."""
        return {name.removesuffix(".json"): value for name, value in self.facts.items()}

    def check(self, saved: Mapping[str, Any]) -> None:
        """Raise ValueError unless the run can continue from saved facts with the bits that it promises."""
        self.numerics.check(saved, self._optimizer.config)

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue from saved facts that have passed `check`."""
        self.numerics.restore(saved)

    def report(self, own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        """Report on rank 0 what differs between facts of this run and saved ones: of the rules, and of bits."""
        optimizer, changed = self._optimizer, _changed(own, saved)
        if changed and optimizer.world.rank == 0:
            log.inform(f"the saved state continues with {', '.join(changed)}")
        self.numerics.note(saved, optimizer.config, optimizer.world.rank)

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
    calls = {} if parameters is None or parameters.carried is None else parameters.carried.calls
    if calls:
        model ^= fingerprint(calls)
    number = -1 if count is None else int(np.float64(count).view(np.int64))
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


# What bits depend on.


class Numerics:
    """What the bits of one optimizer's steps depend on besides its settings, as facts of this rank.

    A reproducible run compares them between its ranks, and with the facts of a checkpoint from which it resumes.
    """

    def __init__(self) -> None:
        self.own: dict[str, str] = {}  # the facts as texts, once there are parameters
        # What the run continued with in place of other facts, with ``allow_different_bits=True``; the same on all ranks
        self.changes: list[str] = []
        self._products = choice.Choice()

    def take(self, parameters: FlatParameters, config: ShardingConfiguration, world: Axis) -> None:
        """Note the facts of this process, and compare those of all ranks of a reproducible run. Collective.

        Raises ValueError on all ranks if they differ, unless the configuration allows it.
        """
        if config.reproducible:
            fix_blas_threads()  # a mesh created after the optimizer has changed their number
        before, self._products = self.own.get("shards"), choice.active()
        self.own |= {
            **arithmetic(),
            **({} if parameters.carried is None else parameters.carried.arithmetic),
            "arrays": arrays.module_of(parameters.like).__name__,
            "dtype": parameters.dtype.name,
            "shards": _shards(parameters),
        }
        self.agree(config, world)
        if config.reproducible and before not in (None, self.own["shards"]):  # another mesh
            self._change(f"the bits change with the mesh: shards was {before} and is {self.own['shards']}", world.rank)
        if config.reproducible and parameters.layout_dependence:
            self._change(f"the bits depend on the layout: the model has {parameters.layout_dependence}", world.rank)

    def note_products(self) -> None:
        """Note the libraries for matrix products, after this process has taken a choice of others.

        The ranks of the run do not: if one that joins lacks their library, they differ.
        """
        self._products = choice.active()
        self.own |= of_products(self._products)

    def keep_products(self) -> None:
        """Continue with the noted libraries for matrix products, if another mesh has changed them since.

        The ranks of a reproducible run have agreed on them.
        """
        if choice.active() is not self._products:
            choice.activate(self._products)

    def agree(self, config: ShardingConfiguration, ranks: Axis, *, places: bool = True) -> None:
        """Compare the facts of ranks that take part in a reproducible run, or are about to. Collective over them.

        `places`: all have one mesh. Raises ValueError on all ranks if they differ, unless the configuration allows it.
        """
        if not config.reproducible:
            return
        own = self.own if places else self.own | {"shards": self.own["shards"].partition(" on ")[0]}
        if not config.allow_different_bits:
            agree_on_settings(ranks, own, what=_PROMISE, remedy=f"use nodes of one kind; {_ALLOWED}")
        elif len(set(ranks.allgather_object(fingerprint(own)))) > 1:
            self._change(str(gather_difference(ranks, own, _PROMISE, "the bits depend on the layout")), ranks.rank)

    @property
    def facts(self) -> dict[str, Any]:
        """The facts for a `RunState`."""
        changes = {DIFFERENT_BITS: list(self.changes)} if self.changes else {}
        return {ARITHMETIC: dict(self.own), **changes} if self.own else changes

    def check(self, saved: Mapping[str, Any], config: ShardingConfiguration) -> None:
        """Raise ValueError unless a reproducible run resumes from saved facts with the same bits, or may differ."""
        if not config.reproducible or config.allow_different_bits or not _was_reproducible(saved):
            return
        if found := self._differences(saved):
            remedies = [_REMEDIES.get(name, f"run it where {name} is {{}}").format(then) for name, then, _ in found]
            raise ValueError(
                f"with reproducible=True the saved run must go on with what its bits depend on, but {_both(found)}; "
                f"{', '.join(remedies)}; or {_ALLOWED}"
            )

    def note(self, saved: Mapping[str, Any], config: ShardingConfiguration, rank: int) -> None:
        """Note, and warn on rank 0, what a run continues with in place of saved facts that have passed `check`."""
        if not config.reproducible or "sharding.json" not in saved:  # no checkpoint, or not of an optimizer
            return
        step, text = saved.get("steps", 0), ""
        if not _was_reproducible(saved):
            text = "its earlier steps were without reproducible=True"
        elif not _arithmetic(saved):
            text = "the checkpoint does not say with which BLAS kernels, shards and micro-batches it was made"
        elif found := self._differences(saved):
            self._change(f"from step {step} on other bits than in one run: {_both(found)}", rank)
        if text and rank == 0:
            log.inform(f"reproducible=True holds from step {step} on: {text}")

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue from saved facts that have passed `check`, with their list of changes."""
        earlier = saved.get(DIFFERENT_BITS, [])
        if isinstance(earlier, list | tuple):
            self.changes = list(dict.fromkeys([*map(brief, earlier), *self.changes]))

    def _differences(self, saved: Mapping[str, Any]) -> list[tuple[str, str, str]]:
        """The name, the saved and the own value of each fact that would differ; a fact that one side lacks does not."""
        theirs = _arithmetic(saved)
        pairs = [(name, theirs[name], own) for name, own in self.own.items() if name in theirs]
        return [pair for pair in pairs if pair[1] != pair[2]]

    def _change(self, text: str, rank: int) -> None:
        if text not in self.changes:
            self.changes.append(text)
            if rank == 0:
                log.inform(f"allow_different_bits=True: {text}")


def _shards(parameters: FlatParameters) -> str:
    """The slices over which a model is defined; its tensor ranks, if MPI takes the sums over them."""
    shards = max((spec.slices for spec in parameters.specs), default=1)
    tensor = parameters.place.tensor_size
    return f"1 on {tensor} tensor ranks" if parameters.sums_by_mpi and tensor > 1 else str(shards)


def _arithmetic(saved: Mapping[str, Any]) -> dict[str, str]:
    """The facts of a state on which bits depend, each as a short text; none if the state has no facts."""
    theirs = saved.get(ARITHMETIC)
    return {name: brief(value) for name, value in theirs.items()} if isinstance(theirs, Mapping) else {}


def _was_reproducible(saved: Mapping[str, Any]) -> bool:
    """Return True if a state is of a reproducible run, or does not say."""
    settings = saved.get("sharding.json")
    return not isinstance(settings, Mapping) or bool(settings.get("reproducible", True))


def _both(found: list[tuple[str, str, str]]) -> str:
    return ", ".join(f"{name} is {then} there and {own} here" for name, then, own in found)
