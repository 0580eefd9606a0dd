"""What users call of an optimizer: it checks the arguments of a step on all ranks; its `state` takes the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mpishard.arguments import kind_of
from mpishard.backend.jit_function import prepare
from mpishard.comm.agreement import opening
from mpishard.comm.axis import Axis
from mpishard.comm.errors import CaughtError
from mpishard.comm.mesh import Mesh
from mpishard.data_parallel.auxiliary_state import AuxiliaryState
from mpishard.data_parallel.configuration import ShardingConfiguration, mesh_of
from mpishard.data_parallel.method_state import MinimizationState
from mpishard.data_parallel.optimizer_state import OptimizerState
from mpishard.data_parallel.results import OptimizationResult, P, Problem, TrainingState
from mpishard.data_parallel.rule_state import RuleState
from mpishard.data_parallel.settings import Settings, agree_on_step, agree_whether_begun
from mpishard.data_parallel.strategies import Sharding, Strategy
from mpishard.data_parallel.validation import (
    check_configuration,
    check_count,
    check_gradients,
    check_no_gradients,
    check_problem,
    warn_if_initial_parameters_differ,
)
from mpishard.minimizers import Method
from mpishard.minimizers.method import Minimizer
from mpishard.optim import Rule
from mpishard.optim.loss_scale import LossScale
from mpishard.parameters.flat import FlatParameters, check_flat

if TYPE_CHECKING:
    from pathlib import Path

    from mpishard.checkpoint import Checkpoints
    from mpishard.data.evaluation import EarlyStopping, Evaluation
    from mpishard.record import RunRecord

Array = Any


class ShardedOptimizer:
    """Base of the optimizers, which differ in their `sharding`.

    Creation and every method are collective over ``config.mesh`` unless a docstring says otherwise.

    Parameters
    ----------
    rule : Rule or Method
        The update rule, e.g. ``AdamW(lr=1e-3)``; or a method such as ``LBFGSB()``, whose steps are the evaluations of
        its line searches.
    config : ShardingConfiguration or Mesh
        Gradients are reduced over the data axis of the mesh.  On a mesh with tensor or pipeline ranks, parameters are a
        FlatParameters laid out for ``mesh.place``; models made for that mesh have such parameters.

    Attributes
    ----------
    measure_norm : bool
        Compute `gradient_norm` even where clipping does not need it (one more pass over the gradients).
    settings : Settings
        The settings that all ranks compare.
    state : OptimizerState
        What training loops and checkpoints save, move and restore.

    Raises
    ------
    TypeError
        On every rank, if `rule` of any is no rule; on this rank, if `config` is neither a mesh nor a configuration.
    ValueError
        On every rank, if the configuration has a setting that this strategy does not have, such as compression under
        ZeRO-3; or if configurations differ between ranks.
    """

    sharding: Sharding

    def __init__(self, rule: Rule | Method, config: ShardingConfiguration | Mesh) -> None:
        name = type(self).__name__
        with opening(mesh_of(config).world, "ShardedOptimizer") as same:
            if not isinstance(rule, Rule | Method):
                raise TypeError(f"{name} needs an update rule such as AdamW(lr=1e-3), got {kind_of(rule)}")
            self.config: ShardingConfiguration = ShardingConfiguration.of(config)
            check_configuration(name, self.config, self.sharding)
            self.axis: Axis = self.config.mesh.data
            self.world: Axis = self.config.mesh.world
            self.state: OptimizerState
            if isinstance(rule, Method):
                self.state = MinimizationState(self, rule)
            else:
                self.state = RuleState(self, rule, self._auxiliary_state())
            same["optimizer"] = name
        self.state.settings.arithmetic.fix_threads(self.config)
        prepare()  # here, so that the first step does not pay for it
        self.measure_norm = False
        # By folder the ids of the checkpoints that `save_checkpoint` may remove; None: all that are there.
        self.own_checkpoints: dict[Path, list[str] | None] = {}
        self._counters = self.state.counters
        self.settings: Settings = self.state.settings

    @property
    def rule(self) -> Rule | Method:
        """The update rule; the next step takes another one with the same slots.  A method cannot be replaced."""
        return self.state.rule

    @rule.setter
    def rule(self, rule: Rule) -> None:
        self.state.replace_rule(rule)

    @property
    def mesh(self) -> Mesh:
        """The mesh of the optimizer, and of the models that it trains."""
        return self.config.mesh

    @property
    def parameters(self) -> FlatParameters | None:
        """The parameters that the optimizer trains; None before the first step."""
        return self.state.parameters

    @property
    def steps(self) -> int:
        """Updates taken; learning-rate schedules and bias corrections count these."""
        return self._counters.steps

    @property
    def skipped_steps(self) -> int:
        """Steps left out because of NaN or infinite gradients."""
        return self._counters.skipped_steps

    @property
    def clock(self) -> int:
        """Steps so far, both taken and skipped: the number of the last step's batch of samples."""
        return self._counters.clock

    @property
    def gradient_norm(self) -> float:
        """Global 2-norm of the averaged gradient of the last step, before clipping; NaN where it was not measured.

        Of a method the largest element of the projected gradient at the last iterate.
        """
        return self._counters.gradient_norm

    @property
    def minimizer(self) -> Minimizer | None:
        """The minimisation of a method, after the first step; None with a rule."""
        return self.state.minimizer

    @property
    def loss_scale(self) -> float:
        """The factor that gradients must already contain; models read it from ``parameters.loss_scale``."""
        return self._counters.scaling.value

    @property
    def scaling(self) -> LossScale:
        """Chooses `loss_scale`."""
        return self._counters.scaling

    @scaling.setter
    def scaling(self, scaling: LossScale) -> None:
        self._counters.scaling = scaling

    # -- steps ------------------------------------------------------------------------------------------------------

    def step(
        self, parameters: Array | FlatParameters, gradients: Array | None = None, *, count: float | None = None
    ) -> None:
        """Take one step: average the gradients of all ranks and update the parameters, in place, on every rank.

        The first call creates the optimizer state.  It also sets all copies of parameters to those of data rank 0,
        tensor rank 0 and the stages that own ties.  With ``auto_sync_gradients=False`` a call only adds this rank's
        gradient to the earlier ones, without communication from the second call on, and `synchronize_optimizer_state`
        takes the step.  Under ZeRO-2 and 3 a backward pass may wait for the other ranks: call `step` before any other
        collective.

        Parameters
        ----------
        parameters : 1-D array or FlatParameters
            The current parameters, float32 or float64, the same on every rank.
        gradients : 1-D array, optional
            This rank's gradient, of the shape, dtype and device of `parameters`, times `loss_scale`.  The reduction
            uses the array as its buffer, so that its content is undefined afterwards.  A FlatParameters has its own
            gradients.
        count : float, optional
            The divisor of the sum of all ranks' gradients, the same on all ranks: the global number of samples where
            gradients are sums over samples.  Default: the number of data-parallel ranks, which gives the mean over
            ranks.  A call that only adds does not use it.

        Raises
        ------
        ValueError, TypeError
            On every rank, if any rank's arguments are invalid, or if arguments, rules or configurations differ between
            ranks.  Nothing has changed then.
        FloatingPointError
            On every rank if any gradient is NaN or infinite (see `nonfinite_gradients`); parameters and state are
            unchanged.
        """
        state = self.state
        summed = isinstance(parameters, FlatParameters) and self._end_pass(parameters, gradients)
        named, problem = self._checked_arguments(parameters, gradients, count)
        is_first, updates = not state.is_bound, summed or self.config.auto_sync_gradients
        largest = math.inf  # of the absolute values of all ranks' gradients; infinity: only their sums tell
        if is_first or updates:
            if not is_first and gradients is not None and problem is None:
                largest = state.on_rank.inspection.largest_ahead(gradients)
            largest = agree_on_step(state.comparing_ranks, named, count, problem, self.settings, largest)
        elif problem is not None:
            raise problem
        assert named is not None
        if is_first:
            warn_if_initial_parameters_differ(self.mesh, named)
        if named is not state.parameters:
            self.bind(named)
        self.settings.arithmetic.keep_products(self.config)
        on_rank = state.on_rank
        reducer = on_rank.strategy.reducer
        if not updates:
            reducer.accumulation.add(gradients)
            return
        if gradients is not None:
            reducer.use_external(gradients)
        on_rank.inspection.note_largest(largest)
        self.update(count if count is not None else self._calls() or self.axis.size, exchange_status=False)

    def _end_pass(self, parameters: FlatParameters, gradients: Array | None) -> bool:
        """End the backward pass that a step of a model follows.  True if its gradients are summed over ranks already.

        Collective over the data axis: the other ranks have started sums in their pass, and a rank without one, which
        has no samples, starts them here.
        """
        summed = parameters.gradients.reduced
        if self.state.parameters is parameters and gradients is None and not summed:
            self.state.strategy.reducer.end_pass()
        return summed

    def _checked_arguments(
        self, parameters: Array | FlatParameters, gradients: Array | None, count: float | None
    ) -> tuple[FlatParameters | None, Exception | None]:
        """The parameters by name, or None and the error in this rank's arguments."""
        state = self.state
        try:
            named = self._named(parameters, gradients)
            named.carried.check_intact()
            if gradients is not None:
                check_gradients(named, gradients)
            if isinstance(parameters, FlatParameters):
                waiting = state.is_bound and state.strategy.reducer.accumulation.total is not None
                if gradients is not None or waiting:
                    check_no_gradients(parameters)
            check_count(count)
            state.check_model(named)
            state.check_step()
        except Exception as error:  # of any kind: all ranks must learn of it
            return None, error
        return named, None

    def _named(self, parameters: Array | FlatParameters, gradients: Array | None) -> FlatParameters:
        if isinstance(parameters, FlatParameters):
            return parameters
        check_flat("parameters", parameters, written=True)
        if gradients is None:
            raise TypeError("step(parameters, gradients) needs the gradients of a flat array of parameters")
        known = self.state.parameters
        same = known is not None and known.sharded is None and known.flat is parameters
        return known if same and known is not None else FlatParameters.over(parameters)

    def synchronize_optimizer_state(self) -> None:
        """End a gradient accumulation by a step, and copy replicated parameters and state again.

        With ``auto_sync_gradients=False`` this takes one step along the mean of the accumulated gradients, over all
        calls of `step` on all data ranks; ranks may differ in their number of calls.  Otherwise ranks agree already.
        Parameters and state with copies on several ranks are then copied again from data rank 0, tensor rank 0 and the
        stages that own ties, which repairs copies that other code has changed.

        Raises
        ------
        ValueError
            On every rank, if some ranks have called `step` and others have not, or settings differ between ranks.
        """
        if not agree_whether_begun(self.world, self.state.is_bound, self.settings):
            return
        self._level_workers()
        strategy, calls = self.state.strategy, self._calls()
        if not calls:
            self.state.broadcast()
            return
        total = strategy.reducer.accumulation.total
        if total is not None:
            strategy.reducer.use_external(total)
        self.update(calls)

    def _calls(self) -> int:
        """Number of calls of `step` that only accumulated since the last update, over all data ranks.  Collective."""
        if self.config.auto_sync_gradients:
            return 0
        accumulation = self.state.strategy.reducer.accumulation
        return accumulation.calls(self.mesh)

    def _level_workers(self) -> None:
        """Bring workers that take steps by themselves to one state; other ranks take all steps together."""
        if self.sharding.workers_differ:
            self.state.consolidate()

    def optimize(
        self,
        problem: Problem[P],
        *,
        callback: Callable[[TrainingState[P]], bool | None] | None = None,
        progress: bool = True,
        checkpoints: Checkpoints | None = None,
        resume: bool = False,
        record: RunRecord | None = None,
        evaluate: Evaluation | None = None,
        stop_early: EarlyStopping | None = None,
    ) -> OptimizationResult[P]:
        """Minimise a problem: take its steps, or continue a run that has taken some.

        As with the optimizers of PyTorch, another call continues with the state of the previous one: slots and steps,
        and hence the position in the learning rate's schedule and in the samples.  A message reports this once.  A new
        optimizer starts afresh.

        Parameters
        ----------
        problem : OptimizationProblem
            What is minimised, over which samples, and when the run stops.
        callback : callable, optional
            Called with a `TrainingState` on every rank after every step; returning True on any rank stops all of them.
        progress : bool
            Show progress on stderr of rank 0.
        checkpoints : Checkpoints, optional
            Save the run there, as often as ``checkpoints.every`` says, and after the last step.
        resume : bool
            Continue from the newest complete checkpoint of `checkpoints`, with its parameters and state, at its step
            and its position in the samples; start a new run without one.  The number of ranks and the layout may
            differ from those that wrote it.  Steps of the earlier run count as steps of this one, and its losses come
            first in `loss_history`, as NaN if the loop that wrote the checkpoint saved no losses.  A run that had
            reached its number of steps or its tolerance takes no more steps.  The learning rate and the other settings
            are those of this optimizer's rule; a message names those that differ from the checkpoint's.
        record : RunRecord, optional
            Write the course of the run there, for ``mpishard plot`` and other tools.
        evaluate : Evaluation, optional
            A validation set, and how often its mean loss is computed.  The losses are in the result, the checkpoints
            and the record.  `LocalSGDOptimizer` brings its workers to one state before, as for a checkpoint.
        stop_early : EarlyStopping, optional
            Stop when the validation loss no longer falls, with the reason ``"patience"``.

        Returns
        -------
        OptimizationResult
            The same on every rank except for `communication`; each has its part of a model that is split over ranks.

        Raises
        ------
        ValueError
            On every rank and before the first step, if an option of any rank is invalid, the problem or the settings
            differ between ranks, nothing would stop the loop, checkpoints cannot hold the `facts`, or the checkpoint
            has other tensors, another rule or other samples.
        TypeError
            On every rank, if an option of any rank has a wrong type.
        FloatingPointError
            On every rank, if a gradient or a loss of any rank is NaN or infinite (see `nonfinite_gradients`).
        OSError
            On every rank, if a checkpoint cannot be read or written, see `Checkpoints`.
        Exception
            What the function of the problem, or `callback`, raises: on every rank, unless ranks wait for each other
            inside a model.
        """
        with CaughtError() as caught:
            check_problem(problem)
        self._level_workers()
        if caught.error is not None:  # the other ranks compare their problems
            self.settings.agree(problem=caught.error)
        return problem.minimize(
            self,
            callback=callback,
            progress=progress,
            checkpoints=checkpoints,
            resume=resume,
            record=record,
            evaluate=evaluate,
            stop_early=stop_early,
        )

    @contextmanager
    def averaged_parameters(self) -> Iterator[None]:
        """Put the exponential moving average of the parameters in their place within a ``with`` block.

        To evaluate, export or save the average: ``with optimizer.averaged_parameters(): ...``.  Take no step inside.

        Yields
        ------
        None
            At the end of the block the parameters are what they were, to the last bit.

        Raises
        ------
        ValueError
            If the rule has no `ema_decay`, or no step was taken yet.
        """
        averages = self.state.moving_averages()
        self._level_workers()
        strategy, parameters = self.state.strategy, self.state.on_rank.parameters
        held = parameters.held
        before = held.copy()
        try:
            for values, average in zip(strategy.values(), averages, strict=True):
                values[...] = average
            strategy.publish_parameters()
            parameters.carried.round_masters()
            yield
        finally:  # without communication, so that the parameters come back after the death of a rank too
            held[...] = before
            if parameters.sharded is not None:
                parameters.sharded.free_all()
            parameters.carried.round_masters()

    def begin_stage(self, *, keep_history: bool = False) -> None:
        """Let the next call of `optimize` minimise another function, from the last iterate of a method on.

        Such as the next frequency band of a wave inversion.  Iterations and evaluations count from 0 again; checkpoints
        of each stage need a separate folder.

        Parameters
        ----------
        keep_history : bool
            Whether what the method has learned of the curvature is kept; else the stage starts like a new run.

        Raises
        ------
        TypeError
            If the optimizer has a rule, whose state does not depend on the function.
        ValueError
            If there is no iterate yet, as before the first step; on all ranks also if `keep_history` differs between
            ranks or is no flag.
        """
        self.state.begin_stage(keep_history)

    def bind(self, parameters: FlatParameters) -> Strategy:
        """Create the state for these parameters, or attach them to existing state.

        `step` does this.  Collective at the first call, which makes all copies of the parameters equal.

        Parameters
        ----------
        parameters : FlatParameters
            Laid out for ``mesh.place``.

        Returns
        -------
        Strategy
            What spreads gradients and state of these parameters over the ranks.

        Raises
        ------
        ValueError
            If the parameters are not laid out for this mesh, or do not match the state.  At the first call on all
            ranks, also if rules or configurations differ between ranks.
        """
        return self.state.bind(parameters)

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
        """Finish the reductions and update along the summed gradient divided by `count`.

        `step` and training loops call this last.

        Parameters
        ----------
        count : float
            As for `step`.
        loss : float
            The mean loss at the parameters, which a method needs.
        rate_factor : float
            Multiplies the rule's learning rate.
        nonfinite_loss : str
            A description of what is NaN or infinite in this rank's loss, if anything is; it counts as a NaN gradient.
        interrupted : bool
            Whether this rank was interrupted; all ranks learn of it if they agree in `update` (`agrees_in_update`).
        exchange_status : bool
            False, on all ranks, if no rank gives a `nonfinite_loss` or is `interrupted`; that may save a message.

        Returns
        -------
        bool
            False if the step was skipped.
        """
        inspection = self.state.on_rank.inspection
        inspection.nonfinite_loss, inspection.interrupted = nonfinite_loss, interrupted
        return self.state.update(count, loss=loss, rate_factor=rate_factor, exchange_status=exchange_status)

    # -- state ------------------------------------------------------------------------------------------------------

    def _auxiliary_state(self) -> list[AuxiliaryState]:
        """State besides that of a rule; called once the configuration is known."""
        return []

    def serialize(self) -> bytes:
        """The whole state as an HDF5 file image, which `deserialize` reads in any layout.

        Returns
        -------
        bytes
            The same on every rank; parameters are not in it.

        Raises
        ------
        ValueError
            Before the first step, when there is no state.
        """
        return self.state.serialize()

    def deserialize(self, data: bytes) -> None:
        """Restore the state that `serialize` returned, from this or another number of ranks, mesh or strategy.

        Before the first step the names and shapes of the parameters are unknown; the first step compares them.

        Parameters
        ----------
        data : bytes
            What `serialize` returned, the same on every rank.

        Raises
        ------
        ValueError, TypeError
            On every rank, if any rank's bytes are truncated, damaged, of another format, of another rule or of other
            parameters, or if ranks have different bytes.  The optimizer is unchanged then.
        """
        self.state.deserialize(data)
