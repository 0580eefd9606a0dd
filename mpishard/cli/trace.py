"""``mpishard trace``: a timeline of all ranks, for Perfetto and as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from mpishard.cli.arguments import RecordFolder
from mpishard.cli.estimate_text import console, print_table
from mpishard.cli.figure import write
from mpishard.cli.trace_text import split_table
from mpishard.record.reading import check_record
from mpishard.record.stack_requests import ask_for_trace
from mpishard.record.time_split import split_times
from mpishard.record.trace import chrome_events, read_trace


def trace(
    run: RecordFolder,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Default: trace.json in that folder.")] = None,
    first: Annotated[int | None, typer.Option(min=1, help="First step; default: of all that were traced.")] = None,
    last: Annotated[int | None, typer.Option(min=1, help="Last step.")] = None,
    upcoming: Annotated[int | None, typer.Option("--next", min=1, help="So many steps that a run takes next.")] = None,
    png: Annotated[bool, typer.Option("--png", help="A Gantt chart beside it, NAME.png.")] = False,
) -> None:
    """Write a timeline of all ranks, and draw it as a Gantt chart; show how each rank spent its steps.

    The file is for ui.perfetto.dev or chrome://tracing, the chart comes with --png.  A table shows the milliseconds of
    a step, and its shares: matrix products of mpishard's layers on the host, communication, which is mostly waiting,
    and the rest, which is element-wise kernels, the optimizer and Python.  The steps to trace are chosen at
    the start, mpishard.RunRecord(folder, mesh, trace=(100, 104)), or of a run that goes on by --next 3.
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
            "the chart is beside it"
        )
    write(path, json.dumps(chrome_events(chosen)).encode())
    typer.echo(path)
    if png:
        from mpishard.cli.trace_figure import draw

        left_out = draw(chosen, path.with_suffix(".png"))
        typer.echo(f"{path.with_suffix('.png')}" + (f" (without the last {left_out} ranks)" if left_out else ""))
    print_table(console(), split_table(split_times(chosen)))
