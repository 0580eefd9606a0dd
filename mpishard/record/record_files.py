"""The files of a record, as one process writes them: its lines, the facts of a start, and events for TensorBoard."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib.util
import math
import os
import platform
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from mpishard.backend.process import arithmetic
from mpishard.comm.capabilities import probe
from mpishard.comm.mesh import Mesh
from mpishard.io import log
from mpishard.launch.lease import FolderLease
from mpishard.record.reading import AUDITS, ENDS, LOGGED, METRICS, PROCESSES, STARTS, TRACE, JsonLinesWriter, read_lines
from mpishard.version import versions


def require_tensorboard(folder: Path) -> None:
    """Raise ModuleNotFoundError with the command that installs TensorBoard; ValueError if it takes no such folder."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ModuleNotFoundError(
            "tensorboard=True needs the package tensorboard: pip install 'mpishard[tensorboard]', or leave it out; "
            "mpishard plot draws the record without it"
        )
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"TensorBoard takes folders whose names are UTF-8, got {str(folder)!r}; give another folder, or leave "
            "tensorboard out"
        ) from None


class Events:
    """Scalars by step in a folder of event files.  The writer, with its own thread, is made at the first flush.

    They are plain numbers, which `EventAccumulator.Scalars` and tools built on it see; TensorBoard's own writer of
    summaries writes tensors, which these do not see.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer: Any = None
        self._waiting: list[tuple[int, float, dict[str, float]]] = []

    def add(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        """Keep the finite metrics of a step, at a time in seconds since 1970, for the next `flush`."""
        self._waiting.append((step, time, {name: value for name, value in metrics.items() if math.isfinite(value)}))

    def flush(self) -> None:
        """Write all metrics that wait; OSError if that fails, and they are lost then."""
        if not self._waiting:
            return
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        waiting, self._waiting = self._waiting, []
        if self._writer is None:
            self._writer = EventFileWriter(str(self.folder))
        for step, clock, metrics in waiting:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
            self._writer.add_event(Event(wall_time=clock, step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        """Close the file; a later `flush` begins another one."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()


# Variables that change the behaviour of MPI, BLAS, threads and devices, or identify the job.
_RELEVANT = re.compile(
    r"(MPISHARD|OMP|OPENBLAS|MKL|BLIS|NUMBA|CUDA|UCX|FI|HDF5|OMPI_MCA|PRTE_MCA|PMIX_MCA|MPIR_CVAR|SLURM)_\w+"
)
# Not tokenizers and numbers of heads of keys, which language models have.
_SECRET = re.compile(
    r"key(?![_-]value)|token(?!i[sz])|jwt|secret|passw|passphrase|auth(?!or\b)|credential", re.IGNORECASE
)
_MASK = "***"
# An argument that has its value with it, as --token=VALUE or api.key=VALUE; a path before = is no name.
_WITH_VALUE = re.compile(r"(-{0,2}[\w.-]+)=.+", re.DOTALL)


def surroundings(mesh: Mesh) -> dict[str, Any]:
    """Time, host, command, number of ranks and versions; secrets are masked."""
    mpi = probe()
    return {
        "time": round(datetime.now(UTC).timestamp(), 3),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [sys.executable, *without_secrets(sys.argv)],
        "working_directory": os.getcwd(),
        "host": os.uname().nodename,
        "system": platform.platform(),
        "ranks": mesh.size,
        "mesh": mesh.shape,
        "ranks_by_node": list(Counter(mesh.nodes).values()),
        "blas_threads": mesh.blas_threads,
        "arithmetic": arithmetic(),
        "versions": {**versions(), mpi.library: mpi.version},
        "environment": {
            name: _MASK if _SECRET.search(name) else value
            for name, value in sorted(os.environ.items())
            if _RELEVANT.fullmatch(name)
        },
    }


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """A command line, where the values of options such as ``--api-key VALUE`` and ``--token=VALUE`` are masked."""
    masked: list[str] = []
    secret = False  # the option before has a secret name, and no value yet
    for argument in arguments:
        pair = _WITH_VALUE.fullmatch(argument)
        name = pair[1] if pair else argument
        named = bool(_SECRET.search(name))
        if secret and not argument.startswith("--"):
            masked.append(_MASK)
        else:
            masked.append(f"{name}={_MASK}" if pair and named else argument)
        secret = named and not pair and argument.startswith("-")
    return masked


def plain(value: Any) -> Any:
    """A setting as a value for JSON: dataclasses as their fields with their type, other objects by their repr."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {"type": type(value).__name__} | {name: plain(one) for name, one in fields.items() if name != "mesh"}
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, np.generic):
        value = float(value) if isinstance(value, np.floating) else value.item()
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


# Largest number of files of processes: a hundred thousand in a folder would burden a file system.
_MOST_PROCESSES = 1024
_EVENTS = "tensorboard"  # the folder of event files
_IMPORTED = time.time()  # a start noted before is of another process, even of one with the same number


class RecordFiles:
    """The files of a record, as one process writes them.

    If one cannot be written, a message says so once, and none is written any more (`broken`).  `name`, of this process
    in names of files, is its host and number.  The first rank alone has `metrics`, `logged` and `events`, which are for
    TensorBoard.
    """

    def __init__(self, folder: Path, mesh: Mesh, tensorboard: bool) -> None:
        self.folder = folder
        self.name = f"{os.uname().nodename}-{os.getpid()}"
        self.metrics = JsonLinesWriter(folder / METRICS)
        self.logged = JsonLinesWriter(folder / LOGGED)
        self.process = JsonLinesWriter(folder / PROCESSES / f"{self.name}.jsonl")
        self.spans = JsonLinesWriter(folder / PROCESSES / f"{self.name}{TRACE}")
        self.events = Events(folder / _EVENTS) if tensorboard else None
        self.broken = False
        self._lease: FolderLease | None = None
        self._mesh = mesh
        self._start = 0  # the number of this start, 0 until it is needed
        written: tuple[JsonLinesWriter | Events | None, ...]
        written = (self.process, self.metrics, self.logged, self.spans, self.events)
        self._all = [each for each in written if each is not None]

    @property
    def has_process(self) -> bool:
        """True if this process has its own files."""
        return self._mesh.rank % -(-self._mesh.size // _MOST_PROCESSES) == 0

    def lead(self, succeeds: bool = False) -> None:
        """Take the lease of the folder as the first rank; `succeeds`: another rank was the first.

        Raises ValueError if another run that lives has it.
        """
        if self._lease is None:
            self._lease = FolderLease.take(self.folder, succeeds=succeeds)

    def open(self, facts: Mapping[str, Any], every: float, *, stage: bool) -> int:
        """Make the folder, and note a start with its environment and `facts`.  Collective.

        Returns the steps of the stages before, which are those of earlier starts of this process, if it is a `stage`.
        Raises OSError on every rank if the folder cannot be made or written; not for a full disk.
        """
        failed, before = None, 0
        try:
            (self.folder / PROCESSES).mkdir(parents=True, exist_ok=True)
            for inner in (self.folder / PROCESSES, self.folder / _EVENTS):
                if inner.is_symlink():  # the files in it would be written somewhere else
                    raise OSError(errno.ELOOP, "it is a link, which is not followed", str(inner))
            if self._mesh.rank == 0:
                if stage:
                    before = self._steps_of_stages(facts)
                    facts = {**facts, "steps_before": before}
                starts = JsonLinesWriter(self.folder / STARTS)
                starts.add({**surroundings(self._mesh), "process": self.name, "every": every, **plain(facts)})
                starts.close()
        except OSError as error:
            failed = (error.errno, error.strerror or str(error), os.path.abspath(error.filename or self.folder))
        gathered = self._mesh.world.allgather_object((failed, before))
        failures, before = [each for each, _ in gathered], gathered[0][1]
        rank = next((rank for rank, each in enumerate(failures) if each is not None), None)
        if rank is not None:
            number, text, path = failures[rank]
            what = f"the record of the run cannot be written: rank {rank} failed at {path}: {text}"
            if number not in (errno.ENOSPC, errno.EDQUOT):
                raise OSError(
                    number, f"{what}; give RunRecord a folder that all ranks may write into, or leave the record out"
                )
            self.broken = True
            if self._mesh.rank == 0:
                log.warn(f"{what}; training continues without")
        self._start = 0
        return before

    def _steps_of_stages(self, facts: Mapping[str, Any]) -> int:
        """The steps of this process's stages before the one with these facts."""
        starts, ends = (read_lines(self.folder / name)[0] for name in (STARTS, ENDS))
        last = starts[-1] if starts else {}
        own = last.get("process") == self.name and last.get("time", 0) >= _IMPORTED
        if not own or not ends or ends[-1].get("start") != len(starts):
            return 0  # another process, or one that failed, may have taken steps that this one repeats
        if facts.get("resumed_steps") and facts.get("checkpoints") == last.get("checkpoints"):
            return int(last.get("steps_before", 0))  # the same stage continues
        return int(ends[-1]["step"])

    def number_of_start(self) -> int:
        """The number of this start, from 1; read from the folder, so that a process that joined later has it too."""
        if not self._start:
            try:
                self._start = len(read_lines(self.folder / STARTS)[0])
            except OSError as error:
                self.give_up(error)
        return self._start

    def write(self, *files: JsonLinesWriter | Events) -> None:
        """Write the lines of these files that wait."""
        if self.broken:
            return
        try:
            for written in files:
                written.flush()
        except OSError as error:
            self.give_up(error)

    def flush(self) -> None:
        """Write all lines that wait."""
        self.write(*self._all)

    def give_up(self, error: OSError) -> None:
        """Write nothing any more, and say why."""
        self.broken = True
        log.warn(f"the record of the run ends here; training continues: {error}")

    def end(self, line: Mapping[str, Any]) -> None:
        """Note the end of this start; the first rank does that."""
        self._add(ENDS, line)

    def audit_found(self, line: Mapping[str, Any]) -> None:
        """Note what an audit has found; the first rank does that."""
        self._add(AUDITS, line)

    def _add(self, name: str, line: Mapping[str, Any]) -> None:
        if self.broken:
            return
        writer = JsonLinesWriter(self.folder / name)
        writer.add(dict(line))
        try:
            writer.close()
        except OSError as error:
            self.give_up(error)

    def close(self) -> None:
        """Close the files; a line that is written later opens its file again."""
        for written in self._all:
            with contextlib.suppress(OSError):
                written.close()
        if self._lease is not None:
            lease, self._lease = self._lease, None
            lease.release()
