"""The time of each step by phase and axis, as means over all processes of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from mpishard.comm.ledger import PRODUCT
from mpishard.record.reading import Run
from mpishard.record.trace import OF_NO_AXIS, Traced

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
