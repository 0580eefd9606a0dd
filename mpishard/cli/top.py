"""``mpishard top``: a run in progress, live, from its record."""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mpishard.arguments import listed
from mpishard.cli.output import RecordFolder, cell, console, new_table, print_table, seconds, size
from mpishard.data.evaluation import EarlyStopping
from mpishard.environment.findings import count
from mpishard.launch.processes import state_here
from mpishard.record.audits import described
from mpishard.record.follower import Follower
from mpishard.record.reading import VALIDATION, Process, check_record

_RECENT = 20  # steps that figures are means of
_MOST_REMARKS, _MOST_NAMED = 3, 8
# A remark is shown if no line of a process (_SILENT_S), or no step of the run (_LATE_S), has come for this many seconds
# and for _SILENT_STEPS steps' time, both beyond the interval between two writes of the record.
_SILENT_S, _LATE_S, _SILENT_STEPS = 10.0, 2.0, 5


def screen(run: Follower, rows: int, width: float = math.inf) -> Group:
    """The current state of the run, with at most `rows` rows of ranks: those that compute longest come first.

    `width`: of a terminal whose lines cannot wrap; what does not fit is left out.
    """
    processes = run.processes
    found = [line for line in run.findings if line.get("start") == run.number][-_MOST_REMARKS:]
    texts = [*map(described, found), run.audit_damage]
    audits = [cell(f"audit: {text}", style="red") for text in texts if text]
    parts: list[Any] = [_headline(run), *_logged(run), *audits, *_remarks(run, processes)]
    if processes:
        busiest = sorted(processes, key=lambda process: -_busy(process))[:rows]
        parts.append(_table(run, sorted(busiest, key=lambda process: process.lines[-1]["rank"]), width))
        if len(busiest) < len(processes):
            parts.append(cell(f"the {len(busiest)} of {len(processes)} ranks that compute longest"))
    return Group(*parts)


def snapshot(run: Follower) -> dict[str, Any]:
    """The same as data."""
    best = run.best_validation
    return {
        "start": run.start,
        "ending": run.ending,
        "metrics": run.metrics[-1] if run.metrics else None,
        "logged": {name: {"step": step, "value": value} for name, (step, value) in run.logged.items()},
        "best_validation": None if best is None else {"step": best[0], "value": best[1]},
        "ranks": [
            {
                "rank": process.lines[-1]["rank"],
                "process": process.name,
                "step": _last_step(process),
                "seconds": _known(_mean(process, "seconds")),
                "busy": _known(_busy(process)),
                "silent": run.silent(process),
            }
            for process in run.processes
        ],
        "stragglers": [
            {"rank": slow.rank, "host": slow.host, "busy": slow.busy, "median": slow.median} for slow in run.stragglers
        ],
        "audit_findings": run.findings,
        "audit_damage": run.audit_damage,
    }


def _headline(run: Follower) -> Text:
    if not run.last_step:
        return cell(f"{run.folder}: no step yet")
    own = run.own_metrics
    last = run.metrics[-1] if run.metrics else {}
    problem = run.start.get("problem", {})
    step_s, left = run.step_seconds, (run.steps or 0) - run.last_step
    figures = [f"step {run.last_step}" + (f" of {run.steps}" if left >= 0 else "")]
    if last.get("iteration") is not None:
        figures.append(f"iteration {last['iteration']}")
    if last.get("loss") is not None:
        figures.append(f"{'value' if run.is_minimization else 'loss'} {last['loss']:.4g}")
    if step_s:
        figures.append(f"{seconds(step_s)} a step")
    terms = problem.get("batch_size", 0) * problem.get("tokens_per_sample", 1)
    if terms and step_s:
        what = "tokens" if problem.get("tokens_per_sample", 1) > 1 else "samples"
        figures.append(f"{terms / step_s:,.0f} {what}/s")
    if own and own[-1].get("workers"):
        figures.append(count(own[-1]["workers"], "rank" if run.is_minimization else "worker"))
    if not run.ending:
        waited = time.time() - own[-1].get("time", math.inf) if own else 0.0
        if waited > max(_LATE_S, _SILENT_STEPS * step_s) + run.start.get("every", 0):
            figures.append(f"no step for {_clock(waited)}")
        elif left > 0 and step_s:
            figures.append(f"{_clock(max(1.0, left * step_s))} to go")
    return cell(f"{run.folder}: " + ", ".join(figures))


def _logged(run: Follower) -> list[Text]:
    """The newest value of each series that the script logs, a few per line."""
    values = [
        f"{name} {'NaN' if value is None else f'{value:.4g}'} at step {step}{_best(run) if name == VALIDATION else ''}"
        for name, (step, value) in run.logged.items()
    ]
    return [cell(listed(values, _MOST_NAMED))] if values else []


def _best(run: Follower) -> str:
    """The lowest validation loss with its step, and how long a run that stops early has waited for a better one."""
    if run.best_validation is None:
        return ""
    step, loss = run.best_validation
    given = run.start.get("stop_early")
    if not given:
        return f" (best {loss:.4g} at step {step})"
    stops = EarlyStopping(given["patience"], given["min_delta"])
    waited = stops.waited(each for _, each in run.validated)
    return f" (best {loss:.4g} at step {step}, {waited} of {stops.patience} without a better one)"


def _remarks(run: Follower, processes: list[Process]) -> list[Text]:
    if run.ending:
        return [cell(f"ended: {run.ending}")]
    remarks = [cell(f"straggler: {slow}", style="yellow") for slow in run.stragglers[:_MOST_REMARKS]]
    silent = [
        process
        for process in processes
        if run.silent(process)
        > max(_SILENT_S, _SILENT_STEPS * (_known(_mean(process, "seconds")) or 0.0)) + run.start.get("every", 0)
    ]
    states = {process.name: state_here(process.name) for process in silent}
    named = [process for process in silent if states[process.name]][:_MOST_REMARKS]
    for process in named:
        who = f"rank {process.lines[-1]['rank']} ({process.name}) for {_clock(run.silent(process))}"
        remarks.append(cell(f"silent: {who}: it {states[process.name]}", style="red"))
    others = [process for process in silent if process not in named]
    if others:
        ranks = listed((process.lines[-1]["rank"] for process in others), _MOST_NAMED)
        clock = _clock(min(map(run.silent, others)))
        remarks.append(cell(f"silent: rank{'s' if len(others) > 1 else ''} {ranks} for {clock}", style="red"))
    if silent:
        remarks.append(cell(f"mpishard why {run.folder} shows who waits for whom"))
    return remarks


def _table(run: Follower, processes: list[Process], width: float) -> Table:
    """Means over the last lines of each process, all over the same steps; without last columns wider than `width`."""
    recent = {process.name: _recent(process) for process in processes}
    axes = [axis for axis in ("data", "tensor", "pipeline", "world") if any(axis in r.axes for r in recent.values())]
    heads = ["rank", "process", "step", "ms/step", "computes", *(f"in {axis}" for axis in axes), "sent/step", "written"]
    rows: list[list[str | Text]] = []
    for process in processes:
        of = recent[process.name]
        shares = [of.busy, *(of.axes.get(axis, 0.0) for axis in axes)]
        rows.append(
            [
                str(process.lines[-1]["rank"]),
                cell(process.name),
                str(_last_step(process) or "-"),
                f"{of.seconds / of.steps * 1e3:.4g}" if of.steps else "-",
                *(f"{share / of.seconds:.0%}" if of.seconds else "-" for share in shares),
                size(of.sent / of.steps) if of.steps else "-",
                f"{_clock(run.silent(process))} ago",
            ]
        )
    widths = [2 + max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    while sum(widths) > width + 2 and len(widths) > 1:
        widths.pop()
    made = new_table(*heads[: len(widths)], left=2)
    for row in rows:
        made.add_row(*row[: len(widths)])
    return made


@dataclass(frozen=True)
class _Recent:
    """Sums over the last steps of a process: seconds, and bytes sent."""

    steps: int
    seconds: float
    busy: float
    axes: dict[str, float]
    sent: int


def _recent(process: Process) -> _Recent:
    """Sums over the last lines that together have `_RECENT` steps; a line holds several steps."""
    steps = seconds = busy = sent = 0
    axes: dict[str, float] = {}
    for line in reversed(process.lines):
        steps += len(line["seconds"])
        seconds += sum(line["seconds"])
        busy += sum(line["busy"])
        for axis, spent in line["axes"].items():
            axes[axis] = axes.get(axis, 0.0) + spent["seconds"]
            sent += spent["bytes"]
        if steps >= _RECENT:
            break
    return _Recent(steps, seconds, busy, axes, sent)


def _last_step(process: Process) -> int:
    last = process.lines[-1]
    return max(0, int(last["step"]) + len(last["seconds"]) - 1)


def _mean(process: Process, what: str) -> float:
    values = process.by_step(what)[1][-_RECENT:]
    return float(values.mean()) if len(values) else math.nan


def _busy(process: Process) -> float:
    return _mean(process, "busy")


def _known(value: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(value) else value


def _clock(duration: float) -> str:
    if duration < 100:
        return f"{duration:.0f} s"
    minutes, _ = divmod(round(duration), 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"


def _print(output: Console, shown: Group) -> None:
    """Print a screen once; in a terminal that is too narrow, lines of its table wrap."""
    for part in shown.renderables:
        if isinstance(part, Table):
            print_table(output, part)
        else:
            output.print(part)


def top(
    run: RecordFolder,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once; also where the output is no terminal.")] = False,
    rows: Annotated[int, typer.Option(min=1, help="Most ranks to show: those that compute longest.")] = 32,
    as_json: Annotated[bool, typer.Option("--json", help="One look, as data.")] = False,
) -> None:
    """Show live how a run stands, and what its ranks spend time on.

    Step, loss or value, speed, time to go, and for each rank how much of a step it computes and how much it waits in
    which axis; stragglers are named, and ranks that have gone silent.

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
    if once or not sys.stdout.isatty() or output.is_dumb_terminal:  # there `Live` would show nothing
        _print(output, screen(follower, rows))
        return
    try:
        with Live(screen(follower, rows, output.width), console=output, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(every)
                follower.update()
                live.update(screen(follower, min(rows, max(1, output.height - 12)), output.width), refresh=True)
    except KeyboardInterrupt:
        _print(output, screen(follower, rows))
