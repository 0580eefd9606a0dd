"""Facts that one process collects about its MPI, its libraries and its machine."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import platform
import resource
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import h5py
from mpi4py import MPI
from threadpoolctl import threadpool_info

from mpishard.backend.array import can_pin, device_count
from mpishard.backend.gemm.choice import Choice, chosen_by_variable, fastest_of
from mpishard.backend.gemm.libraries import TAKES, Offer, installed, loadable
from mpishard.backend.numba_cache import kept_in
from mpishard.backend.optional_library import device_libraries
from mpishard.backend.process import chosen_by_user, cpu_quota, own_cores
from mpishard.comm.capabilities import (
    Capabilities,
    claims_device_buffers,
    could_heal_in_place,
    heals_in_place,
    library_path,
    probe,
)
from mpishard.launch.detection import Launch, launches
from mpishard.launch.launchers import Launcher, find_launcher
from mpishard.version import CUPY_PACKAGES, versions
from mpishard.version import installed as installed_packages

# Facts about the GPUs of a process: asked of the driver and of installed packages, without importing CuPy.

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
    packages = tuple(installed_packages({name: [name] for name in CUPY_PACKAGES}))
    return Devices(
        gpu_list=gpus,
        gpu_of_rank=rank_of_node % count,
        driver_cuda=driver,
        cupy_cuda=packages[0].partition("cuda")[2].rstrip("x") if packages else "",
        device_libraries=device_libraries(),
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


# -- MPI, libraries and the machine ------------------------------------------------------------------------------------

_THREAD_LEVELS = {
    MPI.THREAD_SINGLE: "MPI_THREAD_SINGLE",
    MPI.THREAD_FUNNELED: "MPI_THREAD_FUNNELED",
    MPI.THREAD_SERIALIZED: "MPI_THREAD_SERIALIZED",
    MPI.THREAD_MULTIPLE: "MPI_THREAD_MULTIPLE",
}
_SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class Blas:
    """A BLAS library of this process.

    Parameters
    ----------
    library, version : str
        As `threadpoolctl` reports them, such as ``"openblas"`` and ``"0.3.28"``.
    kernels : str
        The processor type whose kernels the library has chosen; empty if the library does not report it.
    threads : int
        Number of threads when the facts were collected; a mesh limits it to this rank's share of the cores.
    """

    library: str
    version: str
    kernels: str
    threads: int


@dataclass(frozen=True)
class Process:
    """A process among others.

    Parameters
    ----------
    rank, ranks : int
        Rank of the process in ``MPI_COMM_WORLD``, and the size of ``MPI_COMM_WORLD``.
    host : str
        Name of the machine.
    node : int
        The lowest rank that shares memory with this process.
    launches : tuple of Launch
        The launches that launchers report in the environment.
    """

    rank: int
    ranks: int
    host: str
    node: int
    launches: tuple[Launch, ...]


@dataclass(frozen=True)
class MpiSetup:
    """How MPI was built and started, and what starts it.

    Parameters
    ----------
    mpi_text : str
        The MPI library's own full version text.
    thread_level : str
        Such as ``"MPI_THREAD_MULTIPLE"``.
    heals, could_heal : bool
        Whether a run heals the death of a rank in place, and whether it could with this MPI if started differently.
    without_han : bool
        Whether Open MPI's hierarchical collectives, which crash after a death, are off.
    mpirun, mpirun_on_path : Launcher or None
        The mpirun next to this Python, or else that on the PATH; and that on the PATH if it is a different one.  Only
        rank 0 looks for them.
    mpi_path : str
        The file of the MPI library that is loaded; empty if the system does not say.
    """

    mpi_text: str
    thread_level: str
    heals: bool
    could_heal: bool
    without_han: bool
    mpirun: Launcher | None
    mpirun_on_path: Launcher | None
    mpi_path: str = ""


@dataclass(frozen=True)
class H5py:
    """How h5py was built.

    Parameters
    ----------
    h5py_mpi : bool
        Whether with MPI, which mpishard does not need.
    h5py_lacks : tuple of str
        Filters that checkpoints offer, and that this h5py does not have.
    """

    h5py_mpi: bool
    h5py_lacks: tuple[str, ...]


@dataclass(frozen=True)
class Processor:
    """The libraries and cores with which the process computes on the host.

    Parameters
    ----------
    blas : tuple of Blas
        The libraries that are loaded.
    blas_chosen : str
        Environment variable with the user's choice of the number of BLAS threads; empty without a choice.
    cores : tuple of int
        Numbers of the cores on which the process may run.
    cpu_quota : float or None
        CPU time, as a number of cores, that the process may use together with its control group; None: no limit.
    products : str
        The libraries that a mesh of ranks with one thread takes for matrix products on this machine, see
        `mpishard.backend.gemm.choice`; empty on other ranks than 0.
    products_chosen : str
        What the user chose by MPISHARD_PRODUCTS; empty without a choice.
    products_fast : str
        As `products`, if the extra ``fast`` were installed and the user had no choice; empty where it has no packages.
    kernels : str
        The folder of the kernels that `mpishard compile` has compiled for this processor; empty without them, and on
        other ranks than 0.
    kernels_own : str
        A folder where processes of this user keep the kernels that they compile; empty where none can be written, and
        on other ranks than 0.
    """

    blas: tuple[Blas, ...]
    blas_chosen: str
    cores: tuple[int, ...]
    cpu_quota: float | None
    products: str = ""
    products_chosen: str = ""
    products_fast: str = ""
    kernels: str = ""
    kernels_own: str = ""


@dataclass(frozen=True)
class Memory:
    """GPUs, and memory of the host that they and MPI use.

    Parameters
    ----------
    gpus : int
        Number of GPUs that the process can see.
    pins_memory : bool
        Whether the process can pin host memory for the GPUs.
    locked_memory, shared_memory, shared_memory_free : int or None
        Bytes: the most that the process may lock; size of ``/dev/shm``; free space there.  None: unlimited, or no such
        folder.
    """

    gpus: int
    pins_memory: bool
    locked_memory: int | None
    shared_memory: int | None
    shared_memory_free: int | None


@dataclass(frozen=True)
class Facts:
    """The facts of one process.  Ranks send them to each other, and ``mpishard info --json`` prints them for each rank.

    Parameters
    ----------
    process : Process
        Its rank, its machine, and who started it.
    versions : dict
        See `mpishard.version.versions`; also the version of HDF5.
    mpi : Capabilities
        The name and version of the MPI library, and what it can do.
    mpi_setup : MpiSetup
        How it was built and started.
    h5py : H5py
        What checkpoints are written with.
    processor : Processor
        Cores and BLAS.
    memory : Memory
        How many GPUs, and memory.
    devices : Devices
        Which GPUs, and the libraries for them.
    """

    process: Process
    versions: dict[str, str]
    mpi: Capabilities
    mpi_setup: MpiSetup
    h5py: H5py
    processor: Processor
    memory: Memory
    devices: Devices = field(default_factory=Devices)

    def flat(self) -> dict[str, Any]:
        """The facts by name, without their groups, as ``mpishard info --json`` prints them.

        Not collective.

        Returns
        -------
        dict
            For JSON: the fields of the groups, the versions by package, and the fields of `mpi`.
        """
        found: dict[str, Any] = {}
        for name, value in asdict(self).items():
            found |= {name: value} if name in ("versions", "mpi") else value
        return found


def collect(comm: MPI.Intracomm) -> Facts:
    """Collect the facts of this process.

    Collective over `comm`; no error of a single rank makes others wait.  If the MPI claims to accept device pointers, a
    child process tests whether it does.

    Parameters
    ----------
    comm : MPI.Intracomm
        Usually ``MPI.COMM_WORLD``.

    Returns
    -------
    Facts
        Those of this rank; ``comm.allgather`` gives them to all.
    """
    shared = comm.Split_type(MPI.COMM_TYPE_SHARED)
    node, rank_of_node = shared.bcast(comm.rank), shared.rank
    shared.Free()
    gpus = device_count()
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    mpirun, on_path = _launchers() if comm.rank == 0 else (None, None)
    shared_memory, shared_memory_free = _shared_memory()
    quota = cpu_quota()
    kernels, kernels_own = kept_in() if comm.rank == 0 else (None, None)
    return Facts(
        process=Process(
            rank=comm.rank,
            ranks=comm.size,
            host=platform.node(),
            node=node,
            launches=launches(os.environ),
        ),
        versions={**versions(), "HDF5": h5py.version.hdf5_version, **loadable()},
        mpi=probe(device=True),
        mpi_setup=MpiSetup(
            mpi_text=MPI.Get_library_version().strip("\0\n "),
            thread_level=_THREAD_LEVELS[MPI.Query_thread()],
            heals=heals_in_place(),
            could_heal=could_heal_in_place(),
            without_han=_without_han(os.environ.get("OMPI_MCA_coll", "")),
            mpirun=mpirun,
            mpirun_on_path=on_path,
            mpi_path=library_path(),
        ),
        h5py=H5py(
            h5py_mpi=bool(h5py.get_config().mpi),
            h5py_lacks=() if h5py.h5z.filter_avail(h5py.h5z.FILTER_DEFLATE) else ("gzip",),
        ),
        processor=Processor(
            blas=_blas(),
            blas_chosen=chosen_by_user() or "",
            cores=tuple(sorted(own_cores())),
            cpu_quota=None if math.isinf(quota) else quota,
            products=_products() if comm.rank == 0 else "",
            products_chosen=chosen_by_variable(),
            products_fast=_products_fast(platform.machine(), Offer.here()) if comm.rank == 0 else "",
            kernels=str(kernels or ""),
            kernels_own=kernels_own or "",
        ),
        memory=Memory(
            gpus=gpus,
            pins_memory=gpus > 0 and can_pin(),
            locked_memory=None if locked == resource.RLIM_INFINITY else locked,
            shared_memory=shared_memory,
            shared_memory_free=shared_memory_free,
        ),
        devices=collect_devices(gpus, rank_of_node, gpus > 0 and claims_device_buffers()),
    )


def _without_han(components: str) -> bool:
    """Return True if a list of Open MPI's collective components excludes ``han``: as ``^han``, or by not naming it."""
    if components.startswith("^"):
        return "han" in components[1:].split(",")
    return bool(components) and "han" not in components.split(",")


def _launchers() -> tuple[Launcher | None, Launcher | None]:
    """The mpirun next to this Python or else on the PATH, and that on the PATH if it is a different one."""
    found: list[Launcher | None] = []
    for path in (None, shutil.which("mpirun")):
        try:
            found.append(find_launcher(path))
        except (ValueError, OSError):
            found.append(None)
    first, second = found
    if first is not None and second is not None and os.path.realpath(first.path) == os.path.realpath(second.path):
        second = None
    return first, second


def _blas() -> tuple[Blas, ...]:
    """Those that NumPy and other packages brought; libraries for products get their threads from mpishard."""
    own = {os.path.realpath(path) for path in installed().values()}
    return tuple(
        Blas(str(each["internal_api"]), str(each["version"]), str(each.get("architecture") or ""), each["num_threads"])
        for each in threadpool_info()
        if each["user_api"] == "blas" and os.path.realpath(each["filepath"]) not in own
    )


def _products() -> str:
    offer, forced = Offer.here(), chosen_by_variable()
    if forced:
        with contextlib.suppress(ValueError):  # it is among the findings
            return str(Choice.parse(forced).limited_to(offer.versions))
        return ""
    return str(fastest_of(offer))


def _products_fast(machine: str, offer: Offer) -> str:
    """The libraries that would multiply if the extra ``fast`` were installed; empty where it has none."""
    if machine != "x86_64":
        return ""
    libraries = {*offer.versions, *TAKES} - {each.library for each in _blas()}  # NumPy may multiply by one of them
    return str(fastest_of(offer._replace(versions=dict.fromkeys(libraries, ""))))


def _shared_memory() -> tuple[int | None, int | None]:
    try:
        usage = shutil.disk_usage(_SHARED_MEMORY)
    except OSError:
        return None, None
    return usage.total, usage.free
