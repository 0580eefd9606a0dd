"""``mpishard info`` on ranks that a launcher started, of this MPI or, by its variables, of another."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from mpi4py import MPI

from mpishard.backend.gemm.libraries import installed
from mpishard.environment import launches

LIBRARY = MPI.get_vendor()[0]
# What the launcher of another family than that of this MPI would set.
OTHER = (
    {"PMI_RANK": "0", "PMI_SIZE": "3", "MPI_LOCALNRANKS": "3", "MPI_LOCALRANKID": "0"}
    if LIBRARY == "Open MPI"
    else {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}
)
SRUN = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "3", "SLURM_NTASKS": "3"}


@pytest.mark.parametrize("ranks", [1, 3])
def test_one_screen_for_all_ranks(ranks: int, mpirun: Callable[..., Any]) -> None:
    finished = mpirun(ranks, "-m", "mpishard", "info", COLUMNS="100")
    assert finished.code == 0, finished.all
    assert finished.output.count("started by") == 1, finished.all
    ranks_text = f"{ranks} rank{'s' if ranks > 1 else ''}; MPI_COMM_WORLD has {ranks}"
    assert f"started by  mpirun of {LIBRARY}, {ranks_text}" in finished.output, finished.all
    assert "Nothing is wrong" in finished.output, finished.all


def test_json_of_all_ranks(mpirun: Callable[..., Any]) -> None:
    finished = mpirun(3, "-m", "mpishard", "info", "--json")
    assert finished.code == 0, finished.all
    report = json.loads(finished.output)
    assert [(rank["rank"], rank["ranks"], rank["node"]) for rank in report["ranks"]] == [
        (0, 3, 0),
        (1, 3, 0),
        (2, 3, 0),
    ]
    assert [rank["launches"][0]["rank"] for rank in report["ranks"]] == [0, 1, 2]
    assert report["ranks"][0]["mpirun"]["family"] == LIBRARY and report["ranks"][1]["mpirun"] is None
    assert {rank["mpi"]["library"] for rank in report["ranks"]} == {LIBRARY}
    # Libraries for products, which it loads, are not NumPy's BLAS.
    assert not {blas["library"] for rank in report["ranks"] for blas in rank["blas"]} & {*installed()}


def test_threads_that_mpi4py_was_set_not_to_have(mpirun: Callable[..., Any]) -> None:
    finished = mpirun(2, "-m", "mpishard", "info", MPI4PY_RC_THREAD_LEVEL="funneled", COLUMNS="1000")
    assert finished.code == 0, finished.all
    assert "collectives have no time limit" in finished.output, finished.all


@pytest.mark.parametrize("variables", [OTHER, SRUN], ids=["mpirun", "srun"])
def test_a_launcher_of_another_mpi(variables: dict[str, str], alone: Callable[..., Any]) -> None:
    finished = alone("-m", "mpishard", "info", COLUMNS="1000", **variables)
    assert finished.code == 1, finished.all
    (launch,) = launches(variables)
    said = f"{launch.launcher} started 3 ranks, but each is alone in an MPI_COMM_WORLD of size 1: mpi4py is bound to "
    assert f"wrong  {said}{LIBRARY}" in finished.output, finished.all
    second = {name: "1" if value == "0" and name != "SLURM_STEP_ID" else value for name, value in variables.items()}
    finished = alone("-m", "mpishard", "info", **second)
    assert (finished.code, finished.output) == (0, ""), finished.all


def test_a_script_under_a_launcher_of_another_mpi(alone: Callable[..., Any]) -> None:
    # With it MPI_Init of MPICH ends the process; that of Open MPI makes worlds of one rank.
    pmix = {} if LIBRARY == "Open MPI" else {"PMIX_RANK": "0"}
    finished = alone("-c", "import mpishard; mpishard.Mesh()", **OTHER, **pmix)
    (launch,) = launches(OTHER)
    said = f"the {launch.launcher} started 3 ranks, but mpi4py is bound to {LIBRARY}; use "
    assert finished.code == 1 and said in finished.errors.splitlines()[-1], finished.all


def test_no_colours_under_a_launcher(mpirun: Callable[..., Any]) -> None:
    """Open MPI gives ranks a terminal even where what they print ends in a file."""
    finished = mpirun(2, "-m", "mpishard", "bench", "--collectives", TERM="xterm-256color")
    assert finished.code == 0, finished.all
    assert "all_reduce" in finished.output and "\x1b" not in finished.output, finished.all


def test_wrong_usage_is_one_message(mpirun: Callable[..., Any]) -> None:
    finished = mpirun(3, "-m", "mpishard", "bench", "--tensor", "0")
    assert finished.code == 2, finished.all
    assert finished.all.count("mpishard: error:") == 1, finished.all
