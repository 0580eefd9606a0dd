"""The facts on which the bits of a computation depend, in addition to the program.

The number of BLAS threads of this rank, and the libraries, kernels and instructions that this process computes with.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits

from mpishard.arguments import mark
from mpishard.backend.gemm.choice import Choice, active
from mpishard.backend.gemm.libraries import load, settings
from mpishard.backend.jit_function import KERNELS

if TYPE_CHECKING:
    from mpi4py import MPI


# The number of BLAS threads of a rank: its share of the node, unless the user chose a number.

# Number of ranks of the job on this node, set by Open MPI, MPICH and Slurm.
_RANKS_ON_NODE = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE")
# The library's own comes first, as libraries do.
_CHOSEN_BY_USER = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "OMP_NUM_THREADS")
_OF_XLA = "NPROC"
# Multiplications in a matrix product from which a second thread pays: about half a millisecond.
_LARGE_PRODUCT = 2**25


def own_cores() -> set[int]:
    """The cores that this process may run on, by number; at least one."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def cpu_quota(system: Path = Path("/")) -> float:
    """The CPU quota, in cores, of the control groups of this process; a fraction, infinite without a limit.

    Containers have such a quota: they see all cores of the host, and are paused once the quota is used up. `system` is
    the root of the file system.
    """
    least = math.inf
    try:
        groups = (system / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return least
    for controllers, _, path in (group.partition(":")[2].partition(":") for group in groups):
        if controllers and "cpu" not in controllers.split(","):
            continue
        # Inside a container the path may be that of the host, and the container's own group is at the root.
        root = system / "sys/fs/cgroup" / ("cpu" if controllers else "")
        own = root / path.strip("/")
        for folder in (own, *own.parents):
            least = min(least, _quota_of(folder))
            if folder == root:
                break
    return least


def _quota_of(folder: Path) -> float:
    """The quota of one control group, of version 2 or 1."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        return math.inf if quota == "max" else int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        quota_us = int((folder / "cpu.cfs_quota_us").read_text())
        return math.inf if quota_us <= 0 else quota_us / int((folder / "cpu.cfs_period_us").read_text())
    return math.inf


def chosen_by_user() -> str | None:
    """The environment variable with which the user chose the number of BLAS threads, if any."""
    return next((variable for variable in _CHOSEN_BY_USER if os.environ.get(variable, "").isdigit()), None)


def limit_blas_threads(comm: MPI.Intracomm, node: Sequence[int]) -> int:
    """Limit BLAS to this rank's share of the cores it may run on, at least one thread. Collective over `comm`.

    A core on which several ranks of a node may run is shared equally among these, and a CPU quota among all. Eight
    ranks on two cores were seen 6 to 8 times slower with two threads each than with one. If one of the usual
    environment variables is set, the user's choice stands. Returns the number of threads; `node` has the ranks of
    `comm` on this node.
    """
    cores = own_cores()
    masks = comm.allgather(sum(1 << core for core in cores))  # one bit per core, since the message goes to all ranks
    on_node = [masks[rank] for rank in node]
    if chosen := chosen_by_user():
        _limit_xla(int(os.environ[chosen]))
        return int(os.environ[chosen])
    # Each core counts as one over the number of ranks that may run on it.
    share = sum(1 / sum(mask >> core & 1 for mask in on_node) for core in cores)
    share = min(share, cpu_quota() / len(node))
    # `comm` may have fewer ranks than the job has on this node.
    ranks = max(int(os.environ.get(variable, "").strip() or 1) for variable in _RANKS_ON_NODE)
    if ranks > len(node):
        share = min(share, len(cores) / ranks)
    threads = max(1, int(share + 1e-9))  # sums of fractions may be a rounding error below a whole number
    threadpool_limits(threads)
    if threads < len(cores):
        _limit_xla(threads)
    return threads


def fix_blas_threads() -> None:
    """Limit BLAS to one thread, unless the user chose a number: the bits of a product depend on that number."""
    if not chosen_by_user():
        threadpool_limits(1)
        os.environ[_OF_XLA] = "1"


def _limit_xla(threads: int) -> None:
    """Limit the threads of XLA, which JAX reads when it makes its first array, unless the user chose a number."""
    os.environ.setdefault(_OF_XLA, str(threads))


def blas_threads() -> int | None:
    """The threads that NumPy's OpenBLAS may use now; None if the user chose them, or with another BLAS."""
    found = _openblas()
    return None if found is None else found[0]()


def matmul(a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """``numpy.matmul``, with one thread for a small product, unless the user chose the number of threads.

    OpenBLAS would split the product, and its threads spin between products while other code runs. On free cores a
    transformer of width 64 gains nothing from a second thread. On busy cores every product waits for the thread that
    has no core; steps were seen to take 10 times as long. The shape alone decides, so the bits do not vary.
    """
    rows = a.shape[-2] if a.ndim > 1 else 1
    if rows * a.shape[-1] * b.shape[-1] >= _LARGE_PRODUCT or (openblas := _openblas()) is None:
        return np.matmul(a, b, out=out)
    get_threads, set_threads = openblas
    threads = get_threads()
    if threads == 1:
        return np.matmul(a, b, out=out)
    set_threads(1)
    try:
        return np.matmul(a, b, out=out)
    finally:
        set_threads(threads)


@functools.cache
def _openblas() -> tuple[Callable[[], int], Callable[[int], Any]] | None:
    """The functions that get and set the number of threads of NumPy's OpenBLAS; None with another BLAS.

    Threadpoolctl would take microseconds more.
    """
    paths = [each["filepath"] for each in threadpool_info() if each["internal_api"] == "openblas"]
    if not paths or chosen_by_user():
        return None
    library = ctypes.PyDLL(min(paths, key=lambda path: "numpy" not in path))  # SciPy brings its own
    for prefix in ("scipy_", ""):
        for suffix in ("64_", "_64", ""):
            names = (f"{prefix}openblas_{what}_num_threads{suffix}" for what in ("get", "set"))
            get_threads, set_threads = (getattr(library, name, None) for name in names)
            if get_threads is not None and set_threads is not None:
                return get_threads, set_threads
    return None


# What the bits of a computation depend on in addition to the program: libraries, their kernels, threads.


def arithmetic() -> dict[str, str]:
    """The facts of this process, at this moment, on which bits depend, by name; about a millisecond.

    Every process has the same names, such as ``"BLAS kernels"``. OpenBLAS sums in another order under other kernels,
    and with another number of threads; NumPy and Numba use the vector instructions of the processor, and the
    mathematical functions of the C library.
    """
    blas = _numpys_blas()
    library = f"{blas.get('internal_api', 'unknown')} {blas.get('version') or ''}".strip()
    return {
        "BLAS": library,
        "BLAS kernels": str(blas.get("architecture", "unknown")),
        # It decides where OpenBLAS cuts a product in blocks; the processor's own size follows from its name below.
        "OPENBLAS_L2_SIZE": os.environ.get("OPENBLAS_L2_SIZE", "unset"),
        "BLAS threads": str(blas.get("num_threads", "unknown")),
        "kernels": str(KERNELS),
        **of_products(active()),
        **_of_processor(),
    }


def of_products(choice: Choice) -> dict[str, str]:
    """The libraries that multiply in place of NumPy's, what they multiply, and their versions, for `arithmetic`."""
    found = [f"{name} {load(name).version}" for name in sorted({*choice.libraries.values()})]
    if found:
        found += [f"{name}={value}" for name, value in settings().items()]
    return {"products": str(choice), "libraries for products": ", ".join(found) or "none"}


def _numpys_blas() -> dict[str, Any]:
    """The facts of NumPy's BLAS that threadpoolctl reports; empty if it does not know that BLAS."""
    found = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
    # SciPy brings its own library.
    return min(found, key=lambda pool: "numpy" not in pool["filepath"], default={})


@functools.cache
def _of_processor() -> dict[str, str]:
    """The facts that do not change in a process."""
    import numba  # takes a fifth of a second, which every run with compiled kernels takes anyway
    from llvmlite import binding

    options: Any = numba.config
    processor = options.CPU_NAME or binding.get_host_cpu_name()
    features = options.CPU_FEATURES or binding.get_host_cpu_features().flatten()
    # Virtual machines on one kind of processor may hide different instructions.
    vector = np.show_config(mode="dicts")["SIMD Extensions"]
    found = [*vector.get("baseline", []), *vector.get("found", [])]
    return {
        "NumPy": f"{np.__version__} with {found[-1] if found else 'no vector instructions'}",
        "Numba": f"{numba.__version__}{' with SVML' if options.USING_SVML else ''}",
        "processor of compiled kernels": f"{processor} ({mark(features)})",
        "C library": " ".join(platform.libc_ver()).strip() or platform.system(),
    }
