"""L-BFGS: the limited-memory quasi-Newton method of Broyden, Fletcher, Goldfarb and Shanno."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpishard.arguments import integer, number, shown
from mpishard.minimizers.descent import SLOTS
from mpishard.minimizers.limits import Limits
from mpishard.minimizers.line_search import LineSearch, MoreThuente
from mpishard.minimizers.method import Method
from mpishard.minimizers.quasi_newton import QuasiNewton
from mpishard.minimizers.space import Space

Array = Any
_SEARCHES: Mapping[str, type[LineSearch[Any]]] = {"more-thuente": MoreThuente}
_DAMPING = ("skip", "powell")


@dataclass(frozen=True, kw_only=True)
class LBFGS(Method):
    """The L-BFGS method (Liu and Nocedal, 1989), without bounds.

    Its state is ``2 history + 3`` vectors as large as the parameters.

    Parameters
    ----------
    gtol, ftol, xtol, maxiter, maxfun
        When it stops: see `Method`.
    history : int
        The number m of pairs of steps and changes of the gradient that are kept, at least 1.
    line_search : str or LineSearch
        ``"more-thuente"`` (ftol 1e-3, gtol 0.9, xtol 0.1), ``"hager-zhang"``, ``"armijo"``, or a line search with other
        options, which then has its own `maxls`.
    maxls : int
        The most evaluations of a line search that is given by its name.
    damping : str
        What happens to a pair with too little curvature: ``"skip"`` drops it; ``"powell"`` mixes the change of the
        gradient with what the model of the Hessian says for it (Powell, 1978), and keeps it.
    initial_scaling : float, optional
        Positive: the initial inverse Hessian is this times the identity (or scaling, or preconditioner).  By default 1
        in the first iteration, later s'y / y'y of the newest pair.

    Raises
    ------
    TypeError, ValueError
        If an option is invalid.
    """

    history: int = 10
    line_search: str | LineSearch[Any] = "more-thuente"
    maxls: int = 20
    damping: str = "skip"
    initial_scaling: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        for field in ("history", "maxls"):
            object.__setattr__(self, field, integer(f"{name}: {field}", getattr(self, field), least=1))
        if not isinstance(self.line_search, LineSearch) and self.line_search not in _SEARCHES:
            known = ", ".join(map(repr, _SEARCHES))
            raise ValueError(f"{name}: line_search={shown(self.line_search)} must be {known} or a line search")
        if self.damping not in _DAMPING:
            raise ValueError(f"{name}: damping={shown(self.damping)} must be one of {', '.join(map(repr, _DAMPING))}")
        if self.initial_scaling is not None:
            scale = number(f"{name}: initial_scaling", self.initial_scaling, above=0, otherwise="None")
            object.__setattr__(self, "initial_scaling", scale)

    @property
    def slots(self) -> tuple[str, ...]:
        """``base``, ``base_gradient``, ``direction``, ``s.0`` to ``s.(m-1)`` and ``y.0`` to ``y.(m-1)``."""
        return (*SLOTS, *(f"{kind}.{pair}" for kind in "sy" for pair in range(self.history)))

    @property
    def search(self) -> LineSearch[Any]:
        """The line search with its options."""
        if isinstance(self.line_search, LineSearch):
            return self.line_search
        return _SEARCHES[self.line_search](maxls=self.maxls)

    def make(self, space: Space, vectors: Array, point: Array, limits: Limits) -> QuasiNewton:
        if limits.lower is not None or limits.upper is not None:
            raise ValueError("LBFGS takes no bounds; use LBFGSB")
        if limits.scaling is not None and limits.precondition is not None:
            raise ValueError("a scaling and a precondition were given; leave one of them out")
        return QuasiNewton(self, space, vectors, point, limits)
