"""A PyTorch module as an `OptimizationProblem`, for the training loops of mpishard."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Unpack

import numpy as np
import torch

from mpishard.arguments import flag
from mpishard.backend import array as arrays
from mpishard.backend.process import blas_threads
from mpishard.comm.agreement import opening
from mpishard.comm.errors import raised_on_all
from mpishard.comm.mesh import Mesh, checked_mesh
from mpishard.parameters.flat import FlatParameters
from mpishard.torch.buffers import check_mode
from mpishard.torch.cut_module import CutModule
from mpishard.torch.layer_filler import LayerFiller
from mpishard.torch.loop_hooks import LoopHooks
from mpishard.torch.memory import array_module
from mpishard.torch.micro_batches import PipelinedPasses, PipelineSettings
from mpishard.torch.module import (
    ModuleState,
    UnitSharding,
    check_no_units,
    check_other_trainers,
    known_state,
    state_of,
)
from mpishard.torch.module_tensors import ModuleTensors
from mpishard.torch.plans import EXPERTS
from mpishard.torch.sequences import PLAN
from mpishard.torch.staged_module import StagedModule
from mpishard.torch.stages import StageLayer, layers_on
from mpishard.training.objective import ObjectiveOptions
from mpishard.training.problem import OptimizationProblem


def problem(
    module: Any,
    losses: Callable[[Any, np.ndarray], Any],
    samples: int,
    batch_size: int,
    *,
    buffers: str = "broadcast",
    mesh: Mesh | None = None,
    shard_units: Any = None,
    materialize: str | os.PathLike[str] | Callable[[Any], Any] | None = None,
    plan: Mapping[str, Any] | None = None,
    check_plan: bool = True,
    stages: Sequence[str] | Mapping[str, Any] | None = None,
    schedule: str = "1f1b",
    chunks: int = 1,
    microbatches: int | None = None,
    facts: Mapping[str, Any] | None = None,
    **options: Unpack[ObjectiveOptions],
) -> OptimizationProblem[FlatParameters]:
    """The problem of training a PyTorch module: for ``optimizer.optimize(problem)`` of any optimizer of mpishard.

    The parameters of the module become views into one flat array, which is trained in place.  With `shard_units` they
    are divided over the ranks instead, for `ZeRO3Optimizer`, as by ``zero=3`` of `mpishard.torch.as_distributed`; after
    the run `mpishard.torch.summon_full_parameters` shows all of them.  On a mesh with tensor ranks these divide the
    layers that a `plan` names, and on one with pipeline ranks each has the layers of its `stages`, as those of
    `mpishard.torch.as_distributed`.  Collective over `mesh`, if it is given.

    Parameters
    ----------
    module : torch.nn.Module
        As for `mpishard.torch.as_distributed`.
    losses : callable
        ``losses(module, samples)`` returns the loss of each sample, a tensor of shape (len(samples),); `samples` are
        indices, int64.  With PyTorch's losses: ``reduction="none"``, and a mean over the other dimensions of a sample.
        On pipeline ranks it calls the module once, and every stage calls it, as the function of
        `ModuleOptimizer.loss_and_gradient`.
    samples, batch_size : int
        All samples, and those of a step over all ranks.
    buffers : {"broadcast", "average", "local"}
        As for `mpishard.torch.as_distributed`.
    mesh : Mesh, optional
        That of the optimizer, whose data ranks divide the module by `shard_units`, whose tensor ranks by `plan`, and
        whose pipeline ranks by `stages`; needed for these only.  `ElasticOptimizer` with ``layouts`` asks for a new
        module for each mesh.
    shard_units : type, tuple of type, callable or "auto", optional
        As for `mpishard.torch.as_distributed`, but frozen parameters stay whole, since a rank that dies has no copy of
        its share of them; default: the module stays whole.  A rank without samples in a
        micro-batch calls `losses` with those that it had before, and drops the result: ranks gather units together.
    materialize : path or callable, optional
        As for `mpishard.torch.as_distributed`.
    plan, check_plan : mapping, bool
        As for `mpishard.torch.as_distributed`, but for the plans "sequence" and "experts", which a problem does
        not take.
    stages, schedule, chunks, microbatches : sequence or mapping, str, int, int
        As for `mpishard.torch.as_distributed`, on a mesh with pipeline ranks.  What a data rank computes at a time is
        its share of a batch, or `micro_batch_size` samples; it is cut into `microbatches`.
    facts : mapping, optional
        As for `OptimizationProblem`.
    **options
        As for `OptimizationProblem`: micro_batch_size, steps, tolerance, seconds, seed, tokens_per_sample.

    Returns
    -------
    OptimizationProblem
        Its start has the parameters of the module.

    Raises
    ------
    TypeError, ValueError
        If the module or an argument is unfit; with `mesh` on every rank.
    """
    sharding = cuts = filler = staged = layers = None
    known = known_state(module) if isinstance(module, torch.nn.Module) else None
    world = None if mesh is None else checked_mesh(mesh).world
    with opening(world, "problem") as same:  # a class of the user's may raise, too
        if not callable(losses):
            raise TypeError(f"losses must be a function of the module and sample indices, got {type(losses).__name__}")
        check_mode(buffers)
        checks_pass = flag("check_plan", check_plan)
        has_loop = known is not None and isinstance(known.hooks, LoopHooks)
        ranks = 1 if mesh is None else mesh.pipeline.size
        order = PipelineSettings.of(schedule, chunks, microbatches, ranks)
        _check_mesh(mesh, shard_units, materialize, plan, stages)
        earlier = None if has_loop or known is None or not known.is_divided_over(mesh) else known  # of another problem
        if earlier is not None:
            tensors = earlier.tensors
        else:
            check_other_trainers(module, shard_units is not None or (mesh is not None and mesh.data.size < mesh.size))
            tensors = ModuleTensors.of(module, on_meta=shard_units is not None and materialize is not None)
        if mesh is not None:
            array_module(tensors.device)  # raises for a device that has no arrays
            if shard_units is not None:
                sharding = UnitSharding.of(module, tensors, shard_units, mesh.data, divides_frozen=False)
            if ranks > 1:
                layers = layers_on(module, stages, ranks, chunks)
            if earlier is None:
                trained, frozen = tensors.trained, tensors.frozen
                cuts = CutModule.of(module, plan, mesh, trained, frozen, checks_pass=checks_pass)
                if layers is not None:
                    staged = StagedModule(module, mesh, layers, trained, frozen, cuts)
                same |= tensors.described
                if materialize is not None:
                    filler = LayerFiller(materialize, module, {**trained, **frozen}, mesh.world)
                    same["materialize"] = filler.described
            else:
                _check_divided_alike(earlier, plan, sharding, layers)
            same |= {"buffers": buffers, "check_plan": check_plan}
            same |= {"schedule": schedule, "chunks": chunks, "microbatches": order.microbatches}
            same["stages"] = None if staged is None else staged.described
            same["plan"] = None if cuts is None else cuts.described
            same["shard_units"] = None if sharding is None else sharding.described
            same["divided before"] = earlier is not None
    state = state_of(module, tensors, buffers, sharding, cuts, staged, filler)
    state.mesh, state.plan = mesh, plan
    # Names are for one number of stages: the function of a mesh may have others for another.
    state.layers_on = None if isinstance(stages, Sequence) else partial(layers_on, module, stages, chunks=chunks)
    state.parameters.sums_by_mpi |= mesh is not None  # also where another mesh of the run cuts the module first
    passes = None
    if state.stages is not None:
        passes = PipelinedPasses(order, state.stages, state.parameters, tensors.device, takes_numbers=True)
        if state.stages.mesh.rank == 0:
            order.warn(ranks)
    function = LossAndGradient(state, module, losses, passes)
    return OptimizationProblem(function, state.parameters, samples, batch_size, facts=facts or {}, **options)


def _check_mesh(mesh: Mesh | None, shard_units: Any, materialize: Any, plan: Any, stages: Any) -> None:
    """Raise ValueError unless the mesh is there for what divides a module, and can divide it."""
    if isinstance(plan, str) and plan in (PLAN, EXPERTS):
        raise ValueError(
            f"plan={plan!r} is for a loop of your own: give it to mpishard.torch.as_distributed; a problem takes "
            "plans of layers, as {'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}"
        )
    needs_mesh = any(each is not None for each in (shard_units, plan, stages))
    if (mesh is None and needs_mesh) or (materialize is not None and shard_units is None):
        raise ValueError(
            "shard_units and materialize divide the parameters of the module over the data ranks of a mesh, plan over "
            "its tensor ranks, and stages over its pipeline ranks: give mesh with them, and shard_units with "
            f"materialize; got mesh={mesh}, shard_units={shard_units!r}, materialize={materialize!r}, plan={plan!r}, "
            f"stages={stages!r}"
        )
    if mesh is not None:
        check_no_units(shard_units, mesh.pipeline.size)
    if mesh is not None and mesh.tensor.size > 1 and materialize is not None:
        raise ValueError(
            f"materialize fills a module without values unit by unit, and tensor={mesh.tensor.size} ranks cut values: "
            "make the module with values, or the mesh with tensor=1"
        )


def _check_divided_alike(
    earlier: ModuleState, plan: Any, sharding: UnitSharding | None, layers: list[StageLayer] | None
) -> None:
    """Raise ValueError unless another problem has divided the module in the same way."""
    before = None if earlier.units is None else earlier.units.described
    now = None if sharding is None else sharding.described
    if before != now:
        raise ValueError(
            f"another problem has divided this module into the units {before}, and this one would into {now}: give the "
            "same shard_units"
        )
    if plan != earlier.plan:
        raise ValueError(
            f"another problem has cut this module by plan={earlier.plan}, and this one has plan={plan}: give the same"
        )
    if earlier.stages is not None and layers != earlier.stages.layers:
        raise ValueError("another problem has cut this module into other stages: give the same stages and chunks")


class LossAndGradient:
    """The function of such a problem: forward and backward of a micro-batch; its hooks write the gradients.

    On a pipeline `passes` make them, for which this is the `PassTaker`.
    """

    def __init__(
        self,
        state: ModuleState,
        module: Any,
        losses: Callable[[Any, np.ndarray], Any],
        passes: PipelinedPasses | None,
    ) -> None:
        self._state = state
        self._module = module
        self._losses = losses
        self._passes = passes
        self._ranks = None if state.stages is None else state.stages.mesh.world  # those of a pipeline
        self._limits_threads = True
        self._samples = np.arange(2)  # those of the last call that had some

    def __call__(self, parameters: FlatParameters, samples: np.ndarray, gradients: Any) -> float:
        """The summed loss; the hooks add its gradient. Collective under ZeRO-2 and 3 and on pipelines."""
        with raised_on_all(self._ranks):
            self._prepare(parameters)
        if len(samples):
            self._samples = samples
            return self._pass(samples)
        # Other ranks have some, and may wait for this one; a batch norm would not take none.
        if self._state.units is not None or self._passes is not None:
            buffers = self._state.buffers.facts
            self._state.problem_hooks.discards = True
            try:
                self._pass(self._samples)
            finally:
                self._state.problem_hooks.discards = False
            self._state.buffers.restore(buffers)
        return 0.0

    def _prepare(self, parameters: FlatParameters) -> None:
        if self._limits_threads:
            torch.set_num_threads(blas_threads() or torch.get_num_threads())
            self._limits_threads = False
        hooks = self._state.problem_hooks
        self._state.use(hooks)
        hooks.clear()  # an error, as at a death of a rank, ends a pass anywhere
        if self._state.units is not None:
            self._state.units.end_step()
        self._state.check_intact()
        arrays.ready(parameters.held)  # PyTorch may continue in another stream of a GPU
        self._state.round_masters()

    def _pass(self, samples: np.ndarray) -> float:
        if self._passes is not None:
            loss = self._passes.train(self, self._summed, (torch.tensor(samples),), "sum")
        else:
            summed = self._summed(self._module, samples)
            self.scale(summed).backward()
            loss = float(summed.detach())
        if self._state.cuts is not None:
            self._state.cuts.compare_gradients()  # the step raises what is wrong
        return loss

    def _summed(self, module: Any, samples: Any) -> Any:
        values = self._losses(module, np.asarray(samples))
        _check_losses(values, len(samples))
        return values.double().sum()

    def scale(self, loss: Any) -> Any:
        """A loss for its backward pass."""
        return loss * self._state.parameters.loss_scale

    def zero_grad(self) -> None:
        """Drop the gradients of passes that have failed. Collective as `GradientReducer.drop`."""
        self._state.problem_hooks.drop()


def _check_losses(values: Any, samples: int) -> None:
    """Raise TypeError or ValueError unless these are losses of this number of samples."""
    if not isinstance(values, torch.Tensor):
        raise TypeError(f"losses(module, samples) must return a tensor, got a {type(values).__name__}")
    if tuple(values.shape) != (samples,):
        raise ValueError(
            f"losses(module, samples) must return the loss of each sample, of shape ({samples},), got shape "
            f'{tuple(values.shape)}; losses of PyTorch have reduction="none" for that'
        )
