"""Compiled functions: from the cache without the compiler, by the compiler, and without a cache."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import sys
import numba
import numpy as np
from numba.core.runtime.nrt import rtsys
from mpishard.backend.compiled import HostFunction

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
from mpishard.backend.compiled import HostFunction, inner
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
from mpishard.backend.compiled import inner

ADDED = {}

@inner
def scaled(x):
    return {} * x
"""

# A step of a model; then whether kernels had arguments of the types that were expected, those of the model, and others.
MODEL = """
import numpy as np
from mpishard import AdamW, nn
from mpishard.backend import exact, jit
from mpishard.nn import kernels

rule, flat = AdamW(), np.ones(4, np.float32)
rule.kernel.expect(flat.dtype)
exact.expect_norms(flat.dtype, squares=True)
model = nn.GPT(9, 8, width=8, layers=1, heads=2)
model.loss_and_gradient(np.ones((2, 8), int), np.ones((2, 8), int))
for kernel, annotations in kernels.GROUP.kernels:
    arrays, scalars = kernels.arguments_of(annotations, np.dtype("float32"))
    expected = jit.types_of((*arrays, *scalars))
    print(list(kernel.dispatcher().overloads) == [expected] or kernel.dispatcher())
others = [rule.kernel._host, exact._largest_bits, exact._binned_squares]
before = [list(function.dispatcher().overloads) for function in others]
exact.norm_of(flat)
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


def test_what_is_cached_is_loaded_without_compiler_and_runtime(tmp_path):
    script, cache = tmp_path / "script.py", tmp_path / "cache"
    script.write_text(SCRIPT)
    assert run([script], cache, "float64") == ["5.0 0 compiler"]
    assert run([script], cache, "float64", "int64", "float64") == ["5.0 1 loaded", "5.0 1 compiler", "5.0 1 compiler"]
    assert run([script], cache, "int64", "float64") == ["5.0 1 loaded", "5.0 2 loaded"]


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


def test_what_was_cached_with_the_runtime_is_compiled_again(tmp_path):
    script, cache = tmp_path / "script.py", tmp_path / "cache"
    script.write_text(SCRIPT)
    assert run([script], cache, "counted") == ["5.0"]
    assert run([script], cache, "float64") == ["5.0 0 compiler"]
    assert run([script], cache, "float64", "counted") == ["5.0 1 loaded", "5.0"]


def test_a_function_that_has_no_file_is_compiled(tmp_path):
    for _ in range(2):
        assert run(["-c", SCRIPT], tmp_path, "float64") == ["5.0 0 compiler"]


def test_what_is_expected_is_compiled_together_for_the_types_that_it_is_called_with(tmp_path):
    assert run(["-c", MODEL], tmp_path) == ["True"] * 12 + ["True [1, 1, 1]"]
