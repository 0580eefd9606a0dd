"""LAMB, the one rule that needs norms of whole tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mpishard.backend.array import Kernel, empty
from mpishard.backend.exact_norm import norm_of
from mpishard.optim import formulas
from mpishard.optim.rule import LearningRate, Rule

Array = Any


@dataclass(frozen=True)
class LAMB(Rule):
    """LAMB: Adam's direction, scaled per tensor to the tensor's norm times `lr` (You et al. 2020, algorithm 2).

    The paper's phi is phi(z) = z.  Since the norms are those of whole tensors, a step has two halves around a sum over
    shards: first `direction` for all elements, then for each tensor `trust_ratio` of the two norms and `apply`.

    Parameters
    ----------
    lr : float or callable
        Learning rate, or a function of the step.
    betas : (float, float)
        How much of the averages of the gradient and of its square a step keeps; each at least 0 and below 1.
    eps : float
        Added to the root of the second average before the division.
    weight_decay : float
        This many times the parameter is added to the direction, before it is scaled.
    groups : sequence of ParameterGroup
        Tensors with a weight decay or a learning rate of their own.
    ema_decay : float, optional
        Keep an exponential moving average of the parameters with this decay.

    Raises
    ------
    TypeError, ValueError
        If a hyper-parameter is no number or out of its range.
    """

    lr: LearningRate = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 1e-2

    norm_based: ClassVar[bool] = True
    slots = ("exp_avg", "exp_avg_sq")
    kernel = formulas.lamb_direction

    @property
    def halves(self) -> tuple[Kernel, Kernel] | None:
        own = type(self)
        if own.direction is not LAMB.direction or own.apply is not LAMB.apply:
            return None
        return formulas.lamb_direction, formulas.lamb_apply

    def scalars(self, step: int) -> tuple[float, ...]:
        beta1, beta2 = self.betas
        averages = (beta1, 1 - beta1, beta2, 1 - beta2)
        return (self.weight_decay, *averages, 1 - beta1**step, 1 - beta2**step, self.eps)

    def direction(
        self,
        parameters: Array,
        gradients: Array,
        slots: Sequence[Array],
        step: int,
        *,
        divisor: float = 1.0,
        clip: float = 1.0,
        out: Array,
    ) -> None:
        """Update the slots, and write the direction, with decay and before scaling, into `out`.

        The arrays may be any slice of parameters, gradients and slots.

        Parameters
        ----------
        parameters, gradients : array
            1-D, contiguous, float32 or float64, of one size, dtype and device.  They are only read.
        slots : sequence of arrays
            ``exp_avg`` and ``exp_avg_sq``, with the size, dtype and device of the parameters; changed in place.
        step : int
            Counts from 1.
        divisor, clip : float
            The gradient used is ``gradients / divisor * clip``.
        out : array
            Of the size, dtype and device of the parameters; overlaps no other argument.

        Raises
        ------
        TypeError, ValueError
            If an array, the number of arrays or the step is invalid; nothing has changed then.
        """
        self._check_slots(slots)
        self.learning_rate(step)
        self.kernel(parameters, gradients, *slots, out, divisor, clip, *self.scalars(step))

    @staticmethod
    def trust_ratio(parameter_norm: float, direction_norm: float) -> float:
        """Norm of a tensor divided by the norm of its direction; 1 if either is zero.

        Parameters
        ----------
        parameter_norm, direction_norm : float
            Euclidean norms over all elements of the tensor, on whichever ranks they are.

        Returns
        -------
        float
            The factor of `apply`.
        """
        if parameter_norm == 0 or direction_norm == 0:
            return 1.0
        return parameter_norm / direction_norm

    def apply(self, parameters: Array, direction: Array, step: int, ratio: float) -> None:
        """Move the parameters of one tensor, or of a slice of it, along `direction` by ``lr * ratio``, in place.

        Parameters
        ----------
        parameters, direction : array
            1-D, contiguous, of one size, dtype and device.
        step : int
            Counts from 1.
        ratio : float
            The `trust_ratio` of the whole tensor.
        """
        formulas.lamb_apply(parameters, direction, self.learning_rate(step) * ratio)

    def update(
        self,
        parameters: Array,
        gradients: Array,
        slots: Sequence[Array],
        step: int,
        *,
        divisor: float = 1.0,
        clip: float = 1.0,
    ) -> None:
        """Take step `step` in place, as `Rule.update`, with all of `parameters` as ONE tensor.

        Parameters
        ----------
        parameters, gradients : array
            1-D, contiguous, float32 or float64, of one size, dtype and device.  Gradients are only read.
        slots : sequence of arrays
            ``exp_avg`` and ``exp_avg_sq``, with the size, dtype and device of the parameters.
        step : int
            Counts from 1.
        divisor, clip : float
            The gradient used is ``gradients / divisor * clip``.
        """
        out = empty(parameters.size, parameters.dtype, like=parameters)
        self.direction(parameters, gradients, slots, step, divisor=divisor, clip=clip, out=out)
        self.apply(parameters, out, step, self.trust_ratio(norm_of(parameters), norm_of(out)))
