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

LAUNCHED = tuple(mpishard._STARTED_BY)
HEAVY = ("mpi4py.MPI", "numpy", "numba", "h5py", "matplotlib", "rich", "typer", "xxhash", "tqdm")
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


def seen_after(code: str, **environment: str) -> tuple[int, set[str]]:
    """How many files Python opens in `code`, and which modules it imports, in a process that no launcher started."""
    alone = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHED)}
    command = [sys.executable, "-c", COUNT.format(code)]
    output = subprocess.run(command, env=alone | environment, capture_output=True, text=True, check=True).stdout
    count, modules = json.loads(output.splitlines()[-1])
    return count, set(modules)


@pytest.mark.parametrize(
    ("code", "heavy", "most"),
    [
        ("import mpishard", set(), 30),
        ("from mpishard.cli import main; main(['--help'])", {"typer"}, 150),
        ("from mpishard.cli import main; main(['--version'])", {"typer"}, 150),
        (COMPLETE, {"typer"}, 200),
    ],
)
def test_what_nobody_uses_is_not_imported(code: str, heavy: set[str], most: int) -> None:
    count, modules = seen_after(code)
    assert modules & set(HEAVY) == heavy
    assert count < most


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
        "folder": os.getcwd(),
        "arguments": sys.argv[:],
        "path": sys.path[:],
    }}

before = everything()
{code}
for name, after in everything().items():
    assert after == before[name], (name, before[name], after)
"""


@pytest.mark.parametrize(
    ("imports", "code"),
    [
        ("", "import mpishard"),
        ("import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI", "import mpishard"),
        ("from mpi4py import MPI", "import mpishard"),
        # What others do when they are imported is theirs; the first compiled function imports more of Numba.
        (
            "import numba.cpython.listobj, numpy, threadpoolctl, tqdm",
            """
import mpishard
from mpishard.layout.boxes import split
from mpishard.pipeline.schedule import SCHEDULES
rule = mpishard.AdamW(lr=mpishard.cosine(1e-3, 10, warmup=2), weight_decay=0.1)
parameters, gradient = numpy.ones(5), numpy.ones(5)
rule.update(parameters, gradient, [numpy.zeros(5) for slot in rule.slots], 1)
assert parameters[0] < 1 and list(split(7, 3)) == [0, 3, 5, 7]
mpishard.ParameterSpec("weight", (3, 4))
assert "mpi4py.MPI" not in sys.modules
""",
        ),
    ],
)
def test_nothing_of_the_interpreter_is_replaced(imports: str, code: str) -> None:
    """In a program that does not run distributed."""
    alone = {name: value for name, value in os.environ.items() if not name.startswith((*LAUNCHED, "HOME"))}
    if "MPI" in imports:
        alone["HOME"] = os.environ["HOME"]
    program = UNTOUCHED.format(imports=imports, code=code)
    done = subprocess.run(
        [sys.executable, "-c", program], env=alone, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_models_need_no_compiler_before_their_first_step() -> None:
    code = """
import mpishard
mpishard.nn.GPT(9, 8, width=8, layers=1, heads=1, mesh=mpishard.Mesh()), mpishard.Checkpoints, mpishard.DDPOptimizer
"""
    assert seen_after(code)[1].isdisjoint(("numba", "matplotlib"))


def test_runs_without_checkpoints_need_no_hdf5() -> None:
    code = "import mpishard; mpishard.ZeRO2Optimizer, mpishard.ElasticOptimizer, mpishard.OptimizationProblem"
    assert seen_after(code)[1].isdisjoint(("h5py", "xxhash", "matplotlib"))


def test_a_step_of_a_rule_needs_neither_methods_nor_published_weights() -> None:
    modules = seen_after("import mpishard; mpishard.nn.GPT, mpishard.ZeRO1Optimizer, mpishard.AdamW")[1]
    unused = ("minimizers.descent", "nn.pretrained", "nn.llama")
    assert modules.isdisjoint(f"mpishard.{name}" for name in unused)


def test_a_rank_starts_mpi_when_it_imports_mpishard() -> None:
    # Its launcher waits for that: a rank that failed before it would leave the others waiting.
    assert "mpi4py.MPI" in seen_after("import mpishard", MPI_LOCALNRANKS="1")[1]


def names_for_type_checkers(package: ModuleType) -> dict[str, str | None]:
    """Names that the package imports for them alone, and the modules of these."""
    tree = ast.parse(Path(package.__file__ or "").read_text("utf-8"))
    (checked,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    return {
        alias.name: node.module for node in checked.body for alias in node.names if isinstance(node, ast.ImportFrom)
    }


@pytest.mark.parametrize("name", ["inverse", "minimizers", "nn"])
def test_type_checkers_and_python_find_the_same_names_in_packages(name: str) -> None:
    package = importlib.import_module(f"mpishard.{name}")
    for each, module in names_for_type_checkers(package).items():
        assert getattr(package, each) is getattr(importlib.import_module(module or ""), each)
        assert module != f"mpishard.{name}.{each}", "once imported, a module hides the name of the package"
    assert sorted(names_for_type_checkers(package)) == sorted(package.__all__) == sorted(dir(package))
    with pytest.raises(AttributeError, match=f"module 'mpishard.{name}' has no attribute 'Missing'"):
        _ = package.Missing


def test_type_checkers_and_python_find_the_same_names() -> None:
    modules = names_for_type_checkers(mpishard)
    assert modules == {"nn": "mpishard"} | {name: f"mpishard.{module}" for name, module in mpishard._MODULE_OF.items()}
    assert sorted(modules) == sorted(mpishard.__all__)
    assert sorted(dir(mpishard)) == sorted([*mpishard.__all__, "__version__"])
    for name in mpishard.__all__:
        assert getattr(mpishard, name) is not None


@pytest.mark.parametrize(("name", "called"), [("torch", "PyTorch"), ("jax", "JAX")])
def test_without_a_framework_a_message_says_what_to_install(
    name: str, called: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = importlib.import_module(f"mpishard.{name}")
    for public in package.__all__:
        monkeypatch.delitem(vars(package), public, raising=False)
    monkeypatch.setitem(sys.modules, name, None)
    message = rf"mpishard.{name}.rule_of needs {called}: pip install 'mpishard\[{name}\]'"
    with pytest.raises(ModuleNotFoundError, match=message):
        _ = package.rule_of
    assert dir(package) == package.__all__
    assert not hasattr(package, "rules_of")


def test_names_are_listed_before_they_are_used() -> None:
    assert dir(mpishard.inverse) == mpishard.inverse.__all__


def test_what_is_no_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'mpishard' has no attribute 'Mash'"):
        _ = mpishard.Mash
    assert not hasattr(mpishard, "_private")
    assert mpishard.compression.Int8Compressor  # a package, by its own name
