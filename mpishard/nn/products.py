"""Matrix products: as they are, or of operands in half precision (mixed-precision training); on devices too.

Micikevicius et al., "Mixed precision training" (2018), section 3: weights and activations stay in float32, operands are
rounded to half precision, and the terms of a product are summed in float32.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mpishard.backend import array as arrays
from mpishard.backend import cublas, gemm
from mpishard.backend.convert import BITS, convert
from mpishard.backend.gemm.choice import VARIABLE, chosen_by_variable, fastest_of
from mpishard.backend.gemm.libraries import Offer
from mpishard.backend.kinds import backend_of
from mpishard.comm.ledger import users_level
from mpishard.comm.staging import is_half
from mpishard.compression.kernels import to_bfloat16
from mpishard.nn.workspace import Pool

Array = Any


# cuBLAS's fast kernels load 16 bytes of half precision at once, so that rows must begin at multiples of that.
ALIGNED = 8
_thread = threading.local()  # has `weights` in a step


class _RoundedWeights:
    """The weights of a step in half precision: those that lie in `flat` are rounded at once, others one by one."""

    def __init__(self, flat: Array) -> None:
        self._flat = flat
        self._halves: dict[np.dtype, Array] = {}
        self._others: dict[Any, Array] = {}

    @property
    def kept(self) -> list[Array]:
        """The rounded arrays."""
        return [*self._halves.values(), *self._others.values()]

    def get(self, weight: Array, dtype: np.dtype, padded: int | None, make: Callable[[], Array]) -> Array:
        """A rounded weight, padded or not; `make` gives it where it lies in another way."""
        address = backend_of(weight).address
        if padded is None and weight.flags.c_contiguous and weight.dtype == self._flat.dtype:
            place, rest = divmod(address(weight) - address(self._flat), weight.itemsize)
            if not rest and 0 <= place <= self._flat.size - weight.size and not place % ALIGNED:
                halves = self._halves.get(dtype)
                if halves is None:
                    halves = self._halves[dtype] = arrays.empty(self._flat.shape, dtype, like=weight)
                    convert(self._flat, halves)
                return halves[place : place + weight.size].reshape(weight.shape)
        key = address(weight), weight.shape, weight.strides, dtype, padded
        if key not in self._others:
            self._others[key] = make()
        return self._others[key]


@contextlib.contextmanager
def weights_stay(flat: Array | None) -> Iterator[None]:
    """Weights change in no product inside, and lie where they are: they are rounded once, at the first product.

    The rounded weights are kept to the end, as those of PyTorch's autocast are. `flat` is the array that weights are
    views of; None: they are rounded at every product.
    """
    outer = _thread.__dict__.get("weights")
    _thread.weights = None if flat is None else _RoundedWeights(flat)
    try:
        yield
    finally:
        _thread.weights = outer


class DeviceProduct:
    """Called like ``numpy.matmul(a, b, out=out)``; sums and results are in the dtype of `out`.

    Operands are rounded to `half`, float16 or bfloat16, if given.
    """

    def __init__(self, half: np.dtype | None) -> None:
        # Of operands that are rounded already: float16, or uint16 for the bits of bfloat16.
        self.rounded_dtype: np.dtype | None = half if half is None or half == np.float16 else BITS

    def __call__(self, a: Array, b: Array, out: Array, accumulate: bool = False) -> Array:
        """``out = a b``, or with `accumulate` ``out += a b``."""
        a, b = self.rounded(a), self.rounded(b)
        if backend_of(out).has_cublas:
            return cublas.multiply(a, b, out, accumulate)
        product = arrays.module_of(out).matmul(*(_widened(each, out.dtype) for each in (a, b)))
        if accumulate:
            out += product
        else:
            out[...] = product
        return out

    def rounded(self, array: Array) -> Array:
        """An operand of any strides as it is multiplied: rounded in new memory, unless that is done or not wanted.

        Rows of a matrix whose length is no multiple of `ALIGNED`, such as logits, have a gap behind them.
        """
        if self.rounded_dtype is None or array.dtype == self.rounded_dtype:
            return array
        transposed = array.ndim > 1 and array.strides[-2] < array.strides[-1]
        rows = array.swapaxes(-1, -2) if transposed else array
        gap = -rows.shape[-1] % ALIGNED if rows.ndim == 2 and rows.shape[0] > 1 else 0
        halves = arrays.empty((*rows.shape[:-1], rows.shape[-1] + gap), self.rounded_dtype, like=array)
        if gap:
            halves = halves[:, :-gap]
        convert(rows, halves)
        return halves.swapaxes(-1, -2) if transposed else halves

    def rounded_weight(self, weight: Array, padded: int | None = None) -> Array:
        """A view of parameters, rounded if weights stay (`weights_stay`), else as it is unless it is to be padded.

        Zeros are added to the dimension `padded`, up to a multiple of `ALIGNED`: where rounded operands have an odd
        extent, such as that of a vocabulary, cuBLAS takes kernels that load single numbers.
        """
        if padded is not None and not weight.shape[padded] % ALIGNED:
            padded = None
        weights = _thread.__dict__.get("weights")
        if self.rounded_dtype is None or (weights is None and padded is None):
            return weight
        if weights is None:
            return self._padded(weight, padded)
        return weights.get(weight, self.rounded_dtype, padded, lambda: self._padded(weight, padded))

    def _padded(self, weight: Array, dim: int | None) -> Array:
        if dim is None:
            return self.rounded(weight)
        extent = weight.shape[dim]
        shape = (*weight.shape[:dim], padded_extent(extent), *weight.shape[dim + 1 :])
        whole = arrays.empty(shape, self.rounded_dtype, like=weight)
        before = [slice(None)] * dim
        convert(weight, whole[(*before, slice(extent))])
        whole[(*before, slice(extent, None))] = 0
        return whole


def padded_extent(extent: int) -> int:
    """The next multiple of `ALIGNED`."""
    return extent + -extent % ALIGNED


def _widened(array: Array, dtype: np.dtype) -> Array:
    if array.dtype == dtype:
        return array
    values = arrays.empty(array.shape, dtype, like=array)
    convert(array, values)
    return values


# Called like ``numpy.matmul(a, b, out=out)``.
Matmul = Callable[..., Array]
_NOTHING = np.empty(0, np.float32)


def make_matmul(module: Any, compute_dtype: Any = None) -> Matmul:
    """The matrix product of the arrays of `module`, with operands rounded to `compute_dtype` where that is given.

    What is too large for `compute_dtype`, float16 or bfloat16, becomes infinite, without a warning. For NumPy's arrays
    a chosen library multiplies bfloat16 (`mpishard.backend.gemm`), batches, which are of attention, stay in
    float32, and else the rounded operands are multiplied in the dtype of the arrays.

    Device arrays get a `DeviceProduct`, which can add the product to `out`: cuBLAS sums rounded operands in float32,
    and the result is not rounded.
    """
    half = None if compute_dtype is None else np.dtype(compute_dtype)
    if module is not np:
        return DeviceProduct(half)
    return gemm.matmul if half is None else _OfRounded(half)


def check_half(what: str, dtype: Any) -> np.dtype:
    """`dtype`, the argument named `what`, as a dtype; raises TypeError unless it is float16 or bfloat16."""
    import ml_dtypes  # noqa: F401 - gives NumPy the name of bfloat16

    try:
        half = np.dtype(dtype)
    except TypeError:
        half = None
    if half is None or not is_half(half):
        raise TypeError(f"{what} is {dtype if half is None else half}; it must be float16 or bfloat16, or None")
    return half


def warn_if_slow(compute_dtype: Any, module: Any) -> None:
    """Warn where half precision costs time instead of saving it."""
    half = np.dtype(compute_dtype)
    if module is np and not (half.name == "bfloat16" and gemm.has_fast_bfloat16()):
        warnings.warn(
            f"compute_dtype={half} on NumPy arrays rounds operands and is slower than float32 here: "
            f"{way_to_fast_products(half, Offer.here(), chosen_by_variable())}",
            UserWarning,
            stacklevel=users_level(),
        )


def way_to_fast_products(half: np.dtype, offer: Offer, chosen: str) -> str:
    """Why products of NumPy arrays in half precision are slow in a process, and what would be fast.

    `chosen`: the value of MPISHARD_PRODUCTS.
    """
    if not offer.bfloat16:
        return "the processor has neither AVX512_BF16 nor AMX; leave compute_dtype out, or pass module=cupy"
    if half.name != "bfloat16":
        return "processors have fast products of bfloat16 alone; give compute_dtype='bfloat16', or pass module=cupy"
    fast = fastest_of(offer)
    if not fast.has_bfloat16:
        return "pip install 'mpishard[fast]' brings the library that multiplies it fast on this processor"
    if chosen:
        return f"{VARIABLE}={chosen} leaves it to NumPy; give bfloat16={fast.libraries['bfloat16.plain']} there"
    return "a mesh chooses the library that multiplies it fast, if all of its ranks have that; pass mesh="


class _OfRounded:
    """The product of NumPy arrays of which each is rounded to half precision."""

    def __init__(self, half: np.dtype) -> None:
        self._half = half
        self._is_bfloat16 = half.name == "bfloat16"

    def __call__(self, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> np.ndarray:
        if self.by_library:
            if a.ndim == 2:
                return gemm.matmul_bfloat16(_bits(a, "left operand"), _bits(b, "right operand"), out)
            return gemm.matmul(a, b, out)  # of attention: see `mpishard.backend.gemm.libraries`
        with np.errstate(over="ignore", invalid="ignore"):
            one, other = (each.astype(self._half).astype(each.dtype) for each in (a, b))
            return gemm.matmul(one, other, out)

    @property
    def by_library(self) -> bool:
        """Return True if a library multiplies the bits of the rounded operands."""
        return self._is_bfloat16 and gemm.has_fast_bfloat16()


def rounded_dtype(matmul: Matmul) -> np.dtype | None:
    """The dtype in which products by `matmul` take rounded operands.

    uint16 for the bits of bfloat16; float16 on devices only; None if they round no operands, or take all as they are:
    those of NumPy's arrays, but for bfloat16 by a library.
    """
    plain = getattr(matmul, "__wrapped__", matmul)  # in a traced step it is wrapped
    if isinstance(plain, DeviceProduct):
        return plain.rounded_dtype
    return BITS if isinstance(plain, _OfRounded) and plain.by_library else None


def multiply_into(
    matmul: Matmul, a: Array, b: Array, out: Array, accumulate: bool, memory: Callable[[], Array]
) -> None:
    """``out = a b``, or ``out += a b``, in one pass where `matmul` can add.

    `memory` gives an array of the shape of `out`, for a product that is added in a second pass.
    """
    if not accumulate:
        matmul(a, b, out=out)
    elif isinstance(matmul, DeviceProduct):
        matmul(a, b, out=out, accumulate=True)
    else:
        product = memory()
        matmul(a, b, out=product)
        out += product


def shared_operand(matmul: Matmul, array: Array, name: str = "shared operand") -> Array:
    """An operand of the next products by `matmul`, rounded once for all of them if they would round it.

    It is overwritten when the next operand of that name is shared.
    """
    if isinstance(matmul, DeviceProduct):
        return matmul.rounded(array)
    return _bits(array, name) if rounded_dtype(matmul) is not None else array


def rounded_weight(matmul: Matmul, weight: Array, padded: int | None = None) -> Array:
    """A view of parameters as products by `matmul` take it.

    On a device, in a step that keeps rounded weights, it is rounded once for all of them; `padded` as for
    `DeviceProduct.rounded_weight`.
    """
    return matmul.rounded_weight(weight, padded) if isinstance(matmul, DeviceProduct) else weight


_rounded = threading.local()


def _bits(array: np.ndarray, name: str) -> np.ndarray:
    """The bits of a matrix as bfloat16, in memory that is used again when the next one of that name is rounded."""
    transposed = array.strides[-2] < array.strides[-1]
    rows = np.ascontiguousarray(array.T if transposed else array)
    if rows.dtype != BITS:
        pool: Pool = _rounded.__dict__.setdefault("pool", Pool())
        values, rows = rows, pool(name, rows.shape, BITS)
        to_bfloat16((values.reshape(-1), rows.reshape(-1), _NOTHING))
    return rows.T if transposed else rows
