"""Which launcher started this process, by what it left in the environment, and whether it is that of another MPI.

Needs no MPI that has started.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

OPEN_MPI, MPICH, SLURM = "Open MPI", "MPICH", "Slurm"
# The first rank alone says what is wrong, and launchers end all once one has ended.
_FIRST_S = 1.0
_TEXT_BYTES = 8192  # MPI_MAX_LIBRARY_VERSION_STRING of MPICH; that of Open MPI is 256


@dataclass(frozen=True)
class Launch:
    """What a launcher has told this process, whatever MPI it is bound to.

    Attributes
    ----------
    launcher : str
        In words, such as ``"mpirun of MPICH"``.
    family : str
        ``"Open MPI"``, ``"Slurm"``, or ``"MPICH"`` for that and for others with its launcher, Hydra.
    rank, ranks : int
        The place of this process among those that were started with it.
    """

    launcher: str
    family: str
    rank: int
    ranks: int


def launches(environment: Mapping[str, str]) -> tuple[Launch, ...]:
    """All launchers that speak in an environment: one inside another leaves the variables of both.

    Those of MPI come first: under Slurm they start one process a host by ``srun``, whose variables reach the ranks.
    """

    def number(*names: str) -> int | None:
        return next((int(environment[name]) for name in names if environment.get(name, "").isdigit()), None)

    found = []
    rank, ranks = number("OMPI_COMM_WORLD_RANK"), number("OMPI_COMM_WORLD_SIZE")
    if rank is not None and ranks is not None:
        found.append(Launch("mpirun of Open MPI", OPEN_MPI, rank, ranks))
    # srun --mpi=pmi2 sets PMI_RANK and PMI_SIZE too, but never the variables of Hydra.
    rank, ranks = number("PMI_RANK"), number("PMI_SIZE")
    in_step = number("SLURM_STEP_ID") is not None
    if rank is not None and ranks is not None and (not in_step or "MPI_LOCALNRANKS" in environment):
        found.append(Launch("mpirun of MPICH", MPICH, rank, ranks))
    # SLURM_NTASKS is that of the whole job, whose batch script is one process; a step has its own.
    rank, ranks = number("SLURM_PROCID"), number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if in_step and rank is not None and ranks is not None:
        found.append(Launch("srun", SLURM, rank, ranks))
    return tuple(found)


def launch_of(found: Sequence[Launch], ranks: int) -> Launch | None:
    """The one of several launchers that made a world of so many ranks; if none fits, the first; None without any."""
    return next((launch for launch in found if launch.ranks == ranks), found[0] if found else None)


def foreign_launch(found: Sequence[Launch], library: str) -> Launch | None:
    """The launcher that started this process, if it is an mpirun of another MPI than the library; None if it is not."""
    families = {"Open MPI": OPEN_MPI, "MPICH": MPICH, "Intel MPI": MPICH}
    of_mpi = [launch for launch in found if launch.family != SLURM]
    own = families.get(library)
    if own is None or not of_mpi or any(launch.family == own for launch in of_mpi):
        return None
    return of_mpi[0]


def explain(launch: Launch, library: str) -> str:
    """What such a launcher has done, and which one to take."""
    right = _beside() or f"the mpirun of the {library} that it is bound to"
    ranks = "a rank" if launch.ranks == 1 else f"{launch.ranks} ranks"
    return f"the {launch.launcher} started {ranks}, but mpi4py is bound to {library}; use {right}"


def _beside() -> str:
    """The mpirun beside this Python, if it is that of its MPI; else nothing."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() and any((Path(sys.prefix) / "lib").glob("libmpi*.so*")) else ""


def explain_alone(launch: Launch, library: str) -> str:
    """What has become of a rank that is alone in its world, of several that a launcher started; and the ways out."""
    way = f"use {_beside() or f'the mpirun of the {library} that mpi4py is bound to'}"
    if launch.family == SLURM:
        mpi = "pmix" if library == OPEN_MPI else "pmi2"
        way = f"use srun --mpi={mpi}, or the mpirun of {library} in a script for sbatch"
    return (
        f"this rank is alone in its MPI_COMM_WORLD: {launch.launcher} started {launch.ranks} ranks, and {library}, "
        f"which it does not fit, made a world of each; {way}; copies that are to train each for itself take "
        "Mesh(MPI.COMM_SELF)"
    )


def check_before_mpi(environment: Mapping[str, str] = os.environ) -> None:
    """End this process with one line where MPI_Init would abort it: MPICH under a launcher that speaks PMIx alone.

    Other launchers that do not fit make worlds of one rank, which a mesh refuses.
    """
    if "PMIX_RANK" not in environment or "mpi4py.MPI" in sys.modules:
        return
    text = _library_text()
    launch = foreign_launch(launches(environment), MPICH)
    if launch is None or not text.startswith("MPICH") or "pmix" in text.lower():
        return
    if launch.rank == 0:
        sys.exit(f"mpishard: error: {explain(launch, MPICH)}")
    time.sleep(_FIRST_S)
    sys.exit(1)


def _library_text() -> str:
    """What the MPI library behind mpi4py says of itself, which it may be asked before it is started."""
    spec = importlib.util.find_spec("mpi4py.MPI")
    assert spec is not None and spec.origin is not None
    text, length = ctypes.create_string_buffer(_TEXT_BYTES), ctypes.c_int()
    ctypes.CDLL(spec.origin).MPI_Get_library_version(text, ctypes.byref(length))
    return text.value.decode(errors="replace")
