"""Muon: steps of one size in all directions of a matrix, for hidden matrices; another rule has the other tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any, ClassVar

from mpishard.arguments import integer, number, shown
from mpishard.backend import process
from mpishard.backend.array import empty
from mpishard.backend.exact_norms import norm_of
from mpishard.optim import formulas
from mpishard.optim.rule import LearningRate, ParameterGroup, Rule
from mpishard.optim.rules import AdamW

Array = Any
_ADJUSTMENTS = (None, "original", "match_rms_adamw")


@dataclass(frozen=True)
class Muon(Rule):
    """Muon: momentum, orthogonalized by Newton and Schulz's iteration (Jordan et al. 2024), as ``torch.optim.Muon``.

    It is for the matrices inside of a network.  `rest` has all other tensors: those of another number of dimensions,
    and embeddings and heads, whose names `matrices` leaves out.  An optimizer gives each matrix to one rank, which
    needs it whole; the state stays divided as that of other rules.

    The products are in the dtype of the parameters, where PyTorch rounds their operands to bfloat16.

    Parameters
    ----------
    lr : float or callable
        Learning rate of the matrices, or a function of the step.
    weight_decay : float
        A step multiplies the matrix by ``1 - lr * weight_decay`` first.
    momentum : float
        How much of the average of the gradient a step keeps; at least 0 and below 1.
    nesterov : bool
        Nesterov's momentum.
    ns_coefficients : (float, float, float)
        Of the polynomial of an iteration.
    eps : float
        The least norm by which a matrix is divided before the iterations.
    ns_steps : int
        Iterations; at least 1 and below 100.
    adjust_lr_fn : {None, "original", "match_rms_adamw"}
        How the rate of a matrix of shape (A, B) follows from `lr`: times ``sqrt(max(1, A / B))``; or times ``0.2 *
        sqrt(max(A, B))``, so that the rate and decay of AdamW fit.
    groups : sequence of ParameterGroup
        Matrices with their own weight decay or learning rate; `rest` has its own groups.
    ema_decay : float, optional
        Keep an exponential moving average of all parameters with this decay.
    matrices : str or sequence of str
        Patterns of names, as those of `ParameterGroup`: the tensors of two dimensions whose names match any of them.
    rest : Rule
        For the other tensors: an element-wise one with at least one state array, such as ``AdamW(lr=3e-4)``.  The
        state arrays are those of `rest`; the first has the momentum of the matrices, which leave the others at zero.

    Raises
    ------
    TypeError, ValueError
        If a hyper-parameter is no number or out of its range, or `rest` is no such rule.
    """

    lr: LearningRate = 1e-3
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    eps: float = 1e-7
    ns_steps: int = 5
    adjust_lr_fn: str | None = None
    matrices: str | Sequence[str] = field(kw_only=True)
    rest: Rule = field(default=AdamW(), kw_only=True)

    whole_tensors: ClassVar[bool] = True
    kernel = formulas.muon_direction

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("momentum", below=1.0)
        object.__setattr__(self, "ns_steps", integer("Muon: ns_steps", self.ns_steps, least=1))
        if self.ns_steps >= 100:
            raise ValueError(f"Muon: ns_steps={self.ns_steps} must be below 100")
        given = self.ns_coefficients
        if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != 3:
            raise TypeError(f"Muon: ns_coefficients={shown(given)} must be three numbers")
        checked = tuple(number(f"Muon: ns_coefficients[{i}]", each) for i, each in enumerate(given))
        object.__setattr__(self, "ns_coefficients", checked)
        if self.adjust_lr_fn not in _ADJUSTMENTS:
            wanted = 'None, "original" or "match_rms_adamw"'
            raise ValueError(f"Muon: adjust_lr_fn={shown(self.adjust_lr_fn)} must be {wanted}")
        object.__setattr__(self, "matrices", ParameterGroup(self.matrices, lr_factor=1.0).patterns)
        if not isinstance(self.rest, Rule):
            raise TypeError(f"Muon: rest={shown(self.rest)} must be a rule such as AdamW(lr=3e-4)")
        rest = self.rest
        if rest.norm_based or rest.whole_tensors or not rest.slots or rest.initial(rest.slots[0]) or rest.live:
            raise ValueError(
                f"Muon: rest={shown(rest)} must be an element-wise rule that keeps state from zero, such as "
                "AdamW(lr=3e-4), or SGD with a momentum"
            )
        if rest.ema_decay is not None:
            raise ValueError("Muon: the average of all parameters is one; give ema_decay to Muon, and not to rest")

    @property
    def slots(self) -> tuple[str, ...]:
        """The state arrays of `rest`; the first has the momentum of the matrices."""
        return self.rest.slots

    def initial(self, slot: str) -> float:
        return self.rest.initial(slot)

    def scalars(self, step: int) -> tuple[float, ...]:
        return 1 - self.momentum, self.momentum if self.nesterov else 1.0

    def by_shape(self, shapes: Mapping[str, tuple[int, ...]]) -> list[Rule]:
        matching = ParameterGroup(self.matrices, lr_factor=1.0).matching(shapes)
        matrices = [name for name in matching if len(shapes[name]) == 2]
        if not matrices:
            raise ValueError(
                f"Muon: none of the {len(matching)} tensors that matrices={self.matrices} match has two dimensions; "
                "give names of matrices, or another rule"
            )
        inside = set(matrices)
        others = [name for name in shapes if name not in inside]
        rules = dict(zip(matrices, self.by_tensor(matrices), strict=True))
        rules |= zip(others, self.rest.by_tensor(others), strict=True) if others or self.rest.groups else ()
        return [rules[name] for name in shapes]

    def configuration(self) -> dict[str, float | str | bool]:
        plain = super().configuration()
        coefficients = " ".join(map(str, self.ns_coefficients))
        plain |= {"ns_coefficients": coefficients, "matrices": "; ".join(self.matrices)}
        plain |= {"adjust_lr_fn": self.adjust_lr_fn or "original"}
        del plain["rest"]
        return {**plain, **{f"rest_{name}": value for name, value in self.rest.configuration().items()}}

    def direction(
        self, gradients: Array, momentum: Array, step: int, *, divisor: float = 1.0, clip: float = 1.0, out: Array
    ) -> None:
        """Update the momentum of matrices, or of any slice, and write what `orthogonalized` needs whole into `out`.

        Parameters
        ----------
        gradients : array
            1-D, contiguous, float32 or float64.  Only read.
        momentum : array
            Of the size, dtype and device of the gradients; changed in place.
        step : int
            Counts from 1.
        divisor, clip : float
            The gradient used is ``gradients / divisor * clip``.
        out : array
            As `momentum`; overlaps no other argument.
        """
        self.kernel(gradients, momentum, out, divisor, clip, *self.scalars(step))

    def orthogonalized(self, matrix: Array) -> Array:
        """The matrix with its singular values brought near 1, by `ns_steps` iterations; a zero matrix stays zero.

        Parameters
        ----------
        matrix : array
            2-D, contiguous, whole.  Only read.

        Returns
        -------
        array
            Of its shape and dtype.
        """
        if not matrix.size:
            return matrix.copy()
        a, b, c = (matrix.dtype.type(each) for each in self.ns_coefficients)
        norm = matrix.dtype.type(max(norm_of(matrix.reshape(-1)), self.eps))
        if not norm:
            return matrix.copy()
        x = matrix / norm
        x = x.T if x.shape[0] > x.shape[1] else x
        for _ in range(self.ns_steps):
            gram = process.matmul(x, x.T)
            x = a * x + process.matmul(b * gram + c * process.matmul(gram, gram), x)
        return x.T if matrix.shape[0] > matrix.shape[1] else x

    def apply(self, parameters: Array, direction: Array, step: int, shape: tuple[int, ...]) -> None:
        """Decay the parameters of one matrix, or of a slice of it, and move them along its direction, in place.

        Parameters
        ----------
        parameters, direction : array
            1-D, contiguous, of one size, dtype and device; the direction is `orthogonalized`.
        step : int
            Counts from 1.
        shape : (int, int)
            Of the whole matrix.
        """
        rate, (rows, columns) = self.learning_rate(step), shape
        if self.adjust_lr_fn == "match_rms_adamw":
            factor = 0.2 * sqrt(max(rows, columns))
        else:
            factor = sqrt(max(1.0, rows / max(1, columns)))
        formulas.muon_apply(parameters, direction, 1 - rate * self.weight_decay, rate * factor)

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
        """Take step `step` in place of ONE whole matrix, as `Rule.update`.

        Parameters
        ----------
        parameters, gradients : array
            2-D, contiguous, float32 or float64, of one shape, dtype and device.  Gradients are only read.
        slots : sequence of arrays
            Those of `rest`, 1-D, with the size, dtype and device of the parameters; the first is changed in place.
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
        if parameters.ndim != 2:
            raise ValueError(f"Muon needs a whole matrix, got parameters of shape {parameters.shape}")
        self.learning_rate(step)
        flat = parameters.reshape(-1)
        direction = empty(flat.size, flat.dtype, like=flat)
        self.direction(gradients.reshape(-1), slots[0], step, divisor=divisor, clip=clip, out=direction)
        direction[...] = self.orthogonalized(direction.reshape(parameters.shape)).reshape(-1)
        self.apply(flat, direction, step, parameters.shape)
