"""The Laplace approximation of a posterior, as `laplace` returns it."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishard import arguments
from mpishard.backend import array as arrays
from mpishard.backend import exact
from mpishard.comm.errors import raised_on_all
from mpishard.inverse.functions import opening
from mpishard.inverse.pictures import draw_spectrum
from mpishard.inverse.priors import DiagonalPrior, Prior
from mpishard.minimizers.double_pass import DoublePassMinimizer

if TYPE_CHECKING:
    from mpishard.comm.mesh import Mesh
    from mpishard.inverse.result import Ranks
    from mpishard.inverse.unknowns import Unknowns

Array = Any
_ROWS = (1, 2, 3, 5, 10, 20, 30, 50)  # of the eigenvalues that are printed, and these times powers of ten
_ASYMMETRIC = 1e-3  # of the Hessian in the basis, from which on it is said


class LaplacePosterior:
    """A Gaussian around a minimum, whose precision is that of a prior and of the dominant part of the misfit's Hessian.

    `laplace` makes it.  Its attributes are the same on all ranks, but for arrays of what is split, which are parts of
    this rank.

    Parameters
    ----------
    x, prior, unknowns, ranks, mesh : object
        What `laplace` has: the minimum, the prior of what is on this rank, and who has which part of the eigenvectors.

    Attributes
    ----------
    x : array, FlatParameters, or dict, list or tuple of arrays
        The minimum, which is the mean.
    eigenvalues : 1-D array
        float64, from the largest to the lowest: how much the data say of a direction beside the prior.  The variance
        along an eigenvector is ``1 / (1 + eigenvalue)`` of the prior's.
    left_out : 1-D array
        float64, by size: estimates of the eigenvalues behind these, from the further directions; empty if there are
        none.
    information_gain : float
        The Kullback-Leibler divergence of the posterior from the prior, in nats, as far as the eigenvalues go.
    products : int
        The Hessian products that were made.
    asymmetry : float
        The largest difference of two elements of the Hessian in the basis that should be equal, as a share of the
        largest element.

    Raises
    ------
    ValueError
        If the sum of the misfit's Hessian and the precision is not positive definite, or the mean does not fit.
    """

    def __init__(self, x: Any, prior: Prior, unknowns: Unknowns, ranks: Ranks, mesh: Mesh | None) -> None:
        minimizer = ranks.minimizer
        assert isinstance(minimizer, DoublePassMinimizer)
        self._prior, self._unknowns, self._ranks, self._mesh = prior, unknowns, ranks, mesh
        self._minimizer, self._space = minimizer, minimizer.space
        values = np.array(minimizer.eigenvalues)
        if values.min(initial=0.0) <= -1:
            raise ValueError(
                f"the Hessian of misfit and prior is not positive definite: that of the misfit has the eigenvalue "
                f"{values.min():.3g} beside the prior, and not more than -1.  Give a minimum of both, a hessp without "
                "the prior, or the products of Gauss and Newton"
            )
        self.x = x
        self.eigenvalues: np.ndarray = values[: minimizer.kept]
        self.left_out: np.ndarray = values[minimizer.kept :]
        self.products = minimizer.progress.products
        self.asymmetry = minimizer.progress.asymmetry
        self._rows = minimizer.vectors[: minimizer.kept]
        self._tops = self._space.largest(*self._rows) if len(self._rows) else []
        shares = self._shares
        away = minimizer.point - self._own("prior.mean", 0.0 if prior.mean is None else prior.mean)
        (distance,) = self._space.measured_dots((away, self._operator("apply")(away)))
        self.information_gain = 0.5 * (float(np.sum(np.log1p(self.eigenvalues) - shares)) + distance)
        self._log_determinant = self._prior_log_determinant()

    @property
    def _shares(self) -> np.ndarray:
        """By how much of the prior's variance the posterior's is less along each eigenvector."""
        return self.eigenvalues / (1 + self.eigenvalues)

    def variance(self) -> Any:
        """The variance of each unknown.  Collective.

        Returns
        -------
        array, or dict, list or tuple of arrays
            Like `x`, of a FlatParameters flat; of what is split this rank's part.

        Raises
        ------
        ValueError
            If the prior does not know its own, or knows one that is not positive and finite.
        """
        return self._like_x0(self._variance())

    def standard_deviation(self) -> Any:
        """The standard deviation of each unknown.  Collective.

        Returns
        -------
        array, or dict, list or tuple of arrays
            As `variance`.

        Raises
        ------
        ValueError
            As `variance`.
        """
        found = self._variance()
        return self._like_x0(arrays.module_of(found).sqrt(found))

    def samples(self, n: int, seed: int = 0) -> list[Any]:
        """Draw samples of the posterior.  Collective.

        Sample k of a seed is the same on any number of ranks, and for any `n`.

        Parameters
        ----------
        n : int
            How many.
        seed : int
            Of the random numbers, at least 0.

        Returns
        -------
        list of arrays, or of dicts, lists or tuples of arrays
            Each like `x`, of a FlatParameters flat; of what is split this rank's part.

        Raises
        ------
        TypeError, ValueError
            If the prior has no factor, or an argument is invalid or differs between ranks.
        """
        with opening(self._mesh, "LaplacePosterior.samples") as same:
            n, seed = arguments.integer("n", n, least=0), arguments.integer("seed", seed, least=0)
            factor = self._operator("factor")
            same |= {"n": n, "seed": seed}
        shrinks = 1 / np.sqrt(1 + self.eigenvalues) - 1
        found = []
        for number in range(n):
            sample = factor(self._space.white_noise(seed, f"sample {number}"))
            along = self._products(self._operator("apply")(sample), 1.0)
            found.append(self._like_x0(self._minimizer.point + self._sum(shrinks * along, sample)))
        return found

    @property
    def covariance(self) -> PosteriorCovariance:
        """The covariance as an operator of vectors like `x`."""
        return PosteriorCovariance(self._covariance_times, self._unknowns.total, self._space.like.dtype)

    @property
    def log_determinant(self) -> float:
        """The logarithm of the determinant of the covariance.

        Raises
        ------
        ValueError
            If the prior does not know its own.  ``-np.log1p(posterior.eigenvalues).sum()`` is the difference of both.
        """
        if self._log_determinant is None:
            raise ValueError(
                "the prior does not know its determinant: give OperatorPrior(log_determinant=...), or take the "
                "difference of the posterior and the prior, -np.log1p(posterior.eigenvalues).sum()"
            )
        return -self._log_determinant - float(np.sum(np.log1p(self.eigenvalues)))

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw the eigenvalues, where they were cut, and those left out; not collective: call it on one rank.

        Parameters
        ----------
        path : path
            The file, whose name says the format (.png, .pdf, .svg).

        Raises
        ------
        TypeError
            If `path` is no path.
        ModuleNotFoundError
            If matplotlib is not installed (``mpishard[cli]``).
        """
        draw_spectrum(self.eigenvalues, self.left_out, repr(self).splitlines()[0], arguments.path("path", path))

    def __repr__(self) -> str:
        count, left = len(self.eigenvalues), self.left_out
        size, products = self._unknowns.total, self.products
        lines = [f"Laplace posterior of {size} unknowns: {count} eigenpairs from {products} products"]
        if count:
            lines.append(f"{'':>10}  {'eigenvalue':>10}  variance beside the prior's")
        powers = [place * power for power in (1, 100, 10000) for place in _ROWS]
        for place in sorted({*(each for each in powers if each < count), *([count] if count else [])}):
            value = self.eigenvalues[place - 1]
            lines.append(f"{place:>10}  {value:>10.3g}  {1 / (1 + value):.3g}")
        if len(left):
            lines.append(f"{'left out':>10}  {left[0]:>10.3g}  about {1 / (1 + abs(left[0])):.3g} and more")
        elif self._minimizer.is_complete:
            lines.append("nothing is left out: the data say nothing of other directions")
        else:
            lines.append("what is left out is not known without oversampling")
        lines.append(f"information gain {self.information_gain:.6g} nats")
        if self.asymmetry > _ASYMMETRIC:
            lines.append(f"the Hessian products are not symmetric: they differ by {self.asymmetry:.1g} of the largest")
        return "\n".join(lines)

    # -- this rank's elements -----------------------------------------------------------------------------------------

    def _operator(self, name: str) -> Callable[[Array], Array]:
        """An operator of the prior, as one of this rank's elements."""
        function = getattr(self._minimizer.limits, name)
        if function is None:
            raise ValueError("samples need a prior with a factor, such as OperatorPrior(precision, solve, factor)")
        operator: Callable[[Array], Array] = function
        return operator

    def _own(self, what: str, given: Any) -> Array:
        """This rank's elements of a vector of the user's, or of one number."""
        point = self._minimizer.point
        if isinstance(given, Real):
            return arrays.zeros(point.size, point.dtype, like=point) + point.dtype.type(given)
        with raised_on_all(self._ranks.world):
            flat = self._unknowns.vector(what, given)
        return self._ranks.own(flat)

    def _like_x0(self, vector: Array) -> Any:
        """This rank's elements of a vector as the user gets it."""
        return self._unknowns.like_x0(self._ranks.gather(vector).copy())

    def _variance(self) -> Array:
        found = self._prior_variance()
        total = found.astype(np.float64)
        for share, row in zip(self._shares.tolist(), self._rows, strict=True):
            wide = row.astype(np.float64)
            total -= share * (wide * wide)
        total[total < 0] = 0
        return total.astype(found.dtype)

    def _covariance_times(self, vector: Any) -> Any:
        own = self._own("the vector", vector)
        prior = self._operator("solve")(own)
        (square,) = self._space.measured_dots((own, prior))
        return self._like_x0(self._sum(-self._shares * self._products(own, math.sqrt(max(square, 0.0))), prior))

    def _products(self, vector: Array, size: float) -> np.ndarray:
        """The dot products of the eigenvectors with another vector, `size` as of `Space.row_dots`."""
        return np.array(self._space.row_dots(self._rows, self._tops, vector, size))

    def _sum(self, coefficients: np.ndarray, vector: Array) -> Array:
        """A vector and a sum of eigenvectors."""
        found = arrays.empty(vector.size, vector.dtype, like=vector)
        exact.combine(self._rows, range(len(self._rows)), coefficients.tolist(), vector, 1.0, found)
        return found

    def _prior_variance(self) -> Array:
        if isinstance(self._prior, DiagonalPrior):  # which may have one number for many elements
            return self._operator("solve")(self._own("", 1.0))
        given: Any = None
        with raised_on_all(self._ranks.world):
            given = self._prior.variance()
        found = self._own("prior.variance", given)
        with raised_on_all(self._ranks.world):
            values = arrays.to_host(found)
            wrong = values[~((values > 0) & np.isfinite(values))]
            if wrong.size:
                raise ValueError(f"prior.variance must be positive and finite, but has the element {wrong[0]:g}")
        return found

    def _prior_log_determinant(self) -> float | None:
        """That of the prior's precision; for a diagonal one the sum over all elements."""
        if not isinstance(self._prior, DiagonalPrior):
            return self._prior.log_determinant
        variance = self._prior_variance()
        logs, ones = arrays.module_of(variance).log(variance), arrays.module_of(variance).ones_like(variance)
        return -self._space.measured_dots((logs, ones))[0]


class PosteriorCovariance:
    """The covariance of a `LaplacePosterior`, with `matvec` and ``@`` as a ``LinearOperator`` of SciPy.

    Parameters
    ----------
    product : callable
        The covariance times a vector.
    size : int
        The number of unknowns.
    dtype : dtype
        Of the products.

    Attributes
    ----------
    shape : tuple of int
        Counts all unknowns, also where they are split.
    dtype : dtype
    """

    def __init__(self, product: Callable[[Any], Any], size: int, dtype: np.dtype) -> None:
        self._product = product
        self.shape = (size, size)
        self.dtype = dtype

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.shape[0]} unknowns, {self.dtype}>"

    def matvec(self, vector: Any) -> Any:
        """The covariance times a vector.  Collective.

        Parameters
        ----------
        vector : array, or dict, list or tuple of arrays
            Like `x`; of what is split this rank's part.

        Returns
        -------
        array, or dict, list or tuple of arrays
            Like `x`, of a FlatParameters flat.

        Raises
        ------
        TypeError, ValueError
            If it is not like `x`; on all ranks.
        """
        return self._product(vector)

    def __matmul__(self, vector: Any) -> Any:
        return self.matvec(vector)
