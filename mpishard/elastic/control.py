"""Who asks from outside how many workers a run shall have: another shell, or what `discover` asks.

Another shell asks by small files in a folder that only its owner can open.  The folder ``control`` in the run's folder
is made when the run begins and removed when it ends.  The run writes the file ``run`` there: its limits, its workers,
and its answer to the last request.  To request another number of workers, or a mesh, write the file ``request``.  The
run looks for it between steps and removes it with its answer.  Anybody who may write into the run's folder can replace
the control folder, so its owner and mode are checked at each use.  Nothing here needs MPI.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from mpishard.elastic.mesh_choice import MeshSizes
from mpishard.io import files, log
from mpishard.io.files import NotPrivateError, opened, read_note, remove_notes, warn_of_writers, write_note
from mpishard.launch.launchers import parse_hosts

_POLL_S = 0.2  # between two looks of the run for requests
_WAIT_POLL_S = 0.05  # and of another shell for the answer
FIXED = "the run keeps the tensor and pipeline sizes of its mesh; ElasticOptimizer(..., layouts=...) may change them"
T = TypeVar("T")
# A request asks for a number of workers or for a mesh.
Wanted = int | MeshSizes


@dataclass(frozen=True)
class Answer:
    """The answer to the request `id`: the workers before and after, or why the request was refused.

    `step` is the last step of the workers before, or the one after which the request was refused.
    """

    id: str
    before: int
    after: int
    step: int
    refused: str = ""
    mesh: str = ""  # mesh after the request, of a run that may change it


@dataclass(frozen=True)
class Standing:
    """State of a run as its file shows it."""

    min_workers: int
    max_workers: int
    workers: int
    answer: Answer | None = None
    taken: str = ""  # id of the accepted request that still waits for workers to join
    mesh: str = ""  # of a run that may change its mesh


class ControlFolder:
    """The control folder of a run, for the run and for other shells."""

    def __init__(self, run: Path) -> None:
        self.path: Path = run.absolute() / "control"

    def make(self) -> None:
        """Make the folder and the run's folder, or clear the folder that an earlier run left.

        Raises ValueError if the folder belongs to another user or others may open it, and OSError, with a way out, if
        it cannot be made.
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
        """Raise ValueError if another user could write into the folder, FileNotFoundError if it does not exist."""
        with opened(self.path, private=True):
            pass

    def remove(self) -> None:
        """Remove the folder, at the end of the run."""
        with contextlib.suppress(OSError, NotPrivateError):
            remove_notes(self.path)
            self.path.rmdir()

    def write(self, name: str, content: Any) -> None:
        write_note(self.path / name, content, private=True)

    def _read(self, name: str) -> Any:
        return read_note(self.path / name, private=True)

    @property
    def request(self) -> tuple[str, Wanted | None] | None:
        """Id of the present request and the number of workers or mesh that it wants; None without one.

        An unreadable request wants nothing.
        """
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
        try:
            mesh = MeshSizes.parse(str(found["mesh"])) if found.get("mesh") else None
        except ValueError:
            return "", None
        return str(found.get("id")), mesh or found["workers"]

    def take_back(self, id: str) -> None:
        """Remove the request `id`, unless another one has replaced it."""
        request = self.request
        if request is not None and request[0] == id:
            with contextlib.suppress(FileNotFoundError), opened(self.path, private=True) as folder:
                os.unlink("request", dir_fd=folder)

    @property
    def standing(self) -> Standing | None:
        """The state of the run; None if no run has written one.  Raises ValueError if its file is damaged."""
        found = self._read("run")
        if found is None:
            return None
        standing = _of_fields(Standing, found)
        if standing is not None and standing.answer is not None:
            answer = _of_fields(Answer, standing.answer)
            standing = None if answer is None else replace(standing, answer=answer)
        if standing is None:
            raise ValueError(
                f"{self.path / 'run'} is damaged: a run writes its limits, its workers and its answer there"
            )
        return standing


def _of_fields(kind: type[T], found: Any) -> T | None:
    """A value of the fields that a file has; None unless it has exactly these."""
    types = get_type_hints(kind)
    if not isinstance(found, dict) or found.keys() != types.keys():
        return None
    plain = all(type(found[name]) is known for name, known in types.items() if known in (int, str))
    return kind(**found) if plain else None


class Control:
    """The run's side of a control folder; only the first worker calls `poll`, between two steps.

    `why_mesh_refused` gives the reason why the run cannot have a mesh, empty if it can; None: it keeps its own.
    """

    def __init__(
        self,
        folder: ControlFolder,
        min_workers: int,
        max_workers: int,
        why_mesh_refused: Callable[[MeshSizes], str] | None = None,
        every: float | None = None,
    ) -> None:
        self._folder = folder
        self._every = _POLL_S if every is None else every  # seconds between two looks
        self._why_mesh_refused = why_mesh_refused
        self._limits = min_workers, max_workers
        self._standing: Standing | None = None
        # Id of the request that the run has accepted, and the number of workers at that time.
        self._taken: tuple[str, int] | None = None
        self._next = 0.0
        self._has_warned = False  # that the folder was replaced

    def poll(self, workers: int, step: int, waits: bool = False, mesh: str = "") -> Wanted | None:
        """Write the number of workers after this step, and return what a new request wants, else None.

        A poll that returns a request does not answer it.  A later poll does, when the run has had its chance to change
        and waits for no more workers (`waits`).  If another request comes while it waits, that one replaces the first.
        The request file stays until the answer, so that it is not lost if this rank dies.
        """
        now = time.monotonic()
        if (waits or self._taken is None) and now < self._next:
            return None
        self._next = now + self._every
        try:
            return self._poll(workers, step, waits, mesh)
        except OSError:  # a shared disk may fail for a while, and the owner may remove the folder
            return None
        except NotPrivateError as error:
            if not self._has_warned:
                log.warn(f"the folder for requests was replaced, and requests are ignored from now on: {error}")
            self._has_warned = True
            return None

    def _poll(self, workers: int, step: int, waits: bool, mesh: str) -> Wanted | None:
        known = self._standing
        answer = None if known is None else known.answer
        wanted: Wanted | None = None
        request = self._folder.request
        if self._taken is not None and not (waits and request is not None and request[0] != self._taken[0]):
            id, before = self._taken
            if not waits:  # the workers have changed between the last step and this one
                answer, self._taken = Answer(id, before, workers, step - 1, mesh=mesh), None
                self._folder.take_back(id)
        elif request is not None:
            id, wanted = request
            if answer is not None and answer.id == id:  # the request was answered, but could not be removed then
                self._folder.take_back(id)
                wanted = None
            elif refused := self._why_refused(wanted):
                answer, wanted = Answer(id, workers, workers, step, refused), None
                self._folder.take_back(id)
            else:
                self._taken = id, workers
        taken = "" if self._taken is None else self._taken[0]
        standing = Standing(*self._limits, workers, answer, taken, mesh)
        if standing != known:
            self._folder.write("run", asdict(standing))
            self._standing = standing
        return wanted

    def _why_refused(self, wanted: Wanted | None) -> str:
        """The reason why the run refuses a request; empty if it accepts it."""
        workers = wanted.ranks if isinstance(wanted, MeshSizes) else wanted
        if workers is None or not self._limits[0] <= workers <= self._limits[1]:
            return f"{workers} workers are outside of min_workers={self._limits[0]} to max_workers={self._limits[1]}"
        if not isinstance(wanted, MeshSizes):
            return ""
        return FIXED if self._why_mesh_refused is None else self._why_mesh_refused(wanted)

    def close(self) -> None:
        """Remove the folder, at the end of the run."""
        self._folder.remove()


def request_resize(run: Path, wanted: Wanted, wait: float) -> Answer:
    """Request another number of workers, or a mesh, from the run in a folder, from a process outside of the run.

    Waits at most `wait` seconds for the answer, which a run gives between two steps.  Raises FileNotFoundError if no
    run uses the folder, ValueError if the folder is another user's or the run refuses the request, and TimeoutError if
    the run has not accepted the request in time, which is then taken back, or has accepted it and the workers that it
    needs have not joined yet.
    """
    folder = ControlFolder(run)
    try:
        folder.check()
    except (FileNotFoundError, NotADirectoryError):
        below = sorted(path.parent for path in run.glob("*/control"))
        if len(below) != 1:
            hint = f": one of {', '.join(map(str, below))}" if below else ""
            raise FileNotFoundError(
                f"no elastic run in {run}; name the folder of its checkpoints, or the one given to "
                f"ElasticOptimizer(..., folder=...){hint}"
            ) from None
        folder = ControlFolder(below[0])  # that of the checkpoints in the run's folder
        folder.check()
    standing = folder.standing
    mesh, workers = (wanted, wanted.ranks) if isinstance(wanted, MeshSizes) else (None, wanted)
    if mesh is not None and standing is not None and not standing.mesh:
        raise ValueError(f"the run in {run} has refused: {FIXED}")
    if standing is not None and not standing.min_workers <= workers <= standing.max_workers:
        raise ValueError(
            f"{workers} workers are outside of min_workers={standing.min_workers} to "
            f"max_workers={standing.max_workers} of the run in {run}"
        )
    id = uuid.uuid4().hex
    folder.write("request", {"id": id, "workers": workers} | ({} if mesh is None else {"mesh": str(mesh)}))
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
            f"the run in {run} has accepted the request and continues with {standing.workers} workers until the others "
            f"arrive, which has taken more than {wait:g} s; another request takes its place"
        )
    folder.take_back(id)
    raise TimeoutError(
        f"the run in {run} has not taken the request over within {wait:g} s, and it is taken back.  A run does so "
        "between steps: give a longer --wait if its steps are long.  A run that was killed leaves its folder behind.  "
        "Of two requests at the same time the later one counts"
    )


# What `discover` asks: a file, a program or a function, again and again.

_ANSWER_S = 30.0  # for a program to answer


class Discovery:
    """Asks in a thread, so that the run does not wait for the answer.

    `source` is a function without arguments that returns the number; a file with the number, or with hosts whose slots
    add up to it, see `count_slots`; or an executable file that prints one of these.  `every`: seconds between two.
    """

    def __init__(self, source: Callable[[], int] | str | os.PathLike[str], every: float = 1.0) -> None:
        self._every = every
        if callable(source):
            self._ask = source
        else:
            path = Path(source).absolute()  # a script may change its directory
            self._ask = lambda: _ask_file(path)
        self.known: int = -1  # the last number that the run has got
        self._news: int | None = None
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def news(self) -> int | None:
        """The number, once after each change; else None.  The first call starts the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mpishard-discovery", daemon=True)
            self._thread.start()
        with self._lock:
            news, self._news = self._news, None
        if news is not None:
            self.known = news
        return news

    def close(self) -> None:
        """Stop asking, without waiting for an answer that is under way."""
        self._end.set()

    def _run(self) -> None:
        known, problem = self.known, ""
        while not self._end.is_set():
            try:
                found = int(self._ask())
            except (Exception, SystemExit) as error:  # any failure: the run can continue without the answer
                if str(error) != problem:
                    problem = str(error)
                    log.warn(f"discover failed, the workers stay as they are: {error}")
            else:
                problem = ""
                if found != known:
                    known = found
                    with self._lock:
                        self._news = found
            self._end.wait(self._every)


def count_slots(text: str) -> int:
    """The number of workers that a host file asks for; ValueError if a line has another form than these.

    The file has one number; or one host per line, as ``NAME``, ``NAME:SLOTS`` or ``NAME slots=SLOTS``, and the number
    is the sum of the slots.  Empty lines and text after a ``#`` are ignored.
    """
    lines = [line.partition("#")[0].strip().replace(" slots=", ":") for line in text.splitlines()]
    lines = [line for line in lines if line]
    if len(lines) == 1 and lines[0].isdecimal():
        return int(lines[0])
    return sum(host.slots for host in parse_hosts(",".join(lines)))


def _ask_file(path: Path) -> int:
    if not os.access(path, os.X_OK):
        return count_slots(files.read(path).decode())
    done = subprocess.run(
        [str(path)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, timeout=_ANSWER_S, check=True
    )
    return count_slots(done.stdout)
