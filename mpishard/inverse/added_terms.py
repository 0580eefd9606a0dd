"""Functions with terms that regularise: each term counts once, whatever samples and ranks there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from numbers import Real
from typing import Any

import numpy as np

from mpishard.arguments import shown
from mpishard.comm.axis import Axis
from mpishard.comm.errors import OneRank, raised_on_all
from mpishard.comm.mesh import Mesh
from mpishard.inverse.functions import TERMS, AddedTerms, pair_of, world_of
from mpishard.inverse.nonsmooth import NonsmoothTerm
from mpishard.inverse.priors import Prior
from mpishard.inverse.regularization import RegularizationTerm, check_shape
from mpishard.inverse.stencils import sum_of_cells
from mpishard.inverse.unknowns import Unknowns, has_names
from mpishard.layout.tensors import ParameterSpec

Array = Any

_WHY = "as regularized adds terms to both"


def regularized(
    function: Callable[..., Any],
    terms: RegularizationTerm | NonsmoothTerm | Prior | Sequence[RegularizationTerm | NonsmoothTerm | Prior],
    *,
    mesh: Mesh | None = None,
    reduction: str | None = None,
) -> Callable[..., Any]:
    """A function with terms added, of which each counts once, however many samples and ranks there are.

    The function that it returns is collective where a term is.  With an `L1`, `TotalVariation` or
    `GroupL1` term, which has no gradient, it is for `minimize`, which hands the term to its method; whoever calls it
    gets a TypeError.  A `Prior` adds ``(x - mean)' R (x - mean) / 2`` of its precision R, so that the minimum is that
    of the posterior.

    Parameters
    ----------
    function : callable
        As `minimize` takes it, ``function(x)`` or ``function(x, samples)``; or as an OptimizationProblem does,
        ``function(parameters, samples, gradients) -> loss``: to the loss and gradient of each sample every term is
        added, so that the mean over samples has it once, along with them in every order.
    terms : RegularizationTerm, L1, TotalVariation, GroupL1, Prior or sequence of them
        What is added; of those without a gradient one kind.  A prior is of all of `x`, and for `minimize` alone; where
        ranks share the field it needs `mesh`, and a `BiLaplacianPrior` to know how the field is cut:
        ``prior.on(start, mesh)``.
    mesh : Mesh, optional
        The mesh of `minimize`: for ``reduction="sum"``, and for fields of a FlatParameters that are cut over its tensor
        axis, unless the term has a mesh, a `partition` or an `exchange`.  Then making the function is collective over
        this axis, if a term has an array of weights.
    reduction : {None, "sum"}
        That of `minimize`: with ``"sum"`` one data rank adds the terms, with `samples` that of the first one.

    Returns
    -------
    callable
        Of the form of `function`.

    Raises
    ------
    TypeError, ValueError
        If an argument is invalid, or a term has another mesh.  The function raises ValueError where a term does not fit
        the way in which its field is cut.

    Notes
    -----
    `minimize` takes the sum of a function over its N samples, and a term is added to the sum; an OptimizationProblem
    takes the mean, and a term is added to the mean.  The minimum is the same if the weight in `minimize` is N times
    that in the problem.

    Of an `x0` that is an array of several dimensions functions get flat points: `minimize`, `augmented_lagrangian` and
    `check_gradient` then give its shape to terms without ``shape=``.

    Examples
    --------
    >>> import numpy as np
    >>> from mpishard import Tikhonov
    >>> fun = regularized(lambda x: (0.0, np.zeros(3)), Tikhonov(weight=2.0))
    >>> fun(np.array([0.0, 1.0, 3.0]))
    (5.0, array([-2., -2.,  4.]))
    """
    chosen = list(terms) if isinstance(terms, Sequence) else [terms]
    known = RegularizationTerm | NonsmoothTerm | Prior
    if not callable(function) or not all(isinstance(term, known) for term in chosen):
        raise TypeError(f"regularized needs a function and terms, got {shown(function)} and {shown(terms)}")
    if reduction not in (None, "sum") or (reduction == "sum" and mesh is None):
        raise ValueError(f'reduction={shown(reduction)} must be None, or "sum" with a mesh')
    world_of(mesh)  # raises TypeError for what is no mesh
    nonsmooth = tuple(term for term in chosen if isinstance(term, NonsmoothTerm))
    smooth = [term for term in chosen if isinstance(term, RegularizationTerm)]
    priors = [term for term in chosen if isinstance(term, Prior)]
    inner = getattr(function, TERMS, None)
    if inner is not None and inner.nonsmooth:
        function, nonsmooth = inner.smooth, (*inner.nonsmooth, *nonsmooth)
    for term in smooth:
        if mesh is not None and term.mesh is not None and term.mesh.tensor.size != mesh.tensor.size:
            raise ValueError(
                f"{type(term).__name__} has the mesh {term.mesh.sizes}, and regularized {mesh.sizes}; "
                "leave mesh= out of the term"
            )
    summed = mesh is not None and reduction == "sum"
    pairs = [(term, _over(term, mesh)) for term in smooth]

    def for_minimize(x: Any, *samples: np.ndarray) -> tuple[float, Any]:
        # The terms come with the first sample, or of parts of a sum with the first data rank.
        if 0 not in samples[0] if samples else mesh is not None and summed and mesh.data.rank:
            return pair_of(function(x, *samples), _WHY)
        # A copy, unless x has names: the function may change the point that it is given.  A rank may have no values.
        unknowns = Unknowns(x, may_be_empty=True)
        fitting = [_fitting(x, *pair) for pair in pairs]
        of_priors = _sharing(x, mesh) if priors else OneRank()
        sharing = [*(term._axis for term in fitting), of_priors]
        # Of ranks that share a field none may wait in a term for one where the function has failed.
        with raised_on_all(next((ranks for ranks in sharing if ranks.size > 1), None)):
            value, given = pair_of(function(x, *samples), _WHY)
            gradient = unknowns.vector("the gradient", given).copy()
        for term in fitting:
            field, start = _array_and_start(unknowns, x, term)
            added, slope = term.value_and_gradient(field)
            # Every tensor rank has the value of the whole field, unless there is an exchange.
            if not (summed and term.exchange is None and _tensor_rank(x, term)):
                value = value + added
            if not (summed and _is_partial(x, term) and _tensor_rank(x, term)):
                gradient[start : start + slope.size] += slope.reshape(-1)
        for prior in priors:
            added, slope = _of_prior(prior, x, unknowns, of_priors)
            gradient += slope
            if not (summed and (x.place.tensor_rank if has_names(x) else of_priors.rank)):
                value = value + added
        return value, unknowns.like_x0(gradient)

    def for_problem(x: Any, samples: np.ndarray, gradients: Any) -> float:
        if summed:
            raise ValueError(
                'reduction="sum" is for minimize; each data rank adds the terms to its samples of an '
                "OptimizationProblem, so leave it out of regularized"
            )
        if priors:
            raise ValueError(
                "a prior is a term for minimize, which takes the sum of the samples; an OptimizationProblem takes the "
                "mean: add the prior by hand, divided by the number of samples"
            )
        loss = function(x, samples, gradients)
        for pair in pairs:
            term = _fitting(x, *pair)
            if not (len(samples) or term.mesh is not None):
                continue
            added, slope = term.value_and_gradient(_tensor(x, term))
            if len(samples) and has_names(x):
                if not (_is_partial(x, term) and _tensor_rank(x, term)):
                    gradients[_name(x, term)] += len(samples) * slope
            elif len(samples):
                gradients += len(samples) * slope
            loss = loss + len(samples) * added
        return loss

    def with_terms(x: Any, *rest: Any) -> Any:
        return for_minimize(x, *rest) if len(rest) < 2 else for_problem(x, *rest)

    def for_minimize_alone(x: Any, *rest: Any) -> Any:
        kinds = {type(term).__name__ for term in nonsmooth}
        loops = (
            "; in a loop of your own, or in an OptimizationProblem, give the method the term, "
            "mpishard.LBFGSB(l1=(weight, reference)), and the function without it"
        )
        raise TypeError(
            f"a function with {'an L1' if kinds == {'L1'} else ' and '.join(kinds)} term has no gradient where it has "
            f"its kinks: give it to mpishard.minimize{loops * (kinds == {'L1'})}"
        )

    def smooth_of_shape(shape: tuple[int, ...]) -> Callable[..., Any]:
        for term in smooth:
            if term.shape is not None and prod(term.shape) == prod(shape):
                check_shape(type(term).__name__, term.shape, shape)
        inside = function if inner is None else inner.smooth_of_shape(shape)
        shaped = [replace(term, shape=shape) if term.shape is None else term for term in smooth]
        return regularized(inside, [*shaped, *priors], mesh=mesh, reduction=reduction) if shaped or priors else inside

    found = for_minimize_alone if nonsmooth else with_terms
    added = (*smooth, *priors, *(() if inner is None else inner.added))
    without_kinks = with_terms if smooth or priors else function
    setattr(found, TERMS, AddedTerms(reduction, without_kinks, added, nonsmooth, smooth_of_shape))
    return found


def _sharing(x: Any, mesh: Mesh | None) -> Axis | OneRank:
    """The ranks that share the unknowns of a prior; ValueError if that is not known, or differs between tensors."""
    if not has_names(x):  # on a mesh that cuts them they are a part of a Partition
        return OneRank() if mesh is None else mesh.tensor
    size = x.place.tensor_size
    is_cut = size > 1 and any(spec.is_split for spec in x.specs)
    if is_cut and (mesh is None or mesh.tensor.size != size):
        raise ValueError(f"x0 is cut over {size} tensor ranks: give regularized with a prior their mesh=")
    if size > 1 and any(spec.partial or spec.is_split != is_cut for spec in x.specs):
        raise ValueError(
            f"a prior is of all tensors of x0, of which ranks share some, and others are whole on all {size} tensor "
            "ranks: cut all of them, or none"
        )
    return mesh.tensor if is_cut and mesh is not None else OneRank()


def _of_prior(prior: Prior, x: Any, unknowns: Unknowns, ranks: Axis | OneRank) -> tuple[float, Array]:
    """Half of the square of the distance from the mean of a prior, in its precision, and the gradient, flat."""
    mean = 0.0 if prior.mean is None else prior.mean
    away = unknowns.flat - (mean if isinstance(mean, Real) else unknowns.vector("prior.mean", mean))
    like_x = unknowns.like_x0(away) if unknowns.tree or has_names(x) else away.reshape(np.shape(x))
    slope = unknowns.vector("the result of prior.precision", prior.precision(like_x))
    return 0.5 * sum_of_cells(ranks, away.astype(np.float64) * slope), slope


def _over(term: RegularizationTerm, mesh: Mesh | None) -> RegularizationTerm:
    """The term for a field that is cut over the tensor axis of the mesh, unless it says itself how it is cut."""
    known = mesh is None or any(each is not None for each in (term.mesh, term.partition, term.exchange))
    return term if known else replace(term, mesh=mesh)


def _fitting(x: Any, term: RegularizationTerm, on_mesh: RegularizationTerm) -> RegularizationTerm:
    """The term for a whole field, or `on_mesh` for one that is cut over tensor ranks; ValueError if it does not fit."""
    if not has_names(x):
        shared = on_mesh.mesh is not None and on_mesh.mesh.tensor.size > 1 and term.exchange is None
        if shared and term.halo:
            raise ValueError(
                f"{type(term).__name__} takes differences, and those across the cuts of a Partition would be missing; "
                "give it partition="
            )
        return on_mesh if shared else term
    if x.place.tensor_size == 1:
        return term
    spec, place, kind = _spec(x, term), x.place, type(term).__name__
    mesh = on_mesh.mesh
    if mesh is not None and (mesh.tensor.size, mesh.tensor.rank) != (place.tensor_size, place.tensor_rank):
        raise ValueError(f"{kind} has the mesh {mesh.sizes}, but x0 is cut over {place.tensor_size} tensor ranks")
    if spec.tensor_dim is None:
        if term.mesh is not None:
            raise ValueError(
                f"{kind} has a mesh, but {spec.name!r} is whole on all tensor ranks; leave mesh= out of it"
            )
        return term
    if mesh is None and term.exchange is None:
        raise ValueError(
            f"{spec.name!r} is cut over {place.tensor_size} tensor ranks, and {kind} has no mesh, so it would miss the "
            "differences across the cuts; give mesh= to regularized, or to the term"
        )
    if spec.tensor_dim and term.halo:
        raise ValueError(
            f"{spec.name!r} is cut along dimension {spec.tensor_dim}, but {kind} takes slabs along dimension 0; give "
            "its ParameterSpec tensor_dim=0"
        )
    return on_mesh


def _tensor_rank(x: Any, term: RegularizationTerm) -> int:
    """The tensor rank that has this field; 0 if that is not known."""
    if has_names(x):
        return int(x.place.tensor_rank)
    return term._axis.rank


def _is_partial(x: Any, term: RegularizationTerm) -> bool:
    """Return True if the gradient of this field is summed over tensor ranks."""
    return has_names(x) and _spec(x, term).partial


def _spec(x: Any, term: RegularizationTerm) -> ParameterSpec:
    """What all ranks know of the field of a term in parameters with names."""
    name, specs = _name(x, term), {spec.name: spec for spec in x.local}
    if name not in specs:
        raise ValueError(f"{type(term).__name__}: x0 has no array {name!r}; there are {', '.join(specs)}")
    found: ParameterSpec = specs[name]
    return found


def _array_and_start(unknowns: Unknowns, x: Any, term: RegularizationTerm) -> tuple[Array, int]:
    """The array of a term, and its place in a flat gradient."""
    tree = unknowns.tree
    if tree is None:
        values = x if has_names(x) else unknowns.flat.reshape(np.shape(x))
        return _tensor(values, term), x.layout.piece_of[_name(x, term)].start if has_names(x) else 0
    leaves = {leaf.name: leaf for leaf in tree.leaves}
    name = _name(leaves, term)
    if name not in leaves:
        raise ValueError(f"{type(term).__name__}: x0 has no array {name!r}; there are {', '.join(leaves)}")
    leaf = leaves[name]
    leaf.expect_real(type(term).__name__)
    return unknowns.flat[leaf.start : leaf.start + leaf.size].reshape(leaf.shape), leaf.start


def _tensor(x: Any, term: RegularizationTerm) -> Array:
    if has_names(x):
        return x[_name(x, term)]
    if term.name is not None:
        raise ValueError(f"{type(term).__name__}: x0 is one array without names, and name={term.name!r}; leave it out")
    return x


def _name(x: Any, term: RegularizationTerm) -> str:
    if term.name is None and len(x) != 1:
        raise ValueError(f"there are {len(x)} tensors; give {type(term).__name__} the name of one of them, name=...")
    return term.name if term.name is not None else next(iter(x))
