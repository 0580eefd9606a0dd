"""Reads the record of a run, also while the run continues and after a crash.  Needs no MPI.

Its files have one JSON object per line, and are readable up to the line that a crash has cut.  Not HDF5 that is read
while it is written: if a process is killed, such a file loses its last line, but an HDF5 file does not open again
before ``h5clear``.  And any program can read a line.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpishard.arguments import listed
from mpishard.io.files import open_to_append, open_to_read, parsed, read

_END = 65536
_BLOCK = 2**20
_LONGEST_LINE = 2**26
_MOST = 2**32  # bytes that are read of a file


class JsonLinesWriter:
    """Appends lines to a file, which it opens at the first write: a process may have nothing to write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1
        self._waiting: list[str] = []

    def add(self, content: dict[str, Any]) -> None:
        """Keep a line for the next `flush`."""
        # NaN becomes null: JSON has no NaN, and a loss of NaN must not make the file unreadable.
        try:
            line = json.dumps(content, allow_nan=False, default=float)
        except ValueError:
            line = json.dumps(_finite(content), default=lambda value: _finite(float(value)))
        self._waiting.append(line)

    def flush(self) -> None:
        """Write all lines that wait.  Raises OSError with the path; the lines are lost then."""
        if not self._waiting:
            return
        data = ("\n".join(self._waiting) + "\n").encode()
        self._waiting.clear()
        try:
            if self._descriptor < 0:
                self._descriptor = open_to_append(self.path)
                data = self._after_a_torn_line() + data
            # In one call, so that concurrent readers see whole lines.
            if os.write(self._descriptor, data) < len(data):
                raise OSError(28, os.strerror(28))
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    def close(self) -> None:
        """Flush and close; a later `flush` opens the file again."""
        try:
            self.flush()
        finally:
            if self._descriptor >= 0:
                descriptor, self._descriptor = self._descriptor, -1
                os.close(descriptor)  # where a network file system may tell of a full disk

    def _after_a_torn_line(self) -> bytes:
        size = os.fstat(self._descriptor).st_size
        return b"\n" if size and os.pread(self._descriptor, 1, size - 1) != b"\n" else b""


def read_lines(path: Path, start: int = 0) -> tuple[list[dict[str, Any]], int]:
    """Read a file from byte `start` on; returns its objects, and the byte at which to continue.

    Lines that a crash has cut are left out.  A last line without its end may be incomplete; it is read later.  Raises
    OSError with the path if it is no file, or no file of lines.
    """
    found: list[dict[str, Any]] = []
    with contextlib.suppress(FileNotFoundError), os.fdopen(open_to_read(path, start + _MOST), "rb") as file:
        file.seek(start)
        waiting: list[bytes] = []  # of a line whose end is not read yet
        while block := file.read(_BLOCK):
            lines, end, rest = block.rpartition(b"\n")
            if end:
                data = b"".join([*waiting, lines, end])
                found += _objects(data)
                start += len(data)
                waiting.clear()
            waiting.append(rest)
            if sum(map(len, waiting)) > _LONGEST_LINE:
                raise OSError(errno.EFBIG, f"it has a line of more than {_LONGEST_LINE} bytes", str(path))
    return found, start


def read_end(path: Path) -> list[dict[str, Any]]:
    """The lines within the last 64 KiB of a file."""
    size = path.stat().st_size if path.exists() else 0
    return read_lines(path, max(0, size - _END))[0]


def damage(path: Path) -> str:
    """From which line on a file is damaged, in words; empty if each line has an object, and without a file.

    `read_lines` leaves such lines out: a damaged list of findings would look like one of none.
    """
    *lines, rest = read(path).split(b"\n") if path.exists() else [b""]
    whole = [bool([*_objects(line)]) for line in lines] + [False] * bool(rest)
    if all(whole):
        return ""
    return f"{path} is damaged from line {whole.index(False) + 1} on: of {len(whole)} lines {sum(whole)} can be read"


def _objects(data: bytes) -> Iterator[dict[str, Any]]:
    for line in data.splitlines():
        with contextlib.suppress(ValueError):
            content = parsed(line)
            if isinstance(content, dict):
                yield content


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {name: _finite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    if isinstance(content, float) and (content != content or content in (float("inf"), float("-inf"))):
        return None
    return content


METRICS, LOGGED, STARTS, ENDS = "metrics.jsonl", "logged.jsonl", "starts.jsonl", "ends.jsonl"
AUDITS = "audits.jsonl"
DEATHS = "deaths.jsonl"
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
        logged = _series(own_metrics(read_lines(folder / LOGGED)[0]), metrics)
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
    """Raise ValueError if the folder holds no record of a run; the message names a folder with one."""
    if _has_record(folder):
        return
    written = "minimize and optimize write one: record=mpishard.RunRecord(folder, mesh)"
    if not folder.exists():
        raise ValueError(f"{folder} does not exist; give the folder of a run's record; {written}")
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; give the folder of a run's record")
    near = [other for other in (folder.parent, *sorted(folder.iterdir())) if os.access(other, os.X_OK)]
    near = [other for other in near if other.is_dir() and _has_record(other)]
    if near:
        raise ValueError(f"{folder} has no record of a run, but there is one in {listed(near)}")
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
    """Return True if a value of JSON is a number that NumPy has, too: not a larger integer."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)


def series_of(line: dict[str, Any]) -> dict[str, Any]:
    """The series in a line of `LOGGED`, by name."""
    return {name: value for name, value in line.items() if name not in OWN and not isinstance(value, str)}


def began_after(start: dict[str, Any]) -> int | None:
    """The step after which a start (a line of `STARTS`) began, counted from the optimizer's first.

    0 without a checkpoint, None if not noted.
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
    own = line["rank"], line["ranks"], line["step"], line.get("time", 0), line.get("pipeline", 0)
    return all(map(is_number, [*own, *values]))


def process_files(folder: Path, kind: str = ".jsonl") -> list[Path]:
    """The files of processes, sorted by name; OSError if their folder, where there is one, cannot be read."""
    try:
        names = os.listdir(folder / PROCESSES)  # which `glob` takes for empty if it may not read it
    except FileNotFoundError:
        names = []
    found = sorted(folder / PROCESSES / name for name in names if name.endswith(kind))
    return found if kind == TRACE else [file for file in found if not file.name.endswith(TRACE)]


def _columns(lines: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    rows = {line["step"]: line for line in lines}
    # A start from a checkpoint repeats steps; later steps of the earlier start no longer count.
    last = lines[-1]["step"] if rows else 0
    ordered = [rows[step] for step in sorted(rows) if step <= last]
    names = dict.fromkeys(name for row in ordered for name, value in row.items() if not isinstance(value, str))
    found: dict[str, np.ndarray] = {
        name: np.array([row[name] if is_number(row.get(name)) else np.nan for row in ordered], np.float64)
        for name in names
    }
    return found | {"step": np.array([row["step"] for row in ordered], np.int64)}


def _series(lines: list[dict[str, Any]], metrics: dict[str, np.ndarray]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Steps and values by name: the last value of each step, without steps that a later start has taken back."""
    taken = metrics["step"].tolist()
    last = taken[-1] if taken else -1
    starts = dict(zip(taken, metrics["start"].tolist(), strict=True)) if "start" in metrics else {}
    found: dict[str, dict[int, float]] = {}
    for line in lines:
        start: Any = line.get("start")
        if is_number(start) and start < starts.get(line["step"], start):
            continue
        for name, value in series_of(line).items():
            if line["step"] <= last:
                found.setdefault(name, {})[line["step"]] = np.nan if value is None else value
    return {
        name: (np.array(sorted(values), np.int64), np.array([values[step] for step in sorted(values)], np.float64))
        for name, values in found.items()
    }


STEPS = 20  # number of last steps that count
_LEAST = 8  # fewer steps prove nothing
_FACTOR = 1.3  # times the median of the ranks with the same work, above which a rank is slow
_OFTEN = 0.8  # of the steps; on a shared machine any rank is slow now and then
_LEAST_S = 1e-3  # smaller differences come from clock and scheduler


@dataclass(frozen=True)
class Straggler:
    """A process that was slow in most of the last steps: `slower` times the others' median, in seconds per step."""

    process: Process
    rank: int
    busy: float
    median: float

    @property
    def slower(self) -> float:
        return self.busy / self.median if self.median > 0 else float("inf")

    @property
    def host(self) -> str:
        return self.process.name.rpartition("-")[0]

    def __str__(self) -> str:
        return (
            f"rank {self.rank} on {self.host} computes {self.busy * 1e3:.3g} ms a step, "
            f"{self.slower:.2g} times the median of ranks with the same work"
        )


def stragglers(processes: Sequence[Process]) -> list[Straggler]:
    """The processes that were slow in most of the last steps, the slowest first.

    Time in collectives does not count, since there all wait for the slowest rank.  Pipeline stages have different work,
    so each rank is compared with the others of its stage.
    """
    groups: dict[int, list[Process]] = defaultdict(list)
    last = max((_end(process) for process in processes), default=0)
    for process in processes:
        if _end(process) > last - STEPS:
            groups[process.lines[-1].get("pipeline", 0)].append(process)
    found = [straggler for group in groups.values() if len(group) > 1 for straggler in _slow(group)]
    return sorted(found, key=lambda straggler: -straggler.slower)


def _end(process: Process) -> int:
    line = process.lines[-1]
    return int(line["step"]) + len(line["busy"])


def _slow(group: Sequence[Process]) -> list[Straggler]:
    by_step = [dict(zip(*map(np.ndarray.tolist, process.by_step("busy")), strict=True)) for process in group]
    steps = sorted(set.intersection(*(set(known) for known in by_step)))[-STEPS:]
    if len(steps) < _LEAST:
        return []
    busy = np.array([[known[step] for step in steps] for known in by_step])
    found = []
    for number, process in enumerate(group):
        others = np.median(np.delete(busy, number, axis=0), axis=0)
        slow = (busy[number] > _FACTOR * others) & (busy[number] - others > _LEAST_S)
        if slow.mean() >= _OFTEN:
            rank = int(process.lines[-1]["rank"])
            found.append(Straggler(process, rank, float(np.median(busy[number])), float(np.median(others))))
    return found
