"""Matrices as products of two thin ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from mpishard.arguments import integer
from mpishard.backend import array as arrays
from mpishard.backend.random import normal

Array = Any


@dataclass(frozen=True)
class PowerSGDCompressor:
    """The best approximation of low rank that one step of subspace iteration finds (Vogels et al., "PowerSGD", 2019).

    A gradient of shape (m, ...) is a matrix M of m rows and n columns, and travels as P = M Q and as M' P', P' being
    the orthonormal P: ``rank * (m + n)`` elements, each summed over the ranks.  Q is what the last step has found.
    Tensors that would not be smaller, such as vectors, travel as they are; so a flat array without named tensors does.

    Parameters
    ----------
    rank : int
        Columns of P and Q.
    """

    rank: int = 4

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", integer("rank", self.rank, least=1))

    def compresses(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape is smaller as two factors than as it is."""
        rows, columns = matrix_shape(shape)
        return self.rank * (rows + columns) < rows * columns

    def elements(self, shape: Sequence[int]) -> int:
        """How many elements of a tensor of this shape are summed."""
        return self.rank * sum(matrix_shape(shape)) if self.compresses(shape) else prod(shape)

    def first_elements(self, shape: Sequence[int]) -> int:
        """How many of these are summed first: P, or what is not compressed."""
        return self.rank * matrix_shape(shape)[0] if self.compresses(shape) else prod(shape)

    def first_basis(self, name: str, columns: int, like: Array) -> Array:
        """Q of the first step, ``(columns, rank)``, of the dtype and device of `like`: random, by the tensor's name."""
        host = normal(0, name, (columns, self.rank), dtype=like.dtype)
        if not arrays.is_device(like):
            return host
        basis = arrays.empty(host.size, host.dtype, like=like)
        arrays.copy_to_device(host.reshape(-1), basis)
        return basis.reshape(host.shape)


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a tensor as a matrix: its first axis, and all others."""
    return (shape[0], prod(shape[1:])) if shape else (1, 1)


def orthonormal(columns: Array) -> Array:
    """An orthonormal basis of what the columns of a matrix span, and as many more as it has columns."""
    return arrays.module_of(columns).linalg.qr(columns)[0]
