"""A PyTorch module as an `OptimizationProblem`, for the training loops of mpishard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Unpack

import numpy as np
import torch

from mpishard.backend import array as arrays
from mpishard.backend.process import blas_threads
from mpishard.parameters.flat import FlatParameters
from mpishard.torch.buffers import MODES
from mpishard.torch.module import ModuleState, ModuleTensors, state_of
from mpishard.training.objective import ObjectiveOptions
from mpishard.training.problem import OptimizationProblem


def problem(
    module: Any,
    losses: Callable[[Any, np.ndarray], Any],
    samples: int,
    batch_size: int,
    *,
    buffers: str = "broadcast",
    facts: Mapping[str, Any] | None = None,
    **options: Unpack[ObjectiveOptions],
) -> OptimizationProblem[FlatParameters]:
    """The problem of training a PyTorch module: for ``optimizer.optimize(problem)`` of any optimizer of mpishard.

    The parameters of the module become views into one flat array, which is trained in place.

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
        If the module or an argument is unfit.
    """
    if not callable(losses):
        raise TypeError(f"losses must be a function of the module and sample indices, got {type(losses).__name__}")
    if buffers not in MODES:
        raise ValueError(f"buffers={buffers!r} must be one of {', '.join(MODES)}")
    state = state_of(module, ModuleTensors.of(module), buffers)
    state.hooks.keeps = state.hooks.scales = False
    function = LossAndGradient(state, module, losses)
    return OptimizationProblem(function, state.parameters, samples, batch_size, facts=facts or {}, **options)


class LossAndGradient:
    """The function of such a problem: forward and backward of a micro-batch; hooks of `state` write the gradients."""

    def __init__(self, state: ModuleState, module: Any, losses: Callable[[Any, np.ndarray], Any]) -> None:
        self._state = state
        self._module = module
        self._losses = losses
        self._limits_threads = True

    def __call__(self, parameters: FlatParameters, samples: np.ndarray, gradients: Any) -> float:
        """The summed loss; the hooks add its gradient. Collective under ZeRO-2, where ranks wait."""
        if self._limits_threads:
            torch.set_num_threads(blas_threads() or torch.get_num_threads())
            self._limits_threads = False
        self._state.check_intact()
        arrays.ready(parameters.held)  # PyTorch may continue in another stream of a GPU
        if not len(samples):  # other ranks have some; a batch norm would not take none
            return 0.0
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
