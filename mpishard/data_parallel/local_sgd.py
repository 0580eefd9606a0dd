"""Local SGD: each worker takes steps independently; every `sync_every` steps the workers average their parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mpishard.arguments import integer
from mpishard.backend import array as arrays
from mpishard.comm.axis import Axis
from mpishard.comm.mesh import Mesh
from mpishard.data_parallel.averages import Averages, LocalUpdates
from mpishard.data_parallel.configuration import ShardingConfiguration
from mpishard.data_parallel.full_state import FullState
from mpishard.data_parallel.model_parallel_group import ModelParallelGroup
from mpishard.data_parallel.optimizer_state import changed_numbers, shards
from mpishard.data_parallel.settings import settings_of_rule
from mpishard.data_parallel.sharded_optimizer import ShardedOptimizer
from mpishard.data_parallel.slots import fill_slots, whole_slots
from mpishard.data_parallel.strategies import Strategy
from mpishard.layout.run_state import RunState, brief, names_fact
from mpishard.optim import Rule
from mpishard.parameters.flat import FlatParameters

Array = Any
_OUTER = "outer/"  # before the name of a slot of the outer rule, among the kinds of state
_SYNC_EVERY = 8


@arrays.elementwise
def _divide(total, /, count):  # type: ignore[no-untyped-def]
    """``total /= count``"""
    total = total / count
    return total


class LocalSGDOptimizer(ShardedOptimizer):
    """Local SGD and DiLoCo: each worker takes `sync_every` steps by itself, then all workers take the average.

    A worker is one data coordinate.  With ``hierarchical=True`` in the configuration a worker is one node, whose ranks
    sum their gradients every step.  A worker holds whole parameters and state, as under `DDPOptimizer`, and updates
    them with the gradient of its own samples.  `sync_every` steps send as much over the data axis as one step of DDP.

    Parameters
    ----------
    rule : Rule
        The rule of the workers' own steps.  Its state belongs to the worker; only a save averages it over workers.
    config : ShardingConfiguration or Mesh
        With a compressor, averages are sent compressed, with error feedback.
    sync_every : int
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
    staleness : int
        Steps between the start of the last average and its use.
    gradient_norm : float
        Norm of this worker's gradient.  With `measure_norm` it is the largest norm of all workers, which costs 8 bytes
        a step over the data axis.

    Raises
    ------
    ValueError, TypeError
        If a number is invalid, or the configuration has a setting that needs a sum of gradients in every step.  At the
        first step, on all ranks, if there are fewer buckets than `parts`, or ranks differ in these arguments.

    Notes
    -----
    Between averages no rank waits for another worker, except in elastic runs, where all ranks agree on every step.
    `step` compares its arguments within a worker between averages, and over all ranks in a step that starts an average
    without delay.  A worker that rejects its arguments between averages raises alone and is unchanged.  The other
    workers wait for it at the next average, so either it repeats the call or the job must end.

    Each worker also clips, checks for NaN and adjusts a dynamic loss scale by itself.  A worker with a NaN gradient
    skips its step.  With ``nonfinite_gradients="raise"`` all ranks raise FloatingPointError after the next average;
    they can continue from there.

    Saving, `serialize` and `synchronize_optimizer_state` first bring all workers to one state.  They finish the pending
    averages, average the remaining parts and the workers' state, and set the number of skipped steps to the largest of
    any worker.  Steps until the next average count from there.  `OptimizationProblem` does this at its end.  A run that
    continues and one that is resumed from there take the same steps.  End a loop of your own with
    `synchronize_optimizer_state`: until then workers differ, and an average may be pending.
    """

    strategy: type[Strategy] = LocalUpdates
    _strategy: LocalUpdates

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
        config = ShardingConfiguration.of(config)
        if sync_every is None:
            sync_every = config.sync_every if config.sync_every > 1 else _SYNC_EVERY
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
        if outer is not None and outer.norm_based:
            raise ValueError(
                f"the outer rule {type(outer).__name__} scales by norms of whole tensors, and an outer step sees "
                "buckets; use an element-wise one, such as SGD or Adam, and this one as the inner rule"
            )
        if config.reproducible:
            raise ValueError(
                "reproducible=True gives the same bits on any number of ranks, but what LocalSGDOptimizer comes to "
                "depends on the number of workers; leave it out, or use DDP or ZeRO"
            )
        if not config.auto_sync_gradients:
            raise ValueError(
                "auto_sync_gradients=False accumulates gradients until synchronize_optimizer_state, but here every "
                "step is the worker's own already; leave it out, and accumulate over micro-batches of a step"
            )
        super().__init__(rule, config)
        self.sync_every: int = int(sync_every)
        self.outer = outer
        self.parts: int = int(parts)
        self.delay: int = int(delay)
        self.staleness: int = 0
        self._averages: Averages
        self._local = 0  # steps since all workers were in one state
        self._problem: Exception | None = None
        self._may_differ = False

    # -- steps ------------------------------------------------------------------------------------------------------

    def begin_run(self) -> None:
        """Bring the workers, which have taken steps by themselves, to one state."""
        self.prepare_save()

    def update(
        self, count: float, *, rate_factor: float = 1.0, nonfinite_loss: str = "", interrupted: bool = False
    ) -> bool:
        """Take this worker's own step, dividing its gradient by its share of `count`; then average the parts due."""
        self.resync()
        if self._local == 0:
            self._averages.begin()
        try:
            share = count / self._strategy.workers
            usable = super().update(
                share, rate_factor=rate_factor, nonfinite_loss=nonfinite_loss, interrupted=interrupted
            )
        except FloatingPointError as error:
            usable = False
            self.skipped_steps += 1
            self._problem = self._problem or error
        if self.measure_norm:
            self._share_norm()
        self._local += 1
        self._averages.progress()
        self._average(self._due(self._local))
        return usable

    def synchronize_optimizer_state(self) -> None:
        """Bring all workers to one state now; then as `ShardedOptimizer.synchronize_optimizer_state`."""
        if all(self.world.allgather_object(self._parameters is not None)):
            self.prepare_save()
        self._mend()

    def prepare_save(self) -> None:
        """Bring all workers to one state; see the notes of the class.  Steps until the next average count from here.

        Raises
        ------
        FloatingPointError
            On every rank, if any worker had a NaN or infinite gradient that it must raise for.  All workers are in one
            state then too.
        """
        self.resync()
        if self._local:
            problem = None
            try:
                self._average([p for p in range(self.parts) if self._averages.lacks(p, self._local)], all_of_it=True)
            except FloatingPointError as error:
                problem = error
            self._level()
            if problem is not None:
                raise problem
        super().prepare_save()

    @property
    def synchronizes_next_step(self) -> bool:
        return self.measure_norm or self._begins_and_ends or self._averages.ends(self._local + 1 - self.delay)

    @property
    def _begins_and_ends(self) -> bool:
        """Whether the next step both starts and finishes an average."""
        return self.delay == 0 and bool(self._due(self._local + 1))

    @property
    def agrees_in_update(self) -> bool:
        return False

    @property
    def prepares_saves(self) -> bool:
        return True

    def _due(self, now: int) -> list[int]:
        """The parts whose average starts after step `now`."""
        parts, every = self.parts, self.sync_every
        return [part for part in range(parts) if (now + part * every // parts) % every == 0]

    def _average(self, due: list[int], *, all_of_it: bool = False) -> None:
        """Finish averages that started `delay` steps ago, or with `all_of_it` all of them; start those of `due`.

        Averages that are due as soon as they start finish here too.
        """
        now, averages = self._local, self._averages
        latest = now if all_of_it else now - self.delay
        found = [averages.take_in(now, latest)]
        for part in due:
            averages.start(part, now, self._problem)
            self._problem = None
        found.append(averages.take_in(now, latest))
        for staleness, _, _ in found:
            if staleness is not None:
                self.staleness = staleness
        if any(trouble for _, trouble, _ in found):
            self.axis.raise_together(found[0][2] or found[1][2])

    def _level(self) -> None:
        """Average the rule's state over the workers, and make its numbers equal; the parameters already are."""
        axis = self.axis
        for slot in self._slots.values():
            mean = slot.copy()  # if a worker dies during the sum, the slot must not hold half of it
            axis.all_reduce(mean, label="state")
            _divide(mean, axis.size)
            slot[...] = mean
        norm = -1.0 if math.isnan(self.gradient_norm) else self.gradient_norm
        numbers = np.array([self.skipped_steps, norm, -self.scaling.value, -self.scaling.good_steps])
        axis.all_reduce(numbers, op="max", label="control")
        skipped, norm, scale, good = numbers.tolist()
        self.steps, self.skipped_steps = self.clock - int(skipped), int(skipped)
        self.gradient_norm = math.nan if norm < 0 else norm
        self.scaling.restore((-scale, int(-good)))
        self._prepare_step()
        self._averages.steps = [max(self._averages.steps)] * self.parts
        self._restart()
        if self.mesh.debug:
            super()._check_copies()

    def _restart(self) -> None:
        """Restart the count of local steps; all workers are in one state."""
        self._local = 0
        self._problem = None

    def resync(self) -> None:
        if self._may_differ:
            self._mend()

    def _mend(self) -> None:
        """Set all copies to those of the first worker."""
        self._may_differ = False
        super().synchronize_optimizer_state()
        if self._parameters is not None:
            for slot in self._averages.slots.values():
                self._strategy.resync(slot)

    def _share_norm(self) -> None:
        """Set the norm to the largest of all workers, or to NaN if any worker's norm is not finite."""
        norm = np.array([math.inf if math.isnan(self.gradient_norm) else self.gradient_norm])
        self.axis.all_reduce(norm, op="max", label="control")
        self.gradient_norm = float(norm[0]) if math.isfinite(norm[0]) else math.nan

    # -- state ------------------------------------------------------------------------------------------------------

    @property
    def state_bytes(self) -> int:
        """Bytes of state on this rank: state of both rules, and the anchor of the averages.  Not collective."""
        return super().state_bytes + (0 if self._parameters is None else self._averages.nbytes)

    @property
    def outer_steps(self) -> int:
        """Averages so far of the part that has had most of them."""
        return 0 if self._parameters is None else max(self._averages.steps)

    def run_state(self) -> RunState:
        state, slots = super().run_state(), self._averages.slots
        outer = zip(slots, shards(self._strategy, slots)[1 : 1 + len(slots)], strict=True)
        shared = (replace(shard, kind=_OUTER + name) for name, shard in outer)
        return replace(state, shards=(*state.shards, *shared))

    @property
    def further_facts(self) -> dict[str, Any]:
        local = {"sync_every": self.sync_every, "parts": self.parts, "delay": self.delay}
        facts: dict[str, Any] = {"local_sgd.json": local, "outer_steps": self.outer_steps}
        if self.outer is not None:
            facts |= {"outer_rule": self._outer_name, "outer_rule.json": self.outer.configuration()}
            facts |= {"outer_slots.json": list(self.outer.slots)}
        return facts

    def changed_numbers(self, facts: Mapping[str, Any]) -> list[str]:
        changed = super().changed_numbers(facts)
        if self.outer is not None:
            changed += changed_numbers(self.outer, facts.get("outer_rule.json"), of="outer ")
        return changed

    @property
    def further_settings(self) -> dict[str, Any]:
        local = {"sync_every": self.sync_every, "parts": self.parts, "delay": self.delay, "outer": self._outer_name}
        return local if self.outer is None else local | settings_of_rule(self.outer, of="outer ")

    def check_facts(self, facts: Any) -> None:
        super().check_facts(facts)
        self._check_outer(facts.get("outer_rule", ""), names_fact(facts, "outer_slots.json"))

    def restore(self, facts: Any) -> None:
        self._averages.discard()
        super().restore(facts)
        self._averages.steps = [int(facts.get("outer_steps", 0))] * self.parts
        self._restart()

    def rebuild_state(self, parameters: FlatParameters) -> None:
        super().rebuild_state(parameters)
        # After a death no average was possible, so that each worker still has its own parameters and state.
        self._may_differ = True

    def abandon(self) -> None:
        super().abandon()
        if self._parameters is not None:
            self._averages.abandon()

    def _make_state(self, parameters: FlatParameters) -> None:
        restored, self._restored = self._restored, None
        super()._make_state(parameters)
        try:
            self._check_parts()
        except ValueError:
            self._restored = restored
            raise
        self._averages = Averages(self._strategy, self.outer, self.parts, lasting=self.delay > 0)
        self._restart()
        if restored is not None:
            self._restore(restored)

    def _restore(self, state: FullState) -> None:
        self._averages.discard()
        self._may_differ = True  # the optimizer's state does not contain the parameters
        super()._restore(state)
        slots = self._averages.slots
        fill_slots(self._strategy, slots, {name: state.others[_OUTER + name] for name in slots})
        self._averages.steps = [state.outer_steps] * self.parts
        self._restart()

    def _full_state(self, parameters: FlatParameters) -> FullState:
        state = super()._full_state(parameters)
        outer = whole_slots(self.world, self._strategy, self._averages.slots)
        others = {**state.others, **{_OUTER + name: whole for name, whole in outer.items()}}
        return replace(state, outer_rule=self._outer_name, outer_steps=self.outer_steps, others=others)

    def _prepare_step(self) -> None:
        super()._prepare_step()
        self._strategy.compresses = True  # `compress_after` is for rules that divide by the size of what is compressed

    # -- checks -----------------------------------------------------------------------------------------------------

    @property
    def _outer_name(self) -> str:
        return "" if self.outer is None else type(self.outer).__name__

    def _who_agrees(self) -> Axis | ModelParallelGroup:
        if self._parameters is None or self._begins_and_ends:
            return self.world
        return self._strategy.team

    def _check_state(self, state: FullState) -> None:
        super()._check_state(state)
        saved = [kind.removeprefix(_OUTER) for kind in state.others if kind.startswith(_OUTER)]
        self._check_outer(state.outer_rule, saved)

    def _check_outer(self, saved: str, saved_slots: Any) -> None:
        own = () if self.outer is None else self.outer.slots
        if (saved, sorted(saved_slots)) != (self._outer_name, sorted(own)):
            theirs, ours = (brief(", ".join(sorted(names)) or "none") for names in (saved_slots, own))
            raise ValueError(
                f"the state is of the outer rule {brief(saved) or 'none'} (slots: {theirs}), but this optimizer has "
                f"{self._outer_name or 'none'} (slots: {ours}); give outer= as it was when it was saved, or leave its "
                "state and take the parameters alone"
            )

    def _check_parts(self) -> None:
        """Raise on all ranks unless each part gets a bucket on some rank.  Collective."""
        # A pipeline stage may have fewer buckets than another, or none.
        most = max(self.world.allgather_object(len(self._strategy.buckets.buckets)))
        if most < self.parts and self.parts > 1:
            raise ValueError(
                f"parts={self.parts}, but no rank has more than {most} buckets to deal out; use fewer parts, or a "
                f"smaller minimum_parameter_group_size than {self.config.minimum_parameter_group_size}"
            )

    def _check_copies(self) -> None:
        """Workers differ between averages; `_level` compares them."""
