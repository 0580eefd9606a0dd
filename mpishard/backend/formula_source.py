"""CUDA functions of an element-wise formula: for many ranges in one launch, and with largest absolute values.

The formula stands in the source as the text that `mpishard.backend.elementwise` has made of it, so that its bits are
those of the host and of a launch for each range.  CuPy compiles with ``-ftz=true``, though: on a GPU a float32 below
2^-126 counts as zero in a formula, as in all kernels of CuPy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mpishard.backend.cuda_source import CudaFunction, CudaSource, launch
from mpishard.backend.kinds import backend_of
from mpishard.backend.ranges import Ranges

Array = Any
Kernel = Any  # of `mpishard.backend.array`
# Contracting a * b + c would give other bits than the host.
OPTIONS = ("--fmad=false",)
CHUNK = 4096  # elements of a block: 4 packs of float32 for each thread
_THREADS = 256
_MOST_BLOCKS = 1024


class FormulaSource:
    """The CUDA functions of one kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._source = CudaSource(None, OPTIONS, _source(kernel))

    def function(self, dtype: Any) -> CudaFunction:
        """The function for arrays of a dtype."""
        return self._source.function(_name(self._kernel), REAL=dtype)

    def over_ranges(self, rows: Sequence[Sequence[Array]], ranges: Ranges, scalars: Sequence[Sequence[float]]) -> None:
        """Queue the formula for all ranges: one launch.  Arguments as of `Kernel.over_ranges`, checked."""
        first = rows[0][0]
        launch(
            self.function(first.dtype),
            ranges.blocks(CHUNK),
            _THREADS,
            ranges.table(rows, CHUNK),
            ranges.scalars(scalars, first),
            len(ranges),
            CHUNK,
            reached=[array for row in rows for array in row],
        )

    def with_largest(self, arrays: Sequence[Array], scalars: Sequence[float]) -> list[float]:
        """Queue the formula for whole arrays, and wait for the largest absolute values."""
        first, count = arrays[0], len(self._kernel.largest)
        backend = backend_of(first)
        tops = backend.zeros(count, np.uint64, first)
        blocks = min(_MOST_BLOCKS, -(-first.size // _THREADS))
        launch(self.function(first.dtype), blocks, _THREADS, *arrays, *scalars, first.size, tops)
        found = np.empty(count, np.uint64)
        backend.to_host(tops, found)
        return [top if math.isfinite(top) else math.inf for top in found.view(np.float64).tolist()]


def sources_of(kernels: Iterable[Kernel]) -> list[CudaFunction]:
    """The generated functions of kernels, for float32 and for float64, in their order."""
    return [FormulaSource(kernel).function(dtype) for kernel in kernels for dtype in (np.float32, np.float64)]


def _name(kernel: Kernel) -> str:
    return f"{kernel.name}_{'with_largest' if kernel.largest else 'over_ranges'}"


def _source(kernel: Kernel) -> str:
    arrays = [f"{'' if name in kernel.written else 'const '}REAL" for name in kernel.arrays]
    parameters = [f"{kind}& array_{name}" for kind, name in zip(arrays, kernel.arrays, strict=True)]
    parameters += [f"const REAL {name}_" for name in kernel.scalars]
    parameters += [f"REAL& largest{number}" for number in range(len(kernel.largest))]
    found = [f"largest{number} = fabs({name}_);" for number, name in enumerate(kernel.largest)]
    element = [
        f"__device__ __forceinline__ void element({', '.join(parameters)}) {{",
        "typedef REAL T;",
        kernel.c_body,
        *found,
        "}",
    ]
    return "\n".join([*element, *(_with_largest(kernel) if kernel.largest else _over_ranges(kernel)), ""])


def _over_ranges(kernel: Kernel) -> list[str]:
    """A block has one chunk of one range; see `Ranges.table`."""
    numbered = list(enumerate(kernel.arrays))
    scalars = [f"own[{number}]" for number in range(len(kernel.scalars))]
    const = {name: "" if name in kernel.written else "const " for name in kernel.arrays}
    aligned = " && ".join(f"is_aligned(all{number})" for number, _ in numbered)
    return [
        f'extern "C" __global__ void {_name(kernel)}('
        "const long long* table, const double* scalars, int ranges, int chunk) {",
        "const long long *sizes = table + ranges + 1, *choices = sizes + ranges, *addresses = choices + ranges;",
        "const int range = range_of(table, ranges, blockIdx.x);",
        "const long long begin = (blockIdx.x - table[range]) * chunk, left = sizes[range] - begin;",
        "const int size = left < chunk ? (int)left : chunk, width = sizeof(Pack<REAL>) / sizeof(REAL);",
        *(
            f"{const[name]}REAL* all{number} = ({const[name]}REAL*)addresses[{number}LL * ranges + range] + begin;"
            for number, name in numbered
        ),
        *_own_scalars(len(scalars)),
        f"const int packed = {aligned} ? size / width * width : 0;",
        "for (int i = threadIdx.x * width; i < packed; i += blockDim.x * width) {",
        *(f"Pack<REAL> pack{number} = *(const Pack<REAL>*)(all{number} + i);" for number, _ in numbered),
        "for (int j = 0; j < width; j++)",
        f"element({', '.join([*(f'pack{number}.of[j]' for number, _ in numbered), *scalars])});",
        *(f"*(Pack<REAL>*)(all{number} + i) = pack{number};" for number, name in numbered if not const[name]),
        "}",
        "for (int i = packed + threadIdx.x; i < size; i += blockDim.x)",
        f"element({', '.join([*(f'all{number}[i]' for number, _ in numbered), *scalars])});",
        "}",
    ]


def _own_scalars(count: int) -> list[str]:
    if not count:
        return []
    own = f"own[i] = (REAL)scalars[choices[range] * {count} + i];"
    return [f"REAL own[{count}];", f"for (int i = 0; i < {count}; i++) {own}"]


def _with_largest(kernel: Kernel) -> list[str]:
    """Without their sign, floating-point numbers order like the integers of the same bits, NaN on top."""
    arrays = [f"{'' if name in kernel.written else 'const '}REAL* all_{name}" for name in kernel.arrays]
    numbers = range(len(kernel.largest))
    given = [*(f"all_{name}[i]" for name in kernel.arrays), *(f"(REAL){name}_" for name in kernel.scalars)]
    parameters = [*arrays, *(f"double {name}_" for name in kernel.scalars), "long long count"]
    return [
        f'extern "C" __global__ void {_name(kernel)}({", ".join([*parameters, "unsigned long long* tops"])}) {{',
        *(f"unsigned long long top{number} = 0;" for number in numbers),
        "for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; "
        "i += (long long)gridDim.x * blockDim.x) {",
        *(f"REAL largest{number};" for number in numbers),
        f"element({', '.join([*given, *(f'largest{number}' for number in numbers)])});",
        *(
            line
            for number in numbers
            for line in (
                f"const unsigned long long bits{number} = __double_as_longlong((double)largest{number});",
                f"top{number} = bits{number} > top{number} ? bits{number} : top{number};",
            )
        ),
        "}",
        *(f"top{number} = warp_max(top{number});" for number in numbers),
        "if (threadIdx.x % WARP == 0) {",
        *(f"atomicMax(tops + {number}, top{number});" for number in numbers),
        "}",
        "}",
    ]
