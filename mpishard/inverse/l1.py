"""The L1 term, which has no gradient where elements are at their reference: the method itself minimises it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import numpy as np

from mpishard.backend import array as arrays
from mpishard.inverse.nonsmooth import NonsmoothTerm, forms_of
from mpishard.inverse.unknowns import Unknowns
from mpishard.layout.tensors import ParameterSpec
from mpishard.minimizers.elements import OfThisRank, element_name, elements_of_l1, whole_elements

Array = Any


@dataclass(frozen=True)
class L1(NonsmoothTerm):
    """The sum over elements of ``weight |x - reference|``, exactly: at the minimum many elements are at the reference.

    It has no gradient there, so that it is a term for `minimize` by L-BFGS-B, which moves in one orthant an iteration
    (Andrew and Gao, 2007): see `LBFGSB`.  Elements that end at their reference, 0 by default, have its very bits.

    Parameters
    ----------
    weight : float, array, mapping, or list or tuple of these
        Finite and not negative: one number, an array of the shape of `x0` or flat, or by tensor name, of tensors that
        are not named 0; for an `x0` that is a tree, in its structure.  For an `x0` that is cut over ranks, arrays are
        of this rank's part.
    reference : float, array, mapping, or list or tuple of these, optional
        Finite, likewise.  Default: 0.
    mask : array of bool, mapping, or list or tuple of these, optional
        True for elements that count, likewise.  Default: all.

    Raises
    ------
    TypeError, ValueError
        If a number is invalid; arrays are checked by `minimize`, which has `x0`, on all ranks.

    Notes
    -----
    The weight is that of each element: an integral over a grid has the volume of a cell in it.  Several terms add up;
    an element has one reference.

    Examples
    --------
    >>> import numpy as np
    >>> import mpishard
    >>> goal = np.array([3.0, 0.5, -2.0])
    >>> def misfit(x):
    ...     return 0.5 * ((x - goal) ** 2).sum(), x - goal
    >>> mpishard.minimize(mpishard.regularized(misfit, mpishard.L1(1.0)), np.zeros(3)).x
    array([ 2.,  0., -1.])
    """

    _: KW_ONLY
    mask: Any = None
    _containers: ClassVar[tuple[type, ...]] = (list, tuple, Mapping)

    def value(self, x: Any) -> float:
        """The value at a point, on this process alone.

        Parameters
        ----------
        x : array, FlatParameters, or dict, list or tuple of arrays
            As the `x0` of `minimize`, or this rank's part of it.

        Returns
        -------
        float
            Of the elements of `x`.

        Raises
        ------
        TypeError, ValueError
            If arrays do not fit `x`.
        """
        unknowns = Unknowns(x, may_be_empty=True)
        weights, reference = _elements([self], unknowns)
        distances = abs(arrays.to_host(unknowns.given) - (0.0 if reference is None else reference))
        return float((weights * distances).sum())

    @classmethod
    def _options(cls, terms: Sequence[Any], unknowns: Unknowns, mesh: Any) -> tuple[dict[str, Any], str]:
        option: Any = _elements(terms, unknowns)
        if unknowns.is_split or unknowns.is_cut_by_application:
            option = OfThisRank(option, _specs(unknowns), unknowns.arranged)
        return {"l1": option}, forms_of(terms)


def _specs(unknowns: Unknowns) -> Sequence[ParameterSpec]:
    """The tensors of whose elements terms have arrays: those of this rank."""
    named = unknowns.parameters
    if named is None or unknowns.is_cut_by_application:
        return unknowns.option_specs
    return [ParameterSpec(piece.name, piece.shape) for piece in named.pieces]


def _elements(terms: Sequence[L1], unknowns: Unknowns) -> tuple[np.ndarray, np.ndarray | None]:
    """The weights of this rank's elements, and their references, None if no term has any."""
    tree, specs, dtype = unknowns.tree, _specs(unknowns), unknowns.flat.dtype

    def given(name: str, option: Any) -> Any:
        if tree is not None:
            return tree.by_name(f"L1: {name}", option)
        if isinstance(option, Mapping):  # tensors of other ranks have no elements here
            others = {spec.name for spec in unknowns.specs} - {spec.name for spec in specs}
            return {tensor: value for tensor, value in option.items() if tensor not in others}
        return option

    total, references = np.zeros(sum(spec.size for spec in specs), dtype), None
    for term in terms:
        pair = given("weight", term.weight), given("reference", term.reference)
        weights, reference = elements_of_l1("L1", *pair, specs, dtype)
        mask = whole_elements("L1: the elements of mask", given("mask", term.mask), specs, np.dtype(bool), missing=True)
        weights = weights if mask is None else weights * mask
        if reference is not None or references is not None:
            reference = np.zeros_like(total) if reference is None else reference
            references = np.zeros_like(total) if references is None else references
            apart = np.flatnonzero((total > 0) & (weights > 0) & (references != reference))
            if len(apart):
                first = int(apart[0])
                raise ValueError(
                    f"L1 terms have two references of {element_name(first, specs)}, {references[first]:g} and "
                    f"{reference[first]:g}: give one, or a mask to each term"
                )
            references = np.where(weights > 0, reference, references)
        total = total + weights
    for leaf in () if tree is None else tree.leaves:
        if total[leaf.start : leaf.start + leaf.size].any():
            leaf.expect_real("L1")
    return total, references
