"""A PyTorch module as an `OptimizationProblem`, for the training loops of mpishard."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Unpack

import numpy as np
import torch

from mpishard.backend import array as arrays
from mpishard.backend.process import blas_threads
from mpishard.comm.agreement import opening
from mpishard.comm.mesh import Mesh, checked_mesh
from mpishard.parameters.flat import FlatParameters
from mpishard.torch.buffers import MODES
from mpishard.torch.gradient_hooks import LoopHooks
from mpishard.torch.layer_filler import LayerFiller
from mpishard.torch.memory import array_module
from mpishard.torch.module import ModuleState, ModuleTensors, Sharding, check_other_trainers, known_state, state_of
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
    facts: Mapping[str, Any] | None = None,
    **options: Unpack[ObjectiveOptions],
) -> OptimizationProblem[FlatParameters]:
    """The problem of training a PyTorch module: for ``optimizer.optimize(problem)`` of any optimizer of mpishard.

    The parameters of the module become views into one flat array, which is trained in place.  With `shard_units` they
    are divided over the ranks instead, for `ZeRO3Optimizer`, as by ``zero=3`` of `mpishard.torch.as_distributed`; after
    the run `mpishard.torch.summon_full_parameters` shows all of them.  Not collective without `shard_units`.

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
        That of the optimizer, over whose data ranks `shard_units` divides; needed for that only.
    shard_units : type, tuple of type, callable or "auto", optional
        As for `mpishard.torch.as_distributed`, but frozen parameters stay whole, since a rank that dies has no copy of
        its share of them; default: the module stays whole.  A rank without samples in a
        micro-batch calls `losses` with those that it had before, and drops the result: ranks gather units together.
    materialize : path or callable, optional
        As for `mpishard.torch.as_distributed`.
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
        If the module or an argument is unfit; with `shard_units` on every rank.
    """
    sharding = filler = None
    known = known_state(module) if isinstance(module, torch.nn.Module) else None
    world = None if mesh is None else checked_mesh(mesh).world
    with opening(world, "problem") as same:  # a class of the user's may raise, too
        if not callable(losses):
            raise TypeError(f"losses must be a function of the module and sample indices, got {type(losses).__name__}")
        if buffers not in MODES:
            raise ValueError(f"buffers={buffers!r} must be one of {', '.join(MODES)}")
        has_loop = known is not None and isinstance(known.hooks, LoopHooks)
        before = None if known is None or has_loop else known.units  # those of another problem
        if known is not None and before is not None and mesh is not None and before.axis is mesh.data:
            tensors = known.tensors
        else:
            check_other_trainers(module, shard_units is not None)
            tensors = ModuleTensors.of(module, on_meta=shard_units is not None and materialize is not None)
        if (mesh is None) != (shard_units is None) or (materialize is not None and shard_units is None):
            raise ValueError(
                "mesh, shard_units and materialize divide the parameters of the module over the data ranks of a mesh: "
                f"give mesh and shard_units, or none of them; got mesh={mesh}, shard_units={shard_units!r}, "
                f"materialize={materialize!r}"
            )
        if mesh is not None:
            array_module(tensors.device)  # raises for a device that has no arrays
            sharding = Sharding.of(module, tensors, shard_units, mesh.data, divides_frozen=False)
            same |= {"buffers": buffers, **tensors.described, "shard_units": sharding.described}
            if materialize is not None and before is None:
                filler = LayerFiller(materialize, module, {**tensors.trained, **tensors.frozen}, mesh.data)
                same["materialize"] = filler.described
            same["divided before"] = before is not None
            if before is not None and before.described != sharding.described:
                raise ValueError(
                    f"another problem has divided this module into the units {before.described}, and this one "
                    f"would into {sharding.described}: give the same shard_units"
                )
    state = state_of(module, tensors, buffers, sharding, filler=filler)
    function = LossAndGradient(state, module, losses)
    return OptimizationProblem(function, state.parameters, samples, batch_size, facts=facts or {}, **options)


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
