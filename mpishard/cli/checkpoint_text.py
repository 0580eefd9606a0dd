"""The contents of a checkpoint as tables."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from mpishard.checkpoint.comparing import Difference, figures
from mpishard.checkpoint.contents import Contents
from mpishard.checkpoint.sources import Source
from mpishard.cli.estimate_text import cell, console, new_table, print_table, size

_CORNER = 6  # entries of a tensor printed along each dimension


def show_facts(contents: Contents) -> None:
    """Print the facts of the run in a checkpoint."""
    made = new_table("fact", "value", left=2)
    made.columns[1].no_wrap = False
    made.add_row("generation", f"{contents.generation} (id {contents.id})")
    made.add_row("saved", cell(f"{contents.saved} by mpishard {contents.mpishard_version}"))
    for name, value in sorted(contents.facts.items(), key=lambda item: (item[0] != "step", item[0])):
        if isinstance(value, np.ndarray):
            text = f"{value.size} numbers" + (f", the last {value[-1]:.6g}" if value.size else "")
        elif isinstance(value, Mapping):
            text = ", ".join(f"{key}={_short(each)}" for key, each in value.items())
        else:
            text = _short(value)
        made.add_row(cell(name.replace(".json", " (settings)")), cell(text))
    made.add_row("tensors", f"{len(contents.tensors)} of {sum(map(prod, contents.tensors.values()))} elements")
    made.add_row("files of pieces", str(len({piece.file for piece in contents.pieces})))
    console().print(made)


def show_kinds(contents: Contents) -> None:
    """Print the kinds of arrays in a checkpoint; each kind has one value per element of the model."""
    elements = sum(map(prod, contents.tensors.values()))
    pieces = Counter(piece.kind for piece in contents.pieces)
    made = new_table("kind", "dtype", "pieces", "bytes", left=2)
    for kind, dtype in contents.kinds.items():
        made.add_row(cell(kind), dtype.name, str(pieces[kind]), size(elements * dtype.itemsize))
    print_table(console(), made)


def show_tensors(contents: Contents) -> None:
    """Print the tensors of a checkpoint."""
    pieces = Counter(piece.name for piece in contents.pieces)
    width = sum(dtype.itemsize for dtype in contents.kinds.values())
    dtypes = "/".join(sorted({dtype.name for dtype in contents.kinds.values()}))
    made = new_table("tensor", "shape", "dtype", "kinds", "pieces", "bytes", left=3)
    for name, shape in contents.tensors.items():
        extents = " x ".join(map(str, shape)) or "scalar"
        made.add_row(
            cell(name), extents, dtypes, str(len(contents.kinds)), str(pieces[name]), size(prod(shape) * width)
        )
    print_table(console(), made)


def show_tensor(source: Source, name: str) -> None:
    """Print figures of one tensor and its first entries, kind by kind."""
    shape = source.tensors[name]
    output = console()
    output.print(cell(f"{name}: {' x '.join(map(str, shape)) or 'scalar'}", "bold"))
    made = new_table("kind", "dtype", "least", "largest", "mean", "rms", "NaN", "inf", left=2)
    digits = 6 if output.width >= 100 else 3  # what fits
    for kind, dtype in source.kinds.items():
        found = figures(source, kind, name)
        numbers = (f"{value:.{digits}g}" for value in (found.least, found.largest, found.mean, found.rms))
        made.add_row(cell(kind), dtype.name, *numbers, str(found.nans), str(found.infinities))
    print_table(output, made)
    if not prod(shape):
        return
    corner = tuple((0, min(extent, _CORNER)) for extent in shape)
    cut = any(extent > _CORNER for extent in shape)
    for kind in source.kinds:
        output.print(cell(f"{kind}{', the first entries' if cut else ''}", "bold"))
        output.print(np.array2string(source.read(kind, name, corner), precision=8), markup=False, soft_wrap=True)


def show_run(rows: Sequence[tuple[str, str, str, str, str]]) -> None:
    """Print the checkpoints of a run: name, step, generation, size, and whether it is whole."""
    made = new_table("checkpoint", "step", "generation", "size", "state")
    made.columns[-1].justify = "left"
    for row in rows:
        made.add_row(*map(cell, row))
    print_table(console(), made)


def show_differences(found: Sequence[Difference]) -> None:
    """Print tensors that differ."""
    made = new_table("kind", "tensor", "largest difference", "relative", left=2)
    for each in found:
        made.add_row(cell(each.kind), cell(each.name), f"{each.absolute:.3e}", f"{each.relative:.3e}")
    print_table(console(), made)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
