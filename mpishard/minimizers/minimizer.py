"""One minimisation as a state machine: it says at which point it wants value and gradient, and is told them.

Between two evaluations everything that it knows is in its vectors, its point and its metadata: a run that ends there
goes on with the next evaluation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from mpishard.minimizers.limits import Limits
from mpishard.minimizers.space import Space

Array = Any


class Wanted(Enum):
    """What a minimisation wants next."""

    GRADIENT = "gradient"  # value and gradient at the point
    PRODUCT = "product"  # the Hessian at the point, times a direction
    NOTHING = "nothing"  # it has ended


@dataclass(frozen=True)
class Progress:
    """How far a minimisation has come.

    Parameters
    ----------
    iterations : int
        Accepted steps.
    evaluations, products : int
        Values with gradients, and Hessian products, that it was told.
    value : float
        At the last accepted point.
    gradient_norm, projected_norm : float
        Largest absolute element of the gradient there, and of the projected gradient.
    step_length : float
        Of the last accepted step, as a multiple of its direction.
    accepted : bool
        Whether the last call of `tell` has ended an iteration.
    asymmetry : float
        The most by which Hessian products ``a'(H b)`` and ``b'(H a)`` have differed, as a share of ``|a| |H b|``.
    not_finite : int
        Evaluations in line searches whose value or gradient was NaN or infinite.
    """

    iterations: int = 0
    evaluations: int = 0
    products: int = 0
    value: float = float("nan")
    gradient_norm: float = float("nan")
    projected_norm: float = float("nan")
    step_length: float = 0.0
    accepted: bool = False
    asymmetry: float = 0.0
    not_finite: int = 0


class Minimizer(ABC):
    """One minimisation by one method.  Methods are collective over the ranks of the space.

    Parameters
    ----------
    slots : tuple of str
        The names of the vectors.
    space : Space
    vectors : 2-D array
        A row for each name, kept and saved by the caller.
    point : 1-D array
        Where the next evaluation is wanted; in the end the best iterate.  The caller only reads it.
    limits : Limits

    Attributes
    ----------
    wanted : Wanted
        What it wants next, at `point`.
    progress : Progress
    stop_reason : str
        Why it has ended; empty until then.
    versions : list of int
        For each row of `vectors` a number that is raised when the row is written, the same on all ranks.  Who keeps
        copies of the rows copies those again whose number has changed.  Empty, as at first, if the minimisation does
        not say what it writes.
    """

    def __init__(self, slots: tuple[str, ...], space: Space, vectors: Array, point: Array, limits: Limits) -> None:
        self.space = space
        self.point = point
        self.limits = limits
        self.wanted: Wanted = Wanted.GRADIENT
        self.progress: Progress = Progress()
        self.stop_reason: str = ""
        self.vectors = vectors
        self.versions: list[int] = []
        self._slots = slots

    def row(self, slot: str) -> Array:
        """The vector of the state of this name.  Not collective."""
        return self.vectors[self._slots.index(slot)]

    def note_written(self, *rows: int) -> None:
        """Raise the versions of these rows, or of all, since they were written or are about to be.  Not collective."""
        for row in rows or range(len(self.versions)):
            self.versions[row] += 1

    @property
    def best(self) -> Array:
        """The last accepted iterate, while a line search goes on elsewhere; not a copy.  Not collective."""
        return self.point if self.stop_reason else self.row("base")

    @property
    def direction(self) -> Array:
        """The vector to multiply by the Hessian when a product is wanted.  Not collective."""
        raise NotImplementedError(f"{type(self).__name__} wants no Hessian products")

    @abstractmethod
    def begin(self) -> int:
        """Start at the point, which is projected into the bounds.

        Returns
        -------
        int
            The elements of all ranks that were outside of their bounds.
        """

    def forget(self) -> bool:
        """Drop what was learned of the function's curvature from earlier iterates.  Not collective.

        Returns
        -------
        bool
            Whether there was anything.
        """
        return False

    @abstractmethod
    def tell(self, value: float, gradient: Array) -> None:
        """Take what was wanted, and decide what is wanted next.

        Parameters
        ----------
        value : float
            At the point; the same on all ranks.  NaN or infinite outside of the domain of the function.
        gradient : 1-D array
            This rank's part, only read.
        """

    def tell_product(self, product: Array) -> None:
        """Take the Hessian times `direction`, this rank's part, which is only read."""
        raise NotImplementedError(f"{type(self).__name__} wants no Hessian products")

    def reopen(self) -> None:
        """After the end, want another evaluation, at the last iterate, since a limit was lifted.  Not collective."""
        self.wanted, self.stop_reason = Wanted.GRADIENT, ""

    @abstractmethod
    def to_metadata(self) -> dict[str, Any]:
        """Everything it knows besides vectors and point, as plain numbers, strings and lists of them; no call waits.

        Infinities and NaN are allowed.
        """

    @abstractmethod
    def restore(self, metadata: Mapping[str, Any]) -> None:
        """Continue from `to_metadata`, after vectors and point were filled.  Not collective.

        Raises
        ------
        ValueError
            If something is missing or invalid; nothing has changed then.
        """
