"""The differences between NumPy arrays and device arrays: one class a kind, and the table of them.

`mpishard.backend.array` has the functions over both. All that mpishard does with a device goes through a `Backend`, so
that tests can put another in the place of CuPy's where there is no GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

Array = Any
Kernel = Any  # of `mpishard.backend.array`
CudaFunction = Any  # of `mpishard.backend.cuda_source`
Stream = Any  # ``cupy.cuda.Stream``, or what has its methods
Event = Any  # ``cupy.cuda.Event``, likewise
_NOT_READY = 600  # cudaErrorNotReady


class Backend:
    """The functions that mpishard needs for one kind of array, here for NumPy; `module` has its functions.

    Those on streams, events and CUDA functions are of devices only.
    """

    module: Any = np
    device = False
    # Freed memory stays with an allocator, which gives it to whoever asks next on the same stream.  Memory of the host
    # comes from the kernel page by page, so that blocks which are used again and again are worth keeping.
    pools_memory = False
    compiles_cuda = False
    has_cublas = False

    def ready(self, array: Array) -> None:
        pass

    def to_host(self, source: Array, target: np.ndarray) -> None:
        np.copyto(target, source)

    def to_device(self, source: np.ndarray, target: Array) -> None:
        np.copyto(target, source)

    def pinned_empty(self, size: Any, dtype: Any, like: Array) -> np.ndarray:
        return np.empty(size, dtype)

    def empty(self, size: Any, dtype: Any, like: Array) -> Array:
        return np.empty(size, dtype)

    def zeros(self, size: Any, dtype: Any, like: Array) -> Array:
        return np.zeros(size, dtype)

    def overlap(self, one: Array, other: Array) -> bool:
        return np.may_share_memory(one, other)

    def launch(self, kernel: Kernel, arrays: Sequence[Array], scalars: Sequence[float]) -> list[float]:
        return kernel.on_host(arrays, scalars)

    def device_number(self, like: Array) -> int:
        """The number of the device that `like` is on."""
        return 0

    def on_device_of(self, like: Array) -> AbstractContextManager[Any]:
        """A context in which the device of `like` is the current one; it can be entered again, in any thread."""
        return nullcontext()

    # -- devices only -------------------------------------------------------------------------------------------------

    def launch_cuda(
        self,
        function: CudaFunction,
        blocks: int,
        threads: int,
        arguments: Sequence[Any],
        reached: Sequence[Array] = (),
        shared: int = 0,
    ) -> None:
        """Queue a CUDA function on the current stream, with the arguments of `mpishard.backend.cuda_source.launch`.

        The first array is of this backend; scalars are NumPy's, of the right types.
        """
        raise NotImplementedError

    def processors(self, like: Array) -> int:
        """Multiprocessors of the device of `like`."""
        raise NotImplementedError

    def shared_memory(self, like: Array) -> int:
        """The most bytes of shared memory that a block may have there."""
        raise NotImplementedError

    def current_stream(self, like: Array) -> Stream:
        """The stream on which this thread queues work for the device of `like`."""
        raise NotImplementedError

    def new_stream(self, like: Array) -> Stream:
        """A stream that does not wait for others implicitly; ``with stream:`` makes it the current one."""
        raise NotImplementedError

    def record(self, like: Array, stream: Stream) -> Event:
        """An event that is over when what is queued on `stream` is; it has ``done`` and ``synchronize()``.

        ``other_stream.wait_event(event)`` lets another stream wait for it.
        """
        raise NotImplementedError

    def is_over(self, event: Event) -> bool:
        """Return True if an event is over, for callers that poll: raises the error of a device that has failed."""
        raise NotImplementedError

    def current_device(self) -> int:
        """The `device_number` of the device on which arrays that this thread makes are, and on which it computes."""
        raise NotImplementedError

    def release_pinned(self) -> None:
        """Give pinned memory that nobody holds back to the system.  It may wait for all that a device does."""

    def start_to_host(self, source: Array, target: np.ndarray, stream: Stream) -> None:
        """Queue a copy of contiguous memory to pinned memory, which must live until the copy is over."""
        raise NotImplementedError

    def start_to_device(self, source: np.ndarray, target: Array, stream: Stream) -> None:
        """Queue a copy of pinned memory to contiguous memory of the device, as `start_to_host`."""
        raise NotImplementedError

    def address(self, array: Array) -> int:
        """The device address of the first element."""
        raise NotImplementedError

    def cublas(self, like: Array, routine: str, *arguments: int) -> None:
        """Queue a routine of ``cupy_backends.cuda.libs.cublas`` on the current stream of the device of `like`.

        `arguments` follow the handle; scalars are given by their address in the memory of the host.
        """
        raise NotImplementedError


class CuPyBackend(Backend):
    """CuPy's arrays."""

    device = True
    pools_memory = True
    compiles_cuda = True

    def __init__(self) -> None:
        import cupy

        self.module = cupy
        self.has_cublas = not cupy.cuda.runtime.is_hip
        self._functions: dict[tuple[CudaFunction, int], Any] = {}
        self._attributes: dict[int, dict[str, int]] = {}

    def device_number(self, like: Array) -> int:
        return like.device.id

    def on_device_of(self, like: Array) -> AbstractContextManager[Any]:
        return like.device

    def ready(self, array: Array) -> None:
        with array.device:
            self.module.cuda.get_current_stream().synchronize()

    def to_host(self, source: Array, target: np.ndarray) -> None:
        with source.device:
            source.get(out=target)
            self.module.cuda.get_current_stream().synchronize()

    def to_device(self, source: np.ndarray, target: Array) -> None:
        with target.device:
            target.set(source)
            self.module.cuda.get_current_stream().synchronize()

    def pinned_empty(self, size: Any, dtype: Any, like: Array) -> np.ndarray:
        if not np.prod(size):
            return np.empty(size, dtype)
        with like.device:
            nbytes = int(np.prod(size)) * np.dtype(dtype).itemsize
            return np.ndarray(size, dtype, buffer=self.module.cuda.alloc_pinned_memory(nbytes))

    def empty(self, size: Any, dtype: Any, like: Array) -> Array:
        with like.device:
            return self.module.empty(size, dtype)

    def zeros(self, size: Any, dtype: Any, like: Array) -> Array:
        with like.device:
            return self.module.zeros(size, dtype)

    def overlap(self, one: Array, other: Array) -> bool:
        return runs_overlap(one.data.ptr, one.nbytes, other.data.ptr, other.nbytes)

    def launch(self, kernel: Kernel, arrays: Sequence[Array], scalars: Sequence[float]) -> list[float]:
        with arrays[0].device:
            return kernel.on_cupy(self.module, arrays, scalars)

    def launch_cuda(
        self,
        function: CudaFunction,
        blocks: int,
        threads: int,
        arguments: Sequence[Any],
        reached: Sequence[Array] = (),
        shared: int = 0,
    ) -> None:
        device = arguments[function.first_array].device
        compiled = self._functions.get((function, device.id))
        with device:
            if compiled is None:
                module = self.module.RawModule(code=function.code, options=function.options)
                compiled = self._functions[function, device.id] = module.get_function(function.name)
            if shared and shared != compiled.max_dynamic_shared_size_bytes:
                compiled.max_dynamic_shared_size_bytes = shared
            compiled((blocks,), (threads,), tuple(arguments), shared_mem=shared)

    def processors(self, like: Array) -> int:
        return self._attribute("MultiProcessorCount", like.device)

    def shared_memory(self, like: Array) -> int:
        return self._attribute("MaxSharedMemoryPerBlockOptin", like.device)

    def _attribute(self, name: str, device: Any) -> int:
        attributes = self._attributes.get(device.id)
        if attributes is None:  # CUDA is asked for all of them at each access
            attributes = self._attributes[device.id] = device.attributes
        return int(attributes.get(name, 0))

    def current_stream(self, like: Array) -> Stream:
        with like.device:
            return self.module.cuda.get_current_stream()

    def new_stream(self, like: Array) -> Stream:
        with like.device:
            return self.module.cuda.Stream(non_blocking=True)

    def record(self, like: Array, stream: Stream) -> Event:
        with like.device:
            event = self.module.cuda.Event(disable_timing=True)
            event.record(stream)
            return event

    def is_over(self, event: Event) -> bool:
        runtime = self.module.cuda.runtime
        status = runtime.eventQuery(event.ptr)
        if status not in (0, _NOT_READY):
            event.synchronize()  # raises what `done` takes for "not yet", for ever
        return bool(status == 0)

    def current_device(self) -> int:
        return int(self.module.cuda.runtime.getDevice())

    def release_pinned(self) -> None:
        self.module.get_default_pinned_memory_pool().free_all_blocks()

    def start_to_host(self, source: Array, target: np.ndarray, stream: Stream) -> None:
        with source.device:
            source.data.copy_to_host_async(target.ctypes.data, source.nbytes, stream)

    def start_to_device(self, source: np.ndarray, target: Array, stream: Stream) -> None:
        with target.device:
            target.data.copy_from_host_async(source.ctypes.data, target.nbytes, stream)

    def address(self, array: Array) -> int:
        return array.data.ptr

    def cublas(self, like: Array, routine: str, *arguments: int) -> None:
        with like.device:
            # The routine sets the stream of the handle to the current one.
            getattr(self._cublas, routine)(self.module.cuda.device.get_cublas_handle(), *arguments)

    @functools.cached_property
    def _cublas(self) -> Any:
        from cupy_backends.cuda.libs import cublas

        return cublas


_backends: dict[type, Backend | None] = {np.ndarray: Backend()}


def register_backend(kind: type, backend: Backend) -> None:
    """Use `backend` for arrays of the class `kind`."""
    _backends[kind] = backend


def name_of_kind(array: Any) -> str:
    """The class of an array, for messages."""
    return f"{type(array).__module__}.{type(array).__name__}"


def find_backend(array: Any) -> Backend | None:
    """The backend of an array; None if it is none that mpishard works on."""
    kind = type(array)
    if kind not in _backends:
        if isinstance(array, np.ndarray):
            _backends[kind] = _backends[np.ndarray]
        elif kind.__module__.partition(".")[0] == "cupy" and kind.__name__ == "ndarray":
            _backends[kind] = cupy_backend()
        else:
            _backends[kind] = None
    return _backends[kind]


def backend_of(array: Any) -> Backend:
    """The backend of an array; TypeError if it is none."""
    backend = find_backend(array)
    if backend is None:
        raise TypeError(f"expected a NumPy or CuPy array, got {name_of_kind(array)}")
    return backend


@functools.cache
def cupy_backend() -> CuPyBackend:
    """That of CuPy; ModuleNotFoundError where it is not installed."""
    return CuPyBackend()


def runs_overlap(one: int, one_nbytes: int, other: int, other_nbytes: int) -> bool:
    """Return True if two runs of bytes, given by address and length, overlap."""
    return max(one, other) < min(one + one_nbytes, other + other_nbytes)
