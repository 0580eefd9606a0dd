"""``mpishard example``: an example of ``examples/``, with the files that it needs, in the current folder."""

from __future__ import annotations

import ast
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from mpishard.arguments import shown
from mpishard.cli.script import folder_of
from mpishard.io.files import write_whole


def example(
    name: Annotated[str | None, typer.Argument(help="Such as train_gpt; default: all are listed.")] = None,
) -> None:
    """Write an example to the current folder, or list all of them.

    \b
    mpishard example train_gpt

    The files that the example needs come with it, and what is there is not written over.
    """
    known = {path.stem: path for path in sorted(folder_of("examples").glob("*.py"))}
    if name is None:
        width = shutil.get_terminal_size((100, 24)).columns
        indent = max(map(len, known)) + 2
        for each, file in known.items():
            about = textwrap.shorten(_about(file)[1], max(width - indent, 20), placeholder=" ...")
            typer.echo(f"{each:{indent}}{about}")
        return
    path = known.get(name.removesuffix(".py"))
    if path is None:
        raise ValueError(f"no example is called {shown(name)}; mpishard example lists them")
    files = sorted(_needed(path))
    there = [file.name for file in files if Path(file.name).exists()]
    if there:
        raise ValueError(f"{', '.join(there)} would be written over; change to another folder")
    for file in files:
        write_whole(Path(file.name), file.read_bytes())
    typer.echo(f"written: {', '.join(file.name for file in files)}")
    typer.echo(f"run it by {_about(path)[0]}")


def _about(path: Path) -> tuple[str, str]:
    """The line that runs an example from its own folder, and its first sentence."""
    command, text = (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").split("\n\n")[:2]
    return command.partition(" [")[0].replace("examples/", ""), " ".join(text.split()).partition(". ")[0].rstrip(".")


def _needed(path: Path) -> set[Path]:
    """An example, those that it imports, and files in other languages with its name."""
    found = {path, *(each for each in path.parent.glob(f"{path.stem}*") if each.suffix in (".c", ".f90"))}
    for module in _imported(path):
        other = path.with_name(f"{module}.py")
        if other.is_file():
            found |= _needed(other)
    return found


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
