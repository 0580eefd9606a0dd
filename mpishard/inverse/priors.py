"""Gaussian priors of the unknowns, as `laplace` takes them: their precision, covariance, samples and variance."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishard.arguments import number, shown
from mpishard.inverse.trees import tree_of
from mpishard.layout.tensors import ParameterSpec
from mpishard.minimizers.elements import positive_elements

if TYPE_CHECKING:
    from mpishard.comm.mesh import Mesh

Array = Any


class Prior(ABC):
    """A Gaussian prior of the unknowns, with a mean and a precision R, the inverse of its covariance.

    Vectors are what a Hessian product gets as a direction: whole ones, flat for an `x` that is an array, or this rank's
    part of a `Partition` or of slabs, of the shape of that part.  With parts, methods are collective over the ranks
    that share the field.  Each element of a result is computed in the same order however the field is cut, so that the
    bits of a posterior do not depend on the ranks.

    Attributes
    ----------
    mean : None, or array, dict, list or tuple of arrays
        Like `x`; None stands for 0.
    """

    mean: Any = None

    def on(self, x: Any, mesh: Mesh | None = None) -> Prior:
        """This prior for unknowns like these, cut as they are.  Collective over the mesh.

        Parameters
        ----------
        x : array, FlatParameters, Partition, or dict, list or tuple of arrays or of Partitions
            The unknowns as `laplace` was given them.
        mesh : Mesh, optional
            Its ranks.

        Returns
        -------
        Prior
            Itself, unless it has to know how the field is cut.
        """
        return self

    @abstractmethod
    def precision(self, vector: Any) -> Any:
        """The product of R with a vector.

        Parameters
        ----------
        vector : array, or dict, list or tuple of arrays
            Only read.

        Returns
        -------
        array, or dict, list or tuple of arrays
            Like `vector`.
        """

    @abstractmethod
    def covariance(self, vector: Any) -> Any:
        """The product of the inverse of R with a vector: a solve.

        Parameters
        ----------
        vector : array, or dict, list or tuple of arrays
            Only read.

        Returns
        -------
        array, or dict, list or tuple of arrays
            Like `vector`.
        """

    @abstractmethod
    def factor(self, white: Any) -> Any:
        """The product of L with a vector, L L' the inverse of R: of white noise it makes a sample less the mean.

        Parameters
        ----------
        white : array, or dict, list or tuple of arrays
            Only read; as many numbers as there are unknowns.

        Returns
        -------
        array, or dict, list or tuple of arrays
            Like `white`.

        Raises
        ------
        ValueError
            If the prior has no such factor.
        """

    @abstractmethod
    def variance(self) -> Any:
        """The diagonal of the inverse of R.

        Returns
        -------
        float, or array, dict, list or tuple of arrays
            Like `x`, of this rank's part; a number if it is the same for all elements.

        Raises
        ------
        ValueError
            If the prior does not know it.
        """

    @property
    def has_factor(self) -> bool:
        """Whether `factor` is known."""
        return True

    @property
    def log_determinant(self) -> float | None:
        """The logarithm of the determinant of R over all elements; None if it is not known."""
        return None


class DiagonalPrior(Prior):
    """Gaussian unknowns that are independent of each other.

    Parameters
    ----------
    variance : float, or array, dict, list or tuple of arrays
        Of each unknown, positive: one number, or like `x`; for a `Partition` or slabs of this rank's part.
    mean : float, or array, dict, list or tuple of arrays, optional
        As `variance`; default: 0.

    Raises
    ------
    TypeError, ValueError
        If `variance` is no positive, finite number; of an array at its first use.

    Examples
    --------
    >>> import numpy as np
    >>> DiagonalPrior(4.0).precision(np.array([1.0, 2.0]))
    array([0.25, 0.5 ])
    """

    def __init__(self, variance: Any, mean: Any = None) -> None:
        if isinstance(variance, Real) or variance is None:
            variance = number("variance", variance, above=0)
        self._variance, self.mean = copy.deepcopy((variance, mean))  # the user may go on with these arrays

    def precision(self, vector: Any) -> Any:
        return self._times(vector, np.reciprocal)

    def covariance(self, vector: Any) -> Any:
        return self._times(vector, np.positive)

    def factor(self, white: Any) -> Any:
        return self._times(white, np.sqrt)

    def variance(self) -> Any:
        return self._variance

    def _times(self, vector: Any, function: Callable[[np.ndarray], np.ndarray]) -> Any:
        """The product of a vector with a function of the variance of each element."""
        tree, given = tree_of(vector), self._variance
        specs: tuple[ParameterSpec, ...]
        if tree is None:
            specs, flat = (ParameterSpec("x", tuple(vector.shape)),), vector.reshape(-1)
        else:
            specs, flat, given = tree.specs, tree.flat, tree.by_name("variance", given)
        variances = positive_elements("variance", given, specs, flat.dtype)
        assert variances is not None
        found = flat * np.asarray(function(variances), like=flat)
        return found.reshape(vector.shape) if tree is None else tree.of(found)


class OperatorPrior(Prior):
    """A Gaussian prior of functions: its precision R, a solve with R, and what else is known.

    Each function gets and returns a vector as `Prior` says, and is collective where `x` is cut.

    Parameters
    ----------
    precision : callable
        ``precision(v)``: R v, of a symmetric, positive definite R.
    solve : callable
        ``solve(v)``: the w with ``R w = v``.
    factor : callable, optional
        ``factor(white)``: L times a vector, where L L' is the inverse of R, such as a sparse triangular solve; samples
        need it, and the directions of `laplace` are better with it.
    variance : float, or array, dict, list or tuple of arrays, optional
        The diagonal of the inverse of R, like `x`: the posterior's variance needs it.
    mean : float, or array, dict, list or tuple of arrays, optional
        Default: 0.
    log_determinant : float, optional
        The logarithm of the determinant of R.

    Raises
    ------
    TypeError, ValueError
        If a function is not callable, or `log_determinant` no finite number.
    """

    def __init__(
        self,
        precision: Callable[[Any], Any],
        solve: Callable[[Any], Any],
        factor: Callable[[Any], Any] | None = None,
        *,
        variance: Any = None,
        mean: Any = None,
        log_determinant: float | None = None,
    ) -> None:
        for name, function in (("precision", precision), ("solve", solve), ("factor", factor)):
            if not (callable(function) or (name == "factor" and function is None)):
                raise TypeError(f"OperatorPrior: {name}={shown(function)} must be a function of a vector")
        self._precision, self._solve, self._factor = precision, solve, factor
        self._variance, self.mean = copy.deepcopy((variance, mean))
        self._log_determinant = None if log_determinant is None else number("log_determinant", log_determinant)

    def precision(self, vector: Any) -> Any:
        return self._precision(vector)

    def covariance(self, vector: Any) -> Any:
        return self._solve(vector)

    def factor(self, white: Any) -> Any:
        if self._factor is None:
            raise ValueError("samples need OperatorPrior(factor=...), L of a vector, where L L' is the inverse of R")
        return self._factor(white)

    def variance(self) -> Any:
        if self._variance is None:
            raise ValueError("the variance needs OperatorPrior(variance=...), the diagonal of the inverse of R")
        return self._variance

    @property
    def has_factor(self) -> bool:
        return self._factor is not None

    @property
    def log_determinant(self) -> float | None:
        return self._log_determinant


def numbers_of(prior: Prior) -> dict[str, Any]:
    """The numbers that a prior was given for elements, by what messages call them."""
    variance = prior._variance if isinstance(prior, DiagonalPrior | OperatorPrior) else None
    return {"prior.mean": prior.mean, "prior.variance": variance}
