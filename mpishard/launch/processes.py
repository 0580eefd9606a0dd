"""Processes of this machine: the descendants of this process, and how to end them.  Linux only; needs no MPI."""

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
    """Kill this process and the launcher's daemon that started it; the daemon may otherwise wait for ever.

    Raises
    ------
    AssertionError
        Never, as this does not return.
    """
    parent = os.getppid()
    with contextlib.suppress(OSError):
        if Path(f"/proc/{parent}/comm").read_text().strip() in _DAEMONS:
            os.kill(parent, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("this process lives")


def adopt_orphans() -> None:
    """Make this process the parent of orphaned descendants, so that `descendants` finds them."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def descendants() -> set[int]:
    """Process numbers of all living descendants of this process."""
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
    """From the environment of a process: its rank, as its launcher names it, and the number of ranks on this host."""
    with contextlib.suppress(OSError):
        environment = b"\0" + Path(f"/proc/{process}/environ").read_bytes()
        rank, here = _RANK.search(environment), _RANKS_HERE.search(environment)
        if rank and here:
            return rank[0], int(here[1])
    return b"", 0


class Offspring:
    """The processes that a child of this process, a launcher, has started.

    Parameters
    ----------
    child : int
    limit : float
        Seconds without any of them after which `gone` is set.

    Attributes
    ----------
    gone : bool
        All of them have ended, as have all other descendants of this process, but the child still runs.
    ranks_gone : int
        The number of its first ranks that do not run any more, or not yet.
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
                rank, here = _rank(process)
                # A child of a rank has the rank's environment; an orphan is a child of this process.
                if parent != os.getpid() and rank not in (b"", _rank(parent)[0]):
                    self._ranks.add(process)
                    self._ranks_started[parent] = here
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
