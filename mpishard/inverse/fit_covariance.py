"""How sure the unknowns of a least-squares fit are: their covariance, the same bits on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from mpishard.arguments import flag, shown
from mpishard.backend import exact_gram
from mpishard.inverse.functions import opening, world_of
from mpishard.inverse.residuals import Loss, exact_products
from mpishard.inverse.trees import tree_of
from mpishard.minimizers.elements import element_name

if TYPE_CHECKING:
    from mpishard.comm.mesh import Mesh

Array = Any
_ROWS = 20  # of the unknowns that are printed


@dataclass(frozen=True, repr=False)
class Covariance:
    """The covariance of the unknowns of a fit; as an array it is its matrix.

    Parameters
    ----------
    matrix : array of shape (unknowns, unknowns)
        In the order of the flat x; 0 in rows and columns of unknowns at a bound.
    standard_errors : 1-D array, or dict, list or tuple of arrays
        The square roots of its diagonal, in the form of x.
    sigma : float
        The standard deviation of a residual: estimated as the root of twice the cost over the degrees of freedom, or 1
        with `absolute_sigma`.
    degrees_of_freedom : int
        The number of residuals less that of the unknowns that are not at a bound.
    x : 1-D array, or dict, list or tuple of arrays
        The unknowns of the fit.
    """

    matrix: np.ndarray
    standard_errors: Any
    sigma: float
    degrees_of_freedom: int
    x: Any

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.matrix, dtype=dtype, copy=copy)

    def __repr__(self) -> str:
        tree = tree_of(self.x)
        values = self.x if tree is None else tree.flat
        errors = np.sqrt(self.matrix.diagonal())
        rows = [
            (str(k) if tree is None else element_name(k, tree.specs), f"{values[k]:.6g}", f"{errors[k]:.3g}")
            for k in range(min(len(values), _ROWS))
        ]
        rows.insert(0, ("unknown", "value", "standard error"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(word.rjust(width) for word, width in zip(row, widths, strict=True)) for row in rows]
        if len(values) > _ROWS:
            lines.append(f"and {len(values) - _ROWS} more")
        lines.append(f"residuals: standard deviation {self.sigma:.4g}, {self.degrees_of_freedom} degrees of freedom")
        return "\n".join(lines)


def covariance(fit: Mapping[str, Any], *, absolute_sigma: bool = False, mesh: Mesh | None = None) -> Covariance:
    """The covariance of the unknowns of a `least_squares` fit, from its residuals and its Jacobian.

    With the mesh of the fit it is collective.  Its bits are the same on any number of ranks.

    Parameters
    ----------
    fit : OptimizeResult
        Of `least_squares`, or of SciPy's for the linear loss, with a Jacobian that is an array or sparse rows.
    absolute_sigma : bool
        False: the residuals have one standard deviation, which is estimated from them.  True: they are divided by
        theirs already, as ``(model - data) / sigma``.  For the linear loss, as in ``scipy.optimize.curve_fit``.
    mesh : Mesh, optional
        That of the fit, whose ranks have the rows.

    Returns
    -------
    Covariance
        The same on all ranks; printed it is a table of the unknowns with their standard errors.

    Raises
    ------
    ValueError
        On all ranks: if the residuals do not determine the unknowns, or are too few to estimate their standard
        deviation; if the fit has no Jacobian, as with `samples`, or one whose elements are not known; if its unknowns
        are a rank's part of a field; if `mesh` is not that of the fit; or if ranks give different fits.
    TypeError
        If `fit` is no result of a fit.

    Notes
    -----
    For residuals f of m rows, n unknowns that are not at a bound, and the Jacobian J, it is ``s**2 inv(J'J)``, where
    ``s**2 = f'f / (m - n)``, or 1.  For another loss, whose gradient has the factors w of the residuals and whose
    Hessian those h of the rows, it is the sandwich ``m / (m - n) inv(H) B inv(H)`` with ``H = J' diag(h) J`` and ``B =
    J' diag(w f)**2 J``; outliers then count as little as in the fit.  Both are for large m, and for models that are
    nearly linear within the errors.  An unknown at a bound counts as known.

    References
    ----------
    P. J. Huber, E. M. Ronchetti: Robust Statistics, 2nd edition, Wiley 2009, section 7.6.  G. A. F. Seber, C. J. Wild:
    Nonlinear Regression, Wiley 1989, section 2.1.

    Examples
    --------
    >>> import numpy as np
    >>> from mpishard import least_squares
    >>> t, y = np.arange(5.0), np.array([1.1, 2.9, 5.2, 6.8, 9.0])
    >>> covariance(least_squares(lambda x: x[0] + x[1] * t - y, [0.0, 0.0]))
    unknown  value  standard error
          0   1.06           0.135
          1   1.97          0.0551
    residuals: standard deviation 0.1742, 3 degrees of freedom
    """
    with opening(mesh, "covariance") as same:
        flag("absolute_sigma", absolute_sigma)
        rows = _FittedRows(fit)
        if absolute_sigma and not rows.loss.is_linear:
            raise ValueError(
                f"absolute_sigma=True is for the linear loss, and the fit has loss={shown(fit['loss'])}, whose "
                "covariance needs no standard deviation of the residuals: leave it out"
            )
        x = xxhash.xxh3_64_hexdigest(rows.x.tobytes())
        same |= {"absolute_sigma": absolute_sigma, "the hash of x": x, "loss": fit.get("loss", "linear")}
    world = world_of(mesh)
    number = int(world.all_reduce(np.array([len(rows.f)]), label="control")[0])
    cost = float(world.all_reduce(np.array([rows.own_cost]), label="control")[0])
    if not math.isclose(cost, rows.cost, rel_tol=1e-6):  # sums of other ranks, or rounded otherwise
        raise ValueError(
            f"the cost of the fit is {rows.cost:.6g}, and that of these {number} residuals {cost:.6g}: give mesh= as "
            "to least_squares"
        )
    size = int(np.count_nonzero(rows.is_free))
    freedom = number - size
    if freedom <= 0 and not absolute_sigma:
        raise ValueError(
            f"there are {number} residuals for {size} unknowns, too few to estimate their standard deviation: divide "
            "them by theirs, and give absolute_sigma=True"
        )
    of_gradient, of_hessian = rows.loss.weights(rows.f)
    products = exact_products(rows.jacobian * np.sqrt(of_hessian)[:, None], size, world)
    identity = exact_gram.ExactGram(np.eye(size), np.zeros((size, size)))
    inverse = exact_gram.inverse_times(products, identity)
    if not np.isfinite(inverse).all():
        unseen = np.flatnonzero(products.high.diagonal() == 0)
        which = rows.name_of(int(np.flatnonzero(rows.is_free)[unseen[0]])) if len(unseen) else "a sum of unknowns"
        raise ValueError(
            f"the residuals do not depend on {which}, so that its error is infinite: leave it out of x0, or add "
            "residuals that say what is known of it"
        )
    sigma = 1.0 if absolute_sigma else math.sqrt(2 * rows.cost / freedom)
    if rows.loss.is_linear:
        found = sigma**2 * inverse
    else:
        scores = exact_products(rows.jacobian * (of_gradient * rows.f)[:, None], size, world)
        half = exact_gram.inverse_times(products, scores)
        transposed = exact_gram.ExactGram(np.ascontiguousarray(half.T), np.zeros((size, size)))
        found = number / freedom * exact_gram.inverse_times(products, transposed)
    matrix = np.zeros((len(rows.x), len(rows.x)))
    matrix[np.ix_(rows.is_free, rows.is_free)] = 0.5 * (found + found.T)
    return Covariance(matrix, rows.like_x(np.sqrt(matrix.diagonal())), sigma, freedom, fit["x"])


class _FittedRows:
    """This rank's residuals and rows of the Jacobian of the unknowns that are not at a bound."""

    def __init__(self, fit: Any) -> None:
        if not (isinstance(fit, Mapping) and "x" in fit and "cost" in fit):
            raise TypeError(f"covariance needs the result of least_squares, got {shown(fit)}")
        if "jac" not in fit:
            raise ValueError(
                "the fit has no Jacobian, as none with samples= has: fit again without samples=, from this x, with "
                "max_nfev=1"
            )
        self._tree = tree_of(fit["x"])
        if hasattr(fit["x"], "pieces"):
            raise ValueError("covariance is for arrays, and the fit is of a FlatParameters: give the fit an array")
        self.x = np.asarray(fit["x"], np.float64).reshape(-1) if self._tree is None else self._tree.flat
        self.f = np.asarray(fit["fun"], np.float64)
        self.cost = float(fit["cost"])
        self.loss = Loss(fit.get("loss", "linear"), float(fit.get("f_scale", 1.0)))
        values = self.loss.values(self.f)
        self.own_cost = 0.5 * float(values @ values if self.loss.is_linear else values.sum())
        jacobian = fit["jac"].toarray() if hasattr(fit["jac"], "toarray") else fit["jac"]
        if hasattr(jacobian, "matvec") or np.ndim(jacobian) != 2:
            raise ValueError(
                "covariance needs the elements of the Jacobian, and that of the fit is an operator: let jac return an "
                "array or sparse rows"
            )
        jacobian = np.asarray(jacobian, np.float64)
        if jacobian.shape != (len(self.f), len(self.x)):
            raise ValueError(
                f"the Jacobian of the fit has the shape {jacobian.shape}, and there are {len(self.f)} residuals and "
                f"{len(self.x)} unknowns: covariance is for fits whose unknowns all ranks have"
            )
        mask = fit.get("active_mask", np.zeros(len(self.x)))
        self.is_free = (mask if self._tree is None else self._tree.flattened("active_mask", mask)) == 0
        # An exact fit has rows that are weighted by its loss, one by conjugate gradients those of the user.
        weights = np.ones(len(self.f)) if "nhev" in fit else 1 / np.sqrt(self.loss.weights(self.f)[1])
        self.jacobian = jacobian[:, self.is_free] * weights[:, None]

    def like_x(self, flat: Array) -> Any:
        return flat if self._tree is None else self._tree.of(flat)

    def name_of(self, index: int) -> str:
        return f"unknown {index}" if self._tree is None else element_name(index, self._tree.specs)
