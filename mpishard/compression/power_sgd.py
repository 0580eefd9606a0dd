"""Low-rank compression: matrices as products of two thin matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import numpy as np

from mpishard.arguments import integer
from mpishard.backend import array as arrays
from mpishard.backend.random import normal
from mpishard.compression.compressor import Collective, Compressor, SumsMaker, T

Array = Any


@dataclass(frozen=True)
class PowerSGDCompressor(Compressor):
    """The best approximation of low rank that one step of subspace iteration finds (Vogels et al., "PowerSGD", 2019).

    A gradient of shape (m, ...) is a matrix M of m rows and n columns.  It is sent as P = M Q and as M' P', where P' is
    the orthonormal P: ``rank * (m + n)`` elements, each summed over the ranks.  Q is the result of the last step.
    Tensors that would not be smaller, such as vectors, are sent uncompressed; so is a flat array without named tensors.

    Parameters
    ----------
    rank : int
        Number of columns of P and Q.

    Raises
    ------
    TypeError, ValueError
        If `rank` is no whole number of at least 1.
    """

    by_nodes: ClassVar[bool] = False  # what it sends is small already

    rank: int = 4

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", integer("rank", self.rank, least=1))

    def make_sums(self, maker: SumsMaker[T]) -> T:
        return maker.of_low_rank(self)

    def collectives(self, shapes: Sequence[Sequence[int]], dtype: np.dtype, ranks: int) -> list[Collective]:
        first = sum(self.first_elements(shape) for shape in shapes)
        rest = sum(self.elements(shape) for shape in shapes) - first
        return [Collective("all_reduce", [count], dtype.itemsize) for count in (first, rest)]

    def compresses(self, shape: Sequence[int]) -> bool:
        """Whether the two factors of a tensor of this shape are smaller than the tensor.

        Parameters
        ----------
        shape : sequence of int
            Of the tensor, or of the piece of it that a rank holds.

        Returns
        -------
        bool
            False for vectors and scalars.
        """
        rows, columns = matrix_shape(shape)
        return self.rank * (rows + columns) < rows * columns

    def elements(self, shape: Sequence[int]) -> int:
        """Number of elements that are summed for a tensor of this shape.

        Parameters
        ----------
        shape : sequence of int
            Of the tensor.

        Returns
        -------
        int
            ``rank * (m + n)``, or all elements of a tensor that is not compressed.
        """
        return self.rank * sum(matrix_shape(shape)) if self.compresses(shape) else prod(shape)

    def first_elements(self, shape: Sequence[int]) -> int:
        """Number of these that are summed first: those of P, or of an uncompressed tensor.

        Parameters
        ----------
        shape : sequence of int
            Of the tensor.

        Returns
        -------
        int
            ``rank * m``, or all elements of a tensor that is not compressed.
        """
        return self.rank * matrix_shape(shape)[0] if self.compresses(shape) else prod(shape)

    def first_basis(self, name: str, columns: int, like: Array) -> Array:
        """Q of the first step, ``(columns, rank)``, of the dtype and device of `like`: random, by the tensor's name.

        Parameters
        ----------
        name : str
            Of the tensor; it keys the random numbers.
        columns : int
            Columns of the matrix, n.
        like : array
            Float32 or float64, of NumPy or CuPy.

        Returns
        -------
        array
            Normally distributed, the same on all ranks.
        """
        host = normal(0, name, (columns, self.rank), dtype=like.dtype)
        if not arrays.is_device(like):
            return host
        basis = arrays.empty(host.size, host.dtype, like=like)
        arrays.copy_to_device(host.reshape(-1), basis)
        return basis.reshape(host.shape)


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a tensor as a matrix.

    Parameters
    ----------
    shape : sequence of int
        Of the tensor.

    Returns
    -------
    (int, int)
        The first extent, and the product of the others; (1, 1) for a scalar.
    """
    return (shape[0], prod(shape[1:])) if shape else (1, 1)


def orthonormal(columns: Array) -> Array:
    """Orthonormal columns, as many as the matrix has, whose span contains that of the matrix's columns.

    Parameters
    ----------
    columns : array, shape (m, n)
        Float32 or float64, of NumPy or CuPy.

    Returns
    -------
    array, shape (m, min(m, n))
        New memory.
    """
    return arrays.module_of(columns).linalg.qr(columns)[0]
