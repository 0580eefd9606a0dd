"""How many threads BLAS may use in a rank: its share of the node, unless the user chose."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI
from threadpoolctl import threadpool_info, threadpool_limits

# How many ranks of the job are on this node, by Open MPI, MPICH and Slurm; more than those of a smaller communicator.
_RANKS_ON_NODE = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE")
_CHOSEN_BY_USER = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")
# Multiplications of a product from which a second thread is worth its while: about half a millisecond's.
_LARGE_PRODUCT = 2**25


def own_cores() -> set[int]:
    """The cores that this process may run on, by number."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def cpu_quota(system: Path = Path("/")) -> float:
    """Cores' worth of time that control groups grant this process together with others; infinite without a limit.

    Containers have such a quota: they see all cores of the host, and are paused when they have used it up.
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
    """Of one control group, in its second version or its first."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        return math.inf if quota == "max" else int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        quota_us = int((folder / "cpu.cfs_quota_us").read_text())
        return math.inf if quota_us <= 0 else quota_us / int((folder / "cpu.cfs_period_us").read_text())
    return math.inf


def chosen_by_user() -> str | None:
    """The environment variable by which the user chose how many threads BLAS has, if any."""
    return next((variable for variable in _CHOSEN_BY_USER if os.environ.get(variable, "").isdigit()), None)


def limit_blas_threads(comm: MPI.Intracomm, node: Sequence[int]) -> int:
    """Limit BLAS to this rank's share of the cores it may run on, at least one thread.  Collective over `comm`.

    `node` are its ranks on the node of this one.  A core that several of them may run on counts in equal parts for
    each, and a quota of CPU time is shared by all of them.  Eight ranks on two cores with two threads each were seen 6
    to 8 times slower than with one.  Where one of the usual environment variables is set the user's choice stands; it
    is returned.
    """
    cores = own_cores()
    told = comm.allgather(sum(1 << core for core in cores))  # a bit a core: all ranks hold this for a moment
    everybody = [told[rank] for rank in node]
    if chosen := chosen_by_user():
        return int(os.environ[chosen])
    share = sum(1 / sum(theirs >> core & 1 for theirs in everybody) for core in cores)
    share = min(share, cpu_quota() / len(node))
    ranks = max(int(os.environ.get(variable, "").strip() or 1) for variable in _RANKS_ON_NODE)
    if ranks > len(node):
        share = min(share, len(cores) / ranks)
    threads = max(1, int(share + 1e-9))
    threadpool_limits(threads)
    return threads


def fix_blas_threads() -> None:
    """Limit BLAS to one thread, unless the user chose: how it cuts a product decides the bits of the result."""
    if not chosen_by_user():
        threadpool_limits(1)


def matmul(a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """``numpy.matmul``, with one thread where the product is small, unless the user chose how many.

    OpenBLAS would split it, and its threads spin for the next one while other code runs.  Where the cores are free a
    transformer of width 64 gains nothing from a second thread; where they are not, all wait in every product for the
    thread that has no core, and its steps were seen to take 10 times as long.  The shape alone decides: so do the bits.
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
    """How NumPy's OpenBLAS is asked for its number of threads and given another; None with another BLAS.

    Not by threadpoolctl, which takes microseconds.
    """
    paths = [each["filepath"] for each in threadpool_info() if each["internal_api"] == "openblas"]
    if not paths or chosen_by_user():
        return None
    library = ctypes.PyDLL(min(paths, key=lambda path: "numpy" not in path))  # SciPy brings one of its own
    for prefix in ("scipy_", ""):
        for suffix in ("64_", "_64", ""):
            names = (f"{prefix}openblas_{what}_num_threads{suffix}" for what in ("get", "set"))
            get_threads, set_threads = (getattr(library, name, None) for name in names)
            if get_threads is not None and set_threads is not None:
                return get_threads, set_threads
    return None
