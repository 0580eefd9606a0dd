"""Imports go down only: every package has a floor and may import lower ones, and no two files import each other."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

FLOORS = [
    {"arguments", "lazy", "version"},
    {"backend", "layout", "pipeline.schedule"},
    {"io"},
    {"launch", "optim", "minimizers", "compression"},
    {"comm"},
    {"parameters"},
    {"pipeline", "reduction"},
    {"nn", "data", "checkpoint", "record"},
    {"data_parallel"},
    {"training", "estimate"},
    {"elastic", "jax", "torch"},
    {"inverse"},
    {"environment"},
    {"cli"},
    {"__main__"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
TOP = "__init__"  # the public face, which may import every package and which no package may import

# Packages that can be imported where there is no MPI library: they import each other only.
WITHOUT_MPI = {
    "arguments",
    "lazy",
    "version",
    "backend",
    "io",
    "layout",
    "pipeline.schedule",
    "launch",
    "optim",
    "minimizers",
    "compression",
}
# Heavy or optional packages, and what alone may import them: a package with all of its files, or one file.
OUTSIDERS = {
    "cupy": {"backend.kinds"},
    "cupy_backends": {"backend.kinds"},
    "cudnn": {"nn.device_attention"},
    "nvmath": {"backend.cublas"},
    "mpi4py": {"backend.process", "comm", "elastic", "environment", "estimate", "cli"},
    "matplotlib": {"cli", "inverse.gradient_check"},
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
    """The package of FLOORS that a file or module such as ``"nn.gpt"`` is in; its first part if there is none."""
    parts = name.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((name for name in names if name in FLOOR), parts[0])


def violations(path: str, source: str) -> list[str]:
    """What is wrong with the imports of the file at `path` (relative to the package, with slashes)."""
    file = path.removesuffix(".py").replace("/", ".")
    room = room_of(file)
    if room != TOP and room not in FLOOR:
        return [f"{path}: package '{room}' has no floor; give it one in FLOORS"]
    found = []
    for line, origin, name in imported(ast.parse(source), ("mpishard", *file.split(".")[:-1])):
        where = f"{path}:{line}"
        top, _, rest = origin.partition(".")
        if top in OUTSIDERS and not {room, file} & OUTSIDERS[top]:
            found.append(f"{where}: only {sorted(OUTSIDERS[top])} may import {top}")
        if top != "mpishard" or room == TOP:
            continue
        module = ".".join(part for part in (rest, name) if part)
        other = room_of(module)
        if other not in FLOOR:
            full = f"mpishard.{module}".rstrip(".")
            found.append(f"{where}: imports {full}, the public face; import from the file that defines it")
        elif other != room and FLOOR[other] >= FLOOR[room]:
            found.append(f"{where}: {room} (floor {FLOOR[room]}) imports {other} (floor {FLOOR[other]})")
        elif room in WITHOUT_MPI and other not in WITHOUT_MPI:
            found.append(f"{where}: {room}, which does without MPI, imports {other}, which does not")
    return sorted(set(found))


def circles(sources: Mapping[str, str]) -> list[list[str]]:
    """Groups of files (by path) that import each other, directly or by others, for type checking included."""
    names = {path: path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in sources}
    paths = {name: path for path, name in names.items()}
    arrows: dict[str, set[str]] = {path: set() for path in sources}
    for path, source in sources.items():
        folder = ("mpishard", *path.split("/")[:-1])
        for _, origin, name in imported(ast.parse(source), folder):
            if origin.partition(".")[0] != "mpishard":  # torch is not mpishard.torch
                continue
            named, package = (module.removeprefix("mpishard.") for module in (f"{origin}.{name}", origin))
            arrows[path].add(paths.get(named, paths.get(package, path)))
        arrows[path].discard(path)
    return strongly_connected(arrows)


def strongly_connected(arrows: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Groups of two or more nodes of which each is reached from each other, in order of name."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        left = [start]
        while left:
            for node in arrows.get(left.pop(), ()):
                if node not in seen:
                    seen.add(node)
                    left.append(node)
        return seen

    reach = {node: reached(node) for node in arrows}
    groups = {tuple(sorted({node} | {other for other in reach[node] if node in reach[other]})) for node in arrows}
    return sorted(list(group) for group in groups if len(group) > 1)


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    spec = importlib.util.find_spec("mpishard")
    assert spec is not None and spec.submodule_search_locations
    package = Path(spec.submodule_search_locations[0])
    found = {file.relative_to(package).as_posix(): file.read_text("utf-8") for file in sorted(package.rglob("*.py"))}
    assert len(found) > 100, f"no package at {package}"
    return found


def test_imports_go_down_only(sources: dict[str, str]) -> None:
    found = [message for path, source in sources.items() for message in violations(path, source)]
    assert not found, "\n" + "\n".join(found)


def test_who_imports_mpi_imports_comm_first(sources: dict[str, str]) -> None:
    """Importing mpi4py.MPI starts MPI, and `comm` prepares that; imports for type checking alone start none."""
    for path, source in sources.items():
        tree = ast.parse(source)
        top = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "mpi4py"]
        package = sources[f"{path.split('/')[0]}/__init__.py"] if top else ""
        assert not top or path.startswith("comm/") or "\nimport mpishard.comm  #" in package, path


def test_no_two_files_import_each_other(sources: dict[str, str]) -> None:
    assert not circles(sources)


@pytest.mark.parametrize(
    ("path", "source", "message"),
    [
        ("layout/boxes.py", "from mpishard.comm.mesh import Mesh", "layout (floor 1) imports comm (floor 4)"),
        (
            "layout/boxes.py",
            "def f():\n    import mpishard.backend.array",
            "layout (floor 1) imports backend (floor 1)",
        ),
        ("nn/gpt.py", "from mpishard.data_parallel.update import apply_rule", "imports data_parallel (floor 8)"),
        ("record/summary.py", "from ..nn import gpt", "record (floor 7) imports nn (floor 7)"),
        ("parameters/flat.py", "from .. import training", "parameters (floor 5) imports training (floor 9)"),
        ("training/run.py", "from mpishard import AdamW", "imports mpishard.AdamW, the public face"),
        ("training/run.py", "import mpishard", "imports mpishard, the public face"),
        ("pipeline/schedule/actions.py", "from mpishard.pipeline import runtime", "imports pipeline (floor 6)"),
        ("nn/gpt.py", "import cupy.cuda", "may import cupy"),
        ("backend/jit.py", "import cupy", "may import cupy"),
        ("nn/gpt.py", "LIBRARY = OptionalLibrary(title='cuDNN', module='cudnn')", "may import cudnn"),
        ("optim/rules.py", "from mpi4py import MPI", "may import mpi4py"),
        ("attic.py", "import os", "package 'attic' has no floor"),
    ],
)
def test_wrong_imports_are_found(path: str, source: str, message: str) -> None:
    (found,) = violations(path, source)
    assert message in found


def test_what_does_without_mpi_imports_nothing_that_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FLOOR, "optim", FLOOR["comm"] + 1)
    (found,) = violations("optim/rules.py", "from mpishard.comm.axis import Axis")
    assert "optim, which does without MPI, imports comm" in found


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("nn/gpt.py", "from mpishard.nn.linear import Linear\nfrom . import linear\nimport numpy"),
        ("nn/gpt.py", "from mpishard.backend import array as arrays\nfrom ..parameters.flat import FlatParameters"),
        ("pipeline/runtime.py", "from mpishard.pipeline.schedule import SCHEDULES"),
        ("backend/kinds.py", "def f():\n    import cupy"),
        ("__init__.py", "from mpishard import nn\nfrom mpishard.optim import SGD"),
    ],
)
def test_right_imports_pass(path: str, source: str) -> None:
    assert violations(path, source) == []


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"a.py": "from mpishard import b", "b.py": "from mpishard.c import x", "c.py": ""}, []),
        ({"a.py": "from mpishard import b", "b.py": "from mpishard.a import x"}, [["a.py", "b.py"]]),
        (
            {
                "n/a.py": "from mpishard.n.b import x",
                "n/b.py": "from . import c",
                "n/c.py": "def f():\n    from mpishard.n.a import x",
                "n/d.py": "from mpishard.n.a import x",
            },
            [["n/a.py", "n/b.py", "n/c.py"]],
        ),
        (
            {
                "n/__init__.py": "from mpishard.n.a import x",
                "n/a.py": "from mpishard import m",
                "m.py": "import mpishard.n",
            },
            [["m.py", "n/__init__.py", "n/a.py"]],
        ),
    ],
)
def test_files_that_import_each_other_are_found(files: dict[str, str], expected: list[list[str]]) -> None:
    assert circles(files) == expected
