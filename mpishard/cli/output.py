"""Output that several commands share: tables that fit a terminal and a log file, and pictures."""

from __future__ import annotations

import io
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from mpishard.arguments import printable
from mpishard.io.files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def console() -> Console:
    """A console as wide as the terminal, or 120 columns wide without one, as in a log file; no trailing blanks."""
    file: Any = sys.stdout if sys.stdout.isatty() else _Trimmed(sys.stdout)
    return Console(width=shutil.get_terminal_size((120, 24)).columns, highlight=False, file=file)


def cell(text: str, style: str = "") -> Text:
    """A text that may come from a file: rich would read brackets in a string as markup."""
    return Text(printable(text), style)


class _Trimmed:
    """A file that removes the trailing blanks with which a table fills its last column."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        return self._file.write(re.sub(" +$", "", text, flags=re.MULTILINE))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def new_table(*columns: str, left: int = 1) -> Table:
    """An empty table whose first `left` columns are text and whose others are figures."""
    made = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="underline")
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index < left else "right", no_wrap=True)
    return made


def print_table(output: Console, made: Table) -> None:
    """Print a table without cutting any figure: in a terminal that is too narrow, lines wrap."""
    needed = Measurement.get(output, output.options.update(max_width=10_000), made).maximum
    before, output.width = output.width, max(output.width, needed)
    output.print(made)
    output.width = before


def size(count: float) -> str:
    """Bytes with three digits: 1.53 GB is 1.53e9 bytes."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= 0.9995 * factor:
            return f"{_digits(count / factor)} {unit}"
    return f"{count:.0f} B" if count else "-"


def seconds(time: float) -> str:
    """A time with three digits."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if time >= 0.9995 * factor:
            return f"{_digits(time / factor)} {unit}"
    return f"{time * 1e6:.2f} us"


def _digits(number: float) -> str:
    return f"{number:.2f}" if number < 9.995 else f"{number:.1f}" if number < 99.95 else f"{number:.0f}"


# Code that all pictures share: colours that everybody can distinguish, and atomic writing of the file.

# Colours of Okabe and Ito, and of Tol, which colour-blind readers can distinguish; each axis has one.
BLUE, SKY, GREEN, ORANGE, RED, PINK = "#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#cc79a7"
YELLOW = "#f0e442"
ACTIONS = {"F": SKY, "B": GREEN, "I": ORANGE, "W": PINK}  # of a pipeline
AXES = {"data": RED, "tensor": "#999933", "pipeline": "#332288", "world": BLUE, "node": YELLOW}


def check_format(path: Path) -> None:
    """Raise ValueError if the name is not one of a picture."""
    from matplotlib.figure import Figure

    known = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise ValueError(f"{path} is the name of no picture; end it with .png, .pdf or .svg")


def save(figure: Figure, path: Path, *, kind: str = "", dpi: int = 100) -> None:
    """Write a picture; its format follows from the name if `kind` does not say it.

    Raises ValueError for an unknown format, and OSError if it cannot be written; the earlier file stays then.
    """
    if not kind:
        check_format(path)
        kind = path.suffix[1:].lower()
    drawn = io.BytesIO()
    figure.savefig(drawn, format=kind, dpi=dpi)
    write_whole(path, _with_palette(drawn) if kind == "png" else drawn.getvalue())


def _with_palette(drawn: io.BytesIO) -> bytes:
    """The same PNG in 256 colours, a third of the bytes."""
    from PIL import Image

    smaller = io.BytesIO()
    Image.open(drawn).convert("RGB").quantize(dither=Image.Dither.NONE).save(smaller, "png", optimize=True)
    return smaller.getvalue()


# Arguments that several commands have.

RecordFolder = Annotated[Path, typer.Argument(metavar="FOLDER", help="The run's record, as given to RunRecord.")]
