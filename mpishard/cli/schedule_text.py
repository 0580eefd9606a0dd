"""A timeline as text: one line per stage, time to the right."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

import typer

from mpishard.pipeline.schedule import KINDS, Event, Timeline

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
        shown = (head / scale, timeline.makespan - tail / scale)
        notes.append(f"the time from {shown[0]:.6g} to {shown[1]:.6g} is left out")
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
