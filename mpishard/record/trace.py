"""The trace of a run: spans of every process in the traced steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpishard.comm.ledger import PRODUCT
from mpishard.record.json_lines import read_lines
from mpishard.record.reading import TRACE, is_number, process_files

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
            f"or, while the run goes on, by mpishard trace {folder} --next 3"
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
