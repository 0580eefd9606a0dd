"""A timeline as a picture: a Gantt chart with one row per stage."""

from __future__ import annotations

from pathlib import Path

from mpishard.cli.figure import ACTIONS, save
from mpishard.pipeline.schedule import KINDS, Timeline

_IDLE = "#eeeeee"
_DPI = 150
_CHARACTER_INCHES = 0.062  # of a character at the size of the numbers


def save_figure(timeline: Timeline, file: Path) -> None:
    """Write a PNG: colour by kind of action, paler for later chunks, numbers of micro-batches where they fit.

    Raises
    ------
    OSError
        If the file cannot be written.
    """
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
