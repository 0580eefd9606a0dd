"""``mpishard top``: a run in progress, live, from its record."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated

import typer
from rich.live import Live

from mpishard.cli.arguments import RecordFolder
from mpishard.cli.estimate_text import console
from mpishard.cli.top_text import screen, snapshot
from mpishard.record.following import Follower
from mpishard.record.reading import check_record


def top(
    run: RecordFolder,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once; also where the output is no terminal.")] = False,
    rows: Annotated[int, typer.Option(min=1, help="Most ranks to show: those that compute longest.")] = 32,
    as_json: Annotated[bool, typer.Option("--json", help="One look, as data.")] = False,
) -> None:
    """Show live how a run stands, and what its ranks spend time on.

    Step, loss, speed, time to go, and for each rank how much of a step it computes and how much it waits in which axis;
    stragglers are named, and ranks that have gone silent.

    The record is written by optimize(problem, record=mpishard.RunRecord(folder, mesh)).  Ctrl-C ends the view, not the
    run.
    """
    check_record(run)
    follower = Follower(run)
    follower.update()
    if as_json:
        typer.echo(json.dumps(snapshot(follower)))
        return
    output = console()
    if once or not sys.stdout.isatty():
        output.print(screen(follower, rows))
        return
    try:
        with Live(screen(follower, rows), console=output, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(every)
                follower.update()
                live.update(screen(follower, min(rows, max(1, output.height - 12))), refresh=True)
    except KeyboardInterrupt:
        output.print(screen(follower, rows))
