"""A trace as a Gantt chart with one row per rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from mpishard.cli.figure import ACTIONS, AXES, save
from mpishard.comm.ledger import PRODUCT
from mpishard.record.trace import Traced

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
    shown = ranks[:_MOST_ROWS]
    rows = {rank: row for row, rank in enumerate(shown)}
    first = min(span.start for span in spans)
    bars: dict[str, dict[int, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for span in spans:
        if span.rank in rows:
            bars[span.kind][rows[span.rank]].append(((span.start - first) * 1e3, span.seconds * 1e3))
    figure = Figure(figsize=(8, 1.4 + 0.36 * len(shown)), layout="constrained")
    axis = figure.subplots()
    kinds = sorted(bars, key=lambda kind: (_LAYERS.get(kind, _OF_CALLS), kind))
    for kind in kinds:
        layer = _LAYERS.get(kind, _OF_CALLS)
        height = 0.9 - 0.14 * layer
        for row, where in bars[kind].items():
            axis.broken_barh(where, (row - height / 2, height), color=_colour(kind), zorder=2 + layer, lw=0)
    begins = {span.step: (span.start - first) * 1e3 for span in spans if span.kind == "step" and span.rank == shown[0]}
    if len(begins) <= _MOST_NUMBERS:
        for step, begin in begins.items():
            axis.annotate(f"step {step}", (begin, -0.48), fontsize=8, va="bottom")
    patches = [Patch(color=_colour(kind), label=_WORDS.get(kind, f"{kind} axis")) for kind in kinds]
    figure.legend(handles=patches, fontsize=8, frameon=False, ncols=5, loc="outside lower center")
    axis.set(xlabel="ms", yticks=range(len(shown)), yticklabels=[f"rank {rank}" for rank in shown])
    axis.set(ylim=(len(shown) - 0.4, -0.95), xmargin=0.01)
    save(figure, path)
    return len(ranks) - len(shown)


def _colour(kind: str) -> str:
    return _COLOURS.get(kind, "0.3")
