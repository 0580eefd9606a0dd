"""The terms without a gradient, which the method of `minimize` takes: which go together, and as which options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpishard.comm.agreement import text_of
from mpishard.inverse.group_norms import GroupL1, GroupNorms
from mpishard.inverse.l1 import L1, l1_option
from mpishard.inverse.total_variation import TotalVariation, TotalVariations
from mpishard.inverse.unknowns import Unknowns

NonsmoothTerm = L1 | TotalVariation | GroupL1
_PENALTIES: dict[type, Any] = {TotalVariation: TotalVariations, GroupL1: GroupNorms}


def options_of_terms(
    terms: Sequence[NonsmoothTerm], unknowns: Unknowns, mesh: Any, is_elastic: bool
) -> tuple[dict[str, Any], str]:
    """The option ``l1`` or ``penalty`` of a method that has these terms, and what all ranks must have alike of them.

    Raises TypeError or ValueError if a term does not fit the unknowns or the others.
    """
    kinds = list(dict.fromkeys(type(term) for term in terms))
    if len(kinds) > 1:
        names = " and ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"one function has terms {names}: of those without a gradient it may have one kind")
    forms = (f"{type(term).__name__}{' with a reference' * (term.reference is not None)}" for term in terms)
    if kinds[0] is L1:
        return {"l1": l1_option([term for term in terms if isinstance(term, L1)], unknowns)}, ", ".join(forms)
    penalty = _PENALTIES[kinds[0]](terms, unknowns, mesh)
    if is_elastic and penalty.is_cut:
        raise ValueError(f"{penalty.kinds} of a Partition is for ranks that stay: leave elastic= and samples= out")
    return {"penalty": penalty}, ", ".join(forms) if penalty.is_cut else text_of(terms)
