"""``mpishard plot``: a picture of a run, from its record."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from mpishard.cli.arguments import RecordFolder
from mpishard.record import Run
from mpishard.record.summary import spent


def plot(
    run: RecordFolder,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Default: run.png in that folder.")] = None,
    log: Annotated[bool, typer.Option("--log", help="The loss on a logarithmic axis.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="What would be drawn, as data; no picture.")] = False,
) -> None:
    """Draw a run: loss, learning rate, gradient norm, speed, workers, time by phase, bytes by axis.

    And each series that record.log(step, name=value) was given; one whose name ends in "loss" is drawn with the loss.

    Of a run that goes on, what there is so far.  The record is written by optimize(problem,
    record=mpishard.RunRecord(folder, mesh)).
    """
    found = Run.read(run)
    if not len(found.metrics["step"]):
        raise ValueError(f"{run} has no step yet; try again when the run has taken some")
    if as_json:
        typer.echo(json.dumps(_data(found)))
        return
    path = output or run / "run.png"
    from mpishard.cli.plot_figure import draw

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
