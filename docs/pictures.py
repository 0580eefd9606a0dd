"""Draws the pictures of the pages, each for light and for dark pages.

Sphinx runs it before it reads the pages (`setup`); by hand: ``python docs/pictures.py FOLDER``.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch, Rectangle
from snippets import DOCS, program

import mpishard

Axes = Any


class Theme(NamedTuple):
    """Colours of a page."""

    name: str
    text: str
    faint: str
    fill: str
    ranks: tuple[str, ...]


LIGHT = Theme("light", "#222222", "#9a9a9a", "#eeeeee", ("#9ecae9", "#ffbf79", "#a8d8a0", "#d3b8e6"))
DARK = Theme("dark", "#e0e0e0", "#808080", "#2b2f33", ("#2f6690", "#a5651b", "#3d7a3a", "#74519a"))
BAD = "#d0433f"


def _panel(figure: Figure, *position: int) -> Axes:
    """An empty drawing area in its own units, without axes."""
    axes = figure.add_subplot(*position)
    axes.set_axis_off()
    return axes


def _box(axes: Axes, x: float, y: float, width: float, height: float, text: str, colour: str, theme: Theme) -> None:
    style = "round,pad=0,rounding_size=0.12"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=colour, edgecolor="none"))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", color=theme.text, fontsize=9)


def _arrow(axes: Axes, start: tuple[float, float], stop: tuple[float, float], colour: str, **options: Any) -> None:
    shape = {"arrowstyle": "-|>", "mutation_scale": 11, "linewidth": 1.4, "shrinkA": 0, "shrinkB": 0, **options}
    axes.add_patch(FancyArrowPatch(start, stop, color=colour, **shape))


def mesh(theme: Theme) -> Figure:
    """Eight ranks as pipeline=2 x data=2 x tensor=2."""
    figure = Figure(figsize=(7.2, 3.3))
    axes = _panel(figure)
    tensor, data, pipeline = theme.ranks[0], theme.ranks[1], theme.ranks[3]

    def centre(rank: int) -> tuple[float, float]:
        stage, replica, part = rank // 4, rank // 2 % 2, rank % 2
        return 1.3 + 5.4 * stage + 2.2 * part, 2.1 - 1.6 * replica

    for rank in range(8):
        x, y = centre(rank)
        if rank % 2 == 0:
            axes.plot(*zip((x, y), centre(rank + 1), strict=True), color=tensor, lw=7, zorder=1)
        if rank // 2 % 2 == 0:
            axes.plot(*zip((x, y), centre(rank + 2), strict=True), color=data, lw=7, zorder=1)
        if rank < 4:
            bend = {"arrowstyle": "-", "connectionstyle": f"arc3,rad={0.22 if rank > 1 else -0.22}", "linewidth": 2.2}
            _arrow(axes, (x, y), centre(rank + 4), pipeline, zorder=0, **bend)
        _box(axes, x - 0.52, y - 0.24, 1.04, 0.48, f"rank {rank}", theme.fill, theme)
    for stage in range(2):
        axes.text(2.4 + 5.4 * stage, 3.25, f"stage {stage}", ha="center", color=theme.text, fontsize=11)
    for replica in range(2):
        axes.text(-0.75, 2.1 - 1.6 * replica, f"replica {replica}", va="center", color=theme.text, fontsize=10)
    names = ("mesh.tensor", tensor), ("mesh.data", data), ("mesh.pipeline", pipeline)
    handles = [Patch(color=colour, label=name) for name, colour in names]
    figure.legend(handles=handles, loc="lower center", ncols=3, frameon=False, labelcolor=theme.text)
    axes.set(xlim=(-0.9, 9.7), ylim=(-0.55, 3.5))
    figure.subplots_adjust(left=0.01, right=0.99, top=0.99, bottom=0.08)
    return figure


def layouts(theme: Theme) -> Figure:
    """One tensor of 6 x 4 in two layouts, and what goes from whom to whom."""
    figure = Figure(figsize=(7.6, 3.2))
    rows, columns = 6, 4

    def holder_before(row: int, column: int) -> int:  # tensor=2 splits the columns
        return column // 2

    def holder_after(row: int, column: int) -> int:  # ZeRO over 3 ranks splits the elements in row-major order
        return (row * columns + column) // 8

    def moved(row: int, column: int) -> bool:
        return holder_before(row, column) != holder_after(row, column)

    def draw(place: int, title: str, holder: Callable[[int, int], int], note: Callable[[int, int], str]) -> None:
        axes = _panel(figure, 1, 3, place)
        for row in range(rows):
            for column in range(columns):
                colour = theme.ranks[holder(row, column)]
                axes.add_patch(Rectangle((column, -row), 1, 1, facecolor=colour, edgecolor=theme.fill, linewidth=1.5))
                text = note(row, column)
                axes.text(column + 0.5, 0.5 - row, text, ha="center", va="center", color=theme.text, fontsize=8)
        axes.set(xlim=(-0.2, columns + 0.2), ylim=(-rows + 0.8, 2), aspect="equal")
        axes.set_title(title, color=theme.text, fontsize=10)

    draw(1, "before: columns over\n2 tensor ranks", holder_before, lambda row, column: "")
    draw(2, "after: elements over\n3 data ranks (ZeRO)", holder_after, lambda row, column: "")
    sent = sum(moved(row, column) for row in range(rows) for column in range(columns))
    title = f"{rows * columns - sent} stay, {sent} travel\n(from rank)"
    draw(3, title, holder_after, lambda row, column: str(holder_before(row, column)) if moved(row, column) else "")
    handles = [Patch(color=colour, label=f"rank {rank}") for rank, colour in enumerate(theme.ranks[:3])]
    figure.legend(handles=handles, loc="lower center", ncols=3, frameon=False, labelcolor=theme.text)
    figure.subplots_adjust(left=0.02, right=0.98, top=0.84, bottom=0.1)
    return figure


def transaction(theme: Theme) -> Figure:
    """A step of an elastic run: the way to the commit, and the way back."""
    figure = Figure(figsize=(7.6, 2.9))
    axes = _panel(figure)
    steps = ("committed\nstate s", "keep a copy\nof state s", "gradients,\nupdate", "copy to\nthe buddy", "agree")
    for place, text in enumerate(steps):
        colour = theme.ranks[2] if place == 0 else theme.fill
        _box(axes, 2.1 * place, 2, 1.65, 0.95, text, colour, theme)
        if place:
            _arrow(axes, (2.1 * place - 0.43, 2.47), (2.1 * place - 0.03, 2.47), theme.text)
    _box(axes, 10.5, 2, 1.65, 0.95, "committed\nstate s + 1", theme.ranks[2], theme)
    _arrow(axes, (10.07, 2.47), (10.47, 2.47), theme.text)
    axes.plot([2.1, 10.05], [1.78, 1.78], color=BAD, lw=1.4)
    axes.text(6.1, 1.52, "a rank dies anywhere here", ha="center", va="center", color=BAD, fontsize=9)
    way_back = "survivors go back to state s;\na buddy has the dead one's part"
    _box(axes, 3.6, 0.1, 5, 0.95, way_back, theme.fill, theme)
    _arrow(axes, (6.1, 1.33), (6.1, 1.08), BAD)
    _arrow(axes, (3.57, 0.57), (0.82, 1.97), theme.text, connectionstyle="angle,angleA=180,angleB=90,rad=8")
    axes.text(0.95, 0.75, "the step is\ntaken again", color=theme.text, fontsize=8.5)
    axes.set(xlim=(-0.1, 12.3), ylim=(-0.05, 3.1))
    figure.subplots_adjust(left=0.01, right=0.99, top=0.99, bottom=0.01)
    return figure


def tree(theme: Theme) -> Figure:
    """The sum of eight micro-batches along a tree, on three ranks and on two."""
    figure = Figure(figsize=(7.6, 2.9))
    for place, cuts in enumerate(((0, 3, 6, 8), (0, 4, 8))):
        axes = _panel(figure, 1, 2, place + 1)
        held = [next(rank for rank in range(len(cuts) - 1) if term < cuts[rank + 1]) for term in range(8)]
        level, width = [(term + 0.5, held[term]) for term in range(8)], 1
        height = 0.0
        for term, (x, rank) in enumerate(level):
            _box(axes, x - 0.4, -0.25, 0.8, 0.5, str(term), theme.ranks[rank], theme)
        while len(level) > 1:
            above = []
            for left, right in zip(level[::2], level[1::2], strict=True):
                x = (left[0] + right[0]) / 2
                owner = left[1] if left[1] == right[1] else -1
                for child in (left, right):
                    axes.plot([child[0], x], [height + 0.25, height + 0.85], color=theme.faint, lw=1.2, zorder=0)
                colour = theme.fill if owner < 0 else theme.ranks[owner]
                _box(axes, x - 0.4, height + 0.85, 0.8, 0.5, "+", colour, theme)
                above.append((x, owner))
            level, width, height = above, 2 * width, height + 1.1
        ranks = len(cuts) - 1
        axes.set_title(f"{ranks} ranks", color=theme.text, fontsize=10)
        axes.set(xlim=(-0.1, 8.1), ylim=(-0.4, 3.8))
    handles = [Patch(color=colour, label=f"on rank {rank}") for rank, colour in enumerate(theme.ranks[:3])]
    handles.append(Patch(color=theme.fill, label="after the exchange"))
    figure.legend(handles=handles, loc="lower center", ncols=4, frameon=False, labelcolor=theme.text, fontsize=9)
    figure.subplots_adjust(left=0.02, right=0.98, top=0.9, bottom=0.12)
    return figure


def _printed(command: str) -> Any:
    """What a command of mpishard prints as JSON."""
    from mpishard.cli import main

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main(command.split())
    if code:
        raise RuntimeError(f"mpishard {command} ended with code {code}")
    return json.loads(printed.getvalue())


def schedules(theme: Theme) -> Figure:
    """The four schedules for 4 stages and 8 micro-batches, times of F = I = W = 1 and B = 2."""
    colours = dict(zip("FBIW", (theme.ranks[0], theme.ranks[2], theme.ranks[2], theme.ranks[1]), strict=True))
    figure = Figure(figsize=(7.6, 7.2))
    for place, name in enumerate(("gpipe", "1f1b", "interleaved", "zb-h1")):
        plan = _printed(f"schedule {name} --stages 4 --microbatches 8 --json")
        chunks = plan["chunks"]
        axes = figure.add_subplot(4, 1, place + 1)
        axes.set_facecolor(theme.fill)
        for event in plan["events"]:
            start, stop = event["start"] / chunks, event["stop"] / chunks
            alpha = 1 - 0.45 * event["chunk"] / chunks
            axes.barh(
                event["rank"], stop - start, 0.88, left=start, color=colours[event["kind"]], alpha=alpha,
                edgecolor=theme.fill, linewidth=0.5,
            )  # fmt: skip
            if stop - start >= 1:
                x = (start + stop) / 2
                number = str(event["microbatch"])
                axes.text(x, event["rank"], number, ha="center", va="center", fontsize=6.5, color=theme.text)
        axes.set(xlim=(0, 33), ylim=(3.5, -0.5), yticks=range(4))
        axes.set_yticklabels([f"stage {stage}" for stage in range(4)], color=theme.text, fontsize=8)
        axes.tick_params(left=False, bottom=False, labelbottom=False)
        for side in axes.spines.values():
            side.set_visible(False)
        several = f", {chunks} chunks a rank" if chunks > 1 else ""
        kept = plan["peak_live"][0] / chunks
        title = f"{name}{several}: bubble {plan['bubble_fraction']:.1%}, stage 0 keeps {kept:g} micro-batches"
        axes.set_title(title, loc="left", color=theme.text, fontsize=9)
    kinds = ("forward", "F"), ("backward, or input gradient", "B"), ("weight gradient", "W")
    handles = [Patch(color=colours[kind], label=label) for label, kind in kinds]
    handles.append(Patch(color=theme.fill, label="idle"))
    figure.legend(handles=handles, loc="lower center", ncols=4, frameon=False, labelcolor=theme.text, fontsize=9)
    figure.subplots_adjust(left=0.09, right=0.99, top=0.96, bottom=0.06, hspace=0.35)
    return figure


def memory(theme: Theme) -> Figure:
    """What a rank holds under each strategy, by the README's table: AdamW in float32 on 8 data ranks."""
    figure = Figure(figsize=(7.2, 2.7))
    axes = figure.add_subplot()
    ranks, slots = 8, 2
    held = {
        "ZeRO-3": (1 / ranks, 1 / ranks, slots / ranks),
        "ZeRO-2": (1, 1 / ranks, slots / ranks),
        "ZeRO-1": (1, 1, slots / ranks),
        "DDP": (1, 1, slots),
    }
    parts = ("parameters", "gradients", "optimizer state")
    for row, sizes in enumerate(held.values()):
        left = 0.0
        for size, colour in zip(sizes, theme.ranks, strict=False):
            axes.barh(row, size, 0.6, left=left, color=colour)
            left += size
        axes.text(left + 0.05, row, f"{left:.4g} P", va="center", color=theme.text, fontsize=9)
    axes.set_yticks(range(len(held)), list(held), color=theme.text)
    axes.set_xlabel("bytes a rank, in units of the parameters P, without buckets and gathered blocks", color=theme.text)
    axes.tick_params(left=False, colors=theme.text)
    axes.set_xlim(0, 4.6)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(theme.faint)
    handles = [Patch(color=colour, label=part) for part, colour in zip(parts, theme.ranks, strict=False)]
    axes.legend(handles=handles, loc="lower right", frameon=False, labelcolor=theme.text)
    figure.subplots_adjust(left=0.1, right=0.98, top=0.97, bottom=0.2)
    return figure


@cache
def _shown(page: str, before: str = "") -> dict[str, Any]:
    """What the program of a page has computed when it is over, or come to the heading `before`."""
    path = DOCS / page
    stop = path.read_text("utf-8").splitlines().index(before) if before else None
    source = "\n".join(program(path).splitlines()[:stop])
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir(stack.enter_context(tempfile.TemporaryDirectory())))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        exec(compile(source, str(path), "exec"), found := {})
    return found


def _example(name: str) -> Any:
    """A script of examples/ as a module."""
    folder = str(DOCS.parent / "examples")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


def _curves(figure: Figure, x: str, y: str, theme: Theme, *position: int) -> Axes:
    """A drawing area for curves, with names on its axes."""
    axes = figure.add_subplot(*position)
    axes.set_facecolor("none")
    axes.set_xlabel(x, color=theme.text)
    axes.set_ylabel(y, color=theme.text)
    axes.tick_params(which="both", colors=theme.text)
    for side, line in axes.spines.items():
        line.set_visible(side in ("bottom", "left"))
        line.set_color(theme.faint)
    return axes


def _fields(theme: Theme, fields: dict[str, Any], size: tuple[float, float], label: str, **options: Any) -> Figure:
    """Two-dimensional fields side by side on one scale, that of the first."""
    figure = Figure(figsize=size, layout="constrained")
    first = next(iter(fields.values()))
    axes = figure.subplots(1, len(fields), sharey=True)
    for axis, (title, field) in zip(axes, fields.items(), strict=True):
        image = axis.imshow(field, vmin=first.min(), vmax=first.max(), cmap="viridis", **options)
        axis.set_title(title, color=theme.text, fontsize=10)
        axis.set_axis_off()
    bar = figure.colorbar(image, ax=axes, shrink=0.8)
    bar.set_label(label, color=theme.text)
    bar.ax.tick_params(colors=theme.text)
    return figure


def heat(theme: Theme) -> Figure:
    """The rod of the tutorial, true and recovered, by the program that its page shows."""
    shown = _shown("tutorials/heat.md")
    figure = Figure(figsize=(7.2, 2.6))
    axes = _curves(figure, "place on the rod", "log k", theme)
    axes.step(shown["x"], shown["truth"], where="mid", color=theme.faint, lw=2, label="true")
    axes.plot(shown["x"], shown["result"].x, color=BAD, lw=2, label="recovered")
    axes.plot(shown["x"][shown["sensors"]], [-1.15] * 12, "^", color=theme.text, ms=5, label="sensor")
    axes.legend(loc="upper right", frameon=False, labelcolor=theme.text)
    figure.subplots_adjust(left=0.09, right=0.99, top=0.98, bottom=0.19)
    return figure


@cache
def _plate() -> tuple[Any, Any]:
    """The experiments of the example on a small plate, and what L-BFGS-B recovers."""
    example = _example("own_gradient")
    heat = example.HeatExperiments(n=32, experiments=24, noise=0.05, smoothness=300.0, seed=0)
    problem = mpishard.OptimizationProblem(
        heat.loss_and_gradient, np.zeros(heat.truth.size), samples=24, batch_size=24, steps=60
    )
    with mpishard.Mesh() as mesh:
        optimizer = mpishard.as_distributed(example.METHODS["l-bfgs-b"], mesh)
        return heat, optimizer.optimize(problem, progress=False).parameters


def plate(theme: Theme) -> Figure:
    """The diffusivity of a plate, true and recovered."""
    heat, found = _plate()
    fields = {"true": heat.truth, f"recovered, {heat.error(found):.0%} off": found}
    images = {title: np.exp(field).reshape(heat.n, heat.n) for title, field in fields.items()}
    return _fields(theme, images, (7.2, 3.2), "diffusivity", origin="lower")


@cache
def _sea() -> tuple[Any, Any]:
    """The example under the sea with 8 shots and two bands: its module, and the last stage."""
    example = _example("seismic_inversion")
    sound = example.Sound(example.SHAPE, example.SPACING, example.TIME_STEP)
    survey = example.Survey.at_sea(sound, shots=8, noise=0.02, seed=0)
    with mpishard.Mesh() as mesh:
        stages = example.invert(mesh, survey, [(3.0, 10), (6.0, 15)], example.undisturbed, show=False)
    return example, stages[-1].velocity


def sea(theme: Theme) -> Figure:
    """The speed of sound under the sea: true, at the start, and found."""
    example, found = _sea()
    fields = {"true": example.geology(), "start": example.start(), f"found, {example.error(found):.2f} km/s off": found}
    images = {title: field.reshape(example.SHAPE) for title, field in fields.items()}
    return _fields(theme, images, (7.6, 2.2), "km/s")


def _ground(figure: Figure, theme: Theme, titles: dict[str, Any], bars: dict[str, tuple[int, dict[str, Any]]]) -> None:
    """Images of the ground side by side; `bars` has for each scale its label, how many images have it, and how."""
    axes = figure.subplots(1, len(titles), sharey=True)
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title, color=theme.text, fontsize=10)
        axis.set_xlabel("across, m", color=theme.text)
        axis.set_xticks((0, 5, 10))
        axis.tick_params(colors=theme.text)
        for line in axis.spines.values():
            line.set_color(theme.faint)
    axes[0].set_ylabel("depth, m", color=theme.text)
    fields, first = list(titles.values()), 0
    for label, (count, how) in bars.items():
        for axis, field in zip(axes[first : first + count], fields[first : first + count], strict=True):
            image = axis.imshow(field, extent=(0, 10, 20, 0), **how)
        bar = figure.colorbar(image, ax=list(axes[first : first + count]), aspect=30)
        bar.set_label(label, color=theme.text)
        bar.ax.tick_params(colors=theme.text)
        first += count


def boreholes(theme: Theme) -> Figure:
    """The ground of the tutorial, true and most probable, and the standard deviation."""
    shown = _shown("tutorials/tomography.md")
    shape = shown["shape"]
    images = {"true": np.exp(-shown["truth"]), "most probable": np.exp(-shown["posterior"].x)}
    images["standard deviation"] = 100 * shown["deviation"]
    figure = Figure(figsize=(7.6, 4.4), layout="constrained")
    speed, error = {"vmin": 1.4, "vmax": 3.0, "cmap": "viridis"}, {"vmin": 5, "vmax": 12, "cmap": "magma"}
    fields = {title: field.reshape(shape) for title, field in images.items()}
    _ground(figure, theme, fields, {"km/s": (2, speed), "% of the speed": (1, error)})
    axis = figure.axes[2]
    for place, depths in ((0.25, shown["sources"]), (9.75, shown["receivers"])):
        axis.plot([place] * len(depths), depths, ".", color="#ffffff", ms=4)
    return figure


def grounds(theme: Theme) -> Figure:
    """Grounds that are possible before any reading, and after all."""
    shown = _shown("tutorials/tomography.md")
    images = {"from the prior": shown["guess"]}
    images |= {f"from the posterior, {number}": sample for number, sample in enumerate(shown["samples"], 1)}
    figure = Figure(figsize=(7.6, 4.4), layout="constrained")
    fields = {title: np.exp(-field).reshape(shown["shape"]) for title, field in images.items()}
    _ground(figure, theme, fields, {"km/s": (3, {"vmin": 1.4, "vmax": 3.0, "cmap": "viridis"})})
    return figure


def spectrum(theme: Theme) -> Figure:
    """The eigenvalues of the tutorial's posterior, and its error bars along a line."""
    shown = _shown("tutorials/tomography.md")
    posterior = shown["posterior"]
    figure = Figure(figsize=(7.6, 3.0), layout="constrained")
    axes = _curves(figure, "eigenvector", "eigenvalue", theme, 1, 2, 1)
    kept = len(posterior.eigenvalues)
    axes.semilogy(range(1, kept + 1), posterior.eigenvalues, ".", color=theme.ranks[0], label="kept")
    left_out = posterior.left_out
    axes.semilogy(range(kept + 1, kept + 1 + len(left_out)), left_out, ".", color=BAD, label="left out")
    axes.axhline(1, color=theme.faint, lw=1.2, linestyle="--")
    axes.text(0, 0.8, "as strong as the prior", color=theme.text, va="top", fontsize=8)
    axes.legend(loc="upper right", frameon=False, labelcolor=theme.text)
    axes = _curves(figure, "depth, m", "km/s", theme, 1, 2, 2)
    column, depth = shown["shape"][1] // 2, shown["down"][:, 0]
    middle, deviation = (each.reshape(shown["shape"])[:, column] for each in (posterior.x, shown["deviation"]))
    for mean, width, colour, label in (
        (shown["start"][0], 0.15, theme.faint, "prior"),
        (middle, deviation, theme.ranks[0], "posterior"),
    ):
        ends = (np.broadcast_to(np.exp(-mean + sign * width), depth.shape) for sign in (-2, 2))
        axes.fill_between(depth, *ends, color=colour, alpha=0.4, lw=0, label=f"{label}, 2 deviations")
    axes.plot(depth, np.exp(-middle), color=theme.ranks[0], lw=2, label="most probable")
    axes.step(depth, np.exp(-shown["truth"].reshape(shown["shape"])[:, column]), where="mid", color=BAD, label="true")
    axes.set_ylim(1.2, 3.9)
    axes.legend(loc="upper left", ncols=2, frameon=False, labelcolor=theme.text, fontsize=8)
    return figure


def corner(theme: Theme) -> Figure:
    """The L-curve of the guide, with its corner."""
    shown = _shown("how-to/many-runs.md")
    figure = Figure(figsize=(7.2, 2.8))
    axes = _curves(figure, "misfit", "roughness", theme)
    points = list(zip(shown["weights"], shown["misfits"], shown["rough"], strict=True))
    axes.loglog(shown["misfits"], shown["rough"], "o-", color=theme.ranks[0], lw=2, zorder=1)
    for place, (weight, misfit, rough) in enumerate(points):
        is_corner = place == shown["curve"].corner
        axes.annotate(
            f"{weight:g}" + (", the corner" if is_corner else ""), (misfit, rough), xytext=(7, 4),
            textcoords="offset points", color=BAD if is_corner else theme.text,
        )  # fmt: skip
    figure.subplots_adjust(left=0.15, right=0.95, top=0.93, bottom=0.18)
    return figure


def outliers(theme: Theme) -> Figure:
    """The readings of the guide, every tenth of which is wrong, and the fits with and without a robust loss."""
    shown = _shown("how-to/least-squares.md")
    times, measured, jacobian = shown["times"], shown["measured"], shown["jacobian"]
    squares = mpishard.least_squares(shown["residuals"], [1, 1, 1], jacobian, bounds=(0, 10))
    figure = Figure(figsize=(7.2, 2.6))
    axes = _curves(figure, "time", "reading", theme)
    axes.plot(times, measured, ".", color=theme.faint, ms=5, label="measured")
    for fit, colour, label in ((squares, theme.ranks[1], "squares"), (shown["fit"], BAD, "Cauchy's loss")):
        axes.plot(times, shown["residuals"](fit.x) + measured, color=colour, lw=2, label=label)
    axes.legend(loc="upper right", frameon=False, labelcolor=theme.text)
    figure.subplots_adjust(left=0.09, right=0.99, top=0.98, bottom=0.19)
    return figure


def text(theme: Theme) -> Figure:
    """The loss of the tutorial's transformer, step by step."""
    losses = _shown("tutorials/transformer.md", before="## Three dimensions")["result"].loss_history
    figure = Figure(figsize=(7.2, 2.6))
    axes = _curves(figure, "step", "nats per byte", theme)
    axes.plot(range(1, len(losses) + 1), losses, color=BAD, lw=2)
    axes.axhline(math.log(256), color=theme.faint, lw=1.2, linestyle="--")
    axes.text(len(losses), math.log(256) - 0.06, "ln 256", color=theme.text, ha="right", va="top")
    figure.subplots_adjust(left=0.09, right=0.99, top=0.96, bottom=0.19)
    return figure


def slabs(theme: Theme) -> Figure:
    """A field of 12 rows on three ranks, and the rows that neighbours send."""
    figure = Figure(figsize=(7.2, 2.9))
    axes = _panel(figure)
    for rank in range(3):
        left = 4.3 * rank
        for row in range(-1, 5):
            halo = row in (-1, 4)
            if 0 <= 4 * rank + row < 12:
                owner = rank + (row > 3) - (row < 0)
                _box(axes, left, 4 - row, 2.6, 0.8, f"row {4 * rank + row}", theme.ranks[owner], theme)
                if halo:
                    edge = {"fill": False, "edgecolor": theme.text, "linestyle": "--", "linewidth": 1.2}
                    axes.add_patch(Rectangle((left, 4 - row), 2.6, 0.8, **edge))
        axes.text(left + 1.3, -0.75, f"rank {rank}: [{4 * rank}, {4 * rank + 4})", ha="center", color=theme.text)
    for rank in range(2):
        right = 4.3 * rank + 2.65
        _arrow(axes, (right, 1.4), (right + 1.6, 5.4), theme.text)
        _arrow(axes, (right + 1.6, 4.4), (right, 0.4), theme.text)
    axes.set(xlim=(-0.1, 11.4), ylim=(-1.1, 6))
    figure.subplots_adjust(left=0.01, right=0.99, top=0.99, bottom=0.01)
    return figure


PICTURES = (mesh, layouts, transaction, tree, schedules, memory, slabs)
GALLERY = (heat, plate, sea, boreholes, grounds, spectrum, corner, outliers, text)


def draw(folder: Path) -> Iterator[Path]:
    """Write all pictures as SVG, with transparent background."""
    folder.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": "mpishard", "svg.fonttype": "none", "font.family": "sans-serif"}):
        for picture in (*PICTURES, *GALLERY):
            for theme in (LIGHT, DARK):
                path = folder / f"{picture.__name__}-{theme.name}.svg"
                picture(theme).savefig(path, transparent=True, metadata={"Date": None})
                yield path


def setup(app: Any) -> dict[str, bool]:
    """Sphinx: draw the pictures next to the pages that show them, before these are read."""
    app.connect("builder-inited", lambda app: list(draw(Path(app.srcdir) / "pictures")))
    return {"parallel_read_safe": True}


if __name__ == "__main__":
    for written in draw(Path(sys.argv[1])):
        print(written)
