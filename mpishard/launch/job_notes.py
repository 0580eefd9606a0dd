"""Notes of the processes of a job to the supervisor of their run: small files in a folder private to the owner.

The environment of every process of a supervised job has the path of the folder and the number of the start.  Nothing
here needs MPI.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from mpishard.io.files import read_note, remove_notes, write_note
from mpishard.launch.processes import identity, this_kernel

E = TypeVar("E", bound=BaseException)
T = TypeVar("T")

_FOLDER, _ATTEMPT, _FIRST = "MPISHARD_RUN", "MPISHARD_ATTEMPT", "MPISHARD_FIRST_ATTEMPT"
# The number of the process that reports.  Those that it starts inherit the variable, and report nothing.
_REPORTER = "MPISHARD_REPORTER"
# How long notes at the end of a job wait for a shared disk that fails, and between two trials.
_DISK_S, _AGAIN_S = 60.0, 0.2
# An attribute of errors that a process raises because another one has failed.
ECHO = "mpishard_echo"
# An attribute of errors that all ranks of a communicator raise equally, after an exchange: the number of these ranks.
ON_ALL_RANKS = "mpishard_on_all_ranks"


def patiently(call: Callable[[], T]) -> T:
    """What a call returns that reads or writes notes; where the disk fails, it is made again for a while."""
    limit = time.monotonic() + _DISK_S
    while True:
        try:
            return call()
        except OSError as error:
            # A folder that was removed, and a full disk, stay as they are.
            stays = isinstance(error, FileNotFoundError) or error.errno in (errno.ENOSPC, errno.EDQUOT)
            if stays or time.monotonic() > limit:
                raise
        time.sleep(_AGAIN_S)


def was_begun_here(path: Path) -> bool:
    """Return True if a supervisor of this machine, maybe of another container, has used a folder last."""
    holder = read_note(path / "supervisor", private=True)
    return bool(holder) and holder[0].startswith(this_kernel())


def raised_by_all(error: E, ranks: int) -> E:
    """Return the error, marked as one that all `ranks` ranks of a communicator raise equally."""
    setattr(error, ON_ALL_RANKS, ranks)
    return error


class RunLost(RuntimeError):
    """After deaths the processes cannot continue, but a restart can.  It counts as a death, not as a failure."""


@dataclass(frozen=True)
class Failure:
    """An uncaught exception."""

    kind: str  # name of the exception's type
    message: str
    where: str  # ``file:line`` that raised it
    step: int  # the step under way, or 0
    trained: bool = False  # the elastic run of the script had ended
    # A check of mpishard has refused what all ranks gave; they know it from each other, and raise the same error.
    on_all_ranks: bool = False

    def __str__(self) -> str:
        when = f" in step {self.step}" if self.step else ""
        return f"{self.kind} at {self.where}" + (" after its training" if self.trained else when)

    def same_as(self, other: Failure | None) -> bool:
        """Return True if both are the same failure; messages may contain values that change, and are not compared."""
        return other is not None and (self.kind, self.where, self.step) == (other.kind, other.where, other.step)


@dataclass(frozen=True)
class Ended:
    """The note that the script has ended, with its exit code; None if only the launcher knows it."""

    code: int | None


@dataclass(frozen=True)
class Heal:
    """The note that processes have died and others continue: the number left, their last committed step, and the time.

    `time` is in seconds since 1970.
    """

    left: int
    step: int
    time: float


@dataclass(frozen=True)
class Notes:
    """The notes of the processes of one start, as they were read at one time."""

    # A process runs the script.  As MPI initialises all processes together, all of them have imported mpishard.
    started: bool = False
    training: bool | None = None  # an elastic run is under way; None: no elastic run has begun
    step: int = 0  # the last noted step, or 0
    heal: Heal | None = None  # the last death that others survived
    ended: Ended | None = None  # the completion marker
    # A process other than the first left its script with an exit code other than 0; launchers may then end the others.
    given_up: Ended | None = None
    failure: Failure | None = None  # an uncaught exception of a process
    aborted: bool = False  # a process has tried to end the job
    multiple_of: int | None = None  # the meshes of the job need a multiple of this number of ranks; None: not noted

    @property
    def healed(self) -> int:
        """Number of processes left after the last death that others survived, or 0."""
        return 0 if self.heal is None else self.heal.left


@dataclass(frozen=True)
class JobNotes:
    """The files of one start of a run, in a folder that several starts share.

    `attempt` is the number of the start, unique in this folder: notes of other starts are ignored.  `first` is the
    number of this run's first start; an earlier run may have had the folder.  Ten methods write a note of one kind
    each, so that one place has the form of all notes.
    """

    path: Path
    attempt: int = 0
    first: int = 0

    @classmethod
    def create(cls, path: Path) -> JobNotes:
        """Make the folder for a first start, or use an existing one; the notes of an earlier run in it are removed.

        The folder above it must exist.  Raises ValueError if others may read the folder or it belongs to another user,
        and if a run of this machine uses it: each would end the processes of the other.
        """
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        holder, own = read_note(path / "supervisor", private=True), list(identity(os.getpid()))
        if holder and holder[0] and holder != own and holder == list(identity(holder[1])):
            raise ValueError(f"{path} is used by another mpishard run, process {holder[1]}; give each its own --folder")
        write_note(path / "supervisor", own, private=True)
        # Of a run that saves there, too, the files and checkpoints stay.
        names = "started|training|step|cell|ended|given-up|failure|echo|aborted|healed|ending"
        remove_notes(path, rf"({names})-\d+")
        begun = cls(path.absolute(), -1).next()
        return replace(begun, first=begun.attempt)

    def next(self) -> JobNotes:
        """The same folder for the next start; this start is over from now on."""
        before = read_note(self.path / "start", private=True)
        following = replace(self, attempt=self.attempt + 1 if before is None else before + 1)
        write_note(self.path / "start", following.attempt, private=True)
        return following

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> JobNotes | None:
        """The notes of this process's run, if it is supervised; else None."""
        path, attempt = environment.get(_FOLDER), environment.get(_ATTEMPT, "")
        first = environment.get(_FIRST, "")
        if not path or not attempt.isdigit():
            return None
        return cls(Path(path), int(attempt), int(first if first.isdigit() else attempt))

    @classmethod
    def to_report(cls) -> JobNotes | None:
        """As `from_environment`; None in a process that one of the job has started, whose end is not the job's."""
        run, own = cls.from_environment(), str(os.getpid())
        if run is None or (os.environ.get(_REPORTER) or own) != own:
            return None
        os.environ[_REPORTER] = own
        return run

    def environment(self) -> dict[str, str]:
        """The variables that `from_environment` and `to_report` read."""
        return {_FOLDER: str(self.path), _ATTEMPT: str(self.attempt), _FIRST: str(self.first), _REPORTER: ""}

    def note_started(self) -> None:
        """Note that a process of the job runs the script."""
        self._write("started", "")

    def note_training(self, under_way: bool) -> None:
        """Note that an elastic run of the script begins (`under_way`), or has ended."""
        self._write("training", under_way)

    def note_step(self, step: int) -> None:
        self._write("step", step)

    def note_cell(self, ranks: int) -> None:
        """Note that the meshes of the job need a multiple of this number of ranks."""
        self._write("cell", ranks)

    def note_healed(self, left: int, step: int) -> None:
        """Note that processes have died and `left` others continue after `step`, their last committed step.

        These may end the run in order without the dead ones.
        """
        self._write("healed", [left, step])

    def note_ended(self, ended: Ended) -> None:
        """Note that the script has ended."""
        self._write("ended", asdict(ended))

    def note_given_up(self, ended: Ended) -> None:
        """Note that a process other than the first left its script with an exit code other than 0."""
        self._write("given-up", asdict(ended))

    def note_failure(self, failure: Failure, echo: bool = False) -> None:
        """Note the failure of a process; of several the last one is kept.

        `echo`: the process fails because another one does, whose own failure counts if it is noted.  Else the same
        failure would have one name or the other, by which process was later.
        """
        self._write("echo" if echo else "failure", asdict(failure))

    def note_ending(self) -> None:
        """Note that the user asked the run to end; its processes get a signal afterwards."""
        self._write("ending", "")

    def note_aborted(self) -> None:
        self._write("aborted", "")

    @property
    def is_restart(self) -> bool:
        """True if the run was started before."""
        return self.attempt > self.first

    @property
    def is_over(self) -> bool:
        """True if the supervisor has ended this start, or has ended the whole run and removed its folder.

        Raises OSError if the folder cannot be read.
        """
        return read_note(self.path / "start", private=True) != self.attempt

    @property
    def is_ending(self) -> bool:
        """True if the user asked the run to end."""
        return self._read("ending") is not None

    def is_reporter(self, is_first: bool, is_silent: bool) -> bool:
        """Return True if a process reports the job's progress and its end: at first the first one.

        After processes of this start have died and others continue it is every process that is not silent.
        """
        return is_first if self._read("healed") is None else not is_silent

    @property
    def notes(self) -> Notes:
        """All notes of the processes; their files are read now."""
        ended, given_up = (self._read(name) for name in ("ended", "given-up"))
        failure = self._read("failure") or self._read("echo")
        return Notes(
            started=self._read("started") is not None,
            training=self._read("training"),
            step=self._read("step") or 0,
            heal=self._heal(),
            ended=None if ended is None else Ended(**ended),
            given_up=None if given_up is None else Ended(**given_up),
            failure=None if failure is None else Failure(**failure),
            aborted=self._read("aborted") is not None,
            multiple_of=self._read("cell"),
        )

    def _heal(self) -> Heal | None:
        with contextlib.suppress(FileNotFoundError):
            written = self._path("healed").stat().st_mtime
            found = self._read("healed")
            return None if found is None else Heal(found[0], found[1], written)
        return None

    def _write(self, name: str, content: Any) -> None:
        write_note(self._path(name), content, private=True)

    def _read(self, name: str) -> Any:
        return read_note(self._path(name), private=True)

    def _path(self, name: str) -> Path:
        return self.path / f"{name}-{self.attempt}"
