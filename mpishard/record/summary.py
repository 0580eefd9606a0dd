"""The time of each step by phase and axis, as means over all processes of a run."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from mpishard.record.reading import Run

COMPUTATION = "computation"
_MOST_STEPS = 2**27


@dataclass(frozen=True)
class Spent:
    """Time and bytes of each step; each array is float64 (steps,), NaN where no process has noted the step.

    Parameters
    ----------
    steps : ndarray, int64 (steps,)
    phases : dict of arrays
        Seconds by phase, computation first, then the time in collectives by axis (``"data axis"``): means over the
        processes.
    sent : dict of arrays
        Bytes that all ranks sent, by axis.
    """

    steps: np.ndarray
    phases: dict[str, np.ndarray]
    sent: dict[str, np.ndarray]


def spent(run: Run) -> Spent:
    """Compute `Spent` for all steps from the first to the last that any process has noted.  Not collective.

    Parameters
    ----------
    run : Run
        The whole record.

    Returns
    -------
    Spent
        Empty if no process has noted a step.

    Raises
    ------
    ValueError
        If the steps are too many for the memory.
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
    """Means over at most `most` runs of equal length; NaN are left out.  Not collective.

    Parameters
    ----------
    values : 1-D array
        One for each step.
    most : int
        At least 1.

    Returns
    -------
    1-D array of float64
        NaN where all of a run are.
    """
    width = max(1, -(-len(values) // most))
    filled = np.full(-(-len(values) // width) * width, np.nan)
    filled[: len(values)] = values
    rows = filled.reshape(-1, width)
    known = np.isfinite(rows)
    total = np.where(known, rows, 0).sum(axis=1)
    return np.divide(total, known.sum(axis=1), out=np.full(len(rows), np.nan), where=known.any(axis=1))
