"""Processes of this machine: who descends from whom, and how all of them are ended.  Linux only; needs no MPI."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import time
from pathlib import Path
from typing import NoReturn

_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>
_POLL_S = 0.01
# What launchers start on each host for one job, by the names that the kernel has for them.
_DAEMONS = ("prted", "orted", "hydra_pmi_proxy")
_RANK = re.compile(rb"\0(OMPI_COMM_WORLD_RANK|PMI_RANK)=\d+")
_RANKS_HERE = re.compile(rb"\0(?:OMPI_COMM_WORLD_LOCAL_SIZE|MPI_LOCALNRANKS)=(\d+)")


def die_with_parent() -> None:
    """From now on this process is killed when the thread that started it ends."""
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def die_with_single_threaded_parent() -> None:
    """`die_with_parent`, unless the parent has threads: the one that started this process may end long before it."""
    with contextlib.suppress(OSError):
        if len(os.listdir(f"/proc/{os.getppid()}/task")) == 1:
            die_with_parent()


def end_with_daemon() -> NoReturn:
    """Kill this process, and the daemon of the launcher that started it, which may wait for orders for ever."""
    parent = os.getppid()
    with contextlib.suppress(OSError):
        if Path(f"/proc/{parent}/comm").read_text().strip() in _DAEMONS:
            os.kill(parent, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("this process lives")


def adopt_orphans() -> None:
    """Descendants of this process whose parents die become its children, so that `descendants` finds them."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def descendants() -> set[int]:
    """Process numbers of the children of this process, of their children and so on, without those that are dead."""
    return set(_parents())


def _parents() -> dict[int, int]:
    """The parent of each descendant of this process."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                # The name of the program, in brackets, may hold anything.
                state, number, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
                if state not in "ZX":
                    children.setdefault(int(number), []).append(int(folder.name))
    found: dict[int, int] = {}
    pending = [os.getpid()]
    while pending:
        parent = pending.pop()
        for child in children.get(parent, ()):
            found[child] = parent
            pending.append(child)
    return found


def _rank(process: int) -> tuple[bytes, int]:
    """What a launcher calls a rank in the environment of a process, and how many of them it says are on this host."""
    with contextlib.suppress(OSError):
        environment = b"\0" + Path(f"/proc/{process}/environ").read_bytes()
        rank, here = _RANK.search(environment), _RANKS_HERE.search(environment)
        if rank and here:
            return rank[0], int(here[1])
    return b"", 0


class Offspring:
    """What a child of this process, a launcher, has started.

    Parameters
    ----------
    child : int
    limit : float
        Seconds after which the child counts as having outlived all of it.

    Attributes
    ----------
    gone : bool
        The child has outlived all that it has started; other descendants of this process count, too.
    ranks_gone : int
        How many of the ranks that it started first do not run any more, or not yet.
    """

    def __init__(self, child: int, limit: float) -> None:
        self.gone = False
        self.ranks_gone = 0
        self._child = child
        self._limit = limit
        self._looked = self._seen = time.monotonic()
        self._had_any = False
        self._ranks: set[int] = set()
        self._ranks_of: dict[int, int] = {}  # by their parent, as that says
        self._knows_all = False

    def look(self, started: bool) -> None:
        """Look anew, about once a second.  `started`: all ranks run; those that come now were spawned by others."""
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
                rank, here = _rank(process)
                # What a rank has started has its environment; an orphan is a child of this process.
                if parent != os.getpid() and rank not in (b"", _rank(parent)[0]):
                    self._ranks.add(process)
                    self._ranks_of[parent] = here
        self._knows_all = started
        self.ranks_gone = sum(self._ranks_of.values()) - len(self._ranks & parents.keys())


def end_descendants(limit: float = 10.0) -> set[int]:
    """Kill them all, and those that they start meanwhile; returns those that are left after `limit` seconds.

    The caller must have waited for its own children, or not wish to.
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
