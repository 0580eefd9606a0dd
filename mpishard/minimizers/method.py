"""The base of the methods: their options, and the names of the vectors of their state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from mpishard.arguments import integer, number

if TYPE_CHECKING:
    from mpishard.minimizers.limits import Limits
    from mpishard.minimizers.minimizer import Minimizer
    from mpishard.minimizers.space import Space

Array = Any
# Something about each element: one number, a flat array, or by tensor name a number or an array; None: nothing.
Elements = Any


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """Base of the methods, which choose the length of their steps by themselves from values and gradients.

    A method is a frozen record of options, independent of any rank; `make` starts a minimisation by it.

    Parameters
    ----------
    gtol : float
        Stop when the largest element of the projected gradient is at most this: of ``x - P(x - g)``, where P projects
        into the bounds; without bounds, of the gradient.
    ftol : float
        Stop when an iteration decreases the value by at most this times the largest of both values and 1.
    xtol : float
        Stop when no element of an iteration's step is larger than this times the largest of the point and 1.
    maxiter, maxfun : int
        Stop after this number of iterations or evaluations.
    fixed : array of bool, mapping or None
        True for elements that keep their value: a flat array as long as the parameters, or by tensor name an array of
        its shape or True.
    inner_product : float, array, mapping or None
        Positive weights w of the inner product ``sum(w * a * b)``, such as the diagonal of a mass matrix: one number, a
        flat array, or by tensor name.  Gradients are partial derivatives g; what descends is their Riesz map ``g / w``,
        whose largest element `gtol` bounds.  Default: 1.
    preconditioner : float, array, mapping, callable or None
        Initial inverse Hessian: a positive diagonal, as for `inner_product`, or a function of a flat array, symmetric
        and positive definite, called on all ranks.  Default: the inverse of `inner_product`.

    Raises
    ------
    TypeError, ValueError
        If an option is invalid.
    """

    needs_products: ClassVar[bool] = False
    takes_batches: ClassVar[bool] = False  # whether each iteration may be of other samples

    gtol: float = 1e-5
    ftol: float = 2.220446049250313e-09
    xtol: float = 0.0
    maxiter: int = 15000
    maxfun: int = 15000
    fixed: Elements = None
    inner_product: Elements = None
    preconditioner: Elements | Callable[[Array], Array] = None

    def __post_init__(self) -> None:
        for name in ("gtol", "ftol", "xtol"):
            object.__setattr__(self, name, number(f"{type(self).__name__}: {name}", getattr(self, name), least=0))
        for name in ("maxiter", "maxfun"):
            value = integer(f"{type(self).__name__}: {name}", getattr(self, name), least=0)
            object.__setattr__(self, name, value)

    @property
    @abstractmethod
    def slots(self) -> tuple[str, ...]:
        """Names of the vectors of the state, each as large as the parameters."""

    @abstractmethod
    def make(self, space: Space, vectors: Array, point: Array, limits: Limits) -> Minimizer:
        """A minimisation by this method.

        Parameters
        ----------
        space : Space
            Of the vectors.
        vectors : 2-D array
            This rank's part of the state: a row for each name in `slots`.  The caller keeps and saves it.
        point : 1-D array
            This rank's part of the start; the minimisation writes there where it wants to evaluate next.
        limits : Limits
            What is known of the elements.

        Returns
        -------
        Minimizer
            Before its first evaluation: call `begin`, or `restore` after the vectors are filled.
        """

    def initial(self, slot: str) -> float:
        """The value that fills `slot` before the first evaluation: 0.

        Parameters
        ----------
        slot : str
            One of `slots`.

        Returns
        -------
        float
            0.
        """
        return 0.0

    def configuration(self) -> dict[str, float | str | bool]:
        """The options as plain numbers, strings and flags, for saving.

        Returns
        -------
        dict
            ``"rule"`` with the name of the class, and each option that is one number, string or flag by its name.
        """
        plain: dict[str, float | str | bool] = {"rule": type(self).__name__}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float | str | bool):
                plain[field.name] = value
        return plain
