"""``mpishard schedule``: look at a pipeline schedule before running it."""

from __future__ import annotations

import json
import os
import shutil
import textwrap
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from mpishard.cli.schedule_figure import save_figure
from mpishard.cli.schedule_text import draw
from mpishard.pipeline.schedule import (
    SCHEDULES,
    Schedule,
    Timeline,
    find_deadlock,
    make_schedule,
    simulate,
    warn_if_bubbly,
)

_TIMES_OF = {"F": "forward", "B": "backward", "I": "input_gradient", "W": "weight_gradient"}


def schedule(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(SCHEDULES)}.")],
    stages: Annotated[int, typer.Option(help="Pipeline ranks.")],
    microbatches: Annotated[int, typer.Option(help="Micro-batches a step.")],
    chunks: Annotated[int | None, typer.Option(help="Model chunks a rank (interleaved; 2 if not given).")] = None,
    forward: Annotated[str | None, typer.Option(help="Time of a forward of one chunk (1).")] = None,
    backward: Annotated[str | None, typer.Option(help="Time of a whole backward (2).")] = None,
    input_gradient: Annotated[str | None, typer.Option(help="Time of the input gradient alone (1; zb-h1).")] = None,
    weight_gradient: Annotated[str | None, typer.Option(help="Time of the weight gradient alone (1; zb-h1).")] = None,
    transfer: Annotated[str | None, typer.Option(help="Time of a message between stages (0).")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw it into this file, too.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all figures and events as JSON.")] = False,
    blocking_sends: Annotated[
        bool, typer.Option("--blocking-sends", help="Say also what blocking sends would do.")
    ] = False,
) -> None:
    """Draw a pipeline schedule, with its bubble and its memory.

    \b
    mpishard schedule zb-h1 --stages 4 --microbatches 8

    It is proven, too, that it cannot deadlock.  Times are in any one unit; with commas, one time a model chunk of the
    whole pipeline: --forward 1,1,1,1.5
    """
    if chunks is None:
        chunks = 2 if name == "interleaved" else 1
    made = make_schedule(name, stages, microbatches, chunks)
    times = {
        "forward": forward,
        "backward": backward,
        "input_gradient": input_gradient,
        "weight_gradient": weight_gradient,
        "transfer": transfer,
    }
    given = {what: _parse(what, text) for what, text in times.items() if text is not None}
    _refuse_unused(made, given)
    timeline = simulate(made, **given)
    _warn(made)
    if png is not None:
        save_figure(timeline, png)
    if as_json:
        typer.echo(json.dumps(_as_dict(timeline, blocking_sends)))
        return
    width = shutil.get_terminal_size((120, 24)).columns
    colour = False if os.environ.get("NO_COLOR") else None  # None: where the output is a terminal
    typer.echo(_headline(made) + "\n", color=colour)
    typer.echo("\n".join(draw(timeline, width)) + "\n", color=colour)
    for what, text in _summary(timeline, blocking_sends).items():
        typer.echo(textwrap.fill(f"{what:<10} {text}", max(width, 30), subsequent_indent=" " * 11))
    if png is not None:
        typer.echo(f"{'picture':<10} {png}")


def _parse(what: str, text: str) -> float | list[float]:
    try:
        times = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(
            f"--{_option(what)} takes a number, or numbers with commas between them, got {text!r}"
        ) from None
    return times if len(times) > 1 else times[0]


def _option(what: str) -> str:
    return what.replace("_", "-")


def _refuse_unused(made: Schedule, given: dict[str, Any]) -> None:
    kinds = {action.kind for program in made.programs for action in program}
    used = [_TIMES_OF[kind] for kind in _TIMES_OF if kind in kinds] + ["transfer"]
    for what in given:
        if what not in used:
            options = ", ".join(f"--{_option(one)}" for one in used)
            raise ValueError(f"schedule {made.name!r} does not use --{_option(what)}; its times are {options}")


def _warn(made: Schedule) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_if_bubbly(made)
    for warning in caught:
        typer.echo(f"mpishard: warning: {warning.message}", err=True)


def _headline(made: Schedule) -> str:
    chunks = f" x {made.chunks} chunks" if made.chunks > 1 else ""
    return f"{made.name}: {made.stages} stages{chunks}, {made.microbatches} micro-batches"


def _summary(timeline: Timeline, blocking_sends: bool) -> dict[str, str]:
    # `simulate` raises for a schedule that deadlocks, so this line is a proof that it does not.
    lines = {
        "time": f"{timeline.makespan:.6g}",
        "bubble": f"{timeline.bubble_fraction:.1%} of the time; {timeline.bubble_over_ideal:.1%} of the time computing",
        "peak live": f"{' '.join(map(str, timeline.peak_live))} activations by stage (micro-batches of one chunk)",
        "deadlock": "none: with synchronous, non-blocking sends every stage ends its program, whatever the timing",
    }
    if blocking_sends:
        deadlock = find_deadlock(timeline.schedule, blocking_sends=True)
        lines["blocking"] = str(deadlock) if deadlock else "no deadlock with blocking sends either"
    return lines


def _as_dict(timeline: Timeline, blocking_sends: bool) -> dict[str, Any]:
    made = timeline.schedule
    figures: dict[str, Any] = {
        "name": made.name,
        "stages": made.stages,
        "chunks": made.chunks,
        "microbatches": made.microbatches,
        "makespan": timeline.makespan,
        "busy": timeline.busy,
        "bubble_fraction": timeline.bubble_fraction,
        "bubble_over_ideal": timeline.bubble_over_ideal,
        "peak_live": timeline.peak_live,
        "deadlock": None,
        "events": [
            {"rank": event.rank, **event.action._asdict(), "start": event.start, "stop": event.stop}
            for event in timeline.events
        ],
    }
    if blocking_sends:
        deadlock = find_deadlock(made, blocking_sends=True)
        figures["deadlock_blocking_sends"] = deadlock and str(deadlock)
    return figures
