"""``mpishard plot``: a picture of a run, or of several, from their records."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from mpishard.arguments import printable
from mpishard.cli.output import AXES, BLUE, GREEN, ORANGE, PINK, RED, SKY, check_format, save, size
from mpishard.record import Run
from mpishard.record.reading import VALIDATION, began_after
from mpishard.record.summary import COMPUTATION, Spent, binned, ranks_by_step, spent, takeovers


def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="FOLDER", help="The records of runs, as given to RunRecord.")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Default: run.png in that folder; of several runs, runs.png here."),
    ] = None,
    panels: Annotated[
        str | None, typer.Option("--panels", metavar="NAME,...", help="These panels alone, in this order.")
    ] = None,
    log: Annotated[bool, typer.Option("--log", help="Loss, value and norms on logarithmic axes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="All series, as data; no picture.")] = False,
) -> None:
    """Draw a run, or several in one picture.

    Of a training: loss, learning_rate, gradient_norm, speed, workers.  Of a minimisation: value, step_length,
    gradient_norm, iteration, speed, ranks.  Of one run alone: phases, the time of a step, and sent, bytes by axis.  And
    each series that record.log(step, name=value) was given; one whose name ends in "loss" is drawn with the loss.
    These are the names that --panels takes.  Without it a series that is constant is a line of text.

    Of several runs, such as a sweep, each has a line, with the name of its folder.  In the picture of one run, marks
    show where it was started again, and where a spare has taken the place of a process that died or left.

    The name of the output says its format: .png, .pdf or .svg.  Of a run in progress, what is recorded so far.  The
    record is written by optimize(problem, record=mpishard.RunRecord(folder, mesh)) and by minimize(..., record=...).
    """
    if len({os.path.abspath(run) for run in runs}) < len(runs):
        raise ValueError(f"a run is given twice among {', '.join(map(str, runs))}; give each folder once")
    if panels is not None and as_json:
        raise ValueError("--json gives all series, and --panels chooses for a picture; leave one of them out")
    found = [Run.read(run) for run in runs]
    for run in found:
        if not len(run.metrics["step"]):
            raise ValueError(f"{run.folder} has no step yet; try again when the run has taken some")
    if as_json:
        data = {str(run.folder): _data(run) for run in found}
        typer.echo(json.dumps(data if len(found) > 1 else data[str(found[0].folder)]))
        return
    path = output or (runs[0] / "run.png" if len(runs) == 1 else Path("runs.png"))
    check_format(path)
    draw(found, path, log=log, panels=None if panels is None else [name.strip() for name in panels.split(",")])
    typer.echo(printable(str(path)))


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
_LETTERS = 28  # of a label in a line
_LETTERS_BELOW = 100  # of a line of text under the figure
_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1.0))
_OWN = ("learning_rate", "gradient_norm", "iteration")  # in addition to the loss
_OWN_LOSS = "accepted_loss"  # shares the panel of the loss
_OTHERS = (RED, GREEN, ORANGE, PINK)  # losses that the script logs
_OF_RUNS = [(colour, style) for style in ("-", "--", ":") for colour in (BLUE, RED, GREEN, ORANGE, PINK, SKY, "0.3")]
_PHASES = {COMPUTATION: SKY, "update": GREEN, "saving": "0.55", "commit": PINK}
_COLOURS = {**_PHASES, **AXES}
_LEGEND: dict[str, Any] = {
    "fontsize": 8,
    "frameon": False,
    "loc": "lower center",
    "bbox_to_anchor": (0.5, 0.98),
    "ncols": 3,
}


@dataclass(frozen=True)
class _Words:
    """The words of a picture."""

    step: str
    steps: str
    names: dict[str, str]  # by column of the record the panel that shows it, if it has another name
    labels: dict[str, str]  # by column the label of the axis, if it is not the name of the panel

    def name(self, column: str) -> str:
        return self.names.get(column, column)

    def label(self, column: str) -> str:
        return self.labels.get(column, self.name(column).replace("_", " "))


_TRAINING = _Words("step", "steps", {}, {"workers": "data-parallel workers"})
_MINIMIZATION = _Words(
    "evaluation",
    "evaluations",
    {"loss": "value", "learning_rate": "step_length", "workers": "ranks"},
    {"gradient_norm": "norm of the gradient", "iteration": "iterations", _OWN_LOSS: "value at the last iterate"},
)
_WITH_PRODUCTS = {"TruncatedNewton", "GaussNewton"}  # methods for which a Hessian product is a step, too


def _words(runs: Sequence[Run]) -> _Words:
    """Those of minimisations if all runs are some."""
    if not all("iteration" in run.metrics for run in runs):  # a method has chosen the steps, each an evaluation
        return _TRAINING
    rules = [start.get("rule") for run in runs for start in run.starts]
    if any(isinstance(rule, dict) and rule.get("rule") in _WITH_PRODUCTS for rule in rules):
        return replace(_MINIMIZATION, step="evaluation or Hessian product", steps="evaluations and products")
    return _MINIMIZATION


@dataclass(frozen=True)
class _Line:
    """A series of one run."""

    steps: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class _Panel:
    """A part of the picture.

    Panels of one `kind` share rows: 0 is the loss or value, 1 a line, 2 what a step consists of.  `constant` is a line
    of text that says as much as the panel; empty if none does.
    """

    kind: int
    draw: Callable[[Any], None]
    constant: str = ""


def draw(runs: Sequence[Run], path: Path, *, log: bool = False, panels: Sequence[str] | None = None) -> None:
    """Write the picture of runs that have steps; its format follows from the name.

    `panels` are the names of those to draw; None: all that are not constant.  Raises ValueError if there is no such
    panel, or if the loss is to have a logarithmic axis (`log`) and is never above 0.
    """
    from matplotlib.figure import Figure

    words = _words(runs)
    every = _panels(runs, words, log)
    texts = []
    if panels is None:
        chosen = [name for name, panel in every.items() if not panel.constant]
        texts = [textwrap.fill(panel.constant, _LETTERS_BELOW) for panel in every.values() if panel.constant]
    else:
        chosen = list(dict.fromkeys(panels))
        if unknown := [name for name in chosen if name not in every]:
            whose = str(runs[0].folder) if len(runs) == 1 else "the picture of several runs"
            raise ValueError(f"{whose} has no panel {unknown[0]!r}; --panels takes {', '.join(every)}")
    rows: list[Any] = []  # lists of names
    for _, group in itertools.groupby(chosen, lambda name: every[name].kind):
        names = [f"panel {name}" for name in group]
        # With an odd number of panels the last one has its own row.
        rows += [[*names[place : place + 2], *names[place : place + 1]][:2] for place in range(0, len(names), 2)]
    figure = Figure(figsize=(8, _ROW * len(rows)), layout="constrained")
    axes = figure.subplot_mosaic(rows)
    for name in chosen:
        every[name].draw(axes[f"panel {name}"])
    first = axes[f"panel {chosen[0]}"]
    if len(runs) > 1:
        _name_runs(figure, runs)
    else:
        figure.suptitle(_literal(str(runs[0].folder)))
        if every[chosen[0]].kind < 2:  # the others have a legend of their own
            _mark_events(runs[0], first)
    if texts:
        figure.supxlabel("\n".join(texts), fontsize=9, color="0.3")
    # All panels have the same range of steps, which are integers.
    series = [(run.metrics["step"], *(steps for steps, _ in run.further.values())) for run in runs]
    all_steps = np.concatenate(list(itertools.chain(*series)))
    margin = max(1.0, 0.02 * float(np.ptp(all_steps)))
    for axis in axes.values():
        axis.set(xlabel=words.step, xlim=(all_steps.min() - margin, all_steps.max() + margin))
        axis.locator_params(axis="x", integer=True)
        axis.grid(alpha=0.3)
        own = [line for line in axis.lines if line.get_transform() == axis.transData]  # without the marks of events
        if not axis.collections and not any(np.isfinite(line.get_ydata()).any() for line in own):
            axis.set_yticks([])
            axis.text(0.5, 0.5, "nothing noted", transform=axis.transAxes, ha="center", va="center", color="0.5")
        if axis.get_legend() is None and axis.get_legend_handles_labels()[1]:
            axis.legend(fontsize=8, frameon=False, loc="upper right")
    save(figure, path)


# -- which panels ------------------------------------------------------------------------------------------------------


def _panels(runs: Sequence[Run], words: _Words, log: bool) -> dict[str, _Panel]:
    """All panels of the picture by name, in order."""
    several = len(runs) > 1
    draw_main = functools.partial(_draw_losses, runs) if several else functools.partial(_draw_loss, runs[0])
    found = {words.name("loss"): _Panel(0, functools.partial(draw_main, words=words, log=log))}
    of_runs = [_lines(run, words, several) for run in runs]
    labels = {name: label for lines in of_runs for name, (label, _) in lines.items()}
    for name, label in labels.items():
        lines = [each[name][1] if name in each else None for each in of_runs]
        draw_lines = functools.partial(_draw_lines, label=label, lines=lines, log=log and name.endswith("norm"))
        found[name] = _Panel(1, draw_lines, _constant(label, lines, words))
    label, lines = _speed(runs, words)
    draw_speed = functools.partial(_draw_lines, label=label, lines=lines, from_zero=True, formatter="{x:,g}")
    found["speed"] = _Panel(1, draw_speed, _constant(label, lines, words))
    label, lines = words.label("workers"), [_workers(run, words) for run in runs]
    draw_workers = functools.partial(_draw_lines, label=label, lines=lines, from_zero=True, counts=True)
    found[words.name("workers")] = _Panel(1, draw_workers, _constant(label, lines, words))
    if not several:
        used = spent(runs[0])
        found["phases"] = _Panel(2, functools.partial(_draw_phases, used, words=words))
        found["sent"] = _Panel(2, functools.partial(_draw_sent, used, words=words), _constant_bytes(used, words))
    return found


def _lines(run: Run, words: _Words, several: bool) -> dict[str, tuple[str, _Line]]:
    """By name of the panel a label and a series of this run, for all that have panels as they are.

    A logged series that is a loss shares the panel of the loss, unless that has `several` runs.
    """
    steps = run.metrics["step"]
    found = {
        words.name(column): (words.label(column), _Line(steps, run.metrics[column]))
        for column in _OWN
        if column in run.metrics
    }
    taken = {*map(words.name, ("loss", "workers", *_OWN)), "speed", "phases", "sent"}
    for name, series in run.further.items():
        if several or not name.endswith("loss"):
            # A script may log a series under the name of a panel.
            found[f"logged {name}" if name in taken else name] = name.replace("_", " "), _Line(*series)
    return found


def _workers(run: Run, words: _Words) -> _Line:
    """The data-parallel workers of a training, and the ranks of a minimisation."""
    workers = _metric(run, "workers")
    if words is not _TRAINING:
        ranks = ranks_by_step(run)
        workers = np.where(np.isfinite(ranks), ranks, workers)
    return _Line(run.metrics["step"], workers)


def _speed(runs: Sequence[Run], words: _Words) -> tuple[str, list[_Line | None]]:
    """The speeds of runs in their unit if they have one in common, and in steps otherwise."""
    units = {_unit(run) for run in runs}
    unit = units.pop() if len(units) == 1 and words is _TRAINING else ""
    lines: list[_Line | None] = []
    for run in runs:
        with np.errstate(divide="ignore"):
            rate = 1 / binned(_metric(run, "seconds"), _POINTS)
        every = binned(run.metrics["step"].astype(float), _POINTS)
        lines.append(_Line(every, rate * run.tokens_per_step if unit else rate))
    return f"{unit or words.steps} / s", lines


def _unit(run: Run) -> str:
    """What a step of the run takes several of: tokens or samples; empty if that is not noted."""
    if not np.isfinite(run.tokens_per_step):
        return ""
    return "tokens" if run.starts[-1]["problem"].get("tokens_per_sample", 1) > 1 else "samples"


def _constant(label: str, lines: Sequence[_Line | None], words: _Words) -> str:
    """A line of text that says as much as a panel of these series; empty if they are not all of one finite value."""
    known = [line for line in lines if line is not None]
    values = np.concatenate([line.values for line in known])
    if not np.isfinite(values).all() or len(np.unique(values)) != 1:
        return ""
    at = f" at {words.step} {known[0].steps[0]:.0f}" if len(values) == 1 else ""
    return f"{label}: {values[0]:.6g}{at}"


def _constant_bytes(found: Spent, words: _Words) -> str:
    """A line of text that says as much as the panel of bytes; empty if those of an axis change, or none are noted."""
    most = {name: float(values.max(initial=0.0)) for name, values in found.sent.items()}
    # A step has an equal part of the bytes of its line, and parts of equal lines differ in the last bits.
    changes = (not np.allclose(values, most[name], rtol=1e-9, atol=0) for name, values in found.sent.items())
    if not most or any(changes):
        return ""
    parts = (f"{name} axis {size(most[name]) if most[name] else '0 B'}" for name in sorted(most, key=_place))
    return f"sent / {words.step}, all ranks: {', '.join(parts)}"


# -- what is in a panel ------------------------------------------------------------------------------------------------


def _draw_loss(run: Run, axis: Any, *, words: _Words, log: bool) -> None:
    """The loss of one run, and all losses that its script has logged."""
    steps, loss = run.metrics["step"], _metric(run, "loss")
    others = {name: series for name, series in run.further.items() if name.endswith("loss")}
    if _OWN_LOSS in run.metrics:
        others = {_OWN_LOSS: (steps, run.metrics[_OWN_LOSS]), **others}
    label = words.label("loss")
    if log:
        _make_logarithmic(axis, run, loss, label)
    if len(steps) > _POINTS:
        axis.plot(steps, loss, lw=0.5, alpha=0.35, color=BLUE, label=f"every {words.step}")
    _draw_series(axis, steps, loss, color=BLUE, label="mean" if len(steps) > _POINTS else label if others else None)
    for (name, (at, values)), colour in zip(others.items(), itertools.cycle(_OTHERS), strict=False):
        _draw_series(axis, at, values, color=colour, label=words.label(name))
        if name == VALIDATION and np.isfinite(values).any():
            best = int(np.nanargmin(values))
            text = f"best, {words.step} {at[best]}"
            axis.plot(at[best], values[best], "*", color=colour, ms=11, mec="white", label=text)
    axis.set(ylabel=label)


def _draw_losses(runs: Sequence[Run], axis: Any, *, words: _Words, log: bool) -> None:
    """The loss of each run, of minimisations that at the last iterate: the trials of line searches hide it."""
    column = _OWN_LOSS if all(_OWN_LOSS in run.metrics for run in runs) else "loss"
    lines = [_Line(run.metrics["step"], _metric(run, column)) for run in runs]
    label = words.label(column)
    if log:
        for run, line in zip(runs, lines, strict=True):
            _make_logarithmic(axis, run, line.values, label)
    _draw_lines(axis, label=label, lines=lines)


def _make_logarithmic(axis: Any, run: Run, values: np.ndarray, label: str) -> None:
    if not (values > 0).any():
        raise ValueError(f"{run.folder} has no {label} above 0, which a logarithmic axis needs; leave out --log")
    axis.set_yscale("log", nonpositive="mask")


def _draw_lines(
    axis: Any,
    *,
    label: str,
    lines: Sequence[_Line | None],
    log: bool = False,
    from_zero: bool = False,
    counts: bool = False,
    formatter: str | None = None,
) -> None:
    """Draw a series of each run; `counts`: whole numbers, which change at a step."""
    for line, (colour, style) in zip(lines, itertools.cycle(_OF_RUNS), strict=False):
        if line is None:
            continue
        if counts:
            marker = "o" if len(line.steps) == 1 else None  # a line of one point is invisible
            drawn: dict[str, Any] = {"lw": 1.2, "marker": marker, "ms": 4, "drawstyle": "steps-post"}
            axis.plot(line.steps, line.values, color=colour, ls=style, **drawn)
        else:
            _draw_series(axis, line.steps, line.values, color=colour, ls=style)
        if log and (line.values > 0).any():
            axis.set_yscale("log", nonpositive="mask")
    axis.set(ylabel=textwrap.fill(label, _LETTERS))
    if from_zero:
        axis.set(ylim=(0, None))
    if counts:
        axis.yaxis.get_major_locator().set_params(integer=True)
    if formatter is not None:
        axis.yaxis.set_major_formatter(formatter)


def _draw_series(axis: Any, steps: np.ndarray, values: np.ndarray, **style: Any) -> None:
    """Draw a line, and mark its points if they are few and not at consecutive steps."""
    marker = "o" if len(steps) <= _FEW and (len(steps) == 1 or np.diff(steps).max(initial=0) > 1) else None
    at, mean = binned(steps.astype(float), _POINTS), binned(values, _POINTS)
    axis.plot(at, mean, lw=1.2, marker=marker, ms=4, **style)


def _mark_events(run: Run, axis: Any) -> None:
    """Mark where the run was started again, and where a spare has taken over."""
    events = [(began_after(start) or 0, "started again", ":") for start in run.starts[1:]]
    events += [(step, "a spare took over", "-.") for step in takeovers(run)]
    labelled = set()
    for step, label, style in events:
        axis.axvline(step, color="0.5", ls=style, lw=1, label=None if label in labelled else label)
        labelled.add(label)


def _name_runs(figure: Any, runs: Sequence[Run]) -> None:
    """Say above the panels which line is which run: by the name of its folder, or by its path if two have one name."""
    from matplotlib.lines import Line2D

    names = [os.path.basename(os.path.abspath(run.folder)) for run in runs]
    if len(set(names)) < len(names):
        names = [str(run.folder) for run in runs]
    handles = [
        Line2D([], [], color=colour, ls=style, lw=1.2, label=_literal(name))
        for name, (colour, style) in zip(names, itertools.cycle(_OF_RUNS), strict=False)
    ]
    figure.legend(handles=handles, fontsize=8, frameon=False, ncols=min(4, len(names)), loc="outside upper center")


def _literal(text: str) -> str:
    """The name of a folder as matplotlib shows it letter by letter: two dollars would begin a formula."""
    return printable(text).replace("$", r"\$")


def _metric(run: Run, name: str) -> np.ndarray:
    """A series of the run by step, NaN for steps without a value."""
    found: np.ndarray = run.metrics.get(name, np.full(len(run.metrics["step"]), np.nan))
    return found


def _draw_phases(found: Spent, axis: Any, *, words: _Words) -> None:
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
        axis.stackplot(ends, *values, labels=layers, lw=0, colors=colours)
        axis.legend(**_LEGEND)
        # The first step compiles and connects; on its scale all others would be invisible.
        highest = 1.4 * float(np.percentile(sum(layers.values()), 95))
        axis.set_ylim(0, highest or None)
    axis.set(ylabel=textwrap.fill(f"ms / {words.step}, mean of ranks", _LETTERS))


def _draw_sent(found: Spent, axis: Any, *, words: _Words) -> None:
    every = binned(found.steps.astype(float), _POINTS)
    sent = {name: binned(found.sent[name], _POINTS) for name in sorted(found.sent, key=_place)}
    most = max((float(np.nanmax(values, initial=0)) for values in sent.values()), default=0.0)
    unit, factor = next(((unit, factor) for unit, factor in _UNITS if most >= factor), _UNITS[-1])
    marker = "o" if len(every) == 1 else None
    for name, bytes_sent in sent.items():
        label, colour = f"{name} axis", _colour(name)
        axis.plot(every, bytes_sent / factor, lw=1.5, marker=marker, ms=4, label=label, color=colour)
    if found.sent:
        axis.legend(**_LEGEND)
    axis.set(ylabel=textwrap.fill(f"{unit} sent / {words.step}, all ranks", _LETTERS), ylim=(0, None))


def _colour(name: str) -> str:
    return _COLOURS.get(name.removesuffix(" axis"), "0.3")


def _place(name: str) -> tuple[int, str]:
    """Position of a phase or an axis in a legend, independent of the order in this run."""
    known = list(_COLOURS)
    bare = name.removesuffix(" axis")
    return known.index(bare) if bare in known else len(known), name
