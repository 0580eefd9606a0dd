"""Gaussian priors of the unknowns, as `laplace` takes them: their precision, covariance, samples and variance."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

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
        """The product of L with a vector, where L L' is the inverse of R: of white noise it makes a sample less the mean.

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
