"""Facts that one process collects about its MPI, its libraries and its machine."""

from __future__ import annotations

import math
import os
import platform
import resource
import shutil
from dataclasses import dataclass

import h5py
from mpi4py import MPI
from threadpoolctl import threadpool_info

from mpishard.backend.array import can_pin, device_count
from mpishard.backend.blas_threads import chosen_by_user, cpu_quota, own_cores
from mpishard.comm.capabilities import Capabilities, could_heal_in_place, heals_in_place, probe
from mpishard.launch.detection import Launch, launches
from mpishard.launch.launchers import Launcher, find_launcher
from mpishard.version import versions

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
class Facts:
    """The facts of one process.  Ranks send them to each other, and ``mpishard info --json`` prints them for each rank.

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
    versions : dict
        See `mpishard.version.versions`; also the version of HDF5.
    mpi : Capabilities
        The name and version of the MPI library, and what it can do.
    mpi_text : str
        The MPI library's own full version text.
    thread_level : str
        Such as ``"MPI_THREAD_MULTIPLE"``.
    heals, could_heal : bool
        Whether a run heals the death of a rank in place, and whether it could with this MPI if started differently.
    without_han : bool
        Whether Open MPI's hierarchical collectives, which crash after a death, are off.
    mpirun, mpirun_on_path : Launcher or None
        The mpirun beside this Python, or else that on the PATH; and that on the PATH if it is a different one.  Only
        rank 0 looks for them.
    h5py_mpi : bool
        Whether h5py was built with MPI, which mpishard does not need.
    h5py_lacks : tuple of str
        Features that checkpoints need or offer, and that this h5py does not have.
    blas : tuple of Blas
        The libraries that are loaded.
    blas_chosen : str
        Environment variable with the user's choice of the number of BLAS threads; empty without a choice.
    cores : tuple of int
        Numbers of the cores on which the process may run.
    cpu_quota : float or None
        CPU time, as a number of cores, that the process may use together with its control group; None: no limit.
    gpus : int
        Number of GPUs that the process can see.
    pins_memory : bool
        Whether the process can pin host memory for the GPUs.
    locked_memory, shared_memory, shared_memory_free : int or None
        Bytes: the most that the process may lock; size of ``/dev/shm``; free space there.  None: unlimited, or no such
        folder.
    """

    rank: int
    ranks: int
    host: str
    node: int
    launches: tuple[Launch, ...]
    versions: dict[str, str]
    mpi: Capabilities
    mpi_text: str
    thread_level: str
    heals: bool
    could_heal: bool
    without_han: bool
    mpirun: Launcher | None
    mpirun_on_path: Launcher | None
    h5py_mpi: bool
    h5py_lacks: tuple[str, ...]
    blas: tuple[Blas, ...]
    blas_chosen: str
    cores: tuple[int, ...]
    cpu_quota: float | None
    gpus: int
    pins_memory: bool
    locked_memory: int | None
    shared_memory: int | None
    shared_memory_free: int | None


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
    node = shared.bcast(comm.rank)
    shared.Free()
    gpus = device_count()
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    mpirun, on_path = _launchers() if comm.rank == 0 else (None, None)
    shared_memory, shared_memory_free = _shared_memory()
    quota = cpu_quota()
    return Facts(
        rank=comm.rank,
        ranks=comm.size,
        host=platform.node(),
        node=node,
        launches=launches(os.environ),
        versions={**versions(), "HDF5": h5py.version.hdf5_version},
        mpi=probe(device=True),
        mpi_text=MPI.Get_library_version().strip("\0\n "),
        thread_level=_THREAD_LEVELS[MPI.Query_thread()],
        heals=heals_in_place(),
        could_heal=could_heal_in_place(),
        without_han=_without_han(os.environ.get("OMPI_MCA_coll", "")),
        mpirun=mpirun,
        mpirun_on_path=on_path,
        h5py_mpi=bool(h5py.get_config().mpi),
        h5py_lacks=_h5py_lacks(),
        blas=_blas(),
        blas_chosen=chosen_by_user() or "",
        cores=tuple(sorted(own_cores())),
        cpu_quota=None if math.isinf(quota) else quota,
        gpus=gpus,
        pins_memory=gpus > 0 and can_pin(),
        locked_memory=None if locked == resource.RLIM_INFINITY else locked,
        shared_memory=shared_memory,
        shared_memory_free=shared_memory_free,
    )


def _without_han(components: str) -> bool:
    """Whether a list of Open MPI's collective components excludes ``han``: as ``^han``, or as a list without it."""
    if components.startswith("^"):
        return "han" in components[1:].split(",")
    return bool(components) and "han" not in components.split(",")


def _launchers() -> tuple[Launcher | None, Launcher | None]:
    """The mpirun beside this Python or else on the PATH, and that on the PATH if it is a different one."""
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


def _h5py_lacks() -> tuple[str, ...]:
    has = {
        "virtual data sets": h5py.version.hdf5_version_tuple >= (1, 10, 0),
        "gzip": h5py.h5z.filter_avail(h5py.h5z.FILTER_DEFLATE),
        "lzf": h5py.h5z.filter_avail(h5py.h5z.FILTER_LZF),
    }
    return tuple(feature for feature, there in has.items() if not there)


def _blas() -> tuple[Blas, ...]:
    return tuple(
        Blas(str(each["internal_api"]), str(each["version"]), str(each.get("architecture") or ""), each["num_threads"])
        for each in threadpool_info()
        if each["user_api"] == "blas"
    )


def _shared_memory() -> tuple[int | None, int | None]:
    try:
        usage = shutil.disk_usage(_SHARED_MEMORY)
    except OSError:
        return None, None
    return usage.total, usage.free
