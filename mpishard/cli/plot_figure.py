"""The picture of a run: loss, speed, workers, what was sent and what time went into."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mpishard.cli.figure import AXES, BLUE, GREEN, PINK, SKY, save
from mpishard.record import Run
from mpishard.record.summary import COMPUTATION, binned, spent

_POINTS = 400  # in a line; more cannot be told apart
_PHASES = {COMPUTATION: SKY, "update": GREEN, "saving": "0.55", "commit": PINK}
_COLOURS = {**_PHASES, **AXES}
_LEGEND: dict[str, Any] = {
    "fontsize": 8,
    "frameon": False,
    "loc": "lower center",
    "bbox_to_anchor": (0.5, 0.98),
    "ncols": 3,
}


def draw(run: Run, path: Path) -> None:
    """Write the picture; its format follows from the name."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 7.4), layout="constrained")
    axes = figure.subplot_mosaic([["loss", "loss"], ["speed", "workers"], ["phases", "sent"]])
    _draw_metrics(run, axes)
    _draw_spent(run, axes)
    for axis in axes.values():
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    save(figure, path)


def _draw_metrics(run: Run, axes: dict[str, Any]) -> None:
    metrics = run.metrics
    steps = metrics["step"]
    known = {name: metrics.get(name, np.full(len(steps), np.nan)) for name in ("loss", "seconds", "workers")}
    # A run of one step is a point, which no line shows.
    style: dict[str, Any] = {"lw": 1.2, "marker": "o" if len(steps) == 1 else None, "ms": 4}
    loss = axes["loss"]
    every, mean = binned(steps.astype(float), _POINTS), binned(known["loss"], _POINTS)
    if len(mean) < len(steps):
        loss.plot(steps, known["loss"], lw=0.5, alpha=0.35, color=BLUE, label="every step")
    loss.plot(every, mean, **style, color=BLUE, label="mean" if len(mean) < len(steps) else None)
    loss.set(ylabel="loss", title=str(run.folder))
    for number, start in enumerate(run.starts[1:]):
        label = None if number else "started again"
        loss.axvline(start.get("resumed_steps", 0), color="0.5", ls=":", lw=1, label=label)
    if loss.get_legend_handles_labels()[1]:
        loss.legend(fontsize=8, frameon=False, loc="upper right")

    tokens, speed = run.tokens_per_step, axes["speed"]
    with np.errstate(divide="ignore"):
        rate = 1 / binned(known["seconds"], _POINTS)
    per_token = np.isfinite(tokens)
    speed.plot(every, rate * tokens if per_token else rate, **style, color=BLUE)
    terms = run.starts[-1]["problem"].get("tokens_per_sample", 1) if per_token else 1
    speed.set(ylabel=("tokens" if terms > 1 else "samples" if per_token else "steps") + " / s", ylim=(0, None))
    speed.yaxis.set_major_formatter("{x:,g}")
    axes["workers"].plot(steps, known["workers"], **style, color=BLUE, drawstyle="steps-post")
    axes["workers"].set(ylabel="data-parallel workers", ylim=(0, None))
    axes["workers"].yaxis.get_major_locator().set_params(integer=True)


def _draw_spent(run: Run, axes: dict[str, Any]) -> None:
    found = spent(run)
    every = binned(found.steps.astype(float), _POINTS)
    layers = {
        name: np.nan_to_num(binned(seconds, _POINTS)) * 1e3
        for name, seconds in sorted(found.phases.items(), key=lambda item: _place(item[0]))
    }
    if layers:
        colours = [_colour(name) for name in layers]
        axes["phases"].stackplot(every, *layers.values(), labels=layers, lw=0, colors=colours)
        axes["phases"].legend(**_LEGEND)
        # The first step compiles and connects; it would press all others flat.
        highest = 1.4 * float(np.percentile(sum(layers.values()), 95))
        axes["phases"].set_ylim(0, highest or None)
    axes["phases"].set(ylabel="ms / step, mean of ranks")
    for name in sorted(found.sent, key=_place):
        sent = binned(found.sent[name], _POINTS) / 1e6
        axes["sent"].plot(every, sent, lw=1.5, label=f"{name} axis", color=_colour(name))
    if found.sent:
        axes["sent"].legend(**_LEGEND)
    axes["sent"].set(ylabel="MB sent / step, all ranks", ylim=(0, None))


def _colour(name: str) -> str:
    return _COLOURS.get(name.removesuffix(" axis"), "0.3")


def _place(name: str) -> tuple[int, str]:
    """Where a phase or an axis comes in a legend, whatever came first in this run."""
    known = list(_COLOURS)
    bare = name.removesuffix(" axis")
    return known.index(bare) if bare in known else len(known), name
