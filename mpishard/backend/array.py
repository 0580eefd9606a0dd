"""One interface to two kinds of arrays: NumPy on the host, CuPy on a device.

The differences between the kinds are in `mpishard.backend.kinds`: memory, copies, the readiness gate, launches of
kernels. CuPy is imported when the first CuPy array appears, and not before. A host array comes to the device of
another one by ``numpy.asarray(values, like=array)``.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
from collections.abc import Callable, Container, Sequence
from typing import Any

import numpy as np

from mpishard.backend.elementwise import Formula, FormulaSource
from mpishard.backend.jit_function import HostFunction
from mpishard.backend.kinds import backend_of, cupy_backend, find_backend, name_of_kind
from mpishard.backend.ranges import Ranges

Array = Any
# Debug mode: memory that nobody has written shows in each sum that reads it.
_POISONS = os.environ.get("MPISHARD_DEBUG", "0") not in ("", "0")
FLOATS = frozenset({np.dtype(np.float32), np.dtype(np.float64)})  # dtypes of parameters


class Kernel:
    """A formula compiled for whole arrays: one pass over memory, in place. Made by `elementwise`.

    In `c_body`, the formula in C for one element of type ``T``, arrays are lvalues ``array_NAME``, scalars ``NAME_``.
    """

    def __init__(self, formula: Callable[..., Any]) -> None:
        translated = Formula(formula)
        self.__doc__ = formula.__doc__
        self.name: str = translated.name
        self.arrays: tuple[str, ...] = translated.arrays
        self.scalars: tuple[str, ...] = translated.scalars
        self.written: tuple[str, ...] = translated.written
        self.largest: tuple[str, ...] = translated.largest
        self.c_body: str = translated.c_body
        self._translated = translated
        self._device: dict[tuple[str, ...], Any] = {}  # by the types of the written arrays

    @functools.cached_property
    def _host(self) -> HostFunction:
        return HostFunction(self._translated.as_function())

    @functools.cached_property
    def _cuda(self) -> FormulaSource:
        return FormulaSource(self)

    def __repr__(self) -> str:
        return f"Kernel({self.name}: {', '.join(self.arrays)} / {', '.join(self.scalars)})"

    def __call__(self, *arguments: Any) -> list[float]:
        """Apply the formula to arrays (1-D, contiguous, of one size, dtype and device), then scalars; on a GPU queued.

        Scalars are rounded to the arrays' dtype, float32 or float64; an array that is only written may be of bool. The
        bits of a result do not depend on the slice. Returns the largest absolute values that the formula asks for,
        infinite if one is infinite or NaN. Raises TypeError or ValueError for arrays that do not go together.
        """
        count = len(self.arrays)
        if len(arguments) != count + len(self.scalars):
            wanted = ", ".join((*self.arrays, *self.scalars))
            raise TypeError(f"{self.name} takes the arguments {wanted}, got {len(arguments)} of them")
        arrays, scalars, first = arguments[:count], arguments[count:], arguments[0]
        backend, kind, dtype, shape = backend_of(first), type(first), first.dtype, first.shape
        like_first = [
            type(array) is kind and array.dtype is dtype and array.shape == shape and array.flags.c_contiguous
            for array in arrays
        ]
        if not (all(like_first) and len(shape) == 1 and dtype in FLOATS):
            self._check(arrays)
        if not first.size:
            return [0.0] * len(self.largest)
        tops = backend.launch(self, arrays, tuple(map(float, scalars)))
        return [top if math.isfinite(top) else math.inf for top in tops] if tops else tops

    def over_ranges(self, rows: Sequence[Sequence[Array]], ranges: Ranges, scalars: Sequence[Sequence[float]]) -> None:
        """Apply the formula to parts of arrays, with separate scalars: one launch on a device that compiles CUDA.

        Each row has the arrays of one call, all of one dtype and on one device; ranges choose from the sets of scalars.
        The bits are those of one call for each range. The ranges that are written must not overlap. Keep `ranges` from
        call to call: it knows what the device knows. Raises TypeError if the formula asks for largest values.
        """
        if self.largest:
            raise TypeError(f"{self.name} returns largest values, which are of one call; call it for each range")
        if not (rows and runs_cuda(rows[0][0])):
            for number, start, stop, choice in ranges.all:
                row = rows[number]
                parts = row if stop - start == row[0].size else [array[start:stop] for array in row]
                self(*parts, *scalars[choice])
            return
        if any(len(each) != len(self.scalars) for each in scalars):
            raise TypeError(f"{self.name} takes the scalars {', '.join(self.scalars)}")
        for row in rows:
            if len(row) != len(self.arrays):
                raise TypeError(f"{self.name} takes the arrays {', '.join(self.arrays)}, got {len(row)} of them")
            if any(array.dtype != rows[0][0].dtype for array in row):
                raise TypeError(f"{self.name}: arrays of all ranges must be of one dtype")
            self._check(row)
        self._cuda.over_ranges(rows, ranges, [tuple(map(float, each)) for each in scalars])

    def _check(self, arrays: Sequence[Array]) -> None:
        """Raise unless the arrays fit the formula and each other."""
        backend, first = backend_of(arrays[0]), arrays[0]
        for name, array in zip(self.arrays, arrays, strict=True):
            if type(array) is not type(first) and backend_of(array) is not backend:
                kinds = f"{self.arrays[0]} is a {name_of_kind(first)} but {name} is a {name_of_kind(array)}"
                raise TypeError(f"{self.name}: arrays must all be in one kind of memory, but {kinds}")
            is_mask = array.dtype == np.bool_ and name in self.written
            if not is_mask and (array.dtype != first.dtype or array.dtype not in FLOATS):
                dtypes = f"{self.arrays[0]} is {first.dtype} and {name} is {array.dtype}"
                raise TypeError(f"{self.name}: arrays must all be float32 or all float64, but {dtypes}")
            if array.ndim != 1 or array.size != first.size or not array.flags.c_contiguous:
                shapes = f"{self.arrays[0]} has shape {first.shape} and {name} has shape {array.shape}"
                gaps = "" if array.flags.c_contiguous else " with gaps in memory"
                raise ValueError(f"{self.name}: arrays must be flat, contiguous, of one size, but {shapes}{gaps}")

    def expect(self, like: Array, masks: Container[str] = ()) -> None:
        """Announce a call with arrays like this one, those called `masks` of bool (see `HostFunction.expect`).

        For a device nothing is compiled ahead.
        """
        if not is_device(like):
            arrays = [np.empty(0, np.uint8 if name in masks else like.dtype) for name in self.arrays]
            self._host.expect(arrays, [0.0 for _ in self.scalars])

    def on_host(self, arrays: Sequence[np.ndarray], scalars: Sequence[float]) -> list[float]:
        """Run the Numba loop on NumPy arrays that were checked; returns the largest absolute values."""
        for name, array in zip(self.arrays, arrays, strict=True):
            if not array.flags.writeable and name in self.written:
                raise ValueError(f"{self.name} changes {name}, but that array is read-only")
        arrays = [array.view(np.uint8) if array.dtype.kind == "b" else array for array in arrays]
        tops = self._host(arrays, scalars)
        return np.array(tops, np.int64).view(np.float64).tolist() if self.largest else []

    def on_cupy(self, cupy: Any, arrays: Sequence[Any], scalars: Sequence[float]) -> list[float]:
        """Queue a ``cupy.ElementwiseKernel`` of the same formula; returns the largest absolute values.

        With these it is a CUDA function of mpishard: CuPy's have no maximum in addition to the elements.
        """
        if self.largest:
            return self._cuda.with_largest(arrays, scalars)
        named = dict(zip(self.arrays, arrays, strict=True))
        kinds = tuple("bool" if named[name].dtype == np.bool_ else "T" for name in self.written)
        if kinds not in self._device:
            read = [name for name in self.arrays if name not in self.written]
            self._device[kinds] = cupy.ElementwiseKernel(
                ", ".join([*(f"T array_{name}" for name in read), *(f"T {name}_" for name in self.scalars)]),
                ", ".join(f"{kind} array_{name}" for kind, name in zip(kinds, self.written, strict=True)),
                self.c_body,
                f"mpishard_{self.name}",
                # Contracting a * b + c would give other bits than the host.
                options=("--fmad=false",),
                no_return=True,
            )
        real = arrays[0].dtype.type
        inputs = [array for name, array in named.items() if name not in self.written]
        self._device[kinds](*inputs, *map(real, scalars), *(named[name] for name in self.written))
        return []


def elementwise(formula: Callable[..., Any]) -> Kernel:
    """Make a `Kernel` of a scalar formula, for NumPy (through Numba) and for CuPy (through CUDA C).

    The formula reads like a function of one element.  Parameters before the ``/`` are arrays, those after it
    are scalars; it returns the names of the arrays it changes.  It consists of assignments of arithmetic,
    conditional expressions and calls of ``sqrt``, ``abs``, ``exp``, ``log``, ``tanh``, ``copysign``, ``min``
    and ``max``.  It may return ``largest(name)``, too: the largest absolute value of all elements' `name`::

        @elementwise
        def descend(p, g, /, lr):
            p = p - lr * g
            return p

        descend(parameters, gradients, 0.1)

    The formula is computed in the dtype of the arrays, float32 or float64, constants included.
    At definition a formula that has anything else raises TypeError, which names the line.
    """
    return Kernel(formula)


def largest(name: float) -> float:
    """The largest absolute value of an array in what an element-wise formula returns: see `elementwise`."""
    return abs(name)


def check_module(module: Any) -> None:
    """Raise TypeError unless `module` makes arrays, and RuntimeError if it is CuPy and there is no GPU."""
    if not callable(getattr(module, "zeros", None)):
        raise TypeError(f"module is {module!r}; it must be the module numpy or cupy itself")
    if getattr(module, "__name__", "") == "cupy":
        try:
            module.cuda.runtime.getDevice()
        except Exception as error:  # CuPy's own, of a driver or a device that is missing
            raise RuntimeError(
                f"module=cupy needs a GPU, and CuPy finds none ({error}); `mpishard info` shows what this process "
                "sees, and module=numpy computes without a GPU"
            ) from None


def is_array(a: Any) -> bool:
    """Return True if `a` is an array of a kind that mpishard works on."""
    return find_backend(a) is not None


def is_device(a: Any) -> bool:
    """Return True if `a` is an array in device memory; False if it is no array."""
    if type(a) is np.ndarray:
        return False  # what follows, for the most frequent case
    backend = find_backend(a)
    return backend is not None and backend.device


def check_current(a: Array) -> None:
    """Raise ValueError for an array on another device than the current one of this thread.

    CuPy would compute there, reading through the bus what other streams may not have written.
    """
    if is_device(a):
        backend = backend_of(a)
        own, current = backend.device_number(a), backend.current_device()
        if own != current:
            raise ValueError(
                f"the arrays are on GPU {own}, but this thread computes on GPU {current}: begin with "
                f"cupy.cuda.Device({own}).use()"
            )


def runs_cuda(a: Any) -> bool:
    """Return True if `a` is a device array for which CUDA functions are compiled (`mpishard.backend.cuda_source`)."""
    if type(a) is np.ndarray:
        return False  # what follows, for the most frequent case
    backend = find_backend(a)
    return backend is not None and backend.compiles_cuda


def device_count() -> int:
    """The number of CUDA devices that this process can see; asks the driver, without importing CuPy."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def can_pin(nbytes: int = 2**20) -> bool:
    """Return True if CuPy is installed and can pin `nbytes` bytes of host memory."""
    try:
        device_module().cuda.alloc_pinned_memory(nbytes)
    except Exception:  # ImportError, or one of several CuPy errors
        return False
    return True


def device_module() -> Any:
    """CuPy; ModuleNotFoundError where it is not installed."""
    return cupy_backend().module


def module_of(a: Array) -> Any:
    """The module of the array `a`: ``numpy`` or ``cupy``."""
    return backend_of(a).module


def ready(a: Array) -> None:
    """Wait until the work queued on `a` is done, so that something other than its stream may read it.

    For CuPy this synchronises the current stream of the calling thread on the device of `a`: call it in the thread, and
    with the stream, that computed `a`. For NumPy it does nothing.
    """
    backend_of(a).ready(a)


def copy_to_host(device_array: Array, host_array: np.ndarray) -> None:
    """Copy `device_array` into `host_array` of the same shape and dtype, in stream order; done on return.

    It runs at the full speed of the bus if `host_array` comes from `pinned_empty`; the driver stages other memory
    through its pinned buffers.
    """
    _check_copy(device_array, host_array)
    if host_array.size:
        backend_of(device_array).to_host(device_array, host_array)


def copy_to_device(host_array: np.ndarray, device_array: Array) -> None:
    """Copy `host_array` into `device_array` of the same shape and dtype; done on return, as `copy_to_host`.

    NumPy's arrays are taken too: their device is the host.
    """
    _check_copy(device_array, host_array)
    if host_array.size:
        backend_of(device_array).to_device(host_array, device_array)


def _check_copy(device_array: Array, host_array: np.ndarray) -> None:
    if not isinstance(host_array, np.ndarray):
        raise TypeError(f"the host side of a copy must be a NumPy array, got {type(host_array).__name__}")
    if device_array.shape != host_array.shape or device_array.dtype != host_array.dtype:
        raise ValueError(
            f"cannot copy between {device_array.dtype}{device_array.shape} on the device "
            f"and {host_array.dtype}{host_array.shape} on the host"
        )


def pinned_empty(size: int | tuple[int, ...], dtype: Any, like: Array) -> np.ndarray:
    """Uninitialised pinned host memory, which the device of `like` copies at full speed; plain memory for NumPy."""
    return backend_of(like).pinned_empty(size, dtype, like)


def overlap(one: Array, other: Array) -> bool:
    """Return True if two contiguous arrays share memory; those of two kinds never do, nor an empty one with any."""
    if type(one) is type(other) is np.ndarray:
        return np.may_share_memory(one, other)  # what follows, for the most frequent case
    backend = backend_of(one)
    return backend is backend_of(other) and backend.overlap(one, other)


def to_host(a: Array) -> np.ndarray:
    """A new NumPy array with the content of an array in device memory; anything else itself."""
    if not is_device(a):
        return a
    host = np.empty(a.shape, a.dtype)
    copy_to_host(a, host)
    return host


def digest(*parts: Array, seed: int = 0) -> int:
    """A hash of 62 bits of the values of arrays, at least 0."""
    import xxhash  # imported at the first use, not with the package

    hasher = xxhash.xxh3_64(seed=seed)
    for part in parts:
        hasher.update(np.ascontiguousarray(to_host(part)).data)
    return int(hasher.intdigest()) >> 2


def as_array(a: Any) -> Array:
    """`a` itself if it is an array in device memory, else ``numpy.asarray(a)``, with its errors."""
    return a if is_device(a) else np.asarray(a)


def empty(size: int | tuple[int, ...], dtype: Any, like: Array) -> Array:
    """A new uninitialised array on the device of `like`; with ``MPISHARD_DEBUG=1`` it holds NaN."""
    made = backend_of(like).empty(size, dtype, like)
    if _POISONS and made.dtype.kind == "f":
        made[...] = np.nan
    return made


def zeros(size: int | tuple[int, ...], dtype: Any, like: Array) -> Array:
    """A new array of zeros on the device of `like`."""
    return backend_of(like).zeros(size, dtype, like)


def contiguous(a: Array, dtype: Any) -> Array:
    """`a` in one run of memory and of a dtype, as formulas take it; itself if it is."""
    found = a.astype(dtype, copy=False)
    return found if found.flags.c_contiguous else found.copy()


def aligned_copy(a: Array) -> Array:
    """A copy of `a` that JAX can share: on the host it begins at a multiple of 64 bytes, unlike most NumPy arrays."""
    if is_device(a):
        check_current(a)
        return a.copy()
    copy = _aligned_empty(a.size, a.dtype).reshape(a.shape)
    np.copyto(copy, a)
    return copy


def joined(parts: Sequence[Array]) -> Array:
    """The elements of arrays one after the other in a new flat array, which JAX can share as an `aligned_copy`."""
    flat = tuple(part.reshape(-1) for part in parts)
    if is_device(flat[0]):
        check_current(flat[0])
        return module_of(flat[0]).concatenate(flat)
    return np.concatenate(flat, out=_aligned_empty(sum(part.size for part in flat), flat[0].dtype))


def _aligned_empty(size: int, dtype: np.dtype) -> np.ndarray:
    memory = np.empty(size * dtype.itemsize + 64, np.uint8)
    first = -memory.ctypes.data % 64
    return memory[first : first + size * dtype.itemsize].view(dtype)


@elementwise
def accumulate(total, addend, /):  # type: ignore[no-untyped-def]
    """``total += addend``, for flat arrays of both kinds."""
    total = total + addend
    return total
