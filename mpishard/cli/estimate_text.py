"""Estimates as tables that fit a terminal and a log file."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from mpishard.arguments import printable
from mpishard.estimate import Estimate, MachineProfile, Memory

_MEMORY = {
    "parameters": "parameters",
    "gradients": "gradients",
    "state": "optimizer",
    "gathered": "gathered",
    "buckets": "buckets",
    "activations": "activ.",
    "scratch": "scratch",
    "rounded": "rounded",
    "total": "total",
}


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


def overview(found: Sequence[Estimate], limit: float, shown: int, tokens: int) -> None:
    """Print at most `shown` layouts in this order, one a line; more than `limit` bytes a rank are marked.

    `tokens` is the number in a step of all ranks.
    """
    output = console()
    layouts = f"{len(found)} layouts" if len(found) > 1 else "1 layout"
    output.print(
        f"{layouts} of {found[0].layout.ranks} ranks, {tokens} tokens a step; bytes are those of a rank", style="bold"
    )
    rows = [_overview_row(each, limit, tokens) for each in found[:shown]]
    columns = _fitting(rows, output.width)
    made = new_table(*columns, left=0)
    made.columns[columns.index("schedule")].justify = "left"
    for each, row in zip(found, rows, strict=False):
        made.add_row(*(row[column] for column in columns), style="dim" if each.memory.total > limit else None)
    print_table(output, made)
    if len(columns) < len(rows[0]):
        missing = ", ".join(column.replace("\n", " ") for column in rows[0] if column not in columns)
        output.print(f"(not shown in {output.width} columns: {missing})")
    if len(found) > shown:
        output.print(f"... and {len(found) - shown} more; --all shows them")
    over = sum(each.memory.total > limit for each in found)
    if over == len(found):
        least = min(found, key=lambda each: each.memory.total)
        output.print(f"No layout fits into {size(limit)} a rank; the least is {size(least.memory.total)}.")
    elif over:
        output.print(f"! {over} of {len(found)} layouts need more than the limit of {size(limit)} a rank.")


def _overview_row(each: Estimate, limit: float, tokens: int) -> dict[str, str]:
    """Cells by column."""
    layout, memory = each.layout, each.memory
    schedule = layout.schedule + (f" x{layout.chunks}" if layout.chunks > 1 else "")
    return {
        "data": str(layout.data),
        "tens": str(layout.tensor),
        "pipe": str(layout.pipeline),
        "zero": str(layout.zero_stage),
        "schedule": schedule if layout.pipeline > 1 else "-",
        "step": seconds(each.step_time),
        "tokens/s": f"{tokens / each.step_time:,.0f}",
        "bubble": f"{each.bubble_fraction:.0%}" if layout.pipeline > 1 else "-",
        "memory": ("!" if memory.total > limit else "") + size(memory.total),
        "model": size(memory.total - memory.activations - memory.scratch),
        "activ.": size(memory.activations + memory.scratch),
        "tensor\nsends": size(each.sent.get("tensor", 0)),
        "pipe\nsends": size(each.sent.get("pipeline", 0)),
        "data\nsends": size(each.sent.get("data", 0)),
    }


def _fitting(rows: Sequence[dict[str, str]], width: int) -> list[str]:
    """The columns for a terminal of `width`: without room for all, optional columns are left out."""
    columns = list(rows[0])
    widths = {column: 2 + max(map(len, (*column.split("\n"), *(row[column] for row in rows)))) for column in columns}
    for column in ("activ.", "model", "tensor\nsends", "pipe\nsends", "data\nsends"):
        if sum(widths[kept] for kept in columns) > width + 2:
            columns.remove(column)
    return columns


def details(found: Estimate, tokens: int, machine: MachineProfile) -> None:
    """Print one layout by pipeline stage, with the links of its axes."""
    layout = found.layout
    extras = [f"schedule {layout.schedule}"] if layout.pipeline > 1 else []
    extras += [f"{layout.chunks} chunks"] if layout.chunks > 1 else []
    extras += [what.replace("_", " ") for what in ("sequence_parallel", "recompute") if getattr(layout, what)]
    output = console()
    output.print(
        f"data {layout.data} x tensor {layout.tensor} x pipeline {layout.pipeline}, ZeRO {layout.zero_stage}"
        + "".join(f", {extra}" for extra in extras)
        + f"; {found.batch} sequences of {found.length} tokens a data rank, {found.microbatches} micro-batches",
        style="bold",
    )
    output.print(
        f"step {seconds(found.step_time)} ({tokens / found.step_time:,.0f} tokens/s): "
        f"forward and backward {seconds(found.compute)} with a bubble of {found.bubble_fraction:.1%}, "
        f"data axis {seconds(found.communication)}, update {seconds(found.update)}"
    )
    if layout.ranks > 1:
        output.print("\nlinks", style="bold")
        print_table(output, _links(found, machine))
    rows: dict[tuple[str, ...], list[int]] = {}
    for stage in found.stages:
        rows.setdefault(_memory_row(stage.parameters, stage.memory), []).append(stage.rank)
    output.print("\nmemory of a rank", style="bold")
    # A kind of memory that no stage needs has no column, so that the others fit a terminal.
    used = [place for place, cells in enumerate(zip(*rows, strict=True)) if set(cells) != {"-"}]
    names = ["tensors", *_MEMORY.values()]
    made = new_table("stage", *(names[place] for place in used))
    for row, ranks in rows.items():
        made.add_row(_ranks(ranks), *(row[place] for place in used))
    print_table(output, made)
    output.print("sent by a rank in a step, mean of the stage", style="bold")
    made = new_table("stage", "axis", "what", "bytes", left=3)
    rows = {}
    for stage in found.stages:
        for (axis, label), count in stage.sent.items():
            if count:
                rows.setdefault((axis, label, size(count / (layout.data * layout.tensor))), []).append(stage.rank)
    for row, ranks in rows.items():
        made.add_row(_ranks(ranks), *row)
    if rows:
        print_table(output, made)
    else:
        output.print("nothing")


def _links(found: Estimate, machine: MachineProfile) -> Table:
    """For each axis of a layout: its link, and the speed of its most important operation."""
    layout = found.layout
    operations = {
        "tensor": "all_gather" if layout.sequence_parallel else "all_reduce",
        "data": "reduce_scatter" if layout.zero_stage else "all_reduce",
        "pipeline": "send",
    }
    made = new_table("axis", "ranks", "where", "operation", "latency", "bandwidth")
    made.columns[2].justify = made.columns[3].justify = "left"
    for axis, operation in operations.items():
        ranks, span = getattr(layout, axis), layout.span(axis)
        if ranks > 1:
            link = machine.link(operation, span)
            where = "within a node" if machine.within_node(span) else "between nodes"
            made.add_row(axis, str(ranks), where, operation, seconds(link.latency), f"{link.bandwidth / 1e9:.3g} GB/s")
    return made


def _memory_row(parameters: int, memory: Memory) -> tuple[str, ...]:
    return (f"{parameters:,}", *(size(getattr(memory, what)) for what in _MEMORY))


def _ranks(ranks: list[int]) -> str:
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]} to {ranks[-1]}"
    return ", ".join(map(str, ranks))


def _digits(number: float) -> str:
    return f"{number:.2f}" if number < 9.995 else f"{number:.1f}" if number < 99.95 else f"{number:.0f}"
