"""The parameters that an optimizer trains, bound to the arrays of its state."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

from mpishard.comm.axis import Axis
from mpishard.comm.model_parallel_group import ModelParallelGroup
from mpishard.data_parallel.bit_facts import BitFacts
from mpishard.data_parallel.counters import Counters
from mpishard.data_parallel.full_state import FullState
from mpishard.data_parallel.further_state import FurtherState
from mpishard.data_parallel.rank_state import RankState
from mpishard.data_parallel.settings import Configured, Settings
from mpishard.data_parallel.strategy import Strategy
from mpishard.data_parallel.validation import check_layout, check_layout_dependence, check_reducer, check_same_model
from mpishard.optim import Rule
from mpishard.parameters.flat import FlatParameters


class Binding:
    """What an optimizer holds for the parameters that it trains; no arrays before the first parameters are bound.

    Methods are collective over the mesh unless their docstrings say otherwise.

    Parameters
    ----------
    optimizer : Configured
        Has the rule, the configuration and the strategy.
    further : sequence of FurtherState
        State besides that of the rule.

    Attributes
    ----------
    counters : Counters
        Steps, the gradient's norm and the loss scale.
    settings : Settings
        The settings that all ranks compare.
    bits : BitFacts
        What decides bits besides the settings.
    """

    def __init__(self, optimizer: Configured, further: Sequence[FurtherState]) -> None:
        self.further = tuple(further)
        self.counters = Counters(optimizer.config.loss_scale)
        self.settings = Settings(optimizer, self.further)
        self.bits = BitFacts()
        self._optimizer = optimizer
        self._on_rank: RankState | None = None
        self._deserialized: FullState | None = None  # until the first parameters are bound
        self._checked: tuple[object, ...] | None = None  # what `check_model` has found in order

    @property
    def is_bound(self) -> bool:
        """Whether there are parameters, and arrays for them.  Not collective."""
        return self._on_rank is not None

    @property
    def on_rank(self) -> RankState:
        """What this rank holds; ValueError before the first parameters are bound.  Not collective."""
        if self._on_rank is None:
            raise ValueError("there is no optimizer state before the first step")
        return self._on_rank

    @property
    def strategy(self) -> Strategy:
        """The strategy of the bound parameters; ValueError before there are any.  Not collective."""
        return self.on_rank.strategy

    @property
    def parameters(self) -> FlatParameters | None:
        """The bound parameters, if any.  Not collective."""
        return None if self._on_rank is None else self._on_rank.parameters

    @property
    def nbytes(self) -> int:
        """Bytes of the state arrays on this rank.  Not collective."""
        if self._on_rank is None:
            return 0
        return self._on_rank.nbytes + sum(each.nbytes for each in self.further)

    @property
    def comparing_ranks(self) -> Axis | ModelParallelGroup:
        """The ranks that compare their arguments of the next `step` before taking it.  Not collective."""
        if self._on_rank is None or all(each.compares_next_step for each in self.further):
            return self._optimizer.world
        return self._on_rank.strategy.team

    def check_model(self, parameters: FlatParameters) -> None:
        """Raise ValueError unless the optimizer can train these parameters.  Not collective."""
        optimizer, was = self._optimizer, self._on_rank
        rule, config = optimizer.rule, optimizer.config
        objects = (was, parameters, parameters.sharded, rule, config)
        if was is not None and self._checked is not None and all(map(is_, self._checked, objects)):
            check_reducer(parameters, was.strategy.reducer)
            return  # these very objects were found in order
        check_layout(parameters, config.mesh, optimizer.strategy)
        check_layout_dependence(parameters, config)
        if isinstance(rule, Rule):
            rule.by_tensor([spec.name for spec in parameters.specs])  # raises for groups of another model
        if was is not None and was.parameters is not parameters:
            check_same_model(was.parameters, parameters, optimizer.strategy)
        if self._deserialized is not None:
            self._deserialized.check_parameters(parameters.specs, parameters.dtype)
        check_reducer(parameters, None if was is None else was.strategy.reducer)
        if was is not None and was.parameters is parameters:
            self._checked = objects

    def bind(self, parameters: FlatParameters) -> Strategy:
        """Create the arrays for these parameters, or attach them to existing ones: see `ShardedOptimizer.bind`."""
        problem = None
        try:
            self.check_model(parameters)
        except ValueError as error:
            problem = error
        if self._on_rank is None:
            self.settings.agree(self.settings.of_state(parameters), problem)
            self.bits.take(parameters, self._optimizer.config, self._optimizer.world)
        elif problem is not None:
            raise problem
        if self._optimizer.config.reproducible:
            self.bits.keep_products()
        on_rank = self._on_rank
        if on_rank is not None and on_rank.parameters is parameters:
            return on_rank.strategy
        written, scale = parameters.gradients, parameters.loss_scale
        if on_rank is None:
            on_rank = self._make(parameters)
        else:
            on_rank.strategy.attach(parameters)
        reducer = on_rank.strategy.reducer
        reducer.is_last_pass = self._optimizer.config.auto_sync_gradients
        if not written.reduces and written.has_content:  # a backward pass ran before the first step
            if written.reduced:
                on_rank.strategy.copies.zero_duplicates(written.flat)
            else:
                written.finalize()
            if self.counters.scaling.value != scale:
                written.flat[...] *= self.counters.scaling.value / scale  # it was computed without the loss scale
            reducer.memory.use_external(written.flat)
        parameters.gradients = reducer
        self._on_rank = on_rank
        on_rank.prepare_step(self.counters)
        return on_rank.strategy

    def rebuild(self, parameters: FlatParameters) -> None:
        """Create new arrays for the parameters after the mesh has moved to other ranks; the old ones stay unchanged."""
        self._on_rank = self._checked = None  # neither keeps the old arrays alive
        parameters.renew()
        self.bind(parameters)

    def spread(self) -> None:
        """Make all copies of parameters and state equal."""
        self.on_rank.spread()
        for each in self.further:
            each.spread()

    def gather(self) -> FullState:
        """The full state, on every rank; ValueError before the first step."""
        if self._deserialized is not None:
            return self._deserialized
        on_rank, rule, counters, world = self.on_rank, self._optimizer.rule, self.counters, self._optimizer.world
        full = FullState(
            rule=type(rule).__name__,
            configuration=rule.configuration(),
            steps=counters.steps,
            skipped_steps=counters.skipped_steps,
            specs=on_rank.parameters.specs,
            dtype=on_rank.parameters.dtype,
            slots=on_rank.gather_slots(world),
            loss_scale=counters.scaling.state,
            others=on_rank.gather_errors(world),
        )
        for each in self.further:
            full = each.add_to(full, world)
        return full

    def fill(self, full: FullState) -> None:
        """Continue from a full state; before the first parameters are bound, keep it until then.  Not collective."""
        self.counters.steps, self.counters.skipped_steps = full.steps, full.skipped_steps
        self.counters.scaling.restore(full.loss_scale)
        if self._on_rank is None:
            self._deserialized = full
        else:
            self._fill(self._on_rank, full)
            self._on_rank.prepare_step(self.counters)

    def _make(self, parameters: FlatParameters) -> RankState:
        on_rank = RankState(self._optimizer, parameters)
        for each in self.further:
            each.make(on_rank, self.counters)
        if self._deserialized is not None:
            self._fill(on_rank, self._deserialized)
            self._deserialized = None
        return on_rank

    def _fill(self, on_rank: RankState, full: FullState) -> None:
        on_rank.fill(full)
        for each in self.further:
            each.fill(full)
