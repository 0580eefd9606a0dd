"""`laplace`: the Gaussian posterior around a minimum, from products with the Hessian of the misfit and a prior."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishard.arguments import shown
from mpishard.backend import array as arrays
from mpishard.backend.random import normal_at
from mpishard.comm.errors import raised_on_all
from mpishard.inverse.functions import Callback, Functions, opening, world_of
from mpishard.inverse.minimization import solve
from mpishard.inverse.posterior import LaplacePosterior
from mpishard.inverse.priors import Prior, numbers_of
from mpishard.inverse.result import LoopOptions
from mpishard.inverse.run_arguments import RunArguments
from mpishard.inverse.unknowns import Unknowns
from mpishard.minimizers.double_pass import DoublePass
from mpishard.minimizers.elements import applied
from mpishard.minimizers.method import RieszMap

if TYPE_CHECKING:
    from mpishard.checkpoint import Checkpoints
    from mpishard.comm.mesh import Mesh
    from mpishard.record import RunRecord

Array = Any
_APART = 1e-3  # of the norms of one vector on two ranks, relatively, whose solvers and processors may differ


def laplace(
    result: Any,
    hessp: Callable[..., Any],
    prior: Prior,
    args: Any = (),
    *,
    rank: int = 100,
    oversampling: int = 10,
    power_iterations: int = 0,
    seed: int = 0,
    mesh: Mesh | None = None,
    reduction: str | None = None,
    samples: int | None = None,
    elastic: bool | Mapping[str, Any] = False,
    checkpoints: Checkpoints | None = None,
    resume: bool = False,
    record: RunRecord | None = None,
) -> LaplacePosterior:
    """The Laplace approximation of the posterior: the Gaussian around a minimum, with the inverse Hessian there.

    The Hessian is that of the misfit, H, and the precision of the prior, R.  Data inform few directions as a rule: the
    posterior is the prior, corrected in the span of the `rank` dominant eigenvectors of ``H u = lambda R u``.  They
    come from ``(2 + power_iterations) * (rank + oversampling)`` products with H by a randomised double pass; fewer if H
    has a lower rank.

    With a mesh it is collective: all ranks call it, each keeps its part of the eigenvectors, and the posterior has the
    same bits on any number of ranks.  Without one it uses no MPI.

    Parameters
    ----------
    result : OptimizeResult, or as `x0` of `minimize`
        The result of a minimisation, or the minimum itself; a FlatParameters keeps its values.  Where the start was a
        `Partition`, give another one with the values of the result: ``Partition(result.x, mesh, ...)``.
    hessp : callable
        ``hessp(x, direction, *args)``: the Hessian of the misfit at x, without the prior, times a direction; or its
        Gauss-Newton matrix, which has no negative eigenvalues.  The misfit is the negative logarithm of the likelihood:
        divide residuals by the standard deviations of the data.
    prior : Prior
        `DiagonalPrior`, `BiLaplacianPrior`, `OperatorPrior`, or a prior of your own.
    args : tuple
        Further arguments of `hessp`.
    rank : int
        The most eigenpairs that are kept, at most the number of unknowns.  Where the last eigenvalue that is kept is
        far below 1, a larger rank changes little.
    oversampling : int
        Further directions, which make the last eigenpairs accurate.
    power_iterations : int
        How often the directions are multiplied again, each by one more product.  Without, eigenvalues are too small
        where `rank` cuts a spectrum that falls slowly.
    seed : int
        Of the random directions.
    mesh : Mesh, optional
        The ranks that compute together.
    reduction : {None, "sum"}
        As for `minimize`: None if each rank returns the whole product, ``"sum"`` if its part.
    samples : int, optional
        As for `minimize`, with `elastic`: ``hessp(x, direction, samples, *args)`` returns the product of these terms of
        the misfit, which are dealt out to the ranks.
    elastic : bool or mapping
        As for `minimize`: the run outlives its ranks.
    checkpoints : Checkpoints, optional
        With a mesh: save there after every N products, and at the end.
    resume : bool
        Continue from the newest checkpoint there with the next product, on any number of ranks; or, where that run had
        ended, make the posterior again without any.
    record : RunRecord, optional
        With a mesh: a step for each product.

    Returns
    -------
    LaplacePosterior
        Printed it is a table of the eigenvalues, of where they were cut and of what is left.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid, or `hessp` returns something else; if the sum of H and R is not positive definite, so
        that there is no minimum; if R is not symmetric, or not the inverse of the prior's solve and of L L', as far as
        random vectors show it; or if ranks that have the same unknowns have another prior; on a mesh on all ranks.
    KeyboardInterrupt
        After Ctrl-C on a mesh, on all ranks, when the product under way is saved.
    Exception
        What `hessp` or the prior raises, on a mesh on all ranks.

    References
    ----------
    N. Halko, P. G. Martinsson, J. A. Tropp: Finding structure with randomness.  SIAM Review 53, 217-288 (2011).
    A. K. Saibaba, J. Lee, P. K. Kitanidis: Randomized algorithms for generalized Hermitian eigenvalue problems with
    application to computing Karhunen-Loève expansion.  Numerical Linear Algebra with Applications 23, 314-339 (2016).
    U. Villa, N. Petra, O. Ghattas: hIPPYlib.  ACM Transactions on Mathematical Software 47, 16 (2021).

    Examples
    --------
    Three unknowns, of which the data say something of the first two:

    >>> import numpy as np
    >>> from mpishard import DiagonalPrior, laplace
    >>> rows = np.array([[1.0, 0.0, 0.0], [0.0, 3.0, 0.0]])
    >>> posterior = laplace(np.zeros(3), lambda x, v: rows.T @ (rows @ v), DiagonalPrior(1.0))
    >>> posterior.eigenvalues.round(6), posterior.variance().round(6)
    (array([9., 1.]), array([0.5, 0.1, 1. ]))
    """
    with opening(mesh, "laplace") as same:
        if not callable(hessp):
            raise TypeError(f"hessp={shown(hessp)} must be a function of a point and a direction")
        if not isinstance(prior, Prior):
            raise TypeError(f"prior={shown(prior)} must be a Prior, such as DiagonalPrior(variance)")
        x = result.x if hasattr(result, "x") else result
        if x is None:
            raise TypeError("result=None must be the result of minimize, or the minimum itself, as x0 of minimize")
        unknowns = Unknowns(x)
        run = RunArguments.checked(unknowns, mesh, reduction, samples, elastic, checkpoints, resume, record)
        options = DoublePass(rank=rank, oversampling=oversampling, power_iterations=power_iterations, seed=seed)
        same |= {"reduction": reduction, "samples": samples, "elastic": elastic}
        same |= {"prior": type(prior), "prior.factor": prior.has_factor}
        same |= {"rank": options.rank, "oversampling": options.oversampling, "seed": options.seed}
        same["power_iterations"] = options.power_iterations
        same |= run.files_given()
        same["x0"] = f"{unknowns.total} elements, {'cut' if unknowns.is_split else 'whole'}"
        if not unknowns.is_split:
            same |= numbers_of(prior)
    with raised_on_all(world_of(mesh)):
        prior = prior.on(x, mesh)
        mean = prior.mean  # checked before the products, which may take hours
        if mean is not None:
            mean = mean if isinstance(mean, Real) else unknowns.vector("prior.mean", mean)
            if not np.isfinite(arrays.to_host(mean)).all():
                raise ValueError("prior.mean has elements that are NaN or infinite: give finite numbers")
    functions = Functions(hessp, True, hessp, args)  # no value is asked for
    names = ("precision", "covariance", "factor") if prior.has_factor else ("precision", "covariance")
    operators = {name: unknowns.operator_of_this_rank(f"prior.{name}", getattr(prior, name)) for name in names}
    if mesh is not None:
        _check_operators(operators, unknowns, mesh)
    kept = min(options.rank, unknowns.total)
    method = DoublePass(
        inner_product=RieszMap(operators["precision"], operators["covariance"]),
        factor=operators.get("factor"),
        rank=kept,
        oversampling=min(options.oversampling, unknowns.total - kept),
        power_iterations=options.power_iterations,
        seed=options.seed,
    )
    ended = solve(functions, method, unknowns, Callback(None), LoopOptions(), run)
    if ended.reason == "signal":
        raise KeyboardInterrupt(
            f"laplace was stopped after {ended.progress.products} of up to {method.most_products} products"
        )
    if ended.reason == "not finite":
        raise ValueError(
            f"laplace failed at product {ended.progress.products}: the Hessian product is NaN or infinite, or what the "
            "prior made of it, or the direction that its factor made"
        )
    if ended.reason != "rank":
        raise ValueError(f"laplace {ended.result.message}")
    return LaplacePosterior(ended.result.x, prior, unknowns, ended.ranks, mesh)


def _check_operators(operators: Mapping[str, Callable[[Array], Array]], unknowns: Unknowns, mesh: Mesh) -> None:
    """Raise ValueError on all ranks if ranks that have the same elements make other vectors of one.  Collective."""
    if mesh.data.size == 1:
        return
    noise = normal_at(0, "prior", np.arange(unknowns.size)).astype(unknowns.flat.dtype)
    norms: dict[str, float] = {}
    with raised_on_all(mesh.world):
        for name, operator in operators.items():
            found = applied(f"prior.{name}", operator, np.asarray(noise, like=unknowns.flat))
            norms[name] = float(np.linalg.norm(arrays.to_host(found).astype(np.float64)))
    by_rank = list(zip(mesh.data.members, mesh.data.allgather_object(norms), strict=True))
    with raised_on_all(mesh.world):
        first, expected = by_rank[0]
        for (rank, others), name in itertools.product(by_rank, norms):
            if abs(others[name] - expected[name]) > _APART * expected[name]:
                raise ValueError(
                    f"all ranks must have the same prior, but of one vector v the norm of prior.{name}(v) is "
                    f"{expected[name]:.6g} on rank {first} and {others[name]:.6g} on rank {rank}"
                )
