"""A stand-in for a device array: memory that the host cannot read, and work that is done when its stream is waited for.

`DeviceArray` has what mpishard asks of a CuPy array.  Its pages are closed to the process (a stray touch is a
segmentation fault) except while a staging copy or a kernel runs, and a kernel runs no sooner than its stream is
synchronised.  `AwareArray` plays memory under a CUDA-aware MPI: open, and offered through
``__cuda_array_interface__``, but just as late, so that whoever reads it before `mpishard.array.ready` reads garbage.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from mpishard.array import Backend, Kernel, register_backend

GARBAGE = 0xFF  # NaN in every floating-point type
PROT_NONE = 0
_libc = ctypes.CDLL(None, use_errno=True)


class Stream:
    """Work in the order in which it was queued, none of it done before `synchronize`."""

    def __init__(self) -> None:
        self.queue: list[tuple[Callable[..., object], Sequence[DeviceArray]]] = []

    def launch(self, work: Callable[..., object], *arrays: DeviceArray) -> None:
        """Queue ``work(*host_views_of_arrays)``."""
        self.queue.append((work, arrays))

    def synchronize(self) -> None:
        while self.queue:
            work, arrays = self.queue.pop(0)
            with contextlib.ExitStack() as stack:
                work(*(stack.enter_context(array.opened()) for array in arrays))


stream = Stream()


class Memory:
    """Pages that are closed unless `opened`."""

    def __init__(self, nbytes: int, closed: bool) -> None:
        self._pages = mmap.mmap(-1, max(1, nbytes))
        self.bytes = np.frombuffer(self._pages, np.uint8)
        self.bytes[:] = GARBAGE
        self._closed = closed
        self._users = 0
        self._protect(PROT_NONE)

    def _protect(self, access: int) -> None:
        address = ctypes.c_void_p(self.bytes.ctypes.data)
        if self._closed and _libc.mprotect(address, ctypes.c_size_t(self.bytes.size), access):
            raise OSError(ctypes.get_errno(), "mprotect failed")

    @contextlib.contextmanager
    def opened(self) -> Iterator[np.ndarray]:
        if self._users == 0:
            self._protect(mmap.PROT_READ | mmap.PROT_WRITE)
        self._users += 1
        try:
            yield self.bytes
        finally:
            self._users -= 1
            if self._users == 0:
                self._protect(PROT_NONE)


class DeviceArray:
    """A contiguous array in `Memory`; made by the functions of its `module`, never from a NumPy array."""

    closed = True

    def __init__(self, memory: Memory, start: int, shape: tuple[int, ...], dtype: Any) -> None:
        self._memory, self._start = memory, start
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.flags = SimpleNamespace(c_contiguous=True)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shape}, {self.dtype})"

    @property
    def __array_interface__(self) -> dict[str, Any]:
        raise TypeError("device memory was handed to NumPy; copy it with mpishard.array.to_host")

    @contextlib.contextmanager
    def opened(self) -> Iterator[np.ndarray]:
        with self._memory.opened() as memory:
            yield memory[self._start : self._start + self.nbytes].view(self.dtype).reshape(self.shape)

    def reshape(self, *shape: Any) -> DeviceArray:
        if len(shape) == 1 and isinstance(shape[0], tuple | list):
            shape = tuple(shape[0])
        known = math.prod(extent for extent in shape if extent != -1)
        shape = tuple(self.size // max(known, 1) if extent == -1 else extent for extent in shape)
        if math.prod(shape) != self.size:
            raise ValueError(f"cannot reshape {self.shape} to {shape}")
        return type(self)(self._memory, self._start, shape, self.dtype)

    def __getitem__(self, key: Any) -> DeviceArray:
        if key is Ellipsis or key == slice(None):
            return self
        if self.ndim != 1 or not isinstance(key, slice) or key.step not in (None, 1):
            raise TypeError(f"the stand-in slices flat arrays by [start:stop] alone, not {self.shape} by {key!r}")
        start, stop, _ = key.indices(self.size)
        offset = self._start + start * self.dtype.itemsize
        return type(self)(self._memory, offset, (max(0, stop - start),), self.dtype)

    def __setitem__(self, key: Any, value: Any) -> None:
        target = self[key]
        if isinstance(value, DeviceArray):
            if value.shape != target.shape:
                raise ValueError(f"cannot assign {value.shape} to {target.shape}")
            stream.launch(np.copyto, target, value)
        elif np.isscalar(value):
            stream.launch(lambda host: host.fill(value), target)
        else:
            raise TypeError(f"cannot assign a {type(value).__name__} to device memory")

    def fill(self, value: float) -> None:
        self[...] = value

    def copy(self) -> DeviceArray:
        other = empty(self.shape, self.dtype, kind=type(self))
        other[...] = self
        return other

    def astype(self, dtype: Any) -> DeviceArray:
        return compute(type(self), np.ndarray.astype, self, np.dtype(dtype))

    def __float__(self) -> float:
        host = np.empty(self.shape, self.dtype)
        stream.launch(lambda device: np.copyto(host, device), self)
        stream.synchronize()
        return float(host)


def compute(kind: type[DeviceArray], function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """``function`` of the content of `arguments`, as new arrays of `kind`; or into ``out=``, like other queued work."""
    arrays = [a for a in (*arguments, *options.values()) if isinstance(a, DeviceArray)]
    results: list[Any] = []

    def work(*hosts: np.ndarray) -> None:
        views = iter(hosts)
        filled = [next(views) if isinstance(a, DeviceArray) else a for a in arguments]
        named = {name: next(views) if isinstance(a, DeviceArray) else a for name, a in options.items()}
        results.append(function(*filled, **named))

    stream.launch(work, *arrays)
    if "out" in options:
        return options["out"]
    stream.synchronize()
    if not isinstance(results[0], np.ndarray | np.generic):
        return results[0]
    made = empty(results[0].shape, results[0].dtype, kind=kind)
    with made.opened() as host:
        np.copyto(host, results[0])
    return made


def _operator(function: Callable[..., Any], *, swapped: bool = False, in_place: bool = False) -> Callable[..., Any]:
    def method(self: DeviceArray, *others: Any) -> Any:
        arguments = (*others, self) if swapped else (self, *others)
        return compute(type(self), function, *arguments, **({"out": self} if in_place else {}))

    return method


for _name in ("add", "sub", "mul", "truediv", "pow"):
    _function = {"sub": np.subtract, "mul": np.multiply, "truediv": np.divide, "pow": np.power}.get(_name, np.add)
    setattr(DeviceArray, f"__{_name}__", _operator(_function))
    setattr(DeviceArray, f"__r{_name}__", _operator(_function, swapped=True))
    setattr(DeviceArray, f"__i{_name}__", _operator(_function, in_place=True))
for _name, _function in {
    "__abs__": np.abs,
    "__neg__": np.negative,
    "max": np.max,
    "min": np.min,
    "sum": np.sum,
}.items():
    setattr(DeviceArray, _name, _operator(_function))


class AwareArray(DeviceArray):
    """A `DeviceArray` whose memory an MPI library may read and write itself."""

    closed = False

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        address = self._memory.bytes.ctypes.data + self._start
        return {"shape": self.shape, "typestr": self.dtype.str, "data": (address, False), "strides": None, "version": 3}


def empty(shape: int | tuple[int, ...], dtype: Any = np.float64, *, kind: type[DeviceArray] = DeviceArray) -> Any:
    shape = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
    memory = Memory(math.prod(shape) * np.dtype(dtype).itemsize, kind.closed)
    return kind(memory, 0, shape, dtype)


def zeros(shape: int | tuple[int, ...], dtype: Any = np.float64, *, kind: type[DeviceArray] = DeviceArray) -> Any:
    array = empty(shape, dtype, kind=kind)
    array.fill(0)
    return array


class Module:
    """The namespace that NumPy and CuPy are for their arrays: any function of NumPy, for arrays of `kind`."""

    __name__ = "standin"

    def __init__(self, kind: type[DeviceArray]) -> None:
        self.ndarray = kind
        self.empty = functools.partial(empty, kind=kind)
        self.zeros = functools.partial(zeros, kind=kind)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(np, name)
        if isinstance(attribute, type) or not callable(attribute):
            return attribute
        return functools.partial(compute, self.ndarray, attribute)


class StandIn(Backend):
    """What `mpishard.array` needs to work on `kind`."""

    device = True

    def __init__(self, kind: type[DeviceArray]) -> None:
        self.module = Module(kind)

    def ready(self, array: DeviceArray) -> None:
        stream.synchronize()

    def to_host(self, source: DeviceArray, target: np.ndarray) -> None:
        stream.launch(lambda host: np.copyto(target, host), source)
        stream.synchronize()

    def to_device(self, source: np.ndarray, target: DeviceArray) -> None:
        stream.launch(lambda host: np.copyto(host, source), target)
        stream.synchronize()

    def empty(self, size: Any, dtype: Any, like: DeviceArray) -> Any:
        return empty(size, dtype, kind=type(like))

    def zeros(self, size: Any, dtype: Any, like: DeviceArray) -> Any:
        return zeros(size, dtype, kind=type(like))

    def launch(self, kernel: Kernel, arrays: Sequence[DeviceArray], scalars: Sequence[float]) -> None:
        stream.launch(lambda *hosts: kernel.on_host(hosts, scalars), *arrays)


register_backend(DeviceArray, StandIn(DeviceArray))
register_backend(AwareArray, StandIn(AwareArray))
