"""Pictures of `inverse`: the remainders of a gradient check over the steps, an L-curve, a posterior's spectrum."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from os import PathLike
from typing import Any

import numpy as np

from mpishard.inverse.taylor import TaylorTest
from mpishard.lazy import of_extra


def draw_remainders(tests: Sequence[TaylorTest], path: str | PathLike[str]) -> None:
    """Draw one panel for each Taylor test; full marks are in the fit of its order, a line has the expected one."""
    figure = _figure("a gradient check", 4.6 * len(tests), 4)
    for panel, test in zip(figure.subplots(1, len(tests), squeeze=False)[0], tests, strict=True):
        steps, left, used = np.array(test.steps), np.array(test.remainders), np.array(test.used)
        colour = "#0072b2" if test.passed else "#d55e00"
        panel.plot(steps, left, color=colour, lw=1, marker="o", mfc="white", ms=5, label="remainder")
        panel.plot(steps[used], left[used], "o", color=colour, ms=5, label=f"order {test.order:.2f}")
        if used.any():
            right = left[used][0] * (steps / steps[used][0]) ** test.expected
            seen = right >= 0.1 * left[left > 0].min()
            panel.plot(steps[seen], right[seen], color="0.5", ls=":", label=f"order {test.expected}")
        panel.set(xlabel="h", xscale="log", yscale="log")
        panel.set_title(test.name, fontsize=9)
        panel.grid(alpha=0.3)
        panel.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=100)


def draw_l_curve(
    weights: Sequence[float],
    misfits: Sequence[float],
    terms: Sequence[float],
    corner: int | None,
    title: str,
    path: str | PathLike[str],
) -> None:
    """Draw the points of an L-curve, with their weights as far as there is room; a star is at the corner."""
    figure = _figure("an L-curve", 5.4, 4.4)
    panel = figure.add_subplot()
    order = sorted(range(len(weights)), key=weights.__getitem__)
    panel.plot([misfits[each] for each in order], [terms[each] for each in order], color="#0072b2", lw=1, marker="o")
    if corner is not None:
        panel.plot(misfits[corner], terms[corner], "*", color="#d55e00", ms=14, mec="white")
    panel.set(xlabel="misfit", ylabel="term", xscale="log", yscale="log")
    panel.set_title("\n".join(textwrap.wrap(title, 60)), fontsize=9)
    panel.tick_params("x", which="minor", labelrotation=30)  # which have labels on a short axis, long ones
    panel.margins(0.1)
    panel.grid(alpha=0.3)
    figure.draw_without_rendering()  # lays out the panel, and so the places of the points
    taken: list[Any] = []
    for each in dict.fromkeys([*([] if corner is None else [corner]), order[0], order[-1], *order]):
        place = misfits[each], terms[each]
        label = panel.annotate(f"{weights[each]:.4g}", place, xytext=(6, 4), textcoords="offset points", fontsize=8)
        box = label.get_window_extent()
        if any(map(box.overlaps, taken)):
            label.remove()
        else:
            taken.append(box)
    figure.savefig(path, dpi=100)


def draw_spectrum(kept: np.ndarray, left_out: np.ndarray, title: str, path: str | PathLike[str]) -> None:
    """Draw eigenvalues by their number, on a logarithmic axis by size, and those left out behind them; 1 has a line."""
    figure = _figure("a spectrum", 5.4, 4)
    panel = figure.add_subplot()
    numbers = np.arange(1, len(kept) + len(left_out) + 1)
    both = np.concatenate([kept, left_out])
    for which, label, style in (
        ((numbers <= len(kept)) & (both > 0), "kept", {"color": "#0072b2", "marker": "o"}),
        ((numbers <= len(kept)) & (both < 0), "kept, negative", {"color": "#d55e00", "marker": "o"}),
        (numbers > len(kept), "left out", {"color": "#0072b2", "marker": "o", "mfc": "white"}),
    ):
        if which.any():
            panel.plot(numbers[which], abs(both[which]), ls="", ms=4, label=label, **style)
    panel.axhline(1, color="0.5", ls=":", label="data as strong as the prior")
    panel.axvline(len(kept) + 0.5, color="0.5", lw=1)
    panel.set(xlabel="eigenvector", ylabel="eigenvalue", yscale="log")
    panel.set_title(title, fontsize=9)
    panel.grid(alpha=0.3)
    panel.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=100)


def _figure(what: str, width: float, height: float) -> Any:
    """An empty figure of this size in inches."""
    made = of_extra("matplotlib.figure", "cli", f"the picture of {what}").Figure
    return made(figsize=(width, height), layout="constrained")
