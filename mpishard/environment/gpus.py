"""Facts about the GPUs of a process: asked of the driver and of installed packages, without importing CuPy."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mpishard.backend.device_libraries import device_libraries
from mpishard.version import installed

# CuPy's packages, all with the same files: by name the major version of CUDA, empty of one that pip has built.
_CUPY = {"cupy-cuda13x": "13", "cupy-cuda12x": "12", "cupy-cuda11x": "11", "cupy": ""}
_NAME_BYTES = 256


@dataclass(frozen=True)
class Gpu:
    """A GPU that a process can see.

    Parameters
    ----------
    name : str
        Such as ``"NVIDIA H100 80GB HBM3"``.
    memory : int
        Bytes.
    uuid : str
        In hexadecimal digits; the same for all processes that see this GPU.
    """

    name: str
    memory: int
    uuid: str


@dataclass(frozen=True)
class Devices:
    """The GPUs of a process, and what it has for them.  All is empty where there is no GPU.

    Parameters
    ----------
    gpu_list : tuple of Gpu
        All that the process can see, in the order of their numbers.
    gpu_of_rank : int or None
        The number of the one that a mesh of all ranks gives this rank.
    driver_cuda : str
        The newest CUDA that the driver takes, such as ``"13.0"``.
    cupy_cuda : str
        The major version of CUDA of which CuPy's wheel is; empty without CuPy, or if it was built otherwise.
    device_libraries : dict
        Versions of optional libraries by name.
    claims_device_buffers : bool
        Whether the MPI library says that it takes device pointers, right or wrong.
    cupy_packages : tuple of str
        Names of the installed packages that bring CuPy; of several it is not known whose files are there.
    """

    gpu_list: tuple[Gpu, ...] = ()
    gpu_of_rank: int | None = None
    driver_cuda: str = ""
    cupy_cuda: str = ""
    device_libraries: Mapping[str, str] = field(default_factory=dict)
    claims_device_buffers: bool = False
    cupy_packages: tuple[str, ...] = ()

    @property
    def own(self) -> Gpu | None:
        """The GPU of this rank."""
        number = self.gpu_of_rank
        return self.gpu_list[number] if number is not None and number < len(self.gpu_list) else None


def collect_devices(count: int, rank_of_node: int, claims_device_buffers: bool) -> Devices:
    """Ask for the facts of this process.

    Not collective.

    Parameters
    ----------
    count : int
        How many GPUs it sees; with none, nothing is asked.
    rank_of_node : int
        Its number among the ranks that share its memory.
    claims_device_buffers : bool
        See `Devices`.

    Returns
    -------
    Devices
        What could not be asked is left empty.
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
    """Ask the driver for its GPUs, and for its version of CUDA.

    Not collective.

    Parameters
    ----------
    driver : ctypes.CDLL, optional
        The library of the driver; by default, that of this machine.

    Returns
    -------
    tuple of Gpu, and str
        Empty without a driver, or if it refuses.
    """
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
    """Optional libraries for GPUs that are installed as packages, and NCCL if the linker finds one.

    Not collective.

    Returns
    -------
    dict
        Versions by name.
    """
    found = device_libraries()
    if "NCCL" not in found:
        with contextlib.suppress(OSError, AttributeError):
            code = ctypes.c_int(0)
            if not ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(code)):
                found["NCCL"] = version_of_nccl(code.value)
    return found


def version_of_nccl(code: int) -> str:
    """The version in NCCL's own code for it.

    Not collective.

    Parameters
    ----------
    code : int
        Such as 22304, or 2708 of versions before 2.9.

    Returns
    -------
    str
        Such as ``"2.23.4"``.
    """
    of_major = 10000 if code >= 10000 else 1000
    return f"{code // of_major}.{code % of_major // 100}.{code % 100}"
