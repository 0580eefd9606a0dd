"""``mpishard why``: where the ranks of a run are, who waits for whom, and who is missing."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mpishard.arguments import printable
from mpishard.record import stacks
from mpishard.record.follower import Follower
from mpishard.record.reading import check_record
from mpishard.watch.diagnosis import diagnose, report
from mpishard.watch.folder import FOLDER, START, Asked, ask, jobs, read_folder
from mpishard.watch.outside import look
from mpishard.watch.sampler import RUNS, WAITS

_BETWEEN_S = 2.0  # between two looks at a process that nobody watches
_MOST = 8  # other jobs in the folder that are looked at


def why(
    run: Annotated[
        Path | None, typer.Argument(metavar="FOLDER", help=f"A run's record, or what --watch wrote; {FOLDER}.")
    ] = None,
    wait: Annotated[float, typer.Option(min=0, help="Seconds that processes get; 0: what they said last.")] = 3.0,
    pid: Annotated[
        int | None, typer.Option(min=1, help="A launcher or a rank that nobody watches; needs py-spy.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Findings and all answers, as data.")] = False,
) -> None:
    """Say why a run hangs: which ranks wait, where, and for whom.

    Who waits in which collective, who is missing there, and what that one does instead.
    Asks every process through the folder of the record, written by optimize(problem,
    record=mpishard.RunRecord(folder, mesh)), or of mpishard run --watch and python -m mpishard.watch, for any program
    of mpi4py; of several jobs in one folder the newest.  After the end of a run that was stuck it shows what the
    processes said while they waited.
    With --pid it looks at the ranks that a launcher on this host has started.
    """
    if pid is not None:
        if run is not None:
            raise ValueError(f"give {run} or --pid {pid}, not both")
        _show(look(pid, min(wait, _BETWEEN_S)), as_json)
        return
    folder = FOLDER if run is None else run
    if not folder.exists():
        raise ValueError(
            f"{folder} does not exist; give what python -m mpishard.watch named when it began, or a run's record"
        )
    if run is None or (folder / START).exists() or any(folder.glob(f"*/{START}")):
        newest, *older = jobs(folder)
        others = [str(job) for job in older[:_MOST] if _runs(job)]
        if others and not as_json:
            typer.echo(printable(f"{newest} is the newest job here; others run: {', '.join(others)}"))
        _show(ask(newest, wait), as_json)
        return
    check_record(folder)
    asked, ending = stacks.ask(folder, wait)
    if ending and not as_json and all(answer["state"] != WAITS for answer in asked.answers):
        typer.echo(printable(f"the run has ended: {ending}{_newest_checkpoint(folder)}"))
    else:
        _show(asked, as_json, ending)


def _runs(job: Path) -> bool:
    """Return True if a watched job has ranks that may run."""
    try:
        asked = read_folder(job)
    except (OSError, ValueError):  # a damaged one
        return False
    return not asked.is_over and any(answer["state"] in (RUNS, WAITS) for answer in asked.answers)


def _show(asked: Asked, as_json: bool, ending: str = "") -> None:
    """Print where the ranks of a job are, and why they do not go on."""
    causes = diagnose(asked.answers, asked.absent, asked.ranks)
    if as_json:
        found = {"fresh": not asked.is_over, "ending": ending, "findings": list(map(asdict, causes))}
        typer.echo(json.dumps(found | {"answers": asked.answers, "absent": asked.absent}))
        return
    lines = report(asked.answers, asked.absent, asked.ranks)
    if asked.is_over:
        when = max((answer["time"] for answer in asked.answers), default=0.0)
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))
        lines.insert(0, f"nobody answers now; {f'at {at} they said' if when else 'nobody was asked before'}:")
        killed = [str(each["rank"]) for each in asked.answers if each["state"] == RUNS]
        if killed and not causes:
            lines[-1] = (
                f"ranks that have not noted their end, as they were killed or the host was lost: {', '.join(killed)}"
            )
    for line in lines:
        typer.echo(printable(line))


def _newest_checkpoint(run: Path) -> str:
    """A text for the newest checkpoint of a run that has not ended in order; empty without one."""
    follower = Follower(run)
    follower.update()
    folder = follower.start.get("checkpoints")
    if follower.ended_in_order or not isinstance(folder, str):
        return ""
    from mpishard.checkpoint.folder import candidates

    found = [each for each in candidates(Path(folder)) if each.manifest is not None]
    newest = f"the newest is of step {found[0].manifest.step}" if found and found[0].manifest else "there is none"
    return f"; of its checkpoints in {folder} {newest}"
