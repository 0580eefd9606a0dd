"""Kills processes of the run that are stopped (SIGSTOP) for too long: MPI counts them as alive, so all would wait.

Every process of an elastic run watches its peers on the same host in ``/proc``, in a thread that makes no call of MPI,
and kills a peer that stays stopped.  ULFM then handles this death like any other.  If all processes of a host are
stopped, none is left to kill them.  A process under a debugger counts as running.  Linux only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from mpishard.io.log import warn

_POLL_S = 0.25


class Peer(NamedTuple):
    """A process of the run; `host` and `started` distinguish it from others with the same process id, `number`."""

    host: str
    number: int
    started: str


def this_process() -> Peer:
    """The identification of this process by which peers watch it."""
    host = ""
    with contextlib.suppress(OSError):  # without /proc no process is watched
        host = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    return Peer(host, os.getpid(), _look(os.getpid())[1])


class Watch:
    """Watches the processes of this host, as a context manager, and kills one that is stopped for `limit` s."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._own = this_process()
        self._peers: tuple[Peer, ...] = ()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mpishard-watch", daemon=True)

    def follow(self, peers: Iterable[Peer]) -> None:
        """Replace the watched processes by those of `peers` that are on this host."""
        own = self._own
        self._peers = tuple(each for each in peers if own.host and each.host == own.host and each != own)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        poll = min(_POLL_S, self.limit / 4)
        since: dict[Peer, float] = {}
        last = time.monotonic()
        while not self._end.wait(poll):
            now = time.monotonic()
            if now - last > 4 * poll:
                # This process itself did not run: perhaps the whole job was stopped and has just been continued.
                since.clear()
            last = now
            stopped = [each for each in self._peers if _look(each.number) == ("T", each.started)]
            since = {each: since.get(each, now) for each in stopped}
            for each, began in since.items():
                if now - began >= self.limit:
                    _end(each, now - began)


def _end(peer: Peer, seconds: float) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(peer.number, signal.SIGKILL)
        warn(f"process {peer.number} has been stopped for {seconds:.1f} s and is ended")


def _look(number: int) -> tuple[str, str]:
    """State of a process ("T": stopped), and its start in clock ticks since the boot; empty if it is gone."""
    try:
        # The fields follow the program's name, which is in brackets and may contain any character.
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]
