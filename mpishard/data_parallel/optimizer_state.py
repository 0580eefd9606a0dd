"""The state of an optimizer: what training loops and checkpoints need of it.

What takes the steps decides the class: `RuleState` of an update rule, `MinimizationState` of a method.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any, ClassVar

from mpishard.comm.agreement import opening, text_of
from mpishard.comm.axis import Axis, ModelParallelGroup
from mpishard.comm.errors import CaughtError, on_any, raised_on_all
from mpishard.data_parallel.auxiliary_state import AuxiliaryState
from mpishard.data_parallel.configuration import SHARDING
from mpishard.data_parallel.rank_state import Counters, RankState, check_numbers
from mpishard.data_parallel.settings import Configured, Settings
from mpishard.data_parallel.strategies import Strategy
from mpishard.data_parallel.validation import (
    check_layout,
    check_layout_dependence,
    check_reducer,
    check_same_model,
    check_saved_rule,
)
from mpishard.io import log
from mpishard.layout.run_state import RunState, names_fact
from mpishard.minimizers import Method
from mpishard.minimizers.method import Minimizer
from mpishard.optim import Rule
from mpishard.optim.rule import LiveValues
from mpishard.parameters.flat import CarriedState, FlatParameters

if TYPE_CHECKING:
    from mpishard.data_parallel.full_state import FullState  # imports h5py, which only `serialize` and `gather` need

Array = Any


class OptimizerState(ABC):
    """The state of one optimizer: the parameters that it trains, the arrays and numbers for them, and what moves them.

    It is the `state` of an optimizer, and exists before the first parameters are bound; its arrays do not.  Training
    loops save, move and restore it.  `auxiliary` is state besides that of the rule.
    """

    def __init__(self, optimizer: Configured, auxiliary: Sequence[AuxiliaryState] = ()) -> None:
        self.auxiliary = tuple(auxiliary)
        self.counters = Counters(optimizer.config.loss_scale)
        self.settings = Settings(optimizer, self.options, self.live_values)
        self._optimizer = optimizer
        self._on_rank: RankState | None = None
        self._deserialized: FullState | None = None  # until the first parameters are bound
        self._checked: tuple[object, ...] | None = None  # what `check_model` has found in order
        self._reported = False

    # -- what takes the steps -----------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def rule(self) -> Rule | Method:
        """What takes the steps."""

    def replace_rule(self, rule: Any) -> None:
        """Take the next step by another rule; TypeError or ValueError if it cannot continue with this state."""
        raise TypeError(
            f"{type(rule).__name__} cannot take the place of {type(self.rule).__name__}: what a method does next "
            "depends on what it has learned.  Make a new optimizer; deserialize(old.serialize()) continues with other "
            "options"
        )

    @property
    @abstractmethod
    def slot_names(self) -> tuple[str, ...]:
        """The names of the state arrays, each as large as the parameters, in their order."""

    def options(self) -> dict[str, str]:
        """All settings that decide the steps, apart from the configuration, as text."""
        auxiliary = {name: value for each in self.auxiliary for name, value in each.settings.items()}
        return {name: text_of(value) for name, value in auxiliary.items()}

    def live_values(self) -> LiveValues | None:
        """The settings of `rule` that other code changes between two steps, if there are any."""
        return None

    def is_spare(self, slot: str) -> bool:
        """True if a saved state may have this slot, and the rule continues without it."""
        return False

    @abstractmethod
    def make_slots(self, parameters: FlatParameters, size: int) -> dict[str, Array]:
        """New state arrays by name, for `size` elements of the parameters."""

    def check_fits(self, parameters: FlatParameters) -> None:  # noqa: B027
        """Raise ValueError unless `rule` can take steps of these parameters on this mesh."""

    @abstractmethod
    def check_step(self) -> None:
        """Raise unless `rule` can take the next step along gradients that the caller of `step` gives."""

    def check_rate(self) -> None:  # noqa: B027
        """Raise what a learning-rate schedule raises for the next step."""

    @abstractmethod
    def update(self, count: float, *, loss: float, rate_factor: float, exchange_status: bool) -> bool:
        """Finish the reductions and take a step, see `ShardedOptimizer.update`, which has noted this rank's status."""

    def moving_averages(self) -> list[Array]:
        """The moving average of each range of the parameters that this rank updates; ValueError if there is none."""
        raise ValueError(
            f"{type(self.rule).__name__} keeps no average of the parameters; give the rule ema_decay=0.999"
        )

    # -- what a minimisation has, and steps by a rule do not ----------------------------------------------------------

    @property
    def minimizer(self) -> Minimizer | None:
        """The minimisation of a method, once parameters are bound."""
        return None

    @abstractmethod
    def begin_stage(self, keep_history: Any) -> None:
        """Begin to minimise another function, see `ShardedOptimizer.begin_stage`."""

    # -- for training loops -------------------------------------------------------------------------------------------

    def check_run(self, *, samples: int, batch_size: int, scaling: str, has_product: bool) -> None:  # noqa: B027
        """Raise ValueError unless `rule` can take such a run's steps.

        `scaling` is the policy by which batch and learning rate follow the number of workers; `has_product`: the
        problem computes Hessian products.
        """

    @abstractmethod
    def check_evaluation(self, averaged: bool) -> None:
        """Raise ValueError unless a run can evaluate the parameters after a step, or their moving average."""

    # A batch of all samples is one function, with the samples in their order in each step.
    evaluates_one_function: ClassVar[bool]

    # The steps come to an end by themselves.
    ends_by_itself: ClassVar[bool]

    @property
    def stop_reason(self) -> str:
        """Why no other step follows, as in `OptimizationResult.stop_reason`; empty while the steps continue."""
        return ""

    def begin_run(self, is_full_batch: bool) -> None:  # noqa: B027
        """Take steps of all samples, or of a part of them, from now on."""

    def direction(self) -> FlatParameters | None:
        """The vector to multiply by the Hessian in the next step, which then has no gradient; else None."""
        return None

    def loss_of_step(self, measured: float) -> float:
        """The loss of the next step, of which the function has computed `measured`."""
        return measured

    @property
    def added_loss(self) -> float:
        """What terms of the optimizer's own have added to the loss of the last step."""
        return 0.0

    @property
    def ended_batch(self) -> bool:
        """True if the last step was the last one with its samples."""
        return True

    @property
    def record(self) -> dict[str, float]:
        """Numbers of the last step for the record of a run."""
        return {}

    def show_point(self) -> None:  # noqa: B027
        """Make the parameters those whose gradient the next step needs.  Collective over the mesh."""

    def show_result(self) -> None:  # noqa: B027
        """Make the parameters those that a run ends with.  Collective over the mesh."""

    # -- the parameters, and the arrays for them --------------------------------------------------------------------

    @property
    def is_bound(self) -> bool:
        """True if parameters are bound, with arrays for them."""
        return self._on_rank is not None

    @property
    def on_rank(self) -> RankState:
        """The arrays on this rank; ValueError before the first parameters are bound."""
        if self._on_rank is None:
            raise ValueError("there is no optimizer state before the first step")
        return self._on_rank

    @property
    def strategy(self) -> Strategy:
        """The strategy of the bound parameters; ValueError before there are any."""
        return self.on_rank.strategy

    @property
    def parameters(self) -> FlatParameters | None:
        """The bound parameters, if any."""
        return None if self._on_rank is None else self._on_rank.parameters

    @property
    def _carried(self) -> CarriedState:
        """State that comes with the parameters; an empty one before there are any."""
        return CarriedState() if self._on_rank is None else self._on_rank.parameters.carried

    def check_model(self, parameters: FlatParameters) -> None:
        """Raise ValueError unless the optimizer can train these parameters, of which no other reduces the gradients."""
        optimizer, was = self._optimizer, self._on_rank
        config = optimizer.config
        objects = (was, parameters, parameters.sharded, self.rule, config)
        if was is not None and self._checked is not None and all(map(is_, self._checked, objects)):
            check_reducer(parameters, was.strategy.reducer)
            return  # these very objects were found in order
        check_layout(parameters, config.mesh, optimizer.sharding)
        check_layout_dependence(parameters, config)
        self.check_fits(parameters)
        if was is not None and was.parameters is not parameters:
            check_same_model(was.parameters, parameters, optimizer.sharding)
        if self._deserialized is not None:
            self._deserialized.check_parameters(parameters.specs, parameters.dtype)
        check_reducer(parameters, None if was is None else was.strategy.reducer)
        if was is not None and was.parameters is parameters:
            self._checked = objects

    def bind(self, parameters: FlatParameters) -> Strategy:
        """Create the arrays for these parameters, or attach them to existing ones; see `ShardedOptimizer.bind`.

        Collective over the mesh at the first call.
        """
        with CaughtError() as caught:
            self.check_model(parameters)
        if self._on_rank is None:
            self.settings.agree_on_state(parameters, caught.error)
        elif caught.error is not None:
            raise caught.error
        self.settings.arithmetic.keep_products(self._optimizer.config)
        on_rank = self._on_rank
        if on_rank is not None and on_rank.parameters is parameters:
            return on_rank.strategy
        written, scale = parameters.gradients, parameters.loss_scale
        if on_rank is None:
            on_rank = self._make(parameters)
        else:
            on_rank.strategy.attach(parameters)
        reducer = on_rank.strategy.reducer
        if not written.progress.is_bound and written.has_content:  # a backward pass ran before the first step
            if written.reduced:
                on_rank.strategy.copies.zero_duplicates(written.flat)
            else:
                written.finalize()
            if self.counters.scaling.value != scale:
                written.flat[...] *= self.counters.scaling.value / scale  # it was computed without the loss scale
            reducer.use_external(written.flat)
        parameters.gradients = reducer
        self._on_rank = on_rank
        on_rank.prepare_step(self.counters)
        return on_rank.strategy

    def _make(self, parameters: FlatParameters) -> RankState:
        on_rank = RankState(self._optimizer, parameters, self.make_slots)
        self._begin(on_rank)
        if self._deserialized is not None:
            self._fill(on_rank, self._deserialized)
            self._deserialized = None
        return on_rank

    def _begin(self, on_rank: RankState) -> None:
        """Create what accompanies new slots.  Collective over the mesh."""
        for each in self.auxiliary:
            each.make(on_rank, self.counters)

    def rebuild(self, parameters: FlatParameters) -> None:
        """Create new arrays for the parameters after the mesh has moved to other ranks.  Collective over the mesh.

        Arrays of an earlier `capture` stay unchanged.
        """
        self._on_rank = self._checked = None  # neither keeps the old arrays alive
        parameters.renew()
        self.bind(parameters)

    def broadcast(self) -> None:
        """Make all copies of parameters and state equal.  Collective over the mesh."""
        self.on_rank.broadcast()
        for each in self.auxiliary:
            each.broadcast()

    def resync(self) -> None:
        """Broadcast after the mesh has moved to other ranks, if copies may differ.  Collective over the mesh."""
        if any(each.may_differ for each in self.auxiliary):
            self.broadcast()

    def abandon(self) -> None:
        """Drop pending communication, which cannot finish after a rank has died."""
        if self.is_bound:
            self.strategy.abandon()
            for each in self.auxiliary:
                each.abandon()

    # -- saves and moves: rank by rank, for checkpoints and resizes -------------------------------------------------

    @property
    @abstractmethod
    def batches(self) -> int:
        """Batches of samples that its steps have had: one a step, of a method one an iteration."""

    @property
    def facts(self) -> dict[str, Any]:
        """The optimizer's settings, for people to read, and the numbers that `restore` needs."""
        rule, config = self.rule, self._optimizer.config
        facts = {
            "optimizer": type(self._optimizer).__name__,
            "rule": type(rule).__name__,
            "rule.json": rule.configuration(),
            "slots.json": list(self.slot_names),
            SHARDING: config.settings(),
            "mesh.json": dict(config.mesh.shape),
            **self.counters.facts,
            **self.settings.arithmetic.facts,
        }
        for each in self.auxiliary:
            facts |= each.facts
        return {**facts, **self._carried.facts}

    @property
    def needs_consolidation(self) -> bool:
        """True if `consolidate` has something to do.  The same on all ranks."""
        return self._optimizer.config.compressor is not None or any(each.needs_consolidation for each in self.auxiliary)

    def consolidate(self) -> None:
        """Prepare for a save or a move to other ranks: no rank keeps anything that only it needs.  Collective.

        Call this before `capture` when saving.  Raises on every rank: ValueError if a backward pass has begun to send
        compressed gradients and no step has used them yet; FloatingPointError if any worker of Local SGD had a NaN or
        infinite gradient that it must raise for, with all workers in one state.
        """
        self.resync()
        for each in self.auxiliary:
            each.consolidate()
        self._carried.consolidate(self._optimizer.config.mesh)
        compressed = self.strategy.compressed if self.is_bound else None
        if compressed is not None:
            with raised_on_all(self._optimizer.world):
                if compressed.sending:
                    raise ValueError(
                        "compressed gradients of a backward pass are on their way, and what they leave out belongs to "
                        "no step yet; take the step, or call parameters.reset_gradients(), before the state is saved"
                    )
            compressed.fold()

    def capture(self) -> RunState:
        """What the run needs to continue: the live arrays, and the numbers; ValueError if nothing is bound."""
        shards = self.on_rank.shards() + tuple(shard for each in self.auxiliary for shard in each.shards())
        return RunState(self.on_rank.parameters.specs, shards, self.facts)

    @property
    def versions(self) -> dict[str, int]:
        """For arrays of `capture`, by kind, numbers that are raised when they are written.

        Arrays without one are written in every step.
        """
        return {}

    def check(self, facts: Mapping[str, Any]) -> None:
        """Raise ValueError unless the optimizer can continue from a state with these facts.

        They may be of another rule or invalid, or the run would continue with other bits than it promises.
        """
        saved = names_fact(facts, "slots.json")
        needed = [slot for slot in saved if not self.is_spare(slot)]
        check_saved_rule(type(self.rule).__name__, self.slot_names, facts.get("rule", "none"), saved, needed)
        check_numbers(facts)
        self.settings.arithmetic.check(facts, self._optimizer.config)
        for each in self.auxiliary:
            each.check(facts)
        self._carried.check(facts)

    @abstractmethod
    def batches_in(self, facts: Mapping[str, Any]) -> int:
        """The value of `batches` in a state whose facts `check` accepts; ValueError if the number is invalid."""

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Continue from the facts of a state, once its arrays are filled; see `capture`."""
        on_rank = self.on_rank
        for each in self.auxiliary:
            each.restore(facts)
        self._carried.restore(facts)
        self.counters.restore(facts)
        self.settings.arithmetic.restore(facts)
        on_rank.resume(self.counters, float(facts.get("loss_scale", 1.0)))

    def restore_settings(self, facts: Mapping[str, Any]) -> None:
        """Take the settings that other code changes between two steps from saved facts, the same on all ranks.

        What else differs is reported.
        """
        live, saved = self.live_values(), facts.get("rule.json")
        if live is not None and isinstance(saved, Mapping):
            problem = live.restore(saved)
            if problem and self._optimizer.world.rank == 0:
                log.inform(problem)
        self.report_changes(facts)

    # -- saves and moves: as one value with full tensors --------------------------------------------------------------

    def gather(self) -> FullState:
        """The full state, without parameters, on every rank; ValueError before the first step.  Collective."""
        from mpishard.data_parallel.full_state import FullState

        if self._deserialized is not None:
            return self._deserialized
        on_rank, rule, counters, world = self.on_rank, self.rule, self.counters, self._optimizer.world
        full = FullState(
            rule=type(rule).__name__,
            configuration=rule.configuration(),
            steps=counters.steps,
            skipped_steps=counters.skipped_steps,
            specs=on_rank.parameters.specs,
            dtype=on_rank.parameters.dtype,
            slots=on_rank.gather(on_rank.slots, world),
            loss_scale=counters.scaling.state,
            others=on_rank.gather_errors(world),
        )
        for each in self.auxiliary:
            full = each.add_to(full, world)
        return full

    def serialize(self) -> bytes:
        """The full state as a file image, see `ShardedOptimizer.serialize`.  Collective over the mesh."""
        from mpishard.data_parallel.full_state import encode

        with opening(self._optimizer.world, "serialize") as same:
            if self._deserialized is None:
                same["parameters"] = self.on_rank.parameters.description  # ValueError before the first step
        if self.is_bound:
            self.consolidate()
        return encode(self.gather())

    def deserialize(self, data: bytes) -> None:
        """Continue from a file image; before the first parameters are bound, keep it.  Collective over the mesh.

        See `ShardedOptimizer.deserialize`, also for errors.
        """
        from mpishard.data_parallel.full_state import decode

        full = None
        with CaughtError() as caught:
            full = decode(data)
            self.check(full.facts)
            if self.parameters is not None:
                full.check_parameters(self.parameters.specs, self.parameters.dtype)
        self.settings.agree(None if full is None else full.identity(data), caught.error, what="settings and state")
        assert full is not None
        self.restore_settings(full.facts)
        self.counters.steps, self.counters.skipped_steps = full.steps, full.skipped_steps
        if not self.has_gradients():  # else these have the loss scale that there is
            self.counters.scaling.restore(full.loss_scale)
        if self._on_rank is None:
            self._deserialized = full
        else:
            self._fill(self._on_rank, full)
            self._on_rank.prepare_step(self.counters)

    def has_gradients(self) -> bool:
        """Whether any rank has gradients of a backward pass that no step has used. Collective over the mesh."""
        own = self._on_rank is not None and self._on_rank.parameters.gradients.has_content
        return on_any(self._optimizer.world, own)

    def _fill(self, on_rank: RankState, full: FullState) -> None:
        on_rank.fill(on_rank.slots, full.slots)
        on_rank.fill_errors(full.others)
        for each in self.auxiliary:
            each.fill(full)

    # -- steps ------------------------------------------------------------------------------------------------------

    @property
    def comparing_ranks(self) -> Axis | ModelParallelGroup:
        """The ranks that compare their arguments of the next `step` before taking it."""
        if self._on_rank is None or all(each.compares_next_step for each in self.auxiliary):
            return self._optimizer.world
        return self._on_rank.strategy.sync_group

    @property
    def synchronizes_next_step(self) -> bool:
        """True if the next update waits for the other data ranks.  The same on all ranks."""
        return all(self._optimizer.measure_norm or each.synchronizes_next_step for each in self.auxiliary)

    @property
    @abstractmethod
    def agrees_in_update(self) -> bool:
        """True if each update contains an agreement of all ranks.  The same on all ranks."""

    @property
    def interrupted(self) -> bool:
        """True if any rank was interrupted, as of the last update; the same on all ranks if `agrees_in_update`."""
        return self.on_rank.inspection.interrupted

    # -- for people -------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of the state arrays on this rank."""
        if self._on_rank is None:
            return 0
        return self._on_rank.nbytes + sum(each.nbytes for each in self.auxiliary)

    @property
    def gradient_bytes(self) -> int:
        """Peak bytes of the optimizer's gradient memory on this rank."""
        return self.strategy.gradient_bytes if self.is_bound else 0

    def report_changes(self, facts: Mapping[str, Any]) -> None:
        """Report on rank 0 what differs from saved facts: settings of the rules, what bits depend on."""
        self.settings.report(self.facts, facts)

    def report_continuation(self) -> None:
        """Report on rank 0, the first time only, that a run does not start afresh."""
        if self._optimizer.world.rank == 0 and not self._reported:
            log.inform(
                f"resuming at step {self.counters.clock}: optimizer state, learning-rate schedule and sampler "
                "continue; create a new optimizer to start over"
            )
        self._reported = True
