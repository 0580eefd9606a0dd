"""What the processes of a job tell the supervisor of their run, as small files in a folder that only the owner reads.

The path of the folder and the number of the start are in the environment of every process of a supervised job.  Nothing
here needs MPI.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mpishard.io.atomic_json import read_note, remove_notes, write_note

_FOLDER, _ATTEMPT = "MPISHARD_RUN", "MPISHARD_ATTEMPT"


class RunLost(RuntimeError):
    """After deaths the processes cannot go on; another start can.  It counts as a death, not as a failure."""


@dataclass(frozen=True)
class Failure:
    """An exception that nobody caught: its type with its message, where it was raised, and the step under way or 0.

    `trained`: the elastic run of the script had ended.
    """

    kind: str
    message: str
    where: str
    step: int
    trained: bool = False

    def __str__(self) -> str:
        when = f" in step {self.step}" if self.step else ""
        return f"{self.kind} at {self.where}" + (" after its training" if self.trained else when)

    def same_as(self, other: Failure | None) -> bool:
        """Whether it is the same failure again; messages may hold values that change."""
        return other is not None and (self.kind, self.where, self.step) == (other.kind, other.where, other.step)


@dataclass(frozen=True)
class Ended:
    """The script came to its end; `code` is its exit code, None if only the launcher knows it."""

    code: int | None


@dataclass(frozen=True)
class RunFolder:
    """The files of one start of a run.

    Parameters
    ----------
    path : Path
    attempt : int
        Number of the start, one that no other start in this folder had; what another one left does not count.
    """

    path: Path
    attempt: int = 0

    @classmethod
    def create(cls, path: Path) -> RunFolder:
        """Make the folder for a first start, or take one that is there; what an earlier run noted in it is removed.

        Raises
        ------
        ValueError
            If others may look into the folder or it is not the user's.
        OSError
        """
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        names = ("started", "training", "step", "ended", "given-up", "failure", "aborted", "healed", "ending")
        remove_notes(path, *(f"{name}-" for name in names))
        return cls(path.absolute(), -1).next()

    def next(self) -> RunFolder:
        """The same folder for another start; from now on the one before is over."""
        before = read_note(self.path / "start", private=True)
        following = replace(self, attempt=self.attempt + 1 if before is None else before + 1)
        write_note(self.path / "start", following.attempt, private=True)
        return following

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> RunFolder | None:
        """That of the run which this process belongs to, if it is supervised."""
        path, attempt = environment.get(_FOLDER), environment.get(_ATTEMPT, "")
        return cls(Path(path), int(attempt)) if path and attempt.isdigit() else None

    def environment(self) -> dict[str, str]:
        """What `from_environment` reads."""
        return {_FOLDER: str(self.path), _ATTEMPT: str(self.attempt)}

    def note_started(self) -> None:
        """A process of the job runs the script."""
        self._write("started", "")

    def note_training(self, under_way: bool) -> None:
        """An elastic run of the script begins, or has ended."""
        self._write("training", under_way)

    def note_step(self, step: int) -> None:
        """The run is at this step."""
        self._write("step", step)

    def note_healed(self, left: int, step: int) -> None:
        """Processes of the job have died and so many go on: those may end the run in order without them.

        `step` is the last that they have committed.
        """
        self._write("healed", [left, step])

    def note_ended(self, ended: Ended) -> None:
        """The script came to its end."""
        self._write("ended", asdict(ended))

    def note_given_up(self, ended: Ended) -> None:
        """A process that does not speak for the job left its script with an exit code other than 0."""
        self._write("given-up", asdict(ended))

    def note_failure(self, failure: Failure) -> None:
        """A process failed; of several the last one stands."""
        self._write("failure", asdict(failure))

    def note_ending(self) -> None:
        """The user wishes the run to end; its processes are sent a signal then."""
        self._write("ending", "")

    def note_aborted(self) -> None:
        """A process wants the job to end."""
        self._write("aborted", "")

    @property
    def is_over(self) -> bool:
        """Whether the supervisor has given this start up, or the whole run, with its folder.

        Raises
        ------
        OSError
            If the folder cannot be looked into.
        """
        return read_note(self.path / "start", private=True) != self.attempt

    @property
    def started(self) -> bool:
        return self._read("started") is not None

    @property
    def is_ending(self) -> bool:
        return self._read("ending") is not None

    @property
    def training(self) -> bool | None:
        """Whether an elastic run is under way; None if there was none yet."""
        found: bool | None = self._read("training")
        return found

    @property
    def step(self) -> int:
        """The last step that was noted; 0 if none was."""
        return self._read("step") or 0

    @property
    def healed(self) -> int:
        """How many processes were left after the last death that others have survived; 0 if there was none."""
        found = self._read("healed")
        return 0 if found is None else int(found[0])

    @property
    def heal(self) -> tuple[float, int]:
        """When that was noted, in seconds since 1970, and the step; twice 0 if there was no death."""
        found = self._read("healed")
        with contextlib.suppress(FileNotFoundError):
            return self._path("healed").stat().st_mtime, 0 if found is None else found[1]
        return 0.0, 0

    @property
    def ended(self) -> Ended | None:
        found = self._read("ended")
        return None if found is None else Ended(**found)

    @property
    def given_up(self) -> Ended | None:
        found = self._read("given-up")
        return None if found is None else Ended(**found)

    @property
    def failure(self) -> Failure | None:
        found = self._read("failure")
        return None if found is None else Failure(**found)

    @property
    def aborted(self) -> bool:
        return self._read("aborted") is not None

    def _write(self, name: str, content: Any) -> None:
        write_note(self._path(name), content, private=True)

    def _read(self, name: str) -> Any:
        return read_note(self._path(name), private=True)

    def _path(self, name: str) -> Path:
        return self.path / f"{name}-{self.attempt}"
