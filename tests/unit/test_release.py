"""What a release says of itself."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path

from mpishard.version import VERSION

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_version_is_in_the_changelog_and_in_the_citation() -> None:
    assert re.search(rf"^## {re.escape(VERSION)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text()


def test_every_extra_that_is_named_can_be_installed() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("mpishard/**/*.py"), *ROOT.glob("slurm/*")]
    named = set()
    for page in pages:
        for extras in re.findall(r"(?:mpishard|[\s'\"]\.)\[([\w,-]+)\]", page.read_text()):
            named |= {(extra, page.name) for extra in extras.split(",")}
    assert {"cli", "mpich"} <= {extra for extra, _ in named}
    assert not [each for each in named if each[0] not in PROJECT["optional-dependencies"]]


def test_links_of_the_description_lead_to_the_files_of_the_release() -> None:
    spec = importlib.util.spec_from_file_location("release_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    home, readme = "https://example.org/mpishard", (ROOT / "README.md").read_text()
    targets = re.findall(r"\]\(([^)]+)\)", setup.description(readme, home, "1.2.3"))
    assert len(targets) == len(re.findall(r"\]\(", readme)) > 10
    for target in targets:
        path = target.removeprefix(f"{home}/blob/v1.2.3/")
        assert path != target and (ROOT / path.partition("#")[0]).exists(), target
    assert {each.partition("/mpishard")[0] for each in setup.addresses(home, "1.2.3").values()} == {
        "https://example.org"
    }
