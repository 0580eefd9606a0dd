"""Code that all pictures share: colours that everybody can distinguish, and atomic writing of the file."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    write(path, _with_palette(drawn) if kind == "png" else drawn.getvalue())


def _with_palette(drawn: io.BytesIO) -> bytes:
    """The same PNG in 256 colours, a third of the bytes."""
    from PIL import Image

    smaller = io.BytesIO()
    Image.open(drawn).convert("RGB").quantize(dither=Image.Dither.NONE).save(smaller, "png", optimize=True)
    return smaller.getvalue()


def write(path: Path, data: bytes) -> None:
    """Write a file next to `path` and rename it, so that a full disk leaves the old file; OSError says the way out."""
    beside = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        if path.exists() and not path.is_file():  # such as /dev/stdout
            path.write_bytes(data)
            return
        beside.write_bytes(data)
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise OSError(f"cannot write {path}: {error.strerror}; choose another place for it") from None
