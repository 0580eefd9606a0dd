"""A trace as a Gantt chart: a row a rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from mpishard.record.trace import Traced

_MOST_ROWS = 64
# What lies on top of what: calls interrupt everything, and a pipeline's actions are inside the function.
_LAYERS = {"step": 0, "phase": 1, "function": 1, "F": 2, "B": 2, "I": 2, "W": 2}
_COLOURS = {
    "step": "0.88",
    "phase": "#b8b08d",
    "function": "#7fa6c9",
    "F": "#4c8dc4",
    "B": "#2a5f8f",
    "I": "#2a5f8f",
    "W": "#7db07d",
    "data": "#d62728",
    "tensor": "#ff9d3c",
    "pipeline": "#9467bd",
    "world": "#8c564b",
    "node": "#e377c2",
}
_WORDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


def draw(spans: Sequence[Traced], path: Path) -> int:
    """Write the picture; its format follows from the name.  Returns the number of ranks left out."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks = sorted({span.rank for span in spans})
    shown = ranks[:_MOST_ROWS]
    rows = {rank: row for row, rank in enumerate(shown)}
    first = min(span.start for span in spans)
    bars: dict[str, dict[int, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for span in spans:
        if span.rank in rows:
            bars[span.kind][rows[span.rank]].append(((span.start - first) * 1e3, span.seconds * 1e3))
    figure = Figure(figsize=(11, 1.6 + 0.35 * len(shown)), layout="constrained")
    axis = figure.subplots()
    kinds = sorted(bars, key=lambda kind: (_LAYERS.get(kind, 3), kind))
    for kind in kinds:
        layer = _LAYERS.get(kind, 3)
        height = 0.9 - 0.14 * layer
        for row, where in bars[kind].items():
            colour = _COLOURS.get(kind, "#17becf")
            axis.broken_barh(where, (row - height / 2, height), color=colour, zorder=2 + layer, lw=0)
    handles = [
        Patch(color=_COLOURS.get(kind, "#17becf"), label=_WORDS.get(kind, kind if kind in _LAYERS else f"{kind} axis"))
        for kind in kinds
    ]
    axis.legend(handles=handles, fontsize=8, ncols=len(handles), loc="lower center", bbox_to_anchor=(0.5, 1.0))
    axis.set(xlabel="ms", yticks=range(len(shown)), yticklabels=[f"rank {rank}" for rank in shown])
    axis.invert_yaxis()
    figure.savefig(path, dpi=110)
    return len(ranks) - len(shown)
