"""A stand-in for a device array: memory that the host cannot read, and work that is done when its stream is waited for.

`DeviceArray` has what mpishard asks of a CuPy array.  Its pages are closed to the process (a stray touch is a
segmentation fault) except while a staging copy or a kernel runs, and a kernel runs no sooner than somebody waits for
its stream, or for an event on it.  `AwareArray` plays memory under a CUDA-aware MPI: open, and offered through
``__cuda_array_interface__``, but just as late, so that whoever reads it before
`mpishard.backend.array.ready` reads garbage.

Views are as NumPy makes them.  Operations take no NumPy arrays besides their own, as CuPy's do not.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import EllipsisType, SimpleNamespace
from typing import Any

import cuda_on_host
import fake_cublas
import numpy as np
from standin_streams import Event, Stream, current_stream

from mpishard.backend.array import Kernel, copy_to_device
from mpishard.backend.cuda_source import CudaFunction
from mpishard.backend.kinds import Backend, backend_of, register_backend, runs_overlap

GARBAGE = 0xFF  # NaN in every floating-point type
PROT_NONE = 0
_libc = ctypes.CDLL(None, use_errno=True)


class Memory:
    """Pages that are closed unless `opened`."""

    by_page: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()

    def __init__(self, nbytes: int, closed: bool) -> None:
        self._pages = mmap.mmap(-1, max(1, nbytes))
        self.bytes = np.frombuffer(self._pages, np.uint8)
        self.address = self.bytes.ctypes.data
        for first in range(self.address, self.address + self.bytes.size, mmap.PAGESIZE):
            self.by_page[first // mmap.PAGESIZE] = self
        self.bytes[:] = GARBAGE
        self._closed = closed
        self._users = 0
        self._protect(PROT_NONE)

    def _protect(self, access: int) -> None:
        if self._closed and _libc.mprotect(ctypes.c_void_p(self.address), ctypes.c_size_t(self.bytes.size), access):
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
    """An array in `Memory`; made by the functions of its `module`, never from a NumPy array.

    `host` is the same array as the host would see it if the memory were open.
    """

    closed = True

    def __init__(self, memory: Memory, host: np.ndarray) -> None:
        self._memory, self._host = memory, host
        self.shape, self.dtype = host.shape, host.dtype
        self.size, self.ndim, self.itemsize, self.nbytes = host.size, host.ndim, host.itemsize, host.nbytes
        self.strides = host.strides
        self.flags = SimpleNamespace(c_contiguous=host.flags.c_contiguous)

    def _view(self, host: np.ndarray) -> Any:
        return type(self)(self._memory, host)

    def __len__(self) -> int:
        return len(self._host)

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shape}, {self.dtype})"

    @property
    def __array_interface__(self) -> dict[str, Any]:
        raise TypeError("device memory was handed to NumPy; copy it with mpishard.backend.array.to_host")

    def __array_function__(self, function: Any, types: Any, arguments: Any, options: Any) -> Any:
        """``numpy.asarray(values, like=array)`` and the like are those of the module of the array, as CuPy's are."""
        return getattr(backend_of(self).module, function.__name__)(*arguments, **options)

    @contextlib.contextmanager
    def opened(self) -> Iterator[np.ndarray]:
        with self._memory.opened():
            yield self._host

    def reshape(self, *shape: Any) -> Any:
        if self.flags.c_contiguous:
            return self._view(self._host.reshape(*shape))
        return compute(type(self), np.ndarray.reshape, self, *shape)

    def view(self, dtype: Any) -> Any:
        host = self._host.view(dtype)
        if not host.flags.aligned:
            raise ValueError(f"a device reads no {host.dtype} at an address that is not a multiple of its size")
        return self._view(host)

    @property
    def T(self) -> Any:
        return self._view(self._host.T)

    def transpose(self, *axes: int) -> Any:
        return self._view(self._host.transpose(*axes))

    def swapaxes(self, one: int, other: int) -> Any:
        return self._view(self._host.swapaxes(one, other))

    def __getitem__(self, key: Any) -> Any:
        if not _is_basic(key):
            return compute(type(self), operator.getitem, self, key)
        key = key if isinstance(key, tuple) else (key,)
        # With an ellipsis the result is a view, never a number.
        return self._view(self._host[key if Ellipsis in key else (*key, ...)])

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(value, DeviceArray) and not np.isscalar(value):
            raise TypeError(f"cannot assign a {type(value).__name__} to device memory")
        if not _is_basic(key):
            enqueue(operator.setitem, self, key, value)
            return
        target = self[key]
        shape = value.shape if isinstance(value, DeviceArray) else ()
        if shape != target.shape and np.broadcast_shapes(shape, target.shape) != target.shape:
            raise ValueError(f"cannot assign {shape} to {target.shape}")
        if isinstance(value, DeviceArray) and (shape, value.strides) == (target.shape, target.strides):
            _check_as_cupy_copies(target._host, value._host)
        enqueue(_copy, target, value)

    def fill(self, value: float) -> None:
        self[...] = value

    def copy(self) -> DeviceArray:
        other = empty(self.shape, self.dtype, kind=type(self))
        other[...] = self
        return other

    def __deepcopy__(self, memo: Any) -> DeviceArray:
        return self.copy()

    def astype(self, dtype: Any, copy: bool = True) -> DeviceArray:
        if not copy and self.dtype == dtype:
            return self
        return compute(type(self), np.ndarray.astype, self, np.dtype(dtype))

    def __float__(self) -> float:
        host = np.empty(self.shape, self.dtype)
        current_stream().launch(lambda device: np.copyto(host, device), self)
        current_stream().synchronize()
        return float(host)


def _is_basic(key: Any) -> bool:
    """Whether indexing by `key` gives a view."""
    parts = key if isinstance(key, tuple) else (key,)
    return all(part is None or isinstance(part, int | np.integer | slice | EllipsisType) for part in parts)


def _check_as_cupy_copies(target: np.ndarray, value: np.ndarray) -> None:
    """Raise where an assignment of CuPy's differs from NumPy's, for arrays of the same shape and strides."""
    first, other = target.ctypes.data, value.ctypes.data
    if target.size and first == other and target.dtype != value.dtype:
        raise ValueError(
            f"CuPy takes {value.dtype} and {target.dtype} at one address for one array, and copies nothing"
        )
    if target.flags.c_contiguous and first != other and runs_overlap(first, target.nbytes, other, value.nbytes):
        raise ValueError("CuPy copies contiguous memory at once, and CUDA forbids that the two overlap")


def _copy(target: np.ndarray, value: Any) -> None:
    with np.errstate(over="ignore"):
        np.copyto(target, value, casting="unsafe")


def _flat(argument: Any) -> list[Any]:
    return [each for part in argument for each in _flat(part)] if isinstance(argument, tuple) else [argument]


def enqueue(function: Callable[..., Any], /, *arguments: Any, **options: Any) -> list[Any]:
    """Queue ``function`` of the content of `arguments`; its result will be in the list."""
    given = _flat((*arguments, *options.values()))
    if function not in (np.asarray, np.array) and any(isinstance(each, np.ndarray) for each in given):
        raise TypeError(f"{function} of device memory was given a NumPy array")
    results: list[Any] = []

    def work(*hosts: np.ndarray) -> None:
        views = iter(hosts)

        def fill(argument: Any) -> Any:
            if isinstance(argument, tuple):
                return tuple(fill(part) for part in argument)
            return next(views) if isinstance(argument, DeviceArray) else argument

        filled = [fill(argument) for argument in arguments]
        results.append(function(*filled, **{name: fill(argument) for name, argument in options.items()}))

    current_stream().launch(work, *(each for each in given if isinstance(each, DeviceArray)))
    return results


def compute(kind: type[DeviceArray], function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
    """``function`` of the content of `arguments`, as new arrays of `kind`; or into ``out=``, like other queued work."""
    results = enqueue(function, *arguments, **options)
    if "out" in options:
        return options["out"]
    current_stream().synchronize()
    if not isinstance(results[0], np.ndarray | np.generic):
        return results[0]
    made = empty(results[0].shape, results[0].dtype, kind=kind)
    with made.opened() as host:
        np.copyto(host, results[0])
    return made


def _operator(function: Callable[..., Any], *, swapped: bool = False, in_place: bool = False) -> Callable[..., Any]:
    def method(self: DeviceArray, *others: Any, **options: Any) -> Any:
        arguments = (*others, self) if swapped else (self, *others)
        return compute(type(self), function, *arguments, **options, **({"out": self} if in_place else {}))

    return method


_ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "matmul": np.matmul, "truediv": np.divide}
for _name, _function in {**_ARITHMETIC, "pow": np.power}.items():
    setattr(DeviceArray, f"__{_name}__", _operator(_function))
    setattr(DeviceArray, f"__r{_name}__", _operator(_function, swapped=True))
    setattr(DeviceArray, f"__i{_name}__", _operator(_function, in_place=True))
for _name in ("abs", "neg", "ge", "gt", "le", "lt", "and_", "xor", "rshift", "or_"):
    setattr(DeviceArray, f"__{_name.rstrip('_')}__", _operator(getattr(operator, _name)))
for _name in ("max", "mean", "min", "sum"):
    setattr(DeviceArray, _name, _operator(getattr(np, _name)))


class AwareArray(DeviceArray):
    """A `DeviceArray` whose memory an MPI library may read and write itself."""

    closed = False

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        assert self.flags.c_contiguous
        data = self._host.ctypes.data, False
        return {"shape": self.shape, "typestr": self.dtype.str, "data": data, "strides": None, "version": 3}


def empty(shape: int | tuple[int, ...], dtype: Any = np.float64, *, kind: type[DeviceArray] = DeviceArray) -> Any:
    shape = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
    memory = Memory(math.prod(shape) * np.dtype(dtype).itemsize, kind.closed)
    return kind(memory, np.ndarray(shape, dtype, memory.bytes))


def zeros(shape: int | tuple[int, ...], dtype: Any = np.float64, *, kind: type[DeviceArray] = DeviceArray) -> Any:
    array = empty(shape, dtype, kind=kind)
    array.fill(0)
    return array


def on_device(array: np.ndarray) -> Any:
    """A copy of an array of the host."""
    device = empty(array.shape, array.dtype)
    copy_to_device(array, device)
    return device


class Module:
    """The namespace that NumPy and CuPy are for their arrays: any function of NumPy, for arrays of `kind`."""

    __name__ = "standin"

    def __init__(self, kind: type[DeviceArray]) -> None:
        self.ndarray = kind
        self.empty = functools.partial(empty, kind=kind)
        self.zeros = functools.partial(zeros, kind=kind)
        self.linalg = SimpleNamespace(qr=self._qr)

    def _qr(self, matrix: DeviceArray) -> tuple[Any, Any]:
        q, r = (compute(self.ndarray, lambda host, part=part: np.linalg.qr(host)[part], matrix) for part in range(2))
        return q, r

    def asarray(self, values: Any, dtype: Any = None) -> Any:
        """An array of the device is returned as it is."""
        if isinstance(values, self.ndarray) and dtype in (None, values.dtype):
            return values
        return compute(self.ndarray, np.asarray, values, dtype)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(np, name)
        if isinstance(attribute, type) or not callable(attribute):
            return attribute
        function = functools.partial(compute, self.ndarray, attribute)
        if isinstance(attribute, np.ufunc):
            function.at = functools.partial(enqueue, attribute.at)  # type: ignore[attr-defined]
        return function


# Few, so that blocks take several rows of small arrays in turns, and what blocks of an H100 may have.
processors, shared_memory = 3, 232448
_device = contextlib.nullcontext()


class StandIn(Backend):
    """What `mpishard.backend.array` needs to work on `kind`."""

    device = True
    pools_memory = True
    compiles_cuda = cuda_on_host.COMPILER is not None
    has_cublas = True

    def __init__(self, kind: type[DeviceArray]) -> None:
        self.module = Module(kind)

    def ready(self, array: DeviceArray) -> None:
        current_stream().synchronize()

    def to_host(self, source: DeviceArray, target: np.ndarray) -> None:
        if not target.flags.forc:
            raise RuntimeError("`out` cannot be specified when copying to non-contiguous ndarray")
        current_stream().launch(lambda host: np.copyto(target, host), source)
        current_stream().synchronize()

    def to_device(self, source: np.ndarray, target: DeviceArray) -> None:
        if not target._host.flags.forc:
            raise RuntimeError("Cannot set to non-contiguous array")
        current_stream().launch(lambda host: np.copyto(host, source), target)
        current_stream().synchronize()

    def empty(self, size: Any, dtype: Any, like: DeviceArray) -> Any:
        return empty(size, dtype, kind=type(like))

    def zeros(self, size: Any, dtype: Any, like: DeviceArray) -> Any:
        return zeros(size, dtype, kind=type(like))

    def overlap(self, one: DeviceArray, other: DeviceArray) -> bool:
        return runs_overlap(one._host.ctypes.data, one.nbytes, other._host.ctypes.data, other.nbytes)

    def launch(self, kernel: Kernel, arrays: Sequence[DeviceArray], scalars: Sequence[float]) -> list[float]:
        tops: list[float] = []
        current_stream().launch(lambda *hosts: tops.extend(kernel.on_host(hosts, scalars)), *arrays)
        if kernel.largest:  # numbers wait for the stream
            current_stream().synchronize()
        return tops

    def launch_cuda(
        self,
        function: CudaFunction,
        blocks: int,
        threads: int,
        arguments: Sequence[Any],
        reached: Sequence[DeviceArray] = (),
        shared: int = 0,
    ) -> None:
        arrays = [each for each in arguments if isinstance(each, DeviceArray)]

        def work(*hosts: np.ndarray) -> None:
            views = iter(hosts)
            given = [next(views) if isinstance(each, DeviceArray) else each for each in arguments]
            cuda_on_host.run(function, blocks, threads, given, reached=list(views), shared=shared)

        current_stream().launch(work, *arrays, *reached)

    def processors(self, like: DeviceArray) -> int:
        return processors

    def shared_memory(self, like: DeviceArray) -> int:
        return shared_memory

    def current_stream(self, like: DeviceArray) -> Stream:
        return current_stream()

    def new_stream(self, like: DeviceArray) -> Stream:
        return Stream()

    def record(self, like: DeviceArray, stream: Stream) -> Event:
        return stream.record()

    def is_over(self, event: Event) -> bool:
        return event.done

    def current_device(self) -> int:
        return 0

    def start_to_host(self, source: DeviceArray, target: np.ndarray, stream: Stream) -> None:
        assert source.flags.c_contiguous and target.flags.c_contiguous
        stream.launch(lambda host: np.copyto(target, host), source)

    def start_to_device(self, source: np.ndarray, target: DeviceArray, stream: Stream) -> None:
        assert source.flags.c_contiguous and target.flags.c_contiguous
        stream.launch(lambda host: np.copyto(host, source), target)

    def address(self, array: DeviceArray) -> int:
        return array._host.ctypes.data

    def cublas(self, like: DeviceArray, routine: str, *arguments: int) -> None:
        fake_cublas.ROUTINES[routine](fake_cublas.HANDLE, *arguments)

    def device_number(self, array: DeviceArray) -> int:
        return 0

    def on_device_of(self, like: DeviceArray) -> Any:
        return _device


def array_at(address: int, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...] | None = None) -> DeviceArray:
    """The device array at an address that `StandIn.address` has given, for doubles of libraries that take addresses."""
    memory = Memory.by_page.get(address // mmap.PAGESIZE)
    if memory is None or address >= memory.address + memory.bytes.size:
        raise ValueError(f"no device memory at {address:#x}")
    return DeviceArray(memory, np.ndarray(shape, dtype, memory.bytes, address - memory.address, strides))


register_backend(DeviceArray, StandIn(DeviceArray))
register_backend(AwareArray, StandIn(AwareArray))
