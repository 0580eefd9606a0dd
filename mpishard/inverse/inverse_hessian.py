"""The inverse Hessian in the result of `minimize`, an operator as SciPy's ``LbfgsInvHessProduct``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishard.backend import array as arrays
from mpishard.inverse.functions import opening
from mpishard.inverse.unknowns import Unknowns
from mpishard.minimizers.inverses import Inverse

if TYPE_CHECKING:
    from mpishard.comm.mesh import Mesh

Array = Any
_MOST = 5000  # elements of which there is a matrix, of 200 MB in float64


class InverseHessian:
    """The inverse of the Hessian at the result of `minimize`, as an operator: ``options={"hess_inv": True}``.

    Of L-BFGS and L-BFGS-B it is made of the pairs of steps and changes of the gradient, also of that of the last
    iteration; the rest of it is a multiple of the preconditioner, by default of 1: ``s'y / y'y`` of the newest pair.
    It is what the next direction of descent would be made of.  (SciPy's begins with 1 in place of ``s'y / y'y``, and
    lacks the last pair.)  In directions without a pair it says nothing of the function: it is no covariance.  It keeps
    the vectors of the method, ``2 maxcor + 4`` as long as x; on a mesh each rank has its part of them.

    Of the Newton methods each product with it solves with the Hessian at the result: conjugate gradients until the
    residual is 1e-10 of the vector (in float32 2e-6), each iteration a call of `hessp`, or a product with `hess`.

    Elements that are `fixed`, or at a bound beyond which descent leads, count as known: their rows and columns are 0.
    The others are those of the inverse of the rest of the Hessian.

    With a mesh its methods are collective, except for the repr.  Bits are the same on any number of ranks.

    Parameters
    ----------
    inverse : Inverse
        Of this rank's part of vectors.
    unknowns : Unknowns
        The structure of x.
    own, gather : callable
        This rank's part of a flat vector like x, and the reverse; collective.
    mesh : Mesh or None
        The ranks.

    Attributes
    ----------
    shape : tuple of int
        Rows and columns: all elements of x over all ranks; a complex one counts as two.
    dtype : numpy.dtype
        float32 or float64, as x.

    References
    ----------
    R. H. Byrd, J. Nocedal, R. B. Schnabel: Representations of quasi-Newton matrices and their use in limited memory
    methods.  Mathematical Programming 63, 129-156 (1994).
    """

    def __init__(
        self,
        inverse: Inverse,
        unknowns: Unknowns,
        own: Callable[[Array], Array],
        gather: Callable[[Array], Array],
        mesh: Mesh | None,
    ) -> None:
        self._inverse, self._unknowns, self._own, self._gather, self._mesh = inverse, unknowns, own, gather, mesh
        self.shape = (unknowns.total, unknowns.total)
        self.dtype = np.dtype(unknowns.flat.dtype)

    def __repr__(self) -> str:
        return f"<InverseHessian of {self._inverse.origin}, {self.shape}, {self.dtype}>"

    def matvec(self, v: Any) -> Any:
        """The inverse Hessian times a vector.  Collective.

        Parameters
        ----------
        v : 1-D array, or dict, list or tuple of arrays
            In the structure of x; of a FlatParameters a flat array, or by tensor name.  With a `Partition` this rank's
            part; else the same on all ranks that hold the same elements.

        Returns
        -------
        1-D array, or dict, list or tuple of arrays
            As ``result.jac``.

        Raises
        ------
        ValueError, TypeError
            On all ranks, if `v` is not like x, or differs between ranks; of a Newton method also if the Hessian is not
            positive definite.
        """
        with opening(self._mesh, "InverseHessian.matvec") as same:
            flat = self._unknowns.vector("v", v).copy()  # contiguous and writeable, as kernels take it
            if not self._unknowns.is_split:
                same["v"] = flat
        return self._unknowns.like_x0(self._times(flat))

    __call__ = __matmul__ = matvec

    def diagonal(self) -> Any:
        """The diagonal.  Collective.

        Of a Newton method, and with a function as preconditioner, it takes a product for each element.

        Returns
        -------
        1-D array, or dict, list or tuple of arrays
            As ``result.jac``.

        Raises
        ------
        ValueError
            On all ranks, if there are too many elements for a product each, or x is split over ranks.
        """
        with opening(self._mesh, "InverseHessian.diagonal"):
            found = self._inverse.diagonal()
            if found is None:
                self._expect_few("diagonal")
        whole = self._matrix().diagonal().copy() if found is None else self._gather(found)
        return self._unknowns.like_x0(np.asarray(whole, like=self._unknowns.flat))

    def todense(self) -> np.ndarray:
        """The matrix, for up to 5000 elements.  Collective.

        Returns
        -------
        2-D array
            Symmetric, on all ranks; rows and columns in the order of ``result.x``, flat.

        Raises
        ------
        ValueError
            On all ranks, if there are more elements, or x is split over ranks.
        """
        with opening(self._mesh, "InverseHessian.todense"):
            self._expect_few("todense")
        return self._matrix()

    def _expect_few(self, what: str) -> None:
        size = self.shape[0]
        if self._unknowns.is_split:
            raise ValueError(f"{what} needs all of x on each rank, and x is split over ranks: take matvec")
        if size > _MOST:
            raise ValueError(
                f"{what} is for up to {_MOST} elements, and x has {size}, whose matrix would take "
                f"{size**2 * self.dtype.itemsize / 2**30:.3g} GiB: take matvec"
            )

    def _matrix(self) -> np.ndarray:
        size, flat = self.shape[0], self._unknowns.flat
        columns = np.empty(self.shape, self.dtype)
        for column in range(size):
            unit = np.zeros(size, self.dtype)
            unit[column] = 1
            columns[column] = arrays.to_host(self._times(np.asarray(unit, like=flat)))
        return 0.5 * (columns + columns.T)

    def _times(self, flat: Array) -> Array:
        return self._gather(self._inverse.times(self._own(flat)))
