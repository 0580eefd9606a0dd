"""``mpishard compile``: what it writes is loaded by other processes, and all kernels of the package are in it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpishard
from mpishard.backend.jit_function import HostFunction
from mpishard.cli import compile as command
from mpishard.cli import main
from mpishard.nn import kernels as layers

# The command, with one formula for all kernels, whose compilation would take minutes.
COMPILE = """
import sys
from mpishard.cli import compile as command
from mpishard.cli import main

command._FORMULAS = (command.array,)
for others in ("_compile_sums", "_compile_layers", "_compile_compressors"):
    setattr(command, others, lambda dtype: None)
command._compile_least_squares = command.chebyshev_sweep = command.dual_sweeps = lambda *arguments: None
code = main(["compile", *sys.argv[1:]])
assert "mpi4py.MPI" not in sys.modules, "it loads an MPI library, which a container may not have"
sys.exit(code)
"""
# Before a script: for root every folder can be written.
READ_ONLY = """
import tempfile
from numba.core import caching
def refuse(self):
    raise OSError(30, "Read-only file system", self.get_cache_path())
caching._CacheLocator.ensure_cache_path = refuse
tempfile._candidate_tempdir_list = lambda: []
"""
# A step of that formula: its result, and how often Numba has loaded it and compiled it.
STEP = """
import numpy as np
from mpishard.backend import numba_cache
from mpishard.backend.array import accumulate

total = np.ones(3, np.float32)
accumulate(total, total.copy())
stats = accumulate._host.dispatcher().stats
print(total.sum(), sum(stats.cache_hits.values()), sum(stats.cache_misses.values()), numba_cache._file() is not None)
"""
# Numba compiles for a processor without the instructions of this one.
OTHER_PROCESSOR = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}


def run(script: str, *arguments: Any, own: Path, **variables: str) -> str:
    """Output of a process whose own cache is the folder `own`."""
    without = ("MPISHARD_KERNELS", *OTHER_PROCESSOR)
    environment = {name: value for name, value in os.environ.items() if name not in without}
    environment |= {"NUMBA_CACHE_DIR": str(own), "TMPDIR": str(own.parent), **variables}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def files(folder: Path) -> list[Path]:
    return sorted(each for each in folder.rglob("*") if each.is_file())


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command has written."""
    folder: Path = tmp_path_factory.mktemp("installation") / "kernels"
    said = run(COMPILE, "--into", folder, own=folder.parent / "own")
    (of_processor,) = folder.iterdir()
    assert said.startswith("2 kernels, ") and f"in {of_processor}\n" in said
    assert said.endswith(f"export MPISHARD_KERNELS={folder}")
    assert len([file for file in files(folder) if file.suffix == ".nbc"]) == 2  # of float32 and of float64
    assert not files(folder.parent / "own")
    return folder


def test_what_was_compiled_is_loaded_where_the_variable_names_it(kernels: Path, tmp_path: Path) -> None:
    own, before = tmp_path / "own", {file: file.read_bytes() for file in files(kernels)}
    assert run(STEP, own=own, MPISHARD_KERNELS=str(kernels)) == "6.0 1 0 True"
    assert not files(own)
    assert run(STEP, own=own, MPISHARD_KERNELS=str(tmp_path / "missing")) == "6.0 0 1 True"
    assert files(own)
    assert {file: file.read_bytes() for file in files(kernels)} == before


KEPT = "from mpishard.backend import numba_cache; print(*numba_cache.kept_in(), sep='\\n')"


def test_where_kernels_are_is_known(kernels: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    before, kept = run(KEPT, own=own, MPISHARD_KERNELS=str(kernels)).splitlines()
    assert [before] == [str(each) for each in kernels.iterdir()] and Path(kept).is_relative_to(own)
    assert run(KEPT, own=own, MPISHARD_KERNELS=str(kernels), **OTHER_PROCESSOR).splitlines() == ["None", kept]
    assert run(READ_ONLY + KEPT, own=own, MPISHARD_KERNELS=str(kernels)).splitlines() == [before, "None"]


def test_compiling_again_compiles_what_is_missing(kernels: Path, tmp_path: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in files(kernels)}
    said = run(COMPILE, own=tmp_path / "own", MPISHARD_KERNELS=str(kernels))
    assert said.startswith("2 kernels, ") and "export" not in said  # the variable names the folder already
    assert {file: file.stat().st_mtime_ns for file in files(kernels)} == before


def test_another_processor_compiles_for_itself_into_its_own_folder(kernels: Path, tmp_path: Path) -> None:
    own, before = tmp_path / "own", files(kernels)
    of_other = {"MPISHARD_KERNELS": str(kernels), **OTHER_PROCESSOR}
    assert run(STEP, own=own, **of_other) == "6.0 0 1 True"
    assert files(own) and files(kernels) == before
    assert run(STEP, own=own, **of_other) == "6.0 1 0 True"


def test_kernels_of_a_processor_are_not_those_of_another(kernels: Path, tmp_path: Path) -> None:
    """Also where somebody has given them its name: the key in the index says for which processor they are."""
    (of_processor,) = kernels.iterdir()
    name = run(
        "from mpishard.backend import numba_cache; print(numba_cache._processor())",
        own=tmp_path / "own",
        **OTHER_PROCESSOR,
    )
    assert name != of_processor.name
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / name).symlink_to(of_processor)
    of_other = {"MPISHARD_KERNELS": str(tmp_path / "kernels"), **OTHER_PROCESSOR}
    assert run(STEP, own=tmp_path / "own", **of_other) == "6.0 0 1 True"


@pytest.mark.parametrize("compiled", [True, False])
def test_a_step_needs_no_place_that_can_be_written(kernels: Path, tmp_path: Path, compiled: bool) -> None:
    found = str(kernels if compiled else tmp_path / "missing")
    expected = f"6.0 {int(compiled)} {int(not compiled)} False"
    assert run(READ_ONLY + STEP, own=tmp_path / "own", MPISHARD_KERNELS=found, HOME="/") == expected
    assert not files(tmp_path)


def test_a_folder_that_cannot_be_written_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], environ: Callable[..., None]
) -> None:
    (tmp_path / "file").write_text("")
    into = tmp_path / "file" / "kernels"
    assert main(["compile", "--into", str(into)]) == 2
    said = f"mpishard: error: no kernels can be written to {into} (Not a directory); name another\n"
    assert capsys.readouterr().err == said
    environ(MPISHARD_KERNELS=str(into))
    assert main(["compile"]) == 2
    assert "--into FOLDER" in capsys.readouterr().err


# All kernels are compiled, of both dtypes.

# Systems of least squares and solves on grids are of float64, and words of 64 bits.  Sparse rows have indices of both.
ONLY_OF_64_BITS = {"backend/exact_gram.py", "backend/grid_sweeps.py", "backend/dual_sweeps.py", "_values_loop"}


def kernels_in(path: Path) -> set[str]:
    """The functions of a file that are compiled by themselves, by the names that they have in the cache."""
    found: set[str] = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            decorators = [ast.unparse(each).rpartition(".")[2] for each in node.decorator_list]
            found |= {f"{node.name}.loop"} if "elementwise" in decorators else set()
            found |= {node.name} if {"kernel", "kernel_apart"} & {*decorators} else set()
        # An annotation may stand before the value.
        elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
            if ast.unparse(node.value.func) == "HostFunction":
                found.add(ast.unparse(node.value.args[0]))
    return found


def test_every_kernel_of_the_package_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: set[tuple[str, str, int]] = set()
    package = Path(mpishard.__file__).parent

    def note(self: HostFunction, arrays: list[np.ndarray], scalars: Any = ()) -> None:
        code = self._function.__code__
        file = Path(code.co_filename).relative_to(package).as_posix()
        found.add((file, self._function.__qualname__, arrays[0].dtype.itemsize))

    def call(self: HostFunction, arrays: list[np.ndarray], scalars: Any = ()) -> Any:
        note(self, arrays)
        with np.errstate(all="ignore"):
            return self._function(*arrays, *scalars)  # by Python

    monkeypatch.setattr(HostFunction, "expect", note)
    monkeypatch.setattr(HostFunction, "__call__", call)
    monkeypatch.setattr(command, "compile_expected", lambda: None)
    monkeypatch.setattr(command.numba_cache, "_into", None)
    for group in (layers.GROUP, layers.LLAMA_GROUP):
        monkeypatch.setattr(group, "_begun", set())
    assert main(["compile", "--into", str(tmp_path)]) == 0
    expected = set()
    for path in package.rglob("*.py"):
        file = path.relative_to(package).as_posix()
        if not file.startswith("examples/"):
            expected |= {
                (file, name, size)
                for name in kernels_in(path)
                for size in ((8,) if {file, name} & ONLY_OF_64_BITS else (4, 8))
            }
    assert len(expected) > 150
    assert expected - found == set()
