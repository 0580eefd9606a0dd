"""The interface between the loop of a minimisation and the ranks: one protocol for a process alone and for a mesh."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from mpishard.inverse.functions import Unknowns
from mpishard.minimizers.method import Method
from mpishard.minimizers.minimizer import Minimizer

Array = Any


class MinimizationRun(Protocol):
    """A minimisation, its unknowns, and the ranks that take part. Methods other than `watching` are collective."""

    method: Method
    unknowns: Unknowns
    speaks: bool  # this rank writes messages
    value: float  # of the last evaluation
    interrupted: bool  # Ctrl-C came on any rank before the last evaluation, inside of `watching`
    culprits: str  # the ranks whose value or gradient is not finite, if that has ended it and ranks differ

    def watching(self) -> AbstractContextManager[Any]:
        """The context in which Ctrl-C ends the loop in order, where it does."""
        ...

    @property
    def minimizer(self) -> Minimizer: ...

    def publish(self, vector: Array) -> None:
        """Make a vector of the minimizer the values of the unknowns, on all ranks."""
        ...

    def whole(self, vector: Array) -> Array:
        """A vector of the minimizer as an array like the unknowns of this rank; maybe not a copy."""
        ...

    def tell(self, value: float, gradient: Any, problem: BaseException | None) -> None:
        """Check the results of the user's function on every rank, combine them, and give them to the minimizer.

        Raises on all ranks if any has a problem.
        """
        ...

    def value_of(self, value: float, gradient: Any, problem: BaseException | None) -> float:
        """The value of all ranks, checked as by `tell`, which the minimizer does not get."""
        ...

    def tell_product(self, product: Any, problem: BaseException | None) -> None:
        """As `tell`, for a Hessian product."""
        ...

    def any(self, flag: bool) -> bool:
        """Return True if the flag is set on any rank."""
        ...

    def raise_if_any(self, problem: BaseException | None) -> None: ...

    def serialize(self) -> bytes:
        """The whole state of the minimisation, with the point."""
        ...

    def deserialize(self, data: bytes) -> None:
        """Continue from `serialize`; nothing has changed if that raises."""
        ...

    def save(self, folder: str | Path) -> Path:
        """Write a checkpoint."""
        ...

    def load(self, folder: str | Path) -> None:
        """Continue from the newest checkpoint."""
        ...
