"""A product without the addresses of its arrays: sizes, and where rows and columns lie in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

# A function that computes a product, called with the addresses of a, b and out.
Call = Callable[[int, int, int], None]

# Kinds of products, for which libraries are chosen apart: most of a forward pass; weight gradients, whose `a` is
# transposed; batches; batches of fewer terms than columns, such as the scores of attention.
PLAIN, TRANSPOSED, BATCHED, SCORES = "plain", "transposed", "batched", "scores"
# By dtype those that other libraries may do.  Batches of bfloat16 they may not: oneDNN's were up to four times as fast
# as those of float32 by themselves, but a step with attention in bfloat16 took a tenth longer, though each operand was
# rounded once (heads of 32 channels, an Intel processor with AMX).
KINDS = {
    "float32": (PLAIN, TRANSPOSED, BATCHED, SCORES),
    "float64": (PLAIN, TRANSPOSED, BATCHED, SCORES),
    "bfloat16": (PLAIN, TRANSPOSED),
}

# Fewer multiplications are done before another library is called: Python's part of that call takes 5 us.
_FEW_MULTIPLICATIONS = 2**18
# Products with fewer rows or columns are bound by memory, and shapes of generated texts change with every token.
_FEW_ROWS = 16


@dataclass(frozen=True)
class Operand:
    """Where the elements of a matrix, or of a batch of matrices, lie."""

    transposed: bool  # columns, not rows, lie contiguous
    leading: int  # elements between two rows; between two columns if transposed
    batch: int  # elements between two matrices of a batch


@dataclass(frozen=True)
class Product:
    """``out = a b`` of matrices of m x k and k x n elements; `out` is not transposed."""

    dtype: str  # ``"float32"``, ``"float64"`` or ``"bfloat16"``: of `a` and `b`; `out` of the last is float32
    count: int  # matrices in the batch; 0: the arrays are matrices
    m: int
    k: int
    n: int
    a: Operand
    b: Operand
    out: Operand

    @property
    def kind(self) -> str:
        """One of those in `KINDS`."""
        if self.count:
            return SCORES if self.k < self.n else BATCHED
        return TRANSPOSED if self.a.transposed else PLAIN

    @property
    def bytes(self) -> tuple[int, int]:
        """Of an element of `a` and `b`, and of `out`."""
        return {"float32": (4, 4), "float64": (8, 8), "bfloat16": (2, 4)}[self.dtype]

    @property
    def multiplications(self) -> int:
        """Of numbers."""
        return max(1, self.count) * self.m * self.k * self.n

    @property
    def worth_a_call(self) -> bool:
        """Return True if a library may be asked in place of NumPy: the product is large enough in all directions."""
        return min(self.m, self.n) >= _FEW_ROWS and self.multiplications >= _FEW_MULTIPLICATIONS


# By the characters of their dtypes; bfloat16 is given by its bits.
_DTYPES = {"fff": "float32", "ddd": "float64", "HHf": "bfloat16"}


def product_of(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> Product | None:
    """The product of these arrays of 2 or 3 dimensions; None if only NumPy can do it.

    uint16 stands for the bits of bfloat16, with `out` of float32.
    """
    dtype = _DTYPES.get(a.dtype.char + b.dtype.char + out.dtype.char)
    if dtype is None or not a.ndim == b.ndim == out.ndim or a.ndim not in (2, 3):
        return None
    if a.shape[:-2] != b.shape[:-2] or a.shape[:-2] != out.shape[:-2]:
        return None
    (m, k), n = a.shape[-2:], b.shape[-1]
    if b.shape[-2] != k or out.shape[-2:] != (m, n) or not out.size or not k:
        return None  # NumPy raises, or has nothing to do
    first, second, result = (_operand(each) for each in (a, b, out))
    if first is None or second is None or result is None or result.transposed:
        return None
    return Product(dtype, a.shape[0] if a.ndim == 3 else 0, m, k, n, first, second, result)


def _operand(array: np.ndarray) -> Operand | None:
    if any(stride < 0 or stride % array.itemsize for stride in array.strides):
        return None
    rows, columns = array.shape[-2:]
    *batch, row, column = (stride // array.itemsize for stride in array.strides)
    between = batch[0] if batch else 0
    # Where there is one row or column only, its stride says nothing.
    if (column == 1 or columns == 1) and (row >= columns or rows == 1):
        return Operand(False, max(row, columns), between)
    if (row == 1 or rows == 1) and (column >= rows or columns == 1):
        return Operand(True, max(column, rows), between)
    return None
