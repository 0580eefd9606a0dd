"""``mpishard trace``: a timeline of all ranks, for Perfetto and as a picture."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from mpishard.arguments import printable
from mpishard.cli.output import ACTIONS, AXES, RecordFolder, console, new_table, print_table, save
from mpishard.comm.ledger import PRODUCT
from mpishard.io.files import write_whole
from mpishard.record.reading import check_record
from mpishard.record.stacks import ask_for_trace
from mpishard.record.summary import TimeSplit, Traced, chrome_events, mean, read_trace, split_times

_MOST_RANKS = 32


def split_table(splits: Sequence[TimeSplit]) -> Table:
    """Milliseconds of a step and their shares, of each rank, and of several ranks their mean."""
    table = new_table("rank", "ms/step", "products", "communication", "rest")
    for split in splits[:_MOST_RANKS]:
        table.add_row(str(split.rank), *_figures(split))
    if len(splits) > 1:
        table.add_row(f"mean of {len(splits)}", *_figures(mean(splits, -1)))
    return table


def _figures(split: TimeSplit) -> list[str]:
    parts = split.products, split.communication, split.rest
    return [f"{split.step * 1e3:.2f}", *(f"{part * 1e3:.2f} ({part / split.step:.0%})" for part in parts)]


def trace(
    run: RecordFolder,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Default: trace.json in that folder.")] = None,
    first: Annotated[int | None, typer.Option(min=1, help="First step; default: of all that were traced.")] = None,
    last: Annotated[int | None, typer.Option(min=1, help="Last step.")] = None,
    upcoming: Annotated[int | None, typer.Option("--next", min=1, help="How many of a run's next steps.")] = None,
    png: Annotated[bool, typer.Option("--png", help="A Gantt chart next to it, NAME.png.")] = False,
) -> None:
    """Write a timeline of all ranks, and draw it as a Gantt chart; show how each rank spent its steps.

    The file is for ui.perfetto.dev or chrome://tracing, the chart comes with --png.  A table shows the milliseconds of
    a step, and its shares: matrix products of mpishard's layers on the host, communication, which is mostly waiting,
    and the rest, which is element-wise kernels, the optimizer and Python.  The steps to trace are chosen at
    the start, mpishard.RunRecord(folder, mesh, trace=(100, 104)), or of a run in progress by --next 3.
    """
    check_record(run)
    if upcoming is not None:
        if first is not None or last is not None:
            raise ValueError("--next asks for steps to come, --first and --last choose of those traced: give either")
        first, last = ask_for_trace(run, upcoming)
    spans = read_trace(run)
    steps = sorted({span.step for span in spans})
    chosen = [span for span in spans if (first or steps[0]) <= span.step <= (last or steps[-1])]
    if not chosen:
        asked = f"{first or steps[0]} to {last or steps[-1]}"
        raise ValueError(f"none of the steps {asked} was traced, only {steps[0]} to {steps[-1]}")
    path = output or run / "trace.json"
    if path.suffix == ".png":
        raise ValueError(
            f"{path} would be the timeline, which is JSON; with -o {path.with_suffix('.json')} --png "
            "the chart is next to it"
        )
    write_whole(path, json.dumps(chrome_events(chosen)).encode())
    typer.echo(printable(str(path)))
    if png:
        left_out = draw(chosen, path.with_suffix(".png"))
        without = f" (without the last {left_out} ranks)" if left_out else ""
        typer.echo(printable(str(path.with_suffix(".png"))) + without)
    print_table(console(), split_table(split_times(chosen)))


_MOST_ROWS = 64
# Drawing order: calls interrupt everything; the actions of a pipeline are inside the function, and products in these.
_LAYERS = {"step": 0, "phase": 1, "function": 1, "F": 2, "B": 2, "I": 2, "W": 2, PRODUCT: 3}
_OF_CALLS = 4
_COLOURS = {"step": "0.9", "phase": "0.6", "function": "#cfe3f2", PRODUCT: "#44546a", **ACTIONS, **AXES}
_WORDS = {
    "step": "rest of the step",
    "phase": "update, saving",
    "function": "loss and gradient",
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    PRODUCT: "matrix products",
}
_MOST_NUMBERS = 12  # numbers of steps along the axis


def draw(spans: Sequence[Traced], path: Path) -> int:
    """Write the picture; its format follows from the name.  Returns the number of ranks left out."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks = sorted({span.rank for span in spans})
    drawn = ranks[:_MOST_ROWS]
    rows = {rank: row for row, rank in enumerate(drawn)}
    first = min(span.start for span in spans)
    bars: dict[str, dict[int, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for span in spans:
        if span.rank in rows:
            bars[span.kind][rows[span.rank]].append(((span.start - first) * 1e3, span.seconds * 1e3))
    figure = Figure(figsize=(8, 1.4 + 0.36 * len(drawn)), layout="constrained")
    axis = figure.subplots()
    kinds = sorted(bars, key=lambda kind: (_LAYERS.get(kind, _OF_CALLS), kind))
    for kind in kinds:
        layer = _LAYERS.get(kind, _OF_CALLS)
        height = 0.9 - 0.14 * layer
        for row, where in bars[kind].items():
            axis.broken_barh(where, (row - height / 2, height), color=_colour(kind), zorder=2 + layer, lw=0)
    begins = {span.step: (span.start - first) * 1e3 for span in spans if span.kind == "step" and span.rank == drawn[0]}
    if len(begins) <= _MOST_NUMBERS:
        for step, begin in begins.items():
            axis.annotate(f"step {step}", (begin, -0.48), fontsize=8, va="bottom")
    patches = [Patch(color=_colour(kind), label=_WORDS.get(kind, f"{kind} axis")) for kind in kinds]
    figure.legend(handles=patches, fontsize=8, frameon=False, ncols=5, loc="outside lower center")
    axis.set(xlabel="ms", yticks=range(len(drawn)), yticklabels=[f"rank {rank}" for rank in drawn])
    axis.set(ylim=(len(drawn) - 0.4, -0.95), xmargin=0.01)
    save(figure, path)
    return len(ranks) - len(drawn)


def _colour(kind: str) -> str:
    return _COLOURS.get(kind, "0.3")
