"""Which launcher started this process, by what it left in the environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

OPEN_MPI, MPICH, SLURM = "Open MPI", "MPICH", "Slurm"


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
