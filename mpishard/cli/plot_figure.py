"""The picture of a run: loss, speed, workers, what was sent and what time went into."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mpishard.record import Run
from mpishard.record.summary import binned, spent

_POINTS = 400  # in a line; more cannot be told apart


def draw(run: Run, path: Path) -> None:
    """Write the picture; its format follows from the name."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 8), layout="constrained")
    axes = figure.subplot_mosaic([["loss", "loss"], ["speed", "workers"], ["phases", "sent"]])
    _draw_metrics(run, axes)
    _draw_spent(run, axes)
    for name in ("phases", "sent"):
        axes[name].set_xlabel("step")
    for axis in axes.values():
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def _draw_metrics(run: Run, axes: dict) -> None:
    metrics = run.metrics
    steps = metrics["step"]
    known = {name: metrics.get(name, np.full(len(steps), np.nan)) for name in ("loss", "seconds", "workers")}
    loss = axes["loss"]
    every, mean = binned(steps.astype(float), _POINTS), binned(known["loss"], _POINTS)
    if len(mean) < len(steps):
        loss.plot(steps, known["loss"], lw=0.5, alpha=0.3, color="C0")
    loss.plot(every, mean, lw=1.2, color="C0")
    loss.set(ylabel="loss", title=str(run.folder))
    for start in run.starts[1:]:
        loss.axvline(start.get("resumed_steps", 0), color="0.6", ls=":", lw=1)

    tokens, speed = run.tokens_per_step, axes["speed"]
    with np.errstate(divide="ignore"):
        rate = 1 / binned(known["seconds"], _POINTS)
    per_token = np.isfinite(tokens)
    speed.plot(every, rate * tokens if per_token else rate, lw=1, color="C1")
    terms = run.starts[-1]["problem"].get("tokens_per_sample", 1) if per_token else 1
    speed.set(ylabel=("tokens" if terms > 1 else "samples" if per_token else "steps") + " a second", ylim=(0, None))
    axes["workers"].plot(steps, known["workers"], lw=1.2, color="C2", drawstyle="steps-post")
    axes["workers"].set(ylabel="data-parallel workers", ylim=(0, None))
    axes["workers"].yaxis.get_major_locator().set_params(integer=True)


def _draw_spent(run: Run, axes: dict) -> None:
    found = spent(run)
    every = binned(found.steps.astype(float), _POINTS)
    layers = {name: np.nan_to_num(binned(seconds, _POINTS)) * 1e3 for name, seconds in found.phases.items()}
    if layers:
        axes["phases"].stackplot(every, *layers.values(), labels=layers, lw=0)
        axes["phases"].legend(fontsize=8, loc="upper right")
        # The first step compiles and connects; it would press all others flat.
        axes["phases"].set_ylim(0, 1.6 * float(np.percentile(sum(layers.values()), 90)))
    axes["phases"].set(ylabel="ms a step, mean of ranks")
    for name, sent in found.sent.items():
        axes["sent"].plot(every, binned(sent, _POINTS) / 1e6, lw=1, label=name)
    if found.sent:
        axes["sent"].legend(fontsize=8)
    axes["sent"].set(ylabel="MB a step, all ranks", ylim=(0, None))
