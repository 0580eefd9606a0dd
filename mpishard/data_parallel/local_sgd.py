"""Local SGD: each worker takes steps independently; every `sync_every` steps the workers average their parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishard.arguments import integer
from mpishard.comm.agreement import opening
from mpishard.comm.axis import Axis
from mpishard.comm.mesh import Mesh
from mpishard.data_parallel.auxiliary_state import AuxiliaryState
from mpishard.data_parallel.configuration import ShardingConfiguration, mesh_of
from mpishard.data_parallel.local_averages import Averages, AveragingSchedule, LocalSteps
from mpishard.data_parallel.rank_state import OUTER, Counters, RankState
from mpishard.data_parallel.settings import Configured, settings_of_rule
from mpishard.data_parallel.sharded_optimizer import ShardedOptimizer
from mpishard.data_parallel.strategies import LOCAL, Sharding, Strategy
from mpishard.data_parallel.validation import check_copies, check_workers
from mpishard.layout.run_state import Shard, brief, names_fact
from mpishard.optim import Rule
from mpishard.optim.formulas import divide

if TYPE_CHECKING:
    from mpishard.data_parallel.full_state import FullState

_SYNC_EVERY = 8  # steps between two averages, if nobody says how many


class LocalState(AuxiliaryState):
    """The state of a `LocalSGDOptimizer` in addition to its rule's; `outer` moves the anchor."""

    may_differ: bool  # workers may differ although they have taken no separate step
    needs_consolidation = True

    def __init__(self, optimizer: Configured, schedule: AveragingSchedule, outer: Rule | None) -> None:
        self.may_differ = False
        self._optimizer = optimizer
        self._schedule = schedule
        self._outer = outer
        self._averages: Averages | None = None
        self.steps: LocalSteps  # since all workers were in one state, once parameters are bound
        self._strategy: Strategy
        self._on_rank: RankState
        self._counters: Counters

    @property
    def averages(self) -> Averages:
        """The anchor and the pending averages, once parameters are bound."""
        assert self._averages is not None
        return self._averages

    @property
    def workers(self) -> int:
        """Number of workers, once parameters are bound."""
        return self.averages.workers

    @property
    def staleness(self) -> int:
        """Steps between the start of the last average and its use; 0 before the first."""
        return 0 if self._averages is None else self.steps.staleness

    # -- all workers in one state -----------------------------------------------------------------------------------

    def broadcast(self) -> None:
        """Set the outer rule's state to that of the first worker.  Collective over the mesh."""
        self.may_differ = False
        for slot in self.averages.slots.values():
            self._strategy.resync(slot)

    def consolidate(self) -> None:
        """Bring all workers to one state.  Steps until the next average count from here.  Collective over the mesh."""
        if self._averages is None:
            return
        problem = None
        try:
            if not self.steps.average_all():
                return
        except FloatingPointError as error:
            problem = error
        self._level()
        if problem is not None:
            raise problem

    def _level(self) -> None:
        """Average the rule's state over the workers, and make its numbers equal, as parameters are. Collective."""
        axis, counters = self._optimizer.config.mesh.data, self._counters
        for slot in self._on_rank.slots.values():
            mean = slot.copy()  # if a worker dies during the sum, the slot must not hold half of it
            axis.all_reduce(mean, label="state")
            divide(mean, axis.size)
            slot[...] = mean
        norm = -1.0 if math.isnan(counters.gradient_norm) else counters.gradient_norm
        numbers = np.array([counters.skipped_steps, norm, -counters.scaling.value, -counters.scaling.good_steps])
        axis.all_reduce(numbers, op="max", label="control")
        skipped, norm, scale, good = numbers.tolist()
        counters.steps, counters.skipped_steps = counters.clock - int(skipped), int(skipped)
        counters.gradient_norm = math.nan if norm < 0 else norm
        counters.scaling.restore((-scale, int(-good)))
        self._on_rank.prepare_step(counters)
        self.averages.steps = [max(self.averages.steps)] * self._schedule.parts
        self.steps.restart()
        if self._optimizer.config.mesh.debug:
            check_copies(self._strategy, counters.steps)

    @property
    def compares_next_step(self) -> bool:
        """Return True if the next step both starts and finishes an average."""
        return self.steps.next_starts_and_finishes

    @property
    def synchronizes_next_step(self) -> bool:
        """Return True if the next step waits for an average."""
        return self.steps.next_finishes

    # -- state ------------------------------------------------------------------------------------------------------

    @property
    def outer_steps(self) -> int:
        """Averages so far of the part that has had most of them."""
        return 0 if self._averages is None else max(self._averages.steps)

    @property
    def nbytes(self) -> int:
        """Bytes of the anchor, and of the outer rule's state."""
        return self.averages.nbytes

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that decide the steps."""
        own = {**self._schedule.facts, "outer": self._outer_name}
        return own if self._outer is None else own | settings_of_rule(self._outer, of="outer ")

    @property
    def facts(self) -> dict[str, Any]:
        """Facts for a `RunState`."""
        facts: dict[str, Any] = {"local_sgd.json": self._schedule.facts, "outer_steps": self.outer_steps}
        if self._outer is not None:
            facts |= {"outer_rule": self._outer_name, "outer_rule.json": self._outer.configuration()}
            facts |= {"outer_slots.json": list(self._outer.slots)}
        return facts

    def make(self, on_rank: RankState, counters: Counters) -> None:
        """Create the averages of new state.  Collective over the mesh."""
        strategy = on_rank.strategy
        self._check_parts(strategy)
        # State that is made again is that of survivors of a death: no average was possible, so that each worker still
        # has its own parameters and state.
        self.may_differ = self._averages is not None
        self._strategy, self._on_rank, self._counters = strategy, on_rank, counters
        averages = Averages(strategy, self._outer, self._schedule.parts, delayed=self._schedule.delay > 0)
        steps = LocalSteps(strategy.axis, self._schedule, averages, self.staleness)
        self._averages, self.steps = averages, steps

    def shards(self) -> tuple[Shard, ...]:
        """The state of the outer rule, which all workers share."""
        return tuple(self._on_rank.slot_shards(self.averages.slots, OUTER + "{}"))

    def check(self, facts: Mapping[str, Any]) -> None:
        """Raise ValueError unless the facts are of the same outer rule."""
        saved, saved_slots = facts.get("outer_rule", ""), names_fact(facts, "outer_slots.json")
        own = () if self._outer is None else self._outer.slots
        if (saved, sorted(saved_slots)) != (self._outer_name, sorted(own)):
            theirs, ours = (brief(", ".join(sorted(names)) or "none") for names in (saved_slots, own))
            raise ValueError(
                f"the state is of the outer rule {brief(saved) or 'none'} (slots: {theirs}), but this optimizer has "
                f"{self._outer_name or 'none'} (slots: {ours}); give outer= as it was when it was saved, or leave its "
                "state and take the parameters alone"
            )

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Continue from these facts, after the arrays were filled: all workers are in one state."""
        self.averages.discard()
        self.averages.steps = [int(facts.get("outer_steps", 0))] * self._schedule.parts
        self.steps.restart()

    def add_to(self, full: FullState, world: Axis) -> FullState:
        """A full state with that of the outer rule.  Collective over `world`."""
        outer = self._on_rank.gather(self.averages.slots, world)
        others = {**full.others, **{OUTER + name: slot for name, slot in outer.items()}}
        return replace(full, outer_rule=self._outer_name, outer_steps=self.outer_steps, others=others)

    def fill(self, full: FullState) -> None:
        """Continue from a full state, which does not contain the parameters: these may differ."""
        averages = self.averages
        averages.discard()
        self.may_differ = True
        self._on_rank.fill(averages.slots, {name: full.others[OUTER + name] for name in averages.slots})
        averages.steps = [full.outer_steps] * self._schedule.parts
        self.steps.restart()

    def abandon(self) -> None:
        """Drop pending averages, which cannot finish after a rank has died."""
        self.averages.abandon()

    @property
    def _outer_name(self) -> str:
        return "" if self._outer is None else type(self._outer).__name__

    def _check_parts(self, strategy: Strategy) -> None:
        """Raise on all ranks unless each part gets a bucket on some rank.  Collective over the mesh."""
        # A pipeline stage may have fewer buckets than another, or none.
        most, parts = max(self._optimizer.world.allgather_object(len(strategy.shares.buckets))), self._schedule.parts
        if most < parts and parts > 1:
            raise ValueError(
                f"parts={parts}, but no rank has more than {most} buckets to deal out; use fewer parts, or a "
                f"smaller minimum_parameter_group_size than {self._optimizer.config.minimum_parameter_group_size}"
            )


class LocalSGDOptimizer(ShardedOptimizer):
    """Local SGD and DiLoCo: each worker takes `sync_every` separate steps, then all workers take the average.

    A worker is one data coordinate.  With ``hierarchical=True`` in the configuration a worker is one node, whose ranks
    sum their gradients every step.  A worker holds whole parameters and state, as under `DDPOptimizer`, and updates
    them with the gradient of its samples.  `sync_every` steps send as much over the data axis as one step of DDP.

    Creation and the methods are collective, as those of `ShardedOptimizer`; see the notes for when a step waits for
    others.

    Parameters
    ----------
    rule : Rule
        The rule of the workers' own steps.  Its state belongs to the worker; only a save averages it over workers.
    config : ShardingConfiguration or Mesh
        With a compressor, averages are sent compressed, with error feedback.
    sync_every : int, optional
        Steps between two averages of the same parameter.  Default: `sync_every` of the configuration if it is above 1,
        else 8.
    outer : Rule, optional
        Takes a step from the parameters of the last average, along the mean of the workers' changes since then; e.g.
        ``SGD(lr=0.7, momentum=0.9, nesterov=True)`` (Douillard et al., "DiLoCo", 2023).  Default: the workers take
        their mean (Stich, "Local SGD converges fast and communicates little", 2019).
    parts : int
        Number of parts into which the buckets are divided.  Each part is averaged every `sync_every` steps, and the
        parts' averages are spread evenly over these steps (Douillard et al., "Streaming DiLoCo", 2025).
    delay : int
        Steps between the start of an average and its use; it is sent meanwhile, and the worker's updates since the
        start are kept.  At most `sync_every`; with ``sync_every=1, delay=1`` averages are one step behind.

    Attributes
    ----------
    gradient_norm : float
        Norm of this worker's gradient.  With `measure_norm` it is the largest norm of all workers, which costs 8 bytes
        a step over the data axis.

    Raises
    ------
    ValueError, TypeError
        On all ranks, if a number is invalid, the configuration has a setting that needs a sum of gradients in every
        step, or ranks differ in these arguments; at the first step, if there are fewer buckets than `parts`.

    Notes
    -----
    Between averages no rank waits for another worker.
    `step` compares its arguments within a worker between averages, and over all ranks in a step that starts an average
    without delay.  A worker that rejects its arguments between averages raises alone and is unchanged.  The other
    workers wait for it at the next average, so either it repeats the call or the job must end.

    Each worker also clips, checks for NaN and adjusts a dynamic loss scale separately.  A worker with a NaN gradient
    skips its step.  With ``nonfinite_gradients="raise"`` all ranks raise FloatingPointError after the next average;
    they can continue from there.

    Saving, `serialize` and `synchronize_optimizer_state` first bring all workers to one state.  They finish the pending
    averages, average the remaining parts and the workers' state, and set the number of skipped steps to the largest of
    any worker.  Steps until the next average count from there.  `OptimizationProblem` does this at its end.  A run that
    continues and one that is resumed from there take the same steps.  End a loop of your own with
    `synchronize_optimizer_state`: until then workers differ, and an average may be pending.
    """

    sharding: Sharding = LOCAL

    def __init__(
        self,
        rule: Rule,
        config: ShardingConfiguration | Mesh,
        sync_every: int | None = None,
        outer: Rule | None = None,
        *,
        parts: int = 1,
        delay: int = 0,
    ) -> None:
        with opening(mesh_of(config).world, "LocalSGDOptimizer") as same:
            config = ShardingConfiguration.of(config)
            if sync_every is None:
                sync_every = config.sync_every if config.sync_every > 1 else _SYNC_EVERY
            _check(config, sync_every, outer, parts, delay)
            same |= {"sync_every": sync_every, "parts": parts, "delay": delay}
        self._outer = outer
        self._schedule = AveragingSchedule(int(sync_every), int(parts), int(delay))
        self._local = LocalState(self, self._schedule, outer)
        super().__init__(rule, config)

    def _auxiliary_state(self) -> list[AuxiliaryState]:
        return [self._local]

    @property
    def sync_every(self) -> int:
        """Steps between two averages of the same parameter; may be set, on all ranks after the same step.

        An average that is pending then ends before its part is averaged again.
        """
        return self._schedule.sync_every

    @sync_every.setter
    def sync_every(self, steps: int) -> None:
        self._schedule.sync_every = integer("sync_every", steps, least=max(1, self.delay))
        self.settings.note_change()

    @property
    def outer(self) -> Rule | None:
        """As given; read-only, as `parts` and `delay` are, since the averages are made for it."""
        return self._outer

    @property
    def parts(self) -> int:
        """As given."""
        return self._schedule.parts

    @property
    def delay(self) -> int:
        """As given."""
        return self._schedule.delay

    @property
    def outer_steps(self) -> int:
        """Averages so far of the part that has had most of them."""
        return self._local.outer_steps

    @property
    def staleness(self) -> int:
        """Steps between the start of the last average and its use."""
        return self._local.staleness

    def update(
        self,
        count: float,
        *,
        loss: float = math.nan,
        rate_factor: float = 1.0,
        nonfinite_loss: str = "",
        interrupted: bool = False,
        exchange_status: bool = True,
    ) -> bool:
        """Take this worker's own step, then average the parts that are due.

        Collective over the ranks of the worker; in a step that starts or ends an average, over the mesh.

        Parameters
        ----------
        count : float
            As for `step`; the gradient is divided by this worker's share of it.
        loss : float
            Not used.
        rate_factor : float
            Multiplies the rule's learning rate.
        nonfinite_loss : str
            A description of what is NaN or infinite in this rank's loss, if anything is; it counts as a NaN gradient.
        interrupted : bool
            Whether this rank was interrupted.
        exchange_status : bool
            False, on all ranks, if no rank gives a `nonfinite_loss`; that saves a message between the ranks of a node.

        Returns
        -------
        bool
            False if this worker skipped its step.
        """
        self.state.resync()
        steps = self._local.steps
        steps.begin()
        nodes = self.state.strategy.hierarchical
        if nodes is not None and exchange_status:  # the ranks of a node leave a step out together
            texts = nodes.within.allgather_object(nonfinite_loss)
            of_node = [f"{text} of rank {rank}" for rank, text in zip(nodes.within.members, texts, strict=True) if text]
            nonfinite_loss = nonfinite_loss or ", ".join(of_node)
        try:
            share = count / self._local.workers
            usable = super().update(
                share, rate_factor=rate_factor, nonfinite_loss=nonfinite_loss, interrupted=interrupted
            )
        except FloatingPointError as error:
            usable = False
            self._counters.skipped_steps += 1
            steps.note(error)
        if self.measure_norm:  # the largest of all workers, or NaN if that of any is not finite
            norm = np.array([math.inf if math.isnan(self.gradient_norm) else self.gradient_norm])
            self.axis.all_reduce(norm, op="max", label="control")
            self._counters.gradient_norm = float(norm[0]) if math.isfinite(norm[0]) else math.nan
        steps.end()
        return usable


def _check(config: ShardingConfiguration, sync_every: int, outer: Rule | None, parts: int, delay: int) -> None:
    """Raise TypeError or ValueError unless such averages can be taken."""
    for name, number, least in (("sync_every", sync_every, 1), ("parts", parts, 1), ("delay", delay, 0)):
        integer(name, number, least=least)
    if delay > sync_every:
        raise ValueError(
            f"delay={delay} is more than sync_every={sync_every}, so that a part's next average would begin before "
            "its last one is taken in; use a delay of at most sync_every"
        )
    if not (outer is None or isinstance(outer, Rule)):
        raise TypeError(
            f"outer must be an update rule such as SGD(lr=0.7, momentum=0.9, nesterov=True), or None for the mean; "
            f"got {type(outer).__name__}"
        )
    if outer is not None and (outer.norm_based or outer.whole_tensors):
        raise ValueError(
            f"the outer rule {type(outer).__name__} needs whole tensors or their norms, and an outer step sees "
            "buckets; use an element-wise one, such as SGD or Adam, and this one as the inner rule"
        )
    if outer is not None and outer.ema_decay is not None:
        raise ValueError("the outer rule keeps no average of the parameters; give ema_decay to the inner rule")
    if outer is not None and getattr(outer, "by_name", None):  # of optax
        raise ValueError(
            "the outer rule chooses tensors by their names, and an outer step sees buckets; give such a rule as the "
            "inner rule"
        )
    if outer is not None and outer.groups:
        raise ValueError(
            f"the outer rule {type(outer).__name__} has parameter groups, and an outer step sees buckets; give "
            "them to the inner rule"
        )
    check_workers(config)
