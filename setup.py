"""What pyproject.toml cannot say: the packages of a release, and its addresses.

All addresses begin with the home in `[tool.mpishard]`.  Without a home a build has none, and the links of its
description are those of the README.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
# Folders of the repository that an installed mpishard has inside it; pyproject.toml names their files.
INSIDE = ("examples", "slurm")
# Links to files of the repository, and pictures from there.
_LINK = re.compile(r"\]\((?!https?:|#)([^)\s]+)\)")


def addresses(home: str, version: str) -> dict[str, str]:
    """The addresses of a release by their names on PyPI."""
    return {
        "Homepage": home,
        "Documentation": f"{home}/blob/v{version}/docs/index.md",
        "Source": f"{home}/tree/v{version}",
        "Issues": f"{home}/issues",
        "Changelog": f"{home}/blob/v{version}/CHANGELOG.md",
    }


def description(readme: str, home: str, version: str) -> str:
    """The README with absolute links to the files of a release."""
    return _LINK.sub(rf"]({home}/blob/v{version}/\1)", readme)


if __name__ == "__main__":
    home = tomllib.loads((HERE / "pyproject.toml").read_text())["tool"]["mpishard"]["home"]
    found = re.search(r'^VERSION = "(.+)"$', (HERE / "mpishard/version.py").read_text(), re.MULTILINE)
    assert found is not None
    version, readme = found[1], (HERE / "README.md").read_text()
    setup(
        packages=[*find_packages(include=["mpishard", "mpishard.*"]), *(f"mpishard.{each}" for each in INSIDE)],
        package_dir={f"mpishard.{each}": each for each in INSIDE},
        long_description=description(readme, home, version) if home else readme,
        long_description_content_type="text/markdown",
        project_urls=addresses(home, version) if home else {},
    )
