"""Fills the marks of the recipes in this folder for one sdist, and writes them to another folder.

    python -m build --sdist && python packaging/fill.py dist/mpishard-0.1.0.tar.gz recipes

``@FOLDER@`` becomes the address of the folder with the sdist, ``@SHA256@`` the sdist's checksum, and ``@HOME@`` the
home of the project.  All addresses begin with the home in pyproject.toml (see setup.py).  Until there is one they are
those of the sdist on this machine, by which recipes can be tried before a release.
"""

from __future__ import annotations

import hashlib
import re
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
RECIPES = ("conda/recipe.yaml", "spack/package.py", "easybuild/mpishard.eb", "apptainer.def")


def filled(text: str, sdist: Path, home: str) -> str:
    """The text of a recipe without marks; ValueError for one that is not known, or a recipe of another version."""
    version = sdist.name.removeprefix("mpishard-").removesuffix(".tar.gz")
    if version not in text:
        raise ValueError(f"the sdist is of version {version}, which the recipe does not name; give that of the recipe")
    folder = f"{home}/releases/download/v{version}" if home else sdist.resolve().parent.as_uri()
    marks = {"FOLDER": folder, "SHA256": hashlib.sha256(sdist.read_bytes()).hexdigest(), "HOME": home or folder}
    for mark, value in marks.items():
        text = text.replace(f"@{mark}@", value)
    if left := re.search(r"@[A-Z0-9]+@", text):
        raise ValueError(f"{left[0]} is no mark; there are {', '.join(f'@{mark}@' for mark in marks)}")
    return text


def main(sdist: Path, target: Path) -> None:
    """Write all recipes to the folder `target`."""
    home = tomllib.loads((HERE.parent / "pyproject.toml").read_text("utf-8"))["tool"]["mpishard"]["home"]
    for recipe in RECIPES:
        path = target / recipe
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(filled((HERE / recipe).read_text("utf-8"), sdist, home), "utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
