"""Files of tests/unit that plain `tox` runs in part run whole in `tox -e full`."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What is compared with other packages is skipped without them; the fixture `short` leaves cases out.
IN_PART = re.compile(
    r'importorskip\("(torch|jax|optax|transformers)\b|libraries\.installed\(\)|skipif\(nvrtc\(\) is None'
    r"|def test_\w+\([^)]*\bshort\b"
)


def test_files_that_plain_tox_runs_in_part_run_again() -> None:
    in_part = {path.name for path in (ROOT / "tests/unit").glob("test_*.py") if IN_PART.search(path.read_text("utf-8"))}
    lines = (ROOT / "setup.cfg").read_text("utf-8").splitlines()
    again = re.findall(r"tests/unit/(test_\w+\.py)", "\n".join(each for each in lines if "--cuda-checks" not in each))
    assert in_part == set(again) and len(in_part) == len(again) > 5
