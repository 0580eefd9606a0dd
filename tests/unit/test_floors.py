"""Imports go down only: every room (file or folder) of the package has a floor and may import lower ones."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

FLOORS = [
    {"arguments"},
    {
        "compiling",
        "endings",
        "files",
        "formula",
        "interrupts",
        "launches",
        "layout",
        "progress",
        "randomness",
        "schedule",
        "tracebacks",
        "version",
        "witness",
    },
    {"array", "capabilities", "hdf5", "ledger", "notes", "threads"},
    {"compression", "gradients", "lane", "pending", "state", "summation", "tree_sum", "wire"},
    {"collectives", "guard"},
    {"mesh", "reshard", "sharding"},
    {"parameters"},
    {"pipeline"},
    {"nn", "data", "checkpoint", "record"},
    {"optim"},
    {"distributed", "saving", "training"},
    {"elastic"},
    {"environment", "estimate"},
    {"cli"},
    {"__main__"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
TOP = "__init__"  # the public face, which may import every room and which no room may import

# Heavy or optional packages, and the only places that may import them. A room stands for all of its files.
OUTSIDERS = {
    "cupy": {"array"},
    "mpi4py": {
        "capabilities",
        "threads",
        "pending",
        "lane",
        "collectives",
        "guard",
        "mesh",
        "witness",
        "elastic",
        "environment",
        "estimate",  # times bare calls beside its own
        "cli",
    },
    "matplotlib": {"cli"},
    "rich": {"cli"},
    "typer": {"cli"},
    "jax": set(),
    "tensorboard": {"record"},
    "torch": set(),
    "sklearn": set(),
}


def imported(tree: ast.AST, folder: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of all that a file imports, at any depth; `folder`: the package the file is in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) - node.level + 1] if node.level else ()
            origin = (*base, *(node.module.split(".") if node.module else ()))
            if origin == ("mpishard",):
                yield from ((node.lineno, f"mpishard.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, ".".join(origin)


def violations(path: str, source: str) -> list[str]:
    """What is wrong with the imports of the file at `path` (relative to the package, with slashes)."""
    parts = path.removesuffix(".py").split("/")
    room = parts[0]
    if room != TOP and room not in FLOOR:
        return [f"{path}: room '{room}' has no floor; give it one in FLOORS"]
    found = []
    for line, name in imported(ast.parse(source), ("mpishard", *parts[:-1])):
        where = f"{path}:{line}"
        top, *rest = name.split(".")
        if top in OUTSIDERS and room not in OUTSIDERS[top]:
            found.append(f"{where}: only {sorted(OUTSIDERS[top])} may import {top}")
        if top != "mpishard" or room == TOP:
            continue
        other = rest[0] if rest else TOP
        if other not in FLOOR:
            found.append(f"{where}: imports {name}, the public face; import from the room that defines it")
        elif other != room and FLOOR[other] >= FLOOR[room]:
            found.append(f"{where}: {room} (floor {FLOOR[room]}) imports {other} (floor {FLOOR[other]})")
    return found


def test_imports_go_down_only() -> None:
    spec = importlib.util.find_spec("mpishard")
    assert spec is not None and spec.submodule_search_locations
    package = Path(spec.submodule_search_locations[0])
    files = sorted(package.rglob("*.py"))
    assert len(files) > 5, f"no package at {package}"
    found = [
        message
        for file in files
        for message in violations(file.relative_to(package).as_posix(), file.read_text("utf-8"))
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source", "message"),
    [
        ("layout.py", "from mpishard.mesh import Mesh", "layout (floor 1) imports mesh (floor 5)"),
        ("layout.py", "def f():\n    import mpishard.formula", "layout (floor 1) imports formula (floor 1)"),
        ("nn/gpt.py", "from mpishard.optim.rules import SGD", "nn (floor 8) imports optim (floor 9)"),
        ("record/trace.py", "from ..nn import gpt", "record (floor 8) imports nn (floor 8)"),
        ("parameters.py", "from . import training", "parameters (floor 6) imports training (floor 10)"),
        ("training.py", "from mpishard import AdamW", "imports mpishard.AdamW, the public face"),
        ("training.py", "import mpishard", "imports mpishard, the public face"),
        ("nn/gpt.py", "import cupy.cuda", "may import cupy"),
        ("optim/rules.py", "from mpi4py import MPI", "may import mpi4py"),
        ("attic.py", "import os", "room 'attic' has no floor"),
    ],
)
def test_wrong_imports_are_found(path: str, source: str, message: str) -> None:
    (found,) = violations(path, source)
    assert message in found


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("nn/gpt.py", "from mpishard.nn.linear import Linear\nfrom . import linear\nimport numpy"),
        ("nn/gpt.py", "from mpishard import array as arrays\nfrom ..parameters import FlatParameters"),
        ("array.py", "def f():\n    import cupy"),
        ("__init__.py", "from mpishard import nn\nfrom mpishard.optim import SGD"),
    ],
)
def test_right_imports_pass(path: str, source: str) -> None:
    assert violations(path, source) == []
