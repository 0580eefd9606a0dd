"""The abilities of this MPI and this node: asked once, then frozen."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from mpishard.backend.array import device_count

# Set by launchers in the environment of a rank; a child process that keeps them would take itself for that rank.
_LAUNCHER_VARIABLES = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "MPIR_", "HYDRA_", "MPIEXEC_", "SLURM_")

# A blocking and a non-blocking reduction on device memory, in a process whose crash does no harm.
_DEVICE_PROBE = """
import cupy, sys
from mpi4py import MPI
a, b = cupy.arange(4096, dtype=cupy.float32), cupy.zeros(4096, cupy.float32)
cupy.cuda.get_current_stream().synchronize()
MPI.COMM_SELF.Allreduce(a, b)
right = bool((a == b).all())
MPI.COMM_SELF.Sendrecv(a, 0, 0, b, 0, 0)
print(right and bool((a == b).all()), flush=True)
b[:] = 0
cupy.cuda.get_current_stream().synchronize()
MPI.COMM_SELF.Iallreduce(a, b).Wait()
print(bool((a == b).all()), flush=True)
"""


def heals_in_place() -> bool:
    """Return True if survivors of a death are informed and can continue: Open MPI under ``mpirun --with-ft ulfm``.

    It is the same on all ranks.
    """
    return os.environ.get("OMPI_MCA_mpi_ft_enable") == "1"


def could_heal_in_place() -> bool:
    """Return True if ``mpirun --with-ft ulfm`` would allow that; MPICH has the calls, but its launcher ends the job."""
    library, version = MPI.get_vendor()
    return library == "Open MPI" and version >= (5, 0, 0) and hasattr(_mpi_library(), "MPIX_Comm_revoke")


@dataclass(frozen=True)
class Capabilities:
    """Facts about the MPI library in use."""

    library: str  # ``"MPICH"``, ``"Open MPI"`` or another
    version: str
    standard: tuple[int, int]  # the MPI standard it implements
    threads: bool  # several threads may call MPI at once (``MPI_THREAD_MULTIPLE``)
    large_counts: bool  # one call can move more than 2**31 - 1 elements (MPI 4)
    # Device pointers may be handed to MPI, proven in a child process with non-blocking reductions, which crash in
    # common builds that do the blocking ones right; else host staging is used.
    device_buffers: bool


@functools.cache
def probe(device: bool = False) -> Capabilities:
    """Ask the MPI library what it can do, once; `device`: also whether it takes device memory, in a child process."""
    library, version = MPI.get_vendor()
    standard = MPI.Get_version()
    proven = _probe_device() if device and claims_device_buffers() else ""
    return Capabilities(
        library=library,
        version=".".join(map(str, version)),
        standard=(standard[0], standard[1]),
        threads=MPI.Query_thread() == MPI.THREAD_MULTIPLE,
        large_counts=standard >= (4, 0),
        device_buffers=proven.splitlines() == ["True", "True"],
    )


def agree_on_device_buffers(comm: MPI.Intracomm) -> bool:
    """Return True, on all ranks or none, if the ranks of a mesh may hand device memory to MPI. Collective over `comm`.

    The trial of `probe` may fail on some ranks alone, but how large buffers are cut depends on it. The ranks agree when
    the mesh is made, also for a run that will use NumPy arrays only: there is no later moment that all ranks come to. A
    collective may have a device array on one rank and a NumPy array on another, which would not come to the agreement,
    so that the others would wait for ever.
    """
    trial = claims_device_buffers() and device_count() > 0
    proven = np.array([not trial or probe(device=True).device_buffers], np.int64)
    comm.Allreduce(MPI.IN_PLACE, proven, MPI.MIN)
    return bool(proven[0])


def claims_device_buffers() -> bool:
    """Return True if the MPI library says that it takes CUDA pointers; `probe` finds out whether it does."""
    this = ctypes.CDLL(None)
    for library in (this, _mpi_library()):
        query = getattr(library, "MPIX_GPU_query_support", None)  # MPICH: (kind, flag); 0 is CUDA
        if query is not None:
            flag = ctypes.c_int(0)
            query(0, ctypes.byref(flag))
            return bool(flag.value)
        query = getattr(library, "MPIX_Query_cuda_support", None)  # Open MPI's, with which MPICH 3.4 aborts
        if query is not None:
            return bool(query())
    return False


def _mpi_library() -> ctypes.CDLL:
    """The MPI library behind mpi4py; its symbols are reachable through the extension module that links it."""
    return ctypes.CDLL(MPI.__file__)


class _SymbolInfo(ctypes.Structure):
    """``Dl_info`` of the C library."""

    _fields_ = (
        ("path", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def library_path() -> str:
    """The file of the MPI library behind mpi4py, without links; empty if the C library does not say."""
    info = _SymbolInfo()
    function = ctypes.cast(_mpi_library().MPI_Get_version, ctypes.c_void_p)
    find = getattr(ctypes.CDLL(None), "dladdr", None)
    if find is None or not find(function, ctypes.byref(info)) or not info.path:
        return ""
    return os.path.realpath(os.fsdecode(info.path))


def _probe_device() -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHER_VARIABLES)}
    try:
        child = subprocess.run(
            [sys.executable, "-c", _DEVICE_PROBE],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return child.stdout
