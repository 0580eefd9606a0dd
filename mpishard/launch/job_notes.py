"""Notes of the processes of a job to the supervisor of their run: small files in a folder private to the owner.

The environment of every process of a supervised job has the path of the folder and the number of the start.  Nothing
here needs MPI.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from mpishard.io.atomic_json import read_note, remove_notes, write_note

E = TypeVar("E", bound=BaseException)

_FOLDER, _ATTEMPT, _FIRST = "MPISHARD_RUN", "MPISHARD_ATTEMPT", "MPISHARD_FIRST_ATTEMPT"
# An attribute of errors that a process raises because another one has failed.
ECHO = "mpishard_echo"
# An attribute of errors that all ranks of a communicator raise alike, as they have told each other: how many they are.
ALIKE = "mpishard_alike"


def raised_by_all(error: E, ranks: int) -> E:
    """Mark an error as one that all ranks of a communicator raise alike.

    Parameters
    ----------
    error : Exception
        That of this rank.
    ranks : int
        How many ranks there are.

    Returns
    -------
    Exception
        `error`.
    """
    setattr(error, ALIKE, ranks)
    return error


class RunLost(RuntimeError):
    """After deaths the processes cannot continue, but a restart can.  It counts as a death, not as a failure."""


@dataclass(frozen=True)
class Failure:
    """An uncaught exception.

    Parameters
    ----------
    kind : str
        The name of its type.
    message : str
        Its text.
    where : str
        ``file:line`` that raised it.
    step : int
        The step under way, or 0.
    trained : bool
        Whether the elastic run of the script had ended.
    alike : bool
        Whether a check of mpishard has refused what all ranks gave: they have told each other, and raise alike.
    """

    kind: str
    message: str
    where: str
    step: int
    trained: bool = False
    alike: bool = False

    def __str__(self) -> str:
        when = f" in step {self.step}" if self.step else ""
        return f"{self.kind} at {self.where}" + (" after its training" if self.trained else when)

    def same_as(self, other: Failure | None) -> bool:
        """Whether both are the same failure; messages are not compared, since they may contain values that change.

        Parameters
        ----------
        other : Failure or None
            Of an earlier start.

        Returns
        -------
        bool
            False if there is no other.
        """
        return other is not None and (self.kind, self.where, self.step) == (other.kind, other.where, other.step)


@dataclass(frozen=True)
class Ended:
    """The note that the script has ended.

    Parameters
    ----------
    code : int or None
        Its exit code; None if only the launcher knows it.
    """

    code: int | None


@dataclass(frozen=True)
class Heal:
    """The note that processes have died and others go on: how many are left, their last committed step, and when.

    `time` is in seconds since 1970.
    """

    left: int
    step: int
    time: float


@dataclass(frozen=True)
class Notes:
    """What the processes of one start have noted, as it was read at one time.

    Attributes
    ----------
    started : bool
        A process runs the script.  As MPI initialises all processes together, all of them have imported mpishard.
    training : bool or None
        Whether an elastic run is under way; None if there was none yet.
    step : int
        The last noted step; 0 if there is none.
    heal : Heal or None
        The last death that others survived.
    ended : Ended or None
        The completion marker.
    given_up : Ended or None
        A process other than the first left its script with an exit code other than 0; launchers may then end the
        others.
    failure : Failure or None
        An uncaught exception of a process.
    aborted : bool
        A process has tried to end the job.
    """

    started: bool = False
    training: bool | None = None
    step: int = 0
    heal: Heal | None = None
    ended: Ended | None = None
    given_up: Ended | None = None
    failure: Failure | None = None
    aborted: bool = False

    @property
    def healed(self) -> int:
        """The number of processes left after the last death that others survived; 0 if there was none."""
        return 0 if self.heal is None else self.heal.left


@dataclass(frozen=True)
class JobNotes:
    """The files of one start of a run.

    Of its public members nine write a note, each a kind of note, so that one place has the form of all notes.

    Parameters
    ----------
    path : Path
        The folder.
    attempt : int
        Number of the start, unique in this folder; notes of other starts are ignored.
    first : int
        That of the first start of this run; an earlier run may have had the folder.
    """

    path: Path
    attempt: int = 0
    first: int = 0

    @classmethod
    def create(cls, path: Path) -> JobNotes:
        """Make the folder for a first start, or use an existing one; the notes of an earlier run in it are removed.

        Parameters
        ----------
        path : Path
            The folder; the one above it must be there.

        Returns
        -------
        JobNotes
            Of the first start.

        Raises
        ------
        ValueError
            If others may read the folder or it is not the user's.
        OSError
        """
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        names = ("started", "training", "step", "ended", "given-up", "failure", "echo", "aborted", "healed", "ending")
        remove_notes(path, *(f"{name}-" for name in names))
        begun = cls(path.absolute(), -1).next()
        return replace(begun, first=begun.attempt)

    def next(self) -> JobNotes:
        """The same folder for the next start; this start is over from now on.

        Returns
        -------
        JobNotes
            In the same folder.
        """
        before = read_note(self.path / "start", private=True)
        following = replace(self, attempt=self.attempt + 1 if before is None else before + 1)
        write_note(self.path / "start", following.attempt, private=True)
        return following

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> JobNotes | None:
        """The folder of this process's run, if it is supervised; else None.

        Parameters
        ----------
        environment : mapping of str to str
            That of this process.

        Returns
        -------
        JobNotes or None
            Those to which this process adds.
        """
        path, attempt = environment.get(_FOLDER), environment.get(_ATTEMPT, "")
        first = environment.get(_FIRST, "")
        if not path or not attempt.isdigit():
            return None
        return cls(Path(path), int(attempt), int(first if first.isdigit() else attempt))

    def environment(self) -> dict[str, str]:
        """The variables that `from_environment` reads.

        Returns
        -------
        dict of str to str
            For the environment of the job.
        """
        return {_FOLDER: str(self.path), _ATTEMPT: str(self.attempt), _FIRST: str(self.first)}

    def note_started(self) -> None:
        """Note that a process of the job runs the script."""
        self._write("started", "")

    def note_training(self, under_way: bool) -> None:
        """Note that an elastic run of the script begins, or has ended.

        Parameters
        ----------
        under_way : bool
            Whether it begins.
        """
        self._write("training", under_way)

    def note_step(self, step: int) -> None:
        """Note the step of the run.

        Parameters
        ----------
        step : int
            Its number.
        """
        self._write("step", step)

    def note_healed(self, left: int, step: int) -> None:
        """Note that processes have died and others go on; these may end the run in order without the dead ones.

        Parameters
        ----------
        left : int
            How many go on.
        step : int
            The last step that they have committed.
        """
        self._write("healed", [left, step])

    def note_ended(self, ended: Ended) -> None:
        """Note that the script has ended.

        Parameters
        ----------
        ended : Ended
            With its exit code.
        """
        self._write("ended", asdict(ended))

    def note_given_up(self, ended: Ended) -> None:
        """Note that a process other than the first left its script with an exit code other than 0.

        Parameters
        ----------
        ended : Ended
            With its exit code.
        """
        self._write("given-up", asdict(ended))

    def note_failure(self, failure: Failure, echo: bool = False) -> None:
        """Note the failure of a process; of several the last one is kept.

        Parameters
        ----------
        failure : Failure
            What is told of it.
        echo : bool
            Whether the process fails because another one does, whose own failure counts if it is noted: else the same
            failure would have one name or the other, by which process was later.
        """
        self._write("echo" if echo else "failure", asdict(failure))

    def note_ending(self) -> None:
        """Note that the user asked the run to end; its processes get a signal afterwards."""
        self._write("ending", "")

    def note_aborted(self) -> None:
        """Note that a process ends the job."""
        self._write("aborted", "")

    @property
    def is_restart(self) -> bool:
        """Whether the run was started before."""
        return self.attempt > self.first

    @property
    def is_over(self) -> bool:
        """Whether the supervisor has ended this start, or has ended the whole run and removed its folder.

        Raises
        ------
        OSError
            If the folder cannot be read.
        """
        return read_note(self.path / "start", private=True) != self.attempt

    @property
    def is_ending(self) -> bool:
        """Whether the user asked the run to end."""
        return self._read("ending") is not None

    @property
    def has_healed(self) -> bool:
        """Whether processes of this start have died and others go on."""
        return self._read("healed") is not None

    @property
    def notes(self) -> Notes:
        """All notes of the processes, of which each is a file that is read now."""
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
        )

    def _heal(self) -> Heal | None:
        with contextlib.suppress(FileNotFoundError):
            time = self._path("healed").stat().st_mtime
            found = self._read("healed")
            return None if found is None else Heal(found[0], found[1], time)
        return None

    def _write(self, name: str, content: Any) -> None:
        write_note(self._path(name), content, private=True)

    def _read(self, name: str) -> Any:
        return read_note(self._path(name), private=True)

    def _path(self, name: str) -> Path:
        return self.path / f"{name}-{self.attempt}"
