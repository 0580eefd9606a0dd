"""What the README and the docs show is run."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mpishard.cli import main
from mpishard.estimate import TYPICAL

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
SCHEDULES = (ROOT / "docs/explanation/schedules.md").read_text("utf-8")
LAYOUTS = (ROOT / "docs/how-to/choosing-a-layout.md").read_text("utf-8")
TOUR = (ROOT / "docs/tutorials/tour.md").read_text("utf-8")
# All scripts of both, in their order.
DEBLUR, TORCH = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
FIT, GPT, SPLIT, SAVED, ELASTIC = re.findall(r"```(?:python|py)\n(.*?)```", TOUR, re.DOTALL)
FITTED = r"steps \S+e-1\d \[ 1\. -2\.  3\. -4\.  5\.\]"
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
needs_sphinx = pytest.mark.skipif(
    importlib.util.find_spec("sphinx") is None, reason="Sphinx is not installed (extra: docs)"
)
OPTIMIZE = "    result = optimizer.optimize(problem)\n"


def in_three_dimensions() -> str:
    """The script of the transformer with the lines that split it."""
    script = GPT
    for new in SPLIT.splitlines():
        what = new.partition("(")[0].partition("=")[0]  # "    model ", as an example
        (old,) = (line for line in script.splitlines() if line.startswith(what))
        script = script.replace(old, new)
    return script


@pytest.mark.parametrize(
    ("script", "ranks", "printed"),
    [
        (DEBLUR, 3, r"1\d\d iterations, 1\d\d evaluations: misfit \S+e-0[67]"),
        (FIT, 3, FITTED),
        pytest.param(TORCH, 3, r"loss 0\.[0-2]\d\d on rank 0 of 3", marks=needs_torch),
        (GPT, 3, r"5\.\d\d -> 2\."),
        (in_three_dimensions(), 4, r"5\.\d\d -> [23]\."),
    ],
)
@pytest.mark.quick
def test_quickstart(script: str, ranks: int, printed: str, tmp_path: Path, mpirun: Callable[..., Any]) -> None:
    path = tmp_path / "script.py"
    path.write_text(script, "utf-8")
    finished = mpirun(ranks, path)
    assert finished.code == 0, finished.all
    assert re.search(printed, finished.output), finished.all


@pytest.mark.quick
def test_the_quickstart_is_saved_resumed_and_watched(
    tmp_path: Path, mpirun: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path, run = tmp_path / "fit.py", str(tmp_path / "runs" / "first")
    assert OPTIMIZE in FIT
    saved = SAVED.replace('"fit"', repr(str(tmp_path / "fit"))).replace('"runs/first"', repr(run))
    outputs = []
    for ranks, steps in ((3, 200), (2, 300)):
        path.write_text(FIT.replace(OPTIMIZE, saved).replace("steps=300", f"steps={steps}"), "utf-8")
        finished = mpirun(ranks, path)
        assert finished.code == 0, finished.all
        outputs.append(finished)
    assert re.search(FITTED, outputs[1].output), outputs[1].all
    assert "201/300" in outputs[1].errors, outputs[1].all
    assert main(["top", run]) == main(["plot", run]) == main(["why", run]) == 0
    output = capsys.readouterr().out
    assert "step 300 of 300" in output and str(Path(run) / "run.png") in output and "the run has ended" in output


@pytest.mark.quick
def test_the_quickstart_is_elastic(tmp_path: Path, mpirun: Callable[..., Any]) -> None:
    path = tmp_path / "fit.py"
    made = "    optimizer = mpishard.as_distributed(mpishard.Adam(lr=0.1), mesh)\n"
    assert made in FIT
    path.write_text(FIT.replace(made, ELASTIC.replace("AdamW(lr=1e-2)", "Adam(lr=0.1)")), "utf-8")
    finished = mpirun(3, path)
    assert finished.code == 0, finished.all
    assert re.search(FITTED, finished.output), finished.all


def test_the_schedule_is_drawn_as_shown(capsys: pytest.CaptureFixture[str], environ: Callable[..., None]) -> None:
    command, shown = re.findall(r"\$ mpishard (schedule .*?)\n(stage 0 .*?)```", SCHEDULES, re.DOTALL)[0]
    environ(COLUMNS="120")
    assert main(command.split()) == 0
    drawn = capsys.readouterr().out.splitlines()
    assert set(shown.splitlines()) <= set(drawn)


def test_layouts_are_estimated_as_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tables = re.findall(r"mpishard (estimate --.*?)(?:`|\n)", LAYOUTS.replace("\\\n", ""))
    TYPICAL.save(tmp_path / "profile.json")
    for text, name in re.findall(r"```toml\n(# (\S+)\n.*?)```", LAYOUTS, re.DOTALL):
        (tmp_path / name).write_text(text, "utf-8")
    for command in tables:
        assert main(re.sub(r"\S+\.(json|toml)", rf"{tmp_path}/\g<0>", command).split()) == 0
    assert len(tables) == 4
    assert "72 layouts of 8 ranks" in capsys.readouterr().out


@needs_sphinx
def test_the_site_builds(tmp_path: Path, alone: Callable[..., Any]) -> None:
    options = ("-n", "-W", "--keep-going", "-q", "-b", "html", "-d", tmp_path / "trees")
    built = alone("-m", "sphinx", *options, ROOT / "docs", tmp_path / "site")
    assert built.code == 0, built.all


@needs_sphinx
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_pages_and_docstrings_show_runs(ranks: int, alone: Callable[..., Any], mpirun: Callable[..., Any]) -> None:
    script = ROOT / "docs" / "snippets.py"
    finished = alone(script) if ranks == 1 else mpirun(ranks, script)
    assert finished.code == 0, finished.all


@pytest.mark.quick
def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)", README):
        assert (ROOT / target).exists(), target


@pytest.mark.quick
def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 60
