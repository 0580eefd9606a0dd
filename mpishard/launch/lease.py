"""Which run uses a folder: a file in it says so, for as long as that run lives.

No lock of the file system: network file systems may have none, and one that a killed job leaves would keep its next
start out.  A holder on this machine lives if its process does.  That of another machine sets the time of the file now
and then, and the times are compared by the clock of the file system.  An earlier start of this job is over in any case.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import operator
import os
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import ClassVar

from mpishard.arguments import printable
from mpishard.io import files, log
from mpishard.launch.job_notes import JobNotes
from mpishard.launch.processes import identity

SHARE = "MPISHARD_SHARE_FOLDER"
_FILE = "holder"
# Seconds between two signs of life, and without one until a holder counts as dead.
_BEAT_S, _DEAD_S = 5.0, 30.0
_POLL_S = 0.25
_PROCESS = operator.attrgetter("machine", "host", "process", "began")


@dataclass(frozen=True)
class Holder:
    """A process that uses a folder."""

    host: str
    process: int
    since: str  # ISO 8601, by the clock of its host
    machine: str  # the same for processes that see each other; empty if this system does not tell
    began: str  # tells processes with one number apart
    job: str  # the scheduler's name for its job; empty without one
    restart: str  # how often the scheduler has started the job again
    run: str  # the folder of `mpishard run`; empty without one
    attempt: int  # the number of the start by `mpishard run`

    @classmethod
    def this(cls, environment: Mapping[str, str] = os.environ) -> Holder:
        """This process."""
        machine, process, began = identity(os.getpid())
        run = JobNotes.from_environment(environment)
        return cls(
            os.uname().nodename,
            process,
            datetime.now().astimezone().isoformat(timespec="seconds"),
            machine,
            began,
            " of ".join(environment[name] for name in ("SLURM_JOB_ID", "SLURM_CLUSTER_NAME") if environment.get(name)),
            environment.get("SLURM_RESTART_COUNT", "0"),
            "" if run is None else str(run.path),
            0 if run is None else run.attempt,
        )

    def is_same_as(self, other: Holder) -> bool:
        """Return True if both are one process."""
        return _PROCESS(self) == _PROCESS(other)

    def is_earlier_start_of(self, other: Holder) -> bool:
        """Return True if it is of the same job, which was started again since."""
        if self.job and self.job == other.job and self.restart != other.restart:
            return True
        return bool(self.run) and (self.run, self.job) == (other.run, other.job) and self.attempt != other.attempt

    def lives_here(self) -> bool | None:
        """Whether it lives; None if it is of another machine."""
        if not self.machine or self.machine != Holder.this().machine:
            return None
        return identity(self.process) == (self.machine, self.process, self.began)

    def __str__(self) -> str:
        job = f"Slurm job {self.job}, " if self.job else ""
        return printable(f"{job}process {self.process} on {self.host}, since {self.since}")


class FolderLease:
    """The lease of a folder by a run: its first rank takes it, and releases it at the end of the run.

    Several parts of a process may have the lease of one folder; the last one that is released ends it.
    """

    _held: ClassVar[dict[Path, FolderLease]] = {}

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self._path = self.folder / _FILE
        self._users = 0
        self._descriptor = -1
        self._over = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="mpishard-lease", daemon=True)

    @classmethod
    def take(cls, folder: Path, *, succeeds: bool = False) -> FolderLease | None:
        """Take the lease of a folder; None if it cannot be written there, or the user has it shared.

        `succeeds`: the holder so far was of this run.  Raises ValueError if another run that lives has it.
        """
        if os.environ.get(SHARE, "0") not in ("", "0"):
            return None
        lease = cls._held.get(folder.absolute()) or cls(folder)
        if not lease._users:
            try:
                lease._acquire(succeeds)
            except OSError:  # the folder's own use says what is wrong with it
                return None
            cls._held[lease.folder] = lease
        lease._users += 1
        return lease

    def release(self) -> None:
        """Release the lease; after the last release the folder has no holder."""
        self._users -= 1
        if not self._users:
            self._end()

    def _end(self) -> None:
        self._held.pop(self.folder, None)
        self._over.set()
        self._beats.join()
        atexit.unregister(self._end)
        with contextlib.suppress(OSError):
            holder = self._holder()
            if holder is not None and holder.is_same_as(Holder.this()):
                self._path.unlink()
            os.close(self._descriptor)

    def _acquire(self, succeeds: bool) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                self._descriptor = files.create(self._path)
                break
            except FileExistsError:
                found = self._holder()
                if not (succeeds or self._is_dead(found)):
                    raise ValueError(self._refusal(found)) from None
                if self._holder() == found:  # no other run has taken it meanwhile
                    with contextlib.suppress(FileNotFoundError):
                        self._path.unlink()
        try:
            os.write(self._descriptor, json.dumps(asdict(Holder.this())).encode())
        except OSError:  # a full disk; without a name the file would keep the next start waiting
            os.close(self._descriptor)
            self._path.unlink()
            raise
        atexit.register(self._end)
        self._beats.start()

    def _refusal(self, found: Holder | None) -> str:
        who = "another run" if found is None else f"another run ({found})"
        return (
            f"{self.folder} is used by {who}: both would write there; give this run a folder of its own, or end that "
            f"one; {SHARE}=1 lets both use it, and {self._path} may be removed if that run is known to be dead"
        )

    def _holder(self) -> Holder | None:
        """The holder that the file names; None if it names none."""
        try:
            found = files.read_note(self._path)
            return Holder(**found) if isinstance(found, dict) else None
        except (ValueError, TypeError):  # one that is being written, or another program's
            return None

    def _is_dead(self, found: Holder | None) -> bool:
        """Return True if the holder has ended; waits for a sign of life where nothing else tells."""
        if found is not None:
            this = Holder.this()
            if found.is_same_as(this) or found.is_earlier_start_of(this):
                return True
            if (lives := found.lives_here()) is not None:
                return not lives
        with contextlib.suppress(FileNotFoundError):
            first = self._last_beat()
            begun = min(first, self._now())  # the clock may have been set back since
            if self._now() - begun < _DEAD_S:
                who = "another run" if found is None else str(found)
                log.inform(f"waits at most {_DEAD_S:g} s for a sign of life of {who}, which has used {self.folder}")
            while self._now() - begun < _DEAD_S:
                time.sleep(_POLL_S)
                if self._last_beat() != first:
                    return False
        return True

    def _last_beat(self) -> float:
        # Opened, since a network file system then asks its server.
        descriptor = files.open_to_read(self._path, links=False)
        try:
            return os.fstat(descriptor).st_mtime
        finally:
            os.close(descriptor)

    def _now(self) -> float:
        """The time by the clock of the file system."""
        probe = self.folder / f".{_FILE}-{secrets.token_hex(8)}"
        descriptor = files.create(probe)
        try:
            return os.fstat(descriptor).st_mtime
        finally:
            os.close(descriptor)
            probe.unlink()

    def _beat(self) -> None:
        while not self._over.wait(_BEAT_S):
            with contextlib.suppress(OSError):
                os.utime(self._descriptor)
