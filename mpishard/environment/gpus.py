"""Facts about the GPUs of a process: asked of the driver and of installed packages, without importing CuPy."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mpishard.backend.optional_library import device_libraries
from mpishard.version import installed

# CuPy's packages, all with the same files: by name the major version of CUDA, empty of one that pip has built.
_CUPY = {"cupy-cuda13x": "13", "cupy-cuda12x": "12", "cupy-cuda11x": "11", "cupy": ""}
_NAME_BYTES = 256


@dataclass(frozen=True)
class Gpu:
    """A GPU that a process can see."""

    name: str
    memory: int  # bytes
    uuid: str  # in hexadecimal digits; the same for all processes that see this GPU


@dataclass(frozen=True)
class Devices:
    """The GPUs of a process, and its libraries for them; all is empty without a GPU."""

    gpu_list: tuple[Gpu, ...] = ()  # all that the process can see, in the order of their numbers
    gpu_of_rank: int | None = None  # the number of the one that a mesh of all ranks gives this rank
    driver_cuda: str = ""  # the newest CUDA that the driver takes, such as "13.0"
    # The major version of CUDA of which CuPy's wheel is; empty without CuPy, or if it was built otherwise.
    cupy_cuda: str = ""
    device_libraries: Mapping[str, str] = field(default_factory=dict)  # versions of optional libraries by name
    claims_device_buffers: bool = False  # the MPI library says that it takes device pointers, right or wrong
    # Names of the installed packages that bring CuPy; of several it is not known whose files are used.
    cupy_packages: tuple[str, ...] = ()

    @property
    def own(self) -> Gpu | None:
        """The GPU of this rank."""
        number = self.gpu_of_rank
        return self.gpu_list[number] if number is not None and number < len(self.gpu_list) else None


def collect_devices(count: int, rank_of_node: int, claims_device_buffers: bool) -> Devices:
    """The facts of this process, which sees `count` GPUs; fields without an answer, or all without a GPU, stay empty.

    `rank_of_node` is its number among the ranks that share its memory; `claims_device_buffers`: see `Devices`.
    """
    if not count:
        return Devices()
    gpus, driver = gpus_of_driver()
    packages = tuple(installed({name: [name] for name in _CUPY}))
    return Devices(
        gpu_list=gpus,
        gpu_of_rank=rank_of_node % count,
        driver_cuda=driver,
        cupy_cuda=_CUPY[packages[0]] if packages else "",
        device_libraries=libraries(),
        claims_device_buffers=claims_device_buffers,
        cupy_packages=packages,
    )


def gpus_of_driver(driver: Any = None) -> tuple[tuple[Gpu, ...], str]:
    """Ask the driver (default: of this machine) for its GPUs and its version of CUDA; empty if it fails."""
    if driver is None:
        try:
            driver = ctypes.CDLL("libcuda.so.1")
        except OSError:
            return (), ""
    number = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDriverGetVersion(ctypes.byref(number)):
        return (), ""
    version = f"{number.value // 1000}.{number.value % 1000 // 10}"
    if driver.cuDeviceGetCount(ctypes.byref(number)):
        return (), version
    found = [_gpu(driver, index) for index in range(number.value)]
    return tuple(gpu for gpu in found if gpu is not None), version


def _gpu(driver: Any, index: int) -> Gpu | None:
    device, nbytes = ctypes.c_int(0), ctypes.c_size_t(0)
    name, uuid = ctypes.create_string_buffer(_NAME_BYTES), ctypes.create_string_buffer(16)
    if driver.cuDeviceGet(ctypes.byref(device), index) or driver.cuDeviceGetName(name, _NAME_BYTES, device):
        return None
    if driver.cuDeviceTotalMem_v2(ctypes.byref(nbytes), device) or driver.cuDeviceGetUuid(uuid, device):
        return None
    return Gpu(name.value.decode("utf-8", "replace"), nbytes.value, uuid.raw.hex())


def libraries() -> dict[str, str]:
    """Versions by name of optional libraries for GPUs that are installed as packages, and of NCCL from the linker."""
    found = device_libraries()
    if "NCCL" not in found:
        with contextlib.suppress(OSError, AttributeError):
            code = ctypes.c_int(0)
            if not ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(code)):
                found["NCCL"] = version_of_nccl(code.value)
    return found


def version_of_nccl(code: int) -> str:
    """The version, such as ``"2.23.4"``, in NCCL's own code for it: 22304, or 2708 of versions before 2.9."""
    of_major = 10000 if code >= 10000 else 1000
    return f"{code // of_major}.{code % of_major // 100}.{code % 100}"
