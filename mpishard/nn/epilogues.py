"""GELU in the epilogue of a matrix product on devices, where a library has it and it is proven."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpishard.backend import array as arrays
from mpishard.backend.convert import convert
from mpishard.backend.cublas import CublasLt, Shape, cublaslt_on_device
from mpishard.nn import device_kernels
from mpishard.nn.device_products import weights_stay
from mpishard.nn.products import Matmul, rounded_dtype, rounded_weight, shared_operand
from mpishard.nn.tensor_parallel import TensorParallel
from mpishard.nn.workspace import Workspace

Array = Any

# The small problem: rows that are not whole tiles of a kernel.
TRIAL = Shape(rows=150, width=64, inner=256)
# Of the norm: by how many roundings of half precision two right results may differ.
TRIAL_ROUNDINGS = 8


class GELUEpilogues:
    """Bias and GELU in the kernel of the product before, and a backward pass that has all but sums in half precision.

    The backward pass is a product and a separate kernel: cuBLASLt has an epilogue for it, but on an H200 that was a
    product and a second kernel, of 322 us for 16384 rows of 3072 channels.
    """

    def __init__(self, library: CublasLt, matmul: Matmul, half: np.dtype) -> None:
        self.half: np.dtype = half
        self._library = library
        self._matmul = matmul

    def forward(self, x_nc: Array, weight_cd: Array, bias_d: Array, before_nd: Array, y_nd: Array) -> None:
        """``y = GELU(x W + bias)``; `before`, for `backward`, gets what GELU is applied to.

        `x` is rounded or not; `weight` and `bias` are views of parameters; `before` and `y`, of shape (n, d), are in
        half precision.
        """
        self._library.forward(self._rounded(x_nc), self._weight(weight_cd), self._weight(bias_d), before_nd, y_nd)

    def backward(self, dy_nc: Array, weight_dc: Array, before_nd: Array, dbias_d: Array, work: Workspace) -> Array:
        """Gradient by `before`, of shape (n, d) in half precision, which the next call overwrites.

        `dy`, of shape (n, c), is the gradient by the product of `y` and the view `weight` of a second weight, of shape
        (d, c). The gradient by the bias, summed in the dtype of activations, is added to `dbias`.
        """
        dbefore_nd = work.scratch("gradient before GELU", before_nd.shape, self.half)
        self._matmul(self._rounded(dy_nc), self._weight(weight_dc).T, out=dbefore_nd)
        device_kernels.gelu_backward_of_rounded(dbefore_nd, before_nd, dbias_d)
        return dbefore_nd

    def _rounded(self, array: Array) -> Array:
        return shared_operand(self._matmul, array)

    def _weight(self, weight: Array) -> Array:
        """Rounded, once a step where weights stay as they are."""
        return self._rounded(rounded_weight(self._matmul, weight))


def choose_epilogues(
    matmul: Matmul, tensor: TensorParallel, x_nc: Array, inner: int, work: Workspace
) -> GELUEpilogues | None:
    """The epilogues for rows `x` and GELU of `inner` channels; None: GELU is a separate kernel.

    They are used only if operands are rounded, the model is one slice, and a small problem was computed right.
    """
    half = rounded_dtype(matmul)
    # Tensor ranks have replicas whose bits must not differ, and each rank finds out on its own whether its library is
    # right.  Texts that are generated have other rows with every token.
    if half is None or tensor.slices.total > 1 or work.cache is not None or not x_nc.flags.c_contiguous:
        return None
    library = cublaslt_on_device(x_nc)
    if library is None or not library.takes(Shape(len(x_nc), x_nc.shape[1], inner), half, x_nc):
        return None
    if half not in library.proven:
        _prove(library, matmul, half, x_nc)
    return GELUEpilogues(library, matmul, half) if half in library.proven else None


def _prove(library: CublasLt, matmul: Matmul, half: np.dtype, like: Array) -> None:
    """Note that a small problem is right within the precision, or give the library up."""
    if not library.takes(TRIAL, half, like):
        return
    random = np.random.default_rng(0)
    rows, width, inner = TRIAL
    shapes = (rows, width), (width, inner), (inner,), (rows, width), (inner, width)
    scales = 1, width**-0.5, 1, 1, width**-0.5
    operands = [
        arrays.on_device_of((scale * random.standard_normal(shape)).astype(np.float32), like)
        for shape, scale in zip(shapes, scales, strict=True)
    ]
    try:
        with weights_stay(None):  # those of the small problem are gone soon
            found = _by_epilogues(GELUEpilogues(library, matmul, half), *operands)
        expected = _by_kernels(matmul, *operands)
    except Exception as error:  # of several classes, some of them nvmath's own
        library.give_up(f"a product of cuBLASLt with epilogues fails ({error})")
        return
    precision = 2.0**-11 if half == np.float16 else 2.0**-8
    for name, right in expected.items():
        distance = np.linalg.norm(found[name] - right) / np.linalg.norm(right)
        if not distance < TRIAL_ROUNDINGS * precision:  # NaN is no smaller
            library.give_up(f"by the epilogues of cuBLASLt {name} differs by {distance:.1e} from that by kernels")
            return
    library.proven.add(half)


def _by_epilogues(
    epilogues: GELUEpilogues, x: Array, weight: Array, bias: Array, dy: Array, second: Array
) -> dict[str, np.ndarray]:
    work = Workspace(x.dtype, arrays.module_of(x))
    before, y = (arrays.empty((len(x), len(bias)), epilogues.half, like=x) for _ in range(2))
    dbias = arrays.zeros(bias.shape, bias.dtype, like=x)
    epilogues.forward(x, weight, bias, before, y)
    dbefore = epilogues.backward(dy, second, before, dbias, work)
    return _on_host(GELU=y, gradient=dbefore, bias_gradient=dbias)


def _by_kernels(
    matmul: Matmul, x: Array, weight: Array, bias: Array, dy: Array, second: Array
) -> dict[str, np.ndarray]:
    slope, y, dbefore = (arrays.empty((len(x), len(bias)), x.dtype, like=x) for _ in range(3))
    dbias = arrays.zeros(bias.shape, bias.dtype, like=x)
    matmul(x, weight, out=slope)
    device_kernels.gelu(slope, bias, y)
    matmul(dy, second.T, out=dbefore)
    device_kernels.gelu_backward(dbefore, slope, dbias)
    return _on_host(GELU=y, gradient=dbefore, bias_gradient=dbias)


def _on_host(**results: Array) -> dict[str, np.ndarray]:
    """The results by name, in float32."""
    host = {}
    for name, result in results.items():
        values = result
        if result.dtype != np.float32:
            values = arrays.empty(result.shape, np.float32, like=result)
            convert(result, values)
        host[name.replace("_", " ")] = arrays.to_host(values)
    return host
