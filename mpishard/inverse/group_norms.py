"""Norms of groups of unknowns, which are zero together: a proximal method minimises them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from mpishard.arguments import integer, shown
from mpishard.comm.errors import on_any
from mpishard.inverse.nonsmooth import PenaltyOfArrays, ProximalTerm, TermOfArray
from mpishard.inverse.stencils import sum_of_cells
from mpishard.inverse.unknowns import FieldOfTerm, Unknowns
from mpishard.layout.boxes import box_shape
from mpishard.minimizers.penalty import AtReference, GroupsAtReference

Array = Any
_ROUNDS = 180  # at most, of a proximal point where bounds cut a group: a third of them halve
_CONVERGED = 2.0**-50  # relative to where a norm or its weight is
_BITS = 30  # of each of three words of a square


@dataclass(frozen=True)
class GroupL1(ProximalTerm):
    """The sum over groups of ``weight |x_g - reference_g|``, with the 2-norm: the group lasso.

    At the minimum many groups are at their reference, all of their elements, to the last bit.  It is a term for
    `minimize` by L-BFGS-B, which then takes proximal steps: see `LBFGSB`.

    Parameters
    ----------
    weight : float or array
        Finite and not negative: one number, or one for each group, by the number of the group.
    reference : float or array, optional
        Finite, as `groups`; default: 0.
    groups : array of int, optional
        The number of the group of each element, from 0; -1 for elements without one.  Of the shape of the array, or
        flat; where it is cut over ranks, of this rank's part.
    axis : int or tuple of int, optional
        In place of `groups`: elements that differ along these dimensions alone are a group, such as the components of
        a vector field.  Groups are numbered in the order of the other dimensions.
    name : str, optional
        Of the array, where `x0` has several.

    Raises
    ------
    TypeError, ValueError
        If an argument is invalid; arrays are checked by `minimize`, which has `x0`, on all ranks.

    Notes
    -----
    Groups do not overlap, and a group may be on several ranks.  Where sizes differ, weights in proportion to the root
    of the size are usual.

    References
    ----------
    M. Yuan, Y. Lin: Model selection and estimation in regression with grouped variables.  Journal of the Royal
    Statistical Society B 68, 49-67 (2006).

    Examples
    --------
    >>> import numpy as np
    >>> import mpishard
    >>> goal = np.array([3.0, 4.0, 0.3, -0.4])
    >>> def misfit(x):
    ...     return 0.5 * ((x - goal) ** 2).sum(), x - goal
    >>> term = mpishard.GroupL1(1.0, groups=[0, 0, 1, 1])
    >>> mpishard.minimize(mpishard.regularized(misfit, term), np.zeros(4)).x.round(6)
    array([2.4, 3.2, 0. , 0. ])
    """

    _: KW_ONLY
    groups: Any = None
    axis: int | tuple[int, ...] | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.groups is None) == (self.axis is None):
            raise ValueError("GroupL1 takes either groups=, the number of each element's group, or axis=")
        if self.axis is not None:
            axes = self.axis if isinstance(self.axis, Sequence) else (self.axis,)
            object.__setattr__(self, "axis", tuple(integer("GroupL1: axis", axis) for axis in axes))

    @staticmethod
    def _penalty(terms: Sequence[Any], unknowns: Unknowns, mesh: Any) -> PenaltyOfArrays:
        return GroupNorms(terms, unknowns, mesh)


class GroupNorms(PenaltyOfArrays):
    """The norms of the groups of one or several arrays of the unknowns. `mesh` is that of slabs."""

    duals = 0
    kinds = "GroupL1"

    def __init__(self, terms: Sequence[GroupL1], unknowns: Unknowns, mesh: Any) -> None:
        self._arrays = [_Groups(term, unknowns, mesh) for term in terms]
        super().__init__(self._arrays, unknowns)

    @property
    def text(self) -> str:
        return "GroupL1"

    def proximal_point(
        self,
        x: np.ndarray,
        center: np.ndarray,
        alpha: float,
        dual: np.ndarray,
        sides: tuple[np.ndarray, np.ndarray],
        floor: float,
    ) -> None:
        x[:] = np.minimum(np.maximum(center, sides[0]), sides[1])
        for each in self._arrays:
            lower, upper = (side[each.part] for side in sides)
            x[each.part] = each.proximal_point(center[each.part], alpha, lower, upper)

    def subgradient(
        self, x: np.ndarray, gradient: np.ndarray, dual: np.ndarray, sides: tuple[np.ndarray, np.ndarray]
    ) -> np.ndarray:
        found = gradient.copy()
        for each in self._arrays:
            lower, upper = (side[each.part] for side in sides)
            found[each.part] = each.subgradient(x[each.part], gradient[each.part], lower, upper)
        return found

    def snap(self, x: np.ndarray, before: np.ndarray, near: float) -> None:
        for each in self._arrays:
            each.snap(x[each.part], before[each.part], near)

    def at_reference(self, x: np.ndarray) -> AtReference | None:
        counts = [each.at_reference(x[each.part]) for each in self._arrays]
        is_zero = not any(each.has_reference for each in self._arrays)
        return GroupsAtReference(sum(here for here, _ in counts), sum(total for _, total in counts), is_zero)


class _Groups(TermOfArray):
    """The groups of one array: this rank's elements, flat, and sums over each group that is here."""

    def __init__(self, term: GroupL1, unknowns: Unknowns, mesh: Any) -> None:
        field = FieldOfTerm("GroupL1", term.name, unknowns, mesh)
        super().__init__(field)
        labels = _labels_along(term.axis, field) if term.axis is not None else _labels(term.groups, field)
        self._elements = np.flatnonzero(labels >= 0)
        # The numbers of the groups that are here, and to which of them each element belongs.
        self._numbers, self._group = np.unique(labels[self._elements], return_inverse=True)
        self.has_reference = term.reference is not None
        self._reference = field.values("reference", 0.0 if term.reference is None else term.reference)
        self._weights = _weights(term.weight, self._numbers)
        self._labels = labels
        self._is_counted = np.ones(len(self._numbers), bool)  # no rank before has elements of the group
        self._shared = np.zeros(0, np.int64)  # the places among all shared groups of those that are here
        self._shared_here = np.zeros(0, np.int64)
        self._all_shared = 0

    @property
    def elements(self) -> np.ndarray:
        weights = np.zeros(self._labels.size)
        weights[self._elements] = self._weights[self._group]
        return np.array([weights, self._reference, self._labels.astype(np.float64)])

    def begin(self) -> None:
        partition = self.field.partition()
        if partition is None or partition.ranks.size == 1:
            return
        self._ranks = partition.ranks
        by_rank = self._ranks.allgather_object(self._numbers)
        all_numbers, counts = np.unique(np.concatenate(by_rank), return_counts=True)
        shared = all_numbers[counts > 1]
        before = np.concatenate([self._numbers[:0], *by_rank[: self._ranks.rank]])
        self._is_counted = ~np.isin(self._numbers, before)
        self._shared_here = np.flatnonzero(np.isin(self._numbers, shared))
        self._shared = np.searchsorted(shared, self._numbers[self._shared_here])
        self._all_shared = len(shared)

    def _sums(self, numbers: np.ndarray) -> np.ndarray:
        """The sums of int64 numbers (elements, words) over each group that is here.  Collective."""
        found = np.zeros((len(self._numbers), numbers.shape[1]), np.int64)
        np.add.at(found, self._group, numbers)
        if self._all_shared:
            over_ranks = np.zeros((self._all_shared, numbers.shape[1]), np.int64)
            over_ranks[self._shared] = found[self._shared_here]
            self._ranks.all_reduce(over_ranks.reshape(-1), label="groups")
            found[self._shared_here] = over_ranks[self._shared]
        return found

    def _norms(self, values: np.ndarray) -> np.ndarray:
        """The 2-norm of each group that is here; sums are of whole numbers, the same in any order.  Collective."""
        tops = np.zeros(len(self._numbers))
        np.maximum.at(tops, self._group, np.where(np.isfinite(values), abs(values), math.inf))
        if self._all_shared:
            over_ranks = np.zeros(self._all_shared)
            over_ranks[self._shared] = tops[self._shared_here]
            self._ranks.all_reduce(over_ranks, op="max", label="groups")
            tops[self._shared_here] = over_ranks[self._shared]
        known = tops < math.inf
        exponents = np.frexp(np.where(known, tops, 1.0))[1]  # of each group: another one may be far larger
        rest = np.ldexp(np.where(known[self._group], values, 0.0), -exponents[self._group]) ** 2  # below 1
        words = []
        for _ in range(3):
            rest = np.ldexp(rest, _BITS)
            words.append(np.floor(rest))
            rest = rest - words[-1]
        sums = self._sums(np.stack(words, 1).astype(np.int64)).astype(np.float64)
        squares = np.ldexp(sums[:, 0], -_BITS) + (np.ldexp(sums[:, 1], -2 * _BITS) + np.ldexp(sums[:, 2], -3 * _BITS))
        return np.where(known, np.ldexp(np.sqrt(squares), exponents), math.inf)

    def _distances(self, x: np.ndarray) -> np.ndarray:
        return (x - self._reference)[self._elements]

    def value(self, x: np.ndarray) -> float:
        values = self._weights * self._norms(self._distances(x[self.part]))
        return sum_of_cells(self._ranks, values[self._is_counted])

    def proximal_point(self, center: np.ndarray, alpha: float, lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
        """A group has the direction of its center, shortened by weight / alpha, but where a side cuts it.

        With u the distances from the reference it is ``u = clip(a v)``, where the part a of v is that of its norm,
        ``|u| / (|u| + weight / alpha)``; it is found between two ends.
        """
        found = np.minimum(np.maximum(center, lower), upper)
        here, group = self._elements, self._group
        v, low, high = ((each - self._reference)[here] for each in (center, lower, upper))
        shrink = self._weights / alpha
        norms = self._norms(v)
        u = v * (np.maximum(norms - shrink, 0.0) / np.where(norms > 0, norms, 1.0))[group]
        if on_any(self._ranks, bool(((u < low) | (u > high)).any()), "groups"):
            u = self._between(u, v, shrink, low, high)
        found[here] = np.minimum(np.maximum(self._reference[here] + u, lower[here]), upper[here])
        return found

    def _between(
        self, u: np.ndarray, v: np.ndarray, shrink: np.ndarray, low: np.ndarray, high: np.ndarray
    ) -> np.ndarray:
        """The proximal point where sides cut groups."""
        group = self._group

        def at(part: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            """The point of these parts of v, and how much too large its norm is for them: less for larger parts."""
            point = np.minimum(np.maximum(v * part[group], low), high)
            return point, self._norms(point) / np.where(part > 0, part, 1.0) * (1 - part) - shrink

        excess = self._norms(_not_held(v, low, high)) - shrink  # at the part 0
        least, most = (self._norms(np.minimum(np.maximum(each, low), high)) for each in (np.zeros_like(v), v))
        zero = (excess <= 0) & (least == 0)
        part, above = (norms / np.where(norms > 0, norms + shrink, 1.0) for norms in (least, most))
        excess = np.where(part > 0, at(part)[1], excess)
        u, lack = at(above)
        for k in range(_ROUNDS):  # false position, which is halved where one end stays, and each third time bisection
            is_open = ~zero & (lack < 0) & (excess > 0) & (above - part > _CONVERGED * above)
            if not on_any(self._ranks, bool(is_open.any()), "groups"):
                break
            share = 0.5 if k % 3 == 2 else excess / np.where(is_open, excess - lack, 1.0)
            middle = np.where(is_open, part + share * (above - part), above)
            point, left = at(middle)
            left = np.where(abs(left) <= _CONVERGED * shrink, 0.0, left)  # as small as rounding lets it be
            is_above, is_below = is_open & (left <= 0), is_open & (left > 0)
            u = np.where(is_above[group], point, u)
            above, lack = np.where(is_above, middle, above), np.where(is_above, left, 0.5 * lack)
            part, excess = np.where(is_below, middle, part), np.where(is_below, left, 0.5 * excess)
        return np.where(zero[group], 0.0, u)

    def subgradient(self, x: np.ndarray, gradient: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
        """Of least norm: where a group is at its reference, what the weight leaves of the gradient."""
        found, here, group = gradient.copy(), self._elements, self._group
        u, slope = self._distances(x), gradient[here]
        norms = self._norms(u)
        moving = _not_held(-slope, (lower - x)[here], (upper - x)[here])
        sizes = self._norms(moving)
        left = np.maximum(1.0 - self._weights / np.where(sizes > 0, sizes, 1.0), 0.0)
        of_norm = u * (self._weights / np.where(norms > 0, norms, 1.0))[group]
        found[here] = np.where((norms > 0)[group], slope + of_norm, left[group] * slope)
        return found

    def snap(self, x: np.ndarray, before: np.ndarray, near: float) -> None:
        here, reference = self._elements, self._reference[self._elements]
        close = abs(x[here] - reference) <= near * (abs(before[here] - reference) + abs(reference))
        x[here] = np.where(close, reference, x[here])

    def at_reference(self, x: np.ndarray) -> tuple[int, int]:
        """How many groups are at their reference, of those with a weight, over all ranks.  Collective."""
        off = self._sums((self._distances(x) != 0).astype(np.int64)[:, None])[:, 0]
        counted = self._is_counted & (self._weights > 0)
        numbers = np.array([(counted & (off == 0)).sum(), counted.sum()], np.int64)
        self._ranks.all_reduce(numbers, label="groups")
        return int(numbers[0]), int(numbers[1])


def _not_held(step: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """A step from 0, without what leads out of the sides."""
    return np.where(((step > 0) & (high <= 0)) | ((step < 0) & (low >= 0)), 0.0, step)


def _labels(groups: Any, field: FieldOfTerm) -> np.ndarray:
    """The numbers of the groups of this rank's elements, as the user gives them."""
    try:
        found = np.asarray(groups)
    except ValueError:  # lists of different lengths
        found = np.zeros(1)
    if found.dtype.kind not in "iu" and found.size:
        raise TypeError(f"GroupL1: groups={shown(groups)} must be whole numbers")
    if found.shape not in (field.local_shape, (field.size,)):
        raise ValueError(f"GroupL1: groups have the shape {found.shape}, but the array {field.local_shape}")
    if found.size and found.min() < -1:
        raise ValueError(f"GroupL1: the number {found.min()} of a group must be at least 0, or -1 for none")
    if found.size and found.max() > np.iinfo(np.int64).max:
        raise ValueError(f"GroupL1: the number {found.max()} of a group must be below 2**63")
    return found.reshape(-1).astype(np.int64)


def _labels_along(axes: Any, field: FieldOfTerm) -> np.ndarray:
    """The numbers of groups along these dimensions: those of the other ones in the whole array."""
    dimensions = len(field.shape)
    if any(not -dimensions <= axis < dimensions for axis in axes):
        raise ValueError(f"GroupL1: axis={axes}, but the array has the shape {field.shape}")
    along = {axis % dimensions for axis in axes}
    labels = np.zeros(box_shape(field.box), np.int64)
    for dim, ((start, stop), extent) in enumerate(zip(field.box, field.shape, strict=True)):
        if dim not in along:
            place = np.arange(start, stop).reshape([-1 if each == dim else 1 for each in range(dimensions)])
            labels = labels * extent + place
    return labels.reshape(-1)


def _weights(weight: Any, numbers: np.ndarray) -> np.ndarray:
    """The weights of the groups with these numbers."""
    try:
        found = np.asarray(weight)
        if found.dtype.kind == "c":
            raise TypeError
        given = found.astype(np.float64).reshape(-1)
    except (TypeError, ValueError):
        raise TypeError(f"GroupL1: weight={shown(weight)} must be a number or an array of real ones") from None
    if np.ndim(weight) == 0:
        return np.full(len(numbers), given[0])
    if len(numbers) and numbers[-1] >= given.size:
        raise ValueError(f"GroupL1: there are {given.size} weights, and none for the group {numbers[-1]}")
    wrong = ~((given >= 0) & np.isfinite(given))
    if wrong.any():
        raise ValueError(f"GroupL1: the weight {given[wrong][0]:g} must be finite and not negative")
    return given[numbers]
