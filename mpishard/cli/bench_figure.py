"""Times of collectives by size, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mpishard.estimate.collectives import Timing


def draw(timings: Sequence[Timing], path: Path) -> None:
    """One panel an axis: time over size, whole lines for mpishard, dotted ones for mpi4py alone."""
    from matplotlib.figure import Figure

    axes = list(dict.fromkeys(timing.axis for timing in timings))
    figure = Figure(figsize=(5.2 * len(axes), 4.2), layout="constrained")
    for panel, axis in zip(figure.subplots(1, len(axes), squeeze=False)[0], axes, strict=True):
        own = [timing for timing in timings if timing.axis == axis]
        for number, operation in enumerate(dict.fromkeys(timing.operation for timing in own)):
            rows = [timing for timing in own if timing.operation == operation]
            sizes = [timing.nbytes for timing in rows]
            panel.plot(sizes, [timing.seconds * 1e3 for timing in rows], f"C{number}-o", ms=3, label=operation)
            panel.plot(sizes, [timing.bare * 1e3 for timing in rows], f"C{number}:", lw=1)
        panel.set(title=f"{axis} axis, {own[0].ranks} ranks", xlabel="bytes", ylabel="ms", xscale="log", yscale="log")
        panel.grid(alpha=0.3)
        panel.plot([], [], "0.4", ls=":", lw=1, label="mpi4py alone")
        panel.legend(fontsize=8)
    figure.savefig(path, dpi=110)
