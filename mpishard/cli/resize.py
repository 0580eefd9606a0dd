"""``mpishard resize``: request another number of workers for a run in progress."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mpishard.elastic.control import request_resize


def resize(
    run: Annotated[Path, typer.Argument(metavar="FOLDER", help="That of its checkpoints, or ElasticOptimizer's own.")],
    workers: Annotated[int, typer.Argument(min=1, help="How many shall train.")],
    wait: Annotated[float, typer.Option(min=0, help="Most seconds until the run has taken it over.")] = 60.0,
) -> None:
    """Let a run that goes on have another number of workers.

    \b
    mpishard resize checkpoints/ 4

    Only the user who started the run can.  The run takes the request over between two steps.
    """
    answer = request_resize(run, workers, wait)
    text = f"{run}: {answer.before} -> {answer.after} workers after step {answer.step}"
    if answer.after != workers:
        text += f"; there are not processes enough for {workers}, and no more could be spawned: see what the run prints"
    typer.echo(text)
