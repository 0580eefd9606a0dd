"""One minimisation as a state machine: it wants value and gradient at a point, and takes them by `tell`.

Between two evaluations its whole state is in its vectors, its point and its metadata: a run that ends there resumes
with the next evaluation.
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
    """The next evaluation that a minimisation wants."""

    GRADIENT = "gradient"  # value and gradient at the point
    PRODUCT = "product"  # the Hessian at the point, times a direction
    NOTHING = "nothing"  # it has ended


@dataclass(frozen=True)
class Progress:
    """The progress of a minimisation; `value`, `gradient_norm` and `projected_norm` are at the last accepted point."""

    iterations: int = 0  # accepted steps
    evaluations: int = 0  # values with gradients
    products: int = 0  # Hessian products
    value: float = float("nan")
    gradient_norm: float = float("nan")  # largest absolute element of the gradient, and of the projected gradient
    projected_norm: float = float("nan")
    step_length: float = 0.0  # of the last accepted step, as a multiple of its direction
    accepted: bool = False  # the last call of `tell` has ended an iteration
    asymmetry: float = 0.0  # the largest difference of Hessian products a'(H b) and b'(H a), as a share of |a| |H b|
    not_finite: int = 0  # evaluations in line searches whose value or gradient was NaN or infinite


class Minimizer(ABC):
    """One minimisation by one method; `begin`, `tell` and `tell_product` are collective over the ranks of the space.

    `vectors` has a row for each name in `slots`, kept and saved by the caller. `point`, which the caller only reads, is
    where the next evaluation is wanted, and in the end the best iterate.
    """

    def __init__(self, slots: tuple[str, ...], space: Space, vectors: Array, point: Array, limits: Limits) -> None:
        self.space = space
        self.point = point
        self.limits = limits
        self.wanted: Wanted = Wanted.GRADIENT  # the next evaluation, at `point`
        self.progress: Progress = Progress()
        self.stop_reason: str = ""  # empty until it has ended
        self.vectors = vectors
        # For each row of `vectors` a number that is raised when the row is written, the same on all ranks, for those
        # who keep copies of the rows.  Empty, as at first, if the minimisation does not report its writes.
        self.versions: list[int] = []
        self._slots = slots

    def row(self, slot: str) -> Array:
        return self.vectors[self._slots.index(slot)]

    def note_written(self, *rows: int) -> None:
        """Raise the versions of these rows, or of all, since they were written or are about to be."""
        for row in rows or range(len(self.versions)):
            self.versions[row] += 1

    @property
    def best(self) -> Array:
        """The last accepted iterate, also while a line search continues elsewhere; not a copy."""
        return self.point if self.stop_reason else self.row("base")

    @property
    def direction(self) -> Array:
        """The vector to multiply by the Hessian when a product is wanted."""
        raise NotImplementedError(f"{type(self).__name__} wants no Hessian products")

    @abstractmethod
    def begin(self) -> int:
        """Start at the point, projected into the bounds; return the number of elements on all ranks that this moved."""

    def forget(self) -> bool:
        """Drop what was learned of the curvature from earlier iterates; return True if there was anything."""
        return False

    @abstractmethod
    def tell(self, value: float, gradient: Array) -> None:
        """Take the value and this rank's part of the gradient, which is only read, and decide what is wanted next.

        The value is the same on all ranks; NaN or infinite outside of the domain of the function.
        """

    def tell_product(self, product: Array) -> None:
        """Take the Hessian times `direction`, this rank's part, which is only read."""
        raise NotImplementedError(f"{type(self).__name__} wants no Hessian products")

    def reopen(self) -> None:
        """After the end, want another evaluation, at the last iterate, since a limit was lifted."""
        self.wanted, self.stop_reason = Wanted.GRADIENT, ""

    @abstractmethod
    def to_metadata(self) -> dict[str, Any]:
        """The state without vectors and point, as plain numbers (also infinities and NaN), strings and lists."""

    @abstractmethod
    def restore(self, metadata: Mapping[str, Any]) -> None:
        """Continue from `to_metadata`, after vectors and point were filled.

        Raises ValueError, and changes nothing, if something is missing or invalid.
        """
