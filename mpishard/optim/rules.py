"""Update rules.  All but LAMB work on each element by itself.

Names, defaults and formulas are those of ``torch.optim`` if it has the rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, ClassVar

from mpishard.backend.array import Kernel, empty
from mpishard.backend.exact_norms import norm_of
from mpishard.optim import formulas
from mpishard.optim.rule import LearningRate, Rule

Array = Any


@dataclass(frozen=True)
class SGD(Rule):
    """Stochastic gradient descent as ``torch.optim.SGD``; the momentum starts as the first gradient, undampened.

    Parameters
    ----------
    lr : float or callable
        Learning rate, or a function of the step.
    momentum : float
        At least 0.  With 0 there is no momentum buffer.
    dampening : float
        The momentum buffer adds ``1 - dampening`` times the gradient, after the first step.
    weight_decay : float
        This many times the parameter is added to the gradient.
    nesterov : bool
        Nesterov's momentum; needs a momentum above 0 and a dampening of 0.
    groups : sequence of ParameterGroup
        Tensors with their own weight decay or learning rate.
    ema_decay : float, optional
        Keep an exponential moving average of the parameters with this decay.

    Raises
    ------
    TypeError, ValueError
        If a hyper-parameter is no number or out of its range, or `nesterov` does not fit the others.
    """

    lr: LearningRate = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise ValueError(
                "SGD: nesterov needs a momentum above 0 and a dampening of 0, "
                f"got momentum={self.momentum} and dampening={self.dampening}"
            )

    @property
    def slots(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()

    @property
    def kernel(self) -> Kernel:
        if not self.momentum:
            return formulas.sgd
        return formulas.sgd_nesterov if self.nesterov else formulas.sgd_momentum

    def scalars(self, step: int) -> tuple[float, ...]:
        plain = (self.learning_rate(step), self.weight_decay)
        if not self.momentum:
            return plain
        return (*plain, self.momentum, 1.0 if step == 1 else 1.0 - self.dampening)


@dataclass(frozen=True)
class Adam(Rule):
    """Adam as ``torch.optim.Adam`` (Kingma and Ba 2015, algorithm 1), with AMSGrad (Reddi et al. 2018) on request.

    Parameters
    ----------
    lr : float or callable
        Learning rate, or a function of the step.
    betas : (float, float)
        How much of the averages of the gradient and of its square a step keeps; each at least 0 and below 1.
    eps : float
        Added to the root of the second average before the division.
    weight_decay : float
        This many times the parameter is added to the gradient.
    amsgrad : bool
        Divide by the largest second average so far; a third slot keeps it.
    groups : sequence of ParameterGroup
        Tensors with their own weight decay or learning rate.
    ema_decay : float, optional
        Keep an exponential moving average of the parameters with this decay.

    Raises
    ------
    TypeError, ValueError
        If a hyper-parameter is no number or out of its range.
    """

    lr: LearningRate = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False

    @property
    def slots(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if self.amsgrad else ()))

    @property
    def kernel(self) -> Kernel:
        return formulas.amsgrad if self.amsgrad else formulas.adam

    def _decay(self, step: int) -> tuple[float, float]:
        return self.weight_decay, 1.0

    def scalars(self, step: int) -> tuple[float, ...]:
        beta1, beta2 = self.betas
        step_size = self.learning_rate(step) / (1 - beta1**step)
        averages = (beta1, 1 - beta1, beta2, 1 - beta2)
        return (*self._decay(step), *averages, step_size, sqrt(1 - beta2**step), self.eps)


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay, as ``torch.optim.AdamW`` (Loshchilov and Hutter 2019, algorithm 2).

    Parameters
    ----------
    lr : float or callable
        Learning rate, or a function of the step.
    betas : (float, float)
        How much of the averages of the gradient and of its square a step keeps; each at least 0 and below 1.
    eps : float
        Added to the root of the second average before the division.
    weight_decay : float
        A step multiplies the parameter by ``1 - lr * weight_decay`` first.
    amsgrad : bool
        Divide by the largest second average so far; a third slot keeps it.
    groups : sequence of ParameterGroup
        Tensors with their own weight decay or learning rate.
    ema_decay : float, optional
        Keep an exponential moving average of the parameters with this decay.

    Raises
    ------
    TypeError, ValueError
        If a hyper-parameter is no number or out of its range.
    """

    weight_decay: float = 1e-2

    def _decay(self, step: int) -> tuple[float, float]:
        return 0.0, 1 - self.learning_rate(step) * self.weight_decay


@dataclass(frozen=True)
class RMSprop(Rule):
    """RMSprop as ``torch.optim.RMSprop`` (Tieleman and Hinton 2012; centered: Graves 2013, equations 38 to 45).

    Parameters
    ----------
    lr : float or callable
        Learning rate, or a function of the step.
    alpha : float
        How much of the average of the squared gradient a step keeps; at least 0 and below 1.
    eps : float
        Added to the root of that average before the division.
    weight_decay : float
        This many times the parameter is added to the gradient.
    momentum : float
        At least 0.  With 0 there is no momentum buffer.
    centered : bool
        Divide by the root of the variance of the gradient; a further slot keeps its average.
    groups : sequence of ParameterGroup
        Tensors with their own weight decay or learning rate.
    ema_decay : float, optional
        Keep an exponential moving average of the parameters with this decay.

    Raises
    ------
    TypeError, ValueError
        If a hyper-parameter is no number or out of its range.
    """

    lr: LearningRate = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False

    @property
    def slots(self) -> tuple[str, ...]:
        centered = ("grad_avg",) if self.centered else ()
        return ("square_avg", *centered, *(("momentum_buffer",) if self.momentum else ()))

    @property
    def kernel(self) -> Kernel:
        if self.centered:
            return formulas.rmsprop_centered_momentum if self.momentum else formulas.rmsprop_centered
        return formulas.rmsprop_momentum if self.momentum else formulas.rmsprop

    def scalars(self, step: int) -> tuple[float, ...]:
        plain = (self.learning_rate(step), self.weight_decay, self.alpha, 1 - self.alpha, self.eps)
        return (*plain, self.momentum) if self.momentum else plain


@dataclass(frozen=True)
class Adagrad(Rule):
    """Adagrad as ``torch.optim.Adagrad`` (Duchi, Hazan and Singer 2011).

    Parameters
    ----------
    lr : float or callable
        Learning rate, or a function of the step.
    lr_decay : float
        The rate of step s is divided by ``1 + (s - 1) * lr_decay``.
    weight_decay : float
        This many times the parameter is added to the gradient.
    initial_accumulator_value : float
        The sum of squared gradients before the first step.
    eps : float
        Added to the root of the sum before the division.
    groups : sequence of ParameterGroup
        Tensors with their own weight decay or learning rate.
    ema_decay : float, optional
        Keep an exponential moving average of the parameters with this decay.

    Raises
    ------
    TypeError, ValueError
        If a hyper-parameter is no number or out of its range.
    """

    lr: LearningRate = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    slots = ("sum",)
    kernel = formulas.adagrad

    def initial(self, slot: str) -> float:
        return self.initial_accumulator_value

    def scalars(self, step: int) -> tuple[float, ...]:
        return self.learning_rate(step) / (1 + (step - 1) * self.lr_decay), self.weight_decay, self.eps


@dataclass(frozen=True)
class Lion(Rule):
    """Lion: the sign of an interpolated momentum, with decoupled weight decay (Chen et al. 2023, algorithm 2).

    Parameters
    ----------
    lr : float or callable
        Learning rate, or a function of the step.
    betas : (float, float)
        How much of the momentum stays in the interpolation whose sign is taken, and how much a step keeps; each at
        least 0 and below 1.
    weight_decay : float
        A step multiplies the parameter by ``1 - lr * weight_decay`` first.
    groups : sequence of ParameterGroup
        Tensors with their own weight decay or learning rate.
    ema_decay : float, optional
        Keep an exponential moving average of the parameters with this decay.

    Raises
    ------
    TypeError, ValueError
        If a hyper-parameter is no number or out of its range.
    """

    lr: LearningRate = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0

    slots = ("exp_avg",)
    kernel = formulas.lion

    def scalars(self, step: int) -> tuple[float, ...]:
        lr, (beta1, beta2) = self.learning_rate(step), self.betas
        return lr, 1 - lr * self.weight_decay, beta1, 1 - beta1, beta2, 1 - beta2


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
        Tensors with their own weight decay or learning rate.
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
