"""Compiled functions: from the cache without the compiler, by the compiler, and without a cache."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import sys
import numpy as np
from mpishard.compiling import HostFunction

def total(array, factor):
    found = 0.0
    for i in range(array.size):
        found += array[i] * factor
    return found

function = HostFunction(total)
for dtype in sys.argv[1:]:
    value = function((np.arange(5, dtype=dtype),), (0.5,))
    hits = sum(function._dispatcher.stats.cache_hits.values())
    print(value, hits, "compiler" if "numba.np.linalg" in sys.modules else "loaded")
"""

# A step of a model; then which kernels had arguments of other types than those they are compiled for together.
MODEL = """
import numpy as np
from mpishard import nn
from mpishard.compiling import jit
from mpishard.nn import kernels

model = nn.GPT(9, 8, width=8, layers=1, heads=2)
model.loss_and_gradient(np.ones((2, 8), int), np.ones((2, 8), int))
for kernel, annotations in kernels._together:
    expected = jit.types_of(kernels._arguments(annotations, np.dtype("float32")))
    print(list(kernel.dispatcher().overloads) == [expected] or kernel.dispatcher())
"""


def run(script, cache, *dtypes):
    """Lines that it prints: value, functions found in the cache, and whether Numba's compiler was imported."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache)}
    command = [sys.executable, *script, *dtypes]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()


def test_what_is_cached_is_loaded_without_the_compiler(tmp_path):
    script, cache = tmp_path / "script.py", tmp_path / "cache"
    script.write_text(SCRIPT)
    assert run([script], cache, "float64") == ["5.0 0 compiler"]
    assert run([script], cache, "float64", "int64", "float64") == ["5.0 1 loaded", "5.0 1 compiler", "5.0 1 compiler"]
    assert run([script], cache, "int64", "float64") == ["5.0 1 loaded", "5.0 2 loaded"]


def test_a_function_that_has_no_file_is_compiled(tmp_path):
    for _ in range(2):
        assert run(["-c", SCRIPT], tmp_path, "float64") == ["5.0 0 compiler"]


def test_kernels_are_compiled_together_for_the_types_that_a_model_gives_them():
    finished = subprocess.run([sys.executable, "-c", MODEL], capture_output=True, text=True, check=True)
    assert finished.stdout.splitlines() == ["True"] * 12
