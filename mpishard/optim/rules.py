"""Update rules: the new value of one parameter from its gradient and its own state, independent of any rank.

A rule is a frozen record of hyper-parameters.  The caller keeps its state in flat *slot* arrays as large as the
parameters, so that any slice of parameters, gradient and slots can be updated separately with the same result.  Names,
defaults and formulas are those of ``torch.optim`` if it has the rule.

Gradients are sums over samples.  A rule uses them as ``gradients / divisor * clip``, where `divisor` is the global
number of samples and `clip` the factor of clipping by the global norm.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from math import sqrt
from typing import Any, ClassVar

from mpishard.arguments import flag, number, returned, shown
from mpishard.backend.array import Kernel, empty
from mpishard.backend.exact_norm import norm_of
from mpishard.optim import formulas

Array = Any
LearningRate = float | Callable[[int], float]
_ADDRESS = re.compile(" at 0x[0-9a-fA-F]+")


@dataclass(frozen=True)
class Rule(ABC):
    """Base of the update rules.

    Parameters
    ----------
    lr : float or callable
        Learning rate, or a function of the step (see `mpishard.optim.lr_schedules`).  Steps count from 1.
    """

    lr: LearningRate
    norm_based: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not callable(self.lr):
            self._check("lr")
        for field in fields(self):
            if field.name in ("momentum", "dampening", "weight_decay", "eps", "lr_decay", "initial_accumulator_value"):
                self._check(field.name)
            elif field.name in ("nesterov", "amsgrad", "centered"):
                what = f"{type(self).__name__}: {field.name}"
                object.__setattr__(self, field.name, flag(what, getattr(self, field.name)))
            elif field.name == "alpha":
                self._check("alpha", below=1.0)
            elif field.name == "betas":
                self._check_betas(getattr(self, field.name))

    def _check(self, name: str, below: float | None = None) -> None:
        value = number(f"{type(self).__name__}: {name}", getattr(self, name), least=0, below=below)
        object.__setattr__(self, name, value)

    def _check_betas(self, betas: Any) -> None:
        what = f"{type(self).__name__}: betas"
        if not isinstance(betas, Sequence) or isinstance(betas, str) or len(betas) != 2:
            raise TypeError(f"{what}={shown(betas)} must be two numbers of at least 0 and below 1")
        checked = tuple(number(f"{what}[{i}]", beta, least=0, below=1) for i, beta in enumerate(betas))
        object.__setattr__(self, "betas", checked)

    @property
    @abstractmethod
    def slots(self) -> tuple[str, ...]:
        """Names of the state arrays, each as large as the parameters; an option that is off needs no array."""

    @property
    @abstractmethod
    def kernel(self) -> Kernel:
        """The compiled formula of ``(parameters, gradients, *slots, /, divisor, clip, *scalars(step))``."""

    @abstractmethod
    def scalars(self, step: int) -> tuple[float, ...]:
        """The scalars of the formula at this step, computed in float64."""

    def initial(self, slot: str) -> float:
        """The value that fills `slot` before the first step."""
        return 0.0

    def learning_rate(self, step: int) -> float:
        """The learning rate of `step`, which counts from 1."""
        if step < 1:
            raise ValueError(f"steps count from 1, got step {step}")
        if not callable(self.lr):
            return self.lr
        given = self.lr(step)
        try:
            rate = returned(given)
        except (TypeError, ValueError):
            rate = math.nan
        if not 0.0 <= rate < math.inf:
            raise ValueError(
                f"{type(self).__name__}: lr({step}) must be a number of at least 0 and finite, got {shown(given)}"
            )
        return rate

    def scaled(self, factor: float) -> Rule:
        """The same rule with `factor` times its learning rate, at all steps."""
        lr = self.lr
        if factor == 1:
            return self
        return replace(self, lr=(lambda step: factor * lr(step)) if callable(lr) else factor * lr)

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
        """Take step `step` in place, in one pass over memory.

        Parameters
        ----------
        parameters, gradients : array
            1-D, contiguous, float32 or float64, of one size, dtype and device.  Gradients are only read.
        slots : sequence of arrays
            The state arrays, in the order of the property `slots`, with the size, dtype and device of the parameters;
            filled with `initial` before step 1.
        step : int
            Counts from 1.
        divisor, clip : float
            The gradient used is ``gradients / divisor * clip``.

        Raises
        ------
        TypeError, ValueError
            If an array, the number of arrays or the step is invalid; nothing has changed then.
        """
        self._check_slots(slots)
        self.kernel(parameters, gradients, *slots, divisor, clip, *self.scalars(step))

    def _check_slots(self, slots: Sequence[Array]) -> None:
        if len(slots) != len(self.slots):
            raise ValueError(f"{self} has the slots {self.slots}, got {len(slots)} arrays for them")

    def configuration(self) -> dict[str, float | str | bool]:
        """The hyper-parameters as plain numbers, strings and flags, for saving; a schedule by its repr.

        The result is the same on all ranks: the repr of a user's function has no memory address.
        """
        plain: dict[str, float | str | bool] = {"rule": type(self).__name__}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "betas":
                plain["beta1"], plain["beta2"] = value
            else:
                plain[field.name] = _ADDRESS.sub("", repr(value)) if callable(value) else value
        return plain


@dataclass(frozen=True)
class SGD(Rule):
    """Stochastic gradient descent as ``torch.optim.SGD``; the momentum starts as the first gradient, undampened."""

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
    """Adam as ``torch.optim.Adam`` (Kingma and Ba 2015, algorithm 1), with AMSGrad (Reddi et al. 2018) on request."""

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
    """Adam with decoupled weight decay, as ``torch.optim.AdamW`` (Loshchilov and Hutter 2019, algorithm 2)."""

    weight_decay: float = 1e-2

    def _decay(self, step: int) -> tuple[float, float]:
        return 0.0, 1 - self.learning_rate(step) * self.weight_decay


@dataclass(frozen=True)
class RMSprop(Rule):
    """RMSprop as ``torch.optim.RMSprop`` (Tieleman and Hinton 2012; centered: Graves 2013, equations 38 to 45)."""

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
    """Adagrad as ``torch.optim.Adagrad`` (Duchi, Hazan and Singer 2011)."""

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
    """Lion: the sign of an interpolated momentum, with decoupled weight decay (Chen et al. 2023, algorithm 2)."""

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
    """

    lr: LearningRate = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 1e-2

    norm_based: ClassVar[bool] = True
    slots = ("exp_avg", "exp_avg_sq")
    kernel = formulas.lamb_direction

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

        The arguments may be any slice of parameters, gradients and slots; `out` has the same size, dtype and device and
        overlaps none of them.
        """
        self._check_slots(slots)
        self.learning_rate(step)
        self.kernel(parameters, gradients, *slots, out, divisor, clip, *self.scalars(step))

    @staticmethod
    def trust_ratio(parameter_norm: float, direction_norm: float) -> float:
        """Norm of a tensor divided by the norm of its direction; 1 if either is zero."""
        if parameter_norm == 0 or direction_norm == 0:
            return 1.0
        return parameter_norm / direction_norm

    def apply(self, parameters: Array, direction: Array, step: int, ratio: float) -> None:
        """Move the parameters of one tensor, or of a slice of it, along `direction` by ``lr * ratio``, in place."""
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
        """Take step `step` in place, as `Rule.update`, with all of `parameters` as ONE tensor."""
        out = empty(parameters.size, parameters.dtype, like=parameters)
        self.direction(parameters, gradients, slots, step, divisor=divisor, clip=clip, out=out)
        self.apply(parameters, out, step, self.trust_ratio(norm_of(parameters), norm_of(out)))
