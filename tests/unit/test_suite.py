"""The tools of the tests: what fails runs once more, and `bits.py` compares what it says it does."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import bits_run
import grid_cases
import h5py
import numpy as np
import pytest
import suite
from variants import full

from mpishard.pipeline import schedule

# A test that fails runs once more: red twice is red, green the second time is said; what hangs ends in time.

XDIST = ("-p", "xdist.plugin", "-n", "2")
CONFTEST = "from suite import record as pytest_configure\n"
SETUP = "[tool:pytest]\nfaulthandler_timeout = 3\nfaulthandler_exit_on_timeout = true\n"
ONCE = """
import os, time
from pathlib import Path
import pytest

def seen(name):
    path = Path(name)
    return path.exists() or path.touch()

def test_green(): pass
"""
RED = "def test_red(): assert 1 == 2\n"
FIRST_RED = "def test_first_red(): assert seen('again'), 'too\\nearly'\n"
SIX = "@pytest.mark.parametrize('case', range(6))\ndef test_six(case): assert seen(f'again-{case}')\n"
HANGS = "def test_hangs(): time.sleep(60)\n"
FIRST_HANGS = "def test_first_hangs(): time.sleep(0 if seen('again') else 60)\n"
FIRST_DIES = "def test_first_dies(): seen('again') or os._exit(0)\n"
LATER = "def test_later(): seen('later') and os._exit(1)\n"  # not run twice
NOT_COLLECTED = "import no_such_module\n"
ENDS_BADLY = "import atexit\natexit.register(lambda: seen('again') or os._exit(3))\n"


def ended(tmp_path: Path, text: str, *options: str, gate: bool = True) -> SimpleNamespace:
    """What comes of a suite of one file: its exit code, what it said, and the flaky tests."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_one.py").write_text(ONCE + text)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "setup.cfg").write_text(SETUP)
    flaky = tmp_path / "flaky"
    ours = (suite.FLAKY, suite.OUTCOMES, "PYTHONSAFEPATH", "PYTEST_XDIST_WORKER")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    environment |= {"PYTHONPATH": str(Path(suite.__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    limit = "30" if "hangs" in text else "120"
    done = subprocess.run(
        [sys.executable, suite.__file__, limit, sys.executable, "-m", "pytest", *options, "tests/test_one.py"],
        cwd=tmp_path,
        env=environment | ({suite.FLAKY: str(flaky)} if gate else {}),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    said = flaky.read_text() if flaky.exists() else ""
    return SimpleNamespace(code=done.returncode, flaky=said.splitlines(), all=done.stdout + done.stderr)


def test_without_a_gate_it_is_the_suite(tmp_path: Path) -> None:
    found = ended(tmp_path, FIRST_RED, gate=False)
    assert found.code == 1 and not found.flaky and "once more" not in found.all, found.all


@pytest.mark.parametrize(
    ("text", "again"),
    [("", False), (RED + FIRST_RED, True), (SIX, False), (NOT_COLLECTED, False)],
    ids=["", "red", "six", "not collected"],
)
def test_green_and_red(text: str, again: bool, tmp_path: Path) -> None:
    found = ended(tmp_path, text)
    assert (found.code == 0) == (not text), found.all
    assert not found.flaky and ("once more" in found.all) == again, found.all


@pytest.mark.parametrize("options", [(), *full(XDIST)], ids=["alone", "xdist"])
def test_green_the_second_time(options: tuple[str, ...], tmp_path: Path) -> None:
    found = ended(tmp_path, FIRST_RED + LATER, *options)
    assert found.code == 0, found.all
    name, ranks, mpi, message = found.flaky[0].split(", ", 3)
    assert name == "FLAKY: tests/test_one.py::test_first_red" and ranks == "no launcher", found.flaky
    assert len(found.flaky) == 1 and mpi and message == "AssertionError: too", found.flaky


@pytest.mark.full
def test_what_hangs_twice_is_red_in_time(tmp_path: Path) -> None:
    found = ended(tmp_path, HANGS + LATER)
    assert found.code != 0 and not found.flaky and "test_hangs" in found.all, found.all


@pytest.mark.parametrize(
    ("text", "options", "name"),
    [
        (FIRST_HANGS, (), "tests/test_one.py::test_first_hangs"),
        pytest.param(FIRST_DIES, XDIST, "tests/test_one.py::test_first_dies", marks=pytest.mark.full),
        pytest.param(ENDS_BADLY, (), "the end of the suite", marks=pytest.mark.full),
    ],
    ids=["hangs", "crashes", "ends badly"],
)
def test_the_rest_of_a_suite_that_was_cut_runs(text: str, options: tuple[str, ...], name: str, tmp_path: Path) -> None:
    found = ended(tmp_path, text + (LATER if "def" in text else ""), *options)
    assert found.code == 0 and len(found.flaky) == 1, found.all
    assert found.flaky[0].startswith(f"FLAKY: {name}, "), found.flaky


def test_failures_on_ranks_run_in_a_launch_of_their_own(tmp_path: Path) -> None:
    command = ["mpiexec", "-n", "3", "python", "-m", "pytest", "--with-mpi", "-m", "quick", "tests/mpi"]
    assert suite.by_themselves(command, tmp_path) == [*command[:9], f"@{tmp_path}"]
    assert suite.where(command).startswith("3 ranks, ")


# `tests/helpers/bits.py` compares what it says it does, and runs on other states of the package.


def test_the_sample_has_every_mesh_stage_schedule_and_rule():
    chosen = bits_run.sample(60)
    assert len(set(chosen)) == 60 and chosen == bits_run.sample(60)
    every = [case for ranks in (1, 2, 3, 4, 6, 8) for case in grid_cases.cases(ranks)]
    for setting in ("zero", "schedule", "rule", "tied", "sequence_parallel"):
        assert {getattr(case, setting) for case in chosen} == {getattr(case, setting) for case in every}
    meshes = [{(case.data, case.tensor, case.pipeline) for case in some} for some in (chosen, every)]
    assert meshes[0] == meshes[1]


def test_the_grid_has_every_schedule():
    assert set(grid_cases.SCHEDULES) == set(schedule.SCHEDULES)


def test_a_digest_sees_values_dtypes_and_shapes():
    values = [np.zeros(4), -np.zeros(4), np.zeros(4, np.float32), np.zeros(8, np.float32), np.zeros((2, 2))]
    assert len({bits_run.digest(value) for value in values}) == len(values)
    assert bits_run.digest(np.arange(6)[::2]) == bits_run.digest(np.array([0, 2, 4]))
    texts = [np.array([b"some", b"words, " * times], object) for times in (2, 2, 3)]
    first, same, other = map(bits_run.digest, texts)
    assert first == same != other


def test_data_sets_are_compared_but_for_what_is_drawn_anew(tmp_path):
    found = []
    for number in range(3):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file.attrs.update(id=f"{number}", step=number // 2)
            file["b"], file["a/c"], file["text"], file["texts"] = np.arange(3), 1.0, "words", ["some", "words"]
            found.append(dict(bits_run.of_datasets(file)))
    assert list(found[0]) == ["/@", "a/c", "b", "text", "texts"] and found[0] == found[1]
    assert [name for name in found[0] if found[0][name] != found[2][name]] == ["/@"]


def test_modules_that_may_move_are_not_named():
    """States of the package before and after a move have `mpishard` itself, and what README names of it."""
    for name in ("bits.py", "bits_run.py", "launching.py", "grid_cases.py"):
        tree = ast.parse((Path(bits_run.__file__).parent / name).read_text())
        modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        assert not [module for module in modules if module and module.startswith("mpishard.")]
