"""The hosts of a job: their list, which of them answer, and the processes of the job that are left on them."""

from __future__ import annotations

import functools
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

_POLL_S = 0.02
_AGAIN_S = 1.0  # until a host that did not answer is asked again
_SHELL = "ssh -o BatchMode=yes -o ConnectTimeout=3"

# Kills all processes with this entry in their environment.
_SWEEP = """
grep -slzxF {entry} /proc/[0-9]*/environ | while IFS=/ read -r _ _ process _; do kill -9 "$process" 2>/dev/null; done
true
"""


@dataclass(frozen=True)
class Host:
    name: str
    slots: int = 1

    @property
    def is_local(self) -> bool:
        return self.name in _local_names()


@dataclass(frozen=True)
class HostSettings:
    """The hosts of a job, and how they are reached."""

    names: str = ""  # ``NAME:SLOTS,...``; empty: this host
    shell: str | None = None  # reaches a host, as ``SHELL HOST COMMAND``; default ssh
    probe_every: float = 5.0  # seconds between two probes of the hosts
    probe_limit: float = 10.0  # seconds in which a host must answer


@functools.cache
def _local_names() -> tuple[str, ...]:
    return "localhost", "127.0.0.1", socket.gethostname(), socket.getfqdn()


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Parse ``NAME[:SLOTS],...``; slots are numbers of ranks, 1 if not given.

    Raises ValueError if the text has another form, or names a host twice.
    """
    found = []
    for part in text.split(","):
        name, colon, slots = part.strip().partition(":")
        if not name or name.startswith("-") or (colon and not (slots.isdecimal() and int(slots))):
            raise ValueError(f"hosts {text!r}: {part!r} is not NAME or NAME:SLOTS, such as node1:4,node2:4")
        found.append(Host(name, int(slots) if colon else 1))
    if len({host.name for host in found}) < len(found):
        raise ValueError(f"hosts {text!r} name one twice; give its slots as NAME:SLOTS")
    return tuple(found)


def check_shell(hosts: Sequence[Host], shell: str | None) -> None:
    """Raise ValueError if the program that reaches the hosts does not exist."""
    program = shlex.split(shell or _SHELL)[0]
    if not all(host.is_local for host in hosts) and shutil.which(program) is None:
        raise ValueError(f"there is no {program} to reach the hosts with; give another one as --remote-shell")


class Probe:
    """Runs `command` on several hosts at once, each ``SHELL HOST COMMAND``, without waiting.

    `shell`, such as ``ssh``, is not used for this machine.  A host that has not ended after `limit` seconds counts as
    not answering.
    """

    def __init__(self, hosts: Sequence[Host], shell: str | None, limit: float, command: str = "true") -> None:
        self._hosts = hosts
        self._deadline = time.monotonic() + limit
        words = shlex.split(shell or _SHELL)
        self._running = {
            host: subprocess.Popen(
                [*words, host.name, command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            for host in hosts
            if not host.is_local
        }

    def poll(self) -> tuple[Host, ...] | None:
        """The hosts that answered, in their order; None while some may still answer."""
        if time.monotonic() < self._deadline and any(each.poll() is None for each in self._running.values()):
            return None
        for each in self._running.values():
            if each.poll() is None:
                each.kill()
                each.wait()
        return tuple(host for host in self._hosts if host not in self._running or not self._running[host].returncode)

    def wait(self) -> tuple[Host, ...]:
        """`poll` until all have answered or the time limit is over."""
        while (answered := self.poll()) is None:
            time.sleep(_POLL_S)
        return answered


class HostMonitor:
    """Probes hosts every `every` seconds, except this machine.  Further parameters are those of `Probe`."""

    def __init__(self, hosts: Sequence[Host], shell: str | None, every: float, limit: float) -> None:
        self._hosts = [host for host in hosts if not host.is_local]
        self._shell = shell
        self._every = every
        self._limit = limit
        self._probe: Probe | None = None
        self._asked = time.monotonic()
        self._missed: set[Host] = set()

    def look(self) -> set[Host]:
        """The hosts that did not answer twice in succession, since once may be chance.  Does not wait."""
        pause = min(_AGAIN_S, self._every) if self._missed else self._every
        if self._hosts and self._probe is None and time.monotonic() - self._asked >= pause:
            self._probe = Probe(self._hosts, self._shell, self._limit)
        answered = None if self._probe is None else self._probe.poll()
        if answered is None:
            return set()
        self._probe, self._asked = None, time.monotonic()
        silent = set(self._hosts) - set(answered)
        lost, self._missed = silent & self._missed, silent
        return lost


def sweep(hosts: Sequence[Host], shell: str | None, limit: float, variable: str, value: str) -> tuple[Host, ...]:
    """Kill the processes with ``variable=value`` in their environment on other hosts; returns those that answered."""
    return Probe(hosts, shell, limit, _SWEEP.format(entry=shlex.quote(f"{variable}={value}"))).wait()
