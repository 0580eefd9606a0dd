"""``mpishard schedule``: look at a pipeline schedule before running it, as text or as a figure."""

from __future__ import annotations

import json
import math
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer

from mpishard.cli.output import ACTIONS, console, save
from mpishard.pipeline.schedule import (
    KINDS,
    SCHEDULES,
    Event,
    Schedule,
    Timeline,
    find_deadlock,
    make_schedule,
    simulate,
)
from mpishard.pipeline.schedule.generators import warn_if_bubbly

_IDLE = "#eeeeee"
_DPI = 150
_CHARACTER_INCHES = 0.062  # of a character at the size of the numbers
# Of stages x chunks x (stages + micro-batches), as which the time and the memory of a simulation grow.
_MOST = 1_000_000


def save_figure(timeline: Timeline, file: Path) -> None:
    """Write a PNG: colour by kind of action, paler for later chunks, numbers of micro-batches where they fit."""
    # Imported here: it takes a second, and most commands draw nothing.
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    schedule = timeline.schedule
    shortest = min((event.stop - event.start for event in timeline.events if event.stop > event.start), default=1.0)
    inches = min(40.0, max(8.0, 0.17 * timeline.makespan / shortest))
    figure = Figure(figsize=(inches + 2, 1.9 + 0.42 * schedule.stages), layout="constrained")
    axes = figure.add_subplot()
    for event in timeline.events:
        length = event.stop - event.start
        paler = 0.6 * event.action.chunk / schedule.chunks
        colour = tuple(part + (1 - part) * paler for part in to_rgb(ACTIONS[event.action.kind]))
        axes.barh(event.rank, length, 0.86, left=event.start, color=colour, edgecolor="white", linewidth=0.6)
        number = str(event.action.microbatch)
        if length * inches / max(timeline.makespan, length) > len(number) * _CHARACTER_INCHES:
            axes.text(event.start + length / 2, event.rank, number, ha="center", va="center", fontsize=7)
    axes.set_xlim(0, timeline.makespan or 1)
    axes.set_ylim(schedule.stages - 0.5, -0.5)
    axes.set_yticks(range(schedule.stages), [f"stage {rank}" for rank in range(schedule.stages)])
    axes.set_xlabel("time")
    axes.set_facecolor(_IDLE)
    axes.tick_params(left=False)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    peaks = axes.secondary_yaxis("right")
    peaks.set_yticks(range(schedule.stages), [str(peak) for peak in timeline.peak_live])
    peaks.set_ylabel("peak live activations")
    peaks.tick_params(right=False)
    peaks.spines["right"].set_visible(False)
    used = [kind for kind in KINDS if any(event.action.kind == kind for event in timeline.events)]
    patches = [Patch(color=ACTIONS[kind], label=KINDS[kind]) for kind in used]
    patches.append(Patch(color=_IDLE, label="idle"))
    figure.legend(handles=patches, loc="outside lower center", ncols=5, frameon=False)
    chunks = f" x {schedule.chunks} chunks (later ones paler)" if schedule.chunks > 1 else ""
    axes.set_title(
        f"{schedule.name}: {schedule.stages} stages{chunks}, {schedule.microbatches} micro-batches, "
        f"bubble {timeline.bubble_fraction:.1%} of the time",
        loc="left",
    )
    save(figure, file, kind="png", dpi=_DPI)


_BACKGROUNDS = {"F": "blue", "B": "green", "I": "cyan", "W": "yellow"}
Name = Callable[[Event], str]

_CUT = " ~ "
_LONGEST = 50  # screens of text; a longer picture is compressed instead of cut


@dataclass
class _Row:
    """Characters of a line and, for the colours, the kind of action that each belongs to."""

    title: str
    text: list[str]
    kinds: list[str]

    def styled(self) -> str:
        parts = [self.title]
        place = 0
        for kind, run in groupby(self.kinds):
            length = len(list(run))
            text = "".join(self.text[place : place + length])
            place += length
            parts.append(typer.style(text, fg="black", bg=_BACKGROUNDS[kind]) if kind else text)
        return "".join(parts).rstrip()


def draw(timeline: Timeline, width: int) -> list[str]:
    """Lines of at most `width` columns: a ruler, a line per stage, a legend, and a note on what was left out.

    In the plainest form that fits: with micro-batch numbers; without them; without the middle of the time; squeezed.
    """
    title = len(f"stage {timeline.schedule.stages - 1} ")
    room = max(30, width - title)

    def label(event: Event) -> str:
        return timeline.schedule.label(event.action)

    def letter(event: Event) -> str:
        return event.action.kind.lower() if event.action.chunk else event.action.kind

    notes = []
    names: list[Name] = [label]
    scale = _scale(timeline, lambda event: len(label(event)) + 1)
    if scale * timeline.makespan > room:
        names = [letter]
        scale = _scale(timeline, lambda event: 1)
    columns = scale * timeline.makespan
    if columns > _LONGEST * room:
        names = [label, letter]
        scale = room / timeline.makespan
        notes.append(f"a column is {1 / scale:.3g} of time, and what is shorter may not show")
    rows = [
        _ruler(timeline, scale),
        *(_stage(timeline, rank, scale, names) for rank in range(timeline.schedule.stages)),
    ]
    if room < columns <= _LONGEST * room:
        head = (room - len(_CUT) + 1) // 2
        tail = room - len(_CUT) - head
        for row in rows:
            row.text[head:-tail] = _CUT
            row.kinds[head:-tail] = [""] * len(_CUT)
        cut = (head / scale, timeline.makespan - tail / scale)
        notes.append(f"the time from {cut[0]:.6g} to {cut[1]:.6g} is left out")
    used = {event.action.kind for event in timeline.events}
    meanings = [f"{kind} {meaning}" for kind, meaning in KINDS.items() if kind in used]
    if label in names:
        meanings.append("with the micro-batch" + (" and the chunk" if timeline.schedule.chunks > 1 else ""))
    else:
        notes.insert(0, f"micro-batch numbers do not fit into {width} columns; --png FILE draws them")
    if letter in names and timeline.schedule.chunks > 1:
        meanings.append("in lower case for chunks after the first")
    for row in rows:
        row.title = row.title.ljust(title)
    return [row.styled() for row in rows] + ["", f"({', '.join(meanings)}; . idle)"] + [f"({note})" for note in notes]


def _scale(timeline: Timeline, columns_for: Callable[[Event], int]) -> float:
    """Columns per unit of time, so that each action gets enough columns; an integer if the times are."""
    lengths = [(event, event.stop - event.start) for event in timeline.events]
    scale = max((columns_for(event) / length for event, length in lengths if length > 0), default=1.0)
    whole = all(float(event.stop).is_integer() for event in timeline.events)
    return math.ceil(scale) if whole else scale


def _stage(timeline: Timeline, rank: int, scale: float, names: list[Name]) -> _Row:
    """The line of a stage; an action is labelled with the first of its names that fits."""
    columns = round(timeline.makespan * scale)
    row = _Row(f"stage {rank} ", ["."] * columns, [""] * columns)
    for event in timeline.events:
        if event.rank != rank:
            continue
        start, stop = round(event.start * scale), round(event.stop * scale)
        fitting = (text for name in names if len(text := name(event)) <= stop - start)
        text = next(fitting, "")
        if stop - start > len(text) > 1:
            text = text.ljust(stop - start - 1, "-") + " "  # neighbours with numbers need a gap
        row.text[start:stop] = text.ljust(stop - start, "-")[: stop - start]
        row.kinds[start:stop] = [event.action.kind] * (stop - start)
    return row


def _ruler(timeline: Timeline, scale: float) -> _Row:
    columns = round(timeline.makespan * scale)
    text = [" "] * columns
    step = 10.0 ** math.floor(math.log10(8 / scale)) if columns else 1.0
    while step * scale < 8:
        step *= 2 if f"{step:e}"[0] in "15" else 2.5
    for index in range(int(columns / (step * scale)) + 1):
        mark = f"|{index * step:.6g}"
        start = round(index * step * scale)
        if start + len(mark) <= columns:
            text[start : start + len(mark)] = mark
    return _Row("time ", text, [""] * columns)


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
    if stages > 0 and stages * chunks * (stages + microbatches) > _MOST:
        raise ValueError(
            f"{stages} stages of {chunks} chunks with {microbatches} micro-batches are too many to simulate: "
            f"stages x chunks x (stages + micro-batches) may be {_MOST:,} at most"
        )
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
    if not math.isfinite(timeline.makespan):
        raise ValueError("the times add up to more than a number can be; give them in a larger unit")
    _warn(made)
    if png is not None:
        save_figure(timeline, png)
    if as_json:
        typer.echo(json.dumps(_as_dict(timeline, blocking_sends)))
        return
    screen = console()
    colour = screen.color_system is not None and not screen.no_color
    cut = f"{made.stages} stages" + (f" x {made.chunks} chunks" if made.chunks > 1 else "")
    typer.echo(f"{made.name}: {cut}, {made.microbatches} micro-batches\n", color=colour)
    typer.echo("\n".join(draw(timeline, screen.width)) + "\n", color=colour)
    for what, text in _summary(timeline, blocking_sends).items():
        typer.echo(textwrap.fill(f"{what:<10} {text}", max(screen.width, 30), subsequent_indent=" " * 11))
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
