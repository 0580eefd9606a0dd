"""A PyTorch module as an `OptimizationProblem`, for the training loops of mpishard."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Unpack

import numpy as np
import torch

from mpishard.arguments import flag
from mpishard.backend import array as arrays
from mpishard.backend.process import blas_threads
from mpishard.comm.agreement import opening
from mpishard.comm.mesh import Mesh, checked_mesh
from mpishard.parameters.flat import FlatParameters
from mpishard.torch.buffers import check_mode
from mpishard.torch.cut_module import CutModule
from mpishard.torch.layer_filler import LayerFiller
from mpishard.torch.loop_hooks import LoopHooks
from mpishard.torch.memory import array_module
from mpishard.torch.module import ModuleState, UnitSharding, check_other_trainers, known_state, state_of
from mpishard.torch.module_tensors import ModuleTensors
from mpishard.torch.plans import EXPERTS
from mpishard.torch.sequences import PLAN
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
    facts: Mapping[str, Any] | None = None,
    **options: Unpack[ObjectiveOptions],
) -> OptimizationProblem[FlatParameters]:
    """The problem of training a PyTorch module: for ``optimizer.optimize(problem)`` of any optimizer of mpishard.

    The parameters of the module become views into one flat array, which is trained in place.  With `shard_units` they
    are divided over the ranks instead, for `ZeRO3Optimizer`, as by ``zero=3`` of `mpishard.torch.as_distributed`; after
    the run `mpishard.torch.summon_full_parameters` shows all of them.  On a mesh with tensor ranks these divide the
    layers that a `plan` names, as those of `mpishard.torch.as_distributed`.  Collective over `mesh`, if it is given.

    Parameters
    ----------
    module : torch.nn.Module
        As for `mpishard.torch.as_distributed`.
    losses : callable
        ``losses(module, samples)`` returns the loss of each sample, a tensor of shape (len(samples),); `samples` are
        indices, int64.  With PyTorch's losses: ``reduction="none"``, and a mean over the other dimensions of a sample.
    samples, batch_size : int
        All samples, and those of a step over all ranks.
    buffers : {"broadcast", "average", "local"}
        As for `mpishard.torch.as_distributed`.
    mesh : Mesh, optional
        That of the optimizer, whose data ranks divide the module by `shard_units`, and whose tensor ranks by `plan`;
        needed for these only.  `ElasticOptimizer` with ``layouts`` of tensor ranks asks for a new module for each mesh.
    shard_units : type, tuple of type, callable or "auto", optional
        As for `mpishard.torch.as_distributed`, but frozen parameters stay whole, since a rank that dies has no copy of
        its share of them; default: the module stays whole.  A rank without samples in a
        micro-batch calls `losses` with those that it had before, and drops the result: ranks gather units together.
    materialize : path or callable, optional
        As for `mpishard.torch.as_distributed`.
    plan, check_plan : mapping, bool
        As for `mpishard.torch.as_distributed`, but for the plans "sequence" and "experts", which a problem does
        not take.
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
    sharding = cuts = filler = None
    known = known_state(module) if isinstance(module, torch.nn.Module) else None
    world = None if mesh is None else checked_mesh(mesh).world
    with opening(world, "problem") as same:  # a class of the user's may raise, too
        if not callable(losses):
            raise TypeError(f"losses must be a function of the module and sample indices, got {type(losses).__name__}")
        check_mode(buffers)
        checks_pass = flag("check_plan", check_plan)
        has_loop = known is not None and isinstance(known.hooks, LoopHooks)
        _check_mesh(mesh, shard_units, materialize, plan)
        earlier = None if has_loop or known is None or not known.is_divided_over(mesh) else known  # of another problem
        if earlier is not None:
            tensors = earlier.tensors
        else:
            check_other_trainers(module, shard_units is not None or (mesh is not None and mesh.tensor.size > 1))
            tensors = ModuleTensors.of(module, on_meta=shard_units is not None and materialize is not None)
        if mesh is not None:
            array_module(tensors.device)  # raises for a device that has no arrays
            if shard_units is not None:
                sharding = UnitSharding.of(module, tensors, shard_units, mesh.data, divides_frozen=False)
            if earlier is None:
                trained, frozen = tensors.trained, tensors.frozen
                cuts = CutModule.of(module, plan, mesh, trained, frozen, checks_pass=checks_pass)
                same |= tensors.described
                if materialize is not None:
                    filler = LayerFiller(materialize, module, {**trained, **frozen}, mesh.world)
                    same["materialize"] = filler.described
            else:
                _check_divided_alike(earlier, plan, sharding)
            same |= {"buffers": buffers, "check_plan": check_plan}
            same["plan"] = None if cuts is None else cuts.described
            same["shard_units"] = None if sharding is None else sharding.described
            same["divided before"] = earlier is not None
    state = state_of(module, tensors, buffers, sharding, cuts, filler=filler)
    state.mesh, state.plan = mesh, plan
    state.parameters.sums_by_mpi |= mesh is not None  # also where another mesh of the run cuts the module first
    function = LossAndGradient(state, module, losses)
    return OptimizationProblem(function, state.parameters, samples, batch_size, facts=facts or {}, **options)


def _check_mesh(mesh: Mesh | None, shard_units: Any, materialize: Any, plan: Any) -> None:
    """Raise ValueError unless the mesh is there for what divides a module, and can divide it."""
    if isinstance(plan, str) and plan in (PLAN, EXPERTS):
        raise ValueError(
            f"plan={plan!r} is for a loop of your own: give it to mpishard.torch.as_distributed; a problem takes "
            "plans of layers, as {'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}"
        )
    needs_mesh = shard_units is not None or plan is not None
    if (mesh is None and needs_mesh) or (materialize is not None and shard_units is None):
        raise ValueError(
            "shard_units and materialize divide the parameters of the module over the data ranks of a mesh, and plan "
            f"over its tensor ranks: give mesh with them, and shard_units with materialize; got mesh={mesh}, "
            f"shard_units={shard_units!r}, materialize={materialize!r}, plan={plan!r}"
        )
    if mesh is not None and mesh.pipeline.size > 1:
        raise ValueError(
            f"the mesh is {mesh.sizes}: a problem passes its whole module; make the mesh with pipeline=1, or train it "
            "by loss_and_gradient of mpishard.torch.as_distributed"
        )
    if mesh is not None and mesh.tensor.size > 1 and materialize is not None:
        raise ValueError(
            f"materialize fills a module without values unit by unit, and tensor={mesh.tensor.size} ranks cut values: "
            "make the module with values, or the mesh with tensor=1"
        )


def _check_divided_alike(earlier: ModuleState, plan: Any, sharding: UnitSharding | None) -> None:
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


class LossAndGradient:
    """The function of such a problem: forward and backward of a micro-batch; its hooks write the gradients."""

    def __init__(self, state: ModuleState, module: Any, losses: Callable[[Any, np.ndarray], Any]) -> None:
        self._state = state
        self._module = module
        self._losses = losses
        self._limits_threads = True
        self._samples = np.arange(2)  # those of the last call that had some

    def __call__(self, parameters: FlatParameters, samples: np.ndarray, gradients: Any) -> float:
        """The summed loss; the hooks add its gradient. Collective under ZeRO-2 and 3, where ranks wait."""
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
        if len(samples):
            self._samples = samples
            return self._pass(parameters, samples)
        # Other ranks have some; a batch norm would not take none.
        if self._state.units is not None:
            buffers = self._state.buffers.facts
            hooks.discards = True
            try:
                self._pass(parameters, self._samples)
            finally:
                hooks.discards = False
            self._state.buffers.restore(buffers)
        return 0.0

    def _pass(self, parameters: FlatParameters, samples: np.ndarray) -> float:
        values = self._losses(self._module, samples)
        _check_losses(values, len(samples))
        (values.sum() * parameters.loss_scale).backward()
        if self._state.cuts is not None:
            self._state.cuts.compare_gradients()  # the step raises what is wrong
        return float(values.detach().double().sum())


def _check_losses(values: Any, samples: int) -> None:
    """Raise TypeError or ValueError unless these are losses of this number of samples."""
    if not isinstance(values, torch.Tensor):
        raise TypeError(f"losses(module, samples) must return a tensor, got a {type(values).__name__}")
    if tuple(values.shape) != (samples,):
        raise ValueError(
            f"losses(module, samples) must return the loss of each sample, of shape ({samples},), got shape "
            f'{tuple(values.shape)}; losses of PyTorch have reduction="none" for that'
        )
