"""Convex terms without a gradient whose proximal map is known: total variation, norms of groups.

For a term R the proximal map of a point c is the x between the bounds with the least ``R(x) + alpha / 2 |x - c|^2``. A
dual field belongs to it where it has no formula: with R(x) the largest of ``p'K x`` over the allowed p, each such p
gives the subgradient ``K'p``, exact up to the gap ``R(x) - p'K x``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpishard.backend import array as arrays

Array = Any


class AtReference(NamedTuple):
    """Elements that are at the reference of their L1 term, over all ranks."""

    here: int
    total: int  # elements that have such a term
    is_zero: bool  # the reference of each is 0

    @property
    def what(self) -> str:
        return "elements with an L1 term"


class GroupsAtReference(AtReference):
    """Groups all of whose elements are at their reference."""

    @property
    def what(self) -> str:
        return "groups"


class Penalty(ABC):
    """Terms for all unknowns, on vectors of what this rank has of them, float64 on the host.

    Methods are collective over the ranks that share the unknowns, and return the same numbers on all.
    """

    duals: int  # vectors of the dual field, each as large as the unknowns
    kinds: str  # the terms in words, for messages

    @property
    @abstractmethod
    def elements(self) -> Sequence[np.ndarray]:
        """What the terms say of each element: a saved state is of these."""

    @property
    @abstractmethod
    def text(self) -> str:
        """What else they say."""

    @abstractmethod
    def begin(self) -> None:
        """Bring together what a rank needs of its neighbours, before all else."""

    @abstractmethod
    def value(self, x: np.ndarray) -> float:
        """The value of the terms."""

    @abstractmethod
    def proximal_point(
        self,
        x: np.ndarray,
        center: np.ndarray,
        alpha: float,
        dual: np.ndarray,
        sides: tuple[np.ndarray, np.ndarray],
        floor: float,
    ) -> None:
        """Replace `x` by the proximal point of a center, and the dual field by the one there; `sides` are the bounds.

        It may end early: where the gap is at most a tenth of what it gains over the `x` that it gets, or the `floor`.
        """

    @abstractmethod
    def subgradient(
        self, x: np.ndarray, gradient: np.ndarray, dual: np.ndarray, sides: tuple[np.ndarray, np.ndarray]
    ) -> np.ndarray:
        """A gradient with the subgradient of the terms: that of the dual field, or the one that leaves least."""

    def gap(self, x: np.ndarray, dual: np.ndarray) -> float | None:
        """What the terms are above their linear form by the dual field; None without one."""
        return None

    def snap(self, x: np.ndarray, before: np.ndarray, near: float) -> None:  # noqa: B027
        """Move elements that are next to their reference, but for rounding, onto it; not all terms have one."""

    def at_reference(self, x: np.ndarray) -> AtReference | None:
        """What of the terms is exactly zero, where that can be."""
        return None


class PenaltyOfVectors:
    """Terms on the vectors of a method, of which this rank has some elements; collective as `Penalty`.

    `gather` makes of a vector what this rank has of the unknowns, and `cut` is its reverse.
    """

    def __init__(
        self, penalty: Penalty, gather: Callable[[Array], Array], cut: Callable[[Array], Array], like: Array
    ) -> None:
        self.terms = penalty
        self._gather, self._cut, self._like = gather, cut, like

    def whole(self, vector: Array) -> np.ndarray:
        """What this rank has of the unknowns, in float64 on the host; maybe not a copy."""
        return np.ascontiguousarray(arrays.to_host(self._gather(vector)), np.float64)

    def own(self, whole: np.ndarray) -> Array:
        """The reverse of `whole`."""
        return self._cut(np.asarray(whole, self._like.dtype, like=self._like))

    def dual(self, rows: Array) -> np.ndarray:
        """The dual field of rows of the state, a copy."""
        found = [self.whole(row) for row in rows]
        return np.array(found) if found else np.zeros((0, 0))
