"""The form of the code: imports go down only, no test returns early or is never run, and public names have types."""

from __future__ import annotations

import ast
import graphlib
import inspect
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path

import pytest

import mpishard
from mpishard.data_parallel.configuration import ConfigurationOptions

ROOT = Path(__file__).parents[2]

# Imports go down only: every package has a floor and may import lower ones, and no two files import each other.

FLOORS = [
    {"arguments", "lazy", "version"},
    {"io"},
    {"adapters", "backend", "layout", "pipeline.schedule"},
    {"launch", "optim", "minimizers", "compression"},  # these and what is below can be imported without an MPI library
    {"comm", "watch"},  # and so can watch
    {"parameters"},
    {"pipeline", "reduction"},
    {"nn", "data", "checkpoint", "record"},
    {"data_parallel"},
    {"training", "estimate"},
    {"elastic", "jax", "torch"},
    {"inverse"},
    {"pyadjoint"},
    {"environment"},
    {"cli"},
    {"__main__"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
TOP = "__init__"  # the public face, which may import every package and which no package may import

# Heavy or optional packages, and what alone may import them: a package with all of its files, or one file.
OUTSIDERS = {
    "cupy": {"backend.kinds"},
    "cupy_backends": {"backend.kinds"},
    "cudnn": {"nn.device_attention"},
    "nvmath": {"backend.cublas"},
    "mpi4py": {"backend.process", "comm", "elastic", "environment", "estimate", "cli"},
    "matplotlib": {"cli", "inverse.pictures"},
    "rich": {"cli"},
    "typer": {"cli"},
    "checkpoint_schedules": {"inverse.time_steps"},
    "jax": {"jax"},
    "optax": set(),
    "tensorboard": {"record"},
    "torch": {"torch"},
    "zarr": {"data.token_files"},
    "sklearn": set(),
}


def imported(tree: ast.AST, folder: tuple[str, ...]) -> Iterator[tuple[int, str, str]]:
    """(line, dotted name, name in it or "") of all that a file imports, at any depth; `folder`: where the file is."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) - node.level + 1] if node.level else ()
            origin = ".".join((*base, *(node.module.split(".") if node.module else ())))
            yield from ((node.lineno, origin, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "OptionalLibrary":
            modules = [each.value for each in node.keywords if each.arg == "module"]
            yield from ((node.lineno, each.value, "") for each in modules if isinstance(each, ast.Constant))


def room_of(name: str) -> str:
    """The package of FLOORS that a file or module such as ``"nn.models"`` is in; its first part if there is none."""
    parts = name.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((name for name in names if name in FLOOR), parts[0])


def violations(path: str, source: str) -> list[str]:
    """What is wrong with the imports of the file at `path` (relative to the package, with slashes)."""
    file = path.removesuffix(".py").replace("/", ".")
    room, found = room_of(file), []
    if room != TOP and room not in FLOOR:
        return [f"{path}: package '{room}' has no floor; give it one in FLOORS"]
    for line, origin, name in imported(ast.parse(source), ("mpishard", *file.split(".")[:-1])):
        top, _, rest = origin.partition(".")
        if top in OUTSIDERS and not {room, file} & OUTSIDERS[top]:
            found.append(f"{path}:{line}: only {sorted(OUTSIDERS[top])} may import {top}")
        if top != "mpishard" or room == TOP:
            continue
        module = ".".join(part for part in (rest, name) if part)
        other = room_of(module)
        if other not in FLOOR:
            full = f"mpishard.{module}".rstrip(".")
            found.append(f"{path}:{line}: imports {full}, the public face; import from the file that defines it")
        elif other != room and FLOOR[other] >= FLOOR[room]:
            found.append(f"{path}:{line}: {room} (floor {FLOOR[room]}) imports {other} (floor {FLOOR[other]})")
    return found


def circle(sources: Mapping[str, str]) -> list[str]:
    """Files (by path) that import each other, directly or by others, for type checking included; none is right."""
    names = {path: path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in sources}
    paths = {name: path for path, name in names.items()}
    arrows: dict[str, set[str]] = {path: set() for path in sources}
    for path, source in sources.items():
        for _, origin, name in imported(ast.parse(source), ("mpishard", *path.split("/")[:-1])):
            if origin.partition(".")[0] == "mpishard":  # torch is not mpishard.torch
                named, package = (module.removeprefix("mpishard.") for module in (f"{origin}.{name}", origin))
                arrows[path].add(paths.get(named, paths.get(package, path)))
        arrows[path].discard(path)
    try:
        graphlib.TopologicalSorter(arrows).prepare()
    except graphlib.CycleError as error:
        return sorted(set(error.args[1]))
    return []


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    package = Path(mpishard.__file__).parent
    found = {file.relative_to(package).as_posix(): file.read_text("utf-8") for file in sorted(package.rglob("*.py"))}
    assert len(found) > 100, f"no package at {package}"
    # Where it is installed, `mpishard example` has the examples there: scripts, which import the public face.
    return {path: source for path, source in found.items() if not path.startswith("examples/")}


def test_imports_go_down_only_and_not_in_circles(sources: dict[str, str]) -> None:
    found = [message for path, source in sources.items() for message in violations(path, source)]
    assert not found, "\n" + "\n".join(found)
    assert circle(sources) == []


def test_who_imports_mpi_imports_comm_first(sources: dict[str, str]) -> None:
    """Importing mpi4py.MPI starts MPI, and `comm` prepares that; imports for type checking alone start none."""
    for path, source in sources.items():
        tree = ast.parse(source)
        top = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "mpi4py"]
        package = sources[f"{path.split('/')[0]}/__init__.py"] if top else ""
        assert not top or path.startswith("comm/") or "import mpishard.comm  #" in package, path


BOXES, RUN, GPT = "layout/boxes.py", "training/run.py", "nn/models.py"


@pytest.mark.parametrize(
    ("path", "source", "message"),
    [
        (BOXES, "from mpishard.comm.mesh import Mesh", "layout (floor 2) imports comm (floor 4)"),
        (BOXES, "def f():\n    import mpishard.backend.array", "layout (floor 2) imports backend (floor 2)"),
        ("record/summary.py", "from ..nn import models", "record (floor 7) imports nn (floor 7)"),
        ("parameters/flat.py", "from .. import training", "parameters (floor 5) imports training (floor 9)"),
        (RUN, "from mpishard import AdamW", "imports mpishard.AdamW, the public face"),
        (RUN, "import mpishard", "imports mpishard, the public face"),
        ("pipeline/schedule/actions.py", "from mpishard.pipeline import runtime", "imports pipeline (floor 6)"),
        (GPT, "import cupy.cuda", "may import cupy"),
        ("backend/numba_cache.py", "import cupy", "may import cupy"),
        (GPT, "LIBRARY = OptionalLibrary(title='cuDNN', module='cudnn')", "may import cudnn"),
        ("attic.py", "import os", "package 'attic' has no floor"),
        (GPT, "from mpishard.nn.linear import Linear\nfrom . import linear\nimport numpy", ""),
        (GPT, "from mpishard.backend import array as arrays\nfrom ..parameters.flat import FlatParameters", ""),
        ("pipeline/runtime.py", "from mpishard.pipeline.schedule import SCHEDULES", ""),
        ("backend/kinds.py", "def f():\n    import cupy", ""),
        ("__init__.py", "from mpishard import nn\nfrom mpishard.optim import SGD", ""),
    ],
)
def test_wrong_imports_are_found_and_right_ones_pass(path: str, source: str, message: str) -> None:
    found = violations(path, source)
    assert len(found) == (message != "") and message in "".join(found)


A_IMPORTS_B, X_OF_A = "from mpishard import b", "from mpishard.n.a import x"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"a.py": A_IMPORTS_B, "b.py": "from mpishard.c import x", "c.py": ""}, ""),
        ({"a.py": A_IMPORTS_B, "b.py": "from mpishard.a import x"}, "a.py b.py"),
        (
            {
                **{"n/a.py": "from mpishard.n.b import x", "n/b.py": "from . import c"},
                **{"n/c.py": f"def f():\n    {X_OF_A}", "n/d.py": X_OF_A},
            },
            "n/a.py n/b.py n/c.py",
        ),
        (
            {"n/__init__.py": X_OF_A, "n/a.py": "from mpishard import m", "m.py": "import mpishard.n"},
            "m.py n/__init__.py n/a.py",
        ),
    ],
)
def test_files_that_import_each_other_are_found(files: dict[str, str], expected: str) -> None:
    assert " ".join(circle(files)) == expected


# No test returns early: one that has nothing to do skips, and says why, since what returns counts as passed.


def returns(source: str) -> Iterator[str]:
    """``test_name, line N`` of each return in a test function; functions inside of one may return."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            inside: list[ast.AST] = [*node.body]
            while inside:
                each = inside.pop()
                if isinstance(each, ast.Return):
                    yield f"{node.name}, line {each.lineno}"
                elif not isinstance(each, ast.FunctionDef | ast.Lambda | ast.ClassDef):
                    inside.extend(ast.iter_child_nodes(each))


def test_no_test_returns_early() -> None:
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    assert len(paths) > 80
    assert [(path.name, place) for path in paths for place in returns(path.read_text("utf-8"))] == []


def test_a_return_is_found() -> None:
    source = """
def test_a(mesh):
    def helper():
        return 1
    if mesh.size == 1:
        with mesh:
            return
    assert helper()

class TestB:
    def test_c(self):
        return None

def helper():
    return
"""
    assert list(returns(source)) == ["test_a, line 7", "test_c, line 12"]


# What editors and type checkers know of the public names.


@pytest.mark.full
def test_mypy_takes_right_uses_and_finds_wrong_ones() -> None:
    pytest.importorskip("mypy", reason="mypy is not installed (extra: test)")
    command = [sys.executable, "-m", "mypy", "--config-file", "setup.cfg", "tests/helpers/typed_uses.py"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("optimizer", [mpishard.DDPOptimizer, mpishard.LocalSGDOptimizer, mpishard.ElasticOptimizer])
def test_help_shows_the_options_of_optimize(optimizer: type) -> None:
    options = "self problem callback progress checkpoints resume record evaluate stop_early"
    assert " ".join(inspect.signature(optimizer.optimize).parameters) == options


def test_presets_take_every_setting() -> None:
    settings = {field.name: field.type for field in fields(mpishard.ShardingConfiguration) if field.name != "mesh"}
    found = {name: value.__forward_arg__ for name, value in ConfigurationOptions.__annotations__.items()}
    assert found == settings
