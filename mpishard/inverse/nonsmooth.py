"""The terms without a gradient, which the method of `minimize` takes: what they share, and as which options they go."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from mpishard.arguments import number, without_dimensions
from mpishard.backend import array as arrays
from mpishard.comm.agreement import text_of
from mpishard.comm.errors import OneRank
from mpishard.inverse.unknowns import FieldOfTerm, Unknowns
from mpishard.minimizers.penalty import Penalty

if TYPE_CHECKING:
    from mpishard.comm.axis import Axis


@dataclass(frozen=True)
class NonsmoothTerm(ABC):
    """A term of `regularized` that has a weight and a reference, and kinks there.  Numbers are checked at once."""

    weight: Any
    _: KW_ONLY
    reference: Any = None
    _containers: ClassVar[tuple[type, ...]] = (list, tuple)  # of elements; what else is no array must be a number

    def __post_init__(self) -> None:
        kind = type(self).__name__
        if self.weight is None:
            raise TypeError(f"{kind}: weight=None must be a number or an array")
        for name, least in (("weight", 0.0), ("reference", None)):
            given = getattr(self, name)
            if given is not None and not isinstance(given, self._containers) and np.ndim(given) == 0:
                object.__setattr__(self, name, number(f"{kind}: {name}", without_dimensions(given), least=least))

    @classmethod
    @abstractmethod
    def _options(cls, terms: Sequence[Any], unknowns: Unknowns, mesh: Any) -> tuple[dict[str, Any], str]:
        """`options_of_terms` for terms of this class."""


def options_of_terms(terms: Sequence[NonsmoothTerm], unknowns: Unknowns, mesh: Any) -> tuple[dict[str, Any], str]:
    """The option ``l1`` or ``penalty`` of a method that has these terms, and what all ranks must have alike of them.

    Raises TypeError or ValueError if a term does not fit the unknowns or the others.
    """
    kinds = list(dict.fromkeys(type(term) for term in terms))
    if len(kinds) > 1:
        names = " and ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"one function has terms {names}: of those without a gradient it may have one kind")
    return kinds[0]._options(terms, unknowns, mesh)


def forms_of(terms: Sequence[NonsmoothTerm]) -> str:
    """What all ranks must have alike of terms of which each has its own elements."""
    return ", ".join(f"{type(term).__name__}{' with a reference' * (term.reference is not None)}" for term in terms)


class ProximalTerm(NonsmoothTerm):
    """A term of one array of the unknowns whose proximal map is known."""

    @staticmethod
    @abstractmethod
    def _penalty(terms: Sequence[Any], unknowns: Unknowns, mesh: Any) -> PenaltyOfArrays:
        """The penalty of terms of this class; `mesh` is that of slabs."""

    @classmethod
    def _options(cls, terms: Sequence[Any], unknowns: Unknowns, mesh: Any) -> tuple[dict[str, Any], str]:
        penalty = cls._penalty(terms, unknowns, mesh)
        return {"penalty": penalty}, forms_of(terms) if penalty.is_cut else text_of(terms)

    def value(self, x: Any) -> float:
        """The value at a point, on this process alone.

        Parameters
        ----------
        x : array, FlatParameters, or dict, list or tuple of arrays
            As the `x0` of `minimize`, whole.

        Returns
        -------
        float
            With the weight.

        Raises
        ------
        TypeError, ValueError
            If arrays do not fit `x`.
        """
        unknowns = Unknowns(x)
        penalty = self._penalty([self], unknowns, None)
        penalty.begin()
        return penalty.value(np.ascontiguousarray(arrays.to_host(unknowns.flat), np.float64))


class TermOfArray(ABC):
    """A term at work on what this rank has of its array.  Methods get vectors of all unknowns of the rank.

    They are collective over the ranks that share the array, of which all but `begin` know from there.
    """

    def __init__(self, field: FieldOfTerm) -> None:
        self.field = field
        self.part = slice(field.start, field.start + field.size)
        self._ranks: Axis | OneRank = OneRank()

    @property
    @abstractmethod
    def elements(self) -> np.ndarray:
        """Three numbers of each element of this rank, (3, size): the weight, the reference, and one more."""

    @abstractmethod
    def begin(self) -> None:
        """As that of `Penalty`."""

    @abstractmethod
    def value(self, x: np.ndarray) -> float:
        """The value of the term."""


class PenaltyOfArrays(Penalty):
    """Terms of several arrays of the unknowns, one of each; ValueError if two are of one."""

    def __init__(self, terms: Sequence[TermOfArray], unknowns: Unknowns) -> None:
        for name, count in Counter(term.field.name for term in terms).items():
            if count > 1:
                raise ValueError(
                    f"{count} {self.kinds} terms are of the array {name!r}: give one with the weights of all"
                )
        self._terms, self._size = terms, unknowns.size
        self.is_cut = any(term.field.is_cut for term in terms)

    @property
    def elements(self) -> Sequence[np.ndarray]:
        found = np.zeros((3, self._size))
        for term in self._terms:
            found[:, term.part] = term.elements
        return list(found)

    def begin(self) -> None:
        for term in self._terms:
            term.begin()

    def value(self, x: np.ndarray) -> float:
        return math.fsum(term.value(x) for term in self._terms)
