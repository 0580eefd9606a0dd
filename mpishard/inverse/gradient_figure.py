"""The remainders of a gradient check over the steps, as a picture.  The only file here that needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike

import numpy as np

from mpishard.inverse.taylor import TaylorTest

_BLUE, _RED = "#0072b2", "#d55e00"


def draw(tests: Sequence[TaylorTest], path: str | PathLike[str]) -> None:
    """Draw one panel per test; full marks: what the order is fitted to; a line of the expected order beside them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(tests), 4), layout="constrained")
    for panel, test in zip(figure.subplots(1, len(tests), squeeze=False)[0], tests, strict=True):
        steps, left = np.array(test.steps), np.array(test.remainders)
        used = np.array(test.used)
        colour = _BLUE if test.passed else _RED
        panel.plot(steps, left, color=colour, lw=1, marker="o", mfc="white", ms=5, label="remainder")
        panel.plot(steps[used], left[used], "o", color=colour, ms=5, label=f"order {test.order:.2f}")
        if used.any():
            first = np.flatnonzero(used)[0]
            right = left[first] * (steps / steps[first]) ** test.expected
            seen = right >= 0.1 * left[left > 0].min()
            panel.plot(steps[seen], right[seen], color="0.5", ls=":", label=f"order {test.expected}")
        panel.set(title=test.name, xlabel="h", xscale="log", yscale="log")
        panel.title.set_fontsize(9)
        panel.grid(alpha=0.3)
        panel.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=100)
