"""What `import mpishard` shows, and how little it opens before a name is used."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import mpishard

HEAVY = {"mpi4py.MPI", "numpy", "numba", "h5py", "matplotlib", "rich", "typer", "xxhash", "tqdm"}
COUNT = """
import json, sys
opened = set()
sys.addaudithook(lambda event, args: event == "open" and opened.add(str(args[0])))
{}
print(json.dumps([len(opened), sorted(sys.modules)]))
"""
# What the tab key runs.
COMPLETE = """
import contextlib, io, os
os.environ |= {"_MPISHARD_COMPLETE": "complete_bash", "COMP_WORDS": "mpishard p", "COMP_CWORD": "1"}
from mpishard.cli import main
with contextlib.suppress(SystemExit):
    main([])
"""


def output_of(code: str, without: tuple[str, ...] = (), **environment: str) -> str:
    """The output of a process that no launcher started, without some variables of the environment."""
    alone = {
        name: value for name, value in os.environ.items() if not name.startswith((*mpishard._STARTED_BY, *without))
    }
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=alone | environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def seen_after(code: str, **environment: str) -> tuple[int, set[str]]:
    """How many files Python opens in `code`, and which modules it imports."""
    count, modules = json.loads(output_of(COUNT.format(code), **environment).splitlines()[-1])
    return count, set(modules)


@pytest.mark.parametrize(
    ("code", "heavy", "most"),
    [
        ("import mpishard", set(), 30),
        ("from mpishard.cli import main; main(['--help'])", {"typer"}, 150),
        ("from mpishard.cli import main; main(['--version'])", {"typer"}, 150),
        (COMPLETE, {"typer"}, 200),
    ],
    ids=["import", "help", "version", "the tab key"],
)
def test_what_nobody_uses_is_not_imported(code: str, heavy: set[str], most: int) -> None:
    count, modules = seen_after(code)
    assert modules & HEAVY == heavy
    assert count < most


SIZES = "vocabulary_size=9, context_length=8, width=8, layers=1, heads=1"
MODEL = f"mpishard.nn.GPT({SIZES}, mesh=mpishard.Mesh()), mpishard.Checkpoints"


@pytest.mark.parametrize(
    ("code", "unused"),
    [
        (f"{MODEL}, mpishard.DDPOptimizer", ["numba", "matplotlib"]),
        ("mpishard.ZeRO2Optimizer, mpishard.ElasticOptimizer, mpishard.OptimizationProblem", ["h5py", "xxhash"]),
        (
            "mpishard.nn.GPT, mpishard.ZeRO1Optimizer, mpishard.AdamW",
            ["mpishard.minimizers.descent", "mpishard.nn.pretrained"],
        ),
        (
            "mpishard.l_curve([1, 2, 3], [1, 1, 1], [1, 1, 1]), mpishard.inverse.LCurve",
            ["mpi4py.MPI", "numba", "matplotlib"],
        ),
    ],
    ids=[
        "a compiler before the first step",
        "HDF5 without checkpoints",
        "methods and published weights",
        "MPI and pictures for the corner of an L-curve",
    ],
)
def test_what_needs_not(code: str, unused: list[str]) -> None:
    assert seen_after(f"import mpishard; {code}")[1].isdisjoint(unused)


def test_a_rank_starts_mpi_when_it_imports_mpishard() -> None:
    # Its launcher waits for that: a rank that failed before it would leave the others waiting.
    assert "mpi4py.MPI" in seen_after("import mpishard", MPI_LOCALNRANKS="1")[1]


# Compares what belongs to the whole interpreter before and after a piece of code.
UNTOUCHED = """
import atexit, logging, os, signal, sys, threading, warnings
{imports}

def everything():
    root = logging.getLogger()
    return {{
        "functions": [sys.exit, sys.excepthook, sys.unraisablehook, sys.displayhook, threading.excepthook, os._exit],
        "hooks": [*sys.meta_path, *sys.path_hooks, sys.gettrace(), sys.getprofile(), threading.gettrace()],
        "signals": {{number: signal.getsignal(number) for number in signal.valid_signals()}},
        "timer": signal.getitimer(signal.ITIMER_REAL),
        "environment": dict(os.environ),
        "atexit": atexit._ncallbacks(),
        "logging": [root.level, root.disabled, root.handlers[:], root.filters[:], logging.getLoggerClass()],
        "warnings": [warnings.filters[:], warnings.showwarning],
        "threads": threading.enumerate(),
        "place": [os.getcwd(), sys.argv[:], sys.path[:]],
    }}

before = everything()
import mpishard
{code}
for name, after in everything().items():
    assert after == before[name], (name, before[name], after)
"""
# What others do when they are imported is theirs; the first compiled function imports more of Numba.
OTHERS = "import numba.cpython.listobj, numpy, threadpoolctl, tqdm"
A_STEP = """
from mpishard.layout.boxes import split
from mpishard.pipeline.schedule import SCHEDULES
rule = mpishard.AdamW(lr=mpishard.cosine(1e-3, 10, warmup=2), weight_decay=0.1)
parameters, gradient = numpy.ones(5), numpy.ones(5)
rule.update(parameters, gradient, [numpy.zeros(5) for slot in rule.slots], 1)
assert parameters[0] < 1 and list(split(7, 3)) == [0, 3, 5, 7]
mpishard.ParameterSpec("weight", (3, 4))
assert "mpi4py.MPI" not in sys.modules
"""


@pytest.mark.parametrize(
    ("imports", "code"),
    [
        ("", ""),
        ("import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI", ""),
        ("from mpi4py import MPI", ""),
        (OTHERS, A_STEP),
    ],
    ids=["import", "MPI not started", "MPI started", "a step of a rule"],
)
def test_nothing_of_the_interpreter_is_replaced(imports: str, code: str) -> None:
    """In a program that does not run distributed."""
    output_of(UNTOUCHED.format(imports=imports, code=code), () if "MPI" in imports else ("HOME",))


def names_for_type_checkers(package: ModuleType) -> dict[str, str]:
    """Names that the package imports for them alone, and the modules of these."""
    tree = ast.parse(Path(package.__file__ or "").read_text("utf-8"))
    (checked,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = [node for node in checked.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


@pytest.mark.parametrize("name", ["mpishard", "mpishard.inverse", "mpishard.minimizers", "mpishard.nn"])
def test_type_checkers_and_python_find_the_same_names(name: str) -> None:
    package = importlib.import_module(name)
    modules = names_for_type_checkers(package)
    for each, module in modules.items():
        named = getattr(importlib.import_module(module), each)
        assert getattr(package, each) is named
        assert module != f"{name}.{each}", "once imported, a module hides the name of the package"
    further = ["__version__"] if package is mpishard else []
    assert sorted(modules) == sorted(package.__all__) and sorted(dir(package)) == sorted([*modules, *further])
    with pytest.raises(AttributeError, match=f"'{name}' .*'Missing'"):
        _ = package.Missing


@pytest.mark.parametrize(("name", "called"), [("torch", "PyTorch"), ("jax", "JAX")])
def test_without_a_framework_a_message_says_what_to_install(
    name: str, called: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = importlib.import_module(f"mpishard.{name}")
    for public in package.__all__:
        monkeypatch.delitem(vars(package), public, raising=False)
    monkeypatch.setitem(sys.modules, name, None)
    message = rf"mpishard.{name}.rule_of needs {called}: .*mpishard\[{name}\]"
    with pytest.raises(ModuleNotFoundError, match=message):
        _ = package.rule_of
    assert dir(package) == package.__all__
    assert not hasattr(package, "rules_of")


def test_what_is_no_name_is_an_attribute_error() -> None:
    assert not hasattr(mpishard, "_private")
    assert mpishard.compression.Int8Compressor  # a package, by its own name
