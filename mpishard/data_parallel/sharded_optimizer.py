"""An optimizer joins an update rule and a strategy: reduce gradients, update the owned ranges, gather parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishard.backend import array as arrays
from mpishard.backend import exact_norm
from mpishard.backend.array import accumulate
from mpishard.backend.blas_threads import fix_blas_threads
from mpishard.backend.compiled import prepare
from mpishard.comm.axis import Axis
from mpishard.comm.mesh import Mesh
from mpishard.data_parallel.configuration import ShardingConfiguration
from mpishard.data_parallel.full_state import FullState
from mpishard.data_parallel.gradient_checks import Inspection
from mpishard.data_parallel.model_parallel_group import ModelParallelGroup
from mpishard.data_parallel.optimizer_state import changed_numbers, check_numbers, check_rule, facts_of, shards
from mpishard.data_parallel.results import OptimizationResult, P, Problem, TrainingState
from mpishard.data_parallel.settings import Settings, differing
from mpishard.data_parallel.slots import fill_errors, fill_slots, make_slots, whole_errors, whole_slots
from mpishard.data_parallel.strategies import Strategy
from mpishard.data_parallel.update import take_step
from mpishard.data_parallel.validation import (
    agree_on_step,
    check_copies,
    check_count,
    check_gradients,
    check_layout,
    check_no_gradients,
    check_problem,
    check_reducer,
    check_same_model,
    tell_of_other_starts,
)
from mpishard.io import log
from mpishard.layout.run_state import RunState, names_fact
from mpishard.optim import Rule
from mpishard.optim.loss_scale import LossScale
from mpishard.parameters.flat import FlatParameters, check_flat

if TYPE_CHECKING:
    from mpishard.checkpoint import Checkpoints
    from mpishard.record import RunRecord

Array = Any
# torch.nn.utils.clip_grad_norm_ divides by the norm plus this.
_CLIP_EPSILON = 1e-6


class ShardedOptimizer:
    """Base of the optimizers, which differ only in their `strategy`.

    Every method is collective over ``config.mesh`` unless its docstring says otherwise.

    Parameters
    ----------
    rule : Rule
        The update rule, e.g. ``AdamW(lr=1e-3)``.
    config : ShardingConfiguration or Mesh
        Gradients are reduced over the data axis of the mesh.  On a mesh with tensor or pipeline ranks, parameters are a
        FlatParameters laid out for ``mesh.place``; models made for that mesh have such parameters.

    Attributes
    ----------
    steps : int
        Updates taken; learning-rate schedules and bias corrections count these.
    skipped_steps : int
        Steps left out because of NaN or infinite gradients.
    measure_norm : bool
        Compute `gradient_norm` even where clipping does not need it (one more pass over the gradients).
    scaling : LossScale
        Chooses `loss_scale`.
    settings : Settings
        The settings that all ranks compare.
    gradient_norm : float
        Global 2-norm of the averaged gradient of the last step, before clipping; NaN where it was not measured.
    """

    strategy: type[Strategy]
    gradient_norm: float
    scaling: LossScale
    settings: Settings

    def __init__(self, rule: Rule, config: ShardingConfiguration | Mesh) -> None:
        if not isinstance(rule, Rule):
            raise TypeError(
                f"{type(self).__name__} needs an update rule such as AdamW(lr=1e-3), got {type(rule).__name__}"
            )
        self.rule = rule
        self.config: ShardingConfiguration = ShardingConfiguration.of(config)
        if self.config.reproducible:
            if self.strategy.gradients_on_demand and self.config.mesh.pipeline.size > 1:
                raise ValueError(
                    f"reproducible=True with {type(self).__name__} is for meshes without pipeline ranks, whose "
                    "micro-batches cannot be told apart; use ZeRO-1 or DDP there"
                )
            fix_blas_threads()
        prepare()  # here, so that the first step does not pay for it
        if self.config.compressor is not None and self.strategy.shards_parameters:
            raise ValueError(
                f"gradient compression is for DDP, ZeRO-1 and ZeRO-2, not for {type(self).__name__}, which sends "
                "parameters most of the time; use one of these, or a configuration with gradient_compressor=None and "
                "enable_gradient_compression=False"
            )
        self.axis: Axis = self.config.mesh.data
        self.world: Axis = self.config.mesh.world
        self.steps: int = 0
        self.skipped_steps: int = 0
        self.measure_norm = False
        self.gradient_norm = math.nan
        self.scaling = LossScale(self.config.loss_scale)
        self.settings = Settings(self)
        self._parameters: FlatParameters | None = None
        self._strategy: Strategy
        self._inspection: Inspection
        self._slots: dict[str, Array] = {}
        self._restored: FullState | None = None
        self._accumulated: Array | None = None
        self._passes = 0
        self._told = False  # whether `tell_of_state` has reported that a run continues with existing state

    @property
    def mesh(self) -> Mesh:
        """The mesh of the optimizer, and of the models that it trains."""
        return self.config.mesh

    @property
    def parameters(self) -> FlatParameters | None:
        """The parameters that the optimizer trains; None before the first step."""
        return self._parameters

    @property
    def loss_scale(self) -> float:
        """The factor that gradients must already contain; models read it from ``parameters.loss_scale``."""
        return self.scaling.value

    @property
    def clock(self) -> int:
        """Steps so far, both taken and skipped: the number of the last step's batch of samples."""
        return self.steps + self.skipped_steps

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
        gradients : 1-D array
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
        automatic = self.config.auto_sync_gradients
        synchronized = isinstance(parameters, FlatParameters) and parameters.gradients.reduced
        if self._parameters is parameters and gradients is None and not synchronized:
            # The other ranks have started reductions in their backward pass; a rank without one starts them here.
            self._strategy.buckets.end_pass(last=automatic)
        named, problem = self._checked(parameters, gradients, count)
        if automatic or synchronized or self._parameters is None:
            agree_on_step(self._who_agrees(), named, count, problem, self.settings)
        elif problem is not None:
            raise problem
        assert named is not None
        if self._parameters is None:
            tell_of_other_starts(self.mesh, named)
        self.bind(named)
        if automatic or synchronized:
            if gradients is not None:
                self._strategy.buckets.use_external(gradients)
            self.update(count if count is not None else self._calls() or self.axis.size)
            return
        self._passes += 1
        if gradients is not None:
            if self._accumulated is None:
                self._accumulated = arrays.zeros(named.size, named.dtype, like=named.like)
            accumulate(self._accumulated, gradients)

    def synchronize_optimizer_state(self) -> None:
        """Bring all ranks to one state.

        With ``auto_sync_gradients=False`` this takes one step along the mean of the accumulated gradients, over all
        calls of `step` on all data ranks; ranks may differ in their number of calls.  Otherwise ranks agree already.
        Parameters and state with copies on several ranks are then copied again from data rank 0, tensor rank 0 and the
        stages that own ties, which repairs copies that other code has changed.
        """
        states = self.world.allgather_object((self._parameters is not None, self.settings.fingerprint))
        unbound = [rank for rank, (bound, _) in enumerate(states) if not bound]
        if unbound:
            if len(unbound) < len(states):
                raise ValueError(f"ranks {unbound} have not called step() yet")
            return
        if len(set(states)) > 1:
            raise differing(self.world, self.settings.by_name())
        calls = self._calls()
        if calls:
            if self._accumulated is not None:
                self._strategy.buckets.use_external(self._accumulated)
            self.update(calls)
            return
        self._strategy.replicas.spread()
        for slot in self._slots.values():
            self._strategy.resync(slot)

    def optimize(
        self,
        problem: Problem[P],
        *,
        callback: Callable[[TrainingState[P]], bool | None] | None = None,
        progress: bool = True,
        checkpoints: Checkpoints | None = None,
        resume: bool = False,
        record: RunRecord | None = None,
    ) -> OptimizationResult[P]:
        """Minimise a problem: take its steps, or continue a run that has taken some.

        As with the optimizers of PyTorch, another call continues with the state of the previous one: slots and steps,
        and hence the position in the learning rate's schedule and in the samples.  A message reports this once.  A new
        optimizer starts afresh.

        Parameters
        ----------
        problem : OptimizationProblem
        callback : callable, optional
            Called with a `TrainingState` on every rank after every step; returning True on any rank stops all of them.
        progress : bool
            Show progress on stderr of rank 0.
        checkpoints : Checkpoints, optional
            Save the run there, as often as ``checkpoints.every`` says, and after the last step.
        resume : bool
            Continue from the newest complete checkpoint of `checkpoints`, with its parameters and state, at its step
            and its position in the samples; start a new run if there is none.  The number of ranks and the layout may
            differ from those that wrote it.  Steps of the earlier run count as steps of this one, and its losses come
            first in `loss_history`, as NaN if the loop that wrote the checkpoint saved no losses.  A run that had
            reached its number of steps or its tolerance takes no more steps.  The learning rate and the other settings
            are those of this optimizer's rule; a message names those that differ from the checkpoint's.
        record : RunRecord, optional
            Write the course of the run there, for ``mpishard plot`` and other tools.

        Returns
        -------
        OptimizationResult

        Raises
        ------
        ValueError
            On every rank and before the first step, if the problem or the settings differ between ranks, nothing would
            stop the loop, checkpoints cannot hold the `facts`, or the checkpoint has other tensors, another rule or
            other samples.
        """
        check_problem(problem)
        self.begin_run()
        return problem.minimize(
            self, callback=callback, progress=progress, checkpoints=checkpoints, resume=resume, record=record
        )

    def begin_run(self) -> None:
        """Bring all ranks to one state before `optimize` takes steps.  Collective."""

    def bind(self, parameters: FlatParameters) -> Strategy:
        """Create the state for these parameters, or attach them to existing state; `step` does this by itself.

        Collective at the first call, which makes all copies of the parameters equal.

        Raises
        ------
        ValueError
            If the parameters are not laid out for this mesh, or do not match the state.  At the first call on all
            ranks, also if rules or configurations differ between ranks.
        """
        problem = None
        try:
            self._check_model(parameters)
        except ValueError as error:
            problem = error
        if self._parameters is None:
            self.settings.agree(self.settings.of_state(parameters), problem)
        elif problem is not None:
            raise problem
        if self._parameters is parameters:
            return self._strategy
        written = parameters.gradients
        if self._parameters is None:
            self._make_state(parameters)
        else:
            self._strategy.attach(parameters)
        self._strategy.buckets.no_sync = not self.config.auto_sync_gradients
        if not written.reduces and written.has_content:  # a backward pass ran before the first step
            if written.reduced:
                self._strategy.replicas.zero_duplicates(written.flat)
            else:
                written.end_pass()
            self._strategy.buckets.use_external(written.flat)
        parameters.gradients = self._strategy.buckets
        self._parameters = parameters
        self._prepare_step()
        return self._strategy

    def update(
        self, count: float, *, rate_factor: float = 1.0, nonfinite_loss: str = "", interrupted: bool = False
    ) -> bool:
        """Finish the reductions and update along the summed gradient divided by `count`.

        `step` and training loops call this last.

        Parameters
        ----------
        count : float
            As for `step`.
        rate_factor : float
            Multiplies the rule's learning rate.
        nonfinite_loss : str
            A description of what is NaN or infinite in this rank's loss, if anything is; it counts as a NaN gradient.
        interrupted : bool
            Whether this rank was interrupted; all ranks learn of it if they agree in `update` (`agrees_in_update`).

        Returns
        -------
        bool
            False if the step was skipped.
        """
        assert self._parameters is not None
        strategy, config = self._strategy, self.config
        strategy.buckets.end_pass()
        strategy.wait_all()
        divisor = float(count) * self.loss_scale
        self._inspection.nonfinite_loss, self._inspection.interrupted = nonfinite_loss, interrupted
        usable = self._gradients_are_usable(divisor)
        if usable:
            clip = 1.0
            if config.max_gradient_norm is not None and not math.isnan(self.gradient_norm):
                clip = min(1.0, config.max_gradient_norm / (self.gradient_norm + _CLIP_EPSILON))
            self.steps += 1
            config.mesh.ledger.step = self.clock
            slots = list(self._slots.values())
            take_step(self.rule.scaled(rate_factor), strategy, slots, self.steps, divisor=divisor, clip=clip)
            strategy.all_gather_parameters()
            strategy.keep_errors()
            self.scaling.succeeded()
        else:
            self.skipped_steps += 1
        self._prepare_step()
        strategy.buckets.reset()
        if config.mesh.debug:
            self._check_copies()
        return usable

    # -- state ------------------------------------------------------------------------------------------------------

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state on this rank.  Not collective."""
        return sum(int(slot.nbytes) for slot in self._slots.values())

    @property
    def gradient_bytes(self) -> int:
        """Peak bytes of the optimizer's gradient memory on this rank.  Not collective."""
        return self._strategy.gradient_bytes if self._parameters is not None else 0

    def serialize(self) -> bytes:
        """The whole state as an HDF5 file image, the same bytes on every rank; `deserialize` reads it in any layout."""
        from mpishard.data_parallel import serialization  # imports h5py, which only this method and `deserialize` need

        if self._parameters is None:
            if self._restored is not None:
                return serialization.encode(self._restored)
            raise ValueError("there is no optimizer state before the first step")
        self.prepare_save()
        return serialization.encode(self._full_state(self._parameters))

    def deserialize(self, data: bytes) -> None:
        """Restore the state that `serialize` returned, from this or another number of ranks, mesh or strategy.

        Before the first step the names and shapes of the parameters are unknown; the first step compares them.

        Raises
        ------
        ValueError, TypeError
            On every rank, if any rank's bytes are truncated, damaged, of another format, of another rule or of other
            parameters, or if ranks have different bytes.  The optimizer is unchanged then.
        """
        from mpishard.data_parallel import serialization

        state, problem = None, None
        try:
            state = serialization.decode(data)
            self._check_state(state)
            if self._parameters is not None:
                state.check_parameters(self._parameters.specs, self._parameters.dtype)
        except (ValueError, TypeError) as error:
            problem = error
        further = None if state is None else serialization.identity(state, data)
        self.settings.agree(further, problem, what="settings and state")
        assert state is not None
        self.tell_of_changes({"rule.json": state.configuration})
        self.steps, self.skipped_steps = state.steps, state.skipped_steps
        self.scaling.restore(state.loss_scale)
        if self._parameters is None:
            self._restored = state
        else:
            self._restore(state)
            self._prepare_step()

    def prepare_save(self) -> None:
        """Prepare the state for a save or for a move to other ranks: no rank keeps anything that only it needs.

        Call this before `run_state` when saving.  Collective.

        Raises
        ------
        ValueError
            On every rank, if a backward pass has begun to send compressed gradients and no step has used them yet.
        """
        if self._parameters is not None and self._strategy.compressed is not None:
            compressed, problem = self._strategy.compressed, None
            if compressed.sending:
                problem = ValueError(
                    "compressed gradients of a backward pass are on their way, and what they leave out belongs to no "
                    "step yet; take the step, or call parameters.reset_gradients(), before the state is saved"
                )
            self.world.raise_if_any(problem)
            compressed.fold()

    def resync(self) -> None:
        """Make all copies equal again after the mesh has moved to other ranks.  Collective."""

    @property
    def synchronizes_next_step(self) -> bool:
        """Whether the next update waits for the other data ranks.  The same on all ranks."""
        return True

    @property
    def agrees_in_update(self) -> bool:
        """Whether each update contains an agreement of all ranks.  The same on all ranks."""
        config = self.config
        return config.nonfinite_gradients != "ignore" or config.max_gradient_norm is not None or self.measure_norm

    @property
    def interrupted(self) -> bool:
        """Whether any rank was interrupted, as of the last update; the same on all ranks if `agrees_in_update`."""
        return self._inspection.interrupted

    @property
    def prepares_saves(self) -> bool:
        """Whether `prepare_save` has something to do.  The same on all ranks."""
        return self.config.compressor is not None

    def run_state(self) -> RunState:
        """The state that the run needs to continue: the live arrays, and the numbers.  Not collective.

        Raises
        ------
        ValueError
            Before the first step, unless `bind` was called.
        """
        if self._parameters is None:
            raise ValueError("there is no optimizer state before the first step")
        return RunState(self._parameters.specs, shards(self._strategy, self._slots), facts_of(self))

    @property
    def further_facts(self) -> dict[str, Any]:
        """Facts in `run_state` besides those that every optimizer has."""
        return {}

    @property
    def further_settings(self) -> dict[str, Any]:
        """Settings that decide the steps besides the rule and the configuration."""
        return {}

    def check_facts(self, facts: Mapping[str, Any]) -> None:
        """Raise ValueError unless this optimizer can continue from the state that these facts describe."""
        check_rule(self.rule, facts.get("rule", "none"), names_fact(facts, "slots.json"))
        check_numbers(facts)

    def changed_numbers(self, facts: Mapping[str, Any]) -> list[str]:
        """Descriptions of the rule's settings that differ from these facts."""
        return changed_numbers(self.rule, facts.get("rule.json"))

    def tell_of_changes(self, facts: Mapping[str, Any]) -> None:
        """Report on rank 0 the settings of the rule that differ from those in the saved state."""
        changed = self.changed_numbers(facts)
        if changed and self.mesh.rank == 0:
            log.inform(f"the saved state goes on with {', '.join(changed)}")

    def tell_of_state(self) -> None:
        """Report on rank 0, the first time only, that a run does not start afresh."""
        if self.mesh.rank == 0 and not self._told:
            log.inform(
                f"this optimizer goes on after the {self.clock} steps that it has taken, with its state, the learning "
                "rate's schedule and the samples that come next; make a new optimizer to start afresh"
            )
        self._told = True

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Continue from these facts of `run_state`, once its arrays are filled.  Not collective."""
        assert self._parameters is not None
        self.steps, self.skipped_steps = int(facts["steps"]), int(facts["skipped_steps"])
        self.gradient_norm = float(facts.get("gradient_norm", math.nan))
        if "good_steps" in facts:
            self.scaling.restore((float(facts["loss_scale"]), int(facts["good_steps"])))
        if self._strategy.compressed is not None:
            self._strategy.compressed.forget(self._strategy.error_scale(float(facts.get("loss_scale", 1.0))))
        self._prepare_step()
        self._parameters.reset_gradients()
        if self._parameters.sharded is not None:
            self._parameters.sharded.drop()

    def rebuild_state(self, parameters: FlatParameters) -> None:
        """Create new state for the parameters after the mesh has moved to other ranks.

        Arrays of an earlier `run_state` stay unchanged.  Collective.
        """
        self._parameters = None
        parameters.renew()
        self.bind(parameters)

    def abandon(self) -> None:
        """Drop pending reductions, which cannot finish after a rank has died.  Not collective."""
        if self._parameters is not None:
            self._strategy.abandon()

    def _make_state(self, parameters: FlatParameters) -> None:
        config = self.config
        self._strategy = self.strategy.fitting(parameters)(config, parameters)
        self._strategy.buckets.on_reset.append(self._forget_gradients)
        self._inspection = Inspection(self._strategy, parameters)
        if config.nonfinite_gradients == "ignore":
            self._strategy.buckets.inspect = None
        if not arrays.is_device(parameters.like):
            self.rule.kernel.expect(parameters.dtype)
            exact_norm.expect(parameters.dtype, config.max_gradient_norm is not None or self.rule.norm_based)
        self._slots = make_slots(self.rule, self._strategy.owned, parameters.dtype, like=parameters.like)
        if self._restored is not None:
            self._restore(self._restored)
            self._restored = None

    def _restore(self, state: FullState) -> None:
        fill_slots(self._strategy, self._slots, state.slots)
        fill_errors(self._strategy, state.others)

    def _full_state(self, parameters: FlatParameters) -> FullState:
        """The whole state, on every rank.  Collective."""
        return FullState(
            rule=type(self.rule).__name__,
            configuration=self.rule.configuration(),
            steps=self.steps,
            skipped_steps=self.skipped_steps,
            specs=parameters.specs,
            dtype=parameters.dtype,
            slots=whole_slots(self.world, self._strategy, self._slots),
            loss_scale=self.scaling.state,
            others=whole_errors(self.world, self._strategy),
        )

    def _prepare_step(self) -> None:
        """Set the loss scale of the parameters, and the compression of the strategy, for the next step."""
        assert self._parameters is not None
        self._parameters.loss_scale = self.loss_scale
        self._strategy.compresses = self.steps >= self.config.compress_after
        if self._strategy.compressed is not None:
            self._strategy.compressed.rescale(self._strategy.error_scale(self.loss_scale))

    def _forget_gradients(self) -> None:
        self._passes = 0
        self._accumulated = None

    # -- checks -----------------------------------------------------------------------------------------------------

    def _who_agrees(self) -> Axis | ModelParallelGroup:
        """The ranks that compare their arguments of `step` before taking it."""
        return self.world

    def _check_state(self, state: FullState) -> None:
        """Raise ValueError unless this optimizer can continue from a state."""
        check_rule(self.rule, state.rule, state.slots)

    def _checked(
        self, parameters: Array | FlatParameters, gradients: Array | None, count: float | None
    ) -> tuple[FlatParameters | None, Exception | None]:
        """The arguments of `step` as FlatParameters, or None and the error in this rank's arguments."""
        named = parameters if isinstance(parameters, FlatParameters) else None
        try:
            if named is None:
                check_flat("parameters", parameters, written=True)
                if gradients is None:
                    raise TypeError("step(parameters, gradients) needs the gradients of a flat array of parameters")
                known = self._parameters
                same = known is not None and known.sharded is None and known.flat is parameters
                named = known if same else FlatParameters.over(parameters)
            assert named is not None
            if gradients is not None:
                check_gradients(named, gradients)
            arrays_given = gradients is not None or self._accumulated is not None
            if isinstance(parameters, FlatParameters) and arrays_given:
                check_no_gradients(parameters)
            check_count(count)
            self._check_model(named)
            self.rule.learning_rate(self.steps + 1)  # a schedule that raises must do so before anything changes
        except Exception as error:  # of any kind: all ranks must learn of it
            return None, error
        return named, None

    def _check_model(self, parameters: FlatParameters) -> None:
        """Raise unless this optimizer can train these parameters."""
        check_layout(parameters, self.mesh, self.strategy)
        was = self._parameters
        if was is not None and was is not parameters:
            check_same_model(was, parameters, self.strategy)
        if self._restored is not None:
            self._restored.check_parameters(parameters.specs, parameters.dtype)
        check_reducer(parameters, None if was is None else self._strategy.buckets)

    def _calls(self) -> int:
        """Number of calls of `step` that only accumulated since the last update, over all data ranks."""
        if self.config.auto_sync_gradients:
            return 0
        calls = int(self.axis.all_reduce(np.array([self._passes]), label="control")[0])
        if self.axis.size < self.world.size:
            by_rank = self.world.allgather_object(calls)
            if len(set(by_rank)) > 1:
                raise ValueError(f"tensor and pipeline ranks must call step() equally often; calls by rank: {by_rank}")
        return calls

    def _check_copies(self) -> None:
        """Debug mode: raise on all ranks if copies of parameters differ."""
        check_copies(self._strategy.replicas, self.steps)

    def _gradients_are_usable(self, divisor: float) -> bool:
        """Agree on whether to take the step; compute the gradient's norm if clipping or `measure_norm` needs it."""
        mode, limit = self.config.nonfinite_gradients, self.config.max_gradient_norm
        self.gradient_norm = math.nan
        measure = limit is not None or self.measure_norm
        if mode == "ignore" and not measure and not self._inspection.is_first:
            return True
        norm = self._inspection.norm(measure)
        if not math.isinf(norm):
            self.gradient_norm = norm / divisor
            if self._inspection.finite_loss:
                return True
        elif self.scaling.overflowed():
            return False
        if mode == "raise":
            what = self._inspection.culprits(self.clock + 1)
            self._strategy.buckets.reset()
            raise FloatingPointError(
                f"{what}; parameters and state are unchanged.  "
                'nonfinite_gradients="skip" leaves such steps out, "ignore" goes on'
            )
        return mode == "ignore"
