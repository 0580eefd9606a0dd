"""What the steps of a run were spent on: the spans of its traced steps, and the time of each step by phase and axis.

Times are means over all processes of the run.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpishard.comm.ledger import PRODUCT
from mpishard.record.reading import TRACE, Run, is_number, process_files, read_lines

# The kinds of spans that are no calls on an axis.
OF_NO_AXIS = {"step", "phase", "function", PRODUCT, "F", "B", "I", "W"}


@dataclass(frozen=True)
class Traced:
    """One span of one rank, in one step."""

    rank: int
    step: int
    name: str
    # ``"step"``, ``"phase"`` of it, ``"function"`` of the problem, an action of a pipeline (``"F"``, ``"B"``, ``"I"``,
    # ``"W"``), ``"product"`` of matrices, or the axis of a call.
    kind: str
    start: float  # seconds since 1970 by the clock of its host
    seconds: float


def read_trace(folder: Path) -> list[Traced]:
    """All spans in the record of a run, by rank and time, outer ones first; of a repeated step the last.

    Raises ValueError if nothing was traced.
    """
    lines: dict[tuple[int, int], dict[str, Any]] = {}
    for file in process_files(folder, TRACE):
        for line in filter(_is_trace, read_lines(file)[0]):
            known = lines.get((line["rank"], line["step"]))
            if known is None or known["spans"][-1][2] < line["spans"][-1][2]:
                lines[line["rank"], line["step"]] = line
    if not lines:
        raise ValueError(
            f"{folder} has no trace; ask for one of a few steps, by mpishard.RunRecord(folder, mesh, trace=(100, 104)) "
            f"or, during the run, by mpishard trace {folder} --next 3"
        )
    spans = [Traced(rank, step, *span) for (rank, step), line in lines.items() for span in line["spans"]]
    return sorted(spans, key=lambda span: (span.rank, span.start, -span.seconds))


def _is_trace(line: dict[str, Any]) -> bool:
    """Return True if a line is one of spans: their names, kinds, starts and seconds."""
    spans = line.get("spans")
    return (
        all(isinstance(line.get(name), int) for name in ("rank", "step"))
        and isinstance(spans, list)
        and len(spans) > 0
        and all(isinstance(each, list) and len(each) == 4 and all(map(is_number, each[2:])) for each in spans)
        and all(isinstance(text, str) for each in spans for text in each[:2])
    )


def chrome_events(spans: Sequence[Traced]) -> dict[str, Any]:
    """The spans in the JSON object format of trace events, for Perfetto and Chrome; each rank is a process there.

    Times are microseconds since the first span; a JSON number may be too coarse for times since 1970.
    """
    first = min(span.start for span in spans)
    events: list[dict[str, Any]] = []
    for rank in sorted({span.rank for span in spans}):
        named = {"ph": "M", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
        events += [
            {**named, "name": "process_name"},
            {"ph": "M", "pid": rank, "tid": 0, "name": "process_sort_index", "args": {"sort_index": rank}},
        ]
    for span in spans:
        events.append(
            {
                "ph": "X",
                "pid": span.rank,
                "tid": 0,
                "name": span.name,
                "cat": span.kind,
                "ts": round((span.start - first) * 1e6, 1),
                "dur": round(span.seconds * 1e6, 1),
                "args": {"step": span.step},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


COMPUTATION = "computation"
_MOST_STEPS = 2**27


@dataclass(frozen=True)
class Spent:
    """Time and bytes of each step; each array is float64 (steps,), NaN where no process has noted the step."""

    steps: np.ndarray  # int64 (steps,)
    # Seconds by phase, computation first, then the time in collectives by axis (``"data axis"``): means over the
    # processes.
    phases: dict[str, np.ndarray]
    sent: dict[str, np.ndarray]  # bytes that all ranks sent, by axis


def spent(run: Run) -> Spent:
    """Compute `Spent` for all steps from the first to the last that any process has noted; empty if none has noted one.

    Raises ValueError if the steps are too many for the memory.
    """
    lines = [line for process in run.processes for line in process.lines if line["seconds"]]
    if not lines:
        return Spent(np.empty(0, np.int64), {}, {})
    first = min(line["step"] for line in lines)
    count = max(line["step"] + len(line["seconds"]) for line in lines) - first
    if count > _MOST_STEPS:
        raise ValueError(
            f"{run.folder} has notes of {count} steps, from {first} on, but at most {_MOST_STEPS} are shown: a file in "
            "its folder processes is damaged"
        )

    # A line has sums over its steps, of which each step gets an equal part.  The part is added at the first step and
    # subtracted after the last; a running sum then gives the values.
    def rises() -> np.ndarray:
        return np.zeros(count + 1)

    noted, ranks = rises(), rises()
    seconds: dict[str, np.ndarray] = defaultdict(rises)
    sent: dict[str, np.ndarray] = defaultdict(rises)
    seconds[COMPUTATION] = rises()
    for line in lines:
        steps = len(line["seconds"])
        ends = np.array([line["step"] - first, line["step"] - first + steps])

        def add(what: np.ndarray, value: float, ends: np.ndarray = ends) -> None:
            what[ends] += value, -value

        add(noted, 1)
        add(ranks, line["ranks"])
        for name, value in line["phases"].items():
            add(seconds[name], value / steps)
        for name, total_of_axis in line["axes"].items():
            add(seconds[f"{name} axis"], total_of_axis["seconds"] / steps)
            add(sent[name], total_of_axis["bytes"] / steps)

    def level(rise: np.ndarray) -> np.ndarray:
        return np.cumsum(rise)[:-1]

    processes = np.rint(level(noted))
    with np.errstate(invalid="ignore", divide="ignore"):
        # Not all ranks have files; and a step that was taken twice counts once.
        share = level(ranks) / processes / processes
        return Spent(
            np.arange(first, first + count),
            {name: level(rise) / processes for name, rise in seconds.items()},
            {name: level(rise) * share for name, rise in sent.items()},
        )


def ranks_by_step(run: Run) -> np.ndarray:
    """The number of ranks in each step of the metrics, float64, NaN where no process has noted the step."""
    steps = run.metrics["step"]
    found = np.full(len(steps), np.nan)
    lines = [line for process in run.processes for line in process.lines]
    for line in sorted(lines, key=lambda line: line.get("time", 0)):  # of a step taken twice the later line counts
        first, end = np.searchsorted(steps, [line["step"], line["step"] + len(line["seconds"])])
        found[first:end] = line["ranks"]
    return found


def takeovers(run: Run) -> list[int]:
    """The steps after which a spare has taken the place of a process that had died, or left the run; in order.

    A process then begins, or begins again, another one has ended, and as many ranks as before take the next step.  A
    start of the run from a checkpoint is no such step.
    """
    # By number of the start, and by process: its lines, of which a dead process lacks the last.
    starts: dict[int, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    began = sorted(start["time"] for start in run.starts if "time" in start)
    for process in run.processes:
        for line in process.lines:
            starts[bisect.bisect_right(began, line.get("time", 0))][process.name].append(line)
    return sorted(step for processes in starts.values() for step in _replaced_in(processes))


def _end(line: dict[str, Any]) -> int:
    """The step after the last one of a line."""
    return int(line["step"]) + len(line["seconds"])


def _replaced_in(processes: Mapping[str, Sequence[dict[str, Any]]]) -> set[int]:
    """`takeovers` within one start."""
    ends = {name: _end(lines[-1]) for name, lines in processes.items()}
    noted = {name: [line for line in lines if line["seconds"]] for name, lines in processes.items()}
    every = [line for lines in noted.values() for line in lines]
    first = min((line["step"] for line in every), default=0)
    found = set()
    for name, lines in noted.items():
        end = first  # after the process's steps so far: those who begin with the run replace nobody
        for line in lines:
            step, end_before, end = line["step"], end, _end(line)
            if step <= end_before or all(last > step for other, last in ends.items() if other != name):
                continue
            before = {other["ranks"] for other in every if other["step"] < step <= _end(other)}
            if before == {line["ranks"]}:
                found.add(step - 1)
    return found


def binned(values: np.ndarray, most: int) -> np.ndarray:
    """Means, float64, over at most `most` runs of equal length of a 1-D array with one value per step.

    NaN are left out; a run of NaN alone gives NaN.
    """
    width = max(1, -(-len(values) // most))
    filled = np.full(-(-len(values) // width) * width, np.nan)
    filled[: len(values)] = values
    rows = filled.reshape(-1, width)
    known = np.isfinite(rows)
    total = np.where(known, rows, 0).sum(axis=1)
    return np.divide(total, known.sum(axis=1), out=np.full(len(rows), np.nan), where=known.any(axis=1))


@dataclass(frozen=True)
class TimeSplit:
    """Seconds of a step of one rank, as means over steps; `products`, `communication` and `rest` add up to `step`."""

    rank: int  # of the whole mesh
    step: float
    products: float  # in matrix products of the layers of `mpishard.nn`, on the host
    communication: float  # in calls on axes, which is mostly waiting for other ranks

    @property
    def rest(self) -> float:
        """Seconds in neither: element-wise kernels, the optimizer, Python, reading data, saving."""
        return self.step - self.products - self.communication


def split_times(spans: Sequence[Traced]) -> list[TimeSplit]:
    """Split the steps of a trace, one result a rank, by rank; `read_trace` gives the spans, of whole steps."""
    by_step: dict[tuple[int, int], list[Traced]] = defaultdict(list)
    for span in spans:
        by_step[span.rank, span.step].append(span)
    by_rank: dict[int, list[TimeSplit]] = defaultdict(list)
    for (rank, _), own in sorted(by_step.items()):
        by_rank[rank].append(_split(rank, own))
    return [mean(steps, rank) for rank, steps in by_rank.items()]


def mean(splits: Sequence[TimeSplit], rank: int) -> TimeSplit:
    """The mean of times, at least one, as the time of `rank`."""
    count = len(splits)
    return TimeSplit(
        rank,
        sum(each.step for each in splits) / count,
        sum(each.products for each in splits) / count,
        sum(each.communication for each in splits) / count,
    )


def _split(rank: int, spans: Sequence[Traced]) -> TimeSplit:
    """The split of one step, whose spans these are."""
    (whole,) = (span for span in spans if span.kind == "step")
    calls = [span for span in spans if span.kind not in OF_NO_AXIS]
    products = [span for span in spans if span.kind == PRODUCT]
    communication = _covered(calls, whole)
    return TimeSplit(rank, whole.seconds, _covered([*calls, *products], whole) - communication, communication)


def _covered(spans: Iterable[Traced], whole: Traced) -> float:
    """Seconds of `whole` in which there is any of the spans: a moment in two of them counts once."""
    total, until, end = 0.0, whole.start, whole.start + whole.seconds
    for span in sorted(spans, key=lambda span: span.start):
        stop = min(span.start + span.seconds, end)
        if stop > until:
            total += stop - max(span.start, until)
            until = stop
    return total
