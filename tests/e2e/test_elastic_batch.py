"""Workers that were not there at the beginning, and deaths, in a run whose batch goes with its workers."""

from __future__ import annotations

import sys
from pathlib import Path

import faults
import pytest

pytestmark = pytest.mark.faults

SCRIPT = Path(__file__).parents[1] / "helpers" / "scaled.py"


def test_workers_are_spawned_and_die(mpirun, tmp_path):
    ulfm, report = faults.launcher(), tmp_path / "report"
    if ulfm is None:
        assert mpirun(2, SCRIPT, tmp_path).code == 0
    else:
        # After a death the launcher may not end by itself, and its exit code is that of the dead rank.
        output, _ = faults.execute([*ulfm, "-n", "2", sys.executable, str(SCRIPT), str(tmp_path)], 60, report.exists)
        assert report.exists(), output
    same, *workers = report.read_text().split()
    sizes = [size for place, size in enumerate(workers) if place == 0 or size != workers[place - 1]]
    assert same == "True"
    assert sizes[:2] == ["2", "3"]
    assert (sizes[2:3] == ["2"]) == (ulfm is not None)
