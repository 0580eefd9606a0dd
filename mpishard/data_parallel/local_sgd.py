"""Local SGD: each worker takes steps independently; every `sync_every` steps the workers average their parameters."""

from __future__ import annotations

import math

import numpy as np

from mpishard.arguments import integer
from mpishard.comm.mesh import Mesh
from mpishard.data_parallel.configuration import ShardingConfiguration
from mpishard.data_parallel.local_state import LocalState
from mpishard.data_parallel.local_steps import AveragingSchedule
from mpishard.data_parallel.optimizer_state import OptimizerState
from mpishard.data_parallel.sharded_optimizer import ShardedOptimizer
from mpishard.data_parallel.strategies import LocalUpdates
from mpishard.data_parallel.strategy import Strategy
from mpishard.optim import Rule

_SYNC_EVERY = 8


class LocalSGDOptimizer(ShardedOptimizer):
    """Local SGD and DiLoCo: each worker takes `sync_every` steps by itself, then all workers take the average.

    A worker is one data coordinate.  With ``hierarchical=True`` in the configuration a worker is one node, whose ranks
    sum their gradients every step.  A worker holds whole parameters and state, as under `DDPOptimizer`, and updates
    them with the gradient of its own samples.  `sync_every` steps send as much over the data axis as one step of DDP.

    Creation is not collective.  The methods are, as those of `ShardedOptimizer`; see the notes for when a step waits
    for others.

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
        if outer is not None and outer.ema_decay is not None:
            raise ValueError("the outer rule keeps no average of the parameters; give ema_decay to the inner rule")
        if outer is not None and outer.groups:
            raise ValueError(
                f"the outer rule {type(outer).__name__} has parameter groups, and an outer step sees buckets; give "
                "them to the inner rule"
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
        self._outer = outer
        self._schedule = AveragingSchedule(int(sync_every), int(parts), int(delay))
        self._local = LocalState(self, self._schedule, outer)
        super().__init__(rule, config)

    def _make_state(self) -> OptimizerState:
        return OptimizerState(self, [self._local])

    @property
    def sync_every(self) -> int:
        """Steps between two averages of the same parameter; may be set, on all ranks after the same step."""
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
            Not used: the ranks of a worker exchange it always.

        Returns
        -------
        bool
            False if this worker skipped its step.
        """
        self.state.resync()
        steps = self._local.steps
        steps.begin()
        try:
            share = count / self._local.workers
            usable = super().update(
                share, rate_factor=rate_factor, nonfinite_loss=nonfinite_loss, interrupted=interrupted
            )
        except FloatingPointError as error:
            usable = False
            self._counters.skipped_steps += 1
            steps.note(error)
        if self.measure_norm:
            self._share_norm()
        steps.end()
        return usable

    def _share_norm(self) -> None:
        """Set the norm to the largest of all workers, or to NaN if any worker's norm is not finite."""
        norm = np.array([math.inf if math.isnan(self.gradient_norm) else self.gradient_norm])
        self.axis.all_reduce(norm, op="max", label="control")
        self._counters.gradient_norm = float(norm[0]) if math.isfinite(norm[0]) else math.nan
