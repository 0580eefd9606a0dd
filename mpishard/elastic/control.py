"""Requests from another shell to an elastic run: small files in a folder that only its owner can open.

``control`` in the run's folder is made when the run begins and removed when it ends.  The run writes ``run`` there: its
limits, its workers, and what came of the last request.  Who wants another number of workers writes ``request``; the run
looks for it between steps and removes it with its answer.  Whoever may write into the run's folder can exchange this
one, so that its owner and mode are looked at whenever it is used.  Nothing here needs MPI.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mpishard.io import log
from mpishard.io.atomic_json import read_note, remove_notes, write_note
from mpishard.io.files import NotPrivateError, opened, warn_of_writers

_POLL_S = 0.2
_WAIT_POLL_S = 0.05


@dataclass(frozen=True)
class Answer:
    """What came of the request `id`: the workers before and after, or why it was refused."""

    id: str
    before: int
    after: int
    step: int
    refused: str = ""


@dataclass(frozen=True)
class Standing:
    """What a run says of itself; `taken` is the id of the request that it carries out, as soon as workers come."""

    min_workers: int
    max_workers: int
    workers: int
    answer: Answer | None = None
    taken: str = ""


class ControlFolder:
    """The control folder of a run, as both sides see it."""

    def __init__(self, run: Path) -> None:
        self.path: Path = run.absolute() / "control"

    def make(self) -> None:
        """Make it, with its run's folder, or take what an earlier run left.

        Raises
        ------
        ValueError
            If it is not the user's own, or others may open it.
        OSError
            With word of what is to be done.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(mode=0o700)
        except OSError as error:
            raise type(error)(
                f"the run needs a folder {self.path}, which cannot be made: {error.strerror}; give it a folder that "
                "all processes may write to, as ElasticOptimizer(..., folder=...) or that of its checkpoints"
            ) from None
        remove_notes(self.path)
        warn_of_writers(self.path.parent)

    def check(self) -> None:
        """Raise ValueError if somebody else could write there, FileNotFoundError if there is nothing."""
        with opened(self.path, private=True):
            pass

    def remove(self) -> None:
        """The run has ended."""
        with contextlib.suppress(OSError, NotPrivateError):
            remove_notes(self.path)
            self.path.rmdir()

    def write(self, name: str, content: Any) -> None:
        write_note(self.path / name, content, private=True)

    def _read(self, name: str) -> Any:
        return read_note(self.path / name, private=True)

    @property
    def request(self) -> tuple[str, int | None] | None:
        """Id and number of the request that is there; no number if it is not one."""
        try:
            found = self._read("request")
        except NotPrivateError:
            raise
        except ValueError:
            return "", None
        if found is None:
            return None
        if not isinstance(found, dict) or type(found.get("workers")) is not int:
            return "", None
        return str(found.get("id")), found["workers"]

    def take_back(self, id: str) -> None:
        """Remove the request, unless another one is there by now."""
        request = self.request
        if request is not None and request[0] == id:
            with contextlib.suppress(FileNotFoundError), opened(self.path, private=True) as folder:
                os.unlink("request", dir_fd=folder)

    @property
    def standing(self) -> Standing | None:
        """What the run says of itself; None if there is no run."""
        found = self._read("run")
        if found is None:
            return None
        answer = found.pop("answer")
        return Standing(**found, answer=None if answer is None else Answer(**answer))


class Control:
    """The run's side: only the rank that leads it calls `poll`, between two steps.

    Parameters
    ----------
    folder : ControlFolder
    min_workers, max_workers : int
        What may be asked for.
    """

    def __init__(self, folder: ControlFolder, min_workers: int, max_workers: int) -> None:
        self._folder = folder
        self._limits = min_workers, max_workers
        self._standing: Standing | None = None
        # Id of the request that the run has taken over, and the workers of then.
        self._taken: tuple[str, int] | None = None
        self._next = 0.0
        self._exchanged = False  # has been told of

    def poll(self, workers: int, step: int, waits: bool = False) -> int | None:
        """Say how many workers there are after this step, and return how many are asked for, if it is news.

        A request is answered by a poll after the one that returned it, when the run has had its chance to change, and
        no longer waits for workers to come, unless another one has come meanwhile.  It stays until then, so that it is
        not lost if this rank dies.
        """
        now = time.monotonic()
        if (waits or self._taken is None) and now < self._next:
            return None
        self._next = now + _POLL_S
        try:
            return self._poll(workers, step, waits)
        except OSError:  # of a disk that comes back, or of a folder removed by its owner
            return None
        except NotPrivateError as error:
            if not self._exchanged:
                log.warn(f"somebody has exchanged the folder for requests, which are not heard any more: {error}")
            self._exchanged = True
            return None

    def _poll(self, workers: int, step: int, waits: bool) -> int | None:
        known = self._standing
        answer = None if known is None else known.answer
        wanted: int | None = None
        request = self._folder.request
        if self._taken is not None and not (waits and request is not None and request[0] != self._taken[0]):
            id, before = self._taken
            if not waits:
                answer, self._taken = Answer(id, before, workers, step), None
                self._folder.take_back(id)
        elif request is not None:
            id, wanted = request
            if answer is not None and answer.id == id:  # answered, and then it could not be removed
                self._folder.take_back(id)
                wanted = None
            elif wanted is None or not self._limits[0] <= wanted <= self._limits[1]:
                refused = (
                    f"{wanted} workers are outside of min_workers={self._limits[0]} to max_workers={self._limits[1]}"
                )
                answer, wanted = Answer(id, workers, workers, step, refused), None
                self._folder.take_back(id)
            else:
                self._taken = id, workers
        standing = Standing(*self._limits, workers, answer, "" if self._taken is None else self._taken[0])
        if standing != known:
            self._folder.write("run", asdict(standing))
            self._standing = standing
        return wanted

    def close(self) -> None:
        """The run has ended."""
        self._folder.remove()


def request_resize(run: Path, workers: int, wait: float) -> Answer:
    """Ask the run in a folder for another number of workers and return what came of it.

    Parameters
    ----------
    wait : float
        Most seconds until the run has taken it over; it does so between two steps.

    Raises
    ------
    FileNotFoundError
        If no run is there.
    ValueError
        If the folder is another user's, or the run cannot have so many workers.
    TimeoutError
        If it has not been taken over in time; the request is taken back.  Or if it has, and the workers that it needs
        have not come yet.
    """
    folder = ControlFolder(run)
    try:
        folder.check()
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(
            f"there is no elastic run in {run}; name the folder of its checkpoints, or the one given to "
            "ElasticOptimizer(..., folder=...)"
        ) from None
    standing = folder.standing
    if standing is not None and not standing.min_workers <= workers <= standing.max_workers:
        raise ValueError(
            f"{workers} workers are outside of min_workers={standing.min_workers} to "
            f"max_workers={standing.max_workers} of the run in {run}"
        )
    id = uuid.uuid4().hex
    folder.write("request", {"id": id, "workers": workers})
    deadline = time.monotonic() + wait
    while time.monotonic() < deadline:
        if not folder.path.exists():
            raise FileNotFoundError(f"the run in {run} has ended before it took the request over")
        standing = folder.standing
        if standing is not None and standing.answer is not None and standing.answer.id == id:
            if standing.answer.refused:
                raise ValueError(f"the run in {run} has refused: {standing.answer.refused}")
            return standing.answer
        time.sleep(_WAIT_POLL_S)
    if standing is not None and standing.taken == id:
        raise TimeoutError(
            f"the run in {run} has taken the request over and goes on with {standing.workers} workers until the others "
            f"are there, which has taken more than {wait:g} s; another request takes its place"
        )
    folder.take_back(id)
    raise TimeoutError(
        f"the run in {run} has not taken the request over within {wait:g} s, and it is taken back.  A run does so "
        "between steps: give a longer --wait if its steps are long.  A run that was killed leaves its folder behind.  "
        "Of two requests at the same time the later one counts"
    )
