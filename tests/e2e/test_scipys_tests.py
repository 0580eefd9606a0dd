"""SciPy's own tests of its minimisers and least squares pass on those of mpishard, but for a table of reasons."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("scipy.optimize.tests", reason="SciPy is not installed with its tests (extra: test)")
HELPER = Path(__file__).parents[1] / "helpers" / "scipys_tests.py"
LEAST = {  # tests that call mpishard
    "test_lbfgsb_hessinv": 3,
    "test_lbfgsb_setulb": 2,
    "test_trustregion": 3,
    "test_least_squares": 77,
    "test_optimize": 118,
}


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_scipys_tests_pass(ranks: int, alone: Callable[..., Any], mpirun: Callable[..., Any]) -> None:
    finished = alone(HELPER, timeout=550) if ranks == 1 else mpirun(ranks, HELPER, "mesh", timeout=550)
    assert finished.code == 0, finished.all
    counts = {file: int(count) for file, count in re.findall(r"(\w+): (\d+) tests call mpishard", finished.output)}
    assert counts.keys() == LEAST.keys() and all(counts[file] >= least for file, least in LEAST.items()), counts
