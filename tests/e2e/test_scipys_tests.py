"""SciPy's own tests of its minimisers and least squares pass on those of mpishard, but for a table of reasons."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("scipy.optimize.tests", reason="SciPy is not installed with its tests (extra: test)")
HELPER = Path(__file__).parents[1] / "helpers" / "scipys_tests.py"


@pytest.mark.full
@pytest.mark.parametrize(
    ("file", "least"),
    [("test_lbfgsb_hessinv", 3), ("test_trustregion", 3), ("test_least_squares", 75), ("test_optimize", 100)],
)
def test_scipys_tests_pass(file: str, least: int, alone: Callable[..., Any]) -> None:
    finished = alone(HELPER, file, timeout=900)
    assert finished.code == 0, finished.all
    (count,) = re.findall(r"(\d+) tests call mpishard", finished.output)
    assert int(count) >= least
