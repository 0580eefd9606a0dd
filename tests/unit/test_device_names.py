"""Names of CuPy, cuDNN, nvmath and NCCL that the package and its benchmarks use: there where these are installed.

No GPU is needed: what a GPU would find at the first call, of a name that is misspelt or gone, is found here.
"""

from __future__ import annotations

import ast
import functools
import importlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mpishard.comm import nccl

ROOT = Path(__file__).parents[2]
CUBLAS, NCCL, CUBLASLT = "cupy_backends.cuda.libs.cublas", "cupy.cuda.nccl", "nvmath.bindings.cublasLt"
# Packages, and more names than this are used of each.
LIBRARIES = {"cupy": 20, "cupy_backends": 0, "cudnn": 5, "nvmath": 15}
# What an expression of a file stands for: a module, or an instance of a class of one.
MEANINGS = {
    "mpishard/backend/kinds.py": {"self.module": "cupy"},
    "mpishard/backend/array.py": {"cupy": "cupy"},
    "mpishard/backend/cublas.py": {"lt": CUBLASLT, "self._lt": CUBLASLT},
    "mpishard/nn/device_attention.py": {"cudnn": "cudnn", "self._cudnn": "cudnn", "graph": "cudnn.pygraph"},
    "mpishard/comm/nccl.py": {
        "nccl": NCCL,
        "self._nccl": NCCL,
        "self._communicator": f"{NCCL}.NcclCommunicator",
    },
}
# Names by which code has the module of arrays, whichever it is.
ARRAY_MODULES = ("xp", "module", "work.module", "self._module")
# Of functions: the class of what they return, for names of it.
RETURNS = {
    "cupy.cuda.get_current_stream": "cupy.cuda.Stream",
    "cupy.get_default_memory_pool": "cupy.cuda.MemoryPool",
    "cupy.get_default_pinned_memory_pool": "cupy.cuda.PinnedMemoryPool",
    f"{CUBLASLT}.MatmulHeuristicResult": f"{CUBLASLT}.MatmulHeuristicResult",
    "cudnn.pygraph": "cudnn.pygraph",
}
# Of instances, which no name says: what is called of them.  ``ptr`` of streams and events is of the instance alone.
MEMBERS = {
    "cupy.cuda.Stream": ("synchronize", "wait_event", "__enter__", "__exit__", "__eq__"),
    "cupy.cuda.Event": ("synchronize", "record", "done"),
    "cupy.cuda.Device": ("use", "id", "pci_bus_id", "attributes", "__enter__", "__exit__"),
    "cupy.cuda.MemoryPointer": ("copy_to_host_async", "copy_from_host_async", "ptr"),
    "cupy.RawModule": ("get_function",),
    "cupy.RawKernel": ("max_dynamic_shared_size_bytes", "__call__"),
    "cupy.cuda.MemoryHook": ("malloc_postprocess", "__enter__", "__exit__"),
    "cupy.ndarray": ("get", "set", "data", "device", "flags", "view", "nbytes", "toDlpack", "__dlpack__", "fill"),
}


@functools.cache
def thing(path: str) -> Any:
    """What a path of names stands for.

    ImportError where its package is not installed or finds no library; AttributeError for a name that is not there.
    """
    words = path.split(".")
    found, depth = None, len(words)
    while found is None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = importlib.import_module(".".join(words[:depth]))
        except ModuleNotFoundError:
            depth -= 1
            if not depth:
                raise
    if found.__name__ == NCCL and not found.available:
        raise ImportError("CuPy finds no NCCL library")
    for word in words[depth:]:
        found = getattr(found, word)
    return found


def skip_without(path: str) -> None:
    try:
        thing(path)
    except ImportError as error:
        pytest.skip(f"{path} cannot be imported ({error})")


def path_of(node: ast.AST, known: dict[str, str]) -> str | None:
    """The path of an expression of names, attributes and calls that return something known; None for others."""
    text = ast.unparse(node)
    if text in known:
        return known[text]
    if isinstance(node, ast.Attribute):
        start = path_of(node.value, known)
        return None if start is None else f"{start}.{node.attr}"
    if isinstance(node, ast.Call):
        called = path_of(node.func, known)
        return None if called is None else RETURNS.get(called)
    return None


def names_in(tree: ast.AST, known: dict[str, str]) -> Iterator[tuple[int, str]]:
    """Lines and paths; an assignment or an import gives a name to a path in the function around it."""
    known = dict(known)
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                package = each.name.split(".")[0]
                if package in LIBRARIES:
                    known[each.asname or package] = each.name if each.asname else package
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in LIBRARIES:
            known |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
            yield from ((node.lineno, f"{node.module}.{each.name}") for each in node.names)
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            path = path_of(node.value, known)
            known.pop(node.targets[0].id, None)
            if path is not None:
                known[node.targets[0].id] = path
        if isinstance(node, ast.Attribute):
            path = path_of(node, known)
            if path is not None:
                yield node.lineno, path
        yield from names_in(node, known)


def paths(file: str) -> list[tuple[str, str]]:
    text = (ROOT / file).read_text("utf-8")
    found = {(f"{file}:{line}", path) for line, path in names_in(ast.parse(text), MEANINGS.get(file, {}))}
    if file == "mpishard/comm/capabilities.py":  # the program of the trial
        programs = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
        trials = [each for each in programs if isinstance(each, str) and "import cupy" in each]
        assert len(trials) == 1
        found |= {(f"{file}:{line}", path) for line, path in names_in(ast.parse(trials[0]), {})}
    return sorted(found)


def every_file() -> list[str]:
    folders = ROOT / "mpishard", ROOT / "benchmarks"
    return [str(path.relative_to(ROOT)) for folder in folders for path in sorted(folder.rglob("*.py"))]


def missing(found: list[tuple[str, str]]) -> list[str]:
    problems = []
    for place, path in found:
        try:
            thing(path)
        except ImportError:  # of a part whose library of CUDA is missing
            continue
        except AttributeError as error:
            problems.append(f"{place}: {path} ({error})")
    return problems


@pytest.mark.parametrize("library", LIBRARIES)
def test_names_of_libraries(library: str) -> None:
    skip_without(library)
    found = [each for file in every_file() for each in paths(file) if each[1].split(".")[0] == library]
    assert len(found) > LIBRARIES[library]
    assert not missing(found)


def test_names_of_array_modules() -> None:
    """Functions that code calls of the module of arrays, NumPy or CuPy, are in both."""
    skip_without("cupy")
    found = []
    for file in every_file():
        if file.startswith("benchmarks") or file == "mpishard/backend/kinds.py" or "/torch/" in file or "/jax/" in file:
            continue
        for node in ast.walk(ast.parse((ROOT / file).read_text("utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ARRAY_MODULES:
                found.append((f"{file}:{node.lineno}", node.attr))
    assert len(found) > 30
    for module in ("numpy", "cupy"):
        assert not missing([(place, f"{module}.{name}") for place, name in found if name not in ("__name__", "cuda")])


@pytest.mark.parametrize("kind", MEMBERS)
def test_members_of_classes(kind: str) -> None:
    skip_without("cupy")
    assert not missing([("", f"{kind}.{name}") for name in MEMBERS[kind]])


def test_routines_of_cublas_and_constants_of_nccl() -> None:
    skip_without(CUBLAS)
    text = (ROOT / "mpishard/backend/cublas.py").read_text("utf-8")
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    queued = [node.args[1] for node in calls if ast.unparse(node.func) == "queue"]
    routines = [each.value for each in queued if isinstance(each, ast.Constant)]
    assert sorted(routines) == ["gemmEx", "gemmStridedBatchedEx"]
    assert not missing([("", f"{CUBLAS}.{name}") for name in routines])
    skip_without(NCCL)
    constants = [*nccl._TYPES.values(), *nccl._OPS.values()]
    assert not missing([("", f"{NCCL}.{name}") for name in constants])


def test_a_name_that_is_not_there_is_found() -> None:
    skip_without("cupy")
    text = "def f(self):\n    runtime = self.module.cuda.runtime\n    return runtime.eventQuerry(1)\n"
    found = [("", path) for _, path in names_in(ast.parse(text), {"self.module": "cupy"})]
    assert ("", "cupy.cuda.runtime.eventQuerry") in found
    assert len(missing(found)) == 1
