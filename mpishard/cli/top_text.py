"""One screen of a run in progress."""

from __future__ import annotations

import math
import statistics
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from mpishard.cli.estimate_text import new_table, seconds, size
from mpishard.record.following import Follower
from mpishard.record.reading import Process

_RECENT = 20  # steps that figures are means of
_SILENT_S, _SILENT_STEPS = 10.0, 5  # more of both is worth a word


def screen(run: Follower, rows: int) -> Group:
    """How the run stands now, with at most so many rows of ranks: those that compute longest come first."""
    processes = run.processes
    parts: list[Any] = [_headline(run), *_remarks(run, processes)]
    if processes:
        shown = sorted(processes, key=lambda process: -_busy(process))[:rows]
        parts.append(_table(run, sorted(shown, key=lambda process: process.lines[-1]["rank"])))
        if len(shown) < len(processes):
            parts.append(Text(f"the {len(shown)} of {len(processes)} ranks that compute longest"))
    return Group(*parts)


def snapshot(run: Follower) -> dict[str, Any]:
    """The same as data."""
    return {
        "start": run.start,
        "metrics": run.metrics[-1] if run.metrics else None,
        "ranks": [
            {
                "rank": process.lines[-1]["rank"],
                "process": process.name,
                "step": _last_step(process),
                "seconds": _mean(process, "seconds"),
                "busy": _busy(process),
                "silent": run.silent(process),
            }
            for process in run.processes
        ],
        "stragglers": [
            {"rank": slow.rank, "host": slow.host, "busy": slow.busy, "median": slow.median} for slow in run.stragglers
        ],
    }


def _headline(run: Follower) -> Text:
    if not run.metrics:
        return Text(f"{run.folder}: no step yet")
    last = run.metrics[-1]
    problem = run.start.get("problem", {})
    steps = problem.get("steps")
    recent = [line["seconds"] for line in list(run.metrics)[-_RECENT:]]
    step_s = statistics.median(recent)
    told = [f"step {last['step']}" + (f" of {steps}" if steps else "")]
    if last.get("loss") is not None:
        told.append(f"loss {last['loss']:.4g}")
    told.append(f"{seconds(step_s)} a step")
    terms = problem.get("batch_size", 0) * problem.get("tokens_per_sample", 1)
    if terms and step_s > 0:
        what = "tokens" if problem.get("tokens_per_sample", 1) > 1 else "samples"
        told.append(f"{terms / step_s:,.0f} {what}/s")
    told.append(f"{last['workers']} workers")
    if steps and last["step"] < steps:
        told.append(f"{_clock((steps - last['step']) * step_s)} to go")
    return Text(f"{run.folder}: " + ", ".join(told))


def _remarks(run: Follower, processes: list[Process]) -> list[Text]:
    remarks = [Text(f"straggler: {slow}", style="yellow") for slow in run.stragglers]
    for process in processes:
        silent, usual = run.silent(process), _mean(process, "seconds")
        if silent > max(_SILENT_S, _SILENT_STEPS * usual) and not _is_over(run):
            rank = process.lines[-1]["rank"]
            remarks.append(Text(f"silent: rank {rank} ({process.name}) for {_clock(silent)}", style="red"))
    return remarks


def _is_over(run: Follower) -> bool:
    steps = run.start.get("problem", {}).get("steps")
    return bool(steps and run.metrics and run.metrics[-1]["step"] >= steps)


def _table(run: Follower, processes: list[Process]) -> Table:
    axes = [axis for axis in ("data", "tensor", "pipeline", "world") if any(_waits(p, axis) for p in processes)]
    heads = [f"in {axis}" for axis in axes]
    made = new_table("rank", "process", "step", "ms/step", "computes", *heads, "sent/step", "written", left=2)
    for process in processes:
        last = process.lines[-1]
        whole = _mean(process, "seconds")
        shares = [_waits(process, axis) / whole if whole else 0.0 for axis in axes]
        made.add_row(
            str(last["rank"]),
            process.name,
            str(_last_step(process)),
            f"{whole * 1e3:.4g}",
            f"{_busy(process) / whole:.0%}" if whole else "-",
            *(f"{share:.0%}" for share in shares),
            size(sum(told["bytes"] for told in last["axes"].values()) / max(1, len(last["seconds"]))),
            f"{_clock(run.silent(process))} ago",
        )
    return made


def _last_step(process: Process) -> int:
    last = process.lines[-1]
    return max(0, int(last["step"]) + len(last["seconds"]) - 1)


def _mean(process: Process, what: str) -> float:
    values = process.by_step(what)[1][-_RECENT:]
    return float(values.mean()) if len(values) else math.nan


def _busy(process: Process) -> float:
    return _mean(process, "busy")


def _waits(process: Process, axis: str) -> float:
    """Seconds a step inside the collectives of an axis, over the last line."""
    last = process.lines[-1]
    spent = float(last["axes"].get(axis, {}).get("seconds", 0.0))
    return spent / max(1, len(last["seconds"]))


def _clock(duration: float) -> str:
    if duration < 100:
        return f"{duration:.0f} s"
    minutes, _ = divmod(round(duration), 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"
