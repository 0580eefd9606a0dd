"""``mpishard why``: where the ranks of a run are, who waits for whom, and who is missing."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mpishard.arguments import printable
from mpishard.record.follower import Follower
from mpishard.record.reading import check_record
from mpishard.record.stacks import ask, diagnose
from mpishard.watch.diagnosis import Finding, report
from mpishard.watch.diagnosis import diagnose as diagnose_program
from mpishard.watch.folder import FOLDER, START, Asked
from mpishard.watch.folder import ask as ask_program
from mpishard.watch.outside import look
from mpishard.watch.sampler import RUNS

_BETWEEN_S = 2.0  # between two looks at a process that nobody watches
_MOST = 16  # ranks of one kind that are listed one by one


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
    of mpi4py.  After the end of a run that was stuck it shows what the processes said while they waited.
    With --pid it looks at the ranks that a launcher on this host has started.
    """
    if pid is not None or run is None or (run / START).exists():
        if pid is not None and run is not None:
            raise ValueError(f"give {run} or --pid {pid}, not both")
        _of_program(look(pid, min(wait, _BETWEEN_S)) if pid else ask_program(run or FOLDER, wait), as_json)
        return
    if not run.exists():
        raise ValueError(
            f"{run} does not exist; give what python -m mpishard.watch named when it began, or a run's record"
        )
    check_record(run)
    asked = ask(run, wait)
    findings = diagnose(asked.answers, asked.silent)
    if as_json:
        shown = {
            "fresh": asked.fresh,
            "ending": asked.ending,
            "findings": list(map(asdict, findings)),
            "answers": asked.answers,
        }
        typer.echo(json.dumps(shown))
        return
    if asked.ending and not any(finding.kind == "waits" for finding in findings):
        typer.echo(printable(f"the run has ended: {asked.ending}{_newest_checkpoint(run)}"))
        return
    if asked.answers and not asked.fresh:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(asked.answers[-1]["time"]))
        typer.echo(f"nobody answers now; at {when} they said:")
    elif not asked.answers:
        typer.echo("nobody answers, and nobody was asked before: the run has ended, or its hosts are lost")
    elif all(finding.kind == "runs" for finding in findings):
        typer.echo("no rank has waited for long: the run continues, or computes")
    for line in _lines(findings):
        typer.echo(printable(line))


def _of_program(asked: Asked, as_json: bool) -> None:
    """Print where the ranks of any program of mpi4py are, and why they do not go on."""
    if as_json:
        causes = diagnose_program(asked.answers, asked.absent, asked.ranks)
        shown = {"findings": list(map(asdict, causes)), "answers": asked.answers, "absent": asked.absent}
        typer.echo(json.dumps(shown))
        return
    if asked.is_over:
        typer.echo("the job has ended; what its ranks said last:")
    lines = report(asked.answers, asked.absent, asked.ranks)
    killed = [str(each["rank"]) for each in asked.answers if each["state"] == RUNS]
    if asked.is_over and killed and not diagnose_program(asked.answers, asked.absent, asked.ranks):
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


def _lines(findings: list[Finding]) -> list[str]:
    shown_by_kind: dict[str, int] = {}
    lines = []
    for finding in findings:
        shown_by_kind[finding.kind] = shown_by_kind.get(finding.kind, 0) + 1
        if shown_by_kind[finding.kind] <= _MOST:
            several = len(finding.ranks) > 1
            lines.append(f"rank{'s' if several else ''} {', '.join(map(str, finding.ranks))} {finding.text}")
    hidden = {kind: count - _MOST for kind, count in shown_by_kind.items() if count > _MOST}
    return lines + [f"... and {count} more ({kind})" for kind, count in hidden.items()]
