"""A launcher that does not fit the MPI starts several worlds of one rank, which a mesh refuses to train in."""

from __future__ import annotations

import pytest
from mpi4py import MPI

import mpishard

SRUN = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4"}
OWN = MPI.get_vendor()[0]
OF_THIS_MPI = (
    {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
    if OWN == "Open MPI"
    else {"PMI_RANK": "1", "PMI_SIZE": "4"}
)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_STEP_ID", "PMI_RANK", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environment", "launcher", "way_out"),
    [
        (SRUN, "srun", f"use srun --mpi={'pmix' if OWN == 'Open MPI' else 'pmi2'}, or the mpirun of {OWN}"),
        (OF_THIS_MPI, f"mpirun of {OWN}", "mpirun"),
    ],
)
def test_worlds_of_one_rank_are_refused(
    environment: dict[str, str], launcher: str, way_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for comm in (None, MPI.COMM_WORLD):
        with pytest.raises(ValueError, match=f"alone in its MPI_COMM_WORLD: {launcher} started 4 ranks.*{way_out}"):
            mpishard.Mesh(comm)
    with mpishard.Mesh(MPI.COMM_SELF) as mesh:
        assert mesh.size == 1


@pytest.mark.parametrize(
    "environment",
    [
        # python script.py in a script for sbatch, or in the shell of salloc
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
        # srun --pty bash, or srun -n 1
        {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        # mpirun -n 1 in a script for sbatch, whose processes on other hosts come by srun
        {**SRUN, **OF_THIS_MPI, "OMPI_COMM_WORLD_SIZE": "1", "PMI_SIZE": "1", "MPI_LOCALNRANKS": "1"},
    ],
)
def test_one_process_that_was_meant_to_be_one(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with mpishard.Mesh() as mesh:
        assert mesh.size == 1
