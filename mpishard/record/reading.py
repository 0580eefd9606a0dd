"""Reads the record of a run, also while it goes on and after a crash.  Needs no MPI."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpishard.record.json_lines import read_lines

METRICS, LOGGED, STARTS, ENDS = "metrics.jsonl", "logged.jsonl", "starts.jsonl", "ends.jsonl"
PROCESSES = "processes"
TRACE = ".trace.jsonl"
# The series that a run writes itself.
OWN = {"step", "start", "time", "seconds", "workers", "samples", "loss", "learning_rate", "gradient_norm", "loss_scale"}
OWN |= {"iteration", "accepted_loss"}  # of a method
VALIDATION = "validation_loss"  # the series that a run with a validation set logs
_OF_PROCESS = {"rank": int, "ranks": int, "step": int, "seconds": list, "busy": list, "phases": dict, "axes": dict}
_OF_AXIS = ("seconds", "bytes")
# Fields of a start that are used, with their types; it has many more.
_OF_START: dict[str, Any] = {"problem": dict, "resumed_steps": int, "steps_before": int}
_OF_START |= dict.fromkeys(("time", "every"), int | float)
_OF_PROBLEM = ("steps", "batch_size", "tokens_per_sample")
_MOST_NEAR = 3


@dataclass(frozen=True)
class Process:
    """The lines of one process.

    Parameters
    ----------
    name : str
        Host and process number.
    lines : list of dict
        In order of time: ``rank``, ``ranks``, the first ``step``, ``seconds`` and ``busy`` of each step from that on
        (`busy` is without the time in collectives), ``phases`` in seconds and ``axes`` with bytes and seconds.
    """

    name: str
    lines: list[dict[str, Any]]

    def by_step(self, what: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps, and the time of each.

        Parameters
        ----------
        what : {"seconds", "busy"}
            The whole time, or that without the time in collectives.

        Returns
        -------
        (ndarray of int64, ndarray of float64), each of shape (steps,)
            Numbers of the steps, and seconds.
        """
        steps = [line["step"] + index for line in self.lines for index in range(len(line[what]))]
        values = [value for line in self.lines for value in line[what]]
        return np.array(steps, np.int64), np.array(values, np.float64)


@dataclass(frozen=True)
class Run:
    """The record of a run.

    Not collective: one process reads the files.

    Parameters
    ----------
    folder : Path
        Where it was read.
    starts : list of dict
        The environment and settings of each start.
    metrics : dict of arrays
        By name one value per step, in the order of the steps, NaN where a step has none; ``"step"`` is int64, the rest
        is float64.  Of a step that a later start has repeated from a checkpoint, the last value counts.
    processes : list of Process
        Sorted by their rank at the end.
    logged : dict of pairs of arrays
        The values given to `RunRecord.log`: by name the steps, int64, and the values, float64.
    """

    folder: Path
    starts: list[dict[str, Any]]
    metrics: dict[str, np.ndarray]
    processes: list[Process]
    logged: dict[str, tuple[np.ndarray, np.ndarray]]

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> Run:
        """Read all that is written by now.

        Parameters
        ----------
        folder : path
            That of the `RunRecord`.

        Returns
        -------
        Run
            What processes have written so far; lines that are half written are left out.

        Raises
        ------
        ValueError
            If the folder holds no record of a run.
        """
        folder = Path(folder)
        check_record(folder)
        files = process_files(folder)
        processes = [Process(file.stem, lines) for file in files if (lines := own_lines(read_lines(file)[0]))]
        processes.sort(key=lambda process: process.lines[-1]["rank"])
        metrics = _columns(own_metrics(read_lines(folder / METRICS)[0]))
        logged = _series(own_metrics(read_lines(folder / LOGGED)[0]), metrics["step"])
        return cls(folder, own_starts(read_lines(folder / STARTS)[0]), metrics, processes, logged)

    @property
    def further(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """All series that are not the run's own: `logged`, and further values given to `RunRecord.step`."""
        steps = self.metrics["step"]
        others = {name: values for name, values in self.metrics.items() if name not in OWN}
        known = {name: np.isfinite(values) for name, values in others.items()}
        given = {name: (steps[known[name]], others[name][known[name]]) for name in others if known[name].any()}
        return given | self.logged

    @property
    def tokens_per_step(self) -> float:
        """Samples per step times tokens per sample, from the settings of the last start; NaN if they are not noted."""
        problem = self.starts[-1].get("problem", {}) if self.starts else {}
        return float(problem.get("batch_size", np.nan)) * float(problem.get("tokens_per_sample", np.nan))


def check_record(folder: Path) -> None:
    """Raise ValueError if the folder holds no record of a run; the message names a folder with one.  Not collective.

    Parameters
    ----------
    folder : Path
        What a user gave.

    Raises
    ------
    ValueError
        With the way out.
    """
    if _has_record(folder):
        return
    written = "one is written by optimize(problem, record=mpishard.RunRecord(folder, mesh))"
    if not folder.exists():
        raise ValueError(f"{folder} is not there; give the folder of a run's record; {written}")
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; give the folder of a run's record")
    near = [other for other in (folder.parent, *sorted(folder.iterdir())) if other.is_dir() and _has_record(other)]
    if near:
        others = f" and {len(near) - _MOST_NEAR} more" if len(near) > _MOST_NEAR else ""
        raise ValueError(
            f"{folder} has no record of a run, but there is one in {', '.join(map(str, near[:_MOST_NEAR]))}{others}"
        )
    raise ValueError(f"{folder} has no record of a run ({METRICS}, {STARTS}); {written}")


def _has_record(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (METRICS, STARTS))


def own_metrics(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out lines of other programs, which may have files of this name too."""
    return [
        line
        for line in lines
        if isinstance(line.get("step"), int)
        and all(v is None or is_number(v) or (isinstance(v, str) and name not in OWN) for name, v in line.items())
    ]


def own_starts(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out fields that mpishard does not write so; the number of a start counts all lines."""
    found = [{name: v for name, v in line.items() if isinstance(v, _OF_START.get(name, object))} for line in lines]
    for start in found:
        problem = start.get("problem", {})
        start["problem"] = {name: v for name, v in problem.items() if name not in _OF_PROBLEM or is_number(v)}
    return found


def is_number(value: Any) -> bool:
    """Whether a value of JSON is a number that NumPy has, too.  Not collective.

    Parameters
    ----------
    value : object
        Anything.

    Returns
    -------
    bool
        False for larger integers.
    """
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)


def series_of(line: dict[str, Any]) -> dict[str, Any]:
    """The series in a line of `LOGGED`, by name."""
    return {name: value for name, value in line.items() if name not in OWN}


def began_after(start: dict[str, Any]) -> int | None:
    """The step after which a start began, 0 without a checkpoint; None if not noted.  Not collective.

    Parameters
    ----------
    start : dict
        A line of `STARTS`.

    Returns
    -------
    int or None
        Counted from the optimizer's first step.
    """
    resumed = start.get("resumed_steps")
    return resumed + int(start.get("steps_before", 0)) if isinstance(resumed, int) else None


def own_lines(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`own_metrics` for the lines of a process."""
    return [line for line in lines if _is_of_process(line)]


def _is_of_process(line: dict[str, Any]) -> bool:
    if not all(isinstance(line.get(name), kind) for name, kind in _OF_PROCESS.items()):
        return False
    axes = [of if isinstance(of, dict) else {} for of in line["axes"].values()]
    values = [*line["seconds"], *line["busy"], *line["phases"].values(), *(of.get(n) for of in axes for n in _OF_AXIS)]
    return all(map(is_number, [line["rank"], line["ranks"], line["step"], line.get("time", 0), *values]))


def process_files(folder: Path, kind: str = ".jsonl") -> list[Path]:
    """The files of processes, sorted by name."""
    found = sorted((folder / PROCESSES).glob(f"*{kind}"))
    return found if kind == TRACE else [file for file in found if not file.name.endswith(TRACE)]


def _columns(lines: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    rows = {line["step"]: line for line in lines}
    # A start from a checkpoint repeats steps; later steps of the earlier start no longer count.
    last = lines[-1]["step"] if rows else 0
    ordered = [rows[step] for step in sorted(rows) if step <= last]
    names = dict.fromkeys(name for row in ordered for name, value in row.items() if not isinstance(value, str))
    found: dict[str, np.ndarray] = {
        name: np.array([np.nan if row.get(name) is None else row[name] for row in ordered], np.float64)
        for name in names
    }
    return found | {"step": np.array([row["step"] for row in ordered], np.int64)}


def _series(lines: list[dict[str, Any]], taken: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Steps and values by name: the last value of each step, without steps that a later start has undone."""
    last = taken[-1] if len(taken) else -1
    found: dict[str, dict[int, float]] = {}
    for line in lines:
        for name, value in series_of(line).items():
            if line["step"] <= last:
                found.setdefault(name, {})[line["step"]] = np.nan if value is None else value
    return {
        name: (np.array(sorted(values), np.int64), np.array([values[step] for step in sorted(values)], np.float64))
        for name, values in found.items()
    }
