"""Libraries for GPUs: which are installed, when they are imported, and the names of theirs that the package uses."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import sys
import threading
import tomllib
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import standin

from mpishard.backend.cublas import LIBRARY as CUBLASLT
from mpishard.backend.optional_library import OptionalLibrary, device_libraries
from mpishard.environment.findings import cupy_for
from mpishard.nn.device_attention import LIBRARY as CUDNN

# Which libraries for GPUs are said to be installed, and which to install.


def test_versions_of_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {
        "nvidia-cudnn-cu12": "9.1",
        "nvidia-cudnn-cu13": "9.2",
        "nvmath-python": "1.0",
    }

    def version(name: str) -> str:
        if name in installed:
            return installed[name]
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    assert device_libraries() == {"cuDNN": "9.2", "nvmath": "1.0"}


def test_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cudnn", "nvidia", "nvmath"):
        monkeypatch.setitem(sys.modules, name, None)
    before = set(sys.modules)
    assert all(isinstance(version, str) for version in device_libraries().values())
    assert set(sys.modules) == before


@pytest.mark.parametrize(
    ("driver", "way_out"),
    [
        ("12.4", "pip install 'mpishard[cuda12x]', as its driver needs"),
        ("14.1", "pip install 'mpishard[cuda13x]', as its driver needs"),
        ("", "pip install 'mpishard[cuda13x or cuda12x]', as its driver needs"),
        ("11.8", "update its driver, which takes CUDA 11.8 at most, to one for CUDA 12 or later"),
    ],
)
def test_the_cupy_that_a_driver_needs_is_one_of_the_extras(driver: str, way_out: str) -> None:
    assert cupy_for(driver) == way_out
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert set(re.findall(r"cuda\d+x", way_out)) <= set(extras)


# Optional libraries for devices: when they are imported and started, and what is said where that fails.

NAME = "library_of_a_test"


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OptionalLibrary[Any]:
    """One that is installed, and whose start gives a new list."""
    (tmp_path / f"{NAME}.py").write_text("started = []\n", "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    return OptionalLibrary("Lib", "lib-python", NAME, "MPISHARD_LIB", "it is slow", lambda module, like: [module])


@pytest.mark.parametrize("known", [CUBLASLT, CUDNN], ids=["cublaslt", "cudnn"])
def test_they_are_for_cupys_arrays_only_and_can_be_turned_off(
    known: Any, environ: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert replace(known).module_for("standin") is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: types.SimpleNamespace(name=name))
    monkeypatch.setattr("importlib.import_module", lambda name: name)
    assert replace(known).module_for("cupy") == known.module
    environ(**{known.variable: "0"})
    assert replace(known).module_for("cupy") is None


def test_an_import_that_fails_is_warned_of_once(library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert library.module_for("cupy") is sys.modules[NAME]
    (tmp_path / f"{NAME}.py").write_text("raise OSError('libthing.so: not found')\n", "utf-8")
    monkeypatch.delitem(sys.modules, NAME)
    broken = replace(library)
    with pytest.warns(RuntimeWarning) as caught:
        assert broken.module_for("cupy") is broken.module_for("cupy") is None
        broken.warn_once("something else")
    assert [str(each.message) for each in caught] == [
        "the package lib-python is installed, but cannot be imported (libthing.so: not found); it is slow; "
        "MPISHARD_LIB=0 turns Lib off without a warning"
    ]


def test_what_is_not_installed_is_not_warned_of(library: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert replace(library, module="no_such_package.inner").module_for("cupy") is None


def test_it_is_started_once_for_each_thread(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    like = standin.empty(1)
    assert library.on_device(like) is None  # these arrays are not CuPy's
    monkeypatch.setattr(library, "module_for", lambda name: name)
    found = [library.on_device(like), library.on_device(like)]
    other = threading.Thread(target=lambda: found.append(library.on_device(like)))
    other.start()
    other.join()
    assert found[0] is found[1] is not found[2]
    assert found[0] == found[2] == [standin.__name__]


def test_a_start_that_fails_is_tried_and_warned_of_once(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def start(module: Any, like: Any) -> Any:
        tried.append(module)
        raise RuntimeError("STATUS_NOT_INITIALIZED")

    failing = replace(library, start=start)
    monkeypatch.setattr(failing, "module_for", lambda name: name)
    with pytest.warns(RuntimeWarning, match="Lib .*STATUS_NOT_INITIALIZED") as caught:
        assert [failing.on_device(standin.empty(1)) for _ in range(2)] == [None, None]
    assert len(tried) == len(caught) == 1


# Names of CuPy, cuDNN and nvmath that the package and its benchmarks use: there where these are installed.
#
# No GPU is needed: what a GPU would find at the first call, of a name that is misspelt or gone, is found here.

ROOT = Path(__file__).parents[2]
CUBLAS, NAMES_CUBLASLT = "cupy_backends.cuda.libs.cublas", "nvmath.bindings.cublasLt"
# Packages, and more names than this are used of each.
LIBRARIES = {"cupy": 20, "cupy_backends": 0, "cudnn": 5, "nvmath": 15}
# What an expression of a file stands for: a module, or an instance of a class of one.
MEANINGS = {
    "mpishard/backend/kinds.py": {"self.module": "cupy"},
    "mpishard/backend/array.py": {"cupy": "cupy"},
    "mpishard/backend/cublas.py": {"lt": NAMES_CUBLASLT, "self._lt": NAMES_CUBLASLT},
    "mpishard/nn/device_attention.py": {"cudnn": "cudnn", "self._cudnn": "cudnn", "graph": "cudnn.pygraph"},
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
    "cupy.cuda.Device": ("use", "id", "attributes", "__enter__", "__exit__"),
    "cupy.cuda.MemoryPointer": ("copy_to_host_async", "copy_from_host_async", "ptr"),
    "cupy.RawModule": ("get_function",),
    "cupy.RawKernel": ("max_dynamic_shared_size_bytes", "__call__"),
    "cupy.cuda.MemoryHook": ("malloc_postprocess", "__enter__", "__exit__"),
    "cupy.ndarray": ("get", "set", "data", "device", "flags", "view", "nbytes", "toDlpack", "__dlpack__", "fill"),
}


@functools.cache
def thing(path: str) -> Any:
    """What a path of names stands for.

    ImportError where its package is not installed; AttributeError for a name that is not there.
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


def test_routines_of_cublas() -> None:
    skip_without(CUBLAS)
    text = (ROOT / "mpishard/backend/cublas.py").read_text("utf-8")
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    queued = [node.args[1] for node in calls if ast.unparse(node.func) == "queue"]
    routines = [each.value for each in queued if isinstance(each, ast.Constant)]
    assert sorted(routines) == ["gemmEx", "gemmStridedBatchedEx"]
    assert not missing([("", f"{CUBLAS}.{name}") for name in routines])


def test_a_name_that_is_not_there_is_found() -> None:
    skip_without("cupy")
    text = "def f(self):\n    runtime = self.module.cuda.runtime\n    return runtime.eventQuerry(1)\n"
    found = [("", path) for _, path in names_in(ast.parse(text), {"self.module": "cupy"})]
    assert ("", "cupy.cuda.runtime.eventQuerry") in found
    assert len(missing(found)) == 1
