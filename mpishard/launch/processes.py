"""Processes of this machine: the descendants of this process, how to end them, and what MPI libraries leave behind.

Linux only; needs no MPI.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>
_POLL_S = 0.01
GONE, DEAD, STOPPED = "is gone", "is dead", "is stopped (SIGCONT continues it)"
BEGAN = 19  # in `process_facts`: when a process has started, in ticks since the machine has
# The daemons that launchers start on each host for a job, by their names in the kernel.
_DAEMONS = ("prted", "orted", "hydra_pmi_proxy")
_RANK = re.compile(rb"\0(OMPI_COMM_WORLD_RANK|PMI_RANK)=\d+")
_RANKS_HERE = re.compile(rb"\0(?:OMPI_COMM_WORLD_LOCAL_SIZE|MPI_LOCALNRANKS)=(\d+)")


def die_with_parent() -> None:
    """Make the kernel kill this process when the thread that started it ends."""
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def die_with_single_threaded_parent() -> None:
    """`die_with_parent`, unless the parent has threads: the starting thread may end long before the parent."""
    with contextlib.suppress(OSError):
        if len(os.listdir(f"/proc/{os.getppid()}/task")) == 1:
            die_with_parent()


def end_with_daemon() -> NoReturn:
    """Kill this process and the launcher's daemon that started it; the daemon may otherwise wait forever."""
    parent = os.getppid()
    with contextlib.suppress(OSError):
        if Path(f"/proc/{parent}/comm").read_text(errors="replace").strip() in _DAEMONS:
            os.kill(parent, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("this process lives")


def adopt_orphans() -> None:
    """Make this process the parent of orphaned descendants, so that `descendants` finds them."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def process_facts(number: int | str) -> list[str]:
    """The fields of a process in ``/proc/NUMBER/stat`` from its state on ("T": stopped); OSError if it is gone."""
    # The name of the program before them, in brackets, may hold anything, also a letter that the kernel has cut.
    return Path(f"/proc/{number}/stat").read_text(errors="replace").rpartition(")")[2].split()


def state_here(name: str) -> str:
    """The state of a process: `GONE`, `DEAD` or `STOPPED`; empty if it runs, and for processes of other hosts.

    `name` is that of its file: host and process number.
    """
    host, _, number = name.rpartition("-")
    if host != os.uname().nodename:
        return ""
    try:
        state = process_facts(number)[0]
    except OSError:
        return GONE
    return STOPPED if state in "Tt" else DEAD if state in "ZX" else ""


def this_kernel() -> str:
    """A text that only processes of this machine have in common, in all containers; OSError if this does not tell."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def identity(process: int) -> tuple[str, int, str]:
    """What tells a process that lives from all others: its machine, its number, and when it began.

    Processes that see each other have the same machine. It and the time are empty if the process is gone, or if this
    system does not tell.
    """
    with contextlib.suppress(OSError):
        facts = process_facts(process)
        if facts[0] not in "ZX":
            return this_kernel() + os.readlink("/proc/self/ns/pid"), process, facts[BEGAN]
    return "", process, ""


def remove_leftovers(folder: Path, name: str) -> None:
    """Remove what processes of this machine that are dead have left in a folder, as ``.NAME-HOST-PROCESS-8 DIGITS``.

    `name` is a regular expression.
    """
    left = re.compile(rf"\.(?:{name})-(.+-\d+)-[0-9a-f]{{8}}")
    for path in folder.glob(".*"):
        if (found := left.fullmatch(path.name)) and state_here(found[1]) in (GONE, DEAD):
            with contextlib.suppress(OSError):
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()


def descendants(of: int | None = None) -> set[int]:
    """Process numbers of all living descendants of a process; default: of this one."""
    return set(_parents(of))


def _parents(of: int | None = None) -> dict[int, int]:
    """The parent of each descendant of a process; default: of this one."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                state, number, *_ = process_facts(folder.name)
                if state not in "ZX":
                    children.setdefault(int(number), []).append(int(folder.name))
    found: dict[int, int] = {}
    pending = [os.getpid() if of is None else of]
    while pending:
        parent = pending.pop()
        for child in children.get(parent, ()):
            found[child] = parent
            pending.append(child)
    return found


def _rank(process: int) -> tuple[bytes, int] | None:
    """From the environment of a process: its rank, as its launcher names it, and the number of ranks on this host.

    A process that is no rank has none, b"" and 0; None if the process is ending, or gone, and has no environment.
    """
    with contextlib.suppress(OSError):
        if environment := Path(f"/proc/{process}/environ").read_bytes():
            rank, here = _RANK.search(b"\0" + environment), _RANKS_HERE.search(b"\0" + environment)
            return (rank[0], int(here[1])) if rank and here else (b"", 0)
    return None


class Offspring:
    """The processes that a child of this process, a launcher, has started.

    `gone` is set after `limit` seconds in which all of them have ended, as have all other descendants of this process,
    but the child still runs.  `ranks_gone` is the number of its first ranks that do not run any more, or not yet.
    """

    def __init__(self, child: int, limit: float) -> None:
        self.gone = False
        self.ranks_gone = 0
        self._child = child
        self._limit = limit
        self._looked = self._seen = time.monotonic()
        self._had_any = False
        self._ranks: set[int] = set()
        # By the process that has started ranks, a launcher or its daemon: how many it starts on this node.
        self._ranks_started: dict[int, int] = {}
        self._knows_all = False

    def look(self, started: bool) -> None:
        """Look again, about once a second.  `started`: all first ranks run; new ones are spawned by others."""
        now = time.monotonic()
        if now - self._looked < min(1.0, self._limit / 4):
            return
        self._looked = now
        parents = _parents()
        if parents.keys() - {self._child}:
            self._had_any, self._seen = True, now
        self.gone = self._had_any and now - self._seen > self._limit
        if not self._knows_all:
            for process, parent in parents.items():
                rank, of_parent = _rank(process), _rank(parent)
                # A child of a rank has the rank's environment; an orphan is a child of this process.  A parent that is
                # ending has no environment before its children are orphans: who knows what it was.
                if parent != os.getpid() and rank and of_parent and rank[0] not in (b"", of_parent[0]):
                    self._ranks.add(process)
                    self._ranks_started[parent] = rank[1]
        self._knows_all = started
        self.ranks_gone = sum(self._ranks_started.values()) - len(self._ranks & parents.keys())


def end_descendants(limit: float = 10.0) -> set[int]:
    """Kill all descendants, also those started meanwhile; returns those that are left after `limit` seconds.

    It reaps the children of this process, so a caller that needs their exit codes must wait for them before.
    """
    deadline = time.monotonic() + limit
    while True:
        left = descendants()
        for process in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(_POLL_S)


def _prctl(option: int, value: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


# Seconds between two looks, while segments are made, and later.
_SOON_S, _EVERY_S = 0.2, 5.0
# Segments of MPICH, Open MPI and UCX; other files there may be the user's.
_SEGMENT = re.compile(r"/dev/shm/(mpich_sh\w+|(sm|vader)_segment\.\S+|ucx_shm_\w+)$")


class Leftovers:
    """Remembers the segments that the processes of one start of a job have mapped, and removes them afterwards.

    Only what certainly belongs to the job is removed: segments with names of MPI libraries that a process of the job
    had mapped and no process maps any more, and the folder with the launcher's own process number.  `found` gives the
    segments that the descendants of this process have mapped.
    """

    def __init__(
        self, found: Callable[[], set[Path]] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._found = found or (lambda: _mapped(descendants()))
        self._clock = clock
        self._segments: set[Path] = set()
        self._next = clock() + _SOON_S

    def look(self) -> None:
        """Note the segments of the descendants of this process; most calls return at once."""
        if self._clock() >= self._next:
            known, self._segments = self._segments, self._segments | self._found()
            settled = known and known == self._segments
            self._next = self._clock() + (_EVERY_S if settled else _SOON_S)

    def remove(self, launcher: int) -> None:
        """Remove the leftovers of dead processes; `launcher` is the process number of their launcher."""
        if self._segments:
            everybody = (int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit())
            for path in self._segments - _mapped(everybody):
                with contextlib.suppress(OSError):
                    path.unlink()
        with contextlib.suppress(OSError):  # there may be no temporary folder at all
            folder = Path(tempfile.gettempdir()) / f"ompi.{launcher}"  # of Open MPI
            if folder.stat(follow_symlinks=False).st_uid == os.geteuid():
                shutil.rmtree(folder, ignore_errors=True)


def _mapped(processes: Iterable[int]) -> set[Path]:
    """The shared-memory segments of MPI libraries that these processes have mapped."""
    found = set()
    for process in processes:
        with contextlib.suppress(OSError):  # the process has ended, or is another user's
            for line in Path(f"/proc/{process}/maps").read_text(errors="replace").splitlines():
                if match := _SEGMENT.search(line):
                    found.add(Path(match[0]))
    return found
