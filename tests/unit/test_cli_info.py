"""``mpishard info``: what it shows of made-up facts, and the command on one rank."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from facts import GOOD, HYDRA, PRTE, SRUN, VERSIONS, job

from mpishard.cli import main
from mpishard.cli.info import rows, show
from mpishard.environment import findings, launches
from mpishard.launch.launchers import Launcher


@pytest.mark.parametrize(
    ("products", "chosen", "shown"),
    [
        ("numpy", "", "by BLAS; the extras mkl and onednn bring libraries that are faster on some processors"),
        ("numpy", "numpy", "by BLAS, chosen by MPISHARD_PRODUCTS"),
        ("float32.plain=mkl,bfloat16.plain=onednn", "", "mkl: float32.plain; onednn: bfloat16.plain"),
        ("float32=mkl", "float32=mkl", "mkl: float32, chosen by MPISHARD_PRODUCTS"),
    ],
)
def test_libraries_for_products(products: str, chosen: str, shown: str) -> None:
    facts = replace(GOOD, processor=replace(GOOD.processor, products=products, products_chosen=chosen))
    assert dict(rows([facts]))["products"] == shown


@pytest.mark.parametrize("columns", [60, 80])
def test_the_screen_fits(columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    poor = {
        "gpus": 8,
        "mpirun_on_path": Launcher("/b/mpirun", "MPICH"),
        "shared_memory_free": 0,
        "blas_chosen": "OPENBLAS_NUM_THREADS",
    }
    facts = job(*[8] * 20, heals=False, versions={**VERSIONS, "CuPy": "13.6.0"}, **poor)
    found = findings(facts)
    show(facts, found)
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= columns
    whole = " ".join(text.split())
    assert all(f"{finding.level} {finding}" in whole for finding in found)
    assert "n6: ranks 40 to 47 on 4 cores" in whole and "and 14 more with 112 ranks" in whole
    assert whole.endswith("3 things are wrong, with 3 warnings.")


def test_a_good_job_fits_an_old_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    facts = job(*[4] * 20, launches=launches({**PRTE, "OMPI_COMM_WORLD_SIZE": "80"}))
    show(facts, findings(facts))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "Nothing is wrong."
    assert len(lines) <= 24 and max(map(len, lines)) <= 80


def test_alone(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (*HYDRA, *PRTE, *SRUN):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("PATH", "")  # which may have the mpirun of another MPI
    code = main(["info", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert list(report) == ["wrong", "findings", "ranks"]
    assert code == int(report["wrong"])
    (rank,) = report["ranks"]
    assert list(rank) == list(GOOD.flat())
    assert {"mpishard", "Python", "NumPy", "mpi4py", "h5py", "HDF5"} <= set(rank["versions"])
    assert rank["launches"] == [] and rank["ranks"] == 1
    assert all(list(finding) == ["level", "about", "what", "way_out"] for finding in report["findings"])
    assert main(["info"]) == code
    text = capsys.readouterr().out
    assert "no launcher: one rank" in text and rank["mpi"]["version"] in text


def test_one_of_several_lone_ranks_speaks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (*HYDRA, *SRUN):
        monkeypatch.delenv(variable, raising=False)
    for name, value in PRTE.items():
        monkeypatch.setenv(name, value)
    assert main(["info"]) == 1
    assert "mpirun of Open MPI started 4 ranks" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    assert main(["info"]) == 0
    assert capsys.readouterr().out == ""
