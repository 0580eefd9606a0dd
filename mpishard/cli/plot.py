"""``mpishard plot``: a picture of a run, from its record."""

from __future__ import annotations

import itertools
import json
import math
import textwrap
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from mpishard.cli.output import AXES, BLUE, GREEN, ORANGE, PINK, RED, SKY, RecordFolder, save
from mpishard.record import Run
from mpishard.record.reading import VALIDATION, began_after
from mpishard.record.summary import COMPUTATION, binned, spent


def plot(
    run: RecordFolder,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Default: run.png in that folder.")] = None,
    log: Annotated[bool, typer.Option("--log", help="The loss on a logarithmic axis.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="What would be drawn, as data; no picture.")] = False,
) -> None:
    """Draw a run: loss, learning rate, gradient norm, speed, workers, time by phase, bytes by axis.

    And each series that record.log(step, name=value) was given; one whose name ends in "loss" is drawn with the loss.

    Of a run in progress, what is recorded so far.  The record is written by optimize(problem,
    record=mpishard.RunRecord(folder, mesh)).
    """
    found = Run.read(run)
    if not len(found.metrics["step"]):
        raise ValueError(f"{run} has no step yet; try again when the run has taken some")
    if as_json:
        typer.echo(json.dumps(_data(found)))
        return
    path = output or run / "run.png"
    draw(found, path, log=log)
    typer.echo(path)


def _data(run: Run) -> dict[str, dict[str, Any]]:
    """All series by step; NaN becomes null, as JSON has no NaN."""
    used = spent(run)
    tables = {"metrics": run.metrics, "phases": {"step": used.steps, **used.phases}}
    tables["sent"] = {"step": used.steps, **used.sent}
    data = {name: {key: _plain(values) for key, values in columns.items()} for name, columns in tables.items()}
    logged = {name: {"step": _plain(steps), "value": _plain(values)} for name, (steps, values) in run.logged.items()}
    return {**data, "logged": logged}


def _plain(values: np.ndarray) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]


_POINTS = 400  # of a line; more cannot be distinguished
_FEW = 60  # points of a line up to which each is marked
_ROW = 2.47  # inches
_LETTERS = 26  # of a label in a line
_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1.0))
_OWN = ("learning_rate", "gradient_norm", "iteration")  # in addition to the loss
_OWN_LOSS = "accepted_loss"  # shares the panel of the loss
_OTHERS = (RED, GREEN, ORANGE, PINK)  # losses that the script logs
_PHASES = {COMPUTATION: SKY, "update": GREEN, "saving": "0.55", "commit": PINK}
_COLOURS = {**_PHASES, **AXES}
_LEGEND: dict[str, Any] = {
    "fontsize": 8,
    "frameon": False,
    "loc": "lower center",
    "bbox_to_anchor": (0.5, 0.98),
    "ncols": 3,
}


def draw(run: Run, path: Path, *, log: bool = False) -> None:
    """Write the picture; its format follows from the name.

    Raises ValueError if the loss is to have a logarithmic axis (`log`) and is never above 0.
    """
    from matplotlib.figure import Figure

    # A logged series that is a loss shares the panel of the loss; any other has its own scale.
    further = run.further
    losses = {name: series for name, series in further.items() if name.endswith("loss")}
    others = {name: series for name, series in further.items() if name not in losses}
    if _OWN_LOSS in run.metrics:
        losses = {_OWN_LOSS: (run.metrics["step"], run.metrics[_OWN_LOSS]), **losses}
    own = {name: (run.metrics["step"], run.metrics[name]) for name in _OWN if name in run.metrics}
    small = {f"series {name}": (name, *series) for name, series in (own | others).items()}
    names = list(small)
    pairs = [names[first : first + 2] for first in range(0, len(names), 2)]
    # With an odd number of panels the last one has its own row.
    rows: list[Any] = [pair if len(pair) == 2 else pair * 2 for pair in pairs]
    rows = [["loss", "loss"], *rows, ["speed", "workers"], ["phases", "sent"]]
    figure = Figure(figsize=(8, _ROW * len(rows)), layout="constrained")
    axes = figure.subplot_mosaic(rows)
    _draw_loss(run, axes["loss"], losses, log)
    for panel, (name, steps, values) in small.items():
        _draw_series(axes[panel], steps, values, color=BLUE)
        axes[panel].set(ylabel=textwrap.fill(name.replace("_", " "), _LETTERS))
    _draw_speed(run, axes)
    _draw_spent(run, axes)
    # All panels have the same range of steps, which are integers.
    all_steps = np.concatenate([run.metrics["step"], *(steps for steps, _ in further.values())])
    margin = max(1.0, 0.02 * float(np.ptp(all_steps)))
    for axis in axes.values():
        axis.set(xlabel="step", xlim=(all_steps.min() - margin, all_steps.max() + margin))
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
        if not _shows_anything(axis):
            axis.set_yticks([])
            axis.text(0.5, 0.5, "nothing noted", transform=axis.transAxes, ha="center", va="center", color="0.5")
    save(figure, path)


def _draw_loss(run: Run, axis: Any, others: dict[str, tuple[np.ndarray, np.ndarray]], log: bool) -> None:
    steps = run.metrics["step"]
    loss = _metric(run, "loss")
    if log:
        if not (loss > 0).any():
            raise ValueError(f"{run.folder} has no loss above 0, which a logarithmic axis needs; leave out --log")
        axis.set_yscale("log", nonpositive="mask")
    if len(steps) > _POINTS:
        axis.plot(steps, loss, lw=0.5, alpha=0.35, color=BLUE, label="every step")
    _draw_series(axis, steps, loss, color=BLUE, label="mean" if len(steps) > _POINTS else "loss" if others else None)
    for (name, (at, values)), colour in zip(others.items(), itertools.cycle(_OTHERS), strict=False):
        _draw_series(axis, at, values, color=colour, label=name.replace("_", " "))
        if name == VALIDATION and np.isfinite(values).any():
            best = int(np.nanargmin(values))
            axis.plot(at[best], values[best], "*", color=colour, ms=11, mec="white", label=f"best, step {at[best]}")
    axis.set(ylabel="loss", title=str(run.folder))
    for number, start in enumerate(run.starts[1:]):
        label = None if number else "started again"
        axis.axvline(began_after(start) or 0, color="0.5", ls=":", lw=1, label=label)
    if axis.get_legend_handles_labels()[1]:
        axis.legend(fontsize=8, frameon=False, loc="upper right")


def _draw_series(axis: Any, steps: np.ndarray, values: np.ndarray, **style: Any) -> None:
    """Draw a line, and mark its points if they are few and not at consecutive steps."""
    marker = "o" if len(steps) <= _FEW and (len(steps) == 1 or np.diff(steps).max(initial=0) > 1) else None
    at, mean = binned(steps.astype(float), _POINTS), binned(values, _POINTS)
    axis.plot(at, mean, lw=1.2, marker=marker, ms=4, **style)


def _shows_anything(axis: Any) -> bool:
    own = [line for line in axis.lines if line.get_transform() == axis.transData]  # without the marks of starts
    return bool(axis.collections) or any(np.isfinite(line.get_ydata()).any() for line in own)


def _metric(run: Run, name: str) -> np.ndarray:
    """A series of the run by step, NaN for steps without a value."""
    found: np.ndarray = run.metrics.get(name, np.full(len(run.metrics["step"]), np.nan))
    return found


def _draw_speed(run: Run, axes: dict[str, Any]) -> None:
    steps = run.metrics["step"]
    every = binned(steps.astype(float), _POINTS)
    # A run of one step needs a marker, since a line of one point is invisible.
    style: dict[str, Any] = {"lw": 1.2, "marker": "o" if len(steps) == 1 else None, "ms": 4}
    tokens, speed = run.tokens_per_step, axes["speed"]
    with np.errstate(divide="ignore"):
        rate = 1 / binned(_metric(run, "seconds"), _POINTS)
    per_token = np.isfinite(tokens)
    speed.plot(every, rate * tokens if per_token else rate, **style, color=BLUE)
    terms = run.starts[-1]["problem"].get("tokens_per_sample", 1) if per_token else 1
    speed.set(ylabel=("tokens" if terms > 1 else "samples" if per_token else "steps") + " / s", ylim=(0, None))
    speed.yaxis.set_major_formatter("{x:,g}")
    axes["workers"].plot(steps, _metric(run, "workers"), **style, color=BLUE, drawstyle="steps-post")
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
        # A single step has a width of one step.
        ends = every if len(every) > 1 else every + np.array([-0.5, 0.5])
        values = [np.broadcast_to(layer, ends.shape) for layer in layers.values()]
        axes["phases"].stackplot(ends, *values, labels=layers, lw=0, colors=colours)
        axes["phases"].legend(**_LEGEND)
        # The first step compiles and connects; on its scale all others would be invisible.
        highest = 1.4 * float(np.percentile(sum(layers.values()), 95))
        axes["phases"].set_ylim(0, highest or None)
    axes["phases"].set(ylabel="ms / step, mean of ranks")
    sent = {name: binned(found.sent[name], _POINTS) for name in sorted(found.sent, key=_place)}
    most = max((float(np.nanmax(values, initial=0)) for values in sent.values()), default=0.0)
    unit, factor = next(((unit, factor) for unit, factor in _UNITS if most >= factor), _UNITS[-1])
    marker = "o" if len(every) == 1 else None
    for name, bytes_sent in sent.items():
        label, colour = f"{name} axis", _colour(name)
        axes["sent"].plot(every, bytes_sent / factor, lw=1.5, marker=marker, ms=4, label=label, color=colour)
    if found.sent:
        axes["sent"].legend(**_LEGEND)
    axes["sent"].set(ylabel=f"{unit} sent / step, all ranks", ylim=(0, None))


def _colour(name: str) -> str:
    return _COLOURS.get(name.removesuffix(" axis"), "0.3")


def _place(name: str) -> tuple[int, str]:
    """Position of a phase or an axis in a legend, independent of the order in this run."""
    known = list(_COLOURS)
    bare = name.removesuffix(" axis")
    return known.index(bare) if bare in known else len(known), name
