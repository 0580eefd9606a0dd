"""Compiled functions: from the cache, by the compiler, in turns, and the two translations of a formula."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from math import copysign, exp, log, sqrt, tanh
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpishard.backend import numba_cache
from mpishard.backend.array import Kernel, elementwise
from mpishard.optim import formulas

# Compiled functions: from the cache without the compiler, by the compiler, and without a cache.

SCRIPT = """
import sys
import numba
import numpy as np
from numba.core.runtime.nrt import rtsys
from mpishard.backend.jit_function import HostFunction

def total(array, factor):
    found = 0.0
    for i in range(array.size):
        found += array[i] * factor
    return found

function = HostFunction(total)
for dtype in sys.argv[1:]:
    if dtype == "counted":
        print(numba.njit(cache=True)(total)(np.arange(5.0), 0.5))
        continue
    value = function((np.arange(5, dtype=dtype),), (0.5,))
    hits = sum(function._dispatcher.stats.cache_hits.values())
    used = "compiler" if "numba.np.linalg" in sys.modules else "runtime" if rtsys._init else "loaded"
    print(value, hits, used)
"""

# It calls a function of another file, by one that it calls itself, and takes a number from there; sys.argv[1] is an
# option of the compiler.
CALLER = """
import sys
import numpy as np
from mpishard.backend.jit_function import HostFunction, inner
from helper import ADDED, scaled

@inner
def moved(x):
    return scaled(x) + ADDED

def total(array):
    found = 0.0
    for i in range(array.size):
        found += moved(array[i])
    return found

function = HostFunction(total, error_model=sys.argv[1])
print(function((np.ones(2),)), sum(function._dispatcher.stats.cache_hits.values()))
"""
HELPER = """
from mpishard.backend.jit_function import inner

ADDED = {}

@inner
def scaled(x):
    return {} * x
"""

# A step of a model; then whether kernels had arguments of the types that were expected, those of the model, and others.
MODEL = """
import numpy as np
from mpishard import AdamW, nn
from mpishard.backend import exact_norms, numba_cache
from mpishard.nn import kernels
from mpishard.nn.kernel_groups import arguments_of

rule, flat = AdamW(), np.ones(4, np.float32)
rule.kernel.expect(flat)
exact_norms.expect_norms(flat, squares=True)
model = nn.GPT(vocabulary_size=9, context_length=8, width=8, layers=1, heads=2)
model.loss_and_gradient(np.ones((2, 8), int), np.ones((2, 8), int))
for kernel, annotations in kernels.GROUP.kernels:
    arrays, scalars = arguments_of(annotations, np.dtype("float32"))
    expected = numba_cache.types_of((*arrays, *scalars))
    print(list(kernel.dispatcher().overloads) == [expected] or kernel.dispatcher())
others = [rule.kernel._host, exact_norms._largest_bits, exact_norms._binned_squares]
before = [list(function.dispatcher().overloads) for function in others]
exact_norms.norm_of(flat)
rule.update(flat, flat.copy(), [flat.copy(), flat.copy()], 1)
print(before == [list(function.dispatcher().overloads) for function in others], [len(types) for types in before])
"""


def run(script, cache, *dtypes):
    """Lines that it prints: value, functions found in the cache, and what of Numba the process needed."""
    # With a lock file of its own, or a function that another process compiles now would not be compiled here.
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache), "TMPDIR": str(cache.parent)}
    # Modules beside the script are found with PYTHONSAFEPATH too.
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(cache.parent), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, *script, *dtypes]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.full
def test_what_is_cached_is_loaded_without_compiler_and_runtime(tmp_path):
    script, cache = tmp_path / "script.py", tmp_path / "cache"
    script.write_text(SCRIPT)
    assert run([script], cache, "float64") == ["5.0 0 compiler"]
    assert run([script], cache, "float64", "int64", "float64") == ["5.0 1 loaded", "5.0 1 compiler", "5.0 1 compiler"]
    assert run([script], cache, "int64", "float64") == ["5.0 1 loaded", "5.0 2 loaded"]


@pytest.mark.full
def test_what_calls_a_function_that_has_changed_is_compiled_again(tmp_path):
    """Also with another number of another file, or another option; what was cached before is still there."""
    script, cache = tmp_path / "script.py", tmp_path / "cache"
    script.write_text(CALLER)

    def runs(added, factor, option="numpy"):
        # Each text has another length, by which Python knows that its own cache of the file is old.
        (tmp_path / "helper.py").write_text(HELPER.format(added, factor))
        return run([script], cache, option)

    assert runs("1.0", "2.0") == ["6.0 0"]
    assert runs("1.0", "2.0") == ["6.0 1"]
    assert runs("1.0", "12.0") == ["26.0 0"]
    assert runs("10.00", "2.00") == ["24.0 0"]
    assert runs("10.00", "2.00", "python") == ["24.0 0"]
    assert runs("1.0", "2.0") == ["6.0 1"]
    script.write_text(CALLER.replace("found = 0.0", "found = 1.0"))
    assert runs("1.0", "2.0") == ["7.0 0"]


@pytest.mark.full
def test_what_was_cached_with_the_runtime_is_compiled_again(tmp_path):
    script, cache = tmp_path / "script.py", tmp_path / "cache"
    script.write_text(SCRIPT)
    assert run([script], cache, "counted") == ["5.0"]
    assert run([script], cache, "float64") == ["5.0 0 compiler"]
    assert run([script], cache, "float64", "counted") == ["5.0 1 loaded", "5.0"]


@pytest.mark.full
def test_what_is_damaged_in_the_cache_is_compiled_again(tmp_path):
    script, cache = tmp_path / "script.py", tmp_path / "cache"
    script.write_text(SCRIPT)
    assert run([script], cache, "float64") == ["5.0 0 compiler"]
    index, code = sorted(cache.rglob("*.nb?"), reverse=True)
    for path in (index, code):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        assert run([script], cache, "float64") == ["5.0 0 compiler"]
        assert run([script], cache, "float64") == ["5.0 1 loaded"]


def test_code_of_another_key_or_source_is_not_loaded(tmp_path):
    """As nodes with different processors may leave it that share a cache, or who was stopped between two files."""
    files = numba_cache._CheckedFiles(str(tmp_path), "function", "source")
    for key in ("one processor", "another"):
        files.save(key, key.encode())
    assert [files.load(key) for key in ("one processor", "another", "none")] == [b"one processor", b"another", None]
    one, other = sorted(tmp_path.glob("*.nbc"))
    before = other.read_bytes()
    other.write_bytes(one.read_bytes())
    assert [files.load(key) for key in ("one processor", "another")] == [b"one processor", None]
    numba_cache._CheckedFiles(str(tmp_path), "function", "later source").save("another", b"code")
    one.write_bytes(before)  # of the earlier source
    assert numba_cache._CheckedFiles(str(tmp_path), "function", "later source").load("another") is None


@pytest.mark.full
def test_a_function_that_has_no_file_is_compiled(tmp_path):
    for _ in range(2):
        assert run(["-c", SCRIPT], tmp_path, "float64") == ["5.0 0 compiler"]


@pytest.mark.full
def test_what_is_expected_is_compiled_together_for_the_types_that_it_is_called_with(tmp_path):
    assert run(["-c", MODEL], tmp_path) == ["True"] * 12 + ["True [1, 1, 1]"]


# In a process whose cache is empty: what it logs while it compiles for longer than it is patient.
SLOW = """
import logging, sys, threading
import numpy as np
from mpishard.backend import jit_function, numba_cache
from mpishard.backend.array import accumulate
from mpishard.io import log

said, lines = threading.Event(), []

class Handler(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
        said.set()

log.LOGGER.addHandler(Handler())
jit_function.PATIENCE_S, in_turn = 0.01, numba_cache.in_turn

def slow(*arguments):
    assert said.wait(60)
    in_turn(*arguments)

numba_cache.in_turn = slow
for dtype in ("float32", "float64"):
    accumulate(np.ones(3, dtype), np.ones(3, dtype))
print(*lines, sep="\\n")
"""


def test_a_compilation_that_takes_long_is_said_once(tmp_path):
    assert run(["-c", SLOW], tmp_path) == ["compiling kernels for this processor, once; later runs load them"]
    assert run(["-c", SLOW], tmp_path) == [""]  # they are loaded


# Compilation in turns: files in place of the lock file, and processes that hold a lock for long or die.

HOLD = """
import fcntl, sys
file = open(sys.argv[1], "r+")
fcntl.lockf(file, fcntl.LOCK_EX, 1, int(sys.argv[2]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"mpishard-{os.getuid()}.lock"


@pytest.fixture
def holder(path):
    """A process that holds the turn of "name" until its stdin is closed."""
    assert numba_cache._file() is not None
    command = [sys.executable, "-I", "-S", "-c", HOLD, str(path), str(numba_cache._byte("name"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        yield process


def link(path):
    (path.parent / "target").touch(0o600)
    path.symlink_to(path.parent / "target")


def second_name(path):
    (path.parent / "target").touch(0o600)
    path.hardlink_to(path.parent / "target")


def of_another_user(path):
    if os.getuid() != 0:
        pytest.skip("only root can make files of other users")
    path.touch(0o600)
    os.chown(path, 65534, 65534)


def open_to_all(path):
    path.touch()
    path.chmod(0o666)


@pytest.mark.parametrize("plant", [of_another_user, open_to_all, link, second_name, os.mkfifo, os.mkdir])
def test_what_another_user_may_have_planted_is_not_used(path, plant):
    plant(path)
    assert numba_cache._file() is None
    made = []
    numba_cache.load_or_make("name", lambda: False, lambda: made.append(1), patience=0.05)
    assert made == [1]


def test_nobody_makes_anything_while_no_core_is_free(path, monkeypatch):
    free, made = [False, False, True], []
    monkeypatch.setattr(numba_cache, "core", lambda: contextlib.nullcontext(free.pop(0)))
    numba_cache.load_or_make("name", lambda: False, lambda: made.append(list(free)))
    assert made == [[]]


def test_a_lock_of_ours_is_used(path):
    with numba_cache.attempt("name") as mine:
        assert mine
    assert path.stat().st_mode & 0o777 == 0o600


def test_nobody_waits_without_limit(holder):
    with numba_cache.attempt("name") as mine, numba_cache.attempt("other") as other:
        assert not mine and other
    made = []
    numba_cache.load_or_make("name", lambda: False, lambda: made.append(1), patience=0.05)
    assert made == [1]


@pytest.mark.parametrize("done", [True, False])
def test_who_waits_loads_what_was_made_or_makes_it(holder, done):
    waits, ended, found, made = threading.Event(), threading.Event(), [], []

    def load():
        waits.set()
        return ended.is_set() and done

    def wait():
        numba_cache.load_or_make("name", load, lambda: made.append(1))
        found.append(1)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    waits.wait()
    assert not made and not found
    ended.set()
    holder.kill()
    holder.wait()
    thread.join(120)
    assert found == [1]
    assert made == ([] if done else [1])


# The two translations of a formula: the C body, compiled by the system's compiler, against the Numba loop.

COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
RULES = {name: kernel for name, kernel in vars(formulas).items() if isinstance(kernel, Kernel)}


@elementwise
def arithmetic(i, n, T, /, double, x):
    """Every operator, in names that C or the loop around it has other uses for."""
    float_ish = double - 2 * n / (3 - -T) + 0.1
    i += x * float_ish
    i -= (n + 1e-3) * (i / 7)
    i *= 1.5
    i /= 3
    e = n if i < T else T
    e = e + (1 if n <= T else 2) + (3 if n > T else 4) + (5 if n >= T else 6)
    e = e + (1 if n == T else 10) + (1 if n != T else 100)
    T = e
    return i, T


@elementwise
def rounded_functions(a, b, /):
    a = sqrt(abs(a)) + min(a, b) - 3 * max(a, b) + copysign(0.7, b) * abs(b)
    return a


@elementwise
def library_functions(a, b, /):
    a = exp(-abs(a)) + tanh(b) * log(1 + a * a)
    return a


@elementwise
def smaller_and_larger(a, b, /):
    low = min(a, b)
    b = max(a, b)
    a = low
    return a, b


def as_c(kernel: Kernel, real: str, folder: Path) -> Callable[..., None]:
    """The kernel's C body in a loop over elements, compiled; called with NumPy arrays and scalars like the kernel."""
    pointers = [f"{'' if name in kernel.written else 'const '}T *all_{name}" for name in kernel.arrays]
    scalars = [f"T {name}_" for name in kernel.scalars]
    elements = "".join(f"#define array_{name} all_{name}[element_]\n" for name in kernel.arrays)
    source = folder / f"{kernel.name}_{real}.c"
    source.write_text(
        f"#include <tgmath.h>\n#include <stddef.h>\ntypedef {real} T;\n{elements}"
        f"void run({', '.join(['size_t count_', *pointers, *scalars])}) {{\n"
        f"for (size_t element_ = 0; element_ < count_; element_++) {{\n{kernel.c_body}\n}}\n}}\n"
    )
    library = source.with_suffix(".so")
    assert COMPILER
    flags = ["-std=c11", "-O2", "-ffp-contract=off", "-Wall", "-Werror", "-shared", "-fPIC"]
    subprocess.run([COMPILER, *flags, str(source), "-o", str(library), "-lm"], check=True, timeout=60)
    function = ctypes.CDLL(str(library)).run
    number = ctypes.c_float if real == "float" else ctypes.c_double

    def call(*arguments: Any) -> None:
        arrays = arguments[: len(kernel.arrays)]
        function(
            ctypes.c_size_t(arrays[0].size),
            *(ctypes.c_void_p(array.ctypes.data) for array in arrays),
            *(number(scalar) for scalar in arguments[len(kernel.arrays) :]),
        )

    return call


def both(kernel: Kernel, real: str, folder: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """(by Numba, by C) for every array of a kernel, from positive and negative numbers of several sizes."""
    rng = np.random.default_rng(1)
    dtype = np.float32 if real == "float" else np.float64
    sizes = np.exp(rng.uniform(-10, 5, (len(kernel.arrays), 999)))
    inputs = (sizes * rng.choice([-1, 1], sizes.shape)).astype(dtype)
    for name, values in zip(kernel.arrays, inputs, strict=True):
        if name in ("v", "top", "total"):  # accumulated squares
            np.abs(values, out=values)
    inputs[:, :4] = 0
    scalars = rng.uniform(0.1, 1, len(kernel.scalars))
    by_numba = [values.copy() for values in inputs]
    by_c = [values.copy() for values in inputs]
    kernel(*by_numba, *scalars)
    as_c(kernel, real, folder)(*by_c, *scalars)
    return list(zip(by_numba, by_c, strict=True))


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
@pytest.mark.parametrize("real", ["float", "double"])
@pytest.mark.parametrize("kernel", [*RULES.values(), arithmetic, rounded_functions], ids=lambda kernel: kernel.name)
def test_both_translations_give_the_same_bits(kernel: Kernel, real: str, tmp_path: Path) -> None:
    for by_numba, by_c in both(kernel, real, tmp_path):
        assert np.array_equal(by_numba, by_c, equal_nan=True)


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
@pytest.mark.parametrize("real", ["float", "double"])
def test_library_functions_agree_to_rounding(real: str, tmp_path: Path) -> None:
    for by_numba, by_c in both(library_functions, real, tmp_path):
        np.testing.assert_array_max_ulp(by_numba, by_c, maxulp=8)


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
def test_min_and_max_treat_nan_alike(tmp_path: Path) -> None:
    a = np.array([1.0, np.nan, 2.0, np.nan, -0.0])
    b = np.array([2.0, 1.0, np.nan, np.nan, 0.0])
    a_c, b_c = a.copy(), b.copy()
    expected = [(min(x, y), max(x, y)) for x, y in zip(a, b, strict=True)]
    smaller_and_larger(a, b)
    as_c(smaller_and_larger, "double", tmp_path)(a_c, b_c)
    for low, high in ((a, b), (a_c, b_c)):
        assert np.array_equal(np.stack([low, high], axis=1), np.array(expected), equal_nan=True)


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_cupy_gets_the_kernel_and_its_arguments_in_order(
    dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stands in for CuPy's compiler, which needs a GPU: the same body and the same arguments, run by the host."""
    made = []

    class ElementwiseKernel:
        def __init__(self, inputs: str, outputs: str, body: str, name: str, **options: Any) -> None:
            assert body == kernel.c_body and name == "mpishard_amsgrad"
            assert options == {"options": ("--fmad=false",), "no_return": True}
            self.parameters = [parameter.split() for parameter in f"{inputs}, {outputs}".split(", ")]
            assert all(kind == "T" for kind, _ in self.parameters)
            made.append(self)

        def __call__(self, *arguments: Any) -> None:
            assert all(argument.dtype == dtype for argument in arguments)
            given = {name: value for (_, name), value in zip(self.parameters, arguments, strict=True)}
            in_order = [*(f"array_{name}" for name in kernel.arrays), *(f"{name}_" for name in kernel.scalars)]
            as_c(kernel, "float" if dtype is np.float32 else "double", tmp_path)(*(given[name] for name in in_order))

    kernel = formulas.amsgrad
    rng = np.random.default_rng(0)
    arrays = [rng.uniform(0.1, 1, 50).astype(dtype) for _ in kernel.arrays]
    expected = [array.copy() for array in arrays]
    scalars = [float(scalar) for scalar in rng.uniform(0.1, 1, len(kernel.scalars))]
    kernel(*expected, *scalars)
    monkeypatch.setattr(kernel, "_device", {})
    kernel.on_cupy(SimpleNamespace(ElementwiseKernel=ElementwiseKernel), arrays, scalars)
    assert len(made) == 1
    assert all(np.array_equal(*pair) for pair in zip(arrays, expected, strict=True))


def test_cupy_gets_a_kernel_for_each_type_of_mask() -> None:
    """A ``cupy.ElementwiseKernel`` raises for an array of another type than it was made for."""

    class ElementwiseKernel:
        def __init__(self, inputs: str, outputs: str, *_: Any, **options: Any) -> None:
            self.types = [parameter.split()[0] for parameter in f"{inputs}, {outputs}".split(", ")]

        def __call__(self, *arguments: Any) -> None:
            for kind, argument in zip(self.types, arguments, strict=True):
                if (kind == "bool") != (argument.dtype == np.bool_):
                    raise TypeError(f"Type is mismatched: {kind}, {argument.dtype}")
            called.append(self.types)

    @elementwise
    def mark(values, large, /, limit):  # type: ignore[no-untyped-def]
        large = 1.0 if values > limit else 0.0
        return large

    called: list[list[str]] = []
    values = np.zeros(3, np.float32)
    for dtype in (np.bool_, np.float32, np.bool_):
        mark.on_cupy(SimpleNamespace(ElementwiseKernel=ElementwiseKernel), [values, values.astype(dtype)], [1.0])
    assert called == [["T", "T", "bool"], ["T", "T", "T"], ["T", "T", "bool"]]


def test_kernel_describes_itself() -> None:
    assert arithmetic.arrays == ("i", "n", "T")
    assert arithmetic.scalars == ("double", "x")
    assert arithmetic.written == ("i", "T")
    assert arithmetic.__doc__ and arithmetic.__doc__.startswith("Every operator")
    assert repr(arithmetic) == "Kernel(arithmetic: i, n, T / double, x)"


# By name: the parameters of a formula, its body, and what the refusal of it says.
REFUSED = {
    "no_arrays": ("p, rate", "return p", "arrays before a `/`"),
    "no_return": ("p, /, rate", "p = p - rate", "end by returning"),
    "returns_a_scalar": ("p, /, rate", "return rate", "a return of the names of arrays"),
    "returns_an_expression": ("p, /, rate", "return p - rate", "a return of the names of arrays"),
    "returns_twice": ("p, /", "return p, p", "names of arrays, each once"),
    "starred": ("p, /, *rates", "return p", "without defaults, stars or keywords"),
    "defaults": ("p, /, rate=0.1", "return p", "without defaults, stars or keywords"),
    "keywords": ("p, /, *, rate", "return p", "without defaults, stars or keywords"),
    "branches": ("p, /", "if p > 0:\n        p = -p\n    return p", "found `if p > 0:`"),
    "loops": ("p, /", "for _ in range(3):\n        p = p * p\n    return p", "found `for _ in range"),
    "powers": ("p, /", "p = p**2\n    return p", r"found `p \*\* 2`"),
    "modulo": ("p, /", "p = p % 2\n    return p", "found `p % 2`"),
    "inverts": ("p, /", "p = ~p\n    return p", "found `~p`"),
    "chains": ("p, /", "p = 1 if 0 < p < 1 else p\n    return p", "compare two values"),
    "joins": ("p, /", "p = 1 if p > 0 and p < 1 else p\n    return p", "compare two values"),
    "compares_outside_a_condition": ("p, /", "p = p > 0\n    return p", "found `p > 0`"),
    "calls_another": ("p, /", "p = math.sin(p)\n    return p", "calls of sqrt"),
    "calls_with_a_wrong_number": ("p, /", "p = sqrt(p, p)\n    return p", r"calls of sqrt \(of 1\)"),
    "uses_a_global": ("p, /", "p = p * COMPILER\n    return p", "found `COMPILER`"),
    "uses_before_assignment": ("p, /", "p = p + later\n    later = p\n    p = later\n    return p", "found `later`"),
    "assigns_a_scalar": ("p, /, rate", "rate = rate * p\n    return p", "`rate` is the same"),
    "assigns_two": ("p, g, /", "p, g = g, p\n    return p, g", "assignments `name = expression`"),
    "assigns_elements": ("p, /", "p[0] = 1\n    return p", "assignments `name = expression`"),
    "text": ("p, /", "p = p + '1'\n    return p", "finite numbers as constants"),
    "endless": ("p, /", "p = p + 1e999\n    return p", "finite numbers as constants"),
    "hidden": ("p, /", "_p = p\n    p = _p\n    return p", "underscore"),
    "trailing": ("p, /", "p_ = p\n    p = p_\n    return p", "underscore"),
    "shadows": ("p, /, sqrt", "p = p * sqrt\n    return p", "nor name a function"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_formulas_are_refused_when_defined(name: str, tmp_path: Path) -> None:
    parameters, body, message = REFUSED[name]
    path = tmp_path / "formula.py"
    namespace: dict[str, Any] = {}
    path.write_text(f"\n\n\ndef {name}({parameters}):\n    {body}\n")
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    with pytest.raises(TypeError, match=message) as caught:
        elementwise(namespace[name])
    line = int(str(caught.value).partition("(line ")[2].partition(" of ")[0])
    assert 4 <= line <= 7 and str(path) in str(caught.value)


def test_a_formula_needs_its_source() -> None:
    namespace: dict[str, Any] = {}
    exec("def shrink(p, /):\n    p = p / 2\n    return p", namespace)
    with pytest.raises(TypeError, match="must be a function in a file"):
        elementwise(namespace["shrink"])
    with pytest.raises(TypeError, match="element-wise formula"):
        elementwise(lambda p: p)
