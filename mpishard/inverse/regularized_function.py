"""Functions with terms that regularise: each term counts once, whatever samples and ranks there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpishard.arguments import shown
from mpishard.comm.mesh import Mesh
from mpishard.inverse.regularization import RegularizationTerm
from mpishard.inverse.unknowns import Unknowns, has_names

Array = Any


def regularized(
    function: Callable[..., Any],
    terms: RegularizationTerm | Sequence[RegularizationTerm],
    *,
    mesh: Mesh | None = None,
    reduction: str | None = None,
) -> Callable[..., Any]:
    """A function with terms added, of which each counts once, however many samples and ranks there are.

    Not collective; the function that it returns is, where a term is.

    Parameters
    ----------
    function : callable
        As `minimize` takes it, ``function(x)`` or ``function(x, samples)``; or as an OptimizationProblem does,
        ``function(parameters, samples, gradients) -> loss``: to the loss and gradient of each sample every term is
        added, so that the mean over samples has it once, along with them in every order.
    terms : RegularizationTerm or sequence of them
        What is added.
    mesh : Mesh, optional
        With ``reduction="sum"``: the mesh of `minimize`.
    reduction : {None, "sum"}
        As for `minimize`: with ``"sum"`` one data rank adds the terms.

    Returns
    -------
    callable
        Of the form of `function`.

    Raises
    ------
    TypeError, ValueError
        If an argument is invalid.

    Examples
    --------
    >>> import numpy as np
    >>> from mpishard import Tikhonov
    >>> fun = regularized(lambda x: (0.0, np.zeros(3)), Tikhonov(weight=2.0))
    >>> fun(np.array([0.0, 1.0, 3.0]))
    (5.0, array([-2., -2.,  4.]))
    """
    chosen = list(terms) if isinstance(terms, Sequence) else [terms]
    if not callable(function) or not all(isinstance(term, RegularizationTerm) for term in chosen):
        raise TypeError(f"regularized needs a function and terms, got {shown(function)} and {shown(terms)}")
    if reduction not in (None, "sum") or (reduction == "sum" and mesh is None):
        raise ValueError(f'reduction={shown(reduction)} must be None, or "sum" with a mesh')
    summed = mesh is not None and reduction == "sum"
    if summed and mesh is not None and mesh.data.rank:
        return function

    def plain(x: Any, *samples: np.ndarray) -> tuple[float, Any]:
        value, given = function(x, *samples)
        if samples and 0 not in samples[0]:
            return value, given
        unknowns = Unknowns(x)
        gradient = unknowns.vector("the gradient", given).copy()
        for term in chosen:
            added, slope = term.value_and_gradient(_tensor(x, term))
            # On a mesh every tensor rank has the value of the whole field.
            if not (summed and term.mesh is not None and term.mesh.tensor.rank):
                value = value + added
            start = x.layout.piece_of[_name(x, term)].start if has_names(x) else 0
            gradient[start : start + slope.size] += slope.reshape(-1)
        return value, gradient

    def of_samples(x: Any, samples: np.ndarray, gradients: Any) -> float:
        loss = function(x, samples, gradients)
        for term in chosen:
            if not (len(samples) or term.mesh is not None):
                continue
            added, slope = term.value_and_gradient(_tensor(x, term))
            if len(samples) and has_names(x):
                gradients[_name(x, term)] += len(samples) * slope
            elif len(samples):
                gradients += len(samples) * slope
            loss = loss + len(samples) * added
        return loss

    def with_terms(x: Any, *rest: Any) -> Any:
        return plain(x, *rest) if len(rest) < 2 else of_samples(x, *rest)

    return with_terms


def _tensor(x: Any, term: RegularizationTerm) -> Array:
    return x[_name(x, term)] if has_names(x) else x


def _name(x: Any, term: RegularizationTerm) -> str:
    if term.name is None and len(x) != 1:
        raise ValueError(f"there are {len(x)} tensors; give {type(term).__name__} the name of one of them, name=...")
    return term.name if term.name is not None else next(iter(x))
