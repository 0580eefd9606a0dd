"""Watches the processes of an elastic run on one host, and kills one that stays stopped: ULFM then finds a death.

Every process watches its peers on the same host in ``/proc``, in a thread that makes no call of MPI.  If all processes
of a host are stopped, none is left to kill them.  A process under a debugger counts as running.  Linux only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterable

from mpishard.elastic.roles import Peer
from mpishard.io import log
from mpishard.launch.processes import BEGAN, identity, process_facts

_POLL_S = 0.25


def this_process() -> Peer:
    """The identification of this process by which peers watch it."""
    return Peer(*identity(os.getpid()))  # without /proc no process is watched


class StoppedPeerMonitor:
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

    def __enter__(self) -> StoppedPeerMonitor:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
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
            stopped = [each for each in self._peers if _state_and_start(each.pid) == ("T", each.started)]
            since = {each: since.get(each, now) for each in stopped}
            for each, began in since.items():
                if (seconds := now - began) >= self.limit:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(each.pid, signal.SIGKILL)
                        log.warn(f"the process with pid {each.pid} has been stopped for {seconds:.1f} s and was killed")


def _state_and_start(number: int) -> tuple[str, str]:
    """State of a process ("T": stopped), and its start in clock ticks since the boot; empty if it is gone."""
    try:
        fields = process_facts(number)
    except OSError:
        return "", ""
    return fields[0], fields[BEGAN]
