"""Times of collectives by size, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mpishard.cli.figure import BLUE, GREEN, ORANGE, PINK, RED, save
from mpishard.estimate.collectives import Timing

_STYLES = [(BLUE, "o"), (RED, "s"), (GREEN, "^"), (PINK, "D"), (ORANGE, "v")]


def draw(timings: Sequence[Timing], path: Path) -> None:
    """Draw one panel per axis: time over size, solid lines for mpishard, dotted ones for mpi4py alone."""
    from matplotlib.figure import Figure

    axes = list(dict.fromkeys(timing.axis for timing in timings))
    figure = Figure(figsize=(4.4 * len(axes), 4), layout="constrained")
    for panel, axis in zip(figure.subplots(1, len(axes), squeeze=False)[0], axes, strict=True):
        own = [timing for timing in timings if timing.axis == axis]
        operations = dict.fromkeys(timing.operation for timing in own)
        for operation, (colour, marker) in zip(operations, _STYLES, strict=False):
            rows = [timing for timing in own if timing.operation == operation]
            sizes = [timing.nbytes for timing in rows]
            own_ms, bare_ms = ([1e3 * getattr(timing, which) for timing in rows] for which in ("seconds", "bare"))
            panel.plot(sizes, own_ms, color=colour, marker=marker, ms=4, label=operation)
            panel.plot(sizes, bare_ms, color=colour, ls=":", lw=1.2)
        panel.set(title=f"{axis} axis, {own[0].ranks} ranks", xlabel="buffer (bytes)", ylabel="time (ms)")
        panel.set(xscale="log", yscale="log")
        panel.grid(alpha=0.3)
        (alone,) = panel.plot([], [], "0.3", ls=":", lw=1.2, label="mpi4py alone")
    drawn = [*panel.get_lines()[:-1:2], alone]  # all panels have the same lines
    figure.legend(handles=drawn, fontsize=8, frameon=False, ncols=3, loc="outside lower center")
    save(figure, path)
