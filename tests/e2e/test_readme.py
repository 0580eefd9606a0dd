"""What the README shows is run."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
SCRIPTS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize(
    ("script", "printed"),
    [(SCRIPTS[0], r"steps \S+e-1\d \[ 1\. -2\.  3\. -4\.  5\.\]"), (SCRIPTS[1], r"5\.\d\d -> 2\.")],
)
def test_quickstart(script: str, printed: str, tmp_path: Path, mpirun: Callable[..., Any]) -> None:
    path = tmp_path / "script.py"
    path.write_text(script, "utf-8")
    finished = mpirun(3, path)
    assert finished.code == 0, finished.all
    assert re.search(printed, finished.output), finished.all


def test_both_scripts_are_tested() -> None:
    assert len(SCRIPTS) == 2


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (Path(__file__).parents[2] / target).exists(), target
